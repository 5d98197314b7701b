//! `volume move`: a volume with its snapshots goes to another pool.
//!
//! The process may be killed after each step, and a yard may not answer. The *mark*, a random name,
//! tells the next move what this one has left:
//!
//! ```text
//!  step       POOL has then              TO has then
//!  snapshot   v0, v0@first, v0@MARK      -
//!  receive    v0, v0@first, v0@MARK      MARK, MARK@first, MARK@MARK
//!  rename     v0, v0@first, v0@MARK      v0, v0@first, v0@MARK
//!  destroy    -                          v0, v0@first, v0@MARK
//!  destroy    -                          v0, v0@first
//! ```
//!
//! 1. Until the rename, TO gets no other name than the mark. So a move that fails removes nothing
//!    that another client has made.
//! 2. The rename follows when all is there, durably, and POOL has nothing else.
//! 3. POOL destroys snapshots that TO has, the oldest first, and the volume only if it is as it was
//!    at its newest snapshot, with the properties and the key slot of the copy. One change of the
//!    catalogue destroys the volume and the mark. So if both pools have the volume and the mark, TO
//!    has all of it, and the next move goes on.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_object::ObjectUri;
use blockyard_store::remote::{Acknowledge, is_remote, only_open_here};
use blockyard_volume_admin::receive::{ReceiveTarget, receive as receive_here};
use blockyard_yard::client::ClientError;
use blockyard_yard::error::counted;
use blockyard_yard::size::rounded;
use blockyard_yard::volume_properties::{PropertySource, PropertyView, RESERVATION};
use blockyard_yard::volumes::{self, ReceivedView, VolumeRequest, VolumeView};
use serde_json::json;

use super::pool::{Make, PoolAccess, ReadOnlyAccess, text};
use super::progress::ProgressLine;
use super::refused;
use super::stream::StreamSource;
use crate::args::{VolumeMoveArgs, VolumePoolArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};

/// How marks begin. 16 hexadecimal digits follow.
const MARK: &str = "blockyard-move-";

/// What to do about a volume that both pools have.
const AGAIN: &str = "the same command ends the move";

/// How often the upload is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn run(args: &VolumeMoveArgs, out: &mut impl Write) -> Result<(), Failure> {
    let name = args.at.name.as_str();
    if name.contains('@') {
        let text = format!("invalid NAME `{name}`: expected a volume; this is a snapshot");
        return Err(Failure::new(Code::Usage, text));
    }
    let (from, to) = (args.at.pool.pool.as_path(), args.to.as_path());
    if is_same(from, to) {
        return Err(one_pool(to));
    }
    let source = PoolAccess::find(&args.at.pool, Make::Never)?;
    let here = source.list()?;
    let volume = here.iter().find(|it| it.name == name).ok_or_else(|| missing(args))?;
    check_movable(&here, name)?;
    let target = open_target(args)?;
    let moving = Moving { source, target, name, from, to };
    let identity = moving.source.view()?.identity;
    if identity.is_some() && identity == moving.target.view()?.identity {
        return Err(one_pool(to));
    }
    let there = moving.target.list()?;
    let copied = match moving.copied_before(volume, &here, &there)? {
        Some(copied) => copied,
        None => moving.copy(volume, &here, &there)?,
    };
    moving.end(&copied)?;
    let (snapshots, stream_bytes) = (copied.guids.len() as u64 - 1, copied.stream_bytes);
    let (from, to) = (from.display(), to.display());
    if args.at.pool.talk.json {
        let said = json!({
            "name": name, "from": from.to_string(), "to": to.to_string(),
            "snapshots": snapshots, "stream_bytes": stream_bytes,
        });
        return print_json(&said, out);
    }
    let (snapshots, bytes) = (counted(snapshots, "snapshot"), rounded(stream_bytes));
    Ok(writeln!(out, "moved {name} to {to}: {snapshots}, {bytes}")?)
}

/// Whether two paths name one pool.
fn is_same(one: &Path, other: &Path) -> bool {
    match is_remote(one) && is_remote(other) {
        true => {
            let uri = |path: &Path| path.to_str().and_then(|text| ObjectUri::parse(text).ok());
            uri(one) == uri(other) && uri(one).is_some()
        }
        false => {
            let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
            canonical(one) == canonical(other)
        }
    }
}

fn one_pool(to: &Path) -> Failure {
    let text = format!("invalid TO `{}`: expected another pool", to.display());
    Failure::new(Code::Usage, text)
}

/// The arguments that name the other pool.
fn target_args(args: &VolumeMoveArgs) -> VolumePoolArgs {
    VolumePoolArgs {
        pool: args.to.clone(),
        degraded: false,
        take_over: args.take_over_to,
        talk: args.at.pool.talk.clone(),
    }
}

fn open_target(args: &VolumeMoveArgs) -> Result<PoolAccess, Failure> {
    let make = Make::IfMissing { consent: false, capacity: args.capacity };
    PoolAccess::find(&target_args(args), make).map_err(|failure| match failure {
        // This pool has an option of its own.
        Failure::Said(code, text) => {
            let [of_pool, of_to] = ["--take-over", "--take-over-to"].map(only_open_here);
            Failure::Said(code, text.replace(&of_pool, &of_to))
        }
        other => other,
    })
}

/// The refusal of a volume that is not there. The other pool may have it, of an interrupted move.
fn missing(args: &VolumeMoveArgs) -> Failure {
    let (name, from, to) = (&args.at.name, args.at.pool.pool.display(), args.to.display());
    eprintln!("note: {from} has no volume `{name}`; looks for it in {to}");
    let there = ReadOnlyAccess::find(&target_args(args)).and_then(|pool| pool.volumes(None));
    let there = there.unwrap_or_default();
    let mark = snapshots_of(&there, name).find(|(_, rest)| is_mark(rest));
    let rest = mark.map_or_else(String::new, |(mark, _)| {
        format!(
            "; {to} has all of it: if an interrupted move from {from} has made `{0}`, \
             `blockyard volume destroy {to} {0}` ends that move",
            mark.name
        )
    });
    let text = format!("invalid NAME `{name}`: there is no such volume in {from}{rest}");
    Failure::new(Code::NoSuchDevice, text)
}

/// The snapshots of a volume, and the part of their names after the `@`.
fn snapshots_of<'a>(
    views: &'a [VolumeView],
    volume: &'a str,
) -> impl Iterator<Item = (&'a VolumeView, &'a str)> {
    views.iter().filter_map(move |view| {
        let rest = view.name.strip_prefix(volume)?.strip_prefix('@')?;
        Some((view, rest))
    })
}

/// Whether the part of a name after the `@` is a mark.
fn is_mark(rest: &str) -> bool {
    let digits = rest.strip_prefix(MARK);
    digits.is_some_and(|it| it.len() == 16 && it.bytes().all(|it| it.is_ascii_hexdigit()))
}

/// Refuses a volume that cannot be moved.
fn check_movable(all: &[VolumeView], name: &str) -> Result<(), Failure> {
    let refused = |what: &str, why: &str| {
        Err(Failure::new(Code::Refused, format!("`{what}` cannot be moved: {why}")))
    };
    let volume = all.iter().filter(|view| view.name == name);
    for view in volume.chain(snapshots_of(all, name).map(|(view, _)| view)) {
        if view.in_use {
            return refused(&view.name, "it is a device; `blockyard remove` the device first");
        }
        if !view.holds.is_empty() {
            return refused(&view.name, "it has a hold; `volume release` it first");
        }
    }
    let prefix = format!("{name}@");
    let is_clone =
        |view: &&VolumeView| view.origin.as_ref().is_some_and(|it| it.starts_with(&prefix));
    match all.iter().find(is_clone) {
        None => Ok(()),
        Some(clone) => {
            let why =
                format!("`{}` is a clone of it; `volume promote` the clone first", clone.name);
            refused(name, &why)
        }
    }
}

/// A complete copy in the other pool.
struct CompleteCopy {
    mark: String,
    /// The identities of its snapshots, with that of the mark.
    guids: Vec<String>,
    properties: BTreeMap<String, String>,
    key_slot: Option<String>,
    /// The length of the stream that made it; 0 if an earlier move has made it.
    stream_bytes: u64,
}

impl CompleteCopy {
    /// The copy that has this name in a pool; `None` if it is not complete, as it has no mark.
    fn of(there: &[VolumeView], name: &str, mark: &str, stream_bytes: u64) -> Option<CompleteCopy> {
        let volume = there.iter().find(|view| view.name == name)?;
        snapshots_of(there, name).find(|(view, rest)| *rest == mark && view.guid.is_some())?;
        let guids = snapshots_of(there, name).filter_map(|(view, _)| view.guid.clone()).collect();
        let (properties, key_slot) = (stored_properties(volume), volume.key_slot.clone());
        Some(CompleteCopy { mark: mark.to_owned(), guids, properties, key_slot, stream_bytes })
    }
}

/// The properties of a volume that are stored in its pool, and its reservation: only that one can
/// be removed.
fn stored_properties(volume: &VolumeView) -> BTreeMap<String, String> {
    let is_stored =
        |it: &&PropertyView| it.source == PropertySource::Pool || it.name == RESERVATION;
    let stored = volume.properties.iter().filter(is_stored);
    stored.map(|it| (it.name.clone(), it.value.clone())).collect()
}

/// A volume, the pool that has it, and the one that is to get it.
struct Moving<'a> {
    source: PoolAccess,
    target: PoolAccess,
    name: &'a str,
    from: &'a Path,
    to: &'a Path,
}

fn request(name: impl Into<String>) -> VolumeRequest {
    VolumeRequest { name: name.into(), ..VolumeRequest::default() }
}

impl Moving<'_> {
    fn snapshot(&self, mark: &str) -> String {
        format!("{}@{mark}", self.name)
    }

    /// The copy of an earlier move, which was interrupted after its rename.
    fn copied_before(
        &self,
        volume: &VolumeView,
        here: &[VolumeView],
        there: &[VolumeView],
    ) -> Result<Option<CompleteCopy>, Failure> {
        let is_here = |mark: &VolumeView| {
            snapshots_of(here, self.name).any(|(it, _)| it.guid.is_some() && it.guid == mark.guid)
        };
        let mut marks = snapshots_of(there, self.name).filter(|(_, rest)| is_mark(rest));
        let Some((_, mark)) = marks.find(|(it, _)| is_here(it)) else { return Ok(None) };
        // Clients may have set properties since.
        let set = self.set_properties(self.name, volume);
        set.map_err(|failure| self.kept(failure, AGAIN))?;
        Ok(CompleteCopy::of(&self.target.list()?, self.name, mark, 0))
    }

    /// Sets the properties that the volume has in the first pool.
    fn set_properties(&self, copy: &str, volume: &VolumeView) -> Result<(), Failure> {
        let set = VolumeRequest { properties: stored_properties(volume), ..request(copy) };
        self.target.work("set", set).map(drop)
    }

    /// Copies the volume. If that fails, both pools are as they were.
    fn copy(
        &self,
        volume: &VolumeView,
        here: &[VolumeView],
        there: &[VolumeView],
    ) -> Result<CompleteCopy, Failure> {
        if there.iter().any(|view| view.name == self.name) {
            let text = format!(
                "invalid NAME `{}`: {} has a volume of this name; rename one of the two",
                self.name,
                self.to.display()
            );
            return Err(Failure::new(Code::Refused, text));
        }
        // What interrupted moves have left.
        for (view, mark) in snapshots_of(here, self.name).filter(|(_, rest)| is_mark(rest)) {
            if there.iter().any(|it| it.name == mark) {
                let remove = VolumeRequest { recursive: true, ..request(mark) };
                self.target.work("destroy", remove)?;
            }
            self.source.work("destroy", request(&view.name))?;
        }
        let random = blockyard_os::fresh_id().map_err(|error| {
            Failure::new(Code::Failed, format!("cannot draw a random number: {error}"))
        })?;
        let mark = format!("{MARK}{:016x}", u128::from_be_bytes(random) as u64);
        self.copy_as(&mark, volume).inspect_err(|_| self.undo(&mark))
    }

    fn copy_as(&self, mark: &str, volume: &VolumeView) -> Result<CompleteCopy, Failure> {
        let snapshot = self.snapshot(mark);
        self.source.work("snapshot", request(&snapshot))?;
        self.check_reservation(mark, volume)?;
        let send = VolumeRequest { replicate: true, raw: true, ..request(&snapshot) };
        let mut stream = StreamSource::send(&self.source, send)?;
        let received = self.receive(mark, &mut stream);
        let received = stream.finish(received)?;
        if !received.other_secret.is_empty() {
            let text = format!(
                "`{0}` cannot be moved: {1} has its key already, encrypted by another passphrase \
                 or key, which is the only one that would open it there; `volume send -R -w` to \
                 {1}, and destroy `{0}` when you have seen that it opens",
                self.name,
                self.to.display()
            );
            return Err(Failure::new(Code::Refused, text));
        }
        self.set_properties(mark, volume)?;
        let copied = CompleteCopy::of(&self.target.list()?, mark, mark, received.stream_bytes);
        let copied = copied.ok_or_else(|| {
            let text = format!("`{mark}@{mark}` in {} is gone", self.to.display());
            Failure::new(Code::Failed, text)
        })?;
        let check = VolumeRequest { dry_run: true, ..self.destruction(&copied) };
        self.source.work("destroy", check)?;
        let rename = VolumeRequest { new: Some(self.name.to_owned()), ..request(mark) };
        self.target.work("rename", rename)?;
        Ok(copied)
    }

    /// Checks, before anything is copied, that the other pool has space for the reservation.
    fn check_reservation(&self, mark: &str, volume: &VolumeView) -> Result<(), Failure> {
        if volume.reservation_bytes == 0 {
            return Ok(());
        }
        let create = VolumeRequest {
            size_bytes: Some(volume.size_bytes),
            volblocksize_bytes: Some(volume.volblocksize_bytes),
            reservation_bytes: Some(volume.reservation_bytes),
            ..request(mark)
        };
        self.target.work("create", create)?;
        self.target.work("destroy", request(mark)).map(drop)
    }

    fn receive(&self, name: &str, stream: &mut StreamSource) -> Result<ReceivedView, Failure> {
        let mut progress = ProgressLine::new("moved");
        let mut tell = |bytes| progress.tell(bytes, None);
        match &self.target {
            PoolAccess::Here(running) => {
                let target = ReceiveTarget { name: Some(name), is_resumable: false };
                let received = receive_here(running, &target, stream, &mut tell);
                Ok(received.map_err(refused)?.into())
            }
            PoolAccess::There(client, path) => {
                Ok(client.receive(&text(path)?, Some(name), false, stream, &mut tell)?)
            }
        }
    }

    /// Removes what a copy that has failed has made. The mark stays if the copy may be there, so
    /// that the next move finds it.
    fn undo(&self, mark: &str) {
        let snapshot = self.snapshot(mark);
        let (name, from, to) = (self.name, self.from.display(), self.to.display());
        let undone = self.target.list().and_then(|there| {
            if there.iter().any(|it| it.name == snapshot) {
                eprintln!(
                    "note: {to} has all of `{name}`, with `{snapshot}`: do not destroy it; {AGAIN}"
                );
                return Ok(());
            }
            if there.iter().any(|it| it.name == mark) {
                let remove = VolumeRequest { recursive: true, ..request(mark) };
                self.target.work("destroy", remove)?;
            }
            if self.source.list()?.iter().any(|it| it.name == snapshot) {
                self.source.work("destroy", request(&snapshot))?;
            }
            Ok(())
        });
        if let Err(failure) = undone {
            eprintln!(
                "note: `{mark}` or `{name}` in {to}, or `{snapshot}` in {from} may be left; the \
                 same command goes on from there: {}",
                failure.text()
            );
        }
    }

    /// The request that destroys the volume in the first pool, unless the copy lacks something.
    fn destruction(&self, copied: &CompleteCopy) -> VolumeRequest {
        VolumeRequest {
            recursive: true,
            copied: copied.guids.clone(),
            properties: copied.properties.clone(),
            key_slot: copied.key_slot.clone(),
            ..request(self.name)
        }
    }

    /// Ends the move of a volume that the other pool has completely.
    fn end(&self, copied: &CompleteCopy) -> Result<(), Failure> {
        self.until_uploaded().map_err(|failure| self.kept(failure, AGAIN))?;
        self.destroy_source(copied)?;
        let snapshot = self.snapshot(&copied.mark);
        if let Err(failure) = self.target.work("destroy", request(&snapshot)) {
            eprintln!(
                "note: the snapshot `{snapshot}` of the move is left in {}: {}",
                self.to.display(),
                failure.text()
            );
        }
        Ok(())
    }

    /// Waits until the other pool does not depend on a local log: until the object store has what
    /// the yard has acknowledged up to now.
    fn until_uploaded(&self) -> Result<(), Failure> {
        let since = Instant::now();
        let mut progress = ProgressLine::new("waits for the object store");
        loop {
            let asked = since.elapsed();
            let view = self.target.view()?;
            if view.failed_read_only {
                let text = format!("{} has failed, and is read-only", self.to.display());
                return Err(Failure::new(Code::Failed, text));
            }
            let Some(upload) = view.upload else { return Ok(()) };
            // The oldest write that the object store lacks was made after the waiting began.
            let is_later = Duration::from_millis(upload.lag_ms + 1) <= asked;
            let is_local = upload.ack == Acknowledge::Local.to_string();
            if !is_local || upload.lag_batches == 0 || is_later {
                return Ok(());
            }
            progress.wait(upload.lag_bytes);
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    fn destroy_source(&self, copied: &CompleteCopy) -> Result<(), Failure> {
        let destroy = self.destruction(copied);
        let (code, failure) = match &self.source {
            PoolAccess::Here(running) => match volumes::work(running, "destroy", &destroy) {
                Ok(_) => return Ok(()),
                Err(error) => (error.code().to_owned(), refused(error)),
            },
            PoolAccess::There(client, path) => {
                let destroy = VolumeRequest { pool: Some(text(path)?), ..destroy };
                match client.volume("destroy", &destroy) {
                    Ok(_) => return Ok(()),
                    Err(error @ (ClientError::Refused(_) | ClientError::Unsent(_))) => {
                        (error.code().unwrap_or_default().to_owned(), error.into())
                    }
                    // The yard may have destroyed it, or do so later.
                    Err(error) => match self.source.list() {
                        Ok(here) if here.iter().all(|it| it.name != self.name) => return Ok(()),
                        _ => return Err(self.unknown(error.into())),
                    },
                }
            }
        };
        Err(match code.as_str() {
            // The change may be in the log, and take effect when the pool is opened again.
            "latched" => self.unknown(failure),
            "not_copied" => {
                let first = "after `volume send -I` of what has changed since the copy";
                self.kept(failure, &format!("{first}, {AGAIN}"))
            }
            "key_changed" => {
                let from = self.from.display();
                let last = format!("then `volume destroy -r {from} {}`", self.name);
                self.kept(failure, &format!("`volume change-key` it there too, {last}"))
            }
            _ => self.kept(failure, AGAIN),
        })
    }

    /// The failure of a move that may have destroyed the volume in the first pool.
    fn unknown(&self, failure: Failure) -> Failure {
        let (name, from, to) = (self.name, self.from.display(), self.to.display());
        let text = format!(
            "`{name}` was copied to {to}, and it is not known whether it is still in {from}: {}; \
             do not destroy the copy; run the command again",
            failure.text()
        );
        Failure::new(Code::Failed, text)
    }

    /// The failure of a move whose volume both pools have, and what to do about it.
    fn kept(&self, failure: Failure, advice: &str) -> Failure {
        let Failure::Said(code, why) = failure else { return failure };
        let (name, from, to) = (self.name, self.from.display(), self.to.display());
        let text = format!(
            "`{name}` was copied to {to}, and is still in {from}: {why}; do not destroy the copy; \
             {advice}"
        );
        Failure::new(code, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_in_object_stores_are_compared_by_bucket_and_prefix() {
        let is_one = |one: &str, other: &str| is_same(Path::new(one), Path::new(other));
        assert!(is_one("s3://vol/pool", "s3://vol/pool/"));
        assert!(!is_one("s3://vol/pool", "s3://vol/pool2"));
        assert!(!is_one("s3://vol/pool", "/srv/pool"));
        assert!(is_one("/", "/tmp/.."));
    }

    #[test]
    fn only_names_of_moves_are_marks() {
        assert!(is_mark("blockyard-move-0123456789abcdef"));
        for name in ["blockyard-move", "blockyard-move-", "blockyard-move-0123456789abcdefg"] {
            assert!(!is_mark(name), "{name}");
        }
    }
}
