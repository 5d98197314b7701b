//! The NBD wire format: bytes to values and values to bytes, and nothing else.
//!
//! No I/O, no state, and no panic whatever the bytes are. Sections named in comments are those of
//! the protocol document, `doc/proto.md` of the NBD project.

use std::fmt;

/// `NBDMAGIC`, the first eight bytes from the server.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: the newstyle magic, and the magic of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Magic of the reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Magic of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Magic of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The length of the server's greeting.
pub const GREETING_BYTES: usize = 18;
/// The length of the client's flags.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// The length of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;
/// The length of a compact request's header.
pub const REQUEST_BYTES: usize = 28;
/// The length of an extended request's header.
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// The longest string in the protocol ("Conventions").
pub const STRING_BYTES_MAX: usize = 4096;
/// The longest read or write, in bytes: the maximally portable one of "Block size constraints".
pub const REQUEST_BYTES_MAX: u32 = 32 << 20;
/// The longest header of a reply that `ReplyHeader` holds.
pub const HEAD_BYTES_MAX: usize = 40;
/// Zero bytes that end the reply to `NBD_OPT_EXPORT_NAME` unless the client declined them.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// Handshake flags, sent by the server: `NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES`.
pub const HANDSHAKE_FLAGS: u16 = 0b11;
/// The client speaks fixed newstyle.
pub const CLIENT_FIXED_NEWSTYLE: u32 = 1;
/// The client does not want the zeroes after the reply to `NBD_OPT_EXPORT_NAME`.
pub const CLIENT_NO_ZEROES: u32 = 2;

/// Option types ("Option types").
pub mod option {
    /// Choose an export and enter transmission; cannot be refused but by closing.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Upgrade to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and enter transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Option reply types ("Option reply types").
pub mod option_reply {
    /// Accepted, or the end of a list.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// A piece of information on an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// An option that this server does not know.
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    /// Forbidden here.
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    /// Makes no sense.
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    /// Only after TLS has been started.
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = (1 << 31) + 7;
    /// The client must ask for block sizes.
    pub const ERR_BLOCK_SIZE_REQD: u32 = (1 << 31) + 8;
    /// Too large.
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
    /// Extended headers make this option meaningless.
    pub const ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;
}

/// Information types in `NBD_REP_INFO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// The description.
    pub const DESCRIPTION: u16 = 2;
    /// Block size constraints.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags ("Transmission flags").
pub mod export_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_CMD_FLUSH` is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_FUA` is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_CMD_TRIM` is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_CMD_WRITE_ZEROES` is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_CMD_FLAG_DF` is understood.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see the same data, and a flush on one covers all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_CMD_CACHE` is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_CMD_FLAG_FAST_ZERO` is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `NBD_CMD_BLOCK_STATUS` may carry a payload that selects contexts.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Request types ("Request types").
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Disconnect.
    pub const DISC: u16 = 2;
    /// Flush.
    pub const FLUSH: u16 = 3;
    /// Trim.
    pub const TRIM: u16 = 4;
    /// Prefetch.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Block status.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags ("Command flags").
pub mod command_flag {
    /// Reply only when the data are durable.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Do not fragment the reply to a read.
    pub const DF: u16 = 1 << 2;
    /// Only one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zero fast or not at all.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of the payload that follows.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Structured reply chunk types ("Structured reply types").
pub mod chunk {
    /// Nothing more; only ever last.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An error.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// Flag: the last chunk of this reply.
    pub const FLAG_DONE: u16 = 1;
}

/// `base:allocation`: nothing is held for the extent.
pub const STATE_HOLE: u32 = 1;
/// `base:allocation`: the extent reads as zeros.
pub const STATE_ZERO: u32 = 2;
/// The one metadata context.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The id under which the server knows it.
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Errors of the transmission phase ("Error values").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// The export is read-only.
    Perm = 1,
    /// I/O error.
    Io = 5,
    /// No memory for the request.
    NoMem = 12,
    /// The request makes no sense.
    Inval = 22,
    /// No space, or beyond the end.
    NoSpc = 28,
    /// Too long to be answered in one chunk.
    Overflow = 75,
    /// Not supported, or not fast.
    NotSup = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

/// The format of a connection's requests and replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Style {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests and replies.
    Extended,
}

impl Style {
    /// The length of a request's header.
    #[inline]
    pub const fn request_bytes(self) -> usize {
        match self {
            Style::Simple | Style::Structured => REQUEST_BYTES,
            Style::Extended => EXTENDED_REQUEST_BYTES,
        }
    }

    /// The number of bytes before the data in the reply to a read.
    #[inline]
    pub const fn read_head_bytes(self) -> usize {
        match self {
            Style::Simple => 16,
            Style::Structured => 28,
            Style::Extended => 40,
        }
    }
}

/// The bytes violate the protocol. The connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// A magic number is wrong.
    Magic {
        /// The number that was received.
        found: u64,
        /// The number that the protocol requires.
        wanted: u64,
    },
    /// A message ends before its own length says so.
    Truncated,
    /// A string is longer than the protocol allows, or not UTF-8.
    String,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Magic { found, wanted } => {
                write!(f, "magic {found:#x} where {wanted:#x} must come")
            }
            WireError::Truncated => f.write_str("a message ends before its own length says"),
            WireError::String => {
                write!(f, "a string above {STRING_BYTES_MAX} bytes or not UTF-8")
            }
        }
    }
}

impl std::error::Error for WireError {}

/// A cursor over untrusted bytes.
#[derive(Clone, Copy, Debug)]
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (head, tail) = self.0.split_at_checked(len).ok_or(WireError::Truncated)?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(WireError::Truncated)?;
        self.0 = tail;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A 32-bit length and a string of that length.
    fn string(&mut self) -> Result<&'a str, WireError> {
        let len = self.u32()? as usize;
        parse_name(self.take(len)?)
    }
}

/// Parses all of `bytes` as a string ("Conventions": UTF-8, no NUL, at most 4096 bytes).
///
/// # Errors
/// If it is too long, holds a NUL or is not UTF-8.
pub fn parse_name(bytes: &[u8]) -> Result<&str, WireError> {
    if bytes.len() > STRING_BYTES_MAX || bytes.contains(&0) {
        return Err(WireError::String);
    }
    std::str::from_utf8(bytes).map_err(|_| WireError::String)
}

/// The server's greeting ("Newstyle negotiation").
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes[16..].copy_from_slice(&HANDSHAKE_FLAGS.to_be_bytes());
    bytes
}

/// An option's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// The type of the option; see [`option`].
    pub option: u32,
    /// The length of the data that follow.
    pub len: u32,
}

/// Parses the client's flags.
///
/// # Errors
/// If there are not four bytes.
pub fn parse_client_flags(bytes: &[u8]) -> Result<u32, WireError> {
    Cursor(bytes).u32()
}

/// Parses an option's header.
///
/// # Errors
/// If the magic is wrong or bytes are missing.
pub fn parse_option_header(bytes: &[u8]) -> Result<OptionHeader, WireError> {
    let mut cursor = Cursor(bytes);
    let found = cursor.u64()?;
    if found != OPTION_MAGIC {
        return Err(WireError::Magic { found, wanted: OPTION_MAGIC });
    }
    Ok(OptionHeader { option: cursor.u32()?, len: cursor.u32()? })
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export's name; empty for the default export.
    pub name: &'a str,
    /// Whether the canonical name was asked for.
    pub name_wanted: bool,
    /// Whether the description was asked for.
    pub description_wanted: bool,
    /// Whether block size constraints were asked for.
    pub block_size_wanted: bool,
}

/// Parses the data of `NBD_OPT_INFO` or `NBD_OPT_GO`. Unknown information requests are ignored.
///
/// # Errors
/// If the lengths do not add up.
pub fn parse_info_request(bytes: &[u8]) -> Result<InfoRequest<'_>, WireError> {
    let mut cursor = Cursor(bytes);
    let mut request = InfoRequest { name: cursor.string()?, ..InfoRequest::default() };
    for _ in 0..cursor.u16()? {
        match cursor.u16()? {
            info::NAME => request.name_wanted = true,
            info::DESCRIPTION => request.description_wanted = true,
            info::BLOCK_SIZE => request.block_size_wanted = true,
            _ => {}
        }
    }
    if cursor.0.is_empty() { Ok(request) } else { Err(WireError::Truncated) }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextQuery<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The number of queries.
    pub queries: u32,
    /// Whether a query is `base:`, which means every context of that namespace when listing.
    pub base_wildcard: bool,
    /// Whether a query is `base:allocation`.
    pub base_allocation: bool,
}

/// Parses the data of the metadata context options. Queries of other namespaces are ignored, as the
/// document requires.
///
/// # Errors
/// If the lengths do not add up, or a query has no namespace.
pub fn parse_context_query(bytes: &[u8]) -> Result<ContextQuery<'_>, WireError> {
    let mut cursor = Cursor(bytes);
    let name = cursor.string()?;
    let queries = cursor.u32()?;
    let mut query = ContextQuery { name, queries, base_wildcard: false, base_allocation: false };
    for _ in 0..queries {
        let text = cursor.string()?;
        if !text.contains(':') {
            return Err(WireError::String);
        }
        query.base_wildcard |= text == "base:";
        query.base_allocation |= text == BASE_ALLOCATION;
    }
    if cursor.0.is_empty() { Ok(query) } else { Err(WireError::Truncated) }
}

/// Appends a reply to an option.
pub fn print_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&reply.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

/// The data of `NBD_REP_SERVER`.
pub fn server_data(name: &str, description: &str) -> Vec<u8> {
    let mut data = Vec::with_capacity(4 + name.len() + description.len());
    data.extend_from_slice(&(name.len() as u32).to_be_bytes());
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(description.as_bytes());
    data
}

/// The data of `NBD_REP_META_CONTEXT`.
pub fn context_data(id: u32, name: &str) -> Vec<u8> {
    let mut data = Vec::with_capacity(4 + name.len());
    data.extend_from_slice(&id.to_be_bytes());
    data.extend_from_slice(name.as_bytes());
    data
}

/// `NBD_INFO_EXPORT`.
pub fn info_export(len_bytes: u64, flags: u16) -> [u8; 12] {
    let mut data = [0; 12];
    data[..2].copy_from_slice(&info::EXPORT.to_be_bytes());
    data[2..10].copy_from_slice(&len_bytes.to_be_bytes());
    data[10..].copy_from_slice(&flags.to_be_bytes());
    data
}

/// `NBD_INFO_NAME` or `NBD_INFO_DESCRIPTION`.
pub fn info_text(kind: u16, text: &str) -> Vec<u8> {
    let mut data = Vec::with_capacity(2 + text.len());
    data.extend_from_slice(&kind.to_be_bytes());
    data.extend_from_slice(text.as_bytes());
    data
}

/// Block size constraints, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths must be multiples of this.
    pub minimum: u32,
    /// Smallest efficient request.
    pub preferred: u32,
    /// Longest read or write.
    pub maximum: u32,
}

/// `NBD_INFO_BLOCK_SIZE`.
pub fn info_block_size(sizes: BlockSizes) -> [u8; 14] {
    let mut data = [0; 14];
    data[..2].copy_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    data[2..6].copy_from_slice(&sizes.minimum.to_be_bytes());
    data[6..10].copy_from_slice(&sizes.preferred.to_be_bytes());
    data[10..].copy_from_slice(&sizes.maximum.to_be_bytes());
    data
}

/// Appends the reply to `NBD_OPT_EXPORT_NAME`, which has no header.
pub fn print_export_name_reply(out: &mut Vec<u8>, len_bytes: u64, flags: u16, zeroes: bool) {
    out.extend_from_slice(&len_bytes.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    if zeroes {
        out.extend_from_slice(&[0; EXPORT_NAME_ZEROES]);
    }
}

/// A request ("Request message", "Extended request message").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The flags; see [`command_flag`].
    pub flags: u16,
    /// The type; see [`command`].
    pub command: u16,
    /// The client's identifier of the request.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// The length in bytes: of the affected range, or of the payload.
    pub len: u64,
}

/// Parses a request's header from the first [`Style::request_bytes`] bytes.
///
/// # Errors
/// If the magic is wrong, after which the next request cannot be found, or if bytes are missing.
#[inline]
pub fn parse_request(bytes: &[u8], style: Style) -> Result<Request, WireError> {
    let mut cursor = Cursor(bytes);
    let wanted = match style {
        Style::Simple | Style::Structured => REQUEST_MAGIC,
        Style::Extended => EXTENDED_REQUEST_MAGIC,
    };
    let found = cursor.u32()?;
    if found != wanted {
        return Err(WireError::Magic { found: u64::from(found), wanted: u64::from(wanted) });
    }
    Ok(Request {
        flags: cursor.u16()?,
        command: cursor.u16()?,
        cookie: cursor.u64()?,
        offset: cursor.u64()?,
        len: match style {
            Style::Simple | Style::Structured => u64::from(cursor.u32()?),
            Style::Extended => cursor.u64()?,
        },
    })
}

impl Request {
    /// Whether this flag is set.
    #[inline]
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The length of the payload that follows the header.
    ///
    /// A write without the payload flag in extended style violates the protocol; its payload is
    /// read all the same, as other servers do.
    #[inline]
    pub const fn payload_bytes(&self, style: Style) -> u64 {
        let flagged = matches!(style, Style::Extended) && self.has(command_flag::PAYLOAD_LEN);
        if self.command == command::WRITE || flagged { self.len } else { 0 }
    }
}

/// Parses the payload of a block status request: the length of the range and the context ids.
/// `None` if it is malformed.
pub fn parse_status_payload(bytes: &[u8]) -> Option<(u64, impl Iterator<Item = u32> + '_)> {
    let mut cursor = Cursor(bytes);
    let effect_bytes = cursor.u64().ok()?;
    let (ids, []) = cursor.0.as_chunks::<4>() else { return None };
    Some((effect_bytes, ids.iter().map(|id| u32::from_be_bytes(*id))))
}

/// The header of a reply: everything before its data.
#[derive(Clone, Copy, Debug)]
pub struct ReplyHeader {
    bytes: [u8; HEAD_BYTES_MAX],
    len: usize,
}

impl ReplyHeader {
    const EMPTY: ReplyHeader = ReplyHeader { bytes: [0; HEAD_BYTES_MAX], len: 0 };

    #[inline]
    fn put<const N: usize>(mut self, bytes: [u8; N]) -> ReplyHeader {
        self.bytes[self.len..self.len + N].copy_from_slice(&bytes);
        self.len += N;
        self
    }

    /// The header's bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The fields of a request that its reply repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The request's cookie.
    pub cookie: u64,
    /// The request's offset, which extended headers repeat.
    pub offset: u64,
}

impl Request {
    /// The fields of this request that its replies repeat.
    #[inline]
    pub const fn origin(&self) -> Origin {
        Origin { cookie: self.cookie, offset: self.offset }
    }
}

/// The header of a simple reply.
#[inline]
pub fn simple_head(cookie: u64, error: u32) -> ReplyHeader {
    ReplyHeader::EMPTY
        .put(SIMPLE_REPLY_MAGIC.to_be_bytes())
        .put(error.to_be_bytes())
        .put(cookie.to_be_bytes())
}

/// The header of a chunk, structured or extended.
#[inline]
pub fn chunk_head(
    style: Style,
    flags: u16,
    kind: u16,
    origin: Origin,
    payload: u64,
) -> ReplyHeader {
    if style == Style::Extended {
        ReplyHeader::EMPTY
            .put(EXTENDED_REPLY_MAGIC.to_be_bytes())
            .put(flags.to_be_bytes())
            .put(kind.to_be_bytes())
            .put(origin.cookie.to_be_bytes())
            .put(origin.offset.to_be_bytes())
            .put(payload.to_be_bytes())
    } else {
        ReplyHeader::EMPTY
            .put(STRUCTURED_REPLY_MAGIC.to_be_bytes())
            .put(flags.to_be_bytes())
            .put(kind.to_be_bytes())
            .put(origin.cookie.to_be_bytes())
            .put((payload as u32).to_be_bytes())
    }
}

/// The header of a successful reply without data.
#[inline]
pub fn ok_head(style: Style, origin: Origin) -> ReplyHeader {
    match style {
        // "Simple reply message": also allowed under structured replies if there is no data, and
        // four bytes shorter.
        Style::Simple | Style::Structured => simple_head(origin.cookie, 0),
        Style::Extended => chunk_head(style, chunk::FLAG_DONE, chunk::NONE, origin, 0),
    }
}

/// The header of a successful read of `len` bytes, which follow it.
#[inline]
pub fn read_head(style: Style, origin: Origin, len: u64) -> ReplyHeader {
    match style {
        Style::Simple => simple_head(origin.cookie, 0),
        // NBD_CMD_READ: a content chunk has at least one byte.
        _ if len == 0 => chunk_head(style, chunk::FLAG_DONE, chunk::NONE, origin, 0),
        _ => chunk_head(style, chunk::FLAG_DONE, chunk::OFFSET_DATA, origin, 8 + len)
            .put(origin.offset.to_be_bytes()),
    }
}

/// Appends an error reply with a text for people, if the style can carry one.
pub fn print_error(out: &mut Vec<u8>, style: Style, origin: Origin, error: NbdError, text: &str) {
    if style == Style::Simple {
        out.extend_from_slice(simple_head(origin.cookie, error as u32).bytes());
        return;
    }
    let text = &text.as_bytes()[..text.len().min(STRING_BYTES_MAX)];
    let payload = 6 + text.len() as u64;
    let head = chunk_head(style, chunk::FLAG_DONE, chunk::ERROR, origin, payload);
    out.extend_from_slice(head.bytes());
    out.extend_from_slice(&(error as u32).to_be_bytes());
    out.extend_from_slice(&(text.len() as u16).to_be_bytes());
    out.extend_from_slice(text);
}

/// One extent of `base:allocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes.
    pub len: u64,
    /// [`STATE_HOLE`] and [`STATE_ZERO`].
    pub state: u32,
}

/// Appends the reply to a block status request.
///
/// In structured style lengths have 32 bits: the caller passes none above.
pub fn print_status(out: &mut Vec<u8>, style: Style, origin: Origin, extents: &[StatusExtent]) {
    let count = extents.len() as u64;
    if style == Style::Extended {
        let kind = chunk::BLOCK_STATUS_EXT;
        let head = chunk_head(style, chunk::FLAG_DONE, kind, origin, 8 + 16 * count);
        out.extend_from_slice(head.bytes());
        out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        out.extend_from_slice(&(count as u32).to_be_bytes());
        for extent in extents {
            out.extend_from_slice(&extent.len.to_be_bytes());
            out.extend_from_slice(&u64::from(extent.state).to_be_bytes());
        }
    } else {
        let kind = chunk::BLOCK_STATUS;
        let head = chunk_head(style, chunk::FLAG_DONE, kind, origin, 4 + 8 * count);
        out.extend_from_slice(head.bytes());
        out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        for extent in extents {
            out.extend_from_slice(&(extent.len as u32).to_be_bytes());
            out.extend_from_slice(&extent.state.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(style: Style) -> Vec<u8> {
        let mut bytes = Vec::new();
        let magic = match style {
            Style::Extended => EXTENDED_REQUEST_MAGIC,
            _ => REQUEST_MAGIC,
        };
        bytes.extend_from_slice(&magic.to_be_bytes());
        bytes.extend_from_slice(&command_flag::FUA.to_be_bytes());
        bytes.extend_from_slice(&command::WRITE.to_be_bytes());
        bytes.extend_from_slice(&7u64.to_be_bytes());
        bytes.extend_from_slice(&4096u64.to_be_bytes());
        match style {
            Style::Extended => bytes.extend_from_slice(&512u64.to_be_bytes()),
            _ => bytes.extend_from_slice(&512u32.to_be_bytes()),
        }
        bytes
    }

    #[test]
    fn requests_are_read_in_both_forms() {
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            let bytes = request(style);
            assert_eq!(bytes.len(), style.request_bytes());
            let parsed = parse_request(&bytes, style).unwrap();
            assert_eq!((parsed.cookie, parsed.offset, parsed.len), (7, 4096, 512));
            assert_eq!(parsed.payload_bytes(style), 512);
            for len in 0..bytes.len() {
                assert_eq!(parse_request(&bytes[..len], style), Err(WireError::Truncated));
            }
        }
        let compact = request(Style::Simple);
        assert!(matches!(
            parse_request(&compact, Style::Extended),
            Err(WireError::Magic { .. } | WireError::Truncated)
        ));
    }

    #[test]
    fn option_data_must_add_up() {
        let mut data = server_data("a", "");
        data.extend_from_slice(&[0, 2, 0, 3, 0x77, 0x77]);
        let parsed = parse_info_request(&data).unwrap();
        assert_eq!(parsed.name, "a");
        assert!(parsed.block_size_wanted && !parsed.name_wanted);
        for len in 0..data.len() {
            assert!(parse_info_request(&data[..len]).is_err(), "{len}");
        }
        data.push(0);
        assert!(parse_info_request(&data).is_err());
        assert!(parse_info_request(&[0xff; 12]).is_err());
    }

    #[test]
    fn context_queries_are_sorted_out() {
        let mut data = server_data("disk", "");
        data.extend_from_slice(&2u32.to_be_bytes());
        data.extend_from_slice(&server_data("qemu:dirty", ""));
        data.extend_from_slice(&server_data(BASE_ALLOCATION, ""));
        let query = parse_context_query(&data).unwrap();
        assert_eq!((query.name, query.queries), ("disk", 2));
        assert!(query.base_allocation && !query.base_wildcard);
        let mut bad = server_data("disk", "");
        bad.extend_from_slice(&1u32.to_be_bytes());
        bad.extend_from_slice(&server_data("nocolon", ""));
        assert_eq!(parse_context_query(&bad), Err(WireError::String));
        let mut lying = server_data("disk", "");
        lying.extend_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(parse_context_query(&lying), Err(WireError::Truncated));
    }

    #[test]
    fn heads_have_the_lengths_that_buffers_reserve() {
        let origin = Origin { cookie: 1, offset: 2 };
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            assert_eq!(read_head(style, origin, 512).bytes().len(), style.read_head_bytes());
            assert!(style.read_head_bytes() <= HEAD_BYTES_MAX);
            assert!(read_head(style, origin, 0).bytes().len() <= style.read_head_bytes());
        }
    }

    #[test]
    fn a_status_payload_is_a_length_and_ids() {
        let mut bytes = 4096u64.to_be_bytes().to_vec();
        bytes.extend_from_slice(&[0, 0, 0, 1]);
        let (len, ids) = parse_status_payload(&bytes).unwrap();
        assert_eq!((len, ids.collect::<Vec<_>>()), (4096, vec![1]));
        assert!(parse_status_payload(&bytes[..11]).is_none());
        assert!(parse_status_payload(&bytes[..7]).is_none());
    }

    #[test]
    fn names_have_bounds() {
        assert_eq!(parse_name(b"null0"), Ok("null0"));
        assert_eq!(parse_name(&[b'a'; STRING_BYTES_MAX + 1]), Err(WireError::String));
        assert_eq!(parse_name(b"a\0"), Err(WireError::String));
        assert_eq!(parse_name(&[0xff]), Err(WireError::String));
    }
}
