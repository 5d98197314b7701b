//! Cache lines that cores share: who has one, who waits for it, and how long it travels.
//!
//! A line is at one core, which may write, or at several, which may read. Somebody else's access is
//! a transfer; transfers of one line happen one after the other, in the order in which they were
//! asked for. While a request travels to the core that has the line, that core goes on using it
//! (`retain`), and then it is without. Where a line is at several cores and only read, more readers
//! get it without waiting for one another's transfers to end.

use std::collections::VecDeque;

use crate::scale::machine::{Machine, Time};

/// At most so many cores, so that a set of them is a few words.
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

/// What somebody wants of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// To read it.
    Read,
    /// To read and write it; nobody else has it then.
    Write,
}

/// Somebody who waits for a line.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The thread.
    pub thread: usize,
    /// Its core.
    pub core: usize,
    /// What it wants.
    pub want: Want,
    /// What its thread does meanwhile.
    pub purpose: Purpose,
}

/// What a thread that has asked for a line does until it is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It waits.
    Wait,
    /// It goes on: a store in the store buffer, which gives a lock back.
    Posted,
    /// It goes on with the work before an atomic operation, for which its processor has asked.
    Ahead,
}

/// How a transfer goes, in times one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Until those who have the line now lose it.
    pub kept: Time,
    /// From there until the request is granted.
    pub travel: Time,
    /// From the beginning until the next transfer may begin, if that is before the grant.
    pub free_after: Option<Time>,
}

impl Transfer {
    /// One that takes so long, of which the line stays where it is so long.
    fn of(cost: Time, kept: Time) -> Transfer {
        Transfer { kept, travel: cost.saturating_sub(kept), free_after: None }
    }
}

/// A lock's word, if the line holds one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Word {
    /// Nobody holds the lock.
    #[default]
    Free,
    /// Somebody does.
    Held,
    /// Somebody does, and somebody sleeps.
    Wanted,
}

/// A line.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Who may write it.
    pub owner: Option<usize>,
    /// Who may read it, besides the owner.
    pub sharers: Cores,
    /// Who waits, first come first.
    pub queue: VecDeque<Request>,
    /// A transfer is under way.
    pub busy: bool,
    /// What that one takes once the line is lost.
    pub travel: Time,
    /// An atomic operation on the line is under way until then: nobody gets it before.
    pub pinned_until: Time,
    /// What stands in it.
    pub word: Word,
    /// Who has held the lock last.
    pub last: Option<usize>,
    /// Threads asleep, or in a lock's queue.
    pub waiters: VecDeque<usize>,
}

impl Line {
    /// Whether a core may do what it wants at once.
    pub fn serves(&self, core: usize, want: Want) -> bool {
        self.owner == Some(core) || (want == Want::Read && self.sharers.has(core))
    }

    /// Whether a lock here is free to take.
    pub fn is_free(&self) -> bool {
        self.word == Word::Free
    }

    /// How the transfer for a request that begins now goes, if the owner goes on for `kept` with
    /// what it has, where it is [`Machine::retain`] on average. A line that nobody has had costs
    /// nothing: its first touch is before the time that counts.
    pub fn transfer(&self, machine: &Machine, request: &Request, kept: Time) -> Transfer {
        let core = request.core;
        if self.serves(core, request.want) {
            return Transfer::of(0, 0);
        }
        let far = |other: usize| machine.socket_of(other) != machine.socket_of(core);
        if let Some(owner) = self.owner {
            // What is left of the way does not depend on how long the owner went on.
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
            // The right to write what is here already costs as much: the others must be told, and
            // must have answered.
            Want::Write => Transfer::of(machine.transfer(any_far), 0),
        }
    }

    /// The others lose the line for a request; answers who could read it until now.
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
