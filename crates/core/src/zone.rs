//! Zones: the zone report, the state machine of a zone, and the synchronization of a device's
//! zones.

pub mod check;
#[cfg(test)]
mod document;
pub mod gate;
mod info;
mod machine;
mod word_zones;
pub mod zbc;
mod zone_set;

pub use info::{ZoneCond, ZoneInfo, ZoneType};
pub use machine::{Step, Zone, ZoneOp, holding_of};
pub use word_zones::WordZones;
pub use zone_set::{Erase, Transfer, ZoneLayout, ZoneSet};
