//! The zone write plug: orders the writes to each zone, above tags and scheduler.
//!
//! ```text
//! plug ─ enter ▸ zone write plug ─ pass ▸ scheduler ▸ channel tag ▸ device queue
//! reap ◂─ tag freed ◂─ complete ─ zone write plug ◂ leave ─ completion batch ◂─┘
//! ```
//!
//! A request that waits for its zone holds neither a tag nor a place in the scheduler; otherwise a
//! few busy zones would starve the other requests. Each channel holds a [`Gate`]. The gates of one
//! device share state through its [`Gates`]. A device that keeps the order of its requests itself
//! has [`NoGate`], which the compiler removes completely.

mod pointers;
mod tickets;
mod zone_write_plug;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::zone_gate::Waker;

use crate::bio::{Op, Status};
use crate::channel::ChannelStats;
use crate::device::Due;
use crate::limits::Limits;
use crate::request::{CompletedRequest, CompletionBatch, Request, Ring};
use crate::units::{Nanos, Sector};

pub use zone_write_plug::{GateError, ZoneWritePlug, ZoneWritePlugs};

/// How many changes of a zone may be in flight at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GateMode {
    /// As many as the device accepts: the device itself keeps the order of its requests.
    #[default]
    Pipeline,
    /// One, over all channels. The others wait without a tag, in order, and merge. As in Linux
    /// since 6.10 (zone write plugging).
    ZoneWritePlug,
}

impl GateMode {
    /// The mode's name: `pipeline`, `plug`.
    pub const fn name(self) -> &'static str {
        match self {
            GateMode::Pipeline => "pipeline",
            GateMode::ZoneWritePlug => "plug",
        }
    }
}

impl fmt::Display for GateMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for GateMode {
    type Err = String;

    fn from_str(text: &str) -> Result<GateMode, String> {
        let modes = [GateMode::Pipeline, GateMode::ZoneWritePlug];
        let found = modes.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| "`pipeline` or `plug`".to_owned())
    }
}

/// The settings of a device's zone write plug, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateView {
    /// How many changes of a zone may be in flight at once.
    pub mode: GateMode,
    /// Whether zone append is emulated by writes, because the device has no append.
    pub emulates_append: bool,
}

/// The zone write plug of one device: the state that its gates share.
pub trait Gates: Send + Sync + 'static {
    /// The part that each channel holds.
    type Gate: Gate;

    /// Opens the gate of a new channel, whose slot numbers are below `depth`.
    fn open(&self, depth: u16) -> Self::Gate;

    /// The limits of the device as a channel above the zone write plug sees them.
    fn limits(&self, limits: &Limits) -> Limits {
        limits.clone()
    }

    /// The settings, for display.
    fn view(&self) -> GateView;

    /// Reports that zones may have changed by another path than the zone write plug.
    fn zones_changed(&self) {}
}

/// One channel's part of a zone write plug. It belongs to the channel's thread.
///
/// A gate passes on or refuses each request of [`Gate::enter`] exactly once.
pub trait Gate: Send + 'static {
    /// Whether requests go through the gate at all.
    const ACTIVE: bool = true;

    /// Takes a request that the channel submits.
    fn enter(&mut self, request: Request, queues: &mut GateQueues);

    /// Takes a request that the device has completed and passes it to its channel. Each request
    /// that was passed on comes back here once, before its bios complete.
    fn leave(&mut self, ended: CompletedRequest, queues: &mut GateQueues);

    /// Takes an append back that [`GateQueues::again`] received.
    fn requeue(&mut self, request: Request, queues: &mut GateQueues) {
        self.enter(request, queues);
    }

    /// Takes a bio of a merged request that is broken up. The first bio, in slot `head`, replaces
    /// the request and does not come here. The other bios come from the last to the first, and go
    /// before requests that entered later. A returned bio goes to the scheduler at once.
    fn broken(&mut self, head: u16, single: Request) -> Option<Request> {
        let _ = head;
        Some(single)
    }

    /// Passes on requests whose zone other channels have released.
    fn poll(&mut self, now: Nanos, queues: &mut GateQueues) {
        let _ = (now, queues);
    }

    /// Does one slow step after everything else was started; returns whether there was one.
    fn catch_up(&mut self, queues: &mut GateQueues) -> bool {
        let _ = queues;
        false
    }

    /// Whether a request here waits for another channel.
    fn waits(&self) -> bool {
        false
    }

    /// When to poll again for a request that waits for another channel.
    fn due(&self) -> Due {
        Due::Never
    }

    /// Registers a waker that is called when another channel releases a zone; then no polling is
    /// needed.
    fn set_waker(&mut self, waker: Waker) {
        let _ = waker;
    }

    /// Sleeps until another channel releases a zone, for `at_most` at most. May return early.
    fn sleep(&self, at_most: Duration) {
        let _ = at_most;
    }

    /// Whether a bio may be executed inline, bypassing the gate.
    fn may_execute_inline(&self, op: Op, sector: Sector) -> bool {
        let _ = sector;
        op == Op::Read
    }

    /// Discards the waiting requests: the channel is being dropped.
    fn close(&mut self);
}

/// The output queues of a gate: down to the scheduler, and up to the channel.
#[derive(Debug)]
pub struct GateQueues {
    forwarded: Ring<Request>,
    again: Ring<CompletedRequest>,
    completions: CompletionBatch,
    stats: Arc<ChannelStats>,
}

impl GateQueues {
    /// Queues for `depth` requests.
    pub(crate) fn new(depth: usize, stats: Arc<ChannelStats>) -> GateQueues {
        GateQueues {
            forwarded: Ring::with_capacity(depth),
            again: Ring::with_capacity(depth),
            completions: CompletionBatch::with_capacity(depth),
            stats,
        }
    }

    /// Passes a request on to the scheduler.
    #[inline]
    pub fn forward(&mut self, request: Request) {
        self.forwarded.push_back(request);
    }

    /// Completes a request that does not reach the device.
    pub fn refuse(&mut self, request: Request, status: Status) {
        self.completions.enter(request, status);
    }

    /// Passes a request that the device has completed to the channel.
    #[inline]
    pub fn complete(&mut self, ended: CompletedRequest) {
        self.completions.put(ended);
    }

    /// Frees the tag of an append that was executed as a write; the append then enters again.
    pub(crate) fn again(&mut self, ended: CompletedRequest) {
        self.again.push_back(ended);
    }

    pub(crate) fn next_again(&mut self) -> Option<CompletedRequest> {
        self.again.pop_front()
    }

    /// Counts a bio of this operation that was merged.
    pub(crate) fn merged(&self, op: Op) {
        self.stats.merged(op);
    }

    #[inline]
    pub(crate) fn next(&mut self) -> Option<Request> {
        self.forwarded.pop_front()
    }

    #[inline]
    pub(crate) fn completions(&mut self) -> &mut CompletionBatch {
        &mut self.completions
    }

    #[inline]
    pub(crate) fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }
}

/// No zone write plug: the device, or its only writer, keeps the order.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoGate;

impl Gate for NoGate {
    const ACTIVE: bool = false;

    fn enter(&mut self, request: Request, queues: &mut GateQueues) {
        queues.forward(request);
    }

    fn leave(&mut self, ended: CompletedRequest, queues: &mut GateQueues) {
        queues.complete(ended);
    }

    fn may_execute_inline(&self, _op: Op, _sector: Sector) -> bool {
        true
    }

    fn close(&mut self) {}
}

/// The settings of channels without a zone write plug.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ungated;

impl Gates for Ungated {
    type Gate = NoGate;

    fn open(&self, _depth: u16) -> NoGate {
        NoGate
    }

    fn view(&self) -> GateView {
        GateView { mode: GateMode::Pipeline, emulates_append: false }
    }
}
