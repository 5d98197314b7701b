//! The completion router: a completion queue for each channel of a device.

use std::sync::Arc;

use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_sync::event_count::EventCount;
use blockyard_sync::rcu_cell::{RcuCell, RcuReader};

use super::in_flight::CompletedChain;
use crate::request::{CompletedRequest, CompletionBatch};

/// Maximum number of completions that are posted at once.
const POST_MAX: usize = 32;

/// Maximum number of channels that are woken at once.
const NOTIFY_MAX: usize = 64;

/// Completion queues by channel number; a number without a queue is free.
type QueueTable = Vec<Option<Arc<CompletionQueue<CompletedRequest>>>>;

/// The completion queues of a device's channels.
#[derive(Debug)]
pub(super) struct CompletionRouter(Arc<RcuCell<QueueTable>>);

impl CompletionRouter {
    pub(super) fn new() -> CompletionRouter {
        CompletionRouter(Arc::new(RcuCell::new(Vec::new())))
    }

    /// Opens a completion queue for a channel with `requests` requests; `None` if there are too
    /// many channels.
    pub(super) fn open(&self, requests: usize) -> Option<CompletionTarget> {
        let receiver = CompletionQueue::open(requests);
        let mut number = None;
        self.0.update(|table| {
            let mut table = table.clone();
            let free = table.iter().position(Option::is_none).unwrap_or(table.len());
            number = u16::try_from(free).ok();
            if number.is_some() {
                table.resize(table.len().max(free + 1), None);
                table[free] = Some(Arc::clone(receiver.completion_queue()));
            }
            table
        });
        let table = RcuReader::new(&self.0);
        let router = CompletionRouter(Arc::clone(&self.0));
        let (values, notified) = (Vec::with_capacity(POST_MAX), Vec::with_capacity(NOTIFY_MAX));
        Some(CompletionTarget { number: number?, receiver, table, router, values, notified })
    }

    /// Wakes one sleeping thread, if there is one.
    pub(super) fn notify_one(&self) -> bool {
        notify_one_of(&self.0.get(), 0)
    }
}

fn event_count(entry: &Option<Arc<CompletionQueue<CompletedRequest>>>) -> Option<&EventCount> {
    entry.as_ref().map(|completion_queue| completion_queue.event_count())
}

fn notify_one_of(table: &QueueTable, from: usize) -> bool {
    let (low, high) = table.split_at(from.min(table.len()));
    EventCount::notify_one(high.iter().chain(low).filter_map(event_count))
}

/// A channel's completion queue, and its way to those of the other channels. It belongs to one
/// thread at a time.
#[derive(Debug)]
pub(super) struct CompletionTarget {
    number: u16,
    receiver: Receiver<CompletedRequest>,
    table: RcuReader<QueueTable>,
    router: CompletionRouter,
    /// Completions for one channel, collected before they are posted.
    values: Vec<CompletedRequest>,
    /// The channels to wake after posting.
    notified: Vec<u16>,
}

impl CompletionTarget {
    #[inline]
    pub(super) fn number(&self) -> u16 {
        self.number
    }

    /// The eventcount that wakes the channel's thread.
    #[inline]
    pub(super) fn event_count(&self) -> &EventCount {
        self.receiver.completion_queue().event_count()
    }

    /// Whether a completion has arrived.
    #[inline]
    pub(super) fn is_any(&self) -> bool {
        self.receiver.is_any()
    }

    /// Moves the arrived completions into `done`; returns their number.
    #[inline]
    pub(super) fn collect(&mut self, done: &mut CompletionBatch) -> usize {
        let mut count = 0;
        while let Some(ended) = self.receiver.take() {
            done.put(ended);
            count += 1;
        }
        count
    }

    /// Sends completed requests to their channels. Those of this channel go into `done`; returns
    /// their number.
    #[inline]
    pub(super) fn send(
        &mut self,
        completed: &mut Vec<CompletedChain>,
        done: &mut CompletionBatch,
    ) -> usize {
        if completed.is_empty() {
            return 0;
        }
        let CompletionTarget { number, table, values, notified, .. } = self;
        let table = table.get();
        let (mut own, mut to) = (0, *number);
        for chain in completed.drain(..) {
            chain.part(|target, ended| {
                if target == *number {
                    done.put(ended);
                    own += 1;
                    return;
                }
                if target != to || values.len() == POST_MAX {
                    post(table, to, values, notified);
                    to = target;
                }
                values.push(ended);
            });
        }
        post(table, to, values, notified);
        // Wakes last, because a woken thread may take the CPU from this one.
        notify_all(table, notified);
        own
    }

    /// Wakes the thread of one other channel, if one sleeps.
    #[cold]
    pub(super) fn notify_one(&mut self) -> bool {
        notify_one_of(self.table.get(), usize::from(self.number) + 1)
    }

    /// Wakes the thread of this channel number, if it sleeps.
    #[cold]
    pub(super) fn notify(&mut self, number: u32) {
        if let Some(event_count) = self.table.get().get(number as usize).and_then(event_count) {
            event_count.notify();
        }
    }
}

#[inline]
fn post(table: &QueueTable, to: u16, values: &mut Vec<CompletedRequest>, notified: &mut Vec<u16>) {
    if values.is_empty() {
        return;
    }
    let completion_queue =
        table[usize::from(to)].as_ref().expect("a channel waits for its requests");
    completion_queue.post(values.drain(..));
    if notified.len() == NOTIFY_MAX {
        notify_all(table, notified);
    }
    notified.push(to);
}

fn notify_all(table: &QueueTable, notified: &mut Vec<u16>) {
    if !notified.is_empty() {
        let at = |number: u16| table.get(usize::from(number)).and_then(event_count);
        EventCount::notify_all(notified.drain(..).filter_map(at));
    }
}

impl Drop for CompletionTarget {
    fn drop(&mut self) {
        let number = usize::from(self.number);
        self.router.0.update(|table| {
            let mut table = table.clone();
            table[number] = None;
            table
        });
    }
}
