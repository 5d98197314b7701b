//! The yard: named devices made from URIs or TOML, the daemon that serves them, and its control
//! API.

// Test code that other crates include names this crate as they do.
#[cfg(test)]
extern crate self as blockyard_yard;

pub mod activation;
pub mod activity;
pub mod api;
pub mod api_paths;
pub mod backup;
pub mod cleanup_registry;
pub mod client;
pub mod config;
pub mod control;
pub mod daemon;
pub mod devices;
pub mod entry;
pub mod error;
pub mod event;
mod http;
pub mod inject;
pub mod interval;
pub mod memory;
pub mod metrics;
pub mod monitor;
pub mod nvme_listeners;
pub mod param;
pub mod paths;
pub mod process;
pub mod ram;
mod replays;
pub mod scenario;
pub mod scheduler;
pub mod scrubs;
pub mod size;
pub mod spec;
pub mod stack;
pub mod standby;
mod streams;
pub mod suggestion;
pub mod table;
pub mod time_text;
pub mod trace;
pub mod ublk;
pub mod upgrade;
mod upkeep;
pub mod uri;
pub mod vhost;
pub mod view;
pub mod volume_diff;
pub mod volume_properties;
pub mod volume_secret;
pub mod volumes;
pub mod warnings;
pub mod web_access;
pub mod zone_check;
pub mod zone_counts;
pub mod zone_image;
pub mod zonefs;
pub mod zones;

pub use blockyard_nbd::{AllowLists, LIMIT_BYTES_MIN as NBD_MEMORY_MIN, UnixPlace, endpoint};
pub use blockyard_nvme::auth_message::{AuthHash, DhGroup};
pub use blockyard_nvme::{AllowedHosts, check_subsystem_nqn};
