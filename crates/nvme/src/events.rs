//! Asynchronous events: the requests of a host that wait for one, and the one notice that a
//! controller can send (NVM Express Base Specification 2.0, 5.2). No I/O.
//!
//! ```text
//!        change, and the host wants notices        a request waits
//! IDLE ───────────────────────────────────▸ DUE ─────────────────────▸ SENT
//!  ▴                                         │                          │
//!  │ the log is read without RAE, or the     │                          │
//!  │ host wants no more notices              │                          │
//!  ├─────────────────────────────────────────┘                          │
//!  └────────────────────────────────────────────────────────────────────┘
//!    the log is read without RAE
//! ```
//!
//! 1. Between a notice and the read of its log the host gets no other one: the log has all changes.
//! 2. The end of the controller's enabled state drops requests and notice without an answer.

use crate::command::StatusCode;

/// The asynchronous event requests that may be outstanding (AERL + 1).
pub const EVENTS_MAX: usize = 4;

/// The notice that a controller can send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    /// Namespace Attribute Changed, of an I/O controller.
    Namespace,
    /// Discovery Log Page Changed, of a discovery controller.
    Discovery,
}

impl NoticeKind {
    /// The bit of the notice in OAES and in the feature Asynchronous Event Configuration.
    pub fn bit(self) -> u32 {
        match self {
            NoticeKind::Namespace => 1 << 8,
            NoticeKind::Discovery => 1 << 31,
        }
    }

    /// Dword 0 of the completion: type 2, the information, and the log page.
    fn result(self) -> u64 {
        let (information, log) = match self {
            NoticeKind::Namespace => (0x00, 0x04),
            NoticeKind::Discovery => (0xf0, 0x70),
        };
        2 | information << 8 | log << 16
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoticePhase {
    Idle,
    Due,
    Sent,
}

/// Events of a controller.
#[derive(Debug)]
pub struct EventQueue {
    kind: NoticeKind,
    phase: NoticePhase,
    /// The feature Asynchronous Event Configuration.
    config: u32,
    /// The command ids of the requests that wait.
    requests: Vec<u16>,
}

/// The bits for health, which any host may set; no event of health is sent.
const HEALTH_BITS: u32 = 0xff;

impl EventQueue {
    /// No requests, and no notices wanted.
    pub fn new(kind: NoticeKind) -> EventQueue {
        let requests = Vec::with_capacity(EVENTS_MAX);
        EventQueue { kind, phase: NoticePhase::Idle, config: 0, requests }
    }

    /// The feature Asynchronous Event Configuration.
    pub fn config(&self) -> u32 {
        self.config
    }

    /// Sets the feature Asynchronous Event Configuration.
    ///
    /// # Errors
    /// If the host wants a notice that the controller does not send.
    pub fn set_config(&mut self, config: u32) -> Result<(), StatusCode> {
        if config & !(HEALTH_BITS | self.kind.bit()) != 0 {
            return Err(StatusCode::INVALID_FIELD);
        }
        self.config = config;
        if !self.is_wanted() && self.phase == NoticePhase::Due {
            self.phase = NoticePhase::Idle;
        }
        Ok(())
    }

    fn is_wanted(&self) -> bool {
        self.config & self.kind.bit() != 0
    }

    /// Keeps a request until there is an event.
    ///
    /// # Errors
    /// If as many wait as may.
    pub fn request(&mut self, cid: u16) -> Result<(), StatusCode> {
        if self.requests.len() >= EVENTS_MAX {
            return Err(StatusCode::EVENT_LIMIT);
        }
        self.requests.push(cid);
        Ok(())
    }

    /// Takes a request back; `false` if none of this command id waits.
    pub fn abort(&mut self, cid: u16) -> bool {
        let found = self.requests.iter().position(|waiting| *waiting == cid);
        found.map(|at| self.requests.remove(at)).is_some()
    }

    /// Notes a change.
    pub fn note_change(&mut self) {
        if self.phase == NoticePhase::Idle && self.is_wanted() {
            self.phase = NoticePhase::Due;
        }
    }

    /// Notes that the host has read the log of the notice, without retaining the event.
    pub fn note_log_read(&mut self) {
        self.phase = NoticePhase::Idle;
    }

    /// The command id and the result of a request that is to be completed now.
    pub fn take_due(&mut self) -> Option<(u16, u64)> {
        if self.phase != NoticePhase::Due || self.requests.is_empty() {
            return None;
        }
        self.phase = NoticePhase::Sent;
        Some((self.requests.remove(0), self.kind.result()))
    }

    /// Forgets everything, as a controller that is no longer enabled does.
    pub fn reset(&mut self) {
        *self = EventQueue::new(self.kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_waits_for_a_request_and_then_for_its_log_to_be_read() {
        let mut events = EventQueue::new(NoticeKind::Namespace);
        events.set_config(0x1ff).unwrap();
        events.note_change();
        assert_eq!(events.take_due(), None, "no request waits");
        events.request(7).unwrap();
        events.request(8).unwrap();
        assert_eq!(events.take_due(), Some((7, 0x04_0002)));
        events.note_change();
        assert_eq!(events.take_due(), None, "masked until the log is read");
        events.note_log_read();
        assert_eq!(events.take_due(), None, "the log had the second change");
        events.note_change();
        assert_eq!(events.take_due(), Some((8, 0x04_0002)));
    }

    #[test]
    fn only_a_notice_that_the_host_wants_is_sent() {
        let mut events = EventQueue::new(NoticeKind::Discovery);
        events.request(1).unwrap();
        events.note_change();
        assert_eq!(events.set_config(1 << 8), Err(StatusCode::INVALID_FIELD), "the other notice");
        events.set_config(1 << 31).unwrap();
        assert_eq!(events.take_due(), None, "a change before");
        events.note_change();
        events.set_config(0).unwrap();
        events.set_config(1 << 31).unwrap();
        assert_eq!(events.take_due(), None, "a notice that was not wanted for a while");
        events.note_change();
        assert_eq!(events.take_due(), Some((1, 0x70_f002)));
    }

    #[test]
    fn requests_are_bounded_and_can_be_aborted() {
        let mut events = EventQueue::new(NoticeKind::Namespace);
        for cid in 0..4 {
            events.request(cid).unwrap();
        }
        assert_eq!(events.request(4), Err(StatusCode::EVENT_LIMIT));
        assert!(events.abort(2) && !events.abort(2) && !events.abort(9));
        events.request(4).unwrap();
        events.reset();
        assert!(!events.abort(4));
        assert_eq!(events.config(), 0);
    }
}
