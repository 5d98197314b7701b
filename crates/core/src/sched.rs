//! Schedulers: the order in which waiting requests are dispatched.

pub mod deadline;
mod none;
pub mod shared;

pub use none::NoneScheduler;

use crate::request::Request;
use crate::units::Nanos;

/// Orders requests between the plug and the device. A request in a scheduler holds no tag.
pub trait Scheduler: Send + 'static {
    /// Linux's name of the scheduler, e.g. `none`.
    const NAME: &'static str;

    /// Whether the scheduler is a FIFO: it dispatches requests in the order of insertion.
    const PASSES_ON: bool = false;

    /// Adds a request that was submitted at `now`.
    fn insert(&mut self, request: Request, now: Nanos);

    /// Puts a request that a device did not start back at the front. The caller requeues several
    /// requests from the last to the first.
    fn requeue(&mut self, request: Request);

    /// Removes the next request to start.
    fn dispatch(&mut self, now: Nanos) -> Option<Request>;

    /// Whether the scheduler is empty.
    fn is_empty(&self) -> bool;
}
