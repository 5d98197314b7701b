//! The simulation: threads that execute operations on shared lines, event by event.
//!
//! A thread does its steps in order. A critical section follows the lock's own code: an exchange on
//! the lock's line, loads and pauses while it is held, and a store that releases it and travels
//! independently while the thread continues. So the cost of a contended lock is not a parameter: it
//! follows from the transfers of the lines.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fastrand::Rng;

use crate::scale::lines::{Line, Purpose, Request, Want, Word};
use crate::scale::machine::{Machine, Time, ns};
use crate::scale::steps::{Operation, Pick, Step, Waiting};

mod sections;

/// The number of loads of a held spin lock before the thread yields.
const SPINS: u64 = 64;
/// The number of loads of a held sleeping lock before the thread sleeps.
const SLEEPER_SPINS: u64 = 100;
/// The operations per thread before the measured time.
const WARM_UP_OPS: u64 = 50;
/// The measured operations, per thread and in total.
const OPS_PER_THREAD: u64 = 100;
const OPS_MIN: u64 = 20_000;
/// The relative variation of a thread's own work.
const JITTER: f64 = 0.25;
/// A simulation ends after this many events, whatever it has counted until then.
const EVENTS_MAX: u64 = 20_000_000;

/// The event of a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A thread continues.
    Go(usize),
    /// The cores that have a line lose it to the first of its queue.
    Lose(usize),
    /// The first of a line's queue gets the line.
    Grant(usize),
    /// A line's next transfer may begin.
    Free(usize),
}

/// The state of a thread in its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Before the step.
    Begin,
    /// It has the line of a read or an update.
    Touched,
    /// It is about to execute the atomic operation of its step.
    Reach,
    /// It has a lock's line, and takes the lock if it is free.
    Try,
    /// It has a lock's line for reading: the lock is free or held.
    Look,
    /// It is about to load the lock again.
    LookAgain,
    /// It holds the lock and has touched this many objects.
    Inside(usize),
    /// The thread has finished its section.
    Leave,
    /// It has the line of a sleeping lock, to release it.
    GiveBack,
    /// It has the line of a sleeping lock, to announce that it will sleep.
    Announce,
}

#[derive(Debug)]
struct Thread {
    core: usize,
    step: usize,
    phase: Phase,
    /// The objects that this operation has chosen, by kind.
    chosen: Vec<usize>,
    /// The number of the thread's stores that are still on their way.
    posted: usize,
    /// Whether it waits for those, and the line that it needs afterwards.
    draining: bool,
    wanted: Option<(usize, Want)>,
    /// The line that its processor has requested for the step after the present one, and whether
    /// the thread waits for that line by now.
    ahead: Option<usize>,
    awaits_ahead: bool,
    /// Whether the object of that step is chosen.
    has_chosen: bool,
    /// The time since when it polls a held lock whose line it has, without an event for each load.
    watching: Option<Time>,
    looks: u64,
    ops: u64,
}

/// The result of a simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throughput {
    /// Operations per second of all threads.
    pub ops_per_second: f64,
    /// The number of simulated events.
    pub events: u64,
    /// How often a lock passed from one thread to another, per operation.
    pub turns: f64,
    /// How often a thread found a lock held, per operation.
    pub waits: f64,
    /// The share of the threads' time spent waiting for a lock or a line.
    pub waiting_share: f64,
}

/// A simulation.
#[derive(Debug)]
pub struct Simulation<'a> {
    machine: &'a Machine,
    operation: &'a Operation,
    /// The time of an operation in addition to the steps with times of their own.
    rest: Time,
    now: Time,
    sequence: u64,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    lines: Vec<Line>,
    /// The first line of each kind of object.
    first_line: Vec<usize>,
    threads: Vec<Thread>,
    slowdown: f64,
    random: Rng,
    worked: Time,
    ops: u64,
    turns: u64,
    waits: u64,
}

impl<'a> Simulation<'a> {
    /// Simulates all threads that the first `cores` cores can run at once. `alone_ns` is the time
    /// of an operation of one thread alone.
    ///
    /// # Errors
    /// If the machine, the operation or the number of cores is invalid; says which, and what is
    /// expected.
    pub fn run(
        machine: &'a Machine,
        operation: &'a Operation,
        cores: usize,
        alone_ns: f64,
        seed: u64,
    ) -> Result<Throughput, String> {
        machine.check()?;
        operation.check()?;
        if cores == 0 || cores > machine.cores {
            let most = machine.cores;
            return Err(format!("{cores} cores are to work; this machine has 1 to {most}"));
        }
        let threads = cores * machine.threads_per_core;
        if !(alone_ns > 0.0 && alone_ns < 1e9) {
            return Err(format!("an operation takes {alone_ns} ns alone; more than 0, below 1 s"));
        }
        let mut first_line = Vec::new();
        let mut lines = 0;
        for object in &operation.objects {
            first_line.push(lines);
            lines += object.count;
        }
        let mut simulation = Simulation {
            machine,
            operation,
            rest: ns(alone_ns).saturating_sub(steps_alone(machine, operation)),
            now: 0,
            sequence: 0,
            events: BinaryHeap::new(),
            lines: vec![Line::default(); lines],
            first_line,
            threads: (0..threads).map(|thread| simulated(operation, thread % cores)).collect(),
            slowdown: machine.slowdown(cores),
            random: Rng::with_seed(seed),
            worked: 0,
            ops: 0,
            turns: 0,
            waits: 0,
        };
        Ok(simulation.play())
    }

    fn play(&mut self) -> Throughput {
        for thread in 0..self.threads.len() {
            // The threads start at different times.
            let at = self.random.u64(..=self.rest.max(1000));
            self.after(at, Event::Go(thread));
        }
        let threads = self.threads.len() as u64;
        let (warm_up, wanted) = (WARM_UP_OPS * threads, (OPS_PER_THREAD * threads).max(OPS_MIN));
        let (mut started, mut events) = (None, 0);
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.now = at;
            events += 1;
            if started.is_none() && self.ops >= warm_up {
                started = Some((self.now, self.ops, self.worked, self.turns, self.waits));
            }
            let counted = started.map_or(0, |(_, ops, ..)| self.ops - ops);
            if counted >= wanted || events >= EVENTS_MAX {
                break;
            }
            match event {
                Event::Go(thread) => self.go(thread),
                Event::Lose(line) => self.lose(line),
                Event::Grant(line) => self.grant(line),
                Event::Free(line) => self.free(line),
            }
        }
        let (since, ops, worked, turns, waits) = started.unwrap_or_default();
        let time = (self.now - since).max(1) as f64;
        let worked = (self.worked - worked) as f64 / (time * self.threads.len() as f64);
        Throughput {
            ops_per_second: (self.ops - ops) as f64 / time * 1e12,
            events,
            turns: (self.turns - turns) as f64 / (self.ops - ops) as f64,
            waits: (self.waits - waits) as f64 / (self.ops - ops) as f64,
            waiting_share: (1.0 - worked).clamp(0.0, 1.0),
        }
    }

    fn after(&mut self, wait: Time, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((self.now + wait, self.sequence, event)));
    }

    /// The thread works for a time and then enters this phase.
    fn work(&mut self, thread: usize, time: Time, phase: Phase) {
        let time = (time as f64 * self.slowdown) as Time;
        self.worked += time;
        self.threads[thread].phase = phase;
        self.after(time, Event::Go(thread));
    }

    /// The thread waits for a time and then enters this phase.
    fn wait(&mut self, thread: usize, time: Time, phase: Phase) {
        self.threads[thread].phase = phase;
        self.after(time, Event::Go(thread));
    }

    /// The thread enters this phase as soon as it has the line. An atomic access first waits for
    /// the thread's own stores to arrive.
    fn need(&mut self, thread: usize, line: usize, want: Want, phase: Phase) {
        self.threads[thread].phase = phase;
        if want == Want::Write && self.threads[thread].posted > 0 {
            self.threads[thread].draining = true;
            self.threads[thread].wanted = Some((line, want));
            return;
        }
        let core = self.threads[thread].core;
        if self.threads[thread].ahead == Some(line) {
            self.threads[thread].awaits_ahead = true;
        } else if self.lines[line].serves(core, want) {
            // At once: no other core can take the line in between.
            self.go(thread);
        } else {
            self.ask(line, Request { thread, core, want, purpose: Purpose::Wait });
        }
    }

    fn ask(&mut self, line: usize, request: Request) {
        self.lines[line].queue.push_back(request);
        if !self.lines[line].busy {
            let kept = self.retained();
            self.begin_transfer(line, kept);
        }
    }

    fn begin_transfer(&mut self, line: usize, kept: Time) {
        let migrates = self.machine.migrates && self.lines[line].owner.is_some();
        let Some(request) = self.lines[line].queue.front_mut() else { return };
        if migrates {
            // A line that another core has changed moves to a reader as to a writer.
            request.want = Want::Write;
        }
        let request = *request;
        let transfer = self.lines[line].transfer(self.machine, &request, kept);
        self.lines[line].busy = true;
        if let Some(free_after) = transfer.free_after {
            // Readers of an unchanged line need not wait for one another.
            let request = self.lines[line].queue.pop_front().expect("it was looked at");
            self.lines[line].grant(&request);
            self.after(transfer.travel, Event::Go(request.thread));
            self.after(free_after, Event::Free(line));
            return;
        }
        self.lines[line].travel = transfer.travel;
        self.after(transfer.kept, Event::Lose(line));
    }

    /// How long an owner continues with a requested line: up to twice the mean, and most often
    /// about the mean. The turns of two threads that update one cell have this distribution.
    fn retained(&mut self) -> Time {
        (self.machine.retain as f64 * (self.random.f64() + self.random.f64())) as Time
    }

    fn lose(&mut self, line: usize) {
        let pinned_until = self.lines[line].pinned_until;
        if pinned_until > self.now {
            return self.after(pinned_until - self.now, Event::Lose(line));
        }
        let Some(request) = self.lines[line].queue.front().copied() else { return };
        self.after(self.lines[line].travel, Event::Grant(line));
        let lost = self.lines[line].lose(&request);
        if lost.is_empty() {
            return;
        }
        for thread in 0..self.threads.len() {
            let Thread { core, watching, .. } = self.threads[thread];
            if let Some(since) = watching
                && core != request.core
                && lost.has(core)
                && self.lock_line(thread) == line
            {
                self.stop_watching(thread, since);
            }
        }
    }

    fn grant(&mut self, line: usize) {
        let Some(request) = self.lines[line].queue.pop_front() else { return };
        self.lines[line].grant(&request);
        self.lines[line].busy = false;
        match request.purpose {
            Purpose::Posted => {
                // The thread that waits for the line gets it as soon as the store is done.
                self.begin_transfer(line, 0);
                self.arrived(request.thread, line);
            }
            Purpose::Wait => {
                self.after(0, Event::Go(request.thread));
                self.free(line);
            }
            Purpose::Ahead => {
                self.threads[request.thread].ahead = None;
                if std::mem::take(&mut self.threads[request.thread].awaits_ahead) {
                    self.after(0, Event::Go(request.thread));
                }
                self.free(line);
            }
        }
    }

    fn free(&mut self, line: usize) {
        self.lines[line].busy = false;
        let kept = self.retained();
        self.begin_transfer(line, kept);
    }

    /// A store that releases a lock has arrived.
    fn arrived(&mut self, thread: usize, line: usize) {
        self.lines[line].word = Word::Free;
        self.threads[thread].posted -= 1;
        if self.threads[thread].draining && self.threads[thread].posted == 0 {
            self.threads[thread].draining = false;
            let (line, want) = self.threads[thread].wanted.take().expect("set when draining");
            match self.threads[thread].phase {
                Phase::Try | Phase::Touched => self.begin_atomic(thread),
                phase => self.need(thread, line, want, phase),
            }
        }
    }

    /// A thread that polled a held lock has lost the line: it loads the lock again at the point
    /// that its pauses and yields have reached.
    fn stop_watching(&mut self, thread: usize, since: Time) {
        let pause = self.machine.pause;
        let looks = ((self.now - since) / pause) + 1;
        let state = &mut self.threads[thread];
        let yields = (state.looks + looks) / SPINS - state.looks / SPINS;
        state.watching = None;
        state.looks += looks;
        let spins = matches!(self.section(thread).0, Waiting::Spin);
        let away = if spins { yields * self.machine.yielding } else { 0 };
        let at = (since + looks * pause + away).max(self.now);
        self.wait(thread, at - self.now, Phase::LookAgain);
    }

    /// The line of an object: the one that the operation has chosen, or the only one.
    fn line_of(&self, thread: usize, object: usize, pick: Pick) -> usize {
        let offset = if pick == Pick::Same { 0 } else { self.threads[thread].chosen[object] };
        self.first_line[object] + offset
    }

    fn choose(&mut self, thread: usize, object: usize, pick: Pick) {
        if pick == Pick::Any && !std::mem::take(&mut self.threads[thread].has_chosen) {
            let count = self.operation.objects[object].count;
            self.threads[thread].chosen[object] = self.random.usize(..count);
        }
    }

    /// How other threads wait at the section that the thread is in, and its hold time.
    fn section(&self, thread: usize) -> (Waiting, f64) {
        match &self.operation.steps[self.threads[thread].step] {
            Step::Section { waiting, hold_ns, .. } => (*waiting, *hold_ns),
            _ => unreachable!("only sections have phases of a lock"),
        }
    }

    fn lock_line(&self, thread: usize) -> usize {
        match &self.operation.steps[self.threads[thread].step] {
            Step::Section { lock: (object, pick), .. } => self.line_of(thread, *object, *pick),
            _ => usize::MAX,
        }
    }

    fn next(&mut self, thread: usize) {
        let state = &mut self.threads[thread];
        state.phase = Phase::Begin;
        state.step += 1;
        if state.step == self.operation.steps.len() {
            state.step = 0;
            state.ops += 1;
            self.ops += 1;
        }
        self.after(0, Event::Go(thread));
    }

    fn go(&mut self, thread: usize) {
        let phase = self.threads[thread].phase;
        match phase {
            Phase::Begin => self.begin(thread),
            Phase::Touched => self.touched(thread),
            Phase::Reach => self.reach(thread),
            Phase::Try => self.try_lock(thread),
            Phase::Look => self.look(thread),
            Phase::LookAgain => {
                let line = self.lock_line(thread);
                self.need(thread, line, Want::Read, Phase::Look);
            }
            Phase::Inside(done) => self.inside(thread, done),
            Phase::Leave => self.leave(thread),
            Phase::GiveBack => self.give_back(thread),
            Phase::Announce => self.announce(thread),
        }
    }

    fn begin(&mut self, thread: usize) {
        let operation = self.operation;
        match &operation.steps[self.threads[thread].step] {
            Step::Work(time) => {
                self.ask_ahead(thread);
                let time = self.about(ns(*time));
                self.work_then_next(thread, time);
            }
            Step::Rest => {
                let time = self.about(self.rest);
                self.work_then_next(thread, time);
            }
            Step::Read(object, pick) => {
                self.choose(thread, *object, *pick);
                let line = self.line_of(thread, *object, *pick);
                self.need(thread, line, Want::Read, Phase::Touched);
            }
            Step::Update(object, pick) => {
                self.choose(thread, *object, *pick);
                self.begin_atomic(thread);
            }
            Step::Section { lock: (object, pick), .. } => {
                self.choose(thread, *object, *pick);
                self.threads[thread].looks = 0;
                self.begin_atomic(thread);
            }
        }
    }

    /// A processor that works already knows the address of the next atomic operation, and requests
    /// its line.
    fn ask_ahead(&mut self, thread: usize) {
        let operation = self.operation;
        let (object, pick) = match operation.steps.get(self.threads[thread].step + 1) {
            Some(Step::Update(object, pick)) => (*object, *pick),
            Some(Step::Section { lock: (object, pick), .. }) => (*object, *pick),
            _ => return,
        };
        self.choose(thread, object, pick);
        self.threads[thread].has_chosen = pick == Pick::Any;
        let line = self.line_of(thread, object, pick);
        let Thread { core, posted, .. } = self.threads[thread];
        if posted == 0 && !self.lines[line].serves(core, Want::Write) {
            self.threads[thread].ahead = Some(line);
            let purpose = Purpose::Ahead;
            self.ask(line, Request { thread, core, want: Want::Write, purpose });
        }
    }

    /// The time with a random variation: own work never takes exactly as long again, and without it
    /// the threads would fall into step with each other.
    fn about(&mut self, time: Time) -> Time {
        (time as f64 * (1.0 + JITTER * (2.0 * self.random.f64() - 1.0))) as Time
    }

    fn work_then_next(&mut self, thread: usize, time: Time) {
        let time = (time as f64 * self.slowdown) as Time;
        self.worked += time;
        let state = &mut self.threads[thread];
        state.phase = Phase::Begin;
        state.step += 1;
        if state.step == self.operation.steps.len() {
            state.step = 0;
            state.ops += 1;
            self.ops += 1;
        }
        self.after(time, Event::Go(thread));
    }

    fn touched(&mut self, thread: usize) {
        self.next(thread);
    }
}

fn simulated(operation: &Operation, core: usize) -> Thread {
    Thread {
        core,
        step: 0,
        phase: Phase::Begin,
        chosen: vec![0; operation.objects.len()],
        posted: 0,
        draining: false,
        wanted: None,
        ahead: None,
        awaits_ahead: false,
        has_chosen: false,
        watching: None,
        looks: 0,
        ops: 0,
    }
}

/// The uncontended time of the steps with times of their own.
fn steps_alone(machine: &Machine, operation: &Operation) -> Time {
    let alone = |step: &Step| match step {
        Step::Work(time) => ns(*time),
        Step::Rest | Step::Read(..) => 0,
        Step::Update(..) => machine.update,
        Step::Section { waiting: Waiting::Sleep, hold_ns, .. } => machine.sleep + ns(*hold_ns),
        Step::Section { hold_ns, .. } => machine.spin + ns(*hold_ns),
    };
    operation.steps.iter().map(alone).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::steps::Object;

    fn machine(cores: usize) -> Machine {
        Machine { cores, ..Machine::default() }
    }

    fn locked(count: usize, pick: Pick, waiting: Waiting, hold_ns: f64) -> Operation {
        let section = Step::Section { waiting, lock: (0, pick), hold_ns, touches: Vec::new() };
        Operation {
            objects: vec![Object { name: "lock", count }],
            steps: vec![Step::Rest, section],
        }
    }

    fn rate(machine: &Machine, operation: &Operation, cores: usize, alone_ns: f64) -> f64 {
        Simulation::run(machine, operation, cores, alone_ns, 1).unwrap().ops_per_second
    }

    fn assert_near(value: f64, wanted: f64, share: f64) {
        assert!((value / wanted - 1.0).abs() < share, "{value}, expected {wanted}");
    }

    #[test]
    fn one_thread_takes_what_it_takes_alone() {
        for waiting in [Waiting::Spin, Waiting::Sleep, Waiting::Turn, Waiting::Queue] {
            let rate = rate(&machine(8), &locked(1, Pick::Same, waiting, 20.0), 1, 100.0);
            assert_near(rate, 1e7, 0.02);
        }
    }

    #[test]
    fn what_is_not_shared_scales() {
        let rest = Operation { objects: Vec::new(), steps: vec![Step::Rest] };
        assert_near(rate(&machine(64), &rest, 64, 100.0), 64e7, 0.02);
    }

    #[test]
    fn readers_of_one_line_scale() {
        let objects = vec![Object { name: "word", count: 1 }];
        let operation = Operation { objects, steps: vec![Step::Rest, Step::Read(0, Pick::Same)] };
        assert_near(rate(&machine(64), &operation, 64, 100.0), 64e7, 0.05);
    }

    /// A long section hides the hand-over: one operation per hold time and hand-over. A queue's
    /// hand-over takes at least one transfer, and at most the release, the load that sees it, the
    /// exchange and a failed attempt.
    #[test]
    fn one_lock_saturates_at_hold_and_hand_over() {
        for waiting in [Waiting::Spin, Waiting::Turn, Waiting::Queue] {
            let machine = machine(16);
            let hold_ns = 10_000.0;
            let rate = rate(&machine, &locked(1, Pick::Same, waiting, hold_ns), 16, 10_100.0);
            let transfer_ns = machine.transfer_near as f64 / 1000.0;
            let most = 1e9 / (hold_ns + transfer_ns);
            let hand_overs = if waiting == Waiting::Queue { 5.0 } else { 40.0 };
            let least = 1e9 / (hold_ns + hand_overs * transfer_ns);
            assert!((least..most).contains(&rate), "{waiting:?}: {rate} of {least} to {most}");
        }
    }

    #[test]
    fn a_cell_that_all_update_moves_once_a_turn() {
        let objects = vec![Object { name: "cell", count: 1 }];
        let operation = Operation { objects, steps: vec![Step::Update(0, Pick::Same)] };
        let machine = Machine { retain: 0, ..machine(16) };
        let alone_ns = machine.update as f64 / 1000.0;
        assert_near(
            rate(&machine, &operation, 16, alone_ns),
            1e12 / machine.transfer_near as f64,
            0.05,
        );
    }

    /// With many more locks than threads no thread waits: the remaining cost is that a lock's line
    /// is at another core in 15 of 16 cases.
    #[test]
    fn many_locks_cost_a_transfer_and_no_waiting() {
        let machine = machine(16);
        let rate = rate(&machine, &locked(100_000, Pick::Any, Waiting::Spin, 0.0), 16, 1000.0);
        assert!(rate <= 16e6 * 1.02, "{rate}");
        let transfer_ns = machine.transfer_near as f64 / 1000.0;
        assert!(rate > 16e9 / (1000.0 + 1.1 * transfer_ns), "{rate}");
    }

    /// A lock that is in use for a third of the time: the mean wait of M/D/1 would be a quarter of
    /// the service time. With few threads it is less, and never 0.
    #[test]
    fn a_lock_that_is_free_mostly_costs_little() {
        let (update, pinned) = (0, 0);
        let machine = Machine { transfer_near: ns(1.0), retain: 0, update, pinned, ..machine(4) };
        let hold_ns = 100.0 - machine.spin as f64 / 1000.0;
        let rate = rate(&machine, &locked(1, Pick::Same, Waiting::Queue, hold_ns), 4, 1200.0);
        let alone = 4e9 / 1200.0;
        let waited = 4e9 / (1200.0 + 0.25 * 100.0);
        assert!(rate < alone && rate > waited * 0.97, "{rate} of {waited} to {alone}");
    }

    #[test]
    fn far_sockets_hand_over_more_slowly() {
        let operation = locked(1, Pick::Same, Waiting::Queue, 20.0);
        let one = rate(&machine(32), &operation, 32, 500.0);
        let two = rate(&Machine { sockets: 2, ..machine(32) }, &operation, 32, 500.0);
        assert!(two < one, "{two}, one socket {one}");
    }

    #[test]
    fn sleepers_are_woken() {
        let operation = locked(1, Pick::Same, Waiting::Sleep, 3_000.0);
        let rate = rate(&machine(8), &operation, 8, 3_100.0);
        assert!(rate > 50_000.0 && rate < 1e9 / 3_000.0, "{rate}");
    }

    #[test]
    fn the_same_seed_gives_the_same_answer() {
        let operation = locked(16, Pick::Any, Waiting::Spin, 5.0);
        let machine = machine(8);
        let run = |seed| Simulation::run(&machine, &operation, 8, 100.0, seed).unwrap();
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_value() {
        let operation = locked(1, Pick::Same, Waiting::Spin, 5.0);
        let error = |machine: &Machine, operation: &Operation, cores, alone_ns| {
            Simulation::run(machine, operation, cores, alone_ns, 1).unwrap_err()
        };
        assert!(error(&machine(0), &operation, 1, 10.0).contains("cores is 0"));
        assert!(error(&machine(4), &operation, 0, 10.0).contains("0 cores are to work"));
        assert!(error(&machine(4), &operation, 5, 10.0).contains("5 cores are to work"));
        assert!(error(&machine(4), &operation, 2, f64::NAN).contains("NaN ns"));
        let none = Operation { objects: Vec::new(), ..operation.clone() };
        assert!(error(&machine(4), &none, 2, 10.0).contains("object 0"));
        let empty = Operation { objects: vec![Object { name: "x", count: 0 }], ..operation };
        assert!(error(&machine(4), &empty, 2, 10.0).contains("no objects `x`"));
    }

    #[test]
    fn threads_of_a_core_share_it() {
        let rest = Operation { objects: Vec::new(), steps: vec![Step::Rest] };
        let machine = Machine { threads_per_core: 2, ..machine(4) };
        assert_near(rate(&machine, &rest, 4, 100.0), 4e7 * machine.thread_gain, 0.02);
        let crowded = Machine { cores: 4, crowding: 1.25, ..Machine::default() };
        assert_near(rate(&crowded, &rest, 4, 100.0), 3.2e7, 0.02);
        assert_near(rate(&crowded, &rest, 1, 100.0), 1e7, 0.02);
    }
}
