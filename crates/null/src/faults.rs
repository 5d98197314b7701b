//! Injected faults of a device: bad blocks, and requests that time out or are requeued.
//!
//! Queues read a published value once per batch and take the lock only while a fault is armed. Bad
//! blocks are looked up under a zone's lock, because only there an append knows its sector.
#![allow(clippy::disallowed_types)] // The mutex serializes the control plane's changes.

use std::sync::{Arc, Mutex, PoisonError};

use blockyard_core::Sector;
use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::rcu_cell::{RcuCell, RcuReader};
use blockyard_sync::spin_lock::SpinLock;

use crate::bad_blocks::{self, BadBlocks, RANGES_MAX};
use crate::config::NullConfig;
use crate::error::NullError;
use crate::fault_attr::{FaultAttr, FaultState};

/// Seed of the random numbers: any value but 0; the sequence is the same in every run.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// Which faults a queue has to check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Armed {
    pub(crate) badblocks: bool,
    pub(crate) timeout: bool,
    pub(crate) requeue: bool,
}

impl Armed {
    pub(crate) fn any(self) -> bool {
        self.badblocks | self.timeout | self.requeue
    }
}

/// The faults of a device.
#[derive(Debug)]
pub(crate) struct Faults {
    armed: Arc<RcuCell<Armed>>,
    state: SpinLock<State, { ranks::FAULTS }>,
    change: Mutex<()>,
    /// Partial I/O ends at the start of a block of this size.
    block_sectors: u64,
}

#[derive(Debug)]
struct State {
    badblocks: BadBlocks,
    once: bool,
    partial_io: bool,
    timeout: Option<FaultState>,
    requeue: Option<FaultState>,
    random: u64,
}

/// A fault that applies to a whole request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultHit {
    /// The request will time out.
    Timeout,
    /// The request is requeued unstarted.
    Requeue,
}

impl Faults {
    pub(crate) fn new(config: &NullConfig, block_sectors: u64) -> Result<Faults, NullError> {
        let state = State {
            badblocks: BadBlocks::default(),
            once: config.badblocks_once,
            partial_io: config.badblocks_partial_io,
            timeout: config.timeout.map(FaultState::new),
            requeue: config.requeue.map(FaultState::new),
            random: SEED,
        };
        let faults = Faults {
            armed: Arc::new(RcuCell::new(Armed::default())),
            state: SpinLock::new(state),
            change: Mutex::new(()),
            block_sectors,
        };
        if config.badblocks.trim().is_empty() {
            faults.change(|_| Ok(()))?;
        }
        for part in config.badblocks.split(',').filter(|part| !part.trim().is_empty()) {
            faults.change_badblocks(part)?;
        }
        Ok(faults)
    }

    /// A queue's view of the armed faults.
    pub(crate) fn watch(&self) -> RcuReader<Armed> {
        RcuReader::new(&self.armed)
    }

    fn change(
        &self,
        change: impl FnOnce(&mut State) -> Result<(), NullError>,
    ) -> Result<(), NullError> {
        let _one_at_a_time = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let armed = self.state.with(|state| {
            change(state)?;
            Ok::<Armed, NullError>(Armed {
                badblocks: !state.badblocks.is_empty(),
                timeout: state.timeout.is_some(),
                requeue: state.requeue.is_some(),
            })
        })?;
        self.armed.update(|_| armed);
        Ok(())
    }

    /// Lets queues use the fast path again when the last one-shot bad block has been hit. Called
    /// without any lock held.
    #[cold]
    pub(crate) fn disarm_spent(&self) {
        if self.state.with(|state| state.once && state.badblocks.is_empty()) {
            // An empty change only recomputes which faults are armed.
            let done = self.change(|_| Ok(()));
            debug_assert_eq!(done, Ok(()));
        }
    }

    /// Adds or clears bad blocks.
    pub(crate) fn change_badblocks(&self, text: &str) -> Result<(), NullError> {
        let invalid = |wanted: String| NullError::invalid("badblocks", text, wanted);
        let (add, range) = bad_blocks::parse(text).map_err(invalid)?;
        self.change(|state| {
            let list = &mut state.badblocks;
            let fits = if add { list.add(range) } else { list.remove(range) };
            if fits {
                return Ok(());
            }
            Err(invalid(format!("at most {RANGES_MAX} ranges; clear some first")))
        })
    }

    /// Changes one of the other settings; `false` if there is none of this name.
    pub(crate) fn set(&self, name: &str, value: &str) -> Result<bool, NullError> {
        let flag = |field: &'static str| match value.trim() {
            "0" => Ok(false),
            "1" => Ok(true),
            _ => Err(NullError::invalid(field, value, "0 or 1")),
        };
        let attr = |field: &'static str| match value.trim() {
            "" => Ok(None),
            text => text
                .parse::<FaultAttr>()
                .map(|attr| Some(FaultState::new(attr)))
                .map_err(|wanted| NullError::invalid(field, value, wanted)),
        };
        match name {
            "badblocks" => self.change_badblocks(value)?,
            "badblocks_once" => {
                let once = flag("badblocks_once")?;
                self.change(|state| {
                    state.once = once;
                    Ok(())
                })?;
            }
            "badblocks_partial_io" => {
                let partial_io = flag("badblocks_partial_io")?;
                self.change(|state| {
                    state.partial_io = partial_io;
                    Ok(())
                })?;
            }
            "timeout" => {
                let attr = attr("timeout")?;
                self.change(|state| {
                    state.timeout = attr;
                    Ok(())
                })?;
            }
            "requeue" => {
                let attr = attr("requeue")?;
                self.change(|state| {
                    state.requeue = attr;
                    Ok(())
                })?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Which fault, if any, applies to the next request.
    pub(crate) fn hit(&self) -> Option<FaultHit> {
        self.state.with(|state| {
            let State { timeout, requeue, random, .. } = state;
            let mut next = || {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                *random
            };
            if timeout.as_mut().is_some_and(|fault| fault.fires(&mut next)) {
                return Some(FaultHit::Timeout);
            }
            let requeues = requeue.as_mut().is_some_and(|fault| fault.fires(&mut next));
            requeues.then_some(FaultHit::Requeue)
        })
    }

    /// The number of sectors from `at` on that can be transferred before a bad block; `None` if
    /// none of them is bad. A merged request transfers nothing: it is going to be broken up.
    pub(crate) fn before_bad(&self, at: Sector, sectors: u64, merged: bool) -> Option<u64> {
        self.state.with(|state| {
            let bad = state.badblocks.first_in(at.0, at.0 + sectors)?;
            if merged {
                return Some(0);
            }
            if state.once {
                state.badblocks.remove(bad);
            }
            let good = bad.start.saturating_sub(at.0);
            Some(if state.partial_io { good / self.block_sectors * self.block_sectors } else { 0 })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_see_armed_faults() {
        let config = NullConfig { badblocks: "+8-15, +32-39".to_owned(), ..NullConfig::default() };
        let faults = Faults::new(&config, 8).unwrap();
        let mut watch = faults.watch();
        assert_eq!(**watch.get(), Armed { badblocks: true, ..Armed::default() });
        faults.set("badblocks", "-8-15").unwrap();
        faults.set("badblocks", "-32-39").unwrap();
        assert!(!watch.get().any());
        faults.set("timeout", "1,100,0,1").unwrap();
        assert!(watch.get().timeout);
        faults.set("timeout", "").unwrap();
        assert!(!watch.get().any());
        assert_eq!(faults.set("no_such", "1"), Ok(false));
        assert!(faults.set("badblocks_once", "yes").is_err());
        assert!(faults.set("requeue", "1").is_err());
    }

    #[test]
    fn once_and_partial_io() {
        let config = NullConfig { badblocks: "+12-15".to_owned(), ..NullConfig::default() };
        let faults = Faults::new(&config, 8).unwrap();
        assert_eq!(faults.before_bad(Sector(0), 8, false), None);
        assert_eq!(faults.before_bad(Sector(0), 24, false), Some(0));
        faults.set("badblocks_partial_io", "1").unwrap();
        assert_eq!(faults.before_bad(Sector(0), 24, false), Some(8));
        assert_eq!(faults.before_bad(Sector(14), 2, false), Some(0));
        faults.set("badblocks_once", "1").unwrap();
        assert_eq!(faults.before_bad(Sector(0), 24, true), Some(0));
        assert_eq!(faults.before_bad(Sector(0), 24, false), Some(8));
        assert_eq!(faults.before_bad(Sector(0), 24, false), None);
        let mut watch = faults.watch();
        assert!(watch.get().badblocks);
        faults.disarm_spent();
        assert!(!watch.get().any(), "the list is empty");
    }
}
