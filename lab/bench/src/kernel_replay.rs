//! Records the decisions of a running kernel's own scheduler, and replays recordings.
//!
//! [`mod@record`] runs fio on a loop device with mq-deadline and records the block events of
//! tracefs. The crate `blockyard-replay` parses, packs and replays what was recorded. docs/lab.md
//! has the format and the rules by which a difference is explained.

pub mod command;
pub mod record;
