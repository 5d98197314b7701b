//! What happens to the records of a group that has ended: blocks enter the maps, and the records
//! are answered.

use std::collections::BTreeSet;
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_sync::completion_queue::CompletionQueue;
use blockyard_volume_format::entry::Entry;

use super::batch::LogBatch;
use crate::apply::Apply;
use crate::error::VolumeError;
use crate::pool::Pool;
use crate::record::{Body, Reply};
use crate::relocate;

/// The answers to records: what they still have to report, and the threads to wake.
#[derive(Default)]
pub(super) struct Answers {
    /// Volumes with a write that was answered early and then found no space: their next flush
    /// returns the error.
    lost: BTreeSet<u32>,
    /// Completion queues that got answers, and whose owners are to be woken.
    wake_list: Vec<Arc<CompletionQueue<Reply>>>,
}

/// Enters a group's blocks into the maps; `address` is that of the first block. If a map cannot be
/// changed, the pool latches; opening it again reports the cause.
pub(super) fn group<D: SegmentStore>(pool: &Pool<D>, group: &LogBatch, address: u64) {
    if let Err(error) = put(pool, group, address) {
        pool.latch(&format!("a map cannot be changed: {error}"));
    }
}

fn put<D: SegmentStore>(
    pool: &Pool<D>,
    group: &LogBatch,
    mut address: u64,
) -> Result<(), VolumeError> {
    let align = pool.align();
    let copies = pool.volumes().copies;
    let mut maps = Apply::new(pool.segments(), copies);
    let mut entries = Vec::new();
    for record in &group.records {
        match (&record.body, &record.volume) {
            (Body::Write(payload), Some(volume)) => {
                entries.clear();
                entries.extend(payload.blocks().iter().map(|stored| {
                    let place = address + u64::from(stored.offset);
                    Entry::new(place, stored.len, stored.codec, stored.crc)
                }));
                maps.publish(volume, record.first, &entries, record.serial)?;
                address += payload.bytes().len() as u64;
            }
            (Body::Zero(blocks), Some(volume)) => {
                maps.zero(volume, record.first, u64::from(*blocks))?;
                volume.retire(record.first, *blocks, record.serial);
            }
            (Body::Move(moved), _) => {
                let segments = pool.segments();
                let is_left = |location: Entry| {
                    moved.pages.contains(&segments.split(location.address()).0)
                        || moved.lost.contains(&location)
                };
                let volumes = pool.volumes();
                // A block that could not be moved stays in its segment, which is therefore not
                // freed.
                _ = relocate::blocks(&volumes, &moved.moves, &mut maps);
                if !moved.pages.is_empty() || !moved.lost.is_empty() {
                    relocate::pages(&volumes, &moved.spans, is_left, &moved.lost, &mut maps);
                    maps.tally().dirtied += pool.roots().leave(is_left) as u64;
                }
            }
            (Body::Catalogue(change), _) if record.durable => {
                pool.volumes().apply(change, &mut maps)?;
                let len = change.print().len() as u64;
                address += len.next_multiple_of(align.into());
            }
            _ => {}
        }
    }
    Ok(())
}

impl Answers {
    /// Answers all records of the group. [`Answers::wake`] wakes the threads that wait for them.
    pub(super) fn answer<D: SegmentStore>(
        &mut self,
        pool: &Pool<D>,
        group: &mut LogBatch,
        status: Status,
    ) {
        for record in &mut group.records {
            let volume = record.volume.as_ref().map(|volume| volume.meta.id);
            let Some(reply) = &mut record.reply else {
                // This write was answered early. If it failed, the volume's next flush returns the
                // error.
                if let Some(id) = volume {
                    pool.dismiss();
                    if !status.is_ok() {
                        self.lost.insert(id);
                    }
                }
                continue;
            };
            let status = match &record.body {
                // A change that was refused before it entered the group.
                Body::Catalogue(_) if !record.durable => {
                    Status::from_u8(record.serial as u8).expect("it was put there as a status")
                }
                Body::Flush if volume.is_some_and(|id| self.lost.remove(&id)) => match status {
                    Status::Ok => Status::NoSpc,
                    status => status,
                },
                Body::Flush | Body::Stop if status == Status::NoSpc => Status::Ok,
                Body::Checkpoint if status.is_ok() && group.unchecked => Status::NoSpc,
                _ => status,
            };
            let to = reply.answer(status);
            if self.wake_list.last().is_none_or(|last| !Arc::ptr_eq(last, to)) {
                self.wake_list.push(Arc::clone(to));
            }
        }
    }

    /// Wakes the threads that wait for the answers.
    pub(super) fn wake(&mut self) {
        self.wake_list.drain(..).for_each(|queue| _ = queue.event_count().notify());
    }
}
