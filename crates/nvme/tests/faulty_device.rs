//! Devices that block or panic, and hosts that are cut off: what the other hosts, a stop and the
//! log have of them. All log lines of this program go to a subscriber that takes the locks of the
//! servers, so a line that is logged under one of them never returns.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // A test may.

mod initiator;

use std::fmt::Debug;
use std::io::Write;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use blockyard_nvme::{ConnectionThreads, SubsystemError, TargetOptions, TargetServer};
use initiator::faulty::{Fault, FaultyDisk, Gate};
use initiator::{PLAIN, Target, command, pointed, target_with};
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
    static SUBSCRIBES: Once = Once::new();
    SUBSCRIBES.call_once(|| tracing::subscriber::set_global_default(Probe).unwrap());
    let threads = ConnectionThreads::new(NonZeroUsize::MIN);
    let Target { subsystems, server } = target_with(options.clone());
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
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "it ends before the others");
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
