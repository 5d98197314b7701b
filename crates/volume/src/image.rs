//! A snapshot as an image that other programs read: raw, or qcow2. Made of a stream that holds all
//! of it ([`crate::send`]), so that it can be made wherever the stream can be had.

mod qcow2;
mod raw;

use std::fs::File;
use std::io::{Read, Write};

use crate::admin::invalid;
use crate::error::VolumeError;
use crate::receive::{Incoming, Part};

use qcow2::Qcow2;
use raw::{OnDevice, Piped, Sparse};

/// What an image is to be.
pub enum Image<'a> {
    /// Raw, in a file that is empty: what is zeros takes no space.
    Raw(&'a File),
    /// Raw, on a block device at least as long: zeros are written, or the device is told of them.
    Device(&'a File),
    /// Raw, for a reader that takes it in order.
    RawPipe(&'a mut dyn Write),
    /// qcow2, in a file that is empty, or on a block device.
    Qcow2(&'a File),
}

/// What was exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Capacity of the image in bytes.
    pub size_bytes: u64,
    /// How many of them were in the stream.
    pub data_bytes: u64,
}

/// An image that is written, in the order of its bytes.
trait Sink {
    /// These bytes lie at this place.
    fn put(&mut self, at: u64, bytes: &[u8]) -> std::io::Result<()>;

    /// That was all.
    fn finish(&mut self) -> std::io::Result<()>;
}

/// Writes the image of a stream. `progress` is told the bytes of the image that are done, and how
/// many it has.
///
/// # Errors
/// If the stream is damaged or holds only changes, or the image cannot be written.
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
            // A whole one names no zeros; those of a longer snapshot would be zeros anyway.
            Part::Zeros { .. } => {}
            Part::End => break,
        }
    }
    sink.finish().map_err(failed())?;
    progress(size_bytes, size_bytes);
    Ok(Exported { size_bytes, data_bytes })
}

/// Whether all bytes are zero.
fn is_zero(bytes: &[u8]) -> bool {
    // Safe for any length: what is not whole words is looked at byte by byte.
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}
