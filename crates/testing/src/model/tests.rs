//! Tests of the model against the tables that it was written from.

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Op};
use blockyard_core::geometry::{Geometry, ZoneGeometry};
use blockyard_core::limits::Limits;
use blockyard_core::units::{Sector, ZoneNo};
use blockyard_core::zone::ZoneCond;

use super::Model;

/// Eight zones of 64 sectors, 48 writable, the first conventional; at most two open and three
/// active.
fn small() -> Model {
    let zones = ZoneGeometry {
        zone_sectors: 64,
        zone_capacity_sectors: 48,
        zone_count: 8,
        conventional_count: 1,
        open_max: 2,
        active_max: 3,
    };
    let geometry = Geometry {
        sectors: 512,
        logical_block_bytes: 4096,
        physical_block_bytes: 4096,
        zones: Some(zones),
    };
    let mut limits = Limits::unlimited(64);
    limits.chunk_sectors = 64;
    limits.zone_append_sectors_max = 16;
    Model::new(&geometry, &limits, true)
}

fn run(model: &mut Model, op: Op, sector: u64, sectors: u64) -> Status {
    let mut data = vec![7; if op.has_data() { sectors as usize * 512 } else { 0 }];
    model.apply(&Bio::new(op, Sector(sector), sectors), &mut data).status
}

fn cond(model: &Model, zone: usize) -> ZoneCond {
    model.report()[zone].cond
}

#[test]
fn the_oldest_implicitly_open_zone_gives_way() {
    let mut model = small();
    for zone in 1..=3 {
        assert_eq!(run(&mut model, Op::Write, zone * 64, 8), Status::Ok);
    }
    assert_eq!(cond(&model, 1), ZoneCond::Closed);
    assert_eq!(cond(&model, 2), ZoneCond::ImplicitOpen);
    assert_eq!(run(&mut model, Op::Write, 4 * 64, 8), Status::ZoneActiveResource);
    // A closed zone may be written again at the active limit.
    assert_eq!(run(&mut model, Op::Write, 64 + 8, 8), Status::Ok);
    assert_eq!(cond(&model, 2), ZoneCond::Closed);
    assert_eq!(run(&mut model, Op::ZoneOpen, 64, 0), Status::Ok);
    assert_eq!(run(&mut model, Op::ZoneOpen, 3 * 64, 0), Status::Ok);
    assert_eq!(run(&mut model, Op::Write, 2 * 64 + 8, 8), Status::ZoneOpenResource);
}

#[test]
fn a_zone_is_full_at_its_capacity_and_reads_ff_above_the_write_pointer() {
    let mut model = small();
    assert_eq!(run(&mut model, Op::Write, 64, 40), Status::Ok);
    assert_eq!(run(&mut model, Op::Write, 64 + 40, 16), Status::IoErr);
    let read = Bio::new(Op::Read, Sector(64 + 32), 16);
    let mut data = vec![1; 16 * 512];
    assert_eq!(model.apply(&read, &mut data).status, Status::Ok);
    assert_eq!((data[0], data[8 * 512]), (7, 0xff));
    assert_eq!(run(&mut model, Op::ZoneAppend, 64, 8), Status::Ok);
    assert_eq!(cond(&model, 1), ZoneCond::Full);
    assert_eq!(model.report()[1].wp, Sector(64 + 48));
    assert_eq!(run(&mut model, Op::ZoneFinish, 128, 0), Status::Ok);
    assert_eq!(model.report()[2].wp, Sector(128 + 64));
}

#[test]
fn an_append_says_where_it_landed() {
    let mut model = small();
    for index in 0..3 {
        let outcome = model.apply(&Bio::new(Op::ZoneAppend, Sector(128), 8), &mut [3; 4096]);
        assert_eq!((outcome.status, outcome.sector), (Status::Ok, Sector(128 + index * 8)));
    }
    assert_eq!(run(&mut model, Op::ZoneAppend, 0, 8), Status::IoErr);
    assert_eq!(run(&mut model, Op::ZoneAppend, 128 + 8, 8), Status::IoErr);
}

#[test]
fn conditions_times_operations() {
    use Status::{IoErr, Ok};
    // Columns: open, close, finish, reset, write at the write pointer; see null_blk's table.
    type Row = (ZoneCond, &'static [(Op, u64)], [Status; 5]);
    let prepare: [Row; 6] = [
        (ZoneCond::Empty, &[], [Ok, IoErr, Ok, Ok, Ok]),
        (ZoneCond::ImplicitOpen, &[(Op::Write, 8)], [Ok; 5]),
        (ZoneCond::ExplicitOpen, &[(Op::ZoneOpen, 0)], [Ok; 5]),
        (ZoneCond::Closed, &[(Op::Write, 8), (Op::ZoneClose, 0)], [Ok; 5]),
        (ZoneCond::Full, &[(Op::ZoneFinish, 0)], [IoErr, IoErr, Ok, Ok, IoErr]),
        (ZoneCond::ReadOnly, &[], [IoErr; 5]),
    ];
    let ops = [Op::ZoneOpen, Op::ZoneClose, Op::ZoneFinish, Op::ZoneReset, Op::Write];
    for (cond_wanted, steps, answers) in prepare {
        for (op, answer) in ops.into_iter().zip(answers) {
            let mut model = small();
            for (op, sectors) in steps {
                assert_eq!(run(&mut model, *op, 64, *sectors), Ok);
            }
            if cond_wanted == ZoneCond::ReadOnly {
                assert!(model.toggle(ZoneNo(1), ZoneCond::ReadOnly));
            }
            assert_eq!(cond(&model, 1), cond_wanted);
            let wp = model.report()[1].wp.0.min(64 + 40);
            let (sector, sectors) = if op == Op::Write { (wp, 8) } else { (64, 0) };
            assert_eq!(run(&mut model, op, sector, sectors), answer, "{op} on {cond_wanted}");
        }
    }
    // Closing a zone that was opened but never written makes it empty.
    let mut model = small();
    assert_eq!(run(&mut model, Op::ZoneOpen, 64, 0), Ok);
    assert_eq!(run(&mut model, Op::ZoneClose, 64, 0), Ok);
    assert_eq!(cond(&model, 1), ZoneCond::Empty);
}

#[test]
fn a_write_is_cut_at_zones_and_each_piece_stands_alone() {
    let mut model = small();
    // Conventional zone 0 takes its half; zone 1 is written from its start.
    assert_eq!(run(&mut model, Op::Write, 56, 16), Status::Ok);
    assert_eq!(model.report()[1].wp, Sector(72));
    // The second half misses the write pointer: an error, although the first half is written.
    assert_eq!(run(&mut model, Op::Write, 48, 24), Status::IoErr);
    assert_eq!(model.report()[1].wp, Sector(72));
}

#[test]
fn senseless_bios_get_their_statuses() {
    let mut model = small();
    assert_eq!(run(&mut model, Op::Read, 4, 8), Status::Inval);
    assert_eq!(run(&mut model, Op::Read, 0, 0), Status::Inval);
    assert_eq!(run(&mut model, Op::Read, 504, 16), Status::IoErr);
    assert_eq!(run(&mut model, Op::Discard, u64::MAX - 7, 8), Status::IoErr);
    assert_eq!(run(&mut model, Op::ZoneReset, 8, 0), Status::Inval);
    assert_eq!(run(&mut model, Op::ZoneReset, 512, 0), Status::Inval);
}

#[test]
fn a_bad_block_leaves_the_zone_open_and_moves_it_by_what_was_written() {
    let mut model = small();
    model.bad_blocks().add(64 + 8..64 + 9);
    assert_eq!(run(&mut model, Op::Write, 64, 16), Status::IoErr);
    assert_eq!(cond(&model, 1), ZoneCond::ImplicitOpen);
    assert_eq!(model.report()[1].wp, Sector(64));
    model.bad_blocks().partial_io = true;
    assert_eq!(run(&mut model, Op::Write, 64, 16), Status::IoErr);
    assert_eq!(model.report()[1].wp, Sector(72));
}
