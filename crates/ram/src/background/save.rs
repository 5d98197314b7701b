//! Save and load: writes the contents of a device to a snapshot file, and reads them back.
//!
//! A save writes to a temporary file in the target's directory, syncs it, and renames it. After a
//! crash the target is either the complete old file or the complete new one. Blocks are stored as
//! they are compressed.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use blockyard_core::Status;
use blockyard_os::{AtomicFile, Replace};
use blockyard_sync::block_table::{Kind, Word};
use blockyard_sync::dedup_hints::DedupHints;

use crate::blocks::{Blocks, Workspace};
use crate::codec::{self, Algo, Codec, CodecConfig, Decoder};
use crate::config::RamConfig;
use crate::dedup;
use crate::error::{RamError, SnapshotError};
use crate::form::word_of;
use crate::pool::NoSpace;
use crate::snapshot::{BlockRecord, Header, MAGIC, Reader, Stored, Writer};
use crate::store::New;

/// The first bytes of a zstd dictionary.
const DICTIONARY_MAGIC: [u8; 4] = 0xec30_a437_u32.to_le_bytes();

/// Buffer size for reading and writing a snapshot, in bytes.
const BUFFER_BYTES: usize = 1 << 20;

/// Maximum size of the training sample in bytes: many times the size of a dictionary.
const SAMPLE_BYTES_MAX: usize = 8 << 20;

/// The result of a save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Number of blocks in the file.
    pub blocks: u64,
    /// Length of the file in bytes.
    pub bytes: u64,
}

/// The result of training a dictionary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trained {
    /// Number of blocks in the training sample.
    pub samples: u64,
    /// Length of the dictionary in bytes.
    pub bytes: u64,
}

/// Why a save failed.
#[derive(Debug)]
pub enum SaveError {
    /// The output stream cannot be written.
    Io(io::Error),
    /// A block cannot be read.
    Ram(RamError),
}

impl std::fmt::Display for SaveError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SaveError::Io(error) => error.fmt(f),
            SaveError::Ram(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SaveError {}

fn file_failed(path: &Path, source: io::Error) -> RamError {
    let path = path.display().to_string();
    RamError::File { field: "file", path, what: "cannot be written", source }
}

impl From<io::Error> for SaveError {
    fn from(error: io::Error) -> SaveError {
        SaveError::Io(error)
    }
}

impl Blocks {
    /// Saves the contents to a file. Each block is saved as of the moment when the save reaches it.
    pub(crate) fn save(
        &self,
        config: &RamConfig,
        path: &Path,
        replace: Replace,
    ) -> Result<Saved, RamError> {
        let failed = |source| file_failed(path, source);
        let atomic = AtomicFile::create(path, replace, &MAGIC).map_err(failed)?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, atomic.file());
        let blocks = self.save_to(config, file).map_err(|error| match error {
            SaveError::Io(source) => failed(source),
            SaveError::Ram(error) => error,
        })?;
        let bytes = atomic.file().metadata().map_err(failed)?.len();
        atomic.commit().map_err(failed)?;
        Ok(Saved { blocks, bytes })
    }

    /// Saves the contents to a stream and returns the number of blocks written.
    pub(crate) fn save_to(&self, config: &RamConfig, out: impl Write) -> Result<u64, SaveError> {
        let mut workspace = self.workspace().map_err(SaveError::Ram)?;
        let codecs = std::iter::once(&config.codec).chain(&config.recompress).cloned().collect();
        let header = Header { size: config.size, unit: config.unit, codecs };
        let mut writer = Writer::new(out, &header)?;
        let mut blocks = 0;
        let mut spare = vec![0; self.form.stored_bytes_max()];
        for block in 0..self.store.blocks() {
            if self.store.word(block).kind() == Kind::Nothing {
                continue;
            }
            let Workspace { access, unpacker, plain, .. } = &mut workspace;
            blocks += access.peek(block, |word, stored| {
                let damaged = |status| SaveError::Ram(RamError::Unreadable { block, status });
                let record = self.record(word, stored, &mut spare).map_err(damaged)?;
                let Some(record) = record else { return Ok::<u64, SaveError>(0) };
                match record {
                    Kept::Same(bytes) => {
                        writer.record(BlockRecord {
                            block,
                            stored: Stored::Same,
                            bytes: &bytes,
                        })?;
                    }
                    Kept::Bytes(stored, bytes) => {
                        if let Stored::Packed(_) = stored {
                            // One undecodable block would make a load refuse the whole file.
                            self.form.decode(unpacker, word, bytes, plain).map_err(damaged)?;
                        }
                        writer.record(BlockRecord { block, stored, bytes })?;
                    }
                }
                Ok(1)
            })?;
        }
        writer.finish()?.flush()?;
        Ok(blocks)
    }

    /// The snapshot record for a block.
    fn record<'b>(
        &self,
        word: Word,
        stored: &'b [u8],
        spare: &'b mut [u8],
    ) -> Result<Option<Kept<'b>>, Status> {
        let stored = match word.kind() {
            Kind::Nothing => return Ok(None),
            Kind::Same => {
                let half = word.value().to_ne_bytes();
                let mut bytes = [0; 8];
                bytes[..4].copy_from_slice(&half);
                bytes[4..].copy_from_slice(&half);
                return Ok(Some(Kept::Same(bytes)));
            }
            Kind::Object => stored,
            Kind::Backing => self.form.fetch(word, spare)?,
        };
        let bytes = self.form.checked(stored)?;
        let kind = match (word.is_huge(), bytes.len() == self.form.unit) {
            (true, true) => Stored::Raw,
            (true, false) => Stored::Same,
            (false, _) => Stored::Packed(word.codec()),
        };
        Ok(Some(Kept::Bytes(kind, bytes)))
    }

    /// Trains a zstd dictionary on blocks of the device and writes it to a file.
    pub(crate) fn train(&self, path: &Path, replace: Replace) -> Result<Trained, RamError> {
        let (dictionary, samples) = self.dictionary()?;
        let atomic = AtomicFile::create(path, replace, &DICTIONARY_MAGIC);
        let written = atomic.and_then(|atomic| {
            atomic.file().write_all(&dictionary)?;
            atomic.commit()
        });
        written.map_err(|source| file_failed(path, source))?;
        Ok(Trained { samples, bytes: dictionary.len() as u64 })
    }

    /// Trains a zstd dictionary on evenly spaced blocks. Returns it with the number of blocks used.
    pub(crate) fn dictionary(&self) -> Result<(Vec<u8>, u64), RamError> {
        let stored = |block: &u64| self.store.word(*block).kind() == Kind::Object;
        let count = (0..self.store.blocks()).filter(stored).count();
        let most = SAMPLE_BYTES_MAX / self.form.unit;
        let step = count.div_ceil(most).max(1);
        let mut workspace = self.workspace()?;
        let (mut samples, mut lengths) = (Vec::new(), Vec::new());
        for block in (0..self.store.blocks()).filter(stored).step_by(step) {
            let Workspace { access, unpacker, plain, tally, .. } = &mut workspace;
            // `peek` does not count as an access by a client, which would reset the block's idle
            // age.
            let read = access
                .peek(block, |word, stored| self.form.unpack_here(unpacker, word, stored, plain));
            // Leave an unreadable block out of the sample; a client that reads it gets the error.
            if read.is_ok() {
                samples.extend_from_slice(plain);
                lengths.push(plain.len());
            }
            unpacker.settle(tally);
        }
        Ok((codec::train(&samples, &lengths)?, lengths.len() as u64))
    }

    /// Flips one bit of a block's stored bytes: an injected fault that a checksum detects.
    pub(crate) fn flip(&self, block: u64) -> Result<bool, RamError> {
        let mut workspace = self.workspace()?;
        let flipped = workspace.access.remake(block, |word, stored, maker| {
            if word.kind() != Kind::Object {
                return Ok(None);
            }
            let mut changed = stored.to_vec();
            changed[stored.len() / 2] ^= 1;
            maker.make(New::Bytes(&changed, word)).map(Some)
        });
        // The object keeps its length, so the counters do not change.
        let flipped = flipped.map_err(|NoSpace| RamError::no_memory("flip", block))?;
        Ok(flipped.is_some())
    }

    /// Fills never-written blocks with those of a snapshot.
    pub(crate) fn load(&self, config: &RamConfig, path: &Path) -> Result<(), RamError> {
        let name = || path.display().to_string();
        let unreadable = |source| RamError::Snapshot { path: name(), source };
        let refused =
            |what| move |source| RamError::File { field: "load", path: name(), what, source };
        // Without O_NONBLOCK, opening a FIFO waits for a process that writes to it.
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = opened.map_err(refused("cannot be opened"))?;
        if !file.metadata().map_err(refused("cannot be read"))?.is_file() {
            return Err(RamError::invalid("load", name(), "a regular file"));
        }
        let file = BufReader::with_capacity(BUFFER_BYTES, file);
        let mut reader = Reader::new(file).map_err(unreadable)?;
        let header = reader.header().clone();
        if (header.size, header.unit) != (config.size, config.unit) {
            return Err(RamError::invalid(
                "load",
                name(),
                format!("size={}&unit={}, which is what it was saved of", header.size, header.unit),
            ));
        }
        let mut theirs = Vec::new();
        for codec in &header.codecs {
            theirs.push((Codec::new(codec, "load")?, self.reads(config, codec)));
        }
        let zstd = header.codecs.iter().any(|codec| codec.algo == Algo::Zstd);
        let mut decoder = Decoder::new(self.form.unit, zstd)?;
        let mut workspace = self.workspace()?;
        while let Some(record) = reader.next_record().map_err(unreadable)? {
            let BlockRecord { block, stored, bytes } = record;
            let done = match stored {
                Stored::Packed(codec) => {
                    let (codec, own) = &theirs[usize::from(codec)];
                    // Verify now: otherwise a damaged block would be noticed only when a client
                    // reads it.
                    codec
                        .decompress_here(&mut decoder, bytes, &mut workspace.plain)
                        .map_err(|_| unreadable(SnapshotError::Undecodable { block }))?;
                    match own {
                        // This crate never stores a compressed block that is not shorter than a
                        // plain one. Store it plain: with a checksum, a word could not express its
                        // length.
                        Some(own) if bytes.len() + self.form.tail < self.form.unit => {
                            let hints = self.hints.as_ref();
                            let like = hints.map(|hints| (hints, dedup::key(&workspace.plain)));
                            self.put(&mut workspace, block, bytes, *own, like)
                        }
                        _ => self.write(&mut workspace, block),
                    }
                }
                Stored::Raw => {
                    workspace.plain.copy_from_slice(bytes);
                    self.write(&mut workspace, block)
                }
                Stored::Same => {
                    for word in workspace.plain.chunks_exact_mut(bytes.len()) {
                        word.copy_from_slice(bytes);
                    }
                    self.write(&mut workspace, block)
                }
            };
            if !done.is_ok() {
                return Err(no_room(config, name()));
            }
        }
        if config.compact > 0 {
            self.store.pool().gather(u64::MAX, || false);
        }
        Ok(())
    }

    /// The index of our codec that can decompress what codec `theirs` wrote.
    fn reads(&self, config: &RamConfig, theirs: &CodecConfig) -> Option<u8> {
        let is_lz4 = |algo| matches!(algo, Algo::Lz4 | Algo::Lz4hc);
        let mut ours = std::iter::once(&config.codec).chain(&config.recompress);
        let found = ours.position(|own| {
            is_lz4(own.algo) == is_lz4(theirs.algo) && own.dictionary == theirs.dictionary
        });
        found.map(|number| number as u8)
    }

    /// Stores compressed bytes, or shares an existing object that equals the block in
    /// `workspace.plain`.
    fn put(
        &self,
        workspace: &mut Workspace,
        block: u64,
        bytes: &[u8],
        codec: u8,
        like: Option<(&DedupHints, u64)>,
    ) -> Status {
        if like.is_some_and(|(hints, key)| self.share(hints, workspace, block, key)) {
            return Status::Ok;
        }
        let new = workspace.packer.adopt(&self.form, bytes, codec);
        match workspace.access.replace(block, new) {
            Ok(old) => {
                self.form.replaced(&workspace.tally, old, word_of(&new));
                if let Some((hints, key)) = like {
                    hints.note(key, block);
                }
                Status::Ok
            }
            Err(_) => Status::NoSpc,
        }
    }
}

/// The error for a snapshot that does not fit into memory.
fn no_room(config: &RamConfig, path: String) -> RamError {
    match config.mem_limit {
        0 => RamError::no_memory("load", path),
        limit => RamError::invalid("mem_limit", limit, "more: the snapshot does not fit"),
    }
}

/// What a snapshot stores for a block.
enum Kept<'b> {
    Same([u8; 8]),
    Bytes(Stored, &'b [u8]),
}
