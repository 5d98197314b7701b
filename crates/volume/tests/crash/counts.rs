//! Wrong live counts of segments.

use blockyard_core::Status;
use blockyard_store::mirror::assemble::Terms;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_volume::Running;
use blockyard_volume_admin::check::check_in;
use blockyard_volume_admin::scrub::scrub;

use crate::damage::{checkpoint, three_leaves};
use crate::fixture::{self, Fixture, Step, USE};

/// Regression: `check` reported a live count that was too small, and nothing could repair it. A
/// segment with a live count of 0 was free after the next opening.
#[test]
fn a_count_that_is_too_small_is_mended_by_a_scrub() {
    for left in [0, 512] {
        let directory = SimulatedDirectory::default();
        let (mut fixture, shape) = three_leaves(&directory, 100);
        let wanted = fixture.contents();
        checkpoint(&mut fixture);
        let segments = fixture.pool.segments();
        let (mut live, unknown) = segments.live();
        let most = *live.iter().max().unwrap();
        let full = live.iter_mut().filter(|live| **live == most).step_by(3);
        let count = full.map(|live| *live = left).count();
        assert!(count > 5);
        segments.set_live(live, unknown);
        checkpoint(&mut fixture);
        drop(fixture);
        let check = || {
            // The state that a kill would leave.
            let directory = directory.medium().cut(|_, _| 0);
            let store = fixture::store(&directory, &shape, Terms::ReadOnly).unwrap();
            let report = check_in(store, &mut |_| {}).unwrap();
            assert!(report.damage.iter().all(|damage| damage.what.contains("are counted")));
            report.damaged
        };
        assert_eq!(check(), count as u64);
        for _ in 0..2 {
            let store = fixture::store(&directory, &shape, USE).unwrap();
            let running = Running::start(store, shape.options).unwrap();
            let report = scrub(&running, 0, &mut |_, _| true).unwrap();
            assert_eq!((report.damaged, report.repaired), (0, 0));
            assert_eq!(check(), 0);
        }
        let mut fixture = Fixture::open(&directory, &shape);
        fixture.check_counts();
        for round in 0..500 {
            let step = Step::Write { first: 590 + round % 4, count: 1, fua: true };
            assert_eq!(fixture.take(step), Status::Ok);
        }
        let found = fixture.contents().0;
        assert_eq!(found[..590], wanted.0[..590]);
    }
}
