//! Many connections on few threads. This test counts the threads and the memory of the process, so
//! it is the only one in its program.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // A test may.

mod initiator;

use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::sync::Arc;

use blockyard_nvme::auth_message::{AuthHash, DhGroup};
use blockyard_nvme::secret::HostSecrets;
use blockyard_nvme::{AuthRules, ConnectionThreads, HostAccess, TargetOptions, TargetServer};
use blockyard_sync::atomics::{AtomicBool, AtomicU64, Ordering};
use initiator::{
    Initiator, PLAIN, Target, command, connect_parts, fabrics, pattern, pointed, target_for, with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
/// The connections of hosts that make progress, and one in four of them a controller.
const CONNECTIONS: usize = 600;
const THREADS: usize = 2;
/// Threads of the targets besides those for connections: two that accept, and at most four for
/// Diffie-Hellman.
const OTHER_THREADS: usize = 6;

/// The threads of the target, by their names.
fn target_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|it| std::fs::read_to_string(it.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("nvme-")).count()
}

/// Resident memory of the process in bytes.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// A target with few threads; a second one, with secrets, has the same threads.
fn targets() -> (Target, Target) {
    let threads = ConnectionThreads::new(NonZeroUsize::new(THREADS).unwrap());
    let secret = "DHHC-1:01:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    let secrets = HostSecrets::parse(&format!("{} {secret}\n", initiator::HOST)).unwrap();
    let (hashes, groups) = (vec![AuthHash::Sha512], vec![DhGroup::Ffdhe8192]);
    let authentication = Some(Arc::new(AuthRules { secrets, hashes, groups }));
    let proving = HostAccess { authentication, ..HostAccess::default() };
    let on_threads = |access: HostAccess| {
        let Target { subsystems, server } = target_for(access, TargetOptions::default());
        drop(server);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let threads = Arc::clone(&threads);
        let (served, options) = (Arc::clone(&subsystems), TargetOptions::default());
        let server = TargetServer::start_on(threads, served, vec![listener], options).unwrap();
        Target { subsystems, server }
    };
    (on_threads(HostAccess::default()), on_threads(proving))
}

/// Admin queues with three I/O queues each.
fn connect(target: &Target, count: usize) -> (Vec<Initiator>, Vec<Initiator>) {
    let (mut admins, mut queues) = (Vec::new(), Vec::new());
    for _ in 0..count / 4 {
        let (admin, controller) = target.admin(PLAIN, 0);
        admins.push(admin);
        for queue in 1..=3 {
            let mut io = target.idle(0);
            assert_eq!(io.connect(PLAIN, queue, controller, 31, 0).status, 0);
            queues.push(io);
        }
    }
    (admins, queues)
}

/// Begins authentications in the largest group, one after another, until told to stop; each takes
/// the target two powers of 8192 bits, of which the host awaits the first.
fn authenticate(target: &Target, is_over: &AtomicBool) -> u64 {
    let mut challenges = 0;
    while !is_over.load(Ordering::Relaxed) {
        let mut host = target.idle(0);
        let (sqe, data) = connect_parts(PLAIN, 0, 0xffff, 31, 0);
        assert_eq!(host.execute(sqe, &data).status, 0);
        let mut negotiate = vec![0, 0, 0, 0, 5, 0, 0, 1, 1, 0, 1, 1, 3];
        negotiate.resize(42, 0);
        negotiate.push(5);
        negotiate.resize(72, 0);
        let mut sqe = fabrics(5);
        sqe[41..44].copy_from_slice(&[1, 1, 0xe9]);
        assert_eq!(host.execute(with(sqe, 11, 72), &negotiate).status, 0);
        let mut sqe = with(fabrics(6), 11, 2048);
        sqe[41..44].copy_from_slice(&[1, 1, 0xe9]);
        let challenge = host.read(sqe, 2048).data;
        assert_eq!(challenge[..2], [1, 1], "a challenge");
        challenges += 1;
    }
    challenges
}

/// Ends the other hosts, also if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn hosts_make_progress_beside_one_that_stalls_one_that_floods_and_one_that_authenticates() {
    let files = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }).unwrap();
    let (target, proving) = targets();
    let before = resident();
    let (_admins, mut queues) = connect(&target, CONNECTIONS);
    assert_eq!(target.server.connections().len(), CONNECTIONS);
    let resting = (resident() - before) / CONNECTIONS as u64;
    // What docs/nvme-internals.md says, with the initiator's part.
    assert!(resting < 200 << 10, "{resting} bytes for each connection");
    // One host that reads no answer.
    let (_admin, controller) = target.admin(PLAIN, 0);
    let mut stalled = target.io(PLAIN, controller, 0, 0);
    for _ in 0..120 {
        stalled.capsule(pointed(command(READ, 0, 2048), 0x5a, 1 << 20), &[]);
    }
    let (is_over, flooded) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let over = Over(&is_over);
        let challenges = scope.spawn(|| authenticate(&proving, &is_over));
        // One host that always has as many commands in flight as it may.
        scope.spawn(|| {
            let (_admin, controller) = target.admin(PLAIN, 0);
            let mut io = target.io(PLAIN, controller, 0, 0);
            let read = pointed(command(READ, 0, 8), 0x5a, 4096);
            for _ in 0..100 {
                io.capsule(read, &[]);
            }
            while !is_over.load(Ordering::Relaxed) {
                assert_eq!(io.done().status, 0);
                io.next_cid &= 0x3fff;
                io.capsule(read, &[]);
                flooded.fetch_add(1, Ordering::Relaxed);
            }
            (0..100).for_each(|_| assert_eq!(io.done().status, 0));
        });
        // The others, each with blocks of its own, on a device of 32768.
        for round in 0..8_u8 {
            for (number, io) in queues.iter_mut().enumerate() {
                let (block, data) = (8 + number as u64 * 32, pattern(16384, round ^ number as u8));
                let done = match number % 2 {
                    0 => io.write(command(WRITE, block, 32), &data),
                    _ => io.execute(command(WRITE, block, 8), &data[..4096]),
                };
                assert_eq!(done.status, 0);
            }
            for (number, io) in queues.iter_mut().enumerate() {
                let (block, data) = (8 + number as u64 * 32, pattern(16384, round ^ number as u8));
                let read = io.read(command(READ, block, 8), 4096);
                assert!(read.status == 0 && read.data == data[..4096], "round {round}, {number}");
            }
        }
        // As long as it takes the other two to have done something meanwhile.
        while flooded.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        assert!(target_threads() <= THREADS + OTHER_THREADS, "{}", target_threads());
        drop(over);
        assert!(challenges.join().unwrap() > 0);
    });
    let links = target.server.connections();
    let peer = format!("tcp:{}", stalled.stream.local_addr().unwrap());
    let link = links.iter().find(|link| link.peer == peer);
    let link = link.expect("the host that reads nothing is still there");
    assert!(link.queue == Some(1) && link.commands > 0, "{link:?}");
    // A server that stops leaves the threads to the other one.
    target.server.stop();
    queues.iter_mut().for_each(Initiator::ends);
    assert_eq!(proving.idle(0).connect(PLAIN, 0, 0xffff, 31, 0).status, 0);
}
