//! The zone write ordering of Linux 5.8 to 6.9: a bit per zone in the scheduler, which is only
//! tried.
//!
//! Writes wait in the scheduler. At each dispatch all waiting writes are examined in order: a write
//! whose zone's bit is free takes the bit and is dispatched, the others stay. The bit is released
//! when the write completes. No waiter is woken then: a channel looks again after a completion of
//! its own or after a delay.
#![allow(clippy::disallowed_types)] // The bits are this baseline's own; the product needs none.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_core::request::{CompletedRequest, Request};
use blockyard_core::zone::gate::{Gate, GateMode, GateQueues, GateView, Gates};
use blockyard_core::{Due, Nanos, Op, ZoneGeometry};

/// The baseline's name on the command line.
pub const NAME: &str = "write-lock";

/// No zone, where a zone number is expected.
const NONE: u32 = u32::MAX;

/// The delay in ns after which waiting writes are tried again if nothing completes before. The
/// kernel's is 3 ms.
const LOOK_NS: u64 = 20_000;

/// The bits of a device's zones.
#[derive(Debug)]
pub struct WriteLocks {
    zones: ZoneGeometry,
    taken: Arc<[AtomicBool]>,
}

impl WriteLocks {
    /// Free bits for all these zones.
    pub fn new(zones: ZoneGeometry) -> WriteLocks {
        let taken = (0..zones.zone_count).map(|_| AtomicBool::new(false)).collect();
        WriteLocks { zones, taken }
    }
}

impl Gates for WriteLocks {
    type Gate = WriteLock;

    fn open(&self, depth: u16) -> WriteLock {
        WriteLock {
            zones: self.zones.clone(),
            taken: Arc::clone(&self.taken),
            waiting: VecDeque::with_capacity(depth.into()),
            skipped: Vec::with_capacity(depth.into()),
            held: vec![NONE; depth.into()],
            look_at: Nanos(0),
        }
    }

    fn view(&self) -> GateView {
        GateView { mode: GateMode::ZoneWritePlug, emulates_append: false }
    }
}

/// The state of one channel: the writes that wait in its scheduler.
#[derive(Debug)]
pub struct WriteLock {
    zones: ZoneGeometry,
    taken: Arc<[AtomicBool]>,
    waiting: VecDeque<Request>,
    /// The zones that this look has skipped.
    skipped: Vec<u32>,
    /// For each request, by its first slot, the zone whose bit it holds.
    held: Vec<u32>,
    look_at: Nanos,
}

impl WriteLock {
    /// Examines all waiting writes in order, and passes on each that gets its zone's bit.
    fn look(&mut self, queues: &mut GateQueues) {
        self.skipped.clear();
        for _ in 0..self.waiting.len() {
            let Some(request) = self.waiting.pop_front() else { break };
            let zone = self.zones.zone_of(request.sector()).0;
            // A later write of a zone must not overtake an earlier one.
            let stays = self.skipped.contains(&zone);
            // Acquire: pairs with the Release in `leave`.
            if stays || self.taken[zone as usize].swap(true, Ordering::Acquire) {
                self.skipped.push(zone);
                self.waiting.push_back(request);
            } else {
                self.held[usize::from(request.index())] = zone;
                queues.forward(request);
            }
        }
    }
}

impl Gate for WriteLock {
    fn enter(&mut self, request: Request, queues: &mut GateQueues) {
        let zone = self.zones.zone_of(request.sector());
        let writes = matches!(request.op(), Op::Write | Op::WriteZeroes);
        if !writes || self.zones.is_conventional(zone) {
            return queues.forward(request);
        }
        self.waiting.push_back(request);
        self.look(queues);
    }

    fn leave(&mut self, ended: CompletedRequest, queues: &mut GateQueues) {
        let zone = std::mem::replace(&mut self.held[usize::from(ended.index())], NONE);
        if zone != NONE {
            // Release: pairs with the Acquire in `look`.
            self.taken[zone as usize].store(false, Ordering::Release);
        }
        queues.complete(ended);
        self.look(queues);
    }

    fn poll(&mut self, now: Nanos, queues: &mut GateQueues) {
        self.look(queues);
        self.look_at = now + LOOK_NS;
    }

    fn due(&self) -> Due {
        if self.waiting.is_empty() { Due::Never } else { Due::At(self.look_at) }
    }

    fn close(&mut self) {
        self.waiting.clear();
    }
}

/// Releases the bits of requests that the channel never started.
impl Drop for WriteLock {
    fn drop(&mut self) {
        for zone in self.held.iter().filter(|zone| **zone != NONE) {
            self.taken[*zone as usize].store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_core::channel::ChannelConfig;
    use blockyard_core::{Bio, BufRef, Composed, Device, Disk, Region, Sector, Status};
    use blockyard_null::{IrqMode, Null, NullConfig};

    #[test]
    fn one_write_of_a_zone_is_in_flight_and_order_is_kept() {
        let config = NullConfig {
            size: 4 << 20,
            zoned: true,
            zone_size: 1 << 20,
            irqmode: IrqMode::Softirq,
            ..NullConfig::default()
        };
        let null = Null::open(config).unwrap();
        let locks = WriteLocks::new(null.geometry().zones.clone().unwrap());
        let depth = ChannelConfig::default();
        let disk = Composed::new("l".to_owned(), "null", null, depth);
        let disk = disk.with_gates(locks);
        let mut done = Vec::new();
        let mut channels = [disk.open().unwrap(), disk.open().unwrap()];
        for (number, channel) in (0..).zip(&mut channels) {
            let region = channel.register(Region::alloc(4096));
            let buf = BufRef { region, offset: 0 };
            for sector in [number * 16, number * 16 + 8, 2048 * (2 + number)] {
                assert_eq!(channel.push(&[Bio::write(Sector(sector), 8, buf)]), 1);
                channel.submit();
            }
        }
        while done.len() < 6 {
            for channel in &mut channels {
                if channel.in_flight() > 0 {
                    channel.wait(None);
                    channel.reap(&mut done);
                }
            }
        }
        assert!(done.iter().all(|end| end.status == Status::Ok), "{done:?}");
    }
}
