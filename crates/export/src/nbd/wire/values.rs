//! The numbers of the protocol: magics, types and flags (section "Values").

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
/// The longest header of a reply that `Head` holds.
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
