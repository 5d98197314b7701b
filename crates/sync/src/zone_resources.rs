//! Primitive: open and active zones.
//!
//! Protects   the numbers of open and active zones, and the list of implicitly open ones, oldest
//!            first.
//! Why        a device limits both numbers. When a zone has to be opened at the limit, the oldest
//!            implicitly open zone is closed.
//! States     a zone is counted by its [`Holding`]: `open = implicit + explicit`, and `active` is
//!            every zone that is not `Nothing`.
//! Order      rank RESOURCES; no other lock is taken under it.
//! Common     not used if no limit is set; else once for each change of a holding, not for each
//!            write.
//! Cost       about 5 ns for a change.
//! Before     one lock, always taken.
//!
//! The holding of a zone changes only under this lock ([`crate::atomic_zones`]), so zones and
//! counts always agree. This prevents leaks: the kernel's null_blk closes a victim without the
//! victim's lock, and loses the resources of a zone that becomes full at that moment.

use std::collections::TryReserveError;

use crate::lock::Lock;
use crate::rank::ranks;

/// The lock of the counts in a model, where a spinning lock would add too many interleavings.
#[cfg(loom)]
pub type AccountsLock = crate::sleep_lock::SleepLock<Accounts, { ranks::RESOURCES }>;
/// The lock of the counts.
#[cfg(not(loom))]
pub type AccountsLock = crate::spin_lock::SpinLock<Accounts, { ranks::RESOURCES }>;

/// The resources that a zone holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Neither open nor active.
    Nothing,
    /// Active, not open.
    Closed,
    /// Active and open; may be closed to free its open resource.
    Implicit,
    /// Active and open until it is closed by command.
    Explicit,
}

impl Holding {
    /// Whether the zone is counted as active.
    #[inline]
    pub fn is_active(self) -> bool {
        self != Holding::Nothing
    }

    /// Whether the zone is counted as open.
    #[inline]
    pub fn is_open(self) -> bool {
        matches!(self, Holding::Implicit | Holding::Explicit)
    }
}

/// Maximum numbers of open and active zones; 0 means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneLimits {
    /// Open zones.
    pub open_max: u32,
    /// Active zones.
    pub active_max: u32,
}

/// Why a zone may not hold more resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceError {
    /// All open zones are explicitly open: none may be closed.
    OpenLimit,
    /// Too many zones are active.
    ActiveLimit,
}

/// The present counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneCounts {
    /// Open zones.
    pub open: u32,
    /// Explicitly open zones among them.
    pub explicit: u32,
    /// Active zones.
    pub active: u32,
}

/// No zone, at either end of the list.
const NONE: u32 = u32::MAX;

/// The neighbours of an implicitly open zone in the order of opening.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// The counts and the order of opening, which the lock of [`ZoneResources`] guards.
#[derive(Debug)]
pub struct Accounts {
    counts: ZoneCounts,
    oldest: u32,
    newest: u32,
    /// A link per zone; empty without an open limit, because then no zone has to be closed.
    links: Box<[Link]>,
}

/// The counts of a device's zones, under a lock of type `R`.
#[derive(Debug)]
pub struct ZoneResources<R = AccountsLock> {
    limits: ZoneLimits,
    accounts: R,
}

impl<R: Lock<Accounts>> ZoneResources<R> {
    /// The counts of `zones` zones that hold nothing; `None` if no limit is set.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(zones: usize, limits: ZoneLimits) -> Result<Option<Self>, TryReserveError> {
        if limits == ZoneLimits::default() {
            return Ok(None);
        }
        Ok(Some(ZoneResources { limits, accounts: R::new(Accounts::new(zones, limits)?) }))
    }

    /// Calls `f` with the counts under their lock.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Accounts, ZoneLimits) -> T) -> T {
        self.accounts.with(|accounts| f(accounts, self.limits))
    }

    /// The present counts.
    pub fn counts(&self) -> ZoneCounts {
        self.accounts.with(|accounts| accounts.counts)
    }
}

impl Accounts {
    /// The counts of `zones` zones that hold nothing.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(zones: usize, limits: ZoneLimits) -> Result<Accounts, TryReserveError> {
        let count = if limits.open_max == 0 { 0 } else { zones };
        let mut links = Vec::new();
        links.try_reserve_exact(count)?;
        links.resize(count, Link { older: NONE, newer: NONE });
        let links = links.into_boxed_slice();
        Ok(Accounts { counts: ZoneCounts::default(), oldest: NONE, newest: NONE, links })
    }

    /// The present counts.
    pub fn counts(&self) -> ZoneCounts {
        self.counts
    }

    /// The zone that has been implicitly open for longest; `None` without an open limit.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Whether a zone may hold `to` instead of `from`, and which zone has to be closed for that.
    pub(crate) fn permit(
        &self,
        limits: ZoneLimits,
        from: Holding,
        to: Holding,
    ) -> Result<Option<u32>, ResourceError> {
        let ZoneLimits { open_max, active_max } = limits;
        let ZoneCounts { open, active, .. } = self.counts;
        let becomes_active = !from.is_active() && to.is_active();
        let becomes_open = !from.is_open() && to.is_open();
        if becomes_active && active_max != 0 && active >= active_max {
            return Err(ResourceError::ActiveLimit);
        }
        if !becomes_open || open_max == 0 || open < open_max {
            return Ok(None);
        }
        self.oldest().map(Some).ok_or(ResourceError::OpenLimit)
    }

    /// Records that a zone holds `to` instead of `from`. The caller has checked that it may.
    pub fn change(&mut self, zone: u32, from: Holding, to: Holding) {
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
    fn oldest_open_zone_is_the_victim() {
        let limits = ZoneLimits { open_max: 2, active_max: 3 };
        let mut accounts = Accounts::new(4, limits).unwrap();
        for zone in [1, 0] {
            assert_eq!(accounts.permit(limits, Nothing, Implicit), Ok(None));
            accounts.change(zone, Nothing, Implicit);
        }
        assert_eq!(accounts.permit(limits, Nothing, Explicit), Ok(Some(1)));
        accounts.change(1, Implicit, Closed);
        accounts.change(2, Nothing, Explicit);
        assert_eq!(accounts.counts(), ZoneCounts { open: 2, explicit: 1, active: 3 });
        assert_eq!(accounts.permit(limits, Nothing, Implicit), Err(ResourceError::ActiveLimit));
        // A closed zone is already active and needs only an open resource.
        assert_eq!(accounts.permit(limits, Closed, Implicit), Ok(Some(0)));
        accounts.change(0, Implicit, Explicit);
        assert_eq!(accounts.permit(limits, Closed, Implicit), Err(ResourceError::OpenLimit));
    }

    #[test]
    fn open_list_keeps_order_of_opening() {
        let mut accounts = Accounts::new(8, ZoneLimits { open_max: 8, active_max: 0 }).unwrap();
        for zone in [5, 2, 7, 0] {
            accounts.change(zone, Nothing, Implicit);
        }
        accounts.change(2, Implicit, Nothing);
        accounts.change(0, Implicit, Closed);
        let mut order = Vec::new();
        while let Some(zone) = accounts.oldest() {
            accounts.change(zone, Implicit, Nothing);
            order.push(zone);
        }
        assert_eq!(order, [5, 7]);
        assert_eq!(accounts.counts(), ZoneCounts { open: 0, explicit: 0, active: 1 });
    }
}
