//! The device contract on disks as the yard composes them: from a URI, with all layers, on the real
//! clock.

use blockyard_testing::contract::{self, Subject};
use blockyard_yard::{stack, uri};

fn suite(text: &'static str) {
    let open = move || {
        let spec = uri::parse(text).expect("the URI is right");
        stack::open(&spec).expect("the device can be made").disk
    };
    let spec = uri::parse(text).expect("the URI is right");
    contract::run(&Subject::disks(text, spec.switch("memory_backed"), open));
}

#[test]
fn a_plain_device() {
    suite("null:///n?size=8M&bs=4k&max_sectors=128");
}

#[test]
fn a_device_with_memory_and_a_cache() {
    suite("null:///n?size=8M&bs=4k&memory_backed=1&discard=1&cache_size=1M&irqmode=softirq");
}

#[test]
fn a_zoned_device_with_limits() {
    suite(
        "null:///n?size=8M&memory_backed=1&zoned=1&zone_size=512k&zone_capacity=384k\
         &zone_nr_conv=2&zone_max_open=3&zone_max_active=5&irqmode=none",
    );
}

#[test]
fn a_delayed_device() {
    suite("null:///n?size=8M&memory_backed=1&delay_nsec=1000&irqmode=timer&completion_nsec=1000");
}

#[test]
fn a_traced_device() {
    suite("null:///n?size=8M&memory_backed=1&trace=/dev/null");
}

#[test]
fn a_device_below_a_gate() {
    suite(
        "null:///n?size=8M&memory_backed=1&zoned=1&zone_size=512k&zone_capacity=384k\
         &zone_nr_conv=2&zone_max_open=3&zone_max_active=5&gate=plug",
    );
}

#[test]
fn a_device_without_append() {
    suite(
        "null:///n?size=8M&memory_backed=1&zoned=1&zone_size=512k&zone_capacity=384k\
         &zone_nr_conv=2&zone_append_max_sectors=0&irqmode=softirq",
    );
}

#[test]
fn a_device_under_a_scheduler() {
    suite(
        "null:///n?size=8M&bs=4k&memory_backed=1&discard=1&cache_size=1M&irqmode=softirq\
         &scheduler=mq-deadline",
    );
}

#[test]
fn a_zoned_device_under_a_scheduler() {
    suite(
        "null:///n?size=8M&memory_backed=1&zoned=1&zone_size=512k&zone_capacity=384k\
         &zone_nr_conv=2&zone_max_open=3&zone_max_active=5&scheduler=mq-deadline",
    );
}
