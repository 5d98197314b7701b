//! Which hosts get what: the lists of allowed hosts.
#![allow(clippy::unwrap_used)] // A test may.

mod initiator;

use blockyard_nvme::{AllowedHosts, EVERY_DEVICE, HostAccess, TargetOptions};
use initiator::{
    DISCOVERY, Done, HOST, Initiator, PLAIN, Target, ZONED, connect_parts, pointed, target_for,
    with,
};

const OTHER: &str = "nqn.2026-11.example:other";

/// The plain device is for [`HOST`], every other one for [`OTHER`].
fn target() -> Target {
    target_with(TargetOptions::default())
}

fn target_with(options: TargetOptions) -> Target {
    let mut allowed = AllowedHosts::default();
    allowed.allow("plain", HOST).unwrap();
    allowed.allow(EVERY_DEVICE, OTHER).unwrap();
    target_for(HostAccess { allowed, authentication: None }, options)
}

fn connect_as(initiator: &mut Initiator, host: &str, nqn: &str) -> Done {
    let (sqe, mut data) = connect_parts(nqn, 0, 0xffff, 31, 0);
    data[512..768].fill(0);
    data[512..512 + host.len()].copy_from_slice(host.as_bytes());
    initiator.execute(sqe, &data)
}

#[test]
fn a_host_that_is_not_allowed_is_an_invalid_host() {
    let target = target();
    for (host, nqn, status) in [
        (HOST, PLAIN, 0),
        (OTHER, ZONED, 0),
        (HOST, ZONED, 0x4184),
        (OTHER, PLAIN, 0x4184),
        ("nqn.2026-11.example:third", PLAIN, 0x4184),
        ("nqn.2026-11.example:third", DISCOVERY, 0),
    ] {
        let done = connect_as(&mut target.idle(0), host, nqn);
        assert_eq!(done.status, status, "{host} {nqn}");
    }
    // Controllers of the first target end a while after their hosts have gone.
    let target = self::target();
    let mut idle = target.idle(0);
    assert_eq!(connect_as(&mut idle, HOST, ZONED).result, 0);
    assert_eq!(connect_as(&mut idle, HOST, PLAIN).status, 0, "its next attempt is served");
    assert_eq!(target.subsystems.find_info("zoned").unwrap().controllers, 0);
}

#[test]
fn discovery_shows_a_host_what_it_may_use() {
    let target = target();
    for (host, seen) in
        [(HOST, vec![PLAIN]), (OTHER, vec![ZONED]), ("nqn.2026-11.example:third", vec![])]
    {
        let mut discovery = target.idle(0);
        assert_eq!(connect_as(&mut discovery, host, DISCOVERY).status, 0);
        assert_eq!(discovery.property_set(0x14, 0x46_0001).status, 0);
        let len = 1024 * (2 + seen.len());
        let mut sqe = with([0; 64], 10, 0x70 | (len as u32 / 4 - 1) << 16);
        sqe[0] = 2;
        let cid = discovery.capsule(pointed(sqe, 0x5a, len), &[]);
        let done = discovery.done();
        assert_eq!((done.cid, done.status), (cid, 0));
        assert_eq!(done.data[8..16], (1 + seen.len() as u64).to_le_bytes(), "{host}");
        for (at, nqn) in seen.into_iter().enumerate() {
            let name = 1024 * (2 + at) + 256;
            assert_eq!(&done.data[name..name + nqn.len()], nqn.as_bytes(), "{host}");
        }
    }
}

/// Hosts that are in no list kept all others out by connections to discovery.
#[test]
fn discovery_makes_room_for_hosts_that_are_allowed() {
    let options = TargetOptions { connections_max: 2, ..TargetOptions::default() };
    let target = target_with(options);
    let [mut first, mut second] = [0; 2].map(|_| {
        let mut stranger = target.idle(0);
        assert_eq!(connect_as(&mut stranger, "nqn.2026-11.example:third", DISCOVERY).status, 0);
        stranger
    });
    let mut admin = target.idle(0);
    assert_eq!(connect_as(&mut admin, HOST, PLAIN).status, 0);
    first.ends();
    assert_eq!(connect_as(&mut target.idle(0), OTHER, ZONED).status, 0);
    second.ends();
    assert_eq!(admin.property_get(0x08, false).status, 0);
}
