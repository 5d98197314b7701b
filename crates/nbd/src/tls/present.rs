//! TLS by rustls.

use std::io::{self, BufRead, Read, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Region;
use blockyard_os::socket::{
    self, Interest, PieceSource, Ready, WaitMode, read_socket, write_socket,
};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::objects::{oid_registry, oid2abbrev};
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use crate::access::escaped;
use crate::memory::Lease;
use crate::tls::{CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsConfig, TlsError, TlsMode};
use crate::transport::Replies;

/// Longest plaintext in one TLS record.
const RECORD_BYTES: usize = 16 << 10;

/// How long the closing alert may take.
const CLOSE_TIME: Duration = Duration::from_millis(100);

/// Starts TLS on connections.
#[derive(Clone)]
pub(crate) struct Acceptor(Arc<ServerConfig>);

impl Acceptor {
    /// Reads the certificates, unless TLS is off.
    pub(crate) fn load(config: &TlsConfig) -> Result<Option<Acceptor>, TlsError> {
        if config.mode == TlsMode::Off {
            return Ok(None);
        }
        let directory = &config.certificates;
        let mismatch =
            |problem: String| TlsError::Mismatch { certificates: directory.clone(), problem };
        let chain = certificates(&directory.join(CERTIFICATE_FILE))?;
        check_dates(&chain[0]).map_err(|what| mismatch(format!("{CERTIFICATE_FILE}: {what}")))?;
        let key_path = directory.join(KEY_FILE);
        let key = PrivateKeyDer::from_pem_file(&key_path)
            .map_err(|error| file(&key_path, "a private key in PEM", &error.to_string()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| mismatch(error.to_string()))?;
        let builder = if config.verify_peer {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(&directory.join(CA_FILE))? {
                roots.add(certificate).map_err(|error| mismatch(error.to_string()))?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            let verifier = verifier.map_err(|error| mismatch(error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let config =
            builder.with_single_cert(chain, key).map_err(|error| mismatch(error.to_string()))?;
        Ok(Some(Acceptor(Arc::new(config))))
    }

    /// Executes the TLS handshake on a socket.
    pub(crate) fn accept(
        &self,
        socket: Arc<OwnedFd>,
        deadline: Instant,
    ) -> io::Result<TlsTransport> {
        let mut session = ServerConnection::new(Arc::clone(&self.0)).map_err(io::Error::other)?;
        let mut stream = Stream { socket: &socket, deadline: Some(deadline), full: None };
        while session.is_handshaking() {
            session.complete_io(&mut stream)?;
        }
        Ok(TlsTransport { socket, session: Box::new(session) })
    }
}

fn file(path: &Path, wanted: &'static str, problem: &str) -> TlsError {
    TlsError::File { path: path.to_owned(), wanted, problem: problem.to_owned() }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wanted = "certificates in PEM";
    let all = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| file(path, wanted, &error.to_string()))?;
    if all.is_empty() {
        return Err(file(path, wanted, "no certificate in it"));
    }
    Ok(all)
}

/// Refuses a certificate that clients would refuse because of its dates.
fn check_dates(certificate: &CertificateDer<'_>) -> Result<(), String> {
    let (_, parsed) = X509Certificate::from_der(certificate)
        .map_err(|error| format!("the certificate cannot be read: {error}"))?;
    let validity = parsed.validity();
    let (from, to, now) = (validity.not_before, validity.not_after, ASN1Time::now());
    let dates = || format!("it is valid from {from} to {to}, and now it is {now}");
    match (from <= now, now <= to) {
        (false, _) => {
            Err(format!("the certificate is not valid yet: {}; check the clock", dates()))
        }
        (_, false) => Err(format!("the certificate has expired: {}; renew it", dates())),
        _ => Ok(()),
    }
}

/// The subject of a certificate, in the form of [`AllowLists::allow`].
///
/// [`AllowLists::allow`]: crate::access::AllowLists::allow
fn subject_of(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let names = parsed.subject().iter_rdn().map(|name| {
        let attributes = name.iter().map(|attribute| {
            let kind = attribute.attr_type();
            let kind = match oid2abbrev(kind, oid_registry()) {
                // OpenSSL's name for it.
                Ok("Email") => "emailAddress".to_owned(),
                Ok(known) => known.to_owned(),
                Err(_) => kind.to_id_string(),
            };
            // A value that is no text is in no allow list.
            Some(format!("{kind}={}", escaped(attribute.as_str().ok()?)))
        });
        Some(attributes.collect::<Option<Vec<_>>>()?.join("+"))
    });
    Some(names.collect::<Option<Vec<_>>>()?.join(","))
}

/// A socket in the form that rustls needs, with a deadline for each sleep.
struct Stream<'a> {
    socket: &'a OwnedFd,
    deadline: Option<Instant>,
    /// Called before a write sleeps.
    full: Option<&'a mut dyn FnMut()>,
}

impl Read for Stream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        read_socket(self.socket, into, self.deadline)
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_socket(self.socket, bytes, self.deadline, &mut || {
            if let Some(full) = &mut self.full {
                full();
            }
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A TLS session on a socket.
pub(crate) struct TlsTransport {
    socket: Arc<OwnedFd>,
    session: Box<ServerConnection>,
}

impl TlsTransport {
    /// The subject of the client's certificate, if the client was asked for one.
    pub(crate) fn subject(&self) -> Option<String> {
        subject_of(self.session.peer_certificates()?.first()?)
    }

    /// Sleeps until there are bytes to receive; decrypted bytes count too.
    pub(crate) fn wait(&mut self, timeout: Duration) -> io::Result<Ready> {
        if self.session.reader().fill_buf().is_ok() {
            return Ok(Ready::Yes);
        }
        socket::wait(&self.socket, Interest::Readable, None, Some(timeout))
    }

    /// Sleeps until there are bytes to receive, or another descriptor is readable.
    pub(crate) fn wait_either(
        &mut self,
        other: Option<RawFd>,
        timeout: Duration,
    ) -> io::Result<Ready> {
        if self.session.reader().fill_buf().is_ok() {
            return Ok(Ready::Yes);
        }
        socket::wait_either(&self.socket, other, None, timeout)
    }

    /// Passes plaintext to `take`, which returns the number of bytes taken. 0 is the end of the
    /// stream.
    fn plaintext(
        &mut self,
        mode: WaitMode,
        deadline: Option<Instant>,
        mut take: impl FnMut(&[u8]) -> usize,
    ) -> io::Result<usize> {
        loop {
            let mut reader = self.session.reader();
            match reader.fill_buf() {
                Ok(bytes) => {
                    let taken = if bytes.is_empty() { 0 } else { take(bytes) };
                    reader.consume(taken);
                    return Ok(taken);
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) => {}
            }
            if mode == WaitMode::NonBlocking {
                let now = Some(Duration::ZERO);
                if socket::wait(&self.socket, Interest::Readable, None, now)? != Ready::Yes {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
            }
            let mut stream = Stream { socket: &self.socket, deadline, full: None };
            self.session.read_tls(&mut stream)?;
            let processed = self.session.process_new_packets();
            // An alert, or the reply to a key update.
            while self.session.wants_write() {
                self.session.write_tls(&mut stream)?;
            }
            processed.map_err(io::Error::other)?;
        }
    }

    pub(crate) fn recv(
        &mut self,
        region: &Region,
        offset: u64,
        len: usize,
        mode: WaitMode,
    ) -> io::Result<usize> {
        self.plaintext(mode, None, |bytes| {
            let taken = bytes.len().min(len);
            region.write(offset, &bytes[..taken]);
            taken
        })
    }

    pub(crate) fn read(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<usize> {
        self.plaintext(WaitMode::AnyBytes, Some(deadline), |bytes| {
            let taken = bytes.len().min(into.len());
            into[..taken].copy_from_slice(&bytes[..taken]);
            taken
        })
    }

    /// Encrypts plaintext and sends the records.
    fn encrypt(
        &mut self,
        bytes: &[u8],
        deadline: Option<Instant>,
        full: &mut dyn FnMut(),
    ) -> io::Result<usize> {
        let taken = self.session.writer().write(bytes)?;
        let mut stream = Stream { socket: &self.socket, deadline, full: Some(full) };
        while self.session.wants_write() {
            self.session.write_tls(&mut stream)?;
        }
        Ok(taken)
    }

    pub(crate) fn write(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<usize> {
        self.encrypt(bytes, Some(deadline), &mut || {})
    }

    pub(crate) fn send(
        &mut self,
        region: &Region,
        replies: &mut Replies,
        full: &mut dyn FnMut(),
        lease: &Lease,
    ) -> io::Result<()> {
        // Records are filled across pieces, so that many short replies share one.
        let mut record = Vec::with_capacity(RECORD_BYTES);
        let (bytes, pieces) = replies.parts();
        for piece in pieces {
            let (mut offset, mut left) = (piece.offset, piece.len);
            while left > 0 {
                let start = record.len();
                let part = left.min(RECORD_BYTES - start);
                match piece.source {
                    PieceSource::Region => {
                        record.resize(start + part, 0);
                        region.read(offset, &mut record[start..]);
                    }
                    PieceSource::Bytes => {
                        let from = offset as usize;
                        record.extend_from_slice(&bytes[from..from + part]);
                    }
                }
                offset += part as u64;
                left -= part;
                if record.len() == RECORD_BYTES {
                    self.encrypt_all(&record, full, lease)?;
                    record.clear();
                }
            }
        }
        self.encrypt_all(&record, full, lease)
    }

    fn encrypt_all(
        &mut self,
        mut bytes: &[u8],
        full: &mut dyn FnMut(),
        lease: &Lease,
    ) -> io::Result<()> {
        let mut full = || {
            lease.note_blocked();
            full();
        };
        while !bytes.is_empty() {
            let taken = self.session.writer().write(bytes)?;
            bytes = &bytes[taken..];
            while self.session.wants_write() {
                let full: &mut dyn FnMut() = &mut full;
                let mut stream = Stream { socket: &self.socket, deadline: None, full: Some(full) };
                self.session.write_tls(&mut stream)?;
                lease.note_moved();
            }
        }
        Ok(())
    }

    /// "Terminating the transmission phase": TLS is shut down first.
    pub(crate) fn close(&mut self) {
        self.session.send_close_notify();
        let deadline = Some(Instant::now() + CLOSE_TIME);
        let mut stream = Stream { socket: &self.socket, deadline, full: None };
        while self.session.wants_write() {
            if self.session.write_tls(&mut stream).is_err() {
                return;
            }
        }
    }
}
