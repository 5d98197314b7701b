//! DH-HMAC-CHAP by a host that shares no code with the target: another library has its big
//! integers, and the primes are computed here.

use data_encoding::BASE64;
use num_bigint::BigUint;
use ring::{digest, hmac};

use super::host::{Done, Initiator, fabrics, pattern};

/// The secret of [`HOST`], which is also that of the controller for [`OTHER`].
pub(crate) const SECRET: &str = "DHHC-1:01:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
/// A secret with a longer key, and another transformation.
pub(crate) const LONG: &str = "DHHC-1:03:CzBVep/E6Q4zWH2ix+wRNluApcrvFDleg6jN8hc8YYar0PUaP2\
    SJrtP4HUJnjLHW+yBFao+02f4jSG2St9wBJgnmuv8=:";
/// The id, the bytes and the algorithm of each hash function.
pub(crate) const HASHES: [(u8, usize, hmac::Algorithm); 3] =
    [(1, 32, hmac::HMAC_SHA256), (2, 48, hmac::HMAC_SHA384), (3, 64, hmac::HMAC_SHA512)];

/// A key: HMAC of the NQN, unless the secret says that it is used as it is.
pub(crate) fn key(secret: &str, nqn: &str) -> Vec<u8> {
    let bytes = BASE64.decode(&secret.as_bytes()[10..secret.len() - 1]).unwrap();
    let key = &bytes[..bytes.len() - 4];
    match secret.as_bytes()[8] - b'0' {
        0 => key.to_vec(),
        id => mac(HASHES[usize::from(id) - 1].2, key, &[nqn.as_bytes(), b"NVMe-over-Fabrics"]),
    }
}

pub(crate) fn mac(algorithm: hmac::Algorithm, key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(algorithm, key), &parts.concat()).as_ref().to_vec()
}

/// The prime of a group, by the formula of RFC 7919.
pub(crate) fn prime(group: u8) -> Option<BigUint> {
    let (bits, offset) = match group {
        0 => return None,
        1 => (2048, 560_316_u32),
        2 => (3072, 2_625_351),
        3 => (4096, 5_736_041),
        4 => (6144, 15_705_020),
        _ => (8192, 10_965_728),
    };
    let one = BigUint::from(1_u8);
    // 2^(bits - 130) e, as the sum of 1/n!, with 128 more bits.
    let (mut term, mut e) = (&one << (bits - 130 + 128), BigUint::ZERO);
    for divisor in 1_u32.. {
        if term == BigUint::ZERO {
            break;
        }
        e += &term;
        term /= divisor;
    }
    let middle = ((e >> 128_u32) + offset) << 64_u32;
    Some((&one << bits) - (&one << (bits - 64)) + middle - one)
}

pub(crate) fn padded(number: &BigUint, len: usize) -> Vec<u8> {
    let bytes = number.to_bytes_be();
    [vec![0; len - bytes.len()], bytes].concat()
}

/// What a host knows.
#[derive(Clone, Copy)]
pub(crate) struct Knowledge {
    pub(crate) subsystem: &'static str,
    pub(crate) host: &'static str,
    pub(crate) secret: &'static str,
    /// The secret of the controller, if the host authenticates it.
    pub(crate) controller: Option<&'static str>,
}

pub(crate) fn auth_command(kind: u8, len: usize) -> [u8; 64] {
    let mut sqe = fabrics(kind);
    sqe[41..44].copy_from_slice(&[1, 1, 0xe9]);
    sqe[44..48].copy_from_slice(&(len as u32).to_le_bytes());
    sqe
}

pub(crate) fn auth_send(queue: &mut Initiator, message: &[u8]) -> Done {
    queue.execute(auth_command(5, message.len()), message)
}

pub(crate) fn auth_receive(queue: &mut Initiator, len: usize) -> Done {
    queue.read(auth_command(6, len), len)
}

/// An AUTH_Negotiate as Linux sends it, with all hash functions and groups.
pub(crate) fn negotiate(transaction: u16) -> Vec<u8> {
    let [low, high] = transaction.to_le_bytes();
    let mut message = vec![0, 0, 0, 0, low, high, 0, 1, 1, 0, 3, 6, 1, 2, 3];
    message.resize(12 + 30, 0);
    message.extend_from_slice(&[0, 1, 2, 3, 4, 5]);
    message.resize(72, 0);
    message
}

/// The reason of an AUTH_Failure1.
pub(crate) fn reason(message: &[u8]) -> u8 {
    assert_eq!((&message[..4], message[6]), (&[0, 0xf1, 0, 0][..], 1), "{:?}", &message[..16]);
    message[7]
}

/// Authenticates a queue.
///
/// # Errors
/// The reason of the controller's AUTH_Failure1; 0 if the controller does not know its secret.
pub(crate) fn authenticate(queue: &mut Initiator, known: Knowledge) -> Result<(), u8> {
    let transaction = 0x1234_u16.to_le_bytes();
    assert_eq!(auth_send(queue, &negotiate(0x1234)).status, 0);
    let challenge = auth_receive(queue, 4096).data;
    if challenge[0] == 0 {
        return Err(reason(&challenge));
    }
    assert_eq!(challenge[..6], [1, 1, 0, 0, transaction[0], transaction[1]]);
    let (id, len, algorithm) = HASHES[usize::from(challenge[8]) - 1];
    assert_eq!((usize::from(challenge[6]), challenge[8]), (len, id));
    let (sequence, value) = (&challenge[12..16], &challenge[16..16 + len]);
    assert_ne!(sequence, [0; 4]);
    let public_len = usize::from(u16::from_le_bytes([challenge[10], challenge[11]]));
    let (mut public, mut session) = (Vec::new(), None);
    if let Some(prime) = prime(challenge[9]) {
        assert_eq!(public_len as u64, prime.bits() / 8);
        let exponent = BigUint::from_bytes_be(&pattern(40, 9));
        let theirs = BigUint::from_bytes_be(&challenge[16 + len..16 + len + public_len]);
        public = padded(&BigUint::from(2_u8).modpow(&exponent, &prime), public_len);
        let shared = padded(&theirs.modpow(&exponent, &prime), public_len);
        let hash = digest::digest(algorithm.digest_algorithm(), &shared);
        session = Some(hash.as_ref().to_vec());
    } else {
        assert_eq!(public_len, 0);
    }
    let augmented = |value: &[u8]| match &session {
        Some(session) => mac(algorithm, session, &[value]),
        None => value.to_vec(),
    };
    let respond = |secret, role: &[u8], nqns: [&str; 2], value: &[u8], sequence: &[u8]| {
        let mut parts = vec![augmented(value), sequence.to_vec(), transaction.to_vec(), vec![0]];
        parts.extend([role.to_vec(), nqns[0].into(), vec![0], nqns[1].into()]);
        mac(algorithm, &key(secret, nqns[0]), &[&parts.concat()])
    };
    let response =
        respond(known.secret, b"HostHost", [known.host, known.subsystem], value, sequence);
    let ours = pattern(len, 3);
    let mut reply = vec![1, 2, 0, 0, transaction[0], transaction[1], len as u8, 0];
    reply.extend_from_slice(&[u8::from(known.controller.is_some()), 0]);
    reply.extend_from_slice(&(public_len as u16).to_le_bytes());
    reply.extend_from_slice(&[7, 0, 0, 0]);
    reply.extend_from_slice(&[response, ours.clone(), public].concat());
    assert_eq!(auth_send(queue, &reply).status, 0);
    let success = auth_receive(queue, 4096).data;
    if success[0] == 0 {
        return Err(reason(&success));
    }
    assert_eq!(success[..7], [1, 3, 0, 0, transaction[0], transaction[1], len as u8]);
    assert_eq!(success[8], u8::from(known.controller.is_some()));
    let Some(secret) = known.controller else { return Ok(()) };
    let right = respond(secret, b"Controller", [known.subsystem, known.host], &ours, &[7, 0, 0, 0]);
    if success[16..16 + len] != right {
        let failure = [0, 0xf0, 0, 0, transaction[0], transaction[1], 1, 1];
        assert_eq!(auth_send(queue, &failure).status, 0);
        return Err(0);
    }
    let mut success2 = vec![1, 4, 0, 0, transaction[0], transaction[1]];
    success2.resize(16, 0);
    assert_eq!(auth_send(queue, &success2).status, 0);
    Ok(())
}

/// Sends the Connect of a host that has to authenticate, again while queues of the host's
/// controller before are ending; returns the controller.
pub(crate) fn ask(queue: &mut Initiator, parts: ([u8; 64], Vec<u8>), host: &str) -> u16 {
    const BUSY: u16 = 0x181;
    let mut done = connect_as(queue, parts.clone(), host);
    while done.status == BUSY {
        std::thread::yield_now();
        done = connect_as(queue, parts.clone(), host);
    }
    assert_eq!((done.status, done.result >> 16), (0, 2), "authentication is asked for");
    done.result as u16
}

/// Sends the Connect of a host.
pub(crate) fn connect_as(
    queue: &mut Initiator,
    (sqe, mut data): ([u8; 64], Vec<u8>),
    host: &str,
) -> Done {
    data[512..768].fill(0);
    data[512..512 + host.len()].copy_from_slice(host.as_bytes());
    queue.execute(sqe, &data)
}
