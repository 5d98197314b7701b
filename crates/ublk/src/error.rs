//! Why a device cannot be served as a block device of the kernel.

use std::io;

use crate::abi::{CONTROL_PATH, ControlCommand, block_path};
use crate::shape::ShapeError;

/// Why a device is not served as a block device of the kernel, or a command about such devices
/// failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UblkError {
    /// The kernel has no ublk driver.
    #[error(
        "cannot open {}: {source}; load the driver by `modprobe ublk_drv` (Linux 6.5 or later, \
         with CONFIG_BLK_DEV_UBLK)",
        CONTROL_PATH
    )]
    NoDriver {
        /// The error of the system.
        source: io::Error,
    },
    /// The process may not use the driver.
    #[error("cannot open {}: {source}; ublk needs root (CAP_SYS_ADMIN)", CONTROL_PATH)]
    NotPermitted {
        /// The error of the system.
        source: io::Error,
    },
    /// The driver lacks a feature.
    #[error("the kernel's ublk driver has no {what}, which needs {since}")]
    NoFeature {
        /// The feature.
        what: &'static str,
        /// The kernel that has it.
        since: &'static str,
    },
    /// The driver cannot have the device.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The number of the block device belongs to another server.
    #[error(
        "invalid id `{id}`: process {pid} serves /dev/ublkb{id}; expected a number that is free, \
         or none"
    )]
    Served {
        /// The number of the block device.
        id: u32,
        /// The process.
        pid: i32,
    },
    /// The number belongs to a block device that another device or program has left.
    #[error(
        "invalid id `{id}`: ublk device {id} was left by another device or program ({state}); \
         `blockyard ublk remove {id}` removes it"
    )]
    Foreign {
        /// The number of the block device.
        id: u32,
        /// The state of the block device.
        state: &'static str,
    },
    /// The block device was left by a device of the same name with other data.
    #[error(
        "cannot go on with /dev/ublkb{id}: another device of the name `{name}` has left it, whose \
         volume, file or directory is at another place or was made again since; `blockyard ublk \
         remove {id}` removes the block device"
    )]
    Replaced {
        /// The number of the block device.
        id: u32,
        /// The name of the device.
        name: String,
    },
    /// A program has the block device open that is to be made again.
    #[error(
        "invalid id `{id}`: a program still has {} open; expected a number that is free",
        block_path(*id)
    )]
    StillOpen {
        /// The number of the block device.
        id: u32,
    },
    /// The device was changed since its block device was made.
    #[error(
        "cannot go on with /dev/ublkb{id}: the device has another {what} now; \
         `blockyard ublk remove {id}` removes the block device"
    )]
    Changed {
        /// The number of the block device.
        id: u32,
        /// What has changed.
        what: &'static str,
    },
    /// Another process has stopped the block device while it was served.
    #[error(
        "another process has stopped /dev/ublkb{id}; remove it by `blockyard ublk remove`, and add \
         it again"
    )]
    Stopped {
        /// The number of the block device.
        id: u32,
    },
    /// The device is claimed.
    #[error("a file system or a change has claimed the device")]
    Claimed,
    /// There is no such block device.
    #[error("there is no ublk device {id}; `blockyard ublk list` lists them")]
    Unknown {
        /// The number of the block device.
        id: u32,
    },
    /// A block device is served, so it is not left over.
    #[error("cannot remove ublk device {id}: process {pid} serves it; end that process")]
    InUse {
        /// The number of the block device.
        id: u32,
        /// The process.
        pid: i32,
    },
    /// The ublk device was made by another program.
    #[error(
        "cannot remove ublk device {id} ({state}): another program than Blockyard has made it, and \
         may go on with it; use --force to remove it"
    )]
    NotOurs {
        /// The number of the block device.
        id: u32,
        /// The state of the device.
        state: &'static str,
    },
    /// The block device is mounted.
    #[error(
        "cannot remove ublk device {id}: {} is mounted, and its file system would get errors; go \
         on with it and unmount it, or use --force",
        block_path(*id)
    )]
    Mounted {
        /// The number of the block device.
        id: u32,
    },
    /// The kernel refused a command.
    #[error("cannot {} ublk device {}: {source}", command.verb(), id_text(*id))]
    Command {
        /// The command.
        command: ControlCommand,
        /// The number of the block device; [`u32::MAX`] for a new one.
        id: u32,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A queue cannot be served.
    #[error("cannot serve ublk device {id}: {source}")]
    Queue {
        /// The number of the block device.
        id: u32,
        /// The error.
        source: io::Error,
    },
    /// The system refused a ring, memory, a thread or a descriptor.
    #[error("ublk: {0}")]
    System(#[from] io::Error),
}

fn id_text(id: u32) -> String {
    if id == u32::MAX { "of any number".to_owned() } else { id.to_string() }
}
