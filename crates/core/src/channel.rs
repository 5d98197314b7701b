//! The front door: one thread's door to a device.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

pub use blockyard_sync::zone_gate::Caller;

use crate::bio::{Bio, BufRef, Op, RegionId};
use crate::completion::Completion;
use crate::device::Due;
use crate::region::Region;
use crate::status::Status;
use crate::units::Sector;

mod bare;
mod check;
mod flush;
pub(crate) mod merge;
mod plug;
mod slots;
mod split;
mod stack;
mod stats;
mod tags;

pub use bare::Bare;
pub use merge::MergeRules;
pub use stack::{ChannelConfig, Floors, Stack};
pub use stats::{ChannelStats, OpStats, Stats, percentile_ns};

/// One thread's door to a device: register memory, push bios, submit them, reap what is done.
///
/// A channel belongs to one thread at a time. Every pushed bio gets exactly one completion, on the
/// channel that pushed it, in any order. Dropping a channel waits for what the device has started
/// and forgets the rest: reap everything first where it matters.
///
/// While bios are in flight somebody has to reap: where changes of a zone wait for each other
/// ([`crate::zone::gate`]), those of other channels wait for this one to see that its own are done.
pub trait Channel: Send {
    /// Makes memory known to the channel, which keeps it alive until it is unregistered.
    fn register(&mut self, region: Arc<Region>) -> RegionId;

    /// Forgets a region. While any bio of the channel is in flight the region stays, and the answer
    /// is `false`; so it is for a region that is not registered.
    fn unregister(&mut self, region: RegionId) -> bool;

    /// Takes as many of the bios as there is room for, from the first on, and says how many. A bio
    /// that makes no sense is taken too, and completes with an error.
    fn push(&mut self, bios: &[Bio]) -> usize;

    /// Starts everything pushed.
    fn submit(&mut self);

    /// Carries a read or a write without flags out on the spot, without the way down and up, and
    /// says how it ended; `None` leaves it undone, and it has to be pushed.
    ///
    /// For callers with one bio at a time, or with many that are not worth merging. It is carried
    /// where the device would complete it while it is started, if it needs no splitting and while
    /// nothing else of the channel is in flight, and it is counted without a latency: a caller that
    /// measures it says so by [`Channel::note_latency`].
    fn carry(&mut self, op: Op, sector: Sector, sectors: u64, buf: BufRef) -> Option<Status> {
        let _ = (op, sector, sectors, buf);
        None
    }

    /// Adds the latency of a bio that was carried out on the spot to the statistics, for callers
    /// whose requests cost so much that two looks at the clock do not show.
    fn note_latency(&mut self, op: Op, latency_ns: u64) {
        let _ = (op, latency_ns);
    }

    /// Appends what is done to `out` and says how many that are.
    fn reap(&mut self, out: &mut Vec<Completion>) -> usize;

    /// Sleeps until `reap` would find something, or until the deadline. Returns at once when
    /// nothing is in flight.
    fn wait(&mut self, deadline: Option<Instant>);

    /// When `reap` will next find something: for callers that sleep on other things as well.
    fn due(&self) -> Due;

    /// Has somebody called, on whatever thread, when another channel has made way for what waits
    /// here: for callers that sleep on other things as well. Without it `due` says when to look.
    fn call(&mut self, caller: Caller) {
        let _ = caller;
    }

    /// A descriptor that can be read when others have brought something for who sleeps, if the
    /// device has one: for callers that sleep on other things as well. Once it was asked for, `due`
    /// says only what time brings.
    fn descriptor(&mut self) -> Option<RawFd> {
        None
    }

    /// The caller is about to sleep on the descriptor until it reaps again; `false` if there would
    /// be something to reap now.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// How many bios were pushed and not yet reaped.
    fn in_flight(&self) -> usize;
}
