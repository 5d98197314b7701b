//! The contract: a test suite that every device passes, whatever its kind and whatever wraps it.
//!
//! A [`Subject`] makes fresh disks of one kind, and [`run`] checks every clause on it. A clause
//! uses disks through channels only, and compares them with the reference model.
//!
//! The model relies on one promise beyond those of a channel. Bios that one channel submits reach
//! the device in the order in which they were pushed, if they concern one zone or the limits that
//! zones share. Without that order, a client could not keep two writes to a zone in flight.

mod batched;
mod channel;
mod faults;
mod fixture;
mod lockstep;
mod threads;
mod zones;

use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::device::Device;
use blockyard_core::disk::Disk;
use blockyard_core::middleware::{Delayed, Faulty, TraceSource};
use blockyard_core::zone::gate::ZoneWritePlugs;

use crate::clock::ManualClock;
use crate::model::{Model, ZoneRules};
use crate::seed::Seed;

pub use fixture::{Fixture, TestChannel};

/// Queue depth of a subject's channels.
pub const DEPTH: u16 = 64;

/// How long a delayed subject delays completions, in nanoseconds of its manual clock.
const DELAY_NS: u64 = 50_000;

/// A kind of device, with the properties that the suite needs.
pub struct Subject {
    name: String,
    make: Box<dyn Fn() -> Arc<dyn Disk> + Sync>,
    keeps_data: bool,
    rules: ZoneRules,
}

impl Subject {
    /// Devices without a wrapper. `keeps_data` says whether reads return what was written.
    pub fn plain<D: Device>(
        name: &str,
        keeps_data: bool,
        make: impl Fn() -> D + Sync + 'static,
    ) -> Subject {
        Subject::disks(name, keeps_data, move || disk(make()))
    }

    /// Disks that the caller composes; each call of `make` makes a fresh one.
    pub fn disks(
        name: &str,
        keeps_data: bool,
        make: impl Fn() -> Arc<dyn Disk> + Sync + 'static,
    ) -> Subject {
        let (name, rules) = (name.to_owned(), ZoneRules::NullBlk);
        Subject { name, make: Box::new(make), keeps_data, rules }
    }

    /// Sets other zone rules.
    #[must_use]
    pub fn with_rules(self, rules: ZoneRules) -> Subject {
        Subject { rules, ..self }
    }

    /// Devices under [`Delayed`].
    pub fn delayed<D: Device>(
        name: &str,
        keeps_data: bool,
        make: impl Fn() -> D + Sync + 'static,
    ) -> Subject {
        Subject::plain(&format!("delayed {name}"), keeps_data, move || {
            Delayed::new(make(), DELAY_NS)
        })
    }

    /// Devices under [`Faulty`] without rules, which must change nothing.
    pub fn faulty<D: Device>(
        name: &str,
        keeps_data: bool,
        make: impl Fn() -> D + Sync + 'static,
    ) -> Subject {
        Subject::plain(&format!("faulty {name}"), keeps_data, move || Faulty::new(make(), 1))
    }

    /// Devices with a zone write plug, which makes appends of writes if the device has none.
    pub fn gated<D: Device>(
        name: &str,
        keeps_data: bool,
        make: impl Fn() -> D + Sync + 'static,
    ) -> Subject {
        Subject::disks(&format!("gated {name}"), keeps_data, move || gated(make()))
    }

    /// Devices that are recorded; the events that do not fit into the recorder's rings are lost.
    pub fn traced<D: Device>(
        name: &str,
        keeps_data: bool,
        make: impl Fn() -> D + Sync + 'static,
    ) -> Subject {
        Subject::plain(&format!("traced {name}"), keeps_data, move || {
            let source = TraceSource { thread_id: || 1, now: || blockyard_core::Nanos(0) };
            let traced = Faulty::new(make(), 1);
            let recording = traced.trace_point().and_then(|point| point.record(source));
            // It records until the device is closed.
            std::mem::forget(recording.expect("nothing else records it"));
            traced
        })
    }

    /// The subject's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes a fresh disk.
    pub fn disk(&self) -> Arc<dyn Disk> {
        (self.make)()
    }

    /// Opens a channel of a fresh disk, with a model to compare with.
    pub fn fixture(&self) -> Fixture {
        let disk = self.disk();
        let model = self.model(&*disk);
        Fixture::with_model(disk, model)
    }

    /// The model of a fresh disk.
    fn model(&self, disk: &dyn Disk) -> Model {
        Model::new(disk.geometry(), disk.limits(), self.keeps_data).with_rules(self.rules)
    }
}

/// A disk of the device, without scheduler, on a clock that only sleeping advances.
fn disk<D: Device>(device: D) -> Arc<dyn Disk> {
    let config = ChannelConfig { depth: DEPTH };
    let clock = ManualClock::new();
    let name = "subject".to_owned();
    Arc::new(Composed::with_clock(name, "subject", device, config, clock))
}

/// A disk of the device, with a zone write plug if it has zones.
fn gated<D: Device>(device: D) -> Arc<dyn Disk> {
    let config = ChannelConfig { depth: DEPTH };
    let (clock, device) = (ManualClock::new(), Arc::new(device));
    let name = "subject".to_owned();
    let gates = ZoneWritePlugs::new(Arc::clone(&device)).expect("there is memory for it");
    let disk = Composed::with_clock(name, "subject", device, config, clock);
    match gates {
        Some(gates) => Arc::new(disk.with_gates(gates)),
        None => Arc::new(disk),
    }
}

/// One clause of the contract.
type Clause = fn(&Subject, Seed);

/// Every clause, with its name in failure messages.
const CLAUSES: &[(&str, Clause)] = &[
    ("one at a time, as the model says", lockstep::wild),
    ("many in flight, as the model says", batched::as_the_model_says),
    ("merging and splitting are invisible", batched::merging_is_invisible),
    ("flush, FUA and PREFLUSH", lockstep::flushes),
    ("senseless bios get their status and touch nothing", channel::senseless),
    ("data outside of regions are refused", channel::outside_of_regions),
    ("a full channel takes less and serves on", channel::full),
    ("dropping a channel ends what is in flight", channel::dropped_in_flight),
    ("a region in flight cannot be unregistered", channel::unregister_in_flight),
    ("waiting ends, and an idle channel waits for nothing", channel::waiting),
    ("statistics count what was done", channel::statistics),
    ("extents tell the truth", channel::extents),
    ("writes to a zone keep the order of their pushes", zones::order),
    ("threads on disjoint areas do not meet", threads::disjoint),
    ("appends by eight threads: no gap, no overlap", threads::appends),
    ("limits hold under threads, and nothing leaks", threads::limits),
    ("reports can be read in parts", zones::report_in_parts),
    ("limits are met and given back", zones::limits),
];

/// Checks every clause on fresh disks of the subject.
///
/// # Panics
/// If the subject breaks a clause; the message names the subject, the clause and the seed.
pub fn run(subject: &Subject) {
    let seed = Seed::from_env();
    for (name, clause) in CLAUSES {
        let _watch = seed.watch(&format!("{}: {name}", subject.name));
        clause(subject, seed);
    }
}

/// Runs the suite with a zone write plug: alone, with delayed completions, and under a fault
/// injector.
///
/// # Panics
/// As [`run`].
pub fn run_gated<D: Device>(
    name: &str,
    keeps_data: bool,
    make: impl Fn() -> D + Sync + Clone + 'static,
) {
    run_gated_by(ZoneRules::NullBlk, name, keeps_data, make);
}

/// Runs the suite with a zone write plug, for devices with other zone rules.
///
/// # Panics
/// As [`run`].
pub fn run_gated_by<D: Device>(
    rules: ZoneRules,
    name: &str,
    keeps_data: bool,
    make: impl Fn() -> D + Sync + Clone + 'static,
) {
    run(&Subject::gated(name, keeps_data, make.clone()).with_rules(rules));
    let delayed = make.clone();
    let delayed = move || Delayed::new(delayed(), DELAY_NS);
    let name = format!("delayed {name}");
    run(&Subject::gated(&name, keeps_data, delayed).with_rules(rules));
    let seed = Seed::from_env();
    let _watch = seed.watch(&format!("gated, faulty, {name}: failed bios have no effect"));
    faults::injected(make, keeps_data, rules, gated, seed);
}

/// Runs the suite under everything that may wrap a device, and under an injector that fails some
/// bios.
///
/// # Panics
/// As [`run`].
pub fn run_wrapped<D: Device>(
    name: &str,
    keeps_data: bool,
    make: impl Fn() -> D + Sync + Clone + 'static,
) {
    run_wrapped_by(ZoneRules::NullBlk, name, keeps_data, make);
}

/// Runs the suite under everything that may wrap a device, for devices with other zone rules.
///
/// # Panics
/// As [`run`].
pub fn run_wrapped_by<D: Device>(
    rules: ZoneRules,
    name: &str,
    keeps_data: bool,
    make: impl Fn() -> D + Sync + Clone + 'static,
) {
    run(&Subject::plain(name, keeps_data, make.clone()).with_rules(rules));
    run(&Subject::delayed(name, keeps_data, make.clone()).with_rules(rules));
    run(&Subject::faulty(name, keeps_data, make.clone()).with_rules(rules));
    run(&Subject::traced(name, keeps_data, make.clone()).with_rules(rules));
    let seed = Seed::from_env();
    let _watch = seed.watch(&format!("faulty {name}: failed bios have no effect"));
    faults::injected(make, keeps_data, rules, disk, seed);
}
