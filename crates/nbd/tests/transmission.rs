//! Transmission, command by command and error by error, in all three styles.

mod common;

use std::io::Write;
use std::sync::Arc;

use blockyard_core::{Limits, Sector, Status};
use blockyard_nbd::wire::{Style, command, command_flag, export_flag};
use blockyard_nbd::{ExportOptions, ServerOptions};
use common::Fixture;
use common::ram::Ram;

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];
const MIB: u64 = 1 << 20;

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8 ^ seed)).collect()
}

#[test]
fn written_data_is_read_back() {
    for style in STYLES {
        let fixture = Fixture::new(Ram::new(64 * MIB));
        let mut client = fixture.client(style);
        for (seed, len) in [512, 4096, 65536, 300 << 10, 8 << 20, 32 << 20].into_iter().enumerate()
        {
            let data = pattern(len, seed as u8);
            assert_eq!(client.write(0, 1536, &data).error, 0);
            let reply = client.read(1536, len as u64);
            assert_eq!(reply.error, 0);
            assert!(reply.data == data, "{style:?} {len}");
        }
        assert_eq!(client.read(0, 0).error, 0);
        assert_eq!(client.write(0, 0, &[]).error, 0);
        let info = &fixture.server().connections()[0];
        assert_eq!(info.export.as_deref(), Some("disk"));
        assert_eq!(info.extended_headers, style == Style::Extended);
        assert_eq!(info.structured_replies, style != Style::Simple);
        assert_eq!(info.errors, 0);
        assert!(info.read_bytes > 32 * MIB && info.written_bytes > 32 * MIB);
    }
}

#[test]
fn every_refusal_leaves_the_connection_usable() {
    use command::*;
    for style in STYLES {
        let fixture = Fixture::new(Ram::new(MIB));
        let mut client = fixture.client(style);
        let df = if style == Style::Simple { EINVAL } else { EOVERFLOW };
        for (command, flags, offset, len, error) in [
            (READ, 0, MIB, 512, EINVAL),
            (READ, 0, u64::MAX - 511, 512, EINVAL),
            (READ, 0, 1, 512, EINVAL),
            (READ, 0, 0, 33 * MIB, EINVAL),
            (READ, command_flag::DF, 0, 33 * MIB, df),
            (READ, 1 << 15, 0, 512, EINVAL),
            (FLUSH, 0, 0, 512, EINVAL),
            (TRIM, 0, MIB, 512, EINVAL),
            (TRIM, 0, 100, 512, EINVAL),
            (CACHE, 0, MIB, 512, EINVAL),
            (CACHE, command_flag::DF, 0, 512, EINVAL),
            (WRITE_ZEROES, 0, MIB, 512, ENOSPC),
            (WRITE_ZEROES, command_flag::DF, 0, 512, EINVAL),
            (WRITE_ZEROES, command_flag::FAST_ZERO | command_flag::NO_HOLE, 0, 4096, ENOTSUP),
            (8, 0, 0, 0, EINVAL),
            (0xffff, 0, 0, 512, EINVAL),
        ] {
            let reply = client.call(command, flags, offset, len);
            assert_eq!(reply.error, error, "{style:?} {command} {flags} {offset} {len}");
            assert_eq!(reply.text.is_empty(), style == Style::Simple);
        }
        assert_eq!(client.write(0, MIB - 512, &pattern(1024, 0)).error, ENOSPC);
        assert_eq!(client.write(0, 3, &pattern(1024, 0)).error, EINVAL);
        assert_eq!(client.write(command_flag::DF, 0, &pattern(1024, 0)).error, EINVAL);
        // More than the server can buffer: discarded as it arrives.
        assert_eq!(client.write(0, 0, &pattern(40 << 20, 0)).error, EINVAL);
        assert_eq!(client.read(0, 512).data, [0; 512]);
        assert_eq!(fixture.server().connections()[0].errors, 20);
    }
}

#[test]
fn a_read_only_export_refuses_changes() {
    let export = ExportOptions { read_only: true, ..ExportOptions::default() };
    let fixture = Fixture::with(Ram::new(MIB), export, ServerOptions::default());
    for style in STYLES {
        let mut client = fixture.client(style);
        assert_ne!(client.flags & export_flag::READ_ONLY, 0);
        assert_eq!(client.write(0, 0, &pattern(100 << 10, 0)).error, EPERM);
        assert_eq!(client.call(command::TRIM, 0, 0, 4096).error, EPERM);
        assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 4096).error, EPERM);
        assert_eq!(client.call(command::FLUSH, 0, 0, 0).error, 0);
        assert_eq!(client.read(0, 512).data, [0; 512]);
    }
}

#[test]
fn unsupported_operations_are_not_advertised() {
    let limits =
        Limits { discard_sectors_max: 0, write_zeroes_sectors_max: 0, ..Limits::unlimited(8) };
    let fixture = Fixture::new(Ram::with(MIB, 4096, limits));
    let mut client = fixture.client(Style::Structured);
    let absent =
        export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES | export_flag::SEND_FAST_ZERO;
    assert_eq!(client.flags & absent, 0);
    assert_eq!(client.block_sizes, Some((4096, 4096, 32 << 20)));
    assert_eq!(client.call(command::TRIM, 0, 0, 4096).error, EINVAL);
    assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 4096).error, EINVAL);
    assert_eq!(client.read(512, 4096).error, EINVAL);
}

#[test]
fn block_status_reports_the_extents_of_the_disk() {
    for style in [Style::Structured, Style::Extended] {
        let fixture = Fixture::new(Ram::new(MIB));
        let mut client = fixture.client(style);
        let status = |client: &mut common::Client<_>, flags, offset, len| {
            let reply = client.call(command::BLOCK_STATUS, flags, offset, len);
            assert_eq!(reply.error, 0);
            reply.extents
        };
        assert_eq!(status(&mut client, 0, 0, MIB), [(MIB, 3)]);
        client.write(0, 8192, &pattern(8192, 1));
        client.write(0, 65536, &pattern(4096, 1));
        let wanted = [(8192, 3), (8192, 0), (49152, 3), (4096, 0), (MIB - 69632, 3)];
        assert_eq!(status(&mut client, 0, 0, MIB), wanted);
        assert_eq!(status(&mut client, 0, 12288, 8192), [(4096, 0), (4096, 3)]);
        assert_eq!(status(&mut client, command_flag::REQ_ONE, 8192, MIB - 8192), [(8192, 0)]);
        assert_eq!(client.call(command::TRIM, 0, 8192, 8192).error, 0);
        let reply = client.call(command::WRITE_ZEROES, command_flag::FAST_ZERO, 65536, 4096);
        assert_eq!(reply.error, 0);
        assert_eq!(status(&mut client, 0, 0, MIB), [(MIB, 3)]);
        assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, MIB + 512).error, EINVAL);
        assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 0).error, EINVAL);
    }
}

#[test]
fn block_status_reply_is_bounded() {
    let fixture = Fixture::new(Ram::new(32 * MIB));
    let mut client = fixture.client(Style::Structured);
    for block in 0..2048 {
        assert_eq!(client.write(0, block * 8192, &[1; 512]).error, 0);
    }
    let extents = client.call(command::BLOCK_STATUS, 0, 0, 32 * MIB).extents;
    assert_eq!(extents.len(), 1024);
    assert!(extents.iter().all(|(len, _)| *len == 4096));
}

#[test]
fn a_status_payload_selects_contexts() {
    let fixture = Fixture::new(Ram::new(MIB));
    let mut client = fixture.client(Style::Extended);
    assert_ne!(client.flags & export_flag::BLOCK_STATUS_PAYLOAD, 0);
    let flag = command_flag::PAYLOAD_LEN;
    for (effect, ids, error) in [
        (MIB, &[1u32][..], 0),
        (4096, &[1][..], 0),
        (2 * MIB, &[1][..], EINVAL),
        (4096, &[2][..], EINVAL),
        (4096, &[][..], EINVAL),
        (4096, &[1, 1][..], EINVAL),
        (4096, &[7; 300][..], EINVAL),
    ] {
        let mut payload: Vec<u8> = effect.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend_from_slice(&id.to_be_bytes()));
        let len = payload.len() as u64;
        let mut bytes = client.request(command::BLOCK_STATUS, flag, 5, 0, len);
        bytes.extend_from_slice(&payload);
        client.stream.write_all(&bytes).unwrap();
        let reply = client.reply(0);
        assert_eq!((reply.cookie, reply.error), (5, error), "{effect} {ids:?}");
        if error == 0 {
            assert_eq!(reply.extents, [(effect, 3)]);
        }
    }
    // A payload where none is allowed is discarded.
    let mut bytes = client.request(command::TRIM, flag, 6, 0, 4096);
    bytes.extend_from_slice(&[0; 4096]);
    client.stream.write_all(&bytes).unwrap();
    assert_eq!(client.reply(0).error, EINVAL);
    assert_eq!(client.read(0, 512).data, [0; 512]);
}

#[test]
fn extended_lengths_have_64_bits() {
    let fixture = Fixture::new(Ram::new(64 * MIB));
    let mut client = fixture.client(Style::Extended);
    client.write(0, 0, &pattern(4096, 3));
    assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 64 * MIB).error, 0);
    assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 64 * MIB).extents, [(64 * MIB, 3)]);
    assert_eq!(client.call(command::TRIM, 0, 0, 1 << 40).error, EINVAL);
    assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 1 << 62).error, ENOSPC);
    assert_eq!(client.read(0, 1 << 40).error, EINVAL);
}

#[test]
fn durable_writes_and_flushes_reach_the_disk() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    let mut client = fixture.client(Style::Structured);
    assert_eq!(client.call(command::FLUSH, 0, 0, 0).error, 0);
    assert_eq!(disk.inner().flushes, 1);
    // A trim has no FUA, so a flush follows it.
    assert_eq!(client.call(command::TRIM, command_flag::FUA, 0, 4096).error, 0);
    assert_eq!(disk.inner().flushes, 2);
    assert_eq!(client.call(command::WRITE_ZEROES, command_flag::FUA, 0, 4096).error, 0);
    assert_eq!(disk.inner().flushes, 3);
    assert_eq!(client.write(command_flag::FUA, 0, &[7; 512]).error, 0);
    assert_eq!(client.call(command::READ, command_flag::FUA, 0, 512).data, [7; 512]);
}

#[test]
fn disk_errors_map_to_nbd_errors() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    for style in STYLES {
        let mut client = fixture.client(style);
        for (status, error) in [
            (Status::Medium, EIO),
            (Status::NoSpc, ENOSPC),
            (Status::Inval, EINVAL),
            (Status::ZoneActiveResource, EIO),
        ] {
            disk.set(|inner| inner.bad = Some((Sector(8), status)));
            let reply = client.read(0, 8192);
            assert_eq!(reply.error, error);
            if style != Style::Simple {
                assert_eq!(reply.text, status.name());
            }
            assert_eq!(client.write(0, 4096, &[1; 512]).error, error);
            assert_eq!(client.read(8192, 512).error, 0);
        }
        disk.set(|inner| inner.bad = None);
    }
}

#[test]
fn all_of_many_requests_in_flight_are_answered() {
    for style in STYLES {
        let fixture = Fixture::new(Ram::new(4 * MIB));
        let mut client = fixture.client(style);
        // All requests are sent before any reply is read: reads and writes of 1024 blocks.
        let mut bytes = Vec::new();
        for block in 0..1024u64 {
            bytes.extend(client.request(command::WRITE, 0, block, block * 4096, 512));
            bytes.extend(pattern(512, block as u8));
        }
        let mut writer = client.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&bytes).unwrap());
        let mut seen = vec![false; 1024];
        for _ in 0..1024 {
            let reply = client.reply(0);
            assert_eq!(reply.error, 0);
            assert!(!std::mem::replace(&mut seen[reply.cookie as usize], true));
        }
        sender.join().unwrap();
        let mut bytes = Vec::new();
        for block in 0..1024u64 {
            bytes.extend(client.request(command::READ, 0, block, block * 4096, 4096));
        }
        let mut writer = client.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&bytes).unwrap());
        for _ in 0..1024 {
            let reply = client.reply(4096);
            assert_eq!(reply.error, 0);
            assert!(reply.data[..512] == pattern(512, reply.cookie as u8));
        }
        sender.join().unwrap();
    }
}

#[test]
fn write_of_one_connection_is_read_by_another() {
    let fixture = Fixture::new(Ram::new(MIB));
    let mut one = fixture.client(Style::Structured);
    let mut two = fixture.client(Style::Simple);
    assert_ne!(one.flags & export_flag::CAN_MULTI_CONN, 0);
    assert_eq!(one.write(0, 4096, &pattern(4096, 9)).error, 0);
    assert!(two.read(4096, 4096).data == pattern(4096, 9));
    assert_eq!(fixture.server().connections().len(), 2);
}

#[test]
fn the_flush_after_a_trim_starts_at_once() {
    let disk = Ram::new(MIB);
    let fixture = Fixture::new(Arc::clone(&disk) as _);
    let mut client = fixture.client(Style::Structured);
    for command in [command::TRIM, command::WRITE_ZEROES] {
        assert_eq!(client.call(command, command_flag::FUA, 0, 4096).error, 0);
    }
    let inner = disk.inner();
    assert_eq!((inner.pushed, inner.flushes), (4, 2));
    // A connection with a flush to submit has no reason to sleep.
    assert_eq!(inner.idle_asks, 0);
}
