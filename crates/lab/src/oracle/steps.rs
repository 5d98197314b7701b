//! What a replay does with a trace, step by step: which request each event is of, found before any
//! policy is asked.
//!
//! Merges are the kernel's: whether two requests become one hangs on locks that were taken and on
//! limits that no event tells. So what joins another request is inserted with leave to join, and
//! nothing else has any; where it joins and what that does to the order is the policy's own.

use blockyard_core::bio::Prio;

use crate::oracle::parse::{SECTORS_MAX, TraceError};
use crate::oracle::trace::{Event, Kind, Trace, What};

/// As many requests wait at a time.
const REQUESTS_MAX: usize = 1 << 12;

/// A request, as far as a scheduler looks at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it does.
    pub kind: Kind,
    /// Its class.
    pub class: Prio,
    /// Its first sector.
    pub sector: u64,
    /// Its length in sectors.
    pub sectors: u32,
}

impl Request {
    /// The first sector after it.
    pub const fn end(&self) -> u64 {
        self.sector + self.sectors as u64
    }

    fn of(event: &Event) -> Request {
        let Event { kind, class, sector, sectors, .. } = *event;
        Request { kind, class: class.unwrap_or_default(), sector, sectors }
    }
}

/// Leave to become one with neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leave {
    /// How often it may go behind another request.
    pub follow: u8,
    /// How often another request may go behind it.
    pub lead: u8,
}

/// What a replay does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Inserts a request.
    Insert(Request),
    /// Inserts a request in one go with the one before.
    InsertMore(Request),
    /// Inserts what joins a request that waits.
    Join(Request, Leave),
    /// Inserts a request again that the driver gave back.
    Requeue(Request),
    /// Asks for a decision: the kernel's was this one.
    Issue(Request),
    /// Tells of a completion.
    Complete(Request),
}

/// A step of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The tick.
    pub tick: u64,
    /// What is done.
    pub action: Action,
    /// The number of the event, from 0.
    pub event: usize,
}

/// A trace as steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Most requests that waited at a time, with one that is about to join another.
    pub waiting_max: usize,
    /// How often something joined a request.
    pub joins: usize,
    /// How many completions there are; none if they were not recorded.
    pub completions: usize,
}

/// Requests that the kernel has at a time.
#[derive(Debug, Default)]
struct Requests {
    waiting: Vec<Request>,
    in_flight: Vec<Request>,
    given_back: Vec<Request>,
}

fn take(requests: &mut Vec<Request>, wanted: &Request) -> bool {
    let at = requests.iter().position(|request| request == wanted);
    at.map(|at| requests.remove(at)).is_some()
}

/// Finds out what each event is of.
///
/// # Errors
/// If one is of a request that cannot be there; with the event's number, from 1, as the line.
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
    /// What the first of these events is, and how many of them belong to it.
    fn action(&mut self, events: &[Event]) -> Result<(Option<Action>, usize), String> {
        let event = &events[0];
        let request = Request::of(event);
        let action = match event.what {
            What::Insert | What::InsertMore if take(&mut self.given_back, &request) => {
                self.waiting.push(request);
                Action::Requeue(request)
            }
            What::Insert => {
                self.waiting.push(request);
                Action::Insert(request)
            }
            What::InsertMore => {
                self.waiting.push(request);
                Action::InsertMore(request)
            }
            What::Issue => {
                // What the driver gave back may go straight to it again.
                let again = take(&mut self.given_back, &request);
                if !again && !take(&mut self.waiting, &request) {
                    return Err(format!("nobody inserted what is issued, {}", words(&request)));
                }
                self.in_flight.push(request);
                if again {
                    return Ok((None, 1));
                }
                Action::Issue(request)
            }
            What::Complete => match take(&mut self.in_flight, &request) {
                true => Action::Complete(request),
                // It was issued before the recording began.
                false => return Ok((None, 1)),
            },
            What::Requeue => {
                if !take(&mut self.in_flight, &request) {
                    return Err(format!("what is given back was not issued, {}", words(&request)));
                }
                self.given_back.push(request);
                return Ok((None, 1));
            }
            What::BackMerge | What::FrontMerge | What::Merge => {
                return Ok(self.join(events, request));
            }
        };
        Ok((Some(action), 1))
    }

    /// A bio or a request that becomes part of another one, which may then become part of a third.
    fn join(&mut self, events: &[Event], mut new: Request) -> (Option<Action>, usize) {
        let mut leave = Leave::default();
        let front = events[0].what == What::FrontMerge;
        let meets = |other: &Request| match front {
            true => other.sector == new.end(),
            false => other.end() == new.sector,
        };
        let is_bio = events[0].what.is_bio();
        let found = self.waiting.iter().position(|other| {
            other.kind == new.kind && (is_bio || other.class == new.class) && meets(other)
        });
        // Without one it joined a request that was still in a plug.
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
        while let Some(event) = events.get(used).filter(|event| event.what == What::Merge) {
            let merged = Request::of(event);
            let next = match merged == whole {
                // The grown request became part of the one before it.
                true => self.waiting.iter().position(|other| {
                    (other.kind, other.class, other.end())
                        == (whole.kind, whole.class, whole.sector)
                }),
                // The one behind it became part of the grown request.
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
fn together(one: &Request, other: &Request) -> Request {
    let sectors = one.sectors.saturating_add(other.sectors).min(SECTORS_MAX);
    Request { sector: one.sector.min(other.sector), sectors, ..*one }
}

/// A request in words.
pub fn words(request: &Request) -> String {
    let Request { kind, class, sector, sectors } = request;
    format!("{} {} {sector} + {sectors}", kind.letter(), class.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::trace::Header;

    fn event(what: What, sector: u64, sectors: u32) -> Event {
        let class = (!what.is_bio()).then_some(Prio::BestEffort);
        Event { at_us: 0, what, kind: Kind::Write, class, sector, sectors }
    }

    fn steps_of(events: &[Event]) -> Result<Vec<Action>, TraceError> {
        let trace = Trace { header: Header::default(), events: events.to_vec() };
        Ok(steps(&trace)?.steps.into_iter().map(|step| step.action).collect())
    }

    fn write(sector: u64, sectors: u32) -> Request {
        Request { kind: Kind::Write, class: Prio::BestEffort, sector, sectors }
    }

    #[test]
    fn what_joins_gets_leave_to_join_as_often_as_the_kernel_let_it() {
        use What::{BackMerge, FrontMerge, Insert, Issue, Merge};
        // A bio behind a request, which takes the one behind itself too.
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
        // A bio before a request, which becomes part of the one before it.
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
    fn what_is_given_back_is_inserted_again_or_goes_straight_to_the_driver() {
        use What::{Complete, Insert, Issue, Requeue};
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
        let error = steps_of(&[event(What::Insert, 0, 8), event(What::Issue, 8, 8)]).unwrap_err();
        assert!(error.why.contains("event 2: nobody inserted what is issued, W be 8 + 8"));
        let error = steps_of(&[event(What::Requeue, 8, 8)]).unwrap_err();
        assert!(error.why.contains("was not issued"), "{error}");
        // Only its end was recorded.
        assert_eq!(steps_of(&[event(What::Complete, 8, 8)]).unwrap(), []);
    }
}
