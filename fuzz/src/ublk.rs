//! Requests of the kernel: descriptors derived from the input, and the rules that every plan must
//! satisfy.

use blockyard_core::{Geometry, Limits, Op, Sector, ZoneGeometry};
use blockyard_ublk::abi::{
    DESCRIPTOR_BYTES, Descriptor, DevInfo, INFO_BYTES, PARAMS_BYTES, Params,
};
use blockyard_ublk::request::Plan;
use blockyard_ublk::shape::{DeviceShape, ZONE_BYTES};

use crate::input::Input;

const SECTORS: u64 = 16 * 4096;

/// Interprets the bytes as requests.
///
/// # Panics
/// If a plan leaves the device, has more data than the memory of a request, changes a read-only
/// device, or consists of parts of blocks.
pub fn requests(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    while !input.is_empty() {
        answers(&mut input);
        let shape = shape(&mut input);
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let word = input.below(20) as u32 | (input.word() as u32) << 8;
        bytes[..4].copy_from_slice(&word.to_ne_bytes());
        bytes[4..8].copy_from_slice(&(number(&mut input, 1024) as u32).to_ne_bytes());
        bytes[8..16].copy_from_slice(&number(&mut input, SECTORS).to_ne_bytes());
        request(&shape, Descriptor::parse(&bytes));
    }
}

/// What the kernel says of a device is parsed whatever it is, and printed as it was.
fn answers(input: &mut Input<'_>) {
    let mut bytes = [0; PARAMS_BYTES];
    bytes.iter_mut().for_each(|byte| *byte = input.below(256) as u8);
    let params = Params::parse(&bytes);
    // A kernel that has no shift of this size has no such device.
    if params.logical_shift < 32 {
        assert_eq!(Params::parse(&params.print()), params);
    }
    let info: [u8; INFO_BYTES] = std::array::from_fn(|at| bytes[at]);
    let info = DevInfo::parse(&info);
    let again = DevInfo { state: info.state, ..DevInfo::parse(&info.print()) };
    assert_eq!(again, info);
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
    let logical_block_bytes = input.choose(&[512, 4096]);
    let (sectors, physical_block_bytes) = (SECTORS, 4096);
    let read_only = input.below(4) == 0;
    let limits = Limits { read_only, zone_append_sectors_max: 1024, ..Limits::unlimited(16) };
    let geometry = Geometry { sectors, logical_block_bytes, physical_block_bytes, zones };
    DeviceShape::new(&geometry, &limits).expect("the driver can have these devices")
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

fn request(shape: &DeviceShape, descriptor: Descriptor) {
    match shape.plan(descriptor) {
        Ok(Plan::Io(bio)) => {
            let Sector(sector) = bio.sector;
            assert!(
                !(shape.params.read_only && bio.op.is_write()),
                "{bio:?} on a read-only device"
            );
            if bio.op.has_range() {
                let end = sector.checked_add(bio.sectors).expect("a range that was checked");
                assert!(bio.sectors > 0 && end <= SECTORS, "{bio:?}");
                assert!((sector | bio.sectors).is_multiple_of(shape.block_sectors), "{bio:?}");
            }
            if bio.op.has_data() {
                assert!(bio.sectors * 512 <= u64::from(shape.io_bytes_max), "{bio:?}");
            }
            if bio.op == Op::ZoneAppend || (bio.op.is_zone_mgmt() && bio.op != Op::ZoneResetAll) {
                assert!(shape.zones.is_some() && sector < SECTORS, "{bio:?}");
                assert!(sector >= 2 * 4096 && sector.is_multiple_of(4096), "{bio:?}");
            }
        }
        Ok(Plan::Report { from, zones }) => {
            assert!(shape.zones.is_some() && from.0 < SECTORS && zones > 0);
            assert!(zones as usize * ZONE_BYTES <= shape.io_bytes_max as usize, "{zones}");
        }
        Err(status) => assert!(!status.is_ok()),
    }
}
