//! Wrong live counts of segments.

use blockyard_core::Status;
use blockyard_sim::directory::Directory;
use blockyard_volume::Running;
use blockyard_volume::check::check_in;
use blockyard_volume::store::mirror::assemble::Terms;

use crate::damage::{checkpoint, three_leaves};
use crate::rig::{self, Rig, Step, USE};

/// Regression: `check` reported a live count that was too small, and nothing could repair it. A
/// segment with a live count of 0 was free after the next opening.
#[test]
fn a_count_that_is_too_small_is_mended_by_a_scrub() {
    for left in [0, 512] {
        let directory = Directory::default();
        let (mut rig, shape) = three_leaves(&directory, 100);
        let wanted = rig.contents();
        checkpoint(&mut rig);
        let segments = rig.pool.segments();
        let (mut live, unknown) = segments.live();
        let most = *live.iter().max().unwrap();
        let full = live.iter_mut().filter(|live| **live == most).step_by(3);
        let count = full.map(|live| *live = left).count();
        assert!(count > 5);
        segments.set_live(live, unknown);
        checkpoint(&mut rig);
        drop(rig);
        let check = || {
            // The state that a kill would leave.
            let directory = directory.medium().cut(|_, _| 0);
            let store = rig::store(&directory, &shape, Terms::Look).unwrap();
            let report = check_in(store, &mut |_| {}).unwrap();
            assert!(report.damage.iter().all(|damage| damage.what.contains("are counted")));
            report.damaged
        };
        assert_eq!(check(), count as u64);
        for _ in 0..2 {
            let store = rig::store(&directory, &shape, USE).unwrap();
            let running = Running::start(store, shape.options).unwrap();
            let report = running.scrub(0, &mut |_, _| true).unwrap();
            assert_eq!((report.damaged, report.mended), (0, 0));
            assert_eq!(check(), 0);
        }
        let mut rig = Rig::open(&directory, &shape);
        rig.check_counts();
        for round in 0..500 {
            let step = Step::Write { first: 590 + round % 4, count: 1, fua: true };
            assert_eq!(rig.take(step), Status::Ok);
        }
        let found = rig.contents().0;
        assert_eq!(found[..590], wanted.0[..590]);
    }
}
