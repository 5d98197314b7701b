//! The accounts of open and active zones where each zone has a lock, with tokens in transit.
//!
//! A thread that needs room closes a victim under the victim's lock, releases that lock, and
//! returns to its own zone with the victim's open token. Meanwhile the token belongs to the thread:
//! it is counted as open, so that no other thread takes it.

use std::collections::TryReserveError;

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::spin_lock::SpinLock;
use blockyard_sync::zone_resources::{Accounts, Holding, ResourceError, ZoneCounts, ZoneLimits};

/// The lock around the tokens.
pub type TokensLock = SpinLock<Tokens, { ranks::RESOURCES }>;

/// The value that the lock protects: the resources that zones hold, and the open tokens in transit.
#[derive(Debug)]
pub struct Tokens {
    accounts: Accounts,
    in_transit: u32,
}

/// The answer to a zone that asks for more resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// The zone has the resources now.
    Yes,
    /// No token is free: release the zone's lock, make room, and look again.
    MakeRoom,
    /// The zone cannot have the resources.
    No(ResourceError),
}

/// The tokens of a device's zones, protected by a lock of type `R`.
#[derive(Debug)]
pub struct ZoneTokens<R = TokensLock> {
    limits: ZoneLimits,
    tokens: R,
}

impl<R: Lock<Tokens>> ZoneTokens<R> {
    /// Tokens for `zones` zones that hold none; `None` where no limit is set.
    ///
    /// # Errors
    /// If there is no memory for the accounts.
    pub fn new(zones: usize, limits: ZoneLimits) -> Result<Option<Self>, TryReserveError> {
        if limits == ZoneLimits::default() {
            return Ok(None);
        }
        let tokens = Tokens { accounts: Accounts::new(zones, limits)?, in_transit: 0 };
        Ok(Some(ZoneTokens { limits, tokens: R::new(tokens) }))
    }

    /// Takes the tokens that `zone` needs to hold `to` instead of `from`, or none. A token in
    /// transit is spent first. The caller holds the zone's lock.
    pub fn take(&self, zone: u32, from: Holding, to: Holding, in_transit: &mut bool) -> Grant {
        let ZoneLimits { open_max, active_max } = self.limits;
        let becomes_active = !from.is_active() && to.is_active();
        let becomes_open = !from.is_open() && to.is_open();
        self.tokens.with(|tokens| {
            let ZoneCounts { open, explicit, active } = tokens.counts();
            if becomes_active && active_max != 0 && active >= active_max {
                return Grant::No(ResourceError::ActiveLimit);
            }
            if becomes_open && !*in_transit && open_max != 0 && open >= open_max {
                let full = explicit >= open_max;
                return if full { Grant::No(ResourceError::OpenLimit) } else { Grant::MakeRoom };
            }
            if becomes_open && *in_transit {
                // From now on the zone holds the token.
                *in_transit = false;
                tokens.in_transit -= 1;
            }
            tokens.accounts.change(zone, from, to);
            Grant::Yes
        })
    }

    /// Changes to a holding that needs no token beyond those of `from`. The caller holds the zone's
    /// lock.
    pub fn settle(&self, zone: u32, from: Holding, to: Holding) {
        debug_assert!(from.is_active() || !to.is_active());
        debug_assert!(from.is_open() || !to.is_open());
        self.tokens.with(|tokens| tokens.accounts.change(zone, from, to));
    }

    /// Closes a victim, with `to` either `Closed` or `Nothing`. The victim's open token is in
    /// transit afterwards. The caller holds the victim's lock.
    pub fn close_victim(&self, zone: u32, to: Holding) {
        self.tokens.with(|tokens| {
            tokens.accounts.change(zone, Holding::Implicit, to);
            tokens.in_transit += 1;
        });
    }

    /// Returns an unspent token in transit.
    pub fn return_open(&self) {
        self.tokens.with(|tokens| tokens.in_transit -= 1);
    }

    /// The zone that has been implicitly open for longest.
    pub fn oldest(&self) -> Option<u32> {
        self.tokens.with(|tokens| tokens.accounts.oldest())
    }

    /// The counts now. A token in transit counts as open.
    pub fn counts(&self) -> ZoneCounts {
        self.tokens.with(|tokens| tokens.counts())
    }
}

impl Tokens {
    fn counts(&self) -> ZoneCounts {
        let counts = self.accounts.counts();
        ZoneCounts { open: counts.open + self.in_transit, ..counts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Holding::{Closed, Explicit, Implicit, Nothing};

    #[test]
    fn the_oldest_gives_way_and_its_token_is_in_transit() {
        let limits = ZoneLimits { open_max: 2, active_max: 3 };
        let tokens = ZoneTokens::<TokensLock>::new(4, limits).unwrap().unwrap();
        let mut none = false;
        assert_eq!(tokens.take(0, Nothing, Implicit, &mut none), Grant::Yes);
        assert_eq!(tokens.take(1, Nothing, Implicit, &mut none), Grant::Yes);
        assert_eq!(tokens.take(2, Nothing, Implicit, &mut none), Grant::MakeRoom);
        assert_eq!(tokens.oldest(), Some(0));
        tokens.close_victim(0, Closed);
        assert_eq!(tokens.counts(), ZoneCounts { open: 2, explicit: 0, active: 2 });
        // Another thread cannot take the token in transit.
        assert_eq!(tokens.take(3, Nothing, Implicit, &mut none), Grant::MakeRoom);
        let mut in_transit = true;
        assert_eq!(tokens.take(2, Nothing, Explicit, &mut in_transit), Grant::Yes);
        assert!(!in_transit);
        assert_eq!(tokens.counts(), ZoneCounts { open: 2, explicit: 1, active: 3 });
        let refused = Grant::No(ResourceError::ActiveLimit);
        assert_eq!(tokens.take(3, Nothing, Implicit, &mut none), refused);
        // A closed zone is active already and needs only an open token.
        assert_eq!(tokens.take(0, Closed, Implicit, &mut none), Grant::MakeRoom);
        tokens.settle(1, Implicit, Explicit);
        assert_eq!(tokens.oldest(), None);
        let refused = Grant::No(ResourceError::OpenLimit);
        assert_eq!(tokens.take(0, Closed, Implicit, &mut none), refused);
    }
}
