//! The option `--ioscheduler=`, which fio itself would only try to write into sysfs.

use blockyard_core::Disk;
use blockyard_yard::error::StackError;
use blockyard_yard::param::shown;
use blockyard_yard::scheduler;
use blockyard_yard::suggestion::suggestion;

use crate::error::EngineError;

/// Linux's names for the schedulers that a device can have, with our names.
const NAMES: [(&str, &str); 3] =
    [("none", "none"), ("mq-deadline", "mq-deadline"), ("deadline", "mq-deadline")];

/// Our name of a scheduler.
///
/// # Errors
/// If there is no such scheduler.
pub fn find(name: &str) -> Result<&'static str, EngineError> {
    let found = NAMES.iter().find(|(linux, _)| *linux == name);
    found.map(|(_, ours)| *ours).ok_or_else(|| {
        let names = NAMES.map(|(linux, _)| linux);
        let (known, advice) = (names.join(", "), suggestion(name, names));
        EngineError::Scheduler { name: shown(name), known, advice }
    })
}

/// Sets the scheduler of a device without changing its tunables. All jobs of a device do so when
/// they start, later ones under load, as through sysfs: the last one wins.
///
/// # Errors
/// If the device does not have that scheduler.
pub fn apply(name: &'static str, disk: &dyn Disk) -> Result<(), StackError> {
    if scheduler::active(disk) == name {
        return Ok(());
    }
    let control = disk.scheduler().ok_or_else(|| StackError::Invalid {
        field: "scheduler",
        value: name.to_owned(),
        wanted: "none: this device has no other".to_owned(),
    })?;
    scheduler::switch(control, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_yard::{stack, uri};

    #[test]
    fn each_name_is_a_scheduler_that_a_device_takes() {
        let spec = uri::parse("null:///n0?size=1M&fifo_batch=3").unwrap();
        let disk = stack::open(&spec).unwrap().disk;
        let tunables = || disk.scheduler().unwrap().tunables();
        let before = tunables();
        for (linux, ours) in NAMES {
            apply(find(linux).unwrap(), &*disk).unwrap();
            assert_eq!((scheduler::active(&*disk), tunables()), (ours, before));
        }
    }

    #[test]
    fn an_unknown_one_is_refused() {
        assert_eq!(
            find("mq-deadlin").unwrap_err().to_string(),
            "invalid ioscheduler `mq-deadlin`: expected one of none, mq-deadline, deadline; did \
             you mean `mq-deadline`?"
        );
    }
}
