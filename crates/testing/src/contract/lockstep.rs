//! One bio at a time, each compared with the model immediately: the strictest comparison.

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Flags, Op};
use blockyard_core::units::Sector;

use super::Subject;
use super::fixture::{Fixture, data_bytes};
use crate::seed::Seed;
use crate::workload::{Mix, Workload};

/// Bios of a wild run.
const BIOS: u32 = 3000;

/// Fills the start of the buffer with the data that a bio writes.
pub(super) fn fill(fixture: &Fixture, workload: &mut Workload, bio: &Bio) {
    let mut data = vec![0; data_bytes(bio)];
    workload.fill(&mut data);
    fixture.region.write(0, &data);
}

/// A wild workload, including invalid bios, with periodic comparisons of the zone report.
pub(super) fn wild(subject: &Subject, seed: Seed) {
    let mut fixture = subject.fixture();
    let mut workload = Workload::new(seed, 1, Mix::wild());
    for count in 0..BIOS {
        let bio = workload.next(&fixture.model).with_user_data(u64::from(count));
        fill(&fixture, &mut workload, &bio);
        fixture.both(bio);
        if count % 64 == 0 {
            fixture.same_report();
        }
    }
    fixture.same_report();
    fixture.same_contents();
}

/// A flush works on every device; FUA and PREFLUSH do not change what is read.
pub(super) fn flushes(subject: &Subject, seed: Seed) {
    let mut fixture = subject.fixture();
    let mut workload = Workload::new(seed, 2, Mix::tame());
    assert_eq!(fixture.both(Bio::flush()).status, Status::Ok);
    // From sector 0 on: the first zone, conventional or empty, takes writes from its start.
    let block = fixture.disk.geometry().block_sectors();
    let flags = [
        Flags::NONE,
        Flags::FUA,
        Flags::PREFLUSH,
        Flags::FUA | Flags::PREFLUSH,
        Flags::FUA | Flags::SYNC,
    ];
    let mut at = 0;
    for flags in flags {
        let bio = Bio::new(Op::Write, Sector(at), block).with_flags(flags);
        fill(&fixture, &mut workload, &bio);
        assert_eq!(fixture.both(bio).status, Status::Ok, "write with {flags:?}");
        assert_eq!(fixture.both(Bio::flush()).status, Status::Ok);
        at += block;
    }
    for read in 0..flags.len() as u64 {
        assert_eq!(
            fixture.both(Bio::new(Op::Read, Sector(read * block), block)).status,
            Status::Ok
        );
    }
    // A flush with flags of its own is a flush.
    let flush = Bio::flush().with_flags(Flags::PREFLUSH | Flags::FUA);
    assert_eq!(fixture.both(flush).status, Status::Ok);
}
