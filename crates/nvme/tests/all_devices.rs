//! The subsystem of all devices: namespaces that come, go and grow while hosts use others.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // A test may.

mod initiator;

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockyard_core::Op;
use blockyard_core::channel::Stats;
use blockyard_core::device::DeviceError;
use blockyard_core::rmw::SharedDisk;
use blockyard_null::{IrqMode, NullConfig};
use blockyard_nvme::identify::DiskContents;
use blockyard_nvme::{AllowedHosts, EVERY_DEVICE, HostAccess, SubsystemError};
use blockyard_testing::watched_disk::{DiskWatch, WatchedDisk};
use initiator::faulty::{Fault, FaultyDisk, Gate};
use initiator::{
    ALL, DISCOVERY, HOST, Initiator, PLAIN, Target, ZONED, admin_command, command, connect_parts,
    disk, h2c_header, pattern, plain, pointed, target_of_all, with,
};

const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const FLUSH: u8 = 0x00;
const APPEND: u8 = 0x7d;
const DRAIN: Duration = Duration::from_secs(60);
const NAMESPACE_CHANGED: u64 = 0x04_0002;

fn target() -> Target {
    target_of_all(HostAccess::default())
}

fn queues(target: &Target) -> (Initiator, Initiator) {
    let (admin, controller) = target.admin(ALL, 0);
    let io = target.io(ALL, controller, 0, 0);
    (admin, io)
}

/// A command for a namespace.
fn to(nsid: u32, sqe: [u8; 64]) -> [u8; 64] {
    with(sqe, 1, nsid)
}

/// The numbers in a list of namespaces.
fn numbers(data: &[u8]) -> Vec<u32> {
    let numbers = data.chunks(4).map(|it| u32::from_le_bytes(it.try_into().unwrap()));
    numbers.take_while(|number| *number != 0).collect()
}

fn namespaces(admin: &mut Initiator) -> Vec<u32> {
    numbers(&admin.identify(2, 0, 0).data)
}

/// Reads the list of changed namespaces, without retaining the event.
fn changed(admin: &mut Initiator) -> Vec<u32> {
    numbers(&admin.log(4, 4096, false).data)
}

fn blocks(admin: &mut Initiator, nsid: u32) -> u64 {
    u64::from_le_bytes(admin.identify(0, nsid, 0).data[..8].try_into().unwrap())
}

/// Asks for notices of namespaces, and for events.
fn listen(admin: &mut Initiator) {
    assert_eq!(admin.execute(admin_command(9, 0x0b, 0x100), &[]).status, 0);
    for _ in 0..4 {
        admin.capsule(admin_command(0x0c, 0, 0), &[]);
    }
}

fn event(admin: &mut Initiator) {
    let done = admin.done();
    assert_eq!((done.status, done.result), (0, NAMESPACE_CHANGED));
}

#[test]
fn each_device_is_a_namespace_of_its_command_set() {
    let target = target();
    let (mut admin, _) = target.admin(ALL, 0);
    let controller = admin.identify(1, 0, 0).data;
    assert_eq!(&controller[768..768 + ALL.len()], ALL.as_bytes());
    assert_eq!(controller[516..520], 4096u32.to_le_bytes(), "NN");
    assert_eq!((controller[76], controller[525]), (0, 5), "CMIC, and no flush of all");
    assert_eq!(namespaces(&mut admin), [1, 2]);
    assert_eq!(numbers(&admin.identify(2, 1, 0).data), [2]);
    assert_eq!(numbers(&admin.identify(7, 0, 0).data), [1]);
    assert_eq!(numbers(&admin.identify(7, 0, 2).data), [2]);
    assert_eq!(admin.identify(2, u32::MAX, 0).status, 0x400b);
    assert_eq!(admin.identify(0x1c, 0, 0).data[0], 5);
    assert_eq!((blocks(&mut admin, 1), blocks(&mut admin, 2)), (16 << 11, 32 << 8));
    for (nsid, set) in [(1, 0), (2, 2)] {
        assert_eq!(admin.identify(3, nsid, 0).data[40..45], [4, 1, 0, 0, set]);
        assert_eq!(admin.identify(5, nsid, set).status, 0);
        assert_eq!(admin.identify(8, nsid, 0).status, 0);
    }
    for cns in [0, 5, 8] {
        let inactive = admin.identify(cns, 3, 0);
        assert_eq!((inactive.status, inactive.data), (0, vec![0; 4096]), "no device");
    }
    for (cns, nsid) in [(3, 3), (0, 0), (0, 4097), (3, 4097), (5, 4097), (8, u32::MAX)] {
        assert_eq!(admin.identify(cns, nsid, 0).status, 0x400b, "{cns} {nsid}");
    }
    assert_eq!(admin.identify(6, 0, 2).data[0], 8, "ZASL");
    let effects = admin.read(with(admin_command(2, 5 | 1023 << 16, 0), 14, 2 << 24), 4096).data;
    assert_eq!(effects[1024 + 4 * usize::from(APPEND)], 3);
    // A host that did not enable all command sets has no zoned namespaces.
    let mut old = target.idle(0);
    assert_eq!(old.connect(ALL, 0, 0xffff, 31, 0).status, 0);
    assert_eq!(old.property_set(0x14, 0x46_0001).status, 0);
    assert_eq!(namespaces(&mut old), [1]);
    assert_eq!(old.identify(0, 2, 0).data, [0; 4096]);
    // The identifiers are those of the device, by whichever subsystem.
    let (mut alone, _) = target.admin(PLAIN, 0);
    assert_eq!(alone.identify(3, 1, 0).data, admin.identify(3, 1, 0).data);
}

#[test]
fn a_queue_uses_all_namespaces() {
    let target = target();
    let (_admin, mut io) = queues(&target);
    let (first, second) = (pattern(4096, 1), pattern(4096, 2));
    assert_eq!(io.execute(to(1, command(WRITE, 0, 8)), &first).status, 0);
    assert_eq!(io.execute(to(2, command(WRITE, 0, 1)), &second).status, 0);
    let appended = io.execute(to(2, command(APPEND, 0, 1)), &first);
    assert_eq!((appended.status, appended.result), (0, 1));
    // Commands for both are in flight together.
    for _ in 0..30 {
        io.capsule(pointed(to(1, command(READ, 0, 8)), 0x5a, 4096), &[]);
        io.capsule(pointed(to(2, command(READ, 0, 1)), 0x5a, 4096), &[]);
    }
    let mut seen = [0; 2];
    for _ in 0..60 {
        let done = io.done();
        assert_eq!(done.status, 0);
        seen[if done.data == first { 0 } else { 1 }] += 1;
        assert!(done.data == first || done.data == second);
    }
    assert_eq!(seen, [30, 30]);
    for (nsid, status) in [(0, 0x400b), (3, 0x4002), (4097, 0x400b), (u32::MAX, 0x400b)] {
        assert_eq!(io.execute(to(nsid, command(FLUSH, 0, 0)), &[]).status, status, "{nsid}");
    }
    assert_eq!(io.execute(to(1, command(FLUSH, 0, 0)), &[]).status, 0);
    assert_eq!(io.execute(to(1, command(APPEND, 0, 1)), &first).status, 0x4001, "not zoned");
}

#[test]
fn namespaces_come_and_go_while_a_host_uses_others() {
    let target = target();
    let (mut admin, mut io) = queues(&target);
    listen(&mut admin);
    let data = pattern(4096, 1);
    assert_eq!(io.execute(to(1, command(WRITE, 0, 8)), &data).status, 0);
    assert_eq!(io.execute(to(2, command(WRITE, 0, 1)), &data).status, 0);
    target.subsystems.add("third", disk("third", plain())).unwrap();
    event(&mut admin);
    assert_eq!(changed(&mut admin), [3]);
    assert_eq!(namespaces(&mut admin), [1, 2, 3]);
    assert_eq!(io.read(to(3, command(READ, 0, 8)), 4096).data, [0; 4096]);
    // The data of this write come when the device is gone.
    let late = pattern(16384, 9);
    let cid = io.capsule(pointed(to(1, command(WRITE, 0, 32)), 0x5a, late.len()), &[]);
    let r2t = io.receive().unwrap();
    let tag = u16::from_le_bytes([r2t.header[10], r2t.header[11]]);
    target.subsystems.remove("plain", DRAIN).unwrap();
    event(&mut admin);
    assert_eq!(changed(&mut admin), [1]);
    assert_eq!(namespaces(&mut admin), [2, 3]);
    assert_eq!(admin.identify(0, 1, 0).data, [0; 4096]);
    target.subsystems.add("fourth", disk("fourth", plain())).unwrap();
    event(&mut admin);
    assert_eq!(changed(&mut admin), [4], "no device gets the number of another one");
    io.h2c_data(cid, tag, 0, &late);
    assert_eq!(io.done().status, 0x4002);
    assert_eq!(io.execute(to(1, command(WRITE, 0, 8)), &data).status, 0x4002);
    assert_eq!(io.read(to(4, command(READ, 0, 8)), 4096).data, [0; 4096], "another device");
    assert_eq!(io.read(to(2, command(READ, 0, 1)), 4096).data, data);
    // Several changes between two reads of the list.
    target.subsystems.remove("third", DRAIN).unwrap();
    event(&mut admin);
    target.subsystems.remove("fourth", DRAIN).unwrap();
    target.subsystems.add("fifth", disk("fifth", plain())).unwrap();
    assert_eq!(changed(&mut admin), [3, 4, 5]);
    assert_eq!(namespaces(&mut admin), [2, 5]);
    assert_eq!(changed(&mut admin), []);
}

#[test]
fn a_namespace_that_grows_keeps_its_number() {
    let target = target();
    let (mut admin, mut io) = queues(&target);
    listen(&mut admin);
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0);
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    // This waits for the new disk.
    let cid = io.capsule(pointed(to(1, command(READ, 40 << 11, 1)), 0x5a, 512), &[]);
    let grown = NullConfig { size: 64 << 20, ..plain() };
    suspended.resume(disk("plain", grown)).unwrap();
    event(&mut admin);
    assert_eq!(changed(&mut admin), [1]);
    assert_eq!(blocks(&mut admin, 1), 64 << 11);
    let done = io.done();
    assert_eq!((done.cid, done.status), (cid, 0));
    assert_eq!(io.execute(to(2, command(FLUSH, 0, 0)), &[]).status, 0);
    // A device that does not come back is removed, and the host stays.
    drop(target.subsystems.suspend("plain", DRAIN).unwrap());
    event(&mut admin);
    assert_eq!(changed(&mut admin), [1]);
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0x4002);
    assert_eq!(io.execute(to(2, command(FLUSH, 0, 0)), &[]).status, 0);
}

/// A queue kept the devices without a command for as long as another one executed its last command.
#[test]
fn a_host_that_is_gone_keeps_no_device_without_a_command() {
    let target = target();
    let slow = NullConfig { irqmode: IrqMode::Timer, completion_nsec: 3_000_000_000, ..plain() };
    target.subsystems.add("slow", disk("slow", slow)).unwrap();
    let (admin, mut io) = queues(&target);
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0);
    io.capsule(pointed(to(3, command(READ, 0, 1)), 0x5a, 512), &[]);
    assert_eq!(io.execute(to(1, command(FLUSH, 0, 0)), &[]).status, 0, "the read has begun");
    drop((admin, io));
    drop(target.subsystems.suspend("plain", Duration::from_secs(1)).unwrap());
    assert!(target.subsystems.suspend("slow", Duration::ZERO).is_err());
}

#[test]
fn a_host_sees_the_namespaces_that_it_may_use() {
    let mut allowed = AllowedHosts::default();
    allowed.allow("plain", "nqn.2026-11.example:other").unwrap();
    allowed.allow(EVERY_DEVICE, HOST).unwrap();
    let target = target_of_all(HostAccess { allowed, authentication: None });
    let (mut admin, mut io) = queues(&target);
    assert_eq!(namespaces(&mut admin), [2]);
    assert_eq!(admin.identify(0, 1, 0).data, [0; 4096]);
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0x4002);
    assert_eq!(io.read(to(2, command(READ, 0, 1)), 4096).status, 0);
    let uses = |device: &str| target.subsystems.find_info(device).unwrap().controllers;
    assert_eq!((uses("plain"), uses("zoned")), (0, 1));
    listen(&mut admin);
    // A change of a device of others is none.
    target.subsystems.remove("plain", DRAIN).unwrap();
    target.subsystems.add("third", disk("third", plain())).unwrap();
    event(&mut admin);
    assert_eq!(changed(&mut admin), [3]);
    assert_eq!(namespaces(&mut admin), [2, 3]);
    // A host in no list may not connect.
    let (sqe, mut data) = connect_parts(ALL, 0, 0xffff, 31, 0);
    data[512 + HOST.len() - 1] ^= 1;
    assert_eq!(target.idle(0).execute(sqe, &data).status, 0x4184);
}

#[test]
fn discovery_names_the_subsystem_of_all_devices_alone() {
    let target = target();
    let (mut discovery, _) = target.admin(DISCOVERY, 0);
    let log = discovery.log(0x70, 4096, false).data;
    assert_eq!(log[8..16], 2u64.to_le_bytes());
    assert_eq!(&log[2048 + 256..2048 + 256 + ALL.len()], ALL.as_bytes());
    // The subsystems of devices are there too.
    let (mut zoned, _) = target.admin(ZONED, 0);
    assert_eq!(namespaces(&mut zoned), [1]);
}

#[test]
fn hosts_of_all_devices_are_clients_of_each() {
    let target = target();
    let shared = SharedDisk::from(disk("shared", plain()));
    target.subsystems.add("shared", shared.clone()).unwrap();
    let (mut admin, mut io) = queues(&target);
    assert_eq!(io.read(to(3, command(READ, 0, 1)), 512).status, 0);
    for name in ["plain", "zoned", "shared"] {
        let info = target.subsystems.find_info(name).unwrap();
        assert_eq!((info.controllers, info.queues, info.hosts.len()), (1, 1, 1), "{name}");
        assert_eq!((&*info.hosts[0].nqn, &info.hosts[0].queues[..]), (HOST, &[1][..]));
    }
    // A device whose file system is mounted is no namespace for a host that comes later.
    let claim = shared.claim.claim();
    let (mut other, mut later) = queues(&target);
    assert_eq!(namespaces(&mut other), [1, 2]);
    assert_eq!(later.read(to(3, command(READ, 0, 1)), 512).status, 0x4002);
    assert_eq!(namespaces(&mut admin), [1, 2, 3], "this host is a client, and keeps it");
    drop(claim);
    assert_eq!(namespaces(&mut other), [1, 2, 3]);
    assert_eq!(later.read(to(3, command(READ, 0, 1)), 512).status, 0);
    // A later claim counts both hosts, and hides the device from neither.
    let _claim = shared.claim.claim();
    assert_eq!((namespaces(&mut admin), namespaces(&mut other)), (vec![1, 2, 3], vec![1, 2, 3]));
    // A device cannot have the name of the subsystem.
    let taken = target.subsystems.add("all", disk("all", plain()));
    assert_eq!(taken, Err(SubsystemError::TakenByAll(ALL.to_owned())));
    drop((admin, io, other, later));
    while target.subsystems.find_info("plain").unwrap().controllers > 0 {
        std::thread::yield_now();
    }
}

/// The totals of a device did not count the commands of these hosts.
#[test]
fn commands_are_counted_for_the_device_that_they_use() {
    let target = target();
    let (admin, mut io) = queues(&target);
    let data = pattern(8192, 1);
    assert_eq!(io.execute(to(1, command(WRITE, 0, 16)), &data).status, 0);
    assert_eq!(io.read(to(2, command(READ, 0, 1)), 4096).status, 0);
    assert_eq!(io.write(to(1, command(WRITE, 0, 64)), &pattern(32768, 2)).status, 0);
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0);
    // Refused by the rules, by a pointer without its length, and by the zone.
    assert_eq!(io.execute(to(1, command(APPEND, 0, 1)), &data).status, 0x4001);
    assert_eq!(io.read(to(1, command(READ, 0, 2)), 512).status, 0x400f);
    assert_eq!(io.execute(to(2, command(WRITE, 5, 2)), &data).status, 0x41bc);
    // No device has these.
    assert_eq!(io.execute(to(3, command(FLUSH, 0, 0)), &[]).status, 0x4002);
    let counted = |device: &str| {
        let totals = target.subsystems.find_info(device).unwrap().totals;
        (totals.commands, totals.read_bytes, totals.written_bytes, totals.errors)
    };
    assert_eq!(counted("plain"), (5, 512, 8192 + 32768, 2));
    assert_eq!(counted("zoned"), (2, 4096, 0, 1));
    // The queue has a channel to each of the two.
    let links = target.server.connections();
    let link = links.iter().find(|link| link.queue == Some(1)).unwrap();
    let stats = target.server.channel_stats(link.id, &link.peer).unwrap();
    assert_eq!((stats.op(Op::Read).ops, stats.op(Op::Read).sectors, stats.channels), (2, 9, 2));
    assert_eq!(stats.read_latency.iter().sum::<u64>(), 2);
    assert_eq!(target.server.channel_stats(link.id, "another host"), None);
    let admin_link = links.iter().find(|link| link.queue == Some(0)).unwrap();
    let stats = target.server.channel_stats(admin_link.id, &admin_link.peer).unwrap();
    assert_eq!(stats, Stats::default());
    // They stay when the host has left.
    drop((admin, io));
    while target.subsystems.find_info("plain").unwrap().controllers > 0 {
        std::thread::yield_now();
    }
    assert_eq!(counted("plain"), (5, 512, 8192 + 32768, 2));
}

/// A resize, or a mount that is refused, claims a device for a moment. A connected host that looked
/// at the device then was told that it had gone.
#[test]
fn a_claim_takes_no_namespace_from_a_connected_host() {
    let target = target();
    let shared = SharedDisk::from(disk("shared", plain()));
    target.subsystems.add("shared", shared.clone()).unwrap();
    let (mut admin, mut io) = queues(&target);
    listen(&mut admin);
    let _claim = shared.claim.claim();
    assert_eq!(io.read(to(3, command(READ, 0, 1)), 512).status, 0, "the first use");
    assert_eq!(admin.identify(0, 3, 0).status, 0);
    target.subsystems.add("fourth", disk("fourth", plain())).unwrap();
    event(&mut admin);
    assert_eq!(changed(&mut admin), [4]);
    assert_eq!(namespaces(&mut admin), [1, 2, 3, 4]);
}

/// A host that did not enable all command sets could write to zoned namespaces that Identify and
/// the lists did not show.
#[test]
fn a_host_without_all_command_sets_cannot_use_zoned_namespaces() {
    let target = target();
    for (nqn, nsid) in [(ALL, 2), (ZONED, 1)] {
        let mut admin = target.idle(0);
        let connected = admin.connect(nqn, 0, 0xffff, 31, 0);
        assert_eq!((connected.status, admin.property_set(0x14, 0x46_0001).status), (0, 0));
        let mut io = target.io(nqn, connected.result as u16, 0, 0);
        let data = pattern(4096, 1);
        assert_eq!(io.execute(to(nsid, command(WRITE, 0, 1)), &data).status, 0x4002);
        assert_eq!(io.execute(to(nsid, command(APPEND, 0, 1)), &data).status, 0x4002);
        assert_eq!(io.read(to(nsid, command(READ, 0, 1)), 4096).status, 0x4002);
        assert_eq!(admin.identify(0, nsid, 0).data, [0; 4096]);
    }
}

/// A queue that had used a device waited for its successor without a command for it. Commands for
/// other devices waited too, and these devices could not be replaced.
#[test]
fn a_queue_uses_other_devices_while_one_is_replaced() {
    let target = target();
    let (_admin, mut io) = queues(&target);
    for nsid in [1, 2] {
        assert_eq!(io.execute(to(nsid, command(FLUSH, 0, 0)), &[]).status, 0);
    }
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    assert_eq!(io.execute(to(2, command(FLUSH, 0, 0)), &[]).status, 0);
    drop(target.subsystems.suspend("zoned", DRAIN).unwrap());
    suspended.resume(disk("plain", plain())).unwrap();
    assert_eq!(io.execute(to(1, command(FLUSH, 0, 0)), &[]).status, 0);
}

/// The bug: a queue with a command for a device that was being replaced waited for it with the
/// answers of other commands unsent, and kept the other devices from being replaced.
#[test]
fn a_queue_answers_other_commands_while_one_waits_for_its_device() {
    let target = target();
    let (mut admin, mut io) = queues(&target);
    let data = pattern(16384, 3);
    // The data of a write come when its device is away.
    let late = io.capsule(pointed(to(1, command(WRITE, 0, 32)), 0x5a, data.len()), &[]);
    let r2t = io.receive().unwrap();
    let tag = u16::from_le_bytes([r2t.header[10], r2t.header[11]]);
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    // In one segment: a read of the other device, which is answered, and what has to wait.
    let read = pointed(to(2, command(READ, 0, 1)), 0x5a, 4096);
    let [first, waits, last] = [0x100_u16, 0x101, 0x102];
    let with_cid = |mut sqe: [u8; 64], cid: u16| {
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        sqe
    };
    let mut bytes = io.print(4, &with_cid(read, first), &[]);
    bytes.extend(io.print(6, &h2c_header(late, tag, 0, data.len() as u32), &data));
    let flush = pointed(to(1, command(FLUSH, 0, 0)), 1, 0);
    bytes.extend(io.print(4, &with_cid(flush, waits), &[]));
    bytes.extend(io.print(4, &with_cid(read, last), &[]));
    io.stream.write_all(&bytes).unwrap();
    let done = io.done();
    assert_eq!((done.cid, done.status), (first, 0));
    // The other device can be replaced, and removed, while the queue waits.
    let other = target.subsystems.suspend("zoned", DRAIN).unwrap();
    drop(other);
    assert_eq!(namespaces(&mut admin), [1]);
    suspended.resume(disk("plain", plain())).unwrap();
    let mut seen = [(); 3].map(|()| io.done()).map(|done| (done.cid, done.status));
    seen.sort_unstable();
    assert_eq!(seen, [(late, 0), (waits, 0), (last, 0x4002)]);
    assert_eq!(io.read(to(1, command(READ, 0, 32)), data.len()).data, data);
}

/// A command that waited for memory when its device was replaced held the answers back too.
#[test]
fn a_command_that_waits_for_memory_and_its_device_holds_no_answer_back() {
    let target = target();
    let (_admin, mut io) = queues(&target);
    // Two writes of the other device have all memory of the connection until they are complete.
    let writes = [0, 256].map(|slba| {
        let cid = io.capsule(pointed(to(2, command(WRITE, slba, 256)), 0x5a, 1 << 20), &[]);
        let r2t = io.receive().unwrap();
        (cid, u16::from_le_bytes([r2t.header[10], r2t.header[11]]))
    });
    let waits = io.capsule(pointed(to(1, command(READ, 0, 2048)), 0x5a, 1 << 20), &[]);
    // An answer shows that the queue has begun the read.
    assert_eq!(io.execute(to(2, command(FLUSH, 0, 0)), &[]).status, 0);
    let suspended = target.subsystems.suspend("plain", DRAIN).unwrap();
    for (cid, tag) in writes {
        for offset in (0..1 << 20).step_by(128 << 10) {
            io.h2c_data(cid, tag, offset, &pattern(128 << 10, 1));
        }
        let done = io.done();
        assert_eq!((done.cid, done.status), (cid, 0));
    }
    suspended.resume(disk("plain", plain())).unwrap();
    let done = io.done();
    assert_eq!((done.cid, done.status, done.data.len()), (waits, 0, 1 << 20));
}

/// A queue kept a channel to each of up to 4096 devices.
#[test]
fn a_queue_closes_the_namespace_that_it_has_not_used_for_longest() {
    let target = target();
    let small = || NullConfig { size: 1 << 20, ..plain() };
    let added: Vec<_> = (3..=132).map(|nsid: u32| disk(&nsid.to_string(), small())).collect();
    for device in &added {
        target.subsystems.add(device.name(), Arc::clone(device)).unwrap();
    }
    let users = || added.iter().map(Arc::strong_count).sum::<usize>();
    let before = users();
    let (_admin, mut io) = queues(&target);
    // The data of this write come when its namespace has been closed.
    let late = pattern(16384, 9);
    let cid = io.capsule(pointed(to(3, command(WRITE, 0, 32)), 0x5a, late.len()), &[]);
    let r2t = io.receive().unwrap();
    let tag = u16::from_le_bytes([r2t.header[10], r2t.header[11]]);
    for nsid in 4..=132 {
        let data = pattern(512, nsid as u8);
        assert_eq!(io.execute(to(nsid, command(WRITE, 0, 1)), &data).status, 0);
    }
    assert_eq!(users() - before, 128);
    io.h2c_data(cid, tag, 0, &late);
    assert_eq!(io.done().status, 0);
    assert_eq!(io.read(to(3, command(READ, 0, 32)), late.len()).data, late);
    for nsid in 4..=132 {
        let data = pattern(512, nsid as u8);
        assert_eq!(io.read(to(nsid, command(READ, 0, 1)), 512).data, data);
    }
    assert_eq!(users() - before, 128);
}

/// Whether a device has refused a channel: its first one.
#[derive(Default)]
struct RefusesOnce(AtomicBool);

impl DiskWatch for RefusesOnce {
    fn open(&self) -> Result<(), DeviceError> {
        match self.0.swap(true, Ordering::Relaxed) {
            true => Ok(()),
            false => Err(DeviceError::Os { what: "memory", errno: 12 }),
        }
    }
}

/// A device that has no channel at the moment gave a program an error that the host did not retry.
#[test]
fn a_command_for_a_device_without_a_channel_may_be_retried() {
    let target = target();
    let refuses = WatchedDisk::over(disk("refuses", plain()), Arc::<RefusesOnce>::default());
    target.subsystems.add("refuses", refuses).unwrap();
    let (_admin, mut io) = queues(&target);
    assert_eq!(io.read(to(3, command(READ, 0, 1)), 512).status, 0x21);
    assert_eq!(io.read(to(3, command(READ, 0, 1)), 512).status, 0);
}

/// A removal without time for its hosts cut each connection that had used the device, even an idle
/// one that serves other devices.
#[test]
fn a_removal_without_time_cuts_no_queue_that_uses_other_devices() {
    let target = target();
    let (mut admin, mut io) = queues(&target);
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0);
    target.subsystems.remove("plain", Duration::ZERO).unwrap();
    assert_eq!(io.read(to(2, command(READ, 0, 1)), 4096).status, 0);
    assert_eq!(namespaces(&mut admin), [2]);
}

/// Whether the connection ends before this number of commands is answered.
fn ends_before(io: &mut Initiator, mut commands: u32) -> bool {
    let mut is_read = |bytes: &mut [u8]| match io.stream.read_exact(bytes) {
        Ok(()) => true,
        Err(error) => {
            let gone = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
            assert!(gone.contains(&error.kind()), "{error}");
            false
        }
    };
    while commands > 0 {
        let mut head = [0; 8];
        if !is_read(&mut head) {
            return true;
        }
        let len = u32::from_le_bytes(head[4..].try_into().unwrap());
        if !is_read(&mut vec![0; len as usize - head.len()]) {
            return true;
        }
        // A completion, or data with the SUCCESS flag.
        commands -= u32::from(head[0] == 5 || head[1] & 8 != 0);
    }
    false
}

/// A host that does not receive does not keep a device that is removed.
#[test]
fn a_host_that_does_not_receive_is_cut_off_when_a_device_is_removed() {
    let target = target();
    // A host is not cut off if its connection has room for all data that was read before the
    // removal.
    for _ in 0..50 {
        let (mut admin, mut io) = queues(&target);
        // A device that is added again has another number.
        let nsid = target.subsystems.find_info("plain").unwrap().nsid;
        for _ in 0..120 {
            io.capsule(pointed(to(nsid, command(READ, 0, 2048)), 0x5a, 1 << 20), &[]);
        }
        let is_busy = |target: &Target| {
            let links = target.server.connections();
            links.iter().any(|link| link.queue == Some(1) && link.read_bytes > 0)
        };
        while !is_busy(&target) {
            std::thread::yield_now();
        }
        target.subsystems.remove("plain", Duration::ZERO).unwrap();
        assert_eq!(namespaces(&mut admin), [2]);
        if ends_before(&mut io, 120) {
            return;
        }
        target.subsystems.add("plain", disk("plain", plain())).unwrap();
    }
    panic!("no connection was cut off");
}

/// The bug: while a command for a device that was removed was in flight, the queue executed no
/// command for other devices.
#[test]
fn a_queue_uses_other_devices_while_a_removed_one_completes_its_commands() {
    let target = target();
    let gate = Arc::<Gate>::default();
    target.subsystems.add("held", FaultyDisk::serving(Fault::Holds, &gate)).unwrap();
    let (mut admin, mut io) = queues(&target);
    listen(&mut admin);
    let held = io.capsule(pointed(to(3, command(READ, 0, 1)), 0x5a, 512), &[]);
    gate.await_blocked();
    let subsystems = Arc::clone(&target.subsystems);
    let removal = std::thread::spawn(move || subsystems.remove("held", DRAIN));
    event(&mut admin);
    let data = pattern(16384, 5);
    assert_eq!(io.write(to(1, command(WRITE, 0, 32)), &data).status, 0);
    assert_eq!(io.read(to(1, command(READ, 0, 32)), data.len()).data, data);
    // A command for the removed device does not wait for the end of its commands.
    assert_eq!(io.execute(to(3, command(FLUSH, 0, 0)), &[]).status, 0x4002);
    gate.open();
    let done = io.done();
    assert_eq!((done.cid, done.status), (held, 0));
    removal.join().unwrap().unwrap();
    assert_eq!(io.execute(to(2, command(FLUSH, 0, 0)), &[]).status, 0);
}

/// A rollback between two connections of a host: by the same UUID it would have taken the earlier
/// pages of its cache for those of the device.
#[test]
fn a_device_with_other_contents_has_another_uuid() {
    let target = target();
    let identifiers = |version: Option<u64>| {
        add_again(&target, version);
        let (mut admin, _) = target.admin(PLAIN, 0);
        let nsid = namespaces(&mut admin)[0];
        let (list, serial) = (admin.identify(3, nsid, 0).data, admin.identify(1, 0, 0).data);
        (list[4..20].to_vec(), serial[4..24].to_vec())
    };
    let [by_name, first, second, again] = [None, Some(0), Some(1), Some(0)].map(identifiers);
    assert_eq!(first, again);
    assert_ne!(first.0, second.0);
    assert_ne!(first.0, by_name.0);
    assert_eq!(second.1, first.1, "the serial number stays");
}

/// Adds the plain device again, with a version of its contents.
fn add_again(target: &Target, version: Option<u64>) {
    let contents = version.map(|version| DiskContents { origin: "pool/1".to_owned(), version });
    target.subsystems.remove("plain", DRAIN).unwrap();
    let plain = disk("plain", plain());
    target.subsystems.add_contents("plain", contents.as_ref(), plain).unwrap();
}

/// The bug: Linux sends the commands that it has kept while it was disconnected before it looks at
/// UUIDs. Writes to a volume changed what it had been rolled back to meanwhile.
#[test]
fn a_command_for_earlier_contents_reaches_no_later_ones() {
    let target = target();
    let connect = || {
        let (mut admin, controller) = target.admin(PLAIN, 0);
        let nsid = namespaces(&mut admin)[0];
        (target.io(PLAIN, controller, 0, 0), admin, nsid)
    };
    let data = pattern(4096, 1);
    // The number becomes greater, and in the second round less: NN is that of the namespace.
    let mut statuses = BTreeSet::new();
    let mut last_number = None;
    for version in [0, 4096] {
        // The version whose number is 4096, as that of version 0 says.
        let version = last_number.map_or(version, |number| version - u64::from(number));
        add_again(&target, Some(version));
        let (mut io, admin, before) = connect();
        last_number = Some(before);
        assert_eq!(io.execute(to(before, command(WRITE, 0, 8)), &data).status, 0);
        drop((io, admin));
        add_again(&target, Some(version + 1));
        let (mut io, mut admin, nsid) = connect();
        assert_ne!(nsid, before);
        assert_eq!(namespaces(&mut admin), [nsid]);
        assert_eq!(admin.identify(1, 0, 0).data[516..520], nsid.to_le_bytes(), "NN");
        statuses.insert(io.execute(to(before, command(WRITE, 0, 8)), &data).status);
        statuses.insert(io.execute(to(before, command(FLUSH, 0, 0)), &[]).status);
        assert_eq!(io.read(to(nsid, command(READ, 0, 8)), 4096).data, [0; 4096]);
        assert_eq!(io.execute(to(u32::MAX, command(FLUSH, 0, 0)), &[]).status, 0);
    }
    // Both say that the host is not to repeat the command.
    assert_eq!(statuses, BTreeSet::from([0x4002, 0x400b]));
}

/// The bug: a device that did not complete its commands had all connections cut that had a command
/// for it, although they serve other devices; a host that connected again was not ready.
#[test]
fn a_removed_device_that_hangs_keeps_no_host_from_others() {
    let target = target();
    let gate = Arc::<Gate>::default();
    target.subsystems.add("held", FaultyDisk::serving(Fault::Holds, &gate)).unwrap();
    let (admin, mut io) = queues(&target);
    let held = io.capsule(pointed(to(3, command(READ, 0, 1)), 0x5a, 512), &[]);
    gate.await_blocked();
    target.subsystems.remove("held", Duration::ZERO).unwrap();
    // It is not cut, and a command for the removed device does not wait.
    let late = io.execute(to(3, command(FLUSH, 0, 0)), &[]);
    assert_ne!(late.cid, held);
    assert_eq!(late.status, 0x4002);
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0);
    // The host gives the read up, and connects again.
    drop((admin, io));
    let mut admin = target.idle(0);
    let connected = admin.connect(ALL, 0, 0xffff, 31, 0);
    assert_eq!((connected.status, admin.property_set(0x14, 0x46_0061).status), (0, 0));
    let deadline = Instant::now() + DRAIN;
    while admin.property_get(0x1c, false).result == 0 {
        assert!(Instant::now() < deadline, "the host is kept out by the removed device");
        std::thread::yield_now();
    }
    let mut io = target.io(ALL, connected.result as u16, 0, 0);
    assert_eq!(io.execute(to(2, command(FLUSH, 0, 0)), &[]).status, 0);
    assert_eq!(io.execute(to(3, command(FLUSH, 0, 0)), &[]).status, 0x4002);
    gate.open();
}
