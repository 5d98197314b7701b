//! How long the thread of a ring spins, that is, looks for work again and again, before it sleeps.
//!
//! A kick that wakes a thread costs the guest and the thread more time than a fast device needs for
//! a request. [`SpinBudget`] adds up two budgets:
//!
//! - [`SavedTime`]: spins of a thread that waits for the guest. They take no more CPU time than the
//!   sleeps would that they avoid, and 3 % of the cost of the others; a sleep counts as 8 us. A
//!   thread whose device has requests in flight sleeps at once: the device needs another time than
//!   the guest does between two requests, and spins that fail for the one would use up the budget
//!   and the experience of the other.
//! - [`AllowedTime`]: what a user allows besides (`--vhost-poll`), for both waits. The longest
//!   spin, the *window*, doubles after a sleep that was shorter than the longest window, and halves
//!   after a longer one, as in `halt_poll_ns` of KVM. The thread earns the time for it as a
//!   fraction of the time that passes, which bounds its CPU use whatever the guest does.

/// The longest window, in nanoseconds.
const WINDOW_MAX: u64 = 50_000;
/// The shortest window, in nanoseconds: about the cost of a sleep.
const WINDOW_MIN: u64 = 4_000;
/// The most time that is saved for later, in nanoseconds.
const CREDIT_MAX: u64 = 1_000_000;

/// What a sleep counts as, in nanoseconds of CPU time of the thread: one system call, two context
/// switches, and the call that wakes the guest. It was 4,000 to 15,000 where it was measured,
/// depending on whether the processors halt; the budget does not measure it.
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
struct SavedTime {
    saved: u64,
    /// Whether the last spin found work.
    has_found: bool,
    /// The average number of requests that a sleep brings, in units of 1 / `ONE`; not less than the
    /// most that a spin has found since.
    per_sleep: u64,
}

impl SavedTime {
    fn new() -> SavedTime {
        SavedTime { saved: SPIN_MAX, has_found: false, per_sleep: ONE }
    }

    /// How long the thread may spin now.
    fn window(&self) -> u64 {
        // A first spin has to be long enough for a guest that sleeps too.
        if self.has_found || self.saved >= SPIN_MAX { self.saved.min(SPIN_MAX) } else { 0 }
    }

    /// Accounts for a spin, which took `time` and found this many requests.
    fn spun(&mut self, time: u64, found: Option<u16>) {
        self.has_found = found.is_some();
        let found = ONE * u64::from(found.unwrap_or(0));
        self.per_sleep = self.per_sleep.max(found);
        // Without the spin, a sleep would have brought them, or a part of one.
        let avoided = SLEEP_COST * found / self.per_sleep;
        self.saved = (self.saved + avoided).saturating_sub(time).min(SAVED_MAX);
    }

    /// Accounts for a sleep, which brought this many requests.
    fn slept(&mut self, requests: usize) {
        self.saved = (self.saved + SPEND_PER_SLEEP).min(SAVED_MAX);
        self.per_sleep = ((7 * self.per_sleep + ONE * requests as u64) / 8).max(ONE);
    }
}

/// The time in which a user allows a thread to spin. All times are in nanoseconds of one monotonic
/// clock.
#[derive(Clone, Copy, Debug)]
struct AllowedTime {
    percent: u64,
    credit: u64,
    /// When the credit was granted.
    granted: u64,
    window: u64,
}

impl AllowedTime {
    /// A budget of this percentage of the time; at 0 there is none.
    fn new(percent: u32, now: u64) -> AllowedTime {
        AllowedTime { percent: percent.min(100).into(), credit: 0, granted: now, window: 0 }
    }

    /// How long the thread may spin from now on.
    fn begin(&mut self, now: u64) -> u64 {
        let passed = now.saturating_sub(self.granted).min(CREDIT_MAX * 100);
        self.granted = now;
        self.credit = (self.credit + passed * self.percent / 100).min(CREDIT_MAX);
        self.window.min(self.credit)
    }

    /// Accounts for a spin.
    fn spun(&mut self, time: u64) {
        self.credit = self.credit.saturating_sub(time);
    }

    /// Learns how long the thread slept.
    fn slept(&mut self, time: u64) {
        self.window = match self.window {
            window if time < WINDOW_MAX => (window * 2).clamp(WINDOW_MIN, WINDOW_MAX),
            window if window > WINDOW_MIN => window / 2,
            _ => 0,
        };
    }
}

/// The time in which a thread may spin: what spins save, and what a user allows. All times are in
/// nanoseconds of one monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinBudget {
    saved: SavedTime,
    allowed: AllowedTime,
    /// The part of the last window that is spent from `saved`.
    saved_window: u64,
    /// Whether the next requests are the first ones after a sleep in which the thread waited for
    /// the guest.
    has_slept: bool,
}

impl SpinBudget {
    /// The budget of a thread to which a user allows this percentage of the time.
    pub(crate) fn new(allowed_percent: u32, now: u64) -> SpinBudget {
        SpinBudget {
            saved: SavedTime::new(),
            allowed: AllowedTime::new(allowed_percent, now),
            saved_window: 0,
            has_slept: false,
        }
    }

    /// How long the thread may spin from now on; at 0 it sleeps. `is_device_busy` tells whether the
    /// device has requests in flight.
    pub(crate) fn begin(&mut self, now: u64, is_device_busy: bool) -> u64 {
        self.saved_window = if is_device_busy { 0 } else { self.saved.window() };
        self.allowed.begin(now).max(self.saved_window)
    }

    /// Accounts for a spin, which took `time`, at most the window, and found this many requests or
    /// other work.
    pub(crate) fn spun(&mut self, time: u64, found: Option<u16>) {
        // The time that spins saved is spent first.
        let from_saved = time.min(self.saved_window);
        self.allowed.spun(time - from_saved);
        if self.saved_window > 0 {
            // A longer spin would not have found it without the user's allowance.
            self.saved.spun(from_saved, found.filter(|_| time <= self.saved_window));
        }
        if found.is_some() {
            // What ended the sleep before the spin brought no request.
            self.has_slept = false;
        }
    }

    /// Accounts for a sleep of this length, in which the thread waited for the device too, or for
    /// the guest alone.
    pub(crate) fn slept(&mut self, time: u64, is_device_busy: bool) {
        self.allowed.slept(time);
        self.has_slept = !is_device_busy;
    }

    /// Accounts for requests that the thread took.
    pub(crate) fn took(&mut self, requests: usize) {
        if std::mem::take(&mut self.has_slept) {
            self.saved.slept(requests);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a ring whose requests come `gap` after one another for a second; a sleep costs 5 us
    /// more. Returns the time that was spun in nanoseconds and the number of sleeps.
    fn run(percent: u32, gap: u64) -> (u64, u64) {
        let (mut budget, mut now) = (AllowedTime::new(percent, 0), 0);
        let (mut total, mut sleeps) = (0, 0);
        while now < 1_000_000_000 {
            let window = budget.begin(now);
            let spun = window.min(gap);
            budget.spun(spun);
            total += spun;
            if spun < gap {
                budget.slept(gap - spun + 5_000);
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
        let (mut budget, mut total, mut sleeps) = (SavedTime::new(), 0, 0);
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
        let mut budget = SavedTime::new();
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
    fn a_ring_that_is_hardly_used_gets_no_allowed_time() {
        for gap in [60_000, 1_000_000, 100_000_000] {
            assert_eq!(run(100, gap).0, 0, "{gap}");
        }
    }

    #[test]
    fn allowed_spins_take_no_more_than_their_fraction_of_the_time() {
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
    fn a_ring_that_is_no_longer_used_is_soon_allowed_no_spin() {
        let mut budget = AllowedTime::new(100, 0);
        (0..10).for_each(|_| budget.slept(1_000));
        let (mut spins, mut now) = (0, 10_000_000);
        loop {
            let window = budget.begin(now);
            if window == 0 {
                break;
            }
            budget.spun(window);
            budget.slept(1_000_000);
            (spins, now) = (spins + 1, now + window + 1_000_000);
        }
        assert!(spins <= 5, "{spins}");
    }

    /// A thread waits until something comes after `gap`. Returns the time that it spun, and whether
    /// it slept.
    fn wait(budget: &mut SpinBudget, now: &mut u64, gap: u64, is_device_busy: bool) -> (u64, bool) {
        let window = budget.begin(*now, is_device_busy);
        let spun = window.min(gap);
        let has_found = window > 0 && gap <= window;
        if window > 0 {
            budget.spun(spun, has_found.then_some(1));
        }
        *now += gap;
        if !has_found {
            budget.slept(gap - spun, is_device_busy);
        }
        if !is_device_busy {
            budget.took(1);
        }
        (spun, !has_found)
    }

    /// One request at a time, for which the device needs longer than a spin; the guest sends the
    /// next one at once. The spins for the guest pay, and the device's time must not end them.
    #[test]
    fn a_slow_device_does_not_end_the_spins_for_a_fast_guest() {
        for device in [40_000, 5_000, 10_000_000] {
            let (mut budget, mut now) = (SpinBudget::new(0, 0), 0);
            let (mut device_sleeps, mut guest_sleeps) = (0, 0);
            for _ in 0..10_000 {
                device_sleeps += u32::from(wait(&mut budget, &mut now, device, true).1);
                guest_sleeps += u32::from(wait(&mut budget, &mut now, 2_000, false).1);
            }
            assert_eq!((device_sleeps, guest_sleeps), (10_000, 0), "{device}");
        }
    }

    /// The device needs less than a sleep costs, and the guest longer than a spin: no spin pays for
    /// those that fail.
    #[test]
    fn a_fast_device_does_not_pay_for_spins_for_a_slow_guest() {
        let (mut budget, mut now, mut total) = (SpinBudget::new(0, 0), 0, 0);
        for _ in 0..10_000 {
            wait(&mut budget, &mut now, 2_000, true);
            let (spun, slept) = wait(&mut budget, &mut now, 31_000, false);
            total += spun;
            assert!(slept || spun == 31_000);
        }
        assert!(total <= SPIN_MAX + 10_000 * (SPEND_PER_SLEEP + SLEEP_COST / 100), "{total}");
    }

    #[test]
    fn each_budget_pays_for_its_part_of_a_spin() {
        let mut budget = SpinBudget::new(100, 0);
        (0..10).for_each(|_| budget.slept(1_000, true));
        assert_eq!(budget.saved_window, 0);
        let second = 1_000_000_000;
        assert_eq!(budget.begin(second, false), WINDOW_MAX);
        assert_eq!((budget.saved_window, budget.allowed.credit), (SPIN_MAX, CREDIT_MAX));
        // A request that comes within the first window is found by what spins save.
        budget.spun(4_000, Some(1));
        assert_eq!(budget.allowed.credit, CREDIT_MAX);
        assert_eq!(budget.saved.saved, SPIN_MAX + SLEEP_COST - 4_000);
        assert!(budget.saved.has_found);
        // One that comes after it is found by what the user allows, as far as `saved` is concerned.
        assert_eq!(budget.begin(second, false), WINDOW_MAX);
        budget.spun(SPIN_MAX + 10_000, Some(1));
        assert_eq!(budget.allowed.credit, CREDIT_MAX - 10_000);
        assert_eq!(budget.saved.saved, SLEEP_COST - 4_000);
        assert!(!budget.saved.has_found);
        // While the device works, the user's allowance pays for all.
        assert_eq!(budget.begin(second, true), WINDOW_MAX);
        budget.spun(7_000, Some(1));
        assert_eq!(budget.allowed.credit, CREDIT_MAX - 17_000);
        assert_eq!(budget.saved.saved, SLEEP_COST - 4_000);
    }

    #[test]
    fn requests_are_those_of_a_sleep_only_if_it_brought_them() {
        let mut budget = SpinBudget::new(0, 0);
        let per_sleep = |budget: &SpinBudget| budget.saved.per_sleep;
        budget.slept(1_000, true);
        budget.took(100);
        assert_eq!(per_sleep(&budget), ONE, "the thread waited for the device");
        // A sleep that ended without a request, and a spin that found one.
        budget.slept(1_000, false);
        assert!(budget.begin(0, false) > 0);
        budget.spun(100, Some(1));
        budget.took(100);
        assert_eq!(per_sleep(&budget), ONE, "a spin brought the requests");
        // A sleep that ended without a request, and one that a completion ended.
        budget.slept(1_000, false);
        budget.slept(1_000, true);
        budget.took(100);
        assert_eq!(per_sleep(&budget), ONE, "the last sleep was for the device");
        budget.slept(1_000, false);
        budget.took(100);
        assert!(per_sleep(&budget) > ONE);
    }
}
