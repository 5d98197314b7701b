//! TLS in a build without it: there is no acceptor, so there is never a TLS link.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Region;

use crate::nbd::memory::Lease;
use crate::nbd::reply::Replies;
use crate::nbd::sys::{Patience, Ready};
use crate::nbd::tls::{TlsConfig, TlsError, TlsMode};

/// A type without values.
#[derive(Clone, Debug)]
pub(crate) enum Acceptor {}

impl Acceptor {
    pub(crate) fn load(config: &TlsConfig) -> Result<Option<Acceptor>, TlsError> {
        if config.mode == TlsMode::Off { Ok(None) } else { Err(TlsError::NotBuilt) }
    }

    pub(crate) fn accept(&self, _: Arc<OwnedFd>, _: Instant) -> io::Result<TlsLink> {
        match *self {}
    }
}

/// A type without values.
pub(crate) enum TlsLink {}

impl TlsLink {
    pub(crate) fn subject(&self) -> Option<String> {
        match *self {}
    }

    pub(crate) fn wait(&mut self, _: Duration) -> io::Result<Ready> {
        match *self {}
    }

    pub(crate) fn wait_either(&mut self, _: Option<RawFd>, _: Duration) -> io::Result<Ready> {
        match *self {}
    }

    pub(crate) fn recv(&mut self, _: &Region, _: u64, _: usize, _: Patience) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn send(
        &mut self,
        _: &Region,
        _: &mut Replies,
        _: &mut dyn FnMut(),
        _: &Lease,
    ) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn read(&mut self, _: &mut [u8], _: Instant) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn write(&mut self, _: &[u8], _: Instant) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn close(&mut self) {
        match *self {}
    }
}
