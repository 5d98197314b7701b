//! Raw images: the bytes of the disk in order.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;

use super::{Sink, is_zero};

/// Runs of zeros are left out of a file in units of this length, in bytes.
const HOLE_BYTES: usize = 4096;

/// Zeros for one write.
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

/// A block device, whose old data must be overwritten where the disk has zeros.
pub(super) struct OnDevice<'a> {
    file: &'a File,
    at: u64,
    size_bytes: u64,
}

impl<'a> OnDevice<'a> {
    pub(super) fn new(mut file: &'a File, size_bytes: u64) -> io::Result<OnDevice<'a>> {
        let len = file.seek(SeekFrom::End(0))?;
        if len < size_bytes {
            let text = format!("the device has {len} bytes; the image needs {size_bytes}");
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        Ok(OnDevice { file, at: 0, size_bytes })
    }

    fn zeros_to(&mut self, end: u64) -> io::Result<()> {
        if self.at == end {
            return Ok(());
        }
        let zero = || {
            let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(self.file, flags, self.at, end - self.at)
        };
        if rustix::io::retry_on_intr(zero).is_err() {
            let mut at = self.at;
            while at < end {
                let len = (end - at).min(ZEROS.len() as u64);
                self.file.write_all_at(&ZEROS[..len as usize], at)?;
                at += len;
            }
        }
        self.at = end;
        Ok(())
    }
}

impl Sink for OnDevice<'_> {
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.zeros_to(at)?;
        self.file.write_all_at(bytes, at)?;
        self.at = at + bytes.len() as u64;
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.zeros_to(self.size_bytes)?;
        self.file.sync_all()
    }
}

/// A pipe, which cannot seek, so that zeros are written too.
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
