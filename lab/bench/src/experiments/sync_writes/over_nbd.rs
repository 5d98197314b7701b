//! Durable writes over NBD: each server is a process of its own, and one client measures them all.

use std::fs;

use super::*;
use crate::experiment::Cell;
use crate::load::latencies;
use crate::load::workers;
use crate::sample::{LatencyPercentiles, Round, Sample};
use crate::tools::child::CommandLine;
use crate::tools::nbd_client::{NbdClient, NbdOp, NbdRequests, Place};
use crate::tools::pool_place::VOLUME;
use crate::tools::server::Server;

/// The time that making a volume and starting and ending a server takes.
const OVERHEAD: Duration = Duration::from_millis(250);
/// The longest start of a server with an image: one with clusters of 64 KiB takes longer until it
/// is written.
const IMAGE_MAX: Duration = Duration::from_secs(20);

/// The server of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Ours(Commit),
    Nbdkit { serial: bool },
    Qemu,
    Qcow2,
}

/// A variant: its name, its server, and its number of connections.
type NbdVariant = (&'static str, Who, u32);

const ON_DISK: [NbdVariant; 16] = [
    (SERIAL, Who::Ours(Commit::Serial), 1),
    (SERIAL_4C, Who::Ours(Commit::Serial), 4),
    (TASKQ, Who::Ours(Commit::TaskWorkers), 1),
    (TASKQ_4C, Who::Ours(Commit::TaskWorkers), 4),
    (LOG_TASKQ, Who::Ours(Commit::LogWorkers), 1),
    (LOG_TASKQ_4C, Who::Ours(Commit::LogWorkers), 4),
    (GROUP, Who::Ours(Commit::Group), 1),
    (GROUP_4C, Who::Ours(Commit::Group), 4),
    (NBDKIT, Who::Nbdkit { serial: false }, 1),
    (NBDKIT_4C, Who::Nbdkit { serial: false }, 4),
    (NBDKIT_SERIAL, Who::Nbdkit { serial: true }, 1),
    (NBDKIT_SERIAL_4C, Who::Nbdkit { serial: true }, 4),
    (QEMU, Who::Qemu, 1),
    (QEMU_4C, Who::Qemu, 4),
    (QCOW2, Who::Qcow2, 1),
    (QCOW2_4C, Who::Qcow2, 4),
];

/// The parameters of a cell.
#[derive(Clone, Copy, Debug)]
struct CellParams {
    who: Who,
    connections: u32,
    /// The number of requests in flight over all connections.
    in_flight: u32,
    size: Size,
    delay: Option<&'static Delayed>,
}

/// All cells over NBD.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let mut cells = Vec::new();
    let few = settings.quick;
    let of = |names: &'static [&'static str]| {
        ON_DISK.into_iter().filter(move |(name, _, _)| names.is_empty() || names.contains(name))
    };
    let mut add =
        |workload: &'static str, rows: &mut dyn Iterator<Item = NbdVariant>, size, in_flight| {
            for (variant, who, connections) in rows.filter(|row| in_flight >= row.2) {
                let asked = CellParams { who, connections, in_flight, size, delay: None };
                cells.push(asked.cell(variant, workload, settings));
            }
        };
    if few {
        add(W_NBD_4K.name, &mut of(&[GROUP, QEMU, QCOW2]), SMALL, MANY);
    } else {
        for in_flight in [1, MANY] {
            add(W_NBD_4K.name, &mut of(&[]), SMALL, in_flight);
            let ours = &[SERIAL, TASKQ, LOG_TASKQ, GROUP];
            add(W_NBD_16K.name, &mut of(ours), MIDDLE, in_flight);
        }
        add(W_NBD_1M.name, &mut of(&[]), LARGE, 4);
    }
    for (number, delayed) in DELAYED.iter().enumerate() {
        let is_published = number == PUBLISHED_DELAY;
        let mut add = |workload: &'static str, size, in_flight, names: &'static [&'static str]| {
            for (variant, who, connections) in of(names) {
                if delayed.filter.is_none() && matches!(who, Who::Nbdkit { .. }) {
                    continue;
                }
                let delay = Some(delayed);
                let asked = CellParams { who, connections, in_flight, size, delay };
                cells.push(asked.cell(variant, workload, settings));
            }
        };
        let one = &[SERIAL, TASKQ, GROUP, NBDKIT, NBDKIT_SERIAL];
        if few && is_published {
            add(delayed.nbd_large.name, LARGE, 4, &[SERIAL, TASKQ, GROUP, GROUP_4C, NBDKIT]);
        } else if is_published {
            let all = &[
                SERIAL,
                SERIAL_4C,
                TASKQ,
                TASKQ_4C,
                LOG_TASKQ,
                LOG_TASKQ_4C,
                GROUP,
                GROUP_4C,
                NBDKIT,
                NBDKIT_4C,
                NBDKIT_SERIAL,
                NBDKIT_SERIAL_4C,
            ];
            add(delayed.nbd_large.name, LARGE, 4, all);
            add("nbd-4k-disk-3ms", SMALL, MANY, one);
        } else if !few {
            add(delayed.nbd_large.name, LARGE, 4, one);
        }
    }
    cells
}

impl CellParams {
    fn cell(self, variant: &'static str, workload: &'static str, settings: &Settings) -> Cell {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| self.measure(&settings, round);
        Cell::new(variant, workload, self.in_flight, body).overhead(OVERHEAD)
    }

    fn measure(&self, settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
        let (line, export) = self.line(settings, round)?;
        let server = Server::start(line, settings, round.stop)?;
        let depth = (self.in_flight / self.connections) as usize;
        let writes = NbdRequests { op: NbdOp::DurableWrite, len: self.size.len, depth };
        let place = Place::Unix(server.socket());
        let connect = |number: u32| {
            NbdClient::connect(&place, export, writes, round.seed ^ u64::from(number) << 32)
        };
        let works = (0..self.connections).map(connect).collect::<Result<Vec<_>, _>>()?;
        let outcome = workers::run(works, round, || server.cpu())?;
        if outcome.ios == 0 {
            return Err(LabError::failed(NAME, "no write ended in the measured window"));
        }
        let (before, after) = outcome.gauge;
        let before = before?;
        let cpu = after?.saturating_sub(before);
        let mut latency = latencies();
        for work in &outcome.workers {
            latency.add(work.latency()).expect("both have the same range");
        }
        let (ios, wall) = (outcome.ios as f64, outcome.wall.as_secs_f64());
        let sample = Sample::of(Metric::IOPS, ios / wall)
            .with(Metric::CPU_PER_IO, cpu.as_nanos() as f64 / ios)
            .with(Metric::BANDWIDTH, ios * self.size.len as f64 / wall)
            .with(Metric::CPUS, cpu.as_secs_f64() / wall)
            .with(Metric::CLIENT_CPUS, outcome.cpu.as_secs_f64() / wall)
            .with(Metric::P50, latency.value_at_quantile(0.5) as f64)
            .with(Metric::P99, latency.value_at_quantile(0.99) as f64);
        Ok(Sample { latency: LatencyPercentiles::of(&latency), ..sample })
    }

    /// The command line that starts the server on its file, and the name of its export.
    fn line(
        &self,
        settings: &Settings,
        round: &Round<'_>,
    ) -> Result<(CommandLine, &'static str), LabError> {
        let raw = || pool_place::raw_file(settings, raw_bytes(settings));
        let line = match self.who {
            Who::Ours(commit) => {
                let pool = source(settings, self.size.pool, commit)?;
                let line = match (commit, self.delay) {
                    (Commit::Group, None) => {
                        "PROGRAM serve volume:///v0?path=POOL&compress=none --nbd unix:SOCKET \
                         --control none"
                    }
                    _ => "LAB serve POOL --commit COMMIT --delay-us DELAY --nbd SOCKET",
                };
                let us = self.delay.map_or(0, |delayed| delayed.delay.as_micros());
                CommandLine::new("", line).with(&[
                    ("PROGRAM", &settings.program.display()),
                    ("LAB", &settings.lab.display()),
                    ("POOL", &pool.display()),
                    ("COMMIT", &commit.name()),
                    ("DELAY", &us),
                ])
            }
            Who::Nbdkit { serial } => {
                let mut line =
                    CommandLine::new("nbdkit", "nbdkit --foreground --unix SOCKET --threads 32");
                let filter = self.delay.and_then(|delayed| delayed.filter);
                let mut push = |word: String| line.words.push(word);
                if serial {
                    push("--filter=noparallel".to_owned());
                }
                if filter.is_some() {
                    push("--filter=delay".to_owned());
                }
                push("file".to_owned());
                push(format!("file={}", raw()?.display()));
                if let Some(delay) = filter {
                    push(format!("wdelay={delay}"));
                }
                if serial {
                    push("serialize=all-requests".to_owned());
                }
                line
            }
            Who::Qemu => qemu("raw", &raw()?.display().to_string()),
            Who::Qcow2 => {
                let image = pool_place::place(settings)?.join("image.qcow2");
                // The image is made again for each run; there may be no earlier one.
                let _ = fs::remove_file(&image);
                let image = image.display().to_string();
                let make = "qemu-img create -q -f qcow2 -o cluster_size=64k";
                let mut make = CommandLine::new("qemu-utils", make);
                make.words.extend([image.clone(), raw_bytes(settings).to_string()]);
                make.start(None)?.finish(IMAGE_MAX, round.stop)?;
                qemu("qcow2", &image)
            }
        };
        Ok((line, if matches!(self.who, Who::Ours(_)) { VOLUME } else { "" }))
    }
}

fn qemu(format: &str, file: &str) -> CommandLine {
    let line = "qemu-nbd --persistent --shared=16 --cache=none --aio=threads --socket=SOCKET";
    let mut line = CommandLine::new("qemu-utils", line);
    line.words.extend([format!("--format={format}"), file.to_owned()]);
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::stop::Stop;

    /// The test runs other projects' servers. Ours is a program that these tests do not build.
    #[test]
    fn real_servers_make_writes_durable() {
        let scratch = Scratch::new().unwrap();
        let settings = Settings {
            quick: true,
            engine: None,
            program: "/bin/false".into(),
            lab: "blockyard-lab".into(),
            scratch: scratch.path().to_owned(),
            processors: 2,
            peers: Default::default(),
        };
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(50));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        for (who, delay) in [
            (Who::Nbdkit { serial: true }, Some(&DELAYED[1])),
            (Who::Qemu, None),
            (Who::Qcow2, None),
        ] {
            let asked = CellParams { who, connections: 2, in_flight: 4, size: SMALL, delay };
            match asked.measure(&settings, &round) {
                Ok(sample) => assert!(sample.values[0].1 > 0.0, "{who:?}"),
                Err(error) => panic!("{who:?}: {error}"),
            }
        }
        let asked = CellParams {
            who: Who::Ours(Commit::Serial),
            connections: 1,
            in_flight: 1,
            size: SMALL,
            delay: Some(&DELAYED[0]),
        };
        static POOL: PoolShape = PoolShape {
            name: "pool",
            block_bytes: 4096,
            volume_bytes: 16 << 20,
            pool_bytes: 128 << 20,
        };
        let asked = CellParams { size: Size { len: 4096, pool: &POOL }, ..asked };
        let (line, export) = asked.line(&settings, &round).unwrap();
        let want = format!(
            "blockyard-lab serve {}/pool --commit serial --delay-us 100 --nbd SOCKET",
            scratch.path().display()
        );
        assert_eq!((line.text(), export), (want, "v0"));
    }
}
