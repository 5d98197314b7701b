//! Writes qcow2 images of version 3, as QEMU's docs/interop/qcow2.txt describes them: clusters of
//! 64 KiB, without clusters of zeros, backing file, compression or snapshots.
//!
//! Clusters are allocated sequentially, data and their tables as they come. Reference counts and
//! the header are written last, so an interrupted image is not a valid qcow2 file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{Sink, is_zero};

const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;

/// Entries of a level-2 table, one per cluster.
const L2_ENTRIES: u64 = CLUSTER / 8;

/// Clusters that one block of 16-bit reference counts covers.
const COUNTED: u64 = CLUSTER / 2;

/// Flag of an entry: the cluster it refers to has exactly one reference.
const COPIED: u64 = 1 << 63;

/// Length of the version 3 header that is written, in bytes.
const HEADER_BYTES: u32 = 104;

/// An image that is being written.
pub(super) struct Qcow2<'a> {
    file: &'a File,
    size_bytes: u64,
    /// The next free cluster; the first cluster is the header.
    next: u64,
    l1: Vec<u64>,
    /// The level-2 table that is being filled, and its number.
    l2: Vec<u64>,
    l2_number: Option<u64>,
    /// The cluster of the disk that is being filled, and its number.
    cluster: Vec<u8>,
    number: Option<u64>,
}

impl<'a> Qcow2<'a> {
    pub(super) fn new(file: &'a File, size_bytes: u64) -> io::Result<Qcow2<'a>> {
        // The length of a block device cannot be set; its old data are overwritten or not
        // referenced.
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        let tables = size_bytes.div_ceil(CLUSTER * L2_ENTRIES);
        Ok(Qcow2 {
            file,
            size_bytes,
            next: 1,
            l1: vec![0; tables as usize],
            l2: vec![0; L2_ENTRIES as usize],
            l2_number: None,
            cluster: vec![0; CLUSTER as usize],
            number: None,
        })
    }

    /// Allocates clusters; returns the offset of the first, in bytes.
    fn take(&mut self, clusters: u64) -> u64 {
        let at = self.next * CLUSTER;
        self.next += clusters;
        at
    }

    /// Writes the cluster that was filled, unless it is all zeros.
    fn put_cluster(&mut self) -> io::Result<()> {
        let Some(number) = self.number.take() else { return Ok(()) };
        if is_zero(&self.cluster) {
            return Ok(());
        }
        let table = number / L2_ENTRIES;
        if self.l2_number != Some(table) {
            self.put_table()?;
            self.l2_number = Some(table);
        }
        let at = self.take(1);
        self.file.write_all_at(&self.cluster, at)?;
        self.l2[(number % L2_ENTRIES) as usize] = at | COPIED;
        self.cluster.fill(0);
        Ok(())
    }

    /// Writes the level-2 table that was filled.
    fn put_table(&mut self) -> io::Result<()> {
        let Some(number) = self.l2_number.take() else { return Ok(()) };
        let at = self.take(1);
        self.file.write_all_at(&big_endian(&self.l2), at)?;
        self.l1[number as usize] = at | COPIED;
        self.l2.fill(0);
        Ok(())
    }

    /// Writes the reference counts of all clusters, including those of the counts. Returns the
    /// offset of their table, and its length in clusters.
    fn put_counts(&mut self) -> io::Result<(u64, u64)> {
        let (mut blocks, mut tables) = (0, 0);
        loop {
            let all = self.next + blocks + tables;
            let wanted = all.div_ceil(COUNTED);
            let wanted = (wanted, (wanted * 8).div_ceil(CLUSTER));
            if wanted == (blocks, tables) {
                break;
            }
            (blocks, tables) = wanted;
        }
        let first = self.take(blocks);
        let table = self.take(tables);
        let mut left = self.next;
        for block in 0..blocks {
            let mut counts = vec![0; CLUSTER as usize];
            let here = left.min(COUNTED);
            for count in counts.chunks_exact_mut(2).take(here as usize) {
                count[1] = 1;
            }
            left -= here;
            self.file.write_all_at(&counts, first + block * CLUSTER)?;
        }
        let mut entries: Vec<u64> = (0..blocks).map(|block| first + block * CLUSTER).collect();
        entries.resize((tables * CLUSTER / 8) as usize, 0);
        self.file.write_all_at(&big_endian(&entries), table)?;
        Ok((table, tables))
    }

    fn header(&self, l1: u64, counts: u64, counts_clusters: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(CLUSTER as usize);
        out.extend(b"QFI\xfb");
        out.extend(3_u32.to_be_bytes());
        // No backing file.
        out.extend([0; 12]);
        out.extend(CLUSTER_BITS.to_be_bytes());
        out.extend(self.size_bytes.to_be_bytes());
        // Not encrypted.
        out.extend([0; 4]);
        out.extend((self.l1.len() as u32).to_be_bytes());
        out.extend(l1.to_be_bytes());
        out.extend(counts.to_be_bytes());
        out.extend((counts_clusters as u32).to_be_bytes());
        // No snapshots, and no incompatible features.
        out.extend([0; 4 + 8 + 3 * 8]);
        // Reference counts of 2^4 bits.
        out.extend(4_u32.to_be_bytes());
        out.extend(HEADER_BYTES.to_be_bytes());
        out.resize(CLUSTER as usize, 0);
        out
    }
}

impl Sink for Qcow2<'_> {
    fn put(&mut self, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (number, offset) = (at / CLUSTER, (at % CLUSTER) as usize);
            if self.number != Some(number) {
                self.put_cluster()?;
                self.number = Some(number);
            }
            let len = bytes.len().min(CLUSTER as usize - offset);
            let (part, rest) = bytes.split_at(len);
            self.cluster[offset..offset + len].copy_from_slice(part);
            (at, bytes) = (at + len as u64, rest);
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.put_cluster()?;
        self.put_table()?;
        let l1_clusters = (self.l1.len() as u64 * 8).div_ceil(CLUSTER);
        let l1 = self.take(l1_clusters);
        let mut entries = self.l1.clone();
        entries.resize((l1_clusters * CLUSTER / 8) as usize, 0);
        self.file.write_all_at(&big_endian(&entries), l1)?;
        let (counts, counts_clusters) = self.put_counts()?;
        // The header makes it a valid image, so it is written when the rest is durable.
        self.file.sync_all()?;
        self.file.write_all_at(&self.header(l1, counts, counts_clusters), 0)?;
        self.file.sync_all()
    }
}

fn big_endian(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}
