//! Bytes that a connection has received and not parsed yet.

use std::io::{self, Read};

use crate::wire::WHOLE_PDU_BYTES_MAX;

/// The bytes that one receive asks for; the longest PDU that is parsed as a whole fits.
const INBOX_BYTES: usize = 64 << 10;

const _: () = assert!(WHOLE_PDU_BYTES_MAX < INBOX_BYTES, "a whole PDU fits");

/// Received bytes that are not parsed yet.
#[derive(Debug)]
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(crate) fn new() -> Inbox {
        Inbox { bytes: vec![0; INBOX_BYTES].into(), start: 0, end: 0 }
    }

    /// The bytes that are not parsed yet.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Removes parsed bytes.
    pub(crate) fn skip(&mut self, len: usize) {
        self.start += len;
    }

    /// Receives as many bytes as there are and fit; returns their number.
    ///
    /// # Errors
    /// If the connection fails, or has no bytes at the moment.
    pub(crate) fn receive(&mut self, mut from: impl Read) -> io::Result<usize> {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let received = from.read(&mut self.bytes[self.end..])?;
        self.end += received;
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_parsed_stay_in_front_of_later_ones() {
        let mut inbox = Inbox::new();
        assert_eq!(inbox.receive(&b"a whole PDU, and a p"[..]).unwrap(), 20);
        inbox.skip(17);
        assert_eq!(inbox.unread(), b"a p");
        assert_eq!(inbox.receive(&b"art"[..]).unwrap(), 3);
        assert_eq!(inbox.unread(), b"a part");
        inbox.skip(6);
        let much = vec![7; 2 * INBOX_BYTES];
        assert_eq!(inbox.receive(&much[..]).unwrap(), INBOX_BYTES);
        assert_eq!(inbox.unread().len(), INBOX_BYTES);
        assert_eq!(inbox.receive(&much[..]).unwrap(), 0, "it is full");
    }
}
