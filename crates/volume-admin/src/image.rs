//! Exports a snapshot as an image for other programs: raw, or qcow2. The input is a full stream
//! ([`crate::send`]), so the image can be made on any host that has the stream.

mod qcow2;
mod raw;

use std::fs::File;
use std::io::{Read, Write};

use blockyard_volume::VolumeError;
use blockyard_volume::names::invalid;

use crate::incoming::{Incoming, Part};

use qcow2::Qcow2;
use raw::{OnDevice, Piped, Sparse};

/// The kind of image, and where it is written.
pub enum Image<'a> {
    /// Raw, into an empty file; zeros become holes.
    Raw(&'a File),
    /// Raw, onto a block device that is long enough; zeros are written, or the device zeroes the
    /// range.
    Device(&'a File),
    /// Raw, sequentially, to a pipe.
    RawPipe(&'a mut dyn Write),
    /// qcow2, into an empty file or onto a block device.
    Qcow2(&'a File),
}

/// The result of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Capacity of the image in bytes.
    pub size_bytes: u64,
    /// Bytes of the image that were in the stream.
    pub data_bytes: u64,
}

/// Writes an image in the order of its bytes.
trait Sink {
    /// Writes bytes at an offset; bytes that are skipped are zeros.
    fn put(&mut self, at: u64, bytes: &[u8]) -> std::io::Result<()>;

    /// Completes the image.
    fn finish(&mut self) -> std::io::Result<()>;
}

/// Writes the image of a stream. `progress` gets the bytes of the image that are done, and the size
/// of the image.
///
/// # Errors
/// If the stream is damaged, incremental or raw, or the image cannot be written.
pub fn export(
    input: &mut dyn Read,
    image: Image<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Exported, VolumeError> {
    let mut incoming = Incoming::begin(input)?;
    if let Some((_, base)) = &incoming.head.base {
        let wanted = "one that builds on nothing";
        return invalid("stream", &format!("{} since {base}", incoming.head.name), wanted);
    }
    if incoming.head.is_raw() {
        let wanted = "one that is not raw, as an image has the contents of a volume";
        return invalid("stream", &format!("{} (raw)", incoming.head.name), wanted);
    }
    let block_bytes = u64::from(incoming.head.block_bytes);
    let size_bytes = incoming.head.blocks * block_bytes;
    let failed = || VolumeError::io("cannot write the image");
    let mut sink: Box<dyn Sink + '_> = match image {
        Image::Raw(file) => Box::new(Sparse::new(file, size_bytes).map_err(failed())?),
        Image::Device(file) => Box::new(OnDevice::new(file, size_bytes).map_err(failed())?),
        Image::RawPipe(out) => Box::new(Piped::new(out, size_bytes)),
        Image::Qcow2(file) => Box::new(Qcow2::new(file, size_bytes).map_err(failed())?),
    };
    let mut data_bytes = 0;
    loop {
        match incoming.part()? {
            Part::Data { first, bytes } => {
                let at = first * block_bytes;
                sink.put(at, bytes).map_err(failed())?;
                data_bytes += bytes.len() as u64;
                progress(at + bytes.len() as u64, size_bytes);
            }
            // A full stream has no records of zeros, and bytes that are not written are zeros
            // anyway. A stream with encrypted blocks was refused above.
            Part::Zeros { .. } | Part::Sealed { .. } => {}
            Part::End => break,
        }
    }
    sink.finish().map_err(failed())?;
    progress(size_bytes, size_bytes);
    Ok(Exported { size_bytes, data_bytes })
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // `as_chunks` accepts any length: bytes after the last whole word are compared one by one.
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}
