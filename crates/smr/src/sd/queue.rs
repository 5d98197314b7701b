//! The per-channel queue of a disk: turns requests into commands, one at a time.
//!
//! A command is executed when its request is started; its data pass through the queue's own buffer.
//! If the disk has a timing model, the completion waits until the model says that the command is
//! done.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use blockyard_core::{
    Batch, CompletionBatch, DeviceQueue, Due, Flags, InlineRequest, Nanos, Op, Sector, Started,
    Status, Work,
};

use super::buffer::Buffer;
use super::command::{self, UNMAP_LIST_LEN};
use super::device::Shared;
use super::probe::{Discard, RETRIES_MAX};
use super::sense_decision::{SenseDecision, decide};
use crate::cdb::{Blocks, Command, ZoneAction};
use crate::transport::{Data, ScsiTransport};

/// Nanoseconds until a retry if the disk is busy.
const BUSY_RETRY_NS: u64 = 1_000_000;
/// Maximum retries of a request while the disk is busy: at least ten seconds.
const BUSY_RETRIES_MAX: u32 = 10_000;

/// The part of a disk that one channel owns.
pub struct SdQueue<T: ScsiTransport> {
    shared: Arc<Shared<T>>,
    buffer: Buffer,
    /// Executed requests that complete later, oldest first; the next field has their completion
    /// times.
    held: CompletionBatch,
    held_until: VecDeque<Nanos>,
    /// When to retry the requests left in the batch, because the disk was busy.
    retry_at: Option<Nanos>,
    /// How often in a row the disk was busy.
    busy: u32,
    /// The disk was busy when a bio was to be executed inline. The bio is started next, and waits.
    was_busy_inline: bool,
}

/// The data of a command.
enum Payload {
    None,
    /// The request's data, to the disk.
    Out,
    /// The request's data, from the disk.
    In,
    /// A block of zeros.
    Zeros,
    /// An UNMAP parameter list.
    List([u8; UNMAP_LIST_LEN]),
}

impl<T: ScsiTransport> SdQueue<T> {
    pub(super) fn new(shared: Arc<Shared<T>>) -> SdQueue<T> {
        let depth = usize::from(shared.limits.queue_depth);
        SdQueue {
            buffer: Buffer::new(shared.request_bytes_max()),
            held: CompletionBatch::with_capacity(depth),
            held_until: VecDeque::with_capacity(depth),
            retry_at: None,
            busy: 0,
            was_busy_inline: false,
            shared,
        }
    }

    /// The command for a request, with its data; an error status if the disk has no such command.
    fn command(&self, work: &impl Work) -> Result<(Command, Payload), Status> {
        let shift = self.shared.block_shift;
        let lba = work.sector().0 >> shift;
        // The limits keep ranges far below 2^32 blocks, even those of UNMAP.
        let count = u32::try_from(work.sectors() >> shift).map_err(|_| Status::NotSupp)?;
        let blocks = Blocks { lba, count };
        let zone = |action| (command::zone(action, lba), Payload::None);
        Ok(match work.op() {
            Op::Read => (command::read(blocks), Payload::In),
            Op::Write => {
                let fua = work.flags().contains(Flags::FUA);
                (command::write(blocks, fua), Payload::Out)
            }
            Op::Flush => (command::synchronize_cache(), Payload::None),
            Op::WriteZeroes => {
                if self.shared.limits.write_zeroes_sectors_max == 0 {
                    return Err(Status::NotSupp);
                }
                (command::write_same(blocks, false), Payload::Zeros)
            }
            Op::Discard => match self.shared.discard {
                Discard::None => return Err(Status::NotSupp),
                Discard::Unmap => {
                    let list_bytes = UNMAP_LIST_LEN as u16;
                    let list = command::unmap_list(blocks);
                    (Command::Unmap { list_bytes }, Payload::List(list))
                }
                // In a sequential zone WRITE SAME is a write, and the zone write plug has not
                // ordered it.
                Discard::WriteSame if self.is_sequential(work) => return Err(Status::NotSupp),
                Discard::WriteSame => (command::write_same(blocks, true), Payload::Zeros),
            },
            Op::ZoneReset => zone(ZoneAction::Reset),
            Op::ZoneResetAll => (command::reset_all(), Payload::None),
            Op::ZoneOpen => zone(ZoneAction::Open),
            Op::ZoneClose => zone(ZoneAction::Close),
            Op::ZoneFinish => zone(ZoneAction::Finish),
            // There is no such command: the zone write plug makes writes of appends.
            Op::ZoneAppend => return Err(Status::NotSupp),
        })
    }

    /// Whether a range reaches into a sequential zone: conventional zones come first.
    fn is_sequential(&self, work: &impl Work) -> bool {
        let last = Sector(work.sector().0 + work.sectors().saturating_sub(1));
        let zones = self.shared.zones();
        !zones.is_conventional(zones.zone_of(last))
    }

    /// Whether bios that were merged into this write end inside physical blocks of a sequential
    /// zone: the disk refuses each of them, but would accept the merged write.
    fn has_unaligned_pieces(&self, work: &impl Work) -> bool {
        let Shared { geometry, .. } = &*self.shared;
        let physical = geometry.physical_block_bytes as usize;
        let zones = self.shared.zones();
        work.op() == Op::Write
            && physical > geometry.logical_block_bytes as usize
            && !zones.is_conventional(zones.zone_of(work.sector()))
            && work.segments().any(|segment| !segment.len_bytes.is_multiple_of(physical))
    }

    /// Executes a request. Returns the decision and the completion time.
    fn carry_out(&mut self, now: Nanos, work: &impl Work) -> (SenseDecision, Nanos) {
        let (command, payload) = match self.command(work) {
            Ok(command) => command,
            Err(status) => return (SenseDecision::Failed(status), now),
        };
        let cdb = command.print();
        let len = Sector(work.sectors()).bytes() as usize;
        match payload {
            Payload::Out => {
                self.buffer.gather(work.segments());
            }
            Payload::Zeros => {
                self.buffer.bytes(self.shared.geometry.logical_block_bytes as usize).fill(0)
            }
            Payload::List(list) => self.buffer.bytes(UNMAP_LIST_LEN).copy_from_slice(&list),
            Payload::None | Payload::In => {}
        }
        let data_len = match payload {
            Payload::None => 0,
            Payload::In | Payload::Out => len,
            Payload::Zeros => self.shared.geometry.logical_block_bytes as usize,
            Payload::List(_) => UNMAP_LIST_LEN,
        };
        let mut tries = 0;
        let decision = loop {
            let bytes = self.buffer.bytes(data_len);
            let data = match payload {
                Payload::None => Data::None,
                Payload::In => Data::In(bytes),
                Payload::Out | Payload::Zeros | Payload::List(_) => Data::Out(bytes),
            };
            let ended = self.shared.transport.execute(&cdb, data);
            match decide(&ended) {
                SenseDecision::Retry(_) if tries < RETRIES_MAX => tries += 1,
                SenseDecision::Retry(status) => break SenseDecision::Failed(status),
                SenseDecision::Done => {
                    let whole = ended.is_ok_and(|outcome| outcome.transferred == data_len);
                    break if whole {
                        SenseDecision::Done
                    } else {
                        SenseDecision::Failed(Status::IoErr)
                    };
                }
                decision => break decision,
            }
        };
        if decision == SenseDecision::Done && work.op() == Op::Read {
            self.buffer.scatter(work.segments());
        }
        let due = match decision {
            SenseDecision::Later(_) => now,
            _ => self.shared.transport.due(now, &cdb),
        };
        (decision, due)
    }

    /// Completes a request now or at its due time.
    fn complete(
        &mut self,
        now: Nanos,
        due: Nanos,
        (started, status): (Started, Status),
        done: &mut CompletionBatch,
    ) {
        // Completions keep their order, since the disk executes one command at a time.
        let due = self.held_until.back().map_or(due, |&last| due.max(last));
        if due <= now {
            done.complete(started, status);
        } else {
            self.held.complete(started, status);
            self.held_until.push_back(due);
        }
    }
}

impl<T: ScsiTransport + 'static> DeviceQueue for SdQueue<T> {
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        if self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = None;
        if std::mem::take(&mut self.was_busy_inline) {
            self.busy += 1;
            self.retry_at = Some(now + BUSY_RETRY_NS);
            return;
        }
        while self.room() > 0
            && let Some(started) = batch.next()
        {
            if started.is_merged() && self.has_unaligned_pieces(&started) {
                return batch.break_up(started);
            }
            let (decision, due) = self.carry_out(now, &started);
            let status = match decision {
                SenseDecision::Done => Status::Ok,
                SenseDecision::Later(_) if self.busy < BUSY_RETRIES_MAX => {
                    self.busy += 1;
                    self.retry_at = Some(now + BUSY_RETRY_NS);
                    return batch.requeue(started);
                }
                // Retry bio by bio: some may succeed.
                _ if started.is_merged() => return batch.break_up(started),
                SenseDecision::Failed(status)
                | SenseDecision::Retry(status)
                | SenseDecision::Later(status) => status,
            };
            self.busy = 0;
            self.complete(now, due, (started, status), done);
        }
    }

    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        if self.retry_at.is_some() || !self.shared.transport.is_immediate() {
            return None;
        }
        match self.carry_out(Nanos(0), &single).0 {
            SenseDecision::Done => Some(Status::Ok),
            SenseDecision::Failed(status) => Some(status),
            SenseDecision::Retry(_) => None,
            SenseDecision::Later(_) => {
                self.was_busy_inline = true;
                None
            }
        }
    }

    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        while self.held_until.front().is_some_and(|&until| until <= now) {
            self.held_until.pop_front();
            done.take_from(&mut self.held);
        }
    }

    fn room(&self) -> usize {
        usize::from(self.shared.limits.queue_depth) - self.held_until.len()
    }

    fn due(&self) -> Due {
        let retry = self.retry_at.map_or(Due::Never, Due::At);
        let held = self.held_until.front().map_or(Due::Never, |&until| Due::At(until));
        held.earlier(retry)
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        self.held_until.clear();
        while done.take_from(&mut self.held) {}
    }
}

impl<T: ScsiTransport> fmt::Debug for SdQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SdQueue").field("held", &self.held_until.len()).finish_non_exhaustive()
    }
}
