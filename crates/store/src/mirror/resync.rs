//! Resync: makes one copy equal to the other. Copies a missing file, or everything to a stale copy.
//! Data that are equal already are not written.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use blockyard_sync::rcu_cell::RcuCell;
use blockyard_volume_format::{label, segment_name, superblock};

use super::assemble::{failed, has_pool, newest};
use super::{Mirror, Shared, State, VerifyPool};
use crate::buffer::{ALIGN, Memory};
use crate::error::StoreError;
use crate::{Copies, Layout, SegmentStore, StoreFile};

/// Bytes that are compared and written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Bytes between two log lines.
const LOG_BYTES: u64 = 10 << 30;

/// Progress callback: bytes compared, and bytes in total.
pub(super) type Tell<'t> = dyn FnMut(u64, u64) + 't;

/// Whether a file belongs to the pool, and not to one copy alone.
fn is_shared(name: &str) -> bool {
    name == superblock::FILE || name.starts_with("segment-") && !name.ends_with(".new")
}

/// Returns an error if the superblock of a directory cannot be read any more: its disk is gone, or
/// returns other data than it has stored. A disk that has bad sectors elsewhere can still read the
/// superblock.
fn look_alive<D: SegmentStore>(directory: &D) -> io::Result<()> {
    newest(directory, &directory.title()).map(drop).map_err(|error| match error {
        StoreError::Io { source, .. } => source,
        error => io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
    })
}

/// Makes the file `to` equal to `from`, of the same length. Returns the number of bytes written.
/// Before a chunk is written, and if a whole chunk cannot be read, `look` checks the disk of
/// `from`: a disk that fails must not replace the data of the other copy by what it returns.
fn contents<F: StoreFile, T: StoreFile>(
    from: &F,
    to: &T,
    look: &dyn Fn() -> io::Result<()>,
) -> io::Result<u64> {
    let len = from.len()?;
    let memory = Memory::new(CHUNK_BYTES as u64);
    let chunk = CHUNK_BYTES.min(len as usize);
    let (mut want, mut have) = (memory.take_beyond(chunk), memory.take_beyond(chunk));
    let (mut at, mut written, mut lost) = (0, 0, 0);
    while at < len {
        let part = chunk.min((len - at) as usize);
        let (want, have) = (&mut want[..part], &mut have[..part]);
        let unread = read_units(from, at, want);
        if unread.len() == want.len().div_ceil(ALIGN) {
            look()?;
        }
        // A chunk that cannot be read is written completely.
        let all = to.read_at(at, have).is_err();
        if all || want != have {
            look()?;
            // Write only the units that differ.
            for (index, unit) in want.chunks(ALIGN).enumerate() {
                let place = index * ALIGN;
                let differs = all || have[place..place + unit.len()] != *unit;
                if differs && !unread.contains(&index) {
                    to.write_at(at + place as u64, &[unit])?;
                    written += unit.len() as u64;
                }
            }
        }
        lost += unread.len();
        at += part as u64;
    }
    if written > 0 {
        to.sync()?;
    }
    if lost > 0 {
        tracing::error!(
            "{lost} pieces of {ALIGN} bytes could not be read where everything should be; they are \
             left as they are in the other copy, and whoever needs them sees by their checksums"
        );
    }
    Ok(written)
}

/// Reads a chunk of a file, unit by unit if it cannot be read as a whole. Returns the units that
/// could not be read.
fn read_units<F: StoreFile>(file: &F, at: u64, into: &mut [u8]) -> Vec<usize> {
    if file.read_at(at, into).is_ok() {
        return Vec::new();
    }
    // Direct I/O needs page-aligned memory; every unit is page-aligned.
    let units = into.chunks_mut(ALIGN).enumerate();
    let unread = units.filter_map(|(index, unit)| {
        let place = at + (index * ALIGN) as u64;
        file.read_at(place, unit).err().map(|_| index)
    });
    unread.collect()
}

/// Makes a copy of a file atomically, under the same name.
fn fresh<D: SegmentStore>(
    from: &D::File,
    to: &D,
    name: &str,
    look: &dyn Fn() -> io::Result<()>,
) -> io::Result<D::File> {
    let new = format!("{name}.new");
    let file = to.create(&new, from.len()?)?;
    contents(from, &file, look)?;
    file.sync()?;
    to.rename(&new, name)?;
    to.sync_names()?;
    drop(file);
    to.open(name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Makes all files of a directory equal to those of another one, except segments with number
/// `segments` or above. Returns the number of bytes written.
fn all<D: SegmentStore>(from: &D, to: &D, segments: usize, tell: &mut Tell<'_>) -> io::Result<u64> {
    let end = segment_name(segments);
    let shared = |names: Vec<String>| -> BTreeSet<String> {
        let shared = names.into_iter().filter(|name| is_shared(name));
        shared.filter(|name| name == superblock::FILE || *name < end).collect()
    };
    let (wanted, there) = (shared(from.needed()?), shared(to.needed()?));
    let (mut written, mut compared, mut logged) = (0, 0, 0);
    let lengths = wanted.iter().map(|name| from.open(name)?.map_or(Ok(0), |file| file.len()));
    let total = lengths.sum::<io::Result<u64>>()?;
    let look = || look_alive(from);
    for name in &wanted {
        let Some(source) = from.open(name)? else { continue };
        let len = source.len()?;
        match to.open(name)? {
            Some(target) if target.len()? == len => written += contents(&source, &target, &look)?,
            _ => {
                fresh(&source, to, name, &look)?;
                written += len;
            }
        }
        compared += len;
        tell(compared, total);
        if compared - logged >= LOG_BYTES {
            logged = compared;
            let (title, done, whole) = (to.title(), compared >> 30, total >> 30);
            tracing::info!("{title}: {done} of {whole} GiB are equal");
        }
    }
    for name in there.difference(&wanted) {
        to.remove(name)?;
    }
    to.sync_names()?;
    Ok(written)
}

impl<D: SegmentStore> Mirror<D> {
    /// Copies a file that is missing or shorter in one copy. The power was cut while it was made,
    /// or a user has removed it.
    pub(super) fn complete(&self, name: &str, files: &mut [Option<D::File>; 2]) -> io::Result<()> {
        debug_assert_ne!(name, label::FILE, "each copy has its own");
        let shared = &self.0;
        if !shared.writes || shared.good_ones().count() < 2 {
            return Ok(());
        }
        let mut lens = [None, None];
        for (number, file) in files.iter().enumerate() {
            match file.as_ref().map(StoreFile::len).transpose() {
                Ok(len) => lens[number] = len,
                Err(error) => return shared.mark_failed(number, &error),
            }
        }
        let [first, second] = lens;
        if first == second {
            return Ok(());
        }
        let (from, to) = if first > second { (0, 1) } else { (1, 0) };
        let [Some(owner), Some(target)] = [from, to].map(|at| shared.sides[at].directory.as_ref())
        else {
            return Ok(());
        };
        let Some(source) = &files[from] else { return Ok(()) };
        let title = &shared.sides[to].title;
        match fresh(source, target, name, &|| look_alive(owner)) {
            Ok(file) => {
                tracing::warn!("{title}/{name}: it was missing or cut, and is made again");
                shared.repaired(to);
                files[to] = Some(file);
                Ok(())
            }
            Err(error) => shared.mark_failed(to, &error),
        }
    }
}

impl<D: SegmentStore> Mirror<D> {
    /// Resyncs the copy `number` from the other one, which holds all data. If it cannot be written,
    /// the pool continues with the other one alone.
    pub(super) fn resync<V: VerifyPool>(
        &self,
        number: usize,
        verifier: &V,
        tell: &mut Tell<'_>,
    ) -> Result<(), V::Error> {
        let shared = &self.0;
        let from = 1 - number;
        let (Some(source), Some(target)) =
            (&shared.sides[from].directory, &shared.sides[number].directory)
        else {
            return Ok(());
        };
        let (title, rest) = (&shared.sides[number].title, &shared.sides[from].title);
        // Without a valid superblock, the source has lost its data.
        let newest = newest(source, rest)?;
        let division = Layout { align: newest.align, segment_bytes: newest.segment_bytes };
        source.divide(division, false)?;
        let alone = std::array::from_fn(|at| at == from);
        tracing::warn!("{title}: this copy is stale; resyncing it from `{rest}`");
        let divided = target.divide(division, false);
        let segments = source.segments_max().min(target.segments_max());
        let is_shorter = segments < source.segments_max();
        let mut ready = divided.map(drop).map_err(V::Error::from);
        if ready.is_ok() && (is_shorter || has_pool(target)?) {
            let repaired = self.mend_from(number, segments, verifier);
            if is_shorter {
                // There may be data beyond the end of the shorter copy.
                ready = repaired;
            } else {
                repaired?;
            }
        }
        let made = (|| {
            ready?;
            // From here on the stale copy cannot be used without the other one.
            shared
                .note(number, &shared.state(), alone)
                .map_err(failed(&shared.sides[number].path))?;
            let doing = format!("cannot make `{title}` equal to `{rest}`");
            let written = all(source, target, segments, tell).map_err(StoreError::io(doing))?;
            Ok::<_, V::Error>(written)
        })();
        let written = match made {
            Ok(written) => written,
            Err(error) => {
                tracing::error!("{title}: {error}: the pool goes on with `{rest}` alone");
                shared.state().why[number] = Some(error.to_string());
                // Whatever its label says by now, it does not hold all data.
                return Ok(self.note_alone(from)?);
            }
        };
        let mut state = shared.state();
        state.generation = state.generation.saturating_add(1);
        drop(state);
        // First the label of the copy that holds all data: if only that is written, the other copy
        // counts as stale again.
        self.note_for(from, [true, true])?;
        // The lock is free again before the result is examined: `note_alone` takes it.
        let noted = shared.note(number, &shared.state(), [true, true]);
        if let Err(error) = noted {
            tracing::error!("{title}: {error}: the pool goes on with `{rest}` alone");
            shared.state().why[number] = Some(error.to_string());
            return Ok(self.note_alone(from)?);
        }
        shared.good.update(|_| [true, true]);
        shared.state().why[number] = None;
        tracing::warn!("{title}: it is equal now; {written} bytes were written");
        Ok(())
    }

    /// Before the copy `number` is overwritten: reads everything from the good copy, and repairs
    /// damaged blocks there from the stale one. Blocks that have rotted since both were equal may
    /// still be intact in the stale copy. Each block or page is verified by its checksum. The pool
    /// must be within the first `segments` segments.
    ///
    /// # Errors
    /// If the pool on the good copy cannot be opened. The stale copy is unchanged then.
    fn mend_from<V: VerifyPool>(
        &self,
        number: usize,
        segments: usize,
        verifier: &V,
    ) -> Result<(), V::Error> {
        let Shared { sides, .. } = &*self.0;
        let (title, rest) = (&sides[number].title, &sides[1 - number].title);
        let State { set, generation, .. } = *self.0.state();
        let state = State { set, generation, why: [None, None], repaired: [0, 0] };
        let alone = Mirror(Arc::new(Shared {
            sides: Arc::clone(sides),
            good: Arc::new(RcuCell::new(std::array::from_fn(|at| at != number))),
            spare: Some(number),
            aside: OnceLock::new(),
            state: Mutex::new(state),
            writes: true,
            memory: Memory::new(4 << 20),
        }));
        let source = sides[1 - number].directory.as_ref();
        let mut gone = Ok(());
        let found = verifier.verify(Copies::Two(alone), segments, &mut || {
            gone = source.map_or(Ok(()), look_alive);
            gone.is_ok()
        });
        gone.map_err(StoreError::io(format!("cannot read `{rest}` any more")))?;
        let found = found.inspect_err(|error| {
            tracing::error!("{rest}: {error}; nothing is done to the copy at `{title}`");
        })?;
        self.0.state().repaired[1 - number] += found.repaired;
        if found.damaged > 0 {
            let damaged = found.damaged;
            tracing::error!("{rest}: {damaged} blocks or pages are damaged, and in `{title}` too");
        }
        Ok(())
    }

    fn note_alone(&self, number: usize) -> Result<(), StoreError> {
        let mut state = self.0.state();
        state.generation = state.generation.saturating_add(1);
        drop(state);
        self.note_for(number, std::array::from_fn(|at| at == number))
    }

    fn note_for(&self, number: usize, good: [bool; 2]) -> Result<(), StoreError> {
        let path = &self.0.sides[number].path;
        self.0.note(number, &self.0.state(), good).map_err(failed(path))
    }
}
