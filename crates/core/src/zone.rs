//! Zones: what a report shows, and the state machine that zoned devices share.

#[cfg(test)]
mod document;
mod info;
mod machine;
pub mod zbc;

pub use info::{ZoneCond, ZoneInfo, ZoneType};
pub use machine::{Step, Zone, ZoneOp, holding_of};
