//! Models and fixtures for the tests of every device: a reference model, seeded workloads, a manual
//! clock, and the contract that all devices must pass.
//!
//! Nothing here is in the product. The model is written from the standards and from null_blk's
//! documented behaviour, not from the product's state machine, so that the two can disagree.

pub mod allocations;
pub mod capability;
pub mod channel;
pub mod clock;
pub mod contract;
pub mod deadline;
pub mod directory;
pub mod fuse_parameter;
pub mod model;
pub mod reference;
pub mod refusing;
pub mod seed;
pub mod simulated_store;
pub mod temp_dir;
pub mod terminal_picture;
pub mod workload;
pub mod zone_store;
