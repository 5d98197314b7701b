//! Instructions per I/O that the wrappers of a device cost while none of them is in use: a fault
//! injector without rules, and the scheduler `none`. Every device that the daemon serves has both,
//! because they can be switched on at run time.
//!
//! A binary of its own, because the wrappers would change what the compiler inlines in the benches
//! of `instructions.rs`. Both use the same gate.

mod common;

use std::hint::black_box;
use std::process::ExitCode;

use blockyard_core::Bio;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::middleware::Faulty;
use blockyard_core::sched::shared::Scheduled;
use blockyard_null::Null;
use common::{Load, SECTORS, apart, bench, drive, flat, load_on, reads, run, singly};

fn wrapped_reads() -> Load {
    let null = Null::open(flat(false)).expect("the configuration fits");
    let scheduled = Scheduled::new(Faulty::new(null, 1), false).expect("a fresh device has queues");
    let disk = Composed::new("n".to_owned(), "null", scheduled, ChannelConfig::default());
    load_on(&disk, |index, buf| Bio::read(apart(index), SECTORS, buf))
}

fn single_reads() -> Load {
    singly(reads())
}

fn wrapped_single_reads() -> Load {
    singly(wrapped_reads())
}

fn push_to_reap(mut load: Load) -> Load {
    drive(&mut load);
    load
}

/// Reads that are executed inline.
fn execute_inline(mut load: Load) -> Load {
    for bio in &load.bios {
        let Bio { op, sector, sectors, buf, .. } = *bio;
        black_box(load.channel.execute_inline(op, sector, sectors, buf));
    }
    load
}

fn main() -> ExitCode {
    run(&[
        // Reads in batches of 32, and one by one.
        bench("plain_read", reads, push_to_reap),
        bench("wrapped_read", wrapped_reads, push_to_reap),
        bench("plain_single", single_reads, push_to_reap),
        bench("wrapped_single", wrapped_single_reads, push_to_reap),
        bench("plain_inline", reads, execute_inline),
        bench("wrapped_inline", wrapped_reads, execute_inline),
    ])
}
