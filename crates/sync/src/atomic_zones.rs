//! Primitive: an atomic word per zone.
//!
//! Protects   the condition and the write pointer of each zone; for a device with data, the end of
//!            the readable data and the right to discard data.
//! Why        a write changes two small values together, which is one exchange: no writer waits for
//!            a preempted one. Several writers of one zone copy their data concurrently, outside of
//!            any lock.
//! States     bits 0 to 3: the condition. Bit 4, *held*: a thread has exclusive access to the zone.
//!            From bit 8: the write pointer, from the zone's start ([`UNREADABLE`] if nothing is
//!            readable). For a device with data there are two more words. `committed` is the end of
//!            the data that has arrived without a gap; it equals the write pointer whenever no copy
//!            is in flight. `erasures` counts how often the data was discarded.
//! Order      rank ZONE is the lock to hold a zone. It is taken to discard data, to make more data
//!            readable than was written, and to wait for a held zone. RESOURCES may be taken under
//!            it. A copy holds neither.
//! Common     a write is a load and an exchange; with data, one more store after the copy. A read
//!            is a load before and a load after its copy.
//! Cost       5 ns a write, mostly the exchange. If a limit is set, 5 ns more for each change of a
//!            zone's holding, not for each write.
//! Before     one lock for all zones; then a lock per zone, held while data was copied.
//!
//! # Copies
//! An exchange reserves a range; then the data is copied; then `committed` advances over it, in the
//! order of the reservations, so that a reader finds no gap below it. A thread whose copy ends
//! before an earlier one must wait for that one, because its own data could not be read back
//! otherwise. It waits only for copies that were in flight when it reserved; each of them waits
//! only for earlier copies. The earlier lock also made it wait before its own copy.
//!
//! To discard data, a thread holds the zone: it sets *held*, which stops reservations, waits for
//! the copies in flight, exchanges the word, publishes, erases, and releases the zone.
//!
//! | reader | reset |
//! | --- | --- |
//! | loads `erasures`, then `committed`: E | holds the zone; no copy is in flight |
//! | copies data below E | exchanges the word; `committed` becomes 0, `erasures` increases by 1 |
//! | loads `erasures`: increased, so the zone was empty for a moment during the read | erases |
//!
//! A read that detects an erasure returns the contents of that moment, regardless of later writes.
//! `erasures` has 64 bits, so that it cannot return to the same number during a read; a generation
//! in the word could. No other operation is affected by a word that returns to the same value: the
//! value alone determines what an exchange decides.
//!
//! # Limits
//! The condition of a zone determines its holding. A word changes to another holding only under the
//! lock of the counts, so counts and words always agree. The holding of a victim does not change
//! while it is closed. So no resource is ever between two zones, which is where null_blk loses
//! them.
//!
//! | writer of zone A, which is closed | writer of zone B, implicitly open, the oldest |
//! | --- | --- |
//! | locks the counts: limit reached, B is the oldest | may exchange B's write pointer |
//! | exchanges A's word; exchanges B's condition | |
//! | unlocks the counts | its exchange fails: B is closed, and has to be opened |

use std::collections::TryReserveError;
use std::fmt;
use std::marker::PhantomData;

use crate::atomics::{AtomicU64, Ordering, fence, spin_hint, yield_now};
use crate::lock::Lock;
use crate::rank::ranks;
use crate::sleep_lock::SleepLock;
use crate::zone_resources::{
    Accounts, AccountsLock, Holding, ResourceError, ZoneCounts, ZoneLimits, ZoneResources,
};

/// Bits of the condition.
const COND: u64 = 0xf;
/// Set while a thread has exclusive access to the zone.
const HELD: u64 = 1 << 4;
/// The lowest bit of the write pointer.
const WP_SHIFT: u32 = 8;
/// The write pointer of a zone without readable data; above all other values.
pub const UNREADABLE: u64 = u64::MAX >> WP_SHIFT;
/// Checks of a copy in flight before the waiter yields the CPU: the copying thread may be
/// preempted.
const SPINS: u32 = if cfg!(loom) { 1 } else { 64 };
/// Pauses after a writer's first lost exchange, doubled after each further one, and their maximum:
/// long enough for about a dozen writes of the winner.
const PAUSES: u32 = 16;
const PAUSES_MAX: u32 = 64;

/// The properties of a zone condition that the primitive needs.
pub trait Condition: Copy + Eq + fmt::Debug + Send + Sync + 'static {
    /// The condition in which no sector is written.
    const EMPTY: Self;
    /// The condition of an implicitly open zone after it was closed to free its resource, if it has
    /// data.
    const CLOSED: Self;

    /// The number of the condition, below 16.
    fn bits(self) -> u8;

    /// The condition with this number, which `bits` returned.
    fn from_bits(bits: u8) -> Self;

    /// The holding of a zone in this condition.
    fn holding(self) -> Holding;
}

/// The state of a zone in its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneView<C> {
    /// The condition.
    pub cond: C,
    /// The write pointer, from the zone's start, which is the end of the readable data; or
    /// [`UNREADABLE`].
    pub wp: u64,
}

impl<C: Condition> ZoneView<C> {
    #[inline]
    fn pack(self) -> u64 {
        debug_assert!(u64::from(self.cond.bits()) <= COND && self.wp <= UNREADABLE);
        self.wp << WP_SHIFT | u64::from(self.cond.bits())
    }

    #[inline]
    fn unpack(word: u64) -> ZoneView<C> {
        ZoneView { cond: C::from_bits((word & COND) as u8), wp: word >> WP_SHIFT }
    }
}

/// A change of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<C> {
    /// The holding that the zone must be allowed during the change.
    pub through: Holding,
    /// The final state.
    pub to: ZoneView<C>,
}

/// A zone with its own cache line, so that writers of neighbouring zones do not share one.
#[derive(Debug)]
#[repr(align(64))]
struct PaddedZone {
    word: AtomicU64,
    committed: AtomicU64,
    erasures: AtomicU64,
    turn: SleepLock<(), { ranks::ZONE }>,
}

impl PaddedZone {
    /// The word, once no thread holds the zone.
    #[inline]
    fn word(&self) -> u64 {
        loop {
            // Acquire: pairs with the Release in `Hold`: a write after an erasure does not overlap
            // it.
            let word = self.word.load(Ordering::Acquire);
            if word & HELD == 0 {
                return word;
            }
            self.wait_turn();
        }
    }

    /// Waits for the holder of the zone.
    #[cold]
    fn wait_turn(&self) {
        self.turn.with(|()| {});
    }

    /// Waits until data has arrived up to `wp` without a gap.
    #[inline]
    fn wait_committed(&self, wp: u64) {
        // Acquire: pairs with the Release in `Reservation`: a thread that waited for a copy sees
        // its data.
        if self.committed.load(Ordering::Acquire) != wp {
            wait_until(|| self.committed.load(Ordering::Acquire) == wp);
        }
    }
}

#[cold]
fn wait_until(is_so: impl Fn() -> bool) {
    loop {
        for _ in 0..SPINS {
            if is_so() {
                return;
            }
            spin_hint();
        }
        yield_now();
    }
}

/// Lets the winner of an exchange continue: it owns the cache line, and two threads that take it
/// from each other for every write achieve less than one. Not needed in a model.
#[cold]
fn stand_back(pauses: &mut u32) {
    if !cfg!(any(loom, shuttle)) {
        (0..*pauses).for_each(|_| spin_hint());
        *pauses = (*pauses * 2).min(PAUSES_MAX);
    }
}

/// A reserved range of a zone: the owner copies its data before it drops this. The drop waits for
/// the copies that were reserved before.
#[derive(Debug)]
#[must_use]
pub struct Reservation<'a> {
    /// `Some` if there is data to commit.
    line: Option<&'a PaddedZone>,
    from: u64,
    to: u64,
}

impl Drop for Reservation<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(line) = self.line {
            line.wait_committed(self.from);
            // Release: pairs with the Acquire of readers and of threads that wait for the copy.
            line.committed.store(self.to, Ordering::Release);
        }
    }
}

/// Exclusive access to a zone until this is dropped.
struct Hold<'a>(&'a PaddedZone);

impl<'a> Hold<'a> {
    /// Stops reservations and waits for the copies in flight. The caller holds the zone's lock.
    fn new(line: &'a PaddedZone) -> Hold<'a> {
        // Acquire: pairs with the Release in `drop` of the previous holder.
        let word = line.word.fetch_or(HELD, Ordering::Acquire);
        let hold = Hold(line);
        line.wait_committed(word >> WP_SHIFT);
        hold
    }

    /// Tells readers that there is no data any more; the caller may discard it afterwards.
    fn hide(&self) {
        self.0.committed.store(0, Ordering::Relaxed);
        // Release: pairs with the Acquire in `AtomicZones::erasures`: a reader that has seen the
        // new number sees no committed data from before.
        self.0.erasures.fetch_add(1, Ordering::Release);
        // Release: pairs with the Acquire fence there: a reader that has seen any later write sees
        // this number or a later one.
        fence(Ordering::Release);
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `PaddedZone::word`.
        self.0.word.fetch_and(!HELD, Ordering::Release);
    }
}

/// The zones of a device, with a word each; their counts under a lock of type `R`.
#[derive(Debug)]
pub struct AtomicZones<C, R = AccountsLock> {
    lines: Box<[PaddedZone]>,
    resources: Option<ZoneResources<R>>,
    /// Data is copied and can be read back.
    data: bool,
    _cond: PhantomData<fn() -> C>,
}

impl<C: Condition, R: Lock<Accounts>> AtomicZones<C, R> {
    /// Zones in their initial state, in which none is open. With `data`, written data is copied and
    /// can be read back.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(
        zones: impl ExactSizeIterator<Item = ZoneView<C>>,
        limits: ZoneLimits,
        data: bool,
    ) -> Result<Self, TryReserveError> {
        let resources = ZoneResources::<R>::new(zones.len(), limits)?;
        let mut lines = Vec::new();
        lines.try_reserve_exact(zones.len())?;
        lines.extend(zones.enumerate().map(|(number, zone)| {
            let holding = zone.cond.holding();
            assert!(!matches!(holding, Holding::Implicit | Holding::Explicit), "{zone:?} is open");
            if let Some(resources) = &resources {
                let count = |accounts: &mut Accounts, _| {
                    accounts.change(number as u32, Holding::Nothing, holding);
                };
                resources.with(count);
            }
            PaddedZone {
                word: AtomicU64::new(zone.pack()),
                committed: AtomicU64::new(zone.wp),
                erasures: AtomicU64::new(0),
                turn: SleepLock::new(()),
            }
        }));
        Ok(AtomicZones { lines: lines.into_boxed_slice(), resources, data, _cond: PhantomData })
    }

    /// What is counted now; `None` where no limit is set.
    pub fn counts(&self) -> Option<ZoneCounts> {
        self.resources.as_ref().map(ZoneResources::counts)
    }

    /// Replaces the state of a zone by the result of `decide`; returns the old state. Calls
    /// `decide` again whenever another thread was faster.
    ///
    /// # Errors
    /// The refusal of `decide` or of a limit; then nothing has changed.
    ///
    /// # Panics
    /// If there is no such zone: callers have checked their range.
    #[inline]
    pub fn exchange<E: From<ResourceError>>(
        &self,
        zone: u32,
        mut decide: impl FnMut(ZoneView<C>) -> Result<Change<C>, E>,
    ) -> Result<ZoneView<C>, E> {
        let line = &self.lines[zone as usize];
        let mut pauses = PAUSES;
        let mut seen = line.word();
        loop {
            let view = ZoneView::unpack(seen);
            let change = decide(view)?;
            match self.swap(zone, seen, &change, 0)? {
                Ok(()) => return Ok(view),
                Err(_) => {
                    stand_back(&mut pauses);
                    seen = line.word();
                }
            }
        }
    }

    /// Reserves a range for a write: advances the write pointer. The caller copies the data for the
    /// range and drops the reservation, which makes the data readable.
    ///
    /// # Errors
    /// As for [`AtomicZones::exchange`].
    ///
    /// # Panics
    /// As for [`AtomicZones::exchange`].
    #[inline]
    pub fn reserve<E: From<ResourceError>>(
        &self,
        zone: u32,
        mut decide: impl FnMut(ZoneView<C>) -> Result<Change<C>, E>,
    ) -> Result<Reservation<'_>, E> {
        let mut to = 0;
        let before = self.exchange(zone, |view| {
            let change = decide(view)?;
            to = change.to.wp;
            Ok::<_, E>(change)
        })?;
        debug_assert!(to >= before.wp, "a write takes nothing away");
        let line = (self.data && to > before.wp).then(|| &self.lines[zone as usize]);
        Ok(Reservation { line, from: before.wp, to })
    }

    /// Makes a change that discards data or makes more data readable than was written. No other
    /// thread writes to the zone meanwhile, and no copy is in flight. Calls `erase` if there was
    /// data and the zone becomes empty.
    ///
    /// # Errors
    /// As for [`AtomicZones::exchange`]; nothing is erased then.
    ///
    /// # Panics
    /// As for [`AtomicZones::exchange`].
    pub fn replace<E: From<ResourceError>>(
        &self,
        zone: u32,
        mut decide: impl FnMut(ZoneView<C>) -> Result<Change<C>, E>,
        erase: impl FnOnce(),
    ) -> Result<(), E> {
        if !self.data {
            return self.exchange(zone, decide).map(drop);
        }
        let line = &self.lines[zone as usize];
        // A change that is refused or has no effect does not disturb writers.
        let view = ZoneView::unpack(line.word());
        if decide(view)?.to == view {
            return Ok(());
        }
        line.turn.with(|()| {
            let hold = Hold::new(line);
            loop {
                // Relaxed: only an implicit close can change the word now, and it publishes
                // nothing.
                let seen = line.word.load(Ordering::Relaxed);
                let view = ZoneView::unpack(seen);
                let change = decide(view)?;
                if self.swap(zone, seen, &change, HELD)?.is_err() {
                    continue;
                }
                if change.to.cond == C::EMPTY && view.wp != 0 {
                    hold.hide();
                    erase();
                }
                // Release: pairs with the Acquire of readers. It follows the write pointer, which
                // no other thread can move while the zone is held.
                line.committed.store(change.to.wp, Ordering::Release);
                return Ok(());
            }
        })
    }

    /// Tries one exchange, including the counts if the holding changes. `flags` stay in the word.
    ///
    /// # Errors
    /// The outer error if a limit refuses it; the inner error is the present word if it was not
    /// `seen`.
    #[inline]
    fn swap(
        &self,
        zone: u32,
        seen: u64,
        change: &Change<C>,
        flags: u64,
    ) -> Result<Result<(), u64>, ResourceError> {
        let from = ZoneView::<C>::unpack(seen).cond.holding();
        if let Some(resources) = &self.resources
            && (from != change.through || from != change.to.cond.holding())
        {
            return self.swap_counted(resources, zone, seen, change, flags);
        }
        Ok(self.try_word(zone, seen, change.to.pack() | flags))
    }

    #[inline]
    fn try_word(&self, zone: u32, seen: u64, new: u64) -> Result<(), u64> {
        if new == seen {
            return Ok(());
        }
        let word = &self.lines[zone as usize].word;
        // Acquire: pairs with the Release in `Hold`, as in `PaddedZone::word`. The word itself
        // publishes nothing: `committed` publishes the data.
        word.compare_exchange(seen, new, Ordering::Acquire, Ordering::Acquire).map(drop)
    }

    #[inline(never)]
    fn swap_counted(
        &self,
        resources: &ZoneResources<R>,
        zone: u32,
        seen: u64,
        change: &Change<C>,
        flags: u64,
    ) -> Result<Result<(), u64>, ResourceError> {
        let from = ZoneView::<C>::unpack(seen).cond.holding();
        resources.with(|accounts, limits| {
            // Relaxed: the holding changes only under this lock.
            let now = self.lines[zone as usize].word.load(Ordering::Relaxed);
            if now != seen {
                return Ok(Err(now));
            }
            let victim = accounts.permit(limits, from, change.through)?;
            if let Err(now) = self.try_word(zone, seen, change.to.pack() | flags) {
                return Ok(Err(now));
            }
            if let Some(victim) = victim {
                self.close(accounts, victim);
            }
            accounts.change(zone, from, change.to.cond.holding());
            Ok(Ok(()))
        })
    }

    /// Closes an implicitly open zone under the lock of the counts: its holding cannot change, and
    /// its write pointer may move, but never back to the start.
    fn close(&self, accounts: &mut Accounts, victim: u32) {
        let word = &self.lines[victim as usize].word;
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let view = ZoneView::<C>::unpack(seen);
            debug_assert_eq!(view.cond.holding(), Holding::Implicit);
            let to = if view.wp == 0 { C::EMPTY } else { C::CLOSED };
            if view.wp != 0 {
                // This succeeds even if writers move the write pointer concurrently.
                let flip = u64::from(view.cond.bits() ^ to.bits());
                word.fetch_xor(flip, Ordering::Relaxed);
            } else if let Err(now) = word.compare_exchange(
                seen,
                ZoneView { cond: to, wp: 0 }.pack() | seen & HELD,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                seen = now;
                continue;
            }
            accounts.change(victim, Holding::Implicit, to.holding());
            return;
        }
    }

    /// The end of the readable data of a zone, or [`UNREADABLE`]. The data below it has arrived.
    ///
    /// # Panics
    /// As for [`AtomicZones::exchange`].
    #[inline]
    pub fn readable(&self, zone: u32) -> u64 {
        let line = &self.lines[zone as usize];
        match self.data {
            // Acquire: pairs with the Release in `Reservation` and in `replace`, for data read
            // after this.
            true => line.committed.load(Ordering::Acquire),
            false => line.word.load(Ordering::Relaxed) >> WP_SHIFT,
        }
    }

    /// How often the data was discarded. A read calls this before it asks how far it can read, and
    /// again after it has copied. If the number has changed, the zone was empty for a moment in
    /// between.
    ///
    /// # Panics
    /// As for [`AtomicZones::exchange`].
    #[inline]
    pub fn erasures(&self, zone: u32) -> u64 {
        // Acquire: pairs with the Release fence in `Hold::hide`, for data read before this.
        fence(Ordering::Acquire);
        // Acquire: pairs with the Release in `Hold::hide`, for `readable` after this.
        self.lines[zone as usize].erasures.load(Ordering::Acquire)
    }

    /// A consistent state of a zone: all data up to the write pointer can be read.
    ///
    /// # Panics
    /// As for [`AtomicZones::exchange`].
    pub fn look(&self, zone: u32) -> ZoneView<C> {
        let line = &self.lines[zone as usize];
        loop {
            let erasures = line.erasures.load(Ordering::Acquire);
            let view = ZoneView::unpack(line.word());
            if !self.data || view.wp == UNREADABLE {
                return view;
            }
            let arrived = || line.committed.load(Ordering::Acquire) >= view.wp;
            let erased = || line.erasures.load(Ordering::Acquire) != erasures;
            if arrived() {
                return view;
            }
            // Bounded by the copies in flight now: later ones are not waited for.
            wait_until(|| arrived() || erased());
        }
    }
}

#[cfg(test)]
mod example {
    //! The smallest zone that can be opened and filled, for the tests and the models.
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    pub(super) enum Cond {
        Empty,
        Implicit,
        Explicit,
        Closed,
        Full,
    }

    impl Condition for Cond {
        const EMPTY: Cond = Cond::Empty;
        const CLOSED: Cond = Cond::Closed;

        fn bits(self) -> u8 {
            self as u8
        }

        fn from_bits(bits: u8) -> Cond {
            let all = [Cond::Empty, Cond::Implicit, Cond::Explicit, Cond::Closed, Cond::Full];
            all[usize::from(bits)]
        }

        fn holding(self) -> Holding {
            match self {
                Cond::Empty | Cond::Full => Holding::Nothing,
                Cond::Implicit => Holding::Implicit,
                Cond::Explicit => Holding::Explicit,
                Cond::Closed => Holding::Closed,
            }
        }
    }

    /// Blocks in a zone.
    pub(super) const BLOCKS: u64 = 2;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum No {
        Full,
        Limit(ResourceError),
    }

    impl From<ResourceError> for No {
        fn from(refusal: ResourceError) -> No {
            No::Limit(refusal)
        }
    }

    pub(super) type Words = AtomicZones<Cond>;

    pub(super) fn zones(count: u32, open_max: u32, active_max: u32, data: bool) -> Words {
        let empty = (0..count as usize).map(|_| ZoneView { cond: Cond::Empty, wp: 0 });
        let limits = ZoneLimits { open_max, active_max };
        Words::new(empty, limits, data).expect("there is memory")
    }

    /// Appends a block; the last one fills the zone. `copy` gets its position.
    pub(super) fn append(words: &Words, zone: u32, copy: impl FnOnce(u64)) -> Result<u64, No> {
        let mut at = 0;
        let decide = |ZoneView { cond, wp }| {
            if cond == Cond::Full {
                return Err(No::Full);
            }
            at = wp;
            let open = if cond == Cond::Explicit { cond } else { Cond::Implicit };
            let cond = if wp + 1 == BLOCKS { Cond::Full } else { open };
            Ok(Change { through: open.holding(), to: ZoneView { cond, wp: wp + 1 } })
        };
        let reservation = words.reserve(zone, decide)?;
        copy(at);
        drop(reservation);
        Ok(at)
    }

    pub(super) fn write(words: &Words, zone: u32) -> Result<u64, No> {
        append(words, zone, |_| {})
    }

    pub(super) fn become_empty(_: ZoneView<Cond>) -> Result<Change<Cond>, No> {
        Ok(Change { through: Holding::Nothing, to: ZoneView { cond: Cond::Empty, wp: 0 } })
    }

    pub(super) fn reset(words: &Words, zone: u32, erase: impl FnOnce()) {
        assert_eq!(words.replace(zone, become_empty, erase), Ok(()));
    }

    pub(super) fn finish(words: &Words, zone: u32) -> Result<(), No> {
        let decide = |view: ZoneView<Cond>| {
            let through = match view.cond {
                Cond::Full => return Ok(Change { through: Holding::Nothing, to: view }),
                Cond::Empty | Cond::Closed => Holding::Implicit,
                _ => Holding::Nothing,
            };
            Ok(Change { through, to: ZoneView { cond: Cond::Full, wp: BLOCKS } })
        };
        words.replace(zone, decide, || {})
    }

    pub(super) fn open(words: &Words, zone: u32) -> Result<(), No> {
        let decide = |view: ZoneView<Cond>| match view.cond {
            Cond::Full => Err(No::Full),
            _ => {
                let to = ZoneView { cond: Cond::Explicit, ..view };
                Ok(Change { through: Holding::Explicit, to })
            }
        };
        words.exchange(zone, decide).map(drop)
    }

    /// Checks that the counts agree with the words.
    #[cfg(loom)]
    pub(super) fn counts_agree(words: &Words, zone_count: u32) {
        let holdings: Vec<Holding> =
            (0..zone_count).map(|zone| words.look(zone).cond.holding()).collect();
        let count = |wanted: &[Holding]| {
            holdings.iter().filter(|holding| wanted.contains(holding)).count() as u32
        };
        let explicit = count(&[Holding::Explicit]);
        let open = explicit + count(&[Holding::Implicit]);
        let active = open + count(&[Holding::Closed]);
        assert_eq!(words.counts(), Some(ZoneCounts { open, explicit, active }), "{holdings:?}");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::example::*;
    use super::*;

    /// The kernel's null_blk loses resources in this test. 4 threads each fill and reset zones of
    /// their own, with at most one active zone each; the limits are 2 and 6.
    fn writers_leak_nothing(data: bool) {
        let words = zones(16, 2, 6, data);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let words = &words;
                scope.spawn(move || {
                    for cycle in 0..5_000 {
                        let zone = thread * 4 + cycle % 4;
                        assert_eq!(write(words, zone), Ok(0));
                        assert_eq!(write(words, zone), Ok(1));
                        reset(words, zone, || {});
                    }
                });
            }
        });
        assert_eq!(words.counts(), Some(ZoneCounts::default()));
        for zone in 0..6 {
            assert_eq!(write(&words, zone), Ok(0));
        }
        assert_eq!(write(&words, 6), Err(No::Limit(ResourceError::ActiveLimit)));
        assert_eq!(words.counts(), Some(ZoneCounts { open: 2, explicit: 0, active: 6 }));
    }

    #[test]
    fn writers_leak_nothing_without_data() {
        writers_leak_nothing(false);
    }

    #[test]
    fn writers_leak_nothing_with_data() {
        writers_leak_nothing(true);
    }

    #[test]
    fn closed_zone_reopens_at_active_limit() {
        let words = zones(3, 1, 2, false);
        assert_eq!((write(&words, 0), write(&words, 1)), (Ok(0), Ok(0)));
        assert_eq!(words.look(0), ZoneView { cond: Cond::Closed, wp: 1 });
        assert_eq!(write(&words, 2), Err(No::Limit(ResourceError::ActiveLimit)));
        assert_eq!(write(&words, 0), Ok(1));
        assert_eq!(words.look(1).cond, Cond::Closed);
        assert_eq!(open(&words, 1), Ok(()));
        assert_eq!(write(&words, 2), Err(No::Limit(ResourceError::OpenLimit)));
        assert_eq!(finish(&words, 2), Err(No::Limit(ResourceError::OpenLimit)));
        assert_eq!(words.look(2), ZoneView { cond: Cond::Empty, wp: 0 });
    }

    #[test]
    fn initially_closed_zones_count_as_active() {
        let closed = ZoneView { cond: Cond::Closed, wp: 1 };
        let empty = ZoneView { cond: Cond::Empty, wp: 0 };
        let limits = ZoneLimits { open_max: 1, active_max: 2 };
        let words = Words::new([closed, empty, closed].into_iter(), limits, true).unwrap();
        assert_eq!(words.counts(), Some(ZoneCounts { open: 0, explicit: 0, active: 2 }));
        assert_eq!(write(&words, 1), Err(No::Limit(ResourceError::ActiveLimit)));
        assert_eq!(write(&words, 0), Ok(1));
        assert_eq!(write(&words, 1), Ok(0));
    }

    #[test]
    fn write_pointer_of_56_bits_fits() {
        let zone = ZoneView { cond: Cond::Full, wp: UNREADABLE };
        assert_eq!(ZoneView::unpack(zone.pack()), zone);
        assert_eq!(ZoneView::<Cond>::unpack(zone.pack() | HELD), zone);
    }

    #[test]
    fn panic_in_copy_releases_waiting_threads() {
        let words = zones(1, 0, 0, true);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            append(&words, 0, |_| panic!("inside the copy"))
        }));
        assert!(panicked.is_err());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            reset(&words, 0, || panic!("inside the erasure"));
        }));
        assert!(panicked.is_err());
        assert_eq!((write(&words, 0), words.readable(0), words.erasures(0)), (Ok(0), 1, 1));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::example::*;
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;

    /// Explores all interleavings with at most six preemptions.
    fn explore(f: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(6);
        model.check(f);
    }

    /// The contents of the blocks of one zone; 0 means not written.
    type Medium = Arc<[AtomicU32; BLOCKS as usize]>;

    fn medium() -> Medium {
        Arc::new([AtomicU32::new(0), AtomicU32::new(0)])
    }

    fn stamp(medium: &Medium, words: &Words, value: u32) -> Result<u64, No> {
        append(words, 0, |at| medium[at as usize].store(value, Ordering::Relaxed))
    }

    fn erase(medium: &Medium, words: &Words) {
        reset(words, 0, || medium.iter().for_each(|block| block.store(0, Ordering::Relaxed)));
    }

    fn load(medium: &Medium, at: u64) -> u32 {
        medium[at as usize].load(Ordering::Relaxed)
    }

    /// Two concurrent appends get different positions, and both can be read back when they are
    /// done. A concurrent reader finds no gap below the readable end.
    #[test]
    fn appends_do_not_overlap_and_commit_in_order() {
        explore(|| {
            let (words, medium) = (Arc::new(zones(1, 0, 0, true)), medium());
            let other = {
                let (words, medium) = (Arc::clone(&words), Arc::clone(&medium));
                loom::thread::spawn(move || {
                    stamp(&medium, &words, 1).map(|at| (at, words.readable(0)))
                })
            };
            let reader = {
                let (words, medium) = (Arc::clone(&words), Arc::clone(&medium));
                loom::thread::spawn(move || {
                    for at in 0..words.readable(0) {
                        assert_ne!(load(&medium, at), 0, "a gap at {at}");
                    }
                })
            };
            let mine = stamp(&medium, &words, 2).unwrap();
            assert!(words.readable(0) > mine);
            assert_eq!(load(&medium, mine), 2);
            let (theirs, shown) = other.join().unwrap().unwrap();
            assert!(shown > theirs && theirs != mine);
            assert_eq!((load(&medium, theirs), words.readable(0)), (1, 2));
            reader.join().unwrap();
        });
    }

    /// An append comes before a reset and is erased, or after it and is complete.
    #[test]
    fn append_during_reset_is_complete_or_erased() {
        explore(|| {
            let (words, medium) = (Arc::new(zones(1, 1, 1, true)), medium());
            stamp(&medium, &words, 1).unwrap();
            let other = {
                let (words, medium) = (Arc::clone(&words), Arc::clone(&medium));
                loom::thread::spawn(move || erase(&medium, &words))
            };
            let at = stamp(&medium, &words, 2).unwrap();
            other.join().unwrap();
            let found = [load(&medium, 0), load(&medium, 1)];
            let view = words.look(0);
            match at {
                0 => assert_eq!((found, view.cond, view.wp), ([2, 0], Cond::Implicit, 1)),
                _ => assert_eq!((found, view.cond, view.wp), ([0, 0], Cond::Empty, 0)),
            }
            assert_eq!((words.readable(0), words.erasures(0)), (view.wp, 1));
            counts_agree(&words, 1);
        });
    }

    /// A read concurrent with a reset and a rewrite returns the old data or the new, or detects
    /// that the zone was empty meanwhile.
    #[test]
    fn reader_detects_reset_and_rewrite() {
        explore(|| {
            let (words, medium) = (Arc::new(zones(1, 0, 0, true)), medium());
            stamp(&medium, &words, 1).unwrap();
            let other = {
                let (words, medium) = (Arc::clone(&words), Arc::clone(&medium));
                loom::thread::spawn(move || {
                    erase(&medium, &words);
                    stamp(&medium, &words, 2).unwrap();
                })
            };
            let erasures = words.erasures(0);
            if words.readable(0) == 1 {
                let found = load(&medium, 0);
                let wanted = if erasures == 0 { 1 } else { 2 };
                assert!(found == wanted || words.erasures(0) != erasures, "{found}");
            }
            other.join().unwrap();
        });
    }

    /// A finish makes more data readable than was written, after the copies in flight.
    #[test]
    fn append_during_finish_succeeds_or_is_refused() {
        explore(|| {
            let (words, medium) = (Arc::new(zones(1, 1, 1, true)), medium());
            let other = {
                let words = Arc::clone(&words);
                loom::thread::spawn(move || finish(&words, 0))
            };
            match stamp(&medium, &words, 1) {
                Ok(at) => assert!(at == 0 && load(&medium, 0) == 1),
                Err(no) => assert_eq!((no, load(&medium, 0)), (No::Full, 0)),
            }
            assert_eq!(other.join().unwrap(), Ok(()));
            assert_eq!(words.look(0), ZoneView { cond: Cond::Full, wp: BLOCKS });
            assert_eq!(words.readable(0), BLOCKS);
            counts_agree(&words, 1);
        });
    }

    /// A report never shows a write pointer above data that has not arrived.
    #[test]
    fn report_during_append_shows_committed_data_only() {
        explore(|| {
            let (words, medium) = (Arc::new(zones(1, 0, 0, true)), medium());
            let other = {
                let (words, medium) = (Arc::clone(&words), Arc::clone(&medium));
                loom::thread::spawn(move || stamp(&medium, &words, 1).unwrap())
            };
            let view = words.look(0);
            assert!(words.readable(0) >= view.wp);
            assert!(view.wp == 0 || load(&medium, 0) == 1);
            other.join().unwrap();
        });
    }

    /// The null_blk bug: a zone is closed to free its resource while its writer fills it.
    #[test]
    fn victim_filled_concurrently_leaks_no_resource() {
        explore(|| {
            let words = Arc::new(zones(2, 1, 2, false));
            assert_eq!(write(&words, 1), Ok(0));
            let other = Arc::clone(&words);
            let thread = loom::thread::spawn(move || assert_eq!(write(&other, 1), Ok(1)));
            assert_eq!(write(&words, 0), Ok(0));
            thread.join().unwrap();
            assert_eq!(words.look(1).cond, Cond::Full);
            counts_agree(&words, 2);
        });
    }

    #[test]
    fn two_writers_at_open_limit_leak_no_resource() {
        explore(|| {
            let words = Arc::new(zones(2, 1, 2, false));
            let other = Arc::clone(&words);
            let thread = loom::thread::spawn(move || {
                assert_eq!((write(&other, 1), write(&other, 1)), (Ok(0), Ok(1)));
            });
            assert_eq!((write(&words, 0), write(&words, 0)), (Ok(0), Ok(1)));
            thread.join().unwrap();
            assert_eq!(words.counts(), Some(ZoneCounts::default()));
        });
    }

    /// Two threads want the last active resource: one gets it.
    #[test]
    fn two_opens_at_active_limit_leak_no_resource() {
        explore(|| {
            let words = Arc::new(zones(3, 2, 2, false));
            assert_eq!(write(&words, 2), Ok(0));
            let other = Arc::clone(&words);
            let thread = loom::thread::spawn(move || write(&other, 1));
            let answers = [write(&words, 0), thread.join().unwrap()];
            assert!(answers.contains(&Ok(0)), "{answers:?}");
            assert!(answers.contains(&Err(No::Limit(ResourceError::ActiveLimit))), "{answers:?}");
            counts_agree(&words, 3);
        });
    }

    /// Two threads open the same zone: the last resource is enough for both.
    #[test]
    fn two_opens_of_one_zone_at_limit_count_once() {
        explore(|| {
            let words = Arc::new(zones(2, 1, 1, false));
            let other = Arc::clone(&words);
            let thread = loom::thread::spawn(move || write(&other, 0));
            let mut answers = [write(&words, 0), thread.join().unwrap()];
            answers.sort_by_key(|answer| answer.ok());
            assert_eq!(answers, [Ok(0), Ok(1)]);
            counts_agree(&words, 2);
        });
    }

    #[test]
    fn explicit_open_during_write_at_limit_leaks_no_resource() {
        explore(|| {
            let words = Arc::new(zones(3, 1, 0, false));
            assert_eq!(write(&words, 2), Ok(0));
            let other = Arc::clone(&words);
            let thread = loom::thread::spawn(move || open(&other, 1));
            let mine = write(&words, 0);
            assert_eq!(thread.join().unwrap(), Ok(()), "nothing explicit was open before");
            // The write came first and its zone was closed, or it came late and no zone could be
            // closed.
            assert!(matches!(mine, Ok(0) | Err(No::Limit(ResourceError::OpenLimit))), "{mine:?}");
            counts_agree(&words, 3);
        });
    }

    /// A zone that is held for a reset is closed by another thread meanwhile, or has left the list.
    #[test]
    fn victim_reset_concurrently_leaks_no_resource() {
        explore(|| {
            let words = Arc::new(zones(2, 1, 0, true));
            assert_eq!(write(&words, 1), Ok(0));
            let other = Arc::clone(&words);
            let thread = loom::thread::spawn(move || reset(&other, 1, || {}));
            assert_eq!(write(&words, 0), Ok(0));
            thread.join().unwrap();
            assert_eq!(words.counts(), Some(ZoneCounts { open: 1, explicit: 0, active: 1 }));
            counts_agree(&words, 2);
        });
    }
}
