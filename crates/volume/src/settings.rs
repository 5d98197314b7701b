//! The settings of a volume that can change while it is a device: compression, sync mode, and rate
//! limits.

use std::sync::Arc;

use blockyard_sync::rcu_cell::RcuCell;
use blockyard_sync::token_bucket::TokenBucket;
use blockyard_volume_format::properties::Properties;

use crate::codec::Compression;
use crate::config::{SyncMode, VolumeConfig};

/// Refills of a bucket per second, at least; fewer if each would add less than one token.
const TICKS: u64 = 100;

const SECOND_NS: u64 = 1_000_000_000;

/// What can change while a volume is a device.
#[derive(Clone, Debug)]
pub(crate) struct LiveSettings {
    pub(crate) compress: Compression,
    pub(crate) sync: SyncMode,
    pub(crate) rates: Arc<Rates>,
}

impl LiveSettings {
    pub(crate) fn new(config: &VolumeConfig) -> LiveSettings {
        let rates = Arc::new(Rates::new(config.iops, config.bandwidth));
        LiveSettings { compress: config.compress, sync: config.sync, rates }
    }
}

/// A volume that is a device.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    /// The present parameters.
    pub(crate) config: VolumeConfig,
    settings: Arc<RcuCell<LiveSettings>>,
}

impl OpenDevice {
    pub(crate) fn new(config: VolumeConfig, settings: Arc<RcuCell<LiveSettings>>) -> OpenDevice {
        OpenDevice { config, settings }
    }

    /// Sets properties, which from now on take effect in place of what the device was opened with.
    pub(crate) fn set(&mut self, properties: &Properties) {
        let before = self.config.clone();
        self.config = before.clone().with_all(properties);
        let next = LiveSettings::new(&self.config);
        let same = (before.iops, before.bandwidth) == (self.config.iops, self.config.bandwidth);
        self.settings.update(|now| match same {
            // What was taken from the present limits still counts.
            true => LiveSettings { rates: Arc::clone(&now.rates), ..next.clone() },
            false => next.clone(),
        });
    }

    /// Whether the device must be closed before it gets these properties: its clients know whether
    /// they may write, and whether writes are durable without a flush.
    pub(crate) fn needs_closing(&self, properties: &Properties) -> bool {
        let next = self.config.clone().with_all(properties);
        let was_always = self.config.sync == SyncMode::Always;
        next.read_only != self.config.read_only || was_always && next.sync != SyncMode::Always
    }
}

/// The rate limits of a volume.
#[derive(Debug)]
pub(crate) struct Rates {
    requests: Option<TokenBucket>,
    bytes: Option<TokenBucket>,
}

/// A token bucket for `rate` tokens per second. The tokens per refill are an integer, so the
/// interval between refills is what makes the rate exact.
fn bucket(rate: u64) -> Option<TokenBucket> {
    let share = (rate / TICKS).max(1);
    let tick_ns = (u128::from(share) * u128::from(SECOND_NS)).checked_div(rate.into())?;
    // One nanosecond more, so that the rate is never above the requested one.
    Some(TokenBucket::new(share, u64::try_from(tick_ns + 1).unwrap_or(u64::MAX)))
}

impl Rates {
    /// Limits of requests and bytes per second; 0 means unlimited.
    pub(crate) fn new(requests: u64, bytes: u64) -> Rates {
        Rates { requests: bucket(requests), bytes: bucket(bytes) }
    }

    /// Takes the tokens that a request needs.
    ///
    /// # Errors
    /// If the request has to wait: the time in nanoseconds at which to try again.
    pub(crate) fn take(&self, now_ns: u64, bytes: u64) -> Result<(), u64> {
        if let Some(bucket) = &self.bytes {
            bucket.take(now_ns, bytes)?;
        }
        let taken = self.requests.as_ref().map_or(Ok(()), |bucket| bucket.take(now_ns, 1));
        if taken.is_err() {
            self.bytes.iter().for_each(|bucket| bucket.give_back(bytes));
        }
        taken
    }

    /// Returns the tokens of a request that was not started.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.bytes.iter().for_each(|bucket| bucket.give_back(bytes));
        self.requests.iter().for_each(|bucket| bucket.give_back(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests start in ten seconds.
    fn begun(rates: &Rates, bytes: u64) -> u64 {
        let (mut now, mut count) = (0, 0);
        while now < 10 * SECOND_NS {
            match rates.take(now, bytes) {
                Ok(()) => count += 1,
                Err(at) => now = at,
            }
        }
        count
    }

    #[test]
    fn both_limits_hold() {
        assert!((9_900..=10_200).contains(&begun(&Rates::new(1000, 0), 4096)));
        assert!((69..=72).contains(&begun(&Rates::new(7, 0), 1 << 20)));
        let both = Rates::new(1000, 1 << 20);
        assert!((2_500..=2_700).contains(&begun(&both, 4096)), "the bytes");
        assert!((9_900..=10_200).contains(&begun(&Rates::new(1000, 1 << 30), 4096)), "the number");
        assert!((0..1000).all(|_| Rates::new(0, 0).take(0, 1 << 30).is_ok()), "no limits");
    }

    /// Regression: a limit of 199 per second became 100, because the tokens per refill were rounded
    /// down.
    #[test]
    fn a_limit_is_what_was_asked_for_whatever_the_number() {
        for rate in (1..400).chain([999, 1001, 1999, 12_345, 100_003]) {
            let (found, slack) = (begun(&Rates::new(rate, 0), 4096), rate / 100 + 2);
            let wanted = 10 * rate - slack..=10 * rate + slack;
            assert!(wanted.contains(&found), "{rate}: {found} in ten seconds");
            let found = begun(&Rates::new(0, rate << 10), 1 << 10);
            assert!(wanted.contains(&found), "{rate} KiB: {found} in ten seconds");
        }
        // The largest numbers do not overflow.
        assert!(Rates::new(u64::MAX, u64::MAX).take(0, 4096).is_ok());
    }
}
