//! Exporters: each translates between the requests of a protocol and a channel of the block layer.
//!
//! An exporter knows no kinds of device. It takes a [`blockyard_core::Disk`], reads its geometry
//! and limits, and opens a channel for each connection or serving thread.

pub mod fuse;
pub mod nbd;
mod os;
mod rmw;

pub use rmw::SharedDisk;
