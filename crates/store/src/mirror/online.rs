//! Copies join, leave and come back while the pool is in use.
//!
//! A copy joins with [`Mirror::join`], and a stale one comes back with [`Mirror::resume_stale`]:
//! from then on it gets every write. A [`Resync`] copies what is older, in the background and piece
//! by piece; [`Mirror::detach`] removes a copy.
//!
//! ```text
//!              Mirror::join                     Resync::step: all segments are copied
//!   no member ─────────────▸ Resyncing ──────────────────────────────────────────────▸ Good
//!       ▴                    │ ▴     │                                                  │
//!       │     Mirror::detach │ │     │ Shared::mark_failed          Mirror::detach, or  │
//!       ├────────────────────┘ │     ▾                              the copy that       │
//!       ├───────────────────── │ ── Failed                          replaces it is good │
//!       └───────────────────── │ ──────────────────────────────────────────────────────┘
//!                              └─ opening: the cursor is valid, or the copy was stale
//! ```
//!
//! What is durable, and what an opening does after a crash there:
//!
//! | step | the labels afterwards | an opening |
//! | --- | --- | --- |
//! | join | of the good copies: the new one is their other copy, and not good; or they name it as joining | one that has no label, or no cursor: it is missing |
//! | join | of the new one: not good, cursor 0 | continues at the cursor |
//! | resume a stale one | of the good copy: only itself is good | the other one is stale |
//! | resume a stale one | of that one: not good, cursor 0 | continues at the cursor |
//! | resync | of the new one: the cursor, after the segments below it are durable | the same |
//! | it fails | of the good copies: a higher generation, or none joins | the cursor is void |
//! | finish | of the good copies: the new one is good | the cursor is void: resyncs all of it |
//! | finish | of the new one: good; if it replaces the only copy, that one is the other | both are good; or it has replaced that one |
//! | detach, replaced | of the good copies: they do not know the old one | the old one is foreign, or stale |
//! | detach, replaced | of the old one: no copy is good | it was detached |
//!
//! Invariants 1 to 8 are in `mirror.rs`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_volume_format::label::{FILE, SLOT_BYTES, SLOTS as LABEL_SLOTS};
use blockyard_volume_format::superblock;

use super::assemble::{NamedCopy, newest};
use super::members::{Member, Members, SLOTS, detached};
use super::resync::{SUPERBLOCK_BYTES, check_alive, make_superblock};
use super::{CopyState, Mirror, MirrorFile, MirrorState, Shared, write_label};
use crate::buffer::{Buffer, Memory};
use crate::error::{CopiesError, StoreError};
use crate::{Layout, SegmentFiles as _, SegmentStore, StoreFile};

/// Bytes that are compared and written at once. Writes of the same file wait meanwhile.
const CHUNK_BYTES: usize = 256 << 10;

/// Bytes of segments that are copied again after a crash, at most: the cursor becomes durable
/// before more are. It costs two writes and two syncs.
const CURSOR_BYTES: u64 = 256 << 20;

/// The progress of a resync in the background, and the bytes of the segments that the copy had when
/// it began.
#[derive(Debug, Default)]
pub(super) struct ResyncState(Mutex<(ResyncStatus, u64)>);

/// The progress of a resync in the background, for users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResyncStatus {
    /// The path of the copy that is resyncing.
    pub path: PathBuf,
    /// The path of the copy that it replaces when it is good.
    pub replaces: Option<PathBuf>,
    /// Bytes of the pool that are equal in that copy.
    pub done_bytes: u64,
    /// Bytes of the pool.
    pub total_bytes: u64,
    /// Bytes that were written, because they differed.
    pub written_bytes: u64,
}

impl ResyncState {
    fn lock(&self) -> MutexGuard<'_, (ResyncStatus, u64)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of segments that are still to be made.
    pub(super) fn left_bytes(&self) -> u64 {
        let (status, had_bytes) = &*self.lock();
        status.total_bytes.saturating_sub(status.done_bytes.max(*had_bytes))
    }
}

/// What a step of a resync has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resynced {
    /// It has compared this number of bytes.
    Bytes(u64),
    /// The next range is being written by a client: try again soon.
    InFlight,
    /// A copy may have the only intact version of a block: the stale one that is overwritten from
    /// now on, or the one of several good copies that leaves when the new one is good. The caller
    /// repairs the good copies from each other, and from the one that is resyncing, before the next
    /// step.
    Repair,
    /// The copy is good.
    Complete,
    /// The copy has failed, or was detached.
    Ended,
}

/// A resync in the background: makes the copy that is resyncing equal to the good ones.
#[derive(Debug)]
pub struct Resync<D: SegmentStore> {
    mirror: Mirror<D>,
    slot: usize,
    /// The segment that is copied, and the offset in it.
    segment: usize,
    offset: u64,
    /// Bytes after which the cursor becomes durable.
    cursor_bytes: u64,
    /// Bytes since it last became.
    unrecorded: u64,
    /// Whether [`Resynced::Repair`] was returned, if that is to be.
    is_repaired: bool,
    want: Buffer,
    have: Buffer,
}

impl<D: SegmentStore> Mirror<D> {
    /// The resync to be done, if a copy is resyncing in the background.
    pub fn resync_in_background(&self) -> Option<Resync<D>> {
        let members = self.0.members();
        let slot = members.resyncing().next()?.slot;
        let memory = Memory::new(2 * CHUNK_BYTES as u64);
        Some(Resync {
            mirror: Mirror(Arc::clone(&self.0)),
            slot,
            segment: self.0.state().cursor as usize,
            offset: 0,
            cursor_bytes: CURSOR_BYTES,
            unrecorded: 0,
            is_repaired: false,
            want: memory.take_beyond(CHUNK_BYTES),
            have: memory.take_beyond(CHUNK_BYTES),
        })
    }

    /// The progress of the resync in the background, if one is to be done.
    pub fn resync_status(&self) -> Option<ResyncStatus> {
        let members = self.0.members();
        let member = members.resyncing().next()?;
        let replaced = member.replaces.and_then(|slot| members.find(slot));
        let replaces = replaced.map(|it| it.side.path.clone());
        let status = self.0.progress.lock().0.clone();
        Some(ResyncStatus { path: member.side.path.clone(), replaces, ..status })
    }

    /// Adds an empty directory or disk as a copy. With `replaces`, the copy at that path leaves the
    /// pool when the new one is good; without, the pool must have one copy, or a failed one, which
    /// leaves at once. A [`Resync`] is to be done then.
    ///
    /// # Errors
    /// If the copy cannot be added now, or the labels cannot be written.
    pub fn join(&self, given: NamedCopy<D>, replaces: Option<&Path>) -> Result<(), StoreError> {
        let shared = &self.0;
        let mut state = shared.state();
        let members = shared.members();
        let (member, stay) = place(&state, &members, given, replaces)?;
        let title = member.side.title.clone();
        let doing = || StoreError::io(format!("cannot make `{title}` a copy of the pool"));
        let fresh_id = || {
            let id = stay.good().next().map(|it| it.directory().fresh_id());
            id.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
                .map_err(|error| doing()(error))
        };
        let id = fresh_id()?;
        let before = (state.has_labels, state.set);
        match member.replaces {
            // With a new identity, a copy that belonged to the pool before is not recognised.
            None => (state.set, state.generation) = (id, state.generation.saturating_add(1)),
            Some(_) => state.joining_set = id,
        }
        if !state.has_labels {
            // Invariant 7: a copy that is to replace the only one is none of its pair.
            let set = if member.replaces.is_some() { fresh_id()? } else { id };
            (state.has_labels, state.set) = (true, set);
            state.generation = state.generation.max(1);
        }
        state.cursor = 0;
        let new = stay.with(member.clone());
        let joined = shared.record_all(&state, &new).and_then(|()| {
            shared.record(&state, &new, &member, Some(0))?;
            make_superblock(member.directory())
        });
        if let Err(error) = joined {
            _ = member.directory().erase();
            (state.has_labels, state.set) = (before.0, before.1);
            // If this is not written, the next opening finds that a copy is missing: harmless.
            _ = shared.record_all(&state, &members);
            shared.unlabel_single(&mut state, &members);
            return Err(doing()(error));
        }
        state.next_slot = member.slot + 1;
        *shared.progress.lock() = <(ResyncStatus, u64)>::default();
        _ = shared.is_several.set(());
        let failed = members.list().iter().filter(|it| new.find(it.slot).is_none());
        shared.members.update(|_| new.clone());
        failed.for_each(|it| _ = retire(&state, it, &new));
        tracing::info!("{title}: joins the pool `{}`; resyncing", self.good_titles());
        Ok(())
    }

    /// Whether a copy at a path could join now; see [`Mirror::join`].
    ///
    /// # Errors
    /// Why it could not.
    pub fn check_join(&self, path: &Path, replaces: Option<&Path>) -> Result<(), StoreError> {
        let given = NamedCopy { directory: None, path: path.to_owned() };
        place(&self.0.state(), &self.0.members(), given, replaces).map(drop)
    }

    fn good_titles(&self) -> String {
        let members = self.0.members();
        let titles: Vec<&str> = members.good().map(|it| it.side.title.as_str()).collect();
        titles.join(",")
    }

    /// Removes the copy at a path from the pool.
    ///
    /// # Errors
    /// If there is no such copy, or it is the last good one, or another copy is to replace it, or
    /// the labels cannot be written.
    pub fn detach(&self, path: &Path) -> Result<(), StoreError> {
        let shared = &self.0;
        let mut state = shared.state();
        let members = shared.members();
        let member = find(&members, path)?.clone();
        let title = &member.side.title;
        let refused = |why: String| {
            let path = title.clone();
            Err(CopiesError::NotDetached { path, why }.into())
        };
        if !members.good().any(|it| it.slot != member.slot) {
            return refused("it is the last good copy of the pool".to_owned());
        }
        if let Some(joining) = members.resyncing().find(|it| it.replaces == Some(member.slot)) {
            let joining = &joining.side.title;
            return refused(format!("`{joining}` replaces it; detach that one to stop it"));
        }
        if let Some(other) = members.resyncing().find(|it| it.slot != member.slot) {
            return refused(format!("`{}` is resyncing", other.side.title));
        }
        let doing = || StoreError::io(format!("cannot detach `{title}`"));
        let left = members.without(member.slot);
        // From here on an opening does not take the copy for a good one.
        if member.replaces.is_none() {
            state.generation = state.generation.saturating_add(1);
        }
        let without = match member.replaces {
            Some(_) => members.without(member.slot),
            None => members.with_state(member.slot, CopyState::Failed),
        };
        shared.record_all(&state, &without).map_err(|error| doing()(error))?;
        shared.members.update(|_| Members::new(left.list().to_vec()));
        retire(&state, &member, &left);
        shared.unlabel_single(&mut state, &left);
        tracing::info!("{title}: detached from the pool `{}`", self.good_titles());
        Ok(())
    }
}

/// The place of a new copy in the pool, and the copies that stay.
fn place<D: SegmentStore>(
    state: &MirrorState,
    members: &Members<D>,
    given: NamedCopy<D>,
    replaces: Option<&Path>,
) -> Result<(Member<D>, Members<D>), StoreError> {
    let title = given.path.display().to_string();
    let refused = |why: String| CopiesError::NotAttached { path: title.clone(), why }.into();
    let slot = state.next_slot.max(members.list().iter().map(|it| it.slot + 1).max().unwrap_or(0));
    if let Some(joining) = members.resyncing().next() {
        let joining = &joining.side.title;
        return Err(refused(format!("`{joining}` is resyncing; wait for it, or detach it")));
    }
    let is_failed = |it: &&Member<D>| !it.state.is_good() && it.replaces.is_none();
    let failed = members.list().iter().find(is_failed);
    if slot >= SLOTS {
        return Err(refused(format!("the pool had {SLOTS} copies since it was opened; reopen it")));
    }
    let replaced = replaces.map(|path| find(members, path)).transpose()?;
    let is_good = |it: &&Member<D>| it.state.is_good();
    if let (Some(failed), Some(_)) = (failed, replaced.filter(is_good)) {
        let failed = &failed.side.title;
        return Err(refused(format!("`{failed}` has failed; replace or detach that one first")));
    }
    // A failed copy leaves at once: its place is free.
    let failed = failed.map(|it| it.slot);
    let left_over = members.list().iter().filter(|it| it.replaces.is_some()).map(|it| it.slot);
    let stay = left_over.chain(failed).fold(members.without(SLOTS), |all, it| all.without(it));
    let mut pair = stay.pair();
    let (first, second) = (pair.next().cloned(), pair.next().cloned());
    drop(pair);
    let number = match (first, second, replaced.filter(is_good)) {
        (Some(_), Some(second), None) => {
            let other = &second.side.title;
            return Err(refused(format!(
                "the pool has two good copies, one at `{other}`; `blockyard pool replace` replaces \
                 one of them"
            )));
        }
        (Some(_), Some(_), Some(replaced)) => replaced.number,
        (first, ..) => first.map_or(0, |it| 1 - it.number),
    };
    let replaces = replaced.filter(is_good).map(|it| it.slot);
    let member = Member { replaces, ..Member::new(slot, number, CopyState::Resyncing, given) };
    Ok((member, stay))
}

/// The copy at a path.
fn find<'m, D>(members: &'m Members<D>, path: &Path) -> Result<&'m Member<D>, StoreError> {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut list = members.list().iter();
    let found = list.find(|it| it.side.path == path || it.side.path == real);
    found.ok_or_else(|| {
        let copies = members.list().iter().map(|it| format!("`{}`", it.side.title));
        let wanted = format!("a copy of the pool: {}", copies.collect::<Vec<_>>().join(", "));
        StoreError::Invalid { field: "copy", value: path.display().to_string(), wanted }
    })
}

/// Records in the label of a copy that it does not belong to the pool any more. Returns whether the
/// label says so: a copy that cannot be written is left as it is.
fn retire<D: SegmentStore>(state: &MirrorState, member: &Member<D>, left: &Members<D>) -> bool {
    let Some(directory) = &member.side.directory else { return false };
    let other = left.good().next().map_or_else(PathBuf::new, |it| it.side.path.clone());
    let label = detached(state, member.number, other);
    let written = write_label(directory, &label);
    if let Err(error) = &written {
        let title = &member.side.title;
        tracing::warn!(
            "{title}: its label does not say that it was detached: {error}. Do not open the pool \
             by this path any more"
        );
    }
    written.is_ok()
}

/// Removes the label of the only copy of a pool.
fn remove_label<D: SegmentStore>(directory: &D) -> io::Result<()> {
    directory.remove(FILE)?;
    directory.sync_names()?;
    // On a disk the label has no name.
    let Some(file) = directory.open(FILE)? else { return Ok(()) };
    let mut zeros = Memory::new(SLOT_BYTES as u64).take_beyond(SLOT_BYTES);
    zeros.fill(0);
    (0..LABEL_SLOTS).try_for_each(|slot| {
        file.write_at((slot * SLOT_BYTES) as u64, &[&zeros])?;
        file.sync()
    })
}

impl<D: SegmentStore> Shared<D> {
    /// If one copy is left: removes its label, so that it is a pool of one copy.
    pub(super) fn unlabel_single(&self, state: &mut MirrorState, left: &Members<D>) {
        let [one] = left.list() else { return };
        match remove_label(one.directory()) {
            Ok(()) => state.has_labels = false,
            Err(error) => {
                // It says that the other copy is not good, which is true.
                let title = &one.side.title;
                tracing::warn!("{title}: its label still names a second copy: {error}");
            }
        }
    }
}

impl<D: SegmentStore> Resync<D> {
    /// Sets how many bytes are copied between two moments in which the cursor becomes durable.
    #[must_use]
    pub fn with_cursor_bytes(self, cursor_bytes: u64) -> Resync<D> {
        Resync { cursor_bytes, ..self }
    }

    /// Copies the next piece; `files` are the segments that the pool has now. If the copy cannot be
    /// written, it becomes failed, and the pool continues without it.
    ///
    /// # Errors
    /// If no good copy is left, or none can record a change in its label.
    pub fn step(&mut self, files: &[Arc<MirrorFile<D>>]) -> Result<Resynced, StoreError> {
        let members = self.mirror.0.members();
        let member = members.find(self.slot).filter(|it| it.state == CopyState::Resyncing);
        let Some(member) = member else { return Ok(Resynced::Ended) };
        let doing = || format!("cannot resync `{}`", member.side.title);
        // No valid cursor is beyond the end.
        if self.segment > files.len() {
            self.segment = 0;
        }
        self.tell(files);
        let is_repair_due = match self.segment {
            // A copy without a segment has no block that the good ones may lack.
            0 if self.offset == 0 && !member.has_joined() => {
                files.iter().any(|file| file.side(self.slot).is_some())
            }
            segment if segment == files.len() => {
                member.replaces.is_some() && members.good().count() > 1
            }
            _ => false,
        };
        if is_repair_due && !std::mem::replace(&mut self.is_repaired, true) {
            return Ok(Resynced::Repair);
        }
        let stepped = match files.get(self.segment) {
            Some(file) => self.copy(member, file),
            None => self.finish(member),
        };
        stepped.or_else(|error| {
            let failed = self.mirror.0.mark_failed(self.slot, &error);
            failed.map(|()| Resynced::Ended).map_err(StoreError::io(doing()))
        })
    }

    /// Whether the copy is still resyncing.
    pub fn is_wanted(&self) -> bool {
        let members = self.mirror.0.members();
        members.find(self.slot).is_some_and(|it| it.state == CopyState::Resyncing)
    }

    /// Publishes the progress.
    fn tell(&self, files: &[Arc<MirrorFile<D>>]) {
        let segment_bytes = files.first().and_then(|file| file.len().ok()).unwrap_or(0);
        let total_bytes = files.len() as u64 * segment_bytes;
        let (status, had_bytes) = &mut *self.mirror.0.progress.lock();
        if status.total_bytes != total_bytes {
            status.total_bytes = total_bytes;
            let had = files.iter().filter(|file| file.side(self.slot).is_some());
            *had_bytes = had.count() as u64 * segment_bytes;
        }
        let done = (self.segment as u64).saturating_mul(segment_bytes) + self.offset;
        status.done_bytes = done.min(status.total_bytes);
    }

    fn copy(&mut self, member: &Member<D>, file: &Arc<MirrorFile<D>>) -> io::Result<Resynced> {
        let len = file.len()?;
        let target = member.directory();
        if file.side(self.slot).is_none() {
            let found = target.open(file.name())?;
            let found = match found {
                Some(found) if found.len()? == len => found,
                _ => crate::make(target, file.name(), len)?,
            };
            file.add_side(self.slot, found);
        }
        let end = len.min(self.offset + CHUNK_BYTES as u64);
        let check = |source: &Member<D>| check_alive(source.directory());
        let range = self.offset..end;
        let buffers = (&mut self.want, &mut self.have);
        let Some((written, unread)) = file.resync(self.slot, range.clone(), buffers, &check)?
        else {
            return Ok(Resynced::InFlight);
        };
        if unread > 0 {
            let title = &member.side.title;
            tracing::error!(
                "{title}/{}: {unread} units after offset {} could not be read in a good copy; a \
                 reader recognises damage by the checksums",
                file.name(),
                self.offset
            );
        }
        self.mirror.0.progress.lock().0.written_bytes += written;
        self.offset = end;
        if self.offset == len {
            self.end_segment(file, len)?;
        }
        Ok(Resynced::Bytes(range.end - range.start))
    }

    /// Makes a segment durable, and the cursor if enough was copied since.
    fn end_segment(&mut self, file: &Arc<MirrorFile<D>>, len: u64) -> io::Result<()> {
        // Also if nothing differed: a process that was killed may have written it, and not synced.
        if let Some(side) = file.side(self.slot) {
            side.sync()?;
        }
        (self.segment, self.offset) = (self.segment + 1, 0);
        self.unrecorded += len;
        // After the first segment, so that a later opening does not repair the good copies again.
        if self.unrecorded < self.cursor_bytes && self.segment != 1 {
            return Ok(());
        }
        self.record_cursor()
    }

    /// Makes the cursor durable: a later opening continues there.
    ///
    /// # Errors
    /// If the label cannot be written.
    pub fn record_cursor(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.unrecorded) == 0 {
            return Ok(());
        }
        let shared = &self.mirror.0;
        let mut state = shared.state();
        let members = shared.members();
        match members.find(self.slot).filter(|it| it.state == CopyState::Resyncing) {
            None => Ok(()),
            Some(member) => {
                state.cursor = self.segment as u64;
                shared.record(&state, &members, member, Some(state.cursor))
            }
        }
    }

    /// All segments are equal: makes the superblock so, and the copy good.
    fn finish(&mut self, member: &Member<D>) -> io::Result<Resynced> {
        let file = self.mirror.open(superblock::FILE)?.ok_or(io::ErrorKind::NotFound)?;
        let check = |source: &Member<D>| check_alive(source.directory());
        let buffers = (&mut self.want, &mut self.have);
        if file.resync(self.slot, 0..SUPERBLOCK_BYTES, buffers, &check)?.is_none() {
            return Ok(Resynced::InFlight);
        }
        file.side(self.slot).ok_or(io::ErrorKind::NotFound)?.sync()?;
        // A copy that cannot be opened later must not become good.
        newest(member.directory(), &member.side.title).map_err(|error| match error {
            StoreError::Io { source, .. } => source,
            error => io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
        })?;
        match self.mirror.0.finish(self.slot) {
            Ok(()) => Ok(Resynced::Complete),
            Err((slot, error)) if slot == self.slot => Err(error),
            // Try again without the copy whose label cannot be written.
            Err((slot, error)) => {
                self.mirror.0.mark_failed(slot, &error)?;
                Ok(Resynced::InFlight)
            }
        }
    }
}

impl<D: SegmentStore> Shared<D> {
    /// Makes a copy good whose resync is complete (invariant 3). It replaces another one if it was
    /// to do that.
    ///
    /// # Errors
    /// The slot of a copy whose label cannot be written.
    fn finish(&self, slot: usize) -> Result<(), (usize, io::Error)> {
        let mut state = self.state();
        let members = self.members();
        let is_there = |it: &&Member<D>| it.state == CopyState::Resyncing;
        let Some(member) = members.find(slot).filter(is_there) else { return Ok(()) };
        let replaced = member.replaces.and_then(|slot| members.find(slot)).cloned();
        let new = members.with_state(slot, CopyState::Good);
        let before = state.set;
        if replaced.is_some() {
            state.set = state.joining_set;
        }
        state.generation = state.generation.saturating_add(1);
        // First the labels of the others: if only these are written, the copy is stale again.
        let mut others = new.good().filter(|it| it.slot != slot);
        let recorded = others.try_for_each(|it| {
            self.record(&state, &new, it, None).map_err(|error| (it.slot, error))
        });
        let recorded = recorded.and_then(|()| {
            let Some(member) = new.find(slot) else { return Ok(()) };
            let mut label = new.label(&state, member, None);
            // The new copy is not believed alone before the label of the replaced one says so.
            if let Some(replaced) = replaced.as_ref().filter(|_| new.list().len() == 1) {
                label.other.clone_from(&replaced.side.path);
            }
            write_label(member.directory(), &label).map_err(|error| (slot, error))
        });
        if let Err(error) = recorded {
            state.set = before;
            return Err(error);
        }
        // Invariant 8: the replaced copy gets every write until its label says so. If that label
        // cannot be written, the label of the new copy says so, and stays.
        let is_retired = replaced.as_ref().is_none_or(|it| retire(&state, it, &new));
        state.why[slot] = None;
        self.members.update(|members| members.with_state(slot, CopyState::Good));
        let title = &member.side.title;
        match replaced {
            None => tracing::info!("{title}: the resync is done; the copy is good"),
            Some(replaced) => {
                let old = &replaced.side.title;
                tracing::info!("{title}: the resync is done; the copy has replaced `{old}`");
            }
        }
        if is_retired {
            self.unlabel_single(&mut state, &new);
        }
        Ok(())
    }

    /// The layout of the pool, by the superblock of a good copy.
    pub(super) fn layout(&self) -> Result<Layout, StoreError> {
        let members = self.members();
        let no_copy =
            || StoreError::io("cannot read the superblock")(io::ErrorKind::NotFound.into());
        let good = members.good().next().ok_or_else(no_copy)?;
        let newest = newest(good.directory(), &good.side.title)?;
        Ok(Layout { align: newest.align, segment_bytes: newest.segment_bytes })
    }
}
