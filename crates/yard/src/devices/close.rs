//! All devices at the end of a yard: closed, but for those whose block device does not end.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{CLOSE_POLL_INTERVAL, Devices};
use crate::entry::DeviceEntry;
use crate::error::YardError;

/// How long the other devices have to be closed before block devices are removed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long all block devices of the kernel may take to be removed: their requests in flight, and
/// up to 5 s until the kernel has released the number of each.
const UBLK_STOP_TIMEOUT: Duration = Duration::from_secs(30);

impl Devices {
    /// Removes all devices at the same time; the clients of each are disconnected after `drain`.
    /// From now on no request opens a device, and those that have begun are waited for.
    ///
    /// The block devices of the kernel come last, because the files of another device may be on
    /// one, and have a limit: the kernel waits without one for a device that does not complete its
    /// requests. Other devices have no limit, because a pool that is cut off loses writes that were
    /// completed. The log names the devices that are late, and those that stay open.
    pub(crate) fn close_all(self: &Arc<Devices>, drain: Duration) {
        self.table().is_ending = true;
        let begun = Instant::now();
        let mut tried = Vec::new();
        loop {
            let names = self.wait_for_requests(&tried, begun);
            if names.is_empty() {
                break;
            }
            tried.extend(names.iter().cloned());
            self.close(names, drain);
        }
        // Those that the kernel has refused to remove.
        self.ublk.leave();
    }

    /// Waits while other requests open or remove devices. Returns the devices that were not tried;
    /// none if all were, and no request can add one any more.
    fn wait_for_requests(&self, tried: &[String], begun: Instant) -> Vec<String> {
        let mut is_told = false;
        loop {
            let (mut names, mut reserved) = {
                let table = self.table();
                let names = table.entries.iter().map(|entry| entry.spec.name().to_owned());
                (names.collect::<Vec<_>>(), table.reserved.clone())
            };
            names.retain(|name| !tried.contains(name));
            // A request waits for the kernel then, which has no limit.
            let may_hang = begun.elapsed() >= UBLK_STOP_TIMEOUT;
            reserved.retain(|name| !may_hang || self.ublk.find(name).is_none());
            if !names.is_empty() || reserved.is_empty() {
                return names;
            }
            if !is_told && begun.elapsed() >= CLOSE_TIMEOUT {
                let devices = reserved.join(", ");
                tracing::warn!(devices, "requests open or remove them; the yard ends after that");
                is_told = true;
            }
            thread::sleep(CLOSE_POLL_INTERVAL);
        }
    }

    /// Closes these devices, but for those whose block device does not end.
    fn close(self: &Arc<Devices>, names: Vec<String>, drain: Duration) {
        let block_devices: Vec<_> = self.ublk.list().into_iter().map(|(name, _)| name).collect();
        let is_block_device = |name: &String| block_devices.contains(name);
        let (block_devices, others) = names.into_iter().partition(is_block_device);
        let devices = Arc::clone(self);
        let close = move |name: &str| devices.close_flushed(name, drain);
        let mut others = Closing::begin(others, close.clone());
        others.wait(Some(Instant::now() + CLOSE_TIMEOUT));
        for device in &others.left {
            tracing::warn!(device, "its closing takes long; the yard ends when it is closed");
        }
        // A device without a thread may have its files on a block device.
        for device in std::mem::take(&mut others.unstarted) {
            if let Err(error) = close(&device) {
                tracing::error!(device, %error, "not closed in order");
            }
        }
        let devices = Arc::clone(self);
        let mut blocks = Closing::begin(block_devices, move |name| {
            devices.ublk.remove(name)?;
            close(name)
        });
        blocks.wait(Some(Instant::now() + UBLK_STOP_TIMEOUT));
        // It may be removed later, too; then closing it, like that of others, has no limit.
        let is_removed = |name: &String| self.ublk.find(name).is_none();
        for device in blocks.left.iter().filter(|name| !is_removed(name)) {
            tracing::error!(
                device,
                "not closed: it does not complete the requests of its block device"
            );
        }
        others.wait(None);
        while blocks.left.iter().any(is_removed) {
            blocks.wait(Some(Instant::now() + CLOSE_POLL_INTERVAL));
        }
    }

    /// Removes a device, and makes its completed writes durable before it is closed: a client that
    /// was cut off, or a request that lasts, may still use it, and then nothing closes it.
    fn close_flushed(&self, name: &str, drain: Duration) -> Result<(), YardError> {
        let flush = |entry: &DeviceEntry| {
            // What a latched device has lost is known.
            if entry.latched_by().is_none()
                && let Err(error) = entry.flush_before_closing()
            {
                tracing::error!(device = name, %error, "completed writes may be lost");
            }
        };
        match self.remove_after(name, drain, flush) {
            // A request has removed it just now.
            Err(YardError::NoSuchDevice { .. }) => Ok(()),
            removed => removed,
        }
    }
}

/// Work for some names, each in a thread of its own.
struct Closing<E> {
    /// The names whose work has not ended.
    left: Vec<String>,
    /// The names for which no thread could be started.
    unstarted: Vec<String>,
    /// Each name whose work has ended, and its result; `None` if it has panicked.
    ended: Receiver<(String, Option<Result<(), E>>)>,
}

impl<E: fmt::Display + Send + 'static> Closing<E> {
    fn begin(
        names: Vec<String>,
        work: impl Fn(&str) -> Result<(), E> + Clone + Send + 'static,
    ) -> Closing<E> {
        let (sender, ended) = channel();
        let (left, unstarted) = Default::default();
        let mut closing = Closing { left, unstarted, ended };
        for name in names {
            let (sender, work, device) = (sender.clone(), work.clone(), name.clone());
            let run = move || {
                // All that it shares with this thread has locks, which tell of a panic.
                let done = catch_unwind(AssertUnwindSafe(|| work(&device))).ok();
                // After the time, nothing receives it.
                let _ = sender.send((device, done));
            };
            match thread::Builder::new().name(format!("close-{name}")).spawn(run) {
                Ok(_) => closing.left.push(name),
                Err(error) => {
                    tracing::error!(device = name, %error, "cannot start a thread to close it");
                    closing.unstarted.push(name);
                }
            }
        }
        closing
    }

    /// Waits until all threads have ended, or until the deadline; the other threads go on. Logs
    /// errors.
    fn wait(&mut self, deadline: Option<Instant>) {
        let ended = &self.ended;
        let next = || match deadline {
            None => ended.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                ended.recv_timeout(left).ok()
            }
        };
        while !self.left.is_empty()
            && let Some((device, done)) = next()
        {
            self.left.retain(|left| *left != device);
            match done {
                Some(Ok(())) => {}
                Some(Err(error)) => tracing::error!(device, %error, "not closed in order"),
                // The panic was reported when it happened.
                None => tracing::error!(device, "not closed: the thread that closes it panicked"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;
    use std::sync::mpsc::Sender;

    use blockyard_testing::temp_dir::TempDir;
    use blockyard_testing::watched_disk::{DiskWatch, WatchedDisk};

    use super::super::tests::add_lossy;
    use super::*;
    use crate::vhost::{BoundVhost, VhostPlace};
    use crate::{stack, uri};

    const PATIENCE: Duration = Duration::from_secs(60);

    /// The bug: the block device of a device that hung was waited for without a limit, and the
    /// devices after it were not closed.
    #[test]
    fn work_that_hangs_keeps_no_other_work_waiting() {
        let names = ["hung", "failed", "panicked", "a"].map(str::to_owned).to_vec();
        let released = Arc::new(Barrier::new(2));
        let is_released = Arc::clone(&released);
        let work = move |name: &str| match name {
            "hung" => {
                is_released.wait();
                Ok(())
            }
            "failed" => Err("the kernel refuses"),
            "panicked" => panic!("while it is closed"),
            _ => Ok(()),
        };
        let mut closing = Closing::begin(names, work);
        while closing.left.len() > 1 {
            closing.wait(Some(Instant::now() + Duration::from_millis(10)));
        }
        assert_eq!(closing.left, ["hung"]);
        released.wait();
        closing.wait(None);
        assert!(closing.left.is_empty() && closing.unstarted.is_empty());
    }

    /// Reports the closing of a disk, which then waits until the test has come to `released`, too.
    struct WatchedClose {
        closed: Sender<String>,
        name: String,
        released: Option<Arc<Barrier>>,
    }

    impl DiskWatch for WatchedClose {
        fn close(&self) {
            self.closed.send(self.name.clone()).unwrap();
            if let Some(released) = &self.released {
                released.wait();
            }
        }
    }

    /// The bug: devices were closed in turn, so one whose storage hung kept all others open.
    #[test]
    fn device_that_hangs_keeps_no_other_device_open_and_no_hypervisor_connected() {
        let devices = Devices::new();
        let place = TempDir::new(&std::env::temp_dir(), "blockyard-close");
        let (closed, is_closed) = channel();
        let released = Arc::new(Barrier::new(2));
        let add = |name: &str, released| {
            let spec = uri::parse(&format!("null:///{name}?size=1G")).unwrap();
            let watch = WatchedClose { closed: closed.clone(), name: name.to_owned(), released };
            let make = |spec: &_| {
                let made = stack::open(spec)?;
                let disk = WatchedDisk::over(Arc::clone(&made.disk), Arc::new(watch));
                Ok(made.with_disk(disk))
            };
            devices.add_by(spec, make).unwrap();
        };
        let connect = |name: &str| {
            let path = place.fresh();
            let at = VhostPlace::of(name, &format!("unix:{}", path.display())).unwrap();
            devices.serve_vhost(BoundVhost::bind(&at).unwrap()).unwrap();
            let stream = UnixStream::connect(&path).unwrap();
            while devices.clients(name) == 0 {
                thread::yield_now();
            }
            stream
        };
        add("hung", Some(Arc::clone(&released)));
        ["a", "b"].iter().for_each(|name| add(name, None));
        let streams = ["a", "b"].map(connect);
        let closing = thread::spawn({
            let devices = Arc::clone(&devices);
            move || devices.close_all(PATIENCE)
        });
        let mut names: Vec<_> = (0..3).map(|_| is_closed.recv_timeout(PATIENCE).unwrap()).collect();
        names.sort();
        assert_eq!(names, ["a", "b", "hung"]);
        for mut stream in streams {
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it is closed");
        }
        assert!(!closing.is_finished(), "it waits for the device that hangs");
        released.wait();
        closing.join().unwrap();
        assert!(devices.list().is_empty() && devices.vhost().list().is_empty());
    }

    /// The bug: only the last user of a device closed it, which was a thread that nothing waited
    /// for if a client was cut off with a request in flight.
    #[test]
    fn device_that_is_still_used_is_flushed() {
        let devices = Devices::new();
        let place = TempDir::new(&std::env::temp_dir(), "blockyard-close-flush");
        add_lossy(&devices, &place, "a");
        let used = devices.find("a").unwrap();
        assert_eq!(used.latched_by(), None);
        devices.close_all(Duration::ZERO);
        assert!(devices.list().is_empty());
        assert_eq!(used.latched_by(), Some("a write or a sync of its files"), "the flush failed");
    }

    /// The bug: a device that a request was reopening when the yard ended was never closed.
    #[test]
    fn device_that_a_request_reopens_is_closed_and_no_other_is_opened() {
        let devices = Devices::new();
        let spec = |uri: &str| uri::parse(uri).unwrap();
        for uri in ["null:///a?size=1G", "null:///b?size=1G"] {
            devices.add(spec(uri)).unwrap();
        }
        let (begun, may_end) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let reopening = thread::spawn({
            let (devices, begun, may_end) =
                (Arc::clone(&devices), Arc::clone(&begun), Arc::clone(&may_end));
            move || {
                devices.rework(spec("null:///a?size=2G"), false, || {
                    begun.wait();
                    may_end.wait();
                    Ok(())
                })
            }
        });
        begun.wait();
        let closing = thread::spawn({
            let devices = Arc::clone(&devices);
            move || devices.close_all(PATIENCE)
        });
        while !devices.list().is_empty() {
            thread::yield_now();
        }
        let refused = devices.add(spec("null:///c?size=1G")).map(drop);
        assert!(matches!(refused, Err(YardError::Ending)));
        assert!(!closing.is_finished(), "it waits for the request");
        may_end.wait();
        reopening.join().unwrap().unwrap();
        closing.join().unwrap();
        assert!(devices.list().is_empty() && devices.exports().list().is_empty());
    }
}
