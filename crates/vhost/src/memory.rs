//! The memory of a guest, which its hypervisor shares with this process.
//!
//! The guest changes its memory at any time, so no Rust reference to it exists but to an
//! atomic, for one access (an index or a flag of a ring). Everything else is copied through raw
//! pointers ([`Region`]). What is checked (a descriptor, a header, a segment) is a copy that
//! was made by volatile reads, so the compiler cannot read the guest's memory a second time.
//!
//! A hypervisor that truncates the file of the memory ends every process that touches the lost
//! pages (SIGBUS). A memfd with the seal `F_SEAL_SHRINK` cannot be truncated.
#![allow(clippy::disallowed_types)] // The indexes of a ring are atomics in the guest's memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use blockyard_core::Region;
use rustix::fs::{SealFlags, fcntl_get_seals};
use vm_memory::{FileOffset, MmapRegion};

/// The most regions of memory: what QEMU uses at most.
pub(crate) const REGIONS_MAX: usize = 64;

/// A part of the guest's memory, as the hypervisor describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionPlace {
    /// The address in the guest.
    pub(crate) guest: u64,
    /// The address in the hypervisor's process, which the messages about rings use.
    pub(crate) user: u64,
    /// The length in bytes.
    pub(crate) len: u64,
    /// The offset in the file.
    pub(crate) file_offset: u64,
}

/// Mapped memory of the guest.
#[derive(Clone)]
pub(crate) struct MappedRegion {
    pub(crate) place: RegionPlace,
    mapping: Arc<MmapRegion>,
}

impl MappedRegion {
    /// Maps a part of a file.
    ///
    /// # Errors
    /// If the file is shorter, or the system refuses.
    pub(crate) fn map(place: RegionPlace, file: File) -> io::Result<MappedRegion> {
        let len = usize::try_from(place.len).map_err(|_| io::ErrorKind::InvalidInput)?;
        if !fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            tracing::info!(
                guest_address = place.guest,
                "the hypervisor can truncate the file of this memory, which would end the yard; \
                 QEMU seals it with memory-backend-memfd,seal=on"
            );
        }
        let found = file.metadata()?;
        let end = place.file_offset.checked_add(place.len);
        if found.is_file() && end.is_none_or(|end| end > found.len()) {
            // An access after the end of the file would end this process.
            return Err(io::Error::other("a region of memory ends after the end of its file"));
        }
        let mapping = MmapRegion::from_file(FileOffset::new(file, place.file_offset), len);
        let mapping = Arc::new(mapping.map_err(io::Error::other)?);
        Ok(MappedRegion { place, mapping })
    }

    /// A region that bios can point into, which keeps the memory mapped.
    #[allow(unsafe_code)]
    fn region(&self) -> Option<Arc<Region>> {
        let base = NonNull::new(self.mapping.as_ptr())?;
        let owner = Box::new(Arc::clone(&self.mapping));
        // SAFETY: the mapping is readable and writable for its length until the owner is dropped.
        // Bios have the data of requests; this crate accesses those by raw pointers only. Where a
        // guest lets data overlap a ring, an index of the ring is accessed as an atomic, whose
        // reference lives for that access (`GuestMap::index`).
        Some(unsafe { Region::foreign(base, self.mapping.size(), owner) })
    }
}

/// A run of bytes in one region of the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GuestPiece {
    /// The index of the region.
    pub(crate) region: u16,
    /// The offset in the region.
    pub(crate) offset: u64,
    /// The length in bytes, not 0.
    pub(crate) len: u64,
}

/// A region of a guest's memory.
struct GuestRegion {
    place: RegionPlace,
    region: Arc<Region>,
}

/// All memory of a guest.
pub(crate) struct GuestMap {
    /// By address in the guest.
    regions: Vec<GuestRegion>,
}

impl GuestMap {
    /// The memory that consists of these regions.
    ///
    /// # Errors
    /// If there are none or too many, or two overlap.
    pub(crate) fn new(mapped: &[MappedRegion]) -> io::Result<GuestMap> {
        let invalid = |text: &'static str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if mapped.is_empty() || mapped.len() > REGIONS_MAX {
            return Err(invalid("the number of regions is out of range"));
        }
        let mut mapped: Vec<&MappedRegion> = mapped.iter().collect();
        mapped.sort_by_key(|it| it.place.guest);
        let (mut regions, mut next) = (Vec::new(), 0);
        for it in mapped {
            let place = it.place;
            if place.guest < next {
                return Err(invalid("two regions overlap"));
            }
            let end = place.guest.checked_add(place.len);
            next = end.ok_or_else(|| invalid("a region ends beyond the address space"))?;
            let region = it.region().ok_or_else(|| invalid("a region lies at address 0"))?;
            regions.push(GuestRegion { place, region });
        }
        Ok(GuestMap { regions })
    }

    /// Memory that begins at address 0 with the bytes of an image, in two adjacent regions of which
    /// the first one has `first_bytes`; in one, if that is the whole image.
    ///
    /// # Errors
    /// If the image or the first region is empty, or the system refuses.
    pub(crate) fn of_image(image: &[u8], first_bytes: usize) -> io::Result<GuestMap> {
        let (first, second) = image.split_at(first_bytes.min(image.len()));
        let (mut mapped, mut guest) = (Vec::new(), 0);
        for part in [first, second].into_iter().filter(|part| !part.is_empty()) {
            let mapping = Arc::new(MmapRegion::new(part.len()).map_err(io::Error::other)?);
            let len = part.len() as u64;
            let place = RegionPlace { guest, user: guest, len, file_offset: 0 };
            mapped.push(MappedRegion { place, mapping });
            guest += len;
        }
        let map = GuestMap::new(&mapped)?;
        let mut pieces = Vec::with_capacity(mapped.len());
        map.pieces(0, image.len() as u64, &mut pieces);
        map.write(&pieces, 0, image);
        Ok(map)
    }

    /// The address of a piece in the guest.
    pub(crate) fn address(&self, piece: &GuestPiece) -> u64 {
        self.regions[usize::from(piece.region)].place.guest + piece.offset
    }

    /// The regions, in the order of their indexes.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.regions.iter().map(|it| &it.region)
    }

    /// The bytes at an address in the hypervisor's process, if they lie in one region.
    pub(crate) fn run_of_user(&self, user: u64, len: u64) -> Option<GuestPiece> {
        let fits = |(index, it): (usize, &GuestRegion)| {
            let offset = user.checked_sub(it.place.user)?;
            let fits = it.place.len.checked_sub(offset)? >= len;
            // There are at most REGIONS_MAX.
            fits.then_some(GuestPiece { region: index as u16, offset, len })
        };
        self.regions.iter().enumerate().find_map(fits)
    }

    /// The bytes at an address in the guest, if they lie in one region.
    pub(crate) fn run(&self, from: u64, len: u64) -> Option<GuestPiece> {
        let next = self.regions.partition_point(|it| it.place.guest <= from);
        let region = next.checked_sub(1)?;
        let place = &self.regions[region].place;
        let offset = from - place.guest;
        let fits = place.len.checked_sub(offset)? >= len;
        // There are at most REGIONS_MAX.
        fits.then_some(GuestPiece { region: region as u16, offset, len })
    }

    /// An index or a flag of a ring, at an offset in a run, for one access.
    #[inline]
    #[allow(unsafe_code)]
    fn index(&self, run: GuestPiece, at: u64) -> &AtomicU16 {
        let index = self.regions[usize::from(run.region)].region.range(run.offset + at, 2);
        let index = index.expect("`Virtqueue::new` found the ring in the region");
        assert!(index.addr().get().is_multiple_of(2), "`Virtqueue::new` checks the alignment");
        // SAFETY: `range` checked that the bytes lie in mapped memory, which the region keeps
        // mapped; they are aligned. The guest is no part of this process. If it lets data of
        // requests overlap an index, this process copies them by raw pointers, and the index is a
        // mixture; the reference lives for one access, as `MappedRegion::region` says.
        unsafe { AtomicU16::from_ptr(index.as_ptr().cast()) }
    }

    /// Reads an index of a ring, at an offset in a run.
    #[inline]
    pub(crate) fn load(&self, run: GuestPiece, at: u64, order: Ordering) -> u16 {
        u16::from_le(self.index(run, at).load(order))
    }

    /// Writes an index of a ring, at an offset in a run.
    #[inline]
    pub(crate) fn store(&self, run: GuestPiece, at: u64, value: u16, order: Ordering) {
        self.index(run, at).store(value.to_le(), order);
    }

    /// Copies bytes at an offset in a run, which must contain them. Each byte is read once.
    #[inline]
    pub(crate) fn copy_from<const N: usize>(&self, run: GuestPiece, at: u64) -> [u8; N] {
        read_once(&self.regions[usize::from(run.region)].region, run.offset + at)
    }

    /// Copies bytes to an offset in a run, which must contain them.
    #[inline]
    pub(crate) fn copy_to<const N: usize>(&self, run: GuestPiece, at: u64, bytes: [u8; N]) {
        self.regions[usize::from(run.region)].region.write(run.offset + at, &bytes);
    }

    /// Prefetches the cache line at an offset in a run, which the caller reads or writes soon.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) fn prefetch(&self, run: GuestPiece, at: u64) {
        let line = self.regions[usize::from(run.region)].region.range(run.offset + at, 1);
        #[cfg(target_arch = "x86_64")]
        if let Some(line) = line {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch of any address has no visible effect and does not fault.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }

    /// Appends the pieces of a range, which may lie in several regions. Returns `false` if a byte
    /// of it is not memory, or if there are too many pieces for `into`.
    pub(crate) fn pieces(&self, mut from: u64, mut len: u64, into: &mut Vec<GuestPiece>) -> bool {
        while len > 0 {
            let next = self.regions.partition_point(|it| it.place.guest <= from);
            let Some(region) = next.checked_sub(1) else { return false };
            let place = &self.regions[region].place;
            let offset = from - place.guest;
            if offset >= place.len || into.len() == into.capacity() {
                return false;
            }
            let here = (place.len - offset).min(len);
            // There are at most REGIONS_MAX.
            into.push(GuestPiece { region: region as u16, offset, len: here });
            len -= here;
            let Some(next) = from.checked_add(here) else { return len == 0 };
            from = next;
        }
        true
    }

    /// Copies a few bytes of pieces, from an offset on, which are then checked: each is read once.
    /// `None` if the pieces end before.
    pub(crate) fn read_fixed<const N: usize>(
        &self,
        pieces: &[GuestPiece],
        offset: u64,
    ) -> Option<[u8; N]> {
        if let Some(first) = pieces.first()
            && first.len.checked_sub(offset).is_some_and(|rest| rest >= N as u64)
        {
            return Some(self.copy_from(*first, offset));
        }
        let mut bytes = [0; N];
        let done = self.each(pieces, offset, N, |region, at, done| {
            if done.len() == N {
                bytes = read_once(region, at);
                return;
            }
            for (at, byte) in (at..).zip(&mut bytes[done]) {
                [*byte] = read_once(region, at);
            }
        });
        (done == N).then_some(bytes)
    }

    /// Copies bytes of pieces, from an offset on. Returns the number of copied bytes, which is
    /// lower if the pieces end before.
    pub(crate) fn read(&self, pieces: &[GuestPiece], offset: u64, into: &mut [u8]) -> usize {
        self.each(pieces, offset, into.len(), |region, at, done| {
            region.read(at, &mut into[done.start..done.end]);
        })
    }

    /// Copies bytes to pieces, from an offset on. Returns the number of copied bytes, which is
    /// lower if the pieces end before.
    pub(crate) fn write(&self, pieces: &[GuestPiece], offset: u64, from: &[u8]) -> usize {
        self.each(pieces, offset, from.len(), |region, at, done| {
            region.write(at, &from[done.start..done.end]);
        })
    }

    /// Calls `copy` for each run of bytes: with its region, its offset there, and its place in the
    /// `len` bytes.
    fn each(
        &self,
        pieces: &[GuestPiece],
        mut skip: u64,
        len: usize,
        mut copy: impl FnMut(&Region, u64, Range<usize>),
    ) -> usize {
        let mut done = 0;
        for piece in pieces {
            let skipped = skip.min(piece.len);
            skip -= skipped;
            let here = (len - done).min((piece.len - skipped) as usize);
            if here > 0 {
                let region = &self.regions[usize::from(piece.region)].region;
                copy(region, piece.offset + skipped, done..done + here);
                done += here;
            }
        }
        done
    }
}

/// A word at any address.
#[repr(C, packed)]
struct UnalignedWord(u64);

/// Copies bytes of a region, which must contain them, and which the guest may change meanwhile. The
/// reads are volatile: the compiler does not read a byte again when the copy is used.
#[inline]
#[allow(unsafe_code)]
fn read_once<const N: usize>(region: &Region, at: u64) -> [u8; N] {
    const WORD: usize = size_of::<UnalignedWord>();
    let from = region.range(at, N as u64).expect("range inside the region");
    let mut bytes = [0; N];
    let (words, rest) = bytes.as_chunks_mut::<WORD>();
    let whole = words.len();
    for (index, word) in words.iter_mut().enumerate() {
        // SAFETY: `range` checked that all N bytes lie in mapped memory; a packed word needs no
        // alignment, and any bytes are a value of it.
        let UnalignedWord(read) =
            unsafe { from.cast::<UnalignedWord>().add(index).read_volatile() };
        *word = read.to_ne_bytes();
    }
    for (index, byte) in rest.iter_mut().enumerate() {
        // SAFETY: as above.
        *byte = unsafe { from.add(whole * WORD + index).read_volatile() };
    }
    bytes
}

/// The number of bytes of pieces.
pub(crate) fn len_bytes(pieces: &[GuestPiece]) -> u64 {
    pieces.iter().map(|piece| piece.len).sum()
}

/// Removes the first bytes of pieces.
#[inline]
pub(crate) fn skip(pieces: &mut Vec<GuestPiece>, mut bytes: u64) {
    match pieces.as_mut_slice() {
        [first, ..] if first.len > bytes => {
            first.offset += bytes;
            first.len -= bytes;
            return;
        }
        // The header of a read.
        [only] if only.len == bytes => return pieces.clear(),
        _ => {}
    }
    for piece in pieces.iter_mut() {
        let here = bytes.min(piece.len);
        piece.offset += here;
        piece.len -= here;
        bytes -= here;
    }
    pieces.retain(|piece| piece.len > 0);
}

/// Removes the last byte of pieces, and returns it; `None` if there is none.
#[inline]
pub(crate) fn pop_byte(pieces: &mut Vec<GuestPiece>) -> Option<GuestPiece> {
    let last = pieces.last_mut()?;
    last.len -= 1;
    let byte = GuestPiece { offset: last.offset + last.len, len: 1, ..*last };
    if last.len == 0 {
        pieces.pop();
    }
    Some(byte)
}

/// Calls `each` with the pieces of the first bytes. Returns `false` if there are fewer.
pub(crate) fn for_each_head_piece(
    pieces: &[GuestPiece],
    mut bytes: u64,
    mut each: impl FnMut(GuestPiece),
) -> bool {
    for piece in pieces {
        if bytes == 0 {
            break;
        }
        let len = bytes.min(piece.len);
        each(GuestPiece { len, ..*piece });
        bytes -= len;
    }
    bytes == 0
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    /// A memfd.
    pub(crate) fn memfd(len: u64) -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let fd: OwnedFd = rustix::fs::memfd_create("guest", flags).unwrap();
        let file = File::from(fd);
        file.set_len(len).unwrap();
        file
    }

    /// A region of memory.
    pub(crate) fn map(guest: u64, user: u64, len: u64) -> MappedRegion {
        let place = RegionPlace { guest, user, len, file_offset: 0 };
        MappedRegion::map(place, memfd(len)).unwrap()
    }

    /// Two neighbours, and one after a hole.
    fn guest() -> GuestMap {
        let mapped = [
            map(0x10000, 0x7000_0000, 0x4000),
            map(0, 0x5000_0000, 0x4000),
            map(0x4000, 0x6000_0000, 0x4000),
        ];
        GuestMap::new(&mapped).unwrap()
    }

    #[test]
    fn a_range_across_two_regions_is_split() {
        let guest = guest();
        let mut pieces = Vec::with_capacity(4);
        assert!(guest.pieces(0x3f00, 0x300, &mut pieces));
        let wanted = [
            GuestPiece { region: 0, offset: 0x3f00, len: 0x100 },
            GuestPiece { region: 1, offset: 0, len: 0x200 },
        ];
        assert_eq!(pieces, wanted);
        let data: Vec<u8> = (0..=255).cycle().take(0x300).collect();
        assert_eq!(guest.write(&pieces, 0, &data), 0x300);
        let mut back = vec![0; 0x300];
        assert_eq!(guest.read(&pieces, 0, &mut back), 0x300);
        assert_eq!(back, data);
        assert_eq!(guest.read(&pieces, 0xff, &mut back[..3]), 3);
        assert_eq!(back[..3], data[0xff..0x102]);
        assert_eq!(guest.read(&pieces, 0x2ff, &mut [0; 2]), 1);
        assert_eq!(
            guest.read_fixed(&pieces, 0x200),
            Some(<[u8; 16]>::try_from(&data[0x200..0x210]).unwrap())
        );
        assert_eq!(
            guest.read_fixed(&pieces, 0xf9),
            Some(<[u8; 16]>::try_from(&data[0xf9..0x109]).unwrap())
        );
        assert_eq!(guest.read_fixed::<16>(&pieces, 0x2f1), None);
    }

    #[test]
    fn a_range_with_a_byte_that_is_no_memory_is_refused() {
        let guest = guest();
        for (from, len) in
            [(0x8000, 1), (0x7fff, 2), (0x13fff, 2), (u64::MAX, 1), (u64::MAX, u64::MAX)]
        {
            let mut pieces = Vec::with_capacity(4);
            assert!(!guest.pieces(from, len, &mut pieces), "{from:#x} {len:#x}");
        }
        let mut full = Vec::with_capacity(1);
        assert!(!guest.pieces(0x3f00, 0x300, &mut full), "there is room for one piece only");
    }

    #[test]
    fn a_run_of_bytes_lies_in_one_region() {
        let guest = guest();
        let run = |region, offset, len| Some(GuestPiece { region, offset, len });
        assert_eq!(guest.run_of_user(0x6000_0010, 16), run(1, 0x10, 16));
        assert_eq!(guest.run_of_user(0x6000_3ff0, 16), run(1, 0x3ff0, 16));
        assert_eq!(guest.run_of_user(0x6000_3ff0, 17), None);
        assert_eq!(guest.run_of_user(0x6000_4000, 1), None);
        assert_eq!(guest.run_of_user(0, 1), None);
        assert_eq!(guest.run_of_user(u64::MAX, u64::MAX), None);
        assert_eq!(guest.run(0x4010, 16), run(1, 0x10, 16));
        assert_eq!(guest.run(0x3ff0, 16), run(0, 0x3ff0, 16));
        // The next region begins there.
        assert_eq!(guest.run(0x3ff0, 17), None);
        assert_eq!(guest.run(0x8000, 1), None);
        assert_eq!(guest.run(u64::MAX, 1), None);
        let index = guest.run(0x4010, 2).unwrap();
        guest.store(index, 0, 0x1234, Ordering::Release);
        assert_eq!(guest.load(index, 0, Ordering::Acquire), 0x1234);
        assert_eq!(guest.copy_from(index, 0), [0x34, 0x12]);
        guest.copy_to(index, 1, [0x56]);
        assert_eq!(guest.load(index, 0, Ordering::Acquire), 0x5634);
    }

    #[test]
    fn regions_that_overlap_and_files_that_are_too_short_are_refused() {
        let mapped = [map(0, 0, 0x4000), map(0x3000, 0x10000, 0x4000)];
        assert!(GuestMap::new(&mapped).is_err());
        assert!(GuestMap::new(&[]).is_err());
        let place = RegionPlace { guest: 0, user: 0, len: 0x4000, file_offset: 0x1000 };
        assert!(MappedRegion::map(place, memfd(0x4000)).is_err());
        let place = RegionPlace { guest: u64::MAX - 0xfff, user: 0, len: 0x2000, file_offset: 0 };
        assert!(GuestMap::new(&[MappedRegion::map(place, memfd(0x4000)).unwrap()]).is_err());
    }

    #[test]
    fn the_head_and_the_tail_of_pieces_are_cut_off_at_any_byte() {
        let whole = [
            GuestPiece { region: 0, offset: 100, len: 10 },
            GuestPiece { region: 1, offset: 0, len: 4 },
            GuestPiece { region: 2, offset: 50, len: 7 },
        ];
        for head in 0..=21 {
            for tail_bytes in 0..=21 - head {
                let mut pieces = whole.to_vec();
                let mut pop = |_| pop_byte(&mut pieces).unwrap();
                let mut tail: Vec<GuestPiece> = (0..tail_bytes).map(&mut pop).collect();
                tail.reverse();
                skip(&mut pieces, head);
                assert_eq!(len_bytes(&pieces), 21 - head - tail_bytes);
                assert_eq!(len_bytes(&tail), tail_bytes);
                let bytes = |pieces: &[GuestPiece]| -> Vec<(u16, u64)> {
                    let of = |it: &GuestPiece| {
                        (it.offset..it.offset + it.len).map(|at| (it.region, at)).collect()
                    };
                    pieces.iter().flat_map(|it: &GuestPiece| -> Vec<_> { of(it) }).collect()
                };
                let rest = [bytes(&pieces), bytes(&tail)].concat();
                assert_eq!(rest, bytes(&whole)[head as usize..]);
            }
        }
        assert_eq!(pop_byte(&mut Vec::new()), None);
    }
}
