//! A set of descriptors, of which a thread waits for any (epoll).
#![allow(unsafe_code)] // Copies a descriptor that is known by its number only.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// The events that one wait returns at most. The others are returned by the next waits, because the
/// system moves returned descriptors to the end of its list.
const EVENTS_MAX: usize = 128;

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Bytes to read, or the end; for as long as there are any (level-triggered).
    Readable,
    /// Room to write, or the end; for as long as there is any (level-triggered).
    Writable,
    /// New bytes to read: reported once for each arrival (edge-triggered). For descriptors that
    /// stay readable while their owner expects nothing.
    Arrivals,
}

impl Watch {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Watch::Readable => epoll::EventFlags::IN,
            Watch::Writable => epoll::EventFlags::OUT,
            Watch::Arrivals => epoll::EventFlags::IN | epoll::EventFlags::ET,
        }
    }
}

/// The events of a wait: memory that is kept from one wait to the next.
pub struct Events(Vec<epoll::Event>);

// SAFETY: the system's type of an event can have a pointer, but `Epoll` gives it tokens alone.
unsafe impl Send for Events {}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.tokens()).finish()
    }
}

impl Default for Events {
    fn default() -> Events {
        Events(Vec::with_capacity(EVENTS_MAX))
    }
}

impl Events {
    /// The tokens of the descriptors that are ready, or have ended or failed.
    pub fn tokens(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|event| event.data.u64())
    }
}

/// A set of descriptors, each with a token that the events name.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn new() -> io::Result<Epoll> {
        Ok(Epoll(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds a descriptor that is not in the set.
    ///
    /// # Errors
    /// If the descriptor cannot be waited for, or the system is out of memory.
    pub fn add(&self, fd: impl AsFd, token: u64, watch: Watch) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), watch.flags())?)
    }

    /// Changes what is waited for.
    ///
    /// # Errors
    /// If the descriptor is not in the set.
    pub fn change(&self, fd: impl AsFd, token: u64, watch: Watch) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), watch.flags())?)
    }

    /// Removes a descriptor.
    ///
    /// # Errors
    /// If the descriptor is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits until a descriptor is ready, or the time is up; `None` is for ever. Without an event
    /// too if a signal comes.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn wait(&self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        events.0.clear();
        let time = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let mut waited = epoll::wait(&self.0, spare_capacity(&mut events.0), time.as_ref());
        if waited == Err(Errno::NOSYS) {
            // Linux before 5.11 counts milliseconds.
            let time = timeout.map(|timeout| Timespec {
                tv_sec: 0,
                tv_nsec: timeout.as_micros().div_ceil(1000).min(999) as i64 * 1_000_000,
            });
            waited = epoll::wait(&self.0, spare_capacity(&mut events.0), time.as_ref());
        }
        match waited {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// A descriptor of another owner in a set, for new arrivals. It is a copy (dup), so that several
/// owners may watch one descriptor, and its number is not used again before it leaves the set.
/// Dropping it removes it from the set.
#[derive(Debug)]
pub struct Watched {
    set: Arc<Epoll>,
    copy: OwnedFd,
}

impl Watched {
    /// Adds a copy of a descriptor.
    ///
    /// # Errors
    /// If there is no such descriptor, or the system refuses a copy.
    pub fn new(set: &Arc<Epoll>, fd: RawFd, token: u64) -> io::Result<Watched> {
        // SAFETY: no memory is involved; the system checks the number.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        let copy = unsafe { OwnedFd::from_raw_fd(copy) };
        set.add(&copy, token, Watch::Arrivals)?;
        Ok(Watched { set: Arc::clone(set), copy })
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Closing the copy would not remove it while another copy of the descriptor is open.
        let _ = self.set.remove(&self.copy);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn ready(set: &Epoll) -> Vec<u64> {
        let mut events = Events::default();
        set.wait(&mut events, Some(Duration::ZERO)).unwrap();
        let mut tokens: Vec<_> = events.tokens().collect();
        tokens.sort_unstable();
        tokens
    }

    #[test]
    fn a_descriptor_is_ready_for_what_is_waited_for() {
        let set = Epoll::new().unwrap();
        let (mut one, mut other) = UnixStream::pair().unwrap();
        set.add(&one, 7, Watch::Readable).unwrap();
        assert_eq!(ready(&set), []);
        other.write_all(&[1]).unwrap();
        assert_eq!((ready(&set), ready(&set)), (vec![7], vec![7]), "as long as there are bytes");
        set.change(&one, 8, Watch::Writable).unwrap();
        assert_eq!(ready(&set), [8]);
        set.remove(&one).unwrap();
        assert_eq!(ready(&set), []);
        one.read_exact(&mut [0]).unwrap();
    }

    /// A descriptor that two channels share could be in a set once only, and the end of one took it
    /// from the other.
    #[test]
    fn two_owners_watch_one_descriptor() {
        let set = Arc::new(Epoll::new().unwrap());
        let (one, mut other) = UnixStream::pair().unwrap();
        let first = Watched::new(&set, one.as_raw_fd(), 1).unwrap();
        let _second = Watched::new(&set, one.as_raw_fd(), 2).unwrap();
        other.write_all(&[1]).unwrap();
        assert_eq!((ready(&set), ready(&set)), (vec![1, 2], vec![]), "once for an arrival");
        drop(first);
        other.write_all(&[1]).unwrap();
        assert_eq!(ready(&set), [2]);
        // The owner may close its descriptor first.
        drop(one);
        assert!(Watched::new(&set, -1, 3).is_err());
    }

    #[test]
    fn a_wait_ends_after_less_than_a_millisecond() {
        let set = Epoll::new().unwrap();
        let mut events = Events::default();
        for timeout in [Duration::from_micros(1), Duration::from_micros(1500)] {
            set.wait(&mut events, Some(timeout)).unwrap();
            assert_eq!(events.tokens().count(), 0);
        }
    }
}
