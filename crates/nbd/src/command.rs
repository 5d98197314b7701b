//! The meaning of a request for an export: one pure function from a request to a plan.
//!
//! Every rule of the transmission phase on flags, ranges, alignment and permissions is here, and so
//! is the only mapping from [`Status`] to NBD's errors.

use blockyard_core::rmw::{self, Span};
use blockyard_core::{Flags, Op, Status};

use crate::exports::Export;
use crate::wire::{
    NbdError, REQUEST_BYTES_MAX, Request, Style, command, command_flag, export_flag,
};

/// The properties of an export that the rules need, read once when a connection opens.
#[derive(Clone, Copy, Debug)]
pub struct ExportRules {
    /// The format of requests and replies.
    pub style: Style,
    /// Size of the export in bytes.
    pub len_bytes: u64,
    /// The device's logical block in bytes, a power of two.
    pub block_bytes: u64,
    /// Requests must be multiples of this many bytes, a power of two. If it is less than the
    /// logical block, the server reads, changes and writes the blocks at the ends of a write.
    pub min_block_bytes: u64,
    /// The offset at which sequential zones begin, where no part of a block can be written; the end
    /// of the export if there are none.
    pub sequential_from: u64,
    /// The transmission flags that were sent to the client.
    pub flags: u16,
    /// Whether `base:allocation` was selected.
    pub contexts: bool,
}

/// A refusal: the error and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandError {
    /// The error of the reply.
    pub error: NbdError,
    /// The reason, for people.
    pub text: &'static str,
}

/// The plan for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandPlan {
    /// An I/O on a range of bytes, as long as the request's.
    Io {
        /// The operation.
        op: Op,
        /// First byte.
        offset: u64,
        /// Length in bytes: the request's, except for a trim, which skips parts of blocks.
        len: u64,
        /// Flags of the bio.
        flags: Flags,
        /// Whether a flush must follow, because the operation has no FUA.
        then_flush: bool,
    },
    /// No operation: success.
    Nothing,
    /// A query of extents; its length is the request's, unless a payload gives another.
    BlockStatus {
        /// Whether only one extent is wanted.
        one: bool,
    },
    /// Complete the requests in flight and close.
    Disconnect,
    /// An error.
    Refuse(CommandError),
}

const fn refuse(error: NbdError, text: &'static str) -> CommandPlan {
    CommandPlan::Refuse(CommandError { error, text })
}

impl ExportRules {
    /// The rules for an export with the negotiated options.
    pub fn new(export: &Export, style: Style, contexts: bool, min_block_bytes: u32) -> ExportRules {
        let geometry = export.disk().geometry();
        ExportRules {
            style,
            len_bytes: geometry.len_bytes(),
            block_bytes: u64::from(geometry.logical_block_bytes),
            min_block_bytes: u64::from(min_block_bytes),
            sequential_from: rmw::sequential_from(geometry),
            flags: export.flags(style, contexts),
            contexts,
        }
    }

    const fn offers(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether a range lies on the export.
    #[inline]
    const fn inside(&self, offset: u64, len: u64) -> bool {
        match offset.checked_add(len) {
            Some(end) => end <= self.len_bytes,
            None => false,
        }
    }

    /// Checks the alignment ("Block size constraints").
    #[inline]
    const fn aligned(&self, offset: u64, len: u64) -> bool {
        (offset | len) & (self.min_block_bytes - 1) == 0
    }

    /// The flags that a command may carry ("Command flags"). FUA is allowed with every command.
    const fn flags_allowed(&self, command: u16) -> u16 {
        let own = match command {
            command::READ if self.offers(export_flag::SEND_DF) => command_flag::DF,
            command::WRITE if matches!(self.style, Style::Extended) => command_flag::PAYLOAD_LEN,
            command::WRITE_ZEROES if self.offers(export_flag::SEND_FAST_ZERO) => {
                command_flag::NO_HOLE | command_flag::FAST_ZERO
            }
            command::BLOCK_STATUS if self.offers(export_flag::BLOCK_STATUS_PAYLOAD) => {
                command_flag::REQ_ONE | command_flag::PAYLOAD_LEN
            }
            command::BLOCK_STATUS => command_flag::REQ_ONE,
            _ => 0,
        };
        own | command_flag::FUA
    }

    /// The plan for a request.
    #[inline]
    pub fn plan(&self, request: &Request) -> CommandPlan {
        if request.flags & !self.flags_allowed(request.command) != 0 {
            return refuse(NbdError::Inval, "a flag that this command does not take here");
        }
        match request.command {
            command::READ => self.plan_read(request),
            command::WRITE => self.plan_change(request, Op::Write),
            command::DISC => CommandPlan::Disconnect,
            command::FLUSH => self.plan_flush(request),
            command::TRIM => self.plan_change(request, Op::Discard),
            command::CACHE => self.plan_cache(request),
            command::WRITE_ZEROES => self.plan_change(request, Op::WriteZeroes),
            command::BLOCK_STATUS => self.plan_block_status(request),
            _ => refuse(NbdError::Inval, "unknown command"),
        }
    }

    #[inline]
    fn plan_read(&self, request: &Request) -> CommandPlan {
        if request.len > u64::from(REQUEST_BYTES_MAX) {
            return if request.has(command_flag::DF) {
                refuse(NbdError::Overflow, "a read above the maximum block size")
            } else {
                refuse(NbdError::Inval, "a read above the maximum block size")
            };
        }
        if !self.inside(request.offset, request.len) {
            return refuse(NbdError::Inval, "a read beyond the end of the export");
        }
        self.plan_range(request, Op::Read, Flags::NONE, false)
    }

    /// The plan for a write, trim or write-zeroes.
    fn plan_change(&self, request: &Request, op: Op) -> CommandPlan {
        let offered = match op {
            Op::Discard => self.offers(export_flag::SEND_TRIM),
            Op::WriteZeroes => self.offers(export_flag::SEND_WRITE_ZEROES),
            _ => true,
        };
        if !offered {
            return refuse(NbdError::Inval, "a command that this export does not offer");
        }
        if self.offers(export_flag::READ_ONLY) {
            return refuse(NbdError::Perm, "the export is read-only");
        }
        if op == Op::Write && request.len > u64::from(REQUEST_BYTES_MAX) {
            return refuse(NbdError::Inval, "a write above the maximum block size");
        }
        if !self.inside(request.offset, request.len) {
            // "Error values": ENOSPC for writes, EINVAL for a trim.
            let error = if op == Op::Discard { NbdError::Inval } else { NbdError::NoSpc };
            return refuse(error, "a request beyond the end of the export");
        }
        let fua = request.has(command_flag::FUA);
        let mut flags = Flags::NONE;
        if op == Op::Write && fua {
            flags = flags | Flags::FUA;
        }
        if op == Op::WriteZeroes && request.has(command_flag::NO_HOLE) {
            if request.has(command_flag::FAST_ZERO) {
                // NBD_CMD_WRITE_ZEROES: zeros that stay allocated cost as much as a write.
                return refuse(NbdError::NotSup, "zeroing without a hole is not fast");
            }
            flags = flags | Flags::NOUNMAP;
        }
        self.plan_range(request, op, flags, fua && op != Op::Write)
    }

    #[inline]
    fn plan_range(&self, request: &Request, op: Op, flags: Flags, then_flush: bool) -> CommandPlan {
        if !self.aligned(request.offset, request.len) {
            return refuse(NbdError::Inval, "a range not aligned to the minimum block size");
        }
        if request.len == 0 {
            return CommandPlan::Nothing;
        }
        let (offset, len) = (request.offset, request.len);
        if op == Op::Read || (offset | len) & (self.block_bytes - 1) == 0 {
            return CommandPlan::Io { op, offset, len, flags, then_flush };
        }
        self.plan_parts(op, &Span::of(self.block_bytes, offset, len), flags, then_flush)
    }

    /// The plan for a change with an end inside a block.
    #[cold]
    fn plan_parts(&self, op: Op, span: &Span, flags: Flags, then_flush: bool) -> CommandPlan {
        let (mut offset, mut len) = (span.start + span.skip, span.want);
        if op == Op::Discard {
            // NBD_CMD_TRIM is advice: parts of blocks are ignored.
            let inner = span.inner(self.block_bytes);
            (offset, len) = (inner.start, inner.end - inner.start);
            if len == 0 {
                return CommandPlan::Nothing;
            }
        } else if span.start + span.len > self.sequential_from {
            // A sequential zone is written at its write pointer only.
            return refuse(NbdError::Inval, "a write of part of a block in a sequential zone");
        }
        CommandPlan::Io { op, offset, len, flags, then_flush }
    }

    fn plan_flush(&self, request: &Request) -> CommandPlan {
        if request.offset != 0 || request.len != 0 {
            return refuse(NbdError::Inval, "a flush with a range");
        }
        CommandPlan::Io { op: Op::Flush, offset: 0, len: 0, flags: Flags::NONE, then_flush: false }
    }

    /// The plan for `NBD_CMD_CACHE`: a hint, which these devices need not follow.
    fn plan_cache(&self, request: &Request) -> CommandPlan {
        if !self.inside(request.offset, request.len) {
            return refuse(NbdError::Inval, "a range beyond the end of the export");
        }
        if !self.aligned(request.offset, request.len) {
            return refuse(NbdError::Inval, "a range not aligned to the minimum block size");
        }
        CommandPlan::Nothing
    }

    fn plan_block_status(&self, request: &Request) -> CommandPlan {
        if !self.contexts {
            return refuse(NbdError::Inval, "no metadata context was selected");
        }
        if request.has(command_flag::PAYLOAD_LEN) {
            // The length is in the payload; `check_status` checks it.
            return CommandPlan::BlockStatus { one: request.has(command_flag::REQ_ONE) };
        }
        match self.check_status(request.offset, request.len) {
            Some(refusal) => CommandPlan::Refuse(refusal),
            None => CommandPlan::BlockStatus { one: request.has(command_flag::REQ_ONE) },
        }
    }

    /// Checks the range of a block status request.
    pub fn check_status(&self, offset: u64, len: u64) -> Option<CommandError> {
        let text = if len == 0 {
            "a block status request of length 0"
        } else if !self.inside(offset, len) {
            "a range beyond the end of the export"
        } else if !self.aligned(offset, len) {
            "a range not aligned to the minimum block size"
        } else {
            return None;
        };
        Some(CommandError { error: NbdError::Inval, text })
    }
}

/// The NBD error of a status. `None` for success.
#[inline]
pub fn error_of(status: Status) -> Option<NbdError> {
    match status {
        Status::Ok => None,
        Status::NoSpc => Some(NbdError::NoSpc),
        Status::Inval => Some(NbdError::Inval),
        Status::Resource => Some(NbdError::NoMem),
        Status::Offline => Some(NbdError::Shutdown),
        // "Error values": ENOTSUP and EOVERFLOW have narrow meanings, so all other statuses,
        // including zone conditions, are an I/O error whose text says more.
        Status::NotSupp
        | Status::Timeout
        | Status::Transport
        | Status::Target
        | Status::ResvConflict
        | Status::Medium
        | Status::Protection
        | Status::IoErr
        | Status::Again
        | Status::DevResource
        | Status::ZoneOpenResource
        | Status::ZoneActiveResource
        | Status::DurationLimit => Some(NbdError::Io),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u16 = export_flag::HAS_FLAGS
        | export_flag::SEND_TRIM
        | export_flag::SEND_WRITE_ZEROES
        | export_flag::SEND_FAST_ZERO
        | export_flag::SEND_DF;

    fn rules() -> ExportRules {
        ExportRules {
            style: Style::Structured,
            len_bytes: 1 << 20,
            block_bytes: 4096,
            min_block_bytes: 4096,
            sequential_from: 1 << 20,
            flags: ALL,
            contexts: true,
        }
    }

    fn request(command: u16, flags: u16, offset: u64, len: u64) -> Request {
        Request { flags, command, cookie: 0, offset, len }
    }

    fn error(plan: CommandPlan) -> Option<NbdError> {
        match plan {
            CommandPlan::Refuse(refusal) => Some(refusal.error),
            _ => None,
        }
    }

    #[test]
    fn the_table_of_refusals() {
        use command::*;
        let end = 1 << 20;
        let huge = 33 << 20;
        let cases = [
            (READ, 0, 0, 4096, None),
            (READ, 0, 0, 0, None),
            (READ, 0, end, 4096, Some(NbdError::Inval)),
            (READ, 0, u64::MAX - 4095, 4096, Some(NbdError::Inval)),
            (READ, 0, 512, 4096, Some(NbdError::Inval)),
            (READ, 0, 0, 4095, Some(NbdError::Inval)),
            (READ, 0, 0, huge, Some(NbdError::Inval)),
            (READ, command_flag::DF, 0, huge, Some(NbdError::Overflow)),
            (READ, command_flag::NO_HOLE, 0, 4096, Some(NbdError::Inval)),
            (READ, command_flag::FUA, 0, 4096, None),
            (WRITE, 0, end, 4096, Some(NbdError::NoSpc)),
            (WRITE, 0, 512, 4096, Some(NbdError::Inval)),
            (WRITE, command_flag::PAYLOAD_LEN, 0, 4096, Some(NbdError::Inval)),
            (FLUSH, 0, 0, 0, None),
            (FLUSH, 0, 4096, 0, Some(NbdError::Inval)),
            (TRIM, 0, end, 4096, Some(NbdError::Inval)),
            (TRIM, 1 << 9, 0, 4096, Some(NbdError::Inval)),
            (CACHE, 0, end, 4096, Some(NbdError::Inval)),
            (CACHE, 0, 0, 4096, None),
            (WRITE_ZEROES, 0, end - 4096, 8192, Some(NbdError::NoSpc)),
            (WRITE_ZEROES, command_flag::FAST_ZERO, 0, 4096, None),
            (
                WRITE_ZEROES,
                command_flag::FAST_ZERO | command_flag::NO_HOLE,
                0,
                4096,
                Some(NbdError::NotSup),
            ),
            (BLOCK_STATUS, 0, 0, 0, Some(NbdError::Inval)),
            (BLOCK_STATUS, 0, 0, end + 4096, Some(NbdError::Inval)),
            (BLOCK_STATUS, command_flag::REQ_ONE, 0, 4096, None),
            (99, 0, 0, 4096, Some(NbdError::Inval)),
        ];
        for (command, flags, offset, len, wanted) in cases {
            let plan = rules().plan(&request(command, flags, offset, len));
            assert_eq!(error(plan), wanted, "{command} {flags} {offset} {len}: {plan:?}");
        }
    }

    #[test]
    fn a_read_only_export_refuses_changes_only() {
        let rules = ExportRules { flags: ALL | export_flag::READ_ONLY, ..rules() };
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            let plan = rules.plan(&request(command, 0, 0, 4096));
            assert_eq!(error(plan), Some(NbdError::Perm));
        }
        for command in [command::READ, command::CACHE, command::BLOCK_STATUS] {
            assert_eq!(error(rules.plan(&request(command, 0, 0, 4096))), None);
        }
    }

    #[test]
    fn a_command_that_was_not_offered_is_refused() {
        let rules = ExportRules { flags: export_flag::HAS_FLAGS, contexts: false, ..rules() };
        for command in [command::TRIM, command::WRITE_ZEROES, command::BLOCK_STATUS] {
            let plan = rules.plan(&request(command, 0, 0, 4096));
            assert_eq!(error(plan), Some(NbdError::Inval));
        }
        let plan = rules.plan(&request(command::READ, command_flag::DF, 0, 4096));
        assert_eq!(error(plan), Some(NbdError::Inval));
    }

    #[test]
    fn only_success_is_no_error() {
        for status in Status::ALL {
            assert_eq!(error_of(*status).is_none(), status.is_ok());
        }
        assert_eq!(error_of(Status::ZoneActiveResource), Some(NbdError::Io));
    }
}
