//! `volume send` and `volume receive`.

use std::fs::{File, Metadata};
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use blockyard_store::{PoolBacking, is_pool};
use blockyard_volume::{Running, VolumeError};
use blockyard_volume_admin::receive::{begin_new, receive as receive_here};
use blockyard_volume_admin::send::{Sending, Sent};
use blockyard_volume_format::stream::MAGIC;
use blockyard_yard::size::Bytes;
use blockyard_yard::volumes::{ReceivedView, VolumeRequest};
use serde_json::json;

use super::pool::{Make, PoolAccess, text};
use super::progress::ProgressLine;
use super::refused;
use super::secret::unlock_here;
use crate::args::{VolumeReceiveArgs, VolumeSendArgs};
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
    /// The stream of a snapshot.
    pub(super) fn send(
        pool: &PoolAccess,
        name: &str,
        from: Option<&str>,
    ) -> Result<StreamSource, Failure> {
        match pool {
            PoolAccess::There(client, path) => {
                let request = VolumeRequest { from: from.map(str::to_owned), ..of(path, name)? };
                Ok(StreamSource { read: Box::new(client.send(&request)?), thread: None })
            }
            PoolAccess::Here(running) => {
                StreamSource::run(running, Sending::begin(running, name, from).map_err(refused)?)
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
                let sending = match name.contains('@') {
                    true => Sending::begin(running, name, None),
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
    if args.output.is_none() && io::stdout().is_terminal() {
        let text = "send: standard output is a terminal; expected a pipe, a file, or --output FILE";
        return Err(Failure::new(Code::Usage, text));
    }
    let pool = PoolAccess::find(&args.at.pool, Make::Never)?;
    unlock_here(&pool, &args.at.name, &args.secret)?;
    let mut source = StreamSource::send(&pool, &args.at.name, args.from.as_deref())?;
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
    if args.at.pool.talk.json {
        let said = json!({
            "name": args.at.name,
            "from": args.from,
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
        Some(path) => Ok(writeln!(out, "sent {} to {}", Bytes(bytes), path.display())?),
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

pub(super) fn receive(args: &VolumeReceiveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let mut total = None;
    let mut input: Box<dyn Read> = match &args.input {
        Some(path) => {
            let file = File::open(path).map_err(|error| {
                let text = format!("invalid --input `{}`: {error}", path.display());
                Failure::new(Code::Failed, text)
            })?;
            total = file.metadata().ok().filter(Metadata::is_file).map(|it| it.len());
            Box::new(file)
        }
        None if io::stdin().is_terminal() => {
            let text =
                "receive: standard input is a terminal; expected a pipe, a file, or --input FILE";
            return Err(Failure::new(Code::Usage, text));
        }
        None => Box::new(io::stdin()),
    };
    let (at, mut progress) = (&args.at, ProgressLine::new("received"));
    let shown = args.input.as_ref().map_or("standard input".into(), |path| path.to_string_lossy());
    let named = |failure: Failure| match failure {
        Failure::Said(code @ (Code::Failed | Code::NoSuchDevice | Code::Refused), text) => {
            Failure::new(code, format!("{shown}: {text}"))
        }
        other => other,
    };
    // A pool is made when it is known that there is something to receive.
    if !is_pool(&at.pool.pool).map_err(refused)? {
        let head = begin_new(&at.name, &mut input).map_err(|error| named(refused(error)))?;
        input = Box::new(io::Cursor::new(head).chain(input));
    }
    let mut tell = |bytes| progress.tell(bytes, total);
    // A pool may begin with what comes from another.
    let received = match PoolAccess::find(&at.pool, Make::IfMissing { consent: false })? {
        PoolAccess::Here(running) => {
            let received = receive_here(&running, &at.name, &mut input, &mut tell);
            received.map_err(|error| named(refused(error)))?.into()
        }
        PoolAccess::There(client, path) => {
            let received = client.receive(&text(&path)?, &at.name, &mut input, &mut tell);
            received.map_err(|error| named(error.into()))?
        }
    };
    drop(progress);
    if at.pool.talk.json {
        return print_json(&received, out);
    }
    let ReceivedView { name, blocks, stream_bytes } = received;
    let bytes = Bytes(stream_bytes);
    Ok(writeln!(out, "received {name}: {blocks} blocks, {bytes}")?)
}
