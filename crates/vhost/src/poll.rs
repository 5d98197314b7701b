//! How long the thread of a ring looks for work before it sleeps.
//!
//! A kick that wakes a thread costs the guest and the thread more time than a fast device needs for
//! the request. So a thread looks at its ring for a while before it sleeps. The *window* doubles
//! after a sleep that was shorter than the longest window, and halves after a longer one: a ring
//! that is hardly used is not polled (as KVM decides in `halt_poll_ns`). The thread earns the time
//! for it as a fraction of the time that passes, which bounds its CPU use whatever the guest does.

/// The longest window, in nanoseconds.
const WINDOW_MAX: u64 = 50_000;
/// The shortest window, in nanoseconds: about the cost of a sleep.
const WINDOW_MIN: u64 = 4_000;
/// The most time that is saved for later, in nanoseconds.
const CREDIT_MAX: u64 = 1_000_000;

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
