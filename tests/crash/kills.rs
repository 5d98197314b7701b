//! `kill -9` of the server at random moments, repeatedly, while a client writes.

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};

use crate::client::Client;
use crate::fio::Fio;
use crate::history::{History, PAGE};
use crate::place::Place;
use crate::rounds::{Seed, seeds};
use crate::secret::{is_encrypted, key_if_all, key_parameter};
use crate::workload::{End, Workload};
use crate::yard::Yard;

/// The rounds of each test in `make test`.
const FEW: u64 = 8;

const VOLUME_BYTES: u64 = 8 << 20;

fn serve(pool: &Place, more: &str) -> Yard {
    let path = pool.file("pool");
    Yard::serve(&[&format!("volume:///v0?path={path}&size={VOLUME_BYTES}{more}")])
}

/// Kills the server without waiting for its death: requests in flight may still be answered, and
/// these answers count.
fn kill_now(yard: &Yard) {
    let process = Pid::from_raw(yard.pid() as i32).unwrap();
    kill_process(process, Signal::KILL).unwrap();
}

/// Whether a round ends with a settled pool: with a checkpoint, and no further log to replay.
fn settles(seed: &Seed) -> bool {
    seed.0.is_multiple_of(4)
}

fn end(mut yard: Yard) {
    yard.signal("TERM");
    assert!(yard.end().success());
}

/// The parameters of an opening, which may differ from one opening to the next.
fn opening(random: &mut Rng) -> (&'static str, bool) {
    let more = ["", "&compress=none", "&sync=always", "&compress=none&sync=always"];
    let more = more[random.usize(..more.len())];
    (more, more.contains("always"))
}

#[test]
fn nothing_durable_is_lost_when_the_server_is_killed() {
    for (block, by_default) in [("4k", false), ("16k", true), ("64k", false)] {
        let pool = Place::new();
        let key = if is_encrypted(by_default) { key_parameter() } else { String::new() };
        let mut history = History::new(VOLUME_BYTES / PAGE as u64);
        let mut durable = 0;
        for seed in seeds(FEW).step_by(3) {
            let seed = Seed(seed);
            let mut random = Rng::with_seed(seed.0);
            let (more, always) = opening(&mut random);
            let yard = serve(&pool, &format!("&volblocksize={block}{more}{key}"));
            let mut client = Client::connect(&yard.socket(), "v0").unwrap();
            history.check(&client.contents().unwrap(), false);
            let mut workload = Workload::new(client, &mut history, seed.0);
            if always {
                workload = workload.always();
            }
            let answers = random.u64(1..1500);
            assert!(matches!(workload.run(answers), End::Done), "{seed}");
            kill_now(&yard);
            assert!(matches!(workload.run(u64::MAX), End::Gone), "{seed}");
            durable += history.durable_count();
            drop(yard);
            if settles(&seed) {
                end(serve(&pool, &key));
            }
        }
        let yard = serve(&pool, &key);
        let mut client = Client::connect(&yard.socket(), "v0").unwrap();
        history.check(&client.contents().unwrap(), false);
        assert!(durable > 0, "the client was told that something is durable");
    }
}

/// fio writes a volume and records the answers; after the kill another fio verifies all of them. A
/// second client, at another volume of the pool, decides when to kill.
#[test]
fn fio_verifies_what_was_answered_when_the_server_is_killed() {
    let pool = Place::new();
    let path = pool.file("pool");
    let key = key_if_all();
    let v0 = format!("volume:///v0?path={path}&size=64M&sync=always{key}");
    let v1 = format!("volume:///v1?path={path}&size={VOLUME_BYTES}{key}");
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let (fio, yard) = (Fio::new(&seed), Yard::serve(&[&v0, &v1]));
        let mut writing = fio.write(&yard, "v0", &[]);
        let client = Client::connect(&yard.socket(), "v1").unwrap();
        let mut workload = Workload::new(client, &mut history, seed.0).depth(1);
        while !writing.has_written(&yard, "v0") {
            assert!(matches!(workload.run(1), End::Done), "{seed}");
        }
        let more = Rng::with_seed(seed.0).u64(1..300);
        assert!(matches!(workload.run(more), End::Done), "{seed}");
        kill_now(&yard);
        assert!(matches!(workload.run(u64::MAX), End::Gone), "{seed}");
        drop(yard);
        writing.end();

        let yard = Yard::serve(&[&v0, &v1]);
        fio.verify(&yard, "v0");
        let mut client = Client::connect(&yard.socket(), "v1").unwrap();
        history.check(&client.contents().unwrap(), false);
        if settles(&seed) {
            end(yard);
        }
    }
}
