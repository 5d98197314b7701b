//! Where the objects of a pool are, and by which credentials: the URI names the bucket and the
//! prefix, the environment or a file the rest.
//!
//! A secret is never part of a URI, a message or the debug output of a type here.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::ObjectError;

/// A bucket and the prefix of a pool's objects in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectUri {
    bucket: String,
    prefix: String,
}

/// What a URI begins with.
const SCHEME: &str = "s3://";

impl ObjectUri {
    /// Whether a path is meant as one of these URIs.
    pub fn is_one(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// Parses `s3://BUCKET/PREFIX`.
    ///
    /// # Errors
    /// If it is anything else. The message shows the value only if neither `@` nor `?` is in it:
    /// parameters of a URL of S3 may contain a signature.
    pub fn parse(text: &str) -> Result<ObjectUri, ObjectError> {
        let wrong = |wanted: &str| ObjectError::Invalid {
            field: "object store",
            value: (!text.contains(['@', '?'])).then(|| text.to_owned()),
            wanted: wanted.to_owned(),
        };
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| wrong("s3://BUCKET/PREFIX"))?;
        if rest.contains('@') {
            return Err(wrong(
                "s3://BUCKET/PREFIX; credentials come from the environment or a file",
            ));
        }
        let (bucket, prefix) = rest.split_once('/').ok_or_else(|| wrong("s3://BUCKET/PREFIX"))?;
        let is_bucket = (3..=63).contains(&bucket.len())
            && bucket.bytes().all(|it| matches!(it, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
            && bucket.starts_with(|it: char| it.is_ascii_alphanumeric())
            && bucket.ends_with(|it: char| it.is_ascii_alphanumeric());
        if !is_bucket {
            return Err(wrong("a bucket of 3 to 63 small letters, digits, `-` and `.`"));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let is_part = |part: &str| {
            !matches!(part, "" | "." | "..")
                && part.bytes().all(|it| it.is_ascii_alphanumeric() || b"-_.=".contains(&it))
        };
        if prefix.len() > PREFIX_MAX || !prefix.split('/').all(is_part) {
            return Err(wrong("a prefix of letters, digits and `-_.=/`, 512 bytes at most"));
        }
        Ok(ObjectUri { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// The bucket.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The prefix, without a slash at its ends.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

/// Longest prefix in bytes: S3 allows 1,024 for a whole key.
const PREFIX_MAX: usize = 512;

impl fmt::Display for ObjectUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.bucket, self.prefix)
    }
}

/// The endpoint, the region and the credentials of a store.
#[derive(Clone)]
pub struct Access {
    /// The URL of a store that is not AWS.
    pub endpoint: Option<String>,
    /// The region in signatures.
    pub region: String,
    pub(crate) key_id: String,
    pub(crate) secret_key: String,
    pub(crate) session_token: Option<String>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

impl Access {
    /// Access to a store that is not AWS, by these credentials.
    ///
    /// # Errors
    /// If the endpoint is not a plain URL.
    pub fn to_endpoint(endpoint: &str, key_id: &str, secret: &str) -> Result<Access, ObjectError> {
        check_endpoint(endpoint)?;
        Ok(Access {
            endpoint: Some(endpoint.to_owned()),
            region: DEFAULT_REGION.to_owned(),
            key_id: key_id.to_owned(),
            secret_key: secret.to_owned(),
            session_token: None,
        })
    }

    /// Reads the variables of AWS' own tools: `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`,
    /// `AWS_REGION` or `AWS_DEFAULT_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and
    /// `AWS_SESSION_TOKEN`. Without the first key, the credentials are those of the profile
    /// `AWS_PROFILE` in the file `AWS_SHARED_CREDENTIALS_FILE`, by default `~/.aws/credentials`.
    ///
    /// # Errors
    /// If a part is missing or invalid, or other users may read the file.
    pub fn from_env() -> Result<Access, ObjectError> {
        Access::from_variables(|name| env::var_os(name))
    }

    fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Access, ObjectError> {
        let text = |name: &'static str| match get(name).filter(|value| !value.is_empty()) {
            None => Ok(None),
            Some(value) => value.into_string().map(Some).map_err(|_| ObjectError::Invalid {
                field: name,
                value: None,
                wanted: "text in UTF-8".to_owned(),
            }),
        };
        let endpoint = match text("AWS_ENDPOINT_URL_S3")? {
            None => text("AWS_ENDPOINT_URL")?,
            some => some,
        };
        endpoint.as_deref().map(check_endpoint).transpose()?;
        let region = match text("AWS_REGION")? {
            None => text("AWS_DEFAULT_REGION")?,
            some => some,
        };
        // Stores that are not AWS accept this region unless they are configured for another one.
        let default = || endpoint.is_some().then(|| DEFAULT_REGION.to_owned());
        let region = region.or_else(default).ok_or(ObjectError::Invalid {
            field: "AWS_REGION",
            value: Some(String::new()),
            wanted: "the bucket's region, such as eu-central-1".to_owned(),
        })?;
        let keys = match (text("AWS_ACCESS_KEY_ID")?, text("AWS_SECRET_ACCESS_KEY")?) {
            (Some(key_id), Some(secret_key)) => {
                Keys { key_id, secret_key, session_token: text("AWS_SESSION_TOKEN")? }
            }
            (None, None) => {
                let profile = text("AWS_PROFILE")?.unwrap_or_else(|| "default".to_owned());
                let file = match (get("AWS_SHARED_CREDENTIALS_FILE"), get("HOME")) {
                    (Some(file), _) => PathBuf::from(file),
                    (None, Some(home)) => PathBuf::from(home).join(".aws/credentials"),
                    (None, None) => return Err(ObjectError::Credentials(NEITHER.to_owned())),
                };
                keys_in_file(&file, &profile)?
            }
            _ => {
                let half = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set together or not";
                return Err(ObjectError::Credentials(half.to_owned()));
            }
        };
        let Keys { key_id, secret_key, session_token } = keys;
        Ok(Access { endpoint, region, key_id, secret_key, session_token })
    }
}

const DEFAULT_REGION: &str = "us-east-1";

const NEITHER: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file by \
                       AWS_SHARED_CREDENTIALS_FILE";

/// An endpoint is a URL without a user: its text is shown.
fn check_endpoint(text: &str) -> Result<(), ObjectError> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    match rest {
        Some(host) if !host.is_empty() && !host.contains(['@', '?', '#', ' ']) => Ok(()),
        _ => Err(ObjectError::Invalid {
            field: "AWS_ENDPOINT_URL",
            value: (!text.contains(['@', '?'])).then(|| text.to_owned()),
            wanted: "http://HOST:PORT or https://HOST, without credentials".to_owned(),
        }),
    }
}

struct Keys {
    key_id: String,
    secret_key: String,
    session_token: Option<String>,
}

/// The keys of a profile in a file of the form that AWS' tools use.
fn keys_in_file(path: &Path, profile: &str) -> Result<Keys, ObjectError> {
    let name = path.display();
    let failed = |why: String| ObjectError::Credentials(format!("`{name}`: {why}"));
    let metadata = path.metadata().map_err(|error| failed(format!("{error}; or {NEITHER}")))?;
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(failed(format!("other users may read it (mode {mode:03o}); chmod 600 it")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let (mut found, mut is_inside) = ([None, None, None], false);
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
            is_inside = section.trim() == profile;
        } else if let Some((key, value)) = line.split_once('=').filter(|_| is_inside) {
            let names = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"];
            if let Some(at) = names.iter().position(|name| *name == key.trim()) {
                found[at] = Some(value.trim().to_owned());
            }
        }
    }
    match found {
        [Some(key_id), Some(secret_key), session_token] => {
            Ok(Keys { key_id, secret_key, session_token })
        }
        _ => Err(failed(format!("no aws_access_key_id and aws_secret_access_key in [{profile}]"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_testing::temp_dir::TempDir;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn uris_have_a_bucket_and_a_prefix() {
        let uri = ObjectUri::parse("s3://vol-1.x/a/b=c/").unwrap();
        assert_eq!((uri.bucket(), uri.prefix()), ("vol-1.x", "a/b=c"));
        assert_eq!(uri.to_string(), "s3://vol-1.x/a/b=c");
        for wrong in [
            "/srv/pool",
            "s3://vol",
            "s3://vol/",
            "s3://Vol/a",
            "s3://vo/a",
            "s3://-vol/a",
            "s3://vol/a//b",
            "s3://vol/../b",
            "s3://vol/a b",
            "s3://vol/a%20",
        ] {
            let error = ObjectUri::parse(wrong).unwrap_err().to_string();
            assert!(error.starts_with(&format!("invalid object store `{wrong}`: ")), "{error}");
        }
    }

    #[test]
    fn a_uri_with_credentials_is_refused_and_not_shown() {
        for wrong in [
            "s3://KEY:SECRETS@vol/a",
            "https://KEY:SECRETS@host/vol",
            "s3://vol/a?X-Amz-Signature=SECRETS",
        ] {
            let error = ObjectUri::parse(wrong).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("SECRETS"), "{error}");
        }
    }

    fn variables(pairs: &[(&str, &str)]) -> Result<Access, ObjectError> {
        Access::from_variables(|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn variables_give_endpoint_region_and_keys() {
        let access = variables(&[
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
            ("AWS_ACCESS_KEY_ID", "KEYID"),
            ("AWS_SECRET_ACCESS_KEY", "SECRETS"),
            ("AWS_SESSION_TOKEN", "TOKENS"),
        ])
        .unwrap();
        assert_eq!(access.endpoint.as_deref(), Some("http://127.0.0.1:9000"));
        assert_eq!(access.region, "us-east-1");
        assert_eq!((&access.key_id[..], &access.secret_key[..]), ("KEYID", "SECRETS"));
        let shown = format!("{access:?}");
        assert!(!["KEYID", "SECRETS", "TOKENS"].iter().any(|it| shown.contains(it)), "{shown}");

        let keys = [("AWS_ACCESS_KEY_ID", "KEYID"), ("AWS_SECRET_ACCESS_KEY", "SECRETS")];
        let error = variables(&keys).unwrap_err().to_string();
        assert!(error.starts_with("invalid AWS_REGION"), "{error}");
        let error = variables(&[("AWS_REGION", "eu-west-1"), keys[1]]).unwrap_err().to_string();
        assert!(error.contains("together"), "{error}");
        let with_user = ("AWS_ENDPOINT_URL", "http://KEY:SECRETS@host");
        let error = variables(&[with_user, keys[0], keys[1]]).unwrap_err().to_string();
        assert!(error.contains("AWS_ENDPOINT_URL") && !error.contains("SECRETS"), "{error}");
    }

    #[test]
    fn a_file_gives_the_keys_of_a_profile_if_only_its_owner_reads_it() {
        let directory = TempDir::new(&std::env::temp_dir(), "credentials");
        let file = directory.path().join("credentials");
        let text = "# keys\n[default]\naws_access_key_id = A\naws_secret_access_key=B\n[other]\n\
                    aws_access_key_id=C\naws_secret_access_key = D=\naws_session_token=E\n";
        std::fs::write(&file, text).unwrap();
        let read = |profile: &str| {
            variables(&[
                ("AWS_REGION", "eu-west-1"),
                ("AWS_SHARED_CREDENTIALS_FILE", file.to_str().unwrap()),
                ("AWS_PROFILE", profile),
            ])
        };
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
        let error = read("").unwrap_err().to_string();
        assert!(error.contains("other users may read it (mode 640)"), "{error}");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        let access = read("").unwrap();
        assert_eq!((&access.key_id[..], &access.secret_key[..]), ("A", "B"));
        let access = read("other").unwrap();
        assert_eq!((&access.key_id[..], &access.secret_key[..]), ("C", "D="));
        assert_eq!(access.session_token.as_deref(), Some("E"));
        let error = read("third").unwrap_err().to_string();
        assert!(error.contains("in [third]") && !error.contains("D="), "{error}");
    }
}
