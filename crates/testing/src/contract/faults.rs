//! A device under a fault injector with rules: the bios that fail are those that the injector
//! chose, they have no effect, and everything else agrees with the model.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_core::bio::{Flags, Op};
use blockyard_core::device::Device;
use blockyard_core::disk::Disk;
use blockyard_core::inject::{Chance, Injection, Latency, Rule};
use blockyard_core::middleware::{Faulty, InjectedFaults};
use blockyard_core::units::Sector;

use super::fixture::{Fixture, data_bytes};
use super::lockstep::fill;
use crate::model::{Model, ZoneRules};
use crate::seed::Seed;
use crate::workload::{Mix, Workload};

/// A status that no device here returns by itself.
const INJECTED: Status = Status::Protection;

/// One rule for writes in the first half, one for any operation with a bounded count, one for
/// appends, and one that delays reads.
fn injections(sectors: u64) -> [Rule; 4] {
    let rule = |op, start, sectors, chance, times| Rule {
        op,
        start: Sector(start),
        sectors,
        chance: Chance::OneIn(chance),
        times,
        ..Rule::new(INJECTED)
    };
    [
        rule(Some(Op::Write), 0, sectors / 2, 3, None),
        rule(None, 0, sectors, 10, Some(50)),
        rule(Some(Op::ZoneAppend), 0, u64::MAX, 4, None),
        Rule {
            status: Status::Ok,
            latency: Some(Latency::Uniform { min_ns: 0, max_ns: 50_000 }),
            ..rule(Some(Op::Read), 0, sectors, 4, None)
        },
    ]
}

/// Runs a wild workload under the injector and compares it with the model.
pub(super) fn injected<D: Device>(
    make: impl Fn() -> D,
    keeps_data: bool,
    rules: ZoneRules,
    compose: impl Fn(Arc<Faulty<D>>) -> Arc<dyn Disk>,
    seed: Seed,
) {
    let device = Arc::new(Faulty::new(make(), seed.0));
    let disk = compose(Arc::clone(&device));
    for rule in injections(device.geometry().sectors) {
        disk.inject(&Injection::AddRule(rule)).expect("the injector takes rules");
    }
    let model = Model::new(disk.geometry(), disk.limits(), keeps_data).with_rules(rules);
    let mut fixture = Fixture::with_model(disk, model);
    let mut mix = Mix::wild();
    mix.data_sectors_max = 32;
    let mut workload = Workload::new(seed, 7, mix);
    let mut failed = 0;
    for _ in 0..2000 {
        let mut bio = workload.next(&fixture.model);
        // The injector may fail a flush before or after a write without the write, or one piece of
        // a bio without the others. Then a failed bio had an effect.
        bio.flags = bio.flags.without(Flags::FUA | Flags::PREFLUSH);
        if !fixture.model.is_one_piece(&bio) {
            continue;
        }
        fill(&fixture, &mut workload, &bio);
        let bio = bio.with_buf(fixture.buf(0));
        let mut data = vec![0; data_bytes(&bio)];
        fixture.region.read(0, &mut data);
        let done = fixture.run(bio);
        if done.status == INJECTED {
            failed += 1;
            continue;
        }
        let wanted = fixture.model.apply(&bio, &mut data);
        assert_eq!((done.status, done.sector), (wanted.status, wanted.sector), "{bio:?}");
        fixture.same_report();
    }
    let (strikes, injected) = (device.strikes(), device.fault_injector().map(|it| it.injected()));
    assert_eq!(strikes[1..].iter().sum::<u64>(), failed, "strikes {strikes:?}, failed bios");
    assert_eq!(strikes[2], 50, "the bound of the second rule is reached and kept");
    assert_eq!(injected, Some(InjectedFaults { failed, delayed: strikes[0] }));
    assert!(strikes[0] > 0, "no read was delayed");
    fixture.disk.inject(&Injection::RemoveRules).expect("the injector forgets its rules");
    fixture.same_report();
    fixture.same_contents();
}
