//! A connection's memory: one region, mapped once, for received data and for replies.
//!
//! ```text
//! | inbox 0 | inbox 1 | outbox 0 | outbox 1 |
//! ```
//!
//! Each part is a pair of arenas, of which one is current. Spans are allocated from front to back
//! of the current arena. When all of them have been freed, allocation starts again at the
//! beginning, so a connection that is served as fast as it sends requests uses a few warm pages.
//! When the current arena has grown past [`WARM_BYTES`] or is full, the other one becomes current
//! as soon as it is empty.
//!
//! Requests are parsed in the memory into which they were received, and the payload of a write
//! stays there: its inbox arena is the bio's buffer. The only copy is of the start of a message
//! that the end of an arena has cut.
//!
//! The memory is mapped without reservation. A connection costs the memory that it touches, and
//! touches only as much as its [`Lease`] covers. [`shrink`] returns memory while the connection is
//! idle, or when another connection waits for memory.
//!
//! [`shrink`]: Buffers::shrink

use std::io;
use std::sync::Arc;

use blockyard_core::Region;

use crate::client::Client;
use crate::wire::REQUEST_BYTES_MAX;

/// Room in each arena beyond one request of the greatest length.
const SLACK_BYTES: usize = 1 << 20;
/// Length of an arena.
const ARENA_BYTES: usize = REQUEST_BYTES_MAX as usize + SLACK_BYTES;
/// Above this use an arena is replaced by the other one when that is empty.
const WARM_BYTES: usize = 1 << 20;
/// The alignment of data.
const DATA_ALIGN: usize = 64;
/// The bytes that one receive asks for, unless a payload needs more.
pub(crate) const RECEIVE_BYTES: usize = 256 << 10;
/// Length of the region.
const REGION_BYTES: usize = 4 * ARENA_BYTES;

const _: () = assert!(ARENA_BYTES.is_multiple_of(4096), "arenas are made of whole pages");
const _: () = assert!(
    SLACK_BYTES >= 2 * DATA_ALIGN + crate::wire::HEAD_BYTES_MAX,
    "the longest request fits an arena with its head"
);

/// A part of the region, allocated from front to back.
#[derive(Clone, Copy, Debug)]
struct Arena {
    /// The offset of its start in the region.
    base: usize,
    /// Bytes in use, counted from the base.
    used: usize,
    /// Spans that were allocated and not freed.
    spans: usize,
    /// The greatest use since the last trim.
    peak: usize,
}

/// The arena of a pair to which a span belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaIndex(u8);

/// Two arenas that are used in turns.
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

/// A span of the region for the data of a reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutSpan {
    /// The offset at which the data begin; the bytes before them end here.
    pub(crate) data: u64,
    pub(crate) arena: ArenaIndex,
}

/// A connection's memory.
#[derive(Debug)]
pub(crate) struct Buffers {
    region: Arc<Region>,
    inbox: Pair,
    /// The start of unread bytes in the current inbox arena. They end at its `used`.
    unread: usize,
    outbox: Pair,
    /// The client whose lease covers the touched memory.
    client: Arc<Client>,
    /// The bytes of the lease when it was last changed.
    leased: u64,
    /// The bytes of the last refused allocation.
    refused: usize,
}

impl Buffers {
    pub(crate) fn new(client: Arc<Client>) -> io::Result<Buffers> {
        Ok(Buffers {
            region: blockyard_os::map_region(REGION_BYTES)?,
            inbox: Pair::new(0),
            unread: 0,
            outbox: Pair::new(2 * ARENA_BYTES),
            leased: client.lease.bytes(),
            client,
            refused: 0,
        })
    }

    /// The bytes that are touched.
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

    /// Waits for the memory that was refused last, for a connection with nothing in flight. `false`
    /// after a timeout.
    #[cold]
    pub(crate) fn wait_for_memory(&mut self) -> bool {
        self.shrink();
        let needed = self.touched() + (self.refused + 2 * DATA_ALIGN) as u64;
        let client = &self.client;
        let got = client.lease.wait_for(needed, || client.is_cut() || client.is_pausing());
        self.leased = client.lease.bytes();
        got
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Allocates `len` bytes for reply data, with `head_len` bytes before them; `None` until a span
    /// or memory is freed.
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

    /// Frees a span of `take_out`.
    #[inline]
    pub(crate) fn give_out(&mut self, span: OutSpan) {
        self.outbox.give_back(span.arena);
    }

    /// The number of bytes received and not read yet.
    #[inline]
    pub(crate) fn unread_len(&self) -> usize {
        self.inbox.arenas[self.inbox.current].used - self.unread
    }

    /// A copy of all unread bytes.
    #[cold]
    pub(crate) fn unread_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.unread_len()];
        self.peek(&mut bytes);
        bytes
    }

    /// Copies the first unread bytes. There must be as many.
    #[inline]
    pub(crate) fn peek(&self, into: &mut [u8]) {
        let arena = &self.inbox.arenas[self.inbox.current];
        self.region.read((arena.base + self.unread) as u64, into);
    }

    /// Skips unread bytes.
    #[inline]
    pub(crate) fn skip(&mut self, len: usize) {
        debug_assert!(len <= self.unread_len(), "only what was received is read");
        self.unread += len;
    }

    /// Skips a payload, which stays in place until it is freed. Returns its offset in the region,
    /// and its arena.
    #[inline]
    pub(crate) fn keep(&mut self, len: usize) -> (u64, ArenaIndex) {
        let index = ArenaIndex(self.inbox.current as u8);
        let start = self.unread;
        self.skip(len);
        let arena = self.inbox.current();
        arena.spans += 1;
        ((arena.base + start) as u64, index)
    }

    /// Frees a payload of `keep`.
    #[inline]
    pub(crate) fn give_in(&mut self, index: ArenaIndex) {
        self.inbox.give_back(index);
    }

    /// The offset and length of room for receiving. A message of `message_len` bytes, of which the
    /// unread bytes are the first, will fit completely. `None` until a payload or memory is freed.
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
            // Only reached when the message is complete; the caller can parse it.
            return None;
        }
        // More than the message, so that later messages are received too; at least the message.
        let more = (arena.used + RECEIVE_BYTES).max(self.unread + head).min(ARENA_BYTES);
        let least = (arena.used + 1).max(self.unread + head);
        let ends = [more, least];
        let Some(end) = ends.into_iter().find(|end| self.is_covered(arena.peak, *end)) else {
            self.refused = least - arena.used;
            return None;
        };
        // Memory that is touched already costs nothing.
        let end = end.max(arena.peak);
        Some(((arena.base + arena.used) as u64, end - arena.used))
    }

    /// Makes the other inbox arena current and copies the unread bytes to it.
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

    /// Notes that bytes were received into the room of `room`.
    #[inline]
    pub(crate) fn received(&mut self, len: usize) {
        let arena = self.inbox.current();
        arena.used += len;
        debug_assert!(arena.used <= ARENA_BYTES, "no more is received than there is room for");
        arena.peak = arena.peak.max(arena.used);
    }

    /// Appends bytes as if they had been received. `false` without room.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> bool {
        let Some((offset, room)) = self.room(bytes.len()) else { return false };
        if bytes.len() > room {
            return false;
        }
        self.region.write(offset, bytes);
        self.received(bytes.len());
        true
    }

    /// Whether the connection holds much memory that it does not need while idle.
    pub(crate) fn is_bloated(&self) -> bool {
        let arenas = self.inbox.arenas.iter().chain(&self.outbox.arenas);
        arenas.map(|arena| arena.peak).sum::<usize>() > 2 * WARM_BYTES
    }

    /// Returns memory to the system and to other connections, except that of unread bytes. Nothing
    /// may be in flight.
    pub(crate) fn shrink(&mut self) {
        let idle = |pair: &Pair| pair.arenas.iter().all(|arena| arena.spans == 0);
        if !idle(&self.inbox) || !idle(&self.outbox) {
            return;
        }
        if self.unread_len() > 0 && self.touched() <= (self.unread_len() + RECEIVE_BYTES) as u64 {
            // A long message is arriving, and there is little other memory: copying gains nothing.
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
            blockyard_os::forget(&self.region, (arena.base + from) as u64, len);
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
    use crate::client::tests::client_with;

    /// The buffers of a connection whose lease can cover all of them.
    fn buffers() -> Buffers {
        Buffers::new(client_with(8 * ARENA_BYTES as u64)).unwrap()
    }

    /// The bug: 60 clients that did not read their replies took 2 GiB.
    #[test]
    fn no_more_is_touched_than_is_leased() {
        let mut buffers = Buffers::new(client_with(0)).unwrap();
        let leased = |buffers: &Buffers| buffers.client.lease.bytes();
        let max = REQUEST_BYTES_MAX as usize;
        let first = buffers.take_out(40, max).unwrap();
        assert!(leased(&buffers) > max as u64);
        // The budget has no room for the longest read, but for a shorter one.
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
        // Payloads in flight take all but ten bytes of the arena; then a message arrives.
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
