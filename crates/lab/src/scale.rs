//! A model of throughput by core count, beyond this machine's processors.
//!
//! [`zone_locks`] and [`ram_locks`] describe an experiment's shared accesses as data.
//! [`simulation`] runs them on a [`machine::Machine`] whose times [`calibrate`] takes from the
//! experiment `limits`, and [`predict`] compares the result with known figures. docs/scale-model.md
//! explains the model.

pub mod calibrate;
pub mod command;
pub mod lines;
pub mod machine;
pub mod measure;
pub mod predict;
pub mod published;
pub mod ram_locks;
pub mod simulation;
pub mod steps;
pub mod zone_locks;
