//! Serving through io_uring: a thread with a ring that holds many requests at a time.
//!
//! The kernel has a queue for each processor. An *entry* is room for one request of a queue: a
//! header and a buffer, which the thread registers by a command. The command completes when the
//! kernel has put a request there. The thread writes the reply into the entry and commits it by the
//! next command, which waits for the next request. So one system call receives any number of
//! requests, and commits the replies to earlier ones.
//!
//! ```text
//! register ▸ kernel waits ▸ request here ─ serve ▸ commit and fetch ▸ kernel waits ...
//!                                        └▸ lane ▸ home ─┘
//! ```
//!
//! - A request that waits for its device is at a worker with a reply token. The reply goes through
//!   the reply slot ([`home`]), which wakes the thread, because only one thread may submit to a
//!   ring.
//! - Whole blocks are read into the entry's buffer, and written from there.
//! - One thread still reads `/dev/fuse`, for messages that need no reply.
//! - Numbers and layouts are those of the public header `linux/fuse.h`, protocol 7.42, and of the
//!   kernel's documentation (`Documentation/filesystems/fuse-io-uring.rst`).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use io_uring::{IoUring, cqueue, squeue};

use crate::fuse::server::Server;
use crate::os;

pub(crate) mod command;
pub(crate) mod entries;
pub(crate) mod home;
mod thread;

pub(crate) use thread::RingThread;

use entries::Entries;
use home::Home;

/// The most requests of a queue, including those that wait for a slow device. More wait in the
/// kernel, for whatever device. An unused entry costs no memory except half a kilobyte in the
/// kernel.
const DEPTH: usize = 256;
/// The most entries of one ring: a quarter of the kernel's limit.
const ENTRIES_MAX: usize = 8192;
/// Room for commands other than those of entries: the eventfd's.
const SPARE: usize = 1;

/// The file with all possible processors.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// The longest list of processors that is read.
const POSSIBLE_BYTES_MAX: usize = 4096;

/// A ring whose commands have the length that FUSE needs.
pub(crate) type Ring = IoUring<squeue::Entry128, cqueue::Entry>;

/// A ring with its memory, before a thread serves it.
pub(crate) struct Prepared {
    ring: Ring,
    entries: Entries,
    home: Arc<Home>,
    returned: Receiver<u16>,
}

/// Makes the rings for `threads` threads, before the kernel is asked to use io_uring: afterwards it
/// waits for them.
///
/// # Errors
/// If the system refuses a ring, a descriptor or memory.
pub(crate) fn prepare(threads: usize) -> io::Result<Vec<Prepared>> {
    let text = fs::read_to_string(POSSIBLE)?;
    let queues = count_processors(&text)
        .ok_or_else(|| io::Error::other(format!("{POSSIBLE}: `{text}` is no list")))?;
    let threads = threads.clamp(1, queues);
    (0..threads).map(|thread| Prepared::new((thread..queues).step_by(threads))).collect()
}

impl Prepared {
    fn new(queues: impl Iterator<Item = usize>) -> io::Result<Prepared> {
        let queues: Vec<u16> = queues.map(|queue| queue as u16).collect();
        let depth = (ENTRIES_MAX / queues.len()).clamp(1, DEPTH);
        let entries = Entries::new(&queues, depth)?;
        let size = (entries.count() + SPARE).next_power_of_two() as u32;
        let ring = IoUring::builder()
            // The serving thread enables it; no other thread submits, and work is done when the
            // thread asks for completions.
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(size)?;
        let (sender, returned): (Sender<u16>, _) = channel();
        let home = Arc::new(Home::new(entries.memory(), sender, os::bell()?));
        Ok(Prepared { ring, entries, home, returned })
    }

    /// The thread that will serve the ring.
    pub(crate) fn thread(self, server: Arc<Server>, seat: usize, device: OwnedFd) -> RingThread {
        RingThread::new(self, server, seat, device)
    }
}

/// The number of processors in a list: `0-3,8`.
fn count_processors(text: &str) -> Option<usize> {
    if text.len() > POSSIBLE_BYTES_MAX {
        return None;
    }
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        Some(usize::from(last.checked_sub(first)?) + 1)
    };
    let counts = text.trim().split(',').map(count);
    counts.sum::<Option<usize>>().filter(|&count| count <= usize::from(u16::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted() {
        assert_eq!(count_processors("0\n"), Some(1));
        assert_eq!(count_processors("0-1\n"), Some(2));
        assert_eq!(count_processors("0-3,8,10-11"), Some(7));
        for text in ["", "\n", "a", "1-", "3-1", "0-65536", "0,,1", "0-65535", "-1"] {
            assert_eq!(count_processors(text), None, "{text}");
        }
    }
}
