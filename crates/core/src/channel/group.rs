//! The counters of the channels of one device, or of one client: those of the open channels, and
//! the sum of the closed ones.
#![allow(clippy::disallowed_types)] // Control plane: a lock that no bio takes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::stats::{ChannelStats, Stats};
use crate::channel::Channel;

/// Channels whose counters are read together. A channel may be in several groups.
#[derive(Debug, Default)]
pub struct ChannelGroup(Mutex<GroupCounters>);

#[derive(Debug, Default)]
struct GroupCounters {
    /// The sum of the closed channels; `None` while there is none.
    closed: Option<Box<Stats>>,
    open: Vec<Arc<ChannelStats>>,
}

impl ChannelGroup {
    /// Adds a channel, if it has counters.
    pub fn add(&self, channel: &dyn Channel) {
        if let Some(stats) = channel.counters() {
            self.add_counters(stats);
        }
    }

    /// Adds the counters of a channel that is being opened.
    pub(crate) fn add_counters(&self, stats: Arc<ChannelStats>) {
        self.counters().open.push(stats);
    }

    /// The sum of the counters of all channels, open and closed.
    pub fn sum(&self) -> Stats {
        let counters = self.counters();
        let mut sum = counters.closed.as_deref().cloned().unwrap_or_default();
        for stats in &counters.open {
            sum.add(stats);
        }
        sum.channels = counters.open.len() as u64;
        sum
    }

    /// The counters, with those of the channels that have been closed in the sum.
    fn counters(&self) -> MutexGuard<'_, GroupCounters> {
        // A panic of another lock holder leaves the counters usable.
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let GroupCounters { closed, open } = &mut *counters;
        open.retain(|stats| {
            let is_closed = stats.end.is_reached();
            if is_closed {
                closed.get_or_insert_default().add(stats);
            }
            !is_closed
        });
        counters
    }
}

/// A field of a channel, dropped after the fields that count: its drop ends the counters.
#[derive(Debug)]
pub(super) struct EndsCounters(pub(super) Arc<ChannelStats>);

impl Drop for EndsCounters {
    fn drop(&mut self) {
        self.0.end.reach();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bio::Op;

    #[test]
    fn each_group_keeps_the_counts_of_a_closed_channel() {
        let (device, client) = (ChannelGroup::default(), ChannelGroup::default());
        let [first, second] = [(), ()].map(|()| EndsCounters(ChannelStats::new()));
        device.add_counters(Arc::clone(&first.0));
        device.add_counters(Arc::clone(&second.0));
        client.add_counters(Arc::clone(&second.0));
        for (channel, bios) in [(&first, 3), (&second, 5)] {
            (0..bios).for_each(|_| channel.0.executed_inline(Op::Read, true, 8));
            channel.0.latency(Op::Read, 4096, bios);
        }
        let reads = |group: &ChannelGroup| {
            let sum = group.sum();
            (sum.op(Op::Read).ops, sum.read_latency.iter().sum::<u64>(), sum.channels)
        };
        assert_eq!((reads(&device), reads(&client)), ((8, 8, 2), (5, 5, 1)));
        drop(second);
        // A second look does not add the closed channel again.
        for _ in 0..2 {
            assert_eq!((reads(&device), reads(&client)), ((8, 8, 1), (5, 5, 0)));
        }
        drop(first);
        assert_eq!((reads(&device), reads(&client)), ((8, 8, 0), (5, 5, 0)));
    }
}
