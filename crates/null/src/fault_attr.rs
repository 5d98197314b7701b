//! How often a fault triggers: Linux's fault attributes (lib/fault-inject.c).

use std::fmt;
use std::str::FromStr;

/// How often a fault triggers. Written as `interval,probability,space,times`, as in Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultAttr {
    /// Considers only every `interval`-th candidate; 0 and 1 mean every one.
    pub interval: u32,
    /// Probability that a considered candidate fails, in percent.
    pub probability: u32,
    /// Number of requests that pass before the first failure.
    pub space: u32,
    /// Maximum number of failures; -1 for no limit.
    pub times: i32,
}

impl FromStr for FaultAttr {
    type Err = String;

    fn from_str(text: &str) -> Result<FaultAttr, String> {
        let wanted = || {
            "`interval,probability,space,times`, probability in percent, times -1 for no bound"
                .to_owned()
        };
        let parts: Vec<&str> = text.trim().split(',').map(str::trim).collect();
        let [interval, probability, space, times] = parts[..] else { return Err(wanted()) };
        let number = |part: &str| part.parse::<u32>().map_err(|_| wanted());
        let attr = FaultAttr {
            interval: number(interval)?,
            probability: number(probability)?,
            space: number(space)?,
            times: times.parse().map_err(|_| wanted())?,
        };
        if attr.probability > 100 || attr.times < -1 { Err(wanted()) } else { Ok(attr) }
    }
}

impl fmt::Display for FaultAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{},{}", self.interval, self.probability, self.space, self.times)
    }
}

/// A fault attribute with its state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FaultState {
    attr: FaultAttr,
    seen: u32,
}

impl FaultState {
    pub(crate) fn new(attr: FaultAttr) -> FaultState {
        FaultState { attr, seen: 0 }
    }

    /// Whether the fault triggers now. Calls `random` only if the result depends on it. The order
    /// of the checks is that of Linux's `should_fail`.
    pub(crate) fn fires(&mut self, random: impl FnOnce() -> u64) -> bool {
        let attr = &mut self.attr;
        if attr.probability == 0 || attr.times == 0 {
            return false;
        }
        if attr.space > 0 {
            attr.space -= 1;
            return false;
        }
        if attr.interval > 1 {
            self.seen += 1;
            if self.seen < attr.interval {
                return false;
            }
            self.seen = 0;
        }
        if attr.probability < 100 && random() % 100 >= u64::from(attr.probability) {
            return false;
        }
        if attr.times > 0 {
            attr.times -= 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_round_trip_and_invalid_ones_are_refused() {
        let attr: FaultAttr = "1, 100,0 ,-1".parse().unwrap();
        assert_eq!(attr, FaultAttr { interval: 1, probability: 100, space: 0, times: -1 });
        assert_eq!(attr.to_string().parse(), Ok(attr));
        for bad in ["", "1,2,3", "1,2,3,4,5", "1,101,0,1", "1,1,0,-2", "a,1,0,1", "1,1,-1,1"] {
            assert!(bad.parse::<FaultAttr>().is_err(), "{bad}");
        }
    }

    #[test]
    fn space_interval_and_times_are_obeyed() {
        let attr = FaultAttr { interval: 3, probability: 100, space: 2, times: 2 };
        let mut state = FaultState::new(attr);
        let struck: Vec<usize> = (0..20).filter(|_| state.fires(|| 0)).collect();
        assert_eq!(struck, [4, 7]);
        let mut state = FaultState::new(FaultAttr { interval: 1, probability: 30, ..attr });
        assert!(!state.fires(|| 0) && !state.fires(|| 0), "space comes first");
        assert!(!state.fires(|| 30) && state.fires(|| 29));
    }
}
