//! Zones: the zone report, the state machine of a zone, and the synchronization of a device's
//! zones.

mod atomic_zone_set;
pub mod check;
#[cfg(test)]
mod document;
pub mod gate;
mod info;
mod machine;
pub mod zbc;
mod zone_set;

pub use atomic_zone_set::AtomicZoneSet;
pub use info::{ZoneCond, ZoneInfo, ZoneType};
pub use machine::{Step, Zone, ZoneOp, holding_of};
pub use zone_set::{Erase, Transfer, ZoneLayout, ZoneSet};
