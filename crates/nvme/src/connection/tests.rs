//! How much a turn does, by a clock that the test sets.
#![allow(clippy::unwrap_used)] // A test may.

use std::cell::Cell;
use std::sync::LazyLock;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::{Disk, Region};
use blockyard_null::{Null, NullConfig};
use blockyard_os::epoll::Epoll;
use blockyard_os::socket::{SendPiece, Wake};

use super::*;
use crate::access::HostAccess;
use crate::authentication::tests::proving_queue;
use crate::fabrics::{HostIdentity, NEW_CONTROLLER, PropertyRequest, property};
use crate::subsystems::Subsystems;

const ALL: &str = "nqn.2026-11.example:all";
const ZONED: &str = "nqn.2026-11.io.blockyard:zoned";

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

thread_local! {
    static READINGS: Cell<u32> = const { Cell::new(0) };
}

fn standing() -> Instant {
    *START
}

/// 0.4 ms pass between two readings.
fn running() -> Instant {
    let readings = READINGS.get();
    READINGS.set(readings + 1);
    *START + Duration::from_micros(400) * readings
}

/// A host that sends pieces, of which each takes one receive, and reads all answers.
#[derive(Default)]
struct Script {
    pieces: VecDeque<Vec<u8>>,
}

impl HostStream for Script {
    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(piece) = self.pieces.pop_front() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        into[..piece.len()].copy_from_slice(&piece);
        Ok(piece.len())
    }

    fn receive_at(&mut self, _: &Region, _: u64, _: usize) -> io::Result<usize> {
        panic!("no command has data from the host")
    }

    fn send(&mut self, _: &Region, _: &[u8], pieces: &[SendPiece]) -> io::Result<usize> {
        Ok(pieces.iter().map(|piece| piece.len).sum())
    }

    fn unread_bytes(&self) -> io::Result<usize> {
        Ok(self.pieces.iter().map(Vec::len).sum())
    }

    fn has_ended(&self) -> bool {
        false
    }

    fn shutdown(&mut self, _: Shutdown) {}
}

fn ic_request() -> Vec<u8> {
    let mut request = vec![0; 128];
    (request[2], request[4]) = (128, 128);
    request
}

/// A capsule of a command with data of this length to the host, if it has some.
fn capsule(opcode: u8, cid: u16, dwords: &[(usize, u32)], len: u32) -> Vec<u8> {
    let mut pdu = vec![0; 72];
    (pdu[0], pdu[2], pdu[4]) = (4, 72, 72);
    let sqe = &mut pdu[8..];
    (sqe[0], sqe[1]) = (opcode, 0x40);
    sqe[2..4].copy_from_slice(&cid.to_le_bytes());
    sqe[4] = 1;
    for (at, value) in dwords {
        sqe[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
    }
    if len > 0 {
        sqe[32..36].copy_from_slice(&len.to_le_bytes());
        sqe[39] = 0x5a;
    }
    pdu
}

fn shared() -> Arc<SessionShared> {
    let subsystems = Subsystems::new("test", HostAccess::default(), Some(ALL.to_owned()));
    let zones = NullConfig { zoned: true, zone_size: 1 << 20, ..NullConfig::default() };
    let config = NullConfig { size: 64 << 20, bs: 4096, discard: false, ..zones };
    let null = Null::open(config).unwrap();
    let config = ChannelConfig { depth: 16 };
    let disk: Arc<dyn Disk> = Arc::new(Composed::new("zoned".to_owned(), "null", null, config));
    subsystems.add("zoned", disk).unwrap();
    Arc::new(SessionShared { subsystems, discovery_only: false, dh: Arc::default() })
}

fn connection(shared: &Arc<SessionShared>, pieces: Vec<Vec<u8>>) -> HostConnection<Script> {
    let link = Arc::new(HostLink::new(1, String::new(), Arc::new(Wake::new().unwrap())));
    let watch = DeviceWatch { set: Arc::new(Epoll::new().unwrap()), token: 0 };
    let stream = (Script { pieces: pieces.into() }, "192.0.2.1:4420".parse().unwrap());
    let made = HostConnection::new(Arc::clone(shared), link, stream, watch, *START);
    HostConnection { clock: standing, ..made.unwrap() }
}

fn request(subsystem: &str, queue: u16, controller: u16) -> ConnectRequest {
    ConnectRequest {
        queue,
        entries: 128,
        no_flow_control: false,
        keep_alive_ms: 0,
        controller,
        subsystem: subsystem.to_owned(),
        host: HostIdentity { id: [1; 16], nqn: "nqn.2026-11.example:host".to_owned() },
    }
}

/// The admin queue of an enabled controller.
fn admin(shared: &SessionShared, subsystem: &str, link: &Arc<HostLink>) -> AdminQueue {
    let request = request(subsystem, 0, NEW_CONTROLLER);
    let address = "192.0.2.1:4420".parse().unwrap();
    let admin = shared.connect_admin(link, address, &request, *START).unwrap();
    let set = PropertyRequest { offset: property::CC, is_long: false, value: 0x46_0061 };
    admin.controller.set_property(&set).unwrap();
    admin
}

#[test]
fn a_turn_has_no_further_round_after_a_millisecond() {
    let pieces = || {
        let commands = (0..20).map(|cid| capsule(0, cid, &[], 0));
        [ic_request()].into_iter().chain(commands).collect::<Vec<_>>()
    };
    for (clock, rounds) in [(running as fn() -> Instant, 3), (standing, ROUNDS_MAX as usize)] {
        READINGS.set(0);
        let mut connection = connection(&shared(), pieces());
        connection.clock = clock;
        assert_eq!(connection.turn(*START), AfterTurn::Again);
        assert_eq!(21 - connection.transport.pieces.len(), rounds);
    }
}

/// Each report looks at all zones of the device. All that had come in one receive did it in one
/// round.
#[test]
fn a_round_makes_one_report() {
    const REPORTS: u64 = 100;
    let shared = shared();
    let report = |cid: u64| capsule(0x7a, cid as u16, &[(12, 15)], 64);
    let mut connection = connection(&shared, vec![(0..REPORTS).flat_map(report).collect()]);
    let id = admin(&shared, ZONED, &connection.link).controller.id;
    let (link, region, watch) = (&connection.link, connection.pool.region(), &connection.watch);
    let queue = shared.connect_io(link, region, watch, &request(ZONED, 1, id)).unwrap();
    connection.role = QueueRole::Io(Box::new(queue));
    connection.entries = 128;
    let made = |connection: &HostConnection<Script>| connection.link.stats.read_bytes.get() / 64;
    assert_eq!(connection.turn(*START), AfterTurn::Again);
    assert!((1..=u64::from(ROUNDS_MAX)).contains(&made(&connection)), "{}", made(&connection));
    while connection.turn(*START) == AfterTurn::Again {}
    assert_eq!(made(&connection), REPORTS);
    assert_eq!(connection.link.stats.errors.get(), 0);
    connection.leave();
}

/// Executes 50 equal commands that arrive at once: each turn executes as many as it has rounds.
/// Returns the number of errors.
fn execute_one_a_round(shared: &Arc<SessionShared>, role: QueueRole, pdu: &[u8]) -> u64 {
    const COMMANDS: u64 = 50;
    let mut connection = connection(shared, vec![pdu.repeat(COMMANDS as usize)]);
    (connection.role, connection.entries) = (role, 128);
    let made = |connection: &HostConnection<Script>| connection.link.stats.commands.get();
    assert_eq!(connection.turn(*START), AfterTurn::Again);
    assert!((1..=u64::from(ROUNDS_MAX)).contains(&made(&connection)), "{}", made(&connection));
    while connection.turn(*START) == AfterTurn::Again {}
    assert_eq!(made(&connection), COMMANDS);
    connection.leave();
    connection.link.stats.errors.get()
}

fn new_link() -> Arc<HostLink> {
    Arc::new(HostLink::new(1, String::new(), Arc::new(Wake::new().unwrap())))
}

/// The feature and the status looked at all devices, or controllers, for each command of a round.
#[test]
fn a_round_looks_at_all_devices_once() {
    let shared = shared();
    let identify = capsule(0x06, 1, &[(1, 0), (10, 2)], 4096);
    let write_cache = capsule(0x0a, 1, &[(10, 6)], 0);
    let status = capsule(0x7f, 1, &[(1, 4), (11, 0x1c)], 0);
    for pdu in [identify, write_cache, status] {
        let role = QueueRole::Admin(admin(&shared, ALL, &new_link()));
        assert_eq!(execute_one_a_round(&shared, role, &pdu), 0);
    }
}

#[test]
fn a_round_looks_one_namespace_up() {
    let shared = shared();
    let (link, region) = (new_link(), Arc::clone(DataPool::new().unwrap().region()));
    let watch = DeviceWatch { set: Arc::new(Epoll::new().unwrap()), token: 0 };
    let id = admin(&shared, ALL, &link).controller.id;
    let queue = shared.connect_io(&link, &region, &watch, &request(ALL, 1, id)).unwrap();
    // No device has the number.
    let read = capsule(0x02, 1, &[(1, 2)], 4096);
    assert_eq!(execute_one_a_round(&shared, QueueRole::Io(Box::new(queue)), &read), 50);
}

const NAMESPACES: u32 = 30;

/// A queue of the subsystem of all devices, with a read for each of [`NAMESPACES`] devices.
fn reads_of_all() -> HostConnection<Script> {
    let shared = shared();
    for device in 1..NAMESPACES {
        let config = NullConfig { size: 1 << 20, bs: 4096, ..NullConfig::default() };
        let null = Null::open(config).unwrap();
        let (name, config) = (format!("null{device}"), ChannelConfig { depth: 16 });
        let disk: Arc<dyn Disk> = Arc::new(Composed::new(name.clone(), "null", null, config));
        shared.subsystems.add(&name, disk).unwrap();
    }
    let read = |nsid: u32| capsule(0x02, nsid as u16, &[(1, nsid)], 4096);
    let mut connection = connection(&shared, vec![(1..=NAMESPACES).flat_map(read).collect()]);
    let admin = admin(&shared, ALL, &connection.link);
    let (link, region, watch) = (&connection.link, connection.pool.region(), &connection.watch);
    let request = request(ALL, 1, admin.controller.id);
    let queue = shared.connect_io(link, region, watch, &request).unwrap();
    (connection.role, connection.entries) = (QueueRole::Io(Box::new(queue)), 128);
    connection
}

fn channels(connection: &HostConnection<Script>) -> usize {
    let QueueRole::Io(queue) = &connection.role else { panic!("no I/O queue") };
    queue.namespaces_open()
}

/// Gives turns until the connection waits; each opens as many channels as it has rounds.
fn open_one_a_round(connection: &mut HostConnection<Script>) {
    let mut before = channels(connection);
    loop {
        let turn = connection.turn(*START);
        let now = channels(connection);
        assert!(now - before <= ROUNDS_MAX as usize, "{before} channels, then {now}");
        before = now;
        if turn != AfterTurn::Again {
            return;
        }
    }
}

/// A host that used more namespaces than a queue may have open had all channels of a round opened
/// and closed in it.
#[test]
fn a_round_opens_one_channel() {
    let mut connection = reads_of_all();
    open_one_a_round(&mut connection);
    assert_eq!(channels(&connection), NAMESPACES as usize);
    assert_eq!(connection.link.stats.read_bytes.get(), u64::from(NAMESPACES) * 4096);
    assert_eq!(connection.link.stats.errors.get(), 0);
    connection.leave();
}

/// Memory that came back for commands whose namespaces were closed meanwhile opened all of their
/// channels in one round.
#[test]
fn a_round_opens_one_channel_for_commands_that_waited_for_memory() {
    let mut connection = reads_of_all();
    let spans = [(); 2].map(|()| connection.pool.take(crate::namespace::DATA_BYTES_MAX).unwrap());
    open_one_a_round(&mut connection);
    assert_eq!(connection.waiting.len(), NAMESPACES as usize);
    let QueueRole::Io(queue) = &mut connection.role else { panic!("no I/O queue") };
    while queue.end(|_| false) {}
    assert_eq!(channels(&connection), 0);
    spans.into_iter().for_each(|span| connection.pool.give(span));
    open_one_a_round(&mut connection);
    assert_eq!(connection.link.stats.read_bytes.get(), u64::from(NAMESPACES) * 4096);
    assert_eq!(connection.link.stats.errors.get(), 0);
    connection.leave();
}

/// A thread that a device had held found hosts silent whose bytes it had not received.
#[test]
fn a_host_whose_bytes_wait_for_a_late_turn_is_not_silent() {
    let shared = shared();
    let mut connection = connection(&shared, Vec::new());
    let admin = admin(&shared, ZONED, &connection.link);
    admin.controller.set_keep_alive_ms(1000);
    connection.role = QueueRole::Admin(admin);
    connection.entries = 128;
    assert!(matches!(connection.turn(*START), AfterTurn::Waits(_)));
    connection.transport.pieces.push_back(capsule(0x18, 1, &[], 0));
    let late = *START + Duration::from_secs(10);
    assert!(matches!(connection.turn(late), AfterTurn::Waits(_)));
    assert_eq!((connection.phase, connection.link.stats.errors.get()), (Phase::Serves, 0));
    let has_ended = || connection.turn(late + Duration::from_secs(10)) == AfterTurn::Ended;
    assert!(std::iter::repeat_with(has_ended).take(100).any(|it| it), "it is silent now");
    assert!(connection.failure.is_some());
}

/// A host that computed for longer than its keep-alive time-out was disconnected when it had
/// authenticated, because nothing that it had sent before counted.
#[test]
fn a_host_that_has_just_authenticated_is_not_silent() {
    let shared = shared();
    let mut connection = connection(&shared, Vec::new());
    let admin = admin(&shared, ZONED, &connection.link);
    admin.controller.set_keep_alive_ms(1000);
    connection.role = QueueRole::Admin(admin);
    (connection.entries, connection.auth) = (128, Some(proving_queue()));
    assert!(matches!(connection.turn(*START), AfterTurn::Waits(_)));
    let receive = capsule(0x7f, 1, &[(1, 6), (10, 0xe901_0100), (11, 4096)], 4096);
    connection.transport.pieces.push_back(receive);
    let late = *START + Duration::from_secs(10);
    assert!(matches!(connection.turn(late), AfterTurn::Waits(_)));
    assert!(connection.is_proved() && connection.failure.is_none());
    assert_eq!((connection.phase, connection.link.stats.errors.get()), (Phase::Serves, 0));
    let has_ended = || connection.turn(late + Duration::from_secs(10)) == AfterTurn::Ended;
    assert!(std::iter::repeat_with(has_ended).take(100).any(|it| it), "it is silent now");
}

/// A host that repeated its Connect without end kept its connection.
#[test]
fn a_connection_ends_after_many_connects_that_are_refused() {
    let mut connect = capsule(0x7f, 1, &[(1, 1)], 0);
    connect.resize(72 + 1024, 0);
    (connect[3], connect[4], connect[5]) = (72, 72, 4);
    connect[8 + 32..8 + 36].copy_from_slice(&1024_u32.to_le_bytes());
    connect[8 + 39] = 1;
    let pieces = [ic_request()].into_iter().chain((0..40).map(|_| connect.clone()));
    let mut connection = connection(&shared(), pieces.collect());
    let has_ended = || connection.turn(*START) == AfterTurn::Ended;
    assert!(std::iter::repeat_with(has_ended).take(100).any(|it| it), "the connection ends");
    let stats = &connection.link.stats;
    let most = u64::from(CONNECT_REFUSALS_MAX);
    assert_eq!((stats.commands.get(), stats.errors.get()), (most, most));
}
