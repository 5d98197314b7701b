//! Random operations on files, compared with a model of plain bytes: what is written, where, and
//! what is refused. A failure prints its seed.
#![allow(clippy::unwrap_used)] // A test that cannot continue panics.

mod common;

use std::sync::Arc;

use blockyard_core::Disk;
use blockyard_null::NullConfig;
use blockyard_zonefs::{AccessMode, FileError, FileKind, IoHandle, ZoneFile, ZoneFs};
use common::{CAPACITY, config, formatted, open, pattern};
use fastrand::Rng;

const BLOCK: u64 = 4096;
const STEPS: u32 = 600;
const SEEDS: u64 = 12;

/// The expected contents of a sequential file.
#[derive(Clone, Default)]
struct Model(Vec<u8>);

impl Model {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<usize, FileError> {
        if offset >= CAPACITY {
            return Err(FileError::NoRoom);
        }
        let len = data.len().min((CAPACITY - offset) as usize);
        if !offset.is_multiple_of(BLOCK) || !(len as u64).is_multiple_of(BLOCK) {
            return Err(FileError::Unaligned);
        }
        if offset != self.len() {
            return Err(FileError::NotAtWritePointer);
        }
        self.0.extend_from_slice(&data[..len]);
        Ok(len)
    }

    fn append(&mut self, data: &[u8]) -> Result<u64, FileError> {
        let at = self.len();
        if !(data.len() as u64).is_multiple_of(BLOCK) {
            return Err(FileError::Unaligned);
        }
        if at + data.len() as u64 > CAPACITY {
            return Err(FileError::NoRoom);
        }
        self.0.extend_from_slice(data);
        Ok(at)
    }

    fn truncate(&mut self, len: u64) -> Result<(), FileError> {
        match len {
            0 => self.0.clear(),
            // After a finish, the unwritten part reads as whatever the device has there.
            CAPACITY => self.0.resize(CAPACITY as usize, 0),
            _ => return Err(FileError::NotTruncatable),
        }
        Ok(())
    }
}

/// A random length or offset: usually whole blocks, usually small.
fn some(random: &mut Rng, blocks_max: u64) -> u64 {
    let odd = if random.u8(..10) == 0 { random.u64(1..BLOCK) } else { 0 };
    random.u64(..blocks_max) * BLOCK + odd
}

struct Run {
    random: Rng,
    fs: Arc<ZoneFs>,
    io: IoHandle,
    files: Vec<ZoneFile>,
    models: Vec<Model>,
    /// End of the bytes that a model knows: those after a finish are unknown.
    known: Vec<u64>,
}

impl Run {
    fn new(seed: u64, disk: &Arc<dyn Disk>) -> Run {
        let fs = open(disk, "");
        let files = (0..3).map(|n| fs.open_file(FileKind::Sequential, n, AccessMode::Write));
        let files = files.map(|file| file.unwrap().unwrap()).collect();
        let (io, random) = (fs.io_handle().unwrap(), Rng::with_seed(seed));
        Run { random, fs, io, files, models: vec![Model::default(); 3], known: vec![0; 3] }
    }

    fn step(&mut self) {
        let which = self.random.usize(..self.files.len());
        let (file, model) = (&self.files[which], &mut self.models[which]);
        let random = &mut self.random;
        match random.u8(..20) {
            0..8 => {
                let data = pattern(random.u64(..), some(random, 40) as usize);
                let wanted = model.append(&data);
                assert_eq!(file.append(&mut self.io, &data), wanted);
            }
            8..13 => {
                let here = model.len();
                let offset = if random.bool() { here } else { some(random, 200) };
                let data = pattern(random.u64(..), some(random, 60) as usize);
                let wanted = model.write(offset, &data);
                assert_eq!(file.write(&mut self.io, offset, &data), wanted);
            }
            13 => {
                let lens = [0, 0, CAPACITY, model.len(), BLOCK, u64::MAX];
                let len = lens[random.usize(..lens.len())];
                let before = model.len();
                let wanted = model.truncate(len);
                assert_eq!(file.truncate(len), wanted);
                if wanted.is_ok() && len == CAPACITY && before < CAPACITY {
                    self.known[which] = before;
                } else if wanted.is_ok() && len == 0 {
                    self.known[which] = 0;
                }
            }
            _ => {
                let (offset, len) = (some(random, 200), some(random, 50) as usize);
                let mut back = vec![0; len];
                let end = model.len().min(offset + len as u64);
                let wanted = end.saturating_sub(offset) as usize;
                assert_eq!(file.read(&mut self.io, offset, &mut back), Ok(wanted));
                let finished = self.known[which];
                let sure = if finished > 0 { finished.min(end) } else { end };
                let sure = sure.saturating_sub(offset) as usize;
                let known = model.0.iter().skip(offset as usize).take(sure);
                assert!(back[..sure].iter().eq(known));
            }
        }
        assert_eq!(file.size(), model.len());
        assert!(!self.fs.is_read_only());
    }
}

#[test]
fn files_match_a_plain_model() {
    for seed in 0..SEEDS {
        // One device with native append, and one on which appends to a file are serialized.
        let append = if seed % 2 == 0 { u32::MAX } else { 0 };
        let config = NullConfig { zone_append_max_sectors: append, ..config() };
        let disk = formatted("d", config);
        println!("seed {seed}");
        let mut run = Run::new(seed, &disk);
        (0..STEPS).for_each(|_| run.step());
        // Another mount finds the same contents.
        let sizes: Vec<u64> = run.models.iter().map(Model::len).collect();
        drop(run);
        let again = open(&disk, "ro");
        let found = (0..3).map(|n| {
            let file = again.open_file(FileKind::Sequential, n, AccessMode::Read).unwrap().unwrap();
            file.size()
        });
        assert_eq!(found.collect::<Vec<_>>(), sizes, "seed {seed}");
    }
}
