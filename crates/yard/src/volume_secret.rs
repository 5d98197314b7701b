//! Passphrases and keys of encrypted volumes in requests of the control API.

use std::fmt;

use blockyard_volume::{Running, Secret};
use data_encoding::BASE64;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

use crate::error::YardError;
use crate::param::shown;
use crate::volumes::{VolumeRequest, argument};

/// A passphrase, or a key as base64. Dropping it overwrites its memory.
#[derive(Clone, Deserialize, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SecretText(String);

impl Drop for SecretText {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(..)")
    }
}

/// The fields of a request that have a secret: a passphrase, or a key.
#[derive(Clone, Debug, Default)]
pub struct SecretFields {
    /// The passphrase.
    pub passphrase: Option<SecretText>,
    /// The key.
    pub key: Option<SecretText>,
}

impl From<&Secret> for SecretFields {
    fn from(secret: &Secret) -> SecretFields {
        match secret {
            Secret::Passphrase(bytes) => {
                // `Secret::check` has refused a passphrase that is not UTF-8.
                let text = String::from_utf8_lossy(bytes).into_owned();
                SecretFields { passphrase: Some(SecretText(text)), key: None }
            }
            Secret::Key(bytes) => {
                SecretFields { passphrase: None, key: Some(SecretText(BASE64.encode(bytes))) }
            }
        }
    }
}

/// The secret of two fields of a request; `None` if neither is there.
pub(crate) fn secret(
    passphrase: (&'static str, Option<&SecretText>),
    key: (&'static str, Option<&SecretText>),
) -> Result<Option<Secret>, YardError> {
    let secret = match (passphrase.1, key.1) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            let wanted = format!("either {} or {}", passphrase.0, key.0);
            return Err(YardError::Argument { field: key.0, value: "...".to_owned(), wanted });
        }
        (Some(text), None) => Secret::Passphrase(Zeroizing::new(text.0.clone().into_bytes())),
        (None, Some(text)) => {
            let bytes = BASE64.decode(text.0.as_bytes());
            let wanted = "base64".to_owned();
            let refused = YardError::Argument { field: key.0, value: "...".to_owned(), wanted };
            let bytes = bytes.map_err(|_| refused)?;
            Secret::Key(Zeroizing::new(bytes))
        }
    };
    secret.check()?;
    Ok(Some(secret))
}

/// Executes a verb that changes the key of a volume, or whether it is in memory.
pub(crate) fn change_key(
    running: &Running,
    verb: &str,
    request: &VolumeRequest,
) -> Result<String, YardError> {
    let name = request.name.as_str();
    match verb {
        "unlock" => {
            let wanted = "the passphrase of the volume, or key".to_owned();
            let secret = request.present_secret()?;
            let secret = secret.ok_or(YardError::Missing { field: "passphrase", wanted })?;
            running.unlock(name, &secret)?;
            Ok(format!("unlocked {name}"))
        }
        "lock" => {
            running.lock(name)?;
            Ok(format!("locked {name}"))
        }
        "change-key" => {
            let (old, new) = (request.present_secret()?, request.new_secret()?);
            let wanted = "the new passphrase, or new_key".to_owned();
            let new = new.ok_or(YardError::Missing { field: "new_passphrase", wanted })?;
            running.change_key(name, old.as_ref(), &new)?;
            Ok(format!("changed the key of {name}"))
        }
        // The other verbs return a stream.
        _ => Err(argument("verb", shown(verb), "one that changes a volume")),
    }
}
