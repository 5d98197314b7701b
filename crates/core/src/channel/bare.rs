//! A device queue without the layers above it, to measure the cost of those layers.
//!
//! A bio is checked, gets a slot and is started. There is no plug, scheduler, tag, statistic or
//! clock.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::rules::Rules;
use super::stack::Slots;
use crate::bio::{Bio, Status};
use crate::device::{Device, DeviceError, DeviceQueue};
use crate::region::Region;
use crate::request::{Batch, CompletionBatch, Request};
use crate::units::{Nanos, SECTOR_SHIFT, Tag};

/// A queue that executes one batch at a time, for devices whose completions do not depend on time.
pub struct Bare<Q: DeviceQueue> {
    queue: Q,
    rules: Rules,
    slots: Slots,
    batch: Batch,
    done: CompletionBatch,
    region: Arc<Region>,
}

impl<Q: DeviceQueue> Bare<Q> {
    /// Opens a queue of the device for batches of up to `depth` bios, whose data lies in `region`.
    ///
    /// # Errors
    /// If the device can serve no more queues.
    pub fn open<D>(device: &D, depth: u16, region: Arc<Region>) -> Result<Bare<Q>, DeviceError>
    where
        D: Device<Queue = Q>,
    {
        Ok(Bare {
            queue: device.open_queue()?,
            rules: Rules::new(device.geometry(), device.limits()),
            slots: Slots::new(depth),
            batch: Batch::with_capacity(depth.into()),
            done: CompletionBatch::with_capacity(depth.into()),
            region,
        })
    }

    /// Executes up to `depth` plain reads and writes.
    ///
    /// # Errors
    /// The first status that is not `OK`. `INVAL` if a bio is not a plain read or write, if its
    /// data lies outside the region, or if there are more bios than the depth.
    ///
    /// # Panics
    /// If the completions of the device depend on time.
    #[inline]
    pub fn run(&mut self, bios: &[Bio]) -> Result<(), Status> {
        let mut end = self.begin(bios);
        while !self.batch.is_empty() || self.slots.taken() > 0 {
            self.queue.start(Nanos(0), &mut self.batch, &mut self.done);
            self.queue.poll(Nanos(0), &mut self.done);
            assert!(!self.done.is_empty(), "the device completes by itself");
            while let Some(ended) = self.done.take() {
                if !ended.status().is_ok() {
                    end = Err(ended.status());
                }
                // SAFETY: the request has completed, so its slot belongs to this queue again.
                self.slots.put(unsafe { ended.head().as_ref() }.index);
            }
        }
        end
    }

    /// Puts bios into the batch, up to the first invalid one.
    #[inline]
    fn begin(&mut self, bios: &[Bio]) -> Result<(), Status> {
        for bio in bios {
            let data = self.region.range(bio.buf.offset, bio.sectors << SECTOR_SHIFT);
            let (true, Some(data)) = (self.rules.is_plain(bio), data) else {
                return Err(Status::Inval);
            };
            let slot = self.slots.take(bio, data).ok_or(Status::Inval)?;
            // SAFETY: the slot was just taken, this request alone refers to it, and `run` keeps it
            // until the request has completed.
            let request = unsafe { Request::of(slot) };
            // SAFETY: no thread writes to the slot now.
            let tag = Tag(unsafe { slot.as_ref() }.index);
            self.batch.start(request, tag);
        }
        Ok(())
    }
}
