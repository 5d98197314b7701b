//! Raw streams: encrypted volumes that are sent and received without their keys.
#![allow(clippy::unwrap_used)] // Test code.

mod pools;

use std::collections::BTreeSet;
use std::sync::Arc;

use blockyard_core::{Flags, Sector, Status};
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Compression, Options, Running, Secret, Volume, VolumeConfig, VolumeError};
use blockyard_volume_admin::check::check;
use blockyard_volume_admin::incoming::verify;
use blockyard_volume_admin::receive::{self, ReceiveTarget, Received};
use blockyard_volume_admin::send::{SendOptions, Sending};
use blockyard_volume_format::bytes::put_u64;
use blockyard_volume_format::catalogue::Change;
use blockyard_volume_format::stream::{HEAD_BYTES, Head, Kind, RECORD_BYTES, Record, ResumeToken};
use zeroize::Zeroizing;

use pools::{BLOCK, SIZE, contents, handle, place, received, sent};

/// Text that would be found in a stream if it were not encrypted.
const MARK: &[u8; 32] = b"a line that only its owner reads";

fn pool(place: &TempDir, name: &str, align: u32) -> Arc<Running> {
    pools::pool(place, name, Options { align, ..Options::default() })
}

fn key(byte: u8) -> Secret {
    Secret::Key(Zeroizing::new(vec![byte; 32]))
}

/// Makes an encrypted volume that the key of this byte opens, and unlocks it.
fn encrypted(running: &Running, name: &str, byte: u8) {
    let (size, block) = (SIZE as u64, BLOCK as u32);
    running.create_reserved(name, size, block, 0, Some(&key(byte))).unwrap();
    running.unlock(name, &key(byte)).unwrap();
}

/// Changes random blocks of a volume and of its model: marks, noise, zeros.
fn change(running: &Running, name: &str, random: &mut fastrand::Rng, model: &mut [u8]) {
    let compress = [Compression::None, Compression::Lz4][random.usize(..2)];
    pools::change((running, name, compress), random, model, &|block, _| {
        block.copy_from_slice(&MARK.repeat(BLOCK / MARK.len()));
    });
}

const RAW: SendOptions<'static> = SendOptions {
    snapshot: "v0@a",
    base: None,
    intermediate: false,
    replicate: false,
    is_compressed: false,
    is_raw: true,
};

fn receive(running: &Running, name: Option<&str>, stream: &[u8]) -> Result<Received, VolumeError> {
    received(running, ReceiveTarget { name, is_resumable: false }, stream)
}

fn has_mark(bytes: &[u8]) -> bool {
    blockyard_testing::position(bytes, MARK).is_some()
}

fn said<T>(result: Result<T, VolumeError>) -> String {
    match result {
        Ok(_) => panic!("it was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_volume_moves_without_its_key_and_opens_by_its_secret_alone() {
    // Blocks have another padding where the alignment of the pool is another one.
    for (name, from, to) in [("raw-512", 512, 4096), ("raw-4096", 4096, 512)] {
        let place = place(name);
        let (here, there) = (pool(&place, "here", from), pool(&place, "there", to));
        let mut random = fastrand::Rng::with_seed(60);
        let mut model = vec![0; SIZE];
        encrypted(&here, "v0", 1);
        let mut models = Vec::new();
        for snapshot in ["v0@a", "v0@b", "v0@c"] {
            change(&here, "v0", &mut random, &mut model);
            here.snapshot(snapshot).unwrap();
            models.push(model.clone());
        }
        let plain = sent(&here, &SendOptions { is_raw: false, ..RAW });
        here.lock("v0").unwrap();
        let locked = Sending::begin(&here, &SendOptions { is_raw: false, ..RAW });
        assert!(said(locked.map(drop)).contains("`v0@a` is encrypted and locked"));
        let stream = sent(&here, &RAW);
        assert!(has_mark(&plain) && !has_mark(&stream));
        let verified = verify(&mut &stream[..], &mut |_| {}).unwrap();
        assert!(verified.snapshots[0].head.is_raw());
        receive(&there, Some("copy"), &stream).unwrap();
        let open = || Volume::open(VolumeConfig::new(there.path(), "copy")).map(drop);
        assert!(said(open()).contains("`copy` is encrypted and locked"));
        assert!(said(there.unlock("copy", &key(2))).contains("cannot decrypt the key of `copy`"));
        there.unlock("copy", &key(1)).unwrap();
        assert!(contents(&there, "copy") == models[0]);
        // Two increments, which a locked volume takes as well as an unlocked one.
        let (base, intermediate) = (Some("@a"), true);
        let more = sent(&here, &SendOptions { snapshot: "v0@c", base, intermediate, ..RAW });
        assert!(!has_mark(&more) && verify(&mut &more[..], &mut |_| {}).is_ok());
        there.lock("copy").unwrap();
        let received = receive(&there, Some("copy"), &more).unwrap();
        assert_eq!(received.snapshots, ["copy@b", "copy@c"]);
        there.unlock("copy", &key(1)).unwrap();
        assert!(contents(&there, "copy") == models[2]);
        there.clone_of("copy@b", "at_b").unwrap();
        assert!(contents(&there, "at_b") == models[1]);
        // What the received volume is changed to goes back, on a snapshot that both have.
        change(&there, "copy", &mut random, &mut model);
        there.snapshot("copy@d").unwrap();
        let (snapshot, base) = ("copy@d", Some("@c"));
        let back = sent(&there, &SendOptions { snapshot, base, ..RAW });
        receive(&here, Some("v0"), &back).unwrap();
        here.unlock("v0", &key(1)).unwrap();
        assert!(contents(&here, "v0") == model);
        drop((here, there));
        for name in ["here", "there"] {
            assert_eq!(check(&place.path().join(name), &mut |_| {}).unwrap().damaged, 0);
        }
    }
}

#[test]
fn an_increment_of_contents_and_a_raw_one_follow_one_another() {
    let place = place("raw-mixed");
    let (here, there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    let mut random = fastrand::Rng::with_seed(61);
    let mut model = vec![0; SIZE];
    encrypted(&here, "v0", 1);
    let (mut base, mut guids) = (None, BTreeSet::new());
    for (snapshot, is_raw) in [("v0@a", true), ("v0@b", false), ("v0@c", true)] {
        change(&here, "v0", &mut random, &mut model);
        here.snapshot(snapshot).unwrap();
        let stream = sent(&here, &SendOptions { snapshot, base, is_raw, ..RAW });
        if !is_raw {
            assert!(said(receive(&there, None, &stream)).contains("encrypted and locked"));
            there.unlock("v0", &key(1)).unwrap();
        }
        receive(&there, None, &stream).unwrap();
        let is_new = guids.insert(there.pool().find("v0").unwrap().meta.guid);
        assert!(is_new, "clients do not see that the contents are others");
        base = Some(snapshot);
    }
    assert!(contents(&there, "v0") == model);
}

/// A pool with encrypted and other volumes, and clones.
#[test]
fn a_pool_is_replicated_raw_with_its_clones() {
    let place = place("raw-replicate");
    let (here, there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    let mut random = fastrand::Rng::with_seed(62);
    let mut models = Vec::new();
    encrypted(&here, "base", 1);
    encrypted(&here, "other", 2);
    here.create("plain", SIZE as u64, BLOCK as u32).unwrap();
    for name in ["base", "other", "plain", "clone"] {
        let mut model = vec![0; SIZE];
        if name == "clone" {
            here.snapshot("base@origin").unwrap();
            here.clone_of("base@origin", "clone").unwrap();
            model.clone_from(&models[0]);
        }
        change(&here, name, &mut random, &mut model);
        models.push(model);
    }
    here.snapshot_all("all").unwrap();
    here.lock("base").unwrap();
    here.lock("other").unwrap();
    let stream = sent(&here, &SendOptions { snapshot: "@all", replicate: true, ..RAW });
    let verified = verify(&mut &stream[..], &mut |_| {}).unwrap();
    for it in &verified.snapshots {
        assert_eq!(it.head.is_raw(), !it.head.name.starts_with("plain@"), "{}", it.head.name);
    }
    receive(&there, None, &stream).unwrap();
    // The clone has the key of its origin, and so a key slot with it.
    assert_eq!(there.pool().volumes().keys.len(), 2);
    there.unlock("base", &key(1)).unwrap();
    there.unlock("other", &key(2)).unwrap();
    for (name, model) in ["base", "other", "plain", "clone"].iter().zip(&models) {
        assert!(contents(&there, name) == *model, "{name}");
    }
}

/// Cuts of a raw stream at random bytes; the rest is sent by the token, without the key.
#[test]
fn an_interrupted_raw_receive_is_continued() {
    let place = place("raw-resume");
    let (here, mut there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    let mut random = fastrand::Rng::with_seed(63);
    let mut model = vec![0; SIZE];
    encrypted(&here, "v0", 1);
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@a").unwrap();
    let plain = sent(&here, &SendOptions { is_raw: false, ..RAW });
    here.lock("v0").unwrap();
    let mut stream = sent(&here, &RAW);
    let (mut cuts, mut started) = (0, 0);
    while cuts < 8 {
        let at = random.usize(HEAD_BYTES + RECORD_BYTES + 85..stream.len());
        let target = ReceiveTarget { name: Some("v1"), is_resumable: true };
        let cut = receive::receive(&there, &target, &mut &stream[..at], &mut |_| {});
        let Err(VolumeError::Interrupted { token, .. }) = cut else { panic!("{cut:?}") };
        let token: ResumeToken = token.parse().unwrap();
        assert!(token.is_raw && token.start <= SIZE as u64 / BLOCK as u64);
        (cuts, started) = (cuts + 1, started.max(token.start));
        // A stream of contents does not continue a raw one.
        let refused = receive::receive(&there, &target, &mut &plain[..], &mut |_| {});
        assert!(said(refused).contains("is partly received: it has `v0@a` up to block"));
        drop(there);
        there = pool(&place, "there", 4096);
        stream = Vec::new();
        Sending::resume(&here, &token, &RAW).unwrap().run(&mut stream, &mut |_| {}).unwrap();
        assert!(!has_mark(&stream));
    }
    assert!(started > 0);
    receive::receive(
        &there,
        &ReceiveTarget { name: Some("v1"), is_resumable: true },
        &mut &stream[..],
        &mut |_| {},
    )
    .unwrap();
    there.unlock("v1", &key(1)).unwrap();
    assert!(contents(&there, "v1") == model);
    // Regression: a receiver could have a stream that was raw continued in plain, by a token.
    here.unlock("v0", &key(1)).unwrap();
    let guid = here.pool().find("v0@a").unwrap().meta.guid;
    let token = ResumeToken { guid, base: None, start: 0, is_raw: false };
    let text = said(Sending::resume(&here, &token, &RAW).map(drop));
    assert!(text.contains("expected that of a raw stream"), "{text}");
    assert!(Sending::resume(&here, &token, &SendOptions { is_raw: false, ..RAW }).is_ok());
    // A raw token of a volume that is not encrypted.
    here.create("plain", SIZE as u64, BLOCK as u32).unwrap();
    here.snapshot("plain@a").unwrap();
    let guid = here.pool().find("plain@a").unwrap().meta.guid;
    let token = ResumeToken { guid, base: None, start: 0, is_raw: true };
    let any = SendOptions { snapshot: "", ..RAW };
    assert!(
        said(Sending::resume(&here, &token, &any).map(drop)).contains("of an encrypted volume")
    );
}

#[test]
fn streams_of_another_key_or_time_are_refused_by_name() {
    let place = place("raw-refused");
    let (here, there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    let mut random = fastrand::Rng::with_seed(64);
    let mut model = vec![0; SIZE];
    encrypted(&here, "v0", 1);
    for snapshot in ["v0@a", "v0@b", "v0@c"] {
        change(&here, "v0", &mut random, &mut model);
        here.snapshot(snapshot).unwrap();
    }
    let increment = |snapshot, base| sent(&here, &SendOptions { snapshot, base, ..RAW });
    let (whole, to_b) = (sent(&here, &RAW), increment("v0@b", Some("@a")));
    let to_c = increment("v0@c", Some("@b"));
    receive(&there, Some("v0"), &whole).unwrap();
    receive(&there, Some("v0"), &to_b).unwrap();
    let other_key = |stream: &[u8]| {
        with_head(stream, &|head| head.key ^= 1, &|slot| put_u64(slot, 0, key_of(stream) ^ 1))
    };
    // Streams of an earlier time.
    let text = said(receive(&there, Some("v0"), &whole));
    assert!(text.contains("`v0@a` is here already"), "{text}");
    // The end of a stream that has arrived goes without the key, and only under the same key.
    let (_, token) = text.rsplit_once("--resume ").unwrap();
    let token: ResumeToken = token.trim_end_matches('`').parse().unwrap();
    assert!(token.is_raw);
    let mut end = Vec::new();
    Sending::resume(&here, &token, &RAW).unwrap().run(&mut end, &mut |_| {}).unwrap();
    assert_eq!(receive(&there, Some("v0"), &end).unwrap().snapshots, ["v0@a"]);
    let text = said(receive(&there, Some("v0"), &other_key(&end)));
    assert!(text.contains("`v0@a` exists already"), "{text}");
    assert!(said(receive(&there, Some("v0@x"), &whole)).contains("`v0` exists already"));
    assert!(said(receive(&there, Some("v0@x"), &to_b)).contains("`v0@b` exists already"));
    // The same snapshot under another key, and as a stream of contents.
    let text = said(receive(&there, Some("v0"), &other_key(&to_c)));
    assert!(text.contains("invalid stream `v0@c (raw)`"), "{text}");
    assert!(text.contains("expected one that is encrypted by the key of `v0`"), "{text}");
    let contents_of =
        |snapshot, base| sent(&here, &SendOptions { snapshot, base, is_raw: false, ..RAW });
    receive(&there, Some("plain"), &contents_of("v0@b", None)).unwrap();
    let text = said(receive(&there, Some("plain"), &to_c));
    assert!(text.contains("one that is not raw, as `plain` is not encrypted here"), "{text}");
    assert!(receive(&there, Some("plain"), &contents_of("v0@c", Some("@b"))).is_ok());
    // A head of one stream on the records of another, and one that names another key than the slot.
    let swapped = [&whole[..HEAD_BYTES], &to_b[HEAD_BYTES..]].concat();
    let text = said(receive(&there, Some("v1"), &swapped));
    assert!(text.starts_with("invalid stream at byte 512") && text.contains("checksum"), "{text}");
    let text =
        said(receive(&there, Some("v1"), &with_head(&whole, &|head| head.key ^= 1, &|_| {})));
    assert!(text.contains("expected the key that the header names"), "{text}");
    // A joined stream of two keys.
    let joined =
        [&with_head(&to_b, &|head| head.is_followed = true, &|_| {})[..], &other_key(&to_c)[..]];
    let text = said(verify(&mut &joined.concat()[..], &mut |_| {}));
    assert!(text.contains("expected the key of the stream before it"), "{text}");
    // What was refused has left nothing.
    assert_eq!(there.pool().volumes().keys.len(), 1);
    receive(&there, Some("v0"), &to_c).unwrap();
    there.unlock("v0", &key(1)).unwrap();
    assert!(contents(&there, "v0") == model);
}

fn key_of(stream: &[u8]) -> u64 {
    Head::parse(stream.first_chunk().unwrap()).unwrap().key
}

/// A stream with another head and key slot, and with right checksums, as an attacker prints it.
fn with_head(stream: &[u8], head: &dyn Fn(&mut Head), slot: &dyn Fn(&mut [u8])) -> Vec<u8> {
    let mut new = Head::parse(stream.first_chunk().unwrap()).unwrap();
    let old = new.clone();
    head(&mut new);
    printed_again(stream, &old, &new, &|record, payload| {
        if record.kind == Kind::Key {
            slot(payload);
        }
    })
}

/// Changes a record and its payload.
type ChangeRecord<'a> = dyn Fn(&mut Record, &mut Vec<u8>) + 'a;

/// Prints the records of a stream again after `change`.
fn printed_again(stream: &[u8], old: &Head, new: &Head, change: &ChangeRecord<'_>) -> Vec<u8> {
    let head = new.print();
    let (mut out, mut chain) = (head.to_vec(), Head::chain(&head));
    let (mut at, mut from) = (HEAD_BYTES, old.start);
    for number in 0.. {
        let Some(bytes) = stream[at..].first_chunk() else { break };
        let mut record = Record::parse(bytes, old, number, from).unwrap();
        at += RECORD_BYTES;
        let mut payload = stream[at..at + record.len as usize].to_vec();
        (at, from) = (at + payload.len(), record.first + record.count);
        change(&mut record, &mut payload);
        let mut bytes = [0; RECORD_BYTES];
        chain = record.print(chain, &payload, &mut bytes);
        out.extend(bytes);
        out.extend(payload);
    }
    out
}

/// A stream whose checksums are right, but whose block is at the number of another one, or changed:
/// only the key can tell, and does.
#[test]
fn a_block_that_was_moved_or_changed_within_a_stream_is_not_read() {
    let place = place("raw-moved");
    let (here, there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    encrypted(&here, "v0", 1);
    {
        let (_volume, mut io) = handle(&here, "v0", Compression::None);
        let text = MARK.repeat(BLOCK / MARK.len());
        io.write(Sector(8), &text, Flags::NONE).unwrap();
        io.write(Sector(80), &text, Flags::NONE).unwrap();
    }
    here.snapshot("v0@a").unwrap();
    let whole = sent(&here, &RAW);
    let head = Head::parse(whole.first_chunk().unwrap()).unwrap();
    let moved = |record: &mut Record, _: &mut Vec<u8>| {
        record.first += u64::from(record.kind == Kind::Sealed && record.first == 1);
    };
    let changed = |record: &mut Record, payload: &mut Vec<u8>| {
        if record.kind == Kind::Sealed && record.first == 1 {
            payload[100] ^= 1;
        }
    };
    let changes: [(&str, &ChangeRecord<'_>, u64); 2] =
        [("moved", &moved, 2), ("changed", &changed, 1)];
    for (name, change, bad) in changes {
        let stream = printed_again(&whole, &head, &head, change);
        assert!(verify(&mut &stream[..], &mut |_| {}).is_ok(), "the checksums are right");
        receive(&there, Some(name), &stream).unwrap();
        there.unlock(name, &key(1)).unwrap();
        let (_volume, mut io) = handle(&there, name, Compression::None);
        let mut block = vec![0; BLOCK];
        assert_eq!(io.read(Sector(bad * 8), &mut block), Err(Status::Protection), "{name}");
        assert_eq!(io.read(Sector(80), &mut block), Ok(()), "the other block");
        assert!(has_mark(&block));
    }
    // Without the checksums of an attacker the move is found by the receiver.
    let mut stream = whole.clone();
    let at = HEAD_BYTES + RECORD_BYTES + 85 + 8;
    stream[at] = 2;
    let text = said(receive(&there, Some("v1"), &stream));
    assert!(text.starts_with("invalid stream at byte 637") && text.contains("checksum"), "{text}");
}

/// Regression: the token after a malformed record began after it, so its blocks were never there.
#[test]
fn a_malformed_record_is_sent_again_by_the_continuation() {
    let place = place("raw-malformed");
    let (here, there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    encrypted(&here, "v0", 1);
    {
        let (_volume, mut io) = handle(&here, "v0", Compression::None);
        let text = MARK.repeat(BLOCK / MARK.len());
        io.write(Sector(8), &text, Flags::NONE).unwrap();
        io.write(Sector(80), &text, Flags::NONE).unwrap();
    }
    here.snapshot("v0@a").unwrap();
    let whole = sent(&here, &RAW);
    let head = Head::parse(whole.first_chunk().unwrap()).unwrap();
    let bad = printed_again(&whole, &head, &head, &|record, payload| {
        if record.kind == Kind::Sealed && record.first == 10 {
            payload.pop();
            record.len -= 1;
        }
    });
    let target = ReceiveTarget { name: None, is_resumable: true };
    let error = receive::receive(&there, &target, &mut &bad[..], &mut |_| {});
    let Err(VolumeError::Interrupted { token, .. }) = error else { panic!("{error:?}") };
    let token: ResumeToken = token.parse().unwrap();
    assert!(token.start <= 10, "{token:?}");
    let mut rest = Vec::new();
    Sending::resume(&here, &token, &RAW).unwrap().run(&mut rest, &mut |_| {}).unwrap();
    receive::receive(&there, &target, &mut &rest[..], &mut |_| {}).unwrap();
    there.unlock("v0", &key(1)).unwrap();
    assert!(contents(&there, "v0") == contents(&here, "v0"));
}

/// Regression: after renames the rest of a stream went into the volume of another key.
#[test]
fn a_receive_is_not_continued_in_a_volume_of_another_key() {
    let place = place("raw-renamed");
    let (here, there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    let mut random = fastrand::Rng::with_seed(65);
    let mut model = vec![0; SIZE];
    encrypted(&here, "v0", 1);
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@a").unwrap();
    let plain = SendOptions { is_raw: false, ..RAW };
    receive(&there, Some("v0"), &sent(&here, &RAW)).unwrap();
    receive(&there, Some("p"), &sent(&here, &plain)).unwrap();
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@b").unwrap();
    let options = SendOptions { snapshot: "v0@b", base: Some("@a"), ..plain };
    let more = sent(&here, &options);
    there.unlock("v0", &key(1)).unwrap();
    let target = ReceiveTarget { name: Some("v0"), is_resumable: true };
    let receive = |mut stream: &[u8]| receive::receive(&there, &target, &mut stream, &mut |_| {});
    let error = receive(&more[..more.len() / 2]);
    let Err(VolumeError::Interrupted { token, .. }) = error else { panic!("{error:?}") };
    there.rename("v0", "old").unwrap();
    there.rename("p", "v0").unwrap();
    let mut rest = Vec::new();
    let token: ResumeToken = token.parse().unwrap();
    Sending::resume(&here, &token, &options).unwrap().run(&mut rest, &mut |_| {}).unwrap();
    let text = said(receive(&rest));
    assert!(text.contains("partly received, for another volume that had this name"), "{text}");
    receive::abort(&there, "v0").unwrap();
    receive(&more).unwrap();
    assert!(contents(&there, "v0") == model);
    // The pool refuses that to every caller.
    let id = |name| there.pool().find(name).unwrap().meta.id;
    let change = Change::Rollback { id: id("v0"), to: id("old@a") };
    assert!(there.pool().change("v0", change).is_err());
}

/// A volume keeps the passphrase or key that it has where it is received.
#[test]
fn a_key_that_was_changed_at_the_sender_stays_as_it_is_at_the_receiver() {
    let place = place("raw-change-key");
    let (here, there) = (pool(&place, "here", 4096), pool(&place, "there", 4096));
    encrypted(&here, "v0", 1);
    here.snapshot("v0@a").unwrap();
    assert_eq!(receive(&there, None, &sent(&here, &RAW)).unwrap().other_secret, [""; 0]);
    here.change_key("v0", None, &key(2)).unwrap();
    here.snapshot("v0@b").unwrap();
    let (snapshot, base) = ("v0@b", Some("@a"));
    let more = sent(&here, &SendOptions { snapshot, base, ..RAW });
    let again = sent(&here, &RAW);
    assert_eq!(receive(&there, None, &more).unwrap().other_secret, ["v0@b"]);
    // A complete stream of the same key under another name.
    assert_eq!(receive(&there, Some("v1"), &again).unwrap().other_secret, ["v1@a"]);
    for name in ["v0", "v1"] {
        assert!(said(there.unlock(name, &key(2))).contains("cannot decrypt the key"));
        there.unlock(name, &key(1)).unwrap();
        there.lock(name).unwrap();
    }
    there.change_key("v1", Some(&key(1)), &key(2)).unwrap();
    there.unlock("v0", &key(2)).unwrap();
    assert_eq!(there.pool().volumes().keys.len(), 1);
}
