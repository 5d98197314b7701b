//! Reads blocks and pages of maps and compares them with their checksums: for the check of a pool
//! that nobody has open, and for scrubbing one that is in use.

use std::collections::HashMap;

use crate::buffer::{Buffer, Memory};
use crate::bytes::crc;
use crate::check::{Damage, Report};
use crate::codec;
use crate::error::FormatError;
use crate::format::entry::{Entry, STORED_MAX};
use crate::format::{BLOCK_BYTES_MAX, FAN, NODE_BLOCKS, UNIT};
use crate::map::page::parse_node;
use crate::map::{Found, Frozen, Map, Page};
use crate::record::Live;
use crate::segments::Segments;
use crate::store::Directory;

/// Damage that is told one by one.
const TOLD_MAX: usize = 1000;

/// Addresses that were verified: what volumes share is read once. A bit for each unit.
#[derive(Debug, Default)]
struct Seen(HashMap<u64, Box<[u64; 1024]>>);

impl Seen {
    /// Notes an address; says whether it is new.
    fn note(&mut self, address: u64) -> bool {
        let unit = address / UNIT;
        let (page, bit) = (unit / 65_536, unit % 65_536);
        let page = self.0.entry(page).or_insert_with(|| Box::new([0; 1024]));
        let (word, mask) = (&mut page[bit as usize / 64], 1 << (bit % 64));
        let is_new = *word & mask == 0;
        *word |= mask;
        is_new
    }
}

/// See the module.
pub(crate) struct Verifier<'a, D: Directory> {
    segments: &'a Segments<D>,
    stored: Buffer,
    plain: Buffer,
    seen: Seen,
    pub(crate) report: Report,
}

impl<'a, D: Directory> Verifier<'a, D> {
    pub(crate) fn new(segments: &'a Segments<D>) -> Verifier<'a, D> {
        let memory = Memory::new(1 << 20);
        Verifier {
            segments,
            stored: memory.take_beyond(STORED_MAX as usize),
            plain: memory.take_beyond(BLOCK_BYTES_MAX as usize),
            seen: Seen::default(),
            report: Report::default(),
        }
    }

    /// Verifies a volume or snapshot by its map, but for what it shares with those before.
    /// `goes_on` is told the bytes that were verified, leaf by leaf, and says whether to go on; so
    /// does this.
    pub(crate) fn volume(
        &mut self,
        live: &Live,
        frozen: &Frozen,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> bool {
        for (number, node) in (0..).zip(frozen) {
            let Some(node) = node else { continue };
            self.page(live, number * NODE_BLOCKS, node.home(), What::Node);
            for (at, leaf) in node.leaves().iter().enumerate() {
                let Some(leaf) = leaf else { continue };
                let first = number * NODE_BLOCKS + (at * FAN) as u64;
                self.page(live, first, leaf.home(), What::Leaf);
                // What cannot be read was told just now, or has moved meanwhile.
                let Ok(page) = self.segments.page(leaf) else { continue };
                for (block, entry) in (first..).zip(page.entries()) {
                    if !entry.is_hole() && self.seen.note(entry.address()) {
                        self.block(live, block, entry);
                    }
                }
                if !goes_on(self.report.stored_bytes) {
                    return false;
                }
            }
        }
        true
    }

    fn block(&mut self, live: &Live, block: u64, entry: &Entry) {
        self.report.blocks += 1;
        self.report.stored_bytes += u64::from(entry.stored_bytes());
        let Some(what) = self.wrong(entry, What::Block(live.traits.block_bytes)) else { return };
        // It may have moved, or been written again, since the map was looked at.
        let (span, at) = Map::place(block);
        let found = live.map.with(span, |span| span.find(at));
        let is_there = match found {
            Found::Disk(now) => now == *entry,
            Found::Away(leaf) => {
                let page = self.segments.page(&leaf);
                page.is_ok_and(|page| page.entries()[at as usize % FAN] == *entry)
            }
            _ => false,
        };
        if is_there {
            self.tell(live, block, entry, what);
        }
    }

    fn page(&mut self, live: &Live, first: u64, home: Option<Entry>, kind: What) {
        let Some(home) = home.filter(|home| self.seen.note(home.address())) else { return };
        let Some(what) = self.wrong(&home, kind) else { return };
        let (span, at) = Map::place(first);
        let is_there = live.map.with(span, |span| {
            let node = span.node();
            let leaf = node.and_then(|node| node.leaf(at as usize / FAN)?.home());
            node.and_then(|node| node.home()) == Some(home) || leaf == Some(home)
        });
        if is_there {
            self.tell(live, first, &home, what);
        }
    }

    fn tell(&mut self, live: &Live, block: u64, entry: &Entry, what: String) {
        self.report.damaged += 1;
        let (volume, address) = (live.traits.name.clone(), entry.address());
        tracing::error!("{volume}: block {block}, at {address} of the pool: {what}");
        if self.report.damage.len() < TOLD_MAX {
            self.report.damage.push(Damage { volume, block, address, what });
        }
    }

    /// What is wrong with what an entry names.
    fn wrong(&mut self, entry: &Entry, kind: What) -> Option<String> {
        let bytes = &mut self.stored[..entry.stored_bytes() as usize];
        if let Err(error) = self.segments.read(&self.segments.files(), entry.address(), bytes) {
            return Some(error.to_string());
        }
        let (found, want) = (crc(bytes), entry.crc());
        if found != want {
            let what = if matches!(kind, What::Block(_)) { "block" } else { "page of the map" };
            return Some(FormatError::Checksum { what, found, want }.to_string());
        }
        let (whole, what) = match kind {
            What::Block(size) => {
                let plain = &mut self.plain[..size as usize];
                (codec::decode(entry.codec(), bytes, plain), "it cannot be decompressed")
            }
            What::Leaf => (Page::parse(bytes).is_some(), "it has an impossible entry"),
            What::Node => (parse_node(bytes).is_some(), "it has an impossible entry"),
        };
        (!whole).then(|| what.to_owned())
    }
}

/// What an entry names.
#[derive(Clone, Copy, Debug)]
enum What {
    /// A block of so many bytes.
    Block(u32),
    Leaf,
    Node,
}
