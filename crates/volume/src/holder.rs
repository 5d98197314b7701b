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
pub struct Holder {
    /// The process ID, if the process wrote it.
    pub pid: Option<u32>,
    /// The control socket of its yard, if it has one.
    pub control: Option<PathBuf>,
}

impl Holder {
    /// Longest text that is read, in bytes.
    pub(crate) const LEN_MAX: u64 = 8192;

    /// The identity of this process.
    pub fn this(control: Option<&Path>) -> Holder {
        Holder { pid: Some(std::process::id()), control: control.map(Path::to_owned) }
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
    pub fn read(lock: &Path) -> Holder {
        let mut text = Vec::new();
        let read =
            File::open(lock).and_then(|file| file.take(Holder::LEN_MAX).read_to_end(&mut text));
        match read {
            Ok(_) => Holder::parse(&String::from_utf8_lossy(&text)),
            Err(_) => Holder::default(),
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

    pub(crate) fn print(&self) -> String {
        let mut text = String::new();
        if let Some(pid) = self.pid {
            text += &format!("pid {pid}\n");
        }
        if let Some(control) = self.control.as_ref().and_then(|path| path.to_str()) {
            text += &format!("control {control}\n");
        }
        text
    }

    /// Parses the text. Lines that are unknown or incomplete are ignored.
    pub(crate) fn parse(text: &str) -> Holder {
        let mut holder = Holder::default();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            match line.split_once(' ') {
                Some(("pid", pid)) => holder.pid = pid.parse().ok(),
                Some(("control", path)) if path.starts_with('/') => {
                    holder.control = Some(path.into());
                }
                _ => {}
            }
        }
        holder
    }
}

impl fmt::Display for Holder {
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
    fn what_is_written_is_read_and_the_rest_is_passed_over() {
        let whole = Holder { pid: Some(71), control: Some("/run/yard/control.sock".into()) };
        for holder in [whole.clone(), Holder { control: None, ..whole.clone() }, Holder::default()]
        {
            assert_eq!(Holder::parse(&holder.print()), holder);
        }
        let found = Holder::parse("future x\npid many\ncontrol relative\npid 5\ncontrol /cut");
        assert_eq!(found, Holder { pid: Some(5), control: None });
        assert_eq!(whole.to_string(), "process 71, the yard at /run/yard/control.sock");
        assert_eq!(Holder::default().to_string(), "another process");
    }

    #[test]
    fn who_has_ended_is_gone_also_while_nobody_has_asked_how() {
        assert!(!Holder::is_gone(std::process::id()));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        assert!(!Holder::is_gone(pid));
        drop(child.stdin.take());
        while !Holder::is_gone(pid) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(Holder::is_gone(pid));
    }
}
