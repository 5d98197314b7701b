//! The kernel's own ways to a block device: a loop device on a file, a file system on that. Both go
//! when the test does, whatever becomes of it; both need root.

use std::path::Path;

use crate::run::run;

/// Takes away what is mounted there, if anything is.
pub(crate) fn unmount_lazily(dir: &str) {
    let _ = run(&["umount", "--lazy", "--quiet", dir]);
}

/// What is mounted in a directory, which is taken away when this is dropped.
#[derive(Debug)]
pub(crate) struct Unmount(pub(crate) String);

impl Drop for Unmount {
    fn drop(&mut self) {
        unmount_lazily(&self.0);
    }
}

/// A loop device on a file, which goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Loop(pub(crate) String);

impl Loop {
    pub(crate) fn attach(file: &str) -> Loop {
        let line = ["losetup", "--find", "--show", "--direct-io=on", file];
        // Another test, or somebody else, may take the device that was found first.
        for _ in 0..16 {
            let attached = run(&line);
            if attached.code == Some(0) || !attached.err.contains("busy") {
                return Loop(attached.ok().out.trim().to_owned());
            }
        }
        panic!("no loop device is free");
    }

    /// Lets go of the file, and waits for it: a detached device may be held for an instant.
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

/// A mounted block device, unmounted when this is dropped.
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
        // The kernel lets go of what a ring had a moment after its process has ended.
        let tried = (0..500).map(|_| run(&["umount", &self.0.0]));
        let is_busy = |tried: &crate::run::Run| tried.code == Some(32);
        let mut left = tried.skip_while(is_busy);
        left.next().expect("it is busy for ever").ok();
        std::mem::forget(self);
    }
}
