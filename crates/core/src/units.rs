//! Units in interfaces: sectors, zone numbers, tags, nanoseconds, and bytes for people.
//!
//! Inside a function a plain integer with its unit in the name is enough (`len_bytes`, `wait_ns`).
//! A signature that another crate sees uses one of these types.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// Bytes in a sector. As in Linux, a sector is 512 bytes whatever the block size of the device.
pub const SECTOR_BYTES: u64 = 512;
/// `SECTOR_BYTES` as a shift.
pub const SECTOR_SHIFT: u32 = 9;

const _: () = assert!(1 << SECTOR_SHIFT == SECTOR_BYTES, "the shift is the size");

/// A position on a device, in 512-byte sectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sector(pub u64);

impl Sector {
    /// No sector, for example in the report of a zone without a write pointer.
    pub const NONE: Sector = Sector(u64::MAX);

    /// The position in bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        self.0 << SECTOR_SHIFT
    }

    /// The sector that contains a byte position.
    #[inline]
    pub const fn containing(byte: u64) -> Sector {
        Sector(byte >> SECTOR_SHIFT)
    }
}

impl Add<u64> for Sector {
    type Output = Sector;
    #[inline]
    fn add(self, sectors: u64) -> Sector {
        Sector(self.0 + sectors)
    }
}

impl AddAssign<u64> for Sector {
    #[inline]
    fn add_assign(&mut self, sectors: u64) {
        self.0 += sectors;
    }
}

impl Sub<Sector> for Sector {
    type Output = u64;
    #[inline]
    fn sub(self, other: Sector) -> u64 {
        self.0 - other.0
    }
}

impl fmt::Display for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a zone, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ZoneNo(pub u32);

impl ZoneNo {
    /// The zone number as an index into a table.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ZoneNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a started request of a channel, below the queue depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub u16);

/// A point in time, in nanoseconds since the start of its [`crate::clock::Clock`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Nanoseconds from `earlier` to `self`, 0 if `earlier` is later.
    #[inline]
    pub const fn since(self, earlier: Nanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Nanos {
    type Output = Nanos;
    #[inline]
    fn add(self, ns: u64) -> Nanos {
        Nanos(self.0.saturating_add(ns))
    }
}

/// A number of bytes that prints as the shortest size that the configuration reads as exactly this
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LETTERS: [char; 6] = ['k', 'M', 'G', 'T', 'P', 'E'];
        let shift = if self.0 == 0 { 0 } else { (self.0.trailing_zeros() / 10).min(6) };
        match shift {
            0 => write!(f, "{}", self.0),
            _ => write!(f, "{}{}", self.0 >> (10 * shift), LETTERS[shift as usize - 1]),
        }
    }
}
