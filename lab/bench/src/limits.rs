//! The best that this machine can do, so that other figures can be read as fractions of it.
//!
//! One file per kind of limit; [`crate::experiments::limits`] lists them by name.

pub mod atomic;
pub mod fio;
pub mod locks;
pub mod memory;
pub mod pair;
pub mod slices;
pub mod sockets;
pub mod uring;
pub mod wake;
