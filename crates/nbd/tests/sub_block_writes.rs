//! Requests for parts of blocks, from clients that did not ask for block sizes.
//!
//! The bug: Debian 12's nbd-client does not ask, and its kernel assumes 512 bytes. On an export
//! with blocks of 4 KiB mkfs worked, and every mount failed: each request of 512 bytes was answered
//! with `EINVAL`.
#![allow(clippy::unwrap_used)] // A test may.

mod common;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use blockyard_core::{Limits, Sector, Status};
use blockyard_nbd::wire::{self, Style, command, command_flag, option, option_reply};
use common::ram::Ram;
use common::{Client, Fixture};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

fn disk(len_bytes: u64) -> Arc<Ram> {
    Ram::with(len_bytes, BLOCK as u32, Limits::unlimited(64))
}

/// A client that enters without a request for block sizes.
fn unasked(fixture: &Fixture) -> Client<UnixStream> {
    let mut client = Client::greet(fixture.connect());
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]).0, option_reply::ACK);
    client.style = Style::Structured;
    let query = Client::<UnixStream>::context_data("disk", &["base:allocation"]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &query).0, option_reply::ACK);
    let mut data = wire::server_data("disk", "");
    data.extend_from_slice(&[0, 0]);
    assert_eq!(client.option(option::GO, &data).0, option_reply::ACK);
    client
}

/// An endless sequence of numbers, equal for equal seeds.
fn numbers(mut state: u64) -> impl FnMut(u64) -> u64 {
    move |below| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

#[test]
fn unaligned_reads_and_writes_match_a_model() {
    const LEN: u64 = 64 << 10;
    let fixture = Fixture::new(disk(LEN));
    let mut client = unasked(&fixture);
    let mut model = vec![0_u8; LEN as usize];
    let mut number = numbers(7);
    for round in 0..2000 {
        let unit = [1, 512, 1024, BLOCK][number(4) as usize];
        let offset = number(LEN / unit) * unit;
        let len = (1 + number(5 * BLOCK / unit)) * unit;
        let len = len.min(LEN - offset);
        let range = offset as usize..(offset + len) as usize;
        let context = format!("round {round}: {len} bytes at {offset}");
        match number(5) {
            0 | 1 => {
                let data: Vec<u8> = (0..len).map(|at| (at * 7 + round) as u8 | 1).collect();
                let flags = if number(2) == 0 { command_flag::FUA } else { 0 };
                assert_eq!(client.write(flags, offset, &data).error, 0, "{context}");
                model[range].copy_from_slice(&data);
            }
            2 => {
                let reply = client.call(command::WRITE_ZEROES, command_flag::FUA, offset, len);
                assert_eq!(reply.error, 0, "{context}");
                model[range].fill(0);
            }
            3 => {
                // Only whole blocks are discarded: a trim is advice.
                assert_eq!(client.call(command::TRIM, 0, offset, len).error, 0, "{context}");
                let (first, last) = (offset.next_multiple_of(BLOCK), (offset + len) & !(BLOCK - 1));
                if first < last {
                    model[first as usize..last as usize].fill(0);
                }
            }
            _ => {
                let reply = client.call(command::BLOCK_STATUS, 0, offset, len);
                let told: u64 = reply.extents.iter().map(|(len, _)| len).sum();
                assert!((1..=len).contains(&told), "{context}: {reply:?}");
                let mut at = offset as usize;
                for (len, state) in reply.extents {
                    let zero = model[at..at + len as usize].iter().all(|byte| *byte == 0);
                    assert!(state & 2 == 0 || zero, "{context}");
                    at += len as usize;
                }
            }
        }
        let reply =
            client.read(offset.saturating_sub(3), (len + 3).min(LEN - offset.saturating_sub(3)));
        let from = offset.saturating_sub(3) as usize;
        assert!(reply.data == model[from..from + reply.data.len()], "{context}");
        assert!(!reply.data.is_empty());
    }
    assert!(client.read(0, LEN).data == model);
}

#[test]
fn a_client_that_agreed_to_block_sizes_is_held_to_them() {
    let fixture = Fixture::new(disk(MIB));
    let mut client = fixture.client(Style::Structured);
    assert_eq!(client.block_sizes, Some((4096, 4096, 32 << 20)));
    assert_eq!(client.read(512, 512).error, 22);
    assert_eq!(client.write(0, 512, &[1; 512]).error, 22);
}

#[test]
fn a_block_that_cannot_be_read_fails_the_write_and_nothing_else() {
    let ram = disk(MIB);
    let fixture = Fixture::new(Arc::clone(&ram) as _);
    let mut client = unasked(&fixture);
    assert_eq!(client.write(0, 0, &[1; 4096]).error, 0);
    ram.set(|inner| inner.bad = Some((Sector(3), Status::Medium)));
    assert_eq!(client.write(0, 512, &[2; 512]).error, 5);
    assert_eq!(client.write(0, 4096 + 512, &[2; 512]).error, 0);
    ram.set(|inner| inner.bad = None);
    assert_eq!(client.write(0, 512, &[3; 512]).error, 0);
    assert_eq!(client.read(511, 2).data, [1, 3]);
}

/// Eight clients repeatedly write a sector each of a few common blocks, and a ninth writes whole
/// blocks next to them. Each client owns its bytes. A read-modify-write that overwrites another
/// client's new data with old data is therefore noticed by that client.
#[test]
fn no_client_loses_a_write_to_another_client_of_the_same_block() {
    const BLOCKS: u64 = 4;
    const ROUNDS: u64 = 400;
    let fixture = Fixture::new(disk(MIB));
    thread::scope(|scope| {
        for sector in 1..8_u64 {
            let mut client = unasked(&fixture);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let offset = (round % BLOCKS) * BLOCK + sector * 512;
                    let data = [(round * 8 + sector) as u8; 512];
                    assert_eq!(client.write(0, offset, &data).error, 0);
                    let reply = client.read(offset, 512);
                    assert!(reply.data == data, "round {round} of sector {sector} was lost");
                }
            });
        }
        let mut client = unasked(&fixture);
        scope.spawn(move || {
            // Whole blocks: first all of them, later those that no other client writes in part.
            for round in 0..ROUNDS {
                let offset = (BLOCKS + round % 2) * BLOCK;
                let data = [round as u8; BLOCK as usize];
                assert_eq!(client.write(0, offset, &data).error, 0);
                assert!(client.read(offset, BLOCK).data == data, "round {round}");
            }
        });
    });
}

#[test]
fn a_write_of_whole_blocks_is_not_undone_by_a_read_modify_write() {
    let fixture = Fixture::new(disk(MIB));
    thread::scope(|scope| {
        // This client writes the first sector only, while another writes whole blocks. The other
        // sectors of these blocks must keep their data.
        let mut parts = unasked(&fixture);
        let writer = scope.spawn(move || {
            for round in 0..3000_u64 {
                assert_eq!(parts.write(0, 0, &[round as u8; 512]).error, 0);
            }
        });
        let mut whole = fixture.client(Style::Structured);
        let mut round = 0_u64;
        while !writer.is_finished() {
            round += 1;
            let data = [round as u8; BLOCK as usize];
            assert_eq!(whole.write(0, 0, &data).error, 0);
            let reply = whole.read(0, BLOCK);
            assert!(reply.data[512..] == data[512..], "round {round} was undone");
        }
    });
}

/// A client that does not read its replies has written a part of a block. Before its connection
/// sleeps in the send it must complete the write; otherwise no other client could write to that
/// block.
#[test]
fn a_client_that_does_not_read_its_replies_holds_no_block() {
    let ram = disk(64 * MIB);
    let fixture = Fixture::new(Arc::clone(&ram) as _);
    let mut stalled = unasked(&fixture);
    // No bio completes until all requests have arrived: reads with more data than any socket
    // buffers, and a write of part of a block in the same batch.
    let before = ram.inner().pushed;
    ram.set(|inner| inner.held = true);
    let mut bytes = Vec::new();
    for at in 0..8 {
        bytes.extend(stalled.request(command::READ, 0, at, at * MIB, MIB));
    }
    bytes.extend(stalled.request(command::WRITE, 0, 99, 512, 512));
    bytes.extend([7; 512]);
    stalled.stream.write_all(&bytes).unwrap();
    ram.wait_pushed(before + 9);
    ram.set(|inner| inner.held = false);
    let mut other = unasked(&fixture);
    assert_eq!(other.write(0, 1024, &[8; 512]).error, 0);
    let mut whole = fixture.client(Style::Structured);
    assert_eq!(whole.write(0, 0, &[9; 4096]).error, 0);
    assert_eq!(other.write(0, 512, &[6; 512]).error, 0);
    assert_eq!(other.read(1023, 2).data, [6, 9]);
}
