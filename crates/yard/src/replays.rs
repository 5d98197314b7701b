//! The replays of traces on the devices of a yard, which a request can stop.
#![allow(clippy::disallowed_types)] // The table of replays is control plane.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_trace::ReplayStop;

use crate::error::YardError;

/// Replays of a yard at once: each has up to 64 MiB of the daemon's memory for the data of reads.
pub(crate) const REPLAYS_MAX: usize = 16;

/// The replays that are in progress. Each is a client of its device.
#[derive(Default)]
pub(crate) struct Replays(Mutex<Vec<RunningReplay>>);

struct RunningReplay {
    device: String,
    id: Option<u64>,
    /// Whether it changes the device, so that it has claimed it.
    writes: bool,
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
    ///
    /// # Errors
    /// If there are [`REPLAYS_MAX`] already.
    pub(crate) fn enter(
        &self,
        device: &str,
        id: Option<u64>,
        writes: bool,
        stop: &ReplayStop,
    ) -> Result<EnteredReplay<'_>, YardError> {
        let (device, stop, token) = (device.to_owned(), stop.clone(), Arc::new(()));
        let mut table = self.table();
        if table.len() >= REPLAYS_MAX {
            return Err(YardError::Replays { max: REPLAYS_MAX });
        }
        table.push(RunningReplay { device, id, writes, stop, token: Arc::clone(&token) });
        Ok(EnteredReplay { replays: self, token })
    }

    /// The number of replays on a device.
    pub(crate) fn count(&self, device: &str) -> u64 {
        self.table().iter().filter(|replay| replay.device == device).count() as u64
    }

    /// Whether a replay has claimed a device.
    pub(crate) fn has_claimed(&self, device: &str) -> bool {
        self.table().iter().any(|replay| replay.device == device && replay.writes)
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
        let writes = |device: &str| device == "a";
        let mut entered: Vec<_> = places
            .iter()
            .zip(&stops)
            .map(|((device, id), stop)| replays.enter(device, *id, writes(device), stop).unwrap())
            .collect();
        assert_eq!((replays.count("a"), replays.count("b"), replays.count("c")), (3, 1, 0));
        assert_eq!((replays.stop("a", Some(1)), replays.stop("a", Some(3))), (1, 0));
        assert!(replays.has_claimed("a") && !replays.has_claimed("b"));
        let stopped = || stops.iter().map(ReplayStop::is_stopped).collect::<Vec<_>>();
        assert_eq!(stopped(), [false, true, false, false]);
        entered.remove(1);
        assert_eq!(replays.stop("a", None), 2);
        assert_eq!(stopped(), [true, true, true, false]);
        drop(entered);
        assert_eq!(replays.count("a"), 0);
    }

    /// The bug: the replays of a device were bounded, and those of all devices together were not.
    #[test]
    fn a_yard_has_a_bounded_number_of_replays() {
        let (replays, stop) = (Replays::default(), ReplayStop::new());
        let enter = |number: usize| replays.enter(&number.to_string(), None, false, &stop);
        let mut entered: Vec<_> = (0..REPLAYS_MAX).map(|number| enter(number).unwrap()).collect();
        let refused = enter(REPLAYS_MAX).map(drop).unwrap_err();
        assert_eq!(refused.code(), "overloaded");
        assert!(refused.to_string().starts_with("16 replays are in progress"), "{refused}");
        entered.pop();
        assert!(enter(REPLAYS_MAX).is_ok());
    }
}
