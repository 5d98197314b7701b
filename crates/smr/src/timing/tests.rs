//! Tests of the timing model: it must reproduce the figures of a drive's specification.

use super::*;

/// Capacity of the 14 TB drive.
const LEN: u64 = 14_000_519_643_136;
const MS: u64 = 1_000_000;
const WRITE: AccessKind = AccessKind::Write { fua: false, conventional: false };
const RANDOM_WRITE: AccessKind = AccessKind::Write { fua: false, conventional: true };

fn drive(times: DriveTimes) -> Timing {
    Timing::new(times, LEN)
}

/// Megabytes per second of a stream of commands, each sent when the previous one completes.
fn stream(drive: &mut Timing, access: AccessKind, from: u64, len: u64, count: u64) -> u64 {
    let mut now = drive.done_at(access, from, len, 0);
    let start = now;
    for index in 1..=count {
        now = drive.done_at(access, from + index * len, len, now);
    }
    count * len * 1000 / (now - start)
}

/// Pseudorandom places, the same at each run.
fn places(count: usize) -> impl Iterator<Item = u64> {
    let mut random = fastrand::Rng::with_seed(14);
    (0..count).map(move |_| random.u64(..LEN / 4096 - 1) * 4096)
}

#[test]
fn average_seek_matches_the_published_time() {
    let drive = drive(DriveTimes::HC620);
    let places: Vec<u64> = places(40_000).collect();
    for (arm, published) in [(Arm::Reads, 7_400_000), (Arm::Writes, 8_200_000)] {
        let seeks = places.windows(2).map(|two| drive.seek_ns(arm, two[0].abs_diff(two[1])));
        let average = seeks.sum::<u64>() / (places.len() as u64 - 1);
        assert!(average.abs_diff(published) < published / 100, "{arm:?}: {average}");
    }
    assert_eq!(drive.seek_ns(Arm::Reads, 0), 0);
    assert!((230_000..250_000).contains(&drive.seek_ns(Arm::Reads, 1 << 20)));
    let full = drive.seek_ns(Arm::Reads, LEN);
    assert!((13 * MS..14 * MS).contains(&full), "{full}");
}

/// A random read takes a seek and half a revolution on average, and hardly anything else.
#[test]
fn random_reads_are_as_many_as_seek_and_rotation_permit() {
    let mut drive = drive(DriveTimes::HC620);
    let mut now = 0;
    for place in places(20_000) {
        now = drive.done_at(AccessKind::Read, place, 4096, now);
    }
    let average = now / 20_000;
    let expected = 7_400_000 + 8_333_333 / 2 + 50_000;
    assert!(average.abs_diff(expected) < expected / 50, "{average}, not {expected}");
}

#[test]
fn streams_run_at_the_rate_of_their_place() {
    for (from, want) in [(0, 233), (LEN / 2, 182), (LEN - (300 << 20), 110)] {
        let reads = stream(&mut drive(DriveTimes::HC620), AccessKind::Read, from, 1 << 20, 256);
        assert!(reads.abs_diff(want) <= 2, "reads at {from}: {reads} MB/s");
        let mut writing = drive(DriveTimes { write_buffer_bytes: 8 << 20, ..DriveTimes::HC620 });
        let writes = stream(&mut writing, WRITE, from, 1 << 20, 256);
        assert!(writes.abs_diff(want) <= want / 20, "writes at {from}: {writes} MB/s");
    }
}

/// Why a single write in flight per zone is slow without a buffer: each write comes slightly too
/// late.
#[test]
fn a_write_that_comes_too_late_waits_for_a_revolution() {
    let mut drive = drive(DriveTimes { write_buffer_bytes: 0, ..DriveTimes::HC620 });
    let first = drive.done_at(WRITE, 0, 1 << 20, 0);
    let second = drive.done_at(WRITE, 1 << 20, 1 << 20, first);
    let alone = drive.spin_ns(2 << 20) - drive.spin_ns(1 << 20);
    assert_eq!(second - first, alone + 8_333_333);
}

#[test]
fn the_buffer_takes_writes_until_it_is_full() {
    let mut drive = drive(DriveTimes::HC620);
    let quick = drive.done_at(WRITE, 0, 1 << 20, 0);
    assert_eq!(quick, 50_000 + drive.interface_ns(1 << 20));
    let rate = stream(&mut drive, WRITE, 1 << 20, 1 << 20, 1000);
    assert!((250..350).contains(&rate), "the buffer helps a little: {rate} MB/s");
    let now = drive.last_ns;
    let flushed = drive.done_at(AccessKind::Flush, 0, 0, now);
    let left = flushed - now;
    assert!((1000 * MS..1200 * MS).contains(&left), "256 MB at 233 MB/s, not {left} ns");
    assert_eq!(drive.done_at(AccessKind::Flush, 0, 0, flushed), flushed + 50_000);
}

#[test]
fn a_read_does_not_wait_for_the_whole_buffer() {
    let mut drive = drive(DriveTimes::HC620);
    let mut now = 0;
    for index in 0..100 {
        now = drive.done_at(WRITE, index << 20, 1 << 20, now);
    }
    let before = drive.done_at(AccessKind::Flush, 0, 0, now);
    let read = drive.done_at(AccessKind::Read, LEN / 2, 4096, now);
    assert!(read - now < 40 * MS, "{}", read - now);
    let after = drive.done_at(AccessKind::Flush, 0, 0, now);
    assert!(after > before && after - before < 40 * MS, "the writes are as much later");
}

#[test]
fn a_forced_write_is_on_the_medium() {
    let mut drive = drive(DriveTimes::HC620);
    let buffered = drive.done_at(WRITE, LEN / 2, 1 << 20, 0);
    let forced = AccessKind::Write { fua: true, conventional: false };
    let done = drive.done_at(forced, (LEN / 2) + (1 << 20), 4096, buffered);
    assert!(done - buffered > 8 * MS);
    assert_eq!(drive.done_at(AccessKind::Flush, 0, 0, done), done + 50_000);
}

/// Random small writes in the conventional zones go to one place first.
#[test]
fn the_media_cache_gathers_random_writes() {
    let took = |media_cache_bytes| {
        let times = DriveTimes { media_cache_bytes, ..DriveTimes::HC620 };
        let mut drive = drive(times);
        let mut now = 0;
        for place in places(2000) {
            now = drive.done_at(RANDOM_WRITE, place % (524 << 28), 4096, now);
        }
        drive.done_at(AccessKind::Flush, 0, 0, now)
    };
    let (with, without) = (took(8 << 30), took(0));
    assert!(with * 50 < without, "{with} against {without}");
}

#[test]
fn the_media_cache_empties_while_the_drive_is_idle() {
    let mut drive = drive(DriveTimes::HC620);
    let mut now = 0;
    for place in places(100) {
        now = drive.done_at(RANDOM_WRITE, place % (524 << 28), 4096, now);
    }
    now = drive.done_at(AccessKind::Flush, 0, 0, now);
    assert!(drive.cached_writes >= 99);
    now = drive.done_at(AccessKind::Other, 0, 0, now + 550 * MS);
    let left = drive.cached_writes;
    assert!((50..70).contains(&left), "each takes 12.4 ms: {left}");
    drive.done_at(AccessKind::Other, 0, 0, now + 5000 * MS);
    assert_eq!((drive.cached_writes, drive.cached_bytes), (0, 0));
}

#[test]
fn the_same_commands_take_the_same_time_and_none_is_done_before_it_comes() {
    let run = || {
        let mut drive = drive(DriveTimes::HC620);
        let mut random = fastrand::Rng::with_seed(15);
        let mut now = 0;
        let mut all = Vec::new();
        for place in places(5000) {
            let access = match random.u8(..8) {
                0 => AccessKind::Flush,
                1 => AccessKind::Other,
                2 => RANDOM_WRITE,
                3 => AccessKind::Write { fua: true, conventional: random.bool() },
                4 | 5 => WRITE,
                _ => AccessKind::Read,
            };
            let len = 4096 << random.u32(..10);
            let done = drive.done_at(access, place.min(LEN - len), len, now);
            assert!(done >= now + 50_000, "{access:?} came at {now} and was done at {done}");
            all.push(done);
            now += random.u64(..20 * MS);
        }
        all
    };
    assert_eq!(run(), run());
}

#[test]
fn a_drive_of_one_rate_and_of_no_length_makes_no_trouble() {
    let times = DriveTimes { inner_rate: 233_000_000, ..DriveTimes::HC620 };
    let mut flat = drive(times);
    let rate = stream(&mut flat, AccessKind::Read, LEN - (300 << 20), 1 << 20, 256);
    assert!(rate.abs_diff(233) <= 2, "{rate}");
    let mut empty = Timing::new(DriveTimes::HC620, 0);
    assert!(empty.done_at(AccessKind::Read, 0, 0, 0) >= 50_000);
}
