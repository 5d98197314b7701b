//! The reference device: the model under one lock.
//!
//! It shows that the contract can be met, and tests the block layer without a product device. It
//! can also complete requests in any order, which inline devices never do.
#![allow(unsafe_code)]
// One lock for everything makes the device easy to verify.
#![allow(clippy::disallowed_types)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Op};
use blockyard_core::device::{Device, DeviceError, DeviceQueue, Due};
use blockyard_core::geometry::Geometry;
use blockyard_core::limits::Limits;
use blockyard_core::request::{Batch, CompletionBatch, Started};
use blockyard_core::units::{Nanos, SECTOR_BYTES, Sector};
use blockyard_core::zone::ZoneInfo;

use crate::model::{ExpectedResult, Model};
use crate::seed::Seed;

/// A device that answers as the model does.
#[derive(Debug)]
pub struct Reference {
    geometry: Geometry,
    limits: Limits,
    model: Arc<Mutex<Model>>,
    shuffled: Option<Seed>,
}

impl Reference {
    /// A device with the current state of the model. Requests complete immediately or, with a seed,
    /// later and in random order.
    pub fn new(model: Model, shuffled: Option<Seed>) -> Reference {
        Reference {
            geometry: model.geometry().clone(),
            limits: model.limits().clone(),
            model: Arc::new(Mutex::new(model)),
            shuffled,
        }
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        lock(&self.model)
    }
}

/// Locks the model. After a panic of a test's thread its state is used unchanged; the test has
/// failed anyway.
fn lock(model: &Mutex<Model>) -> MutexGuard<'_, Model> {
    model.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device for Reference {
    type Queue = ReferenceQueue;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_queue(&self) -> Result<ReferenceQueue, DeviceError> {
        Ok(ReferenceQueue {
            model: Arc::clone(&self.model),
            rng: self.shuffled.map(|seed| seed.rng(77)),
            pending: Vec::new(),
            depth: usize::from(self.limits.queue_depth),
        })
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        if from.0 >= self.geometry.sectors {
            return Err(DeviceError::OutOfRange { sector: from, sectors: self.geometry.sectors });
        }
        let zones = self.model().report();
        let first = zones.iter().filter(|zone| zone.start.0 + zone.sectors <= from.0).count();
        out.extend(zones.into_iter().skip(first).take(zones_max));
        Ok(())
    }
}

/// A queue of a [`Reference`].
#[derive(Debug)]
pub struct ReferenceQueue {
    model: Arc<Mutex<Model>>,
    rng: Option<fastrand::Rng>,
    pending: Vec<(Started, ExpectedResult)>,
    depth: usize,
}

impl DeviceQueue for ReferenceQueue {
    fn start(&mut self, _now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        while self.room() > 0
            && let Some(started) = batch.next()
        {
            let outcome = carry_out(&mut lock(&self.model), &started);
            if !outcome.status.is_ok() && started.is_merged() {
                // A request of one piece fails without effect, so its bios can be tried alone.
                batch.break_up(started);
                return;
            }
            match self.rng {
                Some(_) => self.pending.push((started, outcome)),
                None => finish(started, outcome, done),
            }
        }
    }

    fn poll(&mut self, _now: Nanos, done: &mut CompletionBatch) {
        let Some(rng) = &mut self.rng else { return };
        // Completes a random number of requests, but at least one.
        let count = if self.pending.is_empty() { 0 } else { rng.usize(1..=self.pending.len()) };
        for _ in 0..count {
            let (started, outcome) = self.pending.swap_remove(rng.usize(0..self.pending.len()));
            finish(started, outcome, done);
        }
    }

    fn room(&self) -> usize {
        self.depth - self.pending.len()
    }

    fn due(&self) -> Due {
        if self.pending.is_empty() { Due::Never } else { Due::At(Nanos(0)) }
    }
}

fn finish(started: Started, outcome: ExpectedResult, done: &mut CompletionBatch) {
    if started.op() == Op::ZoneAppend && outcome.status.is_ok() {
        done.complete_append(started, outcome.sector);
    } else {
        done.complete(started, outcome.status);
    }
}

/// Applies a request to the model, with the request's data gathered into one buffer and scattered
/// back.
fn carry_out(model: &mut Model, started: &Started) -> ExpectedResult {
    let op = started.op();
    let sectors = if op.has_data() { started.sectors() } else { 0 };
    let mut data = vec![0; (sectors * SECTOR_BYTES) as usize];
    let mut at = 0;
    for segment in started.segments() {
        let into = &mut data[at..at + segment.len_bytes];
        // SAFETY: a segment is readable for its length until the request completes, and `into`,
        // which has that length, is ours alone.
        unsafe { segment.data.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        at += segment.len_bytes;
    }
    let bio = Bio::new(op, started.sector(), started.sectors()).with_flags(started.flags());
    let outcome = model.apply(&bio, &mut data);
    if op == Op::Read && outcome.status == Status::Ok {
        let mut from = &data[..];
        for segment in started.segments() {
            let (bytes, rest) = from.split_at(segment.len_bytes);
            // SAFETY: a segment is writable for its length until the request completes, and does
            // not overlap `data`.
            unsafe { segment.data.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            from = rest;
        }
    }
    outcome
}
