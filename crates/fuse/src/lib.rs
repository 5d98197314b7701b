//! Block files over FUSE: a mounted directory with one regular file for each device.
//!
//! ```text
//! mount ─ threads ┬ device ┬▸ server ┬▸ file_system  (names, sizes)
//!                 └ ring ──┘         └▸ files: DeviceHandle ┬▸ channel           (executed inline)
//!                                                           └▸ worker ▸ channel  (everything else)
//! ```
//!
//! - The host's own kernel is the client: `losetup --direct-io=on` makes a block device of a file,
//!   which can hold ext4, XFS or btrfs.
//! - Requests come over io_uring where the kernel offers it ([`ring`]), and are read from
//!   `/dev/fuse` elsewhere ([`device`]); [`wire`] parses and prints their bytes.
//! - A serving thread has its own handles ([`files`]): a channel for each device that it has used.
//!   It executes requests inline there if the device completes them at once, without a contended
//!   lock.
//! - Other requests go to a worker ([`worker`]), a thread with a channel of its own for one device,
//!   so that a slow device delays only the requests for it.
//! - Zone semantics do not cross a block file: a zoned disk is read anywhere and written at its
//!   write pointers, and a write elsewhere fails with `EIO`.

mod device;
mod file_system;
mod files;
mod handshake;
mod memory;
mod mount;
mod mount_point;
mod reply;
mod ring;
mod rules;
mod server;
pub mod wire;
mod worker;

pub use files::{FILES_MAX, FileError, FileInfo, Files, Transport};
pub use mount::{Mount, MountOptions};
pub use mount_point::MountError;
