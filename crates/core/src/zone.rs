//! Zones: what a report shows, and the state machine that zoned devices share.

mod info;

pub use info::{ZoneCond, ZoneInfo, ZoneType};
