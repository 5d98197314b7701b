//! The channel: the interface through which one thread uses a device.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

pub use blockyard_sync::zone_gate::Waker;

use crate::bio::{Bio, BufRef, Completion, Op, RegionId, Status};
use crate::device::Due;
use crate::region::Region;
use crate::units::Sector;

mod bare;
mod group;
mod rules;
mod stack;
mod stats;

pub use bare::Bare;
pub use group::ChannelGroup;
pub use stack::{ChannelConfig, Stack};
pub use stats::{ChannelStats, OpStats, Stats, percentile_ns};

/// One thread's interface to a device: register memory, push bios, submit them, reap completions.
///
/// A channel belongs to one thread at a time. Every pushed bio gets exactly one completion, on the
/// channel that pushed it; completions come in any order. Dropping a channel waits for the requests
/// that the device has started and discards the others. A thread that needs all completions must
/// reap them before it drops the channel.
///
/// While bios are in flight the owner must keep reaping. Zone writes wait for each other
/// ([`crate::zone::gate`]): the writes of other channels continue only after this channel has
/// reaped its own.
pub trait Channel: Send {
    /// Registers memory. The channel keeps it alive until it is unregistered.
    fn register(&mut self, region: Arc<Region>) -> RegionId;

    /// Unregisters a region. Returns `false` and does nothing if the region is not registered, or
    /// if any bio of the channel is in flight.
    fn unregister(&mut self, region: RegionId) -> bool;

    /// Accepts bios, from the first on, until the channel is full; returns the number of accepted
    /// bios. The channel also accepts an invalid bio, which completes with an error.
    fn push(&mut self, bios: &[Bio]) -> usize;

    /// Starts all pushed bios.
    fn submit(&mut self);

    /// Executes a read or a write without flags inline and returns its status. Skips the layers
    /// between channel and device. Returns `None` if the caller has to push the bio instead.
    ///
    /// For callers that have one bio at a time, or many that are not worth merging. A bio is
    /// executed inline only if the device would complete it within `start`, if it needs no
    /// splitting, and if nothing else of the channel is in flight. The statistics count the bio
    /// without a latency; a caller that measures the latency of all bios, or of samples, reports it
    /// by [`Channel::note_latency`].
    fn execute_inline(
        &mut self,
        op: Op,
        sector: Sector,
        sectors: u64,
        buf: BufRef,
    ) -> Option<Status> {
        let _ = (op, sector, sectors, buf);
        None
    }

    /// Adds the latency of bios that were executed inline to the statistics: of `bios` bios, of
    /// which one was measured. A caller that measures samples passes the number of bios that each
    /// sample stands for, so that counts and sums of latencies are those of all bios.
    fn note_latency(&mut self, op: Op, latency_ns: u64, bios: u64) {
        let _ = (op, latency_ns, bios);
    }

    /// Appends the completions that are ready to `out` and returns their number.
    fn reap(&mut self, out: &mut Vec<Completion>) -> usize;

    /// Sleeps until `reap` would find a completion, or until the deadline. Returns at once when
    /// nothing is in flight.
    fn wait(&mut self, deadline: Option<Instant>);

    /// When `reap` will next find a completion. For callers that also wait for other events.
    fn due(&self) -> Due;

    /// Registers a waker. Another channel's thread calls it when a zone write that waits here may
    /// continue. For callers that also wait for other events; without a waker, `due` says when to
    /// reap.
    fn set_waker(&mut self, waker: Waker) {
        let _ = waker;
    }

    /// A descriptor that becomes readable when another thread has completed something for this
    /// channel, if the device has one. For callers that also wait for other events. After the first
    /// call, `due` reports only completions that depend on time.
    fn descriptor(&mut self) -> Option<RawFd> {
        None
    }

    /// Announces that the caller will sleep on the descriptor until it reaps again. Returns `false`
    /// if `reap` would find a completion now.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// Number of bios that were pushed and not yet reaped.
    fn in_flight(&self) -> usize;

    /// The counters of this channel, for [`ChannelGroup`]; `None` if it has none of its own.
    fn counters(&self) -> Option<Arc<ChannelStats>> {
        None
    }
}
