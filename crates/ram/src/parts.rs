//! Splits a range of bytes at block boundaries.
//!
//! A request is executed block by block: a part that covers a whole block replaces it, and any
//! other part modifies the block.

/// The part of a request that lies in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The block number.
    pub block: u64,
    /// Offset in the block, in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Splits a range of bytes into parts, in order. Blocks are `1 << shift` bytes.
#[inline]
pub fn parts(at: u64, len_bytes: u64, shift: u32) -> impl Iterator<Item = Part> {
    let (unit, end) = (1 << shift, at + len_bytes);
    let mut next = at;
    std::iter::from_fn(move || {
        (next < end).then(|| {
            let offset = next & (unit - 1);
            let len = (unit - offset).min(end - next);
            let block = next >> shift;
            next += len;
            Part { block, offset: offset as usize, len: len as usize }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_at_blocks() {
        let cut = |at, len| -> Vec<(u64, usize, usize)> {
            parts(at, len, 12).map(|Part { block, offset, len }| (block, offset, len)).collect()
        };
        assert_eq!(cut(0, 4096), [(0, 0, 4096)]);
        assert_eq!(cut(512, 512), [(0, 512, 512)]);
        assert_eq!(cut(7680, 5120), [(1, 3584, 512), (2, 0, 4096), (3, 0, 512)]);
        assert_eq!(cut(4096, 0), []);
    }
}
