//! What every device is tested with: a reference model to agree with, seeded workloads to disturb
//! it, a clock that tests move by hand, and the contract that all devices keep.
//!
//! Nothing here is in the product. The model is written from the standards and from null_blk's
//! documented behaviour, not from our own state machine, so that the two can disagree.

pub mod allocations;
pub mod clock;
pub mod contract;
pub mod deadline;
pub mod directory;
pub mod fuse_parameter;
pub mod model;
pub mod reference;
pub mod refusing;
pub mod seed;
pub mod workload;
