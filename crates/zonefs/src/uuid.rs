//! A UUID: 16 bytes with a text form.

use std::fmt;
use std::io::Read;
use std::str::FromStr;

/// A universally unique identifier; the bytes are in the order of its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Generates a random UUID: RFC 9562 5.4, version 4.
    ///
    /// # Errors
    /// If the system returns no random bytes.
    pub fn random() -> std::io::Result<Uuid> {
        let mut bytes = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Uuid(bytes))
    }
}

/// Indices of the bytes that a dash precedes in the text.
const DASHES: [usize; 4] = [4, 6, 8, 10];

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if DASHES.contains(&index) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Uuid {
    type Err = String;

    fn from_str(text: &str) -> Result<Uuid, String> {
        let wrong = || "expected 32 hexadecimal digits, as 8-4-4-4-12".to_owned();
        let mut digits = text.bytes();
        let mut bytes = [0; 16];
        for (index, byte) in bytes.iter_mut().enumerate() {
            if DASHES.contains(&index) && digits.next() != Some(b'-') {
                return Err(wrong());
            }
            let mut digit = || char::from(digits.next()?).to_digit(16);
            let (high, low) = (digit().ok_or_else(wrong)?, digit().ok_or_else(wrong)?);
            *byte = (high * 16 + low) as u8;
        }
        if digits.next().is_some() { Err(wrong()) } else { Ok(Uuid(bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back() {
        let text = "00112233-4455-6677-8899-aabbccddeeff";
        assert_eq!(text.parse::<Uuid>().unwrap().to_string(), text);
        let random = Uuid::random().unwrap();
        assert_eq!(random.to_string().parse(), Ok(random));
        for wrong in ["", "00112233", "00112233-4455-6677-8899-aabbccddeeff0", "é"] {
            assert!(wrong.parse::<Uuid>().is_err(), "{wrong}");
        }
    }
}
