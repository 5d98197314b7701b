//! The fuzz targets; `tests/targets` drives them.
//!
//! A target is a function that takes bytes, and returns or panics with its finding.

pub mod bios;
pub mod blktrace;
pub mod cdb;
pub mod deadline;
pub mod disk_image;
pub mod drive;
pub mod fuse;
pub mod input;
pub mod media;
pub mod nbd;
pub mod nvme;
pub mod object;
pub mod ram;
pub mod refusals;
pub mod stream;
pub mod texts;
pub mod trace;
pub mod ublk;
pub mod upgrade;
pub mod vhost;
pub mod volume;
pub mod zoned;
pub mod zonefs;
