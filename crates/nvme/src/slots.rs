//! The commands of a connection, from their capsule to their completion.
//!
//! ```text
//!          capsule, no data or data in the capsule, and nothing else to read
//! FREE ──────────────────────────────────────────────▸ EXECUTES ──▸ FREE
//!   │ capsule, other data                                ▴  ▴        ▴
//!   ▾      pages for the data that the device reads      │  │        │
//! WAITS FOR MEMORY ──────────────────────────────────────┘  │        │
//!   │ pages for the data of a write: R2T                    │        │
//!   ▾                         all data, good digests        │        │
//! RECEIVES ─────────────────────────────────────────────────┘        │
//!   └──────────── all data, a wrong digest ──────────────────────────┘
//! ```
//!
//! 1. A host has at most as many commands as its submission queue has entries.
//! 2. Data are accepted for a command that receives only, by the tag of its R2T. A tag is not used
//!    again before 512 others of its slot.

use blockyard_core::Status;

use crate::command::Sqe;
use crate::data_pool::PageSpan;
use crate::identify::QUEUE_ENTRIES_MAX;
use crate::namespace::{BioPlan, IoPlan, Transfer};
use crate::zones::ReportProgress;

/// The bits of a tag that name the slot.
const SLOT_BITS: u32 = (QUEUE_ENTRIES_MAX - 1).count_ones();

const _: () = assert!(QUEUE_ENTRIES_MAX.is_power_of_two(), "a tag has whole bits for a slot");

/// The state of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotPhase {
    Free,
    WaitsForMemory,
    Receives,
    Executes,
}

/// What a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandPlan {
    /// A Connect.
    Connect,
    /// An Authentication Send.
    AuthSend,
    /// A command of an I/O queue.
    Io(IoPlan),
}

/// A command of a host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandSlot {
    pub(crate) phase: SlotPhase,
    pub(crate) sqe: Sqe,
    pub(crate) plan: CommandPlan,
    /// The id of the subsystem of the device, for a command of an I/O queue.
    pub(crate) device: u64,
    /// The operation that the device executes now, or that has failed.
    pub(crate) bio: Option<BioPlan>,
    /// The status of an operation that has failed, until the zones have been looked at.
    pub(crate) refused: Option<Status>,
    /// The next range or zone of a command that consists of several operations.
    pub(crate) next: u32,
    /// How far a report of zones is.
    pub(crate) report: ReportProgress,
    /// What is left of its present range.
    pub(crate) rest: Option<BioPlan>,
    /// The offset of the data in the region.
    pub(crate) data: u64,
    /// The bytes of data.
    pub(crate) len: u32,
    /// The offset of the data in the region that the device reads and the host does not get.
    pub(crate) scratch: u64,
    /// The bytes received so far, of data that come by R2T.
    pub(crate) received: u32,
    /// Whether a PDU with a part of the data had a wrong digest.
    pub(crate) is_damaged: bool,
    /// The pages of the pool that the data take.
    pub(crate) span: Option<PageSpan>,
    generation: u16,
}

impl CommandSlot {
    /// Whether data have to come from the host.
    pub(crate) fn lacks_data(&self) -> bool {
        let is_from_host = match self.plan {
            CommandPlan::Connect | CommandPlan::AuthSend => true,
            CommandPlan::Io(plan) => matches!(plan.transfer(), Transfer::FromHost(_)),
        };
        is_from_host && self.received < self.len
    }

    /// The bytes of pages that the command needs: for data that are not in its capsule, and for
    /// what the device reads in addition.
    pub(crate) fn pages_bytes(&self) -> u32 {
        self.own_bytes() + self.scratch_bytes()
    }

    /// The bytes of pages for data of the host.
    fn own_bytes(&self) -> u32 {
        // Data in a capsule are received before pages are asked for.
        if self.received == self.len { 0 } else { self.len }
    }

    fn scratch_bytes(&self) -> u32 {
        match self.plan {
            CommandPlan::Connect | CommandPlan::AuthSend => 0,
            CommandPlan::Io(plan) => plan.scratch_bytes(),
        }
    }

    /// Takes the pages that the command needs.
    pub(crate) fn take_pages(&mut self, span: PageSpan) {
        let own = self.own_bytes();
        if own > 0 {
            self.data = span.offset();
        }
        self.scratch = span.offset() + u64::from(own);
        self.span = Some(span);
    }
}

/// The commands of a connection.
#[derive(Debug)]
pub(crate) struct CommandSlots {
    slots: Vec<CommandSlot>,
    free: Vec<u16>,
}

impl CommandSlots {
    pub(crate) fn new() -> CommandSlots {
        let unused = CommandSlot {
            phase: SlotPhase::Free,
            sqe: Sqe::ZERO,
            plan: CommandPlan::Connect,
            device: 0,
            bio: None,
            refused: None,
            next: 0,
            report: ReportProgress::default(),
            rest: None,
            data: 0,
            len: 0,
            scratch: 0,
            received: 0,
            is_damaged: false,
            span: None,
            generation: 0,
        };
        CommandSlots {
            slots: vec![unused; QUEUE_ENTRIES_MAX.into()],
            free: (0..QUEUE_ENTRIES_MAX).rev().collect(),
        }
    }

    /// The number of commands.
    pub(crate) fn in_use(&self) -> u16 {
        QUEUE_ENTRIES_MAX - self.free.len() as u16
    }

    /// The number of commands that the device executes.
    pub(crate) fn executing(&self) -> usize {
        self.slots.iter().filter(|slot| slot.phase == SlotPhase::Executes).count()
    }

    /// A slot for a command; `None` if all are in use.
    pub(crate) fn take(&mut self, sqe: Sqe) -> Option<u16> {
        let index = self.free.pop()?;
        let slot = self.get(index);
        let (plan, generation) = (CommandPlan::Connect, slot.generation);
        *slot = CommandSlot {
            phase: SlotPhase::Executes,
            sqe,
            plan,
            device: 0,
            bio: None,
            refused: None,
            next: 0,
            report: ReportProgress::default(),
            rest: None,
            data: 0,
            len: 0,
            scratch: 0,
            received: 0,
            is_damaged: false,
            span: None,
            generation,
        };
        Some(index)
    }

    /// Frees a slot and returns its pages.
    pub(crate) fn give(&mut self, index: u16) -> Option<PageSpan> {
        let slot = self.get(index);
        slot.phase = SlotPhase::Free;
        let span = slot.span.take();
        self.free.push(index);
        span
    }

    pub(crate) fn get(&mut self, index: u16) -> &mut CommandSlot {
        &mut self.slots[usize::from(index)]
    }

    /// A new tag for the R2T of a slot.
    pub(crate) fn new_tag(&mut self, index: u16) -> u16 {
        let slot = self.get(index);
        slot.generation = slot.generation.wrapping_add(1);
        slot.generation << SLOT_BITS | index
    }

    /// The slot that receives data by this tag for this command.
    pub(crate) fn find_receiving(&mut self, tag: u16, cid: u16) -> Option<u16> {
        let index = tag & (QUEUE_ENTRIES_MAX - 1);
        let slot = self.get(index);
        let is_this = slot.phase == SlotPhase::Receives
            && slot.generation << SLOT_BITS == tag & !(QUEUE_ENTRIES_MAX - 1)
            && slot.sqe.cid() == cid;
        is_this.then_some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data for a read, for a command without an R2T, or by the tag of an earlier command made
    /// Linux use memory after it was freed; SPDK counted tags from 1 and checked only the upper
    /// bound.
    #[test]
    fn data_are_accepted_by_the_tag_of_the_present_r2t_only() {
        let mut slots = CommandSlots::new();
        let mut bytes = [0; 64];
        bytes[2] = 7;
        let sqe = Sqe::parse(&bytes).unwrap();
        let index = slots.take(sqe).unwrap();
        assert_eq!(slots.find_receiving(index, 7), None, "it asked for nothing");
        let tag = slots.new_tag(index);
        assert_eq!(slots.find_receiving(tag, 7), None, "it does not receive");
        slots.get(index).phase = SlotPhase::Receives;
        assert_eq!(slots.find_receiving(tag, 7), Some(index));
        assert_eq!(slots.find_receiving(tag, 8), None, "another command");
        assert_eq!(slots.find_receiving(tag & 127, 7), None, "a tag that was never used");
        slots.give(index);
        assert_eq!(slots.find_receiving(tag, 7), None);
        assert_eq!(slots.take(sqe), Some(index));
        let next = slots.new_tag(index);
        slots.get(index).phase = SlotPhase::Receives;
        assert_eq!(slots.find_receiving(tag, 7), None, "the tag of the command before");
        assert_eq!(slots.find_receiving(next, 7), Some(index));
        for tag in 0..=u16::MAX {
            assert_eq!(slots.find_receiving(tag, 7).is_some(), tag == next);
        }
    }

    #[test]
    fn there_are_as_many_slots_as_entries() {
        let mut slots = CommandSlots::new();
        let taken: Vec<_> = std::iter::from_fn(|| slots.take(Sqe::ZERO)).collect();
        assert_eq!((taken.len(), slots.in_use(), slots.executing()), (128, 128, 128));
    }
}
