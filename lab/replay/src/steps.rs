//! The steps of a replay: which request each event belongs to, found before any policy is asked.
//!
//! Merges are the kernel's: whether two requests merge depends on locks and on limits that no event
//! shows. So a request that merged is inserted with permission to merge, and no other request has
//! it. Where it merges and how that changes the order is up to the policy.

use blockyard_core::bio::Prio;

use crate::parse::{SECTORS_MAX, TraceError};
use crate::trace::{EventKind, OpKind, Trace, TraceEvent};

/// The most requests that wait at a time.
const REQUESTS_MAX: usize = 1 << 12;

/// The fields of a request that a scheduler uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayRequest {
    /// The operation.
    pub kind: OpKind,
    /// The priority class.
    pub class: Prio,
    /// The first sector.
    pub sector: u64,
    /// The length in sectors.
    pub sectors: u32,
}

impl ReplayRequest {
    /// The first sector after it.
    pub const fn end(&self) -> u64 {
        self.sector + self.sectors as u64
    }

    fn of(event: &TraceEvent) -> ReplayRequest {
        let TraceEvent { kind, class, sector, sectors, .. } = *event;
        ReplayRequest { kind, class: class.unwrap_or_default(), sector, sectors }
    }
}

/// The permission to merge with neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leave {
    /// How often the request may be appended to another request.
    pub follow: u8,
    /// How often another request may be appended to this one.
    pub lead: u8,
}

/// The action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Inserts a request.
    Insert(ReplayRequest),
    /// Inserts a request in one list with the request before.
    InsertMore(ReplayRequest),
    /// Inserts a bio or request that joins a waiting request.
    Join(ReplayRequest, Leave),
    /// Inserts a request again that the driver returned.
    Requeue(ReplayRequest),
    /// Asks for a decision; the kernel chose this request.
    Issue(ReplayRequest),
    /// Reports a completion.
    Complete(ReplayRequest),
}

/// A step of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The tick.
    pub tick: u64,
    /// The action.
    pub action: Action,
    /// The number of the event, from 0.
    pub event: usize,
}

/// A trace as steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// The most requests that waited at a time, including one that is about to join another.
    pub waiting_max: usize,
    /// The number of joins.
    pub joins: usize,
    /// The number of completions; 0 if they were not recorded.
    pub completions: usize,
}

/// The requests that the kernel has at a time.
#[derive(Debug, Default)]
struct Requests {
    waiting: Vec<ReplayRequest>,
    in_flight: Vec<ReplayRequest>,
    given_back: Vec<ReplayRequest>,
}

fn take(requests: &mut Vec<ReplayRequest>, wanted: &ReplayRequest) -> bool {
    let at = requests.iter().position(|request| request == wanted);
    at.map(|at| requests.remove(at)).is_some()
}

/// Finds the request of each event.
///
/// # Errors
/// If an event is of a request that cannot exist; the line is then the event's number, from 1.
pub fn steps(trace: &Trace) -> Result<Steps, TraceError> {
    let tick = trace.header.tick;
    let mut steps = Steps::default();
    let mut requests = Requests::default();
    let mut at = 0;
    while let Some(event) = trace.events.get(at) {
        let (found, used) = requests
            .action(&trace.events[at..])
            .map_err(|why| TraceError::new(at + 1, format!("event {}: {why}", at + 1)))?;
        if let Some(action) = found {
            steps.joins += usize::from(matches!(action, Action::Join(..)));
            steps.completions += usize::from(matches!(action, Action::Complete(_)));
            steps.steps.push(Step { tick: tick.count(event.at_us), action, event: at });
        }
        let waiting = requests.waiting.len() + requests.given_back.len() + 1;
        steps.waiting_max = steps.waiting_max.max(waiting);
        if waiting > REQUESTS_MAX {
            let why = format!("more than {REQUESTS_MAX} requests wait");
            return Err(TraceError::new(at + 1, format!("event {}: {why}", at + 1)));
        }
        at += used;
    }
    Ok(steps)
}

impl Requests {
    /// The action of the first of these events, and the number of events that belong to it.
    fn action(&mut self, events: &[TraceEvent]) -> Result<(Option<Action>, usize), String> {
        let event = &events[0];
        let request = ReplayRequest::of(event);
        let action = match event.what {
            EventKind::Insert | EventKind::InsertMore if take(&mut self.given_back, &request) => {
                self.waiting.push(request);
                Action::Requeue(request)
            }
            EventKind::Insert => {
                self.waiting.push(request);
                Action::Insert(request)
            }
            EventKind::InsertMore => {
                self.waiting.push(request);
                Action::InsertMore(request)
            }
            EventKind::Issue => {
                // A request that the driver returned may go directly to it again.
                let again = take(&mut self.given_back, &request);
                if !again && !take(&mut self.waiting, &request) {
                    return Err(format!(
                        "the kernel issued a request that was never inserted, {}",
                        words(&request)
                    ));
                }
                self.in_flight.push(request);
                if again {
                    return Ok((None, 1));
                }
                Action::Issue(request)
            }
            EventKind::Complete => match take(&mut self.in_flight, &request) {
                true => Action::Complete(request),
                // It was issued before the recording began.
                false => return Ok((None, 1)),
            },
            EventKind::Requeue => {
                if !take(&mut self.in_flight, &request) {
                    return Err(format!("what is given back was not issued, {}", words(&request)));
                }
                self.given_back.push(request);
                return Ok((None, 1));
            }
            EventKind::BackMerge | EventKind::FrontMerge | EventKind::Merge => {
                return Ok(self.join(events, request));
            }
        };
        Ok((Some(action), 1))
    }

    /// A bio or request that becomes part of another one, which may then become part of a third.
    fn join(&mut self, events: &[TraceEvent], mut new: ReplayRequest) -> (Option<Action>, usize) {
        let mut leave = Leave::default();
        let front = events[0].what == EventKind::FrontMerge;
        let meets = |other: &ReplayRequest| match front {
            true => other.sector == new.end(),
            false => other.end() == new.sector,
        };
        let is_bio = events[0].what.is_bio();
        let found = self.waiting.iter().position(|other| {
            other.kind == new.kind && (is_bio || other.class == new.class) && meets(other)
        });
        // If there is none, it joined a request that was still in a plug.
        let Some(at) = found else { return (None, 1) };
        let other = self.waiting.remove(at);
        new.class = other.class;
        if front {
            leave.lead += 1
        } else {
            leave.follow += 1
        }
        let mut whole = together(&new, &other);
        let mut used = 1;
        // A request that grew may touch the next one: the kernel tries that at once.
        while let Some(event) = events.get(used).filter(|event| event.what == EventKind::Merge) {
            let merged = ReplayRequest::of(event);
            let next = match merged == whole {
                // The grown request became part of the one before it.
                true => self.waiting.iter().position(|other| {
                    (other.kind, other.class, other.end())
                        == (whole.kind, whole.class, whole.sector)
                }),
                // The request after it became part of the grown request.
                false => self.waiting.iter().position(|other| {
                    *other == merged
                        && (other.kind, other.class, other.sector)
                            == (whole.kind, whole.class, whole.end())
                }),
            };
            let Some(next) = next else { break };
            match merged == whole {
                true => leave.follow = leave.follow.saturating_add(1),
                false => leave.lead = leave.lead.saturating_add(1),
            }
            whole = together(&whole, &self.waiting.remove(next));
            used += 1;
        }
        self.waiting.push(whole);
        (Some(Action::Join(new, leave)), used)
    }
}

/// Two neighbours as one.
fn together(one: &ReplayRequest, other: &ReplayRequest) -> ReplayRequest {
    let sectors = one.sectors.saturating_add(other.sectors).min(SECTORS_MAX);
    ReplayRequest { sector: one.sector.min(other.sector), sectors, ..*one }
}

/// A request in words.
pub fn words(request: &ReplayRequest) -> String {
    let ReplayRequest { kind, class, sector, sectors } = request;
    format!("{} {} {sector} + {sectors}", kind.letter(), class.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::TraceHeader;

    fn event(what: EventKind, sector: u64, sectors: u32) -> TraceEvent {
        let class = (!what.is_bio()).then_some(Prio::BestEffort);
        TraceEvent { at_us: 0, what, kind: OpKind::Write, class, sector, sectors }
    }

    fn steps_of(events: &[TraceEvent]) -> Result<Vec<Action>, TraceError> {
        let trace = Trace { header: TraceHeader::default(), events: events.to_vec() };
        Ok(steps(&trace)?.steps.into_iter().map(|step| step.action).collect())
    }

    fn write(sector: u64, sectors: u32) -> ReplayRequest {
        ReplayRequest { kind: OpKind::Write, class: Prio::BestEffort, sector, sectors }
    }

    #[test]
    fn a_merge_is_permitted_as_often_as_by_the_kernel() {
        use EventKind::{BackMerge, FrontMerge, Insert, Issue, Merge};
        // A bio that is appended to a request, which then also absorbs the request after it.
        let actions = steps_of(&[
            event(Insert, 0, 8),
            event(Insert, 16, 8),
            event(BackMerge, 8, 8),
            event(Merge, 16, 8),
            event(Issue, 0, 24),
        ]);
        let join = Action::Join(write(8, 8), Leave { follow: 1, lead: 1 });
        let (first, second) = (Action::Insert(write(0, 8)), Action::Insert(write(16, 8)));
        assert_eq!(actions.unwrap(), [first, second, join, Action::Issue(write(0, 24))]);
        // A bio that is prepended to a request, which becomes part of the request before it.
        let actions = steps_of(&[
            event(Insert, 0, 8),
            event(Insert, 16, 8),
            event(FrontMerge, 8, 8),
            event(Merge, 8, 16),
            event(Issue, 0, 24),
        ]);
        assert_eq!(actions.unwrap(), [first, second, join, Action::Issue(write(0, 24))]);
        // A request that is merged while it is inserted.
        let actions = steps_of(&[event(Insert, 0, 8), event(Merge, 8, 8), event(Issue, 0, 16)]);
        let join = Action::Join(write(8, 8), Leave { follow: 1, lead: 0 });
        assert_eq!(actions.unwrap(), [first, join, Action::Issue(write(0, 16))]);
    }

    #[test]
    fn a_requeued_request_is_inserted_again_or_sent_to_the_driver() {
        use EventKind::{Complete, Insert, Issue, Requeue};
        let once = [event(Insert, 0, 8), event(Issue, 0, 8), event(Requeue, 0, 8)];
        let (insert, issue) = (Action::Insert(write(0, 8)), Action::Issue(write(0, 8)));
        let (again, done) = (Action::Requeue(write(0, 8)), Action::Complete(write(0, 8)));
        let back = [event(Insert, 0, 8), event(Issue, 0, 8), event(Complete, 0, 8)];
        let actions = steps_of(&[&once[..], &back].concat());
        assert_eq!(actions.unwrap(), [insert, issue, again, issue, done]);
        let actions = steps_of(&[&once[..], &back[1..]].concat());
        assert_eq!(actions.unwrap(), [insert, issue, done]);
    }

    #[test]
    fn a_request_from_nowhere_is_refused_by_its_event() {
        let error =
            steps_of(&[event(EventKind::Insert, 0, 8), event(EventKind::Issue, 8, 8)]).unwrap_err();
        assert!(
            error.why.contains(
                "event 2: the kernel issued a request that was never inserted, W be 8 + 8"
            )
        );
        let error = steps_of(&[event(EventKind::Requeue, 8, 8)]).unwrap_err();
        assert!(error.why.contains("was not issued"), "{error}");
        // Only the completion was recorded.
        assert_eq!(steps_of(&[event(EventKind::Complete, 8, 8)]).unwrap(), []);
    }
}
