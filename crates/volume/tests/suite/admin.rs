//! Snapshots, clones, roll-back, resizing, `destroy` and `check`, on real files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;

use blockyard_core::{Flags, Sector};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, SyncMode, Volume, VolumeConfig};
use blockyard_volume_admin::check::check;

fn open(path: &Path, name: &str, size: u64) -> Arc<Volume> {
    Volume::open(VolumeConfig {
        path: path.to_owned(),
        name: name.to_owned(),
        size,
        volblocksize: 0,
        compress: Compression::None,
        sync: SyncMode::Standard,
        ..VolumeConfig::new("", "")
    })
    .unwrap()
}

fn write(volume: &Arc<Volume>, at: u64, byte: u8) {
    handle(volume).write(Sector(at / 512), &[byte; 65_536], Flags::NONE).unwrap();
}

fn byte(volume: &Arc<Volume>, at: u64) -> u8 {
    let mut found = [0; 65_536];
    handle(volume).read(Sector(at / 512), &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == found[0]));
    found[0]
}

fn seen(volume: &Arc<Volume>) -> (u8, u8, u8) {
    (byte(volume, 0), byte(volume, 1 << 20), byte(volume, 2 << 20))
}

fn pool(name: &str) -> (TempDir, PathBuf) {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name);
    let path = place.path().join("pool");
    (place, path)
}

#[test]
fn snapshots_and_clones_keep_what_was() {
    let (_place, path) = pool("snapshots");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", 16 << 20, 0).unwrap();
    let volume = open(&path, "v0", 0);
    write(&volume, 0, 1);
    write(&volume, 1 << 20, 1);
    // The snapshot is made while the volume is in use.
    running.snapshot("v0@one").unwrap();
    write(&volume, 0, 2);
    running.clone_of("v0@one", "twin").unwrap();
    let twin = open(&path, "twin", 0);
    write(&twin, 1 << 20, 3);
    assert_eq!((seen(&volume), seen(&twin)), ((2, 1, 0), (1, 3, 0)));
    let text = |result: Result<(), blockyard_volume::VolumeError>| result.unwrap_err().to_string();
    assert_eq!(text(running.rollback("v0@one")), "`v0` is in use; close it first");
    assert_eq!(text(running.destroy("twin")), "`twin` is in use; close it first");
    assert_eq!(text(running.snapshot("v0@one")), "`v0@one` exists already");
    assert_eq!(text(running.snapshot("v9@one")), "there is no volume `v9` in this pool");
    assert!(text(running.snapshot("v0")).starts_with("invalid name `v0`"));
    assert!(text(running.create("a@b", 1 << 20, 0)).starts_with("invalid name `a@b`"));
    assert!(text(running.create("c", 1 << 20, 5)).starts_with("invalid volblocksize `5`"));
    drop((volume, twin));
    let needed = "`v0` is needed by its snapshot `v0@one`; destroy that first";
    assert_eq!(text(running.destroy("v0")), needed);
    running.rollback("v0@one").unwrap();
    running.resize("v0", 32 << 20, false).unwrap();
    let wanted = "invalid name `v0@one`: expected a snapshot of 32M, the present size of `v0`; the \
                  snapshot has 16M: resize `v0` to 16M first";
    assert_eq!(text(running.rollback("v0@one")), wanted);
    let wanted = "cannot shrink `v0` from 32M to 16M: this discards its data beyond 16M; use \
                  --force (`\"force\": true`) to do so";
    assert_eq!(text(running.resize("v0", 16 << 20, false)), wanted);
    assert!(text(running.resize("v0@one", 16 << 20, true)).contains("this name is of a snapshot"));
    drop(running);
    // All changes persist across a reopen.
    let running = Running::open(&path, Options::default()).unwrap();
    let volume = open(&path, "v0", 32 << 20);
    assert_eq!(seen(&volume), (1, 1, 0));
    drop(volume);
    assert_eq!(seen(&open(&path, "twin", 0)), (1, 3, 0));
    running.destroy("v0@one").unwrap();
    running.destroy("v0").unwrap();
    let names: Vec<_> = running.pool().list().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["twin"]);
    assert_eq!(seen(&open(&path, "twin", 0)), (1, 3, 0), "a clone stands alone");
}

#[test]
fn a_check_finds_a_changed_bit_and_names_its_block() {
    let (_place, path) = pool("check");
    let nothing = check(&path, &mut |_| {}).unwrap_err().to_string();
    assert!(nothing.contains("expected the directory or the disk of a pool"), "{nothing}");
    let volume = open(&path, "v0", 16 << 20);
    for at in 0..16 {
        write(&volume, at << 20, at as u8 + 1);
    }
    let used = check(&path, &mut |_| {}).unwrap_err().to_string();
    assert!(used.contains("is in use by process"), "{used}");
    drop(volume);
    let mut told = 0;
    let report = check(&path, &mut |bytes| told = bytes).unwrap();
    assert_eq!((report.volumes, report.blocks, report.damaged), (1, 64, 0));
    // Includes the map pages.
    assert!(report.stored_bytes == 1 << 20 && told > 1 << 20, "{told}");
    // Change a bit in the block that is filled with the byte 5.
    let file = path.join("segment-00000000");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(4096).position(|part| part == [5; 4096]).unwrap();
    bytes[at + 100] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let report = check(&path, &mut |_| {}).unwrap();
    assert_eq!(report.damaged, 1);
    let damage = &report.damage[0];
    assert_eq!((damage.volume.as_str(), damage.block), ("v0", (4 << 20) / 16_384));
    assert!(damage.what.starts_with("`block` is damaged: its checksum is 0x"), "{damage:?}");
    let volume = open(&path, "v0", 0);
    let mut found = [0; 4096];
    assert!(handle(&volume).read(Sector((4 << 20) / 512), &mut found).is_err(), "never data");
    assert_eq!(byte(&volume, 5 << 20), 6);
}

/// Regression: a volume counted as in use if its last request was still pending when it was closed,
/// or if another thread looked it up.
#[test]
fn a_volume_that_was_just_closed_can_be_changed() {
    let (_place, path) = pool("closed");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", 16 << 20, 0).unwrap();
    let done = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let (running, path, done) = (&running, &path, done);
        scope.spawn(move || {
            // Looks the volume up continuously.
            while done.1.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                _ = running.pool().find("v0");
            }
        });
        for round in 0..100 {
            let volume = open(path, "v0", 0);
            let mut io = handle(&volume);
            drop(volume);
            io.write(Sector(0), &[1; 65_536], Flags::NONE).unwrap();
            drop(io);
            running.resize("v0", (16 + round % 2) << 20, true).unwrap();
        }
        done.0.send(()).unwrap();
    });
}

/// Regression: a roll-back compared lengths before a concurrent `resize` made the volume shorter.
/// The volume then had data after its end, which appeared when it was made longer again.
#[test]
fn a_rollback_concurrent_with_a_resize_leaves_no_data_after_the_end() {
    const LONG: u64 = 32 << 20;
    let (_place, path) = pool("roll-back-resize");
    let running = Running::open(&path, Options::default()).unwrap();
    running.create("v0", LONG, 0).unwrap();
    write(&open(&path, "v0", 0), 24 << 20, 7);
    running.snapshot("v0@full").unwrap();
    let (go, goes) = channel::<()>();
    let (done, is_done) = channel::<()>();
    let (stop, stops) = channel::<()>();
    std::thread::scope(|scope| {
        let running = &running;
        scope.spawn(move || {
            for () in goes {
                while stops.try_recv().is_err() {
                    _ = running.rollback("v0@full");
                }
                done.send(()).unwrap();
            }
        });
        for round in 0..200 {
            while running.rollback("v0@full").is_err() {}
            go.send(()).unwrap();
            // A roll-back is in progress most of the time.
            while running.resize("v0", LONG / 2, true).is_err() {}
            stop.send(()).unwrap();
            is_done.recv().unwrap();
            running.resize("v0", LONG, false).unwrap();
            assert_eq!(byte(&open(&path, "v0", 0), 24 << 20), 0, "round {round}");
        }
        drop(go);
    });
}
