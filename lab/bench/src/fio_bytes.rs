//! Data as stock fio makes them for `--buffer_compress_percentage=50`, with which the published
//! figures of zram were measured. They compress and decompress four times as fast as real data.

use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockyard_core::Region;

use crate::corpus::CORPUS_BYTES;
use crate::error::LabError;
use crate::stop::Stop;
use crate::tools::fio::Fio;

/// The options that make fio's buffers compress by half, block by block. fio fills one before each
/// write.
pub const HALF: &str = "--buffer_compress_percentage=50 --buffer_compress_chunk=4k";
/// The fio options that write the data to a file, once from the first byte to the last.
const LINE: &str = "--ioengine=psync --rw=write --bs=64k --time_based=0 --refill_buffers \
                    --randrepeat=1 --randseed=100";
/// The time limit, far more than fio takes.
const RUNTIME_MAX: Duration = Duration::from_secs(20);

/// As many bytes of the data as the corpus has, in memory that channels can register; made once in
/// a process, through a file in the `scratch` directory.
///
/// # Errors
/// If there is no fio, or it fails.
pub fn half(scratch: &Path, stop: &Stop) -> Result<&'static Arc<Region>, LabError> {
    static HALVES: OnceLock<Arc<Region>> = OnceLock::new();
    if HALVES.get().is_none() {
        let bytes = make(scratch, stop)?;
        // If two threads make them at once, the first one's are kept; they are equal.
        HALVES.get_or_init(|| {
            let region = Region::alloc(CORPUS_BYTES);
            region.write(0, &bytes);
            region
        });
    }
    Ok(HALVES.get().expect("it was put there just now"))
}

fn make(scratch: &Path, stop: &Stop) -> Result<Vec<u8>, LabError> {
    let path = scratch.join(format!("fio-{}.bytes", std::process::id()));
    let fio = Fio::new(&format!("{LINE} {HALF}"));
    let fio = fio.option("filename", path.display()).option("size", CORPUS_BYTES);
    fio.run(Duration::ZERO, RUNTIME_MAX, stop)?;
    let bytes = fs::read(&path).map_err(LabError::io(path.display().to_string()))?;
    // A file that cannot be removed here is removed with the directory.
    let _ = fs::remove_file(&path);
    match bytes.len() == CORPUS_BYTES {
        true => Ok(bytes),
        false => Err(LabError::failed("fio", format!("it wrote {} bytes", bytes.len()))),
    }
}

#[cfg(test)]
mod tests {
    use blockyard_ram::codec::packed_bytes_max;
    use blockyard_ram::{Codec, CodecConfig};

    use super::*;
    use crate::scratch::Scratch;

    const BLOCK_BYTES: usize = 4096;

    #[test]
    fn every_block_compresses_by_half() {
        let scratch = Scratch::new().unwrap();
        let bytes = make(scratch.path(), &Stop::new()).unwrap();
        let codec = Codec::new(&CodecConfig::default(), "algo").unwrap();
        let mut encoder = codec.encoder(BLOCK_BYTES).unwrap();
        let mut packed = vec![0; packed_bytes_max(BLOCK_BYTES)];
        for (number, block) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
            let len = codec.compress(&mut encoder, block, &mut packed, BLOCK_BYTES);
            let len = len.unwrap_or(BLOCK_BYTES);
            assert!((1900..2300).contains(&len), "block {number} takes {len} bytes");
        }
    }
}
