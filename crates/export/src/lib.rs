//! Exporters: translators from a protocol's ring of requests to a channel of the block layer.
//!
//! An exporter knows nothing of kinds of devices. It takes a [`blockyard_core::Disk`], reads its
//! geometry and limits, and opens a channel for each connection or serving thread.

pub mod fuse;
pub mod nbd;
mod os;
mod rmw;

pub use rmw::SharedDisk;
