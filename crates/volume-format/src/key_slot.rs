//! A key slot: the key of encrypted volumes as the catalogue has it, encrypted by a key that is
//! derived from a passphrase or from a secret. `blockyard-volume` derives and decrypts.

use crate::bytes::Reader;
use crate::error::FormatError;

const WHAT: &str = "key slot";

/// Length of the salt that a key slot draws for its derivation, in bytes.
pub const SALT_BYTES: usize = 16;

/// Length of an encrypted key: 32 bytes and the authentication tag of 16 bytes.
pub const WRAPPED_BYTES: usize = 48;

/// Length of an encoded key slot in bytes.
pub const KEY_SLOT_BYTES: usize = 8 + 1 + 12 + SALT_BYTES + WRAPPED_BYTES;

/// Most memory that a derivation may need, in KiB: 256 MiB, four times that of a new slot. A slot
/// comes from a disk or a stream that another person may have written, and a daemon derives.
pub const MEMORY_KIB_MAX: u32 = 256 << 10;

/// Most passes of a derivation: with the most memory it takes 4 s, where a new slot takes 0.2 s.
pub const PASSES_MAX: u32 = 16;

/// Most lanes of a derivation.
pub const LANES_MAX: u32 = 16;

/// How the key that decrypts a key slot is derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Derivation {
    /// From a passphrase, by Argon2id (RFC 9106).
    Argon2id {
        /// Memory in KiB.
        memory_kib: u32,
        /// Number of passes.
        passes: u32,
        /// Number of lanes.
        lanes: u32,
    },
    /// From a secret of at least 32 bytes, by HKDF with SHA-256 (RFC 5869).
    Hkdf,
}

/// The encrypted key of volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySlot {
    /// The identity of the key: random, never 0. Volumes name their key by it.
    pub id: u64,
    /// How the key that decrypts this one is derived.
    pub derivation: Derivation,
    /// The salt of the derivation, drawn whenever the key is encrypted.
    pub salt: [u8; SALT_BYTES],
    /// The key, encrypted.
    pub wrapped: [u8; WRAPPED_BYTES],
}

impl KeySlot {
    /// The bytes that the encrypted key authenticates: all of the slot before it.
    pub fn authenticated(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(KEY_SLOT_BYTES);
        out.extend(self.id.to_le_bytes());
        let (kind, numbers) = match self.derivation {
            Derivation::Argon2id { memory_kib, passes, lanes } => (1, [memory_kib, passes, lanes]),
            Derivation::Hkdf => (2, [0; 3]),
        };
        out.push(kind);
        numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        out.extend(self.salt);
        out
    }

    /// Appends the encoded slot.
    pub fn print(&self, out: &mut Vec<u8>) {
        out.extend(self.authenticated());
        out.extend(self.wrapped);
    }

    /// Parses a slot.
    ///
    /// # Errors
    /// If the bytes end too early, or a field has an invalid value.
    pub fn parse(reader: &mut Reader<'_>) -> Result<KeySlot, FormatError> {
        let short = || FormatError::Short { what: WHAT, len: 0 };
        let impossible =
            |field, value: u64, want| FormatError::Field { what: WHAT, field, value, want };
        let id = reader.u64().ok_or_else(short)?;
        if id == 0 {
            return Err(impossible("id", 0, "an identity"));
        }
        let kind = reader.u8().ok_or_else(short)?;
        let mut number = || reader.u32().ok_or_else(short);
        let [memory_kib, passes, lanes] = [number()?, number()?, number()?];
        let derivation = match kind {
            1 => Derivation::Argon2id { memory_kib, passes, lanes },
            2 if [memory_kib, passes, lanes] == [0; 3] => Derivation::Hkdf,
            2 => return Err(impossible("costs", memory_kib.into(), "0, as HKDF has none")),
            other => return Err(impossible("derivation", other.into(), "1 or 2")),
        };
        if let Derivation::Argon2id { memory_kib, passes, lanes } = derivation {
            // RFC 9106, section 3.1: at least 8 KiB for each lane.
            if !(1..=LANES_MAX).contains(&lanes) {
                return Err(impossible("lanes", lanes.into(), "1 to 16"));
            }
            if !(8 * lanes..=MEMORY_KIB_MAX).contains(&memory_kib) {
                return Err(impossible("memory_kib", memory_kib.into(), "8 per lane to 262144"));
            }
            if !(1..=PASSES_MAX).contains(&passes) {
                return Err(impossible("passes", passes.into(), "1 to 16"));
            }
        }
        let salt = reader.take(SALT_BYTES).ok_or_else(short)?;
        let salt = salt.try_into().expect("that many bytes were taken");
        let wrapped = reader.take(WRAPPED_BYTES).ok_or_else(short)?;
        let wrapped = wrapped.try_into().expect("that many bytes were taken");
        Ok(KeySlot { id, derivation, salt, wrapped })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(derivation: Derivation) -> KeySlot {
        KeySlot { id: 7, derivation, salt: [1; SALT_BYTES], wrapped: [2; WRAPPED_BYTES] }
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        for derivation in [
            Derivation::Hkdf,
            Derivation::Argon2id { memory_kib: 65_536, passes: 3, lanes: 1 },
            Derivation::Argon2id { memory_kib: 128, passes: 16, lanes: 16 },
        ] {
            let mut bytes = Vec::new();
            slot(derivation).print(&mut bytes);
            assert_eq!(bytes.len(), KEY_SLOT_BYTES);
            assert_eq!(KeySlot::parse(&mut Reader::new(&bytes)), Ok(slot(derivation)));
            for len in 0..bytes.len() {
                assert!(KeySlot::parse(&mut Reader::new(&bytes[..len])).is_err(), "{len}");
            }
        }
    }

    #[test]
    fn costs_that_are_no_derivation_or_exhaust_the_memory_are_refused() {
        let argon = |memory_kib, passes, lanes| Derivation::Argon2id { memory_kib, passes, lanes };
        for (derivation, field) in [
            (argon(MEMORY_KIB_MAX + 1, 1, 1), "memory_kib"),
            (argon(7, 1, 1), "memory_kib"),
            (argon(1024, 0, 1), "passes"),
            (argon(1024, PASSES_MAX + 1, 1), "passes"),
            (argon(1024, 1, 0), "lanes"),
            (argon(1024, 1, LANES_MAX + 1), "lanes"),
        ] {
            let mut bytes = Vec::new();
            slot(derivation).print(&mut bytes);
            let error = KeySlot::parse(&mut Reader::new(&bytes)).unwrap_err();
            assert!(matches!(error, FormatError::Field { field: f, .. } if f == field), "{error}");
        }
        let mut bytes = Vec::new();
        slot(Derivation::Hkdf).print(&mut bytes);
        bytes[9] = 1;
        assert!(KeySlot::parse(&mut Reader::new(&bytes)).is_err(), "HKDF has no costs");
        bytes[..8].fill(0);
        assert!(KeySlot::parse(&mut Reader::new(&bytes)).is_err(), "no identity");
    }
}
