//! `trace`: records what a device of a running yard does.
#![allow(clippy::disallowed_types)] // A flag that a signal sets; no I/O passes here.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_trace::{TraceError, TraceReader, TraceRecord, TraceTally, format};
use blockyard_yard::client::Client;
use blockyard_yard::error::counted;
use blockyard_yard::size::Bytes;
use blockyard_yard::trace::TraceRequest;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::TraceArgs;
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::output_file::{OutputFile, Replace, file_failed};

/// Most bytes that are passed on at once.
const PART_BYTES: usize = 256 << 10;

/// How often signals are looked for.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) fn run(args: &TraceArgs, out: &mut impl Write) -> Result<(), Failure> {
    let request = TraceRequest {
        duration_ms: args.duration.map(|duration| (duration.as_millis() as u64).max(1)),
        bytes_max: args.size_max,
    };
    // The yard says nothing while the device does nothing.
    let client = client(&args.talk).without_notice();
    if args.output == Path::new("-") {
        let (tally, ended) = record(args, &client, &request, out)?;
        ended?;
        // The trace has standard output.
        return report(args, &tally, &mut io::stderr());
    }
    let replace = Replace { force: args.force, magic: &format::START };
    let output = OutputFile::create(&args.output, replace)?;
    let (tally, ended) = record(args, &client, &request, &mut output.file())?;
    // What has been recorded is kept, even if the yard has broken off.
    output.finish()?;
    report(args, &tally, out)?;
    ended
}

/// Records until the trace ends. Returns what was recorded, and why it ended too early.
fn record(
    args: &TraceArgs,
    client: &Client,
    request: &TraceRequest,
    out: &mut impl Write,
) -> Result<(TraceTally, Result<(), Failure>), Failure> {
    let (stopped, device) = (client.clone(), args.device.clone());
    // A trace that has not begun yet is ended in the next round.
    let stopper = Stopper::start(move || stopped.stop_trace(&device).is_ok())?;
    let answer = client.trace(&args.device, request)?;
    let (mut tally, mut record) = (TraceTally::default(), TraceRecord::default());
    let part = Vec::with_capacity(PART_BYTES);
    let mut reader = TraceReader::new(TraceCopy { answer, out, failed: None, part, at: 0 });
    let ended = loop {
        match reader.read(&mut record) {
            Ok(true) => tally.add(&record),
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    stopper.stop();
    let failed = reader.into_inner().failed;
    match (ended, failed) {
        (_, Some(error)) => Err(file_failed(&args.output, &error)),
        (Err(TraceError::Io(error)), None) => {
            let text = format!("the trace is incomplete: {error}");
            Ok((tally, Err(Failure::new(Code::Refused, text))))
        }
        (Err(error), None) => Ok((tally, Err(Failure::new(Code::Failed, error)))),
        (Ok(()), None) => Ok((tally, Ok(()))),
    }
}

fn report(args: &TraceArgs, tally: &TraceTally, out: &mut impl Write) -> Result<(), Failure> {
    let (device, file) = (&args.device, args.output.display());
    if args.talk.json {
        let said = json!({ "device": device, "file": file.to_string(), "trace": tally });
        return print_json(&said, out);
    }
    let TraceTally {
        queued, issued, completed, merged, split, requeued, errors, lost, bytes, ..
    } = *tally;
    let mut text = format!(
        "{device}: {} queued, {} issued, {completed} completed",
        counted(queued, "bio"),
        counted(issued, "request")
    );
    let more = [(merged, "merged"), (split, "split"), (requeued, "requeued"), (errors, "failed")];
    for (count, what) in more.into_iter().filter(|(count, _)| *count > 0) {
        // Text does not fail.
        let _ = write!(text, ", {count} {what}");
    }
    writeln!(out, "{text}; {} in {file}", Bytes(bytes))?;
    if lost > 0 {
        eprintln!(
            "blockyard: {} lost: the device did more than the trace can hold",
            counted(lost, "event")
        );
    }
    Ok(())
}

/// A trace that is copied while it is read.
struct TraceCopy<'o, R, W> {
    answer: R,
    out: &'o mut W,
    /// Why it could not be written.
    failed: Option<io::Error>,
    part: Vec<u8>,
    at: usize,
}

impl<R: Read, W: Write> Read for TraceCopy<'_, R, W> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == self.part.len() {
            self.part.resize(PART_BYTES, 0);
            let len = self.answer.read(&mut self.part).inspect_err(|_| self.part.clear())?;
            self.part.truncate(len);
            self.at = 0;
            let written = self.out.write_all(&self.part).and_then(|()| self.out.flush());
            if let Err(error) = written {
                let kind = error.kind();
                self.failed = Some(error);
                return Err(kind.into());
            }
        }
        let len = into.len().min(self.part.len() - self.at);
        into[..len].copy_from_slice(&self.part[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

/// A thread that ends a trace or a replay on a signal, so that its results still arrive. A second
/// signal ends this process.
pub(crate) struct Stopper {
    thread: JoinHandle<()>,
    done: Sender<()>,
}

impl Stopper {
    /// Starts the thread. After a signal it calls `end` until that returns true.
    pub(crate) fn start(end: impl Fn() -> bool + Send + 'static) -> Result<Stopper, Failure> {
        let failed = |error: io::Error| Failure::new(Code::Failed, format!("signals: {error}"));
        let is_ended = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // First, so that it finds the flag of the signal before.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&is_ended))
                .map_err(failed)?;
            signal_hook::flag::register(signal, Arc::clone(&is_ended)).map_err(failed)?;
        }
        let (done, is_done) = channel::<()>();
        let watch = move || {
            while is_done.recv_timeout(SIGNAL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // Relaxed: the flag publishes nothing but itself.
                if is_ended.load(Ordering::Relaxed) && end() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(watch);
        Ok(Stopper { thread: thread.map_err(failed)?, done })
    }

    pub(crate) fn stop(self) {
        drop(self.done);
        // A panic of the thread has been printed.
        let _ = self.thread.join();
    }
}
