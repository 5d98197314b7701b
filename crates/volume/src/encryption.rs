//! Encryption of blocks: keys, and how a block is encrypted and authenticated.
//!
//! ```text
//! passphrase ── Argon2id ─┐
//! secret ────── HKDF ─────┴▸ wrapping key ── AES-256-GCM ──▸ volume key, random (in a key slot)
//!                                                                │ HKDF with a salt of 16 bytes
//!                                                                ▾
//!                                block key ── AES-256-GCM, nonce = counter ──▸ stored block
//! ```
//!
//! **No nonce is used twice with a key.** Each writer (a [`BlockCipher`]) draws a salt of 128
//! random bits and derives its own block key from it. It numbers the blocks that it encrypts from 0
//! on, and the number is the nonce. The number never decreases, because it is in the memory of the
//! writer alone, which ends with its process. So nothing that the pool keeps can bring a number
//! back: no crash, rollback, clone, or copy of the pool. Two writers share a block key only if they
//! draw the same salt: for 2^32 writers of one volume key the probability is 2^-65. A writer draws
//! another salt after 2^32 blocks, so that at most 2^44 AES blocks are encrypted by one key. What
//! brings the memory of a running process back does bring its numbers back: a snapshot of a virtual
//! machine with its memory, or a checkpoint of the process.
//!
//! **What is authenticated** with a block: its number in the volume, its codec, the length of the
//! volume's blocks, and its stored length. A block that was moved to another number is not
//! accepted. Snapshots and clones have a block under the same number and key as their origin.
//!
//! Neither the pool nor the place in it is authenticated. So a raw stream moves encrypted blocks to
//! another pool unchanged, together with the key slot, and neither end needs the key. A pool that
//! has received blocks encrypts none with their salts: a salt is drawn, never read.
//!
//! [`blockyard_volume_format::sealed`] has the bytes of a stored block.
#![allow(clippy::disallowed_types)] // Keys are derived rarely.

use std::fmt;
use std::sync::{Arc, Mutex, Once, PoisonError};

use blockyard_os::LockedMemory;
use blockyard_volume_format::entry::Codec;
use blockyard_volume_format::key_slot::{Derivation, KeySlot, SALT_BYTES, WRAPPED_BYTES};
use blockyard_volume_format::sealed::{DATA, LEN, NUMBER, OVERHEAD, TAG_BYTES};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::rand::{SecureRandom, SystemRandom};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use zeroize::{Zeroize, Zeroizing};

use crate::error::VolumeError;

/// Length of a volume key in bytes.
const KEY_BYTES: usize = 32;

/// Length of what is authenticated with a block.
const AAD_BYTES: usize = 17;

/// Blocks that are encrypted by one block key.
const BLOCKS_PER_KEY: u64 = 1 << 32;

/// Block keys that one handle keeps for reads.
const KEYS_KEPT: usize = 32;

/// Costs of Argon2id for new key slots: the second recommended option of RFC 9106, section 4, with
/// one lane, because one thread computes them.
const ARGON2ID: Derivation = Derivation::Argon2id { memory_kib: 64 << 10, passes: 3, lanes: 1 };

/// Held while a key is derived from a passphrase.
static DERIVATION: Mutex<()> = Mutex::new(());

/// Least length of a passphrase in bytes.
pub const PASSPHRASE_MIN: usize = 8;
/// Least length of a secret in bytes.
pub const SECRET_MIN: usize = 32;
/// Most bytes of a passphrase or a secret.
pub const SECRET_MAX: usize = 4096;

/// Bytes that a stored block takes of which `len` bytes are encrypted.
pub(crate) const fn sealed_bytes(len: usize, align: usize) -> usize {
    (OVERHEAD + len).next_multiple_of(align)
}

/// From what a volume's key is decrypted. Dropping it overwrites its memory.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// Text that a person knows.
    Passphrase(Zeroizing<Vec<u8>>),
    /// At least 32 bytes that cannot be guessed: of a key file, or the output of a command.
    Key(Zeroizing<Vec<u8>>),
}

impl Secret {
    /// Checks the length, and that a passphrase is text. From now on this process makes no core
    /// dumps, which would have the secret and the data of clients, and other processes of its user
    /// cannot read its memory.
    ///
    /// # Errors
    /// If it is too short or too long, or a passphrase is not UTF-8.
    pub fn check(&self) -> Result<(), VolumeError> {
        // It fails for an invalid argument only.
        let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
        let (field, bytes, min) = match self {
            Secret::Passphrase(bytes) => ("passphrase", bytes, PASSPHRASE_MIN),
            Secret::Key(bytes) => ("key", bytes, SECRET_MIN),
        };
        if matches!(self, Secret::Passphrase(_)) && std::str::from_utf8(bytes).is_err() {
            let (value, wanted) = ("of other bytes".to_owned(), "text in UTF-8".to_owned());
            return Err(VolumeError::Invalid { field, value, wanted });
        }
        if (min..=SECRET_MAX).contains(&bytes.len()) {
            return Ok(());
        }
        let (value, wanted) =
            (format!("of {} bytes", bytes.len()), format!("{min} to {SECRET_MAX} bytes"));
        Err(VolumeError::Invalid { field, value, wanted })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Secret::Passphrase(_) => "Passphrase(..)",
            Secret::Key(_) => "Key(..)",
        })
    }
}

/// A volume key, in locked memory.
pub struct VolumeKey {
    id: u64,
    bytes: LockedMemory<[u8; KEY_BYTES]>,
}

/// Fills bytes by the system's random number generator.
fn random(into: &mut [u8]) -> Result<(), VolumeError> {
    let failed = |_| std::io::Error::other("the system has no random numbers");
    let filled = SystemRandom::new().fill(into).map_err(failed);
    filled.map_err(VolumeError::io("cannot draw a key"))
}

impl VolumeKey {
    /// Draws a key with the identity `id`.
    ///
    /// # Errors
    /// If the system has no random numbers or refuses the memory.
    pub fn draw(id: u64) -> Result<VolumeKey, VolumeError> {
        let mut bytes = locked([0; KEY_BYTES])?;
        random(&mut *bytes)?;
        Ok(VolumeKey { id, bytes })
    }

    /// The identity, by which volumes name their key.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Encrypts the key for a new slot.
    ///
    /// # Errors
    /// If the secret has an invalid length, or the system refuses memory or random numbers.
    pub fn wrap(&self, secret: &Secret) -> Result<KeySlot, VolumeError> {
        secret.check()?;
        let derivation = match secret {
            Secret::Passphrase(_) => ARGON2ID,
            Secret::Key(_) => Derivation::Hkdf,
        };
        let mut salt = [0; SALT_BYTES];
        random(&mut salt)?;
        // The salt is new, so this is the only use of the wrapping key.
        let wrapping = wrapping_key(derivation, &salt, secret)?;
        let wrapped = [0; WRAPPED_BYTES];
        let mut slot = KeySlot { id: self.id, derivation, salt, wrapped };
        let aad = Aad::from(slot.authenticated());
        let (key, tag) = slot.wrapped.split_at_mut(KEY_BYTES);
        key.copy_from_slice(&*self.bytes);
        let sealed = wrapping.seal_in_place_separate_tag(once(), aad, key);
        tag.copy_from_slice(sealed.expect("a key is short enough").as_ref());
        Ok(slot)
    }

    /// Decrypts the key of a slot; `None` if the secret is another one, or the slot was changed.
    ///
    /// # Errors
    /// If the secret has an invalid length, or the system refuses memory.
    pub fn unwrap(slot: &KeySlot, secret: &Secret) -> Result<Option<VolumeKey>, VolumeError> {
        secret.check()?;
        let fits = matches!(
            (slot.derivation, secret),
            (Derivation::Argon2id { .. }, Secret::Passphrase(_))
                | (Derivation::Hkdf, Secret::Key(_))
        );
        if !fits {
            return Ok(None);
        }
        let wrapping = wrapping_key(slot.derivation, &slot.salt, secret)?;
        let mut bytes = locked([0; KEY_BYTES])?;
        let (key, tag) = slot.wrapped.split_at(KEY_BYTES);
        bytes.copy_from_slice(key);
        let tag = tag.try_into().expect("the rest of a wrapped key is its tag");
        let aad = Aad::from(slot.authenticated());
        let opened = wrapping.open_in_place_separate_tag(once(), aad, tag, &mut *bytes, 0..);
        if opened.is_err() {
            return Ok(None);
        }
        Ok(Some(VolumeKey { id: slot.id, bytes }))
    }

    /// The key of the blocks of one writer.
    fn block_key(&self, salt: &[u8; SALT_BYTES]) -> LessSafeKey {
        let derived = Prk::new_less_safe(HKDF_SHA256, &*self.bytes);
        let info: [&[u8]; 2] = [b"blockyard block key", salt];
        let key = derived.expand(&info, &AES_256_GCM).expect("a key is short enough for HKDF");
        LessSafeKey::new(UnboundKey::from(key))
    }
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Locked memory for a key. The first that cannot be locked is reported.
fn locked<T>(value: T) -> Result<LockedMemory<T>, VolumeError> {
    static REPORTED: Once = Once::new();
    let memory = LockedMemory::new(value).map_err(no_memory())?;
    if !memory.is_locked() {
        REPORTED.call_once(|| {
            tracing::warn!(
                "keys of encrypted volumes can be swapped out: the limit of locked memory is \
                 reached; raise RLIMIT_MEMLOCK (LimitMEMLOCK= of a unit)"
            );
        });
    }
    Ok(memory)
}

fn no_memory() -> impl FnOnce(std::io::Error) -> VolumeError {
    VolumeError::io("cannot map memory for a key")
}

/// The nonce of a key that is used once.
fn once() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

/// Derives the key that encrypts a volume key.
fn wrapping_key(
    derivation: Derivation,
    salt: &[u8; SALT_BYTES],
    secret: &Secret,
) -> Result<LessSafeKey, VolumeError> {
    let (Secret::Passphrase(secret) | Secret::Key(secret)) = secret;
    let unbound = match derivation {
        Derivation::Argon2id { memory_kib, passes, lanes } => {
            let refused = |error: argon2::Error| std::io::Error::other(error.to_string());
            let failed = VolumeError::io("cannot derive a key from the passphrase");
            let params = argon2::Params::new(memory_kib, passes, lanes, Some(KEY_BYTES));
            let mut key = Zeroizing::new([0; KEY_BYTES]);
            // One at a time, so that many requests need the memory of one.
            let _one = DERIVATION.lock().unwrap_or_else(PoisonError::into_inner);
            let mut memory = Vec::new();
            let derived = params.and_then(|params| {
                let (algorithm, version) = (argon2::Algorithm::Argon2id, argon2::Version::V0x13);
                let blocks = params.block_count();
                memory.try_reserve_exact(blocks).map_err(|_| argon2::Error::OutOfMemory)?;
                memory.resize(blocks, argon2::Block::default());
                let argon2 = argon2::Argon2::new(algorithm, version, params);
                argon2.hash_password_into_with_memory(secret, salt, &mut *key, &mut memory)
            });
            memory.iter_mut().for_each(Zeroize::zeroize);
            derived.map_err(refused).map_err(failed)?;
            UnboundKey::new(&AES_256_GCM, &*key).expect("the key has the right length")
        }
        Derivation::Hkdf => {
            let derived = Salt::new(HKDF_SHA256, salt).extract(secret);
            let key = derived.expand(&[b"blockyard wrapping key"], &AES_256_GCM);
            UnboundKey::from(key.expect("a key is short enough for HKDF"))
        }
    };
    Ok(LessSafeKey::new(unbound))
}

/// Why a stored block cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Undecodable {
    /// The bytes are no block.
    Damaged,
    /// The block was not written there with this key.
    NotAuthentic,
}

/// Why a block is bad: it could not be read, or not be decoded.
pub(crate) type BadBlock = Result<std::io::Error, Undecodable>;

/// A block key by its salt.
type Derived = ([u8; SALT_BYTES], LessSafeKey);

/// The block keys of one handle.
struct Keys {
    /// The salt and key of the blocks that this handle encrypts, from the first one on.
    own: Option<Derived>,
    /// The number of the next block.
    next: u64,
    /// Keys for reads, and the place of the next one that is kept.
    kept: [Option<Derived>; KEYS_KEPT],
    at: usize,
}

/// Encrypts and decrypts the blocks of a volume for one thread.
pub(crate) struct BlockCipher {
    volume: Arc<VolumeKey>,
    keys: LockedMemory<Keys>,
}

impl BlockCipher {
    /// A cipher without block keys.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub(crate) fn new(volume: Arc<VolumeKey>) -> Result<BlockCipher, VolumeError> {
        let keys = Keys { own: None, next: 0, kept: [const { None }; KEYS_KEPT], at: 0 };
        let keys = locked(keys)?;
        Ok(BlockCipher { volume, keys })
    }

    /// Encrypts block `block`, stored by `codec` in the volume's blocks of `block_bytes` bytes, in
    /// place: its `len` bytes are in `into` from [`DATA`] on. Returns the stored length including
    /// padding.
    ///
    /// # Errors
    /// If the system has no random numbers.
    ///
    /// # Panics
    /// If `into` has fewer than [`sealed_bytes`] bytes.
    pub(crate) fn seal(
        &mut self,
        (block, codec, block_bytes): (u64, Codec, usize),
        len: usize,
        into: &mut [u8],
        align: usize,
    ) -> Result<usize, VolumeError> {
        let end = sealed_bytes(len, align);
        let keys = &mut *self.keys;
        if keys.own.is_none() || keys.next == BLOCKS_PER_KEY {
            let mut salt = [0; SALT_BYTES];
            random(&mut salt)?;
            (keys.own, keys.next) = (Some((salt, self.volume.block_key(&salt))), 0);
        }
        let (salt, key) = keys.own.as_ref().expect("it was made above");
        let number = keys.next.to_le_bytes();
        into[..NUMBER].copy_from_slice(salt);
        into[NUMBER..LEN].copy_from_slice(&number);
        into[LEN..DATA].copy_from_slice(&(len as u32).to_le_bytes());
        let data = &mut into[DATA..DATA + len];
        let aad = Aad::from(authenticated(block, codec, block_bytes, len));
        keys.next += 1;
        let tag = key.seal_in_place_separate_tag(nonce(number), aad, data);
        let tag = tag.expect("a block is short enough");
        into[DATA + len..][..TAG_BYTES].copy_from_slice(tag.as_ref());
        into[OVERHEAD + len..end].fill(0);
        Ok(end)
    }

    /// Decrypts a stored block in place, of which `len` bytes are encrypted, as
    /// [`blockyard_volume_format::sealed::encrypted_len`] says. Returns these.
    ///
    /// # Errors
    /// If the block is not authentic. Its bytes are then undefined.
    pub(crate) fn open<'a>(
        &mut self,
        (block, codec, block_bytes): (u64, Codec, usize),
        len: usize,
        stored: &'a mut [u8],
    ) -> Result<&'a [u8], Undecodable> {
        let (head, rest) = stored.split_at_mut(DATA);
        let (data, rest) = rest.split_at_mut(len);
        let (salt, number) = (field(&head[..NUMBER]), field(&head[NUMBER..LEN]));
        let tag = (&rest[..TAG_BYTES]).try_into().expect("a tag has that many bytes");
        let aad = Aad::from(authenticated(block, codec, block_bytes, len));
        let key = self.key(&salt);
        let opened = key.open_in_place_separate_tag(nonce(number), aad, tag, data, 0..);
        opened.map(|opened| &*opened).map_err(|_| Undecodable::NotAuthentic)
    }

    /// The block key of a salt, derived if this handle does not have it.
    fn key(&mut self, salt: &[u8; SALT_BYTES]) -> &LessSafeKey {
        let keys = &mut *self.keys;
        let is_it = |derived: &Option<Derived>| derived.as_ref().is_some_and(|it| it.0 == *salt);
        let at = keys.kept.iter().position(is_it).unwrap_or_else(|| {
            let at = keys.at;
            keys.kept[at] = Some((*salt, self.volume.block_key(salt)));
            keys.at = (at + 1) % KEYS_KEPT;
            at
        });
        &keys.kept[at].as_ref().expect("it was found or made above").1
    }
}

impl fmt::Debug for BlockCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockCipher").field("volume", &self.volume).finish_non_exhaustive()
    }
}

fn field<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the field has that many bytes")
}

fn nonce(number: [u8; 8]) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number);
    Nonce::assume_unique_for_key(bytes)
}

/// What is authenticated with a block.
fn authenticated(block: u64, codec: Codec, block_bytes: usize, len: usize) -> [u8; AAD_BYTES] {
    let mut bytes = [0; AAD_BYTES];
    bytes[..8].copy_from_slice(&block.to_le_bytes());
    bytes[8] = codec.opened() as u8;
    bytes[9..13].copy_from_slice(&(block_bytes as u32).to_le_bytes());
    bytes[13..].copy_from_slice(&(len as u32).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use blockyard_volume_format::PAGE_BYTES;
    use blockyard_volume_format::bytes::Reader;
    use blockyard_volume_format::sealed::encrypted_len;

    use super::*;

    /// The volume key of known answers.
    const VOLUME_KEY: [u8; KEY_BYTES] = *b"@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_";

    fn bytes_of(hex: &str) -> Vec<u8> {
        let digits = (0..hex.len()).step_by(2).map(|at| &hex[at..at + 2]);
        digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect()
    }

    fn passphrase(text: &str) -> Secret {
        Secret::Passphrase(Zeroizing::new(text.as_bytes().to_vec()))
    }

    fn fixed(byte: u8) -> Arc<VolumeKey> {
        let bytes = LockedMemory::new([byte; KEY_BYTES]).unwrap();
        Arc::new(VolumeKey { id: 7, bytes })
    }

    #[test]
    fn a_slot_opens_by_its_secret_alone() {
        let key = VolumeKey::draw(7).unwrap();
        for (right, wrong) in [
            (passphrase("correct horse"), passphrase("correct house")),
            (Secret::Key(Zeroizing::new(vec![3; 32])), Secret::Key(Zeroizing::new(vec![4; 32]))),
        ] {
            let slot = key.wrap(&right).unwrap();
            let back = VolumeKey::unwrap(&slot, &right).unwrap().unwrap();
            assert_eq!((*back.bytes, back.id), (*key.bytes, 7));
            assert!(VolumeKey::unwrap(&slot, &wrong).unwrap().is_none());
            // Another kind of secret with the same bytes.
            let other = match &right {
                Secret::Passphrase(_) => Secret::Key(Zeroizing::new(vec![3; 32])),
                Secret::Key(bytes) => Secret::Passphrase(bytes.clone()),
            };
            assert!(VolumeKey::unwrap(&slot, &other).unwrap().is_none());
            // A slot under the name of another key, and one with a bit changed.
            let renamed = KeySlot { id: 8, ..slot.clone() };
            assert!(VolumeKey::unwrap(&renamed, &right).unwrap().is_none());
            let mut changed = slot.clone();
            changed.wrapped[40] ^= 1;
            assert!(VolumeKey::unwrap(&changed, &right).unwrap().is_none());
            // The same key in two slots: neither salt nor encrypted key are the same.
            let again = key.wrap(&right).unwrap();
            assert!(again.salt != slot.salt && again.wrapped != slot.wrapped);
        }
        for short in [passphrase("seven.."), Secret::Key(Zeroizing::new(vec![1; 31]))] {
            assert!(key.wrap(&short).is_err(), "{short:?}");
        }
        assert_eq!(format!("{:?}", passphrase("correct horse")), "Passphrase(..)");
    }

    #[test]
    fn a_block_opens_under_its_own_number_codec_and_key_alone() {
        let (align, size) = (512, 4096);
        let plain: Vec<u8> = (0..4096_u32).map(|at| at as u8).collect();
        let mut cipher = BlockCipher::new(fixed(1)).unwrap();
        let mut stored = vec![9; sealed_bytes(size, align)];
        stored[DATA..DATA + size].copy_from_slice(&plain);
        let place = (5, Codec::SealedRaw, size);
        let len = cipher.seal(place, size, &mut stored, align).unwrap();
        assert_eq!(len, 4608);
        assert_eq!(encrypted_len(&stored), Some(size));
        assert!(stored[OVERHEAD + size..].iter().all(|byte| *byte == 0));
        let open = |cipher: &mut BlockCipher, place, stored: &[u8]| {
            let mut stored = stored.to_vec();
            cipher.open(place, size, &mut stored).map(<[u8]>::to_vec)
        };
        assert_eq!(open(&mut cipher, place, &stored).as_ref(), Ok(&plain));
        let mut reader = BlockCipher::new(fixed(1)).unwrap();
        assert_eq!(open(&mut reader, place, &stored).as_ref(), Ok(&plain), "another handle");
        for wrong in [(6, place.1, size), (5, Codec::SealedLz4, size), (5, place.1, 8192)] {
            assert_eq!(open(&mut reader, wrong, &stored), Err(Undecodable::NotAuthentic));
        }
        let mut other = BlockCipher::new(fixed(2)).unwrap();
        assert_eq!(open(&mut other, place, &stored), Err(Undecodable::NotAuthentic));
        for bit in [0, 16 * 8, 28 * 8 + 1, (28 + size + 3) * 8] {
            let mut changed = stored.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&mut reader, place, &changed).is_err(), "bit {bit}");
        }
        assert_eq!(encrypted_len(&stored[..OVERHEAD + size - 1]), None, "cut short");
        // An older block with other padding, by which it has the checksum of a newer one.
        let mut padded = stored.clone();
        padded[OVERHEAD + size + 9] = 1;
        assert_eq!(encrypted_len(&padded), None);
        assert_eq!(encrypted_len(&[&stored[..], &[0; PAGE_BYTES]].concat()), None);
        assert_eq!(encrypted_len(&[]), None);
    }

    /// Known answer, computed by OpenSSL through the Python package `cryptography`: `HKDFExpand`
    /// with SHA-256, then `AESGCM`.
    #[test]
    fn a_block_is_encrypted_as_the_format_says() {
        let key = fixed(0x42).block_key(&[0x17; SALT_BYTES]);
        let aad = Aad::from(authenticated(5, Codec::SealedRaw, 4096, 16));
        let mut data = *b"sixteen bytes ..";
        let tag = key.seal_in_place_separate_tag(nonce(3_u64.to_le_bytes()), aad, &mut data);
        let hex = |bytes: &[u8]| -> String { bytes.iter().map(|it| format!("{it:02x}")).collect() };
        assert_eq!(hex(&data), "496a0a10eb6a29885edd39f569941418");
        assert_eq!(hex(tag.unwrap().as_ref()), "7c1ee897a036ad20436a727b6857482e");
    }

    /// Known answers, computed with the Python packages `cryptography` (OpenSSL) and `argon2-cffi`
    /// (the reference implementation of Argon2): `hash_secret_raw` or `HKDF`, then `AESGCM` with a
    /// nonce of zeros and the slot before the encrypted key as associated data. The volume key has
    /// the bytes 0x40 to 0x5f.
    #[test]
    fn key_slots_of_another_implementation_open() {
        let key = Secret::Key(Zeroizing::new((0x80..0xa8).collect()));
        let argon2id =
            |memory_kib, passes, lanes| Derivation::Argon2id { memory_kib, passes, lanes };
        for (derivation, secret, slot) in [
            (
                ARGON2ID,
                passphrase("correct horse"),
                "efcdab8967452301010000010003000000010000000102030405060708090a0b0c0d0e0f10\
                 27b5029df85b09e1033f9a3ca19262c7a40d8e39c048838ae6c14a105661fe490206da3beb\
                 dff6acb285b3ad5cb8ba47",
            ),
            (
                argon2id(256, 2, 4),
                passphrase("correct horse"),
                "efcdab8967452301010001000002000000040000000102030405060708090a0b0c0d0e0f10\
                 f4d921fa2705b6a17ad9a0816aa6876e8aa9fa0cbe089de3fa158c692254c0bfa7a9386dc4\
                 70e5a4236e75c83f410e52",
            ),
            (
                Derivation::Hkdf,
                key,
                "efcdab8967452301020000000000000000000000000102030405060708090a0b0c0d0e0f10\
                 dfa22fc1a62075d3a26614db1eda58505aca7eb039624d4e3efa1727e89228a9eaa4f1785b\
                 790e8c24572e5194a20bdf",
            ),
        ] {
            let bytes = bytes_of(slot);
            let slot = KeySlot::parse(&mut Reader::new(&bytes)).unwrap();
            assert_eq!((slot.id, slot.derivation), (0x0123_4567_89ab_cdef, derivation));
            let key = VolumeKey::unwrap(&slot, &secret).unwrap();
            let key = key.unwrap_or_else(|| panic!("the slot by {derivation:?} does not open"));
            assert_eq!((key.id, &key.bytes[..]), (slot.id, &VOLUME_KEY[..]));
        }
    }

    /// Known answer, computed with the Python package `cryptography` (OpenSSL): `HKDFExpand` with
    /// SHA-256, then `AESGCM`. The salt has the bytes 0xc0 to 0xcf, the number of the block key's
    /// use is 0x1_0000_0002, and the block is the compressed block 0x0a_0b0c_0d0e of a volume with
    /// blocks of 16 KiB.
    #[test]
    fn a_stored_block_of_another_implementation_opens() {
        let stored = "c0c1c2c3c4c5c6c7c8c9cacbcccdcecf0200000001000000200000002db955ff0ce36664e9\
                      62e86520b5a1bf03c8905960fba6e359c735aa49cf5e7e7fd98cb7cf19f0f816fda312b4da\
                      1cbb";
        let mut stored = bytes_of(stored);
        stored.resize(512, 0);
        assert_eq!(encrypted_len(&stored), Some(32));
        let bytes = LockedMemory::new(VOLUME_KEY).unwrap();
        let mut cipher = BlockCipher::new(Arc::new(VolumeKey { id: 7, bytes })).unwrap();
        let place = (0x0a_0b0c_0d0e, Codec::SealedZstd, 16 << 10);
        let plain = cipher.open(place, 32, &mut stored).unwrap();
        assert_eq!(plain, b"a line that only its owner reads");
    }

    #[test]
    fn each_handle_has_its_own_salt_and_counts_its_blocks() {
        let key = fixed(1);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..3 {
            let mut cipher = BlockCipher::new(Arc::clone(&key)).unwrap();
            for _ in 0..3 {
                let mut stored = [0; 512];
                cipher.seal((0, Codec::SealedRaw, 4096), 64, &mut stored, 512).unwrap();
                assert!(seen.insert(stored[..LEN].to_vec()), "a nonce is used twice");
            }
            // After the last block of a key, the handle draws another salt.
            let salt = cipher.keys.own.as_ref().unwrap().0;
            cipher.keys.next = BLOCKS_PER_KEY;
            let mut stored = [0; 512];
            cipher.seal((0, Codec::SealedRaw, 4096), 64, &mut stored, 512).unwrap();
            assert!(stored[..NUMBER] != salt && stored[NUMBER..LEN] == [0; 8]);
        }
    }

    #[test]
    fn blocks_of_more_writers_than_a_handle_keeps_keys_for_can_be_read() {
        let key = fixed(1);
        let place = (0, Codec::SealedRaw, 64);
        let stored: Vec<_> = (0..KEYS_KEPT as u8 * 2)
            .map(|byte| {
                let mut stored = [byte; 512];
                let mut writer = BlockCipher::new(Arc::clone(&key)).unwrap();
                writer.seal(place, 64, &mut stored, 512).unwrap();
                stored
            })
            .collect();
        let mut reader = BlockCipher::new(key).unwrap();
        for _ in 0..2 {
            for (byte, stored) in (0..).zip(&stored) {
                let mut stored = *stored;
                assert_eq!(reader.open(place, 64, &mut stored), Ok(&[byte; 64][..]));
            }
        }
    }
}
