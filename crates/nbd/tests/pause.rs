//! Connections that one server pauses and another one, or the same, continues.
#![allow(clippy::unwrap_used)] // All of this is test code.

mod common;

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_nbd::wire::{NbdError, Style, command};
use blockyard_nbd::{
    BoundServer, Endpoint, ExportOptions, Exports, PauseError, PausedConnection, PausedServer,
    Server, ServerOptions,
};

use common::ram::Ram;
use common::{Directory, Fixture};

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// Longer than a pause takes on any machine.
const LONG: Duration = Duration::from_secs(60);

/// The sockets and connections of a paused server, as another process gets them.
fn bound(paused: &PausedServer, exports: &Arc<Exports>, at: &Directory) -> BoundServer {
    let sockets = paused.sockets().map(|socket| socket.try_clone_to_owned().unwrap()).collect();
    let endpoint = Some(Endpoint::Unix(at.socket().into()));
    Server::inherit(Arc::clone(exports), endpoint, sockets, ServerOptions::default()).unwrap()
}

fn connections(paused: &PausedServer) -> Vec<PausedConnection> {
    let copy = |it: &PausedConnection| PausedConnection {
        socket: Arc::new(it.socket.as_fd().try_clone_to_owned().unwrap()),
        state: it.state.clone(),
    };
    paused.connections().iter().map(copy).collect()
}

/// Hands a server over to another one, with exports of its own.
fn hand_over(fixture: &mut Fixture, disk: Arc<dyn Disk>) {
    let old = fixture.server.take().unwrap();
    let paused = old.pause(LONG, false).unwrap();
    let exports = Exports::new();
    exports.add("disk", disk, ExportOptions::default()).unwrap();
    let bound = bound(&paused, &exports, &fixture.directory);
    let adopted = bound.adopt(connections(&paused)).unwrap();
    fixture.server = Some(bound.start().unwrap());
    adopted.start();
    paused.leave();
    drop(old);
    fixture.exports = exports;
}

#[test]
fn a_request_that_has_arrived_in_part_is_answered_by_the_other_server() {
    let disk = Ram::new(1 << 20);
    for style in STYLES {
        let mut fixture = Fixture::new(disk.clone());
        let mut client = fixture.client(style);
        let data = [style as u8 + 1; 8192];
        let mut bytes = client.request(command::WRITE, 0, 7, 4096, data.len() as u64);
        let head = bytes.len();
        bytes.extend_from_slice(&data);
        for cut in [1, head - 1, head, head + 1, head + 4096, bytes.len() - 1] {
            client.stream.write_all(&bytes[..cut]).unwrap();
            // The first byte may arrive after the pause too, and then waits in the socket.
            hand_over(&mut fixture, disk.clone());
            client.stream.write_all(&bytes[cut..]).unwrap();
            let reply = client.reply(0);
            assert_eq!((reply.error, reply.cookie), (0, 7), "{style:?}, cut at {cut}");
            assert_eq!(client.read(4096, 8192).data, data);
        }
        let infos = fixture.server().connections();
        assert_eq!((infos.len(), infos[0].requests, infos[0].written_bytes), (1, 12, 6 * 8192));
        assert_eq!(infos[0].export.as_deref(), Some("disk"));
    }
}

#[test]
fn the_rest_of_a_refused_payload_is_discarded_by_the_other_server() {
    let disk = Ram::new(1 << 20);
    let mut fixture = Fixture::new(disk.clone());
    let mut client = fixture.client(Style::Structured);
    let len = 4 << 20;
    let head = client.request(command::WRITE, 0, 9, 1 << 30, len);
    client.stream.write_all(&head).unwrap();
    client.stream.write_all(&vec![1; 5000]).unwrap();
    hand_over(&mut fixture, disk.clone());
    client.stream.write_all(&vec![1; len as usize - 5000]).unwrap();
    let reply = client.reply(0);
    assert_eq!((reply.error, reply.cookie), (NbdError::NoSpc as u32, 9));
    assert_eq!(client.read(0, 512).data, [0; 512]);
}

#[test]
fn what_is_in_flight_is_answered_first() {
    let disk = Ram::new(1 << 20);
    let mut fixture = Fixture::new(disk.clone());
    let mut client = fixture.client(Style::Simple);
    disk.set(|inner| inner.held = true);
    client.send(command::READ, 0, 1, 0, 512);
    disk.wait_pushed(1);
    let server = fixture.server.take().unwrap();
    std::thread::scope(|scope| {
        let pause = scope.spawn(|| server.pause(LONG, false));
        disk.set(|inner| inner.held = false);
        assert_eq!(client.reply(512).data, [0; 512]);
        let paused = pause.join().unwrap().unwrap();
        assert_eq!(paused.connections().len(), 1);
        assert!(paused.connections()[0].state.unread.is_empty());
        server.resume(paused).unwrap();
    });
    assert_eq!(client.read(0, 512).data, [0; 512]);
    fixture.server = Some(server);
}

#[test]
fn a_server_that_cannot_be_paused_serves_as_before() {
    let disk = Ram::new(1 << 20);
    let fixture = Fixture::new(disk.clone());
    let (mut idle, mut busy) = (fixture.client(Style::Simple), fixture.client(Style::Simple));
    disk.set(|inner| inner.held = true);
    busy.send(command::READ, 0, 1, 0, 512);
    disk.wait_pushed(1);
    let error = fixture.server().pause(Duration::from_millis(20), false).unwrap_err();
    assert!(matches!(error, PauseError::Busy { .. }), "{error}");
    disk.set(|inner| inner.held = false);
    assert_eq!(busy.reply(512).data, [0; 512]);
    for client in [&mut idle, &mut busy, &mut fixture.client(Style::Extended)] {
        assert_eq!(client.read(0, 512).data, [0; 512]);
    }
}

#[test]
fn a_client_that_connects_meanwhile_is_served_by_the_other_server() {
    let disk = Ram::new(1 << 20);
    let mut fixture = Fixture::new(disk.clone());
    let old = fixture.server.take().unwrap();
    let paused = old.pause(LONG, false).unwrap();
    let waiting = fixture.connect();
    let bound = bound(&paused, &fixture.exports, &fixture.directory);
    fixture.server = Some(bound.start().unwrap());
    paused.leave();
    drop(old);
    let mut client = common::Client::greet(waiting);
    client.negotiate("disk", Style::Structured, true);
    assert_eq!(client.read(0, 512).data, [0; 512]);
    assert!(fixture.directory.socket().exists());
    drop(fixture.server.take());
    assert!(!fixture.directory.socket().exists(), "the file is the other server's");
}

#[test]
fn a_connection_to_another_device_is_not_continued_and_stays_with_the_first_server() {
    let disk = Ram::new(1 << 20);
    let mut fixture = Fixture::new(disk.clone());
    let mut client = fixture.client(Style::Structured);
    let server = fixture.server.take().unwrap();
    let paused = server.pause(LONG, false).unwrap();
    let adopt = |name: &str, disk: Arc<Ram>| {
        let exports = Exports::new();
        exports.add(name, disk as Arc<dyn Disk>, ExportOptions::default()).unwrap();
        let bound = bound(&paused, &exports, &fixture.directory);
        bound.adopt(connections(&paused)).map(drop).unwrap_err().to_string()
    };
    let error = adopt("other", Ram::new(1 << 20));
    assert!(error.ends_with("there is no export `disk`"), "{error}");
    let error = adopt("disk", Ram::new(2 << 20));
    assert!(error.ends_with("the size of export `disk` is 2097152, and was 1048576"), "{error}");
    assert!(fixture.directory.socket().exists(), "a server that was not started owns no file");
    server.resume(paused).unwrap();
    assert_eq!(client.write(0, 0, &[3; 512]).error, 0);
    assert_eq!(client.read(0, 512).data, [3; 512]);
    fixture.server = Some(server);
}
