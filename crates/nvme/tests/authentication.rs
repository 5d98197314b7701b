//! Hosts that authenticate by DH-HMAC-CHAP.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;
#[path = "initiator/secret.rs"]
mod secret;

use std::io::Write;
use std::sync::Arc;

use blockyard_core::rmw::SharedDisk;
use blockyard_nvme::auth_message::{AuthHash, DhGroup};
use blockyard_nvme::secret::HostSecrets;
use blockyard_nvme::{AllowedHosts, AuthRules, EVERY_DEVICE, HostAccess, TargetOptions};
use initiator::{
    ALL, DISCOVERY, HOST, Initiator, PLAIN, Target, admin_command, command, connect_parts, disk,
    host, pattern, plain, pointed, target_for, target_of_all, with,
};
use secret::{
    Knowledge, LONG, SECRET, ask, auth_command, auth_receive, auth_send, authenticate, connect_as,
    negotiate, reason,
};

const OTHER: &str = "nqn.2026-11.example:other";
const WITHOUT_SECRET: &str = "nqn.2026-11.example:without";
const MINE: &str = "nqn.2026-11.io.blockyard:mine";
const READ: u8 = 0x02;
const WRITE: u8 = 0x01;

/// Access of hosts that authenticate by one of these.
fn access_by(hashes: &[AuthHash], groups: &[DhGroup]) -> HostAccess {
    let text = format!("{HOST} {SECRET} {LONG}\n{OTHER} {LONG}\n");
    let secrets = HostSecrets::parse(&text).unwrap();
    let rules = AuthRules { secrets, hashes: hashes.to_vec(), groups: groups.to_vec() };
    HostAccess { authentication: Some(Arc::new(rules)), ..HostAccess::default() }
}

/// A target whose hosts authenticate by one of these.
fn target_by(hashes: &[AuthHash], groups: &[DhGroup]) -> Target {
    target_for(access_by(hashes, groups), TargetOptions::default())
}

fn target() -> Target {
    target_by(&[AuthHash::Sha256], &[DhGroup::Null])
}

const ONE_WAY: Knowledge =
    Knowledge { subsystem: PLAIN, host: HOST, secret: SECRET, controller: None };
const TWO_WAY: Knowledge = Knowledge { controller: Some(LONG), ..ONE_WAY };

/// Connects a queue of the plain device, which has to authenticate; returns the controller too.
fn connect(target: &Target, host: &str, number: u16, controller: u16) -> (Initiator, u16) {
    let mut queue = target.idle(0);
    let controller = ask(&mut queue, connect_parts(PLAIN, number, controller, 31, 0), host);
    (queue, controller)
}

/// Connects an admin queue of the plain device with a keep-alive time-out.
fn connect_for(target: &Target, host: &str, keep_alive_ms: u32) -> Initiator {
    let mut queue = target.idle(0);
    let (sqe, data) = connect_parts(PLAIN, 0, 0xffff, 31, 0);
    ask(&mut queue, (with(sqe, 12, keep_alive_ms), data), host);
    queue
}

/// Connects a queue of the subsystem of all devices; returns the controller too.
fn connect_all(target: &Target, host: &str, number: u16, controller: u16) -> (Initiator, u16) {
    let mut queue = target.idle(0);
    let controller = ask(&mut queue, connect_parts(ALL, number, controller, 31, 0), host);
    (queue, controller)
}

/// An admin queue that is enabled, after its authentication.
fn admin(target: &Target, known: Knowledge) -> (Initiator, u16) {
    let (mut admin, controller) = connect(target, known.host, 0, 0xffff);
    assert_eq!(authenticate(&mut admin, known), Ok(()));
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    (admin, controller)
}

#[test]
fn a_host_authenticates_by_every_hash_and_group() {
    for hash in AuthHash::ALL {
        for group in DhGroup::ALL {
            let target = target_by(&[hash], &[group]);
            for known in [ONE_WAY, TWO_WAY] {
                let (mut queue, _) = connect(&target, HOST, 0, 0xffff);
                assert_eq!(authenticate(&mut queue, known), Ok(()), "{hash:?} {group:?}");
                assert_eq!(queue.property_get(0x08, false).status, 0);
            }
        }
    }
}

#[test]
fn each_queue_authenticates_before_it_executes_anything() {
    let target = target();
    let (mut admin, controller) = connect(&target, HOST, 0, 0xffff);
    assert_eq!(admin.property_get(0x08, false).status, 0x4191);
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0x4191);
    assert_eq!(admin.identify(1, 0, 0).status, 0x4191);
    assert_eq!(admin.connect(PLAIN, 0, 0xffff, 31, 0).status, 0x400c, "it is connected");
    assert_eq!(authenticate(&mut admin, ONE_WAY), Ok(()));
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    let (mut io, _) = connect(&target, HOST, 1, controller);
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0x4191);
    let data = pattern(8192, 1);
    assert_eq!(io.execute(command(WRITE, 0, 16), &data).status, 0x4191);
    // No R2T asks for the data of a command that is refused.
    io.capsule(pointed(command(WRITE, 0, 64), 0x5a, 32768), &[]);
    assert_eq!(io.done().status, 0x4191);
    assert_eq!(authenticate(&mut io, TWO_WAY), Ok(()));
    assert_eq!(io.read(command(READ, 0, 16), 8192).data, [0; 8192], "nothing was written");
    assert_eq!(io.execute(command(WRITE, 0, 16), &data).status, 0);
}

/// A connection that claimed the NQN and identifier of a host kept the host's own connection of the
/// same queue away for as long as an authentication may take.
#[test]
fn a_queue_belongs_to_the_connection_that_authenticates() {
    let target = target();
    let (_admin, controller) = admin(&target, ONE_WAY);
    let (mut stranger, _) = connect(&target, HOST, 1, controller);
    let (mut io, _) = connect(&target, HOST, 1, controller);
    let (mut late, _) = connect(&target, HOST, 1, controller);
    assert_eq!(authenticate(&mut io, ONE_WAY), Ok(()));
    let data = pattern(8192, 1);
    assert_eq!(io.execute(command(WRITE, 0, 16), &data).status, 0);
    // From now on there is such a queue, also for a host that authenticates too late.
    let (sqe, parts) = connect_parts(PLAIN, 1, controller, 31, 0);
    assert_eq!(target.idle(0).execute(sqe, &parts).status, 0x400c);
    assert_eq!(authenticate(&mut late, ONE_WAY), Ok(()));
    late.ends();
    assert_eq!(stranger.read(command(READ, 0, 1), 512).status, 0x4191);
    // The end of the others takes nothing from the queue.
    drop(stranger);
    while target.server.connections().len() > 2 {
        std::thread::yield_now();
    }
    assert_eq!(io.read(command(READ, 0, 16), 8192).data, data);
    assert_eq!(target.idle(0).execute(sqe, &parts).status, 0x400c);
    // The end of the queue frees its number.
    drop(io);
    while target.server.connections().len() > 1 {
        std::thread::yield_now();
    }
    let (mut io, _) = connect(&target, HOST, 1, controller);
    assert_eq!(authenticate(&mut io, ONE_WAY), Ok(()));
}

/// What a connection sends that has not authenticated does not show that the host is alive.
#[test]
fn a_queue_without_authentication_keeps_no_silent_controller_alive() {
    let target = target();
    let (mut admin, controller) = admin(&target, ONE_WAY);
    let (mut stranger, _) = connect(&target, HOST, 1, controller);
    // The last command of the host sets the time-out: the steps before it may take any time.
    assert_eq!(admin.execute(admin_command(9, 0x0f, 100), &[]).status, 0);
    let bytes = stranger.print(4, &pointed(command(READ, 0, 1), 0x5a, 512), &[]);
    let sends = std::thread::spawn(move || {
        while stranger.stream.write_all(&bytes).is_ok() && stranger.receive().is_some() {}
    });
    admin.ends();
    // The controller takes its queues with it.
    sends.join().unwrap();
}

#[test]
fn a_connection_has_a_role_once_it_is_authenticated() {
    let target = target();
    let (mut queue, _) = connect(&target, HOST, 0, 0xffff);
    assert_eq!(target.server.connections()[0].host, None);
    // It is no client: one that authenticates never would block the operator.
    let info = target.subsystems.find_info("plain").unwrap();
    assert_eq!((info.controllers, info.hosts.len()), (0, 0));
    assert_eq!(authenticate(&mut queue, TWO_WAY), Ok(()));
    // An answer shows that the thread of the connection has gone on.
    assert_eq!(queue.property_get(0x08, false).status, 0);
    assert_eq!(target.server.connections()[0].host.as_deref(), Some(HOST));
    assert_eq!(target.subsystems.find_info("plain").unwrap().controllers, 1);
}

/// The secret for the device that a test adds.
const OF_MINE: Knowledge = Knowledge { subsystem: MINE, ..ONE_WAY };

/// A Connect that claimed an allowed host was a client of the device without proof; so the target
/// must look for a mounted file system when the host has authenticated too.
#[test]
fn a_file_system_mounted_before_the_authentication_keeps_the_device() {
    let (target, disk) = (target(), SharedDisk::from(disk("mine", plain())));
    target.subsystems.add("mine", disk.clone()).unwrap();
    let mut queue = target.idle(0);
    ask(&mut queue, connect_parts(MINE, 0, 0xffff, 31, 0), HOST);
    let claim = disk.claim.claim().unwrap();
    assert_eq!(target.subsystems.find_info("mine").unwrap().controllers, 0);
    assert_eq!(authenticate(&mut queue, OF_MINE), Ok(()));
    queue.ends();
    drop(claim);
}

/// Any connection that knew the NQN of a host opened a channel to the device without its secret.
#[test]
fn a_queue_without_authentication_opens_no_channel() {
    let (target, disk) = (target(), disk("mine", plain()));
    target.subsystems.add("mine", Arc::clone(&disk)).unwrap();
    let mut admin = target.idle(0);
    let controller = ask(&mut admin, connect_parts(MINE, 0, 0xffff, 31, 0), HOST);
    assert_eq!(authenticate(&mut admin, OF_MINE), Ok(()));
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    let [mut io, mut stranger] = [0; 2].map(|_| {
        let mut io = target.idle(0);
        ask(&mut io, connect_parts(MINE, 1, controller, 31, 0), HOST);
        io
    });
    assert_eq!(stranger.read(command(READ, 0, 1), 512).status, 0x4191);
    assert_eq!(Arc::strong_count(&disk), 2, "the disk is the subsystem's and this test's");
    assert_eq!(authenticate(&mut io, OF_MINE), Ok(()));
    assert_eq!(io.read(command(READ, 0, 1), 512).status, 0);
    assert!(Arc::strong_count(&disk) > 2, "the queue uses the disk");
}

#[test]
fn a_wrong_secret_ends_the_connection() {
    let target = target();
    let wrong = Knowledge { secret: LONG, ..ONE_WAY };
    let (mut queue, _) = connect(&target, HOST, 0, 0xffff);
    assert_eq!(authenticate(&mut queue, wrong), Err(1));
    queue.ends();
    // The secret of another host does not help.
    let (mut queue, _) = connect(&target, OTHER, 0, 0xffff);
    assert_eq!(authenticate(&mut queue, Knowledge { host: OTHER, ..ONE_WAY }), Err(1));
    queue.ends();
    // The controller has another secret than the host expects, or none for this host.
    let expects = |host, secret, controller| Knowledge { host, secret, controller, ..ONE_WAY };
    let (mut queue, _) = connect(&target, HOST, 0, 0xffff);
    assert_eq!(authenticate(&mut queue, expects(HOST, SECRET, Some(SECRET))), Err(0));
    queue.ends();
    let (mut queue, _) = connect(&target, OTHER, 0, 0xffff);
    assert_eq!(authenticate(&mut queue, expects(OTHER, LONG, Some(LONG))), Err(1));
    queue.ends();
    let (mut queue, _) = connect(&target, OTHER, 0, 0xffff);
    assert_eq!(authenticate(&mut queue, expects(OTHER, LONG, None)), Ok(()));
}

#[test]
fn a_host_without_a_secret_is_an_invalid_host() {
    let target = target();
    let (sqe, mut data) = connect_parts(PLAIN, 0, 0xffff, 31, 0);
    data[512 + HOST.len() - 1] ^= 1;
    assert_eq!(target.idle(0).execute(sqe, &data).status, 0x4184);
    // Discovery asks for none.
    let done = target.idle(0).connect(DISCOVERY, 0, 0xffff, 31, 0);
    assert_eq!((done.status, done.result >> 16), (0, 0));
}

#[test]
fn an_authenticated_host_may_authenticate_again() {
    let target = target();
    let (mut admin, controller) = admin(&target, ONE_WAY);
    let (mut io, _) = connect(&target, HOST, 1, controller);
    assert_eq!(authenticate(&mut io, ONE_WAY), Ok(()));
    assert_eq!(auth_send(&mut admin, &negotiate(7)).status, 0);
    assert_eq!(admin.property_get(0x08, false).status, 0, "it is used meanwhile");
    assert_eq!(auth_receive(&mut admin, 4096).data[..6], [1, 1, 0, 0, 7, 0]);
    let mut reply = vec![1, 2, 0, 0, 7, 0, 32];
    reply.resize(16 + 64, 0);
    assert_eq!(auth_send(&mut admin, &reply).status, 0);
    assert_eq!(reason(&auth_receive(&mut admin, 4096).data), 1);
    admin.ends();
    io.ends();
}

/// The kernel of an emulated host computed in a large group for longer than its keep-alive
/// time-out, and was disconnected.
#[test]
fn a_host_that_has_to_authenticate_is_not_taken_for_silent() {
    let target = target();
    let mut computes = connect_for(&target, HOST, 100);
    let mut silent = connect_for(&target, HOST, 100);
    assert_eq!(authenticate(&mut silent, ONE_WAY), Ok(()));
    silent.ends();
    assert_eq!(authenticate(&mut computes, ONE_WAY), Ok(()));
    computes.ends();
}

#[test]
fn messages_may_come_by_r2t() {
    let target = target();
    let (mut queue, _) = connect(&target, HOST, 0, 0xffff);
    let message = negotiate(1);
    assert_eq!(queue.write(auth_command(5, message.len()), &message).status, 0);
    assert_eq!(auth_receive(&mut queue, 4096).data[..2], [1, 1]);
}

#[test]
fn commands_with_other_fields_or_lengths_are_refused() {
    let target = target();
    let (mut queue, _) = connect(&target, HOST, 0, 0xffff);
    let message = negotiate(1);
    for at in [41, 42, 43] {
        let mut sqe = auth_command(5, message.len());
        sqe[at] = 0;
        assert_eq!(queue.execute(sqe, &message).status, 0x4002, "byte {at}");
    }
    assert_eq!(queue.execute(auth_command(5, 71), &message).status, 0x400f, "not its length");
    assert_eq!(queue.execute(auth_command(5, 1 << 20), &message).status, 0x4002);
    assert_eq!(queue.read(auth_command(6, 1 << 20), 1 << 20).status, 0x4002);
    assert_eq!(queue.read(auth_command(6, 4096), 4092).status, 0x400f);
    assert_eq!(auth_send(&mut queue, &message).status, 0);
    assert_eq!(auth_receive(&mut queue, 40).status, 0x4002, "too short for the challenge");
    assert_eq!(auth_receive(&mut queue, 48).data[..2], [1, 1]);
    // What the host asks for is not there.
    assert_eq!(reason(&auth_receive(&mut queue, 48).data), 7);
    queue.ends();
    // Without secrets there are no such commands.
    let open = initiator::target();
    let mut queue = open.idle(0);
    assert_eq!(auth_send(&mut queue, &message).status, 0x4001, "before the Connect");
    assert_eq!(queue.connect(PLAIN, 0, 0xffff, 31, 0).result >> 16, 0);
    assert_eq!(auth_send(&mut queue, &message).status, 0x4001);
    assert_eq!(auth_receive(&mut queue, 48).status, 0x4001);
}

/// A host that claims the NQN of another takes no place from hosts that have authenticated.
#[test]
fn connections_without_authentication_make_room() {
    let secrets = HostSecrets::parse(&format!("{HOST} {SECRET}")).unwrap();
    let (hashes, groups) = (vec![AuthHash::Sha256], vec![DhGroup::Null]);
    let rules = AuthRules { secrets, hashes, groups };
    let access = HostAccess { authentication: Some(Arc::new(rules)), ..HostAccess::default() };
    let options = TargetOptions { connections_max: 2, ..TargetOptions::default() };
    let target = target_for(access, options);
    let (mut admin, controller) = admin(&target, ONE_WAY);
    let (mut unproved, _) = connect(&target, HOST, 0, 0xffff);
    let (mut io, _) = connect(&target, HOST, 1, controller);
    unproved.ends();
    assert_eq!(authenticate(&mut io, ONE_WAY), Ok(()));
    assert_eq!(admin.property_get(0x08, false).status, 0);
}

/// Connections of discovery need no secret, and kept the hosts that have one away.
#[test]
fn discovery_makes_room_for_hosts_that_have_secrets() {
    let secrets = HostSecrets::parse(&format!("{HOST} {SECRET}")).unwrap();
    let (hashes, groups) = (vec![AuthHash::Sha256], vec![DhGroup::Null]);
    let rules = AuthRules { secrets, hashes, groups };
    let access = HostAccess { authentication: Some(Arc::new(rules)), ..HostAccess::default() };
    let options = TargetOptions { connections_max: 2, ..TargetOptions::default() };
    let target = target_for(access, options);
    let (mut first, _) = target.admin(DISCOVERY, 0);
    let (mut second, _) = target.admin(DISCOVERY, 0);
    let (mut admin, controller) = admin(&target, ONE_WAY);
    first.ends();
    let (mut io, _) = connect(&target, HOST, 1, controller);
    second.ends();
    assert_eq!(authenticate(&mut io, ONE_WAY), Ok(()));
    assert_eq!(admin.property_get(0x08, false).status, 0);
}

/// A target with the subsystem of all devices: the plain device is for [`HOST`], every other one
/// for [`OTHER`]. A third host is in a list and has no secret.
fn target_of_lists() -> Target {
    let mut allowed = AllowedHosts::default();
    allowed.allow("plain", HOST).unwrap();
    allowed.allow(EVERY_DEVICE, OTHER).unwrap();
    allowed.allow(EVERY_DEVICE, WITHOUT_SECRET).unwrap();
    target_of_all(HostAccess { allowed, ..access_by(&[AuthHash::Sha256], &[DhGroup::Null]) })
}

const ALL_ONE_WAY: Knowledge = Knowledge { subsystem: ALL, ..ONE_WAY };
const ALL_TWO_WAY: Knowledge = Knowledge { subsystem: ALL, ..TWO_WAY };

/// A command for a namespace.
fn to(nsid: u32, sqe: [u8; 64]) -> [u8; 64] {
    with(sqe, 1, nsid)
}

#[test]
fn each_queue_of_all_devices_authenticates_and_uses_what_its_host_may() {
    let target = target_of_lists();
    for known in [
        ALL_ONE_WAY,
        ALL_TWO_WAY,
        Knowledge { host: OTHER, secret: LONG, controller: None, ..ALL_ONE_WAY },
    ] {
        let (mut admin, controller) = connect_all(&target, known.host, 0, 0xffff);
        assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0x4191);
        assert_eq!(admin.identify(2, 0, 0).status, 0x4191);
        assert_eq!(authenticate(&mut admin, known), Ok(()));
        assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
        let (mut io, _) = connect_all(&target, known.host, 1, controller);
        let (own, other) = if known.host == HOST { (1, 2) } else { (2, 1) };
        let read = |nsid| to(nsid, command(READ, 0, 8));
        let len = |nsid| if nsid == 1 { 4096 } else { 32768 };
        assert_eq!(io.read(read(own), len(own)).status, 0x4191);
        // No R2T asks for the data of a command that is refused.
        io.capsule(pointed(to(own, command(WRITE, 0, 64)), 0x5a, 64 << 9), &[]);
        assert_eq!(io.done().status, 0x4191);
        assert_eq!(authenticate(&mut io, known), Ok(()));
        assert_eq!(io.read(read(own), len(own)).status, 0);
        assert_eq!(io.read(read(other), len(other)).status, 0x4002, "a device of another host");
        assert_eq!(admin.identify(2, 0, 0).data[..8], [own as u8, 0, 0, 0, 0, 0, 0, 0]);
    }
}

#[test]
fn a_host_that_is_not_allowed_or_has_no_secret_may_not_connect_to_all_devices() {
    let target = target_of_lists();
    for host in ["nqn.2026-11.example:unknown", WITHOUT_SECRET] {
        let mut queue = target.idle(0);
        let done = connect_as(&mut queue, connect_parts(ALL, 0, 0xffff, 31, 0), host);
        assert_eq!((done.status, done.result), (0x4184, 0), "{host}");
        // The connection stays, for another Connect.
        ask(&mut queue, connect_parts(ALL, 0, 0xffff, 31, 0), HOST);
        assert_eq!(authenticate(&mut queue, ALL_TWO_WAY), Ok(()));
    }
}

#[test]
fn a_wrong_secret_ends_a_connection_to_all_devices() {
    let target = target_of_lists();
    for (known, reason) in [
        (Knowledge { secret: LONG, ..ALL_ONE_WAY }, 1),
        (Knowledge { secret: LONG, ..ALL_TWO_WAY }, 1),
        (Knowledge { controller: Some(SECRET), ..ALL_TWO_WAY }, 0),
        (Knowledge { host: OTHER, secret: LONG, ..ALL_TWO_WAY }, 1),
        // The response names the subsystem: that for another one is wrong.
        (ONE_WAY, 1),
    ] {
        let (mut queue, _) = connect_all(&target, known.host, 0, 0xffff);
        assert_eq!(authenticate(&mut queue, known), Err(reason));
        queue.ends();
    }
    // An I/O queue that fails leaves the controller and its other queues as they are.
    let (mut admin, controller) = connect_all(&target, HOST, 0, 0xffff);
    assert_eq!(authenticate(&mut admin, ALL_TWO_WAY), Ok(()));
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    let (mut wrong, _) = connect_all(&target, HOST, 1, controller);
    assert_eq!(authenticate(&mut wrong, Knowledge { secret: LONG, ..ALL_ONE_WAY }), Err(1));
    wrong.ends();
    let (mut io, _) = connect_all(&target, HOST, 1, controller);
    assert_eq!(authenticate(&mut io, ALL_ONE_WAY), Ok(()));
    assert_eq!(io.read(to(1, command(READ, 0, 1)), 512).status, 0);
}
