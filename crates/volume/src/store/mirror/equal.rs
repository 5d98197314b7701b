//! Making one copy equal to the other: a file that is missing in it, or all of it, where it was
//! left behind. What is the same already is not written.

use std::collections::BTreeSet;
use std::io;

use super::Mirror;
use crate::buffer::{ALIGN, Memory};
use crate::format::label;
use crate::store::{Directory, StoreFile};

/// What is compared and written at once, in bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// After so many bytes a line is logged.
const TELL_BYTES: u64 = 10 << 30;

/// Whether a name is of the pool, and not of one copy alone.
fn is_shared(name: &str) -> bool {
    name == crate::format::superblock::FILE
        || name.starts_with("segment-") && !name.ends_with(".new")
}

/// Makes a file have what another one has, which is of the same length; says how many bytes were
/// written.
fn contents<F: StoreFile, T: StoreFile>(from: &F, to: &T) -> io::Result<u64> {
    let len = from.len()?;
    let memory = Memory::new(CHUNK_BYTES as u64);
    let chunk = CHUNK_BYTES.min(len as usize);
    let (mut want, mut have) = (memory.take_beyond(chunk), memory.take_beyond(chunk));
    let (mut at, mut written, mut lost) = (0, 0, 0);
    while at < len {
        let part = chunk.min((len - at) as usize);
        let (want, have) = (&mut want[..part], &mut have[..part]);
        let unread = read_units(from, at, want);
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
fn fresh<D: Directory>(from: &D::File, to: &D, name: &str) -> io::Result<D::File> {
    let new = format!("{name}.new");
    let file = to.create(&new, from.len()?)?;
    contents(from, &file)?;
    file.sync()?;
    to.rename(&new, name)?;
    to.sync_names()?;
    Ok(file)
}

/// Makes all files of a directory have what those of another one have. `tell` is told how many
/// bytes were compared.
pub(super) fn all<D: Directory>(from: &D, to: &D, tell: &mut dyn FnMut(u64)) -> io::Result<u64> {
    let shared = |names: Vec<String>| -> BTreeSet<String> {
        names.into_iter().filter(|name| is_shared(name)).collect()
    };
    let (wanted, there) = (shared(from.names()?), shared(to.names()?));
    let (mut written, mut compared, mut told) = (0, 0, 0);
    for name in &wanted {
        let Some(source) = from.open(name)? else { continue };
        let len = source.len()?;
        match to.open(name)? {
            Some(target) if target.len()? == len => written += contents(&source, &target)?,
            _ => {
                fresh(&source, to, name)?;
                written += len;
            }
        }
        compared += len;
        if compared - told >= TELL_BYTES {
            told = compared;
            tell(compared);
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
        let len =
            |file: &Option<D::File>| file.as_ref().map_or(Ok(None), |file| file.len().map(Some));
        let (first, second) = (len(&files[0])?, len(&files[1])?);
        if first == second {
            return Ok(());
        }
        let (from, to) = if first > second { (0, 1) } else { (1, 0) };
        let (Some(source), Some(target)) = (&files[from], &shared.sides[to].directory) else {
            return Ok(());
        };
        let title = &shared.sides[to].title;
        match fresh(source, target, name) {
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
