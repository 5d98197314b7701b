//! `kill -9` of the server at any moment, over and over, while a client writes.

use std::path::Path;
use std::process::Stdio;

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};

use crate::client::Client;
use crate::history::{History, PAGE};
use crate::place::Place;
use crate::rounds::{Seed, seeds};
use crate::run::{bounded, finish};
use crate::workload::{End, Workload};
use crate::yard::Yard;

/// Rounds of each test in `make test`.
const FEW: u64 = 8;

const VOLUME_BYTES: u64 = 8 << 20;

fn serve(pool: &Place, more: &str) -> Yard {
    let path = pool.file("pool");
    Yard::serve(&[&format!("volume:///v0?path={path}&size={VOLUME_BYTES}{more}")])
}

/// Does not wait until it is dead: what is in flight goes on meanwhile, and its answers count.
fn kill_now(yard: &Yard) {
    let process = Pid::from_raw(yard.pid() as i32).unwrap();
    kill_process(process, Signal::KILL).unwrap();
}

/// Whether a round ends as it should: then there is a checkpoint, and no longer log to read.
fn settles(seed: &Seed) -> bool {
    seed.0.is_multiple_of(4)
}

fn end(mut yard: Yard) {
    yard.signal("TERM");
    assert!(yard.end().success());
}

/// How the volume is opened in a round: what may differ from one opening to the next.
fn opening(random: &mut Rng) -> (&'static str, bool) {
    let more = ["", "&compress=none", "&sync=always", "&compress=none&sync=always"];
    let more = more[random.usize(..more.len())];
    (more, more.contains("always"))
}

#[test]
fn nothing_durable_is_lost_when_the_server_is_killed() {
    for block in ["4k", "16k", "64k"] {
        let pool = Place::new();
        let mut history = History::new(VOLUME_BYTES / PAGE as u64);
        let mut durable = 0;
        for seed in seeds(FEW).step_by(3) {
            let seed = Seed(seed);
            let mut random = Rng::with_seed(seed.0);
            let (more, always) = opening(&mut random);
            let yard = serve(&pool, &format!("&volblocksize={block}{more}"));
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
                end(serve(&pool, ""));
            }
        }
        let yard = serve(&pool, "");
        let mut client = Client::connect(&yard.socket(), "v0").unwrap();
        history.check(&client.contents().unwrap(), false);
        assert!(durable > 0, "the client was told that something is durable");
    }
}

/// The arguments that fio has both times.
fn fio<'l>(uri: &'l str, seed: &'l str) -> Vec<&'l str> {
    let mut line = vec!["fio", "--name=v", "--ioengine=nbd", uri, seed, "--rw=randwrite"];
    line.extend(["--bs=4k", "--size=64M", "--verify=crc32c"]);
    line
}

/// The line of fio's report that counts requests, behind its `total=`.
fn counted(report: &str) -> &str {
    let line = report.lines().find_map(|line| line.split_once("issued rwts: total="));
    line.unwrap_or_else(|| panic!("no count: {report}")).1.split(' ').next().unwrap()
}

/// A volume is written by fio, which notes what was answered, and after the kill read by fio, which
/// verifies all of that. A client beside it, at another volume of the pool, knows when it is time.
#[test]
fn fio_verifies_what_was_answered_when_the_server_is_killed() {
    let pool = Place::new();
    let path = pool.file("pool");
    let v0 = format!("volume:///v0?path={path}&size=64M&sync=always");
    let v1 = format!("volume:///v1?path={path}&size={VOLUME_BYTES}");
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let (place, yard) = (Place::new(), Yard::serve(&[&v0, &v1]));
        let (uri, first) = (format!("--uri={}", yard.uri("v0")), format!("--randseed={}", seed.0));
        let started = place.file("started");
        let prerun = format!("--exec_prerun=touch {started}");
        let writes = ["--iodepth=16", "--do_verify=0", "--verify_state_save=1", &prerun];
        let line = [fio(&uri, &first), writes.to_vec()].concat();
        let mut command = bounded(&line);
        command.current_dir(place.path()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let client = Client::connect(&yard.socket(), "v1").unwrap();
        let mut workload = Workload::new(client, &mut history, seed.0).depth(1);
        // Who is killed before it has written anything says nothing.
        let has_written = || {
            let stats = yard.command(&["stats", "v0", "--json"]).ok().json();
            assert_eq!(stats[0]["device"], "v0", "{stats}");
            stats[0]["ops"]["write"]["ops"].as_u64() > Some(0)
        };
        while !Path::new(&started).exists() || !has_written() {
            assert!(matches!(workload.run(1), End::Done), "{seed}");
            assert!(child.try_wait().unwrap().is_none(), "{seed}: fio has ended");
        }
        let more = Rng::with_seed(seed.0).u64(1..300);
        assert!(matches!(workload.run(more), End::Done), "{seed}");
        kill_now(&yard);
        assert!(matches!(workload.run(u64::MAX), End::Gone), "{seed}");
        drop(yard);
        let wrote = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();

        let yard = Yard::serve(&[&v0, &v1]);
        let uri = format!("--uri={}", yard.uri("v0"));
        // One by one: then it stops at the first that was not answered.
        let reads = ["--iodepth=1", "--verify_state_load=1", "--verify_only", "--verify_fatal=1"];
        let line = [fio(&uri, &first), reads.to_vec()].concat();
        let read = finish(&line, bounded(&line).current_dir(place.path())).ok();
        let (wrote, read) = (counted(&wrote), counted(&read.out));
        println!("fio wrote {wrote} and verified {read} (reads, writes, trims)");
        let mut client = Client::connect(&yard.socket(), "v1").unwrap();
        history.check(&client.contents().unwrap(), false);
        if settles(&seed) {
            end(yard);
        }
    }
}
