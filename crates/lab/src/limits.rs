//! What this machine can do at best, so that every other figure can be read as a fraction of it.
//!
//! One file per kind of limit; [`crate::experiments::limits`] lists them by name, and
//! [`values::LimitValues`] looks them up in results by that name.

pub mod atomic;
pub mod fio;
pub mod locks;
pub mod memory;
pub mod pair;
pub mod slices;
pub mod sockets;
pub mod uring;
pub mod values;
pub mod wake;
