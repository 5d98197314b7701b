//! The data structures of Identify (NVM Express Base Specification 2.0, 5.17; ZNS 1.1, 4.1).
//!
//! Offsets in the code are those of the standard's figures.

use ring::hmac;

use crate::command::StatusCode;
use crate::events::{EVENTS_MAX, NoticeKind};
use crate::namespace::{DATA_EXPONENT, NSID, NSID_MAX, NamespaceShape};
use crate::wire::{IN_CAPSULE_BYTES_MAX, u32_at};

/// The bytes of each structure.
pub const PAGE_BYTES: usize = 4096;
/// The version of the base specification: 2.0.
pub const VERSION: u32 = 0x0002_0000;
/// The most commands of a queue (MQES + 1, MAXCMD).
pub const QUEUE_ENTRIES_MAX: u16 = 128;
/// The granularity of keep-alive timers, in milliseconds: a multiple of 100.
pub const KEEP_ALIVE_UNIT_MS: u32 = 100;

/// The command set identifier of the NVM command set.
pub const CSI_NVM: u8 = 0;
/// The command set identifier of the zoned namespace command set.
pub const CSI_ZONED: u8 = 2;

/// Identify structures by their number (CNS).
pub mod cns {
    /// A namespace.
    pub const NAMESPACE: u8 = 0x00;
    /// The controller.
    pub const CONTROLLER: u8 = 0x01;
    /// The list of active namespaces.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// The identifiers of a namespace.
    pub const DESCRIPTORS: u8 = 0x03;
    /// A namespace, for a command set.
    pub const NAMESPACE_OF_SET: u8 = 0x05;
    /// The controller, for a command set.
    pub const CONTROLLER_OF_SET: u8 = 0x06;
    /// The list of active namespaces of a command set.
    pub const ACTIVE_OF_SET: u8 = 0x07;
    /// A namespace, independent of its command set.
    pub const NAMESPACE_INDEPENDENT: u8 = 0x08;
    /// The combinations of command sets.
    pub const COMMAND_SETS: u8 = 0x1c;
}

/// What tells the data of a device from others that had its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskContents {
    /// What has the data, wherever it is served: a random number of a pool, for example.
    pub origin: String,
    /// One more after the data were replaced.
    pub version: u64,
}

/// The identity of a subsystem and of its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The NVMe qualified name of the subsystem.
    pub nqn: String,
    /// The serial number, 20 characters at most.
    pub serial: String,
    /// The UUID of the namespace, which is its NGUID too.
    pub uuid: [u8; 16],
    /// The number of the namespace (NSID) in the device's own subsystem.
    pub nsid: u32,
}

impl Identity {
    /// The identity of a device: the same after a restart, another one for another name, and for
    /// another `host` or origin of its contents.
    ///
    /// Another version of the contents gives the namespace another UUID: a host that has pages of
    /// an earlier one in its cache then does not take the namespace for the one that it knew. It
    /// also gives the namespace another number, other than the last [`NSID_MAX`] − 1 versions of
    /// the same device had: a host that has lost its connection sends the commands that it has kept
    /// before it looks at UUIDs.
    pub fn of(nqn: String, host: &str, contents: Option<&DiskContents>) -> Identity {
        let (origin, version) = match contents {
            Some(DiskContents { origin, version }) => (&**origin, version.to_string()),
            None => (host, String::new()),
        };
        // `host` must not be computable from what the network shows (machine-id(5)).
        let key = hmac::Key::new(hmac::HMAC_SHA256, origin.as_bytes());
        let of_name = hmac::sign(&key, nqn.as_bytes());
        let (serial, base) = of_name.as_ref().split_at(10);
        let serial = serial.iter().map(|byte| format!("{byte:02x}")).collect();
        // An NQN has no NUL.
        let tag = hmac::sign(&key, format!("{nqn}\0{version}").as_bytes());
        let mut uuid: [u8; 16] = tag.as_ref()[..16].try_into().expect("16 bytes");
        // Version 8: made by a rule of its own. The variant of RFC 9562.
        uuid[6] = 0x80 | uuid[6] & 0x0f;
        uuid[8] = 0x80 | uuid[8] & 0x3f;
        let nsid = match contents {
            // A version is the one before it and 1: `NSID_MAX` in succession have other numbers.
            Some(DiskContents { version, .. }) => {
                let step = (version % u64::from(NSID_MAX)) as u32; // Less than `NSID_MAX`.
                1 + (u32_at(base, 0) % NSID_MAX + step) % NSID_MAX
            }
            None => NSID,
        };
        Identity { nqn, serial, uuid, nsid }
    }
}

/// A structure that is filled in at offsets.
struct Page(Vec<u8>);

impl Page {
    fn new() -> Page {
        Page(vec![0; PAGE_BYTES])
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Text without a NUL, filled with spaces.
    fn text(&mut self, at: usize, len: usize, text: &str) {
        let field = &mut self.0[at..at + len];
        field.fill(b' ');
        for (to, from) in field.iter_mut().zip(text.bytes()) {
            *to = from;
        }
    }
}

/// What a controller offers for all its namespaces together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerFeatures {
    /// The greatest number of a namespace (NN).
    pub nsid_max: u32,
    /// The most namespaces (MNAN).
    pub namespaces_max: u32,
    /// Whether namespaces may take discards.
    pub discards: bool,
    /// Whether namespaces may take write-zeroes.
    pub write_zeroes: bool,
    /// Whether namespaces may have a volatile write cache.
    pub write_cache: bool,
    /// The longest append, in units of 4 KiB as a power of two (ZASL); `None` if no namespace is
    /// zoned.
    pub append_exponent: Option<u8>,
}

impl ControllerFeatures {
    /// Those of a controller with this namespace alone, and its number.
    pub fn of(shape: &NamespaceShape, nsid: u32) -> ControllerFeatures {
        ControllerFeatures {
            nsid_max: nsid,
            namespaces_max: 1,
            discards: shape.discards && shape.zones.is_none(),
            write_zeroes: shape.write_zeroes,
            write_cache: shape.write_cache,
            append_exponent: shape.zones.as_ref().map(|zones| zones.append_exponent),
        }
    }

    /// Those of a controller whose namespaces come and go.
    pub fn of_many(namespaces_max: u32, append_exponent: u8) -> ControllerFeatures {
        ControllerFeatures {
            nsid_max: namespaces_max,
            namespaces_max,
            discards: true,
            write_zeroes: true,
            write_cache: true,
            append_exponent: Some(append_exponent),
        }
    }
}

/// The properties of a controller that its structure shows.
#[derive(Clone, Copy, Debug)]
pub struct ControllerShape<'a> {
    /// CNTLID.
    pub id: u16,
    /// The subsystem.
    pub identity: &'a Identity,
    /// The features; `None` for a discovery controller.
    pub features: Option<ControllerFeatures>,
}

/// CNS 01h: the controller.
pub fn controller(shape: &ControllerShape<'_>) -> Vec<u8> {
    let mut page = Page::new();
    page.text(4, 20, &shape.identity.serial);
    page.text(24, 40, "Blockyard");
    page.text(64, 8, env!("CARGO_PKG_VERSION"));
    page.put(77, &[DATA_EXPONENT]);
    page.put(78, &shape.id.to_le_bytes());
    page.put(80, &VERSION.to_le_bytes());
    // OAES: the notice that the controller sends.
    let notice = match shape.features {
        Some(_) => NoticeKind::Namespace,
        None => NoticeKind::Discovery,
    };
    page.put(92, &notice.bit().to_le_bytes());
    // CTRATT: host identifiers of 128 bits.
    page.put(96, &1u32.to_le_bytes());
    // CNTRLTYPE: an I/O controller, or a discovery controller.
    page.put(111, &[if shape.features.is_some() { 1 } else { 2 }]);
    // ACL and AERL, 0's based.
    page.put(258, &[3, EVENTS_MAX as u8 - 1]);
    // FRMW: one slot, which cannot be written. LPA: effects and extended data. The only log of a
    // discovery controller is that of discovery.
    page.put(260, if shape.features.is_some() { &[3, 2 | 4] } else { &[0, 4] });
    // WCTEMP and CCTEMP, in kelvins; no device here has a temperature.
    page.put(266, &343u16.to_le_bytes());
    page.put(268, &373u16.to_le_bytes());
    // KAS, in units of 100 ms.
    page.put(320, &((KEEP_ALIVE_UNIT_MS / 100) as u16).to_le_bytes());
    page.put(514, &QUEUE_ENTRIES_MAX.to_le_bytes());
    // SGLS: supported, with an offset in the capsule, and for the transport.
    page.put(536, &(1u32 | 1 << 20 | 1 << 21).to_le_bytes());
    page.put(768, shape.identity.nqn.as_bytes());
    if let Some(features) = shape.features {
        page.put(512, &[0x66, 0x44]);
        page.put(516, &features.nsid_max.to_le_bytes());
        let discards = u16::from(features.discards) << 2;
        let write_zeroes = u16::from(features.write_zeroes) << 3;
        // ONCS: also Compare, Select of Get Features, and Verify.
        page.put(520, &(1 | discards | write_zeroes | 1 << 4 | 1 << 7).to_le_bytes());
        // VWC: whether there is a cache; a flush of all namespaces is allowed if there is one.
        let flush_all = if features.namespaces_max == 1 { 6 } else { 4 };
        page.put(525, &[u8::from(features.write_cache) | flush_all]);
        page.put(540, &features.namespaces_max.to_le_bytes());
        // IOCCSZ and IORCSZ, in units of 16 bytes.
        page.put(1792, &(4 + IN_CAPSULE_BYTES_MAX / 16).to_le_bytes());
    } else {
        page.put(1792, &4u32.to_le_bytes());
    }
    page.put(1796, &1u32.to_le_bytes());
    // MSDBD: one descriptor.
    page.put(1803, &[1]);
    page.0
}

/// CNS 00h: the namespace.
pub fn namespace(shape: &NamespaceShape, uuid: &[u8; 16]) -> Vec<u8> {
    let mut page = Page::new();
    let capacity = match &shape.zones {
        Some(zones) => zones.capacity_blocks * u64::from(zones.count),
        None => shape.blocks,
    };
    page.put(0, &shape.blocks.to_le_bytes());
    page.put(8, &capacity.to_le_bytes());
    page.put(16, &capacity.to_le_bytes());
    if shape.preferred_blocks > 1 {
        // NSFEAT: NPWG, NPWA, NPDG, NPDA and NOWS are there.
        page.put(24, &[1 << 4]);
        for at in [64, 66, 68, 70, 72] {
            page.put(at, &((shape.preferred_blocks - 1) as u16).to_le_bytes());
        }
    }
    if shape.zones.is_none() && shape.discards {
        // DLFEAT: deallocated blocks read as zeros, and write-zeroes may deallocate.
        page.put(33, &[1 | u8::from(shape.write_zeroes) << 3]);
    }
    page.put(99, &[u8::from(shape.read_only)]);
    page.put(104, uuid);
    // LBAF 0: no metadata, and the block size.
    page.put(130, &[shape.block_shift as u8]);
    page.0
}

/// CNS 02h and 07h, and log page 04h: the first of these namespaces, which are in order, that are
/// above `after`.
pub fn namespace_list(namespaces: impl Iterator<Item = u32>, after: u32) -> Vec<u8> {
    let mut page = Page::new();
    for (at, nsid) in namespaces.filter(|nsid| *nsid > after).take(PAGE_BYTES / 4).enumerate() {
        page.put(4 * at, &nsid.to_le_bytes());
    }
    page.0
}

/// CNS 03h: the identifiers of the namespace.
pub fn descriptors(shape: &NamespaceShape, uuid: &[u8; 16]) -> Vec<u8> {
    let mut page = Page::new();
    // Type, length, reserved, and the identifier: NGUID, UUID, command set.
    page.put(0, &[2, 16]);
    page.put(4, uuid);
    page.put(20, &[3, 16]);
    page.put(24, uuid);
    page.put(40, &[4, 1, 0, 0, command_set(shape)]);
    page.0
}

/// The command set of the namespace.
pub fn command_set(shape: &NamespaceShape) -> u8 {
    if shape.zones.is_some() { CSI_ZONED } else { CSI_NVM }
}

/// Whether there can be namespaces of a command set (CSI).
pub fn is_command_set(set: u8) -> bool {
    matches!(set, CSI_NVM | CSI_ZONED)
}

/// A namespace that has no device.
pub fn inactive_namespace() -> Vec<u8> {
    Page::new().0
}

/// CNS 05h: the namespace for a command set.
///
/// # Errors
/// If the namespace is of another command set.
pub fn namespace_of_set(shape: &NamespaceShape, set: u8) -> Result<Vec<u8>, StatusCode> {
    let mut page = Page::new();
    match (set, &shape.zones) {
        (CSI_NVM, _) => {}
        (CSI_ZONED, Some(zones)) => {
            // OZCS: reads may cross zones.
            page.put(2, &[1]);
            // MAR and MOR are 0's based; no limit is all ones.
            page.put(4, &zones.active_max.wrapping_sub(1).to_le_bytes());
            page.put(8, &zones.open_max.wrapping_sub(1).to_le_bytes());
            page.put(2816, &zones.zone_blocks.to_le_bytes());
        }
        _ => return Err(StatusCode::INVALID_FIELD),
    }
    Ok(page.0)
}

/// CNS 06h: the controller for a command set.
///
/// # Errors
/// If the controller does not have that command set.
pub fn controller_of_set(features: &ControllerFeatures, set: u8) -> Result<Vec<u8>, StatusCode> {
    let mut page = Page::new();
    match (set, features.append_exponent) {
        // VSL: Verify reads, and reads of the device are bounded. All other limits are 0: none.
        (CSI_NVM, _) => page.put(0, &[DATA_EXPONENT]),
        (CSI_ZONED, Some(append_exponent)) => page.put(0, &[append_exponent]),
        _ => return Err(StatusCode::INVALID_FIELD),
    }
    Ok(page.0)
}

/// CNS 08h: the namespace, independent of its command set.
pub fn namespace_independent(shape: &NamespaceShape) -> Vec<u8> {
    let mut page = Page::new();
    page.put(8, &[u8::from(shape.read_only)]);
    // NSTAT: ready.
    page.put(14, &[1]);
    page.0
}

/// CNS 1Ch: the one combination of command sets.
pub fn command_sets(features: &ControllerFeatures) -> Vec<u8> {
    let mut page = Page::new();
    page.put(0, &[1 << CSI_NVM | u8::from(features.append_exponent.is_some()) << CSI_ZONED]);
    page.0
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::namespace::ZonedShape;
    use crate::wire::{u16_at, u64_at};

    fn zoned() -> NamespaceShape {
        NamespaceShape {
            block_shift: 12,
            blocks: 1024,
            preferred_blocks: 1,
            discards: true,
            write_zeroes: true,
            write_cache: true,
            read_only: false,
            zones: Some(ZonedShape {
                zone_blocks: 256,
                capacity_blocks: 128,
                count: 4,
                open_max: 2,
                active_max: 0,
                append_exponent: 4,
            }),
        }
    }

    fn identity() -> Identity {
        Identity::of("nqn.2026-11.io.blockyard:z".to_owned(), "host", None)
    }

    #[test]
    fn an_identity_is_stable_and_unique() {
        assert_eq!(identity(), identity());
        let other = Identity::of("nqn.2026-11.io.blockyard:z".to_owned(), "other", None);
        assert_ne!((identity().uuid, identity().serial), (other.uuid, other.serial.clone()));
        assert_eq!(other.serial.len(), 20);
        assert_eq!((other.uuid[6] >> 4, other.uuid[8] >> 6), (8, 2));
    }

    /// The values are those of Python's module hmac.
    #[test]
    fn an_identity_is_a_keyed_hash_of_the_name_and_the_contents() {
        let nqn = "nqn.2026-11.io.blockyard:z";
        let named = identity();
        assert_eq!(named.serial, "17d68f321e064952e836");
        assert_eq!(u128::from_be_bytes(named.uuid), 0x9a57_8acd_1663_80ae_92ab_6a0e_ba01_af57);
        assert_eq!(named.nsid, 1);
        let of = |host, version| {
            let contents = DiskContents { origin: "7/1".to_owned(), version };
            Identity::of(nqn.to_owned(), host, Some(&contents))
        };
        let first = of("host", 2);
        assert_eq!(first.serial, "115fd50ada18933a702f");
        assert_eq!(u128::from_be_bytes(first.uuid), 0x4a4d_d6a2_9432_86a3_b71c_faf6_32d0_22ea);
        assert_eq!(first.nsid, 1517);
        assert_eq!(of("other", 2), first, "a standby has taken the pool over");
        let second = of("host", 3);
        assert_eq!(second.serial, first.serial, "the subsystem is the same");
        assert!(second.uuid != first.uuid && second.nsid != first.nsid);
        assert!((0..100_000).all(|version| (1..=NSID_MAX).contains(&of("", version).nsid)));
        // No two of `NSID_MAX` versions in succession have the same number.
        let numbers: HashSet<u32> =
            (7..).take(NSID_MAX as usize).map(|version| of("", version).nsid).collect();
        assert_eq!(numbers.len(), NSID_MAX as usize);
    }

    #[test]
    fn a_controller_has_what_hosts_check() {
        let (identity, features) = (identity(), ControllerFeatures::of(&zoned(), 1));
        let shape = ControllerShape { id: 7, identity: &identity, features: Some(features) };
        let page = controller(&shape);
        assert_eq!(page.len(), 4096);
        assert_eq!(page[4..24], *identity.serial.as_bytes());
        assert_eq!(&page[24..36], b"Blockyard   ");
        assert_eq!(page[76], 0, "CMIC: one controller");
        assert_eq!((page[77], u16_at(&page, 78), u32_at(&page, 80)), (8, 7, 0x0002_0000));
        assert_eq!((page[111], page[259], page[261]), (1, 3, 6));
        assert_eq!(u32_at(&page, 92), 1 << 8, "OAES");
        assert_eq!(u16_at(&page, 320), 1, "KAS");
        assert_eq!((page[512], page[513], u16_at(&page, 514)), (0x66, 0x44, 128));
        assert_eq!(u16_at(&page, 520), 1 | 1 << 3 | 1 << 4 | 1 << 7, "no discards of zones");
        assert_eq!(page[525], 7);
        assert_eq!(u32_at(&page, 536), 1 | 1 << 20 | 1 << 21);
        assert_eq!(&page[768..794], identity.nqn.as_bytes());
        assert_eq!((u32_at(&page, 1792), u32_at(&page, 1796)), (516, 1));
        assert_eq!((u16_at(&page, 1800), page[1803]), (0, 1));
        assert_eq!((u32_at(&page, 516), u32_at(&page, 540)), (1, 1));
        let alone = ControllerFeatures { nsid_max: 77, ..features };
        let page = controller(&ControllerShape { features: Some(alone), ..shape });
        assert_eq!((u32_at(&page, 516), u32_at(&page, 540), page[525]), (77, 1, 7));
        let many = ControllerFeatures::of_many(4096, 4);
        let page = controller(&ControllerShape { features: Some(many), ..shape });
        assert_eq!((u32_at(&page, 516), u32_at(&page, 540), page[525]), (4096, 4096, 5));
        assert_eq!(u16_at(&page, 520), 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 7);
        let page = controller(&ControllerShape { features: None, ..shape });
        assert_eq!((page[111], u32_at(&page, 516), u32_at(&page, 1792)), (2, 0, 4));
        assert_eq!(u32_at(&page, 92), 1 << 31, "OAES");
    }

    #[test]
    fn a_zoned_namespace_has_less_capacity_than_size() {
        let page = namespace(&zoned(), &[9; 16]);
        assert_eq!((u64_at(&page, 0), u64_at(&page, 8), u64_at(&page, 16)), (1024, 512, 512));
        assert_eq!((page[24], page[25], page[26], page[30]), (0, 0, 0, 0));
        assert_eq!(page[104..120], [9; 16]);
        assert_eq!((u16_at(&page, 128), page[130]), (0, 12));
        let page = namespace_of_set(&zoned(), CSI_ZONED).unwrap();
        assert_eq!((u16_at(&page, 0), u16_at(&page, 2)), (0, 1));
        assert_eq!((u32_at(&page, 4), u32_at(&page, 8)), (u32::MAX, 1), "0's based, or no limit");
        assert_eq!((u64_at(&page, 2816), page[2824]), (256, 0));
        let features = ControllerFeatures::of(&zoned(), 1);
        assert_eq!(controller_of_set(&features, CSI_ZONED).unwrap()[0], 4);
        assert_eq!(controller_of_set(&features, CSI_NVM).unwrap()[0], 8, "VSL");
        assert_eq!(controller_of_set(&features, 1), Err(StatusCode::INVALID_FIELD));
    }

    #[test]
    fn a_plain_namespace_has_no_zones() {
        let plain = NamespaceShape { zones: None, preferred_blocks: 8, ..zoned() };
        assert_eq!(namespace_of_set(&plain, CSI_ZONED), Err(StatusCode::INVALID_FIELD));
        let features = ControllerFeatures::of(&plain, 1);
        assert_eq!(controller_of_set(&features, CSI_ZONED), Err(StatusCode::INVALID_FIELD));
        let page = namespace(&plain, &[9; 16]);
        assert_eq!((page[24], u16_at(&page, 64), page[33]), (16, 7, 9));
        assert_eq!(command_sets(&features)[0], 1);
        assert_eq!(command_sets(&ControllerFeatures::of(&zoned(), 1))[0], 5);
    }

    #[test]
    fn descriptors_name_the_command_set() {
        let page = descriptors(&zoned(), &[7; 16]);
        assert_eq!((page[0], page[1], page[20], page[21]), (2, 16, 3, 16));
        assert_eq!(page[40..45], [4, 1, 0, 0, 2]);
        assert_eq!(page[45..49], [0; 4], "the list ends");
    }

    #[test]
    fn a_list_of_namespaces_has_the_first_above_a_number() {
        assert_eq!(namespace_list([].into_iter(), 0), [0; 4096]);
        let page = namespace_list([1, 2, 5].into_iter(), 1);
        assert_eq!((u32_at(&page, 0), u32_at(&page, 4), u32_at(&page, 8)), (2, 5, 0));
        let page = namespace_list(1..=4096, 1);
        assert_eq!((page.len(), u32_at(&page, 4092)), (4096, 1025));
    }
}
