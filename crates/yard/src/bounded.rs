//! A listener that lets in so many clients at once: the next one waits until another leaves.
//!
//! Without it, clients that connect and say nothing could take all of the process's descriptors,
//! and NBD clients would find none.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// `L` with a bound.
#[derive(Debug)]
pub(crate) struct Bounded<L> {
    listener: L,
    places: Arc<Semaphore>,
}

impl<L> Bounded<L> {
    /// `listener` with at most `clients` at once.
    pub(crate) fn new(listener: L, clients: usize) -> Bounded<L> {
        Bounded { listener, places: Arc::new(Semaphore::new(clients)) }
    }
}

impl<L: Listener> Listener for Bounded<L> {
    type Io = Held<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.expect("nobody closes the semaphore");
        let (io, address) = self.listener.accept().await;
        (Held { io, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection and its place.
#[derive(Debug)]
pub(crate) struct Held<T> {
    io: T,
    _place: OwnedSemaphorePermit,
}

impl<T: AsyncRead + Unpin> AsyncRead for Held<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, into)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Held<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
