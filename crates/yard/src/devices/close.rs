//! All devices at the end of a yard: closed, but for those whose block device does not end.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::Devices;

/// How long all block devices of the kernel may take to be removed: their requests in flight, and
/// up to 5 s until the kernel has released the number of each.
const UBLK_STOP_TIMEOUT: Duration = Duration::from_secs(30);

impl Devices {
    /// Removes all devices; clients are disconnected after `drain` each. The block devices of the
    /// kernel come last and have a limit: the kernel waits without one for a device that does not
    /// complete its requests. The log names the devices that stay open.
    pub(crate) fn close_all(self: &Arc<Devices>, drain: Duration) {
        // All before any is waited for: they drain at the same time.
        self.vhost.begin_stop();
        let block_devices: Vec<_> = self.ublk.list().into_iter().map(|(name, _)| name).collect();
        // A request may have removed a device just now.
        let close = |name: &str| _ = self.remove(name, drain);
        let names = self.list().into_iter().map(|entry| entry.spec.name().to_owned());
        names.filter(|name| !block_devices.contains(name)).for_each(|name| close(&name));
        let remove = {
            let devices = Arc::clone(self);
            // Another attempt, by `close`, finds what is left after an error.
            move |name: &str| _ = devices.ublk.remove(name)
        };
        let removed = at_once(&block_devices, UBLK_STOP_TIMEOUT, remove);
        for device in block_devices {
            match removed.contains(&device) {
                true => close(&device),
                false => tracing::error!(
                    device,
                    "not closed: it does not complete the requests of its block device"
                ),
            }
        }
    }
}

/// Does some work for each name, each in a thread of its own. Returns the names whose work has
/// ended within a time; the other threads go on.
fn at_once(
    names: &[String],
    timeout: Duration,
    work: impl Fn(&str) + Clone + Send + 'static,
) -> Vec<String> {
    let (sender, ended) = channel();
    let deadline = Instant::now() + timeout;
    for name in names {
        let (sender, work, name) = (sender.clone(), work.clone(), name.clone());
        let thread = thread::Builder::new().name(format!("close-{name}"));
        let spawned = thread.spawn(move || {
            work(&name);
            // After the time, nothing receives it.
            let _ = sender.send(name);
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "cannot start a thread that removes a block device");
        }
    }
    drop(sender);
    let left = || deadline.saturating_duration_since(Instant::now());
    std::iter::from_fn(|| ended.recv_timeout(left()).ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;

    use blockyard_testing::temp_dir::TempDir;

    use super::*;
    use crate::uri;
    use crate::vhost::{BoundVhost, VhostPlace};

    /// The bug: the block device of a device that hung was waited for without a limit, and the
    /// devices after it were not closed.
    #[test]
    fn work_that_hangs_keeps_no_other_work_waiting() {
        let names = ["hung", "a", "b"].map(str::to_owned);
        let released = Arc::new(Barrier::new(2));
        let (sender, done) = channel();
        let is_released = Arc::clone(&released);
        let work = move |name: &str| {
            if name == "hung" {
                is_released.wait();
            }
            sender.send(name.to_owned()).unwrap();
        };
        let ended = at_once(&names, Duration::from_millis(100), work);
        assert!(!ended.contains(&names[0]), "{ended:?}");
        let mut others: Vec<_> = done.iter().take(2).collect();
        others.sort();
        assert_eq!(others, ["a", "b"]);
        released.wait();
        assert_eq!(done.recv().unwrap(), "hung");
    }

    #[test]
    fn all_hypervisors_are_disconnected_before_any_is_waited_for() {
        let devices = Devices::new();
        let place = TempDir::new(&std::env::temp_dir(), "blockyard-close");
        let connect = |name: &str| {
            devices.add(uri::parse(&format!("null:///{name}?size=1G")).unwrap()).unwrap();
            let path = place.fresh();
            let at = VhostPlace::of(name, &format!("unix:{}", path.display())).unwrap();
            devices.serve_vhost(BoundVhost::bind(&at).unwrap()).unwrap();
            let stream = UnixStream::connect(&path).unwrap();
            while devices.clients(name) == 0 {
                thread::yield_now();
            }
            stream
        };
        let streams = ["a", "b"].map(connect);
        devices.vhost().begin_stop();
        for mut stream in streams {
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it is closed");
        }
        devices.close_all(Duration::from_secs(60));
        assert!(devices.list().is_empty() && devices.vhost().list().is_empty());
    }
}
