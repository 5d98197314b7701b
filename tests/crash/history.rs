//! A record of a client's requests and answers, and a check of the state after a crash.
//!
//! Three rules must hold. Each write is present completely or not at all. Durable data are present
//! unless a newer write replaced them. If a write is present, then so is every write that was
//! answered before it was sent. Two writes to one page are never in flight at once, so the writes
//! of each page have an order.

use std::collections::{BTreeMap, BTreeSet};

/// The unit of writing and verifying.
pub(crate) const PAGE: usize = 4096;

/// The number of the initial contents.
const NOTHING: u64 = 0;

/// A write or a discard.
#[derive(Debug)]
struct Written {
    first: u64,
    count: u64,
    is_zeros: bool,
    sent: u64,
    answered: Option<u64>,
    is_durable: bool,
}

/// All requests since the last crash, and the contents before.
#[derive(Debug)]
pub(crate) struct History {
    clock: u64,
    next: u64,
    writes: BTreeMap<u64, Written>,
    /// The writes of each page, in order.
    pages: Vec<Vec<u64>>,
    busy: BTreeSet<u64>,
    /// Answered writes that are not known to be durable.
    settling: BTreeSet<u64>,
}

/// The bytes that a write puts into a page: they contain the page and the write's number. Every
/// other write compresses well.
fn page(number: u64, write: u64, is_zeros: bool) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    if is_zeros {
        return bytes;
    }
    let head = [number, write].map(u64::to_le_bytes).concat();
    bytes[..16].copy_from_slice(&head);
    match write % 2 {
        0 => fastrand::Rng::with_seed(number << 32 ^ write).fill(&mut bytes[16..]),
        _ => bytes[16..].chunks_mut(16).for_each(|part| part.copy_from_slice(&head)),
    }
    bytes
}

impl History {
    /// The history of an empty volume with this many pages.
    pub(crate) fn new(pages: u64) -> History {
        let nothing = Written {
            first: 0,
            count: pages,
            is_zeros: true,
            sent: 0,
            answered: Some(0),
            is_durable: true,
        };
        History {
            clock: 0,
            next: 1,
            writes: BTreeMap::from([(NOTHING, nothing)]),
            pages: vec![vec![NOTHING]; pages as usize],
            busy: BTreeSet::new(),
            settling: BTreeSet::new(),
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Whether no write is in flight to any of these pages.
    pub(crate) fn is_quiet(&self, first: u64, count: u64) -> bool {
        self.busy.range(first..first + count).next().is_none()
    }

    /// Records a write, or zeros, about to be sent; returns its number and its bytes.
    pub(crate) fn send(&mut self, first: u64, count: u64, is_zeros: bool) -> (u64, Vec<u8>) {
        assert!(self.is_quiet(first, count), "two writes to one page at once");
        let number = self.next;
        self.next += 1;
        let sent = self.tick();
        let written = Written { first, count, is_zeros, sent, answered: None, is_durable: false };
        self.writes.insert(number, written);
        let mut bytes = Vec::new();
        for at in first..first + count {
            self.pages[at as usize].push(number);
            self.busy.insert(at);
            bytes.extend(page(at, number, is_zeros));
        }
        (number, bytes)
    }

    /// A write was answered; with `fua` it is durable.
    pub(crate) fn answered(&mut self, number: u64, fua: bool) {
        let now = self.tick();
        self.free(number);
        let written = self.writes.get_mut(&number).unwrap();
        written.answered = Some(now);
        written.is_durable = fua;
        if !fua {
            self.settling.insert(number);
        }
    }

    /// A write was refused: whether it is present is unknown.
    pub(crate) fn refused(&mut self, number: u64) {
        self.free(number);
    }

    fn free(&mut self, number: u64) {
        let written = &self.writes[&number];
        for at in written.first..written.first + written.count {
            self.busy.remove(&at);
        }
    }

    /// A flush is about to be sent; returns the value for [`History::flushed`].
    pub(crate) fn flushing(&mut self) -> u64 {
        self.tick()
    }

    /// A flush that was sent at `sent` was answered.
    pub(crate) fn flushed(&mut self, sent: u64) {
        let writes = &mut self.writes;
        self.settling.retain(|number| {
            let written = writes.get_mut(number).unwrap();
            let is_before = written.answered.is_some_and(|answered| answered < sent);
            written.is_durable |= is_before;
            !is_before
        });
    }

    /// The number of writes that are known to be durable.
    pub(crate) fn durable_count(&self) -> usize {
        self.writes.values().filter(|written| written.is_durable).count()
    }

    /// The write of a page to which these bytes belong: the newest, if several match.
    fn find(&self, at: u64, bytes: &[u8]) -> u64 {
        let of = &self.pages[at as usize];
        let fits = |number: &&u64| page(at, **number, self.writes[*number].is_zeros) == bytes;
        let found = of.iter().rev().find(fits);
        *found.unwrap_or_else(|| {
            let head = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            let (here, write) = (head(0), head(8));
            panic!("page {at} holds what never was: it says page {here}, write {write}, {of:?}")
        })
    }

    /// Checks the contents after a crash, and continues from there. `is_durable` says whether these
    /// contents survive the next crash.
    pub(crate) fn check(&mut self, contents: &[u8], is_durable: bool) {
        let found: Vec<u64> =
            (0..).zip(contents.chunks(PAGE)).map(|(at, b)| self.find(at, b)).collect();
        assert_eq!(found.len(), self.pages.len());
        // The latest moment of which a write is certainly present; zeros may be older ones.
        let seen = found.iter().map(|number| &self.writes[number]).filter(|it| !it.is_zeros);
        let known = self.writes.values().filter(|it| it.is_durable);
        let moment = seen.chain(known).map(|written| written.sent).max().unwrap_or(0);
        for (at, has) in found.iter().enumerate() {
            let must = self.pages[at].iter().rev().find(|number| {
                let written = &self.writes[*number];
                written.is_durable || written.answered.is_some_and(|answered| answered < moment)
            });
            let must = must.copied().unwrap_or(NOTHING);
            assert!(
                *has >= must,
                "page {at} holds write {has}, {:?}, and has lost write {must}, {:?}: there is {:?}",
                self.writes[has],
                self.writes[&must],
                self.writes.values().rfind(|written| written.sent == moment),
            );
        }
        for number in found.iter().copied().collect::<BTreeSet<_>>() {
            let Written { first, count, is_zeros, .. } = self.writes[&number];
            for at in first..first + if is_zeros { 0 } else { count } {
                let has = found[at as usize];
                assert!(has >= number, "write {number} is torn: page {at} holds {has}");
            }
        }
        let now = self.tick();
        let kept: BTreeSet<u64> = found.iter().copied().chain([NOTHING]).collect();
        self.writes.retain(|number, _| kept.contains(number));
        self.busy.clear();
        self.settling.clear();
        for (number, written) in &mut self.writes {
            written.answered = Some(written.answered.unwrap_or(now).min(now));
            written.is_durable |= is_durable;
            if !written.is_durable {
                self.settling.insert(*number);
            }
        }
        for (of, number) in self.pages.iter_mut().zip(found) {
            *of = vec![number];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refuses(check: impl FnOnce() + std::panic::UnwindSafe, says: &str) {
        let refused = std::panic::catch_unwind(check).unwrap_err();
        let text = refused.downcast_ref::<String>().unwrap();
        assert!(text.contains(says), "{text}");
    }

    /// Two writes to the first page, one to the second; the caller adds the answers.
    fn written() -> (History, [Vec<u8>; 3]) {
        let mut history = History::new(3);
        let (_, a) = history.send(0, 1, false);
        history.answered(1, false);
        let (_, b) = history.send(0, 2, false);
        let (_, c) = history.send(2, 1, false);
        (history, [a, b, c])
    }

    #[test]
    fn the_history_accepts_valid_states_and_refuses_others() {
        let nothing = vec![0; PAGE];
        let (mut history, [a, b, c]) = written();
        history.check(&[&a[..], &nothing, &nothing].concat(), true);
        let (mut history, _) = written();
        history.check(&[&b[..], &c].concat(), true);
        let (mut history, _) = written();
        history.check(&vec![0; 3 * PAGE], true);
        let torn = [&b[..PAGE], &nothing, &nothing].concat();
        refuses(move || written().0.check(&torn, true), "is torn");
        // Writes that were answered before the third was sent must be present with it.
        let hole = [&nothing[..], &nothing, &c].concat();
        refuses(move || written().0.check(&hole, true), "has lost write 1");
        let mut mixed = [&a[..], &nothing, &nothing].concat();
        mixed[2000] ^= 1;
        refuses(move || written().0.check(&mixed, true), "what never was");
        // Durable by a flush, and by FUA.
        let flushed = || {
            let mut history = written().0;
            let sent = history.flushing();
            history.flushed(sent);
            history
        };
        refuses(move || flushed().check(&vec![0; 3 * PAGE], true), "has lost write 1");
        let fua = || {
            let mut history = written().0;
            history.answered(2, true);
            history
        };
        let old = [&a[..], &nothing, &nothing].concat();
        refuses(move || fua().check(&old, true), "has lost write 2");
    }
}
