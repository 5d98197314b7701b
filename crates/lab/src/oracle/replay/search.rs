//! Looks for what the events do not tell and would explain a decision: each rule is tried by
//! replaying from an earlier state with it, and explains the decision only if every decision since
//! then comes out as the kernel's did.

use super::{Replay, State};
use crate::oracle::steps::{Action, Step};
use crate::oracle::verdict::Rule;

/// The clock may have ticked so much earlier or later.
const SHIFTS: [i64; 2] = [1, -1];
/// So often the kernel may have asked in vain.
const VAIN_MAX: usize = 8;
/// From so many states back another tick, and asking in vain, is tried.
const BACK: usize = 16;

/// How decisions are replayed.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// All at once, ahead of whatever came between their issues.
    at_once: bool,
    /// In this tick, counted from what the recording says.
    shift: i64,
    /// With what the kernel chooses while it has no tag.
    ahead: bool,
    /// With what the kernel asked in vain between.
    vain: bool,
}

const PLAIN: Way = Way { at_once: false, shift: 0, ahead: true, vain: true };

/// The rule that explains the decision that the replay is at, and the state after it.
pub(super) fn explain(replay: &Replay<'_>) -> Option<(Rule, State)> {
    let target = replay.state.at;
    let back = || replay.checkpoints.iter().rev();
    let here = || std::iter::once(&replay.state).chain(back());
    let shifted = SHIFTS.iter().flat_map(|&shift| {
        here().take(BACK).map(move |state| (Rule::Tick, state, 0, Way { shift, ..PLAIN }))
    });
    let early = Way { at_once: true, ..PLAIN };
    let at_once = back().map(|state| (Rule::LocalList, state, 0, early));
    let early_shifted = SHIFTS.iter().flat_map(|&shift| {
        back().map(move |state| (Rule::LocalList, state, 0, Way { shift, ..early }))
    });
    let no_tag = Way { ahead: false, ..PLAIN };
    let later = back().map(|state| (Rule::FreeTag, state, 0, no_tag));
    let not_asked = Way { vain: false, ..PLAIN };
    let fewer = back().map(|state| (Rule::VainAsks, state, 0, not_asked));
    let more = (1..=VAIN_MAX).flat_map(|count| {
        here().take(BACK).flat_map(move |state| {
            [PLAIN, not_asked, no_tag, early].map(|way| (Rule::VainAsks, state, count, way))
        })
    });
    let mut tries =
        shifted.chain(at_once).chain(early_shifted).chain(later).chain(fewer).chain(more);
    tries.find_map(|(rule, state, vain, way)| {
        let state = replay.again(state, vain, way, target)?;
        Some((rule, state))
    })
}

impl Replay<'_> {
    /// The state behind the issue at `target`, from an earlier one, if all decisions come out.
    fn again(&self, from: &State, vain: usize, way: Way, target: usize) -> Option<State> {
        let tick = self.steps.get(from.at)?.tick.saturating_add_signed(way.shift);
        if vain > 0 && !from.policy.has_classes() {
            return None;
        }
        let mut state = from.clone();
        for _ in 0..vain {
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

/// All decisions first, then what came between their issues.
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
    way: Way,
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
            false if way.vain => state.ask_in_vain(tick),
            _ => {}
        }
    }
    Some(())
}
