//! The lab: published workloads on our devices, on the coarse locks that these replaced, and on
//! programs of other projects, measured in one run and shown together.
//!
//! An [`experiment::Experiment`] is data: what others published, the variants, and a list of cells,
//! each of which measures one variant under one workload. [`registry`] lists the experiments.
//! Rounds, statistics, results and reports are common to all and exist once.

mod clock;
pub mod collect;
pub mod command;
pub mod corpus;
pub mod counted;
pub mod error;
pub mod experiment;
pub mod experiments;
pub mod fio_bytes;
pub mod headlines;
pub mod kernel_replay;
pub mod limits;
pub mod load;
pub mod machine;
pub mod metric;
pub mod progress;
pub mod quantity;
pub mod ratios;
pub mod registry;
pub mod report;
pub mod results;
pub mod row_filter;
pub mod run;
pub mod sample;
pub mod scale;
pub mod scratch;
pub mod serve;
pub mod slow;
pub mod stats;
pub mod stop;
pub mod tap;
pub mod ticks;
pub mod tools;

pub use error::LabError;
pub use experiment::Settings;
pub use experiment::{
    Body, Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload,
};
pub use metric::Metric;
pub use sample::{LatencyPercentiles, RoomCount, Round, Sample};
pub use stop::Stop;
