//! The channel by which a device tells its hypervisor of a change: "Vhost-user Protocol", "Backend
//! communication".
//!
//! Crate `vhost` sends only the messages of shared objects and shared memory through it, so the
//! descriptor is taken from the message that brings it, before crate `vhost` reads the message.

use std::io::{self, ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use blockyard_os::socket;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recv, recvmsg,
};

/// The length of the header of a message.
const HEADER_BYTES: usize = 12;
/// `VHOST_USER_SET_BACKEND_REQ_FD`.
const SET_BACKEND_REQ_FD: u32 = 21;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE_MSG: u32 = 2;
/// The version of the protocol, in the flags of a message. No answer is asked for.
const FLAGS: u32 = 1;

/// The device's end of the channel.
#[derive(Debug)]
pub(crate) struct BackendChannel(OwnedFd);

impl BackendChannel {
    /// Waits for the next message of the hypervisor, leaves it there, and returns the channel that
    /// it brings, if it brings one.
    ///
    /// # Errors
    /// If the system refuses to look; reading the message then tells why.
    pub(crate) fn peek(connection: &UnixStream) -> io::Result<Option<BackendChannel>> {
        let mut header = [0; HEADER_BYTES];
        let (taken, _) = retry_on_intr(|| recv(connection, &mut header, RecvFlags::PEEK))?;
        let [a, b, c, d, ..] = header;
        if taken < HEADER_BYTES || u32::from_ne_bytes([a, b, c, d]) != SET_BACKEND_REQ_FD {
            return Ok(None);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        let received = retry_on_intr(|| {
            recvmsg(connection, &mut [IoSliceMut::new(&mut header)], &mut ancillary, flags)
        })?;
        // More descriptors than one: crate `vhost` refuses the message.
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Ok(None);
        }
        let channel = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        Ok(channel.map(BackendChannel))
    }

    /// Tells the hypervisor that the configuration space has changed. Does not wait for it.
    ///
    /// # Errors
    /// If the hypervisor has closed the channel or does not read it.
    pub(crate) fn config_changed(&self) -> io::Result<()> {
        let mut message = [0; HEADER_BYTES];
        message[..4].copy_from_slice(&CONFIG_CHANGE_MSG.to_ne_bytes());
        message[4..8].copy_from_slice(&FLAGS.to_ne_bytes());
        match socket::send_slice(&self.0, &message)? {
            HEADER_BYTES => Ok(()),
            _ => Err(ErrorKind::WriteZero.into()),
        }
    }
}
