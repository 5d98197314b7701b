//! A client's session: handshake, TLS if requested, transmission.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Channel;

use crate::nbd::access::AllowLists;
use crate::nbd::client::{Chosen, Client};
use crate::nbd::command::Rules;
use crate::nbd::connection::Connection;
use crate::nbd::exports::{Export, Exports};
use crate::nbd::handshake::{CloseReason, Handshake, Negotiated, Step, TlsMode};
use crate::nbd::link::Link;
use crate::nbd::tls::Acceptor;
use crate::nbd::wire::WireError;

/// The bytes that one read of the handshake asks for.
const READ_BYTES: usize = 4096;

/// The state that all sessions of a server share.
pub(crate) struct Terms {
    pub(crate) exports: Arc<Exports>,
    pub(crate) tls_mode: TlsMode,
    pub(crate) allow: Arc<AllowLists>,
    pub(crate) acceptor: Option<Acceptor>,
    pub(crate) handshake_timeout: Duration,
}

/// The reason for which a session ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("handshake: {0:?}")]
    Handshake(CloseReason),
    #[error("request: {0}")]
    Request(WireError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the server offered TLS without certificates")]
    NoAcceptor,
}

/// A client's use of an export, for as long as this lives.
struct Attachment {
    export: Arc<Export>,
    client: Arc<Client>,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.export.detach(&self.client);
    }
}

/// Serves one client over a link. `socket` is the link's socket, if it is one.
pub(crate) fn run(
    terms: &Terms,
    mut link: Link,
    socket: Option<Arc<OwnedFd>>,
    client: &Arc<Client>,
) -> Result<(), SessionError> {
    let deadline = Instant::now() + terms.handshake_timeout;
    let mut out = Vec::new();
    let mut handshake = Handshake::new(Arc::clone(&terms.exports), terms.tls_mode, &mut out);
    handshake.allow(Arc::clone(&terms.allow));
    let mut received = Vec::new();
    let (entered, channel, attachment) = loop {
        let (used, mut step) = handshake.feed(&received, &mut out);
        received.drain(..used);
        if matches!(step, Step::Enter) {
            match enter(&mut handshake, client, &mut out) {
                Ok(entered) => {
                    link.write_all(&out, deadline)?;
                    break entered;
                }
                Err(refused) => step = refused,
            }
        }
        link.write_all(&out, deadline)?;
        out.clear();
        match step {
            // The remaining bytes may hold more options.
            Step::More if used > 0 && !received.is_empty() => continue,
            Step::More | Step::Enter => {}
            Step::StartTls => {
                let acceptor = terms.acceptor.as_ref().ok_or(SessionError::NoAcceptor)?;
                let socket = socket.clone().ok_or(SessionError::NoAcceptor)?;
                let tls = acceptor.accept(socket, deadline)?;
                handshake.tls_started(tls.subject());
                link = Link::Tls(Box::new(tls));
                continue;
            }
            Step::Close(CloseReason::Aborted) => {
                link.close();
                return Ok(());
            }
            Step::Close(reason) => {
                link.close();
                return Err(SessionError::Handshake(reason));
            }
        }
        let mut bytes = [0; READ_BYTES];
        match link.read(&mut bytes, deadline)? {
            0 => return Ok(()),
            len => received.extend_from_slice(&bytes[..len]),
        }
    };
    let rules =
        Rules::new(&entered.export, entered.style, entered.contexts, entered.min_block_bytes);
    let export = Arc::clone(&entered.export);
    let mut connection = Connection::new(link, Arc::clone(client), export, channel, rules)?;
    if !connection.put(&received) {
        return Err(SessionError::Io(io::ErrorKind::OutOfMemory.into()));
    }
    let served = connection.serve();
    // The channel is dropped first: it waits for requests in flight, before the export stops
    // counting this client.
    drop(connection);
    drop(attachment);
    match served? {
        None => Ok(()),
        Some(fault) => Err(SessionError::Request(fault)),
    }
}

/// Opens the export that the client chose.
fn enter(
    handshake: &mut Handshake,
    client: &Arc<Client>,
    out: &mut Vec<u8>,
) -> Result<(Negotiated, Box<dyn Channel>, Attachment), Step> {
    let Some(export) = handshake.chosen() else {
        return Err(Step::More);
    };
    if !export.attach(client) {
        return Err(handshake.refuse("the export is being removed", out));
    }
    let attachment = Attachment { export: Arc::clone(&export), client: Arc::clone(client) };
    let channel = match export.disk().open() {
        Ok(channel) => channel,
        Err(error) => {
            let text = format!("the export cannot be opened: {error}");
            return Err(handshake.refuse(&text, out));
        }
    };
    let Some(negotiated) = handshake.accept(out) else { return Err(Step::More) };
    let chosen = Chosen {
        export: export.name().to_owned(),
        style: negotiated.style,
        contexts: negotiated.contexts,
        tls: negotiated.tls,
    };
    // A client enters transmission once.
    let _ = client.chosen.set(chosen);
    Ok((negotiated, channel, attachment))
}
