//! The PDUs of NVMe/TCP: parsed and printed, without I/O.
//!
//! Sections are those of the NVMe/TCP Transport Specification 1.0. All integers are little-endian.
//!
//! ```text
//! | common header 8 | specific header | header digest 4 | padding | data | data digest 4 |
//! |<----------- HLEN ---------------->|                           |<-- at PDO
//! |<------------------------------- PLEN ------------------------------------------>|
//! ```
//!
//! A digest is there only if both sides agreed on it, and the data digest only with data.

use crate::command::Cqe;

/// The bytes of the common header of each PDU.
pub const COMMON_HEADER_BYTES: usize = 8;
/// The bytes of a digest.
pub const DIGEST_BYTES: usize = 4;
/// The bytes of an ICReq and an ICResp.
pub const IC_BYTES: usize = 128;
/// The header of a command capsule: the common header and a submission queue entry.
pub const CAPSULE_HEADER_BYTES: usize = 72;
/// The header of all other PDUs.
pub const SHORT_HEADER_BYTES: usize = 24;
/// The longest data in one H2CData PDU, which the host learns from the ICResp.
pub const H2C_DATA_BYTES_MAX: u32 = 128 << 10;
/// The longest data in a command capsule. The specification fixes it for the admin queue and for
/// fabrics commands; I/O queues get the same (IOCCSZ).
pub const IN_CAPSULE_BYTES_MAX: u32 = 8192;
/// The longest header of a rejected PDU that a TermReq repeats.
const TERM_DATA_BYTES_MAX: usize = 128;

/// The most bytes of a PDU that is parsed as a whole: a command capsule with data.
pub const WHOLE_PDU_BYTES_MAX: usize =
    u8::MAX as usize + IN_CAPSULE_BYTES_MAX as usize + DIGEST_BYTES;

/// PDU types.
pub mod pdu_type {
    /// Initialize connection request.
    pub const IC_REQ: u8 = 0x00;
    /// Initialize connection response.
    pub const IC_RESP: u8 = 0x01;
    /// The host ends the connection because of an error.
    pub const H2C_TERM_REQ: u8 = 0x02;
    /// The controller ends the connection because of an error.
    pub const C2H_TERM_REQ: u8 = 0x03;
    /// A command, with or without data.
    pub const CAPSULE_CMD: u8 = 0x04;
    /// A completion.
    pub const CAPSULE_RESP: u8 = 0x05;
    /// Data of a write.
    pub const H2C_DATA: u8 = 0x06;
    /// Data of a read.
    pub const C2H_DATA: u8 = 0x07;
    /// Ready to transfer: asks for the data of a write.
    pub const R2T: u8 = 0x09;
}

/// PDU flags.
pub mod pdu_flag {
    /// A header digest is there.
    pub const HEADER_DIGEST: u8 = 1;
    /// A data digest is there.
    pub const DATA_DIGEST: u8 = 2;
    /// The last data PDU of a transfer.
    pub const LAST: u8 = 4;
    /// The command has succeeded, and no completion follows.
    pub const SUCCESS: u8 = 8;
}

/// The reason for which a connection ends: the fatal error status of a TermReq (3.6.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalStatus {
    /// A header field is invalid; the information is its offset.
    HeaderField = 1,
    /// The PDU is not allowed now.
    Sequence = 2,
    /// The header digest does not match; the information is the digest that was received.
    HeaderDigest = 3,
    /// Data lie outside the requested range.
    DataRange = 4,
    /// More data, or more requests, than agreed.
    Limit = 5,
    /// A parameter is not supported; the information is its offset.
    Unsupported = 6,
}

/// A violation of the protocol, after which the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduFault {
    /// The status in the TermReq.
    pub status: FatalStatus,
    /// The information in the TermReq: an offset or a digest.
    pub info: u32,
    /// The text for the log.
    pub text: &'static str,
}

impl PduFault {
    /// A violation.
    pub const fn new(status: FatalStatus, info: u32, text: &'static str) -> PduFault {
        PduFault { status, info, text }
    }

    const fn field(offset: u32, text: &'static str) -> PduFault {
        PduFault::new(FatalStatus::HeaderField, offset, text)
    }
}

/// The digests that both sides agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// CRC-32C of the header.
    pub header: bool,
    /// CRC-32C of the data.
    pub data: bool,
}

impl Digests {
    /// The digests of an ICReq's or ICResp's byte.
    pub fn from_bits(bits: u8) -> Digests {
        Digests { header: bits & 1 != 0, data: bits & 2 != 0 }
    }

    /// The byte of an ICReq or ICResp.
    pub fn bits(self) -> u8 {
        u8::from(self.header) | u8::from(self.data) << 1
    }

    /// The bytes of a header digest; 0 without one.
    pub fn header_bytes(self) -> usize {
        if self.header { DIGEST_BYTES } else { 0 }
    }

    /// The bytes of a data digest; 0 without one.
    pub fn data_bytes(self) -> usize {
        if self.data { DIGEST_BYTES } else { 0 }
    }
}

/// CRC-32C, as digests have it.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Two bytes at an offset; the slice must hold them.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Four bytes at an offset; the slice must hold them.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// Eight bytes at an offset; the slice must hold them.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// The common header of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduHeader {
    /// The type, of [`pdu_type`].
    pub kind: u8,
    /// Flags, of [`pdu_flag`].
    pub flags: u8,
    /// HLEN: the bytes of the header.
    pub header_bytes: u8,
    /// PDO: the offset of the data.
    pub data_offset: u8,
    /// PLEN: the bytes of the whole PDU.
    pub len: u32,
}

/// The parts of a PDU whose lengths were checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduLayout {
    /// The bytes of the header, without its digest.
    pub header_bytes: usize,
    /// The offset of the data, after the header digest and the padding.
    pub data_at: usize,
    /// The bytes of data; 0 for a PDU without data.
    pub data_len: usize,
    /// The bytes of the whole PDU.
    pub len: usize,
}

impl PduHeader {
    /// Parses the first [`COMMON_HEADER_BYTES`]; `None` if there are fewer.
    pub fn parse(bytes: &[u8]) -> Option<PduHeader> {
        let bytes = bytes.get(..COMMON_HEADER_BYTES)?;
        Some(PduHeader {
            kind: bytes[0],
            flags: bytes[1],
            header_bytes: bytes[2],
            data_offset: bytes[3],
            len: u32_at(bytes, 4),
        })
    }

    /// Checks the lengths of a PDU from a host. A PDU that passes is at most
    /// [`WHOLE_PDU_BYTES_MAX`] long, unless it is an H2CData.
    ///
    /// # Errors
    /// The violation.
    pub fn check(&self, digests: Digests) -> Result<PduLayout, PduFault> {
        let (expected, digests) = match self.kind {
            pdu_type::IC_REQ => (IC_BYTES, Digests::default()),
            pdu_type::H2C_TERM_REQ => (SHORT_HEADER_BYTES, Digests::default()),
            pdu_type::CAPSULE_CMD => (CAPSULE_HEADER_BYTES, digests),
            pdu_type::H2C_DATA => (SHORT_HEADER_BYTES, digests),
            _ => return Err(PduFault::field(0, "a PDU of a type that no host sends")),
        };
        if usize::from(self.header_bytes) != expected {
            return Err(PduFault::field(2, "a PDU whose header has the wrong length"));
        }
        let header_end = expected + digests.header_bytes();
        let len = self.len as usize;
        if len < header_end {
            return Err(PduFault::field(4, "a PDU that is shorter than its header"));
        }
        if digests.header && self.flags & pdu_flag::HEADER_DIGEST == 0 {
            return Err(PduFault::field(1, "a PDU without the header digest that was agreed"));
        }
        match self.kind {
            pdu_type::IC_REQ if len != IC_BYTES => {
                Err(PduFault::field(4, "an ICReq of the wrong length"))
            }
            pdu_type::H2C_TERM_REQ if len > SHORT_HEADER_BYTES + TERM_DATA_BYTES_MAX => {
                Err(PduFault::field(4, "a TermReq that is too long"))
            }
            pdu_type::CAPSULE_CMD if len > header_end => self.check_data(header_end, digests),
            pdu_type::H2C_DATA => self.check_data(header_end, digests),
            _ => Ok(PduLayout { header_bytes: expected, data_at: len, data_len: 0, len }),
        }
    }

    /// The layout of a PDU with data.
    fn check_data(&self, header_end: usize, digests: Digests) -> Result<PduLayout, PduFault> {
        let (data_at, len) = (usize::from(self.data_offset), self.len as usize);
        if data_at < header_end || !data_at.is_multiple_of(4) {
            return Err(PduFault::field(3, "a PDU whose data begin in its header"));
        }
        if digests.data && self.flags & pdu_flag::DATA_DIGEST == 0 {
            return Err(PduFault::field(1, "a PDU without the data digest that was agreed"));
        }
        let rest = len.checked_sub(data_at + digests.data_bytes());
        let Some(data_len) = rest.filter(|rest| *rest > 0) else {
            return Err(PduFault::field(4, "a PDU that is too short for its data"));
        };
        let max = match self.kind {
            pdu_type::CAPSULE_CMD => IN_CAPSULE_BYTES_MAX,
            _ => H2C_DATA_BYTES_MAX,
        };
        if data_len > max as usize {
            return Err(PduFault::new(FatalStatus::Limit, 4, "more data in a PDU than agreed"));
        }
        Ok(PduLayout { header_bytes: usize::from(self.header_bytes), data_at, data_len, len })
    }
}

/// Checks the header digest of a PDU, of which at least header and digest are there.
///
/// # Errors
/// If it does not match.
pub fn check_header_digest(pdu: &[u8], header_bytes: usize) -> Result<(), PduFault> {
    let received = u32_at(pdu, header_bytes);
    if crc32c(&pdu[..header_bytes]) == received {
        return Ok(());
    }
    Err(PduFault::new(FatalStatus::HeaderDigest, received, "a wrong header digest"))
}

/// An ICReq. MAXR2T is not read: the target sends one R2T for a command, which every host takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// The alignment of data in C2HData PDUs, in bytes: a multiple of 4 up to 128.
    pub data_align: usize,
    /// The digests that the host wants.
    pub digests: Digests,
}

impl IcReq {
    /// Parses an ICReq whose length was checked.
    ///
    /// # Errors
    /// If the version or the alignment is not supported.
    pub fn parse(pdu: &[u8]) -> Result<IcReq, PduFault> {
        if u16_at(pdu, 8) != 0 {
            let text = "an ICReq of a version that is not supported";
            return Err(PduFault::new(FatalStatus::Unsupported, 8, text));
        }
        let align = pdu[10];
        if align > 31 {
            let text = "an ICReq with an alignment above 128 bytes";
            return Err(PduFault::field(10, text));
        }
        Ok(IcReq { data_align: (usize::from(align) + 1) * 4, digests: Digests::from_bits(pdu[11]) })
    }
}

/// Appends an ICResp: no alignment of the host's data, and the digests that it asked for.
pub fn print_ic_resp(out: &mut Vec<u8>, digests: Digests) {
    let start = out.len();
    print_common(out, pdu_type::IC_RESP, 0, IC_BYTES as u8, 0, IC_BYTES as u32);
    out.extend_from_slice(&[0, 0, 0, digests.bits()]);
    out.extend_from_slice(&H2C_DATA_BYTES_MAX.to_le_bytes());
    out.resize(start + IC_BYTES, 0);
}

/// The specific header of an H2CData.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// CCCID: the command whose data these are.
    pub cid: u16,
    /// TTAG: the tag of the R2T.
    pub tag: u16,
    /// DATAO: the offset of the data in the command's data.
    pub offset: u32,
    /// DATAL: the bytes of data.
    pub len: u32,
}

impl H2cData {
    /// Parses the header of an H2CData whose lengths were checked.
    ///
    /// # Errors
    /// If the length of its data does not match the length of the PDU.
    pub fn parse(pdu: &[u8], layout: &PduLayout) -> Result<H2cData, PduFault> {
        let data = H2cData {
            cid: u16_at(pdu, 8),
            tag: u16_at(pdu, 10),
            offset: u32_at(pdu, 12),
            len: u32_at(pdu, 16),
        };
        if data.len as usize != layout.data_len {
            return Err(PduFault::field(16, "an H2CData whose data length is not its PDU's"));
        }
        Ok(data)
    }
}

/// Appends a common header.
fn print_common(
    out: &mut Vec<u8>,
    kind: u8,
    flags: u8,
    header_bytes: u8,
    data_offset: u8,
    len: u32,
) {
    out.extend_from_slice(&[kind, flags, header_bytes, data_offset]);
    out.extend_from_slice(&len.to_le_bytes());
}

/// The common header's flag for a header digest.
fn header_flag(digests: Digests) -> u8 {
    if digests.header { pdu_flag::HEADER_DIGEST } else { 0 }
}

/// Appends the digest of the header that begins at `start`, if one was agreed.
fn print_header_digest(out: &mut Vec<u8>, start: usize, digests: Digests) {
    if digests.header {
        let digest = crc32c(&out[start..]);
        out.extend_from_slice(&digest.to_le_bytes());
    }
}

/// Appends a completion.
pub fn print_response(out: &mut Vec<u8>, cqe: &Cqe, digests: Digests) {
    let start = out.len();
    let len = SHORT_HEADER_BYTES + digests.header_bytes();
    let flags = header_flag(digests);
    print_common(out, pdu_type::CAPSULE_RESP, flags, SHORT_HEADER_BYTES as u8, 0, len as u32);
    out.extend_from_slice(&cqe.bytes());
    print_header_digest(out, start, digests);
}

/// Appends an R2T for the whole data of a command.
pub fn print_r2t(out: &mut Vec<u8>, cid: u16, tag: u16, len_bytes: u32, digests: Digests) {
    let start = out.len();
    let len = SHORT_HEADER_BYTES + digests.header_bytes();
    let flags = header_flag(digests);
    print_common(out, pdu_type::R2T, flags, SHORT_HEADER_BYTES as u8, 0, len as u32);
    out.extend_from_slice(&cid.to_le_bytes());
    out.extend_from_slice(&tag.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&len_bytes.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    print_header_digest(out, start, digests);
}

/// The data of a C2HData: all data of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// CCCID: the command.
    pub cid: u16,
    /// The bytes of data, at least one.
    pub len: u32,
    /// Whether the command has succeeded and no completion follows.
    pub success: bool,
}

/// Appends the header of a C2HData, up to where its data begin. The caller appends the data, and
/// their digest if one was agreed.
pub fn print_data_header(out: &mut Vec<u8>, data: &C2hData, digests: Digests, align: usize) {
    let start = out.len();
    let data_at = (SHORT_HEADER_BYTES + digests.header_bytes()).next_multiple_of(align);
    let len = data_at + data.len as usize + digests.data_bytes();
    let mut flags = header_flag(digests) | pdu_flag::LAST;
    if digests.data {
        flags |= pdu_flag::DATA_DIGEST;
    }
    if data.success {
        flags |= pdu_flag::SUCCESS;
    }
    let header_bytes = SHORT_HEADER_BYTES as u8;
    print_common(out, pdu_type::C2H_DATA, flags, header_bytes, data_at as u8, len as u32);
    out.extend_from_slice(&data.cid.to_le_bytes());
    out.extend_from_slice(&[0; 6]);
    out.extend_from_slice(&data.len.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    print_header_digest(out, start, digests);
    out.resize(start + data_at, 0);
}

/// Appends a TermReq for the PDU that begins with these bytes. It never has a digest.
pub fn print_term(out: &mut Vec<u8>, fault: &PduFault, rejected: &[u8]) {
    let header = PduHeader::parse(rejected).map_or(rejected.len(), |it| it.header_bytes.into());
    let rejected = &rejected[..header.min(rejected.len()).min(TERM_DATA_BYTES_MAX)];
    let len = SHORT_HEADER_BYTES + rejected.len();
    print_common(out, pdu_type::C2H_TERM_REQ, 0, SHORT_HEADER_BYTES as u8, 0, len as u32);
    out.extend_from_slice(&(fault.status as u16).to_le_bytes());
    out.extend_from_slice(&fault.info.to_le_bytes());
    out.extend_from_slice(&[0; 10]);
    out.extend_from_slice(rejected);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::StatusCode;

    const BOTH: Digests = Digests { header: true, data: true };
    const NONE: Digests = Digests { header: false, data: false };

    fn header(kind: u8, flags: u8, header_bytes: u8, data_offset: u8, len: u32) -> PduHeader {
        PduHeader { kind, flags, header_bytes, data_offset, len }
    }

    #[test]
    fn crc_is_that_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn ic_resp_has_its_fields_where_the_standard_has_them() {
        let mut out = Vec::new();
        print_ic_resp(&mut out, BOTH);
        assert_eq!(out.len(), 128);
        assert_eq!(out[..8], [1, 0, 128, 0, 128, 0, 0, 0]);
        assert_eq!(out[8..12], [0, 0, 0, 3], "version 0, CPDA 0, both digests");
        assert_eq!(u32_at(&out, 12), H2C_DATA_BYTES_MAX);
        assert!(out[16..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn ic_req_is_read_and_versions_are_refused() {
        let mut pdu = [0; IC_BYTES];
        pdu[10] = 1;
        pdu[11] = 2;
        let wanted = IcReq { data_align: 8, digests: Digests { header: false, data: true } };
        assert_eq!(IcReq::parse(&pdu), Ok(wanted));
        pdu[8] = 1;
        assert_eq!(IcReq::parse(&pdu).unwrap_err().status, FatalStatus::Unsupported);
        pdu[8] = 0;
        pdu[10] = 32;
        assert_eq!(IcReq::parse(&pdu).unwrap_err().info, 10);
    }

    #[test]
    fn response_r2t_and_data_headers_match_the_standard() {
        let cqe = Cqe { result: 0x1122_3344_5566_7788, sq_head: 9, cid: 7, status: StatusCode::OK };
        let mut out = Vec::new();
        print_response(&mut out, &cqe, NONE);
        assert_eq!(out[..8], [5, 0, 24, 0, 24, 0, 0, 0]);
        assert_eq!(u64_at(&out, 8), cqe.result);
        assert_eq!((u16_at(&out, 16), u16_at(&out, 20), u16_at(&out, 22)), (9, 7, 0));
        assert_eq!(out.len(), 24);

        let mut out = Vec::new();
        print_r2t(&mut out, 7, 0x102, 65536, BOTH);
        assert_eq!(out[..8], [9, 1, 24, 0, 28, 0, 0, 0]);
        assert_eq!((u16_at(&out, 8), u16_at(&out, 10)), (7, 0x102));
        assert_eq!((u32_at(&out, 12), u32_at(&out, 16)), (0, 65536));
        assert_eq!(u32_at(&out, 24), crc32c(&out[..24]));

        let mut out = Vec::new();
        let data = C2hData { cid: 7, len: 512, success: true };
        print_data_header(&mut out, &data, BOTH, 4);
        assert_eq!(out[..4], [7, 1 | 2 | 4 | 8, 24, 28]);
        assert_eq!(u32_at(&out, 4), 28 + 512 + 4);
        assert_eq!((u16_at(&out, 8), u32_at(&out, 12), u32_at(&out, 16)), (7, 0, 512));
        assert_eq!(out.len(), 28);

        let mut out = Vec::new();
        print_data_header(&mut out, &C2hData { success: false, ..data }, NONE, 128);
        assert_eq!((out[1], out[3], out.len()), (4, 128, 128), "padded for the host");
    }

    #[test]
    fn term_repeats_the_rejected_header_and_has_no_digest() {
        let rejected: Vec<u8> = (0..200).collect();
        let mut out = Vec::new();
        let fault = PduFault::new(FatalStatus::DataRange, 0x0a0b_0c0d, "");
        print_term(&mut out, &fault, &rejected);
        // The third byte of the rejected PDU says that its header has 2 bytes.
        assert_eq!(out[..8], [3, 0, 24, 0, 26, 0, 0, 0]);
        assert_eq!((u16_at(&out, 8), u32_at(&out, 10)), (4, 0x0a0b_0c0d));
        assert_eq!(out[24..], [0, 1]);
    }

    /// Linux once let a header length of 255 with digests read and write past its buffer.
    #[test]
    fn header_lengths_other_than_the_standards_are_refused() {
        for wrong in [0, 8, 71, 73, 255] {
            let fault = header(pdu_type::CAPSULE_CMD, 1, wrong, 0, 300).check(BOTH).unwrap_err();
            assert_eq!((fault.status, fault.info), (FatalStatus::HeaderField, 2), "{wrong}");
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let offset = |pdu: PduHeader, digests| pdu.check(digests).unwrap_err().info;
        assert_eq!(offset(header(pdu_type::CAPSULE_CMD, 0, 72, 0, 71), NONE), 4);
        assert_eq!(offset(header(pdu_type::CAPSULE_CMD, 1, 72, 0, 72), BOTH), 4);
        assert_eq!(offset(header(pdu_type::CAPSULE_CMD, 0, 72, 0, 76), BOTH), 1);
        assert_eq!(offset(header(pdu_type::CAPSULE_CMD, 0, 72, 71, 80), NONE), 3);
        assert_eq!(offset(header(pdu_type::CAPSULE_CMD, 0, 72, 84, 80), NONE), 4);
        assert_eq!(offset(header(pdu_type::CAPSULE_CMD, 1, 72, 76, 80), BOTH), 1);
        assert_eq!(offset(header(pdu_type::CAPSULE_CMD, 3, 72, 76, 80), BOTH), 4);
        assert_eq!(offset(header(pdu_type::H2C_DATA, 0, 24, 24, 24), NONE), 4);
        assert_eq!(offset(header(pdu_type::IC_REQ, 0, 128, 0, 129), NONE), 4);
        assert_eq!(offset(header(pdu_type::H2C_TERM_REQ, 0, 24, 0, 153), NONE), 4);
        for kind in [1, 3, 5, 7, 8, 9, 255] {
            assert_eq!(offset(header(kind, 0, 24, 0, 24), NONE), 0, "{kind}");
        }
    }

    #[test]
    fn more_data_than_agreed_is_refused_by_its_length_alone() {
        let most = header(pdu_type::CAPSULE_CMD, 0, 72, 72, 72 + 8192);
        assert_eq!(most.check(NONE).unwrap().data_len, 8192);
        let more = PduHeader { len: most.len + 1, ..most };
        assert_eq!(more.check(NONE).unwrap_err().status, FatalStatus::Limit);
        let huge = header(pdu_type::H2C_DATA, 0, 24, 24, u32::MAX);
        assert_eq!(huge.check(NONE).unwrap_err().status, FatalStatus::Limit);
    }

    #[test]
    fn h2c_data_has_the_length_of_its_pdu() {
        let mut pdu = [0; 24];
        pdu[8] = 5;
        pdu[10] = 6;
        pdu[13] = 2;
        pdu[16] = 100;
        let layout = header(pdu_type::H2C_DATA, 2, 24, 24, 24 + 100 + 4)
            .check(Digests { header: false, data: true });
        let layout = layout.unwrap();
        let wanted = H2cData { cid: 5, tag: 6, offset: 512, len: 100 };
        assert_eq!(H2cData::parse(&pdu, &layout), Ok(wanted));
        pdu[16] = 101;
        assert_eq!(H2cData::parse(&pdu, &layout).unwrap_err().info, 16);
    }

    #[test]
    fn a_flipped_bit_in_a_header_is_noticed() {
        let mut pdu = vec![3; 24];
        pdu.extend_from_slice(&crc32c(&[3; 24]).to_le_bytes());
        assert_eq!(check_header_digest(&pdu, 24), Ok(()));
        pdu[5] ^= 1;
        let fault = check_header_digest(&pdu, 24).unwrap_err();
        assert_eq!((fault.status, fault.info), (FatalStatus::HeaderDigest, crc32c(&[3; 24])));
    }
}
