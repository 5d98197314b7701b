//! Searches for facts that the events do not show and that would explain a decision. Each rule is
//! tried by replaying from an earlier state with it. It explains the decision only if every
//! decision since then equals the kernel's.

use super::{Replay, State};
use crate::steps::{Action, Step};
use crate::verdict::DeviationCause;

/// The numbers of ticks by which the clock may have been early or late.
const SHIFTS: [i64; 2] = [1, -1];
/// The most unsuccessful asks that are tried.
const ASKS_MAX: usize = 8;
/// The number of states back from which another tick, and unsuccessful asks, are tried.
const BACK: usize = 16;

/// The way in which decisions are replayed.
#[derive(Clone, Copy, Debug)]
struct SearchOptions {
    /// All at once, before the events between their issues.
    at_once: bool,
    /// The difference to the recorded tick.
    shift: i64,
    /// Including the request that the kernel chooses while it has no tag.
    ahead: bool,
    /// Including the kernel's unsuccessful asks in between.
    unsuccessful: bool,
}

const PLAIN: SearchOptions =
    SearchOptions { at_once: false, shift: 0, ahead: true, unsuccessful: true };

/// The rule that explains the decision at which the replay is, and the state after it.
pub(super) fn explain(replay: &Replay<'_>) -> Option<(DeviationCause, State)> {
    let target = replay.state.at;
    let back = || replay.checkpoints.iter().rev();
    let here = || std::iter::once(&replay.state).chain(back());
    let shifted = SHIFTS.iter().flat_map(|&shift| {
        here()
            .take(BACK)
            .map(move |state| (DeviationCause::Tick, state, 0, SearchOptions { shift, ..PLAIN }))
    });
    let early = SearchOptions { at_once: true, ..PLAIN };
    let at_once = back().map(|state| (DeviationCause::LocalList, state, 0, early));
    let early_shifted = SHIFTS.iter().flat_map(|&shift| {
        back().map(move |state| {
            (DeviationCause::LocalList, state, 0, SearchOptions { shift, ..early })
        })
    });
    let no_tag = SearchOptions { ahead: false, ..PLAIN };
    let later = back().map(|state| (DeviationCause::FreeTag, state, 0, no_tag));
    let not_asked = SearchOptions { unsuccessful: false, ..PLAIN };
    let fewer = back().map(|state| (DeviationCause::VainAsks, state, 0, not_asked));
    let more = (1..=ASKS_MAX).flat_map(|count| {
        here().take(BACK).flat_map(move |state| {
            [PLAIN, not_asked, no_tag, early]
                .map(|way| (DeviationCause::VainAsks, state, count, way))
        })
    });
    let mut tries =
        shifted.chain(at_once).chain(early_shifted).chain(later).chain(fewer).chain(more);
    tries.find_map(|(rule, state, asks, way)| {
        let state = replay.again(state, asks, way, target)?;
        Some((rule, state))
    })
}

impl Replay<'_> {
    /// The state after the issue at `target`, from an earlier one, if all decisions are equal.
    fn again(&self, from: &State, asks: usize, way: SearchOptions, target: usize) -> Option<State> {
        let tick = self.steps.get(from.at)?.tick.saturating_add_signed(way.shift);
        if asks > 0 && !from.policy.has_classes() {
            return None;
        }
        let mut state = from.clone();
        for _ in 0..asks {
            if state.policy.next(tick).is_some() {
                return None;
            }
        }
        match way.at_once {
            true => at_once(self.steps, &mut state, tick, target)?,
            false => one_by_one(self.steps, self.tags, &mut state, way, target)?,
        }
        Some(state)
    }
}

/// All decisions first, then the events between their issues.
fn at_once(steps: &[Step], state: &mut State, tick: u64, target: usize) -> Option<()> {
    let between = state.at..=target;
    for step in &steps[between.clone()] {
        if let Action::Issue(kernel) = step.action
            && state.choose(tick) != Some(kernel)
        {
            return None;
        }
    }
    while state.at <= target {
        match steps[state.at].action {
            Action::Issue(_) => state.sent(),
            _ => {
                state.apply(steps, 0);
            }
        }
    }
    Some(())
}

/// Each decision at its issue.
fn one_by_one(
    steps: &[Step],
    tags: usize,
    state: &mut State,
    way: SearchOptions,
    target: usize,
) -> Option<()> {
    while state.at <= target {
        let step = steps[state.at];
        let tick = step.tick.saturating_add_signed(way.shift);
        match step.action {
            Action::Issue(kernel) if state.choose(tick) == Some(kernel) => state.sent(),
            Action::Issue(_) => return None,
            _ => {
                state.apply(steps, 0);
            }
        }
        if !state.asks(steps) {
            continue;
        }
        match state.in_flight >= tags {
            true if way.ahead => state.choose_ahead(tick),
            false if way.unsuccessful => state.ask_expecting_none(tick),
            _ => {}
        }
    }
    Some(())
}
