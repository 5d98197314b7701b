//! A device that completes nothing until it may, and one with faults that a channel must not have:
//! it blocks in `submit`, or it panics there and again when it is closed.
#![allow(clippy::disallowed_types)] // A test may.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use blockyard_core::channel::Stats;
use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, Channel, Completion, DeviceError, Disk, Due, Extent, Geometry, Limits, Region, RegionId,
    Sector, Status,
};

/// What a channel does when its bios are submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Waits until [`Gate::open`].
    Blocks,
    /// No fault: it completes its bios after [`Gate::open`] only.
    Holds,
    /// Panics there and in drop; then it says how many bios are in flight.
    Panics { in_flight: usize },
    /// As before, but the question for bios in flight panics too.
    PanicsAlways,
    /// Gives no channel.
    Refuses,
}

/// The state of a channel that blocks, or holds its bios.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// Whether a channel has come.
    has_come: bool,
    /// Whether it may go on.
    is_open: bool,
    /// How often it was asked for completions.
    looks: u64,
}

impl Gate {
    /// Waits for a channel that blocks, or has bios.
    pub(crate) fn await_blocked(&self) {
        self.await_that(|state| state.has_come);
    }

    /// Waits until a channel that holds its bios was asked for completions `count` times more.
    pub(crate) fn await_looks(&self, count: u64) {
        let looks = self.state.lock().unwrap().looks + count;
        self.await_that(|state| state.looks >= looks);
    }

    fn await_that(&self, holds: impl Fn(&GateState) -> bool) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| !holds(state)).unwrap());
    }

    pub(crate) fn open(&self) {
        self.change(|state| state.is_open = true);
    }

    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn pass(&self) {
        self.change(|state| state.has_come = true);
        self.await_that(|state| state.is_open);
    }
}

/// A device of 1 MiB.
pub(crate) struct FaultyDisk {
    geometry: Geometry,
    limits: Limits,
    fault: Fault,
    gate: Arc<Gate>,
}

impl FaultyDisk {
    pub(crate) fn serving(fault: Fault, gate: &Arc<Gate>) -> Arc<dyn Disk> {
        let geometry = Geometry {
            sectors: 2048,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            zones: None,
        };
        let (limits, gate) = (Limits::unlimited(64), Arc::clone(gate));
        Arc::new(FaultyDisk { geometry, limits, fault, gate })
    }
}

impl Disk for FaultyDisk {
    fn name(&self) -> &str {
        "faulty"
    }

    fn kind(&self) -> &'static str {
        "faulty"
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
        if self.fault == Fault::Refuses {
            return Err(DeviceError::Os { what: "memory", errno: 12 });
        }
        let (fault, gate) = (self.fault, Arc::clone(&self.gate));
        let (bios, has_panicked) = (Vec::new(), false);
        Ok(Box::new(FaultyChannel { fault, gate, bios, has_panicked }))
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn extent(&self, _: Sector, sectors: u64) -> Extent {
        Extent { sectors, allocated: true, zero: false }
    }

    fn inject(&self, _: &Injection) -> Result<(), DeviceError> {
        Ok(())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

struct FaultyChannel {
    fault: Fault,
    gate: Arc<Gate>,
    bios: Vec<Bio>,
    has_panicked: bool,
}

impl Channel for FaultyChannel {
    fn register(&mut self, _: Arc<Region>) -> RegionId {
        RegionId(0)
    }

    fn unregister(&mut self, _: RegionId) -> bool {
        self.bios.is_empty()
    }

    fn push(&mut self, bios: &[Bio]) -> usize {
        self.bios.extend(bios);
        bios.len()
    }

    fn submit(&mut self) {
        match self.fault {
            Fault::Blocks => self.gate.pass(),
            Fault::Holds => self.gate.change(|state| state.has_come = true),
            Fault::Refuses => unreachable!("there is no channel"),
            Fault::Panics { .. } | Fault::PanicsAlways => {
                self.has_panicked = true;
                panic!("the device panics in submit");
            }
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        self.gate.change(|state| state.looks += 1);
        if self.fault == Fault::Holds && !self.gate.state.lock().unwrap().is_open {
            return 0;
        }
        let reaped = self.bios.len();
        out.extend(self.bios.drain(..).map(|Bio { user_data, sector, .. }| {
            let status = Status::Ok;
            Completion { user_data, sector, status }
        }));
        reaped
    }

    fn wait(&mut self, _: Option<Instant>) {}

    fn due(&self) -> Due {
        Due::Never
    }

    fn in_flight(&self) -> usize {
        match self.fault {
            Fault::Panics { in_flight } if self.has_panicked => in_flight,
            Fault::PanicsAlways if self.has_panicked => panic!("the device panics again"),
            _ => self.bios.len(),
        }
    }
}

impl Drop for FaultyChannel {
    fn drop(&mut self) {
        assert!(!self.has_panicked, "the device panics when it is closed");
    }
}
