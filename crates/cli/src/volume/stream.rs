//! `volume send`, `volume receive` and `volume verify-stream`.

use std::fs::{File, Metadata};
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use blockyard_store::{PoolBacking, is_pool};
use blockyard_volume::{Running, VolumeError};
use blockyard_volume_admin::incoming::{VerifiedSnapshot, verify as verify_stream};
use blockyard_volume_admin::receive::{ReceiveTarget, begin_new, receive as receive_here};
use blockyard_volume_admin::send::{SendOptions, Sending, Sent};
use blockyard_volume_format::stream::MAGIC;
use blockyard_yard::error::counted;
use blockyard_yard::size::rounded;
use blockyard_yard::volumes::{PartialReceiveView, ReceivedView, VolumeRequest};
use serde_json::json;

use super::pool::{Make, PoolAccess, text};
use super::progress::ProgressLine;
use super::refused;
use super::secret::unlock_here;
use crate::args::{VerifyStreamArgs, VolumeReceiveArgs, VolumeSendArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};
use crate::output_file::{OutputFile, Replace, file_failed};

/// Most bytes that are passed on at once.
const PART_BYTES: usize = 256 << 10;

/// A stream that is read, wherever it is made.
pub(super) struct StreamSource {
    read: Box<dyn Read>,
    /// Makes it, where that is done here.
    thread: Option<JoinHandle<Result<Sent, VolumeError>>>,
}

impl StreamSource {
    /// The streams of snapshots.
    pub(super) fn send(pool: &PoolAccess, request: VolumeRequest) -> Result<StreamSource, Failure> {
        match pool {
            PoolAccess::There(client, path) => {
                let request = VolumeRequest { pool: Some(text(path)?), ..request };
                Ok(StreamSource { read: Box::new(client.send(&request)?), thread: None })
            }
            PoolAccess::Here(running) => {
                StreamSource::run(running, request.sending(running).map_err(refused)?)
            }
        }
    }

    /// The stream of a snapshot, or of a volume as it is at this moment.
    pub(super) fn export(pool: &PoolAccess, name: &str) -> Result<StreamSource, Failure> {
        match pool {
            PoolAccess::There(client, path) => {
                let read = client.export(&of(path, name)?)?;
                Ok(StreamSource { read: Box::new(read), thread: None })
            }
            PoolAccess::Here(running) => {
                let options = SendOptions { snapshot: name, ..SendOptions::default() };
                let sending = match name.contains('@') {
                    true => Sending::begin(running, &options),
                    false => Sending::begin_now(running, name),
                };
                StreamSource::run(running, sending.map_err(refused)?)
            }
        }
    }

    fn run(running: &Arc<Running>, sending: Sending<PoolBacking>) -> Result<StreamSource, Failure> {
        let failed = |error: io::Error| Failure::new(Code::Failed, format!("a pipe: {error}"));
        let (read, mut write) = io::pipe().map_err(failed)?;
        let running = Arc::clone(running);
        let send = move || {
            let sent = sending.run(&mut write, &mut |_| {});
            drop(running);
            sent
        };
        let thread = std::thread::Builder::new().name("volume-send".to_owned()).spawn(send);
        Ok(StreamSource { read: Box::new(read), thread: Some(thread.map_err(failed)?) })
    }

    /// What has become of it: why it ended early counts for more than that it did.
    pub(super) fn finish<T>(self, done: Result<T, Failure>) -> Result<T, Failure> {
        // The reader of the stream has gone.
        drop(self.read);
        let Some(thread) = self.thread else { return done };
        match thread.join() {
            Ok(Ok(_) | Err(VolumeError::Pipe(_))) => done,
            Ok(Err(error)) => Err(refused(error)),
            Err(_) => Err(Failure::new(Code::Failed, "sending has failed")),
        }
    }
}

impl Read for StreamSource {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read.read(into)
    }
}

/// What is asked of a yard about something in a pool.
fn of(path: &Path, name: &str) -> Result<VolumeRequest, Failure> {
    let (pool, name) = (Some(text(path)?), name.to_owned());
    Ok(VolumeRequest { pool, name, ..VolumeRequest::default() })
}

pub(super) fn send(args: &VolumeSendArgs, out: &mut impl Write) -> Result<(), Failure> {
    args.check().map_err(|(what, text, wanted)| {
        Failure::new(Code::Usage, format!("invalid {what} `{text}`: {wanted}"))
    })?;
    if args.output.is_none() && !args.estimate && io::stdout().is_terminal() {
        let text = "send: standard output is a terminal; expected a pipe, a file, or --output FILE";
        return Err(Failure::new(Code::Usage, text));
    }
    let pool = PoolAccess::find(&args.pool, Make::Never)?;
    if let Some(name) = args.name.as_ref().filter(|name| !name.starts_with('@')) {
        unlock_here(&pool, name, &args.secret)?;
    }
    let request = VolumeRequest {
        name: args.name.clone().unwrap_or_default(),
        from: args.from.as_ref().or(args.intermediate.as_ref()).cloned(),
        intermediate: args.intermediate.is_some(),
        replicate: args.replicate,
        compressed: args.compressed,
        raw: args.raw,
        token: args.resume.clone(),
        ..VolumeRequest::default()
    };
    if args.estimate {
        let done = pool.work("estimate", request)?;
        return match args.pool.talk.json {
            true => print_json(&done, out),
            false => Ok(writeln!(out, "{}", done.done)?),
        };
    }
    let mut source = StreamSource::send(&pool, request)?;
    let replace = Replace { force: args.force, magic: &MAGIC };
    let done = match &args.output {
        // A part of a stream is no backup, so a reader that leaves early is an error.
        None => {
            let failed = |error| Failure::new(Code::Failed, format!("standard output: {error}"));
            copy(&mut source, out, failed).map(|bytes| (None, bytes))
        }
        Some(path) => OutputFile::create(path, replace).and_then(|output| {
            let failed = |error| file_failed(path, &error);
            let bytes = copy(&mut source, &mut output.file(), failed)?;
            Ok((Some(output), bytes))
        }),
    };
    // What ends early because it could not be sent is not whole.
    let (output, bytes) = source.finish(done)?;
    output.map_or(Ok(()), OutputFile::finish)?;
    if args.pool.talk.json {
        let said = json!({
            "name": args.name,
            "from": args.from.as_ref().or(args.intermediate.as_ref()),
            "file": args.output.as_ref().map(|path| path.display().to_string()),
            "stream_bytes": bytes,
        });
        return match &args.output {
            // The stream has the other one.
            None => print_json(&said, &mut io::stderr()),
            Some(_) => print_json(&said, out),
        };
    }
    match &args.output {
        None => Ok(()),
        Some(path) => Ok(writeln!(out, "sent {} to {}", rounded(bytes), path.display())?),
    }
}

fn copy(
    source: &mut StreamSource,
    out: &mut impl Write,
    failed: impl Fn(io::Error) -> Failure,
) -> Result<u64, Failure> {
    let mut progress = ProgressLine::new("sent");
    let mut part = vec![0; PART_BYTES];
    let mut bytes = 0;
    loop {
        let len = match source.read(&mut part) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Failure::new(Code::Failed, format!("stream: {error}"))),
        };
        out.write_all(&part[..len]).map_err(&failed)?;
        bytes += len as u64;
        progress.tell(bytes, None);
    }
    out.flush().map_err(&failed)?;
    Ok(bytes)
}

/// A stream that a command reads.
struct StreamFile {
    input: Box<dyn Read>,
    /// The name of the input, for errors.
    name: String,
    /// The length, if it is known.
    total: Option<u64>,
}

impl StreamFile {
    /// Opens a file, or standard input.
    fn open(what: &str, path: Option<&Path>) -> Result<StreamFile, Failure> {
        let Some(path) = path else {
            if io::stdin().is_terminal() {
                let text = format!(
                    "{what}: standard input is a terminal; expected a pipe, a file, or --input FILE"
                );
                return Err(Failure::new(Code::Usage, text));
            }
            let (input, name) = (Box::new(io::stdin()), "standard input".to_owned());
            return Ok(StreamFile { input, name, total: None });
        };
        let name = path.to_string_lossy().into_owned();
        let file = File::open(path).map_err(|error| {
            Failure::new(Code::Failed, format!("invalid --input `{name}`: {error}"))
        })?;
        let total = file.metadata().ok().filter(Metadata::is_file).map(|it| it.len());
        Ok(StreamFile { input: Box::new(file), name, total })
    }
}

pub(super) fn receive(args: &VolumeReceiveArgs, out: &mut impl Write) -> Result<(), Failure> {
    if args.token || args.abort {
        return interrupted(args, out);
    }
    let StreamFile { mut input, name: shown, total } =
        StreamFile::open("receive", args.input.as_deref())?;
    let mut progress = ProgressLine::new("received");
    let name = args.name.as_deref();
    let named = |failure: Failure| match failure {
        Failure::Said(code @ (Code::Failed | Code::NoSuchDevice | Code::Refused), text) => {
            Failure::new(code, format!("{shown}: {text}"))
        }
        other => other,
    };
    // A pool is made when it is known that there is something to receive.
    if !is_pool(&args.pool.pool).map_err(refused)? {
        let head = begin_new(name, &mut input).map_err(|error| named(refused(error)))?;
        input = Box::new(io::Cursor::new(head).chain(input));
    }
    let mut tell = |bytes| progress.tell(bytes, total);
    // A pool may begin with what comes from another.
    let received =
        match PoolAccess::find(&args.pool, Make::IfMissing { consent: false, capacity: 0 })? {
            PoolAccess::Here(running) => {
                let target = ReceiveTarget { name, is_resumable: args.resumable };
                let received = receive_here(&running, &target, &mut input, &mut tell);
                received.map_err(|error| named(refused(error)))?.into()
            }
            PoolAccess::There(client, path) => {
                let (pool, resumable) = (text(&path)?, args.resumable);
                let received = client.receive(&pool, name, resumable, &mut input, &mut tell);
                received.map_err(|error| named(error.into()))?
            }
        };
    drop(progress);
    if args.pool.talk.json {
        return print_json(&received, out);
    }
    for name in &received.other_secret {
        eprintln!(
            "note: {name} opens by the passphrase or key that its volume has here, not by the \
             sender's; `blockyard volume change-key` changes it"
        );
    }
    let ReceivedView { name, names, blocks, stream_bytes, .. } = received;
    let bytes = rounded(stream_bytes);
    match &names[..] {
        [first, .., last] => {
            let count = names.len();
            let what = format!("{count} snapshots, {first} to {last}");
            Ok(writeln!(out, "received {what}: {blocks} blocks, {bytes}")?)
        }
        _ => Ok(writeln!(out, "received {name}: {blocks} blocks, {bytes}")?),
    }
}

/// Shows or drops what interrupted receives have kept.
fn interrupted(args: &VolumeReceiveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let pool = PoolAccess::find(&args.pool, Make::Never)?;
    let name = args.name.clone().unwrap_or_default();
    let request = VolumeRequest { name, ..VolumeRequest::default() };
    let done = pool.work(if args.abort { "abort-receive" } else { "receives" }, request)?;
    if args.pool.talk.json {
        return print_json(&done, out);
    }
    if args.abort {
        return Ok(writeln!(out, "{}", done.done)?);
    }
    for PartialReceiveView { volume, snapshot, received_bytes, size_bytes, token } in done.receives
    {
        match args.name {
            // For scripts.
            Some(_) => writeln!(out, "{token}")?,
            None => {
                let (received, size) = (rounded(received_bytes), rounded(size_bytes));
                writeln!(out, "{volume}: {snapshot}, {received} of {size}, token {token}")?;
            }
        }
    }
    Ok(())
}

/// `volume verify-stream`.
pub(super) fn verify(args: &VerifyStreamArgs, out: &mut impl Write) -> Result<(), Failure> {
    let path = Some(args.file.as_path()).filter(|path| path.as_os_str() != "-");
    let StreamFile { mut input, name: shown, total } = StreamFile::open("verify-stream", path)?;
    let mut progress = ProgressLine::new("verified");
    let verified = verify_stream(&mut input, &mut |bytes| progress.tell(bytes, total));
    drop(progress);
    let verified = verified.map_err(|error| {
        let code = match &error {
            VolumeError::Pipe(_) => Code::Failed,
            _ => Code::Damaged,
        };
        Failure::new(code, format!("{shown}: {error}"))
    })?;
    let bytes = verified.bytes;
    if args.json {
        let snapshots = verified.snapshots.iter().map(|VerifiedSnapshot { head, blocks }| {
            json!({
                "name": head.name,
                "from": head.base.as_ref().map(|(_, name)| name),
                "start_block": head.start,
                "raw": head.is_raw(),
                "blocks": blocks,
            })
        });
        let snapshots = snapshots.collect::<Vec<_>>();
        return print_json(&json!({ "snapshots": snapshots, "stream_bytes": bytes }), out);
    }
    for VerifiedSnapshot { head, blocks } in &verified.snapshots {
        let from = head.base.as_ref().map(|(_, base)| format!("changes since {base}"));
        let from = from.unwrap_or_else(|| "complete".to_owned());
        let rest = match head.start {
            0 => String::new(),
            start => format!(", from block {start} on"),
        };
        let raw = if head.is_raw() { ", raw" } else { "" };
        writeln!(out, "{}: {from}{rest}{raw}, {blocks} blocks", head.name)?;
    }
    if verified.snapshots.iter().any(|it| it.head.is_raw()) {
        writeln!(
            out,
            "raw streams: the checksums are right; whether the blocks are authentic only their key \
             can tell"
        )?;
    }
    let snapshots = counted(verified.snapshots.len() as u64, "snapshot");
    Ok(writeln!(out, "verified {snapshots}, {}", rounded(bytes))?)
}
