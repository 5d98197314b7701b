//! The mounts that this process sees, and unmounting, with and without root. Shared by the
//! exporters that mount something.

mod away;
mod table;

pub use away::{MOUNTER, abort_connection, abort_mounted, detach, unmount_unused};
pub use table::{DeviceNumber, Mounted, topmost};
