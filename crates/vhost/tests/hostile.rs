//! Guests and hypervisors that lie harm no other client: their ring is not served any more, and all
//! other rings are.
#![allow(clippy::unwrap_used)] // A test may.
#![allow(clippy::disallowed_types)] // A flag of a disk.

mod guest;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockyard_core::DeviceError;
use blockyard_testing::log_lines::LogLines;
use blockyard_testing::watched_disk::{DiskWatch, WatchedDisk};
use blockyard_vhost::request::kind;
use guest::{
    Buffer, DATA, ENTRIES, Guest, PATIENCE, REGION_BYTES, disk, into, is_told, out, plain,
    print_header, regions, serve, slow,
};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VringConfigData};

/// A guest breaks its first ring; its second one and another guest's go on.
fn breaks_the_ring(case: &str, lie: impl FnOnce(&mut Guest)) {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 2, 0);
    assert_eq!(guest.request(kind::OUT, 0, &[7; 512], 0).0, 0, "{case}");
    lie(&mut guest);
    guest.kick(0);
    guest.wait_for_fault(0, case);
    // The thread ends, after which the ring has no answers.
    assert_eq!(guest.try_answer(0, Duration::ZERO), None, "{case}");
    let (header, status) = (DATA, DATA + 16);
    guest.put(header, &print_header(kind::IN, 0));
    guest.offer(1, &[out(header, 16), into(DATA + 4096, 512), into(status, 1)]);
    guest.kick(1);
    assert_eq!(guest.answer(1).1, 513, "{case}");
    assert_eq!(guest.get(DATA + 4096, 512), [7; 512], "{case}");
    drop(guest);
    let mut guest = Guest::connect(&served, 1, 0);
    assert_eq!(guest.request(kind::IN, 0, &[], 512), (0, vec![7; 512]), "{case}");
}

/// A device that refuses channels while this is set.
#[derive(Default)]
struct RefusesChannels(AtomicBool);

impl DiskWatch for RefusesChannels {
    fn open(&self) -> Result<(), DeviceError> {
        match self.0.load(Ordering::Acquire) {
            true => Err(DeviceError::Os { what: "memory", errno: 12 }),
            false => Ok(()),
        }
    }
}

/// The bugs: each malformed ring was a line in the log, and a guest can set its rings up again and
/// again. After one of these lines, an error of the system had none. Each message after a wrong
/// place of a ring was one more fault.
#[test]
fn a_guest_does_not_fill_the_log_and_hides_no_error() {
    const FAULTS: u64 = 20;
    let log = LogLines::with("flood");
    let refuses = Arc::<RefusesChannels>::default();
    let served = serve(WatchedDisk::over(disk("flood", plain()), Arc::clone(&refuses)));
    for round in 0..FAULTS {
        let mut guest = Guest::connect(&served, 1, 0);
        guest.offer(0, &[out(DATA, 15), into(DATA + 16, 1)]);
        guest.kick(0);
        guest.wait_for_fault(0, "a short header");
        assert_eq!(served.server.info().rings[0].1.faults, 2 * round + 1);
        // A place outside the memory.
        let place = guest.place(&guest.rings[0]);
        let place = VringConfigData { desc_table_addr: 1 << 40, ..place };
        assert!(guest.frontend.set_vring_addr(0, &place).is_err());
        assert_eq!(served.server.info().rings[0].1.faults, 2 * round + 2);
        // The ring is at the same place.
        assert!(guest.frontend.set_vring_addr(0, &place).is_err());
        assert!(guest.frontend.set_vring_call(0, &guest.rings[0].call).is_err());
        assert_eq!(served.server.info().rings[0].1.faults, 2 * round + 2);
    }
    let has = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    // One a minute.
    assert_eq!(has("is not served any more"), 1, "{:?}", log.lines());
    assert!(log.lines().len() < FAULTS as usize, "{:?}", log.lines());
    refuses.0.store(true, Ordering::Release);
    let mut guest = Guest::connect(&served, 0, 0);
    guest.prepare_ring();
    guest.set_up_ring(0);
    assert!(guest.frontend.set_vring_enable(0, true).is_err());
    // The answer comes before the line.
    while has("cannot serve ring 0: memory:") == 0 {
        std::thread::yield_now();
    }
    drop((guest, served));
    // Each round has a short header and three messages about a wrong place; the first has a line.
    let left_out = format!("{} lines about the device were left out", 4 * FAULTS - 1);
    assert_eq!(has(&left_out), 1, "{:?}", log.lines());
    assert_eq!(has("left out"), 1, "{:?}", log.lines());
}

#[test]
fn memory_that_a_hypervisor_takes_away_is_no_fault_of_the_ring() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    let all = regions(&guest.memory);
    guest.frontend.remove_mem_region(&all[0]).unwrap();
    assert_eq!(served.server.info().queues, 0);
    guest.frontend.add_mem_region(&all[0]).unwrap();
    assert_eq!(guest.request(kind::OUT, 0, &[7; 512], 0).0, 0);
    assert_eq!(served.server.info().rings[0].1.faults, 0);
}

#[test]
fn malformed_chains_end_their_ring_alone() {
    let header = |guest: &Guest| guest.put(DATA, &print_header(kind::IN, 0));
    breaks_the_ring("a buffer after the memory", |guest| {
        header(guest);
        guest.offer(0, &[out(DATA, 16), into(2 * REGION_BYTES - 511, 512), into(DATA + 16, 1)]);
    });
    breaks_the_ring("an address that overflows", |guest| {
        header(guest);
        guest.offer(0, &[out(DATA, 16), into(u64::MAX - 10, 512), into(DATA + 16, 1)]);
    });
    breaks_the_ring("a short header", |guest| {
        guest.offer(0, &[out(DATA, 15), into(DATA + 16, 1)]);
    });
    breaks_the_ring("no status", |guest| {
        header(guest);
        guest.offer(0, &[out(DATA, 16)]);
    });
    breaks_the_ring("a buffer to read after one to write", |guest| {
        header(guest);
        guest.offer(0, &[into(DATA + 16, 1), out(DATA, 16)]);
    });
    breaks_the_ring("a head that does not exist", |guest| {
        let memory = guest.memory.clone();
        guest.rings[0].make_available(&memory, ENTRIES);
    });
    breaks_the_ring("more chains than entries", |guest| {
        let memory = guest.memory.clone();
        guest.rings[0].set_available(&memory, 5000);
    });
    breaks_the_ring("a chain that is a loop of headers", |guest| {
        let memory = guest.memory.clone();
        let loop_back = out(DATA, 8);
        guest.rings[0].put_descriptor(&memory, 9, &loop_back, Some(9), 0);
        guest.rings[0].make_available(&memory, 9);
    });
}

#[test]
fn malformed_tables_end_their_ring_alone() {
    let header = |guest: &Guest| guest.put(DATA, &print_header(kind::IN, 0));
    breaks_the_ring("a table of descriptors outside the memory", |guest| {
        let memory = guest.memory.clone();
        let table = Buffer { at: 3 * REGION_BYTES, len: 64, is_written: false };
        guest.rings[0].put_descriptor(&memory, 9, &table, None, 4);
        guest.rings[0].make_available(&memory, 9);
    });
    breaks_the_ring("a table whose length is odd", |guest| {
        let memory = guest.memory.clone();
        let table = Buffer { at: DATA, len: 63, is_written: false };
        guest.rings[0].put_descriptor(&memory, 9, &table, None, 4);
        guest.rings[0].make_available(&memory, 9);
    });
    breaks_the_ring("an endless chain of empty buffers", |guest| {
        let memory = guest.memory.clone();
        // A valid table of two descriptors, the first of which is the next one of itself.
        let table = Buffer { at: DATA, len: 32, is_written: false };
        guest::descriptor(&memory, DATA, &out(DATA, 0), Some(0), 0);
        guest.rings[0].put_descriptor(&memory, 9, &table, None, 4);
        guest.rings[0].make_available(&memory, 9);
    });
    breaks_the_ring("an endless chain in the longest table", |guest| {
        let memory = guest.memory.clone();
        let at = DATA + (256 << 10);
        for index in 0..1024_u16 {
            let next = Some((index + 1) % 1024);
            guest::descriptor(&memory, at + 16 * u64::from(index), &out(DATA, 0), next, 0);
        }
        let table = Buffer { at, len: 1024 * 16, is_written: false };
        guest.rings[0].put_descriptor(&memory, 9, &table, None, 4);
        guest.rings[0].make_available(&memory, 9);
    });
    breaks_the_ring("a table that is longer than a table may be", |guest| {
        header(guest);
        let mut buffers = vec![out(DATA, 16)];
        buffers.extend((0..1023).map(|_| into(DATA + 4096, 512)));
        buffers.push(into(DATA + 16, 1));
        guest.offer_indirect(0, DATA + (256 << 10), &buffers);
    });
    breaks_the_ring("more pieces of memory than a request may have", |guest| {
        header(guest);
        // A valid table, each of whose buffers lies in two regions.
        let mut buffers = vec![out(DATA, 16)];
        buffers.extend((0..1022).map(|_| into(REGION_BYTES - 256, 512)));
        buffers.push(into(DATA + 16, 1));
        guest.offer_indirect(0, DATA + (256 << 10), &buffers);
    });
}

#[test]
fn tables_that_are_empty_nested_or_not_last_end_their_ring_alone() {
    let header = |guest: &Guest| guest.put(DATA, &print_header(kind::IN, 0));
    breaks_the_ring("an empty table", |guest| {
        header(guest);
        guest.offer_indirect(0, DATA + 8192, &[]);
    });
    breaks_the_ring("a table with a descriptor after it", |guest| {
        let memory = guest.memory.clone();
        header(guest);
        let (table, buffers) = (DATA + 8192, [out(DATA, 16), into(DATA + 4096, 512)]);
        guest::descriptor(&memory, table, &buffers[0], Some(1), 0);
        guest::descriptor(&memory, table + 16, &buffers[1], None, 0);
        guest.rings[0].put_descriptor(&memory, 9, &out(table, 32), Some(10), 4);
        guest.rings[0].put_descriptor(&memory, 10, &into(DATA + 16, 1), None, 0);
        guest.rings[0].make_available(&memory, 9);
    });
    breaks_the_ring("a table in a table", |guest| {
        let memory = guest.memory.clone();
        header(guest);
        // Either table would be valid alone.
        let (outer, inner) = (DATA + 8192, DATA + 12288);
        guest::descriptor(&memory, inner, &out(DATA, 16), Some(1), 0);
        guest::descriptor(&memory, inner + 16, &into(DATA + 16, 1), None, 0);
        guest::descriptor(&memory, outer, &out(inner, 32), None, 4);
        guest.rings[0].put_descriptor(&memory, 9, &out(outer, 16), None, 4);
        guest.rings[0].make_available(&memory, 9);
    });
    breaks_the_ring("a table in itself", |guest| {
        let memory = guest.memory.clone();
        guest::descriptor(&memory, DATA, &out(DATA, 16), None, 4);
        guest.rings[0].put_descriptor(&memory, 9, &out(DATA, 16), None, 4);
        guest.rings[0].make_available(&memory, 9);
    });
}

/// The longest table, with all buffers in one region each, is served.
#[test]
fn a_request_of_as_many_buffers_as_a_table_may_have_is_answered() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    guest.put(DATA, &print_header(kind::IN, 0));
    let mut buffers = vec![out(DATA, 16)];
    buffers.extend((0..1022).map(|_| into(DATA + 4096, 512)));
    buffers.push(into(DATA + 16, 1));
    let head = guest.offer_indirect(0, DATA + (256 << 10), &buffers);
    guest.kick(0);
    assert_eq!(guest.answer(0), (head, 1022 * 512 + 1));
}

/// The server calls the guest for an answer that it gave just before it found the ring malformed.
#[test]
fn answers_before_a_malformed_chain_are_followed_by_a_call() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    // A ring that starts calls the guest for answers that an earlier server may have given.
    assert!(is_told(&guest.rings[0].call, PATIENCE));
    guest.put(DATA, &print_header(kind::GET_ID, 0));
    let memory = guest.memory.clone();
    let good = [out(DATA, 16), into(DATA + 4096, 20), into(DATA + 16, 1)];
    let good = guest.rings[0].chain(&memory, &good);
    // Both chains are seen at once, because the index is written once.
    guest.rings[0].make_all_available(&memory, &[good, ENTRIES]);
    guest.kick(0);
    guest.wait_for_fault(0, "a head that does not exist");
    assert!(is_told(&guest.rings[0].call, Duration::ZERO), "the call comes before the fault");
    assert_eq!(guest.try_answer(0, Duration::ZERO), Some((good, 21)));
}

/// Rings of random descriptors, most of which refer to memory: the server answers or refuses them,
/// and serves the next guest.
#[test]
fn rings_of_random_descriptors_harm_nothing_else() {
    let served = serve(disk("d", plain()));
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = move |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    };
    for round in 0..200 {
        let mut guest = Guest::connect(&served, 1, 0);
        let memory = guest.memory.clone();
        guest.put(DATA, &print_header([0, 1, 4, 8, 11, 13, 24][below(7) as usize], below(40_000)));
        for number in 0..ENTRIES {
            let at = if below(4) == 0 { DATA } else { below(2 * REGION_BYTES + 4096) };
            let len = [1, 15, 16, 512, 4096, 65_536, u32::MAX][below(7) as usize];
            let buffer = Buffer { at, len, is_written: below(2) == 0 };
            let next = (below(3) > 0).then(|| below(u64::from(ENTRIES) + 2) as u16);
            let more = if below(8) == 0 { 4 } else { 0 };
            guest.rings[0].put_descriptor(&memory, number, &buffer, next, more);
        }
        for _ in 0..=below(8) {
            guest.rings[0].make_available(&memory, below(u64::from(ENTRIES) + 2) as u16);
        }
        guest.kick(0);
        // As long as there are answers; the writes of the guest may have changed its own rings.
        while guest.try_answer(0, Duration::from_millis(2)).is_some() {}
        assert!(served.server.info().is_connected, "round {round}");
    }
    let mut guest = Guest::connect(&served, 1, 0);
    assert_eq!(guest.request(kind::OUT, 0, &[1; 512], 0).0, 0);
}

/// A chain that is available twice at once would be answered twice.
#[test]
fn a_chain_that_is_in_flight_twice_ends_its_ring() {
    // The first one is in flight; or it is executed, and the guest does not see the answer yet.
    for (config, answers) in [(slow(20_000_000), 0), (plain(), 1)] {
        let served = serve(disk("d", config));
        let mut guest = Guest::connect(&served, 1, 0);
        // The first request of a disk is not executed inline.
        assert_eq!(guest.request(kind::IN, 0, &[], 512).0, 0);
        let memory = guest.memory.clone();
        let buffers = [out(DATA, 16), into(DATA + 4096, 512), into(DATA + 16, 1)];
        let head = guest.rings[0].chain(&memory, &buffers);
        guest.rings[0].make_all_available(&memory, &[head, head]);
        guest.kick(0);
        guest.wait_for_fault(0, "a chain is in flight twice");
        for _ in 0..answers {
            assert_eq!(guest.try_answer(0, Duration::ZERO), Some((head, 513)));
        }
        assert_eq!(guest.try_answer(0, Duration::ZERO), None);
        // The next start of the ring, as by the reset of the guest, is served.
        let mut guest = {
            drop(guest);
            Guest::connect(&served, 1, 0)
        };
        assert_eq!(guest.request(kind::OUT, 0, &[1; 512], 0).0, 0);
    }
}

/// Header and status are changed by the guest while the request runs: what was checked is used.
#[test]
fn a_guest_that_changes_a_request_gets_what_it_asked_for_first() {
    let served = serve(disk("d", slow(20_000_000)));
    let mut guest = Guest::connect(&served, 1, 0);
    guest.put(DATA, &print_header(kind::IN, 8));
    guest.put(DATA + 16, &[0xff]);
    let buffers = [out(DATA, 16), into(DATA + 4096, 512), into(DATA + 16, 1)];
    let head = guest.offer(0, &buffers);
    guest.kick(0);
    guest.rings[0].wait_until_taken(&guest.memory);
    guest.put(DATA, &print_header(kind::OUT, u64::MAX));
    let memory = guest.memory.clone();
    guest.rings[0].put_descriptor(&memory, head, &out(u64::MAX, u32::MAX), Some(500), 0);
    assert_eq!(guest.answer(0), (head, 513));
    assert_eq!(guest.get(DATA + 16, 1), [0]);
}

#[test]
fn malformed_messages_end_their_connection_alone() {
    let served = serve(disk("d", plain()));
    let message = |request: u32, flags: u32, size: u32, body: &[u8]| {
        let words = [request, flags, size].map(u32::to_le_bytes);
        [words.as_flattened(), body].concat()
    };
    let cases = [
        vec![0],
        vec![0xff; 12],
        message(1, 0, 0, &[]),
        message(1, 1, u32::MAX, &[]),
        message(999, 1, 0, &[]),
        // SET_MEM_TABLE without files.
        message(5, 1, 40, &[1; 40]),
        // SET_VRING_NUM of a ring that does not exist.
        message(8, 1, 8, &[0xff; 8]),
        // GET_CONFIG beyond the end.
        message(24, 1, 12, &[0xff; 12]),
        // SET_VRING_KICK without a file.
        message(12, 1, 8, &0u64.to_le_bytes()),
    ];
    for bytes in cases {
        let mut stream = UnixStream::connect(&served.path).unwrap();
        stream.write_all(&bytes).unwrap();
        drop(stream);
        let mut guest = Guest::connect(&served, 1, 0);
        assert_eq!(guest.request(kind::OUT, 0, &[1; 512], 0).0, 0, "{bytes:x?}");
    }
}

#[test]
fn rings_that_cannot_be_served_are_refused() {
    let served = serve(disk("d", plain()));
    let mut guest = Guest::connect(&served, 1, 0);
    for entries in [0, 3, 2048] {
        assert!(guest.frontend.set_vring_num(1, entries).is_err(), "{entries}");
    }
    let memory_end = guest.place(&guest.rings[0]).desc_table_addr + REGION_BYTES;
    for (field, address) in [(0, memory_end * 2), (1, 16), (2, memory_end * 2)] {
        let mut place = guest.place(&guest.rings[0]);
        match field {
            0 => place.desc_table_addr = address,
            1 => place.used_ring_addr = address,
            _ => place.avail_ring_addr = address,
        }
        assert!(guest.frontend.set_vring_addr(0, &place).is_err(), "{field}");
    }
    let place = guest.place(&guest.rings[0]);
    guest.frontend.set_vring_addr(0, &place).unwrap();
    assert_eq!(guest.request(kind::OUT, 0, &[1; 512], 0).0, 0);
    assert!(guest.frontend.set_features(u64::MAX).is_err());
}
