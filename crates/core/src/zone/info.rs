//! One zone of a zone report.

use std::fmt;

use crate::units::Sector;

/// Condition of a zone: ZBC-2 4.5.3 and NVMe ZNS 2.3, with the numbers of Linux's
/// `enum blk_zone_cond`, which are those of the ZBC zone descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ZoneCond {
    /// Conventional: no write pointer.
    NotWp = 0x0,
    /// No sector is written.
    Empty = 0x1,
    /// Opened by a write.
    ImplicitOpen = 0x2,
    /// Opened by an open.
    ExplicitOpen = 0x3,
    /// Partly written, and not open.
    Closed = 0x4,
    /// Readable, but not writable.
    ReadOnly = 0xd,
    /// Written to its capacity, or finished.
    Full = 0xe,
    /// Neither readable nor writable.
    Offline = 0xf,
}

impl ZoneCond {
    /// Every condition.
    pub const ALL: [ZoneCond; 8] = [
        ZoneCond::NotWp,
        ZoneCond::Empty,
        ZoneCond::ImplicitOpen,
        ZoneCond::ExplicitOpen,
        ZoneCond::Closed,
        ZoneCond::Full,
        ZoneCond::ReadOnly,
        ZoneCond::Offline,
    ];

    /// The name in documents and in JSON, e.g. `implicit-open`.
    pub const fn name(self) -> &'static str {
        match self {
            ZoneCond::NotWp => "not-wp",
            ZoneCond::Empty => "empty",
            ZoneCond::ImplicitOpen => "implicit-open",
            ZoneCond::ExplicitOpen => "explicit-open",
            ZoneCond::Closed => "closed",
            ZoneCond::Full => "full",
            ZoneCond::ReadOnly => "read-only",
            ZoneCond::Offline => "offline",
        }
    }

    /// The two letters of `blkzone report`, e.g. `oi`.
    pub const fn short(self) -> &'static str {
        match self {
            ZoneCond::NotWp => "nw",
            ZoneCond::Empty => "em",
            ZoneCond::ImplicitOpen => "oi",
            ZoneCond::ExplicitOpen => "oe",
            ZoneCond::Closed => "cl",
            ZoneCond::Full => "fu",
            ZoneCond::ReadOnly => "ro",
            ZoneCond::Offline => "ol",
        }
    }
}

impl fmt::Display for ZoneCond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Type of a zone, with the numbers of the ZBC zone descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ZoneType {
    /// Writable at any sector.
    Conventional = 0x1,
    /// Writable only at the write pointer.
    SequentialWriteRequired = 0x2,
}

/// One row of a zone report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneInfo {
    /// First sector.
    pub start: Sector,
    /// Length in sectors: the zone size, or less for a shorter last zone.
    pub sectors: u64,
    /// Writable sectors.
    pub capacity_sectors: u64,
    /// The write pointer, as null_blk reports it: [`Sector::NONE`] for a read-only or offline zone,
    /// and the end of the zone for a conventional one.
    pub wp: Sector,
    /// The zone type.
    pub kind: ZoneType,
    /// The zone condition.
    pub cond: ZoneCond,
}
