//! A client's session: handshake, TLS if requested, transmission.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Channel;

use crate::access::AllowLists;
use crate::client::{Client, NegotiatedOptions};
use crate::command::ExportRules;
use crate::connection::{Connection, ServeEnd};
use crate::exports::{Export, Exports};
use crate::handshake::{CloseReason, Handshake, HandshakeStep, Negotiated, TlsMode};
use crate::pause::{ConnectionState, PausedConnection};
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

/// The reason for which a paused connection cannot be continued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResumeError {
    #[error("there is no export `{0}`")]
    NoExport(String),
    #[error("export `{0}` is being removed, or a file system of the device is mounted")]
    Closed(String),
    #[error("the {what} of export `{export}` is {found}, and was {wanted}")]
    Changed { export: String, what: &'static str, found: u64, wanted: u64 },
    #[error("{0}")]
    Open(String),
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The end of a session.
#[derive(Debug)]
pub(crate) enum SessionEnd {
    /// The client has left.
    Left,
    /// The connection is paused.
    Paused(Box<PausedConnection>),
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
) -> Result<SessionEnd, SessionError> {
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
                return Ok(SessionEnd::Left);
            }
            HandshakeStep::Close(reason) => {
                transport.close();
                return Err(SessionError::Handshake(reason));
            }
        }
        let mut bytes = [0; READ_BYTES];
        match transport.read(&mut bytes, deadline)? {
            0 => return Ok(SessionEnd::Left),
            len => received.extend_from_slice(&bytes[..len]),
        }
    };
    let rules =
        ExportRules::new(&entered.export, entered.style, entered.contexts, entered.min_block_bytes);
    let export = Arc::clone(&entered.export);
    // The state of TLS cannot be handed on, and a pipe has no owner but this process.
    let socket = socket.filter(|_| matches!(transport, Transport::Socket(_)));
    let mut connection = Connection::new(transport, Arc::clone(client), export, channel, rules)?;
    if !connection.put(&received) {
        return Err(SessionError::Io(io::ErrorKind::OutOfMemory.into()));
    }
    serve(connection, &rules, attachment, socket)
}

/// Serves the requests of a client. A connection with a socket can be paused.
fn serve(
    mut connection: Connection,
    rules: &ExportRules,
    attachment: Attachment,
    socket: Option<Arc<OwnedFd>>,
) -> Result<SessionEnd, SessionError> {
    if socket.is_some() {
        attachment.client.note_thread();
    }
    let served = connection.serve();
    let paused = match (&served, socket) {
        (Ok(ServeEnd::Paused), Some(socket)) => {
            let (unread, skipped) = connection.unfinished();
            let client = &attachment.client;
            let state = ConnectionState {
                id: client.id,
                peer: client.peer.clone(),
                since: client.since,
                export: attachment.export.name().to_owned(),
                style: rules.style,
                contexts: rules.contexts,
                min_block_bytes: rules.min_block_bytes as u32, // It was made of 32 bits.
                len_bytes: rules.len_bytes,
                block_bytes: rules.block_bytes,
                flags: rules.flags,
                unread,
                skipped,
                counts: client.stats.counts(),
            };
            Some(Box::new(PausedConnection { socket, state }))
        }
        _ => None,
    };
    // The channel is dropped first: it waits for requests in flight, before the export stops
    // counting this client.
    drop(connection);
    drop(attachment);
    match (served?, paused) {
        (ServeEnd::Fault(fault), _) => Err(SessionError::Request(fault)),
        (_, Some(paused)) => Ok(SessionEnd::Paused(paused)),
        (ServeEnd::Left | ServeEnd::Paused, None) => Ok(SessionEnd::Left),
    }
}

/// A paused connection with an open channel, ready to be continued.
pub(crate) struct Resumable {
    connection: Connection,
    rules: ExportRules,
    attachment: Attachment,
    socket: Arc<OwnedFd>,
}

impl Resumable {
    /// Opens the export of a paused connection. Nothing is read from its socket, nor written to it.
    pub(crate) fn new(
        config: &SessionConfig,
        paused: &PausedConnection,
        client: &Arc<Client>,
    ) -> Result<Resumable, ResumeError> {
        let state = &paused.state;
        let name = || state.export.clone();
        // Not by `find`: the empty name stands for the default export.
        let all = config.exports.snapshot();
        let export = all.into_iter().find(|export| export.name() == state.export);
        let export = export.ok_or_else(|| ResumeError::NoExport(name()))?;
        if !export.attach(client) {
            return Err(ResumeError::Closed(name()));
        }
        let attachment = Attachment { export: Arc::clone(&export), client: Arc::clone(client) };
        if export.is_claimed() {
            return Err(ResumeError::Closed(name()));
        }
        let rules = ExportRules::new(&export, state.style, state.contexts, state.min_block_bytes);
        for (what, found, wanted) in [
            ("size", rules.len_bytes, state.len_bytes),
            ("block size", rules.block_bytes, state.block_bytes),
            ("set of transmission flags", rules.flags.into(), state.flags.into()),
        ] {
            if found != wanted {
                return Err(ResumeError::Changed { export: name(), what, found, wanted });
            }
        }
        let opened = export.disk().open();
        let channel = opened.map_err(|error| ResumeError::Open(error.to_string()))?;
        client.channels.add(channel.as_ref());
        let socket = Arc::clone(&paused.socket);
        let transport = Transport::Socket(Arc::clone(&socket));
        let mut connection =
            Connection::new(transport, Arc::clone(client), export, channel, rules)?;
        if !connection.restore(&state.unread, state.skipped) {
            return Err(io::Error::from(io::ErrorKind::OutOfMemory).into());
        }
        let chosen = NegotiatedOptions {
            export: name(),
            style: state.style,
            contexts: state.contexts,
            tls: false,
        };
        // A client enters transmission once.
        let _ = client.chosen.set(chosen);
        Ok(Resumable { connection, rules, attachment, socket })
    }

    /// Continues the connection.
    pub(crate) fn serve(self) -> Result<SessionEnd, SessionError> {
        let Resumable { connection, rules, attachment, socket } = self;
        serve(connection, &rules, attachment, Some(socket))
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
    client.channels.add(channel.as_ref());
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
