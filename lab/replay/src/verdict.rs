//! The result of a replay: equal decisions, different ones with a rule that explains them, and the
//! rest.

use std::fmt;

use serde::Serialize;

/// The least share of equal decisions.
pub const SHARE_MIN: f64 = 0.99;

/// A reason why the kernel decided differently from the policy that is asked at the issue: a fact
/// that the events do not show, with which the policy decides as the kernel did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviationCause {
    /// The clock ticked a little earlier or later than the recording says.
    Tick,
    /// The kernel decided before the events that precede the issue: meanwhile the request was in
    /// the kernel's local list.
    LocalList,
    /// The kernel decided after tags had run out and become free again, not before.
    FreeTag,
    /// The kernel had asked without a result more or less often than it seems. An ask that a
    /// class's turn forbids changes batch and direction all the same.
    VainAsks,
}

impl DeviationCause {
    /// All of them, in the order in which they are tried.
    pub const ALL: [DeviationCause; 4] = [
        DeviationCause::Tick,
        DeviationCause::LocalList,
        DeviationCause::FreeTag,
        DeviationCause::VainAsks,
    ];

    /// The rule's name.
    pub const fn name(self) -> &'static str {
        match self {
            DeviationCause::Tick => "tick",
            DeviationCause::LocalList => "local-list",
            DeviationCause::FreeTag => "free-tag",
            DeviationCause::VainAsks => "vain-asks",
        }
    }
}

impl fmt::Display for DeviationCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A decision that no rule explains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The number of the event, from 1.
    pub event: usize,
    /// The request that the kernel chose.
    pub kernel: String,
    /// The request that the policy chose, if any.
    pub policy: Option<String>,
}

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplayResult {
    /// Decisions of the kernel.
    pub decisions: usize,
    /// The decisions that the policy made too.
    pub equal: usize,
    /// The other decisions that a rule explains.
    pub explained: Vec<(DeviationCause, usize)>,
    /// The number of decisions that no rule explains.
    pub unexplained: usize,
    /// The first unexplained decisions.
    pub differences: Vec<Difference>,
    /// The number of bios and requests that joined another one.
    pub joins: usize,
    /// The number of joins that did not find their request here.
    pub joins_missed: usize,
    /// The number of decisions for a request whose deadline had passed.
    pub expired: u64,
    /// The number of decisions for a class while a class before it had requests.
    pub aged: usize,
}

impl ReplayResult {
    /// The share of equal decisions; 1 if there were none.
    pub fn share(&self) -> f64 {
        match self.decisions {
            0 => 1.0,
            decisions => self.equal as f64 / decisions as f64,
        }
    }

    /// The number of decisions that this rule explains.
    pub fn explained_by(&self, rule: DeviationCause) -> usize {
        let found = self.explained.iter().find(|(other, _)| *other == rule);
        found.map_or(0, |(_, count)| *count)
    }

    /// The number of decisions that any rule explains.
    pub fn explained_all(&self) -> usize {
        self.explained.iter().map(|(_, count)| count).sum()
    }

    pub(crate) fn explain(&mut self, rule: DeviationCause) {
        match self.explained.iter_mut().find(|(other, _)| *other == rule) {
            Some((_, count)) => *count += 1,
            None => self.explained.push((rule, 1)),
        }
    }

    /// Whether at least this share is equal and the rest explained.
    pub fn is_good(&self, share_min: f64) -> bool {
        self.share() >= share_min && self.unexplained == 0 && self.joins_missed == 0
    }
}
