//! The scheduler `mq-deadline`: its order, its queue that all channels of a device share, and its
//! control plane.

pub mod control;
pub mod deadline;
pub mod shared;
