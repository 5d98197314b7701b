//! The yard: named devices made from URIs or TOML, the daemon that serves them, and its control
//! API.

pub mod nearest;
pub mod param;
pub mod size;
pub mod spec;
pub mod uri;
