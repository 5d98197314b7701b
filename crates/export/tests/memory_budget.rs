//! The memory budget that all connections of a process share.
#![allow(clippy::unwrap_used)] // A test may.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blockyard_export::nbd::wire::{Style, command};
use blockyard_export::nbd::{ExportOptions, MemoryBudget, ServerOptions};
use common::ram::Ram;
use common::{Client, Rig};

const MIB: u64 = 1 << 20;

/// The longest request: the smallest budget has room for one of them at a time.
const LONGEST: u64 = 32 * MIB;

/// The number of connections for which the smallest budget has shares.
const SHARES: usize = 12;

/// A server with the smallest budget, and the budget. A client that stalls is cut off as soon as
/// another one waits for the memory that it holds.
fn rig(disk: Arc<Ram>) -> (Rig, Arc<MemoryBudget>) {
    let memory = MemoryBudget::with_stall_max(0, Duration::ZERO);
    let options = ServerOptions { memory: Arc::clone(&memory), ..ServerOptions::default() };
    (Rig::with(disk, ExportOptions::default(), options), memory)
}

/// Takes all remaining shares; one more client is refused.
fn fill(rig: &Rig, connected: usize) -> Vec<Client<UnixStream>> {
    let clients = (connected..SHARES).map(|_| rig.client(Style::Structured)).collect();
    let mut refused = Vec::new();
    rig.connect().read_to_end(&mut refused).unwrap();
    assert!(refused.is_empty(), "a client without a share is not greeted");
    clients
}

/// A client stalls with leased memory. It stays connected while there is enough memory for all.
/// Then another client waits for memory and gets it, and the stalled one is disconnected. Its share
/// goes to a client that was refused before.
fn cut_off(mut rig: Rig, memory: &MemoryBudget, mut stalled: Client<UnixStream>) {
    let mut others = fill(&rig, 1);
    for other in &mut others {
        assert_eq!(other.read(0, 128 << 10).error, 0);
    }
    assert_eq!(rig.server().connections().len(), SHARES, "no client waits for memory");
    assert_eq!(others[0].read(0, LONGEST).error, 0);
    let usage = memory.usage();
    assert!(usage.waits > 0, "{usage:?}");
    // The bytes that were sent before the cut, and then the end of the stream.
    let mut rest = Vec::new();
    let end = stalled.stream.read_to_end(&mut rest);
    assert!(end.is_ok() || end.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    assert!((rest.len() as u64) < LONGEST, "it was served to the end");
    assert_eq!(rig.client(Style::Structured).read(0, 4096).error, 0);
    rig.server.take().unwrap().shutdown();
    assert_eq!(memory.usage().used_bytes, 0);
}

#[test]
fn a_client_that_does_not_read_its_replies_is_cut_off_when_another_waits_for_memory() {
    let disk = Ram::new(64 * MIB);
    let (rig, memory) = rig(Arc::clone(&disk));
    let mut stalled = rig.client(Style::Simple);
    for cookie in 0..8 {
        stalled.send(command::READ, 0, cookie, 0, LONGEST);
    }
    // The memory is leased before the read is pushed.
    disk.wait_pushed(1);
    cut_off(rig, &memory, stalled);
}

#[test]
fn a_client_that_does_not_send_the_rest_is_cut_off_when_another_waits_for_memory() {
    let (rig, memory) = rig(Ram::new(64 * MIB));
    let mut stalled = rig.client(Style::Simple);
    let mut bytes = stalled.request(command::WRITE, 0, 1, 0, LONGEST);
    bytes.resize(16 << 20, 0xee);
    // Far more than a socket buffers: most of it is received when this returns.
    stalled.stream.write_all(&bytes).unwrap();
    cut_off(rig, &memory, stalled);
}
