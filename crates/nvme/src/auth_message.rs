//! The messages of DH-HMAC-CHAP: parsed and printed, without I/O (NVM Express Base Specification
//! 2.0, 8.13, and the commands Authentication Send and Receive, 6.1 and 6.2).
//!
//! ```text
//! host                              controller
//! AUTH_Negotiate ───────────────▸
//!                ◂─────────────── DH-HMAC-CHAP_Challenge    (or AUTH_Failure1)
//! DH-HMAC-CHAP_Reply ───────────▸
//!                ◂─────────────── DH-HMAC-CHAP_Success1     (or AUTH_Failure1)
//! DH-HMAC-CHAP_Success2 ────────▸  if it authenticated the controller (or AUTH_Failure2)
//! ```

use crate::command::{Sqe, StatusCode};
use crate::wire::{u16_at, u32_at};

/// The security protocol of NVMe.
const PROTOCOL: u8 = 0xe9;
/// The bytes at the beginning of an AUTH_Negotiate.
const NEGOTIATE_BYTES: usize = 8;
/// The bytes of a protocol descriptor in an AUTH_Negotiate.
const DESCRIPTOR_BYTES: usize = 64;
/// The most hashes, and the most groups, in a protocol descriptor.
const LIST_MAX: usize = 30;
/// The bytes before the values in a Challenge, a Reply and a Success1, and of a Success2.
const FIXED_BYTES: usize = 16;
/// The bytes of an AUTH_Failure1 and an AUTH_Failure2.
const FAILURE_BYTES: usize = 8;

/// The longest message of a host: an AUTH_Negotiate with the most descriptors.
pub const SEND_BYTES_MAX: u32 = (NEGOTIATE_BYTES + u8::MAX as usize * DESCRIPTOR_BYTES) as u32;
/// The longest buffer of an Authentication Receive. Hosts have 4 KiB.
pub const RECEIVE_BYTES_MAX: u32 = 64 << 10;

/// Types and identifiers of messages, as their first two bytes.
mod message_id {
    pub(super) const NEGOTIATE: [u8; 2] = [0, 0x00];
    pub(super) const FAILURE2: [u8; 2] = [0, 0xf0];
    pub(super) const FAILURE1: [u8; 2] = [0, 0xf1];
    pub(super) const CHALLENGE: [u8; 2] = [1, 0x01];
    pub(super) const REPLY: [u8; 2] = [1, 0x02];
    pub(super) const SUCCESS1: [u8; 2] = [1, 0x03];
    pub(super) const SUCCESS2: [u8; 2] = [1, 0x04];
}

/// A hash function of DH-HMAC-CHAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AuthHash {
    /// SHA-256.
    Sha256 = 1,
    /// SHA-384.
    Sha384 = 2,
    /// SHA-512.
    Sha512 = 3,
}

impl AuthHash {
    /// All hash functions.
    pub const ALL: [AuthHash; 3] = [AuthHash::Sha256, AuthHash::Sha384, AuthHash::Sha512];

    /// The name.
    pub fn word(self) -> &'static str {
        match self {
            AuthHash::Sha256 => "sha256",
            AuthHash::Sha384 => "sha384",
            AuthHash::Sha512 => "sha512",
        }
    }

    /// The bytes of a hash.
    pub fn len_bytes(self) -> usize {
        match self {
            AuthHash::Sha256 => 32,
            AuthHash::Sha384 => 48,
            AuthHash::Sha512 => 64,
        }
    }
}

/// A Diffie-Hellman group of DH-HMAC-CHAP (RFC 7919).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DhGroup {
    /// No Diffie-Hellman exchange.
    Null = 0,
    /// ffdhe2048.
    Ffdhe2048 = 1,
    /// ffdhe3072.
    Ffdhe3072 = 2,
    /// ffdhe4096.
    Ffdhe4096 = 3,
    /// ffdhe6144.
    Ffdhe6144 = 4,
    /// ffdhe8192.
    Ffdhe8192 = 5,
}

impl DhGroup {
    /// All groups, those before `Null` by their size.
    pub const ALL: [DhGroup; 6] = [
        DhGroup::Ffdhe2048,
        DhGroup::Ffdhe3072,
        DhGroup::Ffdhe4096,
        DhGroup::Ffdhe6144,
        DhGroup::Ffdhe8192,
        DhGroup::Null,
    ];

    /// The name.
    pub fn word(self) -> &'static str {
        match self {
            DhGroup::Null => "null",
            DhGroup::Ffdhe2048 => "ffdhe2048",
            DhGroup::Ffdhe3072 => "ffdhe3072",
            DhGroup::Ffdhe4096 => "ffdhe4096",
            DhGroup::Ffdhe6144 => "ffdhe6144",
            DhGroup::Ffdhe8192 => "ffdhe8192",
        }
    }

    /// The bytes of a public value of the group; 0 for [`DhGroup::Null`].
    pub fn len_bytes(self) -> usize {
        match self {
            DhGroup::Null => 0,
            DhGroup::Ffdhe2048 => 256,
            DhGroup::Ffdhe3072 => 384,
            DhGroup::Ffdhe4096 => 512,
            DhGroup::Ffdhe6144 => 768,
            DhGroup::Ffdhe8192 => 1024,
        }
    }
}

/// The reason of an AUTH_Failure1 or AUTH_Failure2: the reason code explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AuthReason {
    /// Authentication failed.
    Failed = 1,
    /// The authentication protocol is not usable.
    ProtocolNotUsable = 2,
    /// Secure channel concatenation mismatch.
    ConcatenationMismatch = 3,
    /// No hash function is usable.
    HashNotUsable = 4,
    /// No Diffie-Hellman group is usable.
    GroupNotUsable = 5,
    /// Incorrect payload.
    IncorrectPayload = 6,
    /// Incorrect protocol message.
    IncorrectMessage = 7,
}

impl AuthReason {
    /// The text for the log.
    pub fn text(self) -> &'static str {
        match self {
            AuthReason::Failed => {
                "its secret is wrong, or it asks the controller to authenticate, for which the \
                 secrets file has no secret"
            }
            AuthReason::ProtocolNotUsable => "it does not offer DH-HMAC-CHAP",
            AuthReason::ConcatenationMismatch => "it asks for TLS after the authentication",
            AuthReason::HashNotUsable => "it offers no hash function that is allowed",
            AuthReason::GroupNotUsable => "it offers no Diffie-Hellman group that is allowed",
            AuthReason::IncorrectPayload => "it sent a malformed message",
            AuthReason::IncorrectMessage => "it sent or asked for a message out of order",
        }
    }
}

/// The length in an Authentication Send or Receive: of the message, or of the host's buffer.
///
/// # Errors
/// If the command is for another protocol, or the length is 0 or above `len_max`.
pub fn transfer_len(sqe: &Sqe, len_max: u32) -> Result<u32, StatusCode> {
    let (specific, len) = (&sqe.bytes()[41..44], sqe.dword(11));
    match specific == [1, 1, PROTOCOL] && (1..=len_max).contains(&len) {
        true => Ok(len),
        false => Err(StatusCode::INVALID_FIELD),
    }
}

/// An AUTH_Negotiate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiate<'m> {
    /// SC_C: whether the host asks for TLS after the authentication.
    pub concatenates: bool,
    /// The hash functions and groups of the first descriptor for DH-HMAC-CHAP, if there is one.
    pub lists: Option<(&'m [u8], &'m [u8])>,
}

/// A DH-HMAC-CHAP_Reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply<'m> {
    /// The response to the controller's challenge.
    pub response: &'m [u8],
    /// The sequence number and the value of the host's challenge, if it authenticates the
    /// controller.
    pub challenge: Option<(u32, &'m [u8])>,
    /// The host's public value; empty without Diffie-Hellman.
    pub public: &'m [u8],
}

/// A message of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMessage<'m> {
    /// AUTH_Negotiate.
    Negotiate(Negotiate<'m>),
    /// DH-HMAC-CHAP_Reply.
    Reply(Reply<'m>),
    /// DH-HMAC-CHAP_Success2.
    Success2,
    /// AUTH_Failure2, with its reason code explanation.
    Failure2(u8),
}

/// The transaction identifier of a message; 0 if it is too short for one.
pub fn transaction(message: &[u8]) -> u16 {
    if message.len() < 6 { 0 } else { u16_at(message, 4) }
}

impl HostMessage<'_> {
    /// Parses a message.
    ///
    /// # Errors
    /// If the host sends no such message, or its lengths or values are invalid in themselves.
    pub fn parse(message: &[u8]) -> Result<HostMessage<'_>, AuthReason> {
        let id = message.first_chunk().ok_or(AuthReason::IncorrectPayload)?;
        let fixed_bytes = match *id {
            message_id::NEGOTIATE => NEGOTIATE_BYTES,
            message_id::REPLY | message_id::SUCCESS2 => FIXED_BYTES,
            message_id::FAILURE2 => FAILURE_BYTES,
            _ => return Err(AuthReason::IncorrectMessage),
        };
        if message.len() < fixed_bytes {
            return Err(AuthReason::IncorrectPayload);
        }
        let (fixed, rest) = message.split_at(fixed_bytes);
        match *id {
            message_id::NEGOTIATE => negotiate(fixed, rest).map(HostMessage::Negotiate),
            message_id::REPLY => reply(fixed, rest).map(HostMessage::Reply),
            _ if !rest.is_empty() => Err(AuthReason::IncorrectPayload),
            message_id::SUCCESS2 => Ok(HostMessage::Success2),
            _ => Ok(HostMessage::Failure2(fixed[7])),
        }
    }
}

fn negotiate<'m>(fixed: &[u8], rest: &'m [u8]) -> Result<Negotiate<'m>, AuthReason> {
    if rest.len() != usize::from(fixed[7]) * DESCRIPTOR_BYTES {
        return Err(AuthReason::IncorrectPayload);
    }
    let is_ours = |descriptor: &&[u8]| descriptor[0] == 1;
    let lists = rest.chunks_exact(DESCRIPTOR_BYTES).find(is_ours).map(|descriptor| {
        let (hashes, groups) = descriptor[4..].split_at(LIST_MAX);
        Some((hashes.get(..usize::from(descriptor[2]))?, groups.get(..usize::from(descriptor[3]))?))
    });
    match lists {
        Some(None) => Err(AuthReason::IncorrectPayload),
        lists => Ok(Negotiate { concatenates: fixed[6] != 0, lists: lists.flatten() }),
    }
}

fn reply<'m>(fixed: &[u8], rest: &'m [u8]) -> Result<Reply<'m>, AuthReason> {
    let hash_bytes = usize::from(fixed[6]);
    if rest.len() != 2 * hash_bytes + usize::from(u16_at(fixed, 10)) {
        return Err(AuthReason::IncorrectPayload);
    }
    let (response, rest) = rest.split_at(hash_bytes);
    let (value, public) = rest.split_at(hash_bytes);
    let challenge = match (fixed[8], u32_at(fixed, 12)) {
        (0, _) => None,
        // Without a sequence number the challenge would be for a key of TLS.
        (1, sequence) if sequence != 0 => Some((sequence, value)),
        _ => return Err(AuthReason::IncorrectPayload),
    };
    Ok(Reply { response, challenge, public })
}

/// The first bytes of a message, up to the transaction identifier.
fn head(id: [u8; 2], transaction: u16) -> Vec<u8> {
    let [low, high] = transaction.to_le_bytes();
    vec![id[0], id[1], 0, 0, low, high]
}

/// A DH-HMAC-CHAP_Challenge. `public` is empty without Diffie-Hellman.
pub fn challenge(
    transaction: u16,
    (hash, group): (AuthHash, DhGroup),
    (sequence, value): (u32, &[u8]),
    public: &[u8],
) -> Vec<u8> {
    let mut message = head(message_id::CHALLENGE, transaction);
    message.extend_from_slice(&[hash.len_bytes() as u8, 0, hash as u8, group as u8]);
    message.extend_from_slice(&(public.len() as u16).to_le_bytes());
    message.extend_from_slice(&sequence.to_le_bytes());
    message.extend_from_slice(value);
    message.extend_from_slice(public);
    message
}

/// A DH-HMAC-CHAP_Success1. `response` is the response to the host's challenge, if it had one.
pub fn success1(transaction: u16, hash: AuthHash, response: Option<&[u8]>) -> Vec<u8> {
    let mut message = head(message_id::SUCCESS1, transaction);
    message.extend_from_slice(&[hash.len_bytes() as u8, 0, u8::from(response.is_some())]);
    message.resize(FIXED_BYTES, 0);
    message.extend_from_slice(response.unwrap_or_default());
    message
}

/// An AUTH_Failure1.
pub fn failure1(transaction: u16, reason: AuthReason) -> Vec<u8> {
    let mut message = head(message_id::FAILURE1, transaction);
    // The reason code: the authentication failed.
    message.extend_from_slice(&[1, reason as u8]);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::SQE_BYTES;

    fn sqe(specific: [u8; 3], len: u32) -> Sqe {
        let mut bytes = [0; SQE_BYTES];
        bytes[41..44].copy_from_slice(&specific);
        bytes[44..48].copy_from_slice(&len.to_le_bytes());
        Sqe::parse(&bytes).unwrap()
    }

    #[test]
    fn a_command_is_for_the_protocol_of_nvme_and_has_a_bounded_length() {
        let refused = Err(StatusCode::INVALID_FIELD);
        assert_eq!(transfer_len(&sqe([1, 1, 0xe9], 72), 100), Ok(72));
        assert_eq!(transfer_len(&sqe([1, 1, 0xe9], 100), 100), Ok(100));
        for (specific, len) in
            [([1, 1, 0xe9], 0), ([1, 1, 0xe9], 101), ([0, 1, 0xe9], 8), ([1, 2, 0xe9], 8)]
        {
            assert_eq!(transfer_len(&sqe(specific, len), 100), refused, "{specific:?} {len}");
        }
        assert_eq!(transfer_len(&sqe([1, 1, 0], 8), 100), refused);
    }

    /// The AUTH_Negotiate of Linux: three hash functions and six groups.
    fn of_linux() -> Vec<u8> {
        let mut message = vec![0, 0, 0, 0, 0x34, 0x12, 0, 1, 1, 0, 3, 6, 1, 2, 3];
        message.resize(12 + 30, 0);
        message.extend_from_slice(&[0, 1, 2, 3, 4, 5]);
        message.resize(72, 0);
        message
    }

    #[test]
    fn the_negotiate_of_linux_is_read() {
        let message = of_linux();
        let lists = Some((&[1, 2, 3][..], &[0, 1, 2, 3, 4, 5][..]));
        let wanted = HostMessage::Negotiate(Negotiate { concatenates: false, lists });
        assert_eq!(HostMessage::parse(&message), Ok(wanted));
        assert_eq!(transaction(&message), 0x1234);
        // Another protocol before it.
        let mut two = message.clone();
        two[7] = 2;
        two.splice(8..8, [9; 64]);
        assert_eq!(HostMessage::parse(&two), Ok(wanted));
        two[8 + 64] = 9;
        let none = HostMessage::Negotiate(Negotiate { concatenates: false, lists: None });
        assert_eq!(HostMessage::parse(&two), Ok(none));
    }

    /// nvmet read beyond the message by the number of descriptors and the lengths of the lists.
    #[test]
    fn lengths_of_a_negotiate_that_lie_are_refused() {
        let payload = Err(AuthReason::IncorrectPayload);
        for (at, value) in [(7, 0), (7, 2), (7, 255), (10, 31), (10, 255), (11, 31), (11, 255)] {
            let mut message = of_linux();
            message[at] = value;
            assert_eq!(HostMessage::parse(&message), payload, "{at} {value}");
        }
        for len in 0..72 {
            let reason = HostMessage::parse(&of_linux()[..len]).unwrap_err();
            assert_eq!(reason, AuthReason::IncorrectPayload, "{len}");
        }
    }

    #[test]
    fn a_reply_has_its_fields_where_the_standard_has_them() {
        let mut message = vec![1, 2, 0, 0, 7, 0, 32, 0, 1, 0, 0, 1, 9, 0, 0, 0];
        message.extend_from_slice(&[3; 32]);
        message.extend_from_slice(&[4; 32]);
        message.extend_from_slice(&[5; 256]);
        let mut wanted =
            Reply { response: &[3; 32], challenge: Some((9, &[4; 32])), public: &[5; 256] };
        assert_eq!(HostMessage::parse(&message), Ok(HostMessage::Reply(wanted)));
        let payload = Err(AuthReason::IncorrectPayload);
        for (at, value) in [(6, 31), (6, 255), (8, 2), (10, 1), (11, 2), (11, 255), (12, 0)] {
            let mut other = message.clone();
            other[at] = value;
            assert_eq!(HostMessage::parse(&other), payload, "{at} {value}");
        }
        for len in 2..message.len() {
            assert_eq!(HostMessage::parse(&message[..len]), payload, "{len}");
        }
        let mut one_way = message.clone();
        one_way[8] = 0;
        wanted.challenge = None;
        assert_eq!(HostMessage::parse(&one_way), Ok(HostMessage::Reply(wanted)));
    }

    #[test]
    fn the_last_messages_have_one_length() {
        let mut message = vec![1, 4, 0, 0, 7, 0];
        message.resize(16, 0);
        assert_eq!(HostMessage::parse(&message), Ok(HostMessage::Success2));
        message.push(0);
        assert_eq!(HostMessage::parse(&message), Err(AuthReason::IncorrectPayload));
        let failure = [0, 0xf0, 0, 0, 7, 0, 1, 4];
        assert_eq!(HostMessage::parse(&failure), Ok(HostMessage::Failure2(4)));
        assert_eq!(HostMessage::parse(&failure[..7]), Err(AuthReason::IncorrectPayload));
        for id in [[0, 1], [0, 0xf1], [1, 0], [1, 1], [1, 3], [1, 5], [2, 2]] {
            let other = [&id[..], &[0; 14]].concat();
            assert_eq!(HostMessage::parse(&other), Err(AuthReason::IncorrectMessage), "{id:?}");
        }
    }

    #[test]
    fn messages_of_the_controller_have_their_fields_where_the_standard_has_them() {
        let chosen = (AuthHash::Sha384, DhGroup::Ffdhe2048);
        let message = challenge(0x1234, chosen, (0x0102_0304, &[8; 48]), &[9; 256]);
        let wanted = [1, 1, 0, 0, 0x34, 0x12, 48, 0, 2, 1, 0, 1, 4, 3, 2, 1];
        assert_eq!(message[..16], wanted);
        assert_eq!((message.len(), message[16], message[64]), (16 + 48 + 256, 8, 9));
        let message = success1(7, AuthHash::Sha256, None);
        assert_eq!(message, [1, 3, 0, 0, 7, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let message = success1(7, AuthHash::Sha256, Some(&[6; 32]));
        assert_eq!((message[8], message.len(), message[16]), (1, 48, 6));
        assert_eq!(failure1(7, AuthReason::HashNotUsable), [0, 0xf1, 0, 0, 7, 0, 1, 4]);
    }
}
