//! Identities that the kernel provides: of the running boot, and new random ones.

use std::io;

/// The file in which Linux identifies the running boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The file from which Linux returns a new UUID at every read.
const FRESH: &str = "/proc/sys/kernel/random/uuid";

/// The identity of the running boot.
///
/// # Errors
/// If the kernel's file cannot be read.
pub fn boot_id() -> io::Result<[u8; 16]> {
    read(BOOT)
}

/// A new random identity.
///
/// # Errors
/// If the kernel's file cannot be read.
pub fn fresh_id() -> io::Result<[u8; 16]> {
    read(FRESH)
}

/// The identity in a kernel file: 32 hexadecimal digits with dashes.
fn read(file: &str) -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string(file)?;
    let digits: String = text.trim().chars().filter(|digit| *digit != '-').collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(number) if digits.len() == 32 => Ok(number.to_be_bytes()),
        _ => Err(io::Error::other(format!("invalid `{file}`: expected a UUID"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_has_one_identity_and_each_fresh_one_is_new() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
        assert_ne!(fresh_id().unwrap(), fresh_id().unwrap());
    }
}
