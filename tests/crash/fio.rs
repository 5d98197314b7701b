//! fio as a client that notes what was answered, and verifies that later: it knows nothing of how
//! the volume does it.

use std::fs::File;
use std::process::{Child, Stdio};

use crate::place::Place;
use crate::rounds::Seed;
use crate::run::{bounded, finish};
use crate::yard::Yard;

/// fio, once writing and once reading: a folder of its own, with what it notes.
pub(crate) struct Fio {
    place: Place,
    seed: String,
}

/// fio while it writes.
pub(crate) struct Writing(Child);

impl Writing {
    /// Whether it has written something: who is cut off before that says nothing.
    pub(crate) fn has_written(&mut self, yard: &Yard, volume: &str) -> bool {
        assert!(self.0.try_wait().unwrap().is_none(), "fio has ended");
        let stats = yard.command(&["stats", volume, "--json"]).ok().json();
        assert_eq!(stats[0]["device"], volume, "{stats}");
        stats[0]["ops"]["write"]["ops"].as_u64() > Some(0)
    }

    /// Waits for its end, well or not.
    pub(crate) fn end(mut self) {
        self.0.wait().unwrap();
    }
}

impl Fio {
    pub(crate) fn new(seed: &Seed) -> Fio {
        Fio { place: Place::new(), seed: format!("--randseed={}", seed.0) }
    }

    /// The arguments that it has both times.
    fn line<'l>(&'l self, uri: &'l str) -> Vec<&'l str> {
        let mut line = vec!["fio", "--name=v", "--ioengine=nbd", uri, &self.seed];
        line.extend(["--rw=randwrite", "--bs=4k", "--size=64M", "--verify=crc32c"]);
        line
    }

    /// Begins to write over a volume of 64 MiB, 16 at a time, of which each that is answered is
    /// durable; `more` are arguments.
    pub(crate) fn write(&self, yard: &Yard, volume: &str, more: &[&str]) -> Writing {
        let uri = format!("--uri={}", yard.uri(volume));
        let writes = ["--iodepth=16", "--do_verify=0", "--verify_state_save=1"];
        let line = [&self.line(&uri)[..], &writes, more].concat();
        let mut command = bounded(&line);
        let report = File::create(self.report()).unwrap();
        command.current_dir(self.place.path()).stdout(report).stderr(Stdio::null());
        Writing(command.spawn().unwrap())
    }

    fn report(&self) -> String {
        self.place.file("report")
    }

    /// Reads what was answered, and fails if something of it is not there; says how many were
    /// written and how many verified.
    pub(crate) fn verify(&self, yard: &Yard, volume: &str) -> (u64, u64) {
        let wrote = std::fs::read_to_string(self.report()).unwrap();
        let uri = format!("--uri={}", yard.uri(volume));
        // One by one: then it stops at the first that was not answered.
        let reads = ["--iodepth=1", "--verify_state_load=1", "--verify_only", "--verify_fatal=1"];
        let line = [self.line(&uri), reads.to_vec()].concat();
        let read = finish(&line, bounded(&line).current_dir(self.place.path())).ok();
        let (wrote, read) = (counted(&wrote)[1], counted(&read.out)[0]);
        println!("fio wrote {wrote} and verified {read}");
        (wrote, read)
    }
}

/// How many reads, writes and trims fio's report counts, behind its `total=`.
fn counted(report: &str) -> Vec<u64> {
    let line = report.lines().find_map(|line| line.split_once("issued rwts: total="));
    let counts = line.unwrap_or_else(|| panic!("no count: {report}")).1.split(' ').next().unwrap();
    counts.split(',').map(|count| count.parse().unwrap()).collect()
}
