//! LZ4's fast compressor, for blocks that are small and many.
//!
//! It looks for matches as the author's library does and makes the same bytes, which a test shows;
//! so what zram's makes of a block is as long. It takes a fifth less time where a block has long
//! runs, which it compares and copies 32 bytes at a time, and as much time for programs.
//!
//! Tried in vain: not to clear the table for each block (to tell what an earlier one has left takes
//! longer), and to look backwards eight bytes at a time.
//!
//! ```text
//! sequence: token (literals, match) ▸ more of the first ▸ literals ▸ offset ▸ more of the match
//! ```
#![allow(unsafe_code)]

use std::fmt;

/// The least match.
const MATCH_MIN: usize = 4;
/// A block ends with so many literals.
const LITERALS_LAST: usize = 5;
/// No match begins in the last bytes, so many less one.
const MATCH_MARGIN: usize = 12;
const TABLE_BITS: u32 = 13;
/// After so many places in vain, as a power of two, the steps become longer by one.
const PATIENCE_BITS: u32 = 6;
/// What a half of a token can say; this and above is said by further bytes.
const TOKEN_MAX: usize = 15;
/// Positions are 16 bits.
const POSITIONS: usize = 1 << 16;
/// What long matches are compared by.
const RUN_STEP: usize = 32;
/// Literals that are fewer are copied eight at a time, up to seven too many.
const COPY_MIN: usize = 64;

/// Working memory: where four bytes of a hash were last.
pub(super) struct Fast(Box<[u16; 1 << TABLE_BITS]>);

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fast").finish_non_exhaustive()
    }
}

impl Fast {
    pub(super) fn new() -> Fast {
        Fast(Box::new([0; 1 << TABLE_BITS]))
    }

    /// Compresses `block` into `len_max` bytes at most, and no more than `into` has; says how many.
    ///
    /// # Panics
    /// If the block is longer than 64 KiB.
    pub(super) fn compress(
        &mut self,
        block: &[u8],
        into: &mut [u8],
        len_max: usize,
        acceleration: i32,
    ) -> Option<usize> {
        assert!(block.len() <= POSITIONS, "blocks are 64 KiB at most");
        // Where nothing was before stands the first byte, which is earlier than any other.
        self.0.fill(0);
        let source = Source { block: block.as_ptr(), len: block.len() };
        let room = len_max.min(into.len());
        let mut packed = Packed { base: into.as_mut_ptr(), at: 0, room };
        let patience = (acceleration.max(1) as usize) << PATIENCE_BITS;
        // SAFETY: the positions are the block's, which nobody changes while it is borrowed, and
        // `into` has `room` bytes.
        unsafe {
            let anchor = match block.len() > MATCH_MARGIN {
                true => self.sequences(&source, &mut packed, patience)?,
                false => 0,
            };
            packed.last_literals(&source, anchor)?;
        }
        Some(packed.at)
    }

    /// Everything but the last literals; says where those begin. `None` if there is no room.
    ///
    /// # Safety
    /// The source is longer than [`MATCH_MARGIN`], and it and `packed` are what they say.
    #[inline(always)]
    unsafe fn sequences(
        &mut self,
        source: &Source,
        packed: &mut Packed,
        patience: usize,
    ) -> Option<usize> {
        let mut anchor = 0;
        // SAFETY: four bytes are read at places up to `starts_end`, which has as many and more
        // behind it, and at earlier ones: what the table says was put there, for a place that came
        // before, or is 0. A match ends before the last literals. `packed` looks for room itself.
        unsafe {
            *self.slot(source.word(anchor)) = anchor as u16;
            let mut from = anchor + 1;
            while let Some((mut at, mut earlier)) = self.search(source, from, patience) {
                while at > anchor && earlier > 0 && source.byte(at - 1) == source.byte(earlier - 1)
                {
                    (at, earlier) = (at - 1, earlier - 1);
                }
                let mut token = packed.literals(source, anchor, at - anchor)?;
                loop {
                    let more = source.equal(at + MATCH_MIN, earlier + MATCH_MIN);
                    packed.copy_of(token, at - earlier, more)?;
                    at += MATCH_MIN + more;
                    anchor = at;
                    if at >= source.starts_end() {
                        return Some(anchor);
                    }
                    *self.slot(source.word(at - 2)) = (at - 2) as u16;
                    let word = source.word(at);
                    let slot = self.slot(word);
                    earlier = usize::from(*slot);
                    *slot = at as u16;
                    if source.word(earlier) != word {
                        break;
                    }
                    token = packed.no_literals();
                }
                from = at + 1;
            }
        }
        Some(anchor)
    }

    /// The next place from `from` on whose four bytes were there before, and where they were.
    ///
    /// # Safety
    /// The source is what it says, and four bytes can be read at `from`.
    #[inline(always)]
    unsafe fn search(
        &mut self,
        source: &Source,
        from: usize,
        mut patience: usize,
    ) -> Option<(usize, usize)> {
        let (mut next, mut step) = (from, 1);
        // SAFETY: by this function's contract.
        let mut next_word = unsafe { source.word(next) };
        loop {
            let (at, word) = (next, next_word);
            let slot = self.slot(word);
            let earlier = usize::from(*slot);
            next += step;
            step = patience >> PATIENCE_BITS;
            patience += 1;
            if next > source.starts_end() {
                return None;
            }
            // SAFETY: four bytes can be read at the end of starts, and before `at`.
            let there = unsafe {
                next_word = source.word(next);
                source.word(earlier)
            };
            *slot = at as u16;
            if there == word {
                return Some((at, earlier));
            }
        }
    }

    #[inline(always)]
    fn slot(&mut self, word: u32) -> &mut u16 {
        &mut self.0[(word.wrapping_mul(2_654_435_761) >> (u32::BITS - TABLE_BITS)) as usize]
    }
}

/// A block, of which is read without asking each time whether that lies in it.
struct Source {
    block: *const u8,
    len: usize,
}

impl Source {
    /// Matches begin before this.
    #[inline(always)]
    fn starts_end(&self) -> usize {
        self.len - MATCH_MARGIN + 1
    }

    /// # Safety
    /// The bytes from `at` on, as many as `T` has, lie in the block, and any bytes are a `T`.
    #[inline(always)]
    unsafe fn read<T: Copy>(&self, at: usize) -> T {
        debug_assert!(at + size_of::<T>() <= self.len, "position {at}");
        // SAFETY: by this function's contract.
        unsafe { self.block.add(at).cast::<T>().read_unaligned() }
    }

    /// # Safety
    /// The position and the three behind it lie in the block.
    #[inline(always)]
    unsafe fn word(&self, at: usize) -> u32 {
        // SAFETY: by this function's contract.
        unsafe { self.read(at) }
    }

    /// # Safety
    /// The position lies in the block.
    #[inline(always)]
    unsafe fn byte(&self, at: usize) -> u8 {
        // SAFETY: by this function's contract.
        unsafe { self.read(at) }
    }

    /// # Safety
    /// [`RUN_STEP`] bytes from there on lie in the block.
    #[inline(always)]
    unsafe fn run(&self, at: usize) -> [u8; RUN_STEP] {
        // SAFETY: by this function's contract.
        unsafe { self.read(at) }
    }

    /// How many bytes from `from` on are those from `earlier` on, before the last literals.
    ///
    /// # Safety
    /// Both lie in the block, `earlier` first.
    #[inline(always)]
    unsafe fn equal(&self, from: usize, mut earlier: usize) -> usize {
        let (mut at, limit) = (from, self.len - LITERALS_LAST);
        // SAFETY: what is read lies before `limit`, and what is earlier lies earlier.
        unsafe {
            while at + 8 <= limit {
                let (here, there): (u64, u64) = (self.read(at), self.read(earlier));
                let differs = u64::from_le(here ^ there);
                if differs != 0 {
                    return at - from + differs.trailing_zeros() as usize / 8;
                }
                (at, earlier) = (at + 8, earlier + 8);
                while at + RUN_STEP <= limit && self.run(at) == self.run(earlier) {
                    (at, earlier) = (at + RUN_STEP, earlier + RUN_STEP);
                }
            }
            while at < limit && self.byte(at) == self.byte(earlier) {
                (at, earlier) = (at + 1, earlier + 1);
            }
        }
        at - from
    }
}

/// What is made: `room` bytes at `base`, of which `at` are written.
struct Packed {
    base: *mut u8,
    at: usize,
    room: usize,
}

impl Packed {
    /// # Safety
    /// There is room for a byte.
    #[inline(always)]
    unsafe fn push(&mut self, byte: u8) {
        debug_assert!(self.at < self.room);
        // SAFETY: by this function's contract.
        unsafe { self.base.add(self.at).write(byte) };
        self.at += 1;
    }

    /// What of a length does not fit its half of a token.
    ///
    /// # Safety
    /// There is room for a byte in each 255, and one.
    #[inline(always)]
    unsafe fn push_more(&mut self, more: usize) {
        // SAFETY: by this function's contract.
        unsafe {
            if more >= 255 {
                self.at = push_full(self.base, self.at, more / 255);
            }
            self.push((more % 255) as u8);
        }
    }

    /// Begins a sequence with `len` literals from `from` on, and says where its token is. Leaves
    /// room for that of a sequence without literals, and its offset.
    ///
    /// # Safety
    /// They lie in the source, and so do seven bytes behind them; there is room for the token.
    #[inline(always)]
    unsafe fn literals(&mut self, source: &Source, from: usize, len: usize) -> Option<usize> {
        let token = self.at;
        if token + 1 + len + len / 255 + 8 > self.room {
            return None;
        }
        // SAFETY: that is room for the token, what follows it, and the literals and seven more.
        unsafe {
            self.push((len.min(TOKEN_MAX) << 4) as u8);
            if len >= TOKEN_MAX {
                self.push_more(len - TOKEN_MAX);
            }
            let into = self.base.add(self.at);
            if len <= 16 && from + 16 <= source.len && self.at + 16 <= self.room {
                // Nearly always so: without a branch for each length.
                let (one, two): (u64, u64) = (source.read(from), source.read(from + 8));
                into.cast::<u64>().write_unaligned(one);
                into.add(8).cast::<u64>().write_unaligned(two);
            } else if len < COPY_MIN {
                let mut at = 0;
                loop {
                    debug_assert!(self.at + at + 8 <= self.room);
                    let eight: u64 = source.read(from + at);
                    into.add(at).cast::<u64>().write_unaligned(eight);
                    at += 8;
                    if at >= len {
                        break;
                    }
                }
            } else {
                copy(source.block.add(from), into, len);
            }
        }
        self.at += len;
        Some(token)
    }

    /// Begins a sequence without literals, and says where its token is.
    ///
    /// # Safety
    /// A sequence was written before, which has left room.
    #[inline(always)]
    unsafe fn no_literals(&mut self) -> usize {
        // SAFETY: by this function's contract.
        unsafe { self.push(0) };
        self.at - 1
    }

    /// Ends a sequence: so many bytes from `offset` bytes before, and the least match. Leaves room
    /// for six bytes.
    ///
    /// # Safety
    /// The token is that of a sequence that was begun; the offset is from 1 to 65535.
    #[inline(always)]
    unsafe fn copy_of(&mut self, token: usize, offset: usize, more: usize) -> Option<()> {
        if self.at + 2 + 1 + LITERALS_LAST + (more + 240) / 255 > self.room {
            return None;
        }
        // SAFETY: that is room for the offset and what follows.
        unsafe {
            self.push(offset as u8);
            self.push((offset >> 8) as u8);
            *self.base.add(token) |= more.min(TOKEN_MAX) as u8;
            if more >= TOKEN_MAX {
                self.push_more(more - TOKEN_MAX);
            }
        }
        Some(())
    }

    /// Writes the last sequence, which is literals from `from` to the end.
    ///
    /// # Safety
    /// The position lies in the source or is its end.
    #[inline(always)]
    unsafe fn last_literals(&mut self, source: &Source, from: usize) -> Option<()> {
        let len = source.len - from;
        if self.at + len + 1 + (len + 240) / 255 > self.room {
            return None;
        }
        // SAFETY: that is room for the token, what follows it, and the literals.
        unsafe {
            self.push((len.min(TOKEN_MAX) << 4) as u8);
            if len >= TOKEN_MAX {
                self.push_more(len - TOKEN_MAX);
            }
            let into = self.base.add(self.at);
            into.copy_from_nonoverlapping(source.block.add(from), len);
        }
        self.at += len;
        Some(())
    }
}

/// Apart, so that few registers are in its way.
///
/// # Safety
/// There is room for `count` bytes.
#[cold]
#[inline(never)]
unsafe fn push_full(base: *mut u8, at: usize, count: usize) -> usize {
    // SAFETY: by this function's contract.
    unsafe { base.add(at).write_bytes(255, count) };
    at + count
}

/// As above.
///
/// # Safety
/// Both have so many bytes, and are apart.
#[inline(never)]
unsafe fn copy(from: *const u8, into: *mut u8, len: usize) {
    // SAFETY: by this function's contract.
    unsafe { into.copy_from_nonoverlapping(from, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise, runs and repetitions in pieces of any length, so that matches are of any.
    fn block(random: &mut fastrand::Rng, len: usize) -> Vec<u8> {
        let mut block: Vec<u8> = Vec::with_capacity(len);
        let longest = 1 << random.u32(1..13);
        let values = *random.choice([2, 16, 255].iter()).unwrap();
        while block.len() < len {
            let piece = random.usize(1..=longest).min(len - block.len());
            match random.u8(0..4) {
                0 => block.extend((0..piece).map(|_| random.u8(..=values))),
                1 => block.resize(block.len() + piece, random.u8(..)),
                _ if block.is_empty() => block.push(random.u8(..)),
                _ => {
                    let from = random.usize(..block.len());
                    (from..from + piece).for_each(|at| block.push(block[at]));
                }
            }
        }
        block
    }

    /// Lengths at which something changes, and any.
    fn len(random: &mut fastrand::Rng) -> usize {
        match random.u8(0..8) {
            0 => random.usize(..40),
            1 => random.usize(..=POSITIONS),
            2 => POSITIONS,
            3 => random.usize(..5000),
            _ => 4096,
        }
    }

    fn seed() -> u64 {
        let seed = std::env::var("BLOCKYARD_SEED").ok().and_then(|seed| seed.parse().ok());
        seed.unwrap_or_else(|| fastrand::u64(..))
    }

    fn bound(len: usize) -> usize {
        len + len / 255 + 16
    }

    #[test]
    fn another_implementation_reads_what_is_made() {
        let seed = seed();
        println!("BLOCKYARD_SEED={seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut fast = Fast::new();
        for turn in 0..2000 {
            let len = len(&mut random);
            let block = block(&mut random, len);
            let mut packed = vec![0; bound(len)];
            let made = fast.compress(&block, &mut packed, usize::MAX, 1);
            let made = made.expect("that is room for anything");
            let back = lz4_flex::block::decompress(&packed[..made], len);
            assert!(back.ok().as_ref() == Some(&block), "turn {turn}, {len} bytes");
            // It writes where it may.
            let room = random.usize(..=made);
            packed.fill(0xa5);
            let fits = fast.compress(&block, &mut packed, room, 1);
            assert!(fits.is_none_or(|len| len <= room), "turn {turn}, {len} bytes into {room}");
            assert!(packed[room..].iter().all(|byte| *byte == 0xa5), "turn {turn}: into {room}");
        }
    }

    /// zram's, and the kernel's: the same search, so the same bytes, of whatever was before.
    #[cfg(feature = "c-codecs")]
    #[test]
    fn the_library_makes_the_same_bytes() {
        use std::ffi::{c_char, c_int, c_void};

        unsafe extern "C" {
            fn LZ4_sizeofState() -> c_int;
            fn LZ4_compress_fast_extState(
                state: *mut c_void,
                source: *const c_char,
                into: *mut c_char,
                source_len: c_int,
                into_len: c_int,
                acceleration: c_int,
            ) -> c_int;
        }

        let seed = seed();
        println!("BLOCKYARD_SEED={seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        // SAFETY: it takes nothing and answers a size.
        let mut state = vec![0u64; (unsafe { LZ4_sizeofState() } as usize).div_ceil(8)];
        let mut fast = Fast::new();
        for turn in 0..2000 {
            let len = len(&mut random);
            let block = block(&mut random, len);
            let (mut ours, mut theirs) = (vec![0; bound(len)], vec![0; bound(len)]);
            let full = random.bool();
            let room = if full { bound(len) } else { random.usize(..bound(len)) };
            let acceleration = if random.bool() { 1 } else { random.i32(1..=65_537) };
            let made = fast.compress(&block, &mut ours, room, acceleration).unwrap_or(0);
            // SAFETY: the state has its size and alignment, the lengths are those of the slices.
            let wanted = unsafe {
                LZ4_compress_fast_extState(
                    state.as_mut_ptr().cast(),
                    block.as_ptr().cast(),
                    theirs.as_mut_ptr().cast(),
                    len as c_int,
                    room as c_int,
                    acceleration,
                )
            };
            assert_eq!(made, wanted as usize, "turn {turn}: {len} bytes into {room}");
            assert!(ours[..made] == theirs[..made], "turn {turn}: {len} bytes into {room}");
        }
    }
}
