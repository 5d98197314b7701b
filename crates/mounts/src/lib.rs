//! Mounts of this process's view: what is mounted where, and taking it away, with and without being
//! root. What exporters that mount something have in common.

mod away;
mod table;

pub use away::{MOUNTER, abort_connection, abort_mounted, detach, unmount_unused};
pub use table::{DeviceNumber, Mounted, topmost};
