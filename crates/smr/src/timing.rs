//! A timing model of a host-managed SMR drive: seeks, rotation, transfer, buffers.
//!
//! The model is pure: it has no clock and no randomness, so the same commands at the same times
//! always take the same time. The caller passes commands in the order of their arrival and gets the
//! time at which each completes.
//!
//! The medium is one spiral from the outer edge inwards, like a drive's block numbers. A byte's
//! angle follows from the time that the spindle takes to get there from byte 0. So a read that
//! continues where the last one ended loses no time, and an access that comes slightly too late
//! waits for almost a revolution.

use std::collections::VecDeque;

/// Nanoseconds in a second.
const SECOND: f64 = 1e9;

/// Mean of the square root of the distance between two random positions, as a part of the full
/// stroke: the integral of `2 * (1 - d) * sqrt(d)`.
const MEAN_ROOT: f64 = 8.0 / 15.0;

/// Maximum number of buffered writes to track; beyond it the buffer counts as full.
const BUFFERED_MAX: usize = 8192;

/// Idle time in nanoseconds after which a drive starts to empty its media cache.
const IDLE_NS: u64 = 50_000_000;

/// The parameters of a drive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveTimes {
    /// One revolution, in nanoseconds.
    pub revolution_ns: u64,
    /// A seek to the next track for a read and for a write, in nanoseconds.
    pub track_seek_ns: [u64; 2],
    /// The average seek for a read and for a write, in nanoseconds.
    pub average_seek_ns: [u64; 2],
    /// Media transfer rate at the outer edge, in bytes per second.
    pub outer_rate: u64,
    /// Media transfer rate at the inner edge, in bytes per second.
    pub inner_rate: u64,
    /// Interface transfer rate, in bytes per second.
    pub interface_rate: u64,
    /// Additional time of each command, in nanoseconds.
    pub command_ns: u64,
    /// Bytes that the drive reads ahead after a read.
    pub read_ahead_bytes: u64,
    /// Size of the write buffer in bytes; 0 if the write cache is off.
    pub write_buffer_bytes: u64,
    /// Size in bytes of the media cache: the area that first takes small writes to conventional
    /// zones.
    pub media_cache_bytes: u64,
}

impl DriveTimes {
    /// A 14 TB host-managed drive of 2018, Western Digital's Ultrastar DC HC620.
    ///
    /// | figure | value | from |
    /// | --- | --- | --- |
    /// | revolution | 8.33 ms | 7200 revolutions a minute, HC620 specification, revision 1.5 |
    /// | outer rate | 233 MB/s | sustained, as announced for the 14 TB model in 2017 |
    /// | buffer | 512 MB | same announcement; split not published: half for writes here |
    /// | average seek | 7.4, 8.2 ms | read, write: HC310 specification, table 5, same maker |
    /// | track seek | 0.23, 0.32 ms | HC310 specification, table 6 |
    /// | interface | 600 MB/s | SATA at 6 Gb/s |
    /// | inner rate | 110 MB/s | not published: radii of 3.5-inch platters, about 46 to 22 mm |
    /// | command, read-ahead, media cache | 50 us, 4 MiB, 8 GiB | not published: estimates |
    pub const HC620: DriveTimes = DriveTimes {
        revolution_ns: 8_333_333,
        track_seek_ns: [230_000, 320_000],
        average_seek_ns: [7_400_000, 8_200_000],
        outer_rate: 233_000_000,
        inner_rate: 110_000_000,
        interface_rate: 600_000_000,
        command_ns: 50_000,
        read_ahead_bytes: 4 << 20,
        write_buffer_bytes: 256_000_000,
        media_cache_bytes: 8 << 30,
    };
}

/// The kind of access of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// A read.
    Read,
    /// A write.
    Write {
        /// Whether the write completes only when the data are on the medium.
        fua: bool,
        /// Whether the write is to a conventional zone.
        conventional: bool,
    },
    /// A flush of the write buffer.
    Flush,
    /// A command that does not access the medium.
    Other,
}

/// The purpose of an arm movement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    Reads = 0,
    Writes = 1,
}

/// A write in the buffer.
#[derive(Clone, Copy, Debug)]
struct Buffered {
    bytes: u64,
    /// When the write is on the medium.
    done_ns: u64,
}

/// A drive with the state of its head and buffers.
#[derive(Clone, Debug)]
pub struct Timing {
    times: DriveTimes,
    /// Length of the medium in bytes.
    len: u64,
    /// Position of the head in bytes: the end of its last transfer.
    head: u64,
    /// When the head got there and the arm became free.
    free_ns: u64,
    /// Whether the last transfer was a read, so that the drive reads ahead.
    ahead: bool,
    buffered: VecDeque<Buffered>,
    buffered_bytes: u64,
    /// Bytes in the media cache; the next field is the number of writes.
    cached_bytes: u64,
    cached_writes: u64,
    /// When the last command arrived.
    last_ns: u64,
}

impl Timing {
    /// A drive of `len` bytes with its head at the outer edge.
    pub fn new(times: DriveTimes, len: u64) -> Timing {
        Timing {
            times,
            len: len.max(1),
            head: 0,
            free_ns: 0,
            ahead: false,
            buffered: VecDeque::new(),
            buffered_bytes: 0,
            cached_bytes: 0,
            cached_writes: 0,
            last_ns: 0,
        }
    }

    /// When a command that arrives at `now_ns` completes. Arrival times must not decrease; one that
    /// does is treated as the last one.
    pub fn done_at(&mut self, access: AccessKind, offset: u64, len: u64, now_ns: u64) -> u64 {
        let now = now_ns.max(self.last_ns);
        self.tidy(now);
        self.last_ns = now;
        let start = now + self.times.command_ns;
        match access {
            AccessKind::Read => self.read(offset, len, start),
            AccessKind::Write { fua, conventional } => {
                self.write(fua, conventional, offset, len, start)
            }
            AccessKind::Flush => self.drained(start),
            AccessKind::Other => start,
        }
    }

    /// Time in nanoseconds that the head takes from byte 0 to a byte without a pause.
    ///
    /// The rate is proportional to the radius, and the number of bytes inside a radius to its
    /// square: the rate at a byte is `sqrt(outer² - b / len * (outer² - inner²))`. This is the
    /// integral of its inverse.
    fn spin_ns(&self, byte: u64) -> u64 {
        let (outer, inner) = (self.times.outer_rate as f64, self.times.inner_rate as f64);
        let part = byte.min(self.len) as f64 / self.len as f64;
        let fall = outer * outer - inner * inner;
        let seconds = if fall > 0.0 {
            let rate = (outer * outer - part * fall).sqrt();
            // `outer - rate` without cancellation near the edge.
            2.0 * self.len as f64 * part / (outer + rate)
        } else {
            part * self.len as f64 / outer
        };
        (seconds * SECOND) as u64
    }

    /// Duration of a seek over a distance in bytes.
    fn seek_ns(&self, arm: Arm, distance: u64) -> u64 {
        if distance == 0 {
            return 0;
        }
        let track = self.times.track_seek_ns[arm as usize];
        let average = self.times.average_seek_ns[arm as usize];
        let spread = average.saturating_sub(track) as f64 / MEAN_ROOT;
        let part = distance.min(self.len) as f64 / self.len as f64;
        track + (spread * part.sqrt()) as u64
    }

    fn interface_ns(&self, len: u64) -> u64 {
        (len as f64 / self.times.interface_rate as f64 * SECOND) as u64
    }

    /// Moves the head to a byte and transfers from there; returns the completion time.
    fn transfer(&mut self, arm: Arm, offset: u64, len: u64, start: u64) -> u64 {
        let start = start.max(self.free_ns);
        let arrived = start + self.seek_ns(arm, offset.abs_diff(self.head));
        let revolution = self.times.revolution_ns;
        let wait =
            (self.spin_ns(offset) % revolution + revolution - arrived % revolution) % revolution;
        let done = arrived + wait + self.spin_ns(offset + len) - self.spin_ns(offset);
        (self.head, self.free_ns) = (offset + len, done);
        self.ahead = arm == Arm::Reads;
        done
    }

    fn read(&mut self, offset: u64, len: u64, start: u64) -> u64 {
        let ready = start + self.interface_ns(len);
        let (head, end) = (self.head, offset + len);
        let limit = (head + self.times.read_ahead_bytes).min(self.len);
        if self.ahead && (head..limit).contains(&offset) {
            // The head reads ahead up to the limit unless another command comes.
            let reached = |to: u64| self.free_ns + self.spin_ns(to) - self.spin_ns(head);
            let stopped = reached(limit) < start;
            if !stopped || end <= limit {
                let done = reached(end);
                (self.head, self.free_ns) = (end, done);
                return done.max(ready);
            }
        }
        let done = self.ahead_of_buffered(|timing| timing.transfer(Arm::Reads, offset, len, start));
        done.max(ready)
    }

    /// Does something before the buffered writes, but after the one in progress; delays them by its
    /// duration.
    fn ahead_of_buffered(&mut self, work: impl FnOnce(&mut Timing) -> u64) -> u64 {
        let Some(under_way) = self.buffered.front().map(|first| first.done_ns) else {
            return work(self);
        };
        let (free, head) = (self.free_ns, self.head);
        self.free_ns = under_way;
        let done = work(self);
        if self.buffered.len() > 1 {
            let delay = done - under_way;
            for later in self.buffered.iter_mut().skip(1) {
                later.done_ns += delay;
            }
            (self.free_ns, self.head, self.ahead) = (free + delay, head, false);
        }
        done
    }

    fn write(&mut self, fua: bool, conventional: bool, offset: u64, len: u64, start: u64) -> u64 {
        let arrived = start + self.interface_ns(len);
        if fua || self.times.write_buffer_bytes < len {
            let free = self.drained(start);
            return self.transfer(Arm::Writes, offset, len, free).max(arrived);
        }
        let mut accepted = arrived;
        while self.buffered_bytes + len > self.times.write_buffer_bytes
            || self.buffered.len() == BUFFERED_MAX
        {
            let first = self.buffered.pop_front().expect("what fills the buffer is in it");
            self.buffered_bytes -= first.bytes;
            accepted = accepted.max(first.done_ns);
        }
        let done_ns = self.destage(conventional, offset, len, accepted);
        self.buffered.push_back(Buffered { bytes: len, done_ns });
        self.buffered_bytes += len;
        accepted
    }

    /// Moves a buffered write to the medium: small writes to conventional zones go to the media
    /// cache sequentially, others to their place.
    fn destage(&mut self, conventional: bool, offset: u64, len: u64, start: u64) -> u64 {
        let room = self.cached_bytes + len <= self.times.media_cache_bytes.min(self.len);
        let small = len <= 256 << 10 && offset != self.head;
        if !(conventional && small && room) {
            return self.transfer(Arm::Writes, offset, len, start);
        }
        let place = self.cached_bytes;
        self.cached_bytes += len;
        self.cached_writes += 1;
        self.transfer(Arm::Writes, place, len, start)
    }

    /// When all buffered writes are on the medium.
    fn drained(&self, start: u64) -> u64 {
        self.buffered.back().map_or(start, |last| last.done_ns.max(start))
    }

    /// Removes writes that finished before `now`, and lets an idle drive move writes from the media
    /// cache to their places: a seek and half a revolution each.
    fn tidy(&mut self, now: u64) {
        while self.buffered.front().is_some_and(|first| first.done_ns <= now) {
            let first = self.buffered.pop_front().expect("there is a front");
            self.buffered_bytes -= first.bytes;
        }
        let idle = now.saturating_sub(self.free_ns.max(self.last_ns));
        if idle < IDLE_NS || self.cached_writes == 0 {
            return;
        }
        let each = self.times.average_seek_ns[Arm::Writes as usize] + self.times.revolution_ns / 2;
        let home = ((idle - IDLE_NS) / each.max(1)).min(self.cached_writes);
        self.cached_bytes -= self.cached_bytes / self.cached_writes * home;
        self.cached_writes -= home;
        if self.cached_writes == 0 {
            self.cached_bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests;
