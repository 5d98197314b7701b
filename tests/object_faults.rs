//! Faults of the object store below a pool that a daemon serves: answers are lost or come late, the
//! store is killed, its disk is full, and another program changes objects. Clients get what was
//! written, or an error; the log names the cause; and the daemon continues by itself.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_testing::http_proxy::{HttpProxy, ProxyAction};
use blockyard_testing::s3_server::{S3Program, S3Server};
use blockyard_testing::s3_witness::S3Witness;
use blockyard_testing::seed::Seed;
use blockyard_volume_format::object::manifest::Manifest;
use blockyard_volume_format::object::{ObjectId, ObjectKind, table};

use crate::attach::{FileSystem, Loop};
use crate::object_store::{POOL, command, serve, serve_to, stand_by};
use crate::place::Place;
use crate::run::{Run, nbdsh, ok};
use crate::yard::Yard;

/// The commands of a script of nbdsh that writes and one that reads the same blocks.
const WRITES: &str = "import nbd, random\n\
                      r = random.Random(SEED)\n\
                      for block in r.sample(range(16384), 60):\n\
                      \x20   h.pwrite(r.randbytes(4096), block * 4096, nbd.CMD_FLAG_FUA)";
const READS: &str = "import random\n\
                     r = random.Random(SEED)\n\
                     for block in r.sample(range(16384), 60):\n\
                     \x20   assert h.pread(4096, block * 4096) == r.randbytes(4096), block";

fn with_seed(script: &str, seed: u32) -> String {
    script.replace("SEED", &seed.to_string())
}

/// Runs a script of nbdsh on a thread of its own.
fn begin(yard: &Yard, script: &str) -> JoinHandle<String> {
    let (uri, script) = (yard.uri("v0"), script.to_owned());
    std::thread::spawn(move || nbdsh(&uri, &script))
}

/// Waits until the daemon logs one of some texts, while a script waits for the store.
fn wait_for(yard: &Yard, script: &JoinHandle<String>, texts: &[&str]) {
    loop {
        let complained = yard.complained();
        if texts.iter().any(|text| complained.contains(text)) {
            return;
        }
        assert!(!script.is_finished(), "the script did not wait for the store: {complained}");
        std::thread::yield_now();
    }
}

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    assert!(!yard.end().success());
}

/// A connection that loses and delays requests and answers, and a store that is killed and started
/// again. Clients notice nothing of it, and another machine has all that was written.
fn a_pool_is_served_over_a_store_that_fails(program: S3Program) {
    let folder = Place::new();
    let Some(mut store) = program.start(folder.path()) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let proxy = HttpProxy::start(&store.address());
    let yard = serve_to(&proxy.endpoint(), "&pool_size=2G&size=64M");
    let mut random = Seed::from_env().rng(program as u64);
    let pause = Duration::from_millis(200);
    proxy.set(move |_| match random.u32(..20) {
        0 => ProxyAction::CutBefore,
        1 | 2 => ProxyAction::CutAfter,
        3 => ProxyAction::AnswerBefore(503),
        4 => ProxyAction::AnswerAfter(500),
        5 => ProxyAction::DelayRequest(pause),
        6 => ProxyAction::DelayAnswer(pause),
        _ => ProxyAction::Pass,
    });
    nbdsh(&yard.uri("v0"), &with_seed(WRITES, 1));
    nbdsh(&yard.uri("v0"), &with_seed(READS, 1));
    proxy.set(|_| ProxyAction::Pass);
    let count = yard.complained().matches("; trying again").count();
    assert!(count > 0, "no request has failed");

    store.kill();
    let writer = begin(&yard, &with_seed(WRITES, 2));
    loop {
        // The answer of a proxy without a server.
        let complained = yard.complained();
        if complained.matches("; trying again").count() > count {
            break;
        }
        assert!(!writer.is_finished(), "a write was acknowledged without the store: {complained}");
        std::thread::yield_now();
    }
    store.restart();
    writer.join().unwrap();
    kill(yard);
    let other = serve(&store, "");
    nbdsh(&other.uri("v0"), &with_seed(READS, 2));
}

#[test]
fn a_pool_is_served_over_a_minio_that_fails() {
    a_pool_is_served_over_a_store_that_fails(S3Program::Minio);
}

#[test]
fn a_pool_is_served_over_a_versitygw_that_fails() {
    a_pool_is_served_over_a_store_that_fails(S3Program::Versitygw);
}

/// Fills a file system with a file, which it returns.
fn fill(at: &str) -> String {
    let path = format!("{at}/ballast");
    let mut file = File::create(&path).unwrap();
    for len in [1 << 20, 4096] {
        while file.write_all(&vec![1; len]).and_then(|()| file.sync_data()).is_ok() {}
    }
    path
}

/// The disk of the store is full: a write waits, the log says why, and it is acknowledged when
/// there is space again. Nothing that was acknowledged is lost.
fn a_write_waits_while_the_store_is_full(program: S3Program, answer: &str) {
    let folder = Place::new();
    let (image, at) = (folder.file("image"), folder.file("at"));
    File::create(&image).unwrap().set_len(320 << 20).unwrap();
    let device = Loop::attach(&image);
    ok(&["mke2fs", "-q", "-t", "ext4", "-m", "0", &device.0]);
    let _file_system = FileSystem::mount("ext4", &device.0, &at);
    let Some(store) = program.start(Path::new(&at)) else { return };
    let Some(_witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let yard = serve(&store, "&pool_size=2G&size=64M");
    nbdsh(&yard.uri("v0"), &with_seed(WRITES, 1));
    let ballast = fill(&at);
    let writer = begin(&yard, &with_seed(WRITES, 2));
    wait_for(&yard, &writer, &["; trying again"]);
    let complained = yard.complained();
    assert!(complained.contains(answer), "{complained}");
    fs::remove_file(&ballast).unwrap();
    writer.join().unwrap();
    kill(yard);
    let other = serve(&store, "");
    nbdsh(&other.uri("v0"), &with_seed(READS, 2));
    drop(other);
    drop(store);
}

#[test]
fn a_write_waits_while_minio_is_full() {
    a_write_waits_while_the_store_is_full(S3Program::Minio, "507 XMinioStorageFull");
}

#[test]
fn a_write_waits_while_versitygw_is_full() {
    a_write_waits_while_the_store_is_full(S3Program::Versitygw, "the store answered 5");
}

/// Fills a volume so that the pool has every kind of object: short batches, which a compaction
/// copies into segments, long ones, which it leaves, and batches that are to be replayed.
const OBJECTS: &str = "import nbd, random\n\
                       r = random.Random(3)\n\
                       for at in range(40):\n\
                       \x20   h.pwrite(r.randbytes(4096), at * 65536, nbd.CMD_FLAG_FUA)\n\
                       for at in range(8, 52):\n\
                       \x20   h.pwrite(r.randbytes(1 << 20), at << 20)\n\
                       \x20   if at % 4 == 3: h.flush()";
const LAST_BATCHES: &str = "import nbd, random\n\
                            r = random.Random(4)\n\
                            for at in range(40):\n\
                            \x20   h.pwrite(r.randbytes(4096), at << 17, nbd.CMD_FLAG_FUA)";

/// Objects that the pool needs: its manifest, a part of the table, a segment, a batch to which
/// extents refer, and one that is to be replayed.
fn needed(witness: &mut S3Witness) -> Vec<String> {
    let manifest = Manifest::parse(&witness.get("pool/manifest").unwrap()).unwrap();
    let part = manifest.parts.iter().flatten().next().unwrap().to_string();
    let (.., segments) = table::parse(&witness.get(&format!("pool/{part}")).unwrap()).unwrap();
    let objects: Vec<ObjectId> = segments.iter().flatten().map(|extent| extent.object).collect();
    let is_a = |kind| objects.iter().find(|object| object.kind == kind).unwrap().to_string();
    let replay = manifest.replays.last().unwrap();
    let last = ObjectId::batch(replay.epoch, replay.first + 3).to_string();
    let (segment, batch) = (is_a(ObjectKind::Segment), is_a(ObjectKind::Batch));
    vec!["manifest".to_owned(), part, segment, batch, last]
}

/// What boto3 puts in place of an object; `None`: nothing.
fn tampered(bytes: &[u8], other: &[u8]) -> [(&'static str, Option<Vec<u8>>); 5] {
    let mut flipped = bytes.to_vec();
    flipped[bytes.len() / 2] ^= 1;
    [
        ("a bit is flipped", Some(flipped)),
        ("it is cut in half", Some(bytes[..bytes.len() / 2].to_vec())),
        ("it is empty", Some(Vec::new())),
        ("it is deleted", None),
        ("it is of another pool", Some(other.to_vec())),
    ]
}

/// Checks the pool on a machine without a cache.
fn check(store: &S3Server) -> Run {
    command(store, &["volume", "check", POOL])
}

/// Objects that boto3 has changed: an opening and a check name the object, a daemon returns errors
/// and no wrong data, and all is well when the objects are restored.
fn changed_objects_are_named(program: S3Program) {
    let folder = Place::new();
    let Some(store) = program.start(folder.path()) else { return };
    let Some(mut witness) = S3Witness::start(&store.endpoint(), "vol") else { return };
    let create = |pool: &str| {
        let line = ["volume", "create", pool, "v0", "--size", "64M", "--pool-size", "2G"];
        command(&store, &line).ok();
    };
    create("s3://vol/other");
    let yard = serve(&store, "&pool_size=2G&size=64M");
    nbdsh(&yard.uri("v0"), OBJECTS);
    while witness.list("pool/table/").is_empty() {}
    while Manifest::parse(&witness.get("pool/manifest").unwrap()).unwrap().parts.is_empty() {}
    nbdsh(&yard.uri("v0"), LAST_BATCHES);
    kill(yard);
    check(&store).ok();

    let other = witness.list("other/batch/");
    for name in needed(&mut witness) {
        let key = format!("pool/{name}");
        let bytes = witness.get(&key).unwrap();
        let others = match &name[..] {
            "manifest" => "other/manifest",
            _ => &other[0],
        };
        let others = witness.get(others).unwrap();
        for (what, changed) in tampered(&bytes, &others) {
            match changed {
                Some(changed) => witness.put(&key, &changed),
                None => witness.delete(&key),
            }
            let checked = check(&store).fails();
            witness.put(&key, &bytes);
            let named = match (&name[..], what) {
                ("manifest", "it is deleted") => "it has no manifest",
                // The objects do not fit to it.
                ("manifest", "it is of another pool") => "belongs to another pool",
                (name, _) => name,
            };
            assert!(checked.err.contains(named), "{name}, {what}: {checked}");
        }
    }
    check(&store).ok();
    a_daemon_returns_no_changed_data(&store, &mut witness);
    a_standby_names_a_changed_lease(&store, &mut witness);
}

/// Reads all that [`OBJECTS`] and [`LAST_BATCHES`] have written, 64 KiB at once; prints how many
/// reads have errors. The others return what was written.
const READ_ALL: &str = "import errno, nbd, random\n\
                        blocks = {}\n\
                        r = random.Random(3)\n\
                        for at in range(40): blocks[at << 16] = r.randbytes(4096)\n\
                        for at in range(8, 52): blocks[at << 20] = r.randbytes(1 << 20)\n\
                        r = random.Random(4)\n\
                        for at in range(40): blocks[at << 17] = r.randbytes(4096)\n\
                        errors = 0\n\
                        for at, data in blocks.items():\n\
                        \x20   for start in range(0, len(data), 65536):\n\
                        \x20       part = data[start:start + 65536]\n\
                        \x20       try: assert h.pread(len(part), at + start) == part, at\n\
                        \x20       except nbd.Error as error:\n\
                        \x20           assert error.errnum == errno.EIO, error\n\
                        \x20           errors += 1\n\
                        print(errors)";

/// Objects change while a daemon serves the pool: reads get errors until they are restored.
fn a_daemon_returns_no_changed_data(store: &S3Server, witness: &mut S3Witness) {
    let yard = serve(store, "");
    let mut names = witness.list("pool/segment/");
    // Those that are longer than a batch that a daemon keeps in memory.
    let batches = witness.list("pool/batch/").into_iter();
    names.extend(batches.filter(|name| witness.get(name).unwrap().len() > 1 << 20));
    let objects: Vec<_> = names.iter().map(|name| witness.get(name).unwrap()).collect();
    for (name, bytes) in names.iter().zip(&objects) {
        let mut flipped = bytes.clone();
        // In each chunk that has a checksum.
        flipped.iter_mut().step_by(4096).for_each(|byte| *byte ^= 1);
        witness.put(name, &flipped);
    }
    let errors = |yard: &Yard| -> u32 { nbdsh(&yard.uri("v0"), READ_ALL).trim().parse().unwrap() };
    assert!(errors(&yard) > 40, "{}", yard.complained());
    let complained = yard.complained();
    assert!(complained.contains("is damaged in the object store: "), "{complained}");
    names.iter().zip(&objects).for_each(|(name, bytes)| witness.put(name, bytes));
    assert_eq!(errors(&yard), 0, "{}", yard.complained());
    kill(yard);
}

/// A standby says why it cannot read a lease, and goes on when the lease is restored.
fn a_standby_names_a_changed_lease(store: &S3Server, witness: &mut S3Witness) {
    const LEASE: &str = "&lease=30000";
    kill(serve(store, LEASE));
    let standby = stand_by(store, LEASE);
    let lease = witness.get("pool/lease").unwrap();
    let mut flipped = lease.clone();
    flipped[30] ^= 1;
    witness.put("pool/lease", &flipped);
    let warning = loop {
        let status = standby.command(&["status", "--json"]).json();
        if let Some(warning) = status["warnings"].get(0) {
            break warning.clone();
        }
    };
    assert_eq!(warning["kind"], "lease_unreadable", "{warning}");
    let message = warning["message"].as_str().unwrap();
    assert!(message.contains("`s3://vol/pool/lease` is damaged in the object store"), "{message}");
    witness.put("pool/lease", &lease);
    standby.command(&["promote"]).ok();
    assert_eq!(nbdsh(&standby.uri("v0"), READ_ALL).trim(), "0");
}

#[test]
fn changed_objects_of_minio_are_named() {
    changed_objects_are_named(S3Program::Minio);
}

#[test]
fn changed_objects_of_versitygw_are_named() {
    changed_objects_are_named(S3Program::Versitygw);
}
