//! Buffers of serving threads and lanes: sizes, and bytes of a region for a reply.
#![allow(unsafe_code)] // A reply is sent from where the device put the data.

use blockyard_core::Region;

/// Longest read or write that the kernel is told to send, in bytes.
pub(crate) const IO_BYTES_MAX: u64 = 1 << 20;

/// Largest logical block of a device with a file, in bytes.
pub(crate) const BLOCK_BYTES_MAX: u64 = 64 << 10;

/// A buffer for the blocks around any request.
pub(crate) const BUFFER_BYTES: u64 = IO_BYTES_MAX + 2 * BLOCK_BYTES_MAX;

/// Bytes of a region, to be sent.
///
/// # Safety
/// While the slice lives no bio on these bytes may be in flight and nobody may write to them.
///
/// # Panics
/// If the range does not lie inside the region.
pub(crate) unsafe fn bytes(region: &Region, offset: u64, len: u64) -> &[u8] {
    let start = region.range(offset, len).expect("buffers are cut by our own rules");
    // SAFETY: `range` checked that the bytes lie in the region's memory, which lives as long as the
    // region, has been written or zeroed, and is not changed meanwhile, as the caller promises.
    unsafe { std::slice::from_raw_parts(start.as_ptr(), len as usize) }
}
