//! The handshake as a state machine: bytes in, bytes and steps out, no I/O.
//!
//! The owner of the socket feeds received bytes and sends the printed ones; a fuzzer does so
//! without a socket. Only fixed newstyle is supported; a client that does not announce it can only
//! use `NBD_OPT_EXPORT_NAME` ("Newstyle negotiation").

use std::fmt;
use std::sync::Arc;

use crate::access::AllowLists;
use crate::exports::{Export, Exports};
use crate::wire::{
    self, BASE_ALLOCATION, BASE_ALLOCATION_ID, CLIENT_FIXED_NEWSTYLE, CLIENT_FLAGS_BYTES,
    CLIENT_NO_ZEROES, OPTION_HEADER_BYTES, OptionHeader, Style, WireError, option, option_reply,
};

/// The longest option data that are read; longer ones are skipped and refused.
pub const OPTION_DATA_BYTES_MAX: usize = 64 << 10;
/// After this many printed bytes no further option is handled before they are sent. The reply to
/// one option may be longer: a list is as long as the table of exports.
pub const OUTPUT_BYTES: usize = 256 << 10;
/// Most options in one handshake.
pub const OPTIONS_MAX: u32 = 4096;

/// Whether clients may or must use TLS ("Server-side requirements").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// `NOTLS`: there is no TLS.
    #[default]
    Off,
    /// `SELECTIVETLS` with no export that requires it: the client chooses.
    On,
    /// `FORCEDTLS`: only TLS can be started before TLS.
    Require,
}

/// The next step of the socket's owner.
#[derive(Debug)]
pub enum HandshakeStep {
    /// Send the printed bytes, then feed the remaining and further bytes.
    More,
    /// Send the printed bytes, start TLS, then call [`Handshake::tls_started`].
    StartTls,
    /// Open the export, then call [`Handshake::accept`] or [`Handshake::refuse`].
    Enter,
    /// Send the printed bytes and close the connection.
    Close(CloseReason),
}

/// The reason for which a handshake ends without an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The client aborted, as the protocol allows.
    Aborted,
    /// The bytes violate the protocol.
    Wire(WireError),
    /// The client set flags that the server did not offer.
    ClientFlags(u32),
    /// `NBD_OPT_EXPORT_NAME` cannot be answered with an error.
    ExportName,
    /// `NBD_OPT_EXPORT_NAME` for an export that requires a request for block sizes.
    BlockSizes,
    /// More than [`OPTIONS_MAX`] options.
    Options,
    /// Bytes in clear after the request to start TLS.
    BytesBeforeTls,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloseReason::Aborted => f.write_str("the client aborted"),
            CloseReason::Wire(error) => error.fmt(f),
            CloseReason::ClientFlags(flags) => {
                write!(f, "invalid client flags {flags:#x}: expected only flags that were offered")
            }
            CloseReason::ExportName => f.write_str(
                "the export of NBD_OPT_EXPORT_NAME does not exist, is not for this client or \
                 cannot be opened",
            ),
            CloseReason::BlockSizes => f.write_str(
                "the export has `min_block`, and the client did not ask for block sizes: it needs \
                 a client that sends NBD_OPT_GO with NBD_INFO_BLOCK_SIZE",
            ),
            CloseReason::Options => write!(f, "more than {OPTIONS_MAX} options"),
            CloseReason::BytesBeforeTls => f.write_str("bytes in clear after NBD_OPT_STARTTLS"),
        }
    }
}

/// The result of a negotiation.
#[derive(Clone, Debug)]
pub struct Negotiated {
    /// The export.
    pub export: Arc<Export>,
    /// The format of requests and replies.
    pub style: Style,
    /// Whether `base:allocation` was selected.
    pub contexts: bool,
    /// The client's requests are multiples of this many bytes: 1 for a client that did not ask for
    /// block sizes.
    pub min_block_bytes: u32,
    /// Whether the connection is encrypted.
    pub tls: bool,
}

#[derive(Debug)]
enum State {
    /// The client's flags come next.
    ClientFlags,
    /// An option's header comes next.
    Option,
    /// This many bytes of an option that is too long are discarded.
    Skip { option: u32, left: u32 },
    /// The client has chosen an export by this option, and the export waits to be opened.
    Entering { option: u32, export: Arc<Export>, request: InfoWanted },
    /// Nothing more is read.
    Ended,
}

/// The information that a client asked for.
#[derive(Clone, Copy, Debug, Default)]
struct InfoWanted {
    name: bool,
    description: bool,
    block_size: bool,
}

/// One client's handshake.
#[derive(Debug)]
pub struct Handshake {
    exports: Arc<Exports>,
    mode: TlsMode,
    state: State,
    fixed: bool,
    no_zeroes: bool,
    tls: bool,
    /// The clients that may use each export.
    allow: Arc<AllowLists>,
    /// The subject of the client's certificate, if the client has shown one.
    subject: Option<String>,
    style: Style,
    /// The export for which `base:allocation` was selected.
    contexts_of: Option<String>,
    options: u32,
}

impl Handshake {
    /// A handshake that begins with the greeting, which is printed to `out`.
    pub fn new(exports: Arc<Exports>, mode: TlsMode, out: &mut Vec<u8>) -> Handshake {
        out.extend_from_slice(&wire::greeting());
        Handshake {
            exports,
            mode,
            state: State::ClientFlags,
            fixed: false,
            no_zeroes: false,
            tls: false,
            allow: Arc::default(),
            subject: None,
            style: Style::Simple,
            contexts_of: None,
            options: 0,
        }
    }

    /// Handles received bytes up to the next step or until [`OUTPUT_BYTES`] are printed, and
    /// returns the number of bytes used. The caller feeds the others again, followed by newly
    /// received ones.
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> (usize, HandshakeStep) {
        let mut used = 0;
        loop {
            let (taken, step) = self.advance(&bytes[used..], out);
            used += taken;
            match step {
                Some(HandshakeStep::StartTls) if used < bytes.len() => {
                    // Clear-text bytes must not be taken for bytes that came through TLS.
                    self.state = State::Ended;
                    return (used, HandshakeStep::Close(CloseReason::BytesBeforeTls));
                }
                Some(step) => return (used, step),
                None if taken == 0 || out.len() >= OUTPUT_BYTES => {
                    return (used, HandshakeStep::More);
                }
                None => {}
            }
        }
    }

    /// Shows the client only the exports that these lists allow.
    pub fn allow(&mut self, lists: Arc<AllowLists>) {
        self.allow = lists;
    }

    /// TLS is established; `subject` is that of the client's certificate, if the client has shown
    /// one. "`NBD_OPT_STARTTLS`": earlier negotiation is discarded.
    pub fn tls_started(&mut self, subject: Option<String>) {
        self.tls = true;
        self.subject = subject;
        self.style = Style::Simple;
        self.contexts_of = None;
    }

    /// The export that the client chose, while it waits to be opened.
    pub fn chosen(&self) -> Option<Arc<Export>> {
        match &self.state {
            State::Entering { export, .. } => Some(Arc::clone(export)),
            _ => None,
        }
    }

    /// Ends the handshake with the chosen export. `None` if no export is chosen.
    pub fn accept(&mut self, out: &mut Vec<u8>) -> Option<Negotiated> {
        let state = std::mem::replace(&mut self.state, State::Ended);
        let State::Entering { option, export, request } = state else { return None };
        if option == option::EXPORT_NAME {
            let flags = export.flags(self.style, self.contexts_selected(&export));
            let len_bytes = export.disk().geometry().len_bytes();
            wire::print_export_name_reply(out, len_bytes, flags, !self.no_zeroes);
        } else {
            self.print_info(option, &export, request, out);
        }
        let contexts = self.contexts_selected(&export);
        let min_block_bytes = export.block_sizes(request.block_size).minimum;
        Some(Negotiated { export, style: self.style, contexts, min_block_bytes, tls: self.tls })
    }

    /// Reports that the chosen export cannot be opened.
    pub fn refuse(&mut self, text: &str, out: &mut Vec<u8>) -> HandshakeStep {
        let state = std::mem::replace(&mut self.state, State::Option);
        if let State::Entering { option, .. } = state
            && option != option::EXPORT_NAME
        {
            self.answer(option, option_reply::ERR_POLICY, text, out);
            return HandshakeStep::More;
        }
        self.close(CloseReason::ExportName)
    }

    /// Answers an option with a reply whose data is text for people, if there is any.
    fn answer(&self, option: u32, reply: u32, text: &str, out: &mut Vec<u8>) {
        let text = &text[..text.floor_char_boundary(wire::STRING_BYTES_MAX)];
        wire::print_option_reply(out, option, reply, text.as_bytes());
    }

    fn close(&mut self, reason: CloseReason) -> HandshakeStep {
        self.state = State::Ended;
        HandshakeStep::Close(reason)
    }

    /// Handles one message. `(0, None)` means that bytes are missing.
    fn advance(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> (usize, Option<HandshakeStep>) {
        match self.state {
            State::ClientFlags => {
                if bytes.len() < CLIENT_FLAGS_BYTES {
                    return (0, None);
                }
                (CLIENT_FLAGS_BYTES, self.client_flags(bytes))
            }
            State::Skip { option, left } => {
                let taken = bytes.len().min(left as usize);
                let left = left - taken as u32;
                self.state = State::Skip { option, left };
                if left == 0 {
                    self.state = State::Option;
                    let text = format!("option data above {OPTION_DATA_BYTES_MAX} bytes");
                    self.answer(option, option_reply::ERR_TOO_BIG, &text, out);
                }
                (taken, None)
            }
            State::Option => self.next_option(bytes, out),
            State::Entering { .. } | State::Ended => (0, Some(HandshakeStep::More)),
        }
    }

    /// Handles the client's flags: unknown ones end the connection.
    fn client_flags(&mut self, bytes: &[u8]) -> Option<HandshakeStep> {
        let flags = match wire::parse_client_flags(bytes) {
            Ok(flags) => flags,
            Err(error) => return Some(self.close(CloseReason::Wire(error))),
        };
        if flags & !(CLIENT_FIXED_NEWSTYLE | CLIENT_NO_ZEROES) != 0 {
            return Some(self.close(CloseReason::ClientFlags(flags)));
        }
        self.fixed = flags & CLIENT_FIXED_NEWSTYLE != 0;
        self.no_zeroes = flags & CLIENT_NO_ZEROES != 0;
        self.state = State::Option;
        None
    }

    fn next_option(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> (usize, Option<HandshakeStep>) {
        if bytes.len() < OPTION_HEADER_BYTES {
            return (0, None);
        }
        let header = match wire::parse_option_header(bytes) {
            Ok(header) => header,
            Err(error) => return (0, Some(self.close(CloseReason::Wire(error)))),
        };
        let len = header.len as usize;
        if len <= OPTION_DATA_BYTES_MAX && bytes.len() < OPTION_HEADER_BYTES + len {
            return (0, None);
        }
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return (0, Some(self.close(CloseReason::Options)));
        }
        // "Newstyle negotiation": a client without fixed newstyle knows one option only, and a name
        // of an export that is too long can only be refused by closing.
        let export_name = header.option == option::EXPORT_NAME;
        if (!self.fixed && !export_name) || (len > OPTION_DATA_BYTES_MAX && export_name) {
            return (0, Some(self.close(CloseReason::ExportName)));
        }
        if len > OPTION_DATA_BYTES_MAX {
            self.state = State::Skip { option: header.option, left: header.len };
            return (OPTION_HEADER_BYTES, None);
        }
        let used = OPTION_HEADER_BYTES + len;
        (used, self.on_option(header, &bytes[OPTION_HEADER_BYTES..used], out))
    }

    fn on_option(
        &mut self,
        header: OptionHeader,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Option<HandshakeStep> {
        let option = header.option;
        // "FORCEDTLS mode".
        if self.mode == TlsMode::Require && !self.tls {
            match option {
                option::STARTTLS | option::ABORT => {}
                option::EXPORT_NAME => return Some(self.close(CloseReason::ExportName)),
                _ => {
                    let text = "start TLS first";
                    self.answer(option, option_reply::ERR_TLS_REQD, text, out);
                    return None;
                }
            }
        }
        let empty_wanted = matches!(
            option,
            option::LIST | option::STARTTLS | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS
        );
        if empty_wanted && !data.is_empty() {
            let text = "this option takes no data";
            self.answer(option, option_reply::ERR_INVALID, text, out);
            return None;
        }
        match option {
            option::EXPORT_NAME => Some(self.export_name(data)),
            option::ABORT => {
                self.answer(option, option_reply::ACK, "", out);
                Some(self.close(CloseReason::Aborted))
            }
            option::LIST => {
                self.list(out);
                None
            }
            option::STARTTLS => self.start_tls(out),
            option::INFO | option::GO => self.info_or_go(option, data, out),
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                self.raise_style(option, out);
                None
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data, out);
                None
            }
            _ => {
                self.answer(option, option_reply::ERR_UNSUP, "unknown option", out);
                None
            }
        }
    }

    /// The export of a name, if the client may use it. Other exports do not exist for the client,
    /// so that it learns no names.
    fn find(&self, name: &str) -> Option<Arc<Export>> {
        self.exports.find(name).filter(|export| self.permits(export))
    }

    fn permits(&self, export: &Export) -> bool {
        self.allow.permits(export.name(), self.subject.as_deref())
    }

    fn export_name(&mut self, data: &[u8]) -> HandshakeStep {
        let found = wire::parse_name(data).ok().and_then(|name| self.find(name));
        let Some(export) = found else { return self.close(CloseReason::ExportName) };
        if export.demands_block_sizes() {
            return self.close(CloseReason::BlockSizes);
        }
        let request = InfoWanted::default();
        self.state = State::Entering { option: option::EXPORT_NAME, export, request };
        HandshakeStep::Enter
    }

    fn list(&self, out: &mut Vec<u8>) {
        let exports = self.exports.snapshot();
        for export in exports.iter().filter(|export| self.permits(export)) {
            let data = wire::server_data(export.name(), export.description());
            wire::print_option_reply(out, option::LIST, option_reply::SERVER, &data);
        }
        wire::print_option_reply(out, option::LIST, option_reply::ACK, &[]);
    }

    /// "TLS support".
    fn start_tls(&mut self, out: &mut Vec<u8>) -> Option<HandshakeStep> {
        let (reply, text) = match (self.mode, self.tls) {
            (TlsMode::Off, _) => (option_reply::ERR_POLICY, "this server has no TLS"),
            (_, true) => (option_reply::ERR_INVALID, "TLS runs already"),
            (_, false) => (option_reply::ACK, ""),
        };
        self.answer(option::STARTTLS, reply, text, out);
        (reply == option_reply::ACK).then_some(HandshakeStep::StartTls)
    }

    fn raise_style(&mut self, option: u32, out: &mut Vec<u8>) {
        let wanted =
            if option == option::EXTENDED_HEADERS { Style::Extended } else { Style::Structured };
        let (reply, text) = if self.style == wanted {
            (option_reply::ERR_INVALID, "negotiated already")
        } else if self.style > wanted {
            (option_reply::ERR_EXT_HEADER_REQD, "extended headers are in use")
        } else {
            self.style = wanted;
            (option_reply::ACK, "")
        };
        self.answer(option, reply, text, out);
    }

    fn info_or_go(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Option<HandshakeStep> {
        let Ok(request) = wire::parse_info_request(data) else {
            let text = "the lengths in this option do not add up";
            self.answer(option, option_reply::ERR_INVALID, text, out);
            return None;
        };
        let Some(export) = self.find(request.name) else {
            let text = format!("there is no export `{}`", request.name.escape_debug());
            self.answer(option, option_reply::ERR_UNKNOWN, &text, out);
            return None;
        };
        let wanted = InfoWanted {
            name: request.name_wanted,
            description: request.description_wanted,
            block_size: request.block_size_wanted,
        };
        if export.demands_block_sizes() && !wanted.block_size {
            let sizes = export.block_sizes(true);
            let data = wire::info_block_size(sizes);
            wire::print_option_reply(out, option, option_reply::INFO, &data);
            let text = format!("ask for block sizes: the smallest block is {}", sizes.minimum);
            self.answer(option, option_reply::ERR_BLOCK_SIZE_REQD, &text, out);
            return None;
        }
        if option == option::GO {
            self.state = State::Entering { option, export, request: wanted };
            return Some(HandshakeStep::Enter);
        }
        self.print_info(option, &export, wanted, out);
        None
    }

    /// Prints the successful reply to `NBD_OPT_INFO` and `NBD_OPT_GO`.
    fn print_info(&self, option: u32, export: &Export, wanted: InfoWanted, out: &mut Vec<u8>) {
        let info = |out: &mut Vec<u8>, data: &[u8]| {
            wire::print_option_reply(out, option, option_reply::INFO, data);
        };
        let flags = export.flags(self.style, self.contexts_selected(export));
        info(out, &wire::info_export(export.disk().geometry().len_bytes(), flags));
        if wanted.name {
            info(out, &wire::info_text(wire::info::NAME, export.name()));
        }
        if wanted.description && !export.description().is_empty() {
            info(out, &wire::info_text(wire::info::DESCRIPTION, export.description()));
        }
        // A client that enters without asking may send any range. `NBD_OPT_INFO` reports the sizes
        // that a client that asks must obey.
        let obeys = wanted.block_size || option == option::INFO;
        info(out, &wire::info_block_size(export.block_sizes(obeys)));
        wire::print_option_reply(out, option, option_reply::ACK, &[]);
    }

    fn contexts_selected(&self, export: &Export) -> bool {
        self.style >= Style::Structured
            && self.contexts_of.as_deref().is_some_and(|name| name == export.name())
    }

    /// "Metadata querying".
    fn meta_context(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            // Discards the earlier selection, even when this one fails.
            self.contexts_of = None;
        }
        let refusal = match wire::parse_context_query(data) {
            _ if set && self.style < Style::Structured => {
                Some((option_reply::ERR_INVALID, "negotiate structured replies first"))
            }
            Err(_) => Some((option_reply::ERR_INVALID, "this option's data make no sense")),
            Ok(query) => match self.find(query.name) {
                None => Some((option_reply::ERR_UNKNOWN, "there is no such export")),
                Some(export) => {
                    let listed = query.queries == 0 || query.base_wildcard;
                    let matches = query.base_allocation || (!set && listed);
                    if matches {
                        // Listing: the id is reserved and should be 0.
                        let id = if set { BASE_ALLOCATION_ID } else { 0 };
                        let data = wire::context_data(id, BASE_ALLOCATION);
                        wire::print_option_reply(out, option, option_reply::META_CONTEXT, &data);
                    }
                    if matches && set {
                        self.contexts_of = Some(export.name().to_owned());
                    }
                    None
                }
            },
        };
        let (reply, text) = refusal.unwrap_or((option_reply::ACK, ""));
        self.answer(option, reply, text, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_sent_before_more_is_taken() {
        let mut out = Vec::new();
        let mut handshake = Handshake::new(Exports::new(), TlsMode::Off, &mut out);
        let mut bytes = CLIENT_FIXED_NEWSTYLE.to_be_bytes().to_vec();
        for _ in 0..OPTIONS_MAX {
            bytes.extend_from_slice(b"IHAVEOPT");
            // An unknown option.
            bytes.extend_from_slice(&77u32.to_be_bytes());
            bytes.extend_from_slice(&0u32.to_be_bytes());
        }
        // Each reply is longer than its option, and one buffer would have to hold all of them.
        let mut fed = 0;
        let mut sent = 0;
        out.resize(OUTPUT_BYTES - 4096, 0);
        while fed < bytes.len() {
            let (used, step) = handshake.feed(&bytes[fed..], &mut out);
            assert!(matches!(step, HandshakeStep::More) && used > 0, "{step:?}");
            assert!(out.len() < OUTPUT_BYTES + 64);
            fed += used;
            sent += 1;
            out.clear();
        }
        assert_eq!((sent, handshake.options), (2, OPTIONS_MAX));
    }

    /// The bug: the log said `handshake: BlockSizes`, which told the administrator nothing.
    #[test]
    fn the_log_says_which_limit_a_refused_client_did_not_meet() {
        let text = CloseReason::BlockSizes.to_string();
        assert!(text.contains("`min_block`") && text.contains("NBD_OPT_GO"), "{text}");
        let text = CloseReason::ClientFlags(4).to_string();
        assert!(text.contains("0x4: expected"), "{text}");
    }
}
