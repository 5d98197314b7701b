//! The reply slot: passes replies of workers to the thread whose ring received the requests.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use fuser::Errno;

use crate::fuse::ring::entries::Memory;

/// The queue to which workers send their replies.
#[derive(Debug)]
pub(crate) struct Home {
    memory: Memory,
    answered: Sender<u16>,
    /// The eventfd that wakes the thread that waits for its ring.
    bell: OwnedFd,
}

impl Home {
    pub(crate) fn new(memory: Memory, answered: Sender<u16>, bell: OwnedFd) -> Home {
        Home { memory, answered, bell }
    }

    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    /// Writes a reply into an entry and has the thread commit it.
    pub(crate) fn answer(&self, entry: u16, unique: u64, answer: Result<&[u8], Errno>) {
        self.memory.put(entry, unique, answer);
        // A thread that has ended has no connection for the reply.
        if self.answered.send(entry).is_ok() {
            // A full counter wakes the thread too.
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }

    /// Clears the eventfd.
    pub(crate) fn hush(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }
}
