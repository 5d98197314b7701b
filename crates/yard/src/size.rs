//! Sizes as people write them: `4k`, `10G`, `10GiB`, `8s`.
//!
//! All units are binary, as in fio (with `kb_base=1024`), nbdkit, QEMU and blkzone: `k`, `KB` and
//! `KiB` are all 1024 bytes. The suffix `s` counts sectors of 512 bytes.

use blockyard_core::SECTOR_BYTES;

pub use blockyard_core::Bytes;

/// Suffixes and their powers of two. `B` alone is a byte.
const UNITS: [(char, u32); 6] = [('k', 10), ('m', 20), ('g', 30), ('t', 40), ('p', 50), ('e', 60)];

/// What is expected, for messages.
pub const WANTED: &str = "a whole number of bytes with an optional suffix k, M, G, T, P \
     (powers of 1024; `10G`, `10GB` and `10GiB` are the same) or s (sectors of 512 bytes)";

/// The reason for which a text is no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// The text is empty.
    #[error("a size is missing")]
    Empty,
    /// The text has a decimal point or comma.
    #[error("fractions are not taken; use a smaller unit, e.g. 1536M for 1.5G")]
    Fraction,
    /// The text does not begin with digits.
    #[error("not a number")]
    NotNumber,
    /// The suffix is unknown.
    #[error("unknown suffix")]
    Suffix,
    /// The size needs more than 64 bits.
    #[error("more than 2^64 - 1 bytes")]
    TooLarge,
}

/// Parses a size in bytes.
///
/// # Errors
/// If the text is not a whole number with a known suffix, or does not fit 64 bits.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    if text.is_empty() {
        return Err(SizeError::Empty);
    }
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    if suffix.starts_with(['.', ',']) && digits > 0 {
        return Err(SizeError::Fraction);
    }
    if digits == 0 {
        return Err(SizeError::NotNumber);
    }
    let number: u64 = number.parse().map_err(|_| SizeError::TooLarge)?;
    number.checked_mul(multiplier(suffix)?).ok_or(SizeError::TooLarge)
}

fn multiplier(suffix: &str) -> Result<u64, SizeError> {
    let lower = suffix.to_ascii_lowercase();
    match lower.as_str() {
        "" | "b" => return Ok(1),
        "s" => return Ok(SECTOR_BYTES),
        _ => {}
    }
    let mut letters = lower.chars();
    let first = letters.next().ok_or(SizeError::Suffix)?;
    if !matches!(letters.as_str(), "" | "b" | "ib") {
        return Err(SizeError::Suffix);
    }
    UNITS
        .iter()
        .find(|(letter, _)| *letter == first)
        .map(|(_, shift)| 1 << shift)
        .ok_or(SizeError::Suffix)
}

/// A number of bytes with three digits, as `zfs list` prints it: `66.7G`.
pub fn rounded(bytes: u64) -> String {
    const LETTERS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let unit = bytes.checked_ilog2().unwrap_or(0) as usize / 10;
    if bytes.is_multiple_of(1 << (10 * unit)) {
        return format!("{}{}", bytes >> (10 * unit), LETTERS[unit]);
    }
    let value = bytes as f64 / (1_u64 << (10 * unit)) as f64;
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$}{}", LETTERS[unit])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_form_is_read() {
        let cases = [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4kB", 4096),
            ("4KiB", 4096),
            ("1M", 1 << 20),
            ("10G", 10 << 30),
            ("10GiB", 10 << 30),
            ("10GB", 10 << 30),
            ("2t", 2 << 40),
            ("1P", 1 << 50),
            ("8s", 4096),
            (" 7 ", 7),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn an_invalid_size_is_refused() {
        let cases = [
            ("", SizeError::Empty),
            ("  ", SizeError::Empty),
            ("1.5G", SizeError::Fraction),
            ("1,5G", SizeError::Fraction),
            (".5G", SizeError::NotNumber),
            ("G", SizeError::NotNumber),
            ("-1", SizeError::NotNumber),
            ("+1", SizeError::NotNumber),
            ("10X", SizeError::Suffix),
            ("10Gb/s", SizeError::Suffix),
            ("10 G", SizeError::Suffix),
            ("10ib", SizeError::Suffix),
            ("10\u{e9}", SizeError::Suffix),
            ("18446744073709551616", SizeError::TooLarge),
            ("16E", SizeError::TooLarge),
            ("99999999999999999999999999", SizeError::TooLarge),
        ];
        for (text, error) in cases {
            assert_eq!(parse(text), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn printing_and_parsing_round_trip(bytes: u64, shift in 0_u32..64) {
            let bytes = bytes >> shift << (shift / 2);
            prop_assert_eq!(parse(&Bytes(bytes).to_string()), Ok(bytes));
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC*") {
            let _ = parse(&text);
        }
    }
}
