//! Assembles two copies into a mirror: by their labels it determines whether they belong together,
//! and whether one of them is stale.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_volume_format::FormatError;
use blockyard_volume_format::label::{BYTES, FILE, Label, PATH_BYTES_MAX};
use blockyard_volume_format::superblock::{self, Superblock};

use super::members::{FIRST_SLOTS, Member, Members, detached};
use super::resync::{SegmentDifference, check_joining_space, make_superblock};
use super::{CopyState, Mirror, MirrorState, VerifyPool, only, write_label};
use crate::buffer::Memory;
use crate::error::{CopiesError, StoreError};
use crate::{SegmentStore, StoreFile};

/// The purpose for which copies are assembled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// To be used.
    Use {
        /// If one copy is missing, and may be the newer one, use the other one anyway.
        degraded: bool,
    },
    /// To be read only; nothing is changed.
    ReadOnly,
}

/// A copy that the user has named.
#[derive(Debug)]
pub struct NamedCopy<D> {
    /// `None` if it is missing.
    pub directory: Option<D>,
    /// The path.
    pub path: PathBuf,
}

/// Which copies are good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Both copies.
    Both,
    /// The copy of this number; the other one is stale.
    OneGood(usize),
}

/// Derives the verdict from the labels of copies 0 and 1; `None` if each was used without the
/// other.
fn judge(labels: [&Label; 2]) -> Option<Verdict> {
    let [first, second] = labels;
    let both = |label: &Label| label.is_good() && label.is_other_good();
    if both(first) && both(second) && first.generation == second.generation {
        return Some(Verdict::Both);
    }
    match (first.is_good(), second.is_good()) {
        (false, false) => None,
        (true, false) => Some(Verdict::OneGood(0)),
        (false, true) => Some(Verdict::OneGood(1)),
        // A copy that says that only it has everything must have the newer label. If the other
        // label is newer, it must say that both have everything.
        (true, true) => {
            let newer = usize::from(second.generation > first.generation);
            let differ = second.generation != first.generation;
            (differ && labels[1 - newer].is_other_good()).then_some(Verdict::OneGood(newer))
        }
    }
}

/// Whether a label says that a copy of this identity joins.
fn joins(label: &Label, set: [u8; 16]) -> bool {
    label.joining.as_ref().is_some_and(|it| it.set == set)
}

/// Whether a copy was detached from the pool of another copy, or replaced by that one.
pub(super) fn has_left(label: &Label, stays: &Label) -> bool {
    let is_detached = label.set == stays.set && label.is_detached() && !stays.is_detached();
    is_detached || joins(label, stays.set) && stays.is_good()
}

/// The path of a copy that belongs to the pool, if the copy with this label does not, or not yet:
/// it was detached, or replaced and the process was killed before its label said so, or it is to
/// replace another one. `known` reads the label at a path.
pub fn successor(label: &Label, known: impl Fn(&Path) -> Option<Label>) -> Option<PathBuf> {
    let other = Some(&label.other).filter(|it| !it.as_os_str().is_empty());
    if label.is_detached() {
        return other.cloned();
    }
    if label.cursor.is_some() {
        return other.filter(|path| known(path).is_some_and(|it| joins(&it, label.set))).cloned();
    }
    let joining = label.joining.as_ref()?;
    let is_new =
        |path: &&PathBuf| known(path).is_some_and(|it| joins(label, it.set) && it.is_good());
    other.into_iter().chain([&joining.path]).find(is_new).cloned()
}

/// Reads the label of a copy, and whether both of its slots are good; `None` if it has none.
pub(super) fn read_label<D: SegmentStore>(
    directory: &D,
) -> Result<Option<(Label, bool)>, StoreError> {
    let doing = || StoreError::io(format!("cannot read `{}/{FILE}`", directory.title()));
    let Some(file) = directory.open(FILE).map_err(|error| doing()(error))? else {
        return Ok(None);
    };
    let len = (file.len().map_err(|error| doing()(error))? as usize).min(BYTES);
    let mut bytes = Memory::new(BYTES as u64).take_beyond(len);
    // Try twice: an unreadable label has the consequences of a lost copy.
    let read = file.read_at(0, &mut bytes).or_else(|_| file.read_at(0, &mut bytes));
    read.map_err(|error| doing()(error))?;
    Ok(Some(Label::newest(&bytes)?))
}

pub(super) fn has_pool<D: SegmentStore>(directory: &D) -> Result<bool, StoreError> {
    let doing = StoreError::io(format!("cannot examine `{}`", directory.title()));
    Ok(directory.open(superblock::FILE).map_err(doing)?.is_some())
}

/// The newest superblock of a directory.
///
/// # Errors
/// If no slot can be read.
pub(super) fn newest<D: SegmentStore>(
    directory: &D,
    title: &str,
) -> Result<Superblock, StoreError> {
    Ok(superblocks(directory, title)?[0])
}

/// The valid superblocks of a directory, newest first; at least one.
///
/// # Errors
/// If no slot can be read.
fn superblocks<D: SegmentStore>(directory: &D, title: &str) -> Result<Vec<Superblock>, StoreError> {
    let doing = || StoreError::io(format!("cannot read `{title}/{}`", superblock::FILE));
    let no_pool = || CopiesError::NoPool { path: title.to_owned() };
    let file = directory.open(superblock::FILE).map_err(|error| doing()(error))?;
    let file = file.ok_or_else(no_pool)?;
    let whole = superblock::SLOTS as usize * superblock::SLOT_BYTES;
    let mut bytes = Memory::new(whole as u64).take_beyond(whole);
    let read = superblock::read(&mut bytes, |into| file.read_at(0, into));
    read.map_err(|error| doing()(error))?;
    match Superblock::all(&bytes) {
        Err(error @ FormatError::Version { .. }) => Err(error.into()),
        found => found.map_err(|_| no_pool().into()),
    }
}

/// What the superblocks of two copies show whose labels agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Superblocks {
    /// The newest superblocks are equal, or a copy has no valid one.
    InStep,
    /// The copy of this number has an older superblock.
    Older {
        /// The number.
        copy: usize,
        /// The copies have a superblock in common, or superblocks of one opening.
        is_shared: bool,
    },
    /// Each copy was used without the other.
    Diverged,
}

/// Compares the superblocks of two copies, newest first. They differ if the power was cut between
/// the writes of one superblock to both copies, or if one copy was replaced by an earlier state of
/// itself, for example from a backup.
///
/// A superblock is durable in both copies before the next slot is written. So after a crash the
/// newest superblock of one copy is in a slot of the other one, too. Each opening writes both slots
/// with a new epoch, so a state from before that opening has none of the superblocks of the other
/// copy. That copy is older only if its sequence number is lower, and its epoch and group number
/// are not higher: epochs grow by random steps, so an epoch alone does not order two states.
fn compare(copies: [&[Superblock]; 2]) -> Superblocks {
    let [Some(first), Some(second)] = copies.map(<[Superblock]>::first) else {
        return Superblocks::InStep;
    };
    let place = |it: &Superblock| (it.epoch, it.sequence);
    if place(first) == place(second) {
        return Superblocks::InStep;
    }
    let has = |copy: usize, it| copies[copy].iter().any(|slot| place(slot) == place(it));
    let is_before = |it: &Superblock, other: &Superblock| {
        it.epoch <= other.epoch && it.sequence < other.sequence && it.log.number <= other.log.number
    };
    // Superblocks of one epoch are of one opening, also if the one in common is damaged.
    let is_shared = first.epoch == second.epoch;
    match (has(1, first), has(0, second)) {
        (true, _) => Superblocks::Older { copy: 0, is_shared: true },
        (_, true) => Superblocks::Older { copy: 1, is_shared: true },
        _ if is_before(first, second) => Superblocks::Older { copy: 0, is_shared },
        _ if is_before(second, first) => Superblocks::Older { copy: 1, is_shared },
        _ => Superblocks::Diverged,
    }
}

pub(super) fn failed(path: &Path) -> impl FnOnce(io::Error) -> StoreError + use<> {
    StoreError::io(format!("cannot write `{}/{FILE}`", path.display()))
}

fn check_path(path: &Path) -> Result<(), StoreError> {
    if path.as_os_str().len() <= PATH_BYTES_MAX {
        return Ok(());
    }
    let wanted = format!("a path of {PATH_BYTES_MAX} bytes at most");
    Err(StoreError::Invalid { field: "path2", value: path.display().to_string(), wanted })
}

impl<D: SegmentStore> Mirror<D> {
    /// Assembles two copies. In empty directories a new mirror is made. A stale copy is left as it
    /// is, until [`Mirror::resume_stale`].
    ///
    /// # Errors
    /// If the copies do not belong together, or one is missing that may be the newer one.
    pub fn assemble<V: VerifyPool>(
        mut given: [NamedCopy<D>; 2],
        terms: Terms,
        verifier: &V,
    ) -> Result<Mirror<D>, V::Error> {
        given.iter().try_for_each(|it| check_path(&it.path))?;
        let titles: [String; 2] = std::array::from_fn(|at| given[at].path.display().to_string());
        let (mut labels, mut unread, mut aside) = ([None, None], None, None);
        for (label, given) in labels.iter_mut().zip(&mut given) {
            match given.directory.as_ref().map_or(Ok(None), read_label) {
                Ok(found) => *label = found,
                Err(error @ StoreError::Format(FormatError::Version { .. })) => {
                    return Err(error.into());
                }
                Err(error) => {
                    // Treat it as missing, but keep it locked.
                    tracing::error!("{error}");
                    (aside, unread) = (given.directory.take(), Some(error));
                }
            }
        }
        if labels == [None, None]
            && let Some(error) = unread
        {
            return Err(error.into());
        }
        if let [Some((first, _)), Some((second, _))] = &labels
            && has_left(first, second) != has_left(second, first)
        {
            // The power was cut before the label of the copy that stays was removed.
            let ordered = if has_left(first, second) { [second, first] } else { [first, second] };
            if ordered[0].is_good() && !ordered[0].is_other_good() {
                if has_left(first, second) {
                    given.reverse();
                }
                return Ok(left_alone(given, ordered, terms)?);
            }
        }
        for (label, given) in labels.iter().zip(&given) {
            label.as_ref().map_or(Ok(()), |(label, _)| check_attached(label, &given.path))?;
        }
        let mirror = match labels {
            [Some(first), Some(second)] => pair(given, [first, second], &titles, terms, verifier)?,
            [None, None] => make(given, &titles, terms)?,
            [Some(label), None] => one(given, 0, label, &titles, terms, unread)?,
            [None, Some(label)] => one(given, 1, label, &titles, terms, unread)?,
        };
        aside.into_iter().for_each(|aside| _ = mirror.0.aside.set(aside));
        Ok(mirror)
    }

    /// The only copy of a pool. It has a label if another copy is to replace it.
    ///
    /// # Errors
    /// If it was detached, or is one of two copies.
    pub fn assemble_single(given: NamedCopy<D>, terms: Terms) -> Result<Mirror<D>, StoreError> {
        let NamedCopy { directory: Some(directory), path } = given else {
            return Err(CopiesError::NoPool { path: given.path.display().to_string() }.into());
        };
        let Some((label, _)) = read_label(&directory)? else {
            return Ok(Mirror::single(directory, path));
        };
        check_attached(&label, &path)?;
        // Another process may have attached a second copy before this one took the lock.
        if !label.other.as_os_str().is_empty() || !label.is_good() {
            return Err(CopiesError::Changed { path: path.display().to_string() }.into());
        }
        let mirror = Mirror::single(directory, path);
        let mut state = mirror.0.state();
        (state.has_labels, state.set) = (true, label.set);
        (state.generation, state.opened_generation) = (label.generation, label.generation);
        state.pending = label.joining.filter(|_| terms != Terms::ReadOnly);
        drop(state);
        Ok(mirror)
    }

    /// Continues with a copy that was to replace another one when the pool was closed; `open` opens
    /// the copy at a path. A copy that is missing, or is not the one that was joining, is given up.
    ///
    /// # Errors
    /// If that cannot be recorded, or that copy has replaced the other one ([`successor`]).
    pub fn resume_joining(
        &self,
        open: impl FnOnce(&Path) -> Result<D, StoreError>,
    ) -> Result<(), StoreError> {
        let mut state = self.0.state();
        let Some(joining) = state.pending.clone() else { return Ok(()) };
        let members = self.0.members();
        let found = open(&joining.path).and_then(|directory| {
            let label = read_label(&directory)?;
            let label = label.filter(|(label, _)| label.set == joining.set);
            if label.as_ref().is_some_and(|(label, _)| !label.is_good()) {
                let doing =
                    format!("cannot make `{}/{}`", joining.path.display(), superblock::FILE);
                make_superblock(&directory).map_err(StoreError::io(doing))?;
            }
            Ok((directory, label.map(|(label, _)| label)))
        });
        let why = match found {
            Ok((_, Some(label))) if label.is_good() => {
                // Another process has completed the replacement before this one took the lock.
                let path = joining.path.display().to_string();
                return Err(CopiesError::Changed { path }.into());
            }
            Ok((directory, Some(Label { number, generation, cursor: Some(cursor), .. }))) => {
                // Invariant 7.
                let is_valid = generation == state.opened_generation
                    && members.good().all(|it| is_no_newer(&directory, it.directory()));
                let cursor = if is_valid { cursor } else { 0 };
                let given = NamedCopy { directory: Some(directory), path: joining.path };
                let replaced = members.pair().find(|it| it.number == number);
                let replaced = replaced.or_else(|| members.pair().next());
                let slot = state.next_slot;
                let new = Member::new(slot, number, CopyState::Resyncing, given);
                let new = Member { replaces: replaced.map(|it| it.slot), ..new };
                state.pending = None;
                (state.joining_set, state.cursor) = (joining.set, cursor);
                state.next_slot += 1;
                _ = self.0.is_several.set(());
                let joined = members.with(new.clone());
                // A later opening must not find a void cursor when the superblocks are equal again.
                let is_recorded = is_valid && generation == state.generation;
                let has_space = check_joining_space(&members, &new);
                let recorded = has_space.and_then(|()| match is_recorded {
                    true => Ok(()),
                    false => self.0.record(&state, &joined, &new, Some(cursor)),
                });
                self.0.members.update(|_| joined);
                drop(state);
                return match recorded {
                    Ok(()) => Ok(()),
                    Err(error) => self.0.mark_failed(slot, &error).map_err(failed(&new.side.path)),
                };
            }
            Ok(_) => "it is not the copy that was joining".to_owned(),
            Err(error) => error.to_string(),
        };
        let path = joining.path.display();
        tracing::error!(
            "{path}: the replacement by this copy is given up: {why}. Empty it, and \
             `blockyard pool replace` again"
        );
        state.pending = None;
        // Invariant 7: it misses the writes from now on.
        let recorded = self.0.record_all(&state, &members);
        recorded.map_err(StoreError::io(format!("cannot give `{path}` up")))?;
        if members.list().len() == 1 {
            self.0.unlabel_single(&mut state, &members);
        }
        Ok(())
    }

    /// A mirror of the copies that `good` names, and of another one that is stale, or failed if it
    /// is missing.
    fn new(given: [NamedCopy<D>; 2], label: &Label, good: [bool; 2], writes: bool) -> Mirror<D> {
        debug_assert_ne!(good, [false, false], "invariant 1: no copy is good");
        let mut state = MirrorState {
            has_labels: true,
            set: label.set,
            generation: label.generation,
            opened_generation: label.generation,
            pending: label.joining.clone().filter(|_| writes),
            next_slot: FIRST_SLOTS,
            ..MirrorState::default()
        };
        let mut list = Vec::new();
        for (number, given) in given.into_iter().enumerate() {
            let (copy, why) = match (good[number], &given.directory) {
                (true, _) => (CopyState::Good, None),
                (false, Some(_)) => (CopyState::Stale, Some("it lacks the newest writes")),
                (false, None) => (CopyState::Failed, Some("missing")),
            };
            state.why[number] = why.map(str::to_owned);
            list.push(Member::new(number, number, copy, given));
        }
        Mirror::of(Members::new(list), state, writes)
    }

    /// The copy that is older by its newest checkpoint or its log.
    fn older_copy<V: VerifyPool>(
        &self,
        compared: Superblocks,
        verifier: &V,
    ) -> Result<Option<usize>, V::Error> {
        let behind = match compared {
            Superblocks::Older { copy, .. } => Some(copy),
            _ => None,
        };
        let old = verifier.older_copy(Mirror(Arc::clone(&self.0)), behind)?;
        // A copy never replaces one with a newer superblock.
        Ok(old.filter(|old| behind.is_none_or(|behind| behind == *old)))
    }

    /// Marks a copy as stale that is older than the other one although both labels say that it is
    /// good.
    fn mark_stale(&self, number: usize) {
        let why = "it is an earlier state of this copy".to_owned();
        self.0.set_copy(&mut self.0.state(), number, CopyState::Stale, Some(why));
    }

    /// Writes to both labels that both copies are good.
    fn record_both(&self) -> Result<(), StoreError> {
        let (state, members) = (self.0.state(), self.0.members());
        for member in members.good() {
            let recorded = self.0.record(&state, &members, member, None);
            recorded.map_err(failed(&member.side.path))?;
        }
        Ok(())
    }

    /// Continues a resync that was interrupted: the copy `number` gets every write from now on, and
    /// segments below the cursor are equal. Nothing is removed from the copy: that the pool opens
    /// in the good one is not verified yet. If something is to be removed, or the cursor is void,
    /// the copy stays stale, and [`Mirror::resume_stale`] resyncs it from its beginning.
    fn resume(&self, number: usize, cursor: u64) -> Result<(), StoreError> {
        let members = self.0.members();
        let find = |number| members.find(number).expect("a pair has both numbers").directory();
        let (source, target) = (find(1 - number), find(number));
        // A source that was restored from a backup is older than the copy below the cursor.
        let is_valid = is_no_newer(target, source);
        let difference = match SegmentDifference::of(source, target) {
            Ok(difference) if is_valid && difference.is_part() => difference,
            _ => return Ok(()),
        };
        let begun = difference.check_space(target).and_then(|()| make_superblock(target));
        let mut state = self.0.state();
        self.0.set_copy(&mut state, number, CopyState::Resyncing, None);
        state.cursor = cursor.min(difference.first_missing);
        let begun = begun.and_then(|()| {
            let members = self.0.members();
            let member = members.find(number).filter(|_| state.cursor != cursor);
            // A later opening must not find the old cursor.
            member.map_or(Ok(()), |it| self.0.record(&state, &members, it, Some(state.cursor)))
        });
        drop(state);
        begun.or_else(|error| self.fail_resync(number, &error))
    }
}

/// Whether the superblocks of a copy that is partly resynced are no newer than those of a good one.
fn is_no_newer<D: SegmentStore>(partial: &D, good: &D) -> bool {
    let slots = |directory: &D| superblocks(directory, &directory.title()).unwrap_or_default();
    let compared = compare([&slots(partial), &slots(good)]);
    matches!(compared, Superblocks::InStep | Superblocks::Older { copy: 0, .. })
}

/// Compares the superblocks of two copies whose labels say that both are good. `moved` says of each
/// label whether the other copy is not where the label says.
///
/// # Errors
/// If each copy was used without the other.
fn compare_copies<D: SegmentStore>(
    given: &[NamedCopy<D>; 2],
    moved: [bool; 2],
    titles: &[String; 2],
) -> Result<Superblocks, StoreError> {
    let slots = given.each_ref().map(|it| {
        let found = it.directory.as_ref().map(|found| superblocks(found, &titles[0]));
        // An unreadable superblock does not say which copy is older.
        found.and_then(Result::ok).unwrap_or_default()
    });
    match compare([&slots[0], &slots[1]]) {
        // Copies of two pools that were one once: neither was made from the other's path.
        Superblocks::Older { is_shared: false, .. } if moved == [true, true] => Err(split(titles)),
        Superblocks::Diverged => Err(split(titles)),
        compared => Ok(compared),
    }
}

/// Refuses a copy that was detached.
fn check_attached(label: &Label, path: &Path) -> Result<(), StoreError> {
    if !label.is_detached() {
        return Ok(());
    }
    let (path, pool) = (path.display().to_string(), label.other.display().to_string());
    Err(CopiesError::Detached { path, pool }.into())
}

fn split(titles: &[String; 2]) -> StoreError {
    let [first, second] = titles.clone();
    CopiesError::Split { first, second }.into()
}

/// The only copy of a pool whose other copy, the second one, was detached or replaced. Records that
/// there, and removes the label of the first one.
fn left_alone<D: SegmentStore>(
    [given, left]: [NamedCopy<D>; 2],
    [label, left_label]: [&Label; 2],
    terms: Terms,
) -> Result<Mirror<D>, StoreError> {
    let title = given.path.display().to_string();
    let directory = given.directory.ok_or(CopiesError::NoPool { path: title })?;
    let path = given.path.clone();
    let mirror = Mirror::single(directory, given.path);
    let mut state = mirror.0.state();
    (state.has_labels, state.set, state.generation) = (true, label.set, label.generation);
    if terms != Terms::ReadOnly {
        let mut is_retired = true;
        if let Some(left_directory) = left.directory.filter(|_| !left_label.is_detached()) {
            let detached = detached(&state, left_label.number, path);
            is_retired = write_label(&left_directory, &detached).is_ok();
        }
        // The label of the copy that stays says what that of the other one does not.
        if is_retired {
            mirror.0.unlabel_single(&mut state, &mirror.0.members());
        }
    }
    drop(state);
    Ok(mirror)
}

/// Assembles two copies that both have labels.
fn pair<D: SegmentStore, V: VerifyPool>(
    mut given: [NamedCopy<D>; 2],
    labels: [(Label, bool); 2],
    titles: &[String; 2],
    terms: Terms,
    verifier: &V,
) -> Result<Mirror<D>, V::Error> {
    let [(first, first_whole), (second, second_whole)] = &labels;
    let [first_title, second_title] = titles.clone();
    if first.set != second.set {
        let last = first.other.display().to_string();
        let error = CopiesError::Foreign { first: first_title, second: second_title, last };
        return Err(StoreError::from(error).into());
    }
    if first.number == second.number {
        let number = first.number;
        let error = CopiesError::Twice { first: first_title, second: second_title, number };
        return Err(StoreError::from(error).into());
    }
    let mut ordered = [first, second];
    if first.number == 1 {
        given.reverse();
        ordered.reverse();
    }
    let Some(verdict) = judge(ordered) else { return Err(split(titles).into()) };
    let writes = terms != Terms::ReadOnly;
    match verdict {
        Verdict::Both => {
            let had_one = ordered[0].generation > 1;
            let directories = || given.iter().filter_map(|it| it.directory.as_ref());
            let found = directories().map(has_pool).collect::<Result<Vec<bool>, _>>()?;
            if had_one && !found.contains(&true) {
                return Err(StoreError::from(CopiesError::NoPool { path: first_title }).into());
            }
            let moved = [0, 1].map(|at| ordered[at].other != given[1 - at].path);
            let compared = compare_copies(&given, moved, titles)?;
            let mirror = Mirror::new(given, ordered[0], [true, true], writes);
            let old = match compared {
                Superblocks::Older { copy, is_shared: false } => Some(copy),
                _ if found.contains(&false) => None,
                compared => mirror.older_copy(compared, verifier)?,
            };
            if let Some(old) = old {
                mirror.mark_stale(old);
                if writes {
                    mirror.advance(1 - old)?;
                }
                return Ok(mirror);
            }
            if writes && (moved.contains(&true) || !(*first_whole && *second_whole)) {
                mirror.record_both()?;
            }
            Ok(mirror)
        }
        Verdict::OneGood(good) => {
            let mirror = Mirror::new(given, ordered[good], only(good), writes);
            let stale = ordered[1 - good];
            // Invariant 7: the copy has missed no write.
            let cursor = stale.cursor.filter(|_| stale.generation == ordered[good].generation);
            if let Some(cursor) = cursor.filter(|_| writes) {
                mirror.resume(1 - good, cursor)?;
            }
            Ok(mirror)
        }
    }
}

/// Assembles a pool of which one copy has a label, and the other is missing or empty, or has a
/// label that cannot be read: `unread` is the error.
fn one<D: SegmentStore>(
    mut given: [NamedCopy<D>; 2],
    present: usize,
    (label, _): (Label, bool),
    titles: &[String; 2],
    terms: Terms,
    unread: Option<StoreError>,
) -> Result<Mirror<D>, StoreError> {
    let (path, missing) = (titles[present].clone(), titles[1 - present].clone());
    let directory = given[present].directory.as_ref().expect("it has a label");
    let empty = given[1 - present].directory.as_ref();
    let not_a_copy = |what: &str| {
        let found = format!("`{missing}` {what}");
        CopiesError::NotACopy { found, path: path.clone(), last: label.other.display().to_string() }
    };
    if let Some(other) = empty
        && has_pool(other)?
    {
        return Err(not_a_copy("holds a pool that is no copy of this one").into());
    }
    // The power was cut while both were made; they contain no data yet.
    if empty.is_some() && !has_pool(directory)? && label.is_good() && label.is_other_good() {
        return make(given, titles, terms);
    }
    if !label.is_good() {
        return Err(CopiesError::Stale { path, missing }.into());
    }
    let consents = matches!(terms, Terms::ReadOnly | Terms::Use { degraded: true });
    if label.is_other_good() && !consents {
        let what = if empty.is_some() { "holds no copy of a pool" } else { "does not exist" };
        let why = match unread {
            Some(error) => format!("cannot be read ({error})"),
            // The other copy was elsewhere, and may be healthy there.
            None if given[1 - present].path != label.other => return Err(not_a_copy(what).into()),
            None => what.to_owned(),
        };
        return Err(CopiesError::Missing { path, missing, why }.into());
    }
    // An empty directory is not resynced here: `attach` does that on request.
    let aside = given[1 - present].directory.take();
    if present != label.number {
        given.reverse();
    }
    let writes = terms != Terms::ReadOnly;
    let good = only(label.number);
    let mirror = Mirror::new(given, &label, good, writes);
    if label.is_other_good() && !writes {
        let why = "missing, and may be newer than the copy that is present";
        mirror.0.state().why[1 - label.number] = Some(why.to_owned());
    }
    aside.into_iter().for_each(|aside| _ = mirror.0.aside.set(aside));
    if writes {
        let shared = &mirror.0;
        let mut state = shared.state();
        state.generation = state.generation.saturating_add(1);
        let members = shared.members();
        let noted = shared.record_all(&state, &members);
        drop(state);
        noted.map_err(StoreError::io(format!("cannot write `{path}/{FILE}`")))?;
        tracing::error!(
            "{path}: the other copy of the pool, `{missing}`, is missing: the pool continues with \
             one copy. `blockyard pool attach {path} NEW` makes another one"
        );
    }
    Ok(mirror)
}

/// Makes a mirror of two copies without labels.
fn make<D: SegmentStore>(
    given: [NamedCopy<D>; 2],
    titles: &[String; 2],
    terms: Terms,
) -> Result<Mirror<D>, StoreError> {
    for at in 0..2 {
        let (path, other) = (titles[at].clone(), titles[1 - at].clone());
        match &given[at].directory {
            Some(directory) if has_pool(directory)? => {
                return Err(CopiesError::Single { path, other }.into());
            }
            Some(_) => {}
            None => {
                let field = ["path", "path2"][at];
                let wanted = format!("a directory or disk for a copy of the pool at `{other}`");
                return Err(StoreError::Invalid { field, value: path, wanted });
            }
        }
    }
    if terms == Terms::ReadOnly {
        return Err(StoreError::Invalid {
            field: "path",
            value: titles[0].clone(),
            wanted: "the directory of a pool".to_owned(),
        });
    }
    // Check that neither has other data before anything is written to one.
    for given in given.iter().filter_map(|it| it.directory.as_ref()) {
        given.prepare()?;
    }
    let doing = StoreError::io(format!("cannot make `{}/{FILE}`", titles[0]));
    let directory = given[0].directory.as_ref().expect("both directories were checked above");
    let set = directory.fresh_id().map_err(doing)?;
    let other = given[1].path.clone();
    let good = [true, true];
    let label = Label { set, number: 0, generation: 1, good, other, joining: None, cursor: None };
    let mirror = Mirror::new(given, &label, [true, true], true);
    mirror.record_both()?;
    Ok(mirror)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_volume_format::entry::Entry;
    use blockyard_volume_format::superblock::LogPlace;

    fn label(number: usize, generation: u64, good: [bool; 2]) -> Label {
        let (other, joining, cursor) = (PathBuf::new(), None, None);
        Label { set: [1; 16], number, generation, good, other, joining, cursor }
    }

    /// The bug: a copy that was restored from a backup counted as good, because the labels of both
    /// copies still agreed. If the other copy was lost then, the newest data were lost.
    #[test]
    fn an_earlier_state_of_a_copy_is_recognised() {
        const STEP: Superblocks = Superblocks::InStep;
        const OLD_0: Superblocks = Superblocks::Older { copy: 0, is_shared: true };
        const OLD_1: Superblocks = Superblocks::Older { copy: 1, is_shared: true };
        const LONG_OLD_0: Superblocks = Superblocks::Older { copy: 0, is_shared: false };
        const LONG_OLD_1: Superblocks = Superblocks::Older { copy: 1, is_shared: false };
        let slots = |places: &[(u64, u64)]| -> Vec<Superblock> {
            let place = |(epoch, sequence)| Superblock {
                id: [1; 16],
                align: 512,
                segment_bytes: 4 << 20,
                sequence,
                epoch,
                log: LogPlace { segment: 0, offset: 0, next: 1, number: 1, chain: 0 },
                catalogue: Entry::HOLE,
                catalogue_bytes: 0,
                catalogue_crc: 0,
                durable: 0,
            };
            places.iter().copied().map(place).collect()
        };
        for (first, second, want) in [
            (&[(5, 9), (5, 8)][..], &[(5, 9), (5, 8)][..], STEP),
            // The power was cut between the writes of both copies, of a checkpoint or an opening;
            // or a copy was restored from a backup that was taken before the last checkpoint.
            (&[(5, 10), (5, 9)], &[(5, 9), (5, 8)], OLD_1),
            (&[(5, 9), (5, 8)], &[(7, 10), (5, 9)], OLD_0),
            // A slot cannot be read.
            (&[(5, 9)], &[(5, 9), (5, 8)], STEP),
            (&[(5, 8)], &[(5, 9), (5, 8)], OLD_0),
            (&[], &[(5, 9), (5, 8)], STEP),
            // The power was cut between the writes of both copies, and a slot cannot be read.
            (&[(5, 10), (5, 9)], &[(5, 8)], OLD_1),
            // One copy lacks an opening.
            (&[(5, 9), (5, 8)], &[(7, 11), (7, 10)], LONG_OLD_0),
            (&[(7, 11), (7, 10)], &[(5, 9), (5, 8)], LONG_OLD_1),
            // Each was used without the other: the one with the later epoch has had fewer
            // checkpoints, or as many.
            (&[(5, 99), (5, 98)], &[(7, 11), (7, 10)], Superblocks::Diverged),
            (&[(7, 10), (5, 9)], &[(6, 10), (5, 9)], Superblocks::Diverged),
        ] {
            assert_eq!(compare([&slots(first), &slots(second)]), want, "{first:?} {second:?}");
        }
    }

    #[test]
    fn the_stale_copy_is_recognised() {
        const BOTH: [bool; 2] = [true, true];
        const FIRST: [bool; 2] = [true, false];
        const SECOND: [bool; 2] = [false, true];
        for (first, second, want) in [
            ((6, BOTH), (6, BOTH), Some(Verdict::Both)),
            // The second copy has failed, or is being resynced.
            ((7, FIRST), (6, BOTH), Some(Verdict::OneGood(0))),
            ((7, FIRST), (7, FIRST), Some(Verdict::OneGood(0))),
            ((8, BOTH), (7, FIRST), Some(Verdict::OneGood(0))),
            ((6, BOTH), (7, SECOND), Some(Verdict::OneGood(1))),
            // The power was cut when one of two labels was written.
            ((7, BOTH), (6, BOTH), Some(Verdict::OneGood(0))),
            // Each was used without the other.
            ((7, FIRST), (7, SECOND), None),
            ((9, FIRST), (7, SECOND), None),
            // Labels of three different copies.
            ((6, FIRST), (6, BOTH), None),
            ((6, BOTH), (6, SECOND), None),
            // The label that says that both have everything is newer than the one that says that
            // only one has.
            ((6, FIRST), (8, BOTH), None),
            ((6, SECOND), (8, FIRST), None),
        ] {
            let labels = [label(0, first.0, first.1), label(1, second.0, second.1)];
            assert_eq!(judge([&labels[0], &labels[1]]), want, "{first:?} {second:?}");
        }
    }
}
