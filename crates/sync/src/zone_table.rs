//! Room: a lock per zone, and the way to an open zone when all tokens are out.
//!
//! Protects   the state of each zone: condition and write pointer, and its part in the accounts.
//! Why        writers of different zones need not wait for one another, and readers for nobody.
//! States     those of the zone; see [`crate::zone_resources`] for the tokens. Beside its lock a
//!            zone shows a word ([`Openable::word`]), which is stored under the lock whenever the
//!            zone has been worked on, and read without it.
//! Order      rank ZONE, and then RESOURCES. Never two zones at once: a thread that needs room
//!            lets go of its own zone, locks the victim, closes it, lets go of that too and comes
//!            back with the victim's token *in transit*, then looks at its own zone afresh.
//! Common     a write takes its zone's lock, and the accounts only when a limit is set and a
//!            holding changes; a read loads its zone's word.
//! Cost       the lock's, 4 ns spinning, 9 ns sleeping; a load for a read, of a line that stays
//!            shared until somebody writes to the zone.
//! Before     one lock for all zones, which reads took too.
//!
//! | writer of zone A, which is closed | writer of zone B, implicitly open, the oldest |
//! | --- | --- |
//! | locks A, finds no token, unlocks A | |
//! | sees that B is the oldest | locks B, fills it: B holds nothing, the token is free |
//! | locks B: no longer implicitly open, unlocks B | unlocks B |
//! | locks A again, takes the free token | |
//!
//! A reader copies data without the lock and then looks at the word again. Who is going to take
//! data away shows so first ([`Claim::show`]), so that a reader who met the taking finds out:
//!
//! | reader | reset |
//! | --- | --- |
//! | loads the word: data up to E | locks |
//! | copies data below E | shows the start: no data any more; erases |
//! | loads the word: below E, so what was copied from there on does not count | unlocks |
//!
//! A reader who meets a reset *and* a rewrite up to E does not find out: the word is E again, and
//! what was copied may be a mixture. [`crate::zone_words`] counts the resets and has no such gap;
//! this room is there to compare with.

use std::collections::TryReserveError;
use std::marker::PhantomData;

use crate::atomics::{AtomicU64, Ordering, fence, yield_now};
use crate::lock::Lock;
use crate::zone_resources::{
    Accounts, AccountsLock, Grant, Holding, ZoneCounts, ZoneLimits, ZoneResources,
};

/// What the table has to know of a zone.
pub trait Openable: Send {
    /// What it holds now.
    fn holding(&self) -> Holding;

    /// Closes it, implicitly open as it is, so that another can be opened.
    fn close_implicitly(&mut self);

    /// What of its state those may see who do not take its lock.
    fn word(&self) -> u64;
}

/// How an attempt at a zone ended.
#[derive(Debug)]
pub enum Attempt<R> {
    /// With this.
    Done(R),
    /// There was no token ([`Grant::MakeRoom`]), and nothing has been changed.
    MakeRoom,
}

/// A zone on cache lines of its own, so that writers of neighbours do not slow each other down.
/// As with [`crate::pad::Padded`], a pair of lines: processors fetch the second with the first.
#[derive(Debug)]
#[repr(align(128))]
struct Line<L> {
    lock: L,
    /// The zone's word, stored under the lock.
    word: AtomicU64,
}

impl<L> Line<L> {
    /// Works on the zone under its lock, and shows its word afterwards.
    #[inline]
    fn work<Z: Openable, R>(&self, f: impl FnOnce(&mut Z) -> R) -> R
    where
        L: Lock<Z>,
    {
        self.lock.with(|zone| {
            let answer = f(zone);
            // Release: pairs with the Acquire in `ZoneTable::word`: who sees this word sees the
            // data that were written before it.
            self.word.store(zone.word(), Ordering::Release);
            answer
        })
    }
}

/// The zones of a device: each behind a lock of the kind `L`, their accounts behind one of `R`.
#[derive(Debug)]
pub struct ZoneTable<Z, L, R = AccountsLock> {
    zones: Box<[Line<L>]>,
    resources: Option<ZoneResources<R>>,
    _zone: PhantomData<fn() -> Z>,
}

/// The right to change what one zone holds, during one [`ZoneTable::change`].
#[derive(Debug)]
pub struct Claim<'a, R: Lock<Accounts> = AccountsLock> {
    resources: Option<&'a ZoneResources<R>>,
    word: &'a AtomicU64,
    zone: u32,
    in_transit: bool,
}

impl<R: Lock<Accounts>> Claim<'_, R> {
    /// Shows a word before the zone's own is shown at the end: done before data are taken away
    /// that readers may be copying.
    #[inline]
    pub fn show(&self, word: u64) {
        self.word.store(word, Ordering::Relaxed);
        // Release: pairs with the Acquire fence in `ZoneTable::word`: a reader that has met any
        // of what follows sees this word, or a later one.
        fence(Ordering::Release);
    }

    /// Takes what the zone needs to hold `to` instead of `from`. After [`Grant::Yes`] the zone
    /// must be changed accordingly.
    #[inline]
    pub fn take(&mut self, from: Holding, to: Holding) -> Grant {
        match self.resources {
            Some(resources) if from != to => {
                resources.take(self.zone, from, to, &mut self.in_transit)
            }
            _ => Grant::Yes,
        }
    }

    /// Changes to a holding that needs no token that `from` did not have.
    #[inline]
    pub fn settle(&mut self, from: Holding, to: Holding) {
        if let Some(resources) = self.resources
            && from != to
        {
            resources.settle(self.zone, from, to);
        }
    }
}

impl<R: Lock<Accounts>> Drop for Claim<'_, R> {
    #[inline]
    fn drop(&mut self) {
        if self.in_transit {
            self.resources.expect("tokens come from accounts").return_open();
        }
    }
}

impl<Z: Openable, L: Lock<Z>, R: Lock<Accounts>> ZoneTable<Z, L, R> {
    /// A table of zones. They may hold what they like already, but no more than the limits allow.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(
        zones: impl ExactSizeIterator<Item = Z>,
        limits: ZoneLimits,
    ) -> Result<Self, TryReserveError> {
        let resources = ZoneResources::<R>::new(zones.len(), limits)?;
        let mut lines = Vec::new();
        lines.try_reserve_exact(zones.len())?;
        let line = |(number, zone): (usize, Z)| {
            if let Some(resources) = &resources {
                let taken =
                    resources.take(number as u32, Holding::Nothing, zone.holding(), &mut false);
                assert_eq!(taken, Grant::Yes, "the first state is within the limits");
            }
            let word = AtomicU64::new(zone.word());
            Line { lock: L::new(zone), word }
        };
        lines.extend(zones.enumerate().map(line));
        Ok(ZoneTable { zones: lines.into_boxed_slice(), resources, _zone: PhantomData })
    }

    /// How many zones there are.
    pub fn len(&self) -> usize {
        self.zones.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.zones.is_empty()
    }

    /// What is counted now; `None` where no limit is set.
    pub fn counts(&self) -> Option<ZoneCounts> {
        self.resources.as_ref().map(ZoneResources::counts)
    }

    /// Looks at a zone under its lock.
    ///
    /// # Panics
    /// If there is no such zone: callers have checked their range.
    #[inline]
    pub fn look<T>(&self, zone: u32, f: impl FnOnce(&Z) -> T) -> T {
        self.zones[zone as usize].lock.with(|zone| f(zone))
    }

    /// The word that a zone shows, without its lock. Asked again after data were read, it tells
    /// whether they were taken away meanwhile.
    ///
    /// # Panics
    /// If there is no such zone: callers have checked their range.
    #[inline]
    pub fn word(&self, zone: u32) -> u64 {
        // Acquire: pairs with the Release fence in `Claim::show`, for data read before this.
        fence(Ordering::Acquire);
        // Acquire: pairs with the Release in `Line::work`, for data read after this.
        self.zones[zone as usize].word.load(Ordering::Acquire)
    }

    /// Works on a zone under its lock. `f` changes what the zone holds through the claim only; when
    /// the claim says [`Grant::MakeRoom`] it changes nothing and answers [`Attempt::MakeRoom`], and
    /// is called again, on whatever the zone has become, once there is room.
    ///
    /// # Panics
    /// If there is no such zone: callers have checked their range.
    #[inline]
    pub fn change<T>(
        &self,
        zone: u32,
        mut f: impl FnMut(&mut Z, &mut Claim<'_, R>) -> Attempt<T>,
    ) -> T {
        let line = &self.zones[zone as usize];
        let (resources, word) = (self.resources.as_ref(), &line.word);
        let mut claim = Claim { resources, word, zone, in_transit: false };
        loop {
            match line.work(|zone| f(zone, &mut claim)) {
                Attempt::Done(answer) => return answer,
                Attempt::MakeRoom => self.make_room(&mut claim),
            }
        }
    }

    /// Closes the oldest implicitly open zone; its token is in transit in the claim then. Comes
    /// back without one if another thread was faster: then there is room, or soon will be.
    #[cold]
    fn make_room(&self, claim: &mut Claim<'_, R>) {
        let resources = claim.resources.expect("without limits there is room");
        let Some(victim) = resources.oldest() else {
            // All tokens but the explicitly open zones' are in transit; their owners will spend
            // them or give them back without waiting for this thread.
            yield_now();
            return;
        };
        claim.in_transit = self.zones[victim as usize].work(|zone| {
            if zone.holding() != Holding::Implicit {
                return false;
            }
            zone.close_implicitly();
            resources.close_victim(victim, zone.holding());
            true
        });
    }
}

#[cfg(test)]
mod example {
    //! The smallest zone that can be opened and filled: what the tests and the model work on.
    use super::*;

    #[derive(Debug)]
    pub(super) struct Small {
        pub(super) holding: Holding,
        pub(super) written: u32,
    }

    impl Openable for Small {
        fn holding(&self) -> Holding {
            self.holding
        }

        fn close_implicitly(&mut self) {
            assert_eq!(self.holding, Holding::Implicit);
            self.holding = if self.written == 0 { Holding::Nothing } else { Holding::Closed };
        }

        fn word(&self) -> u64 {
            self.written.into()
        }
    }

    pub(super) fn zones(count: u32) -> impl ExactSizeIterator<Item = Small> {
        (0..count).map(|_| Small { holding: Holding::Nothing, written: 0 })
    }

    /// Writes one block; the second fills the zone.
    pub(super) fn write<L: Lock<Small>>(table: &ZoneTable<Small, L>, zone: u32) -> Grant {
        table.change(zone, |zone, claim| {
            let to = match zone.holding {
                Holding::Explicit => Holding::Explicit,
                _ => Holding::Implicit,
            };
            match claim.take(zone.holding, to) {
                Grant::Yes => {}
                Grant::MakeRoom => return Attempt::MakeRoom,
                limit => return Attempt::Done(limit),
            }
            zone.holding = to;
            zone.written += 1;
            if zone.written == 2 {
                claim.settle(zone.holding, Holding::Nothing);
                zone.holding = Holding::Nothing;
            }
            Attempt::Done(Grant::Yes)
        })
    }

    pub(super) fn reset<L: Lock<Small>>(table: &ZoneTable<Small, L>, zone: u32) {
        table.change(zone, |zone, claim| {
            claim.settle(zone.holding, Holding::Nothing);
            zone.holding = Holding::Nothing;
            zone.written = 0;
            Attempt::Done(())
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::example::{Small, reset, write, zones};
    use super::*;
    use crate::rank::ranks;
    use crate::sleep_lock::SleepLock;
    use crate::spin_lock::SpinLock;

    /// The kernel's null_blk loses resources in this test: 4 threads, each fills and resets zones
    /// of its own, at most one active zone each, limits 2 and 6.
    fn writers_leak_nothing<L: Lock<Small>>() {
        let limits = ZoneLimits { open_max: 2, active_max: 6 };
        let table = ZoneTable::<Small, L>::new(zones(16), limits).expect("there is memory");
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let table = &table;
                scope.spawn(move || {
                    for cycle in 0..5_000 {
                        let zone = thread * 4 + cycle % 4;
                        assert_eq!(write(table, zone), Grant::Yes);
                        assert_eq!(write(table, zone), Grant::Yes);
                        reset(table, zone);
                    }
                });
            }
        });
        assert_eq!(table.counts(), Some(ZoneCounts::default()));
        for zone in 0..6 {
            assert_eq!(write(&table, zone), Grant::Yes);
        }
        assert_eq!(write(&table, 6), Grant::ActiveLimit);
        assert_eq!(table.counts(), Some(ZoneCounts { open: 2, explicit: 0, active: 6 }));
    }

    #[test]
    fn spinning_writers_leak_nothing() {
        writers_leak_nothing::<SpinLock<Small, { ranks::ZONE }>>();
    }

    #[test]
    fn sleeping_writers_leak_nothing() {
        writers_leak_nothing::<SleepLock<Small, { ranks::ZONE }>>();
    }

    #[test]
    fn at_the_active_limit_a_closed_zone_opens_again() {
        let limits = ZoneLimits { open_max: 1, active_max: 2 };
        let table =
            ZoneTable::<Small, SpinLock<Small, { ranks::ZONE }>>::new(zones(3), limits).unwrap();
        assert_eq!(write(&table, 0), Grant::Yes);
        assert_eq!(write(&table, 1), Grant::Yes);
        assert_eq!(table.look(0, Openable::holding), Holding::Closed);
        assert_eq!(write(&table, 2), Grant::ActiveLimit);
        assert_eq!(write(&table, 0), Grant::Yes);
        assert_eq!(table.look(1, Openable::holding), Holding::Closed);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::example::{Small, reset, write, zones};
    use super::*;
    use crate::rank::ranks;
    use crate::sleep_lock::SleepLock;
    use loom::sync::Arc;

    type Table = ZoneTable<Small, SleepLock<Small, { ranks::ZONE }>>;

    /// Explores all interleavings with at most five preemptions.
    fn explore(f: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(5);
        model.check(f);
    }

    #[test]
    fn two_writers_with_one_token_leak_nothing() {
        explore(|| {
            let limits = ZoneLimits { open_max: 1, active_max: 2 };
            let table = Arc::new(Table::new(zones(2), limits).unwrap());
            let other = Arc::clone(&table);
            let thread = loom::thread::spawn(move || {
                assert_eq!(write(&other, 1), Grant::Yes);
                assert_eq!(write(&other, 1), Grant::Yes);
            });
            assert_eq!(write(&table, 0), Grant::Yes);
            assert_eq!(write(&table, 0), Grant::Yes);
            thread.join().unwrap();
            assert_eq!(table.counts(), Some(ZoneCounts::default()));
        });
    }

    #[test]
    fn a_victim_that_is_reset_meanwhile_leaks_nothing() {
        explore(|| {
            let limits = ZoneLimits { open_max: 1, active_max: 0 };
            let table = Arc::new(Table::new(zones(2), limits).unwrap());
            assert_eq!(write(&table, 1), Grant::Yes);
            let other = Arc::clone(&table);
            let thread = loom::thread::spawn(move || reset(&other, 1));
            assert_eq!(write(&table, 0), Grant::Yes);
            thread.join().unwrap();
            let counts = ZoneCounts { open: 1, explicit: 0, active: 1 };
            assert_eq!(table.counts(), Some(counts));
        });
    }

    #[test]
    fn a_token_that_is_not_needed_any_more_goes_back() {
        explore(|| {
            let limits = ZoneLimits { open_max: 2, active_max: 0 };
            let table = Arc::new(Table::new(zones(3), limits).unwrap());
            assert_eq!(write(&table, 1), Grant::Yes);
            assert_eq!(write(&table, 2), Grant::Yes);
            // Both writers need room for zone 0, each closes a victim, and one opens the zone.
            let other = Arc::clone(&table);
            let thread = loom::thread::spawn(move || assert_eq!(write(&other, 0), Grant::Yes));
            assert_eq!(write(&table, 0), Grant::Yes);
            thread.join().unwrap();
            let counts = table.counts().unwrap();
            assert_eq!((counts.explicit, counts.active), (0, 2));
            let holdings = [1, 2].map(|zone| table.look(zone, Openable::holding));
            let open = holdings.iter().filter(|&&holding| holding == Holding::Implicit).count();
            assert_eq!(counts.open, open as u32);
        });
    }

    /// Data that a reset takes away are not read as data by whoever looks at the word again.
    #[test]
    fn a_reader_beside_a_reset_finds_out() {
        use loom::sync::atomic::{AtomicU32, Ordering};
        explore(|| {
            let table = Arc::new(Table::new(zones(1), ZoneLimits::default()).unwrap());
            let data = Arc::new(AtomicU32::new(0));
            table.change(0, |zone, _| {
                data.store(7, Ordering::Relaxed);
                zone.written = 1;
                Attempt::Done(())
            });
            let (other, medium) = (Arc::clone(&table), Arc::clone(&data));
            let thread = loom::thread::spawn(move || {
                other.change(0, |zone, claim| {
                    claim.show(0);
                    medium.store(0, Ordering::Relaxed);
                    zone.written = 0;
                    Attempt::Done(())
                });
            });
            if table.word(0) == 1 {
                let read = data.load(Ordering::Relaxed);
                assert!(read == 7 || table.word(0) == 0);
            }
            thread.join().unwrap();
        });
    }

    /// Who sees the word of a write sees its data.
    #[test]
    fn a_reader_beside_a_write_sees_what_it_is_shown() {
        use loom::sync::atomic::{AtomicU32, Ordering};
        explore(|| {
            let table = Arc::new(Table::new(zones(1), ZoneLimits::default()).unwrap());
            let data = Arc::new(AtomicU32::new(0));
            let (other, medium) = (Arc::clone(&table), Arc::clone(&data));
            let thread = loom::thread::spawn(move || {
                other.change(0, |zone, _| {
                    medium.store(7, Ordering::Relaxed);
                    zone.written = 1;
                    Attempt::Done(())
                });
            });
            let read = (table.word(0), data.load(Ordering::Relaxed));
            assert!(read.0 == 0 || read.1 == 7, "{read:?}");
            thread.join().unwrap();
        });
    }

    /// Opens a zone by command.
    fn open(table: &Table, zone: u32) -> Grant {
        table.change(zone, |zone, claim| {
            match claim.take(zone.holding, Holding::Explicit) {
                Grant::Yes => zone.holding = Holding::Explicit,
                Grant::MakeRoom => return Attempt::MakeRoom,
                limit => return Attempt::Done(limit),
            }
            Attempt::Done(Grant::Yes)
        })
    }

    /// Two want the only token, which is in transit at times: whoever finds no zone to close yields
    /// until the other has spent it.
    #[test]
    fn an_explicit_open_takes_no_token_in_transit() {
        explore(|| {
            let limits = ZoneLimits { open_max: 1, active_max: 0 };
            let table = Arc::new(Table::new(zones(3), limits).unwrap());
            assert_eq!(write(&table, 2), Grant::Yes);
            let other = Arc::clone(&table);
            let thread = loom::thread::spawn(move || open(&other, 1));
            let mine = write(&table, 0);
            assert_eq!(thread.join().unwrap(), Grant::Yes, "nothing explicit was open before");
            // The write came first and gave way, or came late and found nothing that does.
            assert!(matches!(mine, Grant::Yes | Grant::OpenLimit), "{mine:?}");
            let counts = table.counts().unwrap();
            assert_eq!((counts.open, counts.explicit), (1, 1));
        });
    }

    /// Two make room for a zone each, and only one more may be active: the other's token goes back.
    #[test]
    fn a_token_in_transit_at_the_active_limit_goes_back() {
        explore(|| {
            let limits = ZoneLimits { open_max: 1, active_max: 2 };
            let table = Arc::new(Table::new(zones(3), limits).unwrap());
            assert_eq!(write(&table, 2), Grant::Yes);
            let other = Arc::clone(&table);
            let thread = loom::thread::spawn(move || write(&other, 1));
            let answers = [write(&table, 0), thread.join().unwrap()];
            let granted = answers.iter().filter(|&&answer| answer == Grant::Yes).count();
            assert_eq!(granted, 1, "{answers:?}");
            assert!(answers.contains(&Grant::ActiveLimit), "{answers:?}");
            let counts = table.counts().unwrap();
            let open =
                (0..3).filter(|&zone| table.look(zone, Openable::holding) == Holding::Implicit);
            assert_eq!(counts.open, open.count() as u32);
            assert_eq!(counts.active, 2);
        });
    }
}
