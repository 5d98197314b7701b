//! The names of volumes and snapshots, and the error of an invalid parameter.

use blockyard_volume_format::catalogue::{NAME_MAX, VOLUME_NAME_MAX, is_name, is_volume_name};

use crate::error::VolumeError;
use crate::pool::{HIDDEN_PREFIX, RECEIVE_STATE_PREFIX};

/// The name of the hidden volume with the data of a volume that is being received.
pub fn received_name(volume: &str) -> String {
    format!("{HIDDEN_PREFIX}{volume}")
}

/// The name of the hidden volume with the position of the receive of a volume.
pub fn receive_state_name(volume: &str) -> String {
    format!("{RECEIVE_STATE_PREFIX}{volume}")
}

/// The error of an invalid parameter.
///
/// # Errors
/// Always.
pub fn invalid<T>(field: &'static str, value: &str, wanted: &str) -> Result<T, VolumeError> {
    let (value, wanted) = (value.to_owned(), wanted.to_owned());
    Err(VolumeError::Invalid { field, value, wanted })
}

/// Refuses what cannot be the name of an existing volume. Volumes that an earlier version made may
/// have names that are not valid as device names.
///
/// # Errors
/// If the name is invalid.
pub fn volume_name(name: &str) -> Result<(), VolumeError> {
    match (is_name(name), name.contains('@')) {
        (true, false) => Ok(()),
        (true, true) => invalid("name", name, "a volume; this name is of a snapshot"),
        _ => invalid("name", name, &volume_name_wanted()),
    }
}

/// Refuses what cannot be the name of a new volume, which must also be valid as a device name.
///
/// # Errors
/// If the name is invalid.
pub fn new_volume_name(name: &str) -> Result<(), VolumeError> {
    match is_volume_name(name) {
        true => Ok(()),
        false => invalid("name", name, &volume_name_wanted()),
    }
}

/// The rule for the name of a volume, for error messages.
pub fn volume_name_wanted() -> String {
    format!(
        "1 to {VOLUME_NAME_MAX} letters, digits, `-`, `_` and `.`, the first a letter or a digit"
    )
}

/// Splits a snapshot's name into volume and snapshot.
///
/// # Errors
/// If the name is invalid.
pub fn snapshot_name(name: &str) -> Result<(&str, &str), VolumeError> {
    let wanted = format!(
        "VOLUME@SNAPSHOT of at most {NAME_MAX} characters, SNAPSHOT of letters, digits, `-`, `_`, \
         `.`, `:` and `+`, the first neither `-` nor `.`"
    );
    match name.split_once('@').filter(|_| is_name(name)) {
        Some(parts) => Ok(parts),
        None => invalid("name", name, &wanted),
    }
}
