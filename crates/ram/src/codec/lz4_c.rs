//! LZ4 by its author's C library.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use crate::error::Damaged;

// Links the library. It does not declare the functions for callers that bring their own state.
use lz4_sys as _;

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
    fn LZ4_sizeofStateHC() -> c_int;
    fn LZ4_compress_HC_extStateHC(
        state: *mut c_void,
        source: *const c_char,
        into: *mut c_char,
        source_len: c_int,
        into_len: c_int,
        level: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe(
        source: *const c_char,
        into: *mut c_char,
        source_len: c_int,
        into_len: c_int,
    ) -> c_int;
}

/// Memory for a compressor, with the alignment that the library requires.
type State = Box<[u64]>;

fn state(len_bytes: c_int) -> State {
    vec![0; (len_bytes as usize).div_ceil(8)].into_boxed_slice()
}

fn len(slice: &[u8]) -> c_int {
    c_int::try_from(slice.len()).expect("blocks are 64 KiB at most")
}

/// Converts the library's return value to a length; 0 or less is an error.
fn packed(answer: c_int) -> Option<usize> {
    usize::try_from(answer).ok().filter(|len| *len > 0)
}

/// The fast compressor.
#[derive(Debug)]
pub(super) struct Fast(State);

impl Fast {
    pub(super) fn new() -> Fast {
        // SAFETY: the function takes no argument and returns a size.
        Fast(state(unsafe { LZ4_sizeofState() }))
    }

    #[inline]
    pub(super) fn compress(
        &mut self,
        block: &[u8],
        into: &mut [u8],
        len_max: usize,
        acceleration: i32,
    ) -> Option<usize> {
        let room = len_max.min(into.len()) as c_int;
        // SAFETY: the state has the size and alignment that the library requires, and only this
        // function uses it. The library reads `block`, which no thread changes during the call: it
        // reads some bytes again and relies on finding the same values. It writes at most `room`
        // bytes, which `into` has.
        packed(unsafe {
            LZ4_compress_fast_extState(
                self.0.as_mut_ptr().cast(),
                block.as_ptr().cast(),
                into.as_mut_ptr().cast(),
                len(block),
                room,
                acceleration,
            )
        })
    }
}

/// The slow compressor with the higher compression ratio.
#[derive(Debug)]
pub(super) struct High(State);

impl High {
    pub(super) fn new() -> High {
        // SAFETY: the function takes no argument and returns a size.
        High(state(unsafe { LZ4_sizeofStateHC() }))
    }

    pub(super) fn compress(
        &mut self,
        block: &[u8],
        into: &mut [u8],
        len_max: usize,
        level: i32,
    ) -> Option<usize> {
        let room = len_max.min(into.len()) as c_int;
        // SAFETY: as in `Fast::compress`.
        packed(unsafe {
            LZ4_compress_HC_extStateHC(
                self.0.as_mut_ptr().cast(),
                block.as_ptr().cast(),
                into.as_mut_ptr().cast(),
                len(block),
                room,
                level,
            )
        })
    }
}

/// Decompresses `packed` to exactly `len_bytes`.
///
/// # Safety
/// `into` must be valid for reads and writes of `len_bytes`. Other threads or processes may access
/// these bytes concurrently, as they may a buffer under I/O: the library copies within them, and
/// their values do not affect its control flow.
#[inline]
pub(super) unsafe fn decompress(
    packed: &[u8],
    into: *mut u8,
    len_bytes: usize,
) -> Result<(), Damaged> {
    // SAFETY: the library reads `packed` within its length, even if it is damaged. It writes within
    // `len_bytes`, which is valid by this function's own contract.
    let answer = unsafe {
        LZ4_decompress_safe(
            packed.as_ptr().cast(),
            into.cast(),
            len(packed),
            c_int::try_from(len_bytes).expect("blocks are 64 KiB at most"),
        )
    };
    if usize::try_from(answer) == Ok(len_bytes) { Ok(()) } else { Err(Damaged) }
}
