//! The completion router: a completion queue for each channel of a device.

use std::sync::Arc;

use blockyard_sync::bell::Bell;
use blockyard_sync::mailbox::{Mailbox, Owner};
use blockyard_sync::published::{Published, Reader};

use super::flights::Landed;
use crate::request::{Done, Ended};

/// Maximum number of completions that are posted at once.
const POST_MAX: usize = 32;

/// Maximum number of channels that are woken at once.
const RING_MAX: usize = 64;

/// Completion queues by channel number; a number without a queue is free.
type Table = Vec<Option<Arc<Mailbox<Ended>>>>;

/// The completion queues of a device's channels.
#[derive(Debug)]
pub(super) struct Homes(Arc<Published<Table>>);

impl Homes {
    pub(super) fn new() -> Homes {
        Homes(Arc::new(Published::new(Vec::new())))
    }

    /// Opens a completion queue for a channel with `requests` requests; `None` if there are too
    /// many channels.
    pub(super) fn open(&self, requests: usize) -> Option<Home> {
        let mail = Mailbox::open(requests);
        let mut number = None;
        self.0.update(|table| {
            let mut table = table.clone();
            let free = table.iter().position(Option::is_none).unwrap_or(table.len());
            number = u16::try_from(free).ok();
            if number.is_some() {
                table.resize(table.len().max(free + 1), None);
                table[free] = Some(Arc::clone(mail.mailbox()));
            }
            table
        });
        let table = Reader::new(&self.0);
        let homes = Homes(Arc::clone(&self.0));
        let (letters, rung) = (Vec::with_capacity(POST_MAX), Vec::with_capacity(RING_MAX));
        Some(Home { number: number?, mail, table, homes, letters, rung })
    }

    /// Wakes one sleeping thread, if there is one.
    pub(super) fn ring_one(&self) -> bool {
        ring_one_of(&self.0.get(), 0)
    }
}

fn bell(entry: &Option<Arc<Mailbox<Ended>>>) -> Option<&Bell> {
    entry.as_ref().map(|mailbox| mailbox.bell())
}

fn ring_one_of(table: &Table, from: usize) -> bool {
    let (before, behind) = table.split_at(from.min(table.len()));
    Bell::ring_one(behind.iter().chain(before).filter_map(bell))
}

/// A channel's completion queue, and its way to those of the other channels. It belongs to one
/// thread at a time.
#[derive(Debug)]
pub(super) struct Home {
    number: u16,
    mail: Owner<Ended>,
    table: Reader<Table>,
    homes: Homes,
    /// Completions for one channel, collected before they are posted.
    letters: Vec<Ended>,
    /// The channels to wake after posting.
    rung: Vec<u16>,
}

impl Home {
    #[inline]
    pub(super) fn number(&self) -> u16 {
        self.number
    }

    /// The eventcount that wakes the channel's thread.
    #[inline]
    pub(super) fn bell(&self) -> &Bell {
        self.mail.mailbox().bell()
    }

    /// Whether a completion has arrived.
    #[inline]
    pub(super) fn is_any(&self) -> bool {
        self.mail.is_any()
    }

    /// Moves the arrived completions into `done`; returns their number.
    #[inline]
    pub(super) fn collect(&mut self, done: &mut Done) -> usize {
        let mut count = 0;
        while let Some(ended) = self.mail.take() {
            done.put(ended);
            count += 1;
        }
        count
    }

    /// Sends completed requests to their channels. Those of this channel go into `done`; returns
    /// their number.
    #[inline]
    pub(super) fn send(&mut self, landed: &mut Vec<Landed>, done: &mut Done) -> usize {
        if landed.is_empty() {
            return 0;
        }
        let Home { number, table, letters, rung, .. } = self;
        let table = table.get();
        let (mut own, mut to) = (0, *number);
        for chain in landed.drain(..) {
            chain.part(|home, ended| {
                if home == *number {
                    done.put(ended);
                    own += 1;
                    return;
                }
                if home != to || letters.len() == POST_MAX {
                    post(table, to, letters, rung);
                    to = home;
                }
                letters.push(ended);
            });
        }
        post(table, to, letters, rung);
        // Wakes last, because a woken thread may take the CPU from this one.
        ring_all(table, rung);
        own
    }

    /// Wakes the thread of one other channel, if one sleeps.
    #[cold]
    pub(super) fn ring_one(&mut self) -> bool {
        ring_one_of(self.table.get(), usize::from(self.number) + 1)
    }

    /// Wakes the thread of this channel number, if it sleeps.
    #[cold]
    pub(super) fn ring(&mut self, number: u32) {
        if let Some(bell) = self.table.get().get(number as usize).and_then(bell) {
            bell.ring();
        }
    }
}

#[inline]
fn post(table: &Table, to: u16, letters: &mut Vec<Ended>, rung: &mut Vec<u16>) {
    if letters.is_empty() {
        return;
    }
    let mailbox = table[usize::from(to)].as_ref().expect("a channel waits for its requests");
    mailbox.post(letters.drain(..));
    if rung.len() == RING_MAX {
        ring_all(table, rung);
    }
    rung.push(to);
}

fn ring_all(table: &Table, rung: &mut Vec<u16>) {
    if !rung.is_empty() {
        let at = |number: u16| table.get(usize::from(number)).and_then(bell);
        Bell::ring_all(rung.drain(..).filter_map(at));
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let number = usize::from(self.number);
        self.homes.0.update(|table| {
            let mut table = table.clone();
            table[number] = None;
            table
        });
    }
}
