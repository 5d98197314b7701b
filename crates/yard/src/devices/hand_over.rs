//! All devices at once: closed for another process, and opened again if that fails.

use std::time::{Duration, Instant};

use blockyard_core::rmw::SharedDisk;
use blockyard_nvme::{NamespaceNumbers, SubsystemError};

use super::{CLOSE_POLL_INTERVAL, Devices, Reserved, ReservedFor, Suspended};
use crate::entry::{DeviceEntry, ReleasedEntry};
use crate::error::{LostDevice, YardError};
use crate::spec::DeviceSpec;
use crate::stack::{self, identity};

/// The devices of a yard that no exporter has any more, in their order.
pub(crate) struct WithdrawnDevices<'d> {
    all: Vec<(WithdrawnDevice, Reserved<'d>)>,
}

/// A device that no exporter has any more.
pub(crate) enum WithdrawnDevice {
    /// It keeps data in memory, and stays open.
    Kept(DeviceEntry),
    /// It is closed, or will be when no request has it.
    Closed(ReleasedEntry),
}

impl WithdrawnDevice {
    /// Whether a request still keeps it, or its pool, from being closed.
    fn is_held(&self) -> bool {
        match self {
            WithdrawnDevice::Kept(_) => false,
            WithdrawnDevice::Closed(released) => released.is_held() || released.is_pool_held(),
        }
    }

    /// The device, if it stays open.
    pub(crate) fn kept(&self) -> Option<&DeviceEntry> {
        match self {
            WithdrawnDevice::Kept(entry) => Some(entry),
            WithdrawnDevice::Closed(_) => None,
        }
    }

    pub(crate) fn spec(&self) -> &DeviceSpec {
        match self {
            WithdrawnDevice::Kept(entry) => &entry.spec,
            WithdrawnDevice::Closed(released) => &released.spec,
        }
    }

    pub(crate) fn identity(&self) -> &str {
        match self {
            WithdrawnDevice::Kept(entry) => &entry.identity,
            WithdrawnDevice::Closed(released) => &released.identity,
        }
    }
}

/// The reason for which devices were not withdrawn.
#[derive(Debug)]
pub(crate) struct WithdrawError {
    pub(crate) error: YardError,
    /// The devices that could not be opened again.
    pub(crate) lost: Vec<LostDevice>,
}

impl WithdrawnDevices<'_> {
    /// The devices in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &WithdrawnDevice> {
        self.all.iter().map(|(device, _)| device)
    }
}

impl Devices {
    /// Takes all devices away from the exporters, which have no clients, and closes those for which
    /// `keeps` does not ask.
    ///
    /// # Errors
    /// If an exporter has a client of a device, requests have one for longer than `timeout`, or a
    /// device is latched, or is latched by the flush before it is closed. Then all devices are as
    /// before, but for those that could not be opened again.
    pub(crate) fn withdraw_all(
        &self,
        keeps: impl Fn(&DeviceSpec) -> bool,
        timeout: Duration,
    ) -> Result<WithdrawnDevices<'_>, WithdrawError> {
        let mut withdrawn = WithdrawnDevices { all: Vec::new() };
        while let Some((entry, reserved)) = self.take_first() {
            // It has no client and nothing in flight any more. The clients would not learn of an
            // error of its closing.
            if let Err(error) = entry.flush_before_closing().and_then(|()| self.take_back(&entry)) {
                // It has all its exporters still. Those before it come before it again.
                self.table().entries.insert(0, entry);
                drop(reserved);
                return Err(WithdrawError { error, lost: self.restore_all(withdrawn) });
            }
            let device = match keeps(&entry.spec) {
                true => WithdrawnDevice::Kept(entry),
                false => WithdrawnDevice::Closed(entry.release()),
            };
            withdrawn.all.push((device, reserved));
        }
        let deadline = Instant::now() + timeout;
        loop {
            let held = withdrawn.iter().find(|device| device.is_held());
            let Some(held) = held else { return Ok(withdrawn) };
            if Instant::now() >= deadline {
                let name = held.spec().name().to_owned();
                let (error, lost) = (YardError::Held { name }, self.restore_all(withdrawn));
                return Err(WithdrawError { error, lost });
            }
            std::thread::sleep(CLOSE_POLL_INTERVAL);
        }
    }

    /// Takes the first device out of the table, and reserves its name.
    fn take_first(&self) -> Option<(DeviceEntry, Reserved<'_>)> {
        let mut table = self.table();
        if table.entries.is_empty() {
            return None;
        }
        let entry = table.entries.remove(0);
        let name = entry.spec.name().to_owned();
        let reserved = self.note_reserved(&mut table, &name, ReservedFor::Reopen);
        Some((entry, reserved))
    }

    /// Takes a device away from the exporters, none of which may have a client of it. If this
    /// fails, all have it still.
    fn take_back(&self, entry: &DeviceEntry) -> Result<(), YardError> {
        let name = entry.spec.name();
        let (clients, opens) = self.users(name);
        let subsystem = self.subsystems.get().and_then(|subsystems| subsystems.find_info(name));
        if subsystem.is_some_and(|subsystem| subsystem.controllers > 0) {
            // All hosts were disconnected, so it has lasted for longer than their drain time.
            return Err(SubsystemError::Busy(name.to_owned()).into());
        }
        let used = |opens| YardError::Used { name: name.to_owned(), clients, opens };
        if clients + opens > 0 {
            return Err(used(opens));
        }
        if !self.files.remove_unused(name)? {
            return Err(used(1));
        }
        self.exports.remove(name, Duration::ZERO)?;
        if let Some(subsystems) = self.subsystems.get() {
            // A device that NVMe cannot describe has none.
            let _ = subsystems.remove_for_now(name);
        }
        Ok(())
    }

    /// The disk of a device, for its exporters; `None` without this device.
    pub(crate) fn disk(&self, name: &str) -> Option<SharedDisk> {
        Some(self.find(name).ok()?.shared)
    }

    /// Opens all devices again, and gives them to the exporters. Returns those that cannot be
    /// opened, or have other data now, which are missing from then on.
    pub(crate) fn restore_all(&self, withdrawn: WithdrawnDevices<'_>) -> Vec<LostDevice> {
        let mut lost = Vec::new();
        // Before those that were not withdrawn.
        let mut index = 0;
        for (device, reserved) in withdrawn.all {
            match self.restore(device, index) {
                Ok(_) => index += 1,
                Err(error) => {
                    let name = reserved.name.clone();
                    tracing::error!(device = name, %error, "the device cannot be opened again");
                    lost.push(LostDevice { name, error: error.to_string() });
                }
            }
        }
        if let Some(subsystems) = self.subsystems.get() {
            subsystems.release_numbers();
        }
        lost
    }

    /// Keeps numbers for the devices of an earlier process, before they are added.
    pub(crate) fn keep_namespace_numbers(&self, numbers: NamespaceNumbers) {
        if let Some(subsystems) = self.subsystems.get() {
            subsystems.keep_numbers(numbers);
        }
    }

    /// The numbers of the devices as namespaces, also of those that were withdrawn.
    pub(crate) fn namespace_numbers(&self) -> NamespaceNumbers {
        self.subsystems.get().map(|subsystems| subsystems.numbers()).unwrap_or_default()
    }

    fn restore(&self, device: WithdrawnDevice, index: usize) -> Result<DeviceEntry, YardError> {
        let released = match device {
            WithdrawnDevice::Kept(entry) => {
                return self.publish(entry, index, Suspended::default());
            }
            WithdrawnDevice::Closed(released) => released,
        };
        match released.restore() {
            Some(entry) => self.publish(entry, index, Suspended::default()),
            None => {
                let ReleasedEntry { spec, identity, .. } = &released;
                identity::check_existing(spec, identity)?;
                let made = stack::open_provisional(spec)?;
                identity::compare(spec, &made.identity, identity)?;
                made.keep();
                self.enter(released.spec, index, made, Suspended::default())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_testing::temp_dir::TempDir;

    use super::super::tests::add_lossy;
    use super::*;
    use crate::uri;

    const NONE: Duration = Duration::ZERO;

    fn devices() -> std::sync::Arc<Devices> {
        let devices = Devices::new();
        for uri in ["null:///a?size=1G", "null:///m?size=1M&memory_backed=1", "null:///b?size=1G"] {
            devices.add(uri::parse(uri).unwrap()).unwrap();
        }
        devices
    }

    fn names(devices: &Devices) -> Vec<String> {
        devices.list().iter().map(|entry| entry.spec.name().to_owned()).collect()
    }

    #[test]
    fn devices_are_closed_and_come_back_in_their_order() {
        let devices = devices();
        let [a, m] =
            ["a", "m"].map(|name| std::sync::Arc::downgrade(&devices.find(name).unwrap().disk));
        let withdrawn = devices.withdraw_all(|spec| spec.name() == "m", NONE).unwrap();
        assert!(devices.list().is_empty() && devices.exports().list().is_empty());
        assert_eq!((a.strong_count() > 0, m.strong_count() > 0), (false, true));
        let error = devices.add(uri::parse("null:///a?size=2G").unwrap()).map(drop);
        assert_eq!(error.unwrap_err().code(), "taken");
        assert!(devices.restore_all(withdrawn).is_empty());
        assert_eq!(names(&devices), ["a", "m", "b"]);
        assert_eq!(devices.exports().list().len(), 3);
        let is_same = |entry: DeviceEntry| std::ptr::addr_eq(m.as_ptr(), &raw const *entry.disk);
        assert!(is_same(devices.find("m").unwrap()));
    }

    /// The bug: the device that could not be withdrawn counted as not served over NVMe, and the
    /// numbers of all devices were kept twice.
    #[test]
    fn subsystems_and_their_numbers_stay_after_a_failure() {
        let devices = Devices::new();
        devices.make_subsystems(blockyard_nvme::HostAccess::default(), None);
        for uri in ["null:///x?size=1G", "null:///a?size=1G", "null:///b?size=1G"] {
            devices.add(uri::parse(uri).unwrap()).unwrap();
        }
        devices.remove("x", NONE).unwrap();
        let numbers = |devices: &Devices| {
            let number = |entry: &DeviceEntry| {
                let export = entry.nvme.clone().unwrap();
                (export.nqn.unwrap(), export.nsid)
            };
            devices.list().iter().map(number).collect::<Vec<_>>()
        };
        let before = numbers(&devices);
        let stop = blockyard_trace::ReplayStop::new();
        let replay = devices.replays().enter("b", None, true, &stop).unwrap();
        assert!(devices.withdraw_all(|_| false, NONE).is_err());
        assert_eq!((names(&devices), numbers(&devices)), (vec!["a".into(), "b".into()], before));
        drop(replay);
        let before = devices.namespace_numbers();
        let withdrawn = devices.withdraw_all(|_| false, NONE).unwrap();
        assert_eq!(devices.namespace_numbers(), before);
        assert!(devices.restore_all(withdrawn).is_empty());
        assert_eq!(devices.namespace_numbers(), before);
    }

    /// The bug: the error of the closing was ignored, and the next process opened the state of the
    /// last flush.
    #[test]
    fn device_that_would_lose_writes_stays_with_all_others() {
        let (devices, place) =
            (devices(), TempDir::new(&std::env::temp_dir(), "blockyard-withdraw"));
        add_lossy(&devices, &place, "z");
        // First its flush fails; then it is latched.
        for _ in 0..2 {
            let error = devices.withdraw_all(|_| false, NONE).map(drop).unwrap_err();
            assert!(matches!(&error.error, YardError::Latched { name, .. } if name == "z"));
            assert!(error.lost.is_empty());
            assert_eq!(names(&devices), ["a", "m", "b", "z"]);
            assert_eq!(devices.exports().list().len(), 4);
            assert_eq!(
                devices.find("z").unwrap().latched_by(),
                Some("a write or a sync of its files")
            );
        }
    }

    #[test]
    fn a_device_that_a_request_has_is_named_and_all_stay() {
        let devices = devices();
        let held = devices.find("b").unwrap();
        let error = devices.withdraw_all(|_| false, NONE).map(drop).unwrap_err();
        assert!(matches!(error.error, YardError::Held { name } if name == "b"));
        assert_eq!(names(&devices), ["a", "m", "b"]);
        drop(held);
        let stop = blockyard_trace::ReplayStop::new();
        let replay = devices.replays().enter("m", None, true, &stop).unwrap();
        let error = devices.withdraw_all(|_| false, NONE).map(drop).unwrap_err();
        assert!(matches!(error.error, YardError::Used { name, clients: 1, .. } if name == "m"));
        assert_eq!(names(&devices), ["a", "m", "b"]);
        assert_eq!(devices.exports().list().len(), 3);
        drop(replay);
        assert!(devices.withdraw_all(|_| false, NONE).is_ok());
    }
}
