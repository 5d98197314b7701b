//! An instance of tracefs of our own: no other user shares its buffers, events and filters.

use std::fs;
use std::path::{Path, PathBuf};

use blockyard_replay::parse::TEXT_MAX;

use super::setting::{read, write};
use crate::error::LabError;

/// The events of requests and bios of one device.
const BLOCK_EVENTS: [&str; 8] = [
    "block_getrq",
    "block_rq_insert",
    "block_rq_issue",
    "block_rq_complete",
    "block_rq_requeue",
    "block_rq_merge",
    "block_bio_backmerge",
    "block_bio_frontmerge",
];
/// The events from which the kernel's tick is known.
const TIMER_EVENTS: [&str; 2] = ["timer_start", "timer_expire_entry"];
/// The size of the buffer of each processor, in KiB.
const BUFFER_KIB: &str = "16384";
/// The trace clock, which is common to all processors.
const CLOCK: &str = "mono";

/// The instance. Dropping it removes the instance.
#[derive(Debug)]
pub(super) struct Instance {
    path: PathBuf,
}

impl Instance {
    /// Makes a new instance in the tracefs that is mounted there.
    ///
    /// # Errors
    /// If there is no tracefs, or it has no events of the block layer.
    pub(super) fn new(tracefs: &Path) -> Result<Instance, LabError> {
        let instances = tracefs.join("instances");
        if !instances.is_dir() {
            let what = format!("tracefs at {}", tracefs.display());
            return Err(LabError::missing(what, "mount -t tracefs tracefs /sys/kernel/tracing"));
        }
        if !tracefs.join("events/block/block_rq_insert").is_dir() {
            let how = "a kernel with CONFIG_BLK_DEV_IO_TRACE has them";
            return Err(LabError::missing("events of the block layer", how));
        }
        let path = instances.join(format!("blockyard-{}", std::process::id()));
        fs::create_dir(&path).map_err(LabError::io(path.display().to_string()))?;
        Ok(Instance { path })
    }

    fn set(&self, file: &str, value: &str) -> Result<(), LabError> {
        write(&self.path.join(file), value)
    }

    /// Sets up the events of a device without starting to record.
    pub(super) fn watch(&self, device: u64) -> Result<(), LabError> {
        self.switch(false)?;
        self.set("trace_clock", CLOCK)?;
        self.set("buffer_size_kb", BUFFER_KIB)?;
        for event in BLOCK_EVENTS {
            self.set(&format!("events/block/{event}/filter"), &format!("dev == {device}"))?;
            self.set(&format!("events/block/{event}/enable"), "1")?;
        }
        for event in TIMER_EVENTS {
            self.set(&format!("events/timer/{event}/enable"), "1")?;
        }
        Ok(())
    }

    /// Starts or stops recording.
    pub(super) fn switch(&self, on: bool) -> Result<(), LabError> {
        self.set("tracing_on", if on { "1" } else { "0" })
    }

    /// Fails if events were lost.
    pub(super) fn check_complete(&self) -> Result<(), LabError> {
        let processors = self.path.join("per_cpu");
        let list = fs::read_dir(&processors);
        let list = list.map_err(LabError::io(processors.display().to_string()))?;
        for processor in list {
            let path = processor.map_err(LabError::io("per_cpu"))?.path().join("stats");
            let stats = read(&path)?;
            if let Some(lost) = lost(&stats) {
                let why = format!("{lost} events were lost; record fewer requests at once");
                return Err(LabError::failed(path.display().to_string(), why));
            }
        }
        Ok(())
    }

    /// The recorded text.
    pub(super) fn text(&self) -> Result<String, LabError> {
        let text = read(&self.path.join("trace"))?;
        if text.len() > TEXT_MAX {
            let why = format!("it printed more than {TEXT_MAX} bytes; record fewer requests");
            return Err(LabError::failed("tracefs", why));
        }
        Ok(text)
    }
}

/// The number of lost events by the statistics of a processor.
fn lost(stats: &str) -> Option<u64> {
    let count = |name: &str| {
        let value = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let lost = count("overrun") + count("commit overrun") + count("dropped events");
    (lost > 0).then_some(lost)
}

impl Drop for Instance {
    fn drop(&mut self) {
        // With its events enabled the instance would be busy. If it cannot be removed, it records
        // nothing.
        let _ = self.set("tracing_on", "0");
        let _ = self.set("events/enable", "0");
        let _ = fs::remove_dir(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_events_are_counted() {
        let stats = "entries: 5\noverrun: 0\ncommit overrun: 0\nbytes: 9\ndropped events: 0\n";
        assert_eq!(lost(stats), None);
        assert_eq!(lost(&stats.replace("overrun: 0", "overrun: 3")), Some(6));
        assert_eq!(lost(&stats.replace("dropped events: 0", "dropped events: 7")), Some(7));
    }

    #[test]
    fn no_tracefs_is_said_with_what_brings_it() {
        let error = Instance::new(Path::new("/no/such")).unwrap_err().to_string();
        assert!(error.starts_with("tracefs at /no/such is missing; mount"), "{error}");
    }
}
