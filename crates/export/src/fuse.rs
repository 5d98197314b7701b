//! Block files over FUSE: a mounted directory with one regular file for each device.
//!
//! ```text
//! mount ─ threads ┬ device ┬▸ server ┬▸ file_system                     (names, sizes)
//!                 └ ring ──┘         └▸ seat ▸ door ┬▸ channel         (executed inline)
//!                                                   └▸ lane ▸ channel  (everything else)
//! ```
//!
//! - The host's own kernel is the client: `losetup --direct-io=on` makes a block device of a file,
//!   which can hold ext4, XFS or btrfs.
//! - Requests come over io_uring where the kernel offers it ([`ring`]), and are read from
//!   `/dev/fuse` elsewhere ([`device`]); [`wire`] parses and prints their bytes.
//! - A serving thread has its own handles ([`seat`]): a channel for each device that it has used.
//!   It executes requests inline there if the device completes them at once, without a contended
//!   lock.
//! - Other requests go to a worker ([`lane`]), a thread with a channel of its own for one device,
//!   so that a slow device delays only the requests for it.
//! - Zone semantics do not cross a block file: a zoned disk is read anywhere and written at its
//!   write pointers, and a write elsewhere fails with `EIO`.

mod device;
mod file_system;
mod files;
mod handshake;
mod lane;
mod memory;
mod mount;
mod mount_point;
mod ranges;
mod ring;
mod seat;
mod server;
mod status;
mod threads;
mod ticket;
pub mod wire;

pub use files::{FILES_MAX, FileError, FileInfo, Files};
pub use mount::{Mount, MountOptions, Transport};
pub use mount_point::MountError;
