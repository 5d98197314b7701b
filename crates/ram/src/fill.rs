//! Same-filled blocks: one word repeated, which takes no memory.
#![allow(unsafe_code)]

/// Bytes of the repeated word, as in zram on a 64-bit machine.
const WORD: usize = 8;

/// The word that `block` repeats from start to end; `None` if it is not same-filled.
#[inline]
pub fn repeated_word(block: &[u8]) -> Option<u64> {
    let (first, last) = (block.first_chunk::<WORD>()?, block.last_chunk::<WORD>()?);
    // Most blocks that are not same-filled differ here already.
    let middle = block.get(block.len() / 2..block.len() / 2 + WORD)?;
    if first != last || first != middle {
        return None;
    }
    let same = block.len().is_multiple_of(WORD) && block[WORD..] == block[..block.len() - WORD];
    same.then(|| u64::from_ne_bytes(*first))
}

/// Fills memory with a repeated word.
///
/// # Safety
/// `into` must be valid for writes of `len_bytes`, a multiple of eight.
#[inline]
pub unsafe fn fill(into: *mut u8, len_bytes: usize, word: u64) {
    debug_assert!(len_bytes.is_multiple_of(WORD));
    let bytes = word.to_ne_bytes();
    if bytes == [bytes[0]; WORD] {
        // SAFETY: the caller's contract.
        unsafe { into.write_bytes(bytes[0], len_bytes) };
        return;
    }
    let words = into.cast::<u64>();
    for at in 0..len_bytes / WORD {
        // SAFETY: the caller's contract; an unaligned write needs no alignment.
        unsafe { words.add(at).write_unaligned(word) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(word: u64, len: usize) -> Vec<u8> {
        let mut block = vec![0xee; len + 1];
        // SAFETY: the vector has `len + 1` bytes, and `fill` accepts an odd address.
        unsafe { fill(block.as_mut_ptr().add(1), len, word) };
        block.remove(0);
        block
    }

    #[test]
    fn filled_memory_is_recognised_as_same_filled() {
        for word in [0, u64::MAX, 1, 0x0101_0101_0101_0101, 0x1234_5678_1234_5678, 0xdead << 40] {
            for len in [512, 4096, 65_536] {
                let block = filled(word, len);
                assert_eq!(repeated_word(&block), Some(word));
            }
        }
    }

    #[test]
    fn one_byte_that_differs_is_found_wherever_it_is() {
        for at in 0..4096 {
            let mut block = filled(0x5555_5555_5555_5555, 4096);
            block[at] ^= 1;
            assert_eq!(repeated_word(&block), None, "byte {at}");
        }
        let shifted: Vec<u8> = (0..4096).map(|at| (at % 16) as u8).collect();
        assert_eq!(repeated_word(&shifted), None);
    }
}
