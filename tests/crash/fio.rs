//! fio as a client that records answered writes, and verifies them later without any knowledge of
//! the volume.

use std::fs::File;
use std::process::{Child, Stdio};

use crate::place::Place;
use crate::rounds::Seed;
use crate::run::{bounded, finish};
use crate::yard::Yard;

/// The writes that fio keeps in flight.
const DEPTH: u64 = 16;

/// fio, once writing and once reading, with its records in a folder of its own.
pub(crate) struct Fio {
    place: Place,
    seed: String,
}

/// A fio process that writes.
pub(crate) struct Writing(Child);

impl Writing {
    /// Whether fio has written enough for a kill. With more writes than its depth, but fewer than
    /// twice as many, fio 3.33 verifies the first ones whether they were answered or not
    /// (`verify_state_should_stop` in its verify.c).
    pub(crate) fn has_written(&mut self, yard: &Yard, volume: &str) -> bool {
        assert!(self.0.try_wait().unwrap().is_none(), "fio has ended");
        let stats = yard.command(&["stats", volume, "--json"]).ok().json();
        assert_eq!(stats[0]["device"], volume, "{stats}");
        stats[0]["ops"]["write"]["ops"].as_u64() > Some(2 * DEPTH)
    }

    /// Waits for fio's end, successful or not.
    pub(crate) fn end(mut self) {
        self.0.wait().unwrap();
    }
}

impl Fio {
    pub(crate) fn new(seed: &Seed) -> Fio {
        Fio { place: Place::new(), seed: format!("--randseed={}", seed.0) }
    }

    /// The arguments of both runs.
    fn line<'l>(&'l self, uri: &'l str) -> Vec<&'l str> {
        // The process of a job survives fio when the time limit kills fio; a thread does not.
        let mut line = vec!["fio", "--thread", "--name=v", "--ioengine=nbd", uri, &self.seed];
        line.extend(["--rw=randwrite", "--bs=4k", "--size=64M", "--verify=crc32c"]);
        line
    }

    /// Starts to overwrite a volume of 64 MiB with [`DEPTH`] durable writes in flight; `more` are
    /// further arguments.
    pub(crate) fn write(&self, yard: &Yard, volume: &str, more: &[&str]) -> Writing {
        let uri = format!("--uri={}", yard.uri(volume));
        let depth = format!("--iodepth={DEPTH}");
        let writes = [depth.as_str(), "--do_verify=0", "--verify_state_save=1"];
        let line = [&self.line(&uri)[..], &writes, more].concat();
        let mut command = bounded(&line);
        let report = File::create(self.report()).unwrap();
        command.current_dir(self.place.path()).stdout(report).stderr(Stdio::null());
        Writing(command.spawn().unwrap())
    }

    fn report(&self) -> String {
        self.place.file("report")
    }

    /// Reads the answered writes, and fails if data are missing. Returns the number of writes and
    /// the number of verified ones.
    pub(crate) fn verify(&self, yard: &Yard, volume: &str) -> (u64, u64) {
        let wrote = std::fs::read_to_string(self.report()).unwrap();
        let uri = format!("--uri={}", yard.uri(volume));
        // One at a time, so that fio stops at the first write that was not answered. The state of
        // the writes stays, to be verified again.
        let reads = ["--iodepth=1", "--verify_state_load=1", "--verify_only", "--verify_fatal=1"];
        let line = [self.line(&uri), reads.to_vec(), vec!["--verify_state_save=0"]].concat();
        let read = finish(&line, bounded(&line).current_dir(self.place.path())).ok();
        let (wrote, read) = (counted(&wrote)[1], counted(&read.out)[0]);
        println!("fio wrote {wrote} and verified {read}");
        (wrote, read)
    }
}

/// The reads, writes and trims that fio's report counts after `total=`.
fn counted(report: &str) -> Vec<u64> {
    let line = report.lines().find_map(|line| line.split_once("issued rwts: total="));
    let counts = line.unwrap_or_else(|| panic!("no count: {report}")).1.split(' ').next().unwrap();
    counts.split(',').map(|count| count.parse().unwrap()).collect()
}
