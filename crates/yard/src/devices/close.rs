//! All devices at the end of a yard: closed, but for those whose block device does not end.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{CLOSE_POLL_INTERVAL, Devices, ReservedFor};
use crate::error::YardError;

/// The limits of the end of a yard.
#[derive(Clone, Copy)]
struct EndLimits {
    /// The time after which block devices are removed although other devices are not closed, and
    /// requests that open a new device are no longer waited for.
    close: Duration,
    /// How long the removal of a block device may take: its requests in flight, and up to 5 s until
    /// the kernel has released its number.
    removal: Duration,
    /// How long the flush of devices whose block devices stay may take.
    flush: Duration,
}

const END_LIMITS: EndLimits = EndLimits {
    close: Duration::from_secs(30),
    removal: Duration::from_secs(30),
    flush: Duration::from_secs(10),
};

/// How often the end looks at the devices that are left.
const END_POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Devices {
    /// Removes all devices; the clients of each are disconnected after `drain`. From now on no
    /// request opens a device, and those that have begun are waited for.
    ///
    /// The block devices of the kernel come last, because the files of another device may be on
    /// one, and have a limit: the kernel waits without one for a device that does not complete its
    /// requests. Other devices have no limit, because a pool that is cut off loses writes that were
    /// completed. The log names the devices that are late, and those that stay open.
    pub(crate) fn close_all(self: &Arc<Devices>, drain: Duration) {
        self.close_within(drain, END_LIMITS);
    }

    fn close_within(self: &Arc<Devices>, drain: Duration, limits: EndLimits) {
        self.table().is_ending = true;
        let mut end = YardEnd::new(Arc::clone(self), drain, limits);
        while end.go_on() {}
        end.flush_rest();
        self.ublk.leave();
    }
}

/// The end of a yard:
///
/// ```text
///  closing ── no device but block devices is left, or after `close` ──▶ removing ──▶ ended
/// ```
///
/// *Closing*: devices that are no block devices of the kernel are closed, also those that a request
/// gives back to the table. *Removing*: block devices as well.
struct YardEnd {
    devices: Arc<Devices>,
    drain: Duration,
    limits: EndLimits,
    begun: Instant,
    /// When the removal of block devices has begun.
    removal_begun: Option<Instant>,
    /// The devices whose closing has begun.
    tried: Vec<String>,
    /// The block devices whose removal has begun, and when.
    removed: Vec<(String, Instant)>,
    /// The devices of which the log says that their block devices are not removed in time.
    told: Vec<String>,
    closing: Closing<YardError>,
}

impl YardEnd {
    fn new(devices: Arc<Devices>, drain: Duration, limits: EndLimits) -> YardEnd {
        YardEnd {
            devices,
            drain,
            limits,
            begun: Instant::now(),
            removal_begun: None,
            tried: Vec::new(),
            removed: Vec::new(),
            told: Vec::new(),
            closing: Closing::default(),
        }
    }

    /// Begins what can begin, and waits a little; `false` if there is nothing to wait for.
    fn go_on(&mut self) -> bool {
        let (names, reserved) = {
            let table = self.devices.table();
            let names = table.entries.iter().map(|entry| entry.spec.name().to_owned());
            (names.collect::<Vec<_>>(), table.reserved.clone())
        };
        let block_devices: Vec<_> = self.devices.ublk.list().into_iter().map(|it| it.0).collect();
        for name in names {
            if !block_devices.contains(&name) && !self.tried.contains(&name) {
                self.close(name);
            }
        }
        let is_late = self.begun.elapsed() >= self.limits.close;
        if self.removal_begun.is_none()
            && (is_late || self.closing.left.is_empty() && reserved.is_empty())
        {
            self.removal_begun = Some(Instant::now());
            let requested = reserved.iter().map(|(name, _)| name);
            for device in self.closing.left.iter().chain(requested) {
                tracing::warn!(device, "its closing takes long; the yard ends when it is closed");
            }
        }
        if self.removal_begun.is_some() {
            // Also one whose device is not in the table: the kernel has refused to remove it.
            for name in &block_devices {
                let is_reserved = reserved.iter().any(|(reserved, _)| reserved == name);
                if !is_reserved && !self.tried.contains(name) {
                    self.remove(name.clone());
                }
            }
        }
        self.tell_of_hung(&block_devices, &reserved);
        let hangs = |name: &String| self.hangs(name, &block_devices);
        let is_waited_for = |(name, what): &(String, ReservedFor)| match what {
            ReservedFor::Open => !is_late,
            ReservedFor::Reopen => true,
            ReservedFor::Remove => !hangs(name),
        };
        if self.removal_begun.is_some()
            && self.closing.left.iter().all(hangs)
            && !reserved.iter().any(is_waited_for)
        {
            return false;
        }
        match self.closing.left.is_empty() {
            true => thread::sleep(CLOSE_POLL_INTERVAL),
            false => self.closing.wait(Some(Instant::now() + END_POLL_INTERVAL)),
        }
        true
    }

    /// Whether the kernel does not remove a block device in time; it has no limit.
    fn hangs(&self, name: &String, block_devices: &[String]) -> bool {
        let removed = self.removed.iter().find(|(removed, _)| removed == name);
        // One that a request removes has its time from the beginning of the removal of all.
        let begun = removed.map(|(_, begun)| *begun).or(self.removal_begun);
        block_devices.contains(name)
            && begun.is_some_and(|begun| begun.elapsed() >= self.limits.removal)
    }

    /// Logs the names of devices whose block devices are not removed in time, once.
    fn tell_of_hung(&mut self, block_devices: &[String], reserved: &[(String, ReservedFor)]) {
        let removed = reserved.iter().filter(|(_, what)| *what == ReservedFor::Remove);
        let all = self.closing.left.iter().chain(removed.map(|(name, _)| name));
        let is_new = |name: &&String| self.hangs(name, block_devices) && !self.told.contains(name);
        let hung: Vec<_> = all.filter(is_new).cloned().collect();
        for device in hung {
            tracing::error!(
                device,
                "not closed: it does not complete the requests of its block device"
            );
            self.told.push(device);
        }
    }

    /// Closes a device that is no block device.
    fn close(&mut self, name: String) {
        let (devices, drain) = (Arc::clone(&self.devices), self.drain);
        self.tried.push(name.clone());
        let close = move |name: &str| devices.close(name, drain);
        if let Some(close) = self.closing.start(name.clone(), close) {
            // Its files may be on a block device.
            Closing::tell(&name, run(|| close(&name)));
        }
    }

    /// Removes the block device of a device, and closes the device.
    fn remove(&mut self, name: String) {
        let (devices, drain) = (Arc::clone(&self.devices), self.drain);
        self.tried.push(name.clone());
        self.removed.push((name.clone(), Instant::now()));
        self.closing.start(name, move |name| {
            devices.ublk.remove(name)?;
            devices.close(name, drain)
        });
    }

    /// Flushes the devices whose block devices could not be removed.
    fn flush_rest(&mut self) {
        let mut flushing = Closing::default();
        for entry in self.devices.list() {
            let name = entry.spec.name().to_owned();
            let flush = move |_: &str| {
                entry.flush_at_end();
                Ok::<_, YardError>(())
            };
            if flushing.start(name.clone(), flush).is_some() {
                tracing::error!(device = name, "not flushed: completed writes may be lost");
            }
        }
        flushing.wait(Some(Instant::now() + self.limits.flush));
        for device in flushing.left {
            tracing::error!(device, "not flushed in time: completed writes may be lost");
        }
    }
}

impl Devices {
    /// Removes a device, unless a request has removed it just now.
    fn close(&self, name: &str, drain: Duration) -> Result<(), YardError> {
        match self.remove(name, drain) {
            Err(YardError::NoSuchDevice { .. }) => Ok(()),
            removed => removed,
        }
    }
}

/// The result of `work`; `None` if it has panicked, which was reported then.
fn run<E>(work: impl FnOnce() -> Result<(), E>) -> Option<Result<(), E>> {
    // The end of the process comes whatever state it leaves.
    catch_unwind(AssertUnwindSafe(work)).ok()
}

/// Work for some names, each in a thread of its own.
struct Closing<E> {
    /// The names whose work has not ended.
    left: Vec<String>,
    sender: Sender<(String, Option<Result<(), E>>)>,
    /// Each name whose work has ended, and its result.
    ended: Receiver<(String, Option<Result<(), E>>)>,
}

impl<E> Default for Closing<E> {
    fn default() -> Closing<E> {
        let (sender, ended) = channel();
        Closing { left: Vec::new(), sender, ended }
    }
}

impl<E: fmt::Display + Send + 'static> Closing<E> {
    /// Starts a thread with this work for a name. Returns the work if there can be no thread.
    fn start<W>(&mut self, name: String, work: W) -> Option<Arc<W>>
    where
        W: Fn(&str) -> Result<(), E> + Send + Sync + 'static,
    {
        let (sender, device, work) = (self.sender.clone(), name.clone(), Arc::new(work));
        let shared = Arc::clone(&work);
        let body = move || {
            let done = run(|| shared(&device));
            drop(shared);
            // After the time, nothing receives it.
            let _ = sender.send((device, done));
        };
        match thread::Builder::new().name(format!("close-{name}")).spawn(body) {
            Ok(_) => {
                self.left.push(name);
                None
            }
            Err(error) => {
                tracing::error!(device = name, %error, "cannot start a thread to close it");
                Some(work)
            }
        }
    }

    /// Waits until all threads have ended, or until the deadline; the other threads go on. Logs
    /// errors.
    fn wait(&mut self, deadline: Option<Instant>) {
        while !self.left.is_empty() {
            let next = match deadline {
                None => self.ended.recv().ok(),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.ended.recv_timeout(left).ok()
                }
            };
            let Some((device, done)) = next else { return };
            self.left.retain(|left| *left != device);
            Closing::tell(&device, done);
        }
    }

    /// Logs what is not in order.
    fn tell(device: &str, done: Option<Result<(), E>>) {
        match done {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(device, %error, "not closed in order"),
            None => tracing::error!(device, "not closed: the thread that closes it panicked"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;

    use blockyard_testing::temp_dir::TempDir;
    use blockyard_testing::watched_disk::{DiskWatch, WatchedDisk};

    use super::super::tests::add_lossy;
    use super::*;
    use crate::vhost::{BoundVhost, VhostPlace};
    use crate::{stack, uri};

    const PATIENCE: Duration = Duration::from_secs(60);

    const NO_TIME: EndLimits =
        EndLimits { close: Duration::ZERO, removal: Duration::ZERO, flush: Duration::ZERO };

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
        let mut closing = Closing::default();
        for name in names {
            assert!(closing.start(name, work.clone()).is_none());
        }
        while closing.left.len() > 1 {
            closing.wait(Some(Instant::now() + Duration::from_millis(10)));
        }
        assert_eq!(closing.left, ["hung"]);
        released.wait();
        closing.wait(None);
        assert!(closing.left.is_empty());
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
    fn removed_device_that_is_still_used_is_flushed() {
        let devices = Devices::new();
        let place = TempDir::new(&std::env::temp_dir(), "blockyard-close-flush");
        add_lossy(&devices, &place, "a");
        let used = devices.find("a").unwrap();
        assert_eq!(used.latched_by(), None);
        devices.remove("a", Duration::ZERO).unwrap();
        assert_eq!(used.latched_by(), Some("a write or a sync of its files"), "the flush failed");
    }

    /// A device that is opened has no writes to lose, and its files may be on a disk that hangs.
    #[test]
    fn request_that_opens_a_device_has_a_limit() {
        let devices = Devices::new();
        let reserved = devices.reserve("a").unwrap();
        devices.close_within(Duration::ZERO, NO_TIME);
        drop(reserved);
        assert!(matches!(devices.reserve("a").map(drop), Err(YardError::Ending)));
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
            move || devices.close_within(PATIENCE, NO_TIME)
        });
        while !devices.list().is_empty() {
            thread::yield_now();
        }
        let refused = devices.add(spec("null:///c?size=1G")).map(drop);
        assert!(matches!(refused, Err(YardError::Ending)));
        may_end.wait();
        reopening.join().unwrap().unwrap();
        closing.join().unwrap();
        assert!(devices.list().is_empty() && devices.exports().list().is_empty());
    }

    /// As those whose block devices the kernel does not remove.
    #[test]
    fn devices_that_stay_in_the_table_are_flushed() {
        let devices = Devices::new();
        let place = TempDir::new(&std::env::temp_dir(), "blockyard-close-rest");
        add_lossy(&devices, &place, "a");
        let limits = EndLimits { flush: PATIENCE, ..NO_TIME };
        YardEnd::new(Arc::clone(&devices), Duration::ZERO, limits).flush_rest();
        let entry = devices.find("a").unwrap();
        assert_eq!(entry.latched_by(), Some("a write or a sync of its files"), "the flush failed");
    }
}
