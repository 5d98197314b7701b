//! A loop device with mq-deadline, for as long as a recording takes.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockyard_replay::trace::KernelTunables;
use blockyard_replay::workloads::TraceWorkload;

use super::setting::{Setting, chosen, read, write};
use crate::error::LabError;

/// The scheduler that is recorded.
const SCHEDULER: &str = "mq-deadline";

/// A loop device. Dropping it detaches the device.
#[derive(Debug)]
pub(super) struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// A loop device over the file, with direct I/O.
    ///
    /// # Errors
    /// If `losetup` is missing or refuses.
    pub(super) fn new(file: &Path) -> Result<LoopDevice, LabError> {
        let words = ["--find", "--show", "--direct-io=on"];
        let mut command = Command::new("losetup");
        let output =
            command.args(words).arg(file).output().map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => {
                    LabError::missing("losetup", "apt-get install util-linux")
                }
                _ => LabError::io("losetup")(error),
            })?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            return Err(LabError::failed("losetup", format!("{}: {}", output.status, said.trim())));
        }
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        let device = LoopDevice { path };
        if !device.path.starts_with("/dev/loop") && device.name().is_empty() {
            let why = format!("it named no device but `{}`", device.path.display());
            return Err(LabError::failed("losetup", why));
        }
        Ok(device)
    }

    /// The device's file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The device's name, e.g. `loop1`.
    pub(super) fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn queue(&self, file: &str) -> PathBuf {
        Path::new("/sys/block").join(self.name()).join("queue").join(file)
    }

    /// The device's number as trace events compare it.
    pub(super) fn number(&self) -> Result<u64, LabError> {
        let meta = std::fs::metadata(&self.path);
        let meta = meta.map_err(LabError::io(self.path.display().to_string()))?;
        let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        Ok(u64::from(major) << 20 | u64::from(minor))
    }

    /// Sets the scheduler and the workload's tunables, until the settings are dropped. This makes a
    /// new scheduler without state of earlier requests.
    pub(super) fn prepare(&self, workload: &TraceWorkload) -> Result<Vec<Setting>, LabError> {
        let scheduler = self.queue("scheduler");
        let offered = read(&scheduler)?;
        if !offered.replace(['[', ']'], " ").split_whitespace().any(|name| name == SCHEDULER) {
            let how = format!("modprobe {SCHEDULER} (here there are: {offered})");
            return Err(LabError::missing(format!("the scheduler {SCHEDULER}"), how));
        }
        if chosen(&offered) == SCHEDULER {
            write(&scheduler, "none")?;
        }
        let settings = vec![
            Setting::new(scheduler, SCHEDULER)?,
            Setting::new(self.queue("nomerges"), &workload.nomerges.to_string())?,
        ];
        // These settings belong to the new scheduler and vanish with it.
        for (name, value) in workload.tunables {
            write(&self.queue("iosched").join(name), &value.to_string())?;
        }
        Ok(settings)
    }

    /// The scheduler's tunables.
    pub(super) fn tunables(&self) -> Result<KernelTunables, LabError> {
        let mut tunables = KernelTunables::default();
        for name in KernelTunables::NAMES {
            let value = self.value(&format!("iosched/{name}"))?;
            *tunables.value_mut(name).expect("every name has a place") = value;
        }
        Ok(tunables)
    }

    /// The number of requests that the scheduler accepts.
    pub(super) fn requests(&self) -> Result<u32, LabError> {
        self.value("nr_requests")
    }

    /// The number of requests that the driver accepts.
    pub(super) fn tags(&self) -> Result<u32, LabError> {
        self.value("../mq/0/nr_tags")
    }

    fn value(&self, file: &str) -> Result<u32, LabError> {
        let path = self.queue(file);
        let text = read(&path)?;
        let bad = || LabError::failed(path.display().to_string(), format!("`{text}` is no number"));
        text.parse().map_err(|_| bad())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // If this fails, the device is already detached.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).output();
    }
}
