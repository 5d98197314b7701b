//! The stream of bytes between a connection and its host. No call waits.
//!
//! The connection is generic in it, so that a test can cut, delay and end the stream at every byte
//! (`tests/model/connection.rs`).

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};

use blockyard_core::Region;
use blockyard_os::socket::{self, SendMode, SendPiece, WaitMode};

/// The stream of bytes between a connection and its host.
pub(crate) trait HostStream {
    /// Receives into ordinary memory; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` without bytes, or if the stream has failed.
    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Receives into a region; 0 at the end of the stream.
    ///
    /// # Errors
    /// As [`HostStream::receive`].
    fn receive_at(&mut self, region: &Region, offset: u64, len: usize) -> io::Result<usize>;

    /// Sends pieces in order, as many as the stream accepts; returns the number of bytes.
    ///
    /// # Errors
    /// `WouldBlock` if the stream accepts nothing, or if it has failed.
    fn send(&mut self, region: &Region, bytes: &[u8], pieces: &[SendPiece]) -> io::Result<usize>;

    /// The bytes that have arrived and are not received.
    ///
    /// # Errors
    /// If the system does not tell.
    fn unread_bytes(&self) -> io::Result<usize>;

    /// Whether the host has ended or reset the stream, also while bytes of it are not received.
    fn has_ended(&self) -> bool;

    /// Ends one or both directions.
    fn shutdown(&mut self, how: Shutdown);
}

/// A socket that does not block.
impl HostStream for TcpStream {
    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read(into)
    }

    fn receive_at(&mut self, region: &Region, offset: u64, len: usize) -> io::Result<usize> {
        socket::recv(&*self, region, offset, len, WaitMode::NonBlocking)
    }

    fn send(&mut self, region: &Region, bytes: &[u8], pieces: &[SendPiece]) -> io::Result<usize> {
        socket::send(&*self, SendMode::SocketNow, region, bytes, pieces)
    }

    fn unread_bytes(&self) -> io::Result<usize> {
        socket::unread_bytes(self)
    }

    fn has_ended(&self) -> bool {
        socket::has_ended(self)
    }

    fn shutdown(&mut self, how: Shutdown) {
        socket::shutdown(&*self, how);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// On loopback an end arrives soon after the call that sends it.
    fn wait_for_end(socket: &TcpStream) {
        while !socket.has_ended() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_end_is_seen_while_bytes_are_unread() {
        let (near, mut far) = pair();
        far.write_all(b"unread").unwrap();
        assert!(!near.has_ended());
        drop(far);
        wait_for_end(&near);
        let (near, far) = pair();
        far.shutdown(Shutdown::Write).unwrap();
        wait_for_end(&near);
    }

    #[test]
    fn bytes_that_have_arrived_are_counted_until_they_are_received() {
        let (mut near, mut far) = pair();
        assert_eq!(HostStream::unread_bytes(&near).unwrap(), 0);
        far.write_all(b"unread").unwrap();
        near.peek(&mut [0; 6]).unwrap();
        assert_eq!(HostStream::unread_bytes(&near).unwrap(), 6);
        assert_eq!(HostStream::receive(&mut near, &mut [0; 4]).unwrap(), 4);
        drop(far);
        wait_for_end(&near);
        assert_eq!(HostStream::unread_bytes(&near).unwrap(), 2, "the end is no byte");
    }

    #[test]
    fn a_host_that_closes_with_unread_bytes_resets_the_stream() {
        let (mut near, far) = pair();
        near.write_all(b"unread").unwrap();
        far.peek(&mut [0; 6]).unwrap();
        assert!(!near.has_ended());
        drop(far);
        wait_for_end(&near);
        while near.take_error().unwrap().is_none() {
            std::thread::yield_now();
        }
    }
}
