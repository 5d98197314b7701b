//! Replays a trace into the product's policy and holds every decision against the kernel's.
//!
//! The events tell when a request went to the driver, not when it was chosen. The kernel chooses
//! until nothing is left to choose or the driver has no tag any more, and then sends what it chose;
//! one request more than there are tags is chosen and waits in a local list. The replay does the
//! same: it asks at each issue, and once more at the end of each row of issues. A decision that
//! differs is put back and [`search`] looks for a rule that explains it; if there is none, the
//! policy takes what the kernel took, and the replay goes on.

mod search;

use std::collections::VecDeque;

use crate::oracle::parse::TraceError;
use crate::oracle::policy::Policy;
use crate::oracle::steps::{Action, Request, Step, steps, words};
use crate::oracle::trace::Trace;
use crate::oracle::verdict::{Difference, Verdict};

/// Earlier states of a replay that are kept to search from.
const CHECKPOINTS_MAX: usize = 64;
/// As many differences are described.
const DESCRIBED_MAX: usize = 8;
/// As many differences are looked into; a trace with more is of another scheduler.
const SEARCHES_MAX: usize = 100;

/// Replays the trace.
///
/// # Errors
/// If an event is of a request that cannot be there.
pub fn replay(trace: &Trace) -> Result<Verdict, TraceError> {
    let steps = steps(trace)?;
    let policy = Policy::new(&trace.header, steps.waiting_max);
    let mut replay = Replay {
        steps: &steps.steps,
        // Without completions nobody knows when the driver has tags.
        tags: match steps.completions {
            0 => usize::MAX,
            _ => trace.header.tags as usize,
        },
        state: State { at: 0, policy, in_flight: 0, chosen: None },
        checkpoints: VecDeque::new(),
        searches: 0,
        verdict: Verdict { joins: steps.joins, ..Verdict::default() },
    };
    replay.run();
    replay.verdict.expired = replay.state.policy.expired();
    Ok(replay.verdict)
}

/// A replay at some point.
#[derive(Clone, Debug)]
struct State {
    /// The next step.
    at: usize,
    policy: Policy,
    /// Requests at the driver.
    in_flight: usize,
    /// What was chosen and waits for a tag.
    chosen: Option<Request>,
}

impl State {
    /// Whom the kernel would send now.
    fn choose(&mut self, tick: u64) -> Option<Request> {
        self.chosen.take().or_else(|| self.policy.next(tick))
    }

    /// What was chosen is at the driver.
    fn sent(&mut self) {
        self.in_flight += 1;
        self.at += 1;
    }

    /// Does the next step, or all of a list that is inserted in one go, in its tick and a shift of
    /// it; of an issue nothing. Says how many joins did not find what they join.
    fn apply(&mut self, steps: &[Step], shift: i64) -> usize {
        let step = steps[self.at];
        let now = step.tick.saturating_add_signed(shift);
        self.at += 1;
        match step.action {
            Action::Insert(request) | Action::InsertMore(request) => {
                self.policy.insert(request, now);
                while let Some(step) = steps.get(self.at)
                    && let Action::InsertMore(request) = step.action
                {
                    self.policy.insert(request, now);
                    self.at += 1;
                }
            }
            Action::Join(request, leave) => {
                return usize::from(!self.policy.join(request, leave, now));
            }
            Action::Requeue(request) => {
                self.in_flight = self.in_flight.saturating_sub(1);
                self.policy.requeue(request, now);
            }
            Action::Complete(request) => {
                self.in_flight = self.in_flight.saturating_sub(1);
                self.policy.completed(&request);
            }
            Action::Issue(_) => {}
        }
        0
    }

    /// Whether the kernel asks here without an issue that tells: behind the last issue of a row,
    /// and where something came and nothing was issued.
    fn asks(&self, steps: &[Step]) -> bool {
        let next = steps.get(self.at).map(|step| step.action);
        let row_goes_on = matches!(next, None | Some(Action::Issue(_) | Action::InsertMore(_)));
        !row_goes_on && self.chosen.is_none() && !self.policy.is_empty()
    }

    /// Chooses what waits for a tag.
    fn choose_ahead(&mut self, tick: u64) {
        self.chosen = self.policy.next(tick);
    }

    /// Asks for what the kernel did not get. An answer would have been issued, so it did not ask,
    /// or asked later.
    fn ask_in_vain(&mut self, tick: u64) {
        if !self.policy.has_classes() {
            return;
        }
        let before = self.policy.clone();
        if self.policy.next(tick).is_some() {
            self.policy = before;
        }
    }
}

struct Replay<'a> {
    steps: &'a [Step],
    tags: usize,
    state: State,
    checkpoints: VecDeque<State>,
    searches: usize,
    verdict: Verdict,
}

impl Replay<'_> {
    fn run(&mut self) {
        while let Some(step) = self.steps.get(self.state.at) {
            match step.action {
                Action::Issue(request) => self.decide(request, step),
                _ => {
                    self.keep();
                    self.verdict.joins_missed += self.state.apply(self.steps, 0);
                }
            }
            if !self.state.asks(self.steps) {
                continue;
            }
            if self.state.in_flight >= self.tags {
                self.keep();
                self.state.choose_ahead(step.tick);
            } else {
                self.state.ask_in_vain(step.tick);
            }
        }
    }

    /// Keeps the state to search from.
    fn keep(&mut self) {
        if self.checkpoints.len() == CHECKPOINTS_MAX {
            self.checkpoints.pop_front();
        }
        self.checkpoints.push_back(self.state.clone());
    }

    /// One decision.
    fn decide(&mut self, kernel: Request, step: &Step) {
        self.verdict.decisions += 1;
        self.verdict.aged += usize::from(self.state.policy.is_passed_over(kernel.class));
        // What differs is put back by going back to this.
        let before = self.state.clone();
        let choice = self.state.choose(step.tick);
        if choice == Some(kernel) {
            self.verdict.equal += 1;
            self.state.sent();
            return;
        }
        self.state = before;
        self.searches += 1;
        let found = if self.searches > SEARCHES_MAX { None } else { search::explain(self) };
        if let Some((rule, state)) = found {
            self.verdict.explain(rule);
            self.state = state;
            return;
        }
        self.verdict.unexplained += 1;
        if self.verdict.differences.len() < DESCRIBED_MAX {
            let (kernel, policy) = (words(&kernel), choice.as_ref().map(words));
            let event = step.event + 1;
            self.verdict.differences.push(Difference { event, kernel, policy });
        }
        // If it does not even wait here, it is gone already by an earlier difference.
        self.state.policy.take(&kernel, step.tick);
        self.state.sent();
    }
}
