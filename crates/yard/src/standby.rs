//! A standby: a daemon that has opened and serves nothing yet. It watches the leases of its pools
//! in object stores, and takes them over when it is promoted or a lease has run out.
//!
//! ```text
//!  Waiting ─ promote, a lease has run out ─▸ Active ─ another opener takes over ─▸ ends
//! ```
//!
//! A take-over is an opening, which fences the opener before. So no clock decides which writes are
//! acknowledged: a lease that runs out too early costs an interruption.
#![allow(clippy::disallowed_types)] // The state of a standby is control plane.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_store::remote::{self, Lease};

use crate::error::YardError;
use crate::event::Event;
use crate::spec::DeviceSpec;
use crate::stack::remote_pool;
use crate::volumes::PoolView;

/// How often a lease is read in its length.
const READS: u32 = 3;

/// Whether a daemon waits as a standby.
#[derive(Debug, Default)]
pub struct Standby {
    /// Where a promotion is sent while it waits.
    waiting: Mutex<Option<Sender<Event>>>,
    /// Where the loss of a pool is sent, if the daemon was started as a standby.
    losses: OnceLock<Sender<Event>>,
}

impl Standby {
    /// From now on the loss of a pool ends the daemon.
    pub(crate) fn end_after_loss(&self, sender: &Sender<Event>) {
        // It is still empty: a daemon starts once.
        let _ = self.losses.set(sender.clone());
    }

    /// Ends a daemon that was started as a standby, if a pool in an object store acknowledges
    /// nothing any more. Its service manager starts it again as a standby.
    pub(crate) fn look_for_loss(&self, pools: &[PoolView]) {
        let is_lost = |pool: &&PoolView| pool.upload.is_some() && pool.failed_read_only;
        if let Some(sender) = self.losses.get()
            && let Some(pool) = pools.iter().find(is_lost)
        {
            tracing::error!(pool = pool.path, "the standby has lost a pool, and ends");
            // A daemon without a receiver is ending.
            let _ = sender.send(Event::PoolLost);
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Option<Sender<Event>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the daemon waits.
    pub fn is_waiting(&self) -> bool {
        self.waiting().is_some()
    }

    /// Ends the wait: the daemon opens and serves its devices.
    ///
    /// # Errors
    /// If the daemon is no standby, or not any more.
    pub fn promote(&self) -> Result<(), YardError> {
        let sender = self.waiting().take().ok_or(YardError::NotStandby)?;
        // A daemon without a receiver is ending.
        let _ = sender.send(Event::Promoted);
        Ok(())
    }

    /// Waits for a promotion, for a lease of `pools` that runs out, or for a signal. Returns the
    /// event.
    pub(crate) fn wait(
        &self,
        pools: Vec<WatchedPool>,
        (sender, events): (&Sender<Event>, &Receiver<Event>),
    ) -> std::io::Result<Event> {
        *self.waiting() = Some(sender.clone());
        let mut stops = Vec::new();
        for pool in pools.into_iter().filter(|pool| !pool.lease.is_zero()) {
            let (stop, stopped) = channel();
            let sender = sender.clone();
            let watch = move || {
                if pool.watch(&stopped) {
                    let _ = sender.send(Event::LeaseRanOut);
                }
            };
            // Not joined: a request to an object store may take a minute.
            std::thread::Builder::new().name("lease-watch".to_owned()).spawn(watch)?;
            stops.push(stop);
        }
        let event = events.recv().map_err(|_| std::io::ErrorKind::BrokenPipe)?;
        self.waiting().take();
        Ok(event)
    }
}

/// A pool that a standby watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WatchedPool {
    /// The path of the pool.
    pub(crate) path: String,
    /// The length of the lease; zero: the standby waits for a promotion.
    pub(crate) lease: Duration,
}

/// The pools in object stores among the devices of a configuration, with the longest lease that a
/// volume of each names.
pub(crate) fn watched_pools(devices: &[DeviceSpec]) -> Vec<WatchedPool> {
    let mut pools: Vec<WatchedPool> = Vec::new();
    for (path, lease) in devices.iter().filter_map(remote_pool) {
        match pools.iter_mut().find(|pool| pool.path == path) {
            Some(pool) => pool.lease = pool.lease.max(lease),
            None => pools.push(WatchedPool { path, lease }),
        }
    }
    pools
}

impl WatchedPool {
    /// Reads the lease until it has run out. Returns false if it is stopped before.
    fn watch(&self, stopped: &Receiver<()>) -> bool {
        let mut seen = SeenLease::default();
        let mut has_failed = false;
        loop {
            let asked = Instant::now();
            let found = remote::lease(&self.path);
            if let Err(error) = &found
                && !has_failed
            {
                tracing::warn!(pool = self.path, %error, "the lease cannot be read");
            }
            has_failed = found.is_err();
            if seen.has_run_out(found.ok(), asked, self.lease) {
                tracing::warn!(
                    pool = self.path,
                    "the lease was not renewed for {} s: taking the pool over",
                    self.lease.as_secs_f64()
                );
                return true;
            }
            match stopped.recv_timeout(self.lease / READS) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }
}

/// The lease that was seen last, and when it was asked for.
#[derive(Debug, Default)]
struct SeenLease(Option<(Lease, Asked)>);

/// When a lease was asked for that has not changed since.
#[derive(Clone, Copy, Debug)]
struct Asked {
    first: Instant,
    last: Instant,
}

impl SeenLease {
    /// Whether a lease has not changed for its length. `found` is what the object store returned
    /// when it was asked at the time `asked`; `None`: it did not answer. Without a lease no opener
    /// has promised to renew one.
    ///
    /// The time begins again after a request without an answer, and after a pause that is longer
    /// than two intervals between requests: the opener may not have reached the object store
    /// either, or this machine was suspended.
    fn has_run_out(
        &mut self,
        found: Option<Option<Lease>>,
        asked: Instant,
        length: Duration,
    ) -> bool {
        let Some(lease) = found.flatten() else {
            self.0 = None;
            return false;
        };
        let first = match self.0 {
            Some((seen, times)) if seen == lease && asked - times.last <= length / READS * 2 => {
                times.first
            }
            _ => asked,
        };
        self.0 = Some((lease, Asked { first, last: asked }));
        asked - first >= length
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uri;
    use crate::volumes::UploadView;

    #[test]
    fn a_lease_runs_out_if_it_does_not_change_for_its_length() {
        let (begin, length) = (Instant::now(), Duration::from_secs(10));
        let lease = |opener, renewals| Some(Some(Lease { opener: [opener; 16], renewals }));
        let (removed, no_answer) = (Some(None), None);
        let mut seen = SeenLease::default();
        for (second, found, expected) in [
            (0, removed, false),
            (100, removed, false),
            (101, lease(1, 5), false),
            (104, lease(1, 5), false),
            (107, lease(1, 5), false),
            (110, lease(1, 5), false),
            // A renewal.
            (113, lease(1, 6), false),
            (116, lease(1, 6), false),
            (119, lease(1, 6), false),
            (122, lease(1, 6), false),
            // Another opener.
            (123, lease(2, 6), false),
            (126, lease(2, 6), false),
            (129, lease(2, 6), false),
            (132, lease(2, 6), false),
            (133, lease(2, 6), true),
            (134, removed, false),
            (135, lease(2, 6), false),
            (140, lease(2, 6), false),
            // An outage of the object store: the opener could not renew its lease either.
            (143, no_answer, false),
            (146, lease(2, 6), false),
            (150, lease(2, 6), false),
            (155, lease(2, 6), false),
            (156, lease(2, 6), true),
            // This machine was suspended, or its request took long.
            (170, lease(2, 6), false),
            (176, lease(2, 6), false),
            (179, lease(2, 6), false),
            (180, lease(2, 6), true),
        ] {
            let asked = begin + Duration::from_secs(second);
            assert_eq!(seen.has_run_out(found, asked, length), expected, "at {second} s");
        }
    }

    #[test]
    fn the_pools_of_a_standby_are_those_in_object_stores() {
        let of = |text: &str| uri::parse(text).unwrap();
        let devices = [
            of("null:///n?size=1M"),
            of("volume:///a?path=/srv/pool&size=1G"),
            of("volume:///b?path=s3://v/one&size=1G"),
            of("volume:///c?path=s3://v/one&lease=5000"),
            of("volume:///d?path=s3://v/two&size=1G"),
        ];
        let pool = |path: &str, ms| WatchedPool {
            path: path.to_owned(),
            lease: Duration::from_millis(ms),
        };
        assert_eq!(watched_pools(&devices), [pool("s3://v/one", 5000), pool("s3://v/two", 0)]);
    }

    #[test]
    fn a_standby_ends_when_a_pool_in_an_object_store_acknowledges_nothing_any_more() {
        let pool =
            |failed_read_only, upload| PoolView { failed_read_only, upload, ..PoolView::default() };
        let remote = Some(UploadView::default());
        let (standby, (sender, events)) = (Standby::default(), channel());
        let lost = [pool(true, None), pool(false, remote.clone()), pool(true, remote)];
        standby.look_for_loss(&lost);
        standby.end_after_loss(&sender);
        standby.look_for_loss(&lost[..2]);
        assert!(events.try_recv().is_err());
        standby.look_for_loss(&lost);
        assert_eq!(events.try_recv(), Ok(Event::PoolLost));
    }

    #[test]
    fn a_promotion_ends_the_wait_once() {
        let standby = Standby::default();
        assert!(matches!(standby.promote(), Err(YardError::NotStandby)));
        let (sender, events) = channel();
        std::thread::scope(|scope| {
            let promoting = scope.spawn(|| {
                while !standby.is_waiting() {
                    std::thread::yield_now();
                }
                standby.promote().unwrap();
            });
            assert_eq!(standby.wait(Vec::new(), (&sender, &events)).unwrap(), Event::Promoted);
            promoting.join().unwrap();
        });
        assert!(matches!(standby.promote(), Err(YardError::NotStandby)));
    }
}
