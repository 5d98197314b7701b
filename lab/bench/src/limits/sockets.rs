//! The time of a message of 64 bytes to another thread and back, over a local socket.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use crate::error::LabError;
use crate::limits::pair::{PairPlacement, in_turns};
use crate::limits::slices::LimitReading;
use crate::sample::Round;

/// The message length, about that of a request header or a reply.
const MESSAGE_BYTES: usize = 64;

/// Half of a round trip over a pair of unix sockets.
///
/// # Errors
/// As [`in_turns`], or if the system refuses the sockets.
pub fn unix(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let (near, far) = UnixStream::pair().map_err(LabError::io("a pair of unix sockets"))?;
    round_trips(round, &near, &far, || drop(near.shutdown(Shutdown::Both)))
}

/// Half of a round trip over TCP on 127.0.0.1.
///
/// # Errors
/// As [`in_turns`], or if the system refuses the connection.
pub fn tcp(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let pair = || -> io::Result<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        let (far, _) = listener.accept()?;
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        Ok((near, far))
    };
    let (near, far) = pair().map_err(LabError::io("a TCP connection to 127.0.0.1"))?;
    round_trips(round, &near, &far, || drop(near.shutdown(Shutdown::Both)))
}

fn round_trips<S: Sync>(
    round: &Round<'_>,
    near: &S,
    far: &S,
    hang_up: impl FnOnce(),
) -> Result<LimitReading, LabError>
where
    for<'a> &'a S: Read + Write,
{
    let (mut asker, mut answerer) = (near, far);
    let (mut question, mut answer) = ([0; MESSAGE_BYTES], [0; MESSAGE_BYTES]);
    in_turns(
        round,
        PairPlacement::Other,
        || {
            let trip = asker.write_all(&question).and_then(|()| asker.read_exact(&mut question));
            trip.map_err(LabError::io("a round trip over a socket"))
        },
        || answerer.read_exact(&mut answer).is_ok() && answerer.write_all(&answer).is_ok(),
        hang_up,
    )
}
