//! The coarse schedulers pass the device contract.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use blockyard_baselines::sched_buckets::Buckets;
use blockyard_baselines::sched_fifo::Fifo;
use blockyard_baselines::sched_lanes::LanesAlone;
use blockyard_baselines::sched_lock::{ParkingLock, QueuedLock, SpinningLock};
use blockyard_core::sched::shared::{Scheduled, SchedulerQueue};
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_testing::contract::{self, Subject};

/// 8 MiB of memory.
fn memory() -> NullConfig {
    NullConfig {
        size: 8 << 20,
        bs: 4096,
        max_sectors: 128,
        memory_backed: true,
        discard: true,
        ..NullConfig::default()
    }
}

fn scheduled<F: SchedulerQueue>(config: &NullConfig) -> Scheduled<Arc<Null>, F> {
    let null = Null::open(config.clone()).expect("the configuration fits");
    Scheduled::with_scheduler_queue(null, true).expect("a queue can be had")
}

fn keeps_the_contract<F: SchedulerQueue>() {
    let timer = NullConfig { irqmode: IrqMode::Timer, hw_queue_depth: 8, ..memory() };
    for (what, config) in [("memory", memory()), ("timer", timer)] {
        let name = format!("{}, {what}", F::NAME);
        contract::run(&Subject::plain(&name, true, move || scheduled::<F>(&config)));
    }
}

#[test]
fn one_lock_that_spins_keeps_the_contract() {
    keeps_the_contract::<SpinningLock>();
    keeps_the_contract::<QueuedLock>();
}

#[test]
fn one_lock_that_parks_keeps_the_contract() {
    keeps_the_contract::<ParkingLock>();
}

#[test]
fn buckets_keep_the_contract() {
    keeps_the_contract::<Buckets>();
}

#[test]
fn one_line_keeps_the_contract() {
    keeps_the_contract::<Fifo>();
}

#[test]
fn submit_rings_without_leases_keep_the_contract() {
    keeps_the_contract::<LanesAlone>();
}
