//! Raw images: the bytes of the disk, one behind the other.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use super::{Sink, is_zero};

/// What is left out of a file if it is all zeros, in bytes.
const HOLE_BYTES: usize = 4096;

/// Zeros that are written at once.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A file with holes where the disk has zeros.
pub(super) struct Sparse<'a> {
    file: &'a File,
}

impl<'a> Sparse<'a> {
    pub(super) fn new(file: &'a File, size_bytes: u64) -> io::Result<Sparse<'a>> {
        file.set_len(size_bytes)?;
        Ok(Sparse { file })
    }
}

impl Sink for Sparse<'_> {
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let parts = bytes[done..].chunks(HOLE_BYTES);
            let hole: usize = parts.take_while(|part| is_zero(part)).map(<[u8]>::len).sum();
            done += hole;
            let parts = bytes[done..].chunks(HOLE_BYTES);
            let data: usize = parts.take_while(|part| !is_zero(part)).map(<[u8]>::len).sum();
            self.file.write_all_at(&bytes[done..done + data], at + done as u64)?;
            done += data;
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}

/// Bytes for somebody who cannot seek: zeros too.
pub(super) struct Piped<'a> {
    out: &'a mut dyn Write,
    at: u64,
    size_bytes: u64,
}

impl<'a> Piped<'a> {
    pub(super) fn new(out: &'a mut dyn Write, size_bytes: u64) -> Piped<'a> {
        Piped { out, at: 0, size_bytes }
    }

    fn zeros_to(&mut self, end: u64) -> io::Result<()> {
        while self.at < end {
            let len = (end - self.at).min(ZEROS.len() as u64);
            self.out.write_all(&ZEROS[..len as usize])?;
            self.at += len;
        }
        Ok(())
    }
}

impl Sink for Piped<'_> {
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.zeros_to(at)?;
        self.out.write_all(bytes)?;
        self.at = at + bytes.len() as u64;
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.zeros_to(self.size_bytes)?;
        self.out.flush()
    }
}
