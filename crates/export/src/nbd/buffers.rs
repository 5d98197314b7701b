//! A connection's memory: one region, mapped once, in which data arrive and from which they leave.
//!
//! ```text
//! | inbox 0 | inbox 1 | outbox 0 | outbox 1 |
//! ```
//!
//! Each part is a pair of arenas. One of the pair is current: spans are cut off its front one
//! after the other, and when all of them have been given back it starts anew at its beginning, so
//! that a connection that is served as fast as it asks keeps to a few warm pages. When the current
//! arena has grown past [`WARM_BYTES`] or is full, the other one takes over as soon as it is empty.
//!
//! Requests are parsed where they were received, and the payload of a write stays there: its
//! inbox arena is the bio's buffer. Nothing is copied, but for the head of a message that was cut
//! by the end of an arena.
//!
//! The memory is mapped without reservation, so a connection costs what it touches, and it touches
//! only what its [`Lease`] covers. [`shrink`] gives memory back when the connection rests, or when
//! another one waits for it.
//!
//! [`shrink`]: Buffers::shrink

use std::io;
use std::sync::Arc;

use blockyard_core::Region;

use crate::nbd::client::Client;
use crate::nbd::exports::REQUEST_BYTES_MAX;
use crate::os;

/// Room in each arena besides one request of the greatest length.
const SLACK_BYTES: usize = 1 << 20;
/// Length of an arena.
const ARENA_BYTES: usize = REQUEST_BYTES_MAX as usize + SLACK_BYTES;
/// Above this an arena is left for the other one when that is empty.
const WARM_BYTES: usize = 1 << 20;
/// Data start at multiples of this.
const DATA_ALIGN: usize = 64;
/// Bytes that one receive asks for, unless a payload needs more.
pub(crate) const RECEIVE_BYTES: usize = 256 << 10;
/// Length of the region.
const REGION_BYTES: usize = 4 * ARENA_BYTES;

const _: () = assert!(ARENA_BYTES.is_multiple_of(4096), "arenas are made of whole pages");
const _: () = assert!(
    SLACK_BYTES >= 2 * DATA_ALIGN + crate::nbd::wire::HEAD_BYTES_MAX,
    "the longest request fits an arena with its head"
);

/// A part of the region that is handed out from front to back.
#[derive(Clone, Copy, Debug)]
struct Arena {
    /// Where it begins in the region.
    base: usize,
    /// Bytes in use, counted from the base.
    used: usize,
    /// Spans that were handed out and not given back.
    spans: usize,
    /// The most that was in use since the last trim.
    peak: usize,
}

/// Which arena of a pair a span belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaIndex(u8);

/// Two arenas that take turns.
#[derive(Debug)]
struct Pair {
    arenas: [Arena; 2],
    current: usize,
}

impl Pair {
    fn new(base: usize) -> Pair {
        let arena = |base| Arena { base, used: 0, spans: 0, peak: 0 };
        Pair { arenas: [arena(base), arena(base + ARENA_BYTES)], current: 0 }
    }

    fn current(&mut self) -> &mut Arena {
        &mut self.arenas[self.current]
    }

    fn other_is_empty(&self) -> bool {
        self.arenas[1 - self.current].spans == 0
    }

    /// Makes the other arena, which must be empty, the current one.
    fn turn(&mut self) {
        debug_assert!(self.other_is_empty(), "an arena is taken over when it is empty");
        self.current = 1 - self.current;
        self.current().used = 0;
    }

    fn give_back(&mut self, index: ArenaIndex) {
        let arena = &mut self.arenas[usize::from(index.0)];
        arena.spans -= 1;
    }
}

/// A stretch of the region for data that leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutSpan {
    /// Where the data begin; what comes before them ends here.
    pub(crate) data: u64,
    pub(crate) arena: ArenaIndex,
}

/// A connection's memory.
#[derive(Debug)]
pub(crate) struct Buffers {
    region: Arc<Region>,
    inbox: Pair,
    /// In the current inbox arena: where unread bytes begin. They end at its `used`.
    unread: usize,
    outbox: Pair,
    /// Whose lease covers what is touched.
    client: Arc<Client>,
    /// Bytes of the lease, as it was at last.
    leased: u64,
    /// Bytes that the last refusal was about.
    refused: usize,
}

impl Buffers {
    pub(crate) fn new(client: Arc<Client>) -> io::Result<Buffers> {
        Ok(Buffers {
            region: os::map_region(REGION_BYTES)?,
            inbox: Pair::new(0),
            unread: 0,
            outbox: Pair::new(2 * ARENA_BYTES),
            leased: client.lease.bytes(),
            client,
            refused: 0,
        })
    }

    /// Bytes that are touched.
    #[inline]
    fn touched(&self) -> u64 {
        let arenas = self.inbox.arenas.iter().chain(&self.outbox.arenas);
        arenas.map(|arena| arena.peak as u64).sum()
    }

    /// Whether the lease covers an arena, of which `peak` bytes are touched, up to `end`.
    #[inline]
    fn is_covered(&mut self, peak: usize, end: usize) -> bool {
        end <= peak || self.cover(self.touched() + (end - peak) as u64)
    }

    #[inline]
    fn cover(&mut self, bytes: u64) -> bool {
        if bytes <= self.leased {
            return true;
        }
        let covered = self.client.lease.grow_to(bytes);
        self.leased = self.client.lease.bytes();
        covered
    }

    /// Waits for the memory that was refused last, for a connection that has nothing in flight.
    /// `false` if there was none for too long.
    #[cold]
    pub(crate) fn wait_for_memory(&mut self) -> bool {
        self.shrink();
        let needed = self.touched() + (self.refused + 2 * DATA_ALIGN) as u64;
        let client = &self.client;
        let got = client.lease.wait_for(needed, || client.is_cut());
        self.leased = client.lease.bytes();
        got
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Room for `len` bytes of data that leave, with `head_len` bytes before them; `None` until
    /// something is given back.
    #[inline]
    pub(crate) fn take_out(&mut self, head_len: usize, len: usize) -> Option<OutSpan> {
        let pair = &mut self.outbox;
        if pair.current().spans == 0 {
            pair.current().used = 0;
        } else if pair.current().used > WARM_BYTES && pair.other_is_empty() {
            pair.turn();
        }
        let span = |used: usize| {
            let data = (used + head_len).next_multiple_of(DATA_ALIGN);
            (data, data + len)
        };
        if span(pair.current().used).1 > ARENA_BYTES {
            if !pair.other_is_empty() {
                return None;
            }
            pair.turn();
        }
        let index = ArenaIndex(pair.current as u8);
        let arena = *pair.current();
        let (data, end) = span(arena.used);
        if !self.is_covered(arena.peak, end) {
            self.refused = head_len + len;
            return None;
        }
        let arena = self.outbox.current();
        arena.used = end;
        arena.spans += 1;
        arena.peak = arena.peak.max(end);
        Some(OutSpan { data: (arena.base + data) as u64, arena: index })
    }

    /// Gives back what `take_out` gave.
    #[inline]
    pub(crate) fn give_out(&mut self, span: OutSpan) {
        self.outbox.give_back(span.arena);
    }

    /// Bytes received and not read yet.
    #[inline]
    pub(crate) fn unread_len(&self) -> usize {
        self.inbox.arenas[self.inbox.current].used - self.unread
    }

    /// Copies the first unread bytes out. There must be as many.
    #[inline]
    pub(crate) fn peek(&self, into: &mut [u8]) {
        let arena = &self.inbox.arenas[self.inbox.current];
        self.region.read((arena.base + self.unread) as u64, into);
    }

    /// Moves past unread bytes.
    #[inline]
    pub(crate) fn skip(&mut self, len: usize) {
        debug_assert!(len <= self.unread_len(), "only what was received is read");
        self.unread += len;
    }

    /// Moves past a payload, which stays where it is until it is given back. Its place in the
    /// region, and the arena.
    #[inline]
    pub(crate) fn keep(&mut self, len: usize) -> (u64, ArenaIndex) {
        let index = ArenaIndex(self.inbox.current as u8);
        let start = self.unread;
        self.skip(len);
        let arena = self.inbox.current();
        arena.spans += 1;
        ((arena.base + start) as u64, index)
    }

    /// Gives back what `keep` kept.
    #[inline]
    pub(crate) fn give_in(&mut self, index: ArenaIndex) {
        self.inbox.give_back(index);
    }

    /// Where to receive: a place in the region and the room there. All of a message of
    /// `message_len` bytes that begins with the unread ones will fit. `None` until a payload or
    /// memory is given back.
    pub(crate) fn room(&mut self, message_len: usize) -> Option<(u64, usize)> {
        let unread_len = self.unread_len();
        let (unread, head) = (self.unread, message_len.max(1));
        let other_is_empty = self.inbox.other_is_empty();
        let arena = self.inbox.current();
        if unread_len == 0 && arena.spans == 0 {
            arena.used = 0;
            self.unread = 0;
        } else if unread + head > ARENA_BYTES || (unread_len == 0 && arena.used > WARM_BYTES) {
            if other_is_empty {
                self.move_unread();
            } else if unread + head > ARENA_BYTES {
                return None;
            }
        }
        let arena = *self.inbox.current();
        if arena.used == ARENA_BYTES {
            // Only reached when the message is whole; the caller has something to parse.
            return None;
        }
        // More than the message, so that the next ones come along; at least the message.
        let more = (arena.used + RECEIVE_BYTES).max(self.unread + head).min(ARENA_BYTES);
        let least = (arena.used + 1).max(self.unread + head);
        let ends = [more, least];
        let Some(end) = ends.into_iter().find(|end| self.is_covered(arena.peak, *end)) else {
            self.refused = least - arena.used;
            return None;
        };
        // What is touched already costs nothing.
        let end = end.max(arena.peak);
        Some(((arena.base + arena.used) as u64, end - arena.used))
    }

    /// Makes the other inbox arena current and takes the unread bytes along.
    fn move_unread(&mut self) {
        let (unread, unread_len) = (self.unread, self.unread_len());
        let from = self.inbox.current().base + unread;
        self.inbox.turn();
        self.unread = 0;
        let arena = self.inbox.current();
        let mut bytes = [0; 4096];
        let mut moved = 0;
        while moved < unread_len {
            let part = (unread_len - moved).min(bytes.len());
            self.region.read((from + moved) as u64, &mut bytes[..part]);
            self.region.write((arena.base + moved) as u64, &bytes[..part]);
            moved += part;
        }
        arena.used = unread_len;
        arena.peak = arena.peak.max(unread_len);
    }

    /// Says that bytes were received where `room` said.
    #[inline]
    pub(crate) fn received(&mut self, len: usize) {
        let arena = self.inbox.current();
        arena.used += len;
        debug_assert!(arena.used <= ARENA_BYTES, "no more is received than there is room for");
        arena.peak = arena.peak.max(arena.used);
    }

    /// Puts bytes in as if they had been received. There must be room.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> bool {
        let Some((offset, room)) = self.room(bytes.len()) else { return false };
        if bytes.len() > room {
            return false;
        }
        self.region.write(offset, bytes);
        self.received(bytes.len());
        true
    }

    /// Whether much memory is held that an idle connection does not need.
    pub(crate) fn is_bloated(&self) -> bool {
        let arenas = self.inbox.arenas.iter().chain(&self.outbox.arenas);
        arenas.map(|arena| arena.peak).sum::<usize>() > 2 * WARM_BYTES
    }

    /// Gives memory back to the system and to other connections, all but that of unread bytes.
    /// Nothing may be in flight.
    pub(crate) fn shrink(&mut self) {
        let idle = |pair: &Pair| pair.arenas.iter().all(|arena| arena.spans == 0);
        if !idle(&self.inbox) || !idle(&self.outbox) {
            return;
        }
        if self.unread_len() > 0 && self.touched() <= (self.unread_len() + RECEIVE_BYTES) as u64 {
            // A long message is on its way, and little else is held: copying it gains nothing.
            return;
        }
        if self.unread_len() > 0 {
            self.move_unread();
        } else {
            self.unread = 0;
            self.inbox.current().used = 0;
        }
        let current = self.inbox.current;
        let inbox = self.inbox.arenas.iter_mut().enumerate();
        let inbox = inbox.map(|(index, arena)| (index == current, arena));
        for (keeps, arena) in inbox.chain(self.outbox.arenas.iter_mut().map(|it| (false, it))) {
            let kept = if keeps { arena.used } else { 0 };
            let from = kept.next_multiple_of(4096);
            let len = arena.peak.next_multiple_of(4096).saturating_sub(from);
            os::forget(&self.region, (arena.base + from) as u64, len);
            arena.used = kept;
            arena.peak = kept;
        }
        self.client.lease.shrink_to(self.touched());
        self.leased = self.client.lease.bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::client::tests::client_with;

    /// Of a connection that has all the memory that it could touch.
    fn buffers() -> Buffers {
        Buffers::new(client_with(8 * ARENA_BYTES as u64)).unwrap()
    }

    /// 60 clients that did not read took 2 GiB.
    #[test]
    fn no_more_is_touched_than_is_leased() {
        let mut buffers = Buffers::new(client_with(0)).unwrap();
        let leased = |buffers: &Buffers| buffers.client.lease.bytes();
        let max = REQUEST_BYTES_MAX as usize;
        let first = buffers.take_out(40, max).unwrap();
        assert!(leased(&buffers) > max as u64);
        // The budget has room for one of the longest.
        assert!(buffers.take_out(40, max).is_none());
        assert!(buffers.take_out(40, 64 << 10).is_some());
        assert!(buffers.room(max).is_none());
        let (_, room) = buffers.room(28).unwrap();
        assert!(room < ARENA_BYTES / 4);
        buffers.give_out(first);
        buffers.shrink();
        assert!(leased(&buffers) > max as u64, "a span is still out");
    }

    #[test]
    fn out_spans_never_overlap_and_come_back() {
        let mut buffers = buffers();
        let max = REQUEST_BYTES_MAX as usize;
        let first = buffers.take_out(40, max).unwrap();
        let second = buffers.take_out(40, max).unwrap();
        assert!(second.data >= first.data + max as u64 + 40);
        assert!(buffers.take_out(40, max).is_none());
        let small = buffers.take_out(28, 512).unwrap();
        assert!(small.data >= second.data + max as u64);
        buffers.give_out(first);
        let third = buffers.take_out(40, max).unwrap();
        assert!(third.data < second.data);
        assert_eq!(third.data % DATA_ALIGN as u64, 0);
        for span in [second, small, third] {
            buffers.give_out(span);
        }
        assert!(buffers.is_bloated());
        buffers.shrink();
        assert!(!buffers.is_bloated());
    }

    #[test]
    fn a_message_cut_by_the_end_of_an_arena_moves() {
        let mut buffers = buffers();
        let (_, room) = buffers.room(28).unwrap();
        assert_eq!(room, RECEIVE_BYTES);
        let (_, room) = buffers.room(ARENA_BYTES).unwrap();
        assert_eq!(room, ARENA_BYTES);
        // All but ten bytes of the arena are taken by payloads in flight, then comes a message.
        buffers.received(ARENA_BYTES - 10);
        let (_, index) = buffers.keep(ARENA_BYTES - 10);
        assert!(buffers.put(b"0123456"));
        let (offset, room) = buffers.room(4096).unwrap();
        assert_eq!(offset as usize, ARENA_BYTES + 7);
        assert!(room >= 4096);
        let mut bytes = [0; 7];
        buffers.peek(&mut bytes);
        assert_eq!(&bytes, b"0123456");
        buffers.skip(7);
        buffers.give_in(index);
        let (offset, _) = buffers.room(28).unwrap();
        assert_eq!(offset as usize, ARENA_BYTES);
    }

    #[test]
    fn no_room_until_a_payload_is_given_back() {
        let mut buffers = buffers();
        let mut kept = Vec::new();
        for _ in 0..2 {
            buffers.room(ARENA_BYTES).unwrap();
            buffers.received(ARENA_BYTES);
            kept.push(buffers.keep(ARENA_BYTES).1);
        }
        assert!(buffers.room(28).is_none());
        buffers.give_in(kept[0]);
        assert!(buffers.room(28).is_some());
    }
}
