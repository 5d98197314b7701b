//! DH-HMAC-CHAP on one queue: the host proves that it knows its secret and, if it wants, the
//! controller proves that it knows its own. No I/O.
//!
//! ```text
//!   AUTH_Negotiate   exchange computed       Challenge received      Reply        secret computed,
//!                    (not with group null)                                         right response
//! WAITS ──▸ COMPUTES ───────────▸ CHALLENGES ───────▸ CHALLENGED ──▸ COMPUTES ──────────▸ PROVES
//!   ▴                                                                                       │
//!   │ Success1 received, by a host that did not challenge the controller                    │
//!   ├───────────────────────────────────────────────────────────────────────────────────────┤
//!   │ Success2                                                          Success1 received   ▾
//!   └──────────────────────────────────────────────────────────────────────────────────── CONFIRMS
//!
//! every state ── a wrong message ──▸ FAILS ── AUTH_Failure1 received ──▸ ENDED
//! every state ── AUTH_Failure2, or the host asks for a message that is not there ──▸ ENDED
//! ```
//!
//! 1. A queue executes no other command before its host has authenticated once.
//! 2. An authenticated host may negotiate again; its queue executes commands meanwhile, except in
//!    the state computes (4).
//! 3. In the state ended, the connection ends.
//! 4. While values of Diffie-Hellman are computed, by another thread, the connection takes no
//!    message and no command: they wait in the socket.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ring::{digest, hmac};
use zeroize::Zeroizing;

use crate::access::AuthRules;
use crate::auth_message::{
    self, AuthHash, AuthReason, DhGroup, HostMessage, Negotiate, Reply, transaction,
};
use crate::command::StatusCode;
use crate::dh::{DhExchange, random};
use crate::dh_worker::{DhResult, DhWork};
use crate::host_link::LinkRole;
use crate::secret::algorithm;

/// How long an authentication may take: the default of SPDK and of the kernel's target. An emulated
/// host computes for half a minute in a large Diffie-Hellman group.
const AUTH_TIMEOUT: Duration = Duration::from_secs(120);

/// A challenge of the controller.
struct Challenge {
    transaction: u16,
    hash: AuthHash,
    sequence: u32,
    value: Vec<u8>,
    /// `None` without Diffie-Hellman.
    exchange: Option<Box<DhExchange>>,
}

/// A Reply whose secret is being computed.
struct PendingReply {
    transaction: u16,
    hash: AuthHash,
    sequence: u32,
    /// The challenge of the controller.
    value: Vec<u8>,
    response: Vec<u8>,
    /// The challenge of the host.
    challenge: Option<(u32, Vec<u8>)>,
}

/// What the authentication does with a value that is being computed.
enum Computed {
    /// It becomes the exchange of a Challenge.
    Challenge { transaction: u16, hash: AuthHash, group: DhGroup },
    /// It proves or disproves a Reply.
    Reply(Box<PendingReply>),
}

enum AuthPhase {
    /// Waits for an AUTH_Negotiate.
    Waits,
    /// Waits for a value of Diffie-Hellman; the work until the connection has taken it.
    Computes(Computed, Option<DhWork>),
    /// The message is the Challenge.
    Challenges(Vec<u8>, Box<Challenge>),
    /// The host has the Challenge: waits for the Reply.
    Challenged(Box<Challenge>),
    /// The message is the Success1 of this transaction.
    Proves { message: Vec<u8>, transaction: u16, is_mutual: bool },
    /// The host has the Success1: waits for the Success2 of this transaction.
    Confirms(u16),
    /// The message is the AUTH_Failure1.
    Fails(Vec<u8>, AuthReason),
    /// The authentication has failed, and the host knows it.
    Ended,
}

/// How far an authentication is after a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuthProgress {
    /// More messages follow.
    Continues,
    /// A value has to be computed first ([`QueueAuth::take_work`]).
    Computes,
    /// The queue is authenticated.
    Authenticated,
    /// The authentication has failed, for this reason, and the connection ends.
    Ended(&'static str),
}

/// The authentication of the host of a queue.
pub(crate) struct QueueAuth {
    /// What the queue is once it is authenticated.
    pub(crate) role: LinkRole,
    rules: Arc<AuthRules>,
    phase: AuthPhase,
    is_authenticated: bool,
    /// The time at which the present authentication has to be over.
    deadline: Option<Instant>,
}

impl QueueAuth {
    /// Begins with the Connect of a queue.
    pub(crate) fn new(role: LinkRole, rules: Arc<AuthRules>, now: Instant) -> QueueAuth {
        let deadline = Some(now + AUTH_TIMEOUT);
        QueueAuth { role, rules, phase: AuthPhase::Waits, is_authenticated: false, deadline }
    }

    /// Whether the queue may execute commands.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.is_authenticated
    }

    /// Whether the authentication has failed.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.phase, AuthPhase::Ended)
    }

    /// The time at which an authentication has to be over; `None` without one.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Takes a message of the host.
    pub(crate) fn send(&mut self, message: &[u8], now: Instant) -> AuthProgress {
        self.deadline.get_or_insert(now + AUTH_TIMEOUT);
        let transaction = transaction(message);
        let phase = std::mem::replace(&mut self.phase, AuthPhase::Ended);
        let is_other = phase.transaction().is_some_and(|ours| ours != transaction);
        let next = match (HostMessage::parse(message), phase) {
            (Err(reason), _) => Err(reason),
            (Ok(HostMessage::Failure2(_)), _) => {
                return AuthProgress::Ended("it does not accept the answers of the controller");
            }
            (Ok(HostMessage::Negotiate(message)), AuthPhase::Waits) => {
                self.negotiate(transaction, &message)
            }
            _ if is_other => Err(AuthReason::IncorrectPayload),
            (Ok(HostMessage::Reply(message)), AuthPhase::Challenged(challenge)) => {
                self.reply(&message, *challenge)
            }
            (Ok(HostMessage::Success2), AuthPhase::Confirms(_)) => {
                self.phase = AuthPhase::Waits;
                return self.succeed();
            }
            (Ok(_), _) => Err(AuthReason::IncorrectMessage),
        };
        self.enter(transaction, next);
        match &self.phase {
            AuthPhase::Computes(..) => AuthProgress::Computes,
            _ => AuthProgress::Continues,
        }
    }

    fn enter(&mut self, transaction: u16, next: Result<AuthPhase, AuthReason>) {
        self.phase = next.unwrap_or_else(|reason| {
            AuthPhase::Fails(auth_message::failure1(transaction, reason), reason)
        });
    }

    /// What is to be computed, once.
    pub(crate) fn take_work(&mut self) -> Option<DhWork> {
        match &mut self.phase {
            AuthPhase::Computes(_, work) => work.take(),
            _ => None,
        }
    }

    /// Continues with what was computed.
    pub(crate) fn computed(&mut self, result: DhResult) {
        let transaction = self.phase.transaction().unwrap_or_default();
        let phase = std::mem::replace(&mut self.phase, AuthPhase::Ended);
        let next = match (phase, result) {
            (
                AuthPhase::Computes(Computed::Challenge { transaction, hash, group }, _),
                DhResult::Exchange(Some(exchange)),
            ) => Ok(challenge(transaction, (hash, group), Some(exchange))),
            (AuthPhase::Computes(Computed::Reply(reply), _), DhResult::Secret(Some(shared))) => {
                self.prove(&reply, Some(shared))
            }
            // The public value of the host is none of the group.
            _ => Err(AuthReason::IncorrectPayload),
        };
        self.enter(transaction, next);
    }

    /// The message for the host, in a buffer of this length, and what follows.
    ///
    /// # Errors
    /// If the buffer is too short for the message, which stays.
    pub(crate) fn receive(&mut self, len: u32) -> Result<(Vec<u8>, AuthProgress), StatusCode> {
        let out_of_order;
        let message = match &self.phase {
            AuthPhase::Challenges(message, _)
            | AuthPhase::Proves { message, .. }
            | AuthPhase::Fails(message, _) => message,
            AuthPhase::Waits
            | AuthPhase::Computes(..)
            | AuthPhase::Challenged(_)
            | AuthPhase::Confirms(_)
            | AuthPhase::Ended => {
                let transaction = self.phase.transaction().unwrap_or_default();
                out_of_order = auth_message::failure1(transaction, AuthReason::IncorrectMessage);
                &out_of_order
            }
        };
        if message.len() > len as usize {
            return Err(StatusCode::INVALID_FIELD);
        }
        // A host waits for as many bytes as it has room for.
        let mut bytes = message.clone();
        bytes.resize(len as usize, 0);
        let progress;
        (self.phase, progress) = match std::mem::replace(&mut self.phase, AuthPhase::Ended) {
            AuthPhase::Challenges(_, challenge) => {
                (AuthPhase::Challenged(challenge), AuthProgress::Continues)
            }
            AuthPhase::Proves { transaction, is_mutual: true, .. } => {
                (AuthPhase::Confirms(transaction), AuthProgress::Continues)
            }
            AuthPhase::Proves { is_mutual: false, .. } => (AuthPhase::Waits, self.succeed()),
            AuthPhase::Fails(_, reason) => (AuthPhase::Ended, AuthProgress::Ended(reason.text())),
            _ => (AuthPhase::Ended, AuthProgress::Ended(AuthReason::IncorrectMessage.text())),
        };
        Ok((bytes, progress))
    }

    fn succeed(&mut self) -> AuthProgress {
        self.is_authenticated = true;
        self.deadline = None;
        AuthProgress::Authenticated
    }

    fn negotiate(
        &self,
        transaction: u16,
        message: &Negotiate<'_>,
    ) -> Result<AuthPhase, AuthReason> {
        if message.concatenates {
            return Err(AuthReason::ConcatenationMismatch);
        }
        let (hashes, groups) = message.lists.ok_or(AuthReason::ProtocolNotUsable)?;
        let hash = self.rules.hashes.iter().find(|hash| hashes.contains(&(**hash as u8)));
        let hash = *hash.ok_or(AuthReason::HashNotUsable)?;
        let group = self.rules.groups.iter().find(|group| groups.contains(&(**group as u8)));
        let group: DhGroup = *group.ok_or(AuthReason::GroupNotUsable)?;
        Ok(match group {
            DhGroup::Null => challenge(transaction, (hash, group), None),
            _ => AuthPhase::Computes(
                Computed::Challenge { transaction, hash, group },
                Some(DhWork::Exchange(group)),
            ),
        })
    }

    fn reply(&self, reply: &Reply<'_>, challenge: Challenge) -> Result<AuthPhase, AuthReason> {
        let Challenge { transaction, hash, sequence, value, exchange } = challenge;
        let public_len = exchange.as_ref().map_or(0, |exchange| exchange.public().len());
        if reply.response.len() != hash.len_bytes() || reply.public.len() != public_len {
            return Err(AuthReason::IncorrectPayload);
        }
        let pending = PendingReply {
            transaction,
            hash,
            sequence,
            value,
            response: reply.response.to_vec(),
            challenge: reply.challenge.map(|(sequence, value)| (sequence, value.to_vec())),
        };
        let Some(exchange) = exchange else { return self.prove(&pending, None) };
        let work = DhWork::Secret(exchange, reply.public.to_vec());
        Ok(AuthPhase::Computes(Computed::Reply(Box::new(pending)), Some(work)))
    }

    /// Checks the response of the host, and answers its challenge.
    fn prove(
        &self,
        reply: &PendingReply,
        shared: Option<Zeroizing<Vec<u8>>>,
    ) -> Result<AuthPhase, AuthReason> {
        let PendingReply { transaction, hash, sequence, .. } = *reply;
        let (host, subsystem) = (self.role.host.as_str(), self.role.subsystem.as_str());
        let secret = self.rules.secrets.find(host).ok_or(AuthReason::Failed)?;
        let proof = Proof { hash, transaction, shared };
        let key = proof.key(&secret.host.key(host));
        let signed = proof.signed(&reply.value, sequence, b"HostHost", [host, subsystem]);
        // The comparison takes the same time wherever they differ.
        hmac::verify(&key, &signed, &reply.response).map_err(|_| AuthReason::Failed)?;
        let response = match &reply.challenge {
            Some((sequence, value)) => {
                let secret = secret.controller.as_ref().ok_or(AuthReason::Failed)?;
                let key = proof.key(&secret.key(subsystem));
                let signed = proof.signed(value, *sequence, b"Controller", [subsystem, host]);
                Some(hmac::sign(&key, &signed))
            }
            None => None,
        };
        let response = response.as_ref().map(AsRef::as_ref);
        let message = auth_message::success1(transaction, hash, response);
        Ok(AuthPhase::Proves { message, transaction, is_mutual: response.is_some() })
    }
}

/// A Challenge with new random numbers.
fn challenge(
    transaction: u16,
    (hash, group): (AuthHash, DhGroup),
    exchange: Option<Box<DhExchange>>,
) -> AuthPhase {
    let mut sequence = [0; 4];
    random(&mut sequence);
    // 0 stands for no sequence number.
    let sequence = u32::from_le_bytes(sequence).max(1);
    let mut value = vec![0; hash.len_bytes()];
    random(&mut value);
    let public = exchange.as_ref().map_or(&[][..], |exchange| exchange.public());
    let message = auth_message::challenge(transaction, (hash, group), (sequence, &value), public);
    let challenge = Challenge { transaction, hash, sequence, value, exchange };
    AuthPhase::Challenges(message, Box::new(challenge))
}

impl AuthPhase {
    /// The identifier of the present transaction.
    fn transaction(&self) -> Option<u16> {
        match self {
            AuthPhase::Challenges(_, challenge) | AuthPhase::Challenged(challenge) => {
                Some(challenge.transaction)
            }
            AuthPhase::Computes(Computed::Challenge { transaction, .. }, _) => Some(*transaction),
            AuthPhase::Computes(Computed::Reply(reply), _) => Some(reply.transaction),
            AuthPhase::Proves { transaction, .. } | AuthPhase::Confirms(transaction) => {
                Some(*transaction)
            }
            AuthPhase::Waits | AuthPhase::Fails(..) | AuthPhase::Ended => None,
        }
    }
}

/// What the responses of both sides have in common.
struct Proof {
    hash: AuthHash,
    transaction: u16,
    /// The secret of the Diffie-Hellman exchange, if there was one.
    shared: Option<Zeroizing<Vec<u8>>>,
}

impl Proof {
    fn key(&self, key: &[u8]) -> hmac::Key {
        hmac::Key::new(algorithm(self.hash), key)
    }

    /// The bytes that the response to a challenge signs, by the side with this role.
    fn signed(&self, challenge: &[u8], sequence: u32, role: &[u8], nqns: [&str; 2]) -> Vec<u8> {
        let mut bytes = match &self.shared {
            Some(shared) => {
                let digest = digest::digest(algorithm(self.hash).digest_algorithm(), shared);
                hmac::sign(&self.key(digest.as_ref()), challenge).as_ref().to_vec()
            }
            None => challenge.to_vec(),
        };
        bytes.extend_from_slice(&sequence.to_le_bytes());
        bytes.extend_from_slice(&self.transaction.to_le_bytes());
        // SC_C: no TLS after the authentication.
        bytes.push(0);
        bytes.extend_from_slice(role);
        bytes.extend_from_slice(nqns[0].as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(nqns[1].as_bytes());
        bytes
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::secret::{HostSecrets, Secret};

    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:4dd5a6b1-51c4-4a24-9a6d-1e1c9f7e0a01";
    const SUBSYSTEM: &str = "nqn.2026-11.io.blockyard:vol0";
    const SECRET: &str = "DHHC-1:01:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";

    impl QueueAuth {
        /// Takes a message, and computes what it asks for at once.
        fn take(&mut self, message: &[u8]) -> AuthProgress {
            match self.send(message, Instant::now()) {
                AuthProgress::Computes => {
                    let work = self.take_work().unwrap();
                    assert!(self.take_work().is_none(), "once");
                    self.computed(work.run());
                    AuthProgress::Continues
                }
                progress => progress,
            }
        }
    }

    fn queue() -> QueueAuth {
        let role = LinkRole {
            subsystem: SUBSYSTEM.to_owned(),
            host: HOST.to_owned(),
            controller: 1,
            queue: 0,
        };
        let secrets = HostSecrets::parse(&format!("{HOST} {SECRET}")).unwrap();
        let hashes = vec![AuthHash::Sha384, AuthHash::Sha256];
        let groups = vec![DhGroup::Ffdhe2048, DhGroup::Null];
        let rules = AuthRules { secrets, hashes, groups };
        QueueAuth::new(role, Arc::new(rules), Instant::now())
    }

    /// An AUTH_Negotiate with these lists.
    fn negotiate(hashes: &[u8], groups: &[u8]) -> Vec<u8> {
        let (hash_count, group_count) = (hashes.len() as u8, groups.len() as u8);
        let mut message = vec![0, 0, 0, 0, 5, 0, 0, 1, 1, 0, hash_count, group_count];
        message.extend_from_slice(hashes);
        message.resize(12 + 30, 0);
        message.extend_from_slice(groups);
        message.resize(72, 0);
        message
    }

    /// The reason of the AUTH_Failure1 after a message.
    fn refused(queue: &mut QueueAuth, message: &[u8]) -> u8 {
        assert_eq!(queue.take(message), AuthProgress::Continues);
        let (answer, progress) = queue.receive(4096).unwrap();
        assert!(matches!(progress, AuthProgress::Ended(_)) && queue.has_ended());
        assert!(!queue.is_authenticated());
        assert_eq!((&answer[..4], answer[6]), (&[0, 0xf1, 0, 0][..], 1));
        answer[7]
    }

    /// Computed by the modules hmac and hashlib of Python.
    #[test]
    fn responses_are_those_of_another_program() {
        let hex = |bytes: &[u8]| bytes.iter().map(|it| format!("{it:02x}")).collect::<String>();
        let proof = Proof { hash: AuthHash::Sha256, transaction: 0x1234, shared: None };
        let challenge: Vec<u8> = (0..64).collect();
        let key = Secret::parse(SECRET).unwrap().key(HOST);
        let signed = proof.signed(&challenge[..32], 0x0102_0304, b"HostHost", [HOST, SUBSYSTEM]);
        assert_eq!(
            hex(hmac::sign(&proof.key(&key), &signed).as_ref()),
            "e631de804ffcf8f01a6e59cbad058efcf6c2c0b59cfc5b6d94c509829e8cf6f5"
        );
        let shared = Some(Zeroizing::new(vec![7; 256]));
        let proof = Proof { hash: AuthHash::Sha512, shared, ..proof };
        let key = Secret::parse(&SECRET.replace(":01:", ":02:")).unwrap().key(SUBSYSTEM);
        let signed = proof.signed(&challenge, 0x0102_0304, b"Controller", [SUBSYSTEM, HOST]);
        assert_eq!(
            hex(hmac::sign(&proof.key(&key), &signed).as_ref()),
            "32b9dfcbc4fe2446abd2f48d656ad85b5e24babc137a04818e89404e9e1db11ec3d99b6d0b99bf43a715c7\
             904d64231d05526b97ccc9e4d335b8db9aca449413"
        );
    }

    #[test]
    fn the_first_allowed_hash_and_group_that_the_host_offers_are_chosen() {
        for (hashes, groups, chosen) in [
            (&[1, 2, 3][..], &[0, 1, 2][..], [48, 0, 2, 1]),
            (&[3, 1], &[5, 4, 0], [32, 0, 1, 0]),
            (&[2], &[1], [48, 0, 2, 1]),
        ] {
            let mut queue = queue();
            let sent = queue.take(&negotiate(hashes, groups));
            assert_eq!(sent, AuthProgress::Continues);
            let (message, progress) = queue.receive(4096).unwrap();
            assert_eq!((&message[..6], progress), (&[1, 1, 0, 0, 5, 0][..], sent));
            assert_eq!(message[6..10], chosen);
        }
        assert_eq!(refused(&mut queue(), &negotiate(&[3], &[0])), 4);
        assert_eq!(refused(&mut queue(), &negotiate(&[], &[0])), 4);
        assert_eq!(refused(&mut queue(), &negotiate(&[1], &[2, 3])), 5);
        let mut other = negotiate(&[1], &[0]);
        other[8] = 2;
        assert_eq!(refused(&mut queue(), &other), 2);
        let mut concatenates = negotiate(&[1], &[0]);
        concatenates[6] = 1;
        assert_eq!(refused(&mut queue(), &concatenates), 3);
        assert_eq!(refused(&mut queue(), &negotiate(&[1], &[0])[..71]), 6);
    }

    #[test]
    fn messages_out_of_order_are_refused() {
        let negotiate = negotiate(&[1], &[0]);
        let mut reply = vec![1, 2, 0, 0, 5, 0, 32];
        reply.resize(16 + 64, 0);
        let mut success2 = vec![1, 4, 0, 0, 5, 0];
        success2.resize(16, 0);
        assert_eq!(refused(&mut queue(), &reply), 7);
        assert_eq!(refused(&mut queue(), &success2), 7);
        assert_eq!(refused(&mut queue(), &[1, 9, 0, 0, 5, 0]), 7);
        assert_eq!(refused(&mut queue(), &[1]), 6);
        let negotiated = || {
            let mut queue = queue();
            queue.take(&negotiate);
            queue
        };
        for message in [&negotiate, &reply, &success2] {
            assert_eq!(refused(&mut negotiated(), message), 7, "the challenge was not asked for");
        }
        let challenged = || {
            let mut queue = negotiated();
            queue.receive(4096).unwrap();
            queue
        };
        assert_eq!(refused(&mut challenged(), &negotiate), 7);
        assert_eq!(refused(&mut challenged(), &success2), 7);
        assert_eq!(refused(&mut challenged(), &reply), 1, "a wrong response");
        reply[4] = 6;
        assert_eq!(refused(&mut challenged(), &reply), 6, "another transaction");
        let mut long = vec![1, 2, 0, 0, 5, 0, 48];
        long.resize(16 + 96, 0);
        assert_eq!(refused(&mut challenged(), &long), 6, "another hash");
        let mut early = queue();
        let (answer, progress) = early.receive(8).unwrap();
        assert_eq!(answer, [0, 0xf1, 0, 0, 0, 0, 1, 7]);
        assert!(matches!(progress, AuthProgress::Ended(_)));
    }

    /// A Reply to the controller's challenge, with a challenge of its own if it is two-way.
    fn reply(challenge: &[u8], secret: &str, is_mutual: bool) -> Vec<u8> {
        let proof = Proof { hash: AuthHash::Sha256, transaction: 5, shared: None };
        let sequence = u32::from_le_bytes(*challenge[12..].first_chunk().unwrap());
        let signed = proof.signed(&challenge[16..48], sequence, b"HostHost", [HOST, SUBSYSTEM]);
        let key = proof.key(&Secret::parse(secret).unwrap().key(HOST));
        let mut message = vec![1, 2, 0, 0, 5, 0, 32, 0, u8::from(is_mutual), 0, 0, 0, 9, 0, 0, 0];
        message.extend_from_slice(hmac::sign(&key, &signed).as_ref());
        message.extend_from_slice(&[3; 32]);
        message
    }

    /// A queue whose host has sent the right response: it gets the Success1 next.
    pub(crate) fn proving_queue() -> QueueAuth {
        let mut queue = queue();
        queue.take(&negotiate(&[1], &[0]));
        let (challenge, _) = queue.receive(4096).unwrap();
        assert_eq!(queue.take(&reply(&challenge, SECRET, false)), AuthProgress::Continues);
        queue
    }

    #[test]
    fn a_host_may_authenticate_again() {
        let mut queue = queue();
        assert!(queue.deadline().is_some());
        for _ in 0..2 {
            queue.take(&negotiate(&[1], &[0]));
            assert!(queue.deadline().is_some(), "it has to end what it began");
            let (challenge, _) = queue.receive(4096).unwrap();
            queue.take(&reply(&challenge, SECRET, false));
            let (success, progress) = queue.receive(16).unwrap();
            assert_eq!((&success[..2], success[8]), (&[1, 3][..], 0));
            assert_eq!(progress, AuthProgress::Authenticated);
            assert!(queue.is_authenticated() && queue.deadline().is_none());
        }
        queue.take(&[1]);
        assert!(queue.deadline().is_some(), "a host that asks for no AUTH_Failure1 is cut off");
    }

    #[test]
    fn a_host_with_another_secret_or_without_the_controllers_is_refused() {
        let other = SECRET.replace(":01:", ":00:");
        for (secret, is_mutual) in [(other.as_str(), false), (SECRET, true)] {
            let mut queue = queue();
            queue.take(&negotiate(&[1], &[0]));
            let (challenge, _) = queue.receive(4096).unwrap();
            assert_eq!(refused(&mut queue, &reply(&challenge, secret, is_mutual)), 1);
        }
    }

    /// Changes, cuts or lengthens a message, or makes another one of it.
    fn damaged(mut message: Vec<u8>, random: &mut fastrand::Rng) -> Vec<u8> {
        match random.u8(0..4) {
            0 if !message.is_empty() => {
                let at = random.usize(..message.len().min(24));
                message[at] ^= 1 << random.u8(0..8);
            }
            1 => message.truncate(random.usize(..=message.len())),
            2 => message.resize(message.len() + random.usize(1..200), random.u8(..)),
            _ => {
                let len = random.usize(..300);
                message = std::iter::repeat_with(|| random.u8(..)).take(len).collect();
                let kinds = [[0, 0], [0, 0xf0], [1, 2], [1, 4], [1, 3]];
                message.splice(..message.len().min(2), kinds[random.usize(..5)]);
            }
        }
        message
    }

    /// A host that follows the protocol for the most part, and otherwise sends anything, or asks
    /// for messages, at any time. Returns whether it has authenticated.
    fn authenticates_by_chance(secret: &str, random: &mut fastrand::Rng) -> bool {
        let (mut queue, mut challenge, mut step) = (queue(), vec![0; 64], 0);
        let group = u8::from(random.u8(..) == 0);
        while !queue.has_ended() && !queue.is_authenticated() && step < 20 {
            assert!(queue.deadline().is_some(), "the host has to end what it has begun");
            let expected = if random.u8(0..8) > 0 { step % 4 } else { random.u8(0..8) };
            step += 1;
            if expected % 2 == 1 {
                let len = if random.u8(0..8) > 0 { 4096 } else { random.u32(..400) };
                match queue.receive(len) {
                    Ok((message, _)) if message.len() >= 64 => challenge = message,
                    Ok(_) | Err(_) => {}
                }
                continue;
            }
            let message = match expected {
                0 => negotiate(&[1], &[group]),
                2 => reply(&challenge, secret, random.u8(0..8) == 0),
                4 => vec![1, 4, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                _ => vec![0, 0xf0, 0, 0, 5, 0, 1, 1],
            };
            let is_damaged = random.u8(0..8) == 0;
            queue.take(&if is_damaged { damaged(message, random) } else { message });
        }
        queue.is_authenticated()
    }

    /// The host with the secret shows that the messages get as far as to a success.
    #[test]
    fn no_messages_authenticate_a_host_without_the_secret() {
        const HOSTS: u64 = 5000;
        let other = SECRET.replace(":01:", ":00:");
        let count = |secret: &str| {
            let by_chance =
                |seed: &u64| authenticates_by_chance(secret, &mut fastrand::Rng::with_seed(*seed));
            (0..HOSTS).filter(by_chance).count()
        };
        assert_eq!(count(&other), 0);
        assert!(count(SECRET) > 100, "{}", count(SECRET));
    }

    #[test]
    fn a_message_stays_until_the_host_has_room_for_it() {
        let mut queue = queue();
        queue.take(&negotiate(&[1], &[1]));
        assert_eq!(queue.receive(303).unwrap_err(), StatusCode::INVALID_FIELD);
        let (message, _) = queue.receive(304).unwrap();
        assert_eq!((message.len(), message[0]), (16 + 32 + 256, 1));
    }

    #[test]
    fn a_host_that_gives_up_ends_its_connection() {
        let mut queue = queue();
        queue.take(&negotiate(&[1], &[0]));
        queue.receive(4096).unwrap();
        let sent = queue.take(&[0, 0xf0, 0, 0, 5, 0, 1, 4]);
        assert!(matches!(sent, AuthProgress::Ended(_)) && queue.has_ended());
    }
}
