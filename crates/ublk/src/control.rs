//! Commands for `/dev/ublk-control`, one at a time, on a ring with entries of 128 bytes.
#![allow(unsafe_code)] // Submissions name memory by address.

use std::fs::{File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use rustix::io::Errno;
use rustix::process::{configure_io_flusher_behavior, is_io_flusher};

use crate::abi::{
    CONTROL_PATH, ControlCommand, ControlData, DevInfo, INFO_BYTES, PARAMS_BYTES, Params, feature,
};
use crate::error::UblkError;

/// How often a wait for a command looks whether to give up.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The length of the buffer for the data of commands, in bytes.
const BUFFER_BYTES: usize = if PARAMS_BYTES > INFO_BYTES { PARAMS_BYTES } else { INFO_BYTES };

/// An open `/dev/ublk-control`.
pub(crate) struct Control {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: File,
    /// What a command reads or writes. The kernel uses it until the command has completed.
    buffer: Box<[u8; BUFFER_BYTES]>,
}

/// Checks that the kernel has a ublk driver which this process may use, with what every device
/// needs.
///
/// # Errors
/// What is missing.
pub fn check_kernel() -> Result<(), UblkError> {
    Control::open()?.check_features(feature::USER_COPY)
}

/// Prepares this thread, and the threads and processes that it starts later, to serve the kernel:
/// to get memory they do not wait for I/O, which may be to a block device of this process.
///
/// # Errors
/// If the system refuses.
pub fn begin_io_flusher() -> io::Result<()> {
    // prctl(2), PR_SET_IO_FLUSHER: a state of the thread, inherited by fork and kept by execve.
    Ok(configure_io_flusher_behavior(true)?)
}

/// Makes this thread one as any other again. A process that this one starts calls it before it
/// executes its program. The call is async-signal-safe.
///
/// # Errors
/// If the system refuses.
pub fn end_io_flusher() -> io::Result<()> {
    match configure_io_flusher_behavior(false) {
        // Without CAP_SYS_RESOURCE the thread cannot have been prepared.
        Err(Errno::PERM | Errno::INVAL) => Ok(()),
        ended => Ok(ended?),
    }
}

/// A thread that is prepared as by [`begin_io_flusher`]. Dropping it restores the state before.
#[derive(Debug)]
pub struct IoFlusher {
    was_flusher: bool,
    /// The state belongs to the thread, so that another thread must not drop this.
    _not_send: PhantomData<*const ()>,
}

impl IoFlusher {
    /// Prepares this thread, and the threads that it starts until this is dropped.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn begin() -> io::Result<IoFlusher> {
        let was_flusher = is_io_flusher()?;
        begin_io_flusher()?;
        Ok(IoFlusher { was_flusher, _not_send: PhantomData })
    }
}

impl Drop for IoFlusher {
    fn drop(&mut self) {
        if !self.was_flusher
            && let Err(error) = end_io_flusher()
        {
            tracing::warn!(%error, "a thread stays an I/O flusher");
        }
    }
}

impl Control {
    /// Opens the device for commands.
    ///
    /// # Errors
    /// If the kernel has no ublk driver, or refuses it or a ring to this process.
    pub(crate) fn open() -> Result<Control, UblkError> {
        let file = OpenOptions::new().read(true).write(true).open(CONTROL_PATH);
        let file = file.map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => UblkError::NotPermitted { source },
            _ => UblkError::NoDriver { source },
        })?;
        let ring = IoUring::<Entry128, cqueue::Entry>::builder().build(4)?;
        Ok(Control { ring, file, buffer: Box::new([0; BUFFER_BYTES]) })
    }

    /// Checks that the driver has features.
    ///
    /// # Errors
    /// The first feature that it lacks.
    pub(crate) fn check_features(&mut self, wanted: u64) -> Result<(), UblkError> {
        const ALL: [(u64, &str, &str); 5] = [
            (feature::USER_COPY, "copies by the server (UBLK_F_USER_COPY)", "Linux 6.5"),
            (feature::ZONED, "zones (UBLK_F_ZONED)", "Linux 6.6 with CONFIG_BLK_DEV_ZONED"),
            (feature::USER_RECOVERY, "recovery (UBLK_F_USER_RECOVERY)", "Linux 6.1"),
            (feature::USER_RECOVERY_REISSUE, "recovery with its requests", "Linux 6.1"),
            (feature::UPDATE_SIZE, "change of the size (UBLK_F_UPDATE_SIZE)", "Linux 6.16"),
        ];
        let features = match self.call(ControlCommand::GetFeatures, u32::MAX, 8, 0) {
            Ok(()) => u64::from_ne_bytes(std::array::from_fn(|at| self.buffer[at])),
            // Linux before 6.5 does not know the command.
            Err(UblkError::Command { source, .. }) if is_unknown_command(&source) => 0,
            Err(error) => return Err(error),
        };
        match ALL.iter().find(|(bit, ..)| wanted & bit != 0 && features & bit == 0) {
            Some((_, what, since)) => Err(UblkError::NoFeature { what, since }),
            None => Ok(()),
        }
    }

    /// Describes a device; `None` if there is none of this number.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn info(&mut self, id: u32) -> Result<Option<DevInfo>, UblkError> {
        self.buffer.fill(0);
        match self.call(ControlCommand::GetDevInfo, id, INFO_BYTES, 0) {
            Ok(()) => Ok(Some(DevInfo::parse(&self.taken()))),
            Err(UblkError::Command { source, .. })
                if source.raw_os_error() == Some(libc::ENODEV) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Adds a device, and returns it as the kernel made it: with its number, and with fewer queues
    /// and features where the kernel has fewer.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn add(&mut self, info: &DevInfo) -> Result<DevInfo, UblkError> {
        self.give(&info.print());
        self.call(ControlCommand::AddDev, info.id, INFO_BYTES, 0)?;
        Ok(DevInfo::parse(&self.taken()))
    }

    /// Sets the parameters of a device.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn set_params(&mut self, id: u32, params: &Params) -> Result<(), UblkError> {
        self.give(&params.print());
        self.call(ControlCommand::SetParams, id, PARAMS_BYTES, 0)
    }

    /// The parameters of a device.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn params(&mut self, id: u32) -> Result<Params, UblkError> {
        self.buffer.fill(0);
        // The kernel reads the length that it may fill.
        self.give(&(PARAMS_BYTES as u32).to_ne_bytes());
        self.call(ControlCommand::GetParams, id, PARAMS_BYTES, 0)?;
        Ok(Params::parse(&self.taken()))
    }

    /// Changes the capacity of a block device that is served, in sectors. The kernel tells the
    /// programs that have it open.
    ///
    /// # Errors
    /// If the kernel refuses, or does not know the command: [`feature::UPDATE_SIZE`].
    pub(crate) fn update_size(&mut self, id: u32, sectors: u64) -> Result<(), UblkError> {
        self.call(ControlCommand::UpdateSize, id, 0, sectors)
    }

    /// Gives a command without data, for the server of a process.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn command(
        &mut self,
        command: ControlCommand,
        id: u32,
        pid: u32,
    ) -> Result<(), UblkError> {
        self.call(command, id, 0, pid.into())
    }

    /// As [`Control::command`], but returns `TimedOut` when `gives_up` says so. The command may
    /// still be running then, and ends when this is dropped.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn command_unless(
        &mut self,
        command: ControlCommand,
        id: u32,
        pid: u32,
        gives_up: impl Fn() -> bool,
    ) -> Result<(), UblkError> {
        self.run(command, ControlData { id, len: 0, address: 0, inline: pid.into() }, gives_up)
    }

    fn give(&mut self, bytes: &[u8]) {
        self.buffer[..bytes.len()].copy_from_slice(bytes);
    }

    fn taken<const N: usize>(&self) -> [u8; N] {
        std::array::from_fn(|at| self.buffer[at])
    }

    /// Executes a command on the first `len` bytes of the buffer.
    fn call(
        &mut self,
        command: ControlCommand,
        id: u32,
        len: usize,
        inline: u64,
    ) -> Result<(), UblkError> {
        let address = if len > 0 { self.buffer.as_mut_ptr() as u64 } else { 0 };
        // At most BUFFER_BYTES. It is waited for, because the kernel uses the buffer.
        self.run(command, ControlData { id, len: len as u16, address, inline }, || false)
    }

    fn run(
        &mut self,
        command: ControlCommand,
        data: ControlData,
        gives_up: impl Fn() -> bool,
    ) -> Result<(), UblkError> {
        let id = data.id;
        let failed = |source| UblkError::Command { command, id, source };
        let entry = opcode::UringCmd80::new(Fd(self.file.as_raw_fd()), command.code())
            .cmd(data.print())
            .build();
        // SAFETY: the file and the buffer that the command names belong to `self`. A command with
        // the buffer is waited for below.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| failed(io::Error::other("a command is running already")))?;
        loop {
            if let Some(done) = self.ring.completion().next() {
                return match done.result() {
                    error if error < 0 => Err(failed(io::Error::from_raw_os_error(-error))),
                    _ => Ok(()),
                };
            }
            let interval = Timespec::from(LOOK_INTERVAL);
            let waited =
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&interval));
            match waited.err().and_then(|error| error.raw_os_error()) {
                None | Some(libc::ETIME | libc::EINTR) => {}
                // The command may be under way already, so it is waited for.
                Some(_) => std::thread::sleep(LOOK_INTERVAL),
            }
            if gives_up() {
                return Err(failed(io::ErrorKind::TimedOut.into()));
            }
        }
    }
}

fn is_unknown_command(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs CAP_SYS_RESOURCE, as ublk does; without it the system has to refuse both.
    #[test]
    fn an_io_flusher_ends_with_the_outermost_guard() {
        let Ok(before) = is_io_flusher() else {
            assert!(IoFlusher::begin().is_err());
            return;
        };
        assert!(!before);
        let outer = IoFlusher::begin().unwrap();
        drop(IoFlusher::begin().unwrap());
        assert!(is_io_flusher().unwrap(), "the thread was one before the inner guard");
        drop(outer);
        assert!(!is_io_flusher().unwrap());
    }
}
