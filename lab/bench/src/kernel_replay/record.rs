//! Records the decisions of the running kernel's mq-deadline: fio on a loop device, under tracefs.
//!
//! Each change of the machine has an owner here, which undoes it on drop: the device's settings,
//! the device, the tracefs instance that receives the events, the file below the device. Ctrl-C
//! ends fio, and then the owners are dropped.

mod device;
mod setting;
mod tracefs;

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockyard_replay::raw;
use blockyard_replay::ticks;
use blockyard_replay::trace::{Trace, TraceHeader};
use blockyard_replay::workloads::{COMMON, TraceWorkload};

use crate::error::LabError;
use crate::scratch::Scratch;
use crate::stop::Stop;
use crate::tools::child::CommandLine;
use device::LoopDevice;
use setting::Setting;
use tracefs::Instance;

/// The length of the file below the device, in bytes.
const FILE_BYTES: u64 = 128 << 20;
/// The mask of processors on which the kernel's workers may run.
const WORKERS: &str = "/sys/devices/virtual/workqueue/cpumask";
/// The time limit of a workload.
const LIMIT: Duration = Duration::from_secs(60);

/// The directories that a recording needs.
#[derive(Clone, Debug)]
pub struct RecordDirs {
    /// The directory of the file below the device.
    pub below: PathBuf,
    /// Where tracefs is mounted.
    pub tracefs: PathBuf,
}

/// Records the kernel's decisions for a workload.
///
/// # Errors
/// If the process is not root, the machine lacks a prerequisite, fio fails, events were lost, or
/// Ctrl-C was pressed.
pub fn record(
    workload: &TraceWorkload,
    place: &RecordDirs,
    stop: &Stop,
) -> Result<Trace, LabError> {
    if !rustix::process::geteuid().is_root() {
        return Err(LabError::missing("permission to trace", "run it as root"));
    }
    let instance = Instance::new(&place.tracefs)?;
    let scratch = Scratch::within(&place.below)?;
    let file = file_below(scratch.path())?;
    let device = LoopDevice::new(&file)?;
    let settings = device.prepare(workload)?;
    // The device's own worker runs there too; otherwise two processors decide at once and the order
    // of their events is unknown.
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
    let header = TraceHeader {
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
    // In this order: the settings belong to the device, and the device uses the file.
    drop(settings);
    drop(device);
    Ok(Trace { header, events: recording.events })
}

fn kernel() -> Result<String, LabError> {
    setting::read(Path::new("/proc/sys/kernel/osrelease"))
}

/// The fio command line for a workload on a device.
fn line(workload: &TraceWorkload, device: &LoopDevice) -> CommandLine {
    let text = format!("{COMMON} --filename={} {}", device.path().display(), workload.jobs);
    CommandLine::new("fio", &text)
}

/// Makes the file below the device with all its blocks allocated: a hole would be read at once.
fn file_below(folder: &Path) -> Result<PathBuf, LabError> {
    let path = folder.join("device");
    let what = || path.display().to_string();
    let file = std::fs::File::create_new(&path).map_err(LabError::io(what()))?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, FILE_BYTES)
        .map_err(|error| LabError::io(what())(error.into()))?;
    Ok(path)
}
