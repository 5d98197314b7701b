//! Programs that others wrote, as instruments: fio and nbdcopy as clients, NBD and FUSE servers as
//! peers.
//!
//! Whatever is started here ends here: a child has a time limit, dies with Ctrl-C, and is killed
//! when its owner is dropped or the lab itself ends in whatever way.

pub mod child;
pub mod copy;
pub(crate) mod cpu;
pub mod direct;
pub(crate) mod engine;
pub mod file_server;
pub mod fio;
pub mod loop_device;
pub mod nbd_writer;
pub mod pool_place;
pub mod server;
pub mod zram_device;
