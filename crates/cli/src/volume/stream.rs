//! `volume send` and `volume receive`.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use blockyard_volume::VolumeError;
use blockyard_volume::send::{Sending, Sent};
use blockyard_yard::size::Bytes;
use blockyard_yard::volumes::{ReceivedView, VolumeRequest};
use serde_json::json;

use super::pool::{Make, Pool, text};
use super::progress::Progress;
use super::refused;
use crate::args::{VolumeReceiveArgs, VolumeSendArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

/// Most bytes that are passed on at once.
const PART_BYTES: usize = 256 << 10;

/// A stream that is read, wherever it is made.
pub(super) struct Source {
    read: Box<dyn Read>,
    /// Makes it, where that is done here.
    thread: Option<JoinHandle<Result<Sent, VolumeError>>>,
}

impl Source {
    /// The stream of a snapshot.
    pub(super) fn open(pool: &Pool, name: &str, from: Option<&str>) -> Result<Source, Failure> {
        let running = match pool {
            Pool::There(client, path) => {
                let request = VolumeRequest {
                    pool: Some(text(path)?),
                    name: name.to_owned(),
                    from: from.map(str::to_owned),
                    ..VolumeRequest::default()
                };
                return Ok(Source { read: Box::new(client.send(&request)?), thread: None });
            }
            Pool::Here(running) => running,
        };
        let sending = Sending::begin(running, name, from).map_err(refused)?;
        let failed = |error: io::Error| Failure::new(Code::Failed, format!("a pipe: {error}"));
        let (read, mut write) = io::pipe().map_err(failed)?;
        let running = Arc::clone(running);
        let send = move || {
            let sent = sending.run(&mut write, &mut |_| {});
            drop(running);
            sent
        };
        let thread = std::thread::Builder::new().name("volume-send".to_owned()).spawn(send);
        Ok(Source { read: Box::new(read), thread: Some(thread.map_err(failed)?) })
    }

    /// What has become of it: why it ended early counts for more than that it did.
    pub(super) fn finish<T>(self, done: Result<T, Failure>) -> Result<T, Failure> {
        // Who sends has nobody to send to any more.
        drop(self.read);
        let Some(thread) = self.thread else { return done };
        match thread.join() {
            Ok(Ok(_) | Err(VolumeError::Pipe(_))) => done,
            Ok(Err(error)) => Err(refused(error)),
            Err(_) => Err(Failure::new(Code::Failed, "sending has failed")),
        }
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read.read(into)
    }
}

/// A file that is written, and gone again if it is not finished.
pub(super) struct Written<'a> {
    path: &'a Path,
    pub(super) file: File,
    finished: bool,
}

impl<'a> Written<'a> {
    pub(super) fn create(path: &'a Path) -> Result<Written<'a>, Failure> {
        let failed = |error| Failure::new(Code::Failed, format!("{}: {error}", path.display()));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        Ok(Written { path, file: options.open(path).map_err(failed)?, finished: false })
    }

    pub(super) fn finish(mut self) -> Result<(), Failure> {
        self.finished = true;
        let synced = self.file.sync_all();
        synced.map_err(|error| {
            Failure::new(Code::Failed, format!("{}: {error}", self.path.display()))
        })
    }
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        if !self.finished && self.path.is_file() {
            // Half of it is of no use; where it stays it is refused when it is read.
            let _ = std::fs::remove_file(self.path);
        }
    }
}

pub(super) fn send(args: &VolumeSendArgs, out: &mut impl Write) -> Result<(), Failure> {
    if args.output.is_none() && io::stdout().is_terminal() {
        let text = "send: standard output is a terminal; wanted a pipe, a file, or --output FILE";
        return Err(Failure::new(Code::Usage, text));
    }
    let pool = Pool::find(&args.at.pool, Make::Never)?;
    let mut source = Source::open(&pool, &args.at.name, args.from.as_deref())?;
    let done = match &args.output {
        None => copy(&mut source, out),
        Some(path) => Written::create(path).and_then(|mut written| {
            let bytes = copy(&mut source, &mut written.file)?;
            written.finish()?;
            Ok(bytes)
        }),
    };
    let bytes = source.finish(done)?;
    if args.at.pool.talk.json {
        let said = json!({
            "name": args.at.name,
            "from": args.from,
            "file": args.output,
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
        Some(path) => Ok(writeln!(out, "{}: {} written", path.display(), Bytes(bytes))?),
    }
}

fn copy(source: &mut Source, out: &mut impl Write) -> Result<u64, Failure> {
    let mut progress = Progress::new("sent");
    let mut part = vec![0; PART_BYTES];
    let mut bytes = 0;
    loop {
        let len = match source.read(&mut part) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Failure::new(Code::Failed, format!("stream: {error}"))),
        };
        out.write_all(&part[..len])?;
        bytes += len as u64;
        progress.tell(bytes, None);
    }
    out.flush()?;
    Ok(bytes)
}

pub(super) fn receive(args: &VolumeReceiveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let mut input: Box<dyn Read> =
        match &args.input {
            Some(path) => Box::new(File::open(path).map_err(|error| {
                Failure::new(Code::Failed, format!("{}: {error}", path.display()))
            })?),
            None if io::stdin().is_terminal() => {
                let text =
                    "receive: standard input is a terminal; wanted a pipe, a file, or --input FILE";
                return Err(Failure::new(Code::Usage, text));
            }
            None => Box::new(io::stdin()),
        };
    let (at, mut progress) = (&args.at, Progress::new("received"));
    let mut tell = |bytes| progress.tell(bytes, None);
    // A pool may begin with what comes from another.
    let received = match Pool::find(&at.pool, Make::IfMissing { consent: false })? {
        Pool::Here(running) => {
            running.receive(&at.name, &mut input, &mut tell).map_err(refused)?.into()
        }
        Pool::There(client, path) => {
            client.receive(&text(&path)?, &at.name, &mut input, &mut tell)?
        }
    };
    drop(progress);
    if at.pool.talk.json {
        return print_json(&received, out);
    }
    let ReceivedView { name, blocks, stream_bytes } = received;
    let bytes = Bytes(stream_bytes);
    Ok(writeln!(out, "{name}: received, {blocks} blocks in {bytes}")?)
}
