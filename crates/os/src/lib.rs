//! Facilities of the operating system that the standard library does not offer, each used by
//! several crates: files that replace others atomically, waiting for many descriptors, identities,
//! mapped memory, memory for keys, files with secrets, precise timers, the mount table, unmounting,
//! socket calls, descriptors in messages, interrupts of threads, and a bound on log lines.

mod atomic_file;
pub mod descriptors;
pub mod epoll;
mod identity;
pub mod interrupt;
mod locked_memory;
mod log_limit;
mod memory;
mod mount_table;
pub mod private_file;
pub mod socket;
mod timer;
mod unmount;

pub use atomic_file::{AtomicFile, Replace, UNFINISHED};
pub use identity::{boot_id, fresh_id};
pub use locked_memory::LockedMemory;
pub use log_limit::LogLimit;
pub use memory::{forget, map_region};
pub use mount_table::{DeviceNumber, Mounted, mount_point, topmost};
pub use timer::sharpen_timers;
pub use unmount::{MOUNTER, abort_connection, abort_mounted, detach, unmount_unused};
