//! What a replay found: equal decisions, others with the rule that explains them, and the rest.

use std::fmt;

use serde::Serialize;

/// Why the kernel decided otherwise when it was asked at the moment of an issue: what the events do
/// not tell, and what was found by asking the policy with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The clock ticked a little earlier or later than the recording says.
    Tick,
    /// The decision was made before the events ahead of its issue: the request lay in the kernel's
    /// local list meanwhile.
    LocalList,
    /// The decision was made after tags had run out and come back, not before.
    FreeTag,
    /// The kernel had asked in vain before, more often or less often than it seems: an answer that
    /// a class's turn forbids leaves its mark on batch and direction all the same.
    VainAsks,
}

impl Rule {
    /// All of them, in the order in which they are tried.
    pub const ALL: [Rule; 4] = [Rule::Tick, Rule::LocalList, Rule::FreeTag, Rule::VainAsks];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Rule::Tick => "tick",
            Rule::LocalList => "local-list",
            Rule::FreeTag => "free-tag",
            Rule::VainAsks => "vain-asks",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A decision that no rule explains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The number of the event, from 1.
    pub event: usize,
    /// What the kernel took.
    pub kernel: String,
    /// What the policy would have taken.
    pub policy: Option<String>,
}

/// What a replay found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Decisions of the kernel.
    pub decisions: usize,
    /// Those that the policy made too.
    pub equal: usize,
    /// The others that a rule explains.
    pub explained: Vec<(Rule, usize)>,
    /// How many no rule explains.
    pub unexplained: usize,
    /// The first of them.
    pub differences: Vec<Difference>,
    /// Bios and requests that joined another one.
    pub joins: usize,
    /// Those that did not find it here.
    pub joins_missed: usize,
    /// Decisions for a request whose deadline had passed.
    pub expired: u64,
    /// Decisions for a class while one before it had requests.
    pub aged: usize,
}

impl Verdict {
    /// The share of equal decisions; 1 if there was none to make.
    pub fn share(&self) -> f64 {
        match self.decisions {
            0 => 1.0,
            decisions => self.equal as f64 / decisions as f64,
        }
    }

    /// How many decisions this rule explains.
    pub fn explained_by(&self, rule: Rule) -> usize {
        let found = self.explained.iter().find(|(other, _)| *other == rule);
        found.map_or(0, |(_, count)| *count)
    }

    /// How many decisions some rule explains.
    pub fn explained_all(&self) -> usize {
        self.explained.iter().map(|(_, count)| count).sum()
    }

    pub(crate) fn explain(&mut self, rule: Rule) {
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
