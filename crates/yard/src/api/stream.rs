//! Responses that are sent while they are produced, and bodies that are read while they arrive:
//! channels between the runtime's thread and blocking threads.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use http_body::Frame;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// The size of a part that is collected before it is sent, in bytes.
const PART_BYTES: usize = 256 << 10;

/// The number of parts that wait to be sent or read.
const PARTS: usize = 4;

/// A response body, and the writer for its contents.
pub(super) fn outgoing() -> (Body, Outgoing) {
    let (sender, receiver) = channel(PARTS);
    (Body::new(StreamBody(receiver)), Outgoing { sender, part: Vec::new() })
}

/// A response body that another thread writes.
pub(super) struct StreamBody(pub(super) Receiver<io::Result<Bytes>>);

impl HttpBody for StreamBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.0.poll_recv(context).map(|part| part.map(|part| part.map(Frame::data)))
    }
}

/// The writer of a response body, for a blocking thread.
pub(super) struct Outgoing {
    sender: Sender<io::Result<Bytes>>,
    part: Vec<u8>,
}

impl Outgoing {
    fn send(&mut self, part: io::Result<Bytes>) -> io::Result<()> {
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the client has disconnected");
        self.sender.blocking_send(part).map_err(gone)
    }

    /// A check whether the client has disconnected.
    pub(super) fn closed_check(&self) -> impl Fn() -> bool + use<> {
        let sender = self.sender.clone();
        move || sender.is_closed()
    }

    /// Aborts the response about `name`, so that the client does not take it for complete.
    pub(super) fn fail(mut self, name: &str, error: io::Error) {
        if self.sender.is_closed() {
            tracing::info!("{name}: the client disconnected before the end of the stream");
        } else {
            tracing::error!("{name}: cannot send the rest of the stream: {error}");
        }
        // A client that has disconnected cannot be told.
        let _ = self.send(Err(error));
    }
}

impl Write for Outgoing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.part.extend_from_slice(bytes);
        if self.part.len() >= PART_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.part.is_empty() {
            return Ok(());
        }
        let part = Bytes::from(std::mem::take(&mut self.part));
        self.send(Ok(part))
    }
}

/// The reader of a request body, for a blocking thread.
pub(super) struct Incoming {
    receiver: Receiver<io::Result<Bytes>>,
    part: Bytes,
}

/// A reader for a request body, whose parts [`pass_on`] sends to it.
pub(super) fn incoming() -> (Sender<io::Result<Bytes>>, Incoming) {
    let (sender, receiver) = channel(PARTS);
    (sender, Incoming { receiver, part: Bytes::new() })
}

/// Sends the parts of a body to its reader until the body ends or the reader is dropped.
pub(super) async fn pass_on(body: Body, to: Sender<io::Result<Bytes>>) -> Result<(), Infallible> {
    let mut body = pin!(body);
    loop {
        let frame = std::future::poll_fn(|context| body.as_mut().poll_frame(context)).await;
        let part = match frame {
            None => return Ok(()),
            Some(Ok(frame)) => frame.into_data().map_err(drop).ok().map(Ok),
            Some(Err(error)) => Some(Err(io::Error::other(error))),
        };
        // Trailers are ignored.
        let Some(part) = part else { continue };
        if to.send(part).await.is_err() {
            return Ok(());
        }
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.part.is_empty() {
            match self.receiver.blocking_recv() {
                None => return Ok(0),
                Some(part) => self.part = part?,
            }
        }
        let len = self.part.len().min(into.len());
        into[..len].copy_from_slice(&self.part.split_to(len));
        Ok(len)
    }
}
