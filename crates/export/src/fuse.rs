//! Block files over FUSE: a mounted directory with one regular file for each device.
//!
//! ```text
//! mount ─ threads ┬ device ┬▸ server ┬▸ file_system                     (names, sizes)
//!                 └ ring ──┘         └▸ seat ▸ door ┬▸ channel         (carried on the spot)
//!                                                   └▸ lane ▸ channel  (everything else)
//! ```
//!
//! - The host's own kernel is the client: `losetup --direct-io=on` makes a block device of a file,
//!   and ext4, XFS or btrfs go on it.
//! - Requests come over io_uring where the kernel offers it ([`ring`]), and are read from
//!   `/dev/fuse` elsewhere ([`device`]); [`wire`] has their bytes.
//! - A serving thread has a [`seat`] and in it a channel for each device that it has touched. What
//!   the device completes on the spot is answered from there, without a lock that others want.
//! - What has to wait goes to a [`lane`], a thread with a channel of its own for one device, so
//!   that a slow device holds up nobody but who asked for it.
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
