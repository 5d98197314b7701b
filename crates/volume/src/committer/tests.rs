//! Tests of the committer when other threads interfere, or an operation fails.

use blockyard_store::PoolStore;

use super::round::DEAD_MIN;
use super::*;
use crate::Compression;
use crate::handle::{NO_REPLY, Outcome, VolumeHandle};
use crate::maintenance::LivenessScan;
use crate::segments::AllocationClass;
use crate::stepped_pool::{BLOCK, FULL, SteppedPool};
use crate::thread::Thread;

/// Regression: space was checked twice. If others took it between the two checks, a whole group was
/// refused, with writes that had been answered.
#[test]
fn a_write_that_has_found_space_does_not_search_again() {
    let mut stepped = SteppedPool::new("admitted");
    stepped.write(0, 1);
    for (block, token) in [(1, NO_REPLY), (2, 7)] {
        let write = stepped.handle.write(block * BLOCK, 4096, &|_, into| into.fill(3), token, true);
        assert_eq!(write, Outcome::Taken);
    }
    let SteppedPool { pool, committer, .. } = &mut stepped;
    committer.gather();
    assert_eq!(committer.group.records.len(), 2);
    assert_eq!(committer.find_space(), SpaceFound::Found);
    let (pages, taken) = (committer.group.pages, committer.segments_taken().unwrap());
    while pool.segments().has(AllocationClass::Write, pages, taken) {
        assert!(pool.segments().take(AllocationClass::Move).is_some());
    }
    assert_eq!(committer.commit(), None);
    let status = committer.complete_alone();
    committer.answer(status);
    assert_eq!(stepped.handle.take().map(|reply| reply.status), Some(Status::Ok));
    assert_eq!(stepped.handle.flush(8), Outcome::Taken);
    assert_eq!(stepped.committer.turn(), Turn::Worked);
    assert_eq!(stepped.handle.take().map(|reply| reply.status), Some(Status::Ok));
}

/// Regression: after a failed checkpoint the log since the last one was reset to 0, so it could
/// grow without bound.
#[test]
fn a_failed_checkpoint_does_not_reset_the_length_of_the_log() {
    let mut stepped = SteppedPool::new("put-off");
    stepped.write(0, 4);
    let SteppedPool { pool, committer, .. } = &mut stepped;
    let before = committer.round.log_bytes();
    assert!(before > 4 * BLOCK);
    let mut taken = Vec::new();
    while let Some(number) = pool.segments().take(AllocationClass::Checkpoint) {
        taken.push(number);
    }
    assert!(!committer.checkpoint_now(Cleaning::Nothing));
    assert_eq!(committer.round.log_bytes(), before);
    assert!(committer.round.retry_at() > before, "the next checkpoint waits");
    taken.into_iter().for_each(|number| pool.segments().put_back(number));
    assert!(committer.checkpoint_now(Cleaning::Nothing));
    assert_eq!((committer.round.log_bytes(), committer.round.retry_at()), (0, 0));
}

/// Regression: during a liveness scan that may not be interrupted, changed pages and log had no
/// bound.
#[test]
fn writes_wait_for_a_liveness_scan_before_a_long_log() {
    let mut stepped = SteppedPool::new("overrun");
    stepped.write(0, 1);
    let SteppedPool { pool, committer, .. } = &mut stepped;
    let mut tally = crate::map::Tally::new(pool.segments().bytes());
    tally.dirtied = 2 * committer.dirty_max() / 4096;
    pool.maintenance().set_scan(LivenessScan::Second);
    assert!(!committer.is_throttled());
    pool.segments().tally(&tally);
    assert!(committer.is_throttled());
    pool.maintenance().set_scan(LivenessScan::First);
    assert!(!committer.is_throttled(), "a checkpoint interrupts the first scan");
    pool.maintenance().set_scan(LivenessScan::Second);
    assert!(committer.is_overrun());
}

/// Regression: a thread that panicked during a scan blocked writes forever: it was joined only by a
/// write.
#[test]
fn writes_do_not_wait_for_a_liveness_scan_whose_thread_has_ended() {
    let mut stepped = SteppedPool::new("ended");
    let SteppedPool { pool, committer, .. } = &mut stepped;
    let mut tally = crate::map::Tally::new(pool.segments().bytes());
    tally.dirtied = 2 * committer.dirty_max() / 4096;
    pool.segments().tally(&tally);
    pool.maintenance().set_scan(LivenessScan::Second);
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let count = move || _ = ends.recv();
    let thread = Thread::start("volume-checkpoint", count).unwrap();
    committer.round.set_thread(thread);
    committer.throttle();
    committer.end_wait();
    assert!(committer.space.is_waiting());
    drop(end);
    while committer.round.is_running() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    committer.end_wait();
    assert!(!committer.space.is_waiting() && !committer.is_throttled());
}

/// If no segment has space for the empty group after the last one, a superblock states what is
/// durable, but not while another thread writes one.
#[test]
fn a_full_pool_records_in_a_superblock_what_is_durable() {
    let mut stepped = SteppedPool::new("recorded");
    stepped.write(0, 1);
    let SteppedPool { pool, committer, .. } = &mut stepped;
    while pool.segments().take(AllocationClass::Checkpoint).is_some() {}
    let stated = |pool: &Pool<_>| {
        let superblock = *pool.superblock.lock().unwrap();
        (superblock.sequence, superblock.durable)
    };
    let (before, place) = (stated(pool), committer.log.place);
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let write = move || _ = ends.recv();
    let thread = Thread::start("volume-checkpoint", write).unwrap();
    committer.round.set_thread(thread);
    committer.finish_idle_log();
    assert!(committer.log_tail() != LogTail::Recorded && stated(pool) == before);
    drop(end);
    while committer.round.is_running() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    for _ in 0..2 {
        committer.finish_idle_log();
        assert!(committer.log_tail() == LogTail::Recorded);
        assert_eq!(stated(pool), (before.0 + 1, committer.log.last()));
    }
    assert_eq!(committer.log.place, place, "the log did not grow");
    assert_eq!(pool.activity().recorded, committer.log.last());
}

/// A durable write of a block that gets no answer before its group is executed.
fn send(handle: &mut VolumeHandle<PoolStore>, block: u64) {
    let write = handle.write(block * BLOCK, 4096, &|_, into| into.fill(3), 0, true);
    assert_eq!(write, Outcome::Taken);
}

#[test]
fn a_durable_group_waits_for_the_clients_that_were_answered_a_moment_ago() {
    let mut stepped = SteppedPool::new("returning");
    let SteppedPool { pool, committer, handle, .. } = &mut stepped;
    let until = Instant::now() + Duration::from_secs(3600);
    committer.returning = Some(Returning { records: 3, until });
    send(handle, 0);
    let queue = Arc::clone(committer.intake.queue().completion_queue());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let live = pool.find("v").unwrap();
            let mut other = VolumeHandle::open(pool, live, Compression::None, 8).unwrap();
            for block in 1..3 {
                while !queue.event_count().is_asleep() {
                    std::thread::yield_now();
                }
                send(&mut other, block);
            }
        });
        committer.gather();
        committer.wait_for_clients();
    });
    assert_eq!((committer.group.records.len(), committer.returning), (3, None));
}

#[test]
fn a_group_does_not_wait_for_clients_that_stay_away() {
    let mut stepped = SteppedPool::new("away");
    let SteppedPool { committer, handle, .. } = &mut stepped;
    let late = Some(Returning { records: 3, until: Instant::now() });
    committer.returning = late;
    assert_eq!(handle.write(0, 4096, &|_, into| into.fill(3), 0, false), Outcome::Taken);
    committer.gather();
    committer.wait_for_clients();
    assert_eq!((committer.group.records.len(), committer.returning), (1, late), "a plain write");
    send(handle, 1);
    committer.gather();
    committer.wait_for_clients();
    assert_eq!((committer.group.records.len(), committer.returning), (2, None));
}

#[test]
fn a_group_expects_those_that_are_answered_and_those_that_wait() {
    let mut stepped = SteppedPool::new("expected");
    let SteppedPool { committer, handle, .. } = &mut stepped;
    (0..2).for_each(|block| send(handle, block));
    let began = Instant::now();
    committer.expect_clients(3, Some(began));
    let Some(Returning { records, until }) = committer.returning else { panic!("none") };
    assert!(until <= Instant::now() + RETURN_TIME_MAX);
    assert_eq!(records, 5);
    committer.gather();
    assert_eq!(committer.group.records.len(), 2, "the records that wait are not lost");
    // A store that answers fast: no group waits.
    committer.returning = None;
    committer.expect_clients(3, None);
    assert_eq!(committer.returning, None);
    while committer.turn() == Turn::Worked {}
    assert_eq!(committer.returning, None);
}

/// A client that sends each durable write after the answer to the last one causes no other writes
/// between them; an idle log gets one.
#[test]
fn only_an_idle_log_is_written_to() {
    let mut stepped = SteppedPool::new("busy");
    let before = stepped.pool.activity();
    (0..5).for_each(|first| stepped.write(first, 1));
    let busy = stepped.pool.activity();
    assert_eq!((busy.groups, busy.syncs), (before.groups + 5, before.syncs + 5));
    assert!(stepped.committer.log_tail() != LogTail::Recorded);
    (0..3).for_each(|_| stepped.committer.finish_idle_log());
    let idle = stepped.pool.activity();
    assert_eq!((idle.groups, idle.syncs), (busy.groups + 1, busy.syncs + 1));
    assert_eq!(idle.log_bytes, busy.log_bytes + BLOCK);
    assert_eq!((idle.number, idle.recorded), (busy.number + 1, busy.number + 1));
}

/// Regression: a pool never gave the space of a large discard back to its file system, because the
/// segments without live data were not free before a checkpoint, and an idle pool wrote none.
#[test]
fn an_idle_pool_frees_segments_without_live_data() {
    let mut pool = SteppedPool::new("dead-segments");
    (0..14).for_each(|number| pool.write(number * FULL, FULL));
    let full = pool.pool.segments().free();
    pool.committer.free_dead_segments();
    let still_full = pool.pool.segments().free();
    assert!(still_full <= full, "{full}, {still_full}: all segments have live data");
    pool.discard(0, 14 * FULL);
    assert!(pool.pool.segments().dead() >= DEAD_MIN, "{:?}", pool.pool.counts());
    (0..2).for_each(|_| pool.committer.free_dead_segments());
    let (dead, free) = (pool.pool.segments().dead(), pool.pool.segments().free());
    assert!(dead < DEAD_MIN && free >= full + DEAD_MIN, "{dead} dead, {full} free, then {free}");
}
