//! One file per experiment; [`crate::registry`] lists them.

mod cached;
pub mod clock;
pub mod file;
pub mod fio_engine;
pub mod fuse;
pub mod hot_path;
pub mod limits;
pub mod nbd;
pub mod nvme;
pub mod race;
mod ram_data;
pub mod ram_kernel;
mod ram_lines;
pub mod ram_locks;
pub mod scheduler;
pub mod scheduler_kernel;
pub mod scheduler_latency;
pub mod scheduler_merge;
pub(crate) mod schedulers;
pub mod smr_append;
pub mod sync_writes;
pub mod vhost;
pub mod volume_limits;
pub mod zone_append;
pub mod zone_gate;
pub mod zone_locks;
mod zone_locks_fio;
