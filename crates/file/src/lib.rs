//! The `file` device: an existing regular file or block device, served as it is.
//!
//! Read in this order: `config.rs`, the parameters; `backing.rs`, which opens, locks and examines
//! the file; `device.rs`, the control plane; `execution.rs`, the system calls that a request
//! becomes; `queue.rs`, `ring.rs` and `blocking.rs`, which execute them by io_uring or by blocking
//! calls; `zoned.rs`, the zones of a zoned block device.

mod backing;
mod blocking;
mod config;
mod device;
mod error;
mod execution;
mod lock;
mod queue;
mod ring;
mod zoned;

pub use config::{Direct, FileConfig, IoEngine};
pub use device::{FileDevice, FileStatus};
pub use error::FileDeviceError;
pub use queue::FileQueue;
