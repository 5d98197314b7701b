//! Writes of every kind, many in flight, until a fault occurs.

use std::collections::HashMap;
use std::io;

use fastrand::Rng;

use crate::client::{Client, Command};
use crate::history::{History, PAGE};

/// The bit that distinguishes a flush's cookie from a write's.
const FLUSH: u64 = 1 << 63;

/// The pages to which many of the writes to a full pool go.
const HOT_PAGES: u64 = 128;

/// The reason for which a run of the workload has ended.
#[derive(Debug)]
pub(crate) enum End {
    /// All requested answers arrived.
    Done,
    /// The server refused a request with this error number.
    Refused(u32),
    /// The server is gone.
    Gone,
}

/// A client's requests in flight.
pub(crate) struct Workload<'h> {
    client: Client,
    history: &'h mut History,
    random: Rng,
    pages: u64,
    depth: usize,
    /// By cookie: whether the write has FUA, or the time at which a flush was sent.
    in_flight: HashMap<u64, u64>,
    flushes: u64,
    /// Whether every answer means durable (`sync=always`).
    always: bool,
    /// The length of the longest write, in pages.
    longest: u64,
    /// The error that answers may have; 0 for none.
    bears: u32,
    /// The number of answers with that error.
    pub(crate) refused: u64,
    /// Answers without an error.
    pub(crate) answers: u64,
    /// Flushes and requests with FUA.
    pub(crate) durable_requests: u64,
}

impl<'h> Workload<'h> {
    pub(crate) fn new(client: Client, history: &'h mut History, seed: u64) -> Workload<'h> {
        let mut random = Rng::with_seed(seed);
        let depth = [1, 4, 16, 32][random.usize(..4)];
        let pages = client.size / PAGE as u64;
        let in_flight = HashMap::new();
        let (flushes, always, longest, answers, durable_requests) = (0, false, 256, 0, 0);
        Workload {
            client,
            history,
            random,
            pages,
            depth,
            in_flight,
            flushes,
            always,
            longest,
            bears: 0,
            refused: 0,
            answers,
            durable_requests,
        }
    }

    /// The volume is open with `sync=always`.
    pub(crate) fn always(mut self) -> Workload<'h> {
        self.always = true;
        self
    }

    /// Limits the length of writes, in pages.
    pub(crate) fn longest(mut self, pages: u64) -> Workload<'h> {
        self.longest = pages;
        self
    }

    /// Continues when a write or a discard is refused with this error.
    pub(crate) fn bears(mut self, error: u32) -> Workload<'h> {
        self.bears = error;
        self
    }

    /// Sets the number of requests in flight.
    pub(crate) fn depth(mut self, depth: usize) -> Workload<'h> {
        self.depth = depth;
        self
    }

    fn send(&mut self) -> io::Result<()> {
        let kind = self.random.u32(..100);
        if kind < 8 {
            let cookie = FLUSH | self.flushes;
            self.flushes += 1;
            self.durable_requests += 1;
            self.in_flight.insert(cookie, self.history.flushing());
            return self.client.send(Command::Flush, cookie, 0, 0, false);
        }
        let count = match self.random.u32(..40) {
            0 => self.random.u64(1..=self.longest),
            1..8 => self.random.u64(1..=16),
            _ => 1,
        };
        // Long discards make space in a full pool. Neighbouring pages in flight share blocks: half
        // of the writes go to the same few.
        let (count, end) = match kind {
            8..14 if self.bears > 0 => (self.random.u64(1..=self.longest), self.pages),
            _ if self.bears > 0 && kind.is_multiple_of(2) => (count, HOT_PAGES),
            _ => (count, self.pages),
        };
        let first = self.random.u64(..=end - count);
        if !self.history.is_quiet(first, count) {
            // The caller tries again with another page.
            return Ok(());
        }
        let (is_zeros, fua) = (kind < 14, self.random.u32(..3) > 0);
        self.durable_requests += u64::from(fua);
        let (number, bytes) = self.history.send(first, count, is_zeros);
        self.in_flight.insert(number, u64::from(fua || self.always));
        let offset = first * PAGE as u64;
        if is_zeros {
            let len = bytes.len() as u32;
            return self.client.send(Command::Trim, number, offset, len, fua);
        }
        self.client.write(number, offset, &bytes, fua)
    }

    fn answer(&mut self) -> io::Result<u32> {
        let answer = self.client.answer()?;
        let what = self.in_flight.remove(&answer.cookie).expect("it is in flight");
        let is_flush = answer.cookie >= FLUSH;
        match (answer.error, is_flush) {
            (0, true) => self.history.flushed(what),
            (0, false) => self.history.answered(answer.cookie, what != 0),
            (_, true) => {}
            (_, false) => self.history.refused(answer.cookie),
        }
        self.answers += u64::from(answer.error == 0);
        self.refused += u64::from(answer.error != 0 && answer.error == self.bears);
        Ok(answer.error)
    }

    /// Runs until this many more answers have arrived, or a fault occurs.
    pub(crate) fn run(&mut self, answers: u64) -> End {
        let until = (self.answers + self.refused).saturating_add(answers);
        while self.answers + self.refused < until {
            while self.in_flight.len() < self.depth {
                if self.send().is_err() {
                    return self.drain();
                }
            }
            match self.answer() {
                Ok(0) => {}
                Ok(error) if error == self.bears => {}
                Ok(error) => return End::Refused(error),
                Err(_) => return End::Gone,
            }
        }
        End::Done
    }

    /// Writes the whole volume sequentially, until a write is refused with the error `full`;
    /// returns whether one was.
    pub(crate) fn fill(&mut self, full: u32) -> bool {
        let mut first = 0;
        while first < self.pages {
            let count = self.longest.min(self.pages - first);
            let (number, bytes) = self.history.send(first, count, false);
            self.in_flight.insert(number, 0);
            self.client.write(number, first * PAGE as u64, &bytes, false).unwrap();
            match self.answer().unwrap() {
                0 => first += count,
                error => return error == full,
            }
        }
        false
    }

    /// Waits for the answers of all requests in flight, without sending more.
    pub(crate) fn drain(&mut self) -> End {
        let mut refused = 0;
        while !self.in_flight.is_empty() {
            match self.answer() {
                Ok(error) => refused = refused.max(error),
                Err(_) => return End::Gone,
            }
        }
        if refused > 0 { End::Refused(refused) } else { End::Done }
    }
}
