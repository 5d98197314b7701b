//! What the fuzz targets do with their input; `tests/targets` says how they are driven.
//!
//! A target is a function from bytes that returns, or panics with what it has found.

pub mod bios;
pub mod cdb;
pub mod deadline;
pub mod drive;
pub mod fuse;
pub mod input;
pub mod media;
pub mod nbd;
pub mod ram;
pub mod refusals;
pub mod stream;
pub mod texts;
pub mod trace;
pub mod volume;
pub mod zonefs;
