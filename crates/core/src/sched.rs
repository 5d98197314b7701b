//! The scheduler `mq-deadline`: its order, its queue that all channels of a device share, and its
//! control plane.

pub mod deadline;
pub mod shared;

use deadline::{Stats, Tunables};

/// The scheduler of a device, as the control plane sees it.
pub trait SchedulerControl: Send + Sync {
    /// The names that [`SchedulerControl::switch`] takes.
    fn available(&self) -> &'static [&'static str];

    /// The name of the active scheduler.
    fn active(&self) -> &'static str;

    /// Activates another scheduler; the previous one still serves the requests that wait in it.
    ///
    /// # Errors
    /// If there is no scheduler of this name.
    fn switch(&self, name: &str) -> Result<(), UnknownScheduler>;

    /// The present tunables.
    fn tunables(&self) -> Tunables;

    /// Changes the tunables.
    fn set(&self, tunables: Tunables);

    /// The counters of requests so far.
    fn stats(&self) -> Stats;

    /// Number of requests that wait in the order.
    fn waiting(&self) -> usize;

    /// How many requests the device executes at once; its limits say how many a channel may submit.
    fn depth(&self) -> u16;
}

/// There is no scheduler of this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownScheduler {
    /// The requested name.
    pub name: String,
}

impl std::fmt::Display for UnknownScheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there is no scheduler `{}`: expected `none` or `mq-deadline`", self.name)
    }
}

impl std::error::Error for UnknownScheduler {}
