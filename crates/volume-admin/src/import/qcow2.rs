//! Reads qcow2 images of versions 2 and 3, as QEMU's docs/interop/qcow2.txt describes them: with
//! clusters that are compressed by deflate or zstd, clusters of zeros, subclusters, and the name of
//! a backing file. Encrypted images, and those whose data are in another file, are refused.

use flate2::{Decompress, FlushDecompress};

use super::image_file::ImageFile;
use super::{ImageRange, ImportError, RangeKind};

/// The first bytes of an image.
pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";

/// Length of the header of version 2, in bytes.
const HEADER_V2_BYTES: usize = 72;

/// Least length of the header of version 3, in bytes.
const HEADER_V3_BYTES: usize = 104;

/// Largest level-1 table, in entries: 32 MiB, as in QEMU.
const L1_MAX: u64 = 4 << 20;

/// Longest name of a backing file, in bytes.
const BACKING_MAX: u32 = 1023;

/// The header extension with the format of the backing file.
const BACKING_FORMAT: u32 = 0xe279_2aca;

/// Incompatible features.
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// Bits of an entry of a table: the offset, and the reserved ones.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
const COMPRESSED: u64 = 1 << 62;
const ZEROS: u64 = 1;

/// Subclusters of a cluster.
const SUBCLUSTERS: u64 = 32;

/// Most clusters or subclusters of a range, which bounds the work of looking one up.
const RANGE_UNITS: usize = 256;

/// The number at an offset, which the caller has checked.
fn be_u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes are four bytes"))
}

/// The number at an offset, which the caller has checked.
fn be_u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes are eight bytes"))
}

/// The backing file of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BackingName {
    /// The name, as it is in the image.
    pub(super) name: String,
    /// The format, if the image names it.
    pub(super) format: Option<String>,
}

/// Where a cluster or subcluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClusterPlace {
    Backing,
    Zeros,
    /// At this offset of the file.
    Data(u64),
    /// Compressed data at this offset of the file, with this length.
    Compressed(u64, u64),
}

impl ClusterPlace {
    fn kind(self) -> RangeKind {
        match self {
            ClusterPlace::Backing => RangeKind::Backing,
            ClusterPlace::Zeros => RangeKind::Zeros,
            ClusterPlace::Data(_) | ClusterPlace::Compressed(..) => RangeKind::Data,
        }
    }
}

/// An image that is open for reading.
pub(super) struct Qcow2Image {
    pub(super) file: ImageFile,
    /// The capacity of the disk in bytes.
    pub(super) size_bytes: u64,
    pub(super) backing: Option<BackingName>,
    is_v2: bool,
    cluster_bits: u32,
    has_subclusters: bool,
    is_zstd: bool,
    l1: Vec<u64>,
    /// The level-2 table that was read last, and its offset.
    l2: Vec<u8>,
    l2_at: Option<u64>,
    /// The cluster that was decompressed last, and its offset in the file.
    plain: Vec<u8>,
    plain_at: Option<u64>,
}

impl Qcow2Image {
    /// Reads the header and the level-1 table, which may take `l1_bytes_max` of memory.
    ///
    /// # Errors
    /// If the file is damaged, or has a feature that is not supported, or a longer table.
    pub(super) fn open(file: ImageFile, l1_bytes_max: u64) -> Result<Qcow2Image, ImportError> {
        let mut fixed = vec![0; HEADER_V2_BYTES];
        file.read(0, &mut fixed)?;
        let (version, cluster_bits) = (be_u32_at(&fixed, 4), be_u32_at(&fixed, 20));
        if fixed[..4] != MAGIC {
            return Err(file.damaged("it does not begin as a qcow2 image"));
        }
        if !(2..=3).contains(&version) {
            return Err(file.refused(format!("version {version} of qcow2; expected 2 or 3")));
        }
        if !(9..=21).contains(&cluster_bits) {
            return Err(file.damaged(format!("clusters of 2^{cluster_bits} bytes")));
        }
        // Everything else of the header is in the first cluster.
        let mut header = vec![0; file.len.min(1 << cluster_bits) as usize];
        file.read(0, &mut header)?;
        let features = Features::parse(&file, &header, version)?;
        let Features { header_bytes, has_subclusters, is_zstd } = features;
        if has_subclusters && cluster_bits < 14 {
            return Err(file.damaged(format!("subclusters of clusters of 2^{cluster_bits} bytes")));
        }
        let backing = backing(&file, &header, header_bytes)?;
        let mut image = Qcow2Image {
            size_bytes: be_u64_at(&fixed, 24),
            backing,
            is_v2: version == 2,
            cluster_bits,
            has_subclusters,
            is_zstd,
            l1: Vec::new(),
            l2: Vec::new(),
            l2_at: None,
            plain: Vec::new(),
            plain_at: None,
            file,
        };
        image.read_l1(be_u32_at(&fixed, 36).into(), be_u64_at(&fixed, 40), l1_bytes_max)?;
        Ok(image)
    }

    fn read_l1(&mut self, entries: u64, at: u64, bytes_max: u64) -> Result<(), ImportError> {
        let needed = self.size_bytes.div_ceil(self.l2_covers());
        if needed > L1_MAX || entries < needed {
            let size = self.size_bytes;
            let why = format!("a disk of {size} bytes with a level-1 table of {entries} entries");
            return Err(self.file.damaged(why));
        }
        if 8 * needed > bytes_max {
            let why = format!(
                "its chain has more than {} MiB of level-1 tables; `qemu-img convert` joins the \
                 files",
                super::TABLE_BYTES_MAX >> 20
            );
            return Err(self.file.refused(why));
        }
        // A false length must not make this program take memory.
        if at.saturating_add(8 * needed) > self.file.len {
            let why = format!("the level-1 table at byte {at} is beyond its end");
            return Err(self.file.damaged(why));
        }
        let mut bytes = vec![0; 8 * needed as usize];
        self.file.read(at, &mut bytes)?;
        self.l1 = bytes.chunks_exact(8).map(|entry| be_u64_at(entry, 0)).collect();
        Ok(())
    }

    /// Memory of the level-1 table.
    pub(super) fn l1_bytes(&self) -> u64 {
        8 * self.l1.len() as u64
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of a level-2 table.
    fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / if self.has_subclusters { 16 } else { 8 }
    }

    /// Bytes of the disk that a level-2 table has.
    fn l2_covers(&self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// The range that begins at an offset below the size.
    pub(super) fn range(&mut self, at: u64) -> Result<ImageRange, ImportError> {
        let (first, mut end) = self.place(at)?;
        let kind = first.kind();
        let limit = (at / self.l2_covers() + 1) * self.l2_covers();
        for _ in 0..RANGE_UNITS {
            if end >= limit.min(self.size_bytes) {
                break;
            }
            let (next, next_end) = self.place(end)?;
            if next.kind() != kind {
                break;
            }
            end = next_end;
        }
        Ok(ImageRange { kind, len: end - at })
    }

    /// Reads a part of a range of data.
    pub(super) fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), ImportError> {
        let mut done = 0;
        while done < into.len() {
            let from = at + done as u64;
            let (place, end) = self.place(from)?;
            let to = done + (end - from).min((into.len() - done) as u64) as usize;
            let offset = from % self.cluster_bytes();
            match place {
                ClusterPlace::Data(host) => self.file.read(host + offset, &mut into[done..to])?,
                ClusterPlace::Compressed(host, len) => {
                    self.decompress(host, len)?;
                    let offset = offset as usize;
                    into[done..to].copy_from_slice(&self.plain[offset..offset + to - done]);
                }
                ClusterPlace::Zeros | ClusterPlace::Backing => into[done..to].fill(0),
            }
            done = to;
        }
        Ok(())
    }

    /// Where the cluster or subcluster at an offset is, and the offset at which it ends. What has
    /// no level-2 table ends where that would.
    fn place(&mut self, at: u64) -> Result<(ClusterPlace, u64), ImportError> {
        let covers = self.l2_covers();
        let (table, index) = (at / covers, (at % covers) >> self.cluster_bits);
        let entry = self.l1[table as usize];
        if entry & L1_RESERVED != 0 {
            let why = format!("entry {table} of its level-1 table is {entry:#x}");
            return Err(self.file.damaged(why));
        }
        if entry & OFFSET == 0 {
            return Ok((ClusterPlace::Backing, (table + 1) * covers));
        }
        self.read_l2(entry & OFFSET)?;
        let width = if self.has_subclusters { 16 } else { 8 };
        let (from, cluster) = (index as usize * width, at >> self.cluster_bits);
        let entry = be_u64_at(&self.l2, from);
        let end = (cluster + 1) << self.cluster_bits;
        if entry & COMPRESSED != 0 {
            return Ok((self.compressed(entry, at)?, end));
        }
        let host = entry & OFFSET;
        let zeros = if self.is_v2 || self.has_subclusters { 0 } else { ZEROS };
        let has_reserved = entry & (L2_RESERVED | (ZEROS & !zeros)) != 0;
        if has_reserved || !host.is_multiple_of(self.cluster_bytes()) || host >= self.file.len {
            return Err(self.wrong_entry(at, entry));
        }
        if !self.has_subclusters {
            let place = match host {
                _ if entry & zeros != 0 => ClusterPlace::Zeros,
                0 => ClusterPlace::Backing,
                host => ClusterPlace::Data(host),
            };
            return Ok((place, end));
        }
        let bitmap = be_u64_at(&self.l2, from + 8);
        let subcluster = self.cluster_bytes() / SUBCLUSTERS;
        let number = at % self.cluster_bytes() / subcluster;
        let (is_data, is_zeros) = ((bitmap >> number) & 1 == 1, (bitmap >> (number + 32)) & 1 == 1);
        let place = match (is_data, is_zeros) {
            (false, true) => ClusterPlace::Zeros,
            (false, false) => ClusterPlace::Backing,
            (true, false) if host != 0 => ClusterPlace::Data(host),
            _ => return Err(self.wrong_entry(at, bitmap)),
        };
        Ok((place, (at / subcluster + 1) * subcluster))
    }

    /// The place of a compressed cluster: an offset in bytes, and a number of sectors after the one
    /// that the offset is in.
    fn compressed(&self, entry: u64, at: u64) -> Result<ClusterPlace, ImportError> {
        let shift = 62 - (self.cluster_bits - 8);
        let host = entry & ((1 << shift) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> shift;
        if entry >> 63 != 0 || host >= self.file.len {
            return Err(self.wrong_entry(at, entry));
        }
        // The last sector may be missing in part.
        let len = ((sectors + 1) * 512 - host % 512).min(self.file.len - host);
        Ok(ClusterPlace::Compressed(host, len))
    }

    fn wrong_entry(&self, at: u64, entry: u64) -> ImportError {
        let why = format!("the entry of its level-2 table for byte {at} of the disk is {entry:#x}");
        self.file.damaged(why)
    }

    fn read_l2(&mut self, at: u64) -> Result<(), ImportError> {
        if self.l2_at == Some(at) {
            return Ok(());
        }
        let len = self.cluster_bytes();
        if !at.is_multiple_of(len) || at.saturating_add(len) > self.file.len {
            let why = format!("a level-2 table at byte {at}, beyond its end or between clusters");
            return Err(self.file.damaged(why));
        }
        self.l2_at = None;
        self.l2.resize(len as usize, 0);
        self.file.read(at, &mut self.l2)?;
        self.l2_at = Some(at);
        Ok(())
    }

    /// Decompresses a cluster into `plain`.
    fn decompress(&mut self, host: u64, len: u64) -> Result<(), ImportError> {
        if self.plain_at == Some(host) {
            return Ok(());
        }
        self.plain_at = None;
        let mut packed = vec![0; len as usize];
        self.file.read(host, &mut packed)?;
        self.plain.resize(self.cluster_bytes() as usize, 0);
        let is_whole = match self.is_zstd {
            true => unzstd(&packed, &mut self.plain),
            false => inflate(&packed, &mut self.plain),
        };
        if !is_whole {
            let why = format!("the compressed cluster at byte {host} cannot be decompressed");
            return Err(self.file.damaged(why));
        }
        self.plain_at = Some(host);
        Ok(())
    }
}

/// Fills `plain` from a deflate stream without header, which other bytes may follow.
fn inflate(packed: &[u8], plain: &mut [u8]) -> bool {
    let mut stream = Decompress::new(false);
    let done = stream.decompress(packed, plain, FlushDecompress::Finish);
    done.is_ok() && stream.total_out() == plain.len() as u64
}

/// Fills `plain` from zstd frames, which other bytes may follow.
#[cfg(feature = "c-codecs")]
fn unzstd(packed: &[u8], plain: &mut [u8]) -> bool {
    let (mut from, mut to) = (0, 0);
    while to < plain.len() {
        let Ok(len) = zstd_safe::find_frame_compressed_size(&packed[from..]) else { return false };
        let frame = &packed[from..from + len];
        match zstd_safe::decompress(&mut plain[to..], frame) {
            // An empty frame makes no progress, but takes bytes.
            Ok(count) if len > 0 => (from, to) = (from + len, to + count),
            _ => return false,
        }
    }
    true
}

#[cfg(not(feature = "c-codecs"))]
fn unzstd(_: &[u8], _: &mut [u8]) -> bool {
    false
}

/// What version 3 adds to the header.
struct Features {
    header_bytes: usize,
    has_subclusters: bool,
    is_zstd: bool,
}

impl Features {
    fn parse(file: &ImageFile, header: &[u8], version: u32) -> Result<Features, ImportError> {
        let method = be_u32_at(header, 32);
        if method != 0 {
            let name = match method {
                1 => "AES",
                2 => "LUKS",
                _ => "an unknown method",
            };
            let why = format!("it is encrypted by {name}; `qemu-img convert` decrypts it");
            return Err(file.refused(why));
        }
        if version == 2 {
            let header_bytes = HEADER_V2_BYTES;
            return Ok(Features { header_bytes, has_subclusters: false, is_zstd: false });
        }
        if header.len() < HEADER_V3_BYTES {
            return Err(file.damaged("it ends within its header"));
        }
        let header_bytes = be_u32_at(header, 100) as usize;
        if header_bytes < HEADER_V3_BYTES || header_bytes > header.len() {
            return Err(file.damaged(format!("a header of {header_bytes} bytes")));
        }
        let features = be_u64_at(header, 72);
        if features & CORRUPT != 0 {
            let why = "QEMU has marked it as corrupt; `qemu-img check -r all` repairs it";
            return Err(file.refused(why));
        }
        if features & EXTERNAL_DATA != 0 {
            let why = "its data are in another file (data_file); `qemu-img convert` joins them";
            return Err(file.refused(why));
        }
        let known = DIRTY | COMPRESSION_TYPE | EXTENDED_L2;
        if features & !known != 0 {
            let why = format!("it has unknown incompatible features {:#x}", features & !known);
            return Err(file.refused(why));
        }
        let compression = match header.get(104) {
            Some(kind) if header_bytes > 104 => *kind,
            _ => 0,
        };
        let is_zstd = compression == 1;
        if compression > 1 || is_zstd != (features & COMPRESSION_TYPE != 0) {
            return Err(file.refused(format!("its compression type is {compression}")));
        }
        if is_zstd && !cfg!(feature = "c-codecs") {
            return Err(
                file.refused("its compression type is zstd, which this build does not have")
            );
        }
        Ok(Features { header_bytes, has_subclusters: features & EXTENDED_L2 != 0, is_zstd })
    }
}

/// The backing file that a header names.
fn backing(
    file: &ImageFile,
    header: &[u8],
    header_bytes: usize,
) -> Result<Option<BackingName>, ImportError> {
    let (at, len) = (be_u64_at(header, 8), be_u32_at(header, 16));
    if at == 0 {
        return Ok(None);
    }
    let from = usize::try_from(at).unwrap_or(usize::MAX);
    let bytes = header.get(from..from.saturating_add(len as usize));
    let Some(bytes) = bytes.filter(|_| len <= BACKING_MAX) else {
        return Err(file.damaged(format!("a name of a backing file of {len} bytes at byte {at}")));
    };
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(file.refused("the name or format of its backing file is not UTF-8")),
    };
    let name = text(bytes)?;
    // Extensions are between the header and the name.
    let mut from = header_bytes;
    while let Some(head) = header.get(from..from + 8) {
        let (kind, len) = (be_u32_at(head, 0), be_u32_at(head, 4) as usize);
        if kind == 0 {
            break;
        }
        let Some(bytes) = header.get(from + 8..(from + 8).saturating_add(len)) else {
            return Err(file.damaged(format!("a header extension of {len} bytes at byte {from}")));
        };
        if kind == BACKING_FORMAT {
            return Ok(Some(BackingName { name, format: Some(text(bytes)?) }));
        }
        from += 8 + len.next_multiple_of(8);
    }
    Ok(Some(BackingName { name, format: None }))
}
