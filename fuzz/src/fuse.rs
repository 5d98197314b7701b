//! Requests of the kernel's FUSE. The bytes must parse to the same call, or to none, whether the
//! parts of the message come in one piece or in separate buffers.

use blockyard_fuse::wire::{Call, Header, IN_HEADER_BYTES, Out};

use crate::input::Input;

/// The most bytes of a call's fixed part, where it is separate from the rest.
const FIXED_BYTES: usize = 128;

/// Parses a message in both forms.
pub fn fuse_wire(bytes: &[u8]) {
    let Some(header) = Header::parse(bytes) else { return assert!(bytes.len() < IN_HEADER_BYTES) };
    let body = &bytes[IN_HEADER_BYTES..];
    // Most numbers are no call.
    let header = Header { opcode: header.opcode % 64, ..header };
    let whole = Call::of_body(&header, body);
    let len = header.fixed_bytes();
    assert!(len <= FIXED_BYTES);
    assert_eq!(whole.is_some(), body.len() >= len, "{header:?}");
    if let Some(whole) = whole {
        let mut fixed = [0; FIXED_BYTES];
        fixed[..len].copy_from_slice(&body[..len]);
        assert_eq!(Call::parse(header.opcode, &fixed, &body[len..]), Some(whole));
        if let Call::Lookup(name) = whole {
            assert!(!name.contains(&0) && name.len() <= body.len());
        }
    }
    directory(body);
}

/// Directory entries must fit their buffer and be aligned to words.
fn directory(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let room = input.below(256) as usize * 8 + 7;
    let mut out = Out::default();
    while !input.is_empty() {
        let name = "n".repeat(input.byte().into());
        let before = out.bytes().len();
        let fits = out.dir_entry(room, input.word(), input.word(), 0o100_600, &name);
        assert!(out.bytes().len() <= room && out.bytes().len().is_multiple_of(8));
        assert_eq!(fits, out.bytes().len() > before);
    }
}
