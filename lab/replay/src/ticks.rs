//! The times of the kernel's ticks: deadlines are counted in ticks, and tracefs prints none.
//!
//! The events of the kernel's timers contain a tick number. Each gives a bound: the tick `n` began
//! at or before the event. The tightest bound is accurate to the time from a tick to the first
//! timer that runs after it, some microseconds.

use crate::trace::Tick;

/// The tick rates of kernel configurations, in Hz.
const RATES: [u32; 4] = [100, 250, 300, 1000];
/// A sample may be late by this part of a period and still show the rate.
const SLACK: f64 = 0.6;
/// The least number of ticks from which the rate can be told.
const SPAN_MIN: u64 = 8;

/// A tick number at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickSample {
    /// The time in microseconds of the recording's clock.
    pub at_us: u64,
    /// The number of the tick.
    pub tick: u64,
}

impl TickSample {
    /// Parses an event of the kernel's timers.
    pub fn parse(at_us: u64, event: &str, rest: &str) -> Option<TickSample> {
        let value = |key: &str| {
            let (_, value) = rest.split_once(key)?;
            let end = value.find(|letter: char| !letter.is_ascii_digit() && letter != '-');
            value[..end.unwrap_or(value.len())].parse::<i64>().ok()
        };
        let tick = match event {
            "timer_start" => value(" expires=")?.checked_sub(value("[timeout=")?)?,
            "timer_expire_entry" => value(" now=")?,
            _ => return None,
        };
        Some(TickSample { at_us, tick: u64::try_from(tick).ok()? })
    }
}

/// The tick's period, and its phase at `began_us`. `None` if there are too few samples.
pub fn tick(samples: &[TickSample], began_us: u64) -> Option<Tick> {
    let first = samples.first()?;
    let span = samples.iter().map(|sample| sample.tick).max()?.checked_sub(first.tick)?;
    if span < SPAN_MIN {
        return None;
    }
    RATES.into_iter().find_map(|rate| {
        let period = 1e6 / f64::from(rate);
        let since = |sample: &TickSample| {
            let ticks = sample.tick as f64 - first.tick as f64;
            sample.at_us as f64 - first.at_us as f64 - ticks * period
        };
        let least = samples.iter().map(since).fold(f64::INFINITY, f64::min);
        let most = samples.iter().map(since).fold(f64::NEG_INFINITY, f64::max);
        if most - least > period * (1.0 + SLACK) {
            return None;
        }
        let phase = began_us as f64 - (first.at_us as f64 + least);
        let period_us = period.round() as u32;
        let phase_us = phase.rem_euclid(period) as u32;
        Some(Tick { period_us, phase_us: phase_us.min(period_us - 1) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_say_which_tick_it_is() {
        let start = "timer=000 function=f expires=4295227 [timeout=250] bucket_expiry=4 cpu=1";
        assert_eq!(TickSample::parse(7, "timer_start", start).unwrap().tick, 4_294_977);
        let past = "timer=000 function=f expires=100 [timeout=-3] bucket_expiry=4 cpu=1";
        assert_eq!(TickSample::parse(7, "timer_start", past).unwrap().tick, 103);
        let entry = "timer=000 function=f now=4295101 baseclk=4295101";
        let want = TickSample { at_us: 7, tick: 4_295_101 };
        assert_eq!(TickSample::parse(7, "timer_expire_entry", entry), Some(want));
        assert_eq!(TickSample::parse(7, "timer_cancel", entry), None);
        assert_eq!(TickSample::parse(7, "timer_start", "expires=x"), None);
    }

    #[test]
    fn the_period_and_the_phase_come_from_the_samples() {
        for rate in RATES {
            let period = 1e6 / f64::from(rate);
            let sample = |tick: u64, late: f64| TickSample {
                at_us: (5000.0 + period * tick as f64 + late) as u64,
                tick: 777 + tick,
            };
            let samples = [
                sample(0, period * 0.8),
                sample(3, 30.0),
                sample(4, 2.0),
                sample(11, period * 0.9),
                sample(60, period * 0.5),
            ];
            let tick = tick(&samples, 5000 + 250).unwrap();
            assert_eq!(tick.period_us, period.round() as u32);
            assert!((246..=250).contains(&tick.phase_us), "{rate}: {tick:?}");
        }
    }

    #[test]
    fn too_few_samples_say_nothing() {
        assert_eq!(tick(&[], 0), None);
        assert_eq!(tick(&[TickSample { at_us: 3, tick: 9 }; 4], 0), None);
    }
}
