//! The stack over a device that logs its requests: merging, splitting, flush sequences, order, and
//! invalid bios.

use std::sync::Arc;

use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::Faulty;
use blockyard_core::*;

use crate::common::*;

#[test]
fn data_round_trips_through_merged_and_split_requests() {
    let recorder = Recorder::new();
    let disk = composed(recorder);
    let mut fixture = Fixture::new(&disk);
    let pattern: Vec<u8> = (0..128u32 << 10).map(|n| (n * 7 + n / 511) as u8).collect();
    fixture.region.write(0, &pattern);
    // 32 writes of 4 KiB, which merge, and one read of 128 KiB, which is split.
    let writes: Vec<Bio> =
        (0..32).map(|n| Bio::write(Sector(n * 8), 8, fixture.buf(n * 4096))).collect();
    assert!(fixture.statuses(&writes).iter().all(|status| status.is_ok()));
    assert!(fixture.statuses(&[Bio::read(Sector(0), 256, fixture.buf(128 << 10))])[0].is_ok());
    let mut back = vec![0; pattern.len()];
    fixture.region.read(128 << 10, &mut back);
    assert!(back == pattern);
}

#[test]
fn neighbours_merge_at_both_ends_within_limits() {
    let recorder = Recorder::new();
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    let write = |sector, sectors| Bio::write(Sector(sector), sectors, buf);
    // Back merge, front merge, back merge; then a distant bio; then one whose flags forbid merging.
    fixture.run(&[write(16, 8), write(24, 8), write(8, 8), write(32, 8), write(100, 8)]);
    assert_eq!(log_of(&log), [(Op::Write, 8, 32, false), (Op::Write, 100, 8, false)]);
    fixture.run(&[write(0, 8), write(8, 8).with_flags(Flags::NOMERGE), write(16, 8)]);
    assert_eq!(log_of(&log).len(), 3);
    fixture.run(&[
        write(0, 8),
        write(8, 8).with_prio(Prio::RealTime),
        Bio::read(Sector(16), 8, buf),
    ]);
    assert_eq!(log_of(&log).len(), 3);
    // One request holds at most 64 sectors.
    fixture.run(&[write(0, 40), write(40, 24), write(64, 8)]);
    assert_eq!(log_of(&log), [(Op::Write, 0, 64, false), (Op::Write, 64, 8, false)]);
    assert_eq!(disk.stats().op(Op::Write).merges, 4);
}

#[test]
fn chunk_boundaries_split_and_are_not_merged_across() {
    let mut recorder = Recorder::new();
    recorder.limits.chunk_sectors = 32;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    fixture.run(&[Bio::read(Sector(24), 50, buf)]);
    let pieces = [(24, 8), (32, 32), (64, 10)];
    assert_eq!(log_of(&log), pieces.map(|(at, len)| (Op::Read, at, len, false)));
    fixture.run(&[Bio::write(Sector(24), 8, buf), Bio::write(Sector(32), 8, buf)]);
    assert_eq!(log_of(&log).len(), 2);
}

#[test]
fn bio_with_more_pieces_than_slots_completes_once() {
    let mut recorder = Recorder::new();
    recorder.limits.sectors_max = 8;
    recorder.late = true;
    let disk = composed_of(recorder, 4, Still::default());
    let mut fixture = Fixture::new(&disk);
    let pattern: Vec<u8> = (0..100u32 << 9).map(|n| (n % 253) as u8).collect();
    fixture.region.write(0, &pattern);
    let (out, back) = (fixture.buf(0), fixture.buf(100 << 9));
    let bios = [Bio::write(Sector(0), 100, out), Bio::read(Sector(0), 100, back)];
    assert!(fixture.run(&bios[..1])[0].status.is_ok());
    assert!(fixture.run(&bios[1..])[0].status.is_ok());
    let mut read = vec![0; pattern.len()];
    fixture.region.read(100 << 9, &mut read);
    assert!(read == pattern);
}

#[test]
fn failing_bio_fails_alone_after_merge() {
    let mut recorder = Recorder::new();
    recorder.bad = Some(20);
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    let bios: Vec<Bio> = (0..5).map(|n| Bio::write(Sector(n * 8), 8, buf)).collect();
    let expected = [Status::Ok, Status::Ok, Status::Medium, Status::Ok, Status::Ok];
    assert_eq!(fixture.statuses(&bios), expected);
    // The bios are offered again one by one and in order.
    let starts: Vec<u64> = log_of(&log).iter().map(|entry| entry.1).collect();
    assert_eq!(starts, [0, 8, 16, 24, 32]);
}

#[test]
fn unstarted_requests_are_offered_again_in_order() {
    let mut recorder = Recorder::new();
    recorder.starts_max = 2;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    let bios: Vec<Bio> = (0..40).map(|n| Bio::read(Sector(n * 16), 8, buf)).collect();
    assert!(fixture.statuses(&bios).iter().all(|status| status.is_ok()));
    let starts: Vec<u64> = log_of(&log).iter().map(|entry| entry.1).collect();
    assert_eq!(starts, (0..40).map(|n| n * 16).collect::<Vec<_>>());
}

#[test]
fn flush_sequences_match_cache_capabilities() {
    use Op::{Flush, Write};
    let buf = BufRef { region: RegionId(0), offset: 0 };
    let write = |flags| Bio::write(Sector(8), 8, buf).with_flags(flags);
    let both = Flags::PREFLUSH | Flags::FUA;
    type Row = (Op, u64, u64, bool);
    let flush: Row = (Flush, 0, 0, false);
    let plain: Row = (Write, 8, 8, false);
    let fua: Row = (Write, 8, 8, true);
    let table: [(Recorder, Bio, &[Row]); 12] = [
        (Recorder::new(), Bio::flush(), &[]),
        (Recorder::new(), write(Flags::FUA), &[plain]),
        (Recorder::new(), write(both), &[plain]),
        (Recorder::cached(true), Bio::flush(), &[flush]),
        (Recorder::cached(true), write(Flags::NONE), &[plain]),
        (Recorder::cached(true), write(Flags::FUA), &[fua]),
        (Recorder::cached(true), write(Flags::PREFLUSH), &[flush, plain]),
        (Recorder::cached(true), write(both), &[flush, fua]),
        (Recorder::cached(false), Bio::flush(), &[flush]),
        (Recorder::cached(false), write(Flags::FUA), &[plain, flush]),
        (Recorder::cached(false), write(Flags::PREFLUSH), &[flush, plain]),
        (Recorder::cached(false), write(both), &[flush, plain, flush]),
    ];
    for (recorder, bio, expected) in table {
        for late in [false, true] {
            let log = Log::default();
            let limits = recorder.limits.clone();
            let device = Recorder { late, limits, log: Arc::clone(&log), ..Recorder::new() };
            let disk = composed(device);
            let mut fixture = Fixture::new(&disk);
            assert_eq!(fixture.statuses(&[bio]), [Status::Ok]);
            assert_eq!(log_of(&log), expected, "{bio:?}");
        }
    }
}

/// Regression: each piece of a split bio had a flush of its own before it, and the first pieces
/// were in flight before the last flush had completed.
#[test]
fn split_bio_has_one_flush_sequence() {
    use Op::{Flush, Write};
    type Row = (Op, u64, u64, bool);
    let both = Flags::PREFLUSH | Flags::FUA;
    let flush: Row = (Flush, 0, 0, false);
    let pieces =
        |fua| -> [Row; 3] { [(Write, 0, 64, fua), (Write, 64, 64, fua), (Write, 128, 32, fua)] };
    let [plain, fua] = [pieces(false), pieces(true)];
    let first = [flush];
    let table: [(Recorder, Flags, [&[Row]; 3]); 9] = [
        (Recorder::new(), both, [&[], &plain, &[]]),
        (Recorder::cached(true), Flags::NONE, [&[], &plain, &[]]),
        (Recorder::cached(true), Flags::FUA, [&[], &fua, &[]]),
        (Recorder::cached(true), Flags::PREFLUSH, [&first, &plain, &[]]),
        (Recorder::cached(true), both, [&first, &fua, &[]]),
        (Recorder::cached(false), Flags::NONE, [&[], &plain, &[]]),
        (Recorder::cached(false), Flags::FUA, [&[], &plain, &first]),
        (Recorder::cached(false), Flags::PREFLUSH, [&first, &plain, &[]]),
        (Recorder::cached(false), both, [&first, &plain, &first]),
    ];
    for (recorder, flags, parts) in table {
        // With four slots the pieces go one after the other, with 64 slots all at once.
        for (late, depth) in [(false, 64), (true, 64), (false, 4), (true, 4)] {
            let log = Log::default();
            let recorder = Recorder {
                geometry: recorder.geometry.clone(),
                limits: recorder.limits.clone(),
                log: Arc::clone(&log),
                late,
                ..Recorder::new()
            };
            let disk = composed_of(recorder, depth, Still::default());
            let mut fixture = Fixture::new(&disk);
            let write = Bio::write(Sector(0), 160, fixture.buf(0)).with_flags(flags);
            let next = Bio::write(Sector(512), 8, fixture.buf(0));
            assert_eq!(fixture.statuses(&[write, next]), [Status::Ok; 2]);
            let found: Vec<Row> =
                log_of(&log).into_iter().filter(|row| *row != (Write, 512, 8, false)).collect();
            assert_eq!(found, parts.concat(), "{flags:?}, late {late}, depth {depth}");
        }
    }
}

/// No piece of a split bio starts before the flush that it waits for has completed, and none starts
/// if the flush fails.
#[test]
fn pieces_wait_for_preflush() {
    for status in [Status::Ok, Status::IoErr] {
        let mut recorder = Recorder::cached(true);
        recorder.late = true;
        let log = Arc::clone(&recorder.log);
        let disk = composed(Faulty::new(recorder, 1));
        if !status.is_ok() {
            let op = Some(Op::Flush);
            let rule = Rule { op, sectors: 8, times: Some(1), ..Rule::new(status) };
            disk.inject(&Injection::AddRule(rule)).unwrap();
        }
        let mut fixture = Fixture::new(&disk);
        let write = Bio::write(Sector(0), 160, fixture.buf(0)).with_flags(Flags::PREFLUSH);
        assert_eq!(fixture.channel.push(&[write, write]), 1, "the next one waits for the pieces");
        fixture.channel.submit();
        let started: Vec<Op> = log_of(&log).iter().map(|row| row.0).collect();
        assert_eq!(started, if status.is_ok() { vec![Op::Flush] } else { vec![] });
        let mut done = Vec::new();
        while fixture.channel.reap(&mut done) == 0 {}
        assert_eq!(done[0].status, status);
        assert_eq!(log_of(&log).len(), if status.is_ok() { 3 } else { 0 });
        // The channel still works.
        assert_eq!(fixture.statuses(&[write]), [Status::Ok]);
    }
}

#[test]
fn invalid_bios_complete_with_their_status() {
    let mut recorder = Recorder::new();
    recorder.geometry.logical_block_bytes = 4096;
    recorder.limits.discard_sectors_max = 0;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut fixture = Fixture::new(&disk);
    let buf = fixture.buf(0);
    let cases = [
        (Bio::read(Sector(0), 0, buf), Status::Inval),
        (Bio::read(Sector(4), 8, buf), Status::Inval),
        (Bio::read(Sector(0), 4, buf), Status::Inval),
        (Bio::read(Sector(SECTORS), 8, buf), Status::IoErr),
        (Bio::read(Sector(SECTORS - 8), 16, buf), Status::IoErr),
        (Bio::read(Sector(u64::MAX - 7), 8, buf), Status::IoErr),
        (Bio::read(Sector(0), 8, BufRef { region: RegionId(9), offset: 0 }), Status::Inval),
        (Bio::read(Sector(0), 8, fixture.buf((256 << 10) - 4095)), Status::Inval),
        (Bio::read(Sector(0), 8, fixture.buf(u64::MAX)), Status::Inval),
        (Bio::new(Op::Discard, Sector(0), 8), Status::NotSupp),
        (Bio::append(Sector(0), 8, buf), Status::NotSupp),
        (Bio::new(Op::ZoneReset, Sector(0), 0), Status::NotSupp),
        (Bio::new(Op::ZoneResetAll, Sector(0), 0), Status::NotSupp),
    ];
    for (bio, status) in cases {
        assert_eq!(fixture.statuses(&[bio]), [status], "{bio:?}");
    }
    assert!(log_of(&log).is_empty(), "none of them came to the device");
    assert_eq!(disk.stats().op(Op::Read).errors, 9);
}

#[test]
fn ignored_fields_may_have_any_value() {
    let disk = composed(Recorder::cached(true));
    let mut fixture = Fixture::new(&disk);
    let garbage = Bio::new(Op::Flush, Sector(u64::MAX), u64::MAX);
    let refused = Bio::read(Sector(u64::MAX - 7), u64::MAX - 7, fixture.buf(0));
    let write = Bio::write(Sector(0), 8, fixture.buf(0));
    let bios = [garbage, garbage, write, refused, refused, garbage];
    let statuses = fixture.statuses(&bios);
    use Status::{IoErr, Ok};
    assert_eq!(statuses, [Ok, Ok, Ok, IoErr, IoErr, Ok]);
    let stats = disk.stats();
    assert_eq!((stats.op(Op::Flush).sectors, stats.op(Op::Read).sectors), (0, 0));
    assert_eq!(stats.read_latency.iter().sum::<u64>(), 0, "they never came to the device");
}
