//! Instructions of the thread of a ring for a read of 4 KiB, in batches of 32: chains are taken and
//! read, executed inline on a null device, and answered, and the guest is called. The counts are
//! compared as in `crates/null/benches/instructions.rs`, and recorded next to that file.
//!
//! ```text
//! cargo bench -p blockyard-vhost --bench instructions    # needs valgrind
//! ```
#![allow(clippy::unwrap_used)] // A bench may.

#[path = "../../null/benches/common/callgrind.rs"]
mod callgrind;
#[path = "../tests/guest/mod.rs"]
mod guest;

use std::process::ExitCode;
use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::middleware::Faulty;
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::{Composed, Disk};
use blockyard_null::{Null, NullConfig};
use blockyard_vhost::request::kind;
use callgrind::{bench, run};
use guest::{Buffer, DATA, Guest, Served, into, out, plain, print_header, serve};

/// Reads that are made available at once.
const BATCH: u64 = 32;
/// Batches of the bench: enough to average out the cost of the first.
const BATCHES: u64 = 64;
/// Callgrind collects in the thread of the ring, while it does not wait.
const COLLECTED: &str = "*QueueThread*serve_batch*";

/// A guest that is connected to a null device without memory, composed as the yard composes it.
fn reads() -> (Served, Guest) {
    let null = Null::open(NullConfig { bs: 4096, memory_backed: false, ..plain() }).unwrap();
    let scheduled = Scheduled::new(Faulty::new(null, 1), false).unwrap();
    let disk = Composed::new("n".to_owned(), "null", scheduled, ChannelConfig::default());
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let served = serve(disk);
    let guest = Guest::connect(&served, 1, 0);
    (served, guest)
}

/// Each read has a header, a block of data and a status.
fn read_batches((served, mut guest): (Served, Guest)) -> (Served, Guest) {
    let memory = guest.memory.clone();
    for _ in 0..BATCHES {
        let offer = |index: u64| {
            let at = DATA + 8192 * index;
            guest.put(at, &print_header(kind::IN, 16 * index));
            let data = Buffer { at: at + 4096, len: 4096, is_written: true };
            guest.rings[0].chain(&memory, &[out(at, 16), data, into(at + 16, 1)])
        };
        let heads: Vec<u16> = (0..BATCH).map(offer).collect();
        guest.rings[0].make_all_available(&memory, &heads);
        guest.kick(0);
        heads.iter().for_each(|head| assert_eq!(guest.answer(0).0, *head));
    }
    (served, guest)
}

fn main() -> ExitCode {
    run(&[bench("vhost_read", reads, read_batches)])
}
