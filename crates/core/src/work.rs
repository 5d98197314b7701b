//! The work that a device executes: a started request, or a single bio that is executed inline.

use std::iter::Once;
use std::ptr::NonNull;

use crate::bio::{Flags, Op};
use crate::request::{Segment, Segments, Started};
use crate::units::Sector;

/// One unit of work for a device.
pub trait Work {
    /// The data, piece by piece in the order of the sectors.
    type Segments<'a>: Iterator<Item = Segment>
    where
        Self: 'a;

    /// The operation.
    fn op(&self) -> Op;

    /// The modifiers.
    fn flags(&self) -> Flags;

    /// First sector.
    fn sector(&self) -> Sector;

    /// Length in sectors.
    fn sectors(&self) -> u64;

    /// The data; empty for operations without any.
    fn segments(&self) -> Self::Segments<'_>;

    /// Whether the work was merged from several bios.
    fn is_merged(&self) -> bool;

    /// The first sector after the range.
    #[inline]
    fn end(&self) -> Sector {
        self.sector() + self.sectors()
    }
}

impl Work for Started {
    type Segments<'a> = Segments<'a>;

    #[inline]
    fn op(&self) -> Op {
        Started::op(self)
    }

    #[inline]
    fn flags(&self) -> Flags {
        Started::flags(self)
    }

    #[inline]
    fn sector(&self) -> Sector {
        Started::sector(self)
    }

    #[inline]
    fn sectors(&self) -> u64 {
        Started::sectors(self)
    }

    #[inline]
    fn segments(&self) -> Segments<'_> {
        Started::segments(self)
    }

    #[inline]
    fn is_merged(&self) -> bool {
        Started::is_merged(self)
    }
}

/// A read or a write without flags that is executed inline: it has no tag and no slot, and it needs
/// no completion.
#[derive(Clone, Copy, Debug)]
pub struct InlineRequest {
    op: Op,
    sector: Sector,
    sectors: u64,
    data: Segment,
}

impl InlineRequest {
    /// A bio without flags. The data stays at `data` until the bio has been executed.
    #[inline]
    pub fn new(op: Op, sector: Sector, sectors: u64, data: NonNull<u8>) -> InlineRequest {
        let len_bytes = Sector(sectors).bytes() as usize;
        InlineRequest { op, sector, sectors, data: Segment { data, len_bytes } }
    }

    /// The address of the data.
    #[inline]
    pub fn data(&self) -> NonNull<u8> {
        self.data.data
    }
}

impl Work for InlineRequest {
    type Segments<'a> = Once<Segment>;

    #[inline]
    fn op(&self) -> Op {
        self.op
    }

    #[inline]
    fn flags(&self) -> Flags {
        Flags::NONE
    }

    #[inline]
    fn sector(&self) -> Sector {
        self.sector
    }

    #[inline]
    fn sectors(&self) -> u64 {
        self.sectors
    }

    #[inline]
    fn segments(&self) -> Once<Segment> {
        std::iter::once(self.data)
    }

    #[inline]
    fn is_merged(&self) -> bool {
        false
    }
}
