//! The gate: where writes to one zone are put in order, above tags and scheduler.
//!
//! ```text
//! plug ─ enter ▸ gate ─ pass ▸ scheduler ▸ tags ▸ device queue
//! reap ◂─ home ─ gate ◂ leave ─ done ring ◂─┘
//! ```
//!
//! A request that waits for its zone holds neither a tag nor a place in the scheduler, or a few hot
//! zones would starve the rest. Each channel holds a [`Gate`]; what those of one device share is
//! behind its [`Gates`]. Where a device orders what it is given by itself there is [`NoGate`], and
//! nothing of this is compiled in.

mod plugged;
mod pointers;
mod turns;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::zone_gate::Caller;

use crate::bio::Op;
use crate::channel::ChannelStats;
use crate::device::Due;
use crate::limits::Limits;
use crate::request::{Done, Ended, Request};
use crate::ring::Ring;
use crate::status::Status;
use crate::units::{Nanos, Sector};

pub use plugged::{GateError, Plugged, ZoneGates};

/// How many changes of a zone are in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GateMode {
    /// As many as the device takes: it keeps the order of what it is given by itself.
    #[default]
    Pipeline,
    /// One over all channels; the others wait without a tag, in order, and merge. As Linux since
    /// 6.10 (zone write plugging).
    Plug,
}

impl GateMode {
    /// The mode's name: `pipeline`, `plug`.
    pub const fn name(self) -> &'static str {
        match self {
            GateMode::Pipeline => "pipeline",
            GateMode::Plug => "plug",
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
        let modes = [GateMode::Pipeline, GateMode::Plug];
        let found = modes.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| "`pipeline` or `plug`".to_owned())
    }
}

/// What is to be shown of a device's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateView {
    /// How many changes of a zone are in flight.
    pub mode: GateMode,
    /// Whether zone append is made of writes, because the device has none of its own.
    pub emulates_append: bool,
}

/// What the gates of one device share, and what makes them.
pub trait Gates: Send + Sync + 'static {
    /// What each channel holds.
    type Gate: Gate;

    /// The gate of a new channel, whose slots are numbered below `depth`.
    fn open(&self, depth: u16) -> Self::Gate;

    /// What the device takes, seen from above the gate.
    fn limits(&self, limits: &Limits) -> Limits {
        limits.clone()
    }

    /// What is to be shown.
    fn view(&self) -> GateView;

    /// Zones may have changed in a way that did not come through the gate.
    fn zones_changed(&self) {}
}

/// One channel's part of a gate. It belongs to the channel's thread.
///
/// Every request that it takes in [`Gate::enter`] it passes on, or refuses, exactly once.
pub trait Gate: Send + 'static {
    /// Whether requests come here at all.
    const ACTIVE: bool = true;

    /// Takes a request on its way down.
    fn enter(&mut self, request: Request, passage: &mut Passage);

    /// Takes a request that the device has completed, and sends it home. Each request that was
    /// passed on comes back here once, before its bios complete.
    fn leave(&mut self, ended: Ended, passage: &mut Passage);

    /// Takes an append back that was given to [`Passage::again`].
    fn take_back(&mut self, request: Request, passage: &mut Passage) {
        self.enter(request, passage);
    }

    /// Takes a bio of a merged request that is broken up, but not its first one, which goes on in
    /// the request's place. `head` is the slot of that one. They come last to first, and go before
    /// what entered later. What comes back goes to the scheduler at once.
    fn broken(&mut self, head: u16, single: Request) -> Option<Request> {
        let _ = head;
        Some(single)
    }

    /// Passes on what other channels have made way for.
    fn poll(&mut self, now: Nanos, passage: &mut Passage) {
        let _ = (now, passage);
    }

    /// Does one thing that takes its time, when everything else that could be started has been;
    /// says whether there was any.
    fn catch_up(&mut self, passage: &mut Passage) -> bool {
        let _ = passage;
        false
    }

    /// Whether something here waits for another channel.
    fn waits(&self) -> bool {
        false
    }

    /// When to look again for what waits for another channel.
    fn due(&self) -> Due {
        Due::Never
    }

    /// Has somebody called when another channel makes way: then there is no need to look again.
    fn call(&mut self, caller: Caller) {
        let _ = caller;
    }

    /// Sleeps until another channel makes way, but not for longer. May return early.
    fn sleep(&self, at_most: Duration) {
        let _ = at_most;
    }

    /// Whether a bio may be carried out on the spot, past the gate.
    fn may_carry(&self, op: Op, sector: Sector) -> bool {
        let _ = sector;
        op == Op::Read
    }

    /// Forgets what waits: the channel is closing.
    fn close(&mut self);
}

/// The way on from a gate: down to the scheduler, or home.
#[derive(Debug)]
pub struct Passage {
    passed: Ring<Request>,
    again: Ring<Ended>,
    home: Done,
    stats: Arc<ChannelStats>,
}

impl Passage {
    /// A passage for so many requests.
    pub(crate) fn new(depth: usize, stats: Arc<ChannelStats>) -> Passage {
        Passage {
            passed: Ring::with_capacity(depth),
            again: Ring::with_capacity(depth),
            home: Done::with_capacity(depth),
            stats,
        }
    }

    /// Lets a request go down.
    #[inline]
    pub fn pass(&mut self, request: Request) {
        self.passed.push_back(request);
    }

    /// Sends a request home that does not come to the device.
    pub fn refuse(&mut self, request: Request, status: Status) {
        self.home.enter(request, status);
    }

    /// Sends a request home that the device has completed.
    #[inline]
    pub fn home(&mut self, ended: Ended) {
        self.home.put(ended);
    }

    /// Gives up the tag of an append that was made a write, and comes back with it.
    pub(crate) fn again(&mut self, ended: Ended) {
        self.again.push_back(ended);
    }

    pub(crate) fn next_again(&mut self) -> Option<Ended> {
        self.again.pop_front()
    }

    /// Counts a bio of this operation that was merged.
    pub(crate) fn merged(&self, op: Op) {
        self.stats.merged(op);
    }

    #[inline]
    pub(crate) fn next(&mut self) -> Option<Request> {
        self.passed.pop_front()
    }

    #[inline]
    pub(crate) fn homeward(&mut self) -> &mut Done {
        &mut self.home
    }

    #[inline]
    pub(crate) fn is_anybody_home(&self) -> bool {
        !self.home.is_empty()
    }
}

/// No gate: the device, or whoever writes to it, keeps the order.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoGate;

impl Gate for NoGate {
    const ACTIVE: bool = false;

    fn enter(&mut self, request: Request, passage: &mut Passage) {
        passage.pass(request);
    }

    fn leave(&mut self, ended: Ended, passage: &mut Passage) {
        passage.home(ended);
    }

    fn may_carry(&self, _op: Op, _sector: Sector) -> bool {
        true
    }

    fn close(&mut self) {}
}

/// Channels without a gate.
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
