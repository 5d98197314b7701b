//! Block devices of the kernel: a loop device on a file, and a file system on that. Both are
//! removed when the test ends, in any way; both need root.

use std::path::Path;

use crate::run::run;

/// Unmounts the directory, if anything is mounted there.
pub(crate) fn unmount_lazily(dir: &str) {
    let _ = run(&["umount", "--lazy", "--quiet", dir]);
}

/// A mounted directory. Dropping it unmounts the directory.
#[derive(Debug)]
pub(crate) struct Unmount(pub(crate) String);

impl Drop for Unmount {
    fn drop(&mut self) {
        unmount_lazily(&self.0);
    }
}

/// A loop device on a file. Dropping it detaches the device.
#[derive(Debug)]
pub(crate) struct Loop(pub(crate) String);

impl Loop {
    pub(crate) fn attach(file: &str) -> Loop {
        let line = ["losetup", "--find", "--show", "--direct-io=on", file];
        // Another test or program may take the device that losetup found.
        for _ in 0..16 {
            let attached = run(&line);
            if attached.code == Some(0) || !attached.err.contains("busy") {
                return Loop(attached.ok().out.trim().to_owned());
            }
        }
        panic!("no loop device is free");
    }

    /// The path of the device, which the caller detaches.
    pub(crate) fn keep(self) -> String {
        let device = self.0.clone();
        std::mem::forget(self);
        device
    }

    /// Detaches the file, and waits until it is free: the kernel may hold a detached device for an
    /// instant.
    pub(crate) fn detach(self) {
        run(&["losetup", "--detach", &self.0]).ok();
        std::mem::forget(self);
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run(&["losetup", "--detach", &self.0]);
    }
}

/// A mounted block device. Dropping it unmounts the device.
#[derive(Debug)]
pub(crate) struct FileSystem(Unmount);

impl FileSystem {
    pub(crate) fn mount(kind: &str, device: &str, dir: &str) -> FileSystem {
        if !Path::new(dir).exists() {
            std::fs::create_dir(dir).unwrap();
        }
        run(&["mount", "--types", kind, device, dir]).ok();
        FileSystem(Unmount(dir.to_owned()))
    }

    pub(crate) fn unmount(self) {
        // The kernel releases the files of an io_uring a moment after the process has ended.
        let tried = (0..500).map(|_| run(&["umount", &self.0.0]));
        let is_busy = |tried: &crate::run::Run| tried.code == Some(32);
        let mut left = tried.skip_while(is_busy);
        left.next().expect("it is busy for ever").ok();
        std::mem::forget(self);
    }
}
