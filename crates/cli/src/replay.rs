//! `replay`: submits the operations of a trace to a device.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use blockyard_trace::{
    Operations, ReplayStop, ReplayView, Select, Speed, TraceOperation, TraceScope, replay,
};
use blockyard_yard::error::counted;
use blockyard_yard::size::Bytes;
use blockyard_yard::table::{Table, duration};
use blockyard_yard::trace::ReplayQuery;
use blockyard_yard::{stack, uri};
use serde_json::json;

use crate::args::{ReplayArgs, ReplayEvents};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::print_table;
use crate::trace::Stopper;

/// A replay that is expected to last at least this long is announced, in seconds.
const ANNOUNCED_S: f64 = 1.0;

/// How the name of a file of blktrace ends before the number of the CPU.
const SUFFIX: &str = ".blktrace.";

pub(crate) fn run(args: &ReplayArgs, out: &mut impl Write) -> Result<(), Failure> {
    let spec = match args.device.contains(':') {
        true => Some(uri::parse(&args.device).map_err(|error| Failure::new(Code::Usage, error))?),
        false => None,
    };
    let query = ReplayQuery {
        speed: Some(args.speed.clone()),
        queue_depth: Some(args.queue_depth.into()),
        duration_max_ms: args.duration_max.map(|duration| (duration.as_millis() as u64).max(1)),
        // Any number, which no other command has.
        id: Some(RandomState::new().hash_one(std::process::id())),
        write: args.write,
        force: args.force,
    };
    let usage = |error| Failure::new(Code::Usage, error);
    let options = query.options().map_err(usage)?;
    let scope = query.scope(options.speed).map_err(usage)?;
    let Trace { operations, skipped, span_ns } = Trace::read(args, scope)?;
    check(args, &operations)?;
    let announce = || announce(args, operations.len(), span_ns, options.speed);
    let view = match spec {
        Some(spec) => {
            crate::serve::start_log(None, "warn")?;
            let stop = ReplayStop::new();
            let stopped = stop.clone();
            let stopper = Stopper::start(move || {
                stopped.stop();
                true
            })?;
            let made = stack::open(&spec).map_err(|error| Failure::new(Code::Refused, error))?;
            // A signal that comes after the announcement stops the replay, and not the command.
            announce();
            let operations = operations.into_iter().map(Ok);
            let replayed = replay(made.disk.as_ref(), operations, &options, &stop);
            stopper.stop();
            replayed.map_err(|error| Failure::new(Code::Refused, error))?
        }
        None => {
            let client = client(&args.talk).without_notice();
            let (stopped, device) = (client.clone(), args.device.clone());
            let id = query.id.unwrap_or_default();
            // A replay that has not begun yet is stopped in the next round.
            let stopper = Stopper::start(move || {
                stopped.stop_replay(&device, id).is_ok_and(|stopped| stopped.replays > 0)
            })?;
            announce();
            let mut printed =
                Printed { operations: operations.into_iter(), part: Vec::new(), at: 0 };
            let replayed = client.replay(&args.device, &query, &mut printed);
            stopper.stop();
            replayed?
        }
    };
    if args.talk.json {
        print_json(&json!({ "device": args.device, "replay": view, "skipped": skipped }), out)?;
    } else {
        print(args, &view, skipped, out)?;
    }
    match view.total().errors {
        0 if !view.is_stopped => Ok(()),
        _ => Err(Failure::Silent(Code::Failed)),
    }
}

/// Prints how long the replay is expected to last, if that is long.
fn announce(args: &ReplayArgs, operations: usize, span_ns: u64, speed: Speed) {
    let Speed::Factor(factor) = speed else { return };
    let expected_s = span_ns as f64 / 1e9 / factor;
    if expected_s >= ANNOUNCED_S {
        let operations = counted(operations as u64, "operation");
        let expected = duration((expected_s * 1e9) as u64);
        eprintln!("blockyard: replaying {operations} on {} in about {expected}", args.device);
    }
}

/// Refuses a trace without operations, and one that changes the device without consent.
fn check(args: &ReplayArgs, operations: &[TraceOperation]) -> Result<(), Failure> {
    let file = args.file.display();
    if operations.is_empty() {
        let events = match args.events {
            ReplayEvents::Queued => "queued bios (Q); `--events issued` replays requests (D)",
            ReplayEvents::Issued => "issued requests (D)",
        };
        return Err(Failure::new(Code::Failed, format!("{file}: the trace has no {events}")));
    }
    let changes = operations.iter().filter(|operation| operation.op.is_write()).count() as u64;
    if changes > 0 && !args.write {
        let text = format!(
            "{file}: {} of the trace would change {}, which destroys data; --write replays them",
            counted(changes, "operation"),
            args.device
        );
        return Err(Failure::new(Code::Usage, text));
    }
    Ok(())
}

/// The operations of a trace, in the order of time.
struct Trace {
    operations: Vec<TraceOperation>,
    /// Events that are no operation of a block device.
    skipped: u64,
    /// From the first to the last operation, in nanoseconds.
    span_ns: u64,
}

impl Trace {
    fn read(args: &ReplayArgs, mut scope: TraceScope) -> Result<Trace, Failure> {
        let mut trace = Trace { operations: Vec::new(), skipped: 0, span_ns: 0 };
        if args.file == Path::new("-") {
            trace.add(io::stdin().lock(), &args.file, args, &mut scope)?;
        } else {
            for path in files(&args.file)? {
                let file = File::open(&path).map_err(|error| unreadable(&path, &error))?;
                trace.add(BufReader::new(file), &path, args, &mut scope)?;
            }
        }
        trace.span_ns = scope.span_ns();
        if !trace.operations.is_sorted_by_key(|operation| operation.at) {
            // Stable: events of one time stay in the order of their file.
            trace.operations.sort_by_key(|operation| operation.at);
        }
        Ok(trace)
    }

    fn add(
        &mut self,
        input: impl Read,
        path: &Path,
        args: &ReplayArgs,
        scope: &mut TraceScope,
    ) -> Result<(), Failure> {
        let select = match args.events {
            ReplayEvents::Queued => Select::Queue,
            ReplayEvents::Issued => Select::Issue,
        };
        let mut operations = Operations::new(input, select).within(scope.clone());
        for operation in &mut operations {
            let failed = |error| Failure::new(Code::Failed, format!("{}: {error}", path.display()));
            let operation = operation.map_err(failed)?;
            if self.operations.len() as u64 == args.operations_max {
                let text = format!(
                    "{}: the trace has more than {} operations; --operations-max N replays more, \
                     and takes up to 120 bytes of memory for each",
                    path.display(),
                    args.operations_max
                );
                return Err(Failure::new(Code::Failed, text));
            }
            self.operations.push(operation);
        }
        self.skipped += operations.skipped();
        *scope = operations.scope().clone();
        Ok(())
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Failed, format!("cannot read `{}`: {error}", path.display()))
}

/// The file of this name, or those that blktrace writes under it, one for each CPU.
fn files(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    if path.exists() {
        return Ok(vec![path.to_owned()]);
    }
    let missing = || unreadable(path, &io::ErrorKind::NotFound.into());
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(missing)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or(Path::new("."));
    let entries = dir.read_dir().map_err(|_| missing())?.filter_map(Result::ok);
    let mut found: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let file = entry.file_name();
            let cpu = file.to_str()?.strip_prefix(name)?.strip_prefix(SUFFIX)?.parse().ok()?;
            Some((cpu, entry.path()))
        })
        .collect();
    found.sort();
    if found.is_empty() { Err(missing()) } else { Ok(found.into_iter().map(|it| it.1).collect()) }
}

/// Operations as the bytes of a trace.
struct Printed<I> {
    operations: I,
    part: Vec<u8>,
    at: usize,
}

impl<I: Iterator<Item = TraceOperation>> Read for Printed<I> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == self.part.len() {
            self.part.clear();
            self.at = 0;
            for operation in self.operations.by_ref().take(into.len() / 64 + 1) {
                operation.record().print(&mut self.part);
            }
        }
        let len = into.len().min(self.part.len() - self.at);
        into[..len].copy_from_slice(&self.part[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

fn print(
    args: &ReplayArgs,
    view: &ReplayView,
    skipped: u64,
    out: &mut impl Write,
) -> Result<(), Failure> {
    writeln!(
        out,
        "{}: {}replayed {} in {}, traced in {}, on {}",
        args.device,
        if view.is_stopped { "stopped; " } else { "" },
        counted(view.total().operations, "operation"),
        duration(view.elapsed_ns),
        duration(view.trace_ns),
        counted(view.channels, "channel")
    )?;
    let mut table = Table::new(["OPERATION", "COUNT", "BYTES", "ERRORS"]);
    for (name, total) in &view.operations {
        let (count, errors) = (total.operations.to_string(), total.errors.to_string());
        table.row([name.clone(), count, Bytes(total.bytes).to_string(), errors]);
    }
    print_table(table, &[], out)?;
    let mut table = Table::new(["TIME", "P50", "P99", "MAX"]);
    for (name, it) in [
        ("read latency", view.read_latency),
        ("write latency", view.write_latency),
        ("flush latency", view.flush_latency),
        ("lateness", view.lateness),
    ] {
        if it.max_ns > 0 {
            let [p50, p99, max] = [it.p50_ns, it.p99_ns, it.max_ns].map(duration);
            table.row([name.to_owned(), p50, p99, max]);
        }
    }
    print_table(table, &[], out)?;
    for (status, count) in &view.errors {
        writeln!(out, "{} with {status}", counted(*count, "error"))?;
    }
    if skipped > 0 {
        let skipped = counted(skipped, "event");
        writeln!(out, "{skipped} of the trace are no operation of a block device")?;
    }
    Ok(())
}
