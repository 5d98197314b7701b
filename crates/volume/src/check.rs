//! Verifies a pool that nobody has open, and changes nothing: superblock, catalogue, every page of
//! the maps, the log behind the checkpoint, and the bytes of every block.

use std::collections::HashSet;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use crate::buffer::Memory;
use crate::bytes::crc;
use crate::codec;
use crate::error::{FormatError, VolumeError};
use crate::format::entry::{Entry, STORED_MAX};
use crate::format::{BLOCK_BYTES_MAX, FAN, NODE_BLOCKS};
use crate::map::Leaf;
use crate::pool::Options;
use crate::recovery;
use crate::store::{Directory, RealDirectory};

/// Damage that is told one by one.
const TOLD_MAX: usize = 1000;

/// A block that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// One of the volumes or snapshots that have it.
    pub volume: String,
    /// Its number there.
    pub block: u64,
    /// Where it is, in bytes from the pool's beginning.
    pub address: u64,
    /// What is wrong with it.
    pub what: String,
}

/// What was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Volumes and snapshots.
    pub volumes: u64,
    /// Blocks that are somewhere; what is shared counts once.
    pub blocks: u64,
    /// Their bytes as they are stored.
    pub stored_bytes: u64,
    /// Groups in the log behind the checkpoint.
    pub groups: u64,
    /// How many blocks are damaged.
    pub damaged: u64,
    /// The first of them.
    pub damage: Vec<Damage>,
}

/// Verifies the pool in a directory. `progress` is told the bytes that were verified.
///
/// # Errors
/// If there is no pool, somebody has it open, or it is damaged so that it cannot be opened.
pub fn check(path: &Path, progress: &mut dyn FnMut(u64)) -> Result<Report, VolumeError> {
    if !crate::device::is_pool(path) {
        return Err(VolumeError::Invalid {
            field: "path",
            value: path.display().to_string(),
            wanted: "the directory of a pool".to_owned(),
        });
    }
    check_in(RealDirectory::take(path)?, progress)
}

/// The same in any directory.
///
/// # Errors
/// As [`check`].
pub fn check_in<D: Directory>(
    directory: D,
    progress: &mut dyn FnMut(u64),
) -> Result<Report, VolumeError> {
    let (volumes, groups, segments) = recovery::look(directory, &Options::default())?;
    let memory = Memory::new(1 << 20);
    let mut stored = memory.take_beyond(STORED_MAX as usize);
    let mut plain = memory.take_beyond(BLOCK_BYTES_MAX as usize);
    let files = segments.files();
    let mut report = Report { volumes: volumes.by_id.len() as u64, groups, ..Report::default() };
    let (mut leaves, mut entries) = (HashSet::new(), HashSet::<Entry>::new());
    for live in volumes.by_id.values() {
        let size = live.traits.block_bytes as usize;
        for (number, node) in (0..).zip(live.map.freeze()) {
            let leaves_of = node.iter().flat_map(|node| node.leaves().iter().enumerate());
            for (at, leaf) in leaves_of.filter_map(|(at, leaf)| Some((at, leaf.as_ref()?))) {
                if !leaves.insert(ptr::from_ref::<Leaf>(Arc::as_ref(leaf))) {
                    continue;
                }
                let first = number * NODE_BLOCKS + (at * FAN) as u64;
                let page = match segments.page(leaf) {
                    Ok(page) => page,
                    Err(error) => {
                        let address = leaf.home().map_or(0, |home| home.address());
                        report.damaged += 1;
                        if report.damage.len() < TOLD_MAX {
                            let (volume, what) = (live.traits.name.clone(), error.to_string());
                            report.damage.push(Damage { volume, block: first, address, what });
                        }
                        continue;
                    }
                };
                for (block, entry) in (first..).zip(page.entries()) {
                    if entry.is_hole() || !entries.insert(*entry) {
                        continue;
                    }
                    let bytes = &mut stored[..entry.stored_bytes() as usize];
                    let read = segments.read(&files, entry.address(), bytes);
                    let found = crc(bytes);
                    let what = match read {
                        Err(error) => Some(error.to_string()),
                        Ok(()) if found != entry.crc() => {
                            let (what, want) = ("block", entry.crc());
                            Some(FormatError::Checksum { what, found, want }.to_string())
                        }
                        Ok(()) if !codec::decode(entry.codec(), bytes, &mut plain[..size]) => {
                            Some("it cannot be decompressed".to_owned())
                        }
                        Ok(()) => None,
                    };
                    report.blocks += 1;
                    report.stored_bytes += u64::from(entry.stored_bytes());
                    if let Some(what) = what {
                        let (volume, address) = (live.traits.name.clone(), entry.address());
                        report.damaged += 1;
                        if report.damage.len() < TOLD_MAX {
                            report.damage.push(Damage { volume, block, address, what });
                        }
                    }
                }
                progress(report.stored_bytes);
            }
        }
    }
    Ok(report)
}
