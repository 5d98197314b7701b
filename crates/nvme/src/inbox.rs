//! Bytes that a connection has received and not parsed yet.

use std::io;

use crate::wire::WHOLE_PDU_BYTES_MAX;

/// The bytes that one receive asks for; the longest PDU that is parsed as a whole fits.
const INBOX_BYTES: usize = 64 << 10;

const _: () = assert!(WHOLE_PDU_BYTES_MAX < INBOX_BYTES, "a whole PDU fits");

/// Received bytes that are not parsed yet. Its memory is made by a receive, and can be returned
/// while there are none.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// The bytes that are not parsed yet.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Removes parsed bytes.
    pub(crate) fn skip(&mut self, len: usize) {
        self.start += len;
    }

    /// Whether there is memory to return.
    pub(crate) fn can_shrink(&self) -> bool {
        !self.bytes.is_empty() && self.start == self.end
    }

    /// Returns the memory, if all bytes are parsed.
    pub(crate) fn shrink(&mut self) {
        if self.can_shrink() {
            *self = Inbox::default();
        }
    }

    /// Receives as many bytes as there are and fit; returns their number.
    ///
    /// # Errors
    /// If the connection fails, or has no bytes at the moment.
    pub(crate) fn receive(
        &mut self,
        receive: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if self.bytes.is_empty() {
            self.bytes = vec![0; INBOX_BYTES].into();
        }
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let received = receive(&mut self.bytes[self.end..])?;
        self.end += received;
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn bytes_that_are_not_parsed_stay_in_front_of_later_ones() {
        let mut inbox = Inbox::default();
        assert_eq!(inbox.receive(|into| (&b"a whole PDU, and a p"[..]).read(into)).unwrap(), 20);
        inbox.skip(17);
        assert_eq!(inbox.unread(), b"a p");
        assert_eq!(inbox.receive(|into| (&b"art"[..]).read(into)).unwrap(), 3);
        inbox.shrink();
        assert_eq!(inbox.unread(), b"a part");
        inbox.skip(6);
        inbox.shrink();
        assert!(inbox.bytes.is_empty(), "an idle connection keeps no memory for bytes");
        let much = vec![7; 2 * INBOX_BYTES];
        assert_eq!(inbox.receive(|into| (&much[..]).read(into)).unwrap(), INBOX_BYTES);
        assert_eq!(inbox.unread().len(), INBOX_BYTES);
        assert_eq!(inbox.receive(|into| (&much[..]).read(into)).unwrap(), 0, "it is full");
    }
}
