//! Clients that stall, lie or vanish, and servers that stop.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use blockyard_nbd::wire::{Style, command};
use blockyard_nbd::{
    Endpoint, ExportOptions, Exports, ListenError, Server, ServerError, ServerOptions,
};
use common::ram::Ram;
use common::{Client, Directory, Fixture};

const MIB: u64 = 1 << 20;

/// Options with which a stalled client is cut off at once.
fn impatient() -> ServerOptions {
    ServerOptions { drain_timeout: Duration::ZERO, ..ServerOptions::default() }
}

#[test]
fn client_killed_during_write_leaves_others_served() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    let mut other = fixture.client(Style::Structured);
    for sent in [0, 1, 27, 28, 29, 512, 4096, 65535] {
        let mut client = fixture.client(Style::Simple);
        let mut bytes = client.request(command::WRITE, 0, 1, 0, 65536);
        bytes.resize(28 + 65536, 0xee);
        client.stream.write_all(&bytes[..sent]).unwrap();
        drop(client);
        assert_eq!(other.read(0, 512).data, [0; 512]);
    }
    drop(fixture);
    // No part of an incomplete write is written.
    assert_eq!(disk.inner().pushed, 8);
}

#[test]
fn garbage_instead_of_a_request_ends_only_its_connection() {
    let fixture = Fixture::new(Ram::new(MIB));
    let mut other = fixture.client(Style::Simple);
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let mut client = fixture.client(style);
        // Requests before the garbage are still answered.
        let mut bytes = client.request(command::READ, 0, 1, 0, 512);
        bytes.extend_from_slice(&[0xa5; 64]);
        client.stream.write_all(&bytes).unwrap();
        assert_eq!(client.reply(512).data, [0; 512]);
        client.assert_closed();
        assert_eq!(other.read(0, 512).error, 0);
    }
}

#[test]
fn compact_requests_after_extended_headers_end_the_connection() {
    let fixture = Fixture::new(Ram::new(MIB));
    let mut client = fixture.client(Style::Extended);
    client.style = Style::Simple;
    client.send(command::READ, 0, 1, 0, 512);
    // The header is four bytes short of an extended one.
    client.stream.write_all(&[0; 4]).unwrap();
    client.assert_closed();
}

#[test]
fn disconnect_answers_what_came_before() {
    let fixture = Fixture::new(Ram::new(MIB));
    let mut client = fixture.client(Style::Simple);
    let mut bytes = client.request(command::READ, 0, 1, 0, 512);
    bytes.extend(client.request(command::DISC, 0, 2, 0, 0));
    bytes.extend(client.request(command::READ, 0, 3, 0, 512));
    client.stream.write_all(&bytes).unwrap();
    assert_eq!(client.reply(512).cookie, 1);
    client.assert_closed();
}

#[test]
fn a_client_that_closes_its_sending_half_gets_its_replies() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    let mut client = fixture.client(Style::Simple);
    disk.set(|inner| inner.held = true);
    client.send(command::READ, 0, 1, 0, 512);
    client.stream.shutdown(Shutdown::Write).unwrap();
    disk.wait_pushed(1);
    disk.set(|inner| inner.held = false);
    assert_eq!(client.reply(512).cookie, 1);
    client.assert_closed();
}

#[test]
fn client_that_never_reads_delays_no_other_and_shutdown_is_bounded() {
    let fixture = Fixture::with(Ram::new(64 * MIB), ExportOptions::default(), impatient());
    let mut stalled = fixture.client(Style::Simple);
    // Far more than any socket buffers.
    for cookie in 0..8 {
        stalled.send(command::READ, 0, cookie, 0, 32 << 20);
    }
    let mut half = fixture.client(Style::Simple);
    let request = half.request(command::WRITE, 0, 1, 0, 4096);
    half.stream.write_all(&request).unwrap();
    let mut silent = fixture.connect();
    // After the greeting the client has a thread.
    silent.read_exact(&mut [0; 18]).unwrap();
    let mut other = fixture.client(Style::Structured);
    for _ in 0..100 {
        assert_eq!(other.read(0, 4096).error, 0);
    }
    let mut fixture = fixture;
    fixture.server.take().unwrap().shutdown();
    let mut rest = Vec::new();
    silent.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 0);
    other.assert_closed();
    half.assert_closed();
    assert!(!fixture.directory.socket().exists());
}

#[test]
fn stalled_disk_delays_only_its_own_clients() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    fixture.exports.add("fast", Ram::new(MIB), ExportOptions::default()).unwrap();
    let mut slow = fixture.client(Style::Simple);
    disk.set(|inner| inner.held = true);
    // More than the disk's channel accepts and more than a connection keeps in flight.
    let mut bytes = Vec::new();
    for cookie in 0..3000 {
        bytes.extend(slow.request(command::READ, 0, cookie, 0, 512));
    }
    slow.stream.write_all(&bytes).unwrap();
    disk.wait_pushed(64);
    let mut fast = Client::greet(fixture.connect());
    fast.negotiate("fast", Style::Structured, true);
    for _ in 0..100 {
        assert_eq!(fast.read(0, 512).error, 0);
    }
    disk.set(|inner| inner.held = false);
    for _ in 0..3000 {
        assert_eq!(slow.reply(512).error, 0);
    }
}

#[test]
fn shutdown_answers_what_is_in_flight() {
    let disk = Ram::new(MIB);
    let mut fixture = Fixture::new(Arc::clone(&disk) as _);
    let mut client = fixture.client(Style::Structured);
    disk.set(|inner| inner.held = true);
    for cookie in 0..10 {
        client.send(command::READ, 0, cookie, 0, 4096);
    }
    disk.wait_pushed(10);
    let server = fixture.server.take().unwrap();
    let stopping = thread::spawn(move || server.shutdown());
    disk.set(|inner| inner.held = false);
    let mut cookies: Vec<_> = (0..10).map(|_| client.reply(4096).cookie).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..10).collect::<Vec<_>>());
    client.assert_closed();
    stopping.join().unwrap();
}

#[test]
fn removing_an_export_drains_and_disconnects_its_clients_only() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    fixture.exports.add("stays", Ram::new(MIB), ExportOptions::default()).unwrap();
    let mut leaves = fixture.client(Style::Simple);
    let mut stays = Client::greet(fixture.connect());
    stays.negotiate("stays", Style::Simple, false);
    disk.set(|inner| inner.held = true);
    leaves.send(command::READ, 0, 1, 0, 512);
    disk.wait_pushed(1);
    let exports = Arc::clone(&fixture.exports);
    let removing = thread::spawn(move || exports.remove("disk", Duration::from_secs(60)).unwrap());
    disk.set(|inner| inner.held = false);
    assert_eq!(leaves.reply(512).cookie, 1);
    leaves.assert_closed();
    removing.join().unwrap();
    assert_eq!(stays.read(0, 512).error, 0);
    let names: Vec<_> = fixture.exports.list().into_iter().map(|export| export.name).collect();
    assert_eq!(names, ["stays"]);
    assert!(fixture.exports.remove("disk", Duration::ZERO).is_err());
}

#[test]
fn shutdown_is_bounded_with_requests_stuck_in_the_disk() {
    let disk = Ram::new(MIB);
    let mut fixture = Fixture::with(Arc::clone(&disk) as _, ExportOptions::default(), impatient());
    let mut clients: Vec<_> = (0..4).map(|_| fixture.client(Style::Structured)).collect();
    disk.set(|inner| inner.held = true);
    for client in &mut clients {
        // More than the disk's channel accepts.
        for cookie in 0..100 {
            client.send(command::READ, 0, cookie, 0, 512);
        }
    }
    // One client has closed its sending direction, one has disconnected.
    clients[1].stream.shutdown(Shutdown::Write).unwrap();
    drop(clients.pop());
    disk.wait_pushed(4 * 64);
    fixture.server.take().unwrap().shutdown();
    for mut client in clients {
        client.assert_closed();
    }
    assert!(disk.inner().held);
}

#[test]
fn servers_that_begin_to_stop_together_tell_all_clients_at_once() {
    let disk = Ram::new(MIB);
    let mut rigs: Vec<_> = (0..3).map(|_| Fixture::new(Arc::clone(&disk) as _)).collect();
    let clients: Vec<_> = rigs.iter().map(|fixture| fixture.client(Style::Simple)).collect();
    let mut halves: Vec<_> = rigs.iter().map(|fixture| Client::greet(fixture.connect())).collect();
    for fixture in &rigs {
        fixture.server().begin_shutdown();
    }
    // The test has not waited for any server yet.
    for mut client in clients {
        client.assert_closed();
    }
    for half in &mut halves {
        half.assert_closed();
    }
    for fixture in &mut rigs {
        let server = fixture.server.take().unwrap();
        server.stop();
        // The server is stopped already; this does nothing.
        server.stop();
        server.wait();
        assert!(server.connections().is_empty());
        assert!(!fixture.directory.socket().exists());
    }
}

#[test]
fn removing_an_export_is_bounded_with_requests_stuck_in_the_disk() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    let mut client = fixture.client(Style::Simple);
    disk.set(|inner| inner.held = true);
    client.send(command::READ, 0, 1, 0, 512);
    disk.wait_pushed(1);
    fixture.exports.remove("disk", Duration::ZERO).unwrap();
    client.assert_closed();
    assert!(disk.inner().held);
}

#[test]
fn writes_of_a_disconnected_client_complete() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    let mut client = fixture.client(Style::Simple);
    disk.set(|inner| inner.held = true);
    let mut bytes = client.request(command::WRITE, 0, 1, 0, 4096);
    bytes.resize(28 + 4096, 0xee);
    client.stream.write_all(&bytes).unwrap();
    disk.wait_pushed(1);
    drop(client);
    let exports = Arc::clone(&fixture.exports);
    let removing = thread::spawn(move || exports.remove("disk", Duration::from_secs(60)).unwrap());
    disk.set(|inner| inner.held = false);
    removing.join().unwrap();
    fixture.exports.add("disk", disk, ExportOptions::default()).unwrap();
    assert_eq!(fixture.client(Style::Simple).read(0, 4096).data, [0xee; 4096]);
}

#[test]
fn client_above_the_limit_is_refused() {
    let options = ServerOptions { connections_max: 1, ..ServerOptions::default() };
    let fixture = Fixture::with(Ram::new(MIB), ExportOptions::default(), options);
    let mut first = fixture.client(Style::Simple);
    let mut rest = Vec::new();
    // The connection ends without a greeting.
    fixture.connect().read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    assert_eq!(first.read(0, 512).error, 0);
}

#[test]
fn unfinished_handshakes_do_not_lock_out_clients() {
    let options =
        ServerOptions { connections_max: 6, handshakes_max: 4, ..ServerOptions::default() };
    let fixture = Fixture::with(Ram::new(MIB), ExportOptions::default(), options);
    let mut first = fixture.client(Style::Simple);
    let mut silent: Vec<_> = (0..4).map(|_| Client::greet(fixture.connect())).collect();
    // Each new client ends the oldest handshake, and no other connection.
    let mut second = fixture.client(Style::Simple);
    silent.remove(0).assert_closed();
    // Five remain: there are at most six clients at once, in any state.
    silent.push(Client::greet(fixture.connect()));
    silent.push(Client::greet(fixture.connect()));
    silent.remove(0).assert_closed();
    for client in [&mut first, &mut second] {
        assert_eq!(client.read(0, 512).error, 0);
    }
    silent.pop().unwrap().negotiate("disk", Style::Simple, false);
}

#[test]
fn sockets_of_dead_servers_are_replaced_and_of_live_ones_not() {
    let directory = Directory::new();
    let start = || {
        let endpoint = Endpoint::Unix(directory.socket().into());
        Server::start(Exports::new(), endpoint, ServerOptions::default())
    };
    // A dropped listener leaves its file.
    drop(UnixListener::bind(directory.socket()).unwrap());
    assert!(directory.socket().exists());
    let server = start().unwrap();
    let error = start().unwrap_err();
    assert!(matches!(error, ServerError::Listen(ListenError::InUse(_))), "{error}");
    server.shutdown();
    assert!(!directory.socket().exists());
    std::fs::write(directory.socket(), b"precious").unwrap();
    let error = start().unwrap_err();
    assert!(matches!(error, ServerError::Listen(ListenError::NotASocket(_))), "{error}");
    assert_eq!(std::fs::read(directory.socket()).unwrap(), b"precious");
}

#[test]
fn uris_keep_the_host_that_was_given() {
    for (given, named) in
        [("localhost", "localhost"), ("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost")]
    {
        let endpoint = Endpoint::Tcp { host: given.to_owned(), port: 0 };
        let server = Server::start(Exports::new(), endpoint, ServerOptions::default()).unwrap();
        let port = server.local_addr().rsplit_once(':').unwrap().1;
        assert_eq!(server.uri("d"), Some(format!("nbd://{named}:{port}/d")));
    }
}

#[test]
fn a_name_is_served_at_each_of_its_addresses() {
    // The bug: only the first address was bound, with `localhost` that is ::1, and clients of
    // 127.0.0.1 were refused.
    let exports = Exports::new();
    exports.add("disk", Ram::new(MIB), ExportOptions::default()).unwrap();
    let endpoint = Endpoint::Tcp { host: "localhost".to_owned(), port: 0 };
    let server = Server::start(exports, endpoint, ServerOptions::default()).unwrap();
    let port: u16 = server.local_addr().rsplit_once(':').unwrap().1.parse().unwrap();
    for address in ("localhost", port).to_socket_addrs().unwrap() {
        let is_here = TcpListener::bind((address.ip(), 0)).is_ok();
        let stream = TcpStream::connect(address);
        assert_eq!(stream.is_ok(), is_here, "{address}");
        if let Ok(stream) = stream {
            assert!(server.local_addrs().contains(&format!("tcp:{address}")));
            Client::greet(stream).negotiate("disk", Style::Extended, true);
        }
    }
}

#[test]
fn a_listening_descriptor_and_a_tcp_port_serve_alike() {
    let directory = Directory::new();
    let exports = Exports::new();
    exports.add("disk", Ram::new(MIB), ExportOptions::default()).unwrap();
    let listener = UnixListener::bind(directory.socket()).unwrap();
    let options = ServerOptions::default;
    let by_fd = Server::adopt(Arc::clone(&exports), OwnedFd::from(listener), options()).unwrap();
    let by_fd = by_fd.start().unwrap();
    let stream = UnixStream::connect(directory.socket()).unwrap();
    let mut client = Client::greet(stream);
    client.negotiate("disk", Style::Extended, true);
    assert_eq!(client.write(0, 0, &[3; 4096]).error, 0);
    by_fd.shutdown();
    // The file belongs to the program that made the socket.
    assert!(directory.socket().exists());

    let endpoint = Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let by_tcp = Server::start(exports, endpoint, options()).unwrap();
    let address = by_tcp.local_addr().strip_prefix("tcp:").unwrap().to_owned();
    assert_eq!(by_tcp.uri("disk"), Some(format!("nbd://{address}/disk")));
    let mut client = Client::greet(TcpStream::connect(address).unwrap());
    client.negotiate("", Style::Structured, true);
    assert_eq!(client.read(0, 4096).data, [3; 4096]);

    let file = std::fs::File::open("/dev/null").unwrap();
    let error = Server::adopt(Exports::new(), OwnedFd::from(file), options()).unwrap_err();
    assert!(matches!(error, ServerError::Listen(ListenError::BadDescriptor)), "{error}");
}
