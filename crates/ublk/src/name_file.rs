//! The names of devices that this machine's ublk devices are made of, for listings: the kernel
//! keeps a number of ours with a device, and no name.
//!
//! A file `/run/blockyard/ublk/N` has the name, and stays when the server is killed.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use blockyard_os::{AtomicFile, Replace};

const DIRECTORY: &str = "/run/blockyard/ublk";

/// The longest name in bytes, and a line with the identity.
const LEN_MAX: u64 = 128;

fn path(id: u32) -> PathBuf {
    PathBuf::from(DIRECTORY).join(id.to_string())
}

/// The mark of our devices, in the high 16 bits of their identity.
const MARK: u64 = 0x4259; // `BY`.

/// The number by which the kernel keeps apart what block devices are made of: a mark, and 48 bits
/// of a hash (FNV-1a of 64 bits, folded) of a text that describes the device.
pub(crate) fn identity_of(text: &str) -> u64 {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    MARK << 48 | (hash ^ hash >> 48) & ((1 << 48) - 1)
}

/// Whether a device with this identity was made by a yard.
pub(crate) fn is_ours(identity: u64) -> bool {
    identity >> 48 == MARK
}

/// Writes the name of a device. A failure is logged: only listings lack the name then.
pub(crate) fn write(id: u32, identity: u64, name: &str) {
    let write = || -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(DIRECTORY)?;
        let file = AtomicFile::create(&path(id), Replace::Any, &[])?;
        file.file().write_all(format!("{identity:016x} {name}\n").as_bytes())?;
        file.commit()
    };
    if let Err(error) = write() {
        tracing::warn!(id, %error, "`blockyard ublk list` will not know the device's name");
    }
}

/// The name of a device, if it is one of ours with this identity.
pub(crate) fn read(id: u32, identity: u64) -> Option<String> {
    let mut text = String::new();
    fs::File::open(path(id)).ok()?.take(LEN_MAX).read_to_string(&mut text).ok()?;
    parse(&text, identity)
}

fn parse(text: &str, identity: u64) -> Option<String> {
    let (number, name) = text.trim_end().split_once(' ')?;
    let is_plain = |byte: u8| byte.is_ascii_graphic();
    let is_of = number == format!("{identity:016x}");
    (is_of && !name.is_empty() && name.bytes().all(is_plain)).then(|| name.to_owned())
}

/// Removes the name of a device that is deleted.
pub(crate) fn remove(id: u32) {
    // It may be gone, or never have been written.
    let _ = fs::remove_file(path(id));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_its_identity() {
        let identity = identity_of("volume:///v0?path=/srv");
        assert_ne!(identity, identity_of("volume:///v0?path=/srw"));
        assert!(is_ours(identity) && !is_ours(0) && !is_ours(u64::MAX));
        let text = format!("{identity:016x} v0\n");
        assert_eq!(parse(&text, identity), Some("v0".to_owned()));
        assert_eq!(parse(&text, identity + 1), None);
        for bad in ["", "v0", "\n", &format!("{identity:016x} v\u{1b}0"), &text[..17]] {
            assert_eq!(parse(bad, identity), None, "{bad:?}");
        }
    }
}
