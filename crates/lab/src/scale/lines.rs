//! Cache lines that cores share: which core has one, which cores wait for it, and how long it
//! travels.
//!
//! A line is at one core, which may write, or at several, which may read. An access by another core
//! is a transfer; transfers of one line happen one after the other, in the order of their requests.
//! While a request travels to the core that has the line, that core goes on using it (`retain`),
//! and then loses it. Where a line is at several cores and only read, more readers get it without
//! waiting for one another's transfers to end.

use std::collections::VecDeque;

use crate::scale::machine::{Machine, Time};

/// The most cores of a machine, so that a set of them is a few words.
pub const CORES_MAX: usize = 512;

/// A set of cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cores([u64; CORES_MAX / 64]);

impl Cores {
    /// Whether a core is in it.
    pub fn has(&self, core: usize) -> bool {
        self.0[core / 64] & (1 << (core % 64)) != 0
    }

    /// Puts one in.
    pub fn insert(&mut self, core: usize) {
        self.0[core / 64] |= 1 << (core % 64);
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// Those in it, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(index, &word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros() as usize;
                (rest != 0).then(|| {
                    rest &= rest - 1;
                    index * 64 + bit
                })
            })
        })
    }
}

/// The kind of access to a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Read.
    Read,
    /// Read and write; no other core has the line then.
    Write,
}

/// A thread that waits for a line.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The thread.
    pub thread: usize,
    /// The thread's core.
    pub core: usize,
    /// The kind of access.
    pub want: Want,
    /// What the thread does meanwhile.
    pub purpose: Purpose,
}

/// What a thread does between its request for a line and the line's arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It waits.
    Wait,
    /// It continues: a store in the store buffer, which releases a lock.
    Posted,
    /// It continues with the work before an atomic operation, whose line its processor has
    /// requested.
    Ahead,
}

/// The times of a transfer, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Until the cores that have the line lose it.
    pub kept: Time,
    /// From there until the request is granted.
    pub travel: Time,
    /// From the beginning until the next transfer may begin, if that is before the grant.
    pub free_after: Option<Time>,
}

impl Transfer {
    /// A transfer that takes `cost`, of which the line stays where it is for `kept`.
    fn of(cost: Time, kept: Time) -> Transfer {
        Transfer { kept, travel: cost.saturating_sub(kept), free_after: None }
    }
}

/// A lock's word, if the line holds one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Word {
    /// No thread holds the lock.
    #[default]
    Free,
    /// A thread holds the lock.
    Held,
    /// A thread holds the lock, and another may sleep.
    Wanted,
}

/// A line.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// The core that may write the line.
    pub owner: Option<usize>,
    /// The other cores that may read the line.
    pub sharers: Cores,
    /// The waiting requests, in the order of arrival.
    pub queue: VecDeque<Request>,
    /// A transfer is under way.
    pub busy: bool,
    /// The travel time of the present transfer once the line is lost.
    pub travel: Time,
    /// The end of an atomic operation on the line; no other core gets the line before.
    pub pinned_until: Time,
    /// The state of the lock in the line.
    pub word: Word,
    /// The thread that held the lock last.
    pub last: Option<usize>,
    /// Threads that sleep, or that are in a lock's queue.
    pub waiters: VecDeque<usize>,
}

impl Line {
    /// Whether a core can make the access at once.
    pub fn serves(&self, core: usize, want: Want) -> bool {
        self.owner == Some(core) || (want == Want::Read && self.sharers.has(core))
    }

    /// Whether a lock here is free to take.
    pub fn is_free(&self) -> bool {
        self.word == Word::Free
    }

    /// The transfer for a request that begins now, if the owner continues for `kept` with the line,
    /// which is [`Machine::retain`] on average. The first access to a line costs nothing: it
    /// happens before the measured time.
    pub fn transfer(&self, machine: &Machine, request: &Request, kept: Time) -> Transfer {
        let core = request.core;
        if self.serves(core, request.want) {
            return Transfer::of(0, 0);
        }
        let far = |other: usize| machine.socket_of(other) != machine.socket_of(core);
        if let Some(owner) = self.owner {
            // The rest of the way does not depend on how long the owner continued.
            let travel = machine.transfer(far(owner)).saturating_sub(machine.retain);
            return Transfer { kept, travel, free_after: None };
        }
        if self.sharers.is_empty() {
            return Transfer::of(0, 0);
        }
        let any_far = self.sharers.iter().any(far);
        match request.want {
            Want::Read => {
                let all_far = any_far && self.sharers.iter().all(far);
                let cost = machine.transfer(all_far);
                let free_after = Some(cost / machine.readers_at_once);
                Transfer { free_after, ..Transfer::of(cost, 0) }
            }
            // The right to write a line that is already here costs as much: the other cores must be
            // told and must answer.
            Want::Write => Transfer::of(machine.transfer(any_far), 0),
        }
    }

    /// The other cores lose the line for a request. Returns the cores that could read it until now.
    pub fn lose(&mut self, request: &Request) -> Cores {
        let mut before = self.sharers;
        if let Some(owner) = self.owner {
            before.insert(owner);
        }
        match request.want {
            Want::Write => self.sharers = Cores::default(),
            Want::Read => self.sharers = before,
        }
        self.owner = None;
        if request.want == Want::Write { before } else { Cores::default() }
    }

    /// The request's core gets the line.
    pub fn grant(&mut self, request: &Request) {
        match request.want {
            Want::Read => self.sharers.insert(request.core),
            Want::Write => {
                self.sharers = Cores::default();
                self.owner = Some(request.core);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(core: usize, want: Want) -> Request {
        Request { thread: core, core, want, purpose: Purpose::Wait }
    }

    #[test]
    fn a_set_of_cores_lists_them() {
        let mut cores = Cores::default();
        assert!(cores.is_empty());
        for core in [0, 63, 64, 511] {
            cores.insert(core);
        }
        assert_eq!(cores.iter().collect::<Vec<_>>(), [0, 63, 64, 511]);
        assert!(cores.has(64) && !cores.has(65));
    }

    #[test]
    fn writers_exclude_and_readers_share() {
        let machine = Machine::default();
        let mut line = Line::default();
        let first = request(0, Want::Write);
        assert_eq!(line.transfer(&machine, &first, 7), Transfer::of(0, 0), "nobody has had it");
        line.grant(&first);
        let reader = request(1, Want::Read);
        let transfer = line.transfer(&machine, &reader, machine.retain);
        assert_eq!(transfer.kept + transfer.travel, machine.transfer(false));
        let longer = line.transfer(&machine, &reader, 2 * machine.retain);
        assert_eq!(longer.travel, transfer.travel, "the way is as long");
        assert_eq!(line.lose(&reader), Cores::default(), "the writer still reads");
        line.grant(&reader);
        assert!(line.serves(0, Want::Read) && !line.serves(0, Want::Write));
        let writer = request(1, Want::Write);
        let transfer = line.transfer(&machine, &writer, machine.retain);
        assert_eq!(transfer, Transfer::of(machine.transfer(false), 0));
        let lost = line.lose(&writer);
        assert_eq!(lost.iter().collect::<Vec<_>>(), [0, 1]);
        line.grant(&writer);
        assert!(!line.serves(0, Want::Read) && line.serves(1, Want::Write));
    }
}
