//! A catalogue longer than a segment. It is stored in pages, of which a checkpoint writes those
//! that changed. Regression: such a catalogue made every checkpoint fail.

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_volume_format::catalogue::{Change, VolumeMeta};

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
