//! Many hostile connections at once. This test measures the memory of the process, so it is the
//! only one in its program.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;

use std::io::Write;
use std::time::Instant;

use blockyard_nvme::TargetOptions;
use initiator::{Initiator, PLAIN, Target, command, h2c_header, pattern, pointed, target_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const WRITE: u8 = 0x01;
const READ: u8 = 0x02;

/// A hostile connection, or the two of a controller that stalls; none if the target has ended it.
fn hostile(target: &Target, kind: usize) -> Vec<Initiator> {
    let stalled = |bytes: &[u8]| {
        let mut io = target.idle(0);
        io.stream.write_all(bytes).unwrap();
        vec![io]
    };
    let raw = |bytes: &[u8]| {
        let mut raw = target.raw();
        raw.stream.write_all(bytes).unwrap();
        vec![raw]
    };
    let refused = |mut connections: Vec<Initiator>| {
        assert_eq!(connections[0].receive().unwrap().kind, 3, "a C2HTermReq");
        connections[0].ends();
        Vec::new()
    };
    // Few hosts keep a megabyte of answers in the kernel.
    match if kind % 64 == 7 { 7 } else { kind % 7 } {
        // Stalled: nothing, or an ICReq and nothing else.
        0 => raw(&[]),
        1 => stalled(&[]),
        // Truncated: a part of an ICReq, and of a capsule.
        2 => raw(&[0, 0, 128, 0, 128]),
        3 => stalled(&[4, 0, 72, 72, 72, 32, 0, 0, 1]),
        // Lengths that lie.
        4 => refused(stalled(&[6, 0, 24, 24, 255, 255, 255, 255])),
        // A wrong order.
        5 => refused(raw(&[4, 0, 72, 0, 72, 0, 0, 0])),
        // Data that never end, and answers that are not read.
        kind => {
            let (admin, controller) = target.admin(PLAIN, 0);
            let mut io = target.io(PLAIN, controller, 0, 0);
            if kind == 6 {
                let cid = io.capsule(pointed(command(WRITE, 0, 32), 0x5a, 16384), &[]);
                let r2t = io.receive().unwrap();
                let tag = u16::from_le_bytes([r2t.header[10], r2t.header[11]]);
                let bytes = io.print(6, &h2c_header(cid, tag, 0, 16384), &[1; 16384]);
                io.stream.write_all(&bytes[..8000]).unwrap();
            } else {
                let sqe = pointed(command(READ, 0, 256), 0x5a, 128 << 10);
                for _ in 0..64 {
                    io.capsule(sqe, &[]);
                }
            }
            vec![admin, io]
        }
    }
}

/// The pages of the process: mapped, and resident.
fn pages() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let mut fields = text.split(' ').map(|field| field.parse().unwrap());
    (fields.next().unwrap(), fields.next().unwrap())
}

/// A thousand hostile connections delay no command of a good host forever and change none of its
/// data, and their memory comes back. Prints the throughput of the good host, which is in
/// docs/measurements/nvme.md, and is no condition of the test.
#[test]
fn a_thousand_hostile_connections_leave_a_good_host_alone() {
    const HOSTILE: usize = 1000;
    const ROUNDS: u64 = 50;
    let files = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }).unwrap();
    let target = target_with(TargetOptions { connections_max: 1100, ..TargetOptions::default() });
    // The hostile hosts use the plain device, and change other blocks.
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut good = target.io(PLAIN, controller, 0, 0);
    let exchange = |good: &mut Initiator, rounds: std::ops::Range<u64>| {
        for round in rounds {
            let (data, block) = (pattern(32768, round as u8), 1024 + round % 64 * 64);
            assert_eq!(good.write(command(WRITE, block, 64), &data).status, 0);
            assert!(good.read(command(READ, block, 64), 32768).data == data, "round {round}");
        }
    };
    let timed = |good: &mut Initiator, what: &str| {
        let start = Instant::now();
        exchange(good, 0..ROUNDS);
        let rate = ROUNDS as f64 / start.elapsed().as_secs_f64();
        eprintln!("{what}: {rate:.0} writes and reads of 32 KiB each a second");
    };
    let mut after = Vec::new();
    for wave in 0..10 {
        let mut connections: Vec<Initiator> = Vec::new();
        let mut round = 0;
        while connections.len() < HOSTILE {
            connections.extend(hostile(&target, round));
            exchange(&mut good, round as u64..round as u64 + 1);
            round += 1;
        }
        // All commands of the good host complete while the others are there.
        let are_there = || target.server.connections().len() == 2 + connections.len();
        let has_come = (0..1000).any(|round| {
            exchange(&mut good, round..round + 1);
            are_there()
        });
        assert!(has_come, "{} of {}", target.server.connections().len(), 2 + connections.len());
        timed(&mut good, "among 1,000 hostile connections");
        drop(connections);
        while target.server.connections().len() > 2 {
            std::thread::yield_now();
        }
        timed(&mut good, "alone");
        assert_eq!(target.subsystems.find_info("plain").unwrap().controllers, 1, "wave {wave}");
        after.push(pages());
    }
    // The first seven waves fill the allocator's arenas, which it keeps (220 MB). Each connection
    // maps 3 MiB and uses 200 KiB: what two waves left would be 1,536,000 and 100,000 pages.
    let [.., (mapped, resident), _, (mapped_then, resident_then)] = after[..] else { panic!() };
    assert!(mapped_then < mapped + 256_000, "{after:?}");
    assert!(resident_then < resident + 8_000, "{after:?}");
}
