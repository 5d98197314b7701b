//! Devices that block or panic, and hosts that are cut off: what the other hosts, a stop and the
//! log have of them. All log lines of this program go to a subscriber that takes the locks of the
//! servers, so a line that is logged under one of them never returns.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // A test may.

mod initiator;

use std::fmt::Debug;
use std::io::{ErrorKind, Write};
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use blockyard_nvme::{
    AllowedHosts, ConnectionThreads, EVERY_DEVICE, HostAccess, SubsystemError, TargetOptions,
    TargetServer,
};
use initiator::faulty::{Fault, FaultyDisk, Gate};
use initiator::{HOST, Initiator, PLAIN, Target, ZONED, command, pointed, target_for};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const READ: u8 = 0x02;
const FAULTY: &str = "nqn.2026-11.io.blockyard:faulty";

/// The targets whose locks every log line takes.
static PROBED: Mutex<Vec<&'static Target>> = Mutex::new(Vec::new());
static MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The text of a log line.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

struct Probe;

impl Subscriber for Probe {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let targets = PROBED.lock().unwrap().clone();
        for target in targets {
            target.server.connections();
            target.subsystems.list();
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        MESSAGES.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// A target with one thread; log lines take its locks.
fn probed(options: TargetOptions) -> (&'static Target, Arc<ConnectionThreads>) {
    probed_for(HostAccess::default(), options)
}

fn probed_for(
    access: HostAccess,
    options: TargetOptions,
) -> (&'static Target, Arc<ConnectionThreads>) {
    static SUBSCRIBES: Once = Once::new();
    SUBSCRIBES.call_once(|| tracing::subscriber::set_global_default(Probe).unwrap());
    let threads = ConnectionThreads::new(NonZeroUsize::MIN);
    let Target { subsystems, server } = target_for(access, options.clone());
    drop(server);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (on, served) = (Arc::clone(&threads), Arc::clone(&subsystems));
    let server = TargetServer::start_on(on, served, vec![listener], options).unwrap();
    let target: &'static Target = Box::leak(Box::new(Target { subsystems, server }));
    PROBED.lock().unwrap().push(target);
    (target, threads)
}

/// Whether a line was logged that has this text about this peer.
fn was_logged(text: &str, peer: &str) -> bool {
    let messages = MESSAGES.lock().unwrap();
    messages.iter().any(|message| message.contains(text) && message.contains(peer))
}

fn await_that(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_device_that_panics_and_panics_again_when_it_is_closed_shuts_no_host_out() {
    let (target, _threads) = probed(TargetOptions::default());
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut other = target.io(PLAIN, controller, 0, 0);
    let faults =
        [Fault::Panics { in_flight: 0 }, Fault::Panics { in_flight: 1 }, Fault::PanicsAlways];
    for fault in faults {
        target.subsystems.add("faulty", FaultyDisk::serving(fault, &Arc::default())).unwrap();
        for _ in 0..2 {
            // The host that comes back is admitted: no queue of its first association is left.
            let (_admin, controller) = target.admin(FAULTY, 0);
            let mut io = target.io(FAULTY, controller, 0, 0);
            io.capsule(pointed(command(READ, 0, 8), 0x5a, 4096), &[]);
            io.ends();
            assert_eq!(other.read(command(READ, 0, 8), 4096).status, 0, "{fault:?}");
        }
        let is_unused = || target.subsystems.find_info("faulty").unwrap().controllers == 0;
        await_that("the disk is returned", is_unused);
        target.subsystems.remove("faulty", Duration::from_secs(60)).unwrap();
        await_that("the connections have ended", || target.server.connections().len() == 2);
    }
}

#[test]
fn stopping_threads_does_not_wait_for_a_device_that_blocks() {
    let options = TargetOptions { drain_timeout: Duration::ZERO, ..TargetOptions::default() };
    let (target, threads) = probed(options);
    let gate = Arc::<Gate>::default();
    target.subsystems.add("faulty", FaultyDisk::serving(Fault::Blocks, &gate)).unwrap();
    let (_admin, controller) = target.admin(FAULTY, 0);
    let mut io = target.io(FAULTY, controller, 0, 0);
    io.capsule(pointed(command(READ, 0, 8), 0x5a, 4096), &[]);
    gate.await_blocked();
    let peer = format!("tcp:{}", io.stream.local_addr().unwrap());
    target.subsystems.remove("faulty", Duration::ZERO).unwrap();
    target.server.stop();
    assert!(was_logged("a host that was cut has not left", &peer));
    threads.stop(Instant::now());
    assert!(was_logged("a thread has not ended in time", "nvme-0"));
    assert_eq!(target.server.connections().len(), 2, "the device blocks still");
    gate.open();
    await_that("the connections end", || target.server.connections().is_empty());
    // The device may have completed the read before the connection saw the cut.
    while io.receive().is_some() {}
}

/// The end of the admin queue cut the I/O queues: answers were not sent, although the device had
/// completed the commands. A host also takes the end of an idle queue for the end of all.
#[test]
fn commands_in_flight_are_answered_when_a_server_stops_or_a_device_is_removed() {
    const LONG: Duration = Duration::from_secs(60);
    for is_removed in [false, true] {
        let (target, _threads) =
            probed(TargetOptions { drain_timeout: LONG, ..TargetOptions::default() });
        let gate = Arc::<Gate>::default();
        target.subsystems.add("faulty", FaultyDisk::serving(Fault::Holds, &gate)).unwrap();
        let (mut admin, controller) = target.admin(FAULTY, 0);
        let mut io = target.io(FAULTY, controller, 0, 0);
        let mut idle = target.idle(0);
        assert_eq!(idle.connect(FAULTY, 2, controller, 31, 0).status, 0);
        let cids = [0x7001, 0x7002, 0x7003];
        let capsules = cids.map(|cid: u16| {
            let mut read = pointed(command(READ, 0, 8), 0x5a, 4096);
            read[2..4].copy_from_slice(&cid.to_le_bytes());
            io.print(4, &read, &[])
        });
        io.stream.write_all(&capsules.concat()).unwrap();
        gate.await_blocked();
        let end = std::thread::spawn(move || match is_removed {
            true => target.subsystems.remove("faulty", LONG).unwrap(),
            false => target.server.stop(),
        });
        match is_removed {
            true => {
                let is_gone = || target.subsystems.find_info("faulty").is_none();
                await_that("the device is removed", is_gone);
            }
            false => target.server.begin_shutdown(),
        }
        // From now on the one thread gives turns to all three connections, which are to end.
        gate.await_looks(50);
        for socket in [&admin.stream, &idle.stream] {
            socket.set_nonblocking(true).unwrap();
            let error = socket.peek(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "it ends before the others");
            socket.set_nonblocking(false).unwrap();
        }
        gate.open();
        let mut answered = cids.map(|_| io.done()).map(|done| (done.cid, done.status));
        answered.sort_unstable();
        assert_eq!(answered, cids.map(|cid| (cid, 0)));
        [&mut io, &mut idle, &mut admin].into_iter().for_each(|it| it.ends());
        end.join().unwrap();
    }
}

#[test]
fn a_connection_is_cut_for_one_more_and_logged_without_a_lock() {
    let (target, _threads) =
        probed(TargetOptions { connections_max: 1, ..TargetOptions::default() });
    let mut first = target.raw();
    let peer = format!("tcp:{}", first.stream.local_addr().unwrap());
    await_that("it is accepted", || target.server.connections().len() == 1);
    let _second = target.idle(0);
    first.ends();
    await_that("it is logged", || was_logged("cut off for one more connection", &peer));
}

#[test]
fn a_host_that_does_not_receive_is_cut_by_a_suspension_and_logged_without_a_lock() {
    let (target, _threads) = probed(TargetOptions::default());
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut stalled = target.io(PLAIN, controller, 0, 0);
    let peer = format!("tcp:{}", stalled.stream.local_addr().unwrap());
    for _ in 0..120 {
        stalled.capsule(pointed(command(READ, 0, 2048), 0x5a, 1 << 20), &[]);
    }
    let has_sent = || target.server.connections().iter().any(|it| it.commands >= 120);
    await_that("its commands have arrived", has_sent);
    // Before it is seen to receive nothing, the device is busy.
    let _suspended = loop {
        match target.subsystems.suspend("plain", Duration::from_millis(10)) {
            Ok(suspended) => break suspended,
            Err(SubsystemError::Busy(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert!(was_logged("cut off: it does not receive its data", &peer));
}

/// The number of lines that were logged, with one of the texts and about one of the peers, if there
/// are any; and the number of lines of the kind that were not logged.
fn lines_about(kind: &str, texts: &[&str], peers: &[String]) -> (usize, usize) {
    let messages = MESSAGES.lock().unwrap();
    let is_one = |message: &&String| {
        texts.iter().any(|text| message.contains(text))
            && (peers.is_empty() || peers.iter().any(|peer| message.contains(peer)))
    };
    let logged = messages.iter().filter(is_one).count();
    let dropped = messages.iter().filter_map(|message| {
        let (count, rest) = message.strip_prefix("message=")?.split_once(" more lines about ")?;
        rest.starts_with(kind).then(|| count.parse::<usize>().unwrap())
    });
    (logged, dropped.sum())
}

/// Hosts that connected again and again, or repeated a command, filled the disk with the log.
#[test]
fn lines_that_hosts_cause_are_bounded_by_kind_and_counted() {
    /// Far more than a period has lines.
    const EVENTS: usize = 192;
    /// A connection may have this many Connects refused.
    const REFUSALS: usize = 16;
    let mut allowed = AllowedHosts::default();
    allowed.allow("plain", "nqn.2026-11.example:other").unwrap();
    allowed.allow(EVERY_DEVICE, HOST).unwrap();
    let access = HostAccess { allowed, authentication: None };
    let (target, _threads) = probed_for(access, TargetOptions::default());
    let device = FaultyDisk::serving(Fault::Refuses, &Arc::default());
    target.subsystems.add("faulty", device).unwrap();
    let peer_of = |host: &Initiator| format!("tcp:{}\"", host.stream.local_addr().unwrap());
    let violate = |mut host: Initiator| {
        host.stream.write_all(&[0xff; 16]).unwrap();
        while host.receive().is_some() {}
        peer_of(&host)
    };
    let strangers: Vec<_> = (0..EVENTS).map(|_| violate(target.idle(0))).collect();
    let hosts: Vec<_> = (0..EVENTS).map(|_| violate(target.admin(ZONED, 0).0)).collect();
    let (admin, controller) = target.admin(FAULTY, 0);
    let refused: Vec<_> = (0..2 * EVENTS / REFUSALS)
        .map(|number| {
            let mut host = target.idle(0);
            for _ in 0..REFUSALS {
                let done = match number % 2 {
                    0 => host.connect(PLAIN, 0, 0xffff, 31, 0),
                    _ => host.connect(FAULTY, 1, controller, 31, 0),
                };
                assert_eq!(done.status, [0x4184, 0x4006][number % 2]);
            }
            host.ends();
            peer_of(&host)
        })
        .collect();
    drop(admin);
    await_that("the hosts have left", || target.server.connections().is_empty());
    // Each connection but the first is turned away, or has another one cut.
    let (full, _threads) = probed(TargetOptions { connections_max: 1, ..TargetOptions::default() });
    let crowd: Vec<_> = (0..=EVENTS).map(|_| full.raw()).collect();
    let has_ended = |host: &&Initiator| {
        host.stream.set_nonblocking(true).unwrap();
        !matches!(host.stream.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    };
    await_that("one stays", || crowd.iter().filter(has_ended).count() == EVENTS);
    let crowd: Vec<_> = crowd.iter().map(peer_of).collect();
    [target, full].into_iter().for_each(|it| it.server.stop());

    let too_many = 2 * EVENTS / REFUSALS;
    let violated = "disconnected: it sent";
    let full = ["cut off for one more connection", "an NVMe host was turned away"];
    for (kind, texts, peers, events) in [
        ("NVMe connections that ended", &[violated][..], &strangers[..], EVENTS),
        ("NVMe hosts that were disconnected", &[violated], &hosts, EVENTS),
        (
            "NVMe hosts that were refused",
            &["a host was refused", "too many Connects"],
            &refused,
            EVENTS + too_many,
        ),
        ("devices", &["cannot open the device for an I/O queue"], &[], EVENTS),
        ("NVMe connections that were not admitted", &full, &crowd, EVENTS),
    ] {
        let (logged, dropped) = lines_about(kind, texts, peers);
        assert_eq!(logged + dropped, events, "{kind}: {logged} lines, {dropped} not logged");
        assert!(0 < logged && logged < EVENTS, "{kind}: {logged} lines");
    }
}
