//! Hosts that violate the protocol, stall or vanish: each case made another target crash, hang or
//! write to the wrong place.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_null::{IrqMode, NullConfig};
use blockyard_nvme::{TargetOptions, TargetServer};
use initiator::faulty::{Fault, FaultyDisk, Gate};
use initiator::{
    DISCOVERY, HOST, Initiator, PLAIN, Target, ZONED, admin_command, command, connect_parts,
    crc32c, disk, fabrics, h2c_header, pattern, plain, pointed, target, target_at, target_with,
    with,
};

const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const FLUSH: u8 = 0x00;

fn queue(target: &Target, digests: u8) -> (Initiator, Initiator) {
    let (admin, controller) = target.admin(PLAIN, digests);
    let io = target.io(PLAIN, controller, digests, 0);
    (admin, io)
}

/// A write whose R2T has arrived: its command id and tag.
fn asked(io: &mut Initiator, bytes: usize) -> (u16, u16) {
    let sqe = command(WRITE, 0, (bytes / 512) as u32);
    let cid = io.capsule(pointed(sqe, 0x5a, bytes), &[]);
    let r2t = io.receive().unwrap();
    assert_eq!(r2t.kind, 9);
    (cid, u16::from_le_bytes([r2t.header[10], r2t.header[11]]))
}

/// nvmet followed a null pointer for data that no R2T had asked for.
#[test]
fn data_that_no_r2t_asked_for_end_the_connection() {
    let target = target();
    let unasked: [fn(&mut Initiator); 4] = [
        |io| io.h2c_data(0, 0, 0, &[0; 512]),
        |io| {
            let (cid, tag) = asked(io, 16384);
            io.h2c_data(cid, tag ^ 0x80, 0, &[0; 512]);
        },
        |io| {
            let (cid, tag) = asked(io, 16384);
            io.h2c_data(cid + 1, tag, 0, &[0; 512]);
        },
        |io| {
            // The tag of a command that is over.
            let (cid, tag) = asked(io, 16384);
            io.h2c_data(cid, tag, 0, &[0; 16384]);
            assert_eq!(io.done().status, 0);
            io.h2c_data(cid, tag, 0, &[0; 512]);
        },
    ];
    for send in unasked {
        let (_admin, mut io) = queue(&target, 0);
        send(&mut io);
        assert_eq!(io.term(), (1, 10));
    }
}

#[test]
fn data_out_of_order_or_range_end_the_connection() {
    let target = target();
    for (offset, len) in [(512, 512), (0, 16896)] {
        let (_admin, mut io) = queue(&target, 0);
        let (cid, tag) = asked(&mut io, 16384);
        io.h2c_data(cid, tag, offset, &vec![0; len]);
        assert_eq!(io.term(), (4, 12), "{offset} {len}");
    }
    // Twice the same range.
    let (_admin, mut io) = queue(&target, 0);
    let (cid, tag) = asked(&mut io, 16384);
    io.h2c_data(cid, tag, 0, &[0; 8192]);
    io.h2c_data(cid, tag, 0, &[0; 8192]);
    assert_eq!(io.term(), (4, 12));
}

/// A read has no R2T: data for it were written to memory of the device's.
#[test]
fn data_for_a_read_end_the_connection() {
    let target = target();
    let (_admin, mut io) = queue(&target, 0);
    // The read is completed before the TermReq, which is the last PDU.
    let read = pointed(command(READ, 0, 2048), 0x5a, 1 << 20);
    let capsule = io.print(4, &read, &[]);
    let data = io.print(6, &h2c_header(0, 0, 0, 512), &[0; 512]);
    io.stream.write_all(&[capsule, data].concat()).unwrap();
    loop {
        let pdu = io.receive().expect("a TermReq");
        match pdu.kind {
            3 => break assert_eq!(pdu.header[8..14], [1, 0, 10, 0, 0, 0]),
            kind => assert!(matches!(kind, 5 | 7), "{pdu:?}"),
        }
    }
    io.ends();
}

/// Data of length 0 made a target loop; a length that is not the PDU's made it read elsewhere.
#[test]
fn lengths_that_lie_end_the_connection() {
    let target = target();
    let pdu = |kind: u8, header_len: u8, offset: u8, len: u32, rest: &[u8]| {
        let mut bytes = vec![kind, 0, header_len, offset];
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(rest);
        bytes
    };
    let cases = [
        (pdu(6, 24, 24, 24, &h2c_header(0, 0, 0, 0)), (1, 4)),
        (pdu(6, 24, 24, 24 + 512, &h2c_header(0, 0, 0, 511)), (1, 16)),
        (pdu(6, 24, 24, u32::MAX, &h2c_header(0, 0, 0, 512)), (5, 4)),
        (pdu(6, 255, 24, 24 + 512, &[]), (1, 2)),
        (pdu(4, 72, 0, 71, &[]), (1, 4)),
        (pdu(4, 72, 72, 72 + 8193, &[]), (5, 4)),
        (pdu(4, 255, 0, 300, &[]), (1, 2)),
        (pdu(0, 128, 0, 128, &[0; 120]), (2, 0)),
        (pdu(5, 24, 0, 24, &[]), (1, 0)),
        (pdu(8, 24, 0, 24, &[]), (1, 0)),
        (pdu(255, 255, 255, u32::MAX, &[]), (1, 0)),
    ];
    for (bytes, wanted) in cases {
        let (_admin, mut io) = queue(&target, 0);
        io.stream.write_all(&bytes).unwrap();
        assert_eq!(io.term(), wanted, "{:?}", &bytes[..8]);
    }
    // The check of a header digest read beyond the buffer, by the length that the header claimed.
    let with_digests = |mut bytes: Vec<u8>| {
        bytes[1] = 3;
        bytes
    };
    let cases = [
        (pdu(6, 255, 28, 28 + 512 + 4, &[]), (1, 2)),
        (pdu(4, 255, 0, 300, &[]), (1, 2)),
        (pdu(4, 72, 0, 72, &[]), (1, 4)),
        (pdu(6, 24, 28, 28 + 512, &h2c_header(0, 0, 0, 512)), (1, 16)),
    ];
    for (bytes, wanted) in cases {
        let (_admin, mut io) = queue(&target, 3);
        let mut bytes = with_digests(bytes);
        let digest = crc32c(&bytes);
        bytes.extend_from_slice(&digest.to_le_bytes());
        io.stream.write_all(&bytes).unwrap();
        assert_eq!(io.term(), wanted, "{:?}", &bytes[..8]);
    }
    // A host that is in order is served as before.
    let (_admin, mut io) = queue(&target, 0);
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0);
}

#[test]
fn a_port_scanner_is_disconnected() {
    let target = target();
    let mut scanner = target.raw();
    scanner.stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(scanner.term(), (1, 0));
    let mut early = target.raw();
    early.send(4, &fabrics(1), &[]);
    assert_eq!(early.term(), (2, 0), "a capsule before the ICReq");
    let mut gone = target.raw();
    gone.stream.write_all(&[0, 0]).unwrap();
    drop(gone);
    let mut future = target.raw();
    let mut request = [0; 128];
    (request[2], request[4], request[8]) = (128, 128, 1);
    future.stream.write_all(&request).unwrap();
    assert_eq!(future.term(), (6, 8), "a version that is not supported");
}

/// A target that could not write the TermReq to such a scanner used a whole processor from then on.
#[test]
fn scanners_that_read_no_answer_leave_nothing() {
    let target = target();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0; 128], &[4, 0, 72]] {
        for _ in 0..8 {
            // Unread answers make the close a reset.
            target.raw().stream.write_all(garbage).unwrap();
        }
    }
    while !target.server.connections().is_empty() {
        std::thread::yield_now();
    }
}

/// Targets have allocated, and read, by the length and the offset that a host claimed.
#[test]
fn logs_are_read_in_parts_of_any_length() {
    let target = target();
    let (mut admin, mut io) = queue(&target, 0);
    let whole = admin.log(5, 4096, false).data;
    assert_eq!(whole[1024 + 4], 3, "Write");
    assert_eq!(admin.log(5, 4, false).data, whole[..4]);
    let long = admin.read(admin_command(2, 5 | 0xffff << 16, 3), 1 << 20).data;
    assert!(long[..4096] == whole && long[4096..].iter().all(|byte| *byte == 0));
    let part = with(admin_command(2, 5 | 1 << 16, 0), 12, 1024 + 4);
    assert_eq!(admin.read(part, 8).data, whole[1028..1036]);
    for (dword, value) in [(11, 0xffff), (12, 2), (12, 4100), (13, 1)] {
        let sqe = with(admin_command(2, 5 | 0xff << 16, 0), dword, value);
        assert_eq!(admin.read(sqe, 1024).status, 0x4002, "dword {dword} is {value}");
    }
    assert_eq!(admin.log(0x80, 512, false).status, 0x4109, "no log of reservations");
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0);
}

#[test]
fn a_wrong_header_digest_is_fatal() {
    let target = target();
    let (_admin, mut io) = queue(&target, 3);
    let mut bytes = io.print(4, &command(FLUSH, 0, 0), &[]);
    bytes[20] ^= 1;
    let digest = u32::from_le_bytes(bytes[72..76].try_into().unwrap());
    io.stream.write_all(&bytes).unwrap();
    assert_eq!(io.term(), (3, digest));
    let (_admin, mut io) = queue(&target, 3);
    io.header_digest = false;
    io.capsule(command(FLUSH, 0, 0), &[]);
    assert_eq!(io.term().0, 1, "without the digest that was agreed");
}

/// The data are read to their end; the host may retry.
#[test]
fn a_wrong_data_digest_fails_the_command_alone() {
    let target = target();
    let (_admin, mut io) = queue(&target, 3);
    let data = pattern(4096, 5);
    assert_eq!(io.execute(command(WRITE, 0, 8), &data).status, 0);
    let mut bytes = io.print(4, &pointed(command(WRITE, 0, 8), 0x01, 4096), &[0; 4096]);
    bytes[100] ^= 1;
    io.stream.write_all(&bytes).unwrap();
    assert_eq!(io.done().status, 0x022);
    let (cid, tag) = asked(&mut io, 16384);
    let mut bytes = io.print(6, &h2c_header(cid, tag, 0, 8192), &[0; 8192]);
    bytes[100] ^= 1;
    io.stream.write_all(&bytes).unwrap();
    io.h2c_data(cid, tag, 8192, &[0; 8192]);
    assert_eq!(io.done().status, 0x022);
    assert_eq!(io.read(command(READ, 0, 8), 4096).data, data, "nothing was written");
}

#[test]
fn more_commands_than_the_queue_has_entries_end_the_connection() {
    let target = target();
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut io = target.idle(0);
    assert_eq!(io.connect(PLAIN, 1, controller, 3, 0).status, 0);
    for _ in 0..4 {
        asked(&mut io, 16384);
    }
    io.capsule(command(FLUSH, 0, 0), &[]);
    assert_eq!(io.term(), (5, 0));
}

#[test]
fn a_connect_is_checked_against_controller_and_host() {
    let target = target();
    let refused = |nqn: &str, queue: u16, controller: u16, size: u16| {
        let done = target.idle(0).connect(nqn, queue, controller, size, 0);
        assert_eq!(done.status, 0x4182);
        done.result
    };
    assert_eq!(refused("nqn.2026-11.io.blockyard:none", 0, 0xffff, 31), 0x1_0100);
    assert_eq!(refused(PLAIN, 0, 1, 31), 0x1_0010, "the host does not choose the controller");
    assert_eq!(refused(PLAIN, 0, 0xffff, 0), 44);
    assert_eq!(refused(PLAIN, 1, 999, 31), 0x1_0010, "there is no such controller");
    let (mut admin, controller) = target.admin(PLAIN, 0);
    assert_eq!(refused(ZONED, 1, controller, 31), 0x1_0100);
    assert_eq!(refused(PLAIN, 33, controller, 31), 42);
    assert_eq!(refused(PLAIN, 1, controller, 128), 44);
    // The identity of another host.
    for at in [0, 512 + HOST.len() - 1] {
        let (sqe, mut data) = connect_parts(PLAIN, 1, controller, 31, 0);
        data[at] ^= 1;
        let done = target.idle(0).execute(sqe, &data);
        assert_eq!((done.status, done.result), (0x4182, 0x1_0200));
    }
    // An I/O queue may leave the host identifier out, as the Base Specification has it since 2.1.
    let (sqe, mut data) = connect_parts(PLAIN, 5, controller, 31, 0);
    data[..16].fill(0);
    assert_eq!(target.idle(0).execute(sqe, &data).status, 0);
    // A connection has one Connect, a queue one connection.
    let mut io = target.io(PLAIN, controller, 0, 0);
    assert_eq!(io.connect(PLAIN, 2, controller, 31, 0).status, 0x400c);
    assert_eq!(target.idle(0).connect(PLAIN, 1, controller, 31, 0).status, 0x400c);
    // A refused host can try again on its connection.
    let mut again = target.idle(0);
    assert_eq!(again.connect(PLAIN, 1, 999, 31, 0).status, 0x4182);
    assert_eq!(again.connect(PLAIN, 2, controller, 31, 0).status, 0);
    // I/O queues need an enabled controller.
    assert_eq!(admin.property_set(0x14, 0x46_0060).status, 0);
    assert_eq!(target.idle(0).connect(PLAIN, 3, controller, 31, 0).status, 0x0181);
    io.ends();
    let (_discovery, controller) = target.admin(DISCOVERY, 0);
    assert_eq!(refused(DISCOVERY, 1, controller, 31), 0x1_0100);
}

/// The Base Specification takes controllers with one host identifier for those of one host, which
/// matters to reservations, and permits several identifiers for the NQN of a host. It asks for no
/// refusal of either.
#[test]
fn a_host_may_have_several_identifiers_and_hosts_may_share_one() {
    let target = target();
    let connected = |id: u8, nqn: &str| {
        let mut admin = target.idle(0);
        let (sqe, mut data) = connect_parts(PLAIN, 0, 0xffff, 31, 0);
        data[..16].fill(id);
        data[512..768].fill(0);
        data[512..512 + nqn.len()].copy_from_slice(nqn.as_bytes());
        assert_eq!(admin.execute(sqe, &data).status, 0, "{id} {nqn}");
        admin
    };
    let other = "nqn.2026-11.example:other";
    let _admins = [connected(7, HOST), connected(8, HOST), connected(7, other), connected(0, HOST)];
    let info = target.subsystems.find_info("plain").unwrap();
    let hosts: Vec<_> = info.hosts.iter().map(|host| &*host.nqn).collect();
    assert_eq!(hosts, [HOST, HOST, other, HOST]);
}

#[test]
fn nothing_is_executed_before_a_connect() {
    let target = target();
    let mut idle = target.idle(0);
    assert_eq!(idle.execute(command(FLUSH, 0, 0), &[]).status, 0x400c);
    assert_eq!(idle.property_get(0, true).status, 0x400c);
    assert_eq!(idle.connect(PLAIN, 0, 0xffff, 31, 0).status, 0);
    assert_eq!(idle.identify(1, 0, 0).status, 0x400c, "it is not enabled");
    assert_eq!(idle.property_get(0x14, false).status, 0);
}

#[test]
fn the_end_of_the_admin_queue_ends_the_controller() {
    let target = target();
    let (admin, mut io) = queue(&target, 0);
    assert_eq!(target.subsystems.find_info("plain").unwrap().controllers, 1);
    drop(admin);
    io.ends();
}

/// A host that sends nothing for its keep-alive time-out is gone. Anything it sends counts, on any
/// queue.
#[test]
fn a_silent_host_loses_its_controller() {
    let target = target();
    let mut admin = target.idle(0);
    let (sqe, data) = connect_parts(PLAIN, 0, 0xffff, 31, 0);
    let controller = admin.execute(with(sqe, 12, 100), &data).result as u16;
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    let mut io = target.io(PLAIN, controller, 0, 0);
    io.ends();
    admin.ends();
}

/// A host that vanishes with data outstanding takes nothing with it.
#[test]
fn a_host_that_vanishes_leaves_its_memory_and_its_zone() {
    let target = target();
    for round in 0..20 {
        let (_admin, controller) = target.admin(ZONED, 0);
        let mut io = target.io(ZONED, controller, 0, 0);
        let write = command(WRITE, 0, 4);
        io.capsule(pointed(write, 0x5a, 16384), &[]);
        let r2t = io.receive().unwrap();
        let tag = u16::from_le_bytes([r2t.header[10], r2t.header[11]]);
        let bytes = io.print(6, &h2c_header(0, tag, 0, 16384), &[round; 16384]);
        io.stream.write_all(&bytes[..8000]).unwrap();
    }
    let (_admin, controller) = target.admin(ZONED, 0);
    let mut io = target.io(ZONED, controller, 0, 0);
    assert_eq!(io.write(command(WRITE, 0, 4), &pattern(16384, 1)).status, 0, "at the start still");
}

/// A discard of several ranges went on after its host had reset the connection, over a write that
/// the host's next association had completed.
#[test]
fn a_host_that_comes_back_finds_no_late_change() {
    const SLOW: &str = "nqn.2026-11.io.blockyard:slow";
    let target = target();
    let config = NullConfig { irqmode: IrqMode::Timer, completion_nsec: 150_000_000, ..plain() };
    target.subsystems.add("slow", disk("slow", config)).unwrap();
    let (first, second) = (pattern(512, 1), pattern(512, 2));
    let (admin, controller) = target.admin(SLOW, 0);
    let mut io = target.io(SLOW, controller, 0, 0);
    assert_eq!(io.execute(command(WRITE, 8, 1), &first).status, 0);
    let range = |block: u64| {
        let mut range = [0; 16];
        range[4..8].copy_from_slice(&1_u32.to_le_bytes());
        range[8..].copy_from_slice(&block.to_le_bytes());
        range
    };
    let ranges = [100, 200, 300, 8].map(range);
    let discard = with(with(command(0x09, 0, 0), 10, 3), 11, 4);
    io.capsule(pointed(discard, 0x01, 64), ranges.as_flattened());
    drop((io, admin));
    let (_admin, controller) = target.admin(SLOW, 0);
    let mut io = target.io(SLOW, controller, 0, 0);
    assert_eq!(io.execute(command(WRITE, 8, 1), &second).status, 0);
    for _ in 0..5 {
        assert_eq!(io.read(command(READ, 8, 1), 512).data, second);
    }
}

/// Two servers of one subsystem gave their controllers the same ids.
#[test]
fn controllers_of_a_subsystem_have_different_ids_at_all_places() {
    let target = target();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let subsystems = std::sync::Arc::clone(&target.subsystems);
    let server = TargetServer::start(subsystems, vec![listener], TargetOptions::default()).unwrap();
    let other = Target { subsystems: std::sync::Arc::clone(&target.subsystems), server };
    let (_first, id) = target.admin(PLAIN, 0);
    let (_second, other_id) = other.admin(PLAIN, 0);
    assert_ne!(id, other_id);
}

#[test]
fn a_removed_device_disconnects_its_hosts_and_no_others() {
    let target = target();
    let (mut admin, mut io) = queue(&target, 0);
    let (mut other, _) = target.admin(ZONED, 0);
    target.subsystems.remove("plain", Duration::from_secs(5)).unwrap();
    admin.ends();
    io.ends();
    assert_eq!(other.property_get(0x08, false).status, 0);
    assert_eq!(target.idle(0).connect(PLAIN, 0, 0xffff, 31, 0).status, 0x4182);
}

/// The bug: writes whose data do not come held all memory of the queue, and the reads that waited
/// for memory got no answer when the device was removed.
#[test]
fn reads_that_wait_for_memory_are_answered_when_their_device_is_removed() {
    const LONG: Duration = Duration::from_secs(60);
    let target = target();
    let (mut admin, mut io) = queue(&target, 0);
    asked(&mut io, 1 << 20);
    asked(&mut io, 1 << 20);
    let cids = [(); 10].map(|()| io.capsule(pointed(command(READ, 0, 8), 0x5a, 4096), &[]));
    while !target.server.connections().iter().any(|it| it.commands >= 12) {
        std::thread::yield_now();
    }
    let subsystems = std::sync::Arc::clone(&target.subsystems);
    let end = std::thread::spawn(move || subsystems.remove("plain", LONG).unwrap());
    assert_eq!(cids.map(|_| io.done()).map(|done| (done.cid, done.status)), cids.map(|it| (it, 0)));
    io.ends();
    admin.ends();
    end.join().unwrap();
}

/// The oldest connection without a Connect makes room; one of a device never does.
#[test]
fn idle_connections_make_room_for_hosts() {
    let target = target_with(TargetOptions { connections_max: 3, ..TargetOptions::default() });
    let (mut admin, mut io) = queue(&target, 0);
    let mut idle = target.raw();
    let (mut other, _) = target.admin(ZONED, 0);
    idle.ends();
    target.raw().ends();
    assert_eq!(admin.property_get(0x08, false).status, 0);
    assert_eq!(other.property_get(0x08, false).status, 0);
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0);
}

#[test]
fn a_server_that_stops_disconnects_its_hosts() {
    let target = target_at("127.0.78.1:0");
    let (mut admin, mut io) = queue(&target, 0);
    asked(&mut io, 16384);
    target.server.stop();
    io.ends();
    admin.ends();
    assert!(target.server.connections().is_empty());
    // Nothing listens any more. A stopped server kept its sockets until it was dropped.
    let refused = TcpStream::connect(target.address()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}

/// The bug: a stopped server removed its addresses again when it was dropped, and with them those
/// of the server that had them by then.
#[test]
fn a_server_that_was_stopped_leaves_the_port_to_the_next_one() {
    let Target { subsystems, server } = target();
    let address = server.local_addrs()[0];
    server.stop();
    assert!(!subsystems.is_served());
    let (listener, options) = (TcpListener::bind(address).unwrap(), TargetOptions::default());
    let next = TargetServer::start(Arc::clone(&subsystems), vec![listener], options).unwrap();
    server.stop();
    drop(server);
    assert!(subsystems.is_served());
    drop(next);
    assert!(!subsystems.is_served());
}

/// The bug: a yard that ended waited for each of its listeners in turn, for as long as hosts may
/// take.
#[test]
fn servers_that_stop_together_share_the_deadline() {
    let options = TargetOptions { drain_timeout: Duration::from_secs(3600), ..Default::default() };
    let gate = Arc::<Gate>::default();
    let targets = [(); 2].map(|()| target_with(options.clone()));
    let hosts = [0, 1].map(|at| {
        let target = &targets[at];
        target.subsystems.add("blocks", FaultyDisk::serving(Fault::Blocks, &gate)).unwrap();
        let blocks = "nqn.2026-11.io.blockyard:blocks";
        let (admin, controller) = target.admin(blocks, 0);
        let mut io = target.io(blocks, controller, 0, 0);
        io.capsule(pointed(command(READ, 0, 1), 0x5a, 512), &[]);
        gate.await_blocked();
        (admin, io)
    });
    std::thread::scope(|scope| {
        let servers = [&targets[0].server, &targets[1].server];
        let stop = scope.spawn(move || TargetServer::stop_all(&servers, Instant::now()));
        // A server that does not share the deadline waits for an hour, or for the device.
        let limit = Instant::now() + Duration::from_secs(60);
        while !stop.is_finished() && Instant::now() < limit {
            std::thread::yield_now();
        }
        let has_stopped = stop.is_finished();
        gate.open();
        assert!(has_stopped, "it waits for the hosts of each server");
    });
    drop(hosts);
}
