//! Records a workload on the running kernel, where root and tracefs allow it.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use blockyard_lab::kernel_replay::record::{RecordDirs, record};
use blockyard_lab::{LabError, Stop};
use blockyard_replay::replay::replay;
use blockyard_replay::workloads;

/// The most recordings.
const TRIES_MAX: u32 = 10;

#[test]
fn this_kernel_is_recorded_or_what_is_missing_is_said() {
    let place = RecordDirs { below: std::env::temp_dir(), tracefs: "/sys/kernel/tracing".into() };
    let loops = || {
        let output = std::process::Command::new("losetup").arg("--list").output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).contains("by-lab-"))
    };
    // On a busy machine too few of the kernel's timers may have run during a recording.
    let mut tries = 0;
    let trace = loop {
        tries += 1;
        match record(workloads::find("batch-1").unwrap(), &place, &Stop::new()) {
            Ok(trace) => break trace,
            Err(LabError::Missing { what, how }) => {
                assert!(!what.is_empty() && !how.is_empty());
                return;
            }
            Err(error) => assert!(tries < TRIES_MAX, "{error}"),
        }
    };
    assert_eq!(trace.header.tunables.fifo_batch, 1);
    assert!(trace.issues() > 1000, "{}", trace.issues());
    // Other processes keep this machine's processors busy, so the share of equal decisions shows
    // nothing; but every event must be of a request that existed.
    replay(&trace).unwrap();
    // Another program, such as udev, may hold a new device for an instant.
    assert!((0..1000).any(|_| !loops().unwrap_or(false)), "the loop device is gone");
    let instance = format!("/sys/kernel/tracing/instances/blockyard-{}", std::process::id());
    assert!(!Path::new(&instance).exists());
}
