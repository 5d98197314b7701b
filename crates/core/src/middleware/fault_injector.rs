//! The control plane of the fault injector: its rules, and the counts of what they did.
#![allow(clippy::disallowed_types)] // The last number is control plane.

use std::sync::{Arc, Mutex, PoisonError};

use blockyard_sync::rcu_cell::RcuCell;

use super::interceptors::{ArmedRule, FaultCounts, Interceptors};
use crate::device::DeviceError;
use crate::inject::Rule;

/// Maximum number of rules: every request is compared with each rule.
pub const RULES_MAX: usize = 1024;

/// The rules of a device's fault injector. Changes take effect with the next batch of each queue;
/// completions that are delayed already keep their delay.
#[derive(Debug)]
pub struct FaultInjector {
    interceptors: Arc<RcuCell<Interceptors>>,
    counts: Arc<FaultCounts>,
    seed: u64,
    /// The number of the newest rule.
    id_last: Mutex<u64>,
}

/// A rule, and what it did.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleStatus {
    /// The number of the rule, which no other rule of the device ever gets.
    pub id: u64,
    /// The rule.
    pub rule: Rule,
    /// Requests that matched, whether or not the chance hit.
    pub matched: u64,
    /// Requests that the rule failed or delayed.
    pub applied: u64,
}

impl RuleStatus {
    fn of(armed: &ArmedRule) -> RuleStatus {
        RuleStatus {
            id: armed.id,
            rule: armed.rule.clone(),
            matched: armed.matched.used(),
            applied: armed.applied.used(),
        }
    }
}

/// How many faults were injected since the device was opened, also by rules that were removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedFaults {
    /// Requests that were failed.
    pub failed: u64,
    /// Requests whose completions were delayed.
    pub delayed: u64,
}

impl FaultInjector {
    pub(super) fn new(
        interceptors: &Arc<RcuCell<Interceptors>>,
        counts: &Arc<FaultCounts>,
        seed: u64,
    ) -> FaultInjector {
        let (interceptors, counts) = (Arc::clone(interceptors), Arc::clone(counts));
        FaultInjector { interceptors, counts, seed, id_last: Mutex::new(0) }
    }

    /// Adds a rule as the newest one; returns its number.
    ///
    /// # Errors
    /// If there are [`RULES_MAX`] rules already.
    pub fn add(&self, rule: Rule) -> Result<u64, DeviceError> {
        // A panic of another lock holder leaves the number usable.
        let mut id_last = self.id_last.lock().unwrap_or_else(PoisonError::into_inner);
        if self.interceptors.get().rules.len() >= RULES_MAX {
            return Err(DeviceError::Invalid {
                field: "add",
                value: format!("rule {}", RULES_MAX + 1),
                wanted: format!("at most {RULES_MAX} rules; `removeall` removes them"),
            });
        }
        *id_last += 1;
        let armed = Arc::new(ArmedRule::new(*id_last, rule, self.seed));
        self.change(|rules| std::iter::once(armed).chain(rules.iter().cloned()).collect());
        Ok(*id_last)
    }

    /// Removes the rule of this number; returns the rule and what it did, if there was one.
    pub fn remove(&self, id: u64) -> Option<RuleStatus> {
        let mut removed = None;
        self.change(|rules| {
            removed = rules.iter().find(|armed| armed.id == id).cloned();
            rules.iter().filter(|armed| armed.id != id).cloned().collect()
        });
        removed.map(|armed| RuleStatus::of(&armed))
    }

    /// Removes all rules; returns how many there were.
    pub fn remove_all(&self) -> usize {
        let mut removed = 0;
        self.change(|rules| {
            removed = rules.len();
            Vec::new()
        });
        removed
    }

    /// The rules, newest first.
    pub fn rules(&self) -> Vec<RuleStatus> {
        self.interceptors.get().rules.iter().map(|armed| RuleStatus::of(armed)).collect()
    }

    /// How many faults were injected since the device was opened.
    pub fn injected(&self) -> InjectedFaults {
        let FaultCounts { failed, delayed } = &*self.counts;
        InjectedFaults { failed: failed.used(), delayed: delayed.used() }
    }

    fn change(&self, change: impl FnOnce(&[Arc<ArmedRule>]) -> Vec<Arc<ArmedRule>>) {
        self.interceptors
            .update(|now| Interceptors { rules: Arc::new(change(&now.rules)), ..now.clone() });
    }
}
