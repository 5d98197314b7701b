//! How long the thread of a ring looks for work before it sleeps.
//!
//! A kick that wakes a thread costs the guest and the thread more time than a fast device needs for
//! the request. So a thread looks at its ring for a while before it sleeps.
//!
//! It always does while that is cheaper than the sleeps ([`SpinBudget`]): it spends no more CPU
//! time than the sleeps would have cost that it avoided. A ring that is hardly used is not looked
//! at, and a guest that needs long between two batches soon is not.
//!
//! A user may allow more ([`PollBudget`]), for a shorter latency. The *window* doubles after a
//! sleep that was shorter than the longest window, and halves after a longer one (as KVM decides in
//! `halt_poll_ns`). The thread earns the time for it as a fraction of the time that passes, which
//! bounds its CPU use whatever the guest does.

/// The longest window, in nanoseconds.
const WINDOW_MAX: u64 = 50_000;
/// The shortest window, in nanoseconds: about the cost of a sleep.
const WINDOW_MIN: u64 = 4_000;
/// The most time that is saved for later, in nanoseconds.
const CREDIT_MAX: u64 = 1_000_000;

/// What a sleep costs a thread, in nanoseconds of CPU time: two system calls, two context switches,
/// and the call that wakes the guest. It was 4,000 to 15,000 where it was measured, depending on
/// whether the processors halt.
const SLEEP_COST: u64 = 8_000;
/// The longest spin, in nanoseconds: a guest whose processor halts needs up to 20,000 to wake up
/// and send the next request.
const SPIN_MAX: u64 = 32_000;
/// The most CPU time that is saved for later spins, in nanoseconds: as much as 8 spins that fail.
const SAVED_MAX: u64 = 8 * SPIN_MAX;
/// What is spent on spins for each sleep in any case, in nanoseconds, to find out whether they pay.
const SPEND_PER_SLEEP: u64 = SLEEP_COST / 32;
/// The unit of the average number of requests.
const ONE: u64 = 16;

/// The CPU time that a thread may spin instead of sleeping: what the sleeps that it avoided would
/// have cost, and 3 % of the cost of those that it did not. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinBudget {
    saved: u64,
    /// Whether the last spin found work.
    has_found: bool,
    /// The average number of requests that a sleep brings, in units of 1 / `ONE`; not less than the
    /// most that a spin has found since.
    per_sleep: u64,
}

impl SpinBudget {
    pub(crate) fn new() -> SpinBudget {
        SpinBudget { saved: SPIN_MAX, has_found: false, per_sleep: ONE }
    }

    /// How long the thread may spin now.
    pub(crate) fn window(&self) -> u64 {
        // A first spin has to be long enough for a guest that sleeps too.
        if self.has_found || self.saved >= SPIN_MAX { self.saved.min(SPIN_MAX) } else { 0 }
    }

    /// Whether a spin that has found a request waits for others: the guest makes several at once.
    pub(crate) fn gathers(&self) -> bool {
        self.per_sleep >= 2 * ONE
    }

    /// Accounts for a spin, which took `time` and found this many requests.
    pub(crate) fn spun(&mut self, time: u64, found: Option<u16>) {
        self.has_found = found.is_some();
        let found = ONE * u64::from(found.unwrap_or(0));
        self.per_sleep = self.per_sleep.max(found);
        // Without the spin, a sleep would have brought them, or a part of one.
        let avoided = SLEEP_COST * found.min(self.per_sleep) / self.per_sleep;
        self.saved = (self.saved + avoided).saturating_sub(time).min(SAVED_MAX);
    }

    /// Accounts for a sleep, which brought this many requests.
    pub(crate) fn slept(&mut self, requests: usize) {
        self.saved = (self.saved + SPEND_PER_SLEEP).min(SAVED_MAX);
        self.per_sleep = ((7 * self.per_sleep + ONE * requests as u64) / 8).max(ONE);
    }
}

/// The time in which a thread may poll. All times are in nanoseconds of one monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PollBudget {
    percent: u64,
    credit: u64,
    /// When the credit was granted.
    granted: u64,
    window: u64,
}

impl PollBudget {
    /// A budget of this percentage of the time; 0 never polls.
    pub(crate) fn new(percent: u32, now: u64) -> PollBudget {
        PollBudget { percent: percent.min(100).into(), credit: 0, granted: now, window: 0 }
    }

    /// How long the thread may poll from now on.
    pub(crate) fn begin(&mut self, now: u64) -> u64 {
        let passed = now.saturating_sub(self.granted).min(CREDIT_MAX * 100);
        self.granted = now;
        self.credit = (self.credit + passed * self.percent / 100).min(CREDIT_MAX);
        self.window.min(self.credit)
    }

    /// Accounts for a poll.
    pub(crate) fn end(&mut self, polled: u64) {
        self.credit = self.credit.saturating_sub(polled);
    }

    /// Learns how long the thread slept.
    pub(crate) fn slept(&mut self, time: u64) {
        self.window = match self.window {
            window if time < WINDOW_MAX => (window * 2).clamp(WINDOW_MIN, WINDOW_MAX),
            window if window > WINDOW_MIN => window / 2,
            _ => 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a ring whose requests come `gap` after one another for a second; a sleep costs 5 us
    /// more. Returns the polled time in nanoseconds and the number of sleeps.
    fn run(percent: u32, gap: u64) -> (u64, u64) {
        let (mut budget, mut now) = (PollBudget::new(percent, 0), 0);
        let (mut total, mut sleeps) = (0, 0);
        while now < 1_000_000_000 {
            let window = budget.begin(now);
            let polled = window.min(gap);
            budget.end(polled);
            total += polled;
            if polled < gap {
                budget.slept(gap - polled + 5_000);
                now += 5_000;
                sleeps += 1;
            }
            now += gap;
        }
        (total, sleeps)
    }

    /// Serves a guest whose requests come `gap` after the answers to the ones before, `batch` at
    /// once, of which a spin finds `found`. Returns the time that was spun and the number of sleeps
    /// in a hundred thousand batches.
    fn run_spins(gap: u64, batch: usize, found: u16) -> (u64, u64) {
        let (mut budget, mut total, mut sleeps) = (SpinBudget::new(), 0, 0);
        (0..32).for_each(|_| budget.slept(batch));
        for _ in 0..100_000 {
            let window = budget.window();
            let spun = window.min(gap);
            total += spun;
            if window > 0 {
                budget.spun(spun, (gap <= window).then_some(found));
            }
            if gap > window {
                sleeps += 1;
                budget.slept(batch);
            }
        }
        (total, sleeps)
    }

    #[test]
    fn a_thread_spins_while_that_is_cheaper_than_to_sleep() {
        for (gap, batch, found) in [(500, 1, 1), (4_000, 1, 1), (7_000, 32, 32), (2_000, 32, 16)] {
            let (_, sleeps) = run_spins(gap, batch, found);
            assert!(sleeps < 1_000, "{gap}, {batch}, {found}: {sleeps}");
        }
    }

    #[test]
    fn spins_cost_no_more_than_the_sleeps_that_they_avoid() {
        for (gap, batch, found) in [
            (9_000, 1, 1),
            (20_000, 1, 1),
            (40_000, 1, 1),
            (1_000_000_000, 1, 1),
            (4_000, 32, 8),
            (2_000, 32, 1),
        ] {
            let (total, sleeps) = run_spins(gap, batch, found);
            let avoided = (100_000 - sleeps) * SLEEP_COST;
            let most = avoided + (sleeps + 32) * SPEND_PER_SLEEP + SPIN_MAX;
            assert!(total <= most, "{gap}, {batch}, {found}: {total} for {sleeps} sleeps");
            assert!(sleeps > 50_000, "{gap}, {batch}, {found}: {sleeps}");
        }
    }

    #[test]
    fn a_guest_that_stops_is_spun_for_a_bounded_time() {
        let mut budget = SpinBudget::new();
        (0..1_000).for_each(|_| budget.spun(100, Some(1)));
        let mut total = 0;
        while budget.window() > 0 {
            total += budget.window();
            budget.spun(budget.window(), None);
        }
        assert!(total <= SAVED_MAX, "{total}");
    }

    #[test]
    fn requests_that_follow_soon_find_the_thread_awake() {
        let (_, sleeps) = run(100, 10_000);
        assert!(sleeps <= 3, "{sleeps}");
    }

    #[test]
    fn a_ring_that_is_hardly_used_is_not_polled() {
        for gap in [60_000, 1_000_000, 100_000_000] {
            assert_eq!(run(100, gap).0, 0, "{gap}");
        }
    }

    #[test]
    fn polling_takes_no_more_than_its_fraction_of_the_time() {
        for (percent, gap) in [(0, 10_000), (10, 10_000), (50, 10_000), (10, 40_000), (25, 44_000)]
        {
            let (total, sleeps) = run(percent, gap);
            let most = 10_000_000 * u64::from(percent) + CREDIT_MAX;
            assert!(total <= most, "{percent} %, {gap}: {total}");
            assert!(sleeps > 0);
            assert_eq!(total == 0, percent == 0, "{percent} %, {gap}");
        }
    }

    #[test]
    fn a_ring_that_is_no_longer_used_is_polled_for_a_short_time() {
        let mut budget = PollBudget::new(100, 0);
        (0..10).for_each(|_| budget.slept(1_000));
        let (mut polls, mut now) = (0, 10_000_000);
        loop {
            let window = budget.begin(now);
            if window == 0 {
                break;
            }
            budget.end(window);
            budget.slept(1_000_000);
            (polls, now) = (polls + 1, now + window + 1_000_000);
        }
        assert!(polls <= 5, "{polls}");
    }
}
