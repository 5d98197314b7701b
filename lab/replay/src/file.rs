//! The contents of trace files: compressed by gzip or plain; in our format or that of tracefs.

use std::io::{self, Read, Write};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

use crate::parse::{self, TEXT_MAX, TraceError};
use crate::raw;
use crate::ticks;
use crate::trace::{Trace, TraceHeader};

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The number of tags of a loop device.
const LOOP_TAGS: u32 = 128;
/// The number of requests that the scheduler of a loop device accepts.
const LOOP_REQUESTS: u32 = 256;

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

/// The trace as a compressed text.
///
/// # Errors
/// If gzip fails.
pub fn packed(trace: &Trace) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(trace.text().as_bytes())?;
    encoder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_packed_and_plain() {
        let raw = "# tracer: nop\nfio-1 [000] . 1.000001: block_rq_insert: 7,1 R 8 () 8 + 8\n";
        let wanted = trace(raw).unwrap();
        let bytes = packed(&wanted).unwrap();
        assert!(bytes.starts_with(&GZIP));
        for bytes in [bytes, wanted.text().into_bytes()] {
            assert_eq!(trace(&text(&bytes).unwrap()).unwrap(), wanted);
        }
    }

    #[test]
    fn damaged_bytes_are_refused() {
        assert!(text(&[0x1f, 0x8b, 8, 0, 1]).is_err());
        let error = trace("nothing").unwrap_err().to_string();
        assert!(error.starts_with("line 1: it starts with `nothing`"), "{error}");
    }
}
