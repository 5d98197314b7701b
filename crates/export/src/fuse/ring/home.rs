//! The way home: answers of lanes to the thread whose ring the requests came by.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use fuser::Errno;

use crate::fuse::ring::entries::Memory;

/// Where lanes bring their answers.
#[derive(Debug)]
pub(crate) struct Home {
    memory: Memory,
    answered: Sender<u16>,
    /// Wakes the thread that waits for its ring.
    bell: OwnedFd,
}

impl Home {
    pub(crate) fn new(memory: Memory, answered: Sender<u16>, bell: OwnedFd) -> Home {
        Home { memory, answered, bell }
    }

    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    /// Puts an answer to an entry and has it committed.
    pub(crate) fn answer(&self, entry: u16, unique: u64, answer: Result<&[u8], Errno>) {
        self.memory.put(entry, unique, answer);
        // A thread that has ended has no connection that an answer could go to.
        if self.answered.send(entry).is_ok() {
            // Full is rung as well.
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }

    /// Makes the bell silent again.
    pub(crate) fn hush(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }
}
