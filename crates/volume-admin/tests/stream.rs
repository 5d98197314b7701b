//! `send` and `receive`: full and incremental streams, received completely or not at all, and never
//! with damage.
#![allow(clippy::unwrap_used)] // Test code.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, Device, Flags, Op, Sector};
use blockyard_testing::channel;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, SyncMode, Volume, VolumeConfig};
use blockyard_volume_admin::image::{Image, export};
use blockyard_volume_admin::receive::ReceiveTarget;
use blockyard_volume_admin::scrub::scrub;
use blockyard_volume_admin::{receive, send};
use blockyard_volume_format::stream::Head;

const SIZE: u64 = 16 << 20;

fn place(name: &str) -> TempDir {
    TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

fn pool(place: &TempDir, name: &str) -> Arc<Running> {
    Running::open(&place.path().join(name), Options::default()).unwrap()
}

/// Opens a volume as a device, with a channel to it.
fn handle(running: &Running, name: &str) -> (Arc<Volume>, Io) {
    let config = VolumeConfig {
        path: running.path().to_owned(),
        name: name.to_owned(),
        size: 0,
        volblocksize: 0,
        compress: Compression::Lz4,
        sync: SyncMode::Standard,
        ..VolumeConfig::new("", "")
    };
    let volume = Volume::open(config).unwrap();
    let io = channel::handle(&volume);
    (volume, io)
}

fn contents(running: &Running, name: &str) -> Vec<u8> {
    let (volume, mut io) = handle(running, name);
    let mut all = vec![0; volume.geometry().len_bytes() as usize];
    for (part, at) in all.chunks_mut(1 << 20).zip((0..).step_by(2048)) {
        io.read(Sector(at), part).unwrap();
    }
    all
}

/// Changes random parts of a volume, and of its model.
fn change(running: &Running, name: &str, random: &mut fastrand::Rng, model: &mut [u8]) {
    let (_volume, mut io) = handle(running, name);
    for _ in 0..20 {
        let len = 4096 * random.usize(1..=64);
        let at = random.usize(..(model.len() - len) / 4096) * 4096;
        if random.u8(..) < 60 {
            let zeros = Bio::new(Op::WriteZeroes, Sector(at as u64 / 512), len as u64 / 512);
            io.run(zeros).unwrap();
            model[at..at + len].fill(0);
            continue;
        }
        random.fill(&mut model[at..at + len]);
        io.write(Sector(at as u64 / 512), &model[at..at + len], Flags::NONE).unwrap();
    }
}

fn sent(running: &Running, snapshot: &str, base: Option<&str>) -> Vec<u8> {
    let (mut stream, mut told) = (Vec::new(), 0);
    let sent = send::send(running, snapshot, base, &mut stream, &mut |bytes| told = bytes).unwrap();
    assert_eq!(sent.bytes, stream.len() as u64);
    assert!(told <= sent.bytes);
    stream
}

/// A receive that leaves nothing if it is interrupted.
fn to(name: &str) -> ReceiveTarget<'_> {
    ReceiveTarget { name: Some(name), is_resumable: false }
}

fn receive(running: &Running, name: &str, mut stream: &[u8]) -> Result<String, String> {
    let received = receive::receive(running, &to(name), &mut stream, &mut |_| {});
    received.map(|it| it.snapshots.join(",")).map_err(|error| error.to_string())
}

fn names(running: &Running) -> Vec<String> {
    running.pool().list().into_iter().map(|it| it.name).collect()
}

#[test]
fn a_volume_follows_another_by_what_has_changed() {
    let place = place("stream-follows");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    here.create("v0", SIZE, 8192).unwrap();
    let mut random = fastrand::Rng::with_seed(11);
    let mut model = vec![0; SIZE as usize];
    let mut last: Option<String> = None;
    let mut whole = 0;
    for round in 0..5 {
        change(&here, "v0", &mut random, &mut model);
        let snapshot = format!("v0@{round}");
        here.snapshot(&snapshot).unwrap();
        let stream = sent(&here, &snapshot, last.as_deref());
        if round == 4 {
            whole = sent(&here, &snapshot, None).len();
        }
        assert_eq!(receive(&there, "copy", &stream), Ok(format!("copy@{round}")));
        assert!(contents(&there, "copy") == model, "round {round}");
        last = Some(snapshot);
    }
    // A change of one block gives a stream of one block, whatever else the volume contains.
    let (_volume, mut io) = handle(&here, "v0");
    io.write(Sector(0), &[1; 8192], Flags::NONE).unwrap();
    here.snapshot("v0@last").unwrap();
    let stream = sent(&here, "v0@last", Some("v0@4"));
    assert!(stream.len() < 12_000 && whole > 4 << 20, "{} of {whole}", stream.len());
    drop(io);
    // Each received snapshot has its contents, also after a reopen.
    there.clone_of("copy@4", "old").unwrap();
    drop(there);
    let there = pool(&place, "there");
    assert!(contents(&there, "old") == model);
    let wanted = ["copy", "copy@0", "copy@1", "copy@2", "copy@3", "copy@4", "old"];
    assert_eq!(names(&there), wanted);
    // A third pool receives from the second, and then an increment from the first.
    let third = pool(&place, "third");
    receive(&third, "v", &sent(&there, "copy@4", None)).unwrap();
    receive(&third, "v", &stream).unwrap();
    model[..8192].fill(1);
    assert!(contents(&third, "v") == model);
}

#[test]
fn a_stream_that_does_not_fit_changes_nothing() {
    let place = place("stream-fits");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    here.create("v0", SIZE, 0).unwrap();
    let mut random = fastrand::Rng::with_seed(12);
    let mut model = vec![0; SIZE as usize];
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@a").unwrap();
    let before = model.clone();
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@b").unwrap();
    here.resize("v0", SIZE * 2, false).unwrap();
    here.snapshot("v0@c").unwrap();
    let (whole, more) = (sent(&here, "v0@a", None), sent(&here, "v0@b", Some("v0@a")));
    let said = |result: Result<String, String>, wanted: &str| {
        let error = result.unwrap_err();
        assert!(error.contains(wanted), "{error}");
    };
    said(receive(&there, "v0", &more), "this pool has no volume `v0` with its base `v0@a`");
    receive(&there, "v0", &whole).unwrap();
    said(receive(&there, "v0", &whole), "`v0@a` is here already, with all blocks");
    said(receive(&there, "v0@again", &whole), "`v0` exists already");
    // Damage or an end anywhere in the stream: nothing changes.
    for at in [0, 40, 300, 511, 520, 560, more.len() / 2, more.len() - 20] {
        let mut damaged = more.clone();
        damaged[at] ^= 0x20;
        let is_magic = at == 0;
        let what = if is_magic { "it is not a stream of" } else { "invalid stream at byte " };
        said(receive(&there, "v0", &damaged), what);
        let cut = format!("the stream ends at byte {at}, before its end record");
        said(receive(&there, "v0", &more[..at]), &cut);
    }
    let mut swapped = more[..512].to_vec();
    swapped.extend(&whole[512..]);
    said(receive(&there, "v0", &swapped), "invalid stream at byte 512: `stream` is damaged");
    said(receive(&there, "v0", b"hi"), "it is not a stream of `blockyard volume send`");
    assert_eq!(names(&there), ["v0", "v0@a"]);
    assert!(contents(&there, "v0") == before);
    let last = sent(&here, "v0@c", Some("v0@b"));
    said(receive(&there, "v0", &last), "`v0@b` among the snapshots of `v0`");
    // Not while the volume is in use, nor over data that were written here since.
    let (volume, mut io) = handle(&there, "v0");
    said(receive(&there, "v0", &more), "in use; close it first");
    io.write(Sector(0), &[9; 4096], Flags::NONE).unwrap();
    drop((volume, io));
    said(receive(&there, "v0", &more), "no longer as it was in `v0@a`");
    there.rollback("v0@a").unwrap();
    receive(&there, "v0", &more).unwrap();
    assert!(contents(&there, "v0") == model);
    receive(&there, "v0", &last).unwrap();
    model.resize(2 * SIZE as usize, 0);
    assert!(contents(&there, "v0") == model);
    let refused = |snapshot: &str, base: Option<&str>, wanted: &str| {
        let error = send::send(&here, snapshot, base, &mut Vec::new(), &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    };
    refused("v0", None, "expected VOLUME@SNAPSHOT");
    refused("v0@a", Some("v0@b"), "expected an older snapshot of the volume of `v0@a`");
    refused("v0@x", None, "there is no snapshot `v0@x` in this pool");
}

/// A stream that breaks off, and first runs a check.
struct Interrupted<'a> {
    stream: &'a [u8],
    look: Option<Box<dyn FnOnce() + 'a>>,
}

impl Read for Interrupted<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.stream.is_empty() {
            self.look.take().into_iter().for_each(|look| look());
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        self.stream.read(into)
    }
}

#[test]
fn a_partly_received_stream_leaves_no_volume() {
    let place = place("stream-part");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    here.create("v0", SIZE, 0).unwrap();
    let mut model = vec![0; SIZE as usize];
    change(&here, "v0", &mut fastrand::Rng::with_seed(13), &mut model);
    here.snapshot("v0@a").unwrap();
    let stream = sent(&here, "v0@a", None);
    let look = || {
        assert_eq!(names(&there), [""; 0], "`list` does not show the volume");
        let error = receive(&there, "v0", &stream).unwrap_err();
        assert_eq!(error, "`v0` is being received already");
    };
    let mut cut = Interrupted { stream: &stream[..stream.len() / 2], look: Some(Box::new(look)) };
    let error = receive::receive(&there, &to("v0"), &mut cut, &mut |_| {}).unwrap_err().to_string();
    assert!(error.starts_with("stream: "), "{error}");
    assert!(there.pool().find("%v0").is_err(), "nothing is left of it");
    receive(&there, "v0", &stream).unwrap();
    assert!(contents(&there, "v0") == model);
}

/// Runs a third-party program, which must succeed.
fn program(line: &[&str]) -> String {
    let run = std::process::Command::new(line[0]).args(&line[1..]).output().unwrap();
    assert!(run.status.success(), "{line:?}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

#[test]
fn qemu_finds_the_same_in_both_images() {
    let place = place("images");
    let here = pool(&place, "here");
    // Longer than one level-2 table covers, and not a multiple of a cluster.
    here.create("v0", (700 << 20) + 4096, 4096).unwrap();
    let mut model = vec![0; SIZE as usize];
    change(&here, "v0", &mut fastrand::Rng::with_seed(14), &mut model);
    let (volume, mut io) = handle(&here, "v0");
    io.write(Sector(699 << 11), &[3; 4096], Flags::NONE).unwrap();
    io.write(Sector(700 << 11), &[4; 4096], Flags::NONE).unwrap();
    // Zeros that were written.
    io.write(Sector(600 << 11), &[0; 1 << 20], Flags::NONE).unwrap();
    drop((volume, io));
    here.snapshot("v0@a").unwrap();
    let stream = sent(&here, "v0@a", None);
    let file = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let (raw, qcow2, piped) = (file("raw"), file("qcow2"), file("piped"));
    let make = |path: &str| {
        let mut options = std::fs::File::options();
        options.read(true).write(true).create(true).truncate(true).open(path).unwrap()
    };
    let mut told = (0, 0);
    let exported =
        export(&mut &stream[..], Image::Raw(&make(&raw)), &mut |at, of| told = (at, of)).unwrap();
    assert_eq!(exported.size_bytes, (700 << 20) + 4096);
    assert_eq!(told, (exported.size_bytes, exported.size_bytes));
    export(&mut &stream[..], Image::Qcow2(&make(&qcow2)), &mut |_, _| {}).unwrap();
    export(&mut &stream[..], Image::RawPipe(&mut make(&piped)), &mut |_, _| {}).unwrap();
    program(&["qemu-img", "check", "-f", "qcow2", &qcow2]);
    program(&["qemu-img", "compare", "-f", "raw", "-F", "qcow2", &raw, &qcow2]);
    program(&["cmp", &raw, &piped]);
    let mut begin = vec![0; SIZE as usize];
    std::fs::File::open(&raw).unwrap().read_exact(&mut begin).unwrap();
    assert!(begin == model);
    for path in [&raw, &qcow2] {
        let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap());
        assert!(blocks * 512 < 24 << 20, "{path} is sparse: {blocks}");
    }
    // A truncated stream leaves no valid image.
    let mut cut = &stream[..stream.len() - 1];
    let error = export(&mut cut, Image::Qcow2(&make(&qcow2)), &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("the stream ends at byte"), "{error}");
    let check = ["check", "-f", "qcow2", &qcow2];
    let refused = std::process::Command::new("qemu-img").args(check).output().unwrap();
    assert!(!refused.status.success());
    here.snapshot("v0@b").unwrap();
    let changes = sent(&here, "v0@b", Some("v0@a"));
    let error = export(&mut &changes[..], Image::Raw(&make(&raw)), &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("expected one that builds on nothing"), "{error}");
}

#[test]
fn a_scrub_finds_a_changed_bit_in_a_pool_that_is_used() {
    let place = place("scrub");
    let here = pool(&place, "here");
    here.create("v0", SIZE, 0).unwrap();
    let (_volume, mut io) = handle(&here, "v0");
    for at in 0..16 {
        let mut block = [0; 16_384];
        fastrand::Rng::with_seed(at).fill(&mut block);
        io.write(Sector(at * 2048), &block, Flags::NONE).unwrap();
    }
    here.snapshot("v0@a").unwrap();
    let mut told = (0, 0);
    let report = scrub(&here, 0, &mut |done, total| {
        told = (done, total);
        true
    });
    let report = report.unwrap();
    assert_eq!((report.volumes, report.blocks, report.damaged), (2, 16, 0));
    assert_eq!(told.0, 16 * 16_384);
    // Regression: progress ended at 80 %, because the total included the free parts of segments.
    assert_eq!(told.1, told.0);
    // Damage a block while the pool is in use.
    let mut block = [0; 16_384];
    fastrand::Rng::with_seed(5).fill(&mut block);
    let file = here.path().join("segment-00000000");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = blockyard_testing::position(&bytes, &block[..4096]).unwrap();
    bytes[at + 100] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let report = scrub(&here, 0, &mut |_, _| true).unwrap();
    assert_eq!(report.damaged, 1);
    let damage = &report.damage[0];
    assert_eq!((damage.volume.as_str(), damage.block), ("v0", 5 << 6));
    assert_eq!(damage.address, at as u64);
    // After a rewrite the block is intact in the volume, but not in the snapshot.
    io.write(Sector(5 * 2048), &block, Flags::FUA).unwrap();
    let report = scrub(&here, 0, &mut |_, _| true).unwrap();
    assert_eq!(report.damage.iter().map(|it| it.volume.as_str()).collect::<Vec<_>>(), ["v0@a"]);
    let stopped = scrub(&here, 0, &mut |_, _| false).unwrap_err();
    assert_eq!(stopped.to_string(), "it was stopped");
    // A damaged block is not sent.
    let mut stream = Vec::new();
    let error = send::send(&here, "v0@a", None, &mut stream, &mut |_| {}).unwrap_err().to_string();
    assert!(error.starts_with("`v0@a`: "), "{error}");
}

/// Regression: blocks shorter than the pool's alignment were accepted. The group that contained
/// them could not be read again, nor any group after it.
#[test]
fn a_stream_of_blocks_that_no_volume_can_have_is_refused() {
    let place = place("stream-blocks");
    let running = pool(&place, "pool");
    running.create("other", 1 << 20, 4096).unwrap();
    for (block_bytes, blocks, wanted) in [
        (512, 8, "blocks of 512 bytes"),
        (2048, 1, "blocks of 2048 bytes"),
        (4096, 1 << 39, "549755813888 blocks of 4096 bytes"),
    ] {
        let name = "v@one".to_owned();
        let stream = Head { block_bytes, blocks, guid: 1, name, ..Head::default() }.print();
        let error = receive::receive(&running, &to("v"), &mut &stream[..], &mut |_| {})
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("invalid stream ") && error.contains(wanted), "{error}");
    }
    let names: Vec<_> = running.pool().list().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["other"]);
    drop(running);
    assert!(pool(&place, "pool").pool().find("%v").is_err(), "nothing was begun");
}

/// Regression: a client could open a volume while it was being received, and its writes were then
/// rolled back.
#[test]
fn a_volume_that_is_being_received_cannot_be_opened() {
    let place = place("stream-held");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    here.create("v0", SIZE, 0).unwrap();
    let (mut model, mut random) = (vec![0; SIZE as usize], fastrand::Rng::with_seed(14));
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@a").unwrap();
    receive(&there, "v0", &sent(&here, "v0@a", None)).unwrap();
    let before = model.clone();
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@b").unwrap();
    let stream = sent(&here, "v0@b", Some("v0@a"));
    let look = || {
        let config = VolumeConfig::new(there.path(), "v0");
        let error = Volume::open(config).map(drop).unwrap_err().to_string();
        assert!(error.starts_with("`v0` is a device of this process already"), "{error}");
        for refused in [there.rollback("v0@a"), there.resize("v0", SIZE * 2, false)] {
            assert_eq!(refused.unwrap_err().to_string(), "`v0` is in use; close it first");
        }
    };
    let mut cut = Interrupted { stream: &stream[..stream.len() - 1], look: Some(Box::new(look)) };
    let error = receive::receive(&there, &to("v0"), &mut cut, &mut |_| {}).unwrap_err().to_string();
    assert!(error.starts_with("stream: "), "{error}");
    assert!(contents(&there, "v0") == before);
    receive(&there, "v0", &stream).unwrap();
    assert!(contents(&there, "v0") == model);
}
