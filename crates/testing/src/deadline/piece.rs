//! A request that records the bios from which it was made.

use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{Item, Kind};
use blockyard_core::{Op, Prio, Sector};

/// A request of one or several bios, each identified by a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPiece {
    /// The operation.
    pub op: Op,
    /// The priority class.
    pub prio: Prio,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// Whether the request may merge.
    pub merges: bool,
    /// The numbers of its bios, in the order of their sectors.
    pub bios: Vec<u32>,
}

impl Item for RequestPiece {
    fn kind(&self) -> Kind {
        Kind::of(self.op, self.prio)
    }

    fn sector(&self) -> Sector {
        Sector(self.sector)
    }

    fn sectors(&self) -> u64 {
        self.sectors
    }

    fn keeps_zone_order(&self) -> bool {
        self.op == Op::Write
    }

    fn joins(&self, next: &RequestPiece, rules: MergeRules) -> bool {
        assert_eq!(self.sector + self.sectors, next.sector, "asked for what does not touch");
        assert_eq!(self.kind(), next.kind(), "asked across classes or directions");
        let range = Sector(self.sector)..Sector(next.sector + next.sectors);
        let segments = self.bios.len() + next.bios.len();
        self.op == next.op
            && self.merges
            && next.merges
            && rules.fits(self.op, range, segments as u16)
    }

    fn merge_back(&mut self, next: RequestPiece) {
        self.sectors += next.sectors;
        self.bios.extend(next.bios);
    }
}
