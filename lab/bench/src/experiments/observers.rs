//! `observers`: what `top`, `iostat`, the dashboard and a trace cost the data path of a yard.

use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use super::nvme::{self, NVME_NULL_NQN, QueueLoad, load};
use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Settings, Variant, VariantRole};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::child::{CommandLine, RunningChild};
use crate::tools::nvme_client::{DEPTH_MAX, NvmeCommands, NvmeController, NvmeOp};

/// The experiment's name on the command line.
pub const NAME: &str = "observers";

/// The line that starts the server, with a device that answers about a million reads a second.
const LINE: &str = "PROGRAM serve null:///null?size=1T&bs=4k --nvme tcp:NVME --nbd none \
                    --control CONTROL";

/// The time that an observer has to begin before the window.
const BEGINS: Duration = Duration::from_millis(100);

/// The processors that the observing programs keep busy.
const OBSERVER_CPUS: Metric = Metric::less("observer_cpus", "");

/// The processors that the server keeps busy apart from the threads that serve connections: the
/// control API, the dashboard, the writer of a trace.
const CONTROL_CPUS: Metric = Metric::less("control_cpus", "");

/// The share of the time of all processors that the observing programs and the server's threads
/// that serve no connection take.
const OBSERVING_SHARE: Metric = Metric::less("observing_share", "");

/// The greatest share that an observer may take, except a trace.
const SHARE_MAX: f64 = 0.01;

/// [`SHARE_MAX`] in words.
const SHARE_WORDS: &str = "0.01 of the processors";

/// The beginning of the names of the threads that serve connections.
const DATA_THREAD: &str = "nvme-";

/// An observer: the further options of the server, and the lines of the observing programs.
struct Observer {
    variant: Variant,
    options: &'static str,
    lines: &'static [&'static str],
}

const fn observer(
    name: &'static str,
    about: &'static str,
    options: &'static str,
    lines: &'static [&'static str],
) -> Observer {
    Observer { variant: Variant { name, kind: VariantRole::Product, about }, options, lines }
}

const NONE: &str = "none";
const TOP: &str = "PROGRAM top --batch -d 1 --control CONTROL";
const IOSTAT: &str = "PROGRAM iostat -y 1 --control CONTROL";
/// The option of the server for the dashboard.
const WEB: &str = "--web tcp:WEB";
const STREAM: &str = "curl -sN http://WEB/v1/stream";
const TRACE: &str = "PROGRAM trace null -o /dev/null --control CONTROL";

const OBSERVERS: [Observer; 6] = [
    observer(NONE, "no observer", "", &[]),
    observer("top", "blockyard top, a sample each second", "", &[TOP]),
    observer("iostat", "blockyard iostat, a report each second", "", &[IOSTAT]),
    observer(
        "dashboard",
        "the dashboard with its history, and a reader of its stream",
        WEB,
        &[STREAM],
    ),
    observer("all-three", "top, iostat and the dashboard at once", WEB, &[TOP, IOSTAT, STREAM]),
    observer("trace", "blockyard trace of every request, whose file is /dev/null", "", &[TRACE]),
];

const LOAD: QueueLoad = load(
    NvmeOp::Read,
    4096,
    DEPTH_MAX,
    ["read-depth-128", "4 KiB random reads over NVMe/TCP, 127 in flight on one queue"],
);

/// The least part of the throughput that an observer leaves, except a trace.
const LEFT_MIN: f64 = 0.99;

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let cells = OBSERVERS.iter().map(|observer| {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| measure(observer, &settings, round);
        Cell::new(observer.variant.name, LOAD.workload.name, 1, body)
            .overhead(nvme::OVERHEAD + BEGINS)
    });
    let compare = |observer: &Observer| {
        let compare = |metric| Comparison::new(NONE, observer.variant.name, metric);
        let (iops, cpu) = (compare(Metric::IOPS), compare(Metric::CPU_PER_IO));
        if observer.variant.name == "trace" {
            return vec![iops, cpu];
        }
        let name = observer.variant.name;
        let share = Comparison::to(SHARE_WORDS, SHARE_MAX, name, OBSERVING_SHARE).aim(1.0);
        vec![iops.aim(LEFT_MIN), cpu, share]
    };
    Experiment {
        name: NAME,
        title: "What observers cost",
        about: "Reads of a null device over NVMe/TCP without an observer, and while other \
                programs observe the yard. CPU time (`cpu_per_io`, ns) is that of the server; \
                `observer_cpus` are the processors that the observing programs keep busy, and \
                `control_cpus` those of the server's threads that serve no connection; \
                `observing_share` is the sum of both, divided by the number of processors. All \
                share the processors with the server's other threads and its client.",
        published: Vec::new(),
        variants: OBSERVERS.iter().map(|observer| observer.variant).collect(),
        workloads: vec![LOAD.workload],
        comparisons: OBSERVERS[1..].iter().flat_map(compare).collect(),
        plots: vec![Metric::IOPS, Metric::CPU_PER_IO],
        cells: cells.collect(),
    }
}

fn measure(
    observer: &'static Observer,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let [nvme, web] = nvme::free_ports().map_err(LabError::io("a free port"))?;
    let control = settings.scratch.join(format!("observed-{}.sock", nvme.port()));
    let start = |line: &str| -> Result<RunningChild, LabError> {
        let values: [(&str, &dyn std::fmt::Display); 4] = [
            ("PROGRAM", &settings.program.display()),
            ("NVME", &nvme),
            ("WEB", &web),
            ("CONTROL", &control.display()),
        ];
        CommandLine::new("curl", line).with(&values).start(None)
    };
    let mut server = start(&format!("{LINE} {}", observer.options))?;
    let has_web = !observer.options.is_empty();
    server.until_ready(round.stop, || lacks(&control, nvme, has_web.then_some(web)))?;
    let mut observing: Vec<RunningChild> =
        observer.lines.iter().copied().map(start).collect::<Result<_, _>>()?;
    round.pause(BEGINS)?;
    let controller = NvmeController::connect(nvme, NVME_NULL_NQN)?;
    let commands = NvmeCommands { op: LOAD.op, len: LOAD.len, depth: LOAD.depth };
    let queue = controller.queue(1, commands, round.seed)?;
    let observer_cpu = || observing.iter().map(RunningChild::cpu).sum::<Result<Duration, _>>();
    let control_cpu = || server.cpu_of_threads(|name| !name.starts_with(DATA_THREAD));
    let before = (observer_cpu()?, control_cpu()?);
    let cpu = || server.cpu();
    let began = std::time::Instant::now();
    let sample = nvme::run(vec![queue], |queue| queue.latency(), &cpu, &LOAD, round)?;
    let took = began.elapsed().as_secs_f64();
    let cpus =
        |before: Duration, after: Duration| after.saturating_sub(before).as_secs_f64() / took;
    let observer_cpus = cpus(before.0, observer_cpu()?);
    let control_cpus = cpus(before.1, control_cpu()?);
    let share = (observer_cpus + control_cpus) / settings.processors as f64;
    let sample = sample.with(CONTROL_CPUS, control_cpus).with(OBSERVER_CPUS, observer_cpus);
    let sample = sample.with(OBSERVING_SHARE, share);
    // An observer that has ended has observed nothing.
    for program in &mut observing {
        if program.ends_within(Duration::ZERO)? {
            return Err(program.ended());
        }
    }
    Ok(sample)
}

/// What a server does not offer yet.
fn lacks(
    control: &Path,
    nvme: std::net::SocketAddr,
    web: Option<std::net::SocketAddr>,
) -> Option<String> {
    if !control.exists() {
        return Some(format!("there is no {}", control.display()));
    }
    let refused =
        [Some(nvme), web].into_iter().flatten().find_map(|port| TcpStream::connect(port).err());
    refused.map(|refused| format!("it does not accept: {refused}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_observer_but_a_trace_has_aims_for_iops_and_processors() {
        let settings = Settings {
            quick: false,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers: Default::default(),
        };
        let experiment = build(&settings);
        let aims = |metric: Metric| -> Vec<_> {
            let aims = experiment.comparisons.iter().filter(|it| it.metric == metric);
            aims.filter_map(|it| Some((it.after, it.value, it.aim?))).collect()
        };
        let observers = ["top", "iostat", "dashboard", "all-three"];
        assert_eq!(aims(Metric::IOPS), observers.map(|name| (name, None, 0.99)));
        assert_eq!(aims(OBSERVING_SHARE), observers.map(|name| (name, Some(0.01), 1.0)));
    }
}
