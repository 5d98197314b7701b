//! A daemon is replaced by another process while NVMe hosts use it: they are disconnected, and
//! connect again.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::nvme_host::{NvmeHost, secrets};
use crate::place::Place;
use crate::run::{bounded_by, ok};
use crate::upgrade::{Done, Upgradable, ends_after_state, executable};
use crate::yard::{BLOCKYARD, Yard};

const ALL: &str = "nqn.2026-11.io.blockyard:all";
const RAM0: &str = "nqn.2026-11.io.blockyard:ram0";
const DEVICES: [&str; 2] = ["null:///mem0?size=16M&memory_backed=1&bs=4k", "ram:///ram0?size=16M"];
const NVME: [&str; 2] = ["--nvme", "tcp:127.0.0.1:0"];

/// The blocks that a host writes.
const BLOCKS: u64 = 512;

/// The addresses of the NVMe listeners, in their order.
fn addresses(yard: &Upgradable) -> Vec<SocketAddr> {
    let control = yard.yard.control();
    let line = ["curl", "--silent", "--unix-socket", &control, "http://yard/v1/nvme/listeners"];
    let listeners = crate::run::run(&line).ok().json();
    let address =
        |it: &serde_json::Value| it["addresses"][0].as_str().unwrap()[4..].parse().unwrap();
    listeners.as_array().unwrap().iter().map(address).collect()
}

/// Writes blocks, and verifies each with one that was written before, until `is_done`; counts them.
fn write_and_verify(host: &mut NvmeHost, nsid: u32, count: &AtomicU64, is_done: &AtomicBool) {
    let seed = |number: u64| (number / 7) as u8;
    for number in 0.. {
        if is_done.load(Ordering::Relaxed) {
            break;
        }
        host.write(nsid, number % BLOCKS, seed(number));
        host.verify(nsid, number % BLOCKS, seed(number));
        if number >= BLOCKS / 2 {
            host.verify(nsid, (number - BLOCKS / 2) % BLOCKS, seed(number - BLOCKS / 2));
        }
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Hosts of a device alone and of all devices, which write and verify over some upgrades.
fn hosts_connect_again(authenticates: bool) {
    let place = Place::new();
    let file = place.file("secrets");
    std::fs::write(&file, secrets()).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    let mut args = [&DEVICES[..], &NVME, &["--nvme-subsystem", ALL]].concat();
    if authenticates {
        args.extend(["--nvme-secrets", &file]);
    }
    let mut yard = Upgradable::new(place, &args);
    let before = addresses(&yard);
    let mut hosts = [(RAM0, 1), (ALL, 1)]
        .map(|(nqn, nsid)| (NvmeHost::connect(before[0], nqn, authenticates), nsid));
    let (is_done, counts) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 2]);
    std::thread::scope(|scope| {
        let done = Done(&is_done);
        let mut threads = Vec::new();
        for ((host, nsid), count) in hosts.iter_mut().zip(&counts) {
            let (nsid, is_done) = (*nsid, &is_done);
            threads.push(scope.spawn(move || write_and_verify(host, nsid, count, is_done)));
        }
        for _ in 0..3 {
            for (count, thread) in counts.iter().zip(&threads) {
                // A host that is connecting would be disconnected a second time.
                let since = count.load(Ordering::Relaxed);
                while count.load(Ordering::Relaxed) == since && !thread.is_finished() {
                    std::thread::yield_now();
                }
            }
            yard.upgrade(&[]);
            assert_eq!(addresses(&yard), before);
        }
        drop(done);
    });
    for (host, nsid) in &mut hosts {
        host.write(*nsid, 0, 1);
        host.verify(*nsid, 0, 1);
        assert_eq!(host.reconnects, 3, "each upgrade disconnects a host once");
    }
    yard.end();
}

#[test]
fn hosts_are_disconnected_and_find_the_same_devices() {
    hosts_connect_again(false);
}

#[test]
fn hosts_authenticate_again_after_an_upgrade() {
    hosts_connect_again(true);
}

/// A program that fails before it is ready, and one that fails after the hosts were disconnected.
/// While the second one has everything, a host connects.
#[test]
fn hosts_go_on_with_the_old_process_after_an_upgrade_that_fails() {
    let place = Place::new();
    let [program, begun, goes] = ["program", "begun", "goes"].map(|name| place.file(name));
    let wait = format!("open('{begun}', 'w').close()\nwhile not os.path.exists('{goes}'): pass\n");
    executable(&program, &ends_after_state(&wait));
    let yard = Upgradable::new(place, &[&DEVICES[..], &NVME].concat());
    let address = addresses(&yard)[0];
    let mut host = NvmeHost::connect(address, RAM0, false);
    host.write(1, 0, 1);
    yard.fails(&["--program", "/bin/false"]).says(&["before it was ready", "serves on"]);
    host.verify(1, 0, 1);
    assert_eq!(host.reconnects, 0, "nothing was paused");
    let control = yard.yard.control();
    let line = [BLOCKYARD, "upgrade", "--program", &program, "--control", &control];
    let mut command = bounded_by(60, &line);
    let upgrade = command.stderr(Stdio::piped()).spawn().unwrap();
    ok(&["sh", "-c", "while [ ! -e $0 ]; do :; done", &begun]);
    let other = std::thread::spawn(move || {
        let mut other = NvmeHost::connect(address, "nqn.2026-11.io.blockyard:mem0", false);
        other.write(1, 0, 2);
        other.verify(1, 0, 2);
    });
    std::fs::write(&goes, "").unwrap();
    host.verify(1, 0, 1);
    other.join().unwrap();
    assert_eq!(host.reconnects, 1);
    let said = upgrade.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(6), "{said:?}");
    let errors = String::from_utf8(said.stderr).unwrap();
    assert!(errors.contains("NVMe hosts were disconnected and connect again"), "{errors}");
    assert_eq!(yard.serving_pid(), u64::from(yard.yard.pid()));
    assert_eq!(addresses(&yard), [address]);
}

/// The bug: the new process found an error in its configuration after the hosts were disconnected.
#[test]
fn hosts_stay_connected_when_the_new_configuration_is_invalid() {
    let place = Place::new();
    let [file, config, control] = ["secrets", "yard.toml", "control"].map(|name| place.file(name));
    std::fs::write(&file, secrets()).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    let nbd = format!("nbd = [\"unix:{}\"]", place.file("nbd"));
    let text = format!(
        "[serve]\ncontrol = \"{control}\"\n{nbd}\nnvme = [\"tcp:127.0.0.1:0\"]\n\
         [nvme]\nsecrets = \"{file}\"\n\
         [[device]]\nkind = \"ram\"\nname = \"ram0\"\nsize = \"16M\"\n"
    );
    std::fs::write(&config, &text).unwrap();
    let mut yard = Upgradable::of(Yard::start(place, &["serve", "--config", &config]));
    let address = addresses(&yard)[0];
    let mut host = NvmeHost::connect(address, RAM0, true);
    host.write(1, 0, 1);
    std::fs::write(&file, "no secret\n").unwrap();
    let said = yard.fails(&[]).says(&["the new process", "serves on"]);
    assert!(!said.err.contains("NVMe hosts"), "{said:?}");
    std::fs::write(&file, secrets()).unwrap();
    // The port is in use.
    let port = format!("\"tcp:127.0.0.1:0\", \"{}\"", format_args!("tcp:{address}"));
    std::fs::write(&config, text.replace("\"tcp:127.0.0.1:0\"", &port)).unwrap();
    yard.fails(&[]).says(&["cannot listen", "serves on"]);
    host.verify(1, 0, 1);
    assert_eq!(host.reconnects, 0, "a host was disconnected");
    std::fs::write(&config, &text).unwrap();
    yard.upgrade(&[]);
    host.verify(1, 0, 1);
    assert_eq!(host.reconnects, 1);
    yard.end();
}

#[test]
fn a_volume_keeps_its_data_for_hosts() {
    let place = Place::new();
    let volume = format!("volume:///v0?size=64M&path={}", place.file("pool"));
    let mut yard = Upgradable::new(place, &[&[&volume[..]], &NVME[..]].concat());
    let mut host = NvmeHost::connect(addresses(&yard)[0], "nqn.2026-11.io.blockyard:v0", false);
    // It is derived from the identity of the volume.
    let nsid = host.remembered.namespaces[0].0;
    for round in 1..=2 {
        host.write(nsid, round, round as u8);
        yard.upgrade(&[]);
        (1..=round).for_each(|at| host.verify(nsid, at, at as u8));
    }
    assert_eq!(host.reconnects, 2);
    yard.end();
}

/// A host would write to another device that has got the number of the one before.
#[test]
fn numbers_of_namespaces_and_listeners_of_requests_stay() {
    let devices = ["null:///a?size=16M&memory_backed=1&bs=4k", DEVICES[0], DEVICES[1]];
    let args = [&devices[..], &["--nvme-subsystem", ALL]].concat();
    let mut yard = Upgradable::new(Place::new(), &args);
    for path in [
        "{\"place\": \"tcp:127.0.0.1:0\"}",
        "{\"place\": \"tcp:127.0.0.1:0\", \"discovery\": true}",
    ] {
        let control = yard.yard.control();
        let url = "http://yard/v1/nvme/listeners";
        ok(&["curl", "--fail", "--silent", "--unix-socket", &control, "--data", path, url]);
    }
    yard.yard.command(&["remove", "a"]).ok();
    let before = addresses(&yard);
    let mut host = NvmeHost::connect(before[0], ALL, false);
    let numbers = |host: &NvmeHost| -> Vec<u32> {
        host.remembered.namespaces.iter().map(|(nsid, _)| *nsid).collect()
    };
    assert_eq!(numbers(&host), [2, 3]);
    host.write(3, 7, 1);
    for _ in 0..2 {
        yard.upgrade(&[]);
        host.verify(3, 7, 1);
    }
    assert_eq!((host.reconnects, addresses(&yard)), (2, before));
    yard.yard.command(&["add", devices[0]]).ok();
    host.scan();
    assert_eq!(numbers(&host), [2, 3, 4]);
    yard.end();
}
