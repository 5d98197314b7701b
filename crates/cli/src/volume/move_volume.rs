//! `volume move`: a volume with its snapshots goes to another pool.
//!
//! Nothing of the volume is destroyed before the other pool has all of it, durably.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use blockyard_store::remote::is_remote;
use blockyard_volume_admin::receive::{ReceiveTarget, receive as receive_here};
use blockyard_yard::client::Client;
use blockyard_yard::error::counted;
use blockyard_yard::size::rounded;
use blockyard_yard::volume_diff::DiffLine;
use blockyard_yard::volume_properties::PropertySource;
use blockyard_yard::volumes::{ReceivedView, VolumeRequest, VolumeView};
use serde_json::json;

use super::pool::{Make, PoolAccess, text};
use super::progress::ProgressLine;
use super::refused;
use super::stream::StreamSource;
use crate::args::{VolumeMoveArgs, VolumePoolArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

/// The snapshot that is moved as the present state of the volume.
const SNAPSHOT: &str = "blockyard-move";

pub(super) fn run(args: &VolumeMoveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let name = args.at.name.as_str();
    if name.contains('@') {
        let text = format!("invalid NAME `{name}`: expected a volume; this is a snapshot");
        return Err(Failure::new(Code::Usage, text));
    }
    let (from, to) = (&args.at.pool.pool, &args.to);
    if is_same(from, to) {
        let text = format!("invalid TO `{}`: expected another pool", to.display());
        return Err(Failure::new(Code::Usage, text));
    }
    let source = PoolAccess::find(&args.at.pool, Make::Never)?;
    let properties = movable(&source, name)?;
    let there = VolumePoolArgs {
        pool: to.clone(),
        degraded: false,
        take_over: args.at.pool.take_over,
        talk: args.at.pool.talk.clone(),
    };
    let make = Make::IfMissing { consent: false, capacity: args.capacity };
    let target = PoolAccess::find(&there, make)?;
    if target.volumes()?.iter().any(|view| view.name == name) {
        let text = format!(
            "invalid NAME `{name}`: {} has a volume of this name; rename one of the two, or \
             destroy that one if an interrupted move has left it",
            to.display()
        );
        return Err(Failure::new(Code::Refused, text));
    }
    let moving = Moving { source, target, name };
    let received = match moving.copy(&properties) {
        Ok(received) => received,
        Err(failure) => {
            moving.undo();
            return Err(failure);
        }
    };
    moving.destroy_source(to)?;
    let snapshots = received.names.len().saturating_sub(1);
    if args.at.pool.talk.json {
        let said = json!({
            "name": name, "from": from.display().to_string(), "to": to.display().to_string(),
            "snapshots": snapshots, "stream_bytes": received.stream_bytes,
        });
        return print_json(&said, out);
    }
    let (to, bytes) = (to.display(), rounded(received.stream_bytes));
    let snapshots = counted(snapshots as u64, "snapshot");
    Ok(writeln!(out, "moved {name} to {to}: {snapshots}, {bytes}")?)
}

/// Whether two paths name one pool.
fn is_same(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    match is_remote(one) || is_remote(other) {
        true => one == other,
        false => canonical(one) == canonical(other),
    }
}

/// Checks that a volume can be moved. Returns the properties that it stores.
fn movable(source: &PoolAccess, name: &str) -> Result<BTreeMap<String, String>, Failure> {
    let all = source.volumes()?;
    let volume = all.iter().find(|view| view.name == name).ok_or_else(|| {
        let text = format!("invalid NAME `{name}`: there is no such volume");
        Failure::new(Code::NoSuchDevice, text)
    })?;
    let refused = |what: &str, why: &str| {
        Err(Failure::new(Code::Refused, format!("`{what}` cannot be moved: {why}")))
    };
    let prefix = format!("{name}@");
    let is_own = |view: &&VolumeView| view.name == name || view.name.starts_with(&prefix);
    for view in all.iter().filter(is_own) {
        if view.in_use {
            return refused(&view.name, "it is a device; `blockyard remove` the device first");
        }
        if !view.holds.is_empty() {
            return refused(&view.name, "it has a hold; `volume release` it first");
        }
    }
    let is_clone =
        |view: &&VolumeView| view.origin.as_ref().is_some_and(|it| it.starts_with(&prefix));
    if let Some(clone) = all.iter().find(is_clone) {
        let why = format!("`{}` is a clone of it; `volume promote` the clone first", clone.name);
        return refused(name, &why);
    }
    let stored = volume.properties.iter().filter(|it| it.source == PropertySource::Pool);
    Ok(stored.map(|it| (it.name.clone(), it.value.clone())).collect())
}

/// A volume, the pool that has it, and the one that is to get it.
struct Moving<'a> {
    source: PoolAccess,
    target: PoolAccess,
    name: &'a str,
}

impl Moving<'_> {
    fn snapshot(&self) -> String {
        format!("{}@{SNAPSHOT}", self.name)
    }

    fn request(&self, name: &str) -> VolumeRequest {
        VolumeRequest { name: name.to_owned(), ..VolumeRequest::default() }
    }

    /// Copies the volume with its snapshots and properties, durably.
    fn copy(&self, properties: &BTreeMap<String, String>) -> Result<ReceivedView, Failure> {
        let snapshot = self.snapshot();
        if self.source.volumes()?.iter().any(|view| view.name == snapshot) {
            // An interrupted move has left it.
            self.source.work("destroy", self.request(&snapshot))?;
        }
        self.source.work("snapshot", self.request(&snapshot))?;
        let request = VolumeRequest { replicate: true, raw: true, ..self.request(&snapshot) };
        let mut stream = StreamSource::send(&self.source, request)?;
        let received = self.receive(&mut stream);
        let received = stream.finish(received)?;
        if !properties.is_empty() {
            let properties = properties.clone();
            self.target.work("set", VolumeRequest { properties, ..self.request(self.name) })?;
        }
        self.target.work("destroy", self.request(&snapshot))?;
        Ok(received)
    }

    fn receive(&self, stream: &mut StreamSource) -> Result<ReceivedView, Failure> {
        let mut progress = ProgressLine::new("moved");
        let mut tell = |bytes| progress.tell(bytes, None);
        let name = Some(self.name);
        match &self.target {
            PoolAccess::Here(running) => {
                let target = ReceiveTarget { name, is_resumable: false };
                let received = receive_here(running, &target, stream, &mut tell);
                Ok(received.map_err(refused)?.into())
            }
            PoolAccess::There(client, path) => {
                Ok(client.receive(&text(path)?, name, false, stream, &mut tell)?)
            }
        }
    }

    /// Destroys the volume of the first pool, unless it was written since it was copied.
    fn destroy_source(&self, to: &Path) -> Result<(), Failure> {
        let destroy = || {
            // A pool that this process has open has no other writer.
            if let PoolAccess::There(client, path) = &self.source
                && has_changed(client, path, self.name, &self.snapshot())?
            {
                let text = "it was written meanwhile; destroy the copy, and move it again";
                return Err(Failure::new(Code::Refused, text));
            }
            let request = VolumeRequest { recursive: true, ..self.request(self.name) };
            self.source.work("destroy", request)
        };
        destroy().map(drop).map_err(|failure| match failure {
            Failure::Said(code, why) => {
                let (name, to) = (self.name, to.display());
                Failure::new(code, format!("`{name}` was copied to {to}, and is still here: {why}"))
            }
            other => other,
        })
    }

    /// Removes what a move that has failed has made.
    fn undo(&self) {
        let copy = VolumeRequest { recursive: true, ..self.request(self.name) };
        let parts = [(&self.target, copy), (&self.source, self.request(&self.snapshot()))];
        for (pool, request) in parts {
            let name = request.name.clone();
            let is_there = pool.volumes().is_ok_and(|all| all.iter().any(|view| view.name == name));
            if is_there && let Err(failure) = pool.work("destroy", request) {
                eprintln!("note: `{name}` of the interrupted move is left: {}", failure.text());
            }
        }
    }
}

/// Whether a volume of a yard's pool differs from a snapshot of it.
fn has_changed(client: &Client, pool: &Path, name: &str, from: &str) -> Result<bool, Failure> {
    let failed = |error: String| Failure::new(Code::Failed, format!("diff: {error}"));
    let (pool, from) = (Some(text(pool)?), Some(from.to_owned()));
    let request = VolumeRequest { pool, name: name.to_owned(), from, ..VolumeRequest::default() };
    let mut lines = BufReader::new(client.diff(&request)?).lines();
    let line = lines.next().ok_or_else(|| failed("the yard has stopped it".to_owned()))?;
    let line = line.map_err(|error| failed(error.to_string()))?;
    match serde_json::from_str(&line).map_err(|error| failed(error.to_string()))? {
        DiffLine::Range(_) => Ok(true),
        DiffLine::Totals(totals) => Ok(totals.from_size_bytes != totals.to_size_bytes),
    }
}
