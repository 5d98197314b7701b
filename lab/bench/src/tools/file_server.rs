//! FUSE servers, ours and those of other projects: how each serves a file, and its CPU time.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use blockyard_testing::fuse_parameter::FuseParameter;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::scratch::folder;
use crate::stop::Stop;
use crate::tools::child::{CommandLine, RunningChild};

/// A server as data.
#[derive(Clone, Copy, Debug)]
pub struct FileServerKind {
    /// The name of its variant.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// The Debian package that has it; empty for this program.
    pub package: &'static str,
    /// The line that starts it. `PROGRAM` stands for `blockyard`, `TARGET` for the mount point,
    /// `SIZE` for the bytes of its device.
    pub line: &'static str,
    /// The name of the mounted file below the target; empty if the target is the file.
    pub file: &'static str,
    /// Whether it is to use FUSE over io_uring; `None` for a server without support for it.
    pub io_uring: Option<bool>,
}

/// The line that starts our server.
const OURS: &str = "PROGRAM serve null:///null0?size=SIZE --nbd unix:TARGET.socket --control none \
                    --fuse TARGET";

/// All servers, ours first; each serves a device that costs nothing to read.
pub const KINDS: [FileServerKind; 3] = [
    FileServerKind {
        name: "blockyard",
        about: "blockyard serve --fuse, a null device without memory, through /dev/fuse",
        package: "",
        line: OURS,
        file: "null0",
        io_uring: Some(false),
    },
    FileServerKind {
        name: "blockyard-io_uring",
        about: "blockyard serve --fuse, a null device without memory, over io_uring (needs root; \
                enable_uring is set for the run and restored)",
        package: "",
        line: OURS,
        file: "null0",
        io_uring: Some(true),
    },
    FileServerKind {
        name: "qemu-storage-daemon",
        about: "QEMU's storage daemon, FUSE export, driver null-co",
        package: "qemu-system-common",
        line: "qemu-storage-daemon --blockdev driver=null-co,node-name=null0,size=SIZE \
               --export type=fuse,id=null0,node-name=null0,mountpoint=TARGET,writable=on",
        file: "",
        io_uring: None,
    },
];

/// The number of [`KINDS`] that are ours.
pub const OURS_COUNT: usize = 2;

/// A running server. Dropping it kills the server.
#[derive(Debug)]
pub struct FileServer {
    running: RunningChild,
    folder: PathBuf,
    file: PathBuf,
}

impl FileServerKind {
    /// Starts the server with a device of `size` bytes, and waits until its file exists.
    ///
    /// # Errors
    /// If its program is missing, it ends, or its file does not appear in time.
    pub fn start(
        &self,
        settings: &Settings,
        size_bytes: u64,
        stop: &Stop,
    ) -> Result<FileServer, LabError> {
        // Held until the file exists: the kernel reads the parameter once, at the mount.
        let _parameter = self.io_uring.map(fuse_parameter).transpose()?;
        let folder = folder(&settings.scratch)?;
        let target = target(&folder);
        let made = match self.file {
            "" => fs::write(&target, ""),
            _ => fs::create_dir(&target),
        };
        made.map_err(LabError::io(target.display().to_string()))?;
        let line = self.line(&settings.program, &target, size_bytes);
        let running = match line.start(Some(&folder)) {
            Ok(running) => running,
            Err(error) => {
                // It contains only the mount point that was just made.
                let _ = fs::remove_dir_all(&folder);
                return Err(error);
            }
        };
        let file = if self.file.is_empty() { target } else { target.join(self.file) };
        let mut server = FileServer { running, folder, file };
        let FileServer { running, file, .. } = &mut server;
        running.until_ready(stop, || {
            let is_there = fs::metadata(&*file).is_ok_and(|found| found.len() == size_bytes);
            (!is_there).then(|| "its file is not there".to_owned())
        })?;
        Ok(server)
    }

    fn line(&self, program: &Path, target: &Path, size_bytes: u64) -> CommandLine {
        CommandLine::new(self.package, self.line).with(&[
            ("PROGRAM", &program.display()),
            ("TARGET", &target.display()),
            ("SIZE", &size_bytes),
        ])
    }
}

/// Sets the kernel's parameter for FUSE over io_uring for as long as the result lives.
fn fuse_parameter(io_uring: bool) -> Result<FuseParameter, LabError> {
    FuseParameter::set(io_uring).map_err(|error| match error.kind() {
        io::ErrorKind::Unsupported => {
            LabError::missing("a way to mount FUSE as the cell asks", error.to_string())
        }
        _ => LabError::failed("FUSE over io_uring", error),
    })
}

fn target(folder: &Path) -> PathBuf {
    folder.join("mount")
}

impl FileServer {
    /// The process of the server.
    pub fn process(&self) -> &RunningChild {
        &self.running
    }

    /// The served file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The CPU time of all its threads until now, in user space and in the kernel.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn cpu(&self) -> Result<Duration, LabError> {
        self.running.cpu()
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        // The server is killed after this, and cannot unmount any more. An error means that nothing
        // is mounted.
        let _ = blockyard_os::detach(&target(&self.folder));
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(test: &str, program: &str) -> Settings {
        let name = format!("by-lab-{test}-{}", std::process::id());
        let scratch = std::env::temp_dir().join(name);
        fs::create_dir_all(&scratch).unwrap();
        Settings {
            quick: true,
            engine: None,
            program: program.into(),
            lab: "blockyard-lab".into(),
            scratch,
            processors: 2,
            peers: Default::default(),
        }
    }

    #[test]
    fn every_line_names_its_target_and_size() {
        for kind in KINDS {
            let text = kind.line(Path::new("by"), Path::new("/s/mount"), 4096).text();
            assert!(text.contains("/s/mount") && text.contains("4096"), "{text}");
            for word in ["TARGET", "SIZE", "PROGRAM"] {
                assert!(!text.contains(word), "{text}");
            }
        }
    }

    #[test]
    fn a_server_that_ends_says_why_and_leaves_nothing() {
        let settings = settings("file-ends", "/bin/false");
        let line = "ls /no/such TARGET";
        let kind = FileServerKind {
            name: "none",
            about: "",
            package: "coreutils",
            line,
            file: "",
            io_uring: None,
        };
        let error = kind.start(&settings, 1, &Stop::new()).unwrap_err().to_string();
        assert!(error.contains("/no/such") && error.contains("exit status"), "{error}");
        assert_eq!(fs::read_dir(&settings.scratch).unwrap().count(), 0);
        fs::remove_dir(&settings.scratch).unwrap();
    }

    #[test]
    fn a_file_exists_as_long_as_its_server() {
        let settings = settings("file-server-ends", "/bin/false");
        let server = KINDS[OURS_COUNT].start(&settings, 1 << 20, &Stop::new()).unwrap();
        assert_eq!(fs::read(server.file()).unwrap().len(), 1 << 20);
        drop(server);
        assert_eq!(fs::read_dir(&settings.scratch).unwrap().count(), 0);
        fs::remove_dir(&settings.scratch).unwrap();
    }
}
