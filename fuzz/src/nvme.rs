//! NVMe hosts: PDUs and commands derived from the input, mostly well-formed, so that random inputs
//! get far; and the rules that every plan and answer must satisfy.

use std::net::SocketAddr;

use blockyard_core::{Geometry, Limits, Op, Status, ZoneGeometry};
use blockyard_nvme::auth_message::{self, HostMessage, SEND_BYTES_MAX};
use blockyard_nvme::command::{Cqe, SQE_BYTES, Sqe, StatusCode, io_opcode};
use blockyard_nvme::events::{EVENTS_MAX, EventQueue, NoticeKind};
use blockyard_nvme::fabrics::{CONNECT_BYTES, ConnectRequest, NQN_LEN_MAX, PropertyRequest};
use blockyard_nvme::identify::{ControllerFeatures, QUEUE_ENTRIES_MAX};
use blockyard_nvme::log_page::{self, LogRequest};
use blockyard_nvme::namespace::{
    BioPlan, DATA_BYTES_MAX, DiscardRange, IoPlan, NamespaceShape, RANGE_BYTES, Transfer,
    check_pointer,
};
use blockyard_nvme::secret::HostSecrets;
use blockyard_nvme::wire::{
    self, C2hData, COMMON_HEADER_BYTES, DIGEST_BYTES, Digests, FatalStatus, H2C_DATA_BYTES_MAX,
    H2cData, IN_CAPSULE_BYTES_MAX, IcReq, PduFault, PduHeader, WHOLE_PDU_BYTES_MAX, pdu_type,
};

use crate::input::Input;

/// Interprets the bytes as a host.
///
/// # Panics
/// If a length is accepted that was not agreed, a plan leaves the namespace or its zone, or an
/// answer is malformed.
pub fn nvme_wire(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let shapes = [shape(None), shape(Some(512)), shape(Some(200))];
    while !input.is_empty() {
        match input.below(9) {
            0 | 1 => pdu(&mut input),
            2 => connect(&mut input),
            3 => log(&mut input, &shapes[0]),
            4 => auth(&mut input),
            5 => secrets(&mut input),
            6 => events(&mut input),
            _ => {
                let which = input.below(3) as usize;
                command(&mut input, &shapes[which]);
            }
        }
    }
}

/// A plain namespace, or a zoned one with this capacity of its zones of 512 blocks.
fn shape(capacity_blocks: Option<u64>) -> NamespaceShape {
    let zones = capacity_blocks.map(|capacity| ZoneGeometry {
        zone_sectors: 4096,
        zone_capacity_sectors: capacity * 8,
        zone_count: 16,
        conventional_count: 0,
        open_max: 2,
        active_max: 0,
    });
    let geometry = Geometry {
        sectors: 16 * 4096,
        logical_block_bytes: 4096,
        physical_block_bytes: 4096,
        zones,
    };
    let limits = Limits { zone_append_sectors_max: 1000, ..Limits::unlimited(16) };
    NamespaceShape::of(&geometry, &limits).expect("NVMe can describe it")
}

/// Bytes of a command, of which some fields are likely.
fn sqe(input: &mut Input<'_>) -> Sqe {
    let mut bytes = [0; SQE_BYTES];
    let taken = input.take(SQE_BYTES);
    bytes[..taken.len()].copy_from_slice(taken);
    if input.below(8) > 0 {
        bytes[0] = input.choose(&[
            io_opcode::FLUSH,
            io_opcode::READ,
            io_opcode::COMPARE,
            io_opcode::VERIFY,
            io_opcode::WRITE,
            io_opcode::WRITE_ZEROES,
            io_opcode::DATASET_MANAGEMENT,
            io_opcode::ZONE_SEND,
            io_opcode::ZONE_RECEIVE,
            io_opcode::ZONE_APPEND,
        ]);
        bytes[1] = 0x40;
        bytes[4..8].copy_from_slice(&input.choose(&[1u32, 1, 1, u32::MAX]).to_le_bytes());
        let first = input.choose(&[0, 1, 199, 200, 511, 512, 8191, 8192, u64::MAX]);
        bytes[40..48].copy_from_slice(&first.to_le_bytes());
        let count = input.choose(&[0u32, 1, 15, 255, 256, 511, 0xffff]);
        bytes[48..52].copy_from_slice(&count.to_le_bytes());
        // Action and Select All of Zone Management Send; filter and Partial Report of Receive.
        let (low, high) = (input.below(8) as u32, input.below(4) as u32);
        let detail = match bytes[0] {
            io_opcode::ZONE_SEND => low | high << 8,
            _ => low << 8 | high << 16,
        };
        bytes[52..56].copy_from_slice(&detail.to_le_bytes());
        bytes[39] = input.choose(&[0x01, 0x5a, 0x5a, 0x20]);
    }
    Sqe::parse(&bytes).expect("it has the length of a command")
}

fn command(input: &mut Input<'_>, shape: &NamespaceShape) {
    let sqe = sqe(input);
    let plan = match shape.plan(&sqe) {
        Ok(plan) => plan,
        Err(status) => {
            assert!(!status.is_ok(), "a refusal is no success");
            return;
        }
    };
    match plan {
        IoPlan::Bio(bio) => check_bio(&bio, shape),
        IoPlan::Compare(bio) | IoPlan::Verify(bio) => {
            check_bio(&bio, shape);
            assert!(bio.op == Op::Read && (1..=DATA_BYTES_MAX).contains(&plan.scratch_bytes()));
        }
        IoPlan::Report(request) => {
            assert!(request.first < shape.blocks && request.len_bytes <= DATA_BYTES_MAX);
        }
        IoPlan::Discards { count, len } => {
            assert!((1..=256).contains(&count) && (16 * count..=4096).contains(&len));
        }
        IoPlan::Hints { len } => assert!((16..=4096).contains(&len)),
        IoPlan::ManageAll(action) => assert!(action.all),
        IoPlan::Offline { sector } => assert!(shape.block(sector) < shape.blocks),
    }
    let transfer = plan.transfer();
    let (Transfer::FromHost(len) | Transfer::ToHost(len)) = transfer else { return };
    assert!(len > 0 && len <= DATA_BYTES_MAX, "{plan:?} moves {len} bytes");
    let in_capsule = input.choose(&[0, 512, len as usize]);
    if check_pointer(&sqe, transfer, in_capsule).is_ok() {
        let is_write = transfer == Transfer::FromHost(len);
        assert!(in_capsule == 0 || (in_capsule == len as usize && is_write));
    }
    if let IoPlan::Discards { .. } = plan {
        let mut range = [0; RANGE_BYTES as usize];
        let taken = input.take(range.len());
        range[..taken.len()].copy_from_slice(taken);
        if let Ok(Some(bio)) = shape.plan_discard(&DiscardRange::parse(&range)) {
            check_bio(&bio, shape);
        }
    }
}

/// A planned operation lies in the namespace, and a write in the capacity of one zone.
fn check_bio(bio: &BioPlan, shape: &NamespaceShape) {
    let first = shape.block(bio.sector);
    let end = first + shape.block(blockyard_core::Sector(bio.sectors));
    assert!(end <= shape.blocks, "{bio:?}");
    assert!(!bio.op.has_range() || end > first);
    let Some(zones) = &shape.zones else { return };
    let start = first & !(zones.zone_blocks - 1);
    if matches!(bio.op, Op::Write | Op::WriteZeroes | Op::ZoneAppend) {
        assert!(end <= start + zones.zone_blocks);
        assert!(bio.op == Op::ZoneAppend || end <= start + zones.capacity_blocks);
    }
    if bio.op == Op::ZoneAppend || bio.op.is_zone_mgmt() {
        assert_eq!(start, first, "{bio:?} names a zone");
    }
}

fn pdu(input: &mut Input<'_>) {
    let digests = Digests { header: input.below(2) == 0, data: input.below(2) == 0 };
    let mut bytes = input.take(160).to_vec();
    if bytes.len() >= COMMON_HEADER_BYTES && input.below(4) > 0 {
        bytes[0] = input.choose(&[pdu_type::IC_REQ, pdu_type::CAPSULE_CMD, pdu_type::H2C_DATA]);
        bytes[1] = input.choose(&[0, 1, 2, 3, 7]);
        bytes[2] = input.choose(&[24, 72, 72, 128, 255]);
        bytes[3] = input.choose(&[0, 24, 28, 72, 76, 80, 255]);
        let len = input.choose(&[24u32, 72, 76, 128, 4168, 8264, 8272, 131_096, 131_104, u32::MAX]);
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
    }
    let Some(header) = PduHeader::parse(&bytes) else { return };
    match header.check(digests) {
        Ok(layout) => {
            assert!(layout.data_at + layout.data_len <= layout.len);
            assert!(layout.header_bytes <= layout.data_at);
            let most = match header.kind {
                pdu_type::H2C_DATA => H2C_DATA_BYTES_MAX,
                _ => {
                    assert!(layout.len <= WHOLE_PDU_BYTES_MAX, "{layout:?}");
                    IN_CAPSULE_BYTES_MAX
                }
            };
            assert!(layout.data_len <= most as usize, "{layout:?}");
            bytes.resize(bytes.len().max(256), 0);
            if header.kind == pdu_type::IC_REQ
                && let Ok(request) = IcReq::parse(&bytes)
            {
                assert!(request.data_align.is_multiple_of(4) && request.data_align <= 128);
                check_answers(input, request.digests, request.data_align);
            }
            if header.kind == pdu_type::H2C_DATA
                && let Ok(data) = H2cData::parse(&bytes, &layout)
            {
                assert!(data.len as usize == layout.data_len && data.len > 0);
            }
            let _ = wire::check_header_digest(&bytes, layout.header_bytes);
        }
        Err(fault) => check_term(&fault, &bytes),
    }
}

/// A TermReq is at most 152 bytes, and repeats the beginning of the PDU.
fn check_term(fault: &PduFault, rejected: &[u8]) {
    let mut out = Vec::new();
    wire::print_term(&mut out, fault, rejected);
    assert!(out.len() <= 152 && rejected.starts_with(&out[24..]));
    assert_eq!(out[4..8], (out.len() as u32).to_le_bytes());
    assert!(fault.status != FatalStatus::HeaderDigest, "lengths have no digest");
}

/// PDUs of the target have the length that their header says.
fn check_answers(input: &mut Input<'_>, digests: Digests, align: usize) {
    let len = |out: &[u8]| u32::from_le_bytes([out[4], out[5], out[6], out[7]]) as usize;
    let status = StatusCode::of(input.choose(Status::ALL), Op::Write);
    let cqe = Cqe { result: input.word(), sq_head: 1, cid: 2, status };
    let mut out = Vec::new();
    wire::print_response(&mut out, &cqe, digests);
    assert_eq!(len(&out), out.len());
    let mut out = Vec::new();
    wire::print_r2t(&mut out, 1, 2, input.word() as u32, digests);
    assert_eq!(len(&out), out.len());
    let mut out = Vec::new();
    let data = C2hData { cid: 1, len: 1 + input.below(1 << 20) as u32, success: false };
    wire::print_data_header(&mut out, &data, digests, align);
    let tail = if digests.data { DIGEST_BYTES } else { 0 };
    assert_eq!(len(&out), out.len() + data.len as usize + tail);
    assert!(out.len().is_multiple_of(align) && usize::from(out[3]) == out.len());
}

fn connect(input: &mut Input<'_>) {
    let sqe = sqe(input);
    let mut data = vec![0; CONNECT_BYTES as usize - usize::from(input.below(16) == 1)];
    for at in [0, 256, 512] {
        let len = input.choose(&[0, 1, 20, 222, 223, 224, 256]);
        let text = input.take(len);
        data[at..at + text.len()].copy_from_slice(text);
    }
    if let Ok(request) = ConnectRequest::parse(&sqe, &data) {
        assert!((2..=QUEUE_ENTRIES_MAX).contains(&request.entries));
        for nqn in [&request.subsystem, &request.host.nqn] {
            assert!(!nqn.is_empty() && nqn.len() <= NQN_LEN_MAX);
        }
    }
    let _ = PropertyRequest::parse(&sqe);
}

/// A message of DH-HMAC-CHAP. What is read of it lies in it.
fn auth(input: &mut Input<'_>) {
    if let Ok(len) = auth_message::transfer_len(&sqe(input), SEND_BYTES_MAX) {
        assert!((1..=SEND_BYTES_MAX).contains(&len));
    }
    let mut message = input.take(16 + 2 * 64 + 256).to_vec();
    if message.len() >= 16 && input.below(8) > 0 {
        message[0] = input.choose(&[0, 0, 1, 1, 1]);
        message[1] = input.choose(&[0, 0, 1, 2, 2, 3, 4, 0xf0, 0xf1]);
        message[6] = input.choose(&[0, 32, 48, 64, 255]);
        message[7] = input.choose(&[0, 1, 2, 255]);
        message[8] = input.choose(&[0, 1, 2]);
        message[10] = input.choose(&[0, 1, 3, 30, 31, 255]);
        message[11] = input.choose(&[0, 1, 6, 30, 31, 255]);
        let len = input.choose(&[0, 8, 16, 72, 80, 112, 144, 136, 336, 400]);
        message.resize(len, input.below(256) as u8);
    }
    let _ = auth_message::transaction(&message);
    match HostMessage::parse(&message) {
        Ok(HostMessage::Negotiate(read)) => {
            if let Some((hashes, groups)) = read.lists {
                assert!(hashes.len() <= 30 && groups.len() <= 30);
            }
        }
        Ok(HostMessage::Reply(read)) => {
            let challenge = read.challenge.map_or(read.response.len(), |(_, value)| value.len());
            assert_eq!(challenge, read.response.len());
            let len = 16 + 2 * read.response.len() + read.public.len();
            assert_eq!(len, message.len());
        }
        Ok(HostMessage::Success2) => assert_eq!(message.len(), 16),
        Ok(HostMessage::Failure2(_)) => assert_eq!(message.len(), 8),
        Err(reason) => assert!(!reason.text().is_empty()),
    }
}

/// A file of secrets. No error repeats a secret.
fn secrets(input: &mut Input<'_>) {
    const KEY: &str = "ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n";
    let pieces = [
        "nqn.a", "nqn.b", " ", "\t", "\n", "#", "DHHC-1:", "00:", "03:", "9:", KEY, ":", "=",
        "\u{e9}",
    ];
    let count = input.below(24);
    let text: String = (0..count).map(|_| input.choose(&pieces)).collect();
    match HostSecrets::parse(&text) {
        Ok(secrets) => {
            for host in ["nqn.a", "nqn.b"] {
                assert!(secrets.find(host).is_none() || text.contains(host));
            }
        }
        Err((line, what)) => {
            assert!((1..=text.matches('\n').count() + 1).contains(&line), "line {line}");
            assert!(!what.contains(&KEY[..8]), "{what}");
        }
    }
}

fn log(input: &mut Input<'_>, shape: &NamespaceShape) {
    let Ok(request) = LogRequest::parse(&sqe(input)) else { return };
    assert!(request.len <= DATA_BYTES_MAX && request.len.is_multiple_of(4));
    let here = SocketAddr::from(([127, 0, 0, 1], 8009));
    let devices = (input.below(2) == 0).then_some(SocketAddr::from(([0; 16], 4420)));
    let nqns = vec!["nqn.2026-11.io.blockyard:a"; input.below(4) as usize];
    if let Ok(part) = log_page::discovery(&request, input.word(), &nqns, (devices, here)) {
        assert_eq!(part.len(), request.len as usize);
    }
    let changed = (0..input.below(2048) as u32).collect();
    if let Ok(page) = log_page::page(&request, &ControllerFeatures::of(shape, 1), &changed)
        && let Ok(part) = request.part(&page)
    {
        assert_eq!(part.len(), request.len as usize);
    }
}

/// An event answers a request that waits, and after a notice there is no other one before the log
/// is read.
fn events(input: &mut Input<'_>) {
    let kind = input.choose(&[NoticeKind::Namespace, NoticeKind::Discovery]);
    let mut events = EventQueue::new(kind);
    let (mut waiting, mut is_masked) = (Vec::new(), false);
    for cid in 0..input.below(32) as u16 {
        match input.below(7) {
            0 | 1 => match events.request(cid) {
                Ok(()) => waiting.push(cid),
                Err(status) => {
                    assert!(status == StatusCode::EVENT_LIMIT && waiting.len() == EVENTS_MAX);
                }
            },
            2 => {
                let aborted = input.below(32) as u16;
                assert_eq!(events.abort(aborted), waiting.contains(&aborted));
                waiting.retain(|other| *other != aborted);
            }
            3 => {
                let config = input.choose(&[0, 0xff, kind.bit(), kind.bit() | 0xff, 1 << 9]);
                assert_eq!(events.set_config(config).is_ok(), config != 1 << 9);
            }
            4 => {
                events.note_log_read();
                is_masked = false;
            }
            _ => events.note_change(),
        }
        if let Some((due, _)) = events.take_due() {
            assert!(!is_masked && events.config() & kind.bit() != 0);
            assert_eq!(waiting.remove(0), due, "the oldest request");
            is_masked = true;
        }
    }
}
