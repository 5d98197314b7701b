//! Requests of one class and direction by their first sector: a directory of small sorted leaves.
//!
//! A search goes through the directory and then through one leaf; an insertion moves at most the
//! keys of one leaf. With up to some hundred requests this touches a handful of cache lines, and
//! with thousands the directory is still short. Requests with equal sectors keep the order of their
//! insertion.
//!
//! Invariant: two neighbouring leaves together hold more than [`JOIN`] keys. This bounds the number
//! of leaves that all orders need, so that they come out of one preallocated pool.

/// Maximum number of keys in a leaf.
const FULL: usize = 4 * STEP;

/// Two neighbouring leaves with at most this number of keys together are joined.
const JOIN: usize = FULL / 2;

/// Number of keys that a search compares at once in its last step.
const STEP: usize = 8;

/// Number of keys that a move copies, whether they are in use or not: a move of constant size has
/// no branch to mispredict.
const MOVED: usize = 16;

/// A request by its first sector.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    pub(super) sector: u64,
    pub(super) place: u32,
}

impl Key {
    /// Greater than all keys. It fills the free end of a leaf, so that a search need not read the
    /// length.
    const NONE: Key = Key { sector: SECTOR_END, place: u32::MAX };
}

/// Above all sectors of keys. A device ends before sector 2^55, because its length in bytes fits 64
/// bits.
pub(super) const SECTOR_END: u64 = 1 << 62;

/// 1 if a sector is below another one, else 0. The sign of the difference of two sectors says it,
/// and is cheaper to add up than the results of comparisons.
#[inline(always)]
const fn is_below(sector: u64, other: u64) -> usize {
    (sector.wrapping_sub(other) >> 63) as usize
}

/// Keys in ascending order.
#[derive(Clone, Debug)]
struct Leaf {
    /// The keys, and free space after them for a move of constant size.
    keys: [Key; FULL + MOVED + 1],
    len: usize,
}

impl Leaf {
    const EMPTY: Leaf = Leaf { keys: [Key::NONE; FULL + MOVED + 1], len: 0 };

    /// Number of keys below a sector. The comparisons depend on each other only once.
    #[inline(always)]
    fn rank(&self, sector: u64) -> usize {
        let is_below = |at: usize| is_below(self.keys[at].sector, sector);
        let steps: usize = (1..FULL / STEP).map(|step| is_below(step * STEP - 1)).sum();
        let from = steps * STEP;
        from + (from..from + STEP).map(is_below).sum::<usize>()
    }

    #[inline]
    fn insert(&mut self, at: usize, key: Key) {
        if at + MOVED < self.len {
            self.keys.copy_within(at + MOVED..at + 2 * MOVED, at + MOVED + 1);
        }
        self.keys.copy_within(at..at + MOVED, at + 1);
        self.keys[at] = key;
        self.len += 1;
    }

    /// Removes `count` keys, starting at `at`.
    #[inline]
    fn remove(&mut self, at: usize, count: usize) {
        let from = at + count;
        if count > MOVED {
            self.keys.copy_within(from..self.len, at);
            self.keys[self.len - count..self.len].fill(Key::NONE);
        } else {
            self.keys.copy_within(from..from + MOVED, at);
            if at + MOVED < self.len {
                self.keys.copy_within(from + MOVED.., at + MOVED);
            }
        }
        self.len -= count;
    }

    /// Moves the keys, starting at `from`, to the end of `other`.
    fn move_tail(&mut self, from: usize, other: &mut Leaf) {
        let count = self.len - from;
        other.keys[other.len..other.len + count].copy_from_slice(&self.keys[from..self.len]);
        other.len += count;
        self.keys[from..self.len].fill(Key::NONE);
        self.len = from;
    }
}

/// The pool of leaves for all orders. Memory for all leaves is allocated at once, but a leaf is
/// first written when it is first needed.
#[derive(Clone, Debug)]
pub(super) struct Leaves {
    /// The leaves that were used before.
    leaves: Vec<Leaf>,
    /// Those of them that are free.
    free: Vec<u32>,
    count: usize,
}

impl Leaves {
    /// Enough leaves for `orders` orders that together hold `keys` keys.
    pub(super) fn new(keys: usize, orders: usize) -> Leaves {
        // By the invariant an order of n keys has at most 2 n / (JOIN + 1) + 1 leaves.
        let count = keys * 2 / (JOIN + 1) + orders;
        Leaves { leaves: Vec::with_capacity(count), free: Vec::with_capacity(count), count }
    }

    #[inline]
    fn at(&self, leaf: u32) -> &Leaf {
        &self.leaves[leaf as usize]
    }

    #[inline]
    fn at_mut(&mut self, leaf: u32) -> &mut Leaf {
        &mut self.leaves[leaf as usize]
    }

    /// Takes an empty leaf from the pool.
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            assert!(self.leaves.len() < self.count, "the invariant bounds the leaves");
            self.leaves.push(Leaf::EMPTY);
            self.leaves.len() as u32 - 1
        })
    }

    /// Moves the keys of one leaf, starting at `from`, to the end of another leaf.
    fn move_tail(&mut self, leaf: u32, from: usize, other: u32) {
        let pair = self.leaves.get_disjoint_mut([leaf as usize, other as usize]);
        let [leaf, other] = pair.expect("two leaves of the pool");
        leaf.move_tail(from, other);
    }
}

/// A position between the keys of an order, identified by the key after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cursor {
    /// Index in the directory.
    leaf: usize,
    /// Number of that leaf in the pool, if the order has one.
    number: u32,
    /// Index in the leaf; may be the length of the leaf.
    at: usize,
}

/// Requests of one class and direction by their first sector.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// For each leaf: a sector not above its first key and not below the last key of the previous
    /// leaf.
    starts: Vec<u64>,
    leaves: Vec<u32>,
    /// A sector and its [`Order::following`] position, if known.
    known: Option<(u64, Cursor)>,
}

impl Order {
    /// An order with capacity for `keys` keys.
    pub(super) fn new(keys: usize) -> Order {
        let count = keys * 2 / (JOIN + 1) + 1;
        Order { starts: Vec::with_capacity(count), leaves: Vec::with_capacity(count), known: None }
    }

    /// The position after all keys up to and including `sector`.
    #[inline]
    pub(super) fn position_after(&self, pool: &Leaves, sector: u64) -> Cursor {
        self.search(pool, sector + 1)
    }

    /// The position before the first key that is not below `sector`.
    #[inline]
    pub(super) fn following(&self, pool: &Leaves, sector: u64) -> Cursor {
        match self.known {
            Some((known, cursor)) if known == sector => cursor,
            _ => self.search(pool, sector),
        }
    }

    /// The position after all keys below `sector`.
    #[inline(always)]
    fn search(&self, pool: &Leaves, sector: u64) -> Cursor {
        let leaf = if self.starts.len() <= 2 * STEP {
            self.starts.iter().map(|start| is_below(*start, sector)).sum()
        } else {
            self.starts.partition_point(|start| *start < sector)
        };
        let leaf = leaf.saturating_sub(1);
        match self.leaves.get(leaf) {
            Some(&number) => Cursor { leaf, number, at: pool.at(number).rank(sector) },
            None => Cursor { leaf: 0, number: u32::MAX, at: 0 },
        }
    }

    /// The key before a position.
    #[inline]
    pub(super) fn before(&self, pool: &Leaves, cursor: Cursor) -> Option<Key> {
        if let Some(at) = cursor.at.checked_sub(1) {
            return pool.leaves.get(cursor.number as usize)?.keys.get(at).copied();
        }
        let number = *self.leaves.get(cursor.leaf.checked_sub(1)?)?;
        let leaf = pool.at(number);
        Some(leaf.keys[leaf.len - 1])
    }

    /// The key after a position, and the position right before that key.
    #[inline]
    pub(super) fn after(&self, pool: &Leaves, cursor: Cursor) -> Option<(Cursor, Key)> {
        let leaf = pool.leaves.get(cursor.number as usize)?;
        if cursor.at < leaf.len {
            return Some((cursor, leaf.keys[cursor.at % leaf.keys.len()]));
        }
        let leaf = cursor.leaf + 1;
        let number = *self.leaves.get(leaf)?;
        Some((Cursor { leaf, number, at: 0 }, pool.at(number).keys[0]))
    }

    /// The keys after a position that lie in the same leaf as the first of them, and the position
    /// right before that one.
    #[inline]
    pub(super) fn run<'a>(&self, pool: &'a Leaves, cursor: Cursor) -> Option<(Cursor, &'a [Key])> {
        let (cursor, _) = self.after(pool, cursor)?;
        let leaf = pool.at(cursor.number);
        Some((cursor, &leaf.keys[cursor.at..leaf.len]))
    }

    /// The position of an entry's key.
    pub(super) fn find(&self, pool: &Leaves, sector: u64, place: u32) -> Cursor {
        let mut next = self.following(pool, sector);
        loop {
            let (cursor, key) = self.after(pool, next).expect("what waits has a key");
            if key.place == place {
                return cursor;
            }
            next = Cursor { at: cursor.at + 1, ..cursor };
        }
    }

    /// Adds a key at the position [`Order::position_after`] of its sector.
    #[inline]
    pub(super) fn insert(&mut self, pool: &mut Leaves, cursor: Cursor, key: Key) {
        self.known = None;
        let mut cursor = cursor;
        if self.leaves.is_empty() {
            cursor.number = self.grow(pool, key.sector);
        } else if pool.at(cursor.number).len == FULL {
            cursor = self.split(pool, cursor, key.sector);
        }
        if cursor.at == 0 {
            let start = &mut self.starts[cursor.leaf];
            *start = key.sector.min(*start);
        }
        pool.at_mut(cursor.number).insert(cursor.at, key);
    }

    /// Adds the first leaf to an order.
    #[cold]
    fn grow(&mut self, pool: &mut Leaves, sector: u64) -> u32 {
        let number = pool.take();
        self.leaves.push(number);
        self.starts.push(sector);
        number
    }

    /// Splits a full leaf to make space for a key; returns the new position.
    #[cold]
    fn split(&mut self, pool: &mut Leaves, cursor: Cursor, sector: u64) -> Cursor {
        let Cursor { leaf, number, at } = cursor;
        // Keys that come in ascending order then leave full leaves, not half-empty ones.
        let is_last = leaf + 1 == self.leaves.len() && at == FULL;
        let keep = if is_last { FULL } else { FULL / 2 };
        let start = if is_last { sector } else { pool.at(number).keys[keep].sector };
        let new = pool.take();
        pool.move_tail(number, keep, new);
        self.leaves.insert(leaf + 1, new);
        self.starts.insert(leaf + 1, start);
        if at > keep || is_last {
            return Cursor { leaf: leaf + 1, number: new, at: at - keep };
        }
        cursor
    }

    /// Lowers the sector of the key at a position. The sector must not be below that of the
    /// previous key.
    pub(super) fn lower(&mut self, pool: &mut Leaves, cursor: Cursor, sector: u64) {
        self.known = None;
        pool.at_mut(cursor.number).keys[cursor.at].sector = sector;
        self.starts[cursor.leaf] = self.starts[cursor.leaf].min(sector);
    }

    /// Removes the key at a position.
    #[inline]
    pub(super) fn remove(&mut self, pool: &mut Leaves, cursor: Cursor) {
        self.known = None;
        self.remove_run(pool, cursor, 1);
    }

    /// Removes keys of one leaf, starting at a position that a sweep has reached. `latest` is the
    /// sector of the last of them; the position after it is then known.
    #[inline]
    pub(super) fn sweep(&mut self, pool: &mut Leaves, cursor: Cursor, count: usize, latest: u64) {
        let stays = self.remove_run(pool, cursor, count);
        self.known = stays.then_some((latest, cursor));
    }

    /// Removes keys of one leaf, starting at a position; returns whether the position is still
    /// valid.
    #[inline]
    fn remove_run(&mut self, pool: &mut Leaves, cursor: Cursor, count: usize) -> bool {
        let leaf = pool.at_mut(cursor.number);
        leaf.remove(cursor.at, count);
        let len = leaf.len;
        if len > JOIN {
            return true;
        }
        self.thin_out(pool, cursor.leaf, len)
    }

    /// Restores the invariant after a leaf lost keys; returns whether positions in it stay valid.
    fn thin_out(&mut self, pool: &mut Leaves, leaf: usize, len: usize) -> bool {
        let len_of = |order: &Order, leaf: usize| pool.at(order.leaves[leaf]).len;
        let joins_next = leaf + 1 < self.leaves.len() && len + len_of(self, leaf + 1) <= JOIN;
        let joins_previous = leaf > 0 && len + len_of(self, leaf - 1) <= JOIN;
        if joins_next {
            pool.move_tail(self.leaves[leaf + 1], 0, self.leaves[leaf]);
            self.drop_leaf(pool, leaf + 1);
            // Both neighbours may be short, because this leaf lost several keys at once.
            let len = pool.at(self.leaves[leaf]).len;
            return self.thin_out(pool, leaf, len);
        }
        if joins_previous {
            pool.move_tail(self.leaves[leaf], 0, self.leaves[leaf - 1]);
            self.drop_leaf(pool, leaf);
            return false;
        }
        if len == 0 {
            self.drop_leaf(pool, leaf);
            return false;
        }
        true
    }

    fn drop_leaf(&mut self, pool: &mut Leaves, leaf: usize) {
        pool.free.push(self.leaves.remove(leaf));
        self.starts.remove(leaf);
    }

    /// The entry numbers from the first key to the last.
    pub(super) fn places<'a>(&'a self, pool: &'a Leaves) -> impl Iterator<Item = u32> + 'a {
        self.leaves.iter().flat_map(|number| {
            let leaf = pool.at(*number);
            leaf.keys[..leaf.len].iter().map(|key| key.place)
        })
    }
}
