//! The secrets of hosts: a file with a line for each.
//!
//! ```text
//! # the host's NQN         its secret     the secret of the controller, if the host asks for it
//! nqn.2014-08.org...:uuid:4dd5a6b1-...  DHHC-1:01:...:  DHHC-1:01:...:
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use blockyard_os::private_file::{PrivateFileError, read_private};
use data_encoding::BASE64;
use ring::hmac;
use zeroize::Zeroizing;

use crate::access::check_nqn;
use crate::auth_message::AuthHash;
use crate::fabrics::NQN_LEN_MAX;

/// The longest file of secrets, in bytes.
const FILE_LEN_MAX: u64 = 1 << 20;

/// The bytes of the CRC-32 after a key.
const CRC_BYTES: usize = 4;

/// A secret of DH-HMAC-CHAP, as `nvme gen-dhchap-key` prints it. Dropping it clears its memory.
pub struct Secret {
    key: Zeroizing<Vec<u8>>,
    /// The hash function by which the key is combined with an NQN; `None`: it is used as it is.
    transformation: Option<AuthHash>,
}

impl Secret {
    /// Parses `DHHC-1:HH:BASE64:`, where HH is the transformation and BASE64 a key of 32, 48 or 64
    /// bytes and its CRC-32.
    ///
    /// # Errors
    /// What is wrong, without any part of the secret.
    pub fn parse(text: &str) -> Result<Secret, &'static str> {
        const FORM: &str = "expected DHHC-1:HH:BASE64: as `nvme gen-dhchap-key` prints it";
        let rest = text.strip_prefix("DHHC-1:").and_then(|rest| rest.strip_suffix(':'));
        let (hash, key) = rest.and_then(|rest| rest.split_once(':')).ok_or(FORM)?;
        let transformation = match hash {
            "00" => None,
            "01" => Some(AuthHash::Sha256),
            "02" => Some(AuthHash::Sha384),
            "03" => Some(AuthHash::Sha512),
            _ => return Err("expected 00, 01, 02 or 03 after `DHHC-1:`"),
        };
        let decoded = BASE64.decode(key.as_bytes()).map(Zeroizing::new);
        let mut key = decoded.map_err(|_| "expected base64 after `DHHC-1:HH:`")?;
        let len = key.len().checked_sub(CRC_BYTES).filter(|len| [32, 48, 64].contains(len));
        let len = len.ok_or("expected a key of 32, 48 or 64 bytes, and 4 bytes of its CRC-32")?;
        let crc = crc_fast::crc32_iso_hdlc(&key[..len]);
        if key[len..] != crc.to_le_bytes() {
            return Err("its CRC-32 is wrong: a character is missing or not the right one");
        }
        key.truncate(len);
        Ok(Secret { key, transformation })
    }

    /// The key of the host or subsystem of this NQN.
    pub(crate) fn key(&self, nqn: &str) -> Zeroizing<Vec<u8>> {
        let Some(hash) = self.transformation else { return self.key.clone() };
        let mut context = hmac::Context::with_key(&hmac::Key::new(algorithm(hash), &self.key));
        context.update(nqn.as_bytes());
        context.update(b"NVMe-over-Fabrics");
        Zeroizing::new(context.sign().as_ref().to_vec())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// HMAC by a hash function.
pub(crate) fn algorithm(hash: AuthHash) -> hmac::Algorithm {
    match hash {
        AuthHash::Sha256 => hmac::HMAC_SHA256,
        AuthHash::Sha384 => hmac::HMAC_SHA384,
        AuthHash::Sha512 => hmac::HMAC_SHA512,
    }
}

/// The secrets for one host.
#[derive(Debug)]
pub struct HostSecret {
    /// By it the host authenticates.
    pub(crate) host: Secret,
    /// By it the controller authenticates to the host.
    pub(crate) controller: Option<Secret>,
}

/// The secrets of hosts, by their NQNs.
#[derive(Debug, Default)]
pub struct HostSecrets(BTreeMap<String, HostSecret>);

/// The reason for which a file of secrets is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretsError {
    /// It cannot be read, or other users can read or change it.
    #[error(transparent)]
    File(#[from] PrivateFileError),
    /// A line is invalid.
    #[error("{path}, line {line}: {what}")]
    Line {
        /// The path.
        path: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong, without any part of a secret.
        what: String,
    },
}

impl HostSecrets {
    /// Reads a file of secrets.
    ///
    /// # Errors
    /// If it cannot be read, belongs to another user, other users can access it, or a line is
    /// invalid.
    pub fn read(path: &Path) -> Result<HostSecrets, SecretsError> {
        let text = read_private(path, FILE_LEN_MAX)?;
        let invalid =
            |(line, what)| SecretsError::Line { path: path.display().to_string(), line, what };
        HostSecrets::parse(&text).map_err(invalid)
    }

    /// Parses the text of a file of secrets.
    ///
    /// # Errors
    /// The number of the first invalid line, and what is wrong with it.
    pub fn parse(text: &str) -> Result<HostSecrets, (usize, String)> {
        let mut secrets = HostSecrets::default();
        for (index, line) in text.lines().enumerate() {
            if !line.trim_start().starts_with('#') && !line.trim().is_empty() {
                secrets.add(line).map_err(|what| (index + 1, what))?;
            }
        }
        Ok(secrets)
    }

    /// Adds a line. Errors repeat no word of it: where a space is missing, the NQN ends with a
    /// secret.
    fn add(&mut self, line: &str) -> Result<(), String> {
        let mut words = line.split_whitespace();
        let nqn = words.next().unwrap_or_default();
        if check_nqn(nqn).is_err() {
            return Err(format!(
                "expected the NQN of a host, of at most {NQN_LEN_MAX} bytes, and then its secret"
            ));
        }
        let secret = |name: &str, text| {
            Secret::parse(text).map_err(|what| format!("invalid {name}: {what}"))
        };
        let host = words.next().ok_or("expected a secret after the NQN and a space")?;
        let host = secret("secret", host)?;
        let controller = words.next().map(|text| secret("secret of the controller", text));
        let controller = controller.transpose()?;
        if words.next().is_some() {
            return Err("expected two secrets at most".to_owned());
        }
        if self.0.contains_key(nqn) {
            return Err("the host has a line before this one".to_owned());
        }
        self.0.insert(nqn.to_owned(), HostSecret { host, controller });
        Ok(())
    }

    /// The secrets for the host of this NQN.
    pub fn find(&self, nqn: &str) -> Option<&HostSecret> {
        self.0.get(nqn)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use blockyard_testing::capability::Capability;
    use blockyard_testing::temp_dir::TempDir;
    use rustix::fs::{CWD, FileType};

    use super::*;

    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:4dd5a6b1-51c4-4a24-9a6d-1e1c9f7e0a01";
    /// The key of the example in the NVM Express Base Specification, with its CRC-32.
    const KEY: &str = "ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n";

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The keys were computed by the modules hmac and hashlib of Python.
    #[test]
    fn the_secret_of_the_specification_gives_the_keys_of_other_programs() {
        let key =
            |hash: &str| hex(&Secret::parse(&format!("DHHC-1:{hash}:{KEY}:")).unwrap().key(HOST));
        assert_eq!(key("00"), "89aeb31a874eaf84841b46736b0dfdf2ba58d30aa2a545a3e235a3521e07594c");
        assert_eq!(key("01"), "670973a2454229e667075036ae12719b9978bd82bddf73683b3b6712a2094b60");
        let sha384 = "38651c71de5426efa85809887a788a034a8ea0e28318f310a0a08457d3e8af8604063c0c579\
                      b33b0dea017fe76952110";
        assert_eq!(key("02"), sha384);
        let sha512 = "79f71e2e0ddb372a0c1b04da3f0ffea7df68effdc0ddb47091ab47a02fa5ca4808be17699\
                      3bc07cd9d1f4c0f24372388c09039125a8cc63298dd250f7ffcd338";
        assert_eq!(key("03"), sha512);
    }

    #[test]
    fn secrets_of_nvme_cli_are_read() {
        for text in [
            "DHHC-1:00:1URXUy8UWEpumX5ig4XZX5NPCLAuShxVizwKcAhJg9F7VCMC:",
            "DHHC-1:02:8batms+lyjcD2h1YhxBPlGde1OdmkCr0m18v6uNz2GfdMFKX1v5R+OuzAxFhCeucInGo\
             Hw==:",
            "DHHC-1:03:wnuSsHD+LK4q7uoAiIFMo47ezwq9Xz/AOOzsBPgpxsPBk/DZ6xbwh25Jl96niylfSVFB9v7yKLw\
             stss93sB55HfVOAM=:",
        ] {
            assert!(Secret::parse(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_damaged_secret_is_refused_and_never_shown() {
        let crc = "its CRC-32 is wrong: a character is missing or not the right one";
        let form = "expected DHHC-1:HH:BASE64: as `nvme gen-dhchap-key` prints it";
        let len = "expected a key of 32, 48 or 64 bytes, and 4 bytes of its CRC-32";
        for (text, wanted) in [
            (format!("DHHC-1:00:j{}:", &KEY[1..]), crc),
            (format!("DHHC-1:00:{}b:", &KEY[..KEY.len() - 1]), crc),
            (format!("DHHC-1:00:{}:", &KEY[4..]), len),
            (format!("DHHC-1:00:AAAA{KEY}:"), len),
            ("DHHC-1:00::".to_owned(), len),
            (format!("DHHC-1:00:{KEY}"), form),
            (format!("DHHC-2:00:{KEY}:"), form),
            (KEY.to_owned(), form),
            (String::new(), form),
            (format!("DHHC-1:04:{KEY}:"), "expected 00, 01, 02 or 03 after `DHHC-1:`"),
            (format!("DHHC-1:00:{KEY}::"), "expected base64 after `DHHC-1:HH:`"),
            (format!("DHHC-1:00:{}:", KEY.replace('6', "*")), "expected base64 after `DHHC-1:HH:`"),
        ] {
            assert_eq!(Secret::parse(&text).unwrap_err(), wanted, "{text}");
        }
        let secret = Secret::parse(&format!("DHHC-1:00:{KEY}:")).unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn lines_name_hosts_and_errors_no_secrets() {
        let secret = format!("DHHC-1:01:{KEY}:");
        let text = format!("# hosts\n\n{HOST} {secret}\n  nqn.b\t{secret}  {secret}\n");
        let secrets = HostSecrets::parse(&text).unwrap();
        assert!(secrets.find(HOST).unwrap().controller.is_none());
        assert!(secrets.find("nqn.b").unwrap().controller.is_some());
        assert!(secrets.find("nqn.c").is_none());
        let wrong = format!("DHHC-1:01:x{}:", &KEY[1..]);
        for (line, wanted) in [
            (secret.clone(), "expected the NQN of a host"),
            ("nqn.c".to_owned(), "expected a secret after the NQN and a space"),
            // Fuzzing found this: the error named the host, with its secret.
            (format!("nqn.c:{secret}"), "expected a secret after the NQN and a space"),
            (format!("nqn.c {wrong}"), "invalid secret: its CRC-32 is wrong"),
            (format!("nqn.c {secret} {wrong}"), "invalid secret of the controller: its CRC-32 is"),
            (format!("nqn.c {secret} {secret} #"), "expected two secrets at most"),
            (format!("{HOST} {secret}"), "the host has a line before this one"),
        ] {
            let (number, what) = HostSecrets::parse(&format!("{text}{line}\n")).unwrap_err();
            assert_eq!(number, 5, "{line}");
            assert!(what.starts_with(wanted) && !what.contains(&KEY[1..9]), "{what}");
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let dir = TempDir::new(&std::env::temp_dir(), "blockyard-secrets");
        let path = dir.path().join("secrets");
        let read = || HostSecrets::read(&path).map(|_| ()).map_err(|error| error.to_string());
        let shown = path.display();
        let missing = format!("cannot read {shown}: No such file or directory (os error 2)");
        assert_eq!(read(), Err(missing));
        std::fs::write(&path, format!("{HOST} DHHC-1:00:{KEY}:\nx\n")).unwrap();
        for mode in [0o644, 0o640, 0o620, 0o601] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let wanted = format!(
                "invalid mode {mode:04o} of {shown}: expected 0600 or 0400, so that no other user \
                 can read it"
            );
            assert_eq!(read(), Err(wanted));
        }
        for mode in [0o600, 0o400] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            assert!(read().unwrap_err().starts_with(&format!("{shown}, line 2: expected the NQN")));
        }
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
        for other in [dir.path(), &fifo] {
            let error = HostSecrets::read(other).unwrap_err().to_string();
            assert!(error.ends_with("it is no regular file"), "{error}");
        }
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        let dir = TempDir::new(&std::env::temp_dir(), "blockyard-secrets-owner");
        let path = dir.path().join("secrets");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        if let Err(error) = std::os::unix::fs::chown(&path, Some(12345), None) {
            return Capability::Root.is_missing(error);
        }
        let error = HostSecrets::read(&path).unwrap_err().to_string();
        assert!(error.starts_with("invalid owner 12345 of "), "{error}");
    }
}
