//! A lock per zone, and how a zone is opened when no token is free.
//!
//! A lock of each zone's own protects its condition and write pointer. Each zone also publishes a
//! word that says how far it can be read ([`UNREADABLE`] for not at all). The word is stored under
//! the lock after each operation on the zone, and may be read without the lock.
//!
//! A thread takes rank ZONE and then RESOURCES, and never holds two zones at once. A thread that
//! needs room unlocks its own zone, locks the victim, closes it and unlocks it. It returns with the
//! victim's token *in transit* ([`crate::tokens`]), and then examines its own zone again.
//!
//! | writer of zone A, which is closed | writer of zone B, implicitly open, the oldest |
//! | --- | --- |
//! | locks A, finds no token, unlocks A | |
//! | sees that B is the oldest | locks B, fills it: B holds nothing, the token is free |
//! | locks B: no longer implicitly open, unlocks B | unlocks B |
//! | locks A again, takes the free token | |
//!
//! A reader copies data without the lock and then loads the word again. A thread that removes data
//! first publishes so ([`Claim::show`]), so that a concurrent reader notices:
//!
//! | reader | reset |
//! | --- | --- |
//! | loads the word: data up to E | locks |
//! | copies data below E | publishes the zone's start: no data any more; erases |
//! | loads the word, which is below E: discards what it copied from there on | unlocks |
//!
//! A reader concurrent with a reset *and* a rewrite up to E does not notice: the word is E again,
//! and the copy may be a mixture. [`blockyard_sync::atomic_zones`] counts the resets and has no
//! such gap.
// This word is the baseline's own. It was a primitive of the sync crate, with a model, until the
// zone words replaced it.
#![allow(clippy::disallowed_types)]

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread::yield_now;

use blockyard_core::zone::Zone;
use blockyard_sync::lock::Lock;
use blockyard_sync::zone_resources::{Holding, ZoneCounts, ZoneLimits};

use crate::close_implicitly;
use crate::tokens::{Grant, Tokens, TokensLock, ZoneTokens};

/// The word of a zone of which nothing can be read.
pub const UNREADABLE: u64 = u64::MAX;

/// The result of an attempt at a zone.
#[derive(Debug)]
pub enum Attempt<R> {
    /// The attempt succeeded, with this result.
    Done(R),
    /// There was no token ([`Grant::MakeRoom`]), and nothing has changed.
    MakeRoom,
}

/// A zone on cache lines of its own, so that writers of neighbours do not slow each other down. It
/// takes a pair of lines, as [`blockyard_sync::pad::Padded`] does: processors fetch the second line
/// with the first.
#[derive(Debug)]
#[repr(align(128))]
struct PaddedZoneLock<L> {
    lock: L,
    /// The zone's word, stored under the lock.
    word: AtomicU64,
}

/// The position up to which data can be read; [`UNREADABLE`] for not at all.
#[inline]
fn word_of(zone: &Zone) -> u64 {
    zone.readable_end().map_or(UNREADABLE, |end| end.0)
}

impl<L> PaddedZoneLock<L> {
    /// Calls `f` with the zone under its lock, and publishes the zone's word afterwards.
    #[inline]
    fn work<R>(&self, f: impl FnOnce(&mut Zone) -> R) -> R
    where
        L: Lock<Zone>,
    {
        self.lock.with(|zone| {
            let answer = f(zone);
            // Release: pairs with the Acquire in `ZoneTable::word`: a thread that sees this word
            // sees the data that were written before it.
            self.word.store(word_of(zone), Ordering::Release);
            answer
        })
    }
}

/// The zones of a device: each protected by a lock of type `L`, their tokens by one of type `R`.
#[derive(Debug)]
pub struct ZoneTable<L, R = TokensLock> {
    zones: Box<[PaddedZoneLock<L>]>,
    tokens: Option<ZoneTokens<R>>,
}

/// The right to change the resources that one zone holds, during one [`ZoneTable::change`].
#[derive(Debug)]
pub struct Claim<'a, R: Lock<Tokens> = TokensLock> {
    tokens: Option<&'a ZoneTokens<R>>,
    word: &'a AtomicU64,
    zone: u32,
    in_transit: bool,
}

impl<R: Lock<Tokens>> Claim<'_, R> {
    /// Publishes a word before the zone's own is published at the end. Called before data are
    /// removed that readers may be copying.
    #[inline]
    pub fn show(&self, word: u64) {
        self.word.store(word, Ordering::Relaxed);
        // Release: pairs with the Acquire fence in `ZoneTable::word`: a reader that has seen any of
        // what follows sees this word, or a later one.
        fence(Ordering::Release);
    }

    /// Takes the tokens that the zone needs to hold `to` instead of `from`. After [`Grant::Yes`]
    /// the caller must change the zone accordingly.
    #[inline]
    pub fn take(&mut self, from: Holding, to: Holding) -> Grant {
        match self.tokens {
            Some(tokens) if from != to => tokens.take(self.zone, from, to, &mut self.in_transit),
            _ => Grant::Yes,
        }
    }

    /// Changes to a holding that needs no token beyond those of `from`.
    #[inline]
    pub fn settle(&mut self, from: Holding, to: Holding) {
        if let Some(tokens) = self.tokens
            && from != to
        {
            tokens.settle(self.zone, from, to);
        }
    }
}

impl<R: Lock<Tokens>> Drop for Claim<'_, R> {
    #[inline]
    fn drop(&mut self) {
        if self.in_transit {
            self.tokens.expect("a token comes from the tokens").return_open();
        }
    }
}

impl<L: Lock<Zone>, R: Lock<Tokens>> ZoneTable<L, R> {
    /// A table of zones, none of which is open or closed.
    ///
    /// # Errors
    /// If there is no memory for the table.
    pub fn new(
        zones: impl ExactSizeIterator<Item = Zone>,
        limits: ZoneLimits,
    ) -> Result<Self, TryReserveError> {
        let tokens = ZoneTokens::<R>::new(zones.len(), limits)?;
        let mut lines = Vec::new();
        lines.try_reserve_exact(zones.len())?;
        lines.extend(zones.map(|zone| {
            assert_eq!(zone.holding(), Holding::Nothing, "no zone is open at first");
            PaddedZoneLock { word: AtomicU64::new(word_of(&zone)), lock: L::new(zone) }
        }));
        Ok(ZoneTable { zones: lines.into_boxed_slice(), tokens })
    }

    /// The counts now; `None` where no limit is set.
    pub fn counts(&self) -> Option<ZoneCounts> {
        self.tokens.as_ref().map(ZoneTokens::counts)
    }

    /// Calls `f` with a zone under its lock.
    ///
    /// # Panics
    /// If there is no such zone: callers have checked their range.
    #[inline]
    pub fn look<T>(&self, zone: u32, f: impl FnOnce(&Zone) -> T) -> T {
        self.zones[zone as usize].lock.with(|zone| f(zone))
    }

    /// The word that a zone publishes, loaded without the lock. Loaded again after a copy, it tells
    /// whether data were removed meanwhile.
    ///
    /// # Panics
    /// If there is no such zone: callers have checked their range.
    #[inline]
    pub fn word(&self, zone: u32) -> u64 {
        // Acquire: pairs with the Release fence in `Claim::show`, for data read before this.
        fence(Ordering::Acquire);
        // Acquire: pairs with the Release in `PaddedZoneLock::work`, for data read after this.
        self.zones[zone as usize].word.load(Ordering::Acquire)
    }

    /// Calls `f` with a zone under its lock. `f` changes the zone's holding through the claim only.
    /// When the claim says [`Grant::MakeRoom`], `f` changes nothing and returns
    /// [`Attempt::MakeRoom`]. Then `f` is called again once there is room, on the zone in its state
    /// at that time.
    ///
    /// # Panics
    /// If there is no such zone: callers have checked their range.
    #[inline]
    pub fn change<T>(
        &self,
        zone: u32,
        mut f: impl FnMut(&mut Zone, &mut Claim<'_, R>) -> Attempt<T>,
    ) -> T {
        let line = &self.zones[zone as usize];
        let (tokens, word) = (self.tokens.as_ref(), &line.word);
        let mut claim = Claim { tokens, word, zone, in_transit: false };
        loop {
            match line.work(|zone| f(zone, &mut claim)) {
                Attempt::Done(answer) => return answer,
                Attempt::MakeRoom => self.make_room(&mut claim),
            }
        }
    }

    /// Closes the oldest implicitly open zone, whose token is in transit in the claim afterwards.
    /// Returns without a token if another thread was faster: then there is room, or soon will be.
    #[cold]
    fn make_room(&self, claim: &mut Claim<'_, R>) {
        let tokens = claim.tokens.expect("without limits there is room");
        let Some(victim) = tokens.oldest() else {
            // All tokens except those of explicitly open zones are in transit. Their owners will
            // spend or return them without waiting for this thread.
            yield_now();
            return;
        };
        claim.in_transit = self.zones[victim as usize].work(|zone| {
            if zone.holding() != Holding::Implicit {
                return false;
            }
            close_implicitly(zone);
            tokens.close_victim(victim, zone.holding());
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_core::Sector;
    use blockyard_core::zone::{ZoneCond, holding_of};
    use blockyard_sync::rank::ranks;
    use blockyard_sync::sleep_lock::SleepLock;
    use blockyard_sync::spin_lock::SpinLock;
    use blockyard_sync::zone_resources::ResourceError;

    /// Zones of two sectors.
    fn zones(count: u32) -> impl ExactSizeIterator<Item = Zone> {
        (0..count).map(|number| Zone::sequential(Sector(u64::from(number) * 2), 2, 2))
    }

    /// Writes one sector; the second write fills the zone.
    fn write<L: Lock<Zone>>(table: &ZoneTable<L>, zone: u32) -> Grant {
        table.change(zone, |zone, claim| {
            let to = zone.step_append(1).unwrap();
            match claim.take(zone.holding(), holding_of(to)) {
                Grant::Yes => zone.enter(to),
                Grant::MakeRoom => return Attempt::MakeRoom,
                refused => return Attempt::Done(refused),
            }
            zone.advance(1);
            if zone.cond() == ZoneCond::Full {
                claim.settle(holding_of(to), Holding::Nothing);
            }
            Attempt::Done(Grant::Yes)
        })
    }

    fn reset<L: Lock<Zone>>(table: &ZoneTable<L>, zone: u32) {
        table.change(zone, |zone, claim| {
            claim.settle(zone.holding(), Holding::Nothing);
            zone.enter(ZoneCond::Empty);
            Attempt::Done(())
        });
    }

    /// The kernel's null_blk loses resources in this test: 4 threads each fill and reset zones of
    /// their own, with at most one active zone each and limits 2 and 6.
    fn writers_leak_nothing<L: Lock<Zone>>() {
        let limits = ZoneLimits { open_max: 2, active_max: 6 };
        let table = ZoneTable::<L>::new(zones(16), limits).expect("there is memory");
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
        assert_eq!(write(&table, 6), Grant::No(ResourceError::ActiveLimit));
        assert_eq!(table.counts(), Some(ZoneCounts { open: 2, explicit: 0, active: 6 }));
    }

    #[test]
    fn spinning_writers_leak_nothing() {
        writers_leak_nothing::<SpinLock<Zone, { ranks::ZONE }>>();
    }

    #[test]
    fn sleeping_writers_leak_nothing() {
        writers_leak_nothing::<SleepLock<Zone, { ranks::ZONE }>>();
    }

    #[test]
    fn at_the_active_limit_a_closed_zone_opens_again() {
        let limits = ZoneLimits { open_max: 1, active_max: 2 };
        let table = ZoneTable::<SpinLock<Zone, { ranks::ZONE }>>::new(zones(3), limits).unwrap();
        assert_eq!(write(&table, 0), Grant::Yes);
        assert_eq!(write(&table, 1), Grant::Yes);
        assert_eq!(table.look(0, Zone::holding), Holding::Closed);
        assert_eq!(write(&table, 2), Grant::No(ResourceError::ActiveLimit));
        assert_eq!(write(&table, 0), Grant::Yes);
        assert_eq!(table.look(1, Zone::holding), Holding::Closed);
    }
}
