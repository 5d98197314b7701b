//! Traces in files: gzip-compressed or plain; in our format, or as tracefs printed them.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

use crate::error::LabError;
use crate::kernel_replay::parse::{self, TEXT_MAX, TraceError};
use crate::kernel_replay::raw;
use crate::kernel_replay::ticks;
use crate::kernel_replay::trace::{Trace, TraceHeader};
use crate::results::write_whole;

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The number of tags of a loop device.
const LOOP_TAGS: u32 = 128;
/// The number of requests that the scheduler of a loop device accepts.
const LOOP_REQUESTS: u32 = 256;

/// Reads the trace of a file.
///
/// # Errors
/// If it cannot be read, or holds none.
pub fn read(path: &Path) -> Result<Trace, LabError> {
    let name = || path.display().to_string();
    let bytes = fs::read(path).map_err(LabError::io(name()))?;
    let text = text(&bytes).map_err(LabError::io(name()))?;
    trace(&text).map_err(|error| LabError::failed(name(), error))
}

/// The text in these bytes, which may be compressed. At most the greatest length of a trace is
/// unpacked.
///
/// # Errors
/// If it is damaged, too long, or not text.
pub fn text(bytes: &[u8]) -> io::Result<String> {
    let mut text = String::new();
    let limit = TEXT_MAX as u64 + 1;
    match bytes.starts_with(&GZIP) {
        true => MultiGzDecoder::new(bytes).take(limit).read_to_string(&mut text)?,
        false => bytes.take(limit).read_to_string(&mut text)?,
    };
    Ok(text)
}

/// Parses a trace in our format or in that of tracefs. The latter has no header; it is taken to be
/// of a loop device with the kernel's default tunables.
///
/// # Errors
/// If the text has neither format.
pub fn trace(text: &str) -> Result<Trace, TraceError> {
    if !text.starts_with(raw::FIRST_WORDS) {
        return parse::trace(text);
    }
    let recording = raw::recording(text)?;
    let mut header = TraceHeader {
        workload: "unknown".to_owned(),
        kernel: "unknown".to_owned(),
        device: "a loop device".to_owned(),
        fio: "unknown".to_owned(),
        sectors: parse::SECTOR_MAX,
        tags: LOOP_TAGS,
        requests: LOOP_REQUESTS,
        ..TraceHeader::default()
    };
    if let Some(tick) = ticks::tick(&recording.ticks, recording.began_us) {
        header.tick = tick;
    }
    Ok(Trace { header, events: recording.events })
}

/// Writes the trace, compressed, and replaces the file.
///
/// # Errors
/// If it cannot be written.
pub fn write(path: &Path, trace: &Trace) -> Result<(), LabError> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let packed = encoder.write_all(trace.text().as_bytes()).and_then(|()| encoder.finish());
    let packed = packed.map_err(LabError::io("gzip"))?;
    write_whole(path, &packed).map_err(LabError::io(path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_file_is_read_packed_and_plain() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("a.trace.gz");
        let raw = "# tracer: nop\nfio-1 [000] . 1.000001: block_rq_insert: 7,1 R 8 () 8 + 8\n";
        let wanted = trace(raw).unwrap();
        write(&path, &wanted).unwrap();
        assert!(fs::read(&path).unwrap().starts_with(&GZIP));
        assert_eq!(read(&path).unwrap(), wanted);
        fs::write(&path, wanted.text()).unwrap();
        assert_eq!(read(&path).unwrap(), wanted);
    }

    #[test]
    fn a_damaged_file_is_refused_by_its_name() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("bad.trace.gz");
        fs::write(&path, [0x1f, 0x8b, 8, 0, 1]).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("bad.trace.gz"));
        fs::write(&path, "nothing").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("bad.trace.gz: line 1: it starts with `nothing`"), "{error}");
    }
}
