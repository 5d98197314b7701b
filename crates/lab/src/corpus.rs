//! Bytes as they are in use, to be compressed: a third each of programs, of text, and of noise that
//! compresses by half.
//!
//! In turns of 16 KiB: pieces of the programs in `/usr/bin` from places drawn by a fixed seed; the
//! text files below some directories that every system has, one behind the other; and blocks of
//! 4 KiB of which one half is random and the other zero, as fio makes them for
//! `buffer_compress_percentage=50`. So the bytes are those of this machine: the same for all
//! variants of a run and in the next run, and others where other programs are installed.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use blockyard_core::Region;
use fastrand::Rng;

use crate::error::LabError;

/// How much there is of it, in bytes.
pub const CORPUS_BYTES: usize = 16 << 20;
/// A turn of one kind.
pub const CHUNK_BYTES: usize = 16 << 10;
/// The block of which half is noise.
const BLOCK_BYTES: usize = 4096;
/// Where programs are.
const PROGRAMS: &str = "/usr/bin";
/// Where text is, the likeliest first.
const TEXTS: [&str; 6] =
    ["/usr/include", "/usr/share/doc", "/usr/share/perl", "/usr/lib/python3", "/usr/share", "/etc"];
/// Text is not looked for in more files, nor deeper.
const FILES_MAX: usize = 4096;
const DEPTH_MAX: usize = 6;
/// As much of a text file is taken.
const TEXT_MAX: u64 = 256 << 10;
/// Less text than this says nothing of text.
const TEXT_MIN: usize = 256 << 10;
const SEED: u64 = 0x10ca1;

/// The bytes in memory that channels can be told of; read once in a process.
///
/// # Errors
/// If there are too few programs or text files.
pub fn corpus() -> Result<&'static Arc<Region>, LabError> {
    static CORPUS: OnceLock<Arc<Region>> = OnceLock::new();
    if CORPUS.get().is_none() {
        let bytes = read(CORPUS_BYTES)?;
        // Of two that come at once the first one's is kept; they are equal.
        CORPUS.get_or_init(|| {
            let region = Region::alloc(CORPUS_BYTES);
            region.write(0, &bytes);
            region
        });
    }
    Ok(CORPUS.get().expect("it was put there just now"))
}

/// So many of the bytes, a multiple of [`CHUNK_BYTES`].
fn read(len_bytes: usize) -> Result<Vec<u8>, LabError> {
    let mut rng = Rng::with_seed(SEED);
    let programs = programs()?;
    let text = text(len_bytes / 3)?;
    let mut bytes = vec![0; len_bytes];
    for (turn, chunk) in bytes.chunks_exact_mut(CHUNK_BYTES).enumerate() {
        match turn % 3 {
            0 => piece(&programs, &mut rng, chunk)?,
            1 => {
                // What text there is comes again where there is less.
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

/// Programs that have a chunk at least, by name.
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

/// At most so many bytes of text.
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
    // What cannot be read is left out: there is more.
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

/// No zero and hardly anything beyond ASCII at the beginning: no archive, no picture.
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

    /// How many times fewer bytes LZ4 makes of every third chunk from this one on.
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
