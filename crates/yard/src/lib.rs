//! The yard: named devices made from URIs or TOML, the daemon that serves them, and its control
//! API.

pub mod activation;
pub mod api;
mod bounded;
pub mod client;
pub mod config;
pub mod control;
pub mod daemon;
pub mod error;
pub mod inject;
pub mod litter;
pub mod metrics;
pub mod nearest;
pub mod param;
pub mod paths;
pub mod ram;
pub mod scheduler;
pub mod size;
pub mod spec;
pub mod stack;
pub mod table;
pub mod uri;
pub mod view;
pub mod volumes;
pub mod yard;
pub mod zone_check;
pub mod zonefs;
pub mod zones;

pub use blockyard_export::nbd::{UnixPlace, endpoint};
