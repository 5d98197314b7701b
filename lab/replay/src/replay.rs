//! Replays a trace into the product's policy and compares every decision with the kernel's.
//!
//! The events tell when a request went to the driver, not when it was chosen. The kernel chooses
//! until no request is left or the driver has no free tag, and then sends the chosen requests; one
//! more than there are tags is chosen and waits in a local list. The replay does so too: it asks
//! the policy at each issue, and once more at the end of each run of issues.
//!
//! A decision that differs is undone, and [`search`] looks for a rule that explains it. If there is
//! none, the policy takes the request that the kernel took, and the replay continues.

mod search;

use std::collections::VecDeque;

use crate::parse::TraceError;
use crate::policy::Policy;
use crate::steps::{Action, ReplayRequest, Step, steps, words};
use crate::trace::Trace;
use crate::verdict::{Difference, ReplayResult};

/// The number of earlier states of a replay that are kept for the search.
const CHECKPOINTS_MAX: usize = 64;
/// The number of differences that are described.
const DESCRIBED_MAX: usize = 8;
/// The number of differences that are searched; a trace with more is from another scheduler.
const SEARCHES_MAX: usize = 100;

/// Replays the trace.
///
/// # Errors
/// If an event is of a request that cannot be there.
pub fn replay(trace: &Trace) -> Result<ReplayResult, TraceError> {
    let steps = steps(trace)?;
    let policy = Policy::new(&trace.header, steps.waiting_max);
    let mut replay = Replay {
        steps: &steps.steps,
        // Without completions it is unknown when the driver has tags.
        tags: match steps.completions {
            0 => usize::MAX,
            _ => trace.header.tags as usize,
        },
        state: State { at: 0, policy, in_flight: 0, chosen: None },
        checkpoints: VecDeque::new(),
        searches: 0,
        verdict: ReplayResult { joins: steps.joins, ..ReplayResult::default() },
    };
    replay.run();
    replay.verdict.expired = replay.state.policy.expired();
    Ok(replay.verdict)
}

/// The state of a replay at some point.
#[derive(Clone, Debug)]
struct State {
    /// The next step.
    at: usize,
    policy: Policy,
    /// The number of requests at the driver.
    in_flight: usize,
    /// The request that was chosen and waits for a tag.
    chosen: Option<ReplayRequest>,
}

impl State {
    /// The request that the policy would send now.
    fn choose(&mut self, tick: u64) -> Option<ReplayRequest> {
        self.chosen.take().or_else(|| self.policy.next(tick))
    }

    /// Counts the chosen request as sent to the driver.
    fn sent(&mut self) {
        self.in_flight += 1;
        self.at += 1;
    }

    /// Does the next step, or all of a list that is inserted at once, in its tick plus `shift`; an
    /// issue does nothing here. Returns the number of joins that did not find their request.
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

    /// Whether the kernel asks here without an issue that shows it: after the last issue of a run,
    /// and where a request arrived and none was issued.
    fn asks(&self, steps: &[Step]) -> bool {
        let next = steps.get(self.at).map(|step| step.action);
        let row_goes_on = matches!(next, None | Some(Action::Issue(_) | Action::InsertMore(_)));
        !row_goes_on && self.chosen.is_none() && !self.policy.is_empty()
    }

    /// Chooses the request that waits for a tag.
    fn choose_ahead(&mut self, tick: u64) {
        self.chosen = self.policy.next(tick);
    }

    /// Asks the policy where the kernel got no request. If the policy returns one, the kernel did
    /// not ask, or asked later: it would have issued that request.
    fn ask_expecting_none(&mut self, tick: u64) {
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
    verdict: ReplayResult,
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
                self.state.ask_expecting_none(step.tick);
            }
        }
    }

    /// Keeps the state for later searches.
    fn keep(&mut self) {
        if self.checkpoints.len() == CHECKPOINTS_MAX {
            self.checkpoints.pop_front();
        }
        self.checkpoints.push_back(self.state.clone());
    }

    /// Replays one decision.
    fn decide(&mut self, kernel: ReplayRequest, step: &Step) {
        self.verdict.decisions += 1;
        self.verdict.aged += usize::from(self.state.policy.is_passed_over(kernel.class));
        // A decision that differs is undone by returning to this state.
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
        // If the request does not even wait here, an earlier difference has already taken it.
        self.state.policy.take(&kernel, step.tick);
        self.state.sent();
    }
}
