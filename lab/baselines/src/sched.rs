//! A disk under one of several ways to share the deadline order.
//!
//! All go through the product's stack and its scheduled device. They differ in the scheduler queue:
//! how requests are inserted, and which thread may dispatch when.

use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::sched::shared::{Dispatcher, Scheduled, SchedulerQueue};
use blockyard_core::zone::gate::ZoneWritePlugs;
use blockyard_core::{Composed, Device, DeviceError, Disk};
use blockyard_null::Null;
use blockyard_yard::error::StackError;
use blockyard_yard::spec::DeviceSpec;
use blockyard_yard::stack::{self, Made};

use crate::sched_buckets::{self, Buckets};
use crate::sched_fifo::{self, Fifo};
use crate::sched_lanes::{self, LanesAlone};
use crate::sched_lock::{self, ParkingLock, QueuedLock, SpinningLock};

/// The system's error number for lack of memory.
const ENOMEM: i32 = 12;

/// The name of the product's scheduler.
pub const PRODUCT: &str = "product";
/// The name of the way without a scheduler: each channel submits to the device directly.
pub const NONE: &str = "none";

/// The ways that every experiment has, coarse ones first.
pub const NAMES: [&str; 5] =
    [sched_lock::SPINNING, sched_lock::PARKING, sched_buckets::NAME, PRODUCT, NONE];

/// A disk named `name` over the device, with its channels under the scheduler `way`.
///
/// # Errors
/// If the device can serve no more queues, or there is no memory for its zone write plugs.
///
/// # Panics
/// If `way` is unknown: [`NAMES`] lists the ways, and [`sched_lock::QUEUED`], [`sched_lanes::NAME`]
/// and [`sched_fifo::NAME`] are three more.
pub fn disk<D: Device, C: Clock + Clone + Sync>(
    way: &str,
    name: &str,
    device: D,
    clock: C,
) -> Result<Arc<dyn Disk>, DeviceError> {
    match way {
        sched_lock::SPINNING => under::<SpinningLock, D, C>(name, device, clock),
        sched_lock::QUEUED => under::<QueuedLock, D, C>(name, device, clock),
        sched_lock::PARKING => under::<ParkingLock, D, C>(name, device, clock),
        sched_buckets::NAME => under::<Buckets, D, C>(name, device, clock),
        sched_lanes::NAME => under::<LanesAlone, D, C>(name, device, clock),
        sched_fifo::NAME => under::<Fifo, D, C>(name, device, clock),
        PRODUCT => under::<Dispatcher, D, C>(name, device, clock),
        NONE => composed(name, device, clock),
        other => unreachable!("there is no scheduler `{other}`"),
    }
}

/// A disk over the device, under the scheduler queue `F`.
fn under<F: SchedulerQueue, D: Device, C: Clock + Clone + Sync>(
    name: &str,
    device: D,
    clock: C,
) -> Result<Arc<dyn Disk>, DeviceError> {
    composed(name, Scheduled::<D, F>::with_scheduler_queue(device, true)?, clock)
}

/// A disk over the device, with a zone write plug, because a scheduler does not keep zone writes in
/// order.
fn composed<D: Device, C: Clock + Clone + Sync>(
    name: &str,
    device: D,
    clock: C,
) -> Result<Arc<dyn Disk>, DeviceError> {
    // The depth that the yard chooses.
    let config = ChannelConfig { depth: 2 * device.limits().queue_depth.clamp(128, 16_384) };
    let (name, device) = (name.to_owned(), Arc::new(device));
    let gates = ZoneWritePlugs::new(Arc::clone(&device));
    let gates = gates
        .map_err(|_| DeviceError::Os { what: "memory for the gates of zones", errno: ENOMEM })?;
    let disk = Composed::with_clock(name, "null", device, config, clock);
    Ok(match gates {
        Some(gates) => Arc::new(disk.with_gates(gates)),
        None => Arc::new(disk),
    })
}

/// A null device as the specification says, under a coarse scheduler.
fn made(way: &str, spec: &DeviceSpec) -> Result<Made, StackError> {
    let null = Null::open(stack::null_config(spec)?)?;
    let disk = disk(way, spec.name(), null, Monotonic)
        .map_err(|error| StackError::Refused { field: "size", message: error.to_string() })?;
    Ok(Made::without_files(disk))
}

pub(crate) fn spinning(spec: &DeviceSpec) -> Result<Made, StackError> {
    made(sched_lock::SPINNING, spec)
}

pub(crate) fn parking(spec: &DeviceSpec) -> Result<Made, StackError> {
    made(sched_lock::PARKING, spec)
}

pub(crate) fn buckets(spec: &DeviceSpec) -> Result<Made, StackError> {
    made(sched_buckets::NAME, spec)
}
