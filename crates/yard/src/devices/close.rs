//! All devices at the end of a yard: closed, but for those whose block device does not end.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::Devices;
use crate::error::YardError;

/// How long the devices that are no block devices of the kernel may take to be closed before the
/// others are.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long all block devices of the kernel may take to be removed: their requests in flight, and
/// up to 5 s until the kernel has released the number of each.
const UBLK_STOP_TIMEOUT: Duration = Duration::from_secs(30);

impl Devices {
    /// Removes all devices at the same time; the clients of each are disconnected after `drain`.
    ///
    /// The block devices of the kernel come last, because the files of another device may be on
    /// one, and have a limit: the kernel waits without one for a device that does not complete its
    /// requests. Other devices have no limit, because a pool that is cut off loses writes that were
    /// completed. The log names the devices that are late, and those that stay open.
    pub(crate) fn close_all(self: &Arc<Devices>, drain: Duration) {
        let block_devices: Vec<_> = self.ublk.list().into_iter().map(|(name, _)| name).collect();
        let names = self.list().into_iter().map(|entry| entry.spec.name().to_owned());
        let others = names.filter(|name| !block_devices.contains(name)).collect();
        let devices = Arc::clone(self);
        let close = move |name: &str| match devices.remove(name, drain) {
            // A request has removed it just now.
            Err(YardError::NoSuchDevice { .. }) => Ok(()),
            // The last user of a device closes it, which waits for its disk.
            removed => removed.map(drop),
        };
        let mut others = Closing::begin(others, close.clone());
        others.wait(Some(Instant::now() + CLOSE_TIMEOUT));
        for device in &others.left {
            tracing::warn!(device, "its closing takes long; the yard ends when it is closed");
        }
        // A device without a thread may have its files on a block device.
        for device in std::mem::take(&mut others.unstarted) {
            if let Err(error) = close(&device) {
                tracing::error!(device, %error, "not closed");
            }
        }
        let devices = Arc::clone(self);
        let mut removal = Closing::begin(block_devices, move |name| devices.ublk.remove(name));
        removal.wait(Some(Instant::now() + UBLK_STOP_TIMEOUT));
        for device in &removal.left {
            tracing::error!(
                device,
                "not closed: it does not complete the requests of its block device"
            );
        }
        // The last volume of a pool may be among them: closing it has no limit.
        let mut removed = Closing::begin(removal.succeeded, close.clone());
        for device in std::mem::take(&mut removed.unstarted) {
            if let Err(error) = close(&device) {
                tracing::error!(device, %error, "not closed");
            }
        }
        removed.wait(None);
        others.wait(None);
        // Those that the kernel has refused to remove.
        self.ublk.leave();
    }
}

/// Work for some names, each in a thread of its own.
struct Closing<E> {
    /// The names whose work has not ended.
    left: Vec<String>,
    /// The names whose work has ended without an error.
    succeeded: Vec<String>,
    /// The names for which no thread could be started.
    unstarted: Vec<String>,
    ended: Receiver<(String, Result<(), E>)>,
}

impl<E: fmt::Display + Send + 'static> Closing<E> {
    fn begin(
        names: Vec<String>,
        work: impl Fn(&str) -> Result<(), E> + Clone + Send + 'static,
    ) -> Closing<E> {
        let (sender, ended) = channel();
        let (left, succeeded, unstarted) = Default::default();
        let mut closing = Closing { left, succeeded, unstarted, ended };
        for name in names {
            let (sender, work, device) = (sender.clone(), work.clone(), name.clone());
            let run = move || {
                let done = work(&device);
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
                Ok(()) => self.succeeded.push(device),
                Err(error) => tracing::error!(device, %error, "not closed in order"),
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

    use super::*;
    use crate::vhost::{BoundVhost, VhostPlace};
    use crate::{stack, uri};

    const PATIENCE: Duration = Duration::from_secs(60);

    /// The bug: the block device of a device that hung was waited for without a limit, and the
    /// devices after it were not closed.
    #[test]
    fn work_that_hangs_keeps_no_other_work_waiting() {
        let names = ["hung", "failed", "a"].map(str::to_owned).to_vec();
        let released = Arc::new(Barrier::new(2));
        let is_released = Arc::clone(&released);
        let work = move |name: &str| match name {
            "hung" => {
                is_released.wait();
                Ok(())
            }
            "failed" => Err("the kernel refuses"),
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
        closing.succeeded.sort();
        assert_eq!(closing.succeeded, ["a", "hung"]);
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
}
