//! The copies that a mirror has now: which are good, and which get writes.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_volume_format::label::{Joining, Label};

use super::assemble::NamedCopy;
use super::{CopyState, MirrorState};
use crate::{COPIES_MAX, GoodCopies};

/// Slots of copies. A copy keeps its slot while it belongs to the pool, and no other copy gets that
/// slot before the pool is opened again: open files and readers refer to a copy by its slot.
pub const SLOTS: usize = COPIES_MAX;

/// Slots of the copies with which a pool is opened.
pub(super) const FIRST_SLOTS: usize = 2;

/// A copy and where it is.
#[derive(Debug)]
pub struct Side<D> {
    /// `None` if the copy is missing.
    pub directory: Option<D>,
    /// The path, for messages.
    pub title: String,
    /// The path.
    pub path: PathBuf,
}

/// A copy of the pool.
#[derive(Debug)]
pub(super) struct Member<D> {
    pub(super) slot: usize,
    /// The number in the label: 0 or 1. A copy that will replace one of two has the number of that
    /// one.
    pub(super) number: usize,
    /// The slot of the copy that this one will replace. Until then it is not one of the pair.
    pub(super) replaces: Option<usize>,
    pub(super) state: CopyState,
    pub(super) side: Arc<Side<D>>,
}

impl<D> Clone for Member<D> {
    fn clone(&self) -> Member<D> {
        Member { side: Arc::clone(&self.side), ..*self }
    }
}

impl<D> Member<D> {
    pub(super) fn new(
        slot: usize,
        number: usize,
        state: CopyState,
        given: NamedCopy<D>,
    ) -> Member<D> {
        let title = given.path.display().to_string();
        let side = Arc::new(Side { directory: given.directory, title, path: given.path });
        Member { slot, number, replaces: None, state, side }
    }

    /// Whether the copy has joined since the pool was opened.
    pub(super) fn has_joined(&self) -> bool {
        self.slot >= FIRST_SLOTS
    }

    /// The directory of a copy that is read or written.
    pub(super) fn directory(&self) -> &D {
        let directory = self.side.directory.as_ref();
        directory.expect("a copy that is good, stale or resyncing is present")
    }
}

/// The copies of a pool.
#[derive(Debug)]
pub(super) struct Members<D> {
    list: Vec<Member<D>>,
    good: GoodCopies,
    written: GoodCopies,
}

impl<D> Clone for Members<D> {
    fn clone(&self) -> Members<D> {
        Members { list: self.list.clone(), ..*self }
    }
}

impl<D> Members<D> {
    pub(super) fn new(list: Vec<Member<D>>) -> Members<D> {
        let slots = |is: &dyn Fn(CopyState) -> bool| {
            GoodCopies::of(list.iter().filter(|it| is(it.state)).map(|it| it.slot))
        };
        let good = slots(&CopyState::is_good);
        let written = slots(&CopyState::is_written);
        Members { list, good, written }
    }

    /// All copies.
    pub(super) fn list(&self) -> &[Member<D>] {
        &self.list
    }

    /// The copy of a slot.
    pub(super) fn find(&self, slot: usize) -> Option<&Member<D>> {
        self.list.iter().find(|it| it.slot == slot)
    }

    /// The slots of the good copies.
    #[inline]
    pub(super) fn good_slots(&self) -> GoodCopies {
        self.good
    }

    /// The slots of the copies that get writes.
    #[inline]
    pub(super) fn written_slots(&self) -> GoodCopies {
        self.written
    }

    /// The good copies.
    pub(super) fn good(&self) -> impl Iterator<Item = &Member<D>> {
        self.list.iter().filter(|it| it.state.is_good())
    }

    /// The copies that get writes.
    pub(super) fn written(&self) -> impl Iterator<Item = &Member<D>> {
        self.list.iter().filter(|it| it.state.is_written())
    }

    /// The pair, without a copy that will replace one of them.
    pub(super) fn pair(&self) -> impl Iterator<Item = &Member<D>> {
        self.list.iter().filter(|it| it.replaces.is_none())
    }

    /// The copies that are resyncing; at most one.
    pub(super) fn resyncing(&self) -> impl Iterator<Item = &Member<D>> {
        self.list.iter().filter(|it| it.state == CopyState::Resyncing)
    }

    /// The copies with one of them in another state. A copy that becomes good replaces the one that
    /// it is to replace.
    pub(super) fn with_state(&self, slot: usize, state: CopyState) -> Members<D> {
        let replaced = self.find(slot).and_then(|it| it.replaces).filter(|_| state.is_good());
        let stay = self.list.iter().filter(|it| Some(it.slot) != replaced);
        let change = |it: &Member<D>| match it.slot == slot {
            true => {
                let replaces = it.replaces.filter(|_| !state.is_good());
                Member { state, replaces, ..it.clone() }
            }
            false => it.clone(),
        };
        Members::new(stay.map(change).collect())
    }

    /// The copies and another one.
    pub(super) fn with(&self, member: Member<D>) -> Members<D> {
        Members::new(self.list.iter().cloned().chain([member]).collect())
    }

    /// The copies without one.
    pub(super) fn without(&self, slot: usize) -> Members<D> {
        Members::new(self.list.iter().filter(|it| it.slot != slot).cloned().collect())
    }

    /// The label that a copy should have.
    pub(super) fn label(
        &self,
        state: &MirrorState,
        member: &Member<D>,
        cursor: Option<u64>,
    ) -> Label {
        let pair = || self.pair();
        let number = member.number;
        let is_extra = member.replaces.is_some();
        let other = pair().find(|it| it.number != number);
        let joining = self.resyncing().find(|it| it.replaces.is_some() && !is_extra);
        Label {
            set: if is_extra { state.joining_set } else { state.set },
            number,
            generation: state.generation,
            good: std::array::from_fn(|at| {
                let is_good = pair().any(|it| it.number == at && it.state.is_good());
                is_good && !(is_extra && at == number)
            }),
            other: other.map_or_else(PathBuf::new, |it| it.side.path.clone()),
            joining: joining
                .map(|it| Joining { path: it.side.path.clone(), set: state.joining_set })
                .or_else(|| state.pending.clone().filter(|_| !is_extra)),
            cursor,
        }
    }
}

/// The label of a copy that was detached from a pool of which `other` is a copy.
pub(super) fn detached(state: &MirrorState, number: usize, other: PathBuf) -> Label {
    let MirrorState { set, generation, .. } = *state;
    let (good, joining, cursor) = ([false, false], None, None);
    Label { set, number, generation, good, other, joining, cursor }
}

/// The results of an operation on several copies.
#[derive(Default)]
pub(super) struct CopyResults {
    /// Whether a good copy has succeeded.
    pub(super) succeeded: bool,
    /// The copies that have not, by slot.
    pub(super) failed: Vec<(usize, io::Error)>,
}

impl CopyResults {
    /// Adds the result of a copy.
    pub(super) fn add<D>(&mut self, member: &Member<D>, result: io::Result<()>) {
        self.add_slot(member.slot, member.state.is_good(), result);
    }

    /// Adds the result of the copy of a slot.
    pub(super) fn add_slot(&mut self, slot: usize, is_good: bool, result: io::Result<()>) {
        match result {
            Ok(()) => self.succeeded |= is_good,
            // The error of a good copy comes first: it is the one that the caller gets.
            Err(error) if is_good => self.failed.insert(0, (slot, error)),
            Err(error) => self.failed.push((slot, error)),
        }
    }
}
