//! Rings stop and start again, memory comes and goes, hypervisors leave: no request is lost.
#![allow(clippy::unwrap_used)] // A test may.
#![allow(clippy::disallowed_types)] // A flag of a disk.

mod guest;

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use blockyard_core::Op;
use blockyard_core::rmw::SharedDisk;
use blockyard_null::NullConfig;
use blockyard_testing::log_lines::LogLines;
use blockyard_testing::watched_disk::{DiskWatch, WatchedDisk};
use blockyard_vhost::request::kind;
use guest::{
    DATA, Guest, PATIENCE, disk, into, is_told, out, plain, print_header, print_range, regions,
    serve, serve_polling, slow,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

/// Offers a read of sector 0 with its own buffers.
fn offer_read(guest: &mut Guest, number: u64) {
    let at = DATA + number * 8192;
    guest.put(at, &print_header(kind::IN, 0));
    guest.put(at + 16, &[0xff]);
    guest.offer(0, &[out(at, 16), into(at + 4096, 512), into(at + 16, 1)]);
}

#[test]
fn a_ring_that_stops_completes_what_it_took_and_goes_on_after_it() {
    let served = serve(disk("d", slow(5_000_000)));
    let mut guest = Guest::connect(&served, 1, 0);
    let mut answered = 0u64;
    for round in 1..=20u64 {
        (0..5).for_each(|number| offer_read(&mut guest, round * 5 + number));
        guest.kick(0);
        if round % 2 == 0 {
            guest.rings[0].wait_until_taken(&guest.memory);
        }
        let base = u64::from(guest.frontend.get_vring_base(0).unwrap());
        while guest.try_answer(0, Duration::ZERO).is_some() {
            answered += 1;
        }
        assert_eq!(answered, base, "what was taken is answered");
        guest.frontend.set_vring_base(0, base as u16).unwrap();
        let kick = guest.rings[0].kick.try_clone().unwrap();
        kick.write(1).unwrap();
        guest.frontend.set_vring_kick(0, &kick).unwrap();
    }
    while answered < 100 {
        guest.answer(0);
        answered += 1;
    }
    assert_eq!(served.server.info().requests, 100);
}

/// The thread has one bounce buffer. The second read needs it too and waits, so that the thread
/// does not take the third read until the first one is complete.
#[test]
fn requests_that_a_stopped_ring_leaves_keep_their_kick() {
    let served = serve(disk("d", slow(500_000_000)));
    let mut guest = Guest::connect(&served, 1, 0);
    for number in 0..3 {
        let at = DATA + number * 8192;
        guest.put(at, &print_header(kind::IN, 0));
        let status = into(at + 16, 1);
        guest.offer(0, &[out(at, 16), into(at + 4096, 511), into(at + 4096 + 511, 1), status]);
    }
    guest.kick(0);
    let base = guest.frontend.get_vring_base(0).unwrap();
    assert!(base < 3, "the ring stopped before the third read");
    assert!(is_told(&guest.rings[0].kick, Duration::ZERO), "{base} of 3 reads were taken");
}

#[test]
fn the_counts_of_rings_go_on_when_another_hypervisor_connects() {
    let served = serve(disk("d", plain()));
    assert_eq!(served.server.info().rings, []);
    let mut requests = [0, 0];
    for connection in 1..=3 {
        let mut guest = Guest::connect(&served, 2, 0);
        for (ring, answered) in requests.iter_mut().enumerate() {
            for _ in 0..=ring {
                guest.put(DATA, &print_header(kind::OUT, 0));
                guest.offer(ring, &[out(DATA, 16), out(DATA + 4096, 512), into(DATA + 16, 1)]);
                guest.kick(ring);
                guest.answer(ring);
                *answered += 1;
            }
        }
        // A read after the end of the disk.
        assert_eq!(guest.request(kind::IN, 1 << 40, &[], 512).0, 1);
        requests[0] += 1;
        let info = served.server.info();
        assert_eq!((info.requests, info.errors, info.written_bytes), (4, 1, 3 * 512));
        let stats = served.server.channel_stats(served.server.info().connection).unwrap();
        assert_eq!((stats.op(Op::Write).ops, stats.channels), (3, 2), "of this connection alone");
        // The thread counts a kick when it wakes up, which may be after the answer.
        while served.server.info().rings.iter().any(|(_, ring)| ring.kicks == 0) {
            std::thread::yield_now();
        }
        let rings = served.server.info().rings;
        assert_eq!(rings.len(), 2);
        for (index, ring) in rings {
            assert_eq!(ring.requests, requests[index], "{index}");
            assert_eq!(ring.errors, if index == 0 { connection } else { 0 });
            assert_eq!(ring.written_bytes, 512 * (requests[index] - ring.errors));
            assert_eq!(ring.read_bytes, 0);
            // The first call tells of what was answered before.
            assert!((1..=requests[index] + connection).contains(&ring.calls), "{ring:?}");
            assert!(ring.kicks <= requests[index] + connection, "{ring:?}");
            assert!(ring.sleeps >= ring.kicks, "{ring:?}");
            assert_eq!(ring.spin_ns > 0, ring.spins_found + ring.spins_empty > 0, "{ring:?}");
        }
        drop(guest);
        while served.server.info().is_connected {
            std::thread::yield_now();
        }
        let info = served.server.info();
        assert_eq!((info.requests, info.rings.len()), (0, 2), "the hypervisor has left");
        assert_eq!(served.server.channel_stats(1), None);
    }
}

#[test]
fn memory_is_replaced_while_requests_are_in_flight() {
    let served = serve(disk("d", slow(2_000_000)));
    let mut guest = Guest::connect(&served, 1, 0);
    assert_eq!(guest.request(kind::OUT, 0, &[9; 512], 0).0, 0);
    for round in 0..10 {
        (0..5).for_each(|number| offer_read(&mut guest, number));
        guest.kick(0);
        let all = regions(&guest.memory);
        match round % 2 {
            0 => _ = guest.frontend.set_mem_table(&all).unwrap(),
            _ => {
                guest.frontend.remove_mem_region(&all[1]).unwrap();
                guest.frontend.add_mem_region(&all[1]).unwrap();
            }
        }
        for number in 0..5 {
            guest.answer(0);
            let at = DATA + number * 8192;
            assert_eq!(guest.get(at + 16, 1), [0]);
            assert_eq!(guest.get(at + 4096, 512), [9; 512]);
        }
    }
}

/// The end of a file that is truncated ends this process, so the log tells of memory whose file is
/// not sealed against that.
#[test]
fn memory_that_a_hypervisor_can_truncate_is_logged() {
    // No other test has memory there.
    const AT: u64 = 0x5ea1_0000_0000;
    let log = LogLines::at_level(tracing::Level::INFO, &format!("guest_address={AT}"));
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 0, 0);
    for (seals, lines) in [
        (Some(SealFlags::SHRINK), 0),
        (Some(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL), 0),
        (Some(SealFlags::GROW), 1),
        // A file that cannot be sealed, as the memory of Guest.
        (None, 2),
    ] {
        let file = match seals {
            None => guest::memfd(4096),
            Some(seals) => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let file = File::from(memfd_create("sealed", flags).unwrap());
                file.set_len(4096).unwrap();
                fcntl_add_seals(&file, seals).unwrap();
                file
            }
        };
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: AT,
            memory_size: 4096,
            userspace_addr: AT,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        guest.frontend.add_mem_region(&region).unwrap();
        guest.frontend.remove_mem_region(&region).unwrap();
        assert_eq!(log.lines().len(), lines, "{seals:?}: {:?}", log.lines());
    }
    assert!(log.lines()[0].contains("the hypervisor can truncate the file of this memory"));
}

#[test]
fn a_disabled_ring_takes_nothing() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    guest.frontend.set_vring_enable(0, false).unwrap();
    offer_read(&mut guest, 0);
    guest.kick(0);
    assert_eq!(guest.try_answer(0, Duration::from_millis(50)), None);
    assert_eq!(served.server.info().queues, 0);
    guest.frontend.set_vring_enable(0, true).unwrap();
    guest.answer(0);
    guest.frontend.reset_device().unwrap();
    assert_eq!(served.server.info().queues, 0);
}

#[test]
fn a_hypervisor_that_leaves_makes_room_for_the_next() {
    let served = serve(disk("d", plain()));
    for round in 0..20u8 {
        let mut guest = Guest::connect(&served, 2, 0);
        assert_eq!(guest.request(kind::OUT, 0, &[round; 512], 0).0, 0);
        offer_read(&mut guest, 3);
        guest.kick(0);
        drop(guest);
        let mut guest = Guest::connect(&served, 1, 0);
        assert_eq!(guest.request(kind::IN, 0, &[], 512), (0, vec![round; 512]));
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while served.server.info().is_connected && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(!served.server.info().is_connected);
}

#[test]
fn a_server_that_stops_completes_what_it_took() {
    let disk = disk("d", slow(5_000_000));
    let served = serve(std::sync::Arc::clone(&disk));
    let mut guest = Guest::connect(&served, 1, 0);
    (0..5).for_each(|number| offer_read(&mut guest, number));
    guest.kick(0);
    guest.answer(0);
    assert!(served.server.stop(PATIENCE));
    let mut answered = 1;
    while guest.try_answer(0, Duration::ZERO).is_some() {
        answered += 1;
    }
    assert_eq!(answered, 5);
    assert_eq!(disk.stats().channels, 0);
}

/// A disk like `plain`, of this many MiB.
fn of_mib(mib: u64) -> SharedDisk {
    SharedDisk::from(disk("d", NullConfig { size: mib << 20, ..plain() }))
}

fn capacity(guest: &mut Guest) -> u64 {
    u64::from_le_bytes(guest.config()[..8].try_into().unwrap())
}

/// The next message is VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, without data.
fn assert_change(channel: &mut UnixStream) {
    let mut message = [0; 12];
    channel.read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn requests_wait_while_the_disk_is_replaced_and_the_hypervisor_learns_its_size() {
    let served = serve(of_mib(16));
    let mut guest = Guest::connect(&served, 2, 0);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&theirs).unwrap();
    // An earlier connection may have missed a change.
    assert_change(&mut ours);
    assert_eq!(guest.request(kind::OUT, 0, &[9; 512], 0).0, 0);
    for mib in [32, 48, 48, 64] {
        let before = capacity(&mut guest);
        assert!(served.server.suspend(PATIENCE));
        assert!(!served.server.suspend(PATIENCE), "it has no disk");
        offer_read(&mut guest, 0);
        guest.kick(0);
        assert_eq!(guest.try_answer(0, Duration::from_millis(20)), None);
        // Messages are answered meanwhile.
        assert_eq!(capacity(&mut guest), before);
        assert_eq!(served.server.info().queues, 0);
        served.server.resume(of_mib(mib));
        guest.answer(0);
        assert_eq!((guest.get(DATA + 16, 1), guest.get(DATA + 4096, 512)), (vec![0], vec![0; 512]));
        assert_eq!(capacity(&mut guest), mib << 11);
        if capacity(&mut guest) > before {
            assert_change(&mut ours);
        }
        assert_eq!(served.server.info().queues, 2);
    }
    ours.set_nonblocking(true).unwrap();
    assert!(ours.read(&mut [0; 12]).is_err(), "an equal size is no change");
}

#[test]
fn a_hypervisor_that_does_not_listen_is_served_on() {
    let served = serve(of_mib(16));
    let mut guest = Guest::connect(&served, 1, 0);
    let (ours, theirs) = UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&theirs).unwrap();
    drop((ours, theirs));
    assert!(served.server.suspend(PATIENCE));
    served.server.resume(of_mib(32));
    assert_eq!(guest.request(kind::OUT, 65_535, &[9; 512], 0).0, 0);
}

#[test]
fn a_capacity_that_grew_before_a_ring_is_served_is_told_with_the_first_ring() {
    let served = serve(of_mib(16));
    let mut guest = Guest::connect(&served, 0, 0);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&theirs).unwrap();
    assert!(served.server.suspend(PATIENCE));
    served.server.resume(of_mib(32));
    ours.set_nonblocking(true).unwrap();
    assert!(ours.read(&mut [0; 12]).is_err(), "a device that is not started drops it");
    ours.set_nonblocking(false).unwrap();
    guest.add_ring();
    assert_change(&mut ours);
}

#[test]
fn a_disk_that_executes_requests_for_too_long_stays() {
    let served = serve(disk("d", slow(1_000_000_000)));
    let mut guest = Guest::connect(&served, 2, 0);
    for _ in 0..2 {
        offer_read(&mut guest, 0);
        guest.kick(0);
        guest.rings[0].wait_until_taken(&guest.memory);
        assert!(!served.server.suspend(Duration::ZERO), "it executes a read");
        // The ring goes on before that read is complete.
        offer_read(&mut guest, 1);
        guest.kick(0);
        guest.rings[0].wait_until_taken(&guest.memory);
        (0..2).for_each(|_| _ = guest.answer(0));
    }
    assert!(served.server.suspend(PATIENCE));
}

/// A disk whose requests complete once this is set.
#[derive(Default)]
struct Released(AtomicBool);

impl DiskWatch for Released {
    fn holds_completions(&self) -> bool {
        !self.0.load(Ordering::Acquire)
    }
}

/// The bug: `cancel_suspend` waited for the message that was being handled, and that for the
/// device. So when an upgrade failed because of one hung device, all clients of the yard waited for
/// that device.
#[test]
fn a_suspend_is_cancelled_while_a_message_waits_for_the_disk() {
    let released = Arc::<Released>::default();
    let served = serve(WatchedDisk::over(disk("d", plain()), Arc::clone(&released)));
    let mut guest = Guest::connect(&served, 2, 0);
    offer_read(&mut guest, 0);
    guest.kick(0);
    guest.rings[0].wait_until_taken(&guest.memory);
    served.server.begin_suspend();
    let (done, is_done) = mpsc::channel();
    let (server, frontend) = (&served.server, &guest.frontend);
    let (cancelled, base) = std::thread::scope(|scope| {
        let message = scope.spawn(|| frontend.get_vring_base(0));
        // While a message is handled, the rings are not known.
        while server.info().queues > 0 {
            std::thread::yield_now();
        }
        scope.spawn(move || {
            server.cancel_suspend();
            done.send(()).unwrap();
        });
        let cancelled = is_done.recv_timeout(PATIENCE);
        released.0.store(true, Ordering::Release);
        (cancelled, message.join().unwrap())
    });
    cancelled.expect("the disk has not completed the read, and is not waited for");
    assert_eq!(base.unwrap(), 1);
    guest.answer(0);
    // The message has stopped the first ring. The second one is served again.
    let at = DATA + 8192;
    guest.put(at, &print_header(kind::IN, 0));
    guest.offer(1, &[out(at, 16), into(at + 4096, 512), into(at + 16, 1)]);
    guest.kick(1);
    guest.answer(1);
}

#[test]
fn a_disk_of_another_shape_disconnects_the_hypervisor() {
    for other in [of_mib(8), SharedDisk::from(disk("d", guest::zoned()))] {
        let served = serve(of_mib(16));
        let guest = Guest::connect(&served, 1, 0);
        assert!(served.server.suspend(PATIENCE));
        let stream = UnixStream::connect(&served.path).unwrap();
        let sectors = other.disk.geometry().sectors;
        served.server.resume(other);
        assert!(guest.frontend.get_features().is_err());
        drop((guest, stream));
        let mut guest = Guest::connect(&served, 1, 0);
        assert_eq!(capacity(&mut guest), sectors);
    }
}

#[test]
fn a_server_does_not_wait_for_a_disk_for_longer_than_it_may() {
    let served = serve(disk("d", slow(2_000_000_000)));
    let mut guest = Guest::connect(&served, 1, 0);
    offer_read(&mut guest, 0);
    guest.kick(0);
    guest.rings[0].wait_until_taken(&guest.memory);
    assert!(!served.server.stop(Duration::ZERO));
    assert!(!served.server.has_ended(), "another server must not serve the guest yet");
    assert_eq!(guest.try_answer(0, Duration::ZERO), None);
    // The thread ends when the disk has completed the read.
    guest.answer(0);
    assert!(served.server.stop(PATIENCE) && served.server.has_ended());
}

#[test]
fn a_ring_that_is_polled_answers_as_others_do() {
    for percent in [10, 100] {
        let served = serve_polling(disk("d", plain()), percent);
        let mut guest = Guest::connect(&served, 2, 0);
        for round in 0..300_u64 {
            let byte = round as u8;
            assert_eq!(guest.request(kind::OUT, round, &[byte; 512], 0).0, 0);
            if round % 50 == 0 {
                // Long enough for the thread to sleep.
                assert_eq!(guest.try_answer(0, Duration::from_millis(5)), None);
            }
            assert_eq!(guest.request(kind::IN, round, &[], 512), (0, vec![byte; 512]));
        }
        assert!(served.server.suspend(PATIENCE));
    }
}

#[test]
fn a_disk_that_a_file_system_has_claimed_is_not_served() {
    let shared = SharedDisk::from(disk("d", plain()));
    let claim = shared.claim.claim();
    let served = serve(shared);
    let stream = UnixStream::connect(&served.path).unwrap();
    let frontend = vhost::vhost_user::Frontend::from_stream(stream, 1);
    assert!(frontend.get_features().is_err());
    drop(claim);
    let mut guest = Guest::connect(&served, 1, 0);
    assert_eq!(guest.request(kind::OUT, 0, &[1; 512], 0).0, 0);
}

/// Writes the record of a server that was killed: it had taken these chains, in this order, and
/// answered none.
fn record_of_a_killed_server(guest: &mut Guest, taken: &[u16]) {
    let wanted = VhostUserInflight::new(0, 0, 1, guest::ENTRIES);
    let (made, file) = guest.frontend.get_inflight_fd(&wanted).unwrap();
    let mut record = vec![0_u8; made.mmap_size as usize];
    record[8..10].copy_from_slice(&1_u16.to_le_bytes());
    record[10..12].copy_from_slice(&guest::ENTRIES.to_le_bytes());
    for (number, head) in taken.iter().enumerate() {
        let entry = 16 * (usize::from(*head) + 1);
        record[entry] = 1;
        record[entry + 8..entry + 16].copy_from_slice(&(number as u64 + 7).to_le_bytes());
    }
    file.write_all_at(&record, made.mmap_offset).unwrap();
    guest.frontend.set_inflight_fd(&made, file.as_raw_fd()).unwrap();
}

#[test]
fn requests_that_a_killed_server_had_taken_are_executed_in_their_order() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 0, 0);
    guest.prepare_ring();
    let memory = guest.memory.clone();
    // Two writes of one sector, a read of it, and one more that the killed server had not taken.
    let chain = |guest: &mut Guest, number: u64, kind: u32, data: u8| {
        let at = DATA + number * 8192;
        guest.put(at, &print_header(kind, 0));
        guest.put(at + 16, &[0xff]);
        guest.put(at + 4096, &[data; 1024]);
        let is_written = kind == kind::IN;
        let data = |at, len| guest::Buffer { at, len, is_written };
        let mut buffers = vec![out(at, 16), data(at + 4096, 512), into(at + 16, 1)];
        if number == 1 {
            // Data in two pieces are not executed inline.
            buffers.insert(2, data(at + 4608, 512));
        }
        guest.rings[0].chain(&memory, &buffers)
    };
    let first = chain(&mut guest, 0, kind::OUT, 1);
    let second = chain(&mut guest, 1, kind::OUT, 2);
    let read = chain(&mut guest, 2, kind::IN, 0);
    let later = chain(&mut guest, 3, kind::OUT, 3);
    for head in [first, second, read, later] {
        guest.rings[0].make_available(&memory, head);
    }
    record_of_a_killed_server(&mut guest, &[second, first, read]);
    guest.start_ring(0);
    let mut answered: Vec<u16> = (0..4).map(|_| guest.answer(0).0).collect();
    answered.sort_unstable();
    assert_eq!(answered, [first, second, read, later]);
    for number in 0..4 {
        assert_eq!(guest.get(DATA + number * 8192 + 16, 1), [0], "{number}");
    }
    assert_eq!(guest.get(DATA + 2 * 8192 + 4096, 512), [1; 512], "in the order of the record");
    // A write that was executed inline before the one of the record would be lost.
    assert_eq!(guest.request(kind::IN, 0, &[], 512), (0, vec![3; 512]));
    assert_eq!(guest.request(kind::IN, 1, &[], 512), (0, vec![2; 512]));
    assert_eq!(served.server.info().requests, 6);
}

/// An append that is executed twice would leave its data twice.
#[test]
fn changes_of_zones_that_a_killed_server_had_taken_fail() {
    let served = serve(disk("z", guest::zoned()));
    let mut guest = Guest::connect(&served, 0, 0);
    guest.prepare_ring();
    let memory = guest.memory.clone();
    let zone = 3 * 2048_u64;
    let mut heads = Vec::new();
    for (number, (kind, sector)) in [
        (kind::ZONE_APPEND, zone),
        (kind::OUT, zone),
        (kind::ZONE_RESET_ALL, 0),
        (kind::OUT, 0),
        (kind::WRITE_ZEROES, zone),
    ]
    .into_iter()
    .enumerate()
    {
        let at = DATA + number as u64 * 16384;
        guest.put(at, &print_header(kind, sector));
        guest.put(at + 16, &[0xff; 9]);
        let tail = if kind == kind::ZONE_APPEND { into(at + 16, 9) } else { into(at + 24, 1) };
        let chain = match kind {
            kind::ZONE_RESET_ALL => vec![out(at, 16), tail],
            kind::WRITE_ZEROES => {
                guest.put(at + 4096, &print_range(sector, 8, 0));
                vec![out(at, 16), out(at + 4096, 16), tail]
            }
            _ => vec![out(at, 16), out(at + 4096, 4096), tail],
        };
        heads.push(guest.rings[0].chain(&memory, &chain));
        guest.rings[0].make_available(&memory, heads[number]);
    }
    record_of_a_killed_server(&mut guest, &heads);
    guest.start_ring(0);
    (0..5).for_each(|_| _ = guest.answer(0));
    let statuses: Vec<u8> =
        (0..5).flat_map(|number| guest.get(DATA + number * 16384 + 24, 1)).collect();
    assert_eq!(statuses, [1, 1, 1, 0, 1], "a conventional zone is written again");
    // The bug: the zeros were written.
    let (status, report) = guest.request(kind::ZONE_REPORT, zone, &[], 128);
    assert_eq!((status, &report[64 + 16..64 + 24]), (0, &zone.to_le_bytes()[..]));
}
