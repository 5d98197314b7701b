//! TLS with certificates that the test makes: off, on and required, verified or not.
#![cfg(feature = "tls")]
#![allow(clippy::unwrap_used)] // A test may.

mod common;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockyard_nbd::tls::{CA_FILE, CERTIFICATE_FILE, KEY_FILE};
use blockyard_nbd::wire::{Style, command, option, option_reply};
use blockyard_nbd::{
    Endpoint, ExportOptions, Exports, MemoryBudget, Server, ServerError, ServerOptions, TlsConfig,
    TlsError, TlsMode,
};
use common::ram::Ram;
use common::{Client, Directory};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    date_time_ymd,
};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};

const MIB: u64 = 1 << 20;

/// The files of an authority, and of a server's and a client's certificate.
struct Papers {
    directory: Directory,
    client: (CertificateDer<'static>, Vec<u8>),
}

impl Papers {
    fn new() -> Papers {
        Papers::of_years([1999, 2999])
    }

    /// Certificates of which the server's is valid between the starts of these years.
    fn of_years(server_years: [i32; 2]) -> Papers {
        let directory = Directory::new();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let issue = |name: &str, years: [i32; 2]| {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::OrganizationName, "Example, Inc.");
            params.distinguished_name.push(DnType::CommonName, name);
            [params.not_before, params.not_after] = years.map(|year| date_time_ymd(year, 1, 1));
            (params.signed_by(&key, &authority).unwrap(), key)
        };
        let (server, server_key) = issue("server", server_years);
        let (client, client_key) = issue("alice", [1999, 2999]);
        let file = |name, text: String| std::fs::write(directory.0.join(name), text).unwrap();
        file(CA_FILE, authority.pem());
        file(CERTIFICATE_FILE, server.pem());
        file(KEY_FILE, server_key.serialize_pem());
        let client = (client.der().clone(), client_key.serialize_der());
        Papers { directory, client }
    }

    fn config(&self, mode: TlsMode, verify_peer: bool) -> TlsConfig {
        let certificates = self.directory.0.clone();
        TlsConfig { mode, certificates, verify_peer, ..TlsConfig::default() }
    }

    fn start(&self, mode: TlsMode, verify_peer: bool) -> Server {
        self.start_with(mode, verify_peer, Arc::default())
    }

    fn start_with(&self, mode: TlsMode, verify_peer: bool, memory: Arc<MemoryBudget>) -> Server {
        let exports = Exports::new();
        exports.add("disk", Ram::new(64 * MIB), ExportOptions::default()).unwrap();
        let tls = self.config(mode, verify_peer);
        let options = ServerOptions { tls, memory, ..ServerOptions::default() };
        Server::start(exports, Endpoint::Unix(self.directory.socket().into()), options).unwrap()
    }

    fn greet(&self) -> Client<UnixStream> {
        Client::greet(UnixStream::connect(self.directory.socket()).unwrap())
    }

    /// Requests TLS and executes its handshake.
    fn upgrade(
        &self,
        mut client: Client<UnixStream>,
        show: bool,
    ) -> Client<StreamOwned<ClientConnection, UnixStream>> {
        assert_eq!(client.option(option::STARTTLS, &[]).0, option_reply::ACK);
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_file(self.directory.0.join(CA_FILE)).unwrap();
        roots.add(authority).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = if show {
            let key = PrivateKeyDer::try_from(self.client.1.clone()).unwrap();
            builder.with_client_auth_cert(vec![self.client.0.clone()], key).unwrap()
        } else {
            builder.with_no_client_auth()
        };
        let name = ServerName::try_from("localhost").unwrap();
        let session = ClientConnection::new(Arc::new(config), name).unwrap();
        Client {
            stream: StreamOwned::new(session, client.stream),
            style: Style::Simple,
            export_bytes: 0,
            flags: 0,
            block_sizes: None,
        }
    }
}

fn exercise<S: std::io::Read + std::io::Write>(client: &mut Client<S>) {
    client.negotiate("disk", Style::Extended, true);
    for len in [512, 4096, 100 << 10, 5 << 20] {
        let data: Vec<u8> = (0..len).map(|at: usize| (at / 7) as u8).collect();
        assert_eq!(client.write(0, 512, &data).error, 0);
        assert!(client.read(512, len as u64).data == data);
    }
    let mut bytes = Vec::new();
    for cookie in 0..64 {
        bytes.extend(client.request(command::READ, 0, cookie, cookie * 4096, 4096));
    }
    client.stream.write_all(&bytes).unwrap();
    for cookie in 0..64 {
        assert_eq!(client.reply(4096).cookie, cookie);
    }
    assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, MIB).error, 0);
}

#[test]
fn tls_required_refuses_options_before_starttls() {
    let papers = Papers::new();
    let server = papers.start(TlsMode::Require, false);
    assert!(server.uri("").unwrap().starts_with("nbds+unix:///?socket="));
    let mut client = papers.greet();
    for option in [option::LIST, option::INFO, option::GO, option::STRUCTURED_REPLY, 99] {
        assert_eq!(client.option(option, &[]).0, option_reply::ERR_TLS_REQD);
    }
    let mut client = papers.upgrade(client, false);
    assert_eq!(client.option(option::STARTTLS, &[]).0, option_reply::ERR_INVALID);
    exercise(&mut client);
    assert!(server.connections()[0].tls);

    let mut old = papers.greet();
    old.send_option(option::EXPORT_NAME, b"disk");
    old.assert_closed();
    let mut leaving = papers.greet();
    assert_eq!(leaving.option(option::ABORT, &[]).0, option_reply::ACK);
    server.shutdown();
}

#[test]
fn tls_on_lets_the_client_choose_and_negotiate_again() {
    let papers = Papers::new();
    let server = papers.start(TlsMode::On, false);
    exercise(&mut papers.greet());
    let mut client = papers.greet();
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]).0, option_reply::ACK);
    let mut client = papers.upgrade(client, false);
    // Earlier negotiation in clear text is discarded.
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]).0, option_reply::ACK);
    exercise(&mut client);
    server.shutdown();
}

#[test]
fn bytes_in_clear_are_not_taken_for_encrypted_ones() {
    let papers = Papers::new();
    let _server = papers.start(TlsMode::Require, false);
    let mut client = papers.greet();
    let mut bytes = Vec::new();
    for option in [option::STARTTLS, option::LIST] {
        bytes.extend_from_slice(b"IHAVEOPT");
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
    }
    std::io::Write::write_all(&mut client.stream, &bytes).unwrap();
    assert_eq!(client.option_reply(option::STARTTLS).0, option_reply::ACK);
    client.assert_closed();
}

#[test]
fn a_client_without_a_certificate_is_refused_where_one_is_wanted() {
    let papers = Papers::new();
    let server = papers.start(TlsMode::Require, true);
    exercise(&mut papers.upgrade(papers.greet(), true));
    let mut stranger = papers.upgrade(papers.greet(), false);
    stranger.stream.conn.complete_io(&mut stranger.stream.sock).unwrap();
    let mut byte = [0];
    std::io::Read::read(&mut stranger.stream, &mut byte).unwrap_err();
    exercise(&mut papers.upgrade(papers.greet(), true));
    server.shutdown();
}

#[test]
fn garbage_instead_of_tls_ends_only_its_connection() {
    let papers = Papers::new();
    let server = papers.start(TlsMode::On, false);
    let mut client = papers.greet();
    assert_eq!(client.option(option::STARTTLS, &[]).0, option_reply::ACK);
    std::io::Write::write_all(&mut client.stream, &[0x5a; 100]).unwrap();
    let mut rest = Vec::new();
    // An alert, and the end of the stream.
    std::io::Read::read_to_end(&mut client.stream, &mut rest).unwrap();
    assert!(rest.len() < 100);
    exercise(&mut papers.greet());
    server.shutdown();
}

#[test]
fn missing_and_mixed_up_files_are_named() {
    let papers = Papers::new();
    let start = |config| {
        let options = ServerOptions { tls: config, ..ServerOptions::default() };
        let endpoint = Endpoint::Unix(papers.directory.socket().into());
        match Server::start(Exports::new(), endpoint, options) {
            Err(ServerError::Tls(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let elsewhere = TlsConfig {
        mode: TlsMode::Require,
        certificates: Path::new("/nowhere").to_owned(),
        verify_peer: false,
        ..TlsConfig::default()
    };
    let error = start(elsewhere);
    assert!(matches!(error, TlsError::File { .. }));
    assert!(error.to_string().contains("/nowhere/server-cert.pem"), "{error}");
    let other = KeyPair::generate().unwrap().serialize_pem();
    std::fs::write(papers.directory.0.join(KEY_FILE), other).unwrap();
    let error = start(papers.config(TlsMode::On, false));
    assert!(matches!(error, TlsError::Mismatch { .. }), "{error}");
    std::fs::write(papers.directory.0.join(KEY_FILE), "no key").unwrap();
    let error = start(papers.config(TlsMode::On, false));
    assert!(error.to_string().contains(KEY_FILE), "{error}");
}

/// The bug: a server started with an expired certificate, and every client refused it.
#[test]
fn a_certificate_out_of_its_dates_is_refused_at_start() {
    for (years, what) in [([1999, 2001], "has expired"), ([2900, 2999], "is not valid yet")] {
        let papers = Papers::of_years(years);
        let options = ServerOptions {
            tls: papers.config(TlsMode::Require, false),
            ..ServerOptions::default()
        };
        let endpoint = Endpoint::Unix(papers.directory.socket().into());
        let error = Server::start(Exports::new(), endpoint, options).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains(&years[0].to_string()), "{error}");
        assert!(error.contains(&years[1].to_string()), "{error}");
    }
}

/// The bug: any verified client could use every export.
#[test]
fn an_export_that_a_client_may_not_use_does_not_exist_for_it() {
    let papers = Papers::new();
    let exports = Exports::new();
    for name in ["hers", "his", "unlisted"] {
        exports.add(name, Ram::new(MIB), ExportOptions::default()).unwrap();
    }
    let mut tls = papers.config(TlsMode::Require, true);
    tls.allow.allow("hers", r"O=Example\, Inc., CN=alice").unwrap();
    tls.allow.allow("his", "CN=bob").unwrap();
    let options = ServerOptions { tls, ..ServerOptions::default() };
    let endpoint = Endpoint::Unix(papers.directory.socket().into());
    let server = Server::start(exports, endpoint, options).unwrap();
    let mut client = papers.upgrade(papers.greet(), true);
    let (reply, listed) = client.option(option::LIST, &[]);
    assert_eq!(reply, option_reply::ACK);
    let listed: Vec<_> = listed
        .into_iter()
        .map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap())
        .collect();
    assert_eq!(listed, ["hers"]);
    for name in ["his", "unlisted", "none"] {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend([0, 0]);
        assert_eq!(client.option(option::INFO, &data).0, option_reply::ERR_UNKNOWN, "{name}");
        assert_eq!(client.option(option::GO, &data).0, option_reply::ERR_UNKNOWN, "{name}");
    }
    client.negotiate("hers", Style::Extended, true);
    assert_eq!(client.read(0, 4096).error, 0);
    drop(server);
}

#[test]
fn a_client_that_does_not_read_its_replies_loses_its_memory_to_one_that_waits() {
    const LONGEST: u64 = 32 * MIB;
    let papers = Papers::new();
    let memory = MemoryBudget::with_stall_max(0, Duration::ZERO);
    let server = papers.start_with(TlsMode::Require, false, Arc::clone(&memory));
    let [mut stalled, mut other] = [(); 2].map(|()| papers.upgrade(papers.greet(), false));
    stalled.negotiate("disk", Style::Simple, false);
    other.negotiate("disk", Style::Structured, false);
    stalled.send(command::READ, 0, 1, 0, LONGEST);
    // After the header of the reply the connection has the memory for its data.
    stalled.bytes::<16>();
    assert_eq!(other.read(0, LONGEST).error, 0);
    assert!(memory.usage().waits > 0);
    assert!(stalled.stream.read_to_end(&mut Vec::new()).is_err(), "no goodbye: it was cut off");
    server.shutdown();
    assert_eq!(memory.usage().used_bytes, 0);
}
