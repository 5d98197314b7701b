//! Diffie-Hellman exchange in the groups of RFC 7919.
//!
//! The prime of a group of `b` bits is made of the digits of e:
//! 2^b - 2^(b-64) + (⌊2^(b-130) e⌋ + X) 2^64 - 1. Its generator is 2.

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use crate::auth_message::DhGroup;

/// The bytes of an exponent. RFC 7919 asks for 50 bytes at least in its largest group.
const EXPONENT_BYTES: usize = 64;

/// The number X of a group; `None` for [`DhGroup::Null`].
fn offset(group: DhGroup) -> Option<u32> {
    match group {
        DhGroup::Null => None,
        DhGroup::Ffdhe2048 => Some(560_316),
        DhGroup::Ffdhe3072 => Some(2_625_351),
        DhGroup::Ffdhe4096 => Some(5_736_041),
        DhGroup::Ffdhe6144 => Some(15_705_020),
        DhGroup::Ffdhe8192 => Some(10_965_728),
    }
}

/// The most significant words of e, of which the first two bits are the integer part.
fn words_of_e(count: usize) -> Vec<u32> {
    // Two words more: each term is rounded down.
    let mut term = vec![0; count + 2];
    term[0] = 1 << 30;
    let mut sum = term.clone();
    for divisor in 1.. {
        let mut rest = 0;
        for word in &mut term {
            let value = rest << 32 | u64::from(*word);
            *word = (value / divisor) as u32;
            rest = value % divisor;
        }
        if term.iter().all(|word| *word == 0) {
            break;
        }
        add(&mut sum, &term);
    }
    sum.truncate(count);
    sum
}

/// Adds words, the most significant first, as many in both.
fn add(sum: &mut [u32], term: &[u32]) {
    let mut carry = 0;
    for (word, other) in sum.iter_mut().zip(term).rev() {
        let value = u64::from(*word) + u64::from(*other) + carry;
        *word = value as u32;
        carry = value >> 32;
    }
}

/// The prime of a group, most significant byte first.
fn prime(group: DhGroup) -> Option<Vec<u8>> {
    let words = group.len_bytes() / 4;
    let mut middle = words_of_e(words.checked_sub(4)?);
    let mut offset_words = vec![0; middle.len()];
    *offset_words.last_mut()? = offset(group)? - 1;
    add(&mut middle, &offset_words);
    let mut bytes = vec![0xff; group.len_bytes()];
    for (bytes, word) in bytes[8..].chunks_exact_mut(4).zip(middle) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    Some(bytes)
}

/// One side of an exchange: a secret exponent and its public value.
pub(crate) struct DhExchange {
    params: BoxedMontyParams,
    prime: Vec<u8>,
    exponent: Zeroizing<BoxedUint>,
    public: Vec<u8>,
}

impl DhExchange {
    /// A new exchange; `None` for [`DhGroup::Null`].
    pub(crate) fn new(group: DhGroup) -> Option<DhExchange> {
        let mut exponent = Zeroizing::new([0; EXPONENT_BYTES]);
        random(&mut *exponent);
        DhExchange::with_exponent(group, &*exponent)
    }

    fn with_exponent(group: DhGroup, exponent: &[u8]) -> Option<DhExchange> {
        let prime = prime(group)?;
        let odd = Odd::new(BoxedUint::from_be_slice_vartime(&prime)).into_option()?;
        let params = BoxedMontyParams::new_vartime(odd);
        let exponent = BoxedUint::from_be_slice_truncated(exponent, 8 * exponent.len() as u32);
        let exponent = Zeroizing::new(exponent);
        let two = BoxedUint::from_be_slice_truncated(&[2], params.bits_precision());
        let public = BoxedMontyForm::new(two, &params).pow(&exponent).retrieve().to_be_bytes();
        Some(DhExchange { params, prime, exponent, public: public.into_vec() })
    }

    /// The public value, as long as the prime.
    pub(crate) fn public(&self) -> &[u8] {
        &self.public
    }

    /// The secret that both sides share, as long as the prime; `None` if the other side's public
    /// value is none of the group, or one that would make the secret known.
    pub(crate) fn shared(&self, other: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        // From 2 to the prime less 2. The last byte of the prime is ffh.
        let (last, rest) = other.split_last()?;
        let is_small = *last < 2 && rest.iter().all(|byte| *byte == 0);
        let mut most = self.prime.clone();
        *most.last_mut()? -= 2;
        if other.len() != most.len() || is_small || other > most.as_slice() {
            return None;
        }
        let other = BoxedUint::from_be_slice_vartime(other);
        let shared = Zeroizing::new(BoxedMontyForm::new(other, &self.params).pow(&self.exponent));
        let shared = Zeroizing::new(shared.retrieve());
        Some(Zeroizing::new(shared.to_be_bytes().into_vec()))
    }
}

/// Fills bytes with random numbers of the system.
pub(crate) fn random(bytes: &mut [u8]) {
    SystemRandom::new().fill(bytes).expect("the kernel has random numbers");
}

#[cfg(test)]
mod tests {
    use ring::digest::{SHA256, digest};

    use super::*;

    /// SHA-256 of the primes of RFC 7919, A.1 to A.5, as OpenSSL 3.0 has them.
    const PRIMES: [(DhGroup, &str); 5] = [
        (DhGroup::Ffdhe2048, "9cd3b7f336872f46c09428d1bbc19877a4d440512cda8d1c1cf0cd6e33698966"),
        (DhGroup::Ffdhe3072, "0eaf67db3a839156d5013494a5318a772b5697d270d721f37f092efc69ea5a17"),
        (DhGroup::Ffdhe4096, "4648414224ac881b3d0dc59b466f96d06a558278776807797ecf1f66ff397b3e"),
        (DhGroup::Ffdhe6144, "227ac9066b3ddd9e193670cda2388fa884f65ba0cf98b742d1fe77a6687c79c7"),
        (DhGroup::Ffdhe8192, "770b14efaf6f049929c523113b3fa99a8d11dab1b18af3609590122075d19833"),
    ];

    #[test]
    fn the_primes_are_those_of_the_standard() {
        for (group, hash) in PRIMES {
            let prime = prime(group).unwrap();
            assert_eq!(prime.len(), group.len_bytes());
            let found: String =
                digest(&SHA256, &prime).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, hash, "{group:?}");
        }
        assert!(prime(DhGroup::Null).is_none() && DhExchange::new(DhGroup::Null).is_none());
    }

    #[test]
    fn both_sides_compute_one_secret() {
        for (group, _) in PRIMES {
            let (ours, theirs) = (DhExchange::new(group).unwrap(), DhExchange::new(group).unwrap());
            assert_ne!(ours.public(), theirs.public());
            let shared = ours.shared(theirs.public()).unwrap();
            assert_eq!(Some(&shared), theirs.shared(ours.public()).as_ref());
            assert_eq!(shared.len(), group.len_bytes());
        }
    }

    #[test]
    fn powers_are_right() {
        let mut wanted = vec![0; 256];
        wanted[255] = 8;
        let small = DhExchange::with_exponent(DhGroup::Ffdhe2048, &[3]).unwrap();
        assert_eq!(small.public(), wanted);
        let shared = small.shared(&wanted).unwrap();
        wanted[254..].copy_from_slice(&[2, 0]);
        assert_eq!(*shared, wanted, "8^3 is 512");
        // 2^2048 less the prime is what 2^2048 leaves.
        let large = DhExchange::with_exponent(DhGroup::Ffdhe2048, &[8, 0]).unwrap();
        let prime = prime(DhGroup::Ffdhe2048).unwrap();
        let mut rest: Vec<u8> = prime.iter().map(|byte| !byte).collect();
        *rest.last_mut().unwrap() += 1;
        assert_eq!(large.public(), rest);
    }

    /// With such a value the secret would be 0, 1 or the prime less 1, whatever the exponent is.
    #[test]
    fn values_that_make_the_secret_known_are_refused() {
        let exchange = DhExchange::new(DhGroup::Ffdhe2048).unwrap();
        let prime = prime(DhGroup::Ffdhe2048).unwrap();
        let near = |less: u8| {
            let mut value = prime.clone();
            *value.last_mut().unwrap() -= less;
            value
        };
        let small = |value: u8| [&[0; 255][..], &[value]].concat();
        let refused = [small(0), small(1), near(0), near(1), vec![0xff; 256], vec![], vec![5; 255]];
        for value in refused {
            assert!(exchange.shared(&value).is_none(), "{value:?}");
        }
        assert!(exchange.shared(&small(2)).is_some() && exchange.shared(&near(2)).is_some());
    }
}
