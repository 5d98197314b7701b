//! Encrypted volumes on real files: who can open them, what is on the disk, what shares a key.

use std::collections::HashMap;
use std::fmt::Debug;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use blockyard_core::{Bio, Flags, Sector, Status};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{
    Compression, Options, Running, Secret, SecretFile, Volume, VolumeConfig, VolumeError,
};
use blockyard_volume_admin::check::check;
use blockyard_volume_admin::receive::{ReceiveTarget, receive};
use blockyard_volume_admin::scrub::scrub;
use blockyard_volume_admin::send::{SendOptions, Sending, send};
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::entry::Codec;
use blockyard_volume_format::group::{self, Descriptor, Places};
use blockyard_volume_format::key_slot::KeySlot;
use blockyard_volume_format::{VERSION, catalogue};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use zeroize::Zeroizing;

use crate::crafted::{append_group, replace_catalogue};

const MIB: u64 = 1 << 20;

/// Text that would be found on the disk if it were not encrypted.
const MARK: &[u8; 32] = b"a line that only its owner reads";

struct Place {
    directory: TempDir,
}

impl Place {
    fn new(name: &str) -> Place {
        Place { directory: TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name) }
    }

    fn pool(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    /// A file of mode 0600 with these bytes.
    fn secret(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        File::create(&path).unwrap().write_all(bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn config(&self, name: &str, size: u64, secret: Option<SecretFile>) -> VolumeConfig {
        VolumeConfig { size, secret, ..VolumeConfig::new(self.pool(), name) }
    }

    /// All bytes of all files of the pool.
    fn bytes(&self) -> Vec<u8> {
        files(&self.pool()).iter().flat_map(|path| fs::read(path).unwrap()).collect()
    }
}

/// The files of a pool.
fn files(pool: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(pool).unwrap().map(|it| it.unwrap().path()).collect();
    files.sort();
    files
}

fn has_mark(bytes: &[u8]) -> bool {
    blockyard_testing::position(bytes, MARK).is_some()
}

/// Writes 1 MiB of marks, at MiB `at`.
fn write(volume: &Arc<Volume>, at: u64) {
    let bytes: Vec<u8> = MARK.iter().copied().cycle().take(MIB as usize).collect();
    handle(volume).write(Sector(at * 2048), &bytes, Flags::FUA).unwrap();
}

fn is_written(volume: &Arc<Volume>, at: u64) -> bool {
    let mut found = vec![0; MIB as usize];
    handle(volume).read(Sector(at * 2048), &mut found).unwrap();
    found.chunks(MARK.len()).all(|chunk| chunk == MARK)
}

fn key(bytes: &[u8]) -> Secret {
    Secret::Key(Zeroizing::new(bytes.to_vec()))
}

fn refused<T>(result: Result<T, VolumeError>) -> String {
    match result {
        Ok(_) => panic!("it was accepted"),
        Err(error) => error.to_string(),
    }
}

/// In one write, blocks that compress and blocks that do not: the latter move forward in the buffer
/// before they are encrypted.
#[test]
fn a_write_of_blocks_that_compress_and_blocks_that_do_not_is_encrypted_as_a_whole() {
    const BLOCK: usize = 16 << 10;
    let place = Place::new("mixed");
    let secret = Some(SecretFile::Key(place.secret("key", &[b'k'; 40])));
    let mut random = fastrand::Rng::with_seed(5);
    let mut data = Vec::new();
    for _ in 0..4 {
        data.extend(MARK.iter().copied().cycle().take(BLOCK));
        let noise: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(BLOCK).collect();
        data.extend(noise);
        let end = data.len();
        data[end - MARK.len()..].copy_from_slice(MARK);
    }
    let config = |size, secret| VolumeConfig {
        volblocksize: BLOCK as u32,
        ..place.config("mixed", size, secret)
    };
    let volume = Volume::open(config(16 * MIB, secret.clone())).unwrap();
    // Whole blocks, and with a part of the first and of the last block.
    let parts = [(0, 0, data.len()), (64, BLOCK / 2, data.len() - 4096)];
    for (block, from, to) in parts {
        let at = Sector((block * BLOCK + from) as u64 / 512);
        handle(&volume).write(at, &data[from..to], Flags::FUA).unwrap();
    }
    drop(volume);
    assert!(!has_mark(&place.bytes()));
    let volume = Volume::open(config(0, secret)).unwrap();
    for (block, from, to) in parts {
        let mut found = vec![1; data.len()];
        handle(&volume).read(Sector((block * BLOCK) as u64 / 512), &mut found).unwrap();
        assert!(found[from..to] == data[from..to], "the data of block {block} on");
        assert!(found[..from].iter().chain(&found[to..]).all(|byte| *byte == 0), "{block}");
    }
}

#[test]
fn nothing_is_on_the_disk_in_plain_and_only_the_secret_opens_it() {
    let place = Place::new("plaintext");
    let right = || Some(SecretFile::Passphrase(place.secret("right", b"correct horse\n")));
    for (name, compress) in [("packed", Compression::Lz4), ("raw", Compression::None)] {
        let config = VolumeConfig { compress, ..place.config(name, 16 * MIB, right()) };
        let volume = Volume::open(config).unwrap();
        write(&volume, 1);
        // Parts of blocks, which are read, decrypted, merged and encrypted again.
        handle(&volume).write(Sector(8), &[7; 8192], Flags::FUA).unwrap();
        handle(&volume).write(Sector(16), &MARK.repeat(128), Flags::FUA).unwrap();
        assert!(is_written(&volume, 1));
        drop(volume);
        assert!(!has_mark(&place.bytes()), "{name}");
        let open = |secret| Volume::open(place.config(name, 0, secret));
        let volume = open(right()).unwrap();
        assert!(is_written(&volume, 1));
        let mut found = [0; 8192];
        handle(&volume).read(Sector(8), &mut found).unwrap();
        assert!(found[..4096] == [7; 4096] && found[4096..] == MARK.repeat(128)[..]);
        drop(volume);
        let locked = format!("`{name}` is encrypted and locked: ");
        assert!(refused(open(None)).starts_with(&locked));
        let wrong = SecretFile::Passphrase(place.secret("wrong", b"correct house"));
        assert!(
            refused(open(Some(wrong))).starts_with(&format!("cannot decrypt the key of `{name}`"))
        );
        let other = SecretFile::Key(place.secret("other", &[b'x'; 40]));
        assert!(refused(open(Some(other))).starts_with("cannot decrypt the key"));
    }
    // The search itself: a volume that is not encrypted has the text on the disk.
    let config =
        VolumeConfig { compress: Compression::None, ..place.config("plain", 16 * MIB, None) };
    write(&Volume::open(config).unwrap(), 0);
    assert!(has_mark(&place.bytes()));
    let text = refused(Volume::open(place.config("plain", 0, right())));
    assert!(text.starts_with("`plain` is not encrypted"), "{text}");
}

#[test]
fn files_with_secrets_are_refused_by_name() {
    let place = Place::new("secrets");
    let open = |secret| refused(Volume::open(place.config("v", 16 * MIB, Some(secret))));
    let path = place.secret("short", b"seven..\n");
    let text = open(SecretFile::Passphrase(path.clone()));
    let wanted = format!(
        "invalid passphrase_file `{} of 7 bytes`: expected 8 to 4096 bytes",
        path.display()
    );
    assert_eq!(text, wanted);
    let text = open(SecretFile::Key(place.secret("short", &[1; 31])));
    assert!(text.contains("key_file") && text.contains("expected 32 to 4096 bytes"), "{text}");
    let path = place.secret("open", &[1; 32]);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let text = open(SecretFile::Key(path));
    assert!(text.starts_with("key_file: invalid mode 0640"), "{text}");
    let text = open(SecretFile::Passphrase(place.directory.path().join("missing")));
    assert!(text.starts_with("passphrase_file: cannot read"), "{text}");
    assert!(!place.pool().exists(), "a refused volume leaves no pool");
}

#[test]
fn copies_share_a_key_that_can_be_locked_and_changed() {
    let place = Place::new("shared-key");
    let running = Running::open(&place.pool(), Options::default()).unwrap();
    let (first, second) = (key(&[1; 32]), key(&[2; 32]));
    running.create_reserved("v", 16 * MIB, 0, 0, Some(&first)).unwrap();
    running.create("plain", 16 * MIB, 0).unwrap();
    let open = |name: &str| Volume::open(place.config(name, 0, None));
    assert!(refused(open("v")).contains("is encrypted and locked"));
    assert!(refused(running.unlock("v", &second)).starts_with("cannot decrypt the key of `v`"));
    assert!(refused(running.unlock("plain", &first)).starts_with("`plain` is not encrypted"));
    assert!(refused(running.lock("plain")).starts_with("`plain` is not encrypted"));
    assert_eq!(refused(running.lock("v")), "`v` is locked already");
    running.unlock("v", &first).unwrap();
    let volume = open("v").unwrap();
    write(&volume, 0);
    running.snapshot("v@one").unwrap();
    write(&volume, 1);
    assert!(refused(running.lock("v")).starts_with("`v` is in use"));
    // A snapshot and a clone need no key to be made.
    running.clone_of("v@one", "twin").unwrap();
    let twin = open("twin").unwrap();
    assert!(is_written(&twin, 0) && !is_written(&twin, 1));
    write(&twin, 2);
    drop(volume);
    assert!(refused(running.lock("v")).starts_with("`v` is in use, or a volume that shares"));
    drop(twin);
    running.rollback("v@one").unwrap();
    running.lock("v@one").unwrap();
    assert!(refused(open("twin")).contains("is encrypted and locked"));
    let mut stream = Vec::new();
    let text = refused(send(&running, "v@one", None, &mut stream, &mut |_| {}));
    assert!(text.starts_with("`v@one` is encrypted and locked"), "{text}");
    // A locked volume's key is changed by its present secret alone.
    let text = refused(running.change_key("v", None, &second));
    assert!(text.contains("is encrypted and locked"), "{text}");
    assert!(refused(running.change_key("v", Some(&second), &second)).starts_with("cannot decrypt"));
    running.change_key("twin", Some(&first), &second).unwrap();
    assert!(refused(running.unlock("v", &first)).starts_with("cannot decrypt the key of `v`"));
    running.unlock("v", &second).unwrap();
    let (volume, twin) = (open("v").unwrap(), open("twin").unwrap());
    assert!(is_written(&volume, 0) && !is_written(&volume, 1));
    assert!(is_written(&twin, 0) && is_written(&twin, 2));
    drop((volume, twin));
    send(&running, "v@one", None, &mut stream, &mut |_| {}).unwrap();
    assert!(has_mark(&stream), "a stream of an unlocked volume is not encrypted");
    // The key is gone with the last volume that has it.
    for name in ["v@one", "v", "twin"] {
        assert_eq!(running.pool().volumes().keys.len(), 1, "{name}");
        running.destroy(name).unwrap();
    }
    assert!(running.pool().volumes().keys.is_empty());
}

/// A pool is verified, cleaned, resynced and opened without the keys of its volumes.
#[test]
fn maintenance_needs_no_key() {
    let place = Place::new("without-key");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let volume = Volume::open(place.config("v", 64 * MIB, secret())).unwrap();
    let mut bytes = vec![0; MIB as usize];
    for round in 0..6 {
        for at in 0..40 {
            fastrand::Rng::with_seed(round * 100 + at).fill(&mut bytes);
            handle(&volume).write(Sector(at * 2048), &bytes, Flags::NONE).unwrap();
        }
    }
    handle(&volume).run(Bio::flush()).unwrap();
    drop(volume);
    let report = check(&place.pool(), &mut |_| {}).unwrap();
    assert_eq!((report.damaged, report.blocks), (0, 40 * 64));
    let running = Running::open(&place.pool(), Options::default()).unwrap();
    let report = scrub(&running, 0, &mut |_, _| true).unwrap();
    assert_eq!(report.damaged, 0);
    assert!(refused(Volume::open(place.config("v", 0, None))).contains("is encrypted and locked"));
    let copy = place.directory.path().join("copy");
    fs::create_dir(&copy).unwrap();
    running.attach(&copy, None, false).unwrap();
    running.wait_for_resync();
    let copies = running.status().unwrap().copies;
    assert!(copies.len() == 2 && copies.iter().all(|copy| copy.state.is_good()), "{copies:?}");
    assert!(refused(Volume::open(place.config("v", 0, None))).contains("is encrypted and locked"));
    // The copy alone has the volume.
    running.detach(&place.pool()).unwrap();
    drop(running);
    fs::remove_dir_all(place.pool()).unwrap();
    let config = VolumeConfig { secret: secret(), ..VolumeConfig::new(&copy, "v") };
    let volume = Volume::open(config).unwrap();
    let mut found = vec![0; MIB as usize];
    for at in 0..40 {
        fastrand::Rng::with_seed(500 + at).fill(&mut bytes);
        handle(&volume).read(Sector(at * 2048), &mut found).unwrap();
        assert!(found == bytes, "MiB {at}");
    }
}

/// A block in the log of a pool.
struct StoredBlock {
    descriptor: Descriptor,
    segment: PathBuf,
    /// The offset in the segment.
    at: u64,
    bytes: Vec<u8>,
}

/// All blocks in the log of a pool.
fn stored_blocks(pool: &Path) -> Vec<StoredBlock> {
    let align = 4096;
    let mut found = Vec::new();
    let is_segment =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("segment-");
    for segment in files(pool).into_iter().filter(is_segment) {
        let bytes = fs::read(&segment).unwrap();
        for start in (0..bytes.len()).step_by(align as usize) {
            let Some((head, _, descriptors)) = group::parse(&bytes[start..], align) else {
                continue;
            };
            let (payload, mut places) = (start + head.head_bytes as usize, Places::default());
            for descriptor in descriptors {
                let (at, len) = places.next(&descriptor, align);
                let (at, len) = (payload + at as usize, len as usize);
                if descriptor.kind == group::Kind::Data {
                    let (segment, bytes) = (segment.clone(), bytes[at..at + len].to_vec());
                    found.push(StoredBlock { descriptor, segment, at: at as u64, bytes });
                }
            }
        }
    }
    found
}

/// The nonces of all encrypted blocks in the log of a pool, each with its block's bytes.
fn nonces(pool: &Path) -> Vec<([u8; 24], Vec<u8>)> {
    let blocks = stored_blocks(pool).into_iter();
    let nonces = blocks.map(|StoredBlock { descriptor, bytes, .. }| {
        assert!(descriptor.codec.is_sealed(), "a block is not encrypted");
        (*bytes.first_chunk().unwrap(), bytes)
    });
    nonces.collect()
}

#[test]
fn no_nonce_repeats_over_snapshots_clones_rollbacks_and_copies() {
    let place = Place::new("nonces");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let open = |pool: &Path, name: &str, size| {
        Volume::open(VolumeConfig { size, secret: secret(), ..VolumeConfig::new(pool, name) })
            .unwrap()
    };
    let pool = place.pool();
    let volume = open(&pool, "v", 16 * MIB);
    write(&volume, 0);
    let running = Arc::clone(volume.running());
    running.snapshot("v@one").unwrap();
    running.clone_of("v@one", "twin").unwrap();
    let twin = open(&pool, "twin", 0);
    // The same blocks of both, from the same contents.
    write(&volume, 1);
    write(&twin, 1);
    write(&volume, 0);
    drop((volume, twin));
    running.rollback("v@one").unwrap();
    let volume = open(&pool, "v", 0);
    write(&volume, 1);
    drop((volume, running));
    // Two copies of the pool go on from the same state.
    let copy = place.directory.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(&pool).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    for pool in [&pool, &copy] {
        write(&open(pool, "v", 0), 2);
    }
    let mut seen: HashMap<[u8; 24], Vec<u8>> = HashMap::new();
    for pool in [&pool, &copy] {
        for (nonce, bytes) in nonces(pool) {
            let before = seen.entry(nonce).or_insert_with(|| bytes.clone());
            assert!(*before == bytes, "{nonce:02x?} is used twice");
        }
    }
    for pool in [&pool, &copy] {
        let bytes: Vec<u8> = files(pool).iter().flat_map(|it| fs::read(it).unwrap()).collect();
        assert!(!has_mark(&bytes), "{}", pool.display());
    }
    // 1 MiB was written seven times, in blocks of 16 KiB.
    assert_eq!(seen.len(), 7 * 64);
}

/// A raw stream brings the key and the nonces of a volume to another pool, and both go on writing.
#[test]
fn no_nonce_repeats_over_two_pools_between_which_raw_streams_go() {
    let place = Place::new("nonces-raw");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let (here, there) = (place.pool(), place.directory.path().join("there"));
    let open = |pool: &Path, size| {
        Volume::open(VolumeConfig { size, secret: secret(), ..VolumeConfig::new(pool, "v") })
            .unwrap()
    };
    let raw = |from: &Path, to: &Path, snapshot: &str, base: Option<&str>| {
        let running = Running::open(from, Options::default()).unwrap();
        running.snapshot(snapshot).unwrap();
        let options = SendOptions { snapshot, base, is_raw: true, ..SendOptions::default() };
        let mut stream = Vec::new();
        let sending = Sending::begin(&running, &options).unwrap();
        sending.run(&mut stream, &mut |_| {}).unwrap();
        assert!(!has_mark(&stream));
        let running = Running::open(to, Options::default()).unwrap();
        let target = ReceiveTarget::default();
        receive(&running, &target, &mut &stream[..], &mut |_| {}).unwrap();
        stream
    };
    write(&open(&here, 16 * MIB), 0);
    raw(&here, &there, "v@one", None);
    // The same blocks in both pools, from the same contents.
    for pool in [&here, &there] {
        write(&open(pool, 0), 1);
        write(&open(pool, 0), 0);
    }
    Running::open(&here, Options::default()).unwrap().rollback("v@one").unwrap();
    // Back, and there and back again after more writes.
    let back = raw(&there, &here, "v@two", Some("@one"));
    for pool in [&here, &there] {
        write(&open(pool, 0), 2);
    }
    Running::open(&there, Options::default()).unwrap().rollback("v@two").unwrap();
    raw(&here, &there, "v@three", Some("@two"));
    let running = Running::open(&here, Options::default()).unwrap();
    running.rollback("v@one").unwrap();
    ["v@three", "v@two"].iter().for_each(|snapshot| running.destroy(snapshot).unwrap());
    // The same stream a second time.
    receive(&running, &ReceiveTarget::default(), &mut &back[..], &mut |_| {}).unwrap();
    drop(running);
    write(&open(&here, 0), 3);
    assert!(is_written(&open(&there, 0), 2) && is_written(&open(&here, 0), 3));
    let mut seen: HashMap<[u8; 24], Vec<u8>> = HashMap::new();
    let mut count = 0;
    for pool in [&here, &there] {
        let bytes: Vec<u8> = files(pool).iter().flat_map(|it| fs::read(it).unwrap()).collect();
        assert!(!has_mark(&bytes), "{}", pool.display());
        for (nonce, bytes) in nonces(pool) {
            count += 1;
            let before = seen.entry(nonce).or_insert_with(|| bytes.clone());
            assert!(*before == bytes, "{nonce:02x?} is used twice");
        }
    }
    // 1 MiB was written 8 times, in blocks of 16 KiB, and moved 1, 2, 1 and 2 MiB.
    assert_eq!((seen.len(), count), (8 * 64, 14 * 64));
}

/// The bug: a snapshot of all volumes took a part of a reservation for the whole, because a block
/// that is encrypted is longer.
#[test]
fn a_snapshot_of_all_volumes_needs_the_space_that_one_of_each_needs() {
    let place = Place::new("encrypted-reservation");
    let options = Options { segment_bytes: 1 << 20, segments_max: 64, ..Options::default() };
    let secret = Some(SecretFile::Key(place.secret("key", &[7; 32])));
    let own = VolumeConfig {
        volblocksize: 4096,
        reservation: 16 * MIB,
        compress: Compression::None,
        ..place.config("own", 16 * MIB, secret)
    };
    let own = Volume::open_with(own, options).unwrap();
    (0..8).for_each(|at| write(&own, at));
    let (running, live) = (own.running(), own.running().pool().find("own").unwrap());
    let unused = live.unused_reserved_bytes();
    let needed = live.meta.stored_max(16 * MIB) - unused;
    assert!(needed > 16 * MIB - unused + 2 * MIB, "{needed} of {unused}");
    let other =
        VolumeConfig { compress: Compression::None, ..place.config("other", 64 * MIB, None) };
    let other = Volume::open_with(other, options).unwrap();
    for at in (0..64).take_while(|_| running.pool().unreserved_bytes() > needed) {
        write(&other, at);
    }
    let left = running.pool().unreserved_bytes();
    assert!(left < needed && left > 16 * MIB - unused, "{left} of {needed}");
    assert!(refused(running.snapshot("own@a")).contains("space"));
    assert!(refused(running.snapshot_all("a")).contains("space"));
}

/// Collects the messages of log lines.
#[derive(Clone, Debug, Default)]
struct Messages(Arc<Mutex<Vec<String>>>);

impl Visit for Messages {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

impl Subscriber for Messages {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Reads a block of 16 KiB, which has to fail; returns what the log says of it.
fn failed_read(volume: &Arc<Volume>, block: u64) -> String {
    let messages = Messages::default();
    let mut found = vec![0; 16 << 10];
    let read = || handle(volume).read(Sector(block * 32), &mut found);
    // The handle reads on this thread.
    let status = tracing::subscriber::with_default(messages.clone(), read);
    assert_eq!(status, Err(Status::Protection), "an I/O error with EILSEQ");
    assert!(!has_mark(&found), "the client got the block");
    let messages = messages.0.lock().unwrap();
    let named = messages.iter().find_map(|it| it.split_once(" of the pool, "));
    let (place, what) = named.unwrap_or_else(|| panic!("no block is named: {messages:?}"));
    let (block, _) = place.split_once(", at ").expect("the log names the place");
    // After a `;` the line may count the reads that failed since an earlier line.
    format!("{block}: {}", what.split(';').next().unwrap_or(what))
}

const NOT_AUTHENTIC: &str = "is not authentic: it was not written there with this key";

/// A pool with two encrypted volumes, `one` and `two`. Both keys are encrypted by the same secret,
/// so that the secret decrypts each slot.
fn two_volumes(place: &Place, secret: impl Fn() -> Option<SecretFile>) -> [KeySlot; 2] {
    ["one", "two"].map(|name| {
        let volume = Volume::open(place.config(name, 16 * MIB, secret())).unwrap();
        write(&volume, 0);
        let meta = volume.running().pool().find(name).unwrap().meta.clone();
        volume.running().pool().volumes().keys[&meta.key].clone()
    })
}

#[test]
fn exchanged_key_slots_are_refused_by_name() {
    let place = Place::new("exchanged-slots");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let slots = two_volumes(&place, secret);
    // Both checkpoints may have the same catalogue, so a change is made by what a slot is.
    let set_identities = |ids: [u64; 2]| {
        replace_catalogue(&place.pool(), VERSION, |bytes| {
            let (mut whole, listed) = catalogue::parse(bytes).unwrap();
            for slot in &mut whole.keys {
                // An older checkpoint has the first volume only, which must have a slot.
                if listed.len() == 2 {
                    slot.id = ids[usize::from(slot.salt == slots[1].salt)];
                }
            }
            catalogue::print(&whole, &listed)
        });
    };
    set_identities([slots[1].id, slots[0].id]);
    for name in ["one", "two"] {
        let text = refused(Volume::open(place.config(name, 0, secret())));
        assert!(text.starts_with(&format!("cannot decrypt the key of `{name}`")), "{text}");
    }
    // The refused openings have changed nothing.
    set_identities([slots[0].id, slots[1].id]);
    for name in ["one", "two"] {
        assert!(is_written(&Volume::open(place.config(name, 0, secret())).unwrap(), 0), "{name}");
    }
}

#[test]
fn volumes_under_each_others_key_have_no_authentic_block() {
    let place = Place::new("exchanged-keys");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let slots = two_volumes(&place, secret);
    replace_catalogue(&place.pool(), VERSION, |bytes| {
        let (whole, mut listed) = catalogue::parse(bytes).unwrap();
        if let [one, two] = &mut listed[..] {
            assert_eq!((&*one.meta.name, &*two.meta.name), ("one", "two"));
            (one.meta.key, two.meta.key) = (slots[1].id, slots[0].id);
        }
        catalogue::print(&whole, &listed)
    });
    for name in ["one", "two"] {
        let volume = Volume::open(place.config(name, 0, secret())).unwrap();
        for block in [0, 1, 63] {
            let text = failed_read(&volume, block);
            assert_eq!(text, format!("{name}: block {block}: {NOT_AUTHENTIC}"));
        }
    }
}

/// A pool with the encrypted volume `v`, whose block 0 is written, and that block as it is stored.
fn one_block(place: &Place, secret: Option<SecretFile>) -> StoredBlock {
    let volume = Volume::open(place.config("v", 16 * MIB, secret)).unwrap();
    handle(&volume).write(Sector(0), &MARK.repeat(512), Flags::FUA).unwrap();
    drop(volume);
    let mut blocks = stored_blocks(&place.pool());
    assert_eq!(blocks.len(), 1);
    blocks.remove(0)
}

#[test]
fn a_block_that_is_moved_to_another_number_is_not_authentic() {
    let place = Place::new("moved-block");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let StoredBlock { descriptor, bytes, .. } = one_block(&place, secret());
    append_group(&place.pool(), Descriptor { block: 1, ..descriptor }, &bytes);
    let volume = Volume::open(place.config("v", 0, secret())).unwrap();
    assert_eq!(failed_read(&volume, 1), format!("v: block 1: {NOT_AUTHENTIC}"));
    let mut found = vec![0; 16 << 10];
    handle(&volume).read(Sector(0), &mut found).unwrap();
    assert!(found == MARK.repeat(512), "the block itself is intact");
}

#[test]
fn an_unencrypted_block_in_an_encrypted_volume_is_not_authentic() {
    let place = Place::new("plain-block");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let StoredBlock { descriptor, .. } = one_block(&place, secret());
    let bytes = MARK.repeat(512);
    let (len, crc) = (bytes.len() as u32, crc(&bytes));
    let descriptor = Descriptor { codec: Codec::Raw, len, crc, ..descriptor };
    append_group(&place.pool(), descriptor, &bytes);
    let volume = Volume::open(place.config("v", 0, secret())).unwrap();
    assert_eq!(failed_read(&volume, 0), format!("v: block 0: {NOT_AUTHENTIC}"));
}

/// The older block is authentic, but the map has the checksum of the newer one.
#[test]
fn an_older_block_in_place_of_the_newer_one_is_damaged() {
    let place = Place::new("older-block");
    let secret = || Some(SecretFile::Key(place.secret("key", &[9; 32])));
    let older = one_block(&place, secret());
    let volume = Volume::open(place.config("v", 0, secret())).unwrap();
    handle(&volume).write(Sector(0), &[5; 16 << 10], Flags::FUA).unwrap();
    drop(volume);
    let newer = stored_blocks(&place.pool()).into_iter().find(|it| it.bytes != older.bytes);
    let newer = newer.expect("the log has the newer block");
    assert_eq!(newer.bytes.len(), older.bytes.len());
    let segment = File::options().write(true).open(&newer.segment).unwrap();
    segment.write_all_at(&older.bytes, newer.at).unwrap();
    let volume = Volume::open(place.config("v", 0, secret())).unwrap();
    assert_eq!(failed_read(&volume, 0), "v: block 0: is damaged");
    segment.write_all_at(&newer.bytes, newer.at).unwrap();
    let mut found = vec![0; 16 << 10];
    handle(&volume).read(Sector(0), &mut found).unwrap();
    assert!(found == [5; 16 << 10], "the newer block is back");
}
