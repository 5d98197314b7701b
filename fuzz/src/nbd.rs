//! NBD clients: a handshake and requests derived from the input, mostly well-formed, so that random
//! inputs get far; and the rules that every reply must satisfy.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_nbd::command::{CommandPlan, ExportRules, error_of};
use blockyard_nbd::exports::{ExportOptions, Exports};
use blockyard_nbd::handshake::{Handshake, HandshakeStep, TlsMode};
use blockyard_nbd::wire::{
    self, OPTION_MAGIC, OPTION_REPLY_MAGIC, Request, STRING_BYTES_MAX, StatusExtent, Style,
    WireError, command, export_flag, option,
};
use blockyard_null::{Null, NullConfig};

use crate::input::Input;

/// The length of an option reply's header.
const REPLY_HEAD_BYTES: usize = 20;

/// The longest reply to one option: a listing of the few exports here is far shorter.
const ANSWER_BYTES_MAX: usize = 8192;

/// Interprets the bytes as a client.
///
/// # Panics
/// If a reply is malformed or too long, if it depends on how the bytes were split, or if a request
/// would reach a disk that forbids it.
pub fn nbd_wire(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let exports = exports();
    let mode = input.choose(&[TlsMode::Off, TlsMode::Off, TlsMode::Off, TlsMode::On]);
    let refuse = input.below(8) == 0;
    let hello = hello(&mut input);
    let mut whole = HandshakeClient::new(&exports, mode, refuse);
    whole.send(&hello);
    let mut parts = HandshakeClient::new(&exports, mode, refuse);
    let mut left = &hello[..];
    while !left.is_empty() {
        let (part, rest) = left.split_at(left.len().min(1 + input.below(40) as usize));
        parts.send(part);
        left = rest;
    }
    // Bytes after a request for TLS end the connection only if they arrived together with it.
    if mode == TlsMode::Off {
        assert!(whole.out == parts.out, "the answer depends on how the bytes arrived");
        assert_eq!(whole.end, parts.end);
    }
    whole.check(hello.len());
    parts.check(hello.len());
    let styles = [Style::Simple, Style::Structured, Style::Extended];
    let export = input.choose(&[0, 1, 2]);
    let style = input.choose(&styles);
    let export = &exports.snapshot()[export];
    let minimum = export.block_sizes(input.below(2) == 0).minimum;
    let rules = ExportRules::new(export, style, input.below(2) == 0, minimum);
    while !input.is_empty() {
        request(&mut input, &rules);
    }
}

/// A disk that accepts every operation, a read-only one, and a zoned one.
fn exports() -> Arc<Exports> {
    let exports = Exports::new();
    let backed = NullConfig {
        size: 1 << 20,
        bs: 4096,
        memory_backed: true,
        discard: true,
        ..NullConfig::default()
    };
    let zoned = NullConfig { zoned: true, zone_size: 1 << 16, discard: false, ..backed.clone() };
    for (name, read_only, config) in
        [("mem", false, &backed), ("ro", true, &backed), ("z", false, &zoned)]
    {
        let null = Null::open(config.clone()).expect("the configuration fits");
        let depth = ChannelConfig { depth: 16 };
        let disk = Composed::new(name.to_owned(), "null", null, depth);
        let description = format!("the disk {name}");
        let options = ExportOptions { read_only, description, ..ExportOptions::default() };
        exports.add(name, Arc::new(disk), options).expect("three names that differ");
    }
    exports
}

/// The bytes that a client sends: flags, then options.
fn hello(input: &mut Input<'_>) -> Vec<u8> {
    if input.below(16) == 1 {
        let len = input.below(256) as usize;
        return input.take(len).to_vec();
    }
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&input.choose(&[3u32, 3, 3, 1, 0, 255]).to_be_bytes());
    for _ in 0..input.below(24) {
        let data = option_data(input);
        let magic = if input.below(64) == 1 { input.word() } else { OPTION_MAGIC };
        let len = match input.below(64) {
            1 => input.word() as u32,
            2 => data.len() as u32 + 1,
            _ => data.len() as u32,
        };
        let known = [
            option::GO,
            option::INFO,
            option::LIST,
            option::EXPORT_NAME,
            option::STRUCTURED_REPLY,
            option::EXTENDED_HEADERS,
            option::SET_META_CONTEXT,
            option::LIST_META_CONTEXT,
            option::STARTTLS,
            option::ABORT,
            4,
            u32::MAX,
        ];
        bytes.extend_from_slice(&magic.to_be_bytes());
        bytes.extend_from_slice(&input.choose(&known).to_be_bytes());
        bytes.extend_from_slice(&len.to_be_bytes());
        bytes.extend_from_slice(&data);
    }
    bytes
}

/// The data of an option, in the format of any option.
fn option_data(input: &mut Input<'_>) -> Vec<u8> {
    let mut data = Vec::new();
    let string = |data: &mut Vec<u8>, text: &[u8]| {
        data.extend_from_slice(&(text.len() as u32).to_be_bytes());
        data.extend_from_slice(text);
    };
    let names: [&[u8]; 6] = [b"mem", b"ro", b"z", b"", b"none", b"\xff\0"];
    match input.below(6) {
        0 => {}
        1 => {
            string(&mut data, input.choose(&names));
            let count = input.below(5) as u16;
            data.extend_from_slice(&count.to_be_bytes());
            for _ in 0..count {
                data.extend_from_slice(&input.choose(&[0u16, 1, 2, 3, 9]).to_be_bytes());
            }
        }
        2 => {
            string(&mut data, input.choose(&names));
            let count = input.below(4) as u32;
            data.extend_from_slice(&count.to_be_bytes());
            let queries: [&[u8]; 4] = [b"base:allocation", b"base:", b"qemu:dirty", b"nothing"];
            for _ in 0..count {
                string(&mut data, input.choose(&queries));
            }
        }
        3 => data.extend_from_slice(input.choose(&names)),
        4 => {
            let len = input.below(64) as usize;
            data.extend_from_slice(input.take(len));
        }
        _ => data.resize(64 * input.below(256) as usize, input.byte()),
    }
    data
}

/// A handshake under test, driven as a session drives it.
struct HandshakeClient {
    handshake: Handshake,
    refuse: bool,
    received: Vec<u8>,
    out: Vec<u8>,
    /// The reason for which it ended.
    end: Option<String>,
    /// The length of a reply without a header at the end of the output.
    headless_bytes: usize,
}

impl HandshakeClient {
    fn new(exports: &Arc<Exports>, mode: TlsMode, refuse: bool) -> HandshakeClient {
        let mut out = Vec::new();
        let handshake = Handshake::new(Arc::clone(exports), mode, &mut out);
        HandshakeClient {
            handshake,
            refuse,
            received: Vec::new(),
            out,
            end: None,
            headless_bytes: 0,
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
        while self.end.is_none() {
            let (used, step) = self.handshake.feed(&self.received, &mut self.out);
            assert!(used <= self.received.len(), "used more than there was");
            self.received.drain(..used);
            match step {
                HandshakeStep::More if used > 0 && !self.received.is_empty() => {}
                HandshakeStep::More => return,
                HandshakeStep::StartTls => self.end = Some("TLS".to_owned()),
                HandshakeStep::Close(reason) => self.end = Some(format!("{reason:?}")),
                HandshakeStep::Enter => self.enter(),
            }
        }
    }

    fn enter(&mut self) {
        let chosen = self.handshake.chosen().expect("an export was chosen");
        if self.refuse {
            if let HandshakeStep::Close(reason) = self.handshake.refuse("not today", &mut self.out)
            {
                self.end = Some(format!("{reason:?}"));
            }
            return;
        }
        let before = self.out.len();
        let negotiated = self.handshake.accept(&mut self.out).expect("an export was chosen");
        assert_eq!(negotiated.export.name(), chosen.name());
        assert!(!negotiated.contexts || negotiated.style >= Style::Structured);
        // Only the reply to EXPORT_NAME has no header: size, flags and perhaps zeroes.
        let answer = &self.out[before..];
        if !answer.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()) {
            assert!(answer.len() == 10 || answer.len() == 134, "{} bytes", answer.len());
            self.headless_bytes = answer.len();
        }
        self.end = Some(format!("in as {:?} of {}", negotiated.style, chosen.name()));
    }

    /// The output is a greeting and complete replies, and not too long for the bytes that were
    /// sent.
    fn check(&self, sent_bytes: usize) {
        let (greeting, replies) = self.out.split_at(wire::greeting().len());
        assert_eq!(greeting, wire::greeting());
        let mut left = &replies[..replies.len() - self.headless_bytes];
        while !left.is_empty() {
            assert!(left.len() >= REPLY_HEAD_BYTES, "half a reply");
            let (head, rest) = left.split_at(REPLY_HEAD_BYTES);
            assert_eq!(head[..8], OPTION_REPLY_MAGIC.to_be_bytes());
            let len = u32::from_be_bytes([head[16], head[17], head[18], head[19]]) as usize;
            assert!(len <= 2 * STRING_BYTES_MAX + 4, "a reply of {len} bytes");
            assert!(len <= rest.len(), "a reply says {len} bytes, {} are left", rest.len());
            left = &rest[len..];
        }
        let options = sent_bytes / wire::OPTION_HEADER_BYTES + 1;
        assert!(replies.len() <= options * ANSWER_BYTES_MAX, "{} bytes", replies.len());
    }
}

/// Checks one request, well-formed or not, and its plan and replies.
fn request(input: &mut Input<'_>, rules: &ExportRules) {
    let wanted = Request {
        flags: if input.below(4) == 0 { input.byte().into() } else { 0 },
        command: if input.below(16) == 1 { input.word() as u16 } else { input.below(9) as u16 },
        cookie: input.word(),
        offset: number(input, rules),
        len: number(input, rules)
            & if rules.style == Style::Extended { u64::MAX } else { 0xffff_ffff },
    };
    let mut bytes = print_request(&wanted, rules.style);
    assert_eq!(bytes.len(), rules.style.request_bytes());
    assert_eq!(wire::parse_request(&bytes, rules.style), Ok(wanted), "printed and read back");
    let cut = input.below(bytes.len() as u64) as usize;
    assert_eq!(wire::parse_request(&bytes[..cut], rules.style), Err(WireError::Truncated));
    bytes[usize::from(input.byte()) % 4] ^= 1;
    let spoilt = wire::parse_request(&bytes, rules.style);
    assert!(matches!(spoilt, Err(WireError::Magic { .. })), "{spoilt:?}");
    let payload = wanted.payload_bytes(rules.style);
    assert!(payload == 0 || payload == wanted.len);
    let _ = wire::parse_status_payload(input.take(40)).map(|(_, ids)| ids.count());
    check_plan(&wanted, rules);
    check_replies(input, &wanted, rules.style);
}

/// Mostly blocks of the export, or its end, or any number.
fn number(input: &mut Input<'_>, rules: &ExportRules) -> u64 {
    match input.below(8) {
        0 => rules.len_bytes - input.below(4) * rules.block_bytes,
        1 => input.word(),
        2 => input.below(256),
        _ => input.below(256) * rules.block_bytes,
    }
}

/// Prints a request as another client would send it, independently of the product.
fn print_request(request: &Request, style: Style) -> Vec<u8> {
    let mut bytes = Vec::new();
    let magic: u32 = if style == Style::Extended { 0x21e4_1c71 } else { 0x2560_9513 };
    bytes.extend_from_slice(&magic.to_be_bytes());
    bytes.extend_from_slice(&request.flags.to_be_bytes());
    bytes.extend_from_slice(&request.command.to_be_bytes());
    bytes.extend_from_slice(&request.cookie.to_be_bytes());
    bytes.extend_from_slice(&request.offset.to_be_bytes());
    match style {
        Style::Extended => bytes.extend_from_slice(&request.len.to_be_bytes()),
        _ => bytes.extend_from_slice(&(request.len as u32).to_be_bytes()),
    }
    bytes
}

/// An executed request lies on the export, in blocks that the client may use, and is allowed.
fn check_plan(request: &Request, rules: &ExportRules) {
    let CommandPlan::Io { op, offset, len, .. } = rules.plan(request) else { return };
    let end = offset.checked_add(len).expect("a range of an export");
    assert!(end <= rules.len_bytes, "{request:?} reaches beyond the export");
    assert!((offset | len).is_multiple_of(rules.min_block_bytes));
    assert!(op.name() != "discard" || (offset | len).is_multiple_of(rules.block_bytes));
    assert!(
        !op.is_write() || rules.flags & export_flag::READ_ONLY == 0,
        "{op} on a read-only export"
    );
    assert!(!op.has_data() || len <= u64::from(wire::REQUEST_BYTES_MAX));
    let asked = match request.command {
        command::READ => op.name() == "read",
        command::WRITE => op.name() == "write",
        command::FLUSH => op.name() == "flush",
        command::TRIM => op.name() == "discard",
        command::WRITE_ZEROES => op.name() == "write_zeroes",
        _ => false,
    };
    assert!(asked, "{op} for command {}", request.command);
}

/// Replies have the length that their headers say.
fn check_replies(input: &mut Input<'_>, request: &Request, style: Style) {
    let origin = request.origin();
    let status = input.choose(Status::ALL);
    if let Some(error) = error_of(status) {
        let mut out = Vec::new();
        let text = "e".repeat(input.choose(&[0, 1, 20, STRING_BYTES_MAX, STRING_BYTES_MAX + 9]));
        wire::print_error(&mut out, style, origin, error, &text);
        assert_eq!(chunk_payload(&out, style), chunk_rest(&out, style), "error {error:?}");
    }
    let len = request.len % (1 << 20);
    let head = wire::read_head(style, origin, len);
    let wanted = if len == 0 { style_head_bytes(style) } else { style.read_head_bytes() };
    assert_eq!(head.bytes().len(), wanted, "read of {len} bytes");
    if style != Style::Simple {
        let extents = vec![StatusExtent { len: 4096, state: 3 }; input.below(20) as usize + 1];
        let mut out = Vec::new();
        wire::print_status(&mut out, style, origin, &extents);
        assert_eq!(chunk_payload(&out, style), chunk_rest(&out, style), "status");
    }
}

/// The length of a chunk's header.
fn style_head_bytes(style: Style) -> usize {
    match style {
        Style::Simple => 16,
        Style::Structured => 20,
        Style::Extended => 32,
    }
}

/// The payload's length by the header; 0 for a simple reply.
fn chunk_payload(out: &[u8], style: Style) -> usize {
    match style {
        Style::Simple => 0,
        Style::Structured => u32::from_be_bytes([out[16], out[17], out[18], out[19]]) as usize,
        Style::Extended => {
            let len: [u8; 8] = out[24..32].try_into().expect("eight bytes");
            u64::from_be_bytes(len) as usize
        }
    }
}

/// The actual length of the payload.
fn chunk_rest(out: &[u8], style: Style) -> usize {
    out.len() - style_head_bytes(style)
}
