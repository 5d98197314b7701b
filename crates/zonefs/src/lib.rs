//! zonefs: a file system with one file per zone of a zoned device.
//!
//! The format and the rules are those of Linux's zonefs. [`format`](mod@format) creates a file
//! system, [`ZoneFs`] opens one on any zoned device, and [`ZoneFile`] appends, writes, reads and
//! truncates, within the process and from many threads concurrently. [`mount`](mod@mount) serves
//! the file system to all programs over FUSE, without zone support in the kernel.

mod attributes;
mod error;
mod file;
pub mod format;
mod fs;
mod fuse;
mod io_handle;
mod layout;
mod manage;
pub mod mount;
pub mod options;
mod remount;
pub mod superblock;

pub use attributes::{Attributes, FileKind, Space, TreeNode};
pub use error::{FileError, ZoneFsError};
pub use file::{AccessMode, ZoneFile};
pub use fs::{Resources, ZoneFs};
pub use io_handle::IoHandle;
pub use manage::AttributeChange;
pub use mount::{Mount, MountError};
pub use options::{FormatOptions, MountOptions, OnError};
pub use superblock::Superblock;
/// A UUID, and its text of 32 hexadecimal digits with dashes.
pub use uuid::{Uuid, fmt::Hyphenated};
