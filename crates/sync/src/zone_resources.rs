//! Room: open and active zones.
//!
//! Protects   how many zones are open and active, and which of them are implicitly open, oldest
//!            first.
//! Why        a device allows only so many; when a zone has to be opened and none is free, the
//!            oldest implicitly open zone gives way.
//! States     a zone is counted by its [`Holding`]. Besides, open tokens may be *in transit*:
//!            taken from a closed victim, still counted as open, owned by the thread that closed
//!            it. `open = implicit + explicit + in transit`, `active` counts every zone that is
//!            not `Nothing`.
//! Order      rank RESOURCES, under a zone's lock; no zone's lock is ever waited for under it.
//! Common     never touched where no limit is set; else once for each change of a holding, not
//!            for each write.
//! Cost       about 5 ns for a change.
//! Before     one lock, always taken.
//!
//! A holding changes under its zone's lock only, together with the zone, so both always agree.
//! That is what keeps resources from leaking: the kernel's null_blk closes a victim without the
//! victim's lock, and loses the token of a zone that is filled at that moment.

use std::collections::TryReserveError;

use crate::lock::Lock;
use crate::rank::ranks;

/// The lock around the accounts; a model has enough to do with the zones' own.
#[cfg(loom)]
pub type AccountsLock = crate::sleep_lock::SleepLock<Accounts, { ranks::RESOURCES }>;
/// The lock around the accounts.
#[cfg(not(loom))]
pub type AccountsLock = crate::spin_lock::SpinLock<Accounts, { ranks::RESOURCES }>;

/// What a zone holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Neither open nor active.
    Nothing,
    /// Active, not open.
    Closed,
    /// Active and open, may be closed to make room.
    Implicit,
    /// Active and open until it is closed by command.
    Explicit,
}

impl Holding {
    #[inline]
    fn is_active(self) -> bool {
        self != Holding::Nothing
    }

    #[inline]
    fn is_open(self) -> bool {
        matches!(self, Holding::Implicit | Holding::Explicit)
    }
}

/// How many zones may be open and active; 0 means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneLimits {
    /// Open zones.
    pub open_max: u32,
    /// Active zones.
    pub active_max: u32,
}

/// The answer to a zone that wants to hold more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// It does now.
    Yes,
    /// Not now: let go of the zone, make room, look again.
    MakeRoom,
    /// All open zones are explicitly open: nothing gives way.
    OpenLimit,
    /// Too many zones are active.
    ActiveLimit,
}

/// Why a zone may not hold more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// All open zones are explicitly open: nothing gives way.
    OpenLimit,
    /// Too many zones are active.
    ActiveLimit,
}

/// Zones that are counted now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneCounts {
    /// Open zones, tokens in transit included.
    pub open: u32,
    /// Explicitly open zones among them.
    pub explicit: u32,
    /// Active zones.
    pub active: u32,
}

/// No zone, at either end of the list.
const NONE: u32 = u32::MAX;

/// Neighbours of an implicitly open zone in the order of opening.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// What is counted, and the order of opening: what the lock of [`ZoneResources`] is around.
#[derive(Debug)]
pub struct Accounts {
    counts: ZoneCounts,
    oldest: u32,
    newest: u32,
    /// A link per zone; empty without an open limit, because then nothing gives way.
    links: Box<[Link]>,
}

/// The accounts of a device's zones, behind a lock of the kind `R`.
#[derive(Debug)]
pub struct ZoneResources<R = AccountsLock> {
    limits: ZoneLimits,
    accounts: R,
}

impl<R: Lock<Accounts>> ZoneResources<R> {
    /// Accounts of `zones` zones that hold nothing; none where no limit is set.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn new(zones: usize, limits: ZoneLimits) -> Result<Option<Self>, TryReserveError> {
        if limits == ZoneLimits::default() {
            return Ok(None);
        }
        let count = if limits.open_max == 0 { 0 } else { zones };
        let mut links = Vec::new();
        links.try_reserve_exact(count)?;
        links.resize(count, Link { older: NONE, newer: NONE });
        let links = links.into_boxed_slice();
        let accounts =
            Accounts { counts: ZoneCounts::default(), oldest: NONE, newest: NONE, links };
        Ok(Some(ZoneResources { limits, accounts: R::new(accounts) }))
    }

    /// Takes what `zone` needs to hold `to` instead of `from`, or nothing. A token in transit is
    /// spent first. The caller holds the zone's lock.
    pub(crate) fn take(
        &self,
        zone: u32,
        from: Holding,
        to: Holding,
        in_transit: &mut bool,
    ) -> Grant {
        let ZoneLimits { open_max, active_max } = self.limits;
        let becomes_active = !from.is_active() && to.is_active();
        let becomes_open = !from.is_open() && to.is_open();
        self.accounts.with(|accounts| {
            let counts = &mut accounts.counts;
            if becomes_active && active_max != 0 && counts.active >= active_max {
                return Grant::ActiveLimit;
            }
            if becomes_open && !*in_transit && open_max != 0 && counts.open >= open_max {
                let full = counts.explicit >= open_max;
                return if full { Grant::OpenLimit } else { Grant::MakeRoom };
            }
            if becomes_open && *in_transit {
                // Counted as open already; `change` counts it again.
                *in_transit = false;
                counts.open -= 1;
            }
            accounts.change(zone, from, to);
            Grant::Yes
        })
    }

    /// Changes to a holding that needs no token that `from` did not have. The caller holds the
    /// zone's lock.
    pub(crate) fn settle(&self, zone: u32, from: Holding, to: Holding) {
        debug_assert!(from.is_active() || !to.is_active());
        debug_assert!(from.is_open() || !to.is_open());
        self.accounts.with(|accounts| accounts.change(zone, from, to));
    }

    /// Closes a victim, `to` being `Closed` or `Nothing`; its open token is in transit then. The
    /// caller holds the victim's lock.
    pub(crate) fn close_victim(&self, zone: u32, to: Holding) {
        self.accounts.with(|accounts| {
            accounts.change(zone, Holding::Implicit, to);
            accounts.counts.open += 1;
        });
    }

    /// Gives a token in transit back unspent.
    pub(crate) fn return_open(&self) {
        self.accounts.with(|accounts| accounts.counts.open -= 1);
    }

    /// The zone that has been implicitly open for longest.
    pub(crate) fn oldest(&self) -> Option<u32> {
        let oldest = self.accounts.with(|accounts| accounts.oldest);
        (oldest != NONE).then_some(oldest)
    }

    /// Works on the accounts under their lock.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Accounts, ZoneLimits) -> T) -> T {
        self.accounts.with(|accounts| f(accounts, self.limits))
    }

    /// The counts now.
    pub fn counts(&self) -> ZoneCounts {
        self.accounts.with(|accounts| accounts.counts)
    }
}

impl Accounts {
    /// Whether a zone may hold `to` instead of `from`, and which zone has to be closed for it.
    pub(crate) fn permit(
        &self,
        limits: ZoneLimits,
        from: Holding,
        to: Holding,
    ) -> Result<Option<u32>, Refusal> {
        let ZoneLimits { open_max, active_max } = limits;
        let ZoneCounts { open, active, .. } = self.counts;
        let becomes_active = !from.is_active() && to.is_active();
        let becomes_open = !from.is_open() && to.is_open();
        if becomes_active && active_max != 0 && active >= active_max {
            return Err(Refusal::ActiveLimit);
        }
        if !becomes_open || open_max == 0 || open < open_max {
            return Ok(None);
        }
        if self.oldest == NONE { Err(Refusal::OpenLimit) } else { Ok(Some(self.oldest)) }
    }

    pub(crate) fn change(&mut self, zone: u32, from: Holding, to: Holding) {
        if from == to {
            return;
        }
        let counts = &mut self.counts;
        counts.open = counts.open - u32::from(from.is_open()) + u32::from(to.is_open());
        counts.active = counts.active - u32::from(from.is_active()) + u32::from(to.is_active());
        counts.explicit = counts.explicit - u32::from(from == Holding::Explicit)
            + u32::from(to == Holding::Explicit);
        if from == Holding::Implicit {
            self.unlink(zone);
        }
        if to == Holding::Implicit {
            self.link_newest(zone);
        }
    }

    fn link_newest(&mut self, zone: u32) {
        if self.links.is_empty() {
            return;
        }
        let newest = std::mem::replace(&mut self.newest, zone);
        self.links[zone as usize] = Link { older: newest, newer: NONE };
        match newest {
            NONE => self.oldest = zone,
            older => self.links[older as usize].newer = zone,
        }
    }

    fn unlink(&mut self, zone: u32) {
        if self.links.is_empty() {
            return;
        }
        let Link { older, newer } = self.links[zone as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use Holding::{Closed, Explicit, Implicit, Nothing};

    #[test]
    fn the_oldest_gives_way_and_its_token_is_in_transit() {
        let limits = ZoneLimits { open_max: 2, active_max: 3 };
        let resources = ZoneResources::<AccountsLock>::new(4, limits).unwrap().unwrap();
        let mut none = false;
        assert_eq!(resources.take(0, Nothing, Implicit, &mut none), Grant::Yes);
        assert_eq!(resources.take(1, Nothing, Implicit, &mut none), Grant::Yes);
        assert_eq!(resources.take(2, Nothing, Implicit, &mut none), Grant::MakeRoom);
        assert_eq!(resources.oldest(), Some(0));
        resources.close_victim(0, Closed);
        assert_eq!(resources.counts(), ZoneCounts { open: 2, explicit: 0, active: 2 });
        // Somebody else cannot snatch the token.
        assert_eq!(resources.take(3, Nothing, Implicit, &mut none), Grant::MakeRoom);
        let mut in_transit = true;
        assert_eq!(resources.take(2, Nothing, Explicit, &mut in_transit), Grant::Yes);
        assert!(!in_transit);
        assert_eq!(resources.counts(), ZoneCounts { open: 2, explicit: 1, active: 3 });
        assert_eq!(resources.take(3, Nothing, Implicit, &mut none), Grant::ActiveLimit);
        // A closed zone is active already and needs an open token only.
        assert_eq!(resources.take(0, Closed, Implicit, &mut none), Grant::MakeRoom);
        resources.settle(1, Implicit, Explicit);
        assert_eq!(resources.oldest(), None);
        assert_eq!(resources.take(0, Closed, Implicit, &mut none), Grant::OpenLimit);
    }

    #[test]
    fn the_list_keeps_the_order_of_opening() {
        let limits = ZoneLimits { open_max: 8, active_max: 0 };
        let resources = ZoneResources::<AccountsLock>::new(8, limits).unwrap().unwrap();
        let mut none = false;
        for zone in [5, 2, 7, 0] {
            assert_eq!(resources.take(zone, Nothing, Implicit, &mut none), Grant::Yes);
        }
        resources.settle(2, Implicit, Nothing);
        resources.settle(0, Implicit, Closed);
        let mut order = Vec::new();
        while let Some(zone) = resources.oldest() {
            resources.settle(zone, Implicit, Nothing);
            order.push(zone);
        }
        assert_eq!(order, [5, 7]);
        assert_eq!(resources.counts(), ZoneCounts { open: 0, explicit: 0, active: 1 });
    }
}
