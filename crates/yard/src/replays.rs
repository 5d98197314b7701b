//! The replays of traces on the devices of a yard, which a request can stop.
#![allow(clippy::disallowed_types)] // The table of replays is control plane.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_trace::ReplayStop;

/// The replays that are in progress. Each is a client of its device.
#[derive(Default)]
pub(crate) struct Replays(Mutex<Vec<RunningReplay>>);

struct RunningReplay {
    device: String,
    id: Option<u64>,
    stop: ReplayStop,
    /// Tells this replay from all others.
    token: Arc<()>,
}

impl Replays {
    fn table(&self) -> MutexGuard<'_, Vec<RunningReplay>> {
        // Every change is one call: a holder that panicked has left the table consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a replay until the returned guard is dropped.
    pub(crate) fn enter(
        &self,
        device: &str,
        id: Option<u64>,
        stop: &ReplayStop,
    ) -> EnteredReplay<'_> {
        let (device, stop, token) = (device.to_owned(), stop.clone(), Arc::new(()));
        self.table().push(RunningReplay { device, id, stop, token: Arc::clone(&token) });
        EnteredReplay { replays: self, token }
    }

    /// The number of replays on a device.
    pub(crate) fn count(&self, device: &str) -> u64 {
        self.table().iter().filter(|replay| replay.device == device).count() as u64
    }

    /// Asks the replays on a device to end, or the one of this number. Returns how many there are.
    pub(crate) fn stop(&self, device: &str, id: Option<u64>) -> u64 {
        let is_meant = |it: &&RunningReplay| it.device == device && (id.is_none() || it.id == id);
        let table = self.table();
        table.iter().filter(is_meant).inspect(|replay| replay.stop.stop()).count() as u64
    }
}

/// A replay in the table of [`Replays`].
pub(crate) struct EnteredReplay<'d> {
    replays: &'d Replays,
    token: Arc<()>,
}

impl Drop for EnteredReplay<'_> {
    fn drop(&mut self) {
        self.replays.table().retain(|replay| !Arc::ptr_eq(&replay.token, &self.token));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replays_are_stopped_by_device_and_number() {
        let replays = Replays::default();
        let stops = [(); 4].map(|()| ReplayStop::new());
        let places = [("a", None), ("a", Some(1)), ("a", Some(2)), ("b", Some(1))];
        let mut entered: Vec<_> = places
            .iter()
            .zip(&stops)
            .map(|((device, id), stop)| replays.enter(device, *id, stop))
            .collect();
        assert_eq!((replays.count("a"), replays.count("b"), replays.count("c")), (3, 1, 0));
        assert_eq!((replays.stop("a", Some(1)), replays.stop("a", Some(3))), (1, 0));
        let stopped = || stops.iter().map(ReplayStop::is_stopped).collect::<Vec<_>>();
        assert_eq!(stopped(), [false, true, false, false]);
        entered.remove(1);
        assert_eq!(replays.stop("a", None), 2);
        assert_eq!(stopped(), [true, true, true, false]);
        drop(entered);
        assert_eq!(replays.count("a"), 0);
    }
}
