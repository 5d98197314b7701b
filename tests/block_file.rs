//! Block files: devices as files of a mount, used by ordinary programs and by the kernel's own loop
//! driver and file systems. These tests mount, so they need root.

use blockyard_testing::capability::Capability;
use blockyard_testing::fuse_parameter::FuseParameter;

use crate::attach::{FileSystem, Loop, Unmount, unmount_lazily};
use crate::place::Place;
use crate::run::Run;
use crate::yard::Yard;

/// Tests that run once for each interface over which the kernel sends requests.
macro_rules! both_ways {
    ($($name:ident),+ $(,)?) => {
        mod device {
            use super::super::Way;
            $(#[test]
            fn $name() {
                super::$name(&Way::device());
            })+
        }
        mod io_uring {
            use super::super::Way;
            $(#[test]
            fn $name() {
                if let Some(way) = Way::io_uring() {
                    super::$name(&way);
                }
            })+
        }
    };
}

mod file_systems;
mod files;
mod mounts;

/// An interface over which the kernel sends requests.
#[derive(Debug)]
struct Way {
    /// The interface's name, as `blockyard show` prints it.
    name: &'static str,
    io_uring: bool,
}

impl Way {
    /// Reads of /dev/fuse.
    fn device() -> Way {
        Way { name: "/dev/fuse", io_uring: false }
    }

    /// FUSE over io_uring. Without it the test fails, or is skipped by request.
    fn io_uring() -> Option<Way> {
        match FuseParameter::set(true) {
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {
                Capability::FuseUring.is_missing(error);
                None
            }
            set => {
                set.unwrap();
                Some(Way { name: "io_uring", io_uring: true })
            }
        }
    }

    /// A yard with mounted files in a place of its own, served over this interface.
    fn serve(&self, devices: &[&str]) -> Mounted {
        // The kernel's parameter, held until the mount is made.
        let parameter = FuseParameter::set(self.io_uring).unwrap();
        let mounted = Mounted::serve(devices);
        drop(parameter);
        let printed = mounted.yard.printed();
        assert!(printed.contains(&format!("through {}", self.name)), "{printed}");
        mounted
    }
}

/// A yard whose devices are mounted as files. However the test ends, nothing stays mounted.
#[derive(Debug)]
struct Mounted {
    dir: String,
    /// Unmounts before the yard is killed.
    _mount: Unmount,
    yard: Yard,
}

impl Mounted {
    fn serve(devices: &[&str]) -> Mounted {
        let place = Place::new();
        let dir = place.file("files");
        std::fs::create_dir(&dir).unwrap();
        Mounted::serve_in(place, dir, devices)
    }

    fn serve_in(place: Place, dir: String, args: &[&str]) -> Mounted {
        let args = [args, &["--fuse", &dir]].concat();
        Mounted::by(place, dir.clone(), &args)
    }

    /// A yard in `place` whose arguments mount its devices in `dir`.
    fn by(place: Place, dir: String, args: &[&str]) -> Mounted {
        // The server may mount and then fail to start.
        let mount = Unmount(dir.clone());
        Mounted { dir, _mount: mount, yard: Yard::serve_in(place, args) }
    }

    /// The path of a device's file.
    fn file(&self, device: &str) -> String {
        format!("{}/{device}", self.dir)
    }
}

/// Runs a Python script that must succeed; its variable `path` is the file's path.
fn python(path: &str, script: &str) -> String {
    let prelude = "import errno, os, sys, threading\npath = sys.argv[1]\n\
                   def fails(number, call, *args):\n\
                   \x20   try:\n\
                   \x20       call(*args)\n\
                   \x20   except OSError as error:\n\
                   \x20       assert error.errno == number, error\n\
                   \x20       return\n\
                   \x20   raise AssertionError('it succeeded')\n";
    crate::run::python(&format!("{prelude}{script}"), &[path])
}

/// The memory of the server, in bytes.
fn memory_of(yard: &Yard) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", yard.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// fio's report must be without errors and with I/O of both kinds.
fn check_report(run: &Run) {
    let report = &run.out[run.out.find('{').unwrap_or(0)..];
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0, "{run}");
    assert!(job["write"]["total_ios"].as_u64() > Some(0), "{run}");
    assert!(job["read"]["total_ios"].as_u64() > Some(0), "{run}");
}
