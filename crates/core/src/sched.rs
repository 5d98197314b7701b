//! Schedulers: in which order requests that wait are dispatched.

pub mod deadline;
mod none;
pub mod shared;

pub use none::NoneScheduler;

use crate::request::Request;
use crate::units::Nanos;

/// Orders requests between the plug and the device. A request in here holds no tag.
pub trait Scheduler: Send + 'static {
    /// Linux's name of the scheduler, e.g. `none`.
    const NAME: &'static str;

    /// Whether it only passes requests on in the order of their insertion.
    const PASSES_ON: bool = false;

    /// Adds a request that was submitted at `now`.
    fn insert(&mut self, request: Request, now: Nanos);

    /// Adds a request that a device did not start, before all others. Several come last to first.
    fn requeue(&mut self, request: Request);

    /// Takes the request whose turn it is.
    fn dispatch(&mut self, now: Nanos) -> Option<Request>;

    /// Whether no request waits.
    fn is_empty(&self) -> bool;
}
