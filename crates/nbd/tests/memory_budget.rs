//! The memory budget that all connections of a process share.
#![allow(clippy::unwrap_used)] // A test may.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blockyard_nbd::wire::{Style, command};
use blockyard_nbd::{ExportOptions, MemoryBudget, ServerOptions};
use common::ram::Ram;
use common::{Client, Fixture};

const MIB: u64 = 1 << 20;

/// The longest request: the smallest budget has room for one of them at a time.
const LONGEST: u64 = 32 * MIB;

/// The number of connections for which the smallest budget has shares.
const SHARES: usize = 12;

/// A server with the smallest budget, and the budget. A client that stalls is cut off as soon as
/// another one waits for the memory that it holds.
fn fixture(disk: Arc<Ram>) -> (Fixture, Arc<MemoryBudget>) {
    let memory = MemoryBudget::with_stall_max(0, Duration::ZERO);
    let options = ServerOptions { memory: Arc::clone(&memory), ..ServerOptions::default() };
    (Fixture::with(disk, ExportOptions::default(), options), memory)
}

/// Takes all remaining shares; one more client is refused.
fn fill(fixture: &Fixture, connected: usize) -> Vec<Client<UnixStream>> {
    let clients = (connected..SHARES).map(|_| fixture.client(Style::Structured)).collect();
    let mut refused = Vec::new();
    fixture.connect().read_to_end(&mut refused).unwrap();
    assert!(refused.is_empty(), "a client without a share is not greeted");
    clients
}

/// A client stalls with leased memory. It stays connected while there is enough memory for all.
/// Then another client waits for memory and gets it, and the stalled one is disconnected. Its share
/// goes to a client that was refused before.
fn cut_off(mut fixture: Fixture, memory: &MemoryBudget, mut stalled: Client<UnixStream>) {
    let mut others = fill(&fixture, 1);
    for other in &mut others {
        assert_eq!(other.read(0, 128 << 10).error, 0);
    }
    assert_eq!(fixture.server().connections().len(), SHARES, "no client waits for memory");
    assert_eq!(others[0].read(0, LONGEST).error, 0);
    let usage = memory.usage();
    assert!(usage.waits > 0, "{usage:?}");
    // The bytes that were sent before the cut, and then the end of the stream.
    let mut rest = Vec::new();
    let end = stalled.stream.read_to_end(&mut rest);
    assert!(end.is_ok() || end.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    assert!((rest.len() as u64) < LONGEST, "it was served to the end");
    assert_eq!(fixture.client(Style::Structured).read(0, 4096).error, 0);
    fixture.server.take().unwrap().shutdown();
    assert_eq!(memory.usage().used_bytes, 0);
}

#[test]
fn a_client_that_does_not_read_its_replies_is_cut_off_when_another_waits_for_memory() {
    let disk = Ram::new(64 * MIB);
    let (fixture, memory) = fixture(Arc::clone(&disk));
    let mut stalled = fixture.client(Style::Simple);
    for cookie in 0..8 {
        stalled.send(command::READ, 0, cookie, 0, LONGEST);
    }
    // The memory is leased before the read is pushed.
    disk.wait_pushed(1);
    cut_off(fixture, &memory, stalled);
}

#[test]
fn a_client_that_does_not_send_the_rest_is_cut_off_when_another_waits_for_memory() {
    let (fixture, memory) = fixture(Ram::new(64 * MIB));
    let mut stalled = fixture.client(Style::Simple);
    let mut bytes = stalled.request(command::WRITE, 0, 1, 0, LONGEST);
    bytes.resize(16 << 20, 0xee);
    // Far more than a socket buffers: most of it is received when this returns.
    stalled.stream.write_all(&bytes).unwrap();
    cut_off(fixture, &memory, stalled);
}

/// The number of clients that [`stall`].
const STALLED: usize = 200;

/// Clients that each request the longest reads and receive no reply. Returns when all wait for
/// memory except those that lease it.
fn stall(fixture: &Fixture, memory: &MemoryBudget) -> Vec<Client<UnixStream>> {
    let mut stalled: Vec<_> = (0..STALLED).map(|_| fixture.client(Style::Simple)).collect();
    for client in &mut stalled {
        for cookie in 0..4 {
            client.send(command::READ, 0, cookie, 0, LONGEST);
        }
    }
    while memory.usage().waits < STALLED as u64 * 9 / 10 {
        std::thread::yield_now();
    }
    stalled
}

/// The bug: 200 clients asked for 32 MiB each and read no reply. The reads of another client waited
/// for theirs, in the order of arrival, and failed with `ENOMEM` after 30 s; new clients got no
/// share and were disconnected.
#[test]
fn clients_that_stall_delay_no_read_within_the_fair_share() {
    let memory = MemoryBudget::with_stall_max(256 * MIB, Duration::from_secs(3600));
    let options = ServerOptions {
        memory: Arc::clone(&memory),
        drain_timeout: Duration::ZERO,
        ..ServerOptions::default()
    };
    let fixture = Fixture::with(Ram::new(64 * MIB), ExportOptions::default(), options);
    let mut established = fixture.client(Style::Simple);
    let _stalled = stall(&fixture, &memory);
    let mut new = fixture.client(Style::Simple);
    for part in 0..64 {
        assert_eq!(established.read(part * MIB, MIB).error, 0);
        assert_eq!(new.read(part * MIB, MIB).error, 0);
    }
    // The reserve was enough: no client was cut off.
    assert_eq!(fixture.server().connections().len(), STALLED + 2);
}

/// The bug: a client that stalled kept its memory for 10 s from another one that had not even its
/// fair share. The stall time here is an hour, so only the fair share can end it.
#[test]
fn a_client_that_stalls_is_cut_off_when_another_lacks_its_fair_share() {
    let memory = MemoryBudget::with_stall_max(0, Duration::from_secs(3600));
    let options = ServerOptions { memory: Arc::clone(&memory), ..ServerOptions::default() };
    let disk = Ram::new(64 * MIB);
    let fixture = Fixture::with(Arc::clone(&disk) as _, ExportOptions::default(), options);
    let mut stalled = fixture.client(Style::Simple);
    stalled.send(command::READ, 0, 1, 0, LONGEST);
    disk.wait_pushed(1);
    let mut others = fill(&fixture, 1);
    assert_eq!(others[0].read(0, 3 * MIB).error, 0);
    let mut rest = Vec::new();
    let end = stalled.stream.read_to_end(&mut rest);
    assert!(end.is_ok() || end.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    assert!((rest.len() as u64) < LONGEST, "it was served to the end");
}

/// The bug: with 200 stalled clients a read of 4 MiB, above the fair share, waited until all their
/// reads of 32 MiB were served, and failed with `ENOMEM` after 30 s.
#[test]
fn a_read_beyond_the_fair_share_comes_before_larger_ones_of_clients_that_stall() {
    let memory = MemoryBudget::with_stall_max(256 * MIB, Duration::from_secs(1));
    let options = ServerOptions {
        memory: Arc::clone(&memory),
        drain_timeout: Duration::ZERO,
        ..ServerOptions::default()
    };
    let fixture = Fixture::with(Ram::new(64 * MIB), ExportOptions::default(), options);
    let mut client = fixture.client(Style::Simple);
    let _stalled = stall(&fixture, &memory);
    for _ in 0..4 {
        assert_eq!(client.read(0, 4 * MIB).error, 0);
    }
}
