//! The owner of a pool's lock. The process that holds the lock writes its identity into the lock
//! file, or to a fixed place on the disk. Other processes can then name it and find its control
//! socket.
//!
//! The lock itself is the kernel's and ends with the process. The text is valid only while the lock
//! is held.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A process that has a pool open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockOwner {
    /// The process ID, if the process wrote it.
    pub pid: Option<u32>,
    /// The control socket of its yard, if it has one.
    pub control: Option<PathBuf>,
    /// When it started: the ID of the boot, and clock ticks since then. It tells a process from a
    /// later one with the same ID.
    pub started: Option<String>,
}

/// When a process of this host started; `None` if there is none with this ID, or if `/proc` does
/// not tell. Source: proc(5), field 22 of `/proc/PID/stat`.
fn started(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in brackets and may contain any character; the state, field 3, follows it.
    let ticks = stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.to_owned();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("{} {ticks}", boot.trim()))
}

impl LockOwner {
    /// Longest text that is read, in bytes.
    pub(crate) const LEN_MAX: u64 = 8192;

    /// The identity of this process.
    pub fn this(control: Option<&Path>) -> LockOwner {
        let pid = std::process::id();
        LockOwner { pid: Some(pid), control: control.map(Path::to_owned), started: started(pid) }
    }

    /// Writes the identity into the file that this process has locked.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn write(&self, lock: &File) -> io::Result<()> {
        let text = self.print();
        lock.write_all_at(text.as_bytes(), 0)?;
        lock.set_len(text.len() as u64)
    }

    /// Reads the identity of the process that has locked the file; empty if it wrote none.
    pub fn read(lock: &Path) -> LockOwner {
        let mut text = Vec::new();
        let read =
            File::open(lock).and_then(|file| file.take(LockOwner::LEN_MAX).read_to_end(&mut text));
        match read {
            Ok(_) => LockOwner::parse(&String::from_utf8_lossy(&text)),
            Err(_) => LockOwner::default(),
        }
    }

    /// Whether no process with this ID runs here. It may have been killed with system calls that
    /// have not ended. A process on another host or in another PID namespace looks the same.
    pub(crate) fn is_gone(pid: u32) -> bool {
        match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            // proc(5): the state follows the name, which is in brackets. When the first thread has
            // ended, the others end too.
            Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, it)| it.starts_with(['Z', 'X'])),
            Err(error) => {
                let code = error.raw_os_error();
                let is_none = [Some(libc::ENOENT), Some(libc::ESRCH)].contains(&code);
                is_none && Path::new("/proc/self").exists()
            }
        }
    }

    /// Whether this is a process of this host that still runs, and not this one.
    pub(crate) fn is_other_running(&self) -> bool {
        let other = self.pid.filter(|pid| *pid != std::process::id());
        other.is_some_and(|pid| {
            self.started.is_some() && self.started == started(pid) && !LockOwner::is_gone(pid)
        })
    }

    pub(crate) fn print(&self) -> String {
        let mut text = String::new();
        if let Some(pid) = self.pid {
            text += &format!("pid {pid}\n");
        }
        if let Some(control) = self.control.as_ref().and_then(|path| path.to_str()) {
            text += &format!("control {control}\n");
        }
        if let Some(started) = &self.started {
            text += &format!("started {started}\n");
        }
        text
    }

    /// Parses the text. Lines that are unknown or incomplete are ignored.
    pub(crate) fn parse(text: &str) -> LockOwner {
        let mut lock_owner = LockOwner::default();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            match line.split_once(' ') {
                Some(("pid", pid)) => lock_owner.pid = pid.parse().ok(),
                Some(("control", path)) if path.starts_with('/') => {
                    lock_owner.control = Some(path.into());
                }
                Some(("started", when)) => lock_owner.started = Some(when.to_owned()),
                _ => {}
            }
        }
        lock_owner
    }
}

impl fmt::Display for LockOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}")?,
            None => f.write_str("another process")?,
        }
        match &self.control {
            Some(control) => write!(f, ", the yard at {}", control.display()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_owner_round_trips_and_unknown_lines_are_ignored() {
        let whole = LockOwner {
            pid: Some(71),
            control: Some("/run/yard/control.sock".into()),
            started: Some("b00t 17".to_owned()),
        };
        for lock_owner in
            [whole.clone(), LockOwner { control: None, ..whole.clone() }, LockOwner::default()]
        {
            assert_eq!(LockOwner::parse(&lock_owner.print()), lock_owner);
        }
        let found = LockOwner::parse("future x\npid many\ncontrol relative\npid 5\ncontrol /cut");
        assert_eq!(found, LockOwner { pid: Some(5), ..LockOwner::default() });
        assert_eq!(whole.to_string(), "process 71, the yard at /run/yard/control.sock");
        assert_eq!(LockOwner::default().to_string(), "another process");
    }

    #[test]
    fn a_process_is_distinguished_from_a_later_one_with_its_id() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let running = LockOwner { pid: Some(pid), control: None, started: started(pid) };
        assert!(running.is_other_running(), "{running:?}");
        let earlier = LockOwner { started: Some("b00t 17".to_owned()), ..running.clone() };
        assert!(!earlier.is_other_running());
        assert!(!LockOwner { started: None, ..running.clone() }.is_other_running());
        assert!(!LockOwner::this(None).is_other_running(), "it is this one");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!running.is_other_running());
    }

    #[test]
    fn an_exited_process_is_gone_before_its_parent_waits_for_it() {
        assert!(!LockOwner::is_gone(std::process::id()));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        assert!(!LockOwner::is_gone(pid));
        drop(child.stdin.take());
        while !LockOwner::is_gone(pid) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(LockOwner::is_gone(pid));
    }
}
