//! ublk: a device as a block device `/dev/ublkbN` of the Linux kernel.
//!
//! ```text
//! server ─ control commands ▸ /dev/ublk-control      add, parameters, start, recover, stop, delete
//! kernel ─ descriptor ▸ request ▸ bio ▸ channel ─ completion ▸ commit ▸ kernel   (/dev/ublkcN)
//! ```
//!
//! - [`abi`] has the bytes of the driver's interface, [`shape`] the parameters of a device and
//!   [`request`] the rules for a descriptor. They do no I/O, and a fuzzer drives them.
//! - [`control`] sends commands to `/dev/ublk-control`; [`char_device`] maps the descriptors and
//!   copies data.
//! - Each queue of the kernel has a thread, a ring and a channel of its own ([`queue`]).
//! - [`server`] makes a block device, or goes on with the one that a killed server has left;
//!   [`machine`] lists and removes those of the whole machine.
//!
//! Source: Linux, `include/uapi/linux/ublk_cmd.h` and `Documentation/block/ublk.rst`.

pub mod abi;
mod char_device;
mod control;
mod error;
mod machine;
mod name_file;
mod queue;
pub mod request;
mod server;
pub mod shape;

pub use abi::{ID_MAX, block_path};
pub use control::{IoFlusher, begin_io_flusher, check_kernel, end_io_flusher};
pub use error::UblkError;
pub use machine::{MachineDevice, list, remove};
pub use server::{UblkInfo, UblkOptions, UblkServer};
pub use shape::ShapeError;
