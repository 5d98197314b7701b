//! The file of `trace=FILE`: a trace of a device from its opening on.

use std::fs::{File, TryLockError};
use std::io::{self, BufWriter};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use blockyard_core::middleware::{Recorder, TraceWriter};
use blockyard_core::{Disk, owner_only};
use blockyard_trace::{RecordLimits, SOURCE, format, write_trace};

use crate::error::StackError;

/// The device number of /dev/null: 1:3 (Linux, Documentation/admin-guide/devices.txt).
const NULL_DEVICE: u64 = 0x103;

/// What a trace says of its device.
pub(crate) fn trace_title(name: &str, disk: &dyn Disk) -> String {
    format!("{} device {name} of {} sectors", disk.kind(), disk.geometry().sectors)
}

/// The file of `trace=FILE`, open and locked.
pub(crate) struct TraceFile {
    file: File,
    path: String,
}

impl TraceFile {
    /// Opens the file, which is new, empty or a trace. Its old contents stay until the trace
    /// begins, when it is known that the device can be opened.
    pub(crate) fn open(path: &str) -> Result<TraceFile, StackError> {
        let refused = |what: String| {
            let message = format!("trace: `{path}` {what}");
            StackError::Refused { field: "trace", message }
        };
        let failed = |error: io::Error| refused(format!("cannot be written: {error}"));
        let file = owner_only::make_options().open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let is_null = metadata.file_type().is_char_device() && metadata.rdev() == NULL_DEVICE;
        if !metadata.is_file() && !is_null {
            // A write to a pipe or a terminal may wait forever, and so would the end of the device.
            let what = "is neither a file nor /dev/null; `blockyard trace -o -` writes to a pipe";
            return Err(refused(what.to_owned()));
        }
        if metadata.is_file() {
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => {
                    let what = "is being written by another device; expected a file of its own";
                    refused(what.to_owned())
                }
                TryLockError::Error(error) => failed(error),
            })?;
            let mut start = [0; format::START.len()];
            let read = file.read_at(&mut start, 0).map_err(failed)?;
            if start[..read] != format::START[..read] {
                let what = "holds something else than a trace; remove it, or name another file";
                return Err(refused(what.to_owned()));
            }
            owner_only::narrow(&file).map_err(failed)?;
        }
        Ok(TraceFile { file, path: path.to_owned() })
    }

    /// Begins the trace, which lasts until the device is closed. If it cannot be written, the trace
    /// ends and the I/O continues.
    pub(crate) fn begin(self, disk: &Arc<dyn Disk>) {
        let (path, name) = (self.path.clone(), disk.name().to_owned());
        if let Err(error) = self.start(disk) {
            tracing::warn!(device = name, "trace: `{path}` cannot be written: {error}");
        }
    }

    fn start(self, disk: &Arc<dyn Disk>) -> io::Result<()> {
        let TraceFile { file, path } = self;
        let busy = || io::Error::other("the device is recorded already");
        let point = disk.trace_point().ok_or_else(busy)?;
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        let recording = point.record(SOURCE).ok_or_else(busy)?;
        let recorder = Arc::clone(recording.recorder());
        let (title, name) = (trace_title(disk.name(), disk.as_ref()), disk.name().to_owned());
        let disk: Weak<dyn Disk> = Arc::downgrade(disk);
        let write = move || {
            let mut out = BufWriter::new(file);
            let is_closed = || disk.strong_count() == 0;
            let limits = RecordLimits::default();
            match write_trace(&recording, &title, limits, is_closed, &mut out) {
                Ok((_, tally)) if tally.lost > 0 => {
                    tracing::warn!(device = name, "trace: `{path}` lacks {} events", tally.lost);
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(device = name, "trace: `{path}` has ended: {error}");
                }
            }
        };
        let thread = std::thread::Builder::new().name("trace".to_owned()).spawn(write)?;
        point.keep(Box::new(FileWriter { recorder, thread: Some(thread) }));
        Ok(())
    }
}

/// The thread that writes the trace of a device until the device is closed.
#[derive(Debug)]
struct FileWriter {
    recorder: Arc<Recorder>,
    thread: Option<JoinHandle<()>>,
}

impl TraceWriter for FileWriter {}

impl Drop for FileWriter {
    fn drop(&mut self) {
        self.recorder.stop();
        // A panic of the thread has been printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
