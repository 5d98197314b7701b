//! The handshake, option by option, against a real server.

#![allow(clippy::unwrap_used)] // A test may.

mod common;

use std::io::Write;
use std::sync::Arc;

use blockyard_core::Limits;
use blockyard_nbd::wire::{self, Style, export_flag, option, option_reply};
use blockyard_nbd::{ExportOptions, Exports, ServerOptions};
use common::ram::Ram;
use common::{Client, Fixture};

fn fixture() -> Fixture {
    let fixture = Fixture::new(Ram::new(1 << 20));
    let description = "the second".to_owned();
    let second = ExportOptions { read_only: true, description, ..ExportOptions::default() };
    fixture.exports.add("second", Ram::new(8192), second).unwrap();
    fixture
}

fn greet(fixture: &Fixture) -> Client<std::os::unix::net::UnixStream> {
    Client::greet(fixture.connect())
}

/// Regression: a device with a long path could not be exported.
#[test]
fn a_long_description_is_cut_off() {
    let exports = Exports::new();
    let description = "x".to_owned() + &"é".repeat(4096);
    let options = ExportOptions { description, ..ExportOptions::default() };
    exports.add("long", Ram::new(1 << 20), options).unwrap();
    assert_eq!(exports.list()[0].description, "x".to_owned() + &"é".repeat(2047));
}

#[test]
fn exports_are_listed_with_their_descriptions() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    let (reply, servers) = client.option(option::LIST, &[]);
    assert_eq!(reply, option_reply::ACK);
    let texts: Vec<_> = servers.iter().map(|(_, data)| data[4..].to_vec()).collect();
    assert_eq!(texts, [b"disk".to_vec(), b"secondthe second".to_vec()]);
    assert_eq!(client.option(option::LIST, b"x").0, option_reply::ERR_INVALID);
}

#[test]
fn info_tells_what_go_would_and_goes_nowhere() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    assert_eq!(client.info(option::INFO, "second"), option_reply::ACK);
    assert_eq!(client.export_bytes, 8192);
    assert_ne!(client.flags & export_flag::READ_ONLY, 0);
    assert_eq!(client.flags & export_flag::SEND_DF, 0);
    assert_eq!(client.block_sizes, Some((512, 4096, 32 << 20)));
    assert_eq!(client.info(option::INFO, "third"), option_reply::ERR_UNKNOWN);
    // The empty name is the first export.
    assert_eq!(client.info(option::GO, ""), option_reply::ACK);
    assert_eq!(client.export_bytes, 1 << 20);
    assert_eq!(client.read(0, 512).data, [0; 512]);
}

/// The smallest block in the replies to `NBD_OPT_INFO` or `NBD_OPT_GO`.
fn min_block(infos: &[(u32, Vec<u8>)]) -> u32 {
    let mut sizes = infos.iter().filter(|(_, data)| data[..2] == [0, 3]);
    let minimum = u32::from_be_bytes(sizes.next().unwrap().1[2..6].try_into().unwrap());
    assert!(sizes.next().is_none());
    minimum
}

#[test]
fn a_client_that_does_not_ask_for_block_sizes_may_send_any_range() {
    let fixture = Fixture::new(Ram::with(1 << 20, 4096, Limits::unlimited(8)));
    let mut client = greet(&fixture);
    // A name and no requests for information.
    let mut data = wire::server_data("disk", "");
    data.extend_from_slice(&[0, 0]);
    for (option, minimum) in [(option::INFO, 4096), (option::GO, 1)] {
        let (reply, infos) = client.option(option, &data);
        assert_eq!((reply, min_block(&infos)), (option_reply::ACK, minimum));
    }
    let mut client = greet(&fixture);
    data.truncate(data.len() - 2);
    data.extend_from_slice(&[0, 1, 0, 3]);
    for option in [option::INFO, option::GO] {
        let (reply, infos) = client.option(option, &data);
        assert_eq!((reply, min_block(&infos)), (option_reply::ACK, 4096));
    }
}

#[test]
fn min_block_refuses_clients_that_do_not_ask_for_block_sizes() {
    let export = ExportOptions { min_block_bytes: 4096, ..ExportOptions::default() };
    let fixture = Fixture::with(Ram::new(1 << 20), export, ServerOptions::default());
    let mut client = greet(&fixture);
    let mut data = wire::server_data("disk", "");
    data.extend_from_slice(&[0, 0]);
    for option in [option::INFO, option::GO] {
        let (reply, infos) = client.option(option, &data);
        assert_eq!((reply, min_block(&infos)), (option_reply::ERR_BLOCK_SIZE_REQD, 4096));
    }
    // A client that asks for block sizes can enter, on the same connection, and gets the larger
    // block.
    assert_eq!(client.info(option::GO, "disk"), option_reply::ACK);
    assert_eq!(client.block_sizes, Some((4096, 4096, 32 << 20)));
    assert_ne!(client.read(0, 512).error, 0);
    // The old option cannot report errors.
    let mut client = greet(&fixture);
    client.send_option(option::EXPORT_NAME, b"disk");
    client.assert_closed();
}

#[test]
fn the_default_export_can_be_chosen() {
    let fixture = fixture();
    fixture.exports.set_default("second").unwrap();
    let mut client = greet(&fixture);
    assert_eq!(client.info(option::GO, ""), option_reply::ACK);
    assert_eq!(client.export_bytes, 8192);
    assert!(fixture.exports.set_default("third").is_err());
}

#[test]
fn export_name_enters_without_a_header() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    client.send_option(option::EXPORT_NAME, b"disk");
    assert_eq!(client.u64(), 1 << 20);
    let _flags: [u8; 2] = client.bytes();
    assert_eq!(client.read(4096, 512).data, [0; 512]);
}

#[test]
fn export_name_of_old_clients_ends_with_zeroes() {
    let fixture = fixture();
    let mut stream = fixture.connect();
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut stream, &mut greeting).unwrap();
    // Without fixed newstyle and NO_ZEROES only the option EXPORT_NAME is allowed.
    stream.write_all(&[0; 4]).unwrap();
    let mut client =
        Client { stream, style: Style::Simple, export_bytes: 0, flags: 0, block_sizes: None };
    client.send_option(option::EXPORT_NAME, b"second");
    assert_eq!(client.u64(), 8192);
    let rest: [u8; 126] = client.bytes();
    assert!(rest[2..].iter().all(|byte| *byte == 0));
    assert_eq!(client.read(0, 512).data, [0; 512]);
}

#[test]
fn requests_without_an_error_reply_close_the_connection() {
    let fixture = fixture();
    let mut unknown = greet(&fixture);
    unknown.send_option(option::EXPORT_NAME, b"nowhere");
    unknown.assert_closed();

    let mut flags = fixture.connect();
    flags.write_all(&0x80u32.to_be_bytes()).unwrap();
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut flags, &mut greeting).unwrap();
    let mut client = Client {
        stream: flags,
        style: Style::Simple,
        export_bytes: 0,
        flags: 0,
        block_sizes: None,
    };
    client.assert_closed();

    let mut garbage = greet(&fixture);
    garbage.stream.write_all(b"GET / HTTP/1.1\r\nHost: nowhere\r\n\r\n").unwrap();
    garbage.assert_closed();

    // The server still serves other clients.
    assert_eq!(fixture.client(Style::Simple).read(0, 512).error, 0);
}

#[test]
fn errors_in_options_leave_the_session_open() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    assert_eq!(client.option(77, b"whatever").0, option_reply::ERR_UNSUP);
    assert_eq!(client.option(option::STARTTLS, &[]).0, option_reply::ERR_POLICY);
    assert_eq!(client.option(option::GO, b"short").0, option_reply::ERR_INVALID);
    assert_eq!(client.option(option::GO, &[0xff; 64]).0, option_reply::ERR_INVALID);
    let too_long = vec![0; 70 << 10];
    assert_eq!(client.option(option::INFO, &too_long).0, option_reply::ERR_TOO_BIG);
    assert_eq!(client.option(option::STRUCTURED_REPLY, b"x").0, option_reply::ERR_INVALID);
    client.negotiate("disk", Style::Structured, true);
    assert_eq!(client.read(0, 512).data, [0; 512]);
}

#[test]
fn styles_are_raised_and_never_lowered() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]).0, option_reply::ACK);
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]).0, option_reply::ERR_INVALID);
    assert_eq!(client.option(option::EXTENDED_HEADERS, &[]).0, option_reply::ACK);
    assert_eq!(client.option(option::EXTENDED_HEADERS, &[]).0, option_reply::ERR_INVALID);
    let reply = client.option(option::STRUCTURED_REPLY, &[]).0;
    assert_eq!(reply, option_reply::ERR_EXT_HEADER_REQD);
}

#[test]
fn metadata_contexts_are_listed_and_selected() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    let data = |queries: &[&str]| Client::<std::fs::File>::context_data("disk", queries);
    let wanted = data(&["base:allocation"]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &wanted).0, option_reply::ERR_INVALID);
    client.option(option::STRUCTURED_REPLY, &[]);
    for (queries, listed, set) in [
        (&[][..], 1, 0),
        (&["base:"][..], 1, 0),
        (&["base:allocation"][..], 1, 1),
        (&["qemu:dirty-bitmap:x", "base:allocation"][..], 1, 1),
        (&["qemu:allocation-depth"][..], 0, 0),
    ] {
        let (reply, found) = client.option(option::LIST_META_CONTEXT, &data(queries));
        assert_eq!((reply, found.len()), (option_reply::ACK, listed), "{queries:?}");
        let (reply, found) = client.option(option::SET_META_CONTEXT, &data(queries));
        assert_eq!((reply, found.len()), (option_reply::ACK, set), "{queries:?}");
    }
    let unknown = Client::<std::fs::File>::context_data("nowhere", &["base:allocation"]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &unknown).0, option_reply::ERR_UNKNOWN);
    assert_eq!(client.option(option::SET_META_CONTEXT, b"xy").0, option_reply::ERR_INVALID);
    // The failure has discarded the earlier selection.
    assert_eq!(client.info(option::GO, "disk"), option_reply::ACK);
    client.style = Style::Structured;
    assert_eq!(client.call(7, 0, 0, 4096).error, 22);
}

#[test]
fn contexts_of_another_export_are_not_selected() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    client.option(option::STRUCTURED_REPLY, &[]);
    let data = Client::<std::fs::File>::context_data("second", &["base:allocation"]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &data).0, option_reply::ACK);
    assert_eq!(client.info(option::GO, "disk"), option_reply::ACK);
    client.style = Style::Structured;
    assert_eq!(client.call(7, 0, 0, 4096).error, 22);
}

#[test]
fn abort_is_acknowledged() {
    let fixture = fixture();
    let mut client = greet(&fixture);
    assert_eq!(client.option(option::ABORT, b"ignored").0, option_reply::ACK);
    client.assert_closed();
}

#[test]
fn disk_that_fails_to_open_is_refused_with_its_error() {
    let disk = Ram::new(1 << 20);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    disk.set(|inner| inner.closed = true);
    let mut client = greet(&fixture);
    assert_eq!(client.info(option::GO, "disk"), option_reply::ERR_POLICY);
    disk.set(|inner| inner.closed = false);
    assert_eq!(client.info(option::GO, "disk"), option_reply::ACK);
}

#[test]
fn silent_client_is_disconnected_after_the_timeout() {
    let options = ServerOptions {
        handshake_timeout: std::time::Duration::from_millis(1),
        ..ServerOptions::default()
    };
    let fixture = Fixture::with(Ram::new(1 << 20), ExportOptions::default(), options);
    let mut stream = fixture.connect();
    // The greeting, then the end of the stream.
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut stream, &mut bytes).unwrap();
    assert_eq!(bytes.len(), 18);
}
