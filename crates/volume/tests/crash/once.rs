//! A read fails once during an opening: the opening fails, or finds everything; the next opening
//! finds everything.

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::simulated_store::{FaultPlan, SimulatedStore, When};

use crate::fixture::{Fixture, Shape, Step, format};

/// A pool whose log is full of moves. Segments contain blocks of the first leaf, which are
/// overwritten repeatedly, and one block each of other leaves, which stay live.
fn moving(directory: &SimulatedDirectory) -> (Fixture, Shape) {
    let mut shape = Shape { blocks: 600, ..Shape::tiny() };
    // A long log after the checkpoint, through segments that became free only after it.
    shape.options.checkpoint_bytes = 256 << 10;
    shape.options.segments_max = 60;
    format(directory, &shape);
    let mut fixture = Fixture::open(directory, &shape);
    for group in 0..256 {
        let (moved, first) = (256 + group, group * 7 % 248);
        for (first, count) in [(moved, 1), (first, 7)] {
            assert_eq!(fixture.take(Step::Write { first, count, fua: true }), Status::Ok);
        }
    }
    (fixture, shape)
}

/// Regression: if a leaf could not be read during replay, recovery ignored the moves of its blocks
/// and kept their old addresses. Other data could be there by then, so intact blocks were lost
/// permanently.
#[test]
fn a_page_that_cannot_be_read_once_loses_no_moves() {
    let directory = SimulatedDirectory::default();
    let (mut fixture, shape) = moving(&directory);
    let (mut refused, mut opened) = (0, 0);
    for round in 0..400_u64 {
        let step = Step::Write { first: round * 7 % 248, count: 7, fua: true };
        assert_eq!(fixture.take(step), Status::Ok);
        if round % 8 > 0 {
            continue;
        }
        let (wanted, medium) = (fixture.contents(), directory.medium());
        for number in 1.. {
            // The state that a kill leaves.
            let directory = medium.cut(|_, _| 0);
            let store = SimulatedStore::new(&directory);
            store
                .set_faults(FaultPlan { failed_reads: When::Only(number), ..FaultPlan::default() });
            let found = Fixture::on(store.clone(), &directory, &shape);
            let is_felt = store.reads() >= number;
            store.set_faults(FaultPlan::default());
            let mut fixture = match found {
                Ok(fixture) => {
                    opened += u64::from(is_felt);
                    fixture
                }
                Err(error) => {
                    refused += u64::from(error.to_string().contains("page of the map"));
                    Fixture::open(&directory, &shape)
                }
            };
            assert_eq!(fixture.contents(), wanted, "round {round}: read {number} has failed");
            if !is_felt {
                break;
            }
        }
    }
    assert!(refused > 20 && opened > 20, "{refused} refused, {opened} opened");
}
