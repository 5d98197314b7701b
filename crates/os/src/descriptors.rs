//! Descriptors in messages of a unix socket (SCM_RIGHTS, unix(7)).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors of one message, below the kernel's 253.
pub const DESCRIPTORS_MAX: usize = 64;

/// The byte that carries descriptors: a stream has no message without bytes.
const CARRIER: u8 = 0xfd;

/// Sends descriptors, in order, in as many messages as they need. The receiver asks for as many by
/// [`receive_descriptors`].
///
/// # Errors
/// If the system call fails, for example with `WouldBlock` after the timeout of the socket.
pub fn send_descriptors(socket: impl AsFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    for batch in descriptors.chunks(DESCRIPTORS_MAX) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // The space has room for as many.
        let _ = control.push(SendAncillaryMessage::ScmRights(batch));
        let carrier = [IoSlice::new(&[CARRIER])];
        let sent = sendmsg(socket.as_fd(), &carrier, &mut control, SendFlags::NOSIGNAL)?;
        if sent != 1 {
            return Err(io::ErrorKind::WriteZero.into());
        }
    }
    Ok(())
}

/// Receives `count` descriptors that [`send_descriptors`] sent by one call. A program that this
/// process starts does not get them.
///
/// # Errors
/// If the system call fails, or the messages are others.
pub fn receive_descriptors(socket: impl AsFd, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut received = Vec::new();
    while received.len() < count {
        let wanted = (count - received.len()).min(DESCRIPTORS_MAX);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut into = [IoSliceMut::new(&mut byte)];
        let message = recvmsg(socket.as_fd(), &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if message.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let before = received.len();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = part {
                received.extend(descriptors);
            }
        }
        if byte != [CARRIER] || received.len() - before != wanted {
            let found = received.len() - before;
            let text = format!("a message has {found} descriptors: expected {wanted}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use rustix::fs::{fstat, major};

    use super::*;

    #[test]
    fn descriptors_arrive_in_order_and_in_batches() {
        let (here, there) = UnixStream::pair().unwrap();
        let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let all: Vec<_> = (0..150).map(|index| files[index % 3].as_fd()).collect();
        send_descriptors(&here, &all).unwrap();
        let found = receive_descriptors(&there, 150).unwrap();
        for (index, descriptor) in found.iter().enumerate() {
            let [wanted, found] = [files[index % 3].as_fd(), descriptor.as_fd()].map(fstat);
            let (wanted, found) = (wanted.unwrap(), found.unwrap());
            assert_eq!((major(found.st_dev), found.st_ino), (major(wanted.st_dev), wanted.st_ino));
        }
        assert!(receive_descriptors(&there, 0).unwrap().is_empty());
    }

    #[test]
    fn other_messages_are_refused() {
        let (mut here, there) = UnixStream::pair().unwrap();
        let file = File::open("/dev/null").unwrap();
        send_descriptors(&here, &[file.as_fd()]).unwrap();
        let error = receive_descriptors(&there, 2).unwrap_err().to_string();
        assert_eq!(error, "a message has 1 descriptors: expected 2");
        here.write_all(&[CARRIER]).unwrap();
        assert!(receive_descriptors(&there, 1).is_err());
        drop(here);
        let error = receive_descriptors(&there, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
