//! The structures of a pool on disk: as the product prints them with any fields, or any bytes. An
//! accepted structure is within bounds and consistent.

use blockyard_volume::map::page;
use blockyard_volume_format::bytes::Reader;
use blockyard_volume_format::catalogue::{
    self, CatalogueImage, Change, Hold, Listed, ScrubRecord, VolumeMeta,
};
use blockyard_volume_format::entry::{ADDRESS_END, Codec, ENTRY_BYTES, Entry, STORED_MAX};
use blockyard_volume_format::group::{self, Descriptor, Head, Kind, Places};
use blockyard_volume_format::key_slot::{Derivation, KeySlot};
use blockyard_volume_format::label::{self, Joining, Label};
use blockyard_volume_format::properties::Properties;
use blockyard_volume_format::superblock::{BYTES, LogPlace, SLOT_BYTES, Superblock};

use crate::input::Input;

/// Interprets the bytes as every structure.
///
/// # Panics
/// If an inconsistent structure is accepted, or a printed one does not parse to the same values.
pub fn volume(bytes: &[u8]) {
    any(bytes);
    let mut input = Input::new(bytes);
    superblock(&mut input);
    label(&mut input);
    group(&mut input);
    listed(&mut input);
}

/// Parses the raw bytes as every structure.
fn any(bytes: &[u8]) {
    _ = Superblock::newest(bytes);
    _ = Superblock::newest(&Superblock::best([bytes, &bytes[bytes.len() / 2..]].into_iter()));
    _ = Label::newest(bytes);
    _ = Change::parse(bytes);
    if let Ok((_, volumes)) = catalogue::parse(bytes) {
        assert!(volumes.iter().all(|it| it.roots.len() == it.meta.root_count()));
    }
    if let Some((head, _, descriptors)) = group::parse(bytes, 512) {
        assert_eq!(head.count as usize, descriptors.len());
    }
    _ = page::parse_node(bytes);
    if let Some(page) = page::Page::parse(bytes) {
        for entry in page.entries().iter().filter(|entry| !entry.is_hole()) {
            assert!(entry.address() < ADDRESS_END && entry.stored_bytes() <= STORED_MAX);
            _ = entry.codec();
        }
    }
    _ = VolumeMeta::parse(&mut Reader::new(bytes));
}

fn entry(input: &mut Input<'_>) -> Entry {
    if input.below(4) == 0 {
        return Entry::HOLE;
    }
    let address = input.word() % ADDRESS_END / 512 * 512;
    let len = (input.below(256) as u32 + 1) * 512;
    Entry::new(address, len, input.choose(&[Codec::Raw, Codec::Lz4, Codec::Zstd]), input.word())
}

fn superblock(input: &mut Input<'_>) {
    let superblock = Superblock {
        id: *b"0123456789abcdef",
        align: input.choose(&[512, 4096, 0, 513, 8192]),
        segment_bytes: input.choose(&[1 << 20, 8192, 0, u32::MAX, 12_289]),
        sequence: input.word(),
        epoch: input.word(),
        log: LogPlace {
            segment: input.word() as u32,
            offset: input.choose(&[0, 4096, 513, u32::MAX]),
            next: input.word() as u32,
            number: input.word(),
            chain: input.word(),
        },
        catalogue: entry(input),
        catalogue_bytes: input.word(),
        catalogue_crc: input.word(),
        durable: input.word(),
    };
    let mut bytes = [0; SLOT_BYTES];
    superblock.print(&mut bytes);
    match Superblock::parse(&bytes) {
        Ok(read) => assert_eq!(read, superblock),
        Err(error) => assert!(error.to_string().starts_with('`')),
    }
    let at = input.word() as usize % BYTES;
    bytes[at] ^= input.byte().max(1);
    assert!(Superblock::parse(&bytes).is_err(), "a changed byte {at} is not noticed");
}

fn label(input: &mut Input<'_>) {
    let label = Label {
        set: *b"0123456789abcdef",
        number: input.choose(&[0, 1, 2]),
        generation: input.word(),
        good: [input.choose(&[true, false]), input.choose(&[true, false])],
        other: "/p".repeat(input.below(1001) as usize).into(),
        joining: input.choose(&[true, false]).then(|| Joining {
            path: "/j".repeat(1 + input.below(1000) as usize).into(),
            set: *b"fedcba9876543210",
        }),
        cursor: input.choose(&[true, false]).then(|| input.word() >> 1),
    };
    let mut bytes = [0; label::SLOT_BYTES];
    label.print(&mut bytes);
    match Label::parse(&bytes) {
        Ok(read) => assert_eq!(read, label),
        Err(error) => assert!(error.to_string().contains("number"), "{error}"),
    }
    let at = input.word() as usize % label::SLOT_BYTES;
    bytes[at] ^= input.byte().max(1);
    assert!(Label::parse(&bytes).is_err(), "a changed byte {at} is not noticed");
}

fn group(input: &mut Input<'_>) {
    let count = input.below(20) as usize;
    let align = input.choose(&[512, 4096]);
    let descriptors: Vec<Descriptor> = (0..count)
        .map(|_| {
            let kind = input.choose(&[Kind::Data, Kind::Zero, Kind::Catalogue, Kind::Move]);
            let moves = kind == Kind::Move;
            Descriptor {
                kind,
                codec: input.choose(&[Codec::Raw, Codec::Lz4, Codec::Zstd, Codec::SealedRaw]),
                volume: input.word() as u32,
                to: if moves { input.word() % ADDRESS_END / 512 * 512 } else { 0 },
                from: if moves { input.word() % ADDRESS_END / 512 * 512 } else { 0 },
                block: if moves { input.word() >> 24 } else { input.word() },
                len: match kind {
                    Kind::Data => input.below(STORED_MAX.into()) as u32 + 1,
                    Kind::Move => (input.below(256) as u32 + 1) * 512,
                    Kind::Zero => input.below(1 << 16) as u32 + 1,
                    Kind::Catalogue => input.below(2048) as u32 + 1,
                },
                crc: input.word(),
            }
        })
        .collect();
    let mut places = Places::default();
    descriptors.iter().for_each(|it| _ = places.next(it, align));
    let head = Head {
        pool: input.word(),
        epoch: input.word(),
        number: input.word(),
        chain: input.word(),
        durable: input.word(),
        next: input.word() as u32,
        count: count as u32,
        head_bytes: group::head_bytes(count, align),
        payload_bytes: places.payload_bytes(align) as u32,
    };
    let mut bytes = vec![0; head.head_bytes as usize];
    group::print(&head, &descriptors, &mut bytes);
    let (read, _, parts) = group::parse(&bytes, align).expect("what was printed is read back");
    assert_eq!((read, parts), (head, descriptors));
    let at = input.word() as usize % bytes.len();
    bytes[at] ^= input.byte().max(1);
    assert!(group::parse(&bytes, align).is_none(), "a changed byte {at} is not noticed");
}

fn key_slots(input: &mut Input<'_>) -> Vec<KeySlot> {
    let count = input.below(3);
    let slot = |id| {
        let derivation = match input.below(2) {
            0 => Derivation::Hkdf,
            _ => Derivation::Argon2id { memory_kib: 1024, passes: 3, lanes: 1 },
        };
        let byte = input.word() as u8;
        let slot = KeySlot { id, derivation, salt: [byte; 16], wrapped: [!byte; 48] };
        let change = Change::PutKey(slot.clone());
        assert_eq!(Change::parse(&change.print()), Ok(change));
        slot
    };
    (1..=count).map(slot).collect()
}

fn properties(input: &mut Input<'_>) -> Properties {
    let mut some = |below: u64| (input.below(2) == 1).then(|| input.below(below));
    Properties {
        compress: some(21).map(|code| code as u8),
        sync: some(3).map(|code| code as u8),
        iops: some(u64::MAX),
        bandwidth: some(u64::MAX),
        read_only: some(2).map(|value| value == 1),
    }
}

fn some_volumes(input: &mut Input<'_>) -> Vec<Listed> {
    let mut volumes = Vec::new();
    for id in 1..=input.below(4) as u32 {
        let meta = VolumeMeta {
            id,
            name: "v".repeat(input.below(20) as usize),
            is_snapshot: input.below(2) == 1,
            guid: input.below(3),
            reserved_bytes: input.below(2) << 9,
            created: input.word(),
            key: 0,
            origin: input.word() as u32,
            block_bytes: input.choose(&[4096, 512, 65_536]),
            blocks: input.below(90_000_000) + 1,
        };
        let roots = (0..meta.root_count()).map(|_| entry(input)).collect();
        let holds = (0..if meta.is_snapshot { input.below(3) } else { 0 })
            .map(|number| Hold { tag: format!("tag-{number}"), created: input.word() })
            .collect();
        volumes.push(Listed {
            meta,
            family: input.word() as u32,
            copied: input.word() as u32,
            owned: input.word(),
            holds,
            properties: properties(input),
            roots,
        });
    }
    volumes
}

fn listed(input: &mut Input<'_>) {
    let mut volumes = some_volumes(input);
    let keys = key_slots(input);
    for Listed { meta, .. } in &mut volumes {
        meta.key = input.below(keys.len() as u64 + 1);
    }
    let live = (0..input.below(9)).map(|_| input.below(1 << 21) * 512).collect();
    let (copies, unknown_bytes) = (input.word() as u32, input.word());
    let scrub = ScrubRecord {
        ended: input.word(),
        duration_ms: input.word(),
        verified_bytes: input.word(),
        damaged: input.word(),
        repaired: input.word(),
    };
    let (id, created) = (input.word() as u32, input.word());
    let text = |len: u64| "x".repeat(len as usize + 1);
    for change in [
        Change::Scrubbed(scrub),
        Change::Rename { id, name: text(input.below(200)) },
        Change::SnapshotAll {
            first_id: id,
            snapshot: text(input.below(200)),
            created,
            seed: input.word(),
        },
        Change::Promote { id },
        Change::Hold { id, hold: Hold { tag: text(input.below(64)), created } },
        Change::Release { id, tag: text(input.below(64)) },
    ] {
        assert_eq!(Change::parse(&change.print()), Ok(change));
    }
    let repaired = input.word();
    let whole = CatalogueImage { next_id: 9, copies, live, unknown_bytes, scrub, repaired, keys };
    let bytes = catalogue::print(&whole, &volumes);
    assert_eq!(catalogue::parse(&bytes), Ok((whole, volumes)));
    let cut = input.word() as usize % bytes.len();
    assert!(catalogue::parse(&bytes[..cut]).is_err());
    let mut page = [0; 4096];
    let entries: [Entry; 256] = std::array::from_fn(|_| entry(input));
    for (entry, bytes) in entries.iter().zip(page.chunks_mut(ENTRY_BYTES)) {
        entry.print(bytes);
    }
    let read = page::Page::parse(&page).expect("what was printed is read back");
    assert_eq!(read.entries(), &entries);
}
