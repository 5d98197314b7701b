//! A read that fails once while a pool is being opened: the opening is refused, or has everything;
//! and so has the next one.

use blockyard_core::Status;
use blockyard_sim::directory::Directory;

use crate::rig::{Rig, Shape, Step, format};
use crate::simulated::{Fault, Simulated};

/// A pool that is full of moves: beside blocks of the first leaf, which is written again and again,
/// there is one of the other leaves, which are not.
fn moving(directory: &Directory) -> (Rig, Shape) {
    let mut shape = Shape { blocks: 600, ..Shape::tiny() };
    // There is much log behind a checkpoint, through segments that are free only since then.
    shape.options.checkpoint_bytes = 256 << 10;
    shape.options.segments_max = 60;
    format(directory, &shape);
    let mut rig = Rig::open(directory, &shape);
    for group in 0..256 {
        let (moved, first) = (256 + group, group * 7 % 248);
        for (first, count) in [(moved, 1), (first, 7)] {
            assert_eq!(rig.take(Step::Write { first, count, fua: true }), Status::Ok);
        }
    }
    (rig, shape)
}

/// A page that cannot be read while the log is carried out was taken for one whose blocks stay
/// where they were. Where they were there may be something else by then: they were lost for good,
/// though they were whole where they are.
#[test]
fn a_page_that_cannot_be_read_once_loses_no_moves() {
    let directory = Directory::default();
    let (mut rig, shape) = moving(&directory);
    let (mut refused, mut opened) = (0, 0);
    for round in 0..400_u64 {
        let step = Step::Write { first: round * 7 % 248, count: 7, fua: true };
        assert_eq!(rig.take(step), Status::Ok);
        if round % 8 > 0 {
            continue;
        }
        let (wanted, medium) = (rig.contents(), directory.medium());
        for number in 1.. {
            // As a kill leaves it.
            let directory = medium.cut(|_, _| 0);
            let store = Simulated::new(&directory);
            store.fail(Fault::FailingRead(number));
            let found = Rig::on(store.clone(), &directory, &shape);
            let is_felt = store.reads() >= number;
            store.fail(Fault::None);
            let mut rig = match found {
                Ok(rig) => {
                    opened += u64::from(is_felt);
                    rig
                }
                Err(error) => {
                    refused += u64::from(error.to_string().contains("page of the map"));
                    Rig::open(&directory, &shape)
                }
            };
            assert_eq!(rig.contents(), wanted, "round {round}: read {number} has failed");
            if !is_felt {
                break;
            }
        }
    }
    assert!(refused > 20 && opened > 20, "{refused} refused, {opened} opened");
}
