//! The limits of a volume: how many reads and writes, and how many of their bytes, all of its
//! queues together may begin in a second.

use blockyard_sync::token_bucket::TokenBucket;

/// How often a bucket is filled in a second, at least, unless that would be less than 1 at a time.
const TICKS: u64 = 100;

const SECOND_NS: u64 = 1_000_000_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct Rates {
    requests: Option<TokenBucket>,
    bytes: Option<TokenBucket>,
}

/// A bucket for so much in a second. What it gets at a time is a whole number, and so the time is
/// what makes it right.
fn bucket(rate: u64) -> Option<TokenBucket> {
    let share = (rate / TICKS).max(1);
    let tick_ns = (u128::from(share) * u128::from(SECOND_NS)).checked_div(rate.into())?;
    // In a nanosecond more it is not more than was asked for.
    Some(TokenBucket::new(share, u64::try_from(tick_ns + 1).unwrap_or(u64::MAX)))
}

impl Rates {
    /// So many requests and bytes in a second; 0: any number.
    pub(crate) fn new(requests: u64, bytes: u64) -> Rates {
        Rates { requests: bucket(requests), bytes: bucket(bytes) }
    }

    /// Takes what a request needs.
    ///
    /// # Errors
    /// If it has to wait: when it is worth another try.
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

    /// Gives back what a request has taken that was not begun.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.bytes.iter().for_each(|bucket| bucket.give_back(bytes));
        self.requests.iter().for_each(|bucket| bucket.give_back(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests begin in ten seconds.
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

    /// 199 in a second were 100: what a tick gets was cut off to a whole number.
    #[test]
    fn a_limit_is_what_was_asked_for_whatever_the_number() {
        for rate in (1..400).chain([999, 1001, 1999, 12_345, 100_003]) {
            let (found, slack) = (begun(&Rates::new(rate, 0), 4096), rate / 100 + 2);
            let wanted = 10 * rate - slack..=10 * rate + slack;
            assert!(wanted.contains(&found), "{rate}: {found} in ten seconds");
            let found = begun(&Rates::new(0, rate << 10), 1 << 10);
            assert!(wanted.contains(&found), "{rate} KiB: {found} in ten seconds");
        }
        // Not more than a number can be.
        assert!(Rates::new(u64::MAX, u64::MAX).take(0, 4096).is_ok());
    }
}
