//! Receives that are interrupted and continued, and streams of several snapshots.
#![allow(clippy::unwrap_used)] // Test code.

mod pools;

use std::sync::Arc;

use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::names::receive_state_name;
use blockyard_volume::{Compression, Options, Running, VolumeError};
use blockyard_volume_admin::incoming::verify;
use blockyard_volume_admin::receive::{self, ReceiveTarget, Received};
use blockyard_volume_admin::send::{SendOptions, Sending};
use blockyard_volume_format::catalogue::VolumeMeta;
use blockyard_volume_format::stream::{HEAD_BYTES, ResumeToken};

use pools::{BLOCK, SIZE, contents, place, received, sent};

fn pool(place: &TempDir, name: &str) -> Arc<Running> {
    pools::pool(place, name, Options::default())
}

/// Changes random blocks of a volume and of its model; some become zeros, and some compress.
fn change(running: &Running, name: &str, random: &mut fastrand::Rng, model: &mut [u8]) {
    let volume = (running, name, Compression::default());
    // Of five blocks, three become noise, one zeros, and one repeats a byte.
    pools::change(volume, random, model, &|block, random| match random.u8(..3) {
        0 => block.fill(random.u8(..)),
        _ => random.fill(block),
    });
}

fn resumed(running: &Running, token: &ResumeToken) -> Vec<u8> {
    let is_compressed = token.start % 2 == 1;
    let options = SendOptions { is_compressed, ..SendOptions::default() };
    let sending = Sending::resume(running, token, &options).unwrap();
    let mut out = Vec::new();
    sending.run(&mut out, &mut |_| {}).unwrap();
    out
}

fn receive(running: &Running, name: Option<&str>, stream: &[u8]) -> Result<Received, VolumeError> {
    received(running, ReceiveTarget { name, is_resumable: true }, stream)
}

fn metas(running: &Running) -> Vec<VolumeMeta> {
    running.pool().list()
}

fn names(running: &Running) -> Vec<String> {
    metas(running).into_iter().map(|meta| meta.name).collect()
}

/// The token of an interrupted receive.
fn token(error: &VolumeError) -> ResumeToken {
    match error {
        VolumeError::Interrupted { token, .. } => token.parse().unwrap(),
        other => panic!("{other}"),
    }
}

#[test]
fn fifty_cuts_at_random_bytes_change_nothing() {
    let place = place("resume-cuts");
    let here = pool(&place, "here");
    let mut there = pool(&place, "there");
    let mut random = fastrand::Rng::with_seed(50);
    here.create("v0", SIZE as u64, BLOCK as u32).unwrap();
    let mut model = vec![0; SIZE];
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@a").unwrap();
    let first = model.clone();
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@b").unwrap();
    let options = |snapshot, base| SendOptions { snapshot, base, ..SendOptions::default() };
    let (mut cuts, mut continued) = (0, 0);
    let mut round = 0;
    while cuts < 50 {
        let name = format!("r{round}");
        round += 1;
        for (snapshot, base, wanted) in [("v0@a", None, &first), ("v0@b", Some("@a"), &model)] {
            let mut stream = sent(&here, &options(snapshot, base));
            // Each stream is cut up to three times.
            for _ in 0..3 {
                let at = random.usize(..stream.len());
                let error = receive(&there, Some(&name), &stream[..at]).unwrap_err();
                cuts += 1;
                if at < HEAD_BYTES {
                    let is_cut = |error: &VolumeError| match error {
                        VolumeError::StreamEnds { offset } => *offset == at as u64,
                        _ => false,
                    };
                    assert!(is_cut(&error), "{error}");
                    continue;
                }
                let token = token(&error);
                continued += u64::from(token.start > 0);
                if random.bool() {
                    drop(there);
                    there = pool(&place, "there");
                }
                let kept = receive::interrupted(&there);
                assert_eq!(kept.len(), 1);
                assert_eq!((&kept[0].volume, kept[0].head.token()), (&name, token));
                // What the stream makes is not there yet.
                let count = metas(&there).iter().filter(|it| it.name.starts_with(&name)).count();
                assert_eq!(count, if base.is_some() { 2 } else { 0 });
                stream = resumed(&here, &token);
            }
            receive(&there, Some(&name), &stream).unwrap();
            assert_eq!(receive::interrupted(&there), []);
            assert!(contents(&there, &name) == *wanted, "{name} of {snapshot}, {cuts} cuts");
        }
        // The snapshots are those of the sender, so an increment of the sender fits.
        let guid = |pool: &Running, name: &str| {
            metas(pool).into_iter().find(|it| it.name == name).map(|it| (it.guid, it.created))
        };
        assert_eq!(guid(&there, &format!("{name}@b")), guid(&here, "v0@b"));
        let doomed = there.doomed(&name, true).unwrap();
        there.destroy_all(&doomed).unwrap();
        assert_eq!(names(&there), [""; 0]);
        assert!(there.pool().volumes().by_id.is_empty(), "nothing hidden is left");
    }
    assert!(continued > cuts / 2, "{continued} of {cuts} did not begin again");
}

#[test]
fn an_interrupted_receive_takes_only_its_own_continuation() {
    let place = place("resume-other");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    let mut random = fastrand::Rng::with_seed(51);
    let mut model = vec![0; SIZE];
    here.create("v0", SIZE as u64, BLOCK as u32).unwrap();
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@a").unwrap();
    let other = sent(&here, &SendOptions { snapshot: "v0@a", ..SendOptions::default() });
    change(&here, "v0", &mut random, &mut model);
    here.snapshot("v0@b").unwrap();
    let whole = sent(&here, &SendOptions { snapshot: "v0@b", ..SendOptions::default() });
    let said = |result: Result<Received, VolumeError>, wanted: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    };
    let error = receive(&there, Some("v0"), &whole[..whole.len() / 2]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the stream ends at byte") && text.contains("--resume 1-"), "{text}");
    let token = token(&error);
    assert!(token.start > 0);
    said(receive(&there, Some("v0"), &other), "partly received: it has `v0@b` up to block");
    let rest = resumed(&here, &token);
    said(receive(&there, Some("v1"), &rest), "nothing of `v1` was received before");
    // A stream that leaves blocks out does not fit, nor one from the beginning, which would send
    // again what is there; one that repeats blocks does.
    let later = resumed(&here, &ResumeToken { start: token.start + 1, ..token });
    said(receive(&there, Some("v0"), &later), "partly received");
    said(receive(&there, Some("v0"), &whole), &format!("--resume {token}`"));
    let repeats = resumed(&here, &ResumeToken { start: 1, ..token });
    receive(&there, Some("v0"), &repeats).unwrap();
    assert!(contents(&there, "v0") == model);
    // What is dropped is gone, and its space with it.
    let error = receive(&there, Some("v1"), &whole[..whole.len() - 1]).unwrap_err();
    assert!(matches!(error, VolumeError::Interrupted { .. }), "{error}");
    receive::abort(&there, "v1").unwrap();
    assert_eq!(there.pool().volumes().by_id.len(), 2);
    let error = receive::abort(&there, "v1").unwrap_err().to_string();
    assert_eq!(error, "invalid name `v1`: expected a volume that was partly received");
    // Damage interrupts too, and the undamaged rest continues.
    let mut damaged = whole.clone();
    damaged[whole.len() * 3 / 4] ^= 1;
    let error = receive(&there, Some("v1"), &damaged).unwrap_err();
    let rest = resumed(&here, &self::token(&error));
    receive(&there, Some("v1"), &rest).unwrap();
    assert!(contents(&there, "v1") == model);
    for (token, wanted) in [
        (ResumeToken { guid: 1, ..token }, "that of a snapshot, and of its base"),
        (ResumeToken { base: Some(1), ..token }, "that of a snapshot, and of its base"),
        (ResumeToken { start: 257, ..token }, "a block of the snapshot as the start"),
    ] {
        let error = Sending::resume(&here, &token, &SendOptions::default())
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

/// Regression: what was received was dropped, as if nothing had been, when its position could not
/// be read.
#[test]
fn a_part_whose_position_cannot_be_read_is_kept_until_it_is_dropped() {
    let place = place("resume-position");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    let mut model = vec![0; SIZE];
    here.create("v0", SIZE as u64, BLOCK as u32).unwrap();
    change(&here, "v0", &mut fastrand::Rng::with_seed(56), &mut model);
    here.snapshot("v0@a").unwrap();
    let whole = sent(&here, &SendOptions { snapshot: "v0@a", ..SendOptions::default() });
    let rest = resumed(&here, &token(&receive(&there, None, &whole[..SIZE / 8]).unwrap_err()));
    {
        let live = there.pool().find(&receive_state_name("v0")).unwrap();
        let mut handle = VolumeHandle::open(there.pool(), live, Compression::None, 1).unwrap();
        let written = handle.write(0, BLOCK, &|_, into| into.fill(7), 0, false);
        assert!(matches!(written, Outcome::Taken));
    }
    let error = receive(&there, None, &rest).unwrap_err().to_string();
    assert!(error.contains("`v0` is partly received, and how far cannot be read"), "{error}");
    receive::abort(&there, "v0").unwrap();
    receive(&there, None, &whole).unwrap();
    assert!(contents(&there, "v0") == model);
}

/// Regression: a sender that did not learn that its stream had arrived, as it was killed or the
/// connection broke after the last byte, sent it again and was refused for ever.
#[test]
fn a_stream_that_has_arrived_is_ended_by_the_token_of_its_refusal() {
    let place = place("resume-arrived");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    let mut random = fastrand::Rng::with_seed(55);
    let mut model = vec![0; SIZE];
    here.create("v0", SIZE as u64, BLOCK as u32).unwrap();
    let mut base = None;
    for snapshot in ["v0@a", "v0@b"] {
        change(&here, "v0", &mut random, &mut model);
        here.snapshot(snapshot).unwrap();
        let stream = sent(&here, &SendOptions { snapshot, base, ..SendOptions::default() });
        // With and without `-s`: the receive is complete, so nothing is left of it.
        let target = ReceiveTarget { name: None, is_resumable: base.is_none() };
        let receive = |mut stream: &[u8]| {
            receive::receive(&there, &target, &mut stream, &mut |_| {}).map(|it| it.snapshots)
        };
        assert_eq!(receive(&stream).unwrap(), [snapshot]);
        let error = receive(&stream).unwrap_err().to_string();
        assert!(error.contains("is here already, with all blocks"), "{error}");
        let (_, token) = error.rsplit_once("--resume ").unwrap();
        let token: ResumeToken = token.trim_end_matches('`').parse().unwrap();
        assert_eq!(token.start, (SIZE / BLOCK) as u64);
        let end = resumed(&here, &token);
        assert!(end.len() < 600, "{}", end.len());
        let before = metas(&there);
        assert_eq!(receive(&end).unwrap(), [snapshot]);
        assert_eq!(metas(&there), before);
        assert!(contents(&there, "v0") == model);
        // A part of it is no end, nor is the end of a stream whose snapshot is not there.
        let cut = receive(&end[..end.len() - 1]).unwrap_err();
        assert!(matches!(cut, VolumeError::StreamEnds { .. }), "{cut}");
        base = Some(snapshot);
    }
    let guid = metas(&here).into_iter().find(|it| it.name == "v0@b").unwrap().guid;
    let end = resumed(&here, &ResumeToken { guid, base: None, start: 256, is_raw: false });
    let error = receive(&there, Some("v1"), &end).unwrap_err().to_string();
    assert!(error.contains("nothing of `v1` was received before"), "{error}");
}

/// A pool with a volume, its clone, and a clone of that.
fn family(here: &Running) -> Vec<(&'static str, Vec<u8>)> {
    let mut random = fastrand::Rng::with_seed(52);
    let mut model = vec![0; SIZE];
    here.create("base", SIZE as u64, BLOCK as u32).unwrap();
    for snapshot in ["base@a", "base@b"] {
        change(here, "base", &mut random, &mut model);
        here.snapshot(snapshot).unwrap();
    }
    here.clone_of("base@b", "clone").unwrap();
    let mut clone = model.clone();
    change(here, "clone", &mut random, &mut clone);
    here.snapshot("clone@own").unwrap();
    here.clone_of("clone@own", "second").unwrap();
    let mut second = clone.clone();
    change(here, "second", &mut random, &mut second);
    // The origins become clones, so that numbers say nothing about the order.
    here.promote("clone").unwrap();
    change(here, "base", &mut random, &mut model);
    here.snapshot_all("all").unwrap();
    vec![("base", model), ("clone", clone), ("second", second)]
}

#[test]
fn a_pool_is_replicated_with_its_snapshots_and_clones() {
    let place = place("replicate");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    let wanted = family(&here);
    let options = SendOptions { snapshot: "@all", replicate: true, ..SendOptions::default() };
    let stream = sent(&here, &options);
    // The clones are sent as what they have changed.
    assert!(stream.len() < 5 * 60 * (BLOCK + 40) + 6 * 600, "{}", stream.len());
    let verified = verify(&mut &stream[..], &mut |_| {}).unwrap();
    let order: Vec<_> = verified.snapshots.iter().map(|it| it.head.name.as_str()).collect();
    let chain = ["clone@a", "clone@b", "clone@own", "clone@all"];
    assert_eq!(order, [&chain[..], &["base@all", "second@all"]].concat());
    let packed = sent(&here, &SendOptions { is_compressed: true, ..options });
    assert!(packed.len() < stream.len());
    let received = receive(&there, None, &packed).unwrap();
    assert_eq!(received.snapshots, order);
    for (name, model) in &wanted {
        assert!(contents(&there, name) == *model, "{name}");
    }
    let mut listed = (names(&here), names(&there));
    listed.0.sort();
    listed.1.sort();
    assert_eq!(listed.0, listed.1);
    let origins = |pool: &Running| {
        let all = metas(pool);
        let name = |id: u32| all.iter().find(|it| it.id == id).map(|it| it.name.clone());
        let volumes = all.iter().filter(|it| !it.is_snapshot);
        let mut all: Vec<_> = volumes.map(|it| (it.name.clone(), name(it.origin))).collect();
        all.sort();
        all
    };
    assert_eq!(origins(&there), origins(&here));
    // A second time, only what has changed; a new volume is complete.
    let mut model = vec![0; SIZE];
    here.create("new", SIZE as u64, BLOCK as u32).unwrap();
    change(&here, "new", &mut fastrand::Rng::with_seed(53), &mut model);
    here.snapshot_all("more").unwrap();
    let more = SendOptions { snapshot: "@more", base: Some("@all"), ..options };
    let stream = sent(&here, &more);
    let received = receive(&there, None, &stream).unwrap();
    assert_eq!(received.snapshots, ["clone@more", "new@more", "base@more", "second@more"]);
    assert!(contents(&there, "new") == model);
    let error = receive(&there, Some("base"), &stream).unwrap_err().to_string();
    assert!(error.contains("`base@more` exists already"), "{error}");
    let error = receive(&there, Some("other@x"), &stream).unwrap_err().to_string();
    assert!(error.contains("expected a volume, as the input has several snapshots"), "{error}");
    for (options, wanted) in [
        (SendOptions { snapshot: "@none", ..options }, "there is no snapshot `@none`"),
        (SendOptions { base: Some("@more"), ..options }, "older than `clone@all`"),
        (SendOptions { base: Some("base@a"), ..options }, "expected `@SNAPSHOT`"),
    ] {
        let error = Sending::begin(&here, &options).map(drop).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn intermediate_snapshots_follow_one_another() {
    let place = place("intermediate");
    let (here, there) = (pool(&place, "here"), pool(&place, "there"));
    let mut random = fastrand::Rng::with_seed(54);
    let mut model = vec![0; SIZE];
    here.create("v0", SIZE as u64, BLOCK as u32).unwrap();
    let mut models = Vec::new();
    for snapshot in ["a", "b", "c", "d"] {
        change(&here, "v0", &mut random, &mut model);
        here.snapshot(&format!("v0@{snapshot}")).unwrap();
        models.push(model.clone());
    }
    let first = SendOptions { snapshot: "v0@a", ..SendOptions::default() };
    receive(&there, Some("copy"), &sent(&here, &first)).unwrap();
    let options = SendOptions {
        snapshot: "v0@d",
        base: Some("@a"),
        intermediate: true,
        ..SendOptions::default()
    };
    let stream = sent(&here, &options);
    // Cut in the middle: the first snapshots stay, and the next one can be continued.
    let two = sent(&here, &SendOptions { snapshot: "v0@c", ..options }).len();
    for cut in [two, two + HEAD_BYTES + 8000] {
        let error = receive(&there, Some("copy"), &stream[..cut]);
        let error = error.unwrap_err();
        if cut == two {
            assert!(matches!(error, VolumeError::StreamEnds { .. }), "{error}");
            assert_eq!(names(&there), ["copy", "copy@a", "copy@b", "copy@c"]);
            for snapshot in ["copy@c", "copy@b"] {
                there.rollback("copy@a").unwrap();
                there.destroy(snapshot).unwrap();
            }
        } else {
            assert_eq!(token(&error).guid, metas(&here)[4].guid);
            let rest = resumed(&here, &token(&error));
            receive(&there, Some("copy"), &rest).unwrap();
        }
    }
    for (snapshot, model) in ["a", "b", "c", "d"].iter().zip(&models) {
        there.clone_of(&format!("copy@{snapshot}"), snapshot).unwrap();
        assert!(contents(&there, snapshot) == *model, "{snapshot}");
    }
    damage_is_found_without_a_pool(&stream, two);
    not_in_order_is_found_without_a_pool(&here, &options);
}

/// `two` is the length of the first two of the three streams.
fn damage_is_found_without_a_pool(stream: &[u8], two: usize) {
    let verified = verify(&mut &*stream, &mut |_| {}).unwrap();
    assert_eq!((verified.snapshots.len(), verified.bytes), (3, stream.len() as u64));
    for cut in [two, two - 1, stream.len() - 1] {
        let error = verify(&mut &stream[..cut], &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains(&format!("the stream ends at byte {cut}")), "{error}");
    }
    let longer = [stream, b"x"].concat();
    let error = verify(&mut &longer[..], &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("expected the end of the input"), "{error}");
    for at in [HEAD_BYTES + 100, two + 30, two + HEAD_BYTES + 2000, stream.len() - 1] {
        let mut damaged = stream.to_vec();
        damaged[at] ^= 4;
        let error = verify(&mut &damaged[..], &mut |_| {}).unwrap_err().to_string();
        assert!(error.starts_with("invalid stream at byte"), "{at}: {error}");
    }
}

fn not_in_order_is_found_without_a_pool(here: &Running, options: &SendOptions<'_>) {
    let only = SendOptions { intermediate: false, ..*options };
    let gap = sent(here, &SendOptions { snapshot: "v0@b", base: None, replicate: true, ..only });
    let end = sent(here, &SendOptions { base: Some("@c"), ..only });
    let of_b = sent(here, &SendOptions { snapshot: "v0@a", base: None, ..only }).len();
    let joined = [&gap[..of_b], &end[..]].concat();
    let error = verify(&mut &joined[..], &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("expected the snapshot of the stream before it"), "{error}");
    let error = Sending::begin(here, &SendOptions { base: None, ..*options }).map(drop);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the snapshot on which the first stream builds"), "{error}");
}
