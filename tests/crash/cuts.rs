//! The power is cut at any write or sync, also of a recovery, on a disk that keeps nothing else
//! but what was synced.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fastrand::Rng;

use crate::client::Client;
use crate::disk::Fault;
use crate::history::{History, PAGE};
use crate::mounted::Mounted;
use crate::rounds::{Seed, seeds};
use crate::workload::{End, Workload};
use crate::yard::Yard;

/// Disks of `make test`; each is cut a few times.
const FEW: u64 = 2;
const CUTS: u64 = 5;

const VOLUME_BYTES: u64 = 8 << 20;

fn kill(mut yard: Yard) {
    yard.signal("KILL");
    yard.end();
}

/// One opening of the volume, to its end; says how many answers it gave. `more` are parameters.
fn live(
    mounted: &Mounted,
    history: &mut History,
    seed: &Seed,
    random: &mut Rng,
    more: &str,
) -> u64 {
    let device = format!("volume:///v0?path={}&size={VOLUME_BYTES}{more}", mounted.file("pool"));
    // Some while it comes up, most while it works, some not at all.
    let kind = random.u32(..10);
    if kind < 3 {
        mounted.disk().fail(Some(Fault::Cut(random.u64(..130))));
    }
    let yard = match Yard::try_serve(&[&device]) {
        Ok(yard) => yard,
        Err((status, text)) => {
            assert!(mounted.disk().is_off(), "{seed}: ended with {status}: {text}");
            return 0;
        }
    };
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    match client.contents() {
        // What is there although the power was not cut need not outlive the next cut.
        Ok(contents) => history.check(&contents, false),
        Err(error) => assert!(mounted.disk().is_off(), "{seed}: {error}"),
    }
    if kind >= 3 {
        mounted.disk().fail(Some(Fault::Cut(random.u64(..400))));
    }
    let mut workload = Workload::new(client, history, random.u64(..));
    let answers = if kind == 9 { random.u64(1..500) } else { u64::MAX };
    match workload.run(answers) {
        End::Done => {}
        end => {
            assert!(mounted.disk().is_off(), "{seed}: {end:?}");
            workload.drain();
        }
    }
    let answers = workload.answers;
    kill(yard);
    answers
}

/// A disk with a volume on it that is cut a few times; says how many answers it gave in all.
fn disk(seed: &Seed, more: &str) -> u64 {
    let mut random = Rng::with_seed(seed.0);
    let mounted = Mounted::new(seed.0);
    let mut history = History::new(VOLUME_BYTES / PAGE as u64);
    let mut answers = 0;
    for _ in 0..CUTS {
        answers += live(&mounted, &mut history, seed, &mut random, more);
        if mounted.disk().is_off() {
            mounted.disk().switch_on();
        }
    }
    mounted.disk().fail(None);
    let device = format!("volume:///v0?path={}&size={VOLUME_BYTES}{more}", mounted.file("pool"));
    let yard = Yard::serve(&[&device]);
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    history.check(&client.contents().unwrap(), false);
    // It goes on.
    assert!(matches!(Workload::new(client, &mut history, seed.0).run(200), End::Done), "{seed}");
    kill(yard);
    answers
}

#[test]
fn nothing_durable_is_lost_when_the_power_is_cut() {
    let mut answers = 0;
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let block = ["4k", "16k", "64k"][seed.0 as usize % 3];
        let compress = ["lz4", "none"][seed.0 as usize / 3 % 2];
        answers += disk(&seed, &format!("&volblocksize={block}&compress={compress}"));
    }
    assert!(answers > 0, "the client was answered something");
}

/// A volume that answers flush and FUA at once does lose what it said is durable: these tests would
/// see it.
#[test]
fn a_volume_without_syncs_is_found_out() {
    let mut seeds = 1..=5;
    let found_out = seeds.any(|seed| {
        let run = || disk(&Seed(seed), "&sync=disabled");
        catch_unwind(AssertUnwindSafe(run)).is_err()
    });
    assert!(found_out, "none of five disks has lost anything");
}
