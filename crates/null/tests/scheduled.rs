//! The contract on null devices whose channels share a scheduler.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use blockyard_core::middleware::Delayed;
use blockyard_core::sched::shared::Scheduled;
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_sim::contract::{self, Subject};

/// 8 MiB without memory or zones.
fn flat() -> NullConfig {
    NullConfig { size: 8 << 20, bs: 4096, max_sectors: 128, ..NullConfig::default() }
}

/// The same with memory behind it.
fn backed() -> NullConfig {
    NullConfig { memory_backed: true, discard: true, ..flat() }
}

fn null(config: &NullConfig) -> Arc<Null> {
    Null::open(config.clone()).expect("the configuration fits")
}

/// The suite under the scheduler, and with the way past it.
fn suite(name: &str, config: NullConfig) {
    for (mode, active) in [("deadline", true), ("past deadline", false)] {
        let config = config.clone();
        contract::run(&Subject::plain(
            &format!("{mode}, {name}"),
            config.memory_backed,
            move || Scheduled::new(null(&config), active).unwrap(),
        ));
    }
}

#[test]
fn completed_at_once() {
    suite("null", flat());
    suite("memory", backed());
    suite("memory, 512", NullConfig { bs: 512, max_sectors: 0, ..backed() });
}

#[test]
fn completed_later() {
    suite("softirq", NullConfig { irqmode: IrqMode::Softirq, ..backed() });
    suite("timer", NullConfig { irqmode: IrqMode::Timer, hw_queue_depth: 8, ..backed() });
}

#[test]
fn held_back() {
    let config = backed();
    contract::run(&Subject::plain("deadline, delayed", true, move || {
        Scheduled::new(Delayed::new(null(&config), 50_000), true).unwrap()
    }));
}

#[test]
fn a_write_cache_and_few_tags() {
    suite("cache", NullConfig { cache_size: 1 << 20, ..backed() });
    suite("cache without fua", NullConfig { cache_size: 1 << 20, fua: false, ..backed() });
    suite("one tag", NullConfig { hw_queue_depth: 1, ..backed() });
    let shared = NullConfig { submit_queues: Some(1), hw_queue_depth: 4, ..backed() };
    suite("one hardware queue", shared);
}
