//! zonefs: a file system with one file per zone of a zoned device.
//!
//! The format and the rules are those of Linux's zonefs. [`format`](mod@format) creates a file
//! system, [`ZoneFs`] opens one on any zoned device, and [`ZoneFile`] appends, writes, reads and
//! truncates, within the process and from many threads concurrently. [`mount`](mod@mount) serves
//! the file system to all programs over FUSE, without zone support in the kernel.

mod attributes;
mod door;
mod error;
mod file;
pub mod format;
mod fs;
mod fuse;
mod layout;
mod manage;
pub mod mount;
pub mod options;
mod reading;
mod recovery;
mod remount;
pub mod superblock;
pub mod uuid;

pub use attributes::{Attributes, FileKind, Node, Space};
pub use door::Door;
pub use error::{FileError, ZoneFsError};
pub use file::{Access, ZoneFile};
pub use fs::{Resources, ZoneFs};
pub use manage::Change;
pub use mount::{Mount, MountError};
pub use options::{FormatOptions, MountOptions, OnError};
pub use superblock::Superblock;
pub use uuid::Uuid;
