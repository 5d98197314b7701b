//! Records the decisions of the running kernel's mq-deadline: fio on a loop device, under tracefs.
//!
//! Whatever is changed on the machine is put back when its owner here is dropped: the device's
//! settings, the device, the instance of tracefs that the events go to, the file below the device.
//! Ctrl-C ends fio, and the rest follows.

mod device;
mod setting;
mod tracefs;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::LabError;
use crate::oracle::raw;
use crate::oracle::ticks;
use crate::oracle::trace::{Header, Trace};
use crate::oracle::workloads::{COMMON, Workload};
use crate::scratch::Scratch;
use crate::stop::Stop;
use crate::tools::child::Line;
use device::LoopDevice;
use setting::Setting;
use tracefs::Instance;

/// Bytes of the file below the device.
const FILE_BYTES: u64 = 128 << 20;
/// The processors that the kernel's workers may have, as a mask.
const WORKERS: &str = "/sys/devices/virtual/workqueue/cpumask";
/// As long a workload may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Where a recording is made.
#[derive(Clone, Debug)]
pub struct Place {
    /// The directory of the file below the device.
    pub below: PathBuf,
    /// Where tracefs is mounted.
    pub tracefs: PathBuf,
}

/// Records what the kernel does with a workload.
///
/// # Errors
/// If this is not root, something of the machine is missing, fio fails, events were lost, or Ctrl-C
/// came.
pub fn record(workload: &Workload, place: &Place, stop: &Stop) -> Result<Trace, LabError> {
    if !rustix::process::geteuid().is_root() {
        return Err(LabError::missing("permission to trace", "run it as root"));
    }
    let instance = Instance::new(&place.tracefs)?;
    let scratch = Scratch::within(&place.below)?;
    let file = file_below(scratch.path())?;
    let device = LoopDevice::new(&file)?;
    let settings = device.prepare(workload)?;
    // The device's own worker too, or two processors decide at once and nobody knows who was first.
    let one_processor = Setting::new(WORKERS.into(), "1")?;
    instance.watch(device.number()?)?;

    let line = line(workload, &device);
    instance.switch(true)?;
    let ran = line.start(None)?.finish(LIMIT, stop);
    instance.switch(false)?;
    drop(one_processor);
    ran?;
    instance.check_complete()?;
    let text = instance.text()?;
    let recording =
        raw::recording(&text).map_err(|error| LabError::failed("what tracefs printed", error))?;
    let tick = ticks::tick(&recording.ticks, recording.began_us).ok_or_else(|| {
        let why = "too few timers ran to tell the kernel's tick; record more requests";
        LabError::failed("what tracefs printed", why)
    })?;
    let header = Header {
        workload: workload.name.to_owned(),
        kernel: kernel()?,
        device: format!("{} over {}", device.name(), place.below.display()),
        sectors: FILE_BYTES / 512,
        tags: device.tags()?,
        requests: device.requests()?,
        nomerges: workload.nomerges,
        tunables: device.tunables()?,
        tick,
        fio: line.text(),
    };
    // In this order: the settings are the device's, and the file is below it.
    drop(settings);
    drop(device);
    Ok(Trace { header, events: recording.events })
}

fn kernel() -> Result<String, LabError> {
    setting::read(Path::new("/proc/sys/kernel/osrelease"))
}

/// fio's line for a workload on a device.
fn line(workload: &Workload, device: &LoopDevice) -> Line {
    let text = format!("{COMMON} --filename={} {}", device.path().display(), workload.jobs);
    Line::new("fio", &text)
}

/// The file below the device, with a block for each of its own: a hole would be read at once.
fn file_below(folder: &Path) -> Result<PathBuf, LabError> {
    let path = folder.join("device");
    let what = || path.display().to_string();
    let file = std::fs::File::create_new(&path).map_err(LabError::io(what()))?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, FILE_BYTES)
        .map_err(|error| LabError::io(what())(error.into()))?;
    Ok(path)
}
