//! What becomes of a group's records: blocks go into the maps, or out again, and answers home.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_sync::mailbox::Mailbox;

use super::group::Group;
use crate::format::entry::Entry;
use crate::map::Map;
use crate::pool::Pool;
use crate::record::{Body, Reply};
use crate::relocate::{self, Moves};
use crate::store::Directory;

/// Puts a group's blocks into the maps; the first is at this address.
pub(super) fn group<D: Directory>(pool: &Pool<D>, group: &Group, mut address: u64) {
    let align = pool.align();
    for record in &group.records {
        match (&record.body, &record.volume) {
            (Body::Write(payload), Some(volume)) => {
                let (number, from) = Map::place(record.first);
                let to = from + payload.blocks().len() as u32;
                volume.map.with(number, |span| {
                    for (block, stored) in (from..to).zip(payload.blocks()) {
                        let place = address + u64::from(stored.offset);
                        let entry = Entry::new(place, stored.len, stored.codec, stored.crc);
                        span.set(block, entry);
                    }
                    span.retire(from, to, record.serial);
                });
                address += payload.bytes().len() as u64;
            }
            (Body::Zero(blocks), Some(volume)) => {
                let (number, from) = Map::place(record.first);
                volume.map.with(number, |span| {
                    span.clear(from, from + blocks);
                    span.retire(from, from + blocks, record.serial);
                });
            }
            (Body::Move(moved), _) => {
                let stored = moved.payload.blocks();
                let moves: Moves = (moved.from.iter().zip(stored))
                    .map(|((block, from), stored)| {
                        let place = address + u64::from(stored.offset);
                        let to = Entry::new(place, stored.len, stored.codec, stored.crc);
                        (*block, *from, to)
                    })
                    .collect();
                let segments = pool.segments();
                let is_left = |home: Entry| moved.pages.contains(&segments.split(home.address()).0);
                let volumes = pool.volumes();
                relocate::blocks(&volumes, moves);
                if !moved.pages.is_empty() {
                    relocate::pages(&volumes, is_left);
                }
                address += moved.payload.bytes().len() as u64;
            }
            (Body::Catalogue(change), _) if record.durable => {
                let applied = pool.volumes().apply(change);
                assert!(applied.is_some(), "{change:?} was checked");
                let len = change.print().len() as u64;
                address += len.next_multiple_of(align.into());
            }
            _ => {}
        }
    }
}

/// Takes a group's blocks back, because there was no space for them.
pub(super) fn take_back(group: &Group) {
    for record in &group.records {
        let Some(volume) = &record.volume else { continue };
        let (number, from) = Map::place(record.first);
        let blocks = match &record.body {
            Body::Write(payload) => payload.blocks().len() as u32,
            Body::Zero(blocks) => *blocks,
            _ => continue,
        };
        volume.map.with(number, |span| span.retire(from, from + blocks, record.serial));
    }
}

/// Tells everybody how the group has ended.
pub(super) fn answer(group: &mut Group, status: Status) {
    let mut rung: Option<Arc<Mailbox<Reply>>> = None;
    for record in group.records.drain(..) {
        let Some(reply) = record.reply else { continue };
        let status = match &record.body {
            // What was refused before it came into the group.
            Body::Catalogue(_) if !record.durable => {
                Status::from_u8(record.serial as u8).expect("it was put there as a status")
            }
            Body::Flush | Body::Checkpoint | Body::Stop if status == Status::NoSpc => Status::Ok,
            _ => status,
        };
        reply.to.post([Reply { token: reply.token, status }].into_iter());
        if let Some(before) = rung.take_if(|before| !Arc::ptr_eq(before, &reply.to)) {
            before.bell().ring();
        }
        rung = Some(reply.to);
    }
    if let Some(last) = rung {
        last.bell().ring();
    }
}
