//! How long a host-managed SMR drive would take: seeks, rotation, transfer, its buffers.
//!
//! A pure model: no clock and no chance in it, so that the same commands at the same times always
//! take as long. Who completes commands asks it when each is due, in the order of their arrival.
//!
//! The medium is one spiral from the outer edge inwards, as the blocks of a drive are numbered. A
//! byte's angle follows from how long the spindle takes to get there from byte 0, so that whoever
//! reads on where he ended loses nothing, and whoever comes back to where he was a moment too late
//! waits for most of a revolution.

use std::collections::VecDeque;

/// Nanoseconds in a second.
const SECOND: f64 = 1e9;

/// Mean of the square root of the distance between two places drawn at random, where the whole
/// stroke is 1: the integral of `2 * (1 - d) * sqrt(d)`.
const MEAN_ROOT: f64 = 8.0 / 15.0;

/// Most buffered writes that are kept apart; beyond, the buffer counts as full.
const BUFFERED_MAX: usize = 8192;

/// Idle for so long, in nanoseconds, a drive begins to empty its media cache.
const IDLE_NS: u64 = 50_000_000;

/// What is known of a drive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveTimes {
    /// One revolution, in nanoseconds.
    pub revolution_ns: u64,
    /// A seek to the next track, in nanoseconds, when reading and when writing.
    pub track_seek_ns: [u64; 2],
    /// The average of all seeks, in nanoseconds, when reading and when writing.
    pub average_seek_ns: [u64; 2],
    /// From the medium at the outer edge, in bytes a second.
    pub outer_rate: u64,
    /// From the medium at the inner edge, in bytes a second.
    pub inner_rate: u64,
    /// Over the interface, in bytes a second.
    pub interface_rate: u64,
    /// What each command takes beside, in nanoseconds.
    pub command_ns: u64,
    /// Bytes that are read ahead after a read.
    pub read_ahead_bytes: u64,
    /// Bytes of writes that are buffered; none where the write cache is off.
    pub write_buffer_bytes: u64,
    /// Bytes of the area on the medium where small writes to conventional zones go first.
    pub media_cache_bytes: u64,
}

impl DriveTimes {
    /// A 14 TB host-managed drive of 2018, Western Digital's Ultrastar DC HC620.
    ///
    /// | figure | value | from |
    /// | --- | --- | --- |
    /// | revolution | 8.33 ms | 7200 revolutions a minute, HC620 specification, revision 1.5 |
    /// | outer rate | 233 MB/s | sustained, as announced for the 14 TB model in 2017 |
    /// | buffer | 512 MB | the same; how it is divided is not published: half for writes here |
    /// | average seek | 7.4, 8.2 ms | read, write: HC310 specification, table 5, the same maker's |
    /// | track seek | 0.23, 0.32 ms | the same, table 6 |
    /// | interface | 600 MB/s | SATA at 6 Gb/s |
    /// | inner rate | 110 MB/s | not published: radii of 3.5-inch platters, about 46 to 22 mm |
    /// | command, read-ahead, media cache | 50 us, 4 MiB, 8 GiB | not published: guesses |
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

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It reads.
    Read,
    /// It writes.
    Write {
        /// It is done when the data are on the medium.
        fua: bool,
        /// To a conventional zone.
        conventional: bool,
    },
    /// It empties the write buffer.
    Flush,
    /// It does not touch the medium.
    Other,
}

/// Where the arm goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    Reads = 0,
    Writes = 1,
}

/// A write in the buffer.
#[derive(Clone, Copy, Debug)]
struct Buffered {
    bytes: u64,
    /// When it is on the medium.
    done_ns: u64,
}

/// A drive and where its head is.
#[derive(Clone, Debug)]
pub struct Timing {
    times: DriveTimes,
    /// Length of the medium in bytes.
    len: u64,
    /// Where the head is, in bytes: behind what it transferred last.
    head: u64,
    /// When it got there, and the arm is free.
    free_ns: u64,
    /// Whether it has read last, and so goes on reading ahead.
    ahead: bool,
    buffered: VecDeque<Buffered>,
    buffered_bytes: u64,
    /// Bytes in the media cache, and the number of writes that they are.
    cached_bytes: u64,
    cached_writes: u64,
    /// When the last command came.
    last_ns: u64,
}

impl Timing {
    /// A drive of `len` bytes, its head at the outer edge.
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

    /// When a command that comes at `now_ns` is done. Times do not fall from call to call; one that
    /// does counts as the last one.
    pub fn done_at(&mut self, access: Access, offset: u64, len: u64, now_ns: u64) -> u64 {
        let now = now_ns.max(self.last_ns);
        self.tidy(now);
        self.last_ns = now;
        let start = now + self.times.command_ns;
        match access {
            Access::Read => self.read(offset, len, start),
            Access::Write { fua, conventional } => {
                self.write(fua, conventional, offset, len, start)
            }
            Access::Flush => self.drained(start),
            Access::Other => start,
        }
    }

    /// How long the head takes from byte 0 to a byte, in nanoseconds, without a pause.
    ///
    /// The rate falls with the radius, and bytes below a radius go with its square: the rate at a
    /// byte is `sqrt(outer² - b / len * (outer² - inner²))`. This is the integral of its inverse.
    fn spin_ns(&self, byte: u64) -> u64 {
        let (outer, inner) = (self.times.outer_rate as f64, self.times.inner_rate as f64);
        let part = byte.min(self.len) as f64 / self.len as f64;
        let fall = outer * outer - inner * inner;
        let seconds = if fall > 0.0 {
            let rate = (outer * outer - part * fall).sqrt();
            // `outer - rate` without the loss of digits near the edge.
            2.0 * self.len as f64 * part / (outer + rate)
        } else {
            part * self.len as f64 / outer
        };
        (seconds * SECOND) as u64
    }

    /// A seek over a distance in bytes.
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

    /// Moves the head to a byte and transfers from there; answers when that is done.
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
            // The head reads on until the limit, unless something else comes.
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

    /// Does something before the writes that are buffered, but behind the one on its way: they are
    /// done so much later.
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

    /// Brings a buffered write to the medium: small ones of conventional zones to the media cache,
    /// one behind the other, the rest to their place.
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

    /// When everything buffered is on the medium.
    fn drained(&self, start: u64) -> u64 {
        self.buffered.back().map_or(start, |last| last.done_ns.max(start))
    }

    /// Forgets what was done before `now`, and lets an idle drive bring its media cache home, a
    /// seek and half a revolution for each write.
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
