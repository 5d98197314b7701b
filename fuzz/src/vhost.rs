//! Requests of virtual machines: chains of descriptors, headers and segments derived from the
//! input, and the rules that every chain and every plan must satisfy.

use blockyard_core::{Op, Sector, Status, ZoneGeometry};
use blockyard_vhost::config_space::{self, CONFIG_BYTES};
use blockyard_vhost::request::{
    BlkHeader, BlkStatus, HEADER_BYTES, Plan, RANGE_BYTES, RANGES_MAX, kind,
};
use blockyard_vhost::{ChainBuffers, DeviceShape, walk_image};

use crate::input::Input;

const SECTORS: u64 = 16 * 4096;

/// Interprets the bytes as requests.
///
/// # Panics
/// If a plan leaves the device or its zone, changes a read-only device, or consists of parts of
/// blocks.
pub fn requests(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    while !input.is_empty() {
        let shape = shape(&mut input);
        let config = config_space::print(&shape, 4);
        assert_eq!((config.len(), &config[..8]), (CONFIG_BYTES, &SECTORS.to_le_bytes()[..]));
        match input.below(3) {
            0 => range(&mut input, &shape),
            _ => request(&mut input, &shape),
        }
    }
}

/// The descriptors of an image of a guest's memory: so few that a chain has room for all buffers,
/// each in two regions.
const DESCRIPTORS: u64 = 128;
const DESCRIPTOR_BYTES: u64 = 16;

/// Interprets the bytes as chains of descriptors, in memory of one region and of two.
///
/// # Panics
/// If a buffer is not in the memory, or a chain depends on where a region ends.
pub fn chains(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let entries = input.choose(&[1_u16, 2, 8, 32]);
    let (table_bytes, len) =
        (DESCRIPTOR_BYTES * u64::from(entries), DESCRIPTORS * DESCRIPTOR_BYTES);
    let cases = [(); 4].map(|()| {
        let head = input.below(u64::from(entries) + 1) as u16;
        // A ring lies in one region; everything else may cross into the second one.
        (head, table_bytes + below(&mut input, len - table_bytes))
    });
    let mut image = Vec::new();
    (0..DESCRIPTORS).for_each(|_| print_descriptor(&mut input, entries, &mut image));
    for (head, first_bytes) in cases {
        let walk = |first_bytes: u64| {
            let chain = walk_image(&image, first_bytes as usize, entries, head);
            chain.map(|chain| runs(&chain, len))
        };
        let whole = walk(len);
        assert!(head < entries || whole.is_err(), "{head} of {entries}");
        let split = walk(first_bytes);
        assert_eq!(split, whole, "head {head} of {entries}, border at {first_bytes}");
    }
}

/// A number below `bound`, from two bytes.
fn below(input: &mut Input<'_>, bound: u64) -> u64 {
    (u64::from(input.byte()) << 8 | u64::from(input.byte())) % bound
}

/// Appends a descriptor: of a buffer or a table, mostly in the memory.
fn print_descriptor(input: &mut Input<'_>, entries: u16, image: &mut Vec<u8>) {
    let len = DESCRIPTORS * DESCRIPTOR_BYTES;
    let from = match input.below(16) {
        0 => input.word(),
        1 => len.wrapping_add(input.below(32)).wrapping_sub(16),
        _ => below(input, len),
    };
    let bytes = match input.below(8) {
        0 => input.word() as u32,
        1..=3 => DESCRIPTOR_BYTES as u32 * input.below(20) as u32,
        _ => below(input, 600) as u32,
    };
    let flags = match input.below(8) {
        0 => input.word() as u16,
        // A table, and buffers that the device writes, with and without a next one.
        1 => 4,
        2..=4 => 3,
        5 => 2,
        _ => 1,
    };
    image.extend_from_slice(&from.to_le_bytes());
    image.extend_from_slice(&bytes.to_le_bytes());
    image.extend_from_slice(&flags.to_le_bytes());
    let next = input.below(u64::from(entries) + 1) as u16;
    image.extend_from_slice(&next.to_le_bytes());
}

/// The addresses and lengths of a chain; what is adjacent is one run, of whatever regions.
fn runs(chain: &ChainBuffers, memory_bytes: u64) -> [Vec<(u64, u64)>; 2] {
    [&chain.readable, &chain.writable].map(|buffers| {
        let mut all: Vec<(u64, u64)> = Vec::new();
        for &(from, len) in buffers {
            let end = from.checked_add(len).expect("a buffer that was checked");
            assert!(len > 0 && end <= memory_bytes, "{from} {len}");
            match all.last_mut() {
                Some(last) if last.0 + last.1 == from => last.1 += len,
                _ => all.push((from, len)),
            }
        }
        all
    })
}

/// A plain device, or a zoned one with conventional zones.
fn shape(input: &mut Input<'_>) -> DeviceShape {
    let zones = (input.below(2) == 0).then_some(ZoneGeometry {
        zone_sectors: 4096,
        zone_capacity_sectors: 4000,
        zone_count: 16,
        conventional_count: 2,
        open_max: 2,
        active_max: 0,
    });
    DeviceShape {
        sectors: SECTORS,
        block_sectors: input.choose(&[1, 8]),
        physical_block_sectors: 8,
        discard_sectors_max: input.choose(&[0, 4096]),
        write_zeroes_sectors_max: input.choose(&[0, 4096]),
        append_sectors_max: if zones.is_some() { 1024 } else { 0 },
        read_only: input.below(4) == 0,
        zones,
        id: [0; 20],
    }
}

/// A number near what is valid, or any.
fn number(input: &mut Input<'_>, valid_max: u64) -> u64 {
    match input.below(4) {
        0 => input.word(),
        1 => valid_max.wrapping_add(input.below(16)).wrapping_sub(8),
        2 => input.below(16) * 4096,
        _ => input.word() % (valid_max + 1),
    }
}

fn check(shape: &DeviceShape, op: Op, sector: Sector, sectors: u64) {
    assert!(!(shape.read_only && op.is_write()), "{op} on a read-only device");
    if op.has_range() {
        let end = sector.0.checked_add(sectors).expect("a range that was checked");
        assert!(sectors > 0 && end <= shape.sectors, "{op} {sector:?} {sectors}");
        assert!(sector.0.is_multiple_of(shape.block_sectors), "{op} {sector:?}");
        assert!(sectors.is_multiple_of(shape.block_sectors), "{op} {sectors}");
    }
    if op.is_zone_mgmt() && op != Op::ZoneResetAll {
        assert!(sector.0 >= 2 * 4096 && sector.0.is_multiple_of(4096), "{op} {sector:?}");
    }
}

fn request(input: &mut Input<'_>, shape: &DeviceShape) {
    let mut bytes = [0; HEADER_BYTES];
    let all = [
        kind::IN,
        kind::OUT,
        kind::FLUSH,
        kind::GET_ID,
        kind::DISCARD,
        kind::WRITE_ZEROES,
        kind::ZONE_APPEND,
        kind::ZONE_REPORT,
        kind::ZONE_OPEN,
        kind::ZONE_FINISH,
        kind::ZONE_RESET,
        kind::ZONE_RESET_ALL,
        99,
    ];
    bytes[..4].copy_from_slice(&input.choose(&all).to_le_bytes());
    bytes[8..].copy_from_slice(&number(input, shape.sectors).to_le_bytes());
    let header = BlkHeader::parse(&bytes);
    let (read, written) = (number(input, 1 << 20), number(input, 1 << 20));
    match shape.plan(header, read, written) {
        Ok(Plan::Io { op, sector, sectors, .. }) => {
            check(shape, op, sector, sectors);
            let bytes = if op == Op::Read { written } else { read };
            assert!(!op.has_data() || sectors * 512 == bytes, "{op} {sectors} {bytes}");
        }
        Ok(Plan::Ranges { op, count }) => {
            assert!((1..=RANGES_MAX).contains(&count) && !shape.read_only, "{op} {count}");
            assert_eq!(u64::from(count) * RANGE_BYTES as u64, read);
        }
        Ok(Plan::Report { from }) => assert!(shape.zones.is_some() && from.0 < shape.sectors),
        Ok(Plan::GetId) => assert_eq!(header.kind, kind::GET_ID),
        Err(status) => assert_ne!(status, BlkStatus::Ok),
    }
    let status = input.choose(Status::ALL);
    let answered = shape.status_of(Op::Write, Sector(header.sector), status, None);
    assert_eq!(answered == BlkStatus::Ok, status.is_ok());
}

fn range(input: &mut Input<'_>, shape: &DeviceShape) {
    let mut bytes = [0; RANGE_BYTES];
    bytes[..8].copy_from_slice(&number(input, shape.sectors).to_le_bytes());
    bytes[8..12].copy_from_slice(&(number(input, 4096) as u32).to_le_bytes());
    bytes[12..].copy_from_slice(&(input.below(4) as u32).to_le_bytes());
    let op = input.choose(&[Op::Discard, Op::WriteZeroes]);
    // A request of a read-only device is refused before its segments are read.
    if let Ok(bio) = shape.plan_range(op, &bytes)
        && !shape.read_only
    {
        assert!(bio.op == op && bio.sectors <= 4096);
        check(shape, op, bio.sector, bio.sectors);
    }
}
