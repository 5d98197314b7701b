//! Volumes and pools in directories, files and disks.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

#[path = "../loop_device/mod.rs"]
mod loop_device;

mod admin;
mod contract;
mod crafted;
mod device;
mod directory;
mod disk;
mod encrypted;
mod full;
mod lease;
mod limits;
mod losses;
mod mirror;
mod owner;
mod panic;
mod replace;
mod sectors;
