//! The passphrases and keys of encrypted volumes: `volume unlock`, `lock` and `change-key`.

use std::io::{IsTerminal, Read, Write, stdin};
use std::path::Path;
use std::process::{Command, Stdio};

use blockyard_volume::encryption::SECRET_MAX;
use blockyard_volume::{Secret, SecretFile};
use blockyard_yard::volume_secret::SecretFields;
use blockyard_yard::volumes::VolumeRequest;
use zeroize::Zeroizing;

use super::pool::{Make, PoolAccess};
use super::{refused, work, work_in};
use crate::args::{SecretArgs, VolumeChangeKeyArgs, VolumeNameArgs, VolumeUnlockArgs};
use crate::failure::{Code, Failure};

/// `volume unlock`.
pub(super) fn unlock(args: &VolumeUnlockArgs, out: &mut impl Write) -> Result<(), Failure> {
    let pool = PoolAccess::find(&args.at.pool, Make::Never)?;
    if let PoolAccess::Here(_) = pool {
        let text = "no yard has this pool open, so there is no process to keep the key; give the \
                    device its key with key_file= or passphrase_file=";
        return Err(Failure::new(Code::Refused, format!("cannot unlock: {text}")));
    }
    let secret = required(&args.secret, &args.at.name)?;
    let SecretFields { passphrase, key } = SecretFields::from(&secret);
    let request = VolumeRequest { passphrase, key, ..VolumeRequest::default() };
    work_in(pool, &args.at.pool, &args.at.name, "unlock", request, out)
}

/// `volume lock`.
pub(super) fn lock(args: &VolumeNameArgs, out: &mut impl Write) -> Result<(), Failure> {
    work(&args.at, "lock", VolumeRequest::default(), out)
}

/// `volume change-key`.
pub(super) fn change_key(args: &VolumeChangeKeyArgs, out: &mut impl Write) -> Result<(), Failure> {
    let pool = PoolAccess::find(&args.at.pool, Make::Never)?;
    let old = match (&pool, read(&args.secret)?) {
        // The yard may have the key in memory.
        (PoolAccess::There(..), secret) => secret,
        (PoolAccess::Here(_), Some(secret)) => Some(secret),
        (PoolAccess::Here(_), None) => Some(prompt(&args.at.name)?),
    };
    let new = match read(&args.new_secret())? {
        Some(secret) => secret,
        None => new_passphrase(&args.at.name)?,
    };
    let old = old.as_ref().map(SecretFields::from).unwrap_or_default();
    let new = SecretFields::from(&new);
    let request = VolumeRequest {
        passphrase: old.passphrase,
        key: old.key,
        new_passphrase: new.passphrase,
        new_key: new.key,
        ..VolumeRequest::default()
    };
    work_in(pool, &args.at.pool, &args.at.name, "change-key", request, out)
}

/// The secret for a new volume; `None` if it is not to be encrypted.
pub(super) fn of_new(
    args: &SecretArgs,
    is_encrypted: bool,
    name: &str,
) -> Result<Option<Secret>, Failure> {
    match read(args)? {
        Some(secret) => Ok(Some(secret)),
        None if is_encrypted => new_passphrase(name).map(Some),
        None => Ok(None),
    }
}

/// Unlocks a volume or snapshot in a pool that this process has open, if a secret is given.
pub(super) fn unlock_here(pool: &PoolAccess, name: &str, args: &SecretArgs) -> Result<(), Failure> {
    match (pool, read(args)?) {
        (_, None) => Ok(()),
        (PoolAccess::Here(running), Some(secret)) => running.unlock(name, &secret).map_err(refused),
        (PoolAccess::There(..), Some(_)) => {
            let text = "a yard has this pool open; unlock the volume there with `blockyard volume \
                        unlock`, and give no key here";
            Err(Failure::new(Code::Usage, text))
        }
    }
}

/// The secret that the options name, or that a person enters.
fn required(args: &SecretArgs, name: &str) -> Result<Secret, Failure> {
    match read(args)? {
        Some(secret) => Ok(secret),
        None => prompt(name),
    }
}

/// The secret that the options name.
fn read(args: &SecretArgs) -> Result<Option<Secret>, Failure> {
    let file = |file: SecretFile| file.read().map(Some).map_err(refused);
    match (&args.key_file, &args.passphrase_file, &args.key_command) {
        (Some(path), _, _) => file(SecretFile::Key(path.clone())),
        (_, Some(path), _) if path == Path::new("-") => from_stdin().map(Some),
        (_, Some(path), _) => file(SecretFile::Passphrase(path.clone())),
        (_, _, Some(command)) => from_command(command).map(Some),
        _ => Ok(None),
    }
}

fn checked(secret: Secret) -> Result<Secret, Failure> {
    secret.check().map_err(refused)?;
    Ok(secret)
}

/// Reads at most one byte more than a secret may have.
fn read_all(from: impl Read) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(SECRET_MAX + 2));
    from.take(SECRET_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a passphrase from standard input: all of it, without a line end.
fn from_stdin() -> Result<Secret, Failure> {
    let failed = |error| Failure::new(Code::Failed, format!("standard input: {error}"));
    let mut bytes = read_all(stdin().lock()).map_err(failed)?;
    for end in [b'\n', b'\r'] {
        if bytes.last() == Some(&end) {
            bytes.pop();
        }
    }
    checked(Secret::Passphrase(bytes))
}

/// Runs a command by the shell, whose output is the key.
fn from_command(command: &str) -> Result<Secret, Failure> {
    let failed = |why: String| Failure::new(Code::Failed, format!("--key-command: {why}"));
    let child = Command::new("/bin/sh").args(["-c", command]).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| failed(format!("cannot run /bin/sh: {error}")))?;
    let output = child.stdout.take().expect("the output is a pipe");
    let bytes = read_all(output).map_err(|error| failed(error.to_string()))?;
    let status = child.wait().map_err(|error| failed(error.to_string()))?;
    if bytes.len() <= SECRET_MAX && !status.success() {
        return Err(failed(format!("`{command}`: {status}")));
    }
    checked(Secret::Key(bytes))
}

/// Asks for a passphrase on the terminal.
fn ask(question: &str) -> Result<Secret, Failure> {
    if !stdin().is_terminal() {
        let text = "no passphrase or key: expected --passphrase-file, --key-file, --key-command, \
                    or a terminal on standard input";
        return Err(Failure::new(Code::Usage, text));
    }
    let failed = |error| Failure::new(Code::Failed, format!("the terminal: {error}"));
    let text = rpassword::prompt_password(question).map_err(failed)?;
    checked(Secret::Passphrase(Zeroizing::new(text.into_bytes())))
}

fn prompt(name: &str) -> Result<Secret, Failure> {
    ask(&format!("Passphrase of {name}: "))
}

/// Asks for a new passphrase, twice.
fn new_passphrase(name: &str) -> Result<Secret, Failure> {
    let first = ask(&format!("New passphrase of {name}, at least 8 bytes: "))?;
    let second = ask("Repeat the passphrase: ")?;
    if first == second {
        return Ok(first);
    }
    Err(Failure::new(Code::Usage, "the two passphrases differ"))
}
