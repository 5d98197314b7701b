//! A client's session: handshake, TLS if requested, transmission.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Channel;

use crate::access::AllowLists;
use crate::client::{Client, NegotiatedOptions};
use crate::command::ExportRules;
use crate::connection::Connection;
use crate::exports::{Export, Exports};
use crate::handshake::{CloseReason, Handshake, HandshakeStep, Negotiated, TlsMode};
use crate::tls::Acceptor;
use crate::transport::Transport;
use crate::wire::WireError;

/// The bytes that one read of the handshake asks for.
const READ_BYTES: usize = 4096;

/// The state that all sessions of a server share.
pub(crate) struct SessionConfig {
    pub(crate) exports: Arc<Exports>,
    pub(crate) tls_mode: TlsMode,
    pub(crate) allow: Arc<AllowLists>,
    pub(crate) acceptor: Option<Acceptor>,
    pub(crate) handshake_timeout: Duration,
}

/// The reason for which a session ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("handshake: {0}")]
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

/// Serves one client over a transport. `socket` is the transport's socket, if it is one.
pub(crate) fn run(
    config: &SessionConfig,
    mut transport: Transport,
    socket: Option<Arc<OwnedFd>>,
    client: &Arc<Client>,
) -> Result<(), SessionError> {
    let deadline = Instant::now() + config.handshake_timeout;
    let mut out = Vec::new();
    let mut handshake = Handshake::new(Arc::clone(&config.exports), config.tls_mode, &mut out);
    handshake.allow(Arc::clone(&config.allow));
    let mut received = Vec::new();
    let (entered, channel, attachment) = loop {
        let (used, mut step) = handshake.feed(&received, &mut out);
        received.drain(..used);
        if matches!(step, HandshakeStep::Enter) {
            match enter(&mut handshake, client, &mut out) {
                Ok(entered) => {
                    transport.write_all(&out, deadline)?;
                    break entered;
                }
                Err(refused) => step = refused,
            }
        }
        transport.write_all(&out, deadline)?;
        out.clear();
        match step {
            // The remaining bytes may hold more options.
            HandshakeStep::More if used > 0 && !received.is_empty() => continue,
            HandshakeStep::More | HandshakeStep::Enter => {}
            HandshakeStep::StartTls => {
                let acceptor = config.acceptor.as_ref().ok_or(SessionError::NoAcceptor)?;
                let socket = socket.clone().ok_or(SessionError::NoAcceptor)?;
                let tls = acceptor.accept(socket, deadline)?;
                handshake.tls_started(tls.subject());
                transport = Transport::Tls(Box::new(tls));
                continue;
            }
            HandshakeStep::Close(CloseReason::Aborted) => {
                transport.close();
                return Ok(());
            }
            HandshakeStep::Close(reason) => {
                transport.close();
                return Err(SessionError::Handshake(reason));
            }
        }
        let mut bytes = [0; READ_BYTES];
        match transport.read(&mut bytes, deadline)? {
            0 => return Ok(()),
            len => received.extend_from_slice(&bytes[..len]),
        }
    };
    let rules =
        ExportRules::new(&entered.export, entered.style, entered.contexts, entered.min_block_bytes);
    let export = Arc::clone(&entered.export);
    let mut connection = Connection::new(transport, Arc::clone(client), export, channel, rules)?;
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
) -> Result<(Negotiated, Box<dyn Channel>, Attachment), HandshakeStep> {
    let Some(export) = handshake.chosen() else {
        return Err(HandshakeStep::More);
    };
    if !export.attach(client) {
        return Err(handshake.refuse("the export is being removed", out));
    }
    let attachment = Attachment { export: Arc::clone(&export), client: Arc::clone(client) };
    if export.is_claimed() {
        let text = "a file system of the device is mounted: unmount it first";
        return Err(handshake.refuse(text, out));
    }
    let channel = match export.disk().open() {
        Ok(channel) => channel,
        Err(error) => {
            let text = format!("the export cannot be opened: {error}");
            return Err(handshake.refuse(&text, out));
        }
    };
    let Some(negotiated) = handshake.accept(out) else { return Err(HandshakeStep::More) };
    let chosen = NegotiatedOptions {
        export: export.name().to_owned(),
        style: negotiated.style,
        contexts: negotiated.contexts,
        tls: negotiated.tls,
    };
    // A client enters transmission once.
    let _ = client.chosen.set(chosen);
    Ok((negotiated, channel, attachment))
}
