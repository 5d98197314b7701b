//! The socket between two processes of a hand-over: messages and descriptors, each in a bounded
//! time.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blockyard_os::descriptors::{receive_descriptors, send_descriptors};

use super::message::{HEADER_BYTES, Message, MessageError};

/// The reason for which a message was not sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The other process has ended, or has closed its socket.
    #[error("the other process has ended")]
    Closed,
    /// The other process did nothing for too long.
    #[error("the other process did nothing for {} s", .0.as_secs())]
    TimedOut(Duration),
    /// The bytes are no message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The message is another one than the state of the hand-over permits.
    #[error("the other process sent a message out of order: {0:.40}")]
    Order(String),
    /// The other process reports its failure.
    #[error("{0}")]
    Failed(String),
    /// A system call failed.
    #[error("{0}")]
    Io(io::Error),
}

/// One end of the socket.
#[derive(Debug)]
pub struct Link(UnixStream);

impl Link {
    /// The link over a socket.
    pub fn new(socket: UnixStream) -> Link {
        Link(socket)
    }

    /// Two ends.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pair() -> io::Result<(Link, OwnedFd)> {
        let (here, there) = UnixStream::pair()?;
        Ok((Link(here), there.into()))
    }

    /// Sends a message, and descriptors after it.
    ///
    /// # Errors
    /// If the other process has ended, or does not read for `timeout`.
    pub fn send(
        &self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<(), LinkError> {
        let failed = |error| failure(error, timeout);
        self.0.set_write_timeout(Some(timeout)).map_err(failed)?;
        (&self.0).write_all(&message.print()?).map_err(failed)?;
        send_descriptors(self.0.as_fd(), descriptors).map_err(failed)
    }

    /// Receives a message. A report of failure is an error.
    ///
    /// # Errors
    /// If the other process has ended or failed, sends no message for `timeout`, or sends another
    /// thing.
    pub fn receive(&self, timeout: Duration) -> Result<Message, LinkError> {
        let deadline = Instant::now() + timeout;
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, deadline, timeout)?;
        let mut body = vec![0; Message::parse_header(&header)?];
        self.fill(&mut body, deadline, timeout)?;
        match Message::parse(&body)? {
            Message::Failed { message } => Err(LinkError::Failed(message)),
            message => Ok(message),
        }
    }

    fn fill(
        &self,
        mut into: &mut [u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<(), LinkError> {
        while !into.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LinkError::TimedOut(timeout));
            }
            self.0.set_read_timeout(Some(left)).map_err(LinkError::Io)?;
            match (&self.0).read(into) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(len) => into = &mut into[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failure(error, timeout)),
            }
        }
        Ok(())
    }

    /// Receives the descriptors after a message.
    ///
    /// # Errors
    /// As [`Link::receive`].
    pub fn receive_descriptors(
        &self,
        count: usize,
        timeout: Duration,
    ) -> Result<Vec<OwnedFd>, LinkError> {
        let failed = |error| failure(error, timeout);
        self.0.set_read_timeout(Some(timeout)).map_err(failed)?;
        receive_descriptors(self.0.as_fd(), count).map_err(failed)
    }
}

fn failure(error: io::Error, timeout: Duration) -> LinkError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => LinkError::TimedOut(timeout),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof => {
            LinkError::Closed
        }
        _ => LinkError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_other_process_and_its_report_are_told_apart() {
        let soon = Duration::from_millis(10);
        let (here, there) = Link::pair().unwrap();
        let there = Link::new(UnixStream::from(there));
        assert!(matches!(here.receive(soon), Err(LinkError::TimedOut(_))));
        let file = std::fs::File::open("/dev/null").unwrap();
        there.send(&Message::Ready, &[file.as_fd()], soon).unwrap();
        assert_eq!(here.receive(soon).unwrap(), Message::Ready);
        assert_eq!(here.receive_descriptors(1, soon).unwrap().len(), 1);
        there.send(&Message::Failed { message: "no".to_owned() }, &[], soon).unwrap();
        assert_eq!(here.receive(soon).unwrap_err().to_string(), "no");
        drop(there);
        assert!(matches!(here.receive(soon), Err(LinkError::Closed)));
        assert!(matches!(here.send(&Message::Go, &[], soon), Err(LinkError::Closed)));
    }
}
