//! Atomic operations and critical sections, simulated as in the locks' own code.

use super::{Phase, SLEEPER_SPINS, Simulation, Thread};
use crate::scale::lines::{Purpose, Request, Want, Word};
use crate::scale::machine::{Machine, ns};
use crate::scale::steps::{Step, Waiting};

impl Simulation<'_> {
    /// The thread begins an atomic operation. With the line present this takes time, at the end of
    /// which the operation executes at one moment; the line may be gone by then. With the line
    /// absent the operation executes as soon as the line arrives.
    pub(super) fn begin_atomic(&mut self, thread: usize) {
        let core = self.threads[thread].core;
        let line = self.atomic_line(thread);
        if self.threads[thread].posted == 0 && self.lines[line].serves(core, Want::Write) {
            self.work(thread, self.machine.update - self.machine.pinned, Phase::Reach);
        } else {
            self.reach(thread);
        }
    }

    /// The thread needs the line of its atomic operation now.
    pub(super) fn reach(&mut self, thread: usize) {
        let update = matches!(self.operation.steps[self.threads[thread].step], Step::Update(..));
        let phase = if update { Phase::Touched } else { Phase::Try };
        let line = self.atomic_line(thread);
        let Thread { core, posted, .. } = self.threads[thread];
        if posted == 0 && self.lines[line].serves(core, Want::Write) {
            self.lines[line].pinned_until = self.now + self.machine.pinned;
            self.work(thread, self.machine.pinned, phase);
        } else {
            self.need(thread, line, Want::Write, phase);
        }
    }

    /// The line of the step's atomic operation.
    fn atomic_line(&self, thread: usize) -> usize {
        match &self.operation.steps[self.threads[thread].step] {
            Step::Update(object, pick) => self.line_of(thread, *object, *pick),
            _ => self.lock_line(thread),
        }
    }

    /// The thread has exclusive access to the lock's line: it takes the lock if it is free.
    pub(super) fn try_lock(&mut self, thread: usize) {
        let line = self.lock_line(thread);
        let (waiting, _) = self.section(thread);
        let fair = matches!(waiting, Waiting::Queue | Waiting::Turn);
        let queued = fair && !self.lines[line].waiters.is_empty();
        let first = self.lines[line].waiters.front() == Some(&thread);
        if self.lines[line].is_free() && (!queued || first) {
            if first && waiting == Waiting::Queue {
                self.lines[line].waiters.pop_front();
                self.promote(thread, line);
            }
            return self.enter(thread, line, waiting);
        }
        self.waits += 1;
        if waiting == Waiting::Turn {
            self.lines[line].waiters.push_back(thread);
        }
        if waiting == Waiting::Queue {
            self.lines[line].waiters.push_back(thread);
            if self.lines[line].waiters.len() > 1 {
                return;
            }
        }
        self.wait(thread, 0, Phase::LookAgain);
    }

    /// The thread holds the lock.
    fn enter(&mut self, thread: usize, line: usize, waiting: Waiting) {
        self.lines[line].word = Word::Held;
        self.turns += u64::from(self.lines[line].last != Some(thread));
        self.lines[line].last = Some(thread);
        // The time for taking and releasing beyond the exchange is time in which other threads see
        // the lock held.
        let Machine { spin, sleep, update, .. } = *self.machine;
        let time = if waiting == Waiting::Sleep { sleep } else { spin };
        self.work(thread, time.saturating_sub(update), Phase::Inside(0));
    }

    /// The next thread in a lock's queue sees that it is first now: a line of its own travels
    /// there.
    fn promote(&mut self, from: usize, line: usize) {
        if let Some(&next) = self.lines[line].waiters.front() {
            let (here, there) = (self.threads[from].core, self.threads[next].core);
            let far = self.machine.socket_of(here) != self.machine.socket_of(there);
            self.wait(next, self.machine.transfer(far), Phase::LookAgain);
        }
    }

    pub(super) fn look(&mut self, thread: usize) {
        let line = self.lock_line(thread);
        let (waiting, _) = self.section(thread);
        if waiting == Waiting::Turn {
            // Its ticket is drawn already, so it only has to see that its turn has come.
            if self.lines[line].is_free() && self.lines[line].waiters.front() == Some(&thread) {
                self.lines[line].waiters.pop_front();
                return self.enter(thread, line, waiting);
            }
        } else if self.lines[line].is_free() {
            return self.begin_atomic(thread);
        }
        if waiting == Waiting::Sleep {
            self.threads[thread].looks += 1;
            let wanted = self.lines[line].word == Word::Wanted;
            return if wanted || self.threads[thread].looks >= SLEEPER_SPINS {
                self.need(thread, line, Want::Write, Phase::Announce)
            } else {
                self.wait(thread, self.machine.pause, Phase::LookAgain)
            };
        }
        let core = self.threads[thread].core;
        if self.lines[line].serves(core, Want::Read) {
            self.threads[thread].watching = Some(self.now);
        } else {
            self.wait(thread, self.machine.pause, Phase::LookAgain);
        }
    }

    pub(super) fn inside(&mut self, thread: usize, done: usize) {
        let operation = self.operation;
        let Step::Section { touches, hold_ns, .. } = &operation.steps[self.threads[thread].step]
        else {
            unreachable!("only sections have an inside");
        };
        match touches.get(done) {
            Some(&(object, pick, changes)) => {
                self.choose(thread, object, pick);
                let line = self.line_of(thread, object, pick);
                let want = if changes { Want::Write } else { Want::Read };
                self.need(thread, line, want, Phase::Inside(done + 1));
            }
            None => self.work(thread, ns(*hold_ns), Phase::Leave),
        }
    }

    pub(super) fn leave(&mut self, thread: usize) {
        let line = self.lock_line(thread);
        let core = self.threads[thread].core;
        if self.section(thread).0 == Waiting::Sleep {
            return self.need(thread, line, Want::Write, Phase::GiveBack);
        }
        if self.lines[line].serves(core, Want::Write) {
            self.lines[line].word = Word::Free;
        } else {
            self.threads[thread].posted += 1;
            let purpose = Purpose::Posted;
            self.ask(line, Request { thread, core, want: Want::Write, purpose });
        }
        self.next(thread);
    }

    /// A sleeping lock is released; if a thread may sleep, one is woken.
    pub(super) fn give_back(&mut self, thread: usize) {
        let line = self.lock_line(thread);
        let wanted = self.lines[line].word == Word::Wanted;
        self.lines[line].word = Word::Free;
        if !wanted {
            return self.next(thread);
        }
        if let Some(sleeper) = self.lines[line].waiters.pop_front() {
            self.threads[sleeper].looks = 0;
            self.wait(sleeper, self.machine.wake, Phase::Announce);
        }
        self.work_then_next(thread, self.machine.wake_call);
    }

    /// A thread announces that it will sleep, or has been woken. It takes the lock if it is free,
    /// and in any case marks that a thread may sleep.
    pub(super) fn announce(&mut self, thread: usize) {
        let line = self.lock_line(thread);
        let core = self.threads[thread].core;
        if !self.lines[line].serves(core, Want::Write) {
            return self.need(thread, line, Want::Write, Phase::Announce);
        }
        let free = self.lines[line].is_free();
        self.lines[line].word = Word::Wanted;
        if free {
            return self.work(thread, self.machine.sleep, Phase::Inside(0));
        }
        self.threads[thread].looks = 0;
        self.lines[line].waiters.push_back(thread);
    }
}
