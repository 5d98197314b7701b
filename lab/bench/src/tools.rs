//! Programs of other projects as instruments: fio and nbdcopy as clients, NBD and FUSE servers for
//! comparison.
//!
//! A process that is started here also ends here. A child has a time limit and dies with Ctrl-C. It
//! is killed when its owner is dropped or the lab itself ends in any way.

pub mod bucket_place;
pub mod child;
pub mod copy;
pub(crate) mod cpu;
pub mod direct;
pub(crate) mod engine;
pub mod file_server;
pub mod fio;
pub mod loop_device;
pub mod nbd_client;
pub mod nvme_client;
pub mod nvme_peer;
pub mod peer;
pub mod pool_place;
pub(crate) mod resident;
pub mod server;
pub mod vhost_client;
pub mod vhost_peer;
pub mod zram_device;
