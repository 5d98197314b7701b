//! Realistic data for compression: a third each of programs, of text, and of noise that compresses
//! by half.
//!
//! The kinds alternate every 16 KiB. Programs: pieces of files in `/usr/bin` from offsets drawn by
//! a fixed seed. Text: the text files below some directories that every system has, concatenated.
//! Noise: blocks of 4 KiB of which one half is random and the other zero, as fio makes them for
//! `buffer_compress_percentage=50`. So the data depend on the machine: they are equal for all
//! variants of a run and in the next run, and differ where other programs are installed.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use blockyard_core::Region;
use fastrand::Rng;

use crate::error::LabError;

/// The length of the corpus, in bytes.
pub const CORPUS_BYTES: usize = 16 << 20;
/// The length of a chunk of one kind.
pub const CHUNK_BYTES: usize = 16 << 10;
/// The block of which half is noise.
const BLOCK_BYTES: usize = 4096;
/// The directory of the programs.
const PROGRAMS: &str = "/usr/bin";
/// The directories of the text files, the most likely first.
const TEXTS: [&str; 6] =
    ["/usr/include", "/usr/share/doc", "/usr/share/perl", "/usr/lib/python3", "/usr/share", "/etc"];
/// The bounds of the search for text: the number of files, and the depth.
const FILES_MAX: usize = 4096;
const DEPTH_MAX: usize = 6;
/// The most bytes that are taken of a text file.
const TEXT_MAX: u64 = 256 << 10;
/// With less text than this the corpus would not be representative.
const TEXT_MIN: usize = 256 << 10;
const SEED: u64 = 0x10ca1;

/// The corpus in memory that channels can register; read once in a process.
///
/// # Errors
/// If there are too few programs or text files.
pub fn corpus() -> Result<&'static Arc<Region>, LabError> {
    static CORPUS: OnceLock<Arc<Region>> = OnceLock::new();
    if CORPUS.get().is_none() {
        let bytes = read(CORPUS_BYTES)?;
        // If two threads build it at once, the first one's is kept; they are equal.
        CORPUS.get_or_init(|| {
            let region = Region::alloc(CORPUS_BYTES);
            region.write(0, &bytes);
            region
        });
    }
    Ok(CORPUS.get().expect("it was put there just now"))
}

/// The first `len_bytes` of the corpus, a multiple of [`CHUNK_BYTES`].
fn read(len_bytes: usize) -> Result<Vec<u8>, LabError> {
    let mut rng = Rng::with_seed(SEED);
    let programs = programs()?;
    let text = text(len_bytes / 3)?;
    let mut bytes = vec![0; len_bytes];
    for (turn, chunk) in bytes.chunks_exact_mut(CHUNK_BYTES).enumerate() {
        match turn % 3 {
            0 => piece(&programs, &mut rng, chunk)?,
            1 => {
                // If there is too little text, it is repeated.
                let from = turn / 3 * CHUNK_BYTES;
                let again = text.iter().cycle().skip(from % text.len());
                chunk.iter_mut().zip(again).for_each(|(byte, from)| *byte = *from);
            }
            _ => chunk.chunks_exact_mut(BLOCK_BYTES).for_each(|block| {
                rng.fill(&mut block[..BLOCK_BYTES / 2]);
            }),
        }
    }
    Ok(bytes)
}

/// The programs of at least a chunk, by name.
fn programs() -> Result<Vec<PathBuf>, LabError> {
    let entries = fs::read_dir(PROGRAMS).map_err(LabError::io(PROGRAMS))?;
    let is_long = |path: &PathBuf| {
        let long = |meta: fs::Metadata| meta.is_file() && meta.len() >= CHUNK_BYTES as u64;
        fs::symlink_metadata(path).is_ok_and(long)
    };
    let mut programs: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_long).collect();
    programs.sort();
    match programs.is_empty() {
        true => Err(LabError::missing(format!("a program in {PROGRAMS}"), "the corpus needs some")),
        false => Ok(programs),
    }
}

/// A chunk of one of the programs.
fn piece(programs: &[PathBuf], rng: &mut Rng, chunk: &mut [u8]) -> Result<(), LabError> {
    let path = &programs[rng.usize(..programs.len())];
    let named = |error| LabError::io(path.display().to_string())(error);
    let file = File::open(path).map_err(named)?;
    let chunks = (file.metadata().map_err(named)?.len() / CHUNK_BYTES as u64).max(1);
    file.read_exact_at(chunk, rng.u64(..chunks) * CHUNK_BYTES as u64).map_err(named)
}

/// At most `len_bytes` of text.
fn text(len_bytes: usize) -> Result<Vec<u8>, LabError> {
    let mut text = Vec::with_capacity(len_bytes);
    let mut files = FILES_MAX;
    for directory in TEXTS {
        gather(Path::new(directory), DEPTH_MAX, &mut files, len_bytes, &mut text);
    }
    match text.len() < TEXT_MIN.min(len_bytes) {
        true => {
            let found = format!("text below {}", TEXTS.join(", "));
            Err(LabError::missing(found, format!("there are {} bytes of it", text.len())))
        }
        false => Ok(text),
    }
}

/// Appends the text files below a directory, by name, until there is enough.
fn gather(directory: &Path, depth: usize, files: &mut usize, enough: usize, text: &mut Vec<u8>) {
    // Unreadable directories are skipped: there are others.
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        if text.len() >= enough || *files == 0 {
            return;
        }
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        if meta.is_dir() && depth > 0 {
            gather(&path, depth - 1, files, enough, text);
        } else if meta.is_file() {
            *files -= 1;
            let mut bytes = Vec::new();
            let read = File::open(&path)
                .and_then(|file| file.take(TEXT_MAX).read_to_end(&mut bytes).map(drop));
            if read.is_ok() && is_text(&bytes) {
                let len = bytes.len().min(enough - text.len());
                text.extend_from_slice(&bytes[..len]);
            }
        }
    }
}

/// Whether the start has no zero and hardly a byte beyond ASCII: no archive and no image.
fn is_text(bytes: &[u8]) -> bool {
    let head = &bytes[..bytes.len().min(4096)];
    let odd = head.iter().filter(|byte| !byte.is_ascii() || **byte == 0).count();
    !head.is_empty() && odd * 20 < head.len()
}

#[cfg(test)]
mod tests {
    use blockyard_ram::codec::packed_bytes_max;
    use blockyard_ram::{Codec, CodecConfig};

    use super::*;

    /// The compression ratio of LZ4 for every third chunk from this one on.
    fn ratio(bytes: &[u8], kind: usize) -> f64 {
        let codec = Codec::new(&CodecConfig::default(), "algo").unwrap();
        let mut encoder = codec.encoder(BLOCK_BYTES).unwrap();
        let mut packed = vec![0; packed_bytes_max(BLOCK_BYTES)];
        let chunks = bytes.chunks_exact(CHUNK_BYTES).skip(kind).step_by(3);
        let blocks = chunks.flat_map(|chunk| chunk.chunks_exact(BLOCK_BYTES));
        let (mut plain, mut compressed) = (0, 0);
        for block in blocks {
            let len = codec.compress(&mut encoder, block, &mut packed, BLOCK_BYTES);
            plain += BLOCK_BYTES;
            compressed += len.unwrap_or(BLOCK_BYTES);
        }
        plain as f64 / f64::from(compressed as u32)
    }

    #[test]
    fn it_is_the_same_each_time_and_compresses_as_such_data_do() {
        let bytes = read(3 << 20).unwrap();
        assert!(bytes == read(3 << 20).unwrap());
        let [programs, text, noise] = [0, 1, 2].map(|kind| ratio(&bytes, kind));
        assert!(programs > 1.2 && programs < 4.0, "{programs}");
        assert!(text > 1.5 && text < 5.0, "{text}");
        assert!(noise > 1.8 && noise < 2.1, "{noise}");
    }
}
