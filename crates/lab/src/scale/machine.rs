//! A machine that the model simulates: cores, sockets, and the times between them.

/// Picoseconds.
pub type Time = u64;

/// Converts nanoseconds to picoseconds.
pub fn ns(nanoseconds: f64) -> Time {
    (nanoseconds.max(0.0) * 1000.0).round() as Time
}

/// The parameters of a machine. [`crate::scale::calibrate`] takes them from the experiment
/// `limits`.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Cores in all.
    pub cores: usize,
    /// Sockets over which the cores are spread evenly.
    pub sockets: usize,
    /// Threads that share a core.
    pub threads_per_core: usize,
    /// The throughput of a core's threads together, relative to one alone.
    pub thread_gain: f64,
    /// The factor by which a thread's work on private data slows down while other cores work too.
    pub crowding: f64,
    /// The time of a line's transfer between cores of one socket.
    pub transfer_near: Time,
    /// The time of a line's transfer between sockets.
    pub transfer_far: Time,
    /// How long a core continues to use a line after another has requested it.
    pub retain: Time,
    /// Whether a read of a line that another core has changed takes the line away from that core.
    pub migrates: bool,
    /// The number of readers that get a line during one transfer, once it is only read.
    pub readers_at_once: u64,
    /// The pause between two loads of a held lock.
    pub pause: Time,
    /// A yield of the processor with no other thread to run.
    pub yielding: Time,
    /// The spin lock, taken and released without contention.
    pub spin: Time,
    /// The sleeping lock, taken and released without contention.
    pub sleep: Time,
    /// An atomic update of a line that this core has.
    pub update: Time,
    /// The last part of an atomic update, in which no other core gets the line.
    pub pinned: Time,
    /// The waker's system call.
    pub wake_call: Time,
    /// The time from the waker's call to the sleeper's next instruction.
    pub wake: Time,
}

impl Default for Machine {
    /// Two cores of one socket, with round figures of a server of the 2020s.
    fn default() -> Machine {
        Machine {
            cores: 2,
            sockets: 1,
            threads_per_core: 1,
            thread_gain: 1.3,
            crowding: 1.0,
            transfer_near: ns(65.0),
            transfer_far: ns(160.0),
            retain: ns(15.0),
            migrates: true,
            readers_at_once: 8,
            pause: ns(12.0),
            yielding: ns(180.0),
            spin: ns(8.0),
            sleep: ns(14.0),
            update: ns(7.0),
            pinned: ns(1.0),
            wake_call: ns(800.0),
            wake: ns(4000.0),
        }
    }
}

impl Machine {
    /// The socket that a core is on.
    pub fn socket_of(&self, core: usize) -> usize {
        core * self.sockets / self.cores.max(1)
    }

    /// The transfer time of a line to another core, on another socket if `far`.
    pub fn transfer(&self, far: bool) -> Time {
        if far { self.transfer_far } else { self.transfer_near }
    }

    /// The slowdown of a thread's own work while the other threads of its core, and the other cores
    /// of `cores`, work too.
    pub fn slowdown(&self, cores: usize) -> f64 {
        let crowding = if cores > 1 { self.crowding } else { 1.0 };
        if self.threads_per_core > 1 {
            crowding * self.threads_per_core as f64 / self.thread_gain
        } else {
            crowding
        }
    }

    /// Checks the parameters.
    ///
    /// # Errors
    /// The parameter, its value and what is expected.
    pub fn check(&self) -> Result<(), String> {
        let cores_max = crate::scale::lines::CORES_MAX;
        if self.cores == 0 || self.cores > cores_max {
            return Err(format!("cores is {}; from 1 to {cores_max} are modelled", self.cores));
        }
        if self.sockets == 0 || !self.cores.is_multiple_of(self.sockets) {
            let (sockets, cores) = (self.sockets, self.cores);
            return Err(format!(
                "sockets is {sockets}; {cores} cores need a number that divides them, at least 1"
            ));
        }
        if !(1..=8).contains(&self.threads_per_core) {
            let threads = self.threads_per_core;
            return Err(format!("threads per core is {threads}; from 1 to 8 are modelled"));
        }
        if !(1.0..=8.0).contains(&self.thread_gain) {
            return Err(format!("thread gain is {}; from 1 to 8 is possible", self.thread_gain));
        }
        if !(1.0..=8.0).contains(&self.crowding) {
            return Err(format!("crowding is {}; from 1 to 8 is possible", self.crowding));
        }
        if self.pinned > self.update {
            let (pinned, update) = (self.pinned, self.update);
            return Err(format!("pinned is {pinned} ps; at most the {update} ps of an update"));
        }
        if self.readers_at_once == 0 || self.pause == 0 {
            return Err("readers at once and pause must not be 0".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silly_machines_are_refused_by_name() {
        let machine = |cores, sockets| Machine { cores, sockets, ..Machine::default() };
        assert_eq!(machine(0, 1).check().unwrap_err(), "cores is 0; from 1 to 512 are modelled");
        assert!(machine(513, 1).check().unwrap_err().contains("513"));
        assert!(machine(3, 2).check().unwrap_err().starts_with("sockets is 2; 3 cores"));
        assert!(machine(2, 0).check().is_err());
        let threads = Machine { threads_per_core: 9, ..Machine::default() };
        assert!(threads.check().unwrap_err().contains("threads per core is 9"));
        assert_eq!(machine(96, 2).check(), Ok(()));
    }

    #[test]
    fn sockets_take_neighbouring_cores() {
        let machine = Machine { cores: 8, sockets: 2, ..Machine::default() };
        let sockets: Vec<_> = (0..8).map(|core| machine.socket_of(core)).collect();
        assert_eq!(sockets, [0, 0, 0, 0, 1, 1, 1, 1]);
    }
}
