//! A catalogue longer than a segment. It is stored in pages, of which a checkpoint writes those
//! that changed. Regression: such a catalogue made every checkpoint fail.

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_volume_format::catalogue::{Change, Hold, VolumeMeta};

use crate::fixture::{Fixture, Shape, Step, format, read};

/// Number of volumes and snapshots; the names of the volumes fill several segments.
const COUNT: usize = 400;

/// One in this number of volumes is a snapshot.
const SNAPSHOTS: usize = 16;

/// Makes a change of the catalogue, which must succeed.
fn change(fixture: &mut Fixture, change: Change) {
    let mut answer = fixture.pool.submit_change(change.clone());
    fixture.run();
    let status = answer.take().map(|reply| reply.status);
    assert_eq!(status, Some(Status::Ok), "{change:?}: {:?}", fixture.pool.counts());
}

#[test]
fn a_catalogue_longer_than_a_segment_is_written_in_pages() {
    let mut shape = Shape::tiny();
    (shape.options.segment_bytes, shape.options.segments_max) = (32 << 10, 120);
    (shape.block_bytes, shape.blocks) = (2048, 8);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let mut fixture = Fixture::open(&directory, &shape);
    let live = fixture.pool.find("v").unwrap().meta.clone();
    let long = "x".repeat(180);
    // For each volume, the number of disk operations when it had been made.
    let mut made = Vec::new();
    for number in 0..COUNT {
        let meta = match number % SNAPSHOTS {
            0 => {
                let (name, origin) = (format!("v@{number}"), live.id);
                VolumeMeta { name, is_snapshot: true, origin, ..live.clone() }
            }
            _ => VolumeMeta { name: format!("{long}-{number}"), ..live.clone() },
        };
        let kind = if number % SNAPSHOTS == 0 { Change::Copy } else { Change::Create };
        let write = Step::Write { first: number as u64 % 8, count: 1, fua: false };
        assert_eq!(fixture.take(write), Status::Ok, "{number}: {:?}", fixture.pool.counts());
        change(&mut fixture, kind(meta));
        made.push(directory.change_count());
    }
    let list = fixture.pool.list();
    let length: u64 = list.iter().map(|meta| meta.name.len() as u64).sum();
    assert!(length > u64::from(shape.options.segment_bytes), "{length} bytes of names");
    let contents = read(&mut fixture.handle, &shape).unwrap();
    drop(fixture);
    for (moment, change) in (1..).zip(&directory.changes()) {
        medium.apply(change);
        if moment % 97 != 0 {
            continue;
        }
        let found = Fixture::open(&medium.cut(|_, _| 0), &shape).pool.list();
        let answered = made.iter().filter(|at| **at <= moment).count();
        // One more volume may be there, which was not acknowledged yet.
        assert!((answered..=answered + 1).contains(&(found.len() - 1)), "at {moment}");
        assert_eq!(found[..], list[..found.len()], "at {moment}");
    }
    for found in [medium.cut(|_, _| 0), medium.kill()] {
        let mut fixture = Fixture::open(&found, &shape);
        assert_eq!(fixture.pool.list(), list);
        assert_eq!(read(&mut fixture.handle, &shape).unwrap(), contents);
    }
    let mut fixture = Fixture::open(&directory, &shape);
    for VolumeMeta { id, .. } in list.into_iter().filter(|meta| meta.name != "v") {
        change(&mut fixture, Change::Destroy { id });
    }
    drop(fixture);
    assert_eq!(Fixture::open(&directory, &shape).pool.list().len(), 1);
}

/// The names, origins and holds of all volumes and snapshots.
type Listing = Vec<(String, u32, Vec<Hold>)>;

fn listing(fixture: &Fixture) -> Listing {
    let list = fixture.pool.list();
    let volumes = fixture.pool.volumes();
    let holds = |id: u32| volumes.holds_of(id).to_vec();
    list.into_iter().map(|it| (it.name, it.origin, holds(it.id))).collect()
}

/// Renames, promotions, holds and snapshots of all volumes are there completely or not at all after
/// a power cut, and all that were answered are there.
#[test]
fn changes_of_the_catalogue_are_atomic_and_durable() {
    let mut shape = Shape::tiny();
    (shape.block_bytes, shape.blocks) = (2048, 8);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let mut fixture = Fixture::open(&directory, &shape);
    let live = fixture.pool.find("v").unwrap().meta.clone();
    let number = |fixture: &Fixture, name: &str| fixture.pool.find(name).unwrap().meta.id;
    let named = |name: &str| VolumeMeta { name: name.to_owned(), ..live.clone() };
    let copy = |name: &str, origin: u32| VolumeMeta {
        origin,
        is_snapshot: name.contains('@'),
        ..named(name)
    };
    let hold = Hold { tag: "keep".to_owned(), created: 5 };
    let all = |snapshot: &str| {
        let (first_id, snapshot) = (0, snapshot.to_owned());
        Change::SnapshotAll { first_id, snapshot, created: 7, seed: 9 }
    };
    let mut states = vec![(directory.change_count(), listing(&fixture))];
    let mut apply = |fixture: &mut Fixture, what: Change| {
        change(fixture, what);
        states.push((directory.change_count(), listing(fixture)));
    };
    apply(&mut fixture, Change::Create(named("w")));
    let w = number(&fixture, "w");
    apply(&mut fixture, Change::Copy(copy("w@a", w)));
    apply(&mut fixture, all("monday"));
    let a = number(&fixture, "w@a");
    apply(&mut fixture, Change::Hold { id: a, hold: hold.clone() });
    let monday = number(&fixture, "w@monday");
    apply(&mut fixture, Change::Copy(copy("clone", monday)));
    apply(&mut fixture, Change::Rename { id: w, name: "x".to_owned() });
    apply(&mut fixture, Change::Rename { id: a, name: "x@b".to_owned() });
    let promote = Change::Promote { id: number(&fixture, "clone") };
    apply(&mut fixture, promote);
    apply(&mut fixture, all("tuesday"));
    apply(&mut fixture, Change::Release { id: a, tag: hold.tag.clone() });
    apply(&mut fixture, Change::Destroy { id: a });
    let names: Vec<String> = listing(&fixture).into_iter().map(|(name, ..)| name).collect();
    let wanted =
        ["v", "x", "v@monday", "clone@monday", "clone", "v@tuesday", "x@tuesday", "clone@tuesday"];
    assert_eq!(names, wanted);
    refuse_all(&mut fixture, &hold);
    drop(fixture);
    let last = states.last().map_or(0, |(at, _)| *at);
    for (moment, change) in (1..=last).zip(&directory.changes()) {
        medium.apply(change);
        if moment < states[0].0 {
            continue;
        }
        let found = listing(&Fixture::open(&medium.cut(|_, _| 0), &shape));
        let answered = states.iter().rposition(|(at, _)| *at <= moment).unwrap_or(0);
        // One change more may be there, which was not answered yet.
        let may_be = states[answered..].iter().take(2).map(|(_, listing)| listing);
        assert!(may_be.into_iter().any(|listing| *listing == found), "at {moment}: {found:?}");
    }
}

/// Changes that are impossible in the state at the end of the test.
fn refuse_all(fixture: &mut Fixture, hold: &Hold) {
    let refuse = |fixture: &mut Fixture, what: Change, status: Status| {
        let mut answer = fixture.pool.submit_change(what.clone());
        fixture.run();
        assert_eq!(answer.take().map(|reply| reply.status), Some(status), "{what:?}");
    };
    let number = |fixture: &Fixture, name: &str| fixture.pool.find(name).unwrap().meta.id;
    let (first_id, snapshot) = (0, "tuesday".to_owned());
    let tuesday = Change::SnapshotAll { first_id, snapshot, created: 7, seed: 9 };
    // The fixture has `v` open.
    let v = number(fixture, "v");
    refuse(fixture, Change::Rename { id: v, name: "y".to_owned() }, Status::DevResource);
    let monday = number(fixture, "clone@monday");
    for name in ["x@monday", "clone@tuesday", "clone", "%hidden"] {
        let rename = Change::Rename { id: monday, name: name.to_owned() };
        refuse(fixture, rename, Status::Inval);
    }
    refuse(fixture, tuesday, Status::Inval);
    refuse(fixture, Change::Promote { id: v }, Status::Inval);
    refuse(fixture, Change::Release { id: monday, tag: "keep".to_owned() }, Status::Inval);
    refuse(fixture, Change::Hold { id: v, hold: hold.clone() }, Status::Inval);
    change(fixture, Change::Hold { id: monday, hold: hold.clone() });
    refuse(fixture, Change::Hold { id: monday, hold: hold.clone() }, Status::Inval);
    refuse(fixture, Change::Destroy { id: monday }, Status::DevResource);
}
