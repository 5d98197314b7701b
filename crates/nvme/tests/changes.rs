//! What a host learns while it is connected: namespaces that grow, devices that come and go.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;

use std::time::Duration;

use blockyard_core::rmw::SharedDisk;
use blockyard_null::{IrqMode, NullConfig};
use blockyard_nvme::{SubsystemError, SubsystemInfo};
use initiator::{
    DISCOVERY, Initiator, PLAIN, Target, ZONED, admin_command, command, connect_parts,
    discovery_of, disk, pattern, plain, pointed, target,
};

const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const DRAIN: Duration = Duration::from_secs(60);
const NAMESPACE_CHANGED: u64 = 0x04_0002;
const DISCOVERY_CHANGED: u64 = 0x70_f002;

/// Asks for notices, and for events by as many requests as there may be; the requests' ids.
fn listen(admin: &mut Initiator, notice: u32) -> Vec<u16> {
    assert_eq!(admin.execute(admin_command(9, 0x0b, notice), &[]).status, 0);
    (0..4).map(|_| admin.capsule(admin_command(0x0c, 0, 0), &[])).collect()
}

/// Replaces the plain device by one of `size` bytes.
fn grow(target: &Target, size: u64) {
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    suspended.resume(disk("plain", NullConfig { size, ..plain() })).unwrap();
}

fn event(admin: &mut Initiator) -> (u16, u64) {
    let done = admin.done();
    assert_eq!(done.status, 0);
    (done.cid, done.result)
}

fn blocks(admin: &mut Initiator) -> u64 {
    u64::from_le_bytes(admin.identify(0, 1, 0).data[..8].try_into().unwrap())
}

#[test]
fn a_host_learns_of_a_namespace_that_grows_and_uses_it_without_reconnecting() {
    let target = target();
    let (mut admin, controller) = target.admin(PLAIN, 0);
    let mut io = target.io(PLAIN, controller, 0, 0);
    assert_eq!(admin.identify(1, 0, 0).data[92..96], 0x100u32.to_le_bytes(), "OAES");
    let requests = listen(&mut admin, 0x100);
    // The data of this write come after the change.
    let data = pattern(16384, 3);
    let cid = io.capsule(pointed(command(WRITE, 0, 32), 0x5a, data.len()), &[]);
    let r2t = io.receive().unwrap();
    let tag = u16::from_le_bytes([r2t.header[10], r2t.header[11]]);
    grow(&target, 32 << 20);
    assert_eq!(event(&mut admin), (requests[0], NAMESPACE_CHANGED));
    assert_eq!(blocks(&mut admin), 32 << 11);
    io.h2c_data(cid, tag, 0, &data);
    assert_eq!(io.done().status, 0);
    assert_eq!(io.read(command(READ, 0, 32), 16384).data, data);
    let last = (32 << 11) - 1;
    assert_eq!(io.execute(command(WRITE, last, 1), &pattern(512, 1)).status, 0);
    assert_eq!(io.read(command(READ, last, 1), 512).data, pattern(512, 1));
    assert_eq!(io.read(command(READ, last + 1, 1), 512).status, 0x4080);
    // No other notice before the host reads of this one; a read that retains the event is none.
    grow(&target, 48 << 20);
    assert_eq!(admin.log(4, 4096, true).data[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    grow(&target, 64 << 20);
    assert_eq!(admin.log(4, 4096, false).data[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(admin.log(4, 4096, false).data, [0; 4096]);
    grow(&target, 80 << 20);
    assert_eq!(event(&mut admin), (requests[1], NAMESPACE_CHANGED));
    assert_eq!(blocks(&mut admin), 80 << 11);
    // A device of the same size is no change for a host.
    assert_eq!(admin.log(4, 4096, false).data[0], 1);
    grow(&target, 80 << 20);
    assert_eq!(admin.log(4, 4096, false).data[0], 0);
}

#[test]
fn commands_wait_while_the_device_is_replaced() {
    let target = target();
    let (_admin, controller) = target.admin(PLAIN, 3);
    let mut io = target.io(PLAIN, controller, 3, 0);
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    let cids: Vec<_> = (0..100)
        .map(|block| io.capsule(pointed(command(READ, block, 1), 0x5a, 512), &[]))
        .collect();
    suspended.resume(disk("plain", plain())).unwrap();
    for _ in cids {
        assert_eq!(io.done().status, 0);
    }
    // A queue that is connected meanwhile waits too.
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    let resume = std::thread::spawn(move || suspended.resume(disk("plain", plain())));
    let mut second = target.idle(0);
    assert_eq!(second.connect(PLAIN, 2, controller, 31, 0).status, 0);
    resume.join().unwrap().unwrap();
    assert_eq!(second.read(command(READ, 0, 1), 512).status, 0);
}

#[test]
fn a_device_whose_commands_take_too_long_is_not_replaced() {
    let target = target();
    // Reads take a second.
    let (irqmode, completion_nsec) = (IrqMode::Timer, 1 << 30);
    let slow = NullConfig { irqmode, completion_nsec, ..plain() };
    target.subsystems.add("slow", disk("slow", slow)).unwrap();
    let nqn = "nqn.2026-11.io.blockyard:slow";
    let (_admin, controller) = target.admin(nqn, 0);
    let mut io = target.io(nqn, controller, 0, 0);
    io.capsule(pointed(command(READ, 0, 1), 0x5a, 512), &[]);
    let is_received = |target: &Target| {
        let links = target.server.connections();
        links.iter().any(|link| link.queue == Some(1) && link.commands == 2)
    };
    while !is_received(&target) {
        std::thread::yield_now();
    }
    let busy = target.subsystems.suspend("slow", Duration::ZERO).map(drop);
    assert_eq!(busy, Err(SubsystemError::Busy("slow".to_owned())));
    assert_eq!(io.done().status, 0);
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0, "the queue continues");
    let unknown = target.subsystems.suspend("none", DRAIN).map(drop);
    assert_eq!(unknown, Err(SubsystemError::Unknown("none".to_owned())));
}

/// A host that did not receive kept every change of the device away, and each attempt stopped the
/// other hosts for as long as a change may take.
#[test]
fn a_host_that_does_not_receive_is_cut_off_when_the_device_is_replaced() {
    let target = target();
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut stalled = target.io(PLAIN, controller, 0, 0);
    for _ in 0..120 {
        stalled.capsule(pointed(command(READ, 0, 2048), 0x5a, 1 << 20), &[]);
    }
    let (_other_admin, controller) = target.admin(PLAIN, 0);
    let mut other = target.io(PLAIN, controller, 0, 0);
    assert_eq!(other.read(command(READ, 0, 1), 512).status, 0);
    // A host whose connection still has room for data is not cut off by the first change.
    while target.subsystems.find_info("plain").unwrap().queues != 1 {
        let suspended = target.subsystems.suspend("plain", Duration::from_secs(1)).unwrap();
        suspended.resume(disk("plain", plain())).unwrap();
        assert_eq!(other.read(command(READ, 0, 1), 512).status, 0);
    }
}

/// The commands of a host that was refused at first were counted twice. What is counted is its I/O
/// commands, also when it has left.
#[test]
fn a_host_that_is_admitted_at_its_second_attempt_is_counted_once() {
    let target = target();
    let shared = SharedDisk::from(disk("shared", plain()));
    target.subsystems.add("shared", shared.clone()).unwrap();
    let claim = shared.claim.claim();
    let nqn = "nqn.2026-11.io.blockyard:shared";
    let mut host = target.idle(0);
    assert_eq!(host.connect(nqn, 0, 0xffff, 31, 0).status, 0x181);
    drop(claim);
    let controller = host.connect(nqn, 0, 0xffff, 31, 0).result as u16;
    assert_eq!(host.property_set(0x14, 0x46_0061).status, 0);
    let info = || target.subsystems.find_info("shared").unwrap();
    assert_eq!((info().totals, info().controllers), (Default::default(), 1));
    let mut io = target.io(nqn, controller, 0, 0);
    assert_eq!(io.read(command(READ, 0, 8), 4096).status, 0);
    assert_eq!(io.execute(command(WRITE, 0, 2), &pattern(1024, 1)).status, 0);
    assert_eq!(io.read(command(READ, 1 << 40, 8), 4096).status, 0x4080);
    let counted = |info: SubsystemInfo| {
        let totals = info.totals;
        (totals.commands, totals.read_bytes, totals.written_bytes, totals.errors)
    };
    assert_eq!(counted(info()), (3, 4096, 1024, 1));
    // A disk that takes the place of another one is the same device.
    let suspended = target.subsystems.suspend("shared", DRAIN).unwrap();
    suspended.resume(disk("shared", plain())).unwrap();
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0);
    assert_eq!(counted(info()), (4, 4608, 1024, 1));
    drop((host, io));
    while info().controllers > 0 {
        std::thread::yield_now();
    }
    assert_eq!(counted(info()), (4, 4608, 1024, 1));
}

#[test]
fn a_device_that_does_not_come_back_disconnects_its_hosts() {
    let target = target();
    for smaller in [true, false] {
        let (mut admin, controller) = target.admin(PLAIN, 0);
        let mut io = target.io(PLAIN, controller, 0, 0);
        let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
        match smaller {
            true => {
                let less = NullConfig { size: 8 << 20, ..plain() };
                let unlike = SubsystemError::Unlike("plain".to_owned());
                assert_eq!(suspended.resume(disk("plain", less)), Err(unlike));
            }
            false => drop(suspended),
        }
        admin.ends();
        io.ends();
        assert_eq!(target.idle(0).connect(PLAIN, 0, 0xffff, 31, 0).status, 0x4182);
        target.subsystems.add("plain", disk("plain", plain())).unwrap();
    }
}

/// A device that was removed while hosts waited for it was used after its end.
#[test]
fn a_queue_that_waits_for_a_device_that_is_removed_ends() {
    let target = target();
    let (mut admin, controller) = target.admin(PLAIN, 0);
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    let mut waits = target.idle(0);
    let (sqe, data) = connect_parts(PLAIN, 1, controller, 31, 0);
    waits.capsule(pointed(sqe, 0x01, data.len()), &data);
    let is_received = |target: &Target| {
        let links = target.server.connections();
        links.iter().any(|link| link.queue.is_none() && link.commands == 1)
    };
    while !is_received(&target) {
        std::thread::yield_now();
    }
    target.subsystems.remove("plain", DRAIN).unwrap();
    admin.ends();
    // The answer may not get through any more.
    if let Some(pdu) = waits.receive() {
        assert_eq!((pdu.kind, &pdu.header[22..24]), (5, &(0x4182_u16 << 1).to_le_bytes()[..]));
        waits.ends();
    }
    assert!(suspended.resume(disk("plain", plain())).is_err(), "it is gone");
    target.subsystems.add("plain", disk("plain", plain())).unwrap();
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut io = target.io(PLAIN, controller, 0, 0);
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0);
}

#[test]
fn requests_for_events_end_with_the_controller_or_by_an_abort() {
    let target = target();
    let (mut admin, controller) = target.admin(PLAIN, 0);
    let mut io = target.io(PLAIN, controller, 0, 0);
    let requests = listen(&mut admin, 0x100);
    assert_eq!(admin.execute(admin_command(0x0c, 0, 0), &[]).status, 0x4105);
    // The completion of the aborted command comes first.
    let abort = |queue: u32, cid: u16| admin_command(8, queue | u32::from(cid) << 16, 0);
    let cid = admin.capsule(abort(0, requests[1]), &[]);
    let aborted = admin.done();
    assert_eq!((aborted.cid, aborted.status), (requests[1], 0x007));
    let done = admin.done();
    assert_eq!((done.cid, done.status, done.result), (cid, 0, 0));
    assert_eq!(admin.execute(abort(0, requests[1]), &[]).result, 1, "it waits no more");
    assert_eq!(admin.execute(abort(1, requests[0]), &[]).result, 1, "another queue");
    assert_eq!(admin.execute(admin_command(9, 0x0b, 1 << 9), &[]).status, 0x4002);
    assert_eq!(admin.execute(admin_command(10, 0x0b, 0), &[]).result, 0x100);
    // A reset drops requests, notices and the list of changes.
    assert_eq!(admin.property_set(0x14, 0x46_0060).status, 0);
    io.ends();
    while admin.property_get(0x1c, false).result != 0 {}
    grow(&target, 32 << 20);
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    assert_eq!(admin.execute(admin_command(10, 0x0b, 0), &[]).result, 0);
    let requests = listen(&mut admin, 0x100);
    grow(&target, 48 << 20);
    assert_eq!(event(&mut admin), (requests[0], NAMESPACE_CHANGED));
}

/// A discovery controller with a keep-alive time-out stays, and tells of each change.
#[test]
fn a_discovery_controller_tells_of_devices_that_come_and_go() {
    let target = target();
    let (mut discovery, _) = target.admin(DISCOVERY, 0);
    let controller = discovery.identify(1, 0, 0).data;
    assert_eq!(controller[92..96], (1u32 << 31).to_le_bytes(), "OAES");
    assert_eq!(discovery.execute(admin_command(9, 0x0b, 0x100), &[]).status, 0x4002);
    assert_eq!(discovery.execute(admin_command(9, 0x0f, 120_000), &[]).status, 0);
    let requests = listen(&mut discovery, 1 << 31);
    let head = |discovery: &mut Initiator, retain| {
        let data = discovery.log(0x70, 20, retain).data;
        let word = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().unwrap());
        (word(0), word(8))
    };
    let before = head(&mut discovery, false);
    target.subsystems.add("third", disk("third", plain())).unwrap();
    assert_eq!(event(&mut discovery), (requests[0], DISCOVERY_CHANGED));
    assert_eq!(head(&mut discovery, true), (before.0 + 1, before.1 + 1));
    // Masked until the log is read without RAE.
    target.subsystems.remove("third", DRAIN).unwrap();
    assert_eq!(head(&mut discovery, false), (before.0 + 2, before.1));
    target.subsystems.remove("zoned", DRAIN).unwrap();
    assert_eq!(event(&mut discovery), (requests[1], DISCOVERY_CHANGED));
    assert_eq!(head(&mut discovery, false), (before.0 + 3, before.1 - 1));
    assert_eq!(discovery.execute(admin_command(0x18, 0, 0), &[]).status, 0, "keep alive");
    // A device that grows is no change of the log.
    grow(&target, 32 << 20);
    assert_eq!(head(&mut discovery, false).0, before.0 + 3);
    assert_eq!(target.idle(0).connect(ZONED, 0, 0xffff, 31, 0).status, 0x4182);
}

/// A port for discovery alone names the port of the devices, and does not serve them.
#[test]
fn a_discovery_port_leads_to_the_port_of_the_devices() {
    let target = target();
    let finder = discovery_of(&target);
    let (mut discovery, _) = finder.admin(DISCOVERY, 0);
    let read = |discovery: &mut Initiator| {
        let log = discovery.log(0x70, 4096, false).data;
        let count = u64::from_le_bytes(log[8..16].try_into().unwrap());
        let entries = log[1024..].chunks(1024).take(count as usize);
        let text = |entry: &[u8], at: usize| {
            let end = entry[at..].iter().position(|byte| *byte == 0 || *byte == b' ').unwrap();
            String::from_utf8(entry[at..at + end].to_vec()).unwrap()
        };
        entries.map(|entry| (text(entry, 256), text(entry, 32))).collect::<Vec<_>>()
    };
    let (here, there) = (finder.address().port().to_string(), target.address().port().to_string());
    let itself = (DISCOVERY.to_owned(), here);
    let wanted =
        [itself.clone(), (PLAIN.to_owned(), there.clone()), (ZONED.to_owned(), there.clone())];
    assert_eq!(read(&mut discovery), wanted);
    assert_eq!(finder.idle(0).connect(PLAIN, 0, 0xffff, 31, 0).status, 0x4182);
    // The bug: an I/O queue of a controller of the other port was admitted here.
    let (_admin, controller) = target.admin(PLAIN, 0);
    assert_eq!(finder.idle(0).connect(PLAIN, 1, controller, 31, 0).status, 0x4182);
    assert_eq!(target.idle(0).connect(PLAIN, 1, controller, 31, 0).status, 0);
    // The port of the devices answers discovery too.
    let (mut other, _) = target.admin(DISCOVERY, 0);
    assert_eq!(read(&mut other)[0], (DISCOVERY.to_owned(), there));
    // The end of that port is a change.
    let requests = listen(&mut discovery, 1 << 31);
    drop(other);
    target.server.stop();
    assert_eq!(event(&mut discovery), (requests[0], DISCOVERY_CHANGED));
    assert_eq!(read(&mut discovery), [itself]);
}
