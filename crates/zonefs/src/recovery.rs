//! Recovery from device errors.
//!
//! After an error, recovery reports the zone and adapts the file to it, as `errors=` specifies.
//! That applies to a failed write, flush or zone operation, and to a failed read of a zone that has
//! become read-only or offline.
//!
//! | errors= | zone | size | file read | file write |
//! | --- | --- | --- | --- | --- |
//! | remount-ro | good | fixed, never grown | yes | no, in no file |
//! | zone-ro | good | as is | yes | no |
//! | zone-offline | good | 0 | no | no |
//! | repair | good | fixed | yes | yes |
//! | any but zone-offline | read-only | as is | yes | no |
//! | zone-offline | read-only | 0 | no | no |
//! | any | offline | 0 | no | no |

use blockyard_core::zone::{ZoneCond, ZoneInfo};

use crate::attributes::FileKind;
use crate::file::{File, bit};
use crate::fs::ZoneFs;
use crate::layout::{worst, written};
use crate::options::OnError;

impl ZoneFs {
    /// Recovers a file after an error. `writing` says whether the failed operation was a change.
    pub(crate) fn recover(&self, file: &File, writing: bool) {
        let _alone = file.close_passage();
        let _state = file.state();
        self.recover_alone(file, writing);
    }

    /// Recovers a file; the caller has closed its passage and holds its state.
    pub(crate) fn recover_alone(&self, file: &File, writing: bool) {
        let Some((cond, in_zone)) = self.find_out(file) else {
            self.warn(&format!("zone {} gives no report", file.zone));
            return self.become_read_only("an error cannot be recovered from");
        };
        let size = file.size();
        match cond {
            ZoneCond::Offline => file.add_bits(bit::OFFLINE),
            ZoneCond::ReadOnly => file.add_bits(bit::READ_ONLY),
            _ => {}
        }
        if !file.is(bit::IMMUTABLE) && !writing && size == in_zone {
            return;
        }
        if size != in_zone {
            let zone = file.zone;
            self.warn(&format!("inode {zone}: invalid size {size} (should be {in_zone})"));
        }
        let fixed = self.settle(file, size, in_zone);
        self.update_permissions(file);
        if file.is(bit::IMMUTABLE) {
            // Such a zone needs no close.
            file.set_zone_open(false);
        }
        if self.options().errors == OnError::RemountRo {
            self.become_read_only("an error of the device, and errors=remount-ro");
        }
        file.set_size(fixed);
    }

    /// Sets the bits that the options require, and returns the new size of the file.
    fn settle(&self, file: &File, size: u64, in_zone: u64) -> u64 {
        let errors = self.options().errors;
        if file.is(bit::OFFLINE) || errors == OnError::ZoneOffline {
            self.warn(&format!("inode {}: read and write access disabled", file.zone));
            file.add_bits(bit::OFFLINE);
            0
        } else if file.is(bit::READ_ONLY) || errors == OnError::ZoneRo {
            self.warn(&format!("inode {}: write access disabled", file.zone));
            file.add_bits(bit::READ_ONLY);
            size
        } else if errors == OnError::RemountRo {
            // Data beyond the old size are undefined: they were never acknowledged.
            in_zone.min(size)
        } else {
            in_zone
        }
    }

    fn update_permissions(&self, file: &File) {
        let mut looks = file.looks();
        if file.is(bit::OFFLINE) {
            looks.permissions &= !0o777;
        } else if file.is(bit::READ_ONLY) {
            looks.permissions &= !0o222;
        }
        if file.is(bit::IMMUTABLE) && looks.permissions & 0o777 == 0 {
            file.add_bits(bit::UNREADABLE);
        }
    }

    /// The condition of the file's zones, the worst of several, and their number of bytes. The
    /// write pointer of a read-only zone is unknown: then the number is the file's size.
    fn find_out(&self, file: &File) -> Option<(ZoneCond, u64)> {
        let mut zones: Vec<ZoneInfo> = Vec::with_capacity(file.zones as usize);
        self.disk().report_zones(file.start, file.zones as usize, &mut zones).ok()?;
        let first = zones.first().filter(|first| first.start == file.start)?;
        if zones.len() != file.zones as usize {
            return None;
        }
        let cond = zones.iter().fold(first.cond, |cond, zone| worst(cond, zone.cond));
        let in_zone = match (cond, file.kind) {
            (ZoneCond::Offline, _) => 0,
            (_, FileKind::Conventional) => file.capacity,
            (ZoneCond::ReadOnly, _) => file.size(),
            _ => written(first, file.capacity),
        };
        Some((cond, in_zone))
    }

    /// Whether an append of `wanted` bytes failed only because other appends took the space: the
    /// zone is neither read-only nor offline, and has less space than that, or had until a
    /// truncation after the failure. `truncations` is the number of truncations when the append
    /// began.
    pub(crate) fn has_no_room(&self, file: &File, wanted: u64, truncations: u64) -> bool {
        let _alone = file.close_passage();
        let well = |cond| !matches!(cond, ZoneCond::Offline | ZoneCond::ReadOnly);
        self.find_out(file).is_some_and(|(cond, in_zone)| {
            let full = in_zone + wanted > file.capacity || file.truncations() != truncations;
            well(cond) && in_zone == file.size() && full
        })
    }
}
