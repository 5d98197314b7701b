//! Making one copy equal to the other: a file that is missing in it, or all of it, where it was
//! left behind. What is the same already is not written.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use blockyard_sync::published::Published;

use super::assemble::{failed, has_pool, newest};
use super::{Mirror, Shared, State};
use crate::buffer::{ALIGN, Memory};
use crate::check;
use crate::error::VolumeError;
use crate::format::{label, superblock};
use crate::segments::name as segment_name;
use crate::store::{Copies, Directory, Division, StoreFile};

/// What is compared and written at once, in bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// After so many bytes a line is logged.
const LOG_BYTES: u64 = 10 << 30;

/// Whoever is told how many bytes of the copies were compared, and of how many.
pub(super) type Tell<'t> = dyn FnMut(u64, u64) + 't;

/// Whether a name is of the pool, and not of one copy alone.
fn is_shared(name: &str) -> bool {
    name == superblock::FILE || name.starts_with("segment-") && !name.ends_with(".new")
}

/// Fails if nothing of a directory can be read any more: its disk is gone. The disk of one that has
/// bad sectors somewhere else still reads the superblock.
fn look_alive<D: Directory>(directory: &D) -> io::Result<()> {
    let file = directory.open(superblock::FILE)?.ok_or(io::ErrorKind::NotFound)?;
    let mut slot = Memory::new(ALIGN as u64).take_beyond(superblock::SLOT_BYTES);
    file.read_at(0, &mut slot)
}

/// Makes a file have what another one has, which is of the same length; says how many bytes were
/// written. Where a whole piece cannot be read, `look` says whether anything can.
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
        // What cannot be read there is written, whatever it is.
        let all = to.read_at(at, have).is_err();
        if all || want != have {
            // By the unit: what differs may be little.
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

/// Reads a piece of a file, unit by unit if it cannot be read as a whole; answers which units could
/// not be.
fn read_units<F: StoreFile>(file: &F, at: u64, into: &mut [u8]) -> Vec<usize> {
    if file.read_at(at, into).is_ok() {
        return Vec::new();
    }
    // Direct I/O wants memory that begins at a page, which every unit does.
    let units = into.chunks_mut(ALIGN).enumerate();
    let unread = units.filter_map(|(index, unit)| {
        let place = at + (index * ALIGN) as u64;
        file.read_at(place, unit).err().map(|_| index)
    });
    unread.collect()
}

/// Makes a file of a name that has what another one has, whole or not at all.
fn fresh<D: Directory>(
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

/// Makes all files of a directory have what those of another one have, but for segments from this
/// number on.
fn all<D: Directory>(from: &D, to: &D, segments: usize, tell: &mut Tell<'_>) -> io::Result<u64> {
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

impl<D: Directory> Mirror<D> {
    /// Makes a file that one copy has and the other one has not, or shorter: it was being made when
    /// the power was cut, or somebody has removed it.
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
                Err(error) => return shared.give_up(number, &error),
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
                shared.mended(to);
                files[to] = Some(file);
                Ok(())
            }
            Err(error) => shared.give_up(to, &error),
        }
    }
}

impl<D: Directory> Mirror<D> {
    /// Makes the copy of a number equal to the other one, which has everything. If it cannot be
    /// written, the other one goes on alone.
    pub(super) fn make_equal(&self, number: usize, tell: &mut Tell<'_>) -> Result<(), VolumeError> {
        let shared = &self.0;
        let from = 1 - number;
        let (Some(source), Some(target)) =
            (&shared.sides[from].directory, &shared.sides[number].directory)
        else {
            return Ok(());
        };
        let (title, rest) = (&shared.sides[number].title, &shared.sides[from].title);
        // Nothing is taken from one that has lost its own.
        let newest = newest(source, rest)?;
        let division = Division { align: newest.align, segment_bytes: newest.segment_bytes };
        source.divide(division, false)?;
        let alone = std::array::from_fn(|at| at == from);
        tracing::warn!("{title}: this copy was left behind; it is made equal to `{rest}`");
        let divided = target.divide(division, false);
        let segments = source.segments_max().min(target.segments_max());
        let is_shorter = segments < source.segments_max();
        let mut ready = divided.map(drop);
        if ready.is_ok() && (is_shorter || has_pool(target)?) {
            let mended = self.mend_from(number, segments);
            if is_shorter {
                // There may be something behind its end.
                ready = mended;
            } else {
                mended?;
            }
        }
        let made = (|| {
            ready?;
            // From here on it is of no use without the other one.
            shared
                .note(number, &shared.state(), alone)
                .map_err(failed(&shared.sides[number].path))?;
            let doing = format!("cannot make `{title}` equal to `{rest}`");
            all(source, target, segments, tell).map_err(VolumeError::io(doing))
        })();
        let written = match made {
            Ok(written) => written,
            Err(error) => {
                tracing::error!("{title}: {error}: the pool goes on with `{rest}` alone");
                shared.state().why[number] = Some(error.to_string());
                // Whatever it says by now, it has not everything.
                return self.note_alone(from);
            }
        };
        let mut state = shared.state();
        state.generation = state.generation.saturating_add(1);
        drop(state);
        // The one that has everything first: between the two the other one is behind once more.
        self.note_for(from, [true, true])?;
        if let Err(error) = shared.note(number, &shared.state(), [true, true]) {
            tracing::error!("{title}: {error}: the pool goes on with `{rest}` alone");
            shared.state().why[number] = Some(error.to_string());
            return self.note_alone(from);
        }
        shared.good.update(|_| [true, true]);
        shared.state().why[number] = None;
        tracing::warn!("{title}: it is equal now; {written} bytes were written");
        Ok(())
    }

    /// Reads everything out of the copy that has it, before it is written over the one of this
    /// number, and puts right from there what is damaged: what has rotted in one since both had it
    /// may be whole in the other. A block or page counts by its checksum, whatever else the copy
    /// has that was left behind. What has everything is to be in so many segments.
    ///
    /// # Errors
    /// If what should have everything cannot be opened. Nothing was done to the other one then.
    fn mend_from(&self, number: usize, segments: usize) -> Result<(), VolumeError> {
        let Shared { sides, .. } = &*self.0;
        let (title, rest) = (&sides[number].title, &sides[1 - number].title);
        let State { set, generation, .. } = *self.0.state();
        let state = State { set, generation, why: [None, None], mended: [0, 0] };
        let alone = Mirror(Arc::new(Shared {
            sides: Arc::clone(sides),
            good: Arc::new(Published::new(std::array::from_fn(|at| at != number))),
            spare: Some(number),
            aside: OnceLock::new(),
            state: Mutex::new(state),
            writes: true,
            memory: Memory::new(4 << 20),
        }));
        let source = sides[1 - number].directory.as_ref();
        let mut gone = Ok(());
        let found = check::verify(Copies::Two(alone), true, segments, &mut |_| {
            gone = source.map_or(Ok(()), look_alive);
            gone.is_ok()
        });
        gone.map_err(VolumeError::io(format!("cannot read `{rest}` any more")))?;
        let found = found.inspect_err(|error| {
            tracing::error!("{rest}: {error}; nothing is done to the copy at `{title}`");
        })?;
        self.0.state().mended[1 - number] += found.mended;
        if found.damaged > 0 {
            let damaged = found.damaged;
            tracing::error!("{rest}: {damaged} blocks or pages are damaged, and in `{title}` too");
        }
        Ok(())
    }

    fn note_alone(&self, number: usize) -> Result<(), VolumeError> {
        let mut state = self.0.state();
        state.generation = state.generation.saturating_add(1);
        drop(state);
        self.note_for(number, std::array::from_fn(|at| at == number))
    }

    fn note_for(&self, number: usize, good: [bool; 2]) -> Result<(), VolumeError> {
        let path = &self.0.sides[number].path;
        self.0.note(number, &self.0.state(), good).map_err(failed(path))
    }
}
