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

    fn shutdown(&mut self, how: Shutdown) {
        socket::shutdown(&*self, how);
    }
}
