//! Requests of one class and direction by their first sector: a directory of small sorted leaves.
//!
//! A search looks through the directory's first sectors and then through one leaf; an insertion
//! moves at most one leaf's keys. Up to some hundred requests that is a handful of cache lines, and
//! with thousands the directory is still short. Equal sectors stay in the order of their insertion.
//!
//! Invariant: two neighbouring leaves hold more than [`JOIN`] keys together. It bounds the leaves
//! that all orders together can need, so they come out of one pool and nothing is allocated.

/// Most keys of a leaf.
const FULL: usize = 32;

/// Neighbouring leaves that hold no more keys than this together become one.
const JOIN: usize = FULL / 2;

/// Some keys in ascending order, each with the place of its request.
#[derive(Clone, Debug)]
struct Leaf {
    len: usize,
    sectors: [u64; FULL],
    places: [u32; FULL],
}

impl Leaf {
    const EMPTY: Leaf = Leaf { len: 0, sectors: [0; FULL], places: [0; FULL] };

    #[inline]
    fn sectors(&self) -> &[u64] {
        &self.sectors[..self.len]
    }

    #[inline]
    fn insert(&mut self, at: usize, sector: u64, place: u32) {
        self.sectors.copy_within(at..self.len, at + 1);
        self.places.copy_within(at..self.len, at + 1);
        (self.sectors[at], self.places[at]) = (sector, place);
        self.len += 1;
    }

    #[inline]
    fn remove(&mut self, at: usize) {
        self.sectors.copy_within(at + 1..self.len, at);
        self.places.copy_within(at + 1..self.len, at);
        self.len -= 1;
    }

    /// Moves the keys from `from` on behind those of `other`.
    fn move_tail(&mut self, from: usize, other: &mut Leaf) {
        let count = self.len - from;
        let room = other.len..other.len + count;
        other.sectors[room.clone()].copy_from_slice(&self.sectors[from..self.len]);
        other.places[room].copy_from_slice(&self.places[from..self.len]);
        other.len += count;
        self.len = from;
    }
}

/// The leaves of all orders.
#[derive(Clone, Debug)]
pub(super) struct Leaves {
    leaves: Vec<Leaf>,
    free: Vec<u32>,
}

impl Leaves {
    /// As many as `orders` need that hold `keys` together.
    pub(super) fn new(keys: usize, orders: usize) -> Leaves {
        // By the invariant an order of n keys has at most 2 n / (JOIN + 1) + 1 leaves.
        let count = keys * 2 / (JOIN + 1) + orders;
        let free = (0..count as u32).rev().collect();
        Leaves { leaves: vec![Leaf::EMPTY; count], free }
    }

    #[inline]
    fn at(&self, leaf: u32) -> &Leaf {
        &self.leaves[leaf as usize]
    }

    #[inline]
    fn at_mut(&mut self, leaf: u32) -> &mut Leaf {
        &mut self.leaves[leaf as usize]
    }

    /// An empty leaf.
    fn take(&mut self) -> u32 {
        let leaf = self.free.pop().expect("the invariant bounds the leaves");
        self.at_mut(leaf).len = 0;
        leaf
    }

    /// Moves the keys of one leaf from `from` on behind those of another one.
    fn move_tail(&mut self, leaf: u32, from: usize, other: u32) {
        let pair = self.leaves.get_disjoint_mut([leaf as usize, other as usize]);
        let [leaf, other] = pair.expect("two leaves of the pool");
        leaf.move_tail(from, other);
    }
}

/// A point between the keys of an order, before the key that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cursor {
    /// Index in the directory.
    leaf: usize,
    /// Index in the leaf; may be its length.
    at: usize,
}

/// Requests of one class and direction by their first sector.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// For each leaf a sector that is not above its first one nor below the last one before it.
    starts: Vec<u64>,
    leaves: Vec<u32>,
    /// What [`Order::following`] this sector is, if it is known.
    known: Option<(u64, Cursor)>,
}

impl Order {
    /// An order with room for so many keys.
    pub(super) fn new(keys: usize) -> Order {
        let count = keys * 2 / (JOIN + 1) + 1;
        Order { starts: Vec::with_capacity(count), leaves: Vec::with_capacity(count), known: None }
    }

    /// The point behind all keys up to and including `sector`.
    #[inline]
    pub(super) fn behind(&self, pool: &Leaves, sector: u64) -> Cursor {
        let leaf = self.starts.partition_point(|start| *start <= sector).saturating_sub(1);
        let Some(&number) = self.leaves.get(leaf) else { return Cursor { leaf: 0, at: 0 } };
        let at = pool.at(number).sectors().partition_point(|key| *key <= sector);
        Cursor { leaf, at }
    }

    /// The point before all keys from `sector` on.
    #[inline]
    pub(super) fn following(&self, pool: &Leaves, sector: u64) -> Cursor {
        if let Some((known, cursor)) = self.known
            && known == sector
        {
            return cursor;
        }
        let leaf = self.starts.partition_point(|start| *start < sector).saturating_sub(1);
        let Some(&number) = self.leaves.get(leaf) else { return Cursor { leaf: 0, at: 0 } };
        let at = pool.at(number).sectors().partition_point(|key| *key < sector);
        self.forward(pool, Cursor { leaf, at })
    }

    /// The same point as one before a key, if there is one behind it.
    #[inline]
    fn forward(&self, pool: &Leaves, cursor: Cursor) -> Cursor {
        match self.leaves.get(cursor.leaf) {
            Some(&number) if cursor.at == pool.at(number).len => {
                Cursor { leaf: cursor.leaf + 1, at: 0 }
            }
            _ => cursor,
        }
    }

    /// The place of the key before a point.
    #[inline]
    pub(super) fn before(&self, pool: &Leaves, cursor: Cursor) -> Option<u32> {
        if let Some(at) = cursor.at.checked_sub(1) {
            return Some(pool.at(self.leaves[cursor.leaf]).places[at]);
        }
        let number = *self.leaves.get(cursor.leaf.checked_sub(1)?)?;
        let leaf = pool.at(number);
        Some(leaf.places[leaf.len - 1])
    }

    /// The key behind a point: where it stands, and its place.
    #[inline]
    pub(super) fn after(&self, pool: &Leaves, cursor: Cursor) -> Option<(Cursor, u32)> {
        let cursor = self.forward(pool, cursor);
        let leaf = pool.at(*self.leaves.get(cursor.leaf)?);
        Some((cursor, leaf.places[cursor.at]))
    }

    /// Where the key of this place stands.
    pub(super) fn find(&self, pool: &Leaves, sector: u64, place: u32) -> Cursor {
        let mut cursor = self.following(pool, sector);
        loop {
            let number = *self.leaves.get(cursor.leaf).expect("what waits has a key");
            if pool.at(number).places[cursor.at] == place {
                return cursor;
            }
            cursor = self.forward(pool, Cursor { at: cursor.at + 1, ..cursor });
        }
    }

    /// Adds a key at the point [`Order::behind`] its sector.
    #[inline]
    pub(super) fn insert(&mut self, pool: &mut Leaves, cursor: Cursor, sector: u64, place: u32) {
        self.known = None;
        let mut cursor = cursor;
        match self.leaves.get(cursor.leaf) {
            None => {
                self.leaves.push(pool.take());
                self.starts.push(sector);
            }
            Some(&number) if pool.at(number).len == FULL => {
                cursor = self.split(pool, cursor, sector);
            }
            Some(_) => {}
        }
        if sector < self.starts[cursor.leaf] {
            self.starts[cursor.leaf] = sector;
        }
        pool.at_mut(self.leaves[cursor.leaf]).insert(cursor.at, sector, place);
    }

    /// Makes room in a full leaf for a key at a point of it; says where the point is then.
    fn split(&mut self, pool: &mut Leaves, cursor: Cursor, sector: u64) -> Cursor {
        let Cursor { leaf, at } = cursor;
        let number = self.leaves[leaf];
        // Keys that come in ascending order leave full leaves behind, not half empty ones.
        let is_last = leaf + 1 == self.leaves.len() && at == FULL;
        let keep = if is_last { FULL } else { FULL / 2 };
        let start = if is_last { sector } else { pool.at(number).sectors[keep] };
        let new = pool.take();
        pool.move_tail(number, keep, new);
        self.leaves.insert(leaf + 1, new);
        self.starts.insert(leaf + 1, start);
        if at > keep || is_last { Cursor { leaf: leaf + 1, at: at - keep } } else { cursor }
    }

    /// Gives the key at a point a lower sector, not below that of the key before it.
    pub(super) fn lower(&mut self, pool: &mut Leaves, cursor: Cursor, sector: u64) {
        self.known = None;
        pool.at_mut(self.leaves[cursor.leaf]).sectors[cursor.at] = sector;
        self.starts[cursor.leaf] = self.starts[cursor.leaf].min(sector);
    }

    /// Removes the key at a point.
    #[inline]
    pub(super) fn remove(&mut self, pool: &mut Leaves, cursor: Cursor) {
        self.known = None;
        self.remove_at(pool, cursor);
    }

    /// Removes the key at the point that follows the last one that was removed here: what follows
    /// its sector is known then.
    #[inline]
    pub(super) fn sweep(&mut self, pool: &mut Leaves, cursor: Cursor, sector: u64) {
        let stays = self.remove_at(pool, cursor);
        self.known = stays.then(|| (sector, self.forward(pool, cursor)));
    }

    /// Removes the key at a point; says whether the point is still the same.
    #[inline]
    fn remove_at(&mut self, pool: &mut Leaves, Cursor { leaf, at }: Cursor) -> bool {
        let removed_from = pool.at_mut(self.leaves[leaf]);
        removed_from.remove(at);
        let len = removed_from.len;
        if len > JOIN {
            return true;
        }
        self.thin_out(pool, leaf, len)
    }

    /// Restores the invariant after a leaf has lost a key; says whether points in it stay.
    fn thin_out(&mut self, pool: &mut Leaves, leaf: usize, len: usize) -> bool {
        let len_of = |order: &Order, leaf: usize| pool.at(order.leaves[leaf]).len;
        if len == 0 {
            self.drop_leaf(pool, leaf);
        } else if leaf + 1 < self.leaves.len() && len + len_of(self, leaf + 1) <= JOIN {
            pool.move_tail(self.leaves[leaf + 1], 0, self.leaves[leaf]);
            self.drop_leaf(pool, leaf + 1);
        } else if leaf > 0 && len + len_of(self, leaf - 1) <= JOIN {
            pool.move_tail(self.leaves[leaf], 0, self.leaves[leaf - 1]);
            self.drop_leaf(pool, leaf);
            return false;
        }
        true
    }

    fn drop_leaf(&mut self, pool: &mut Leaves, leaf: usize) {
        pool.free.push(self.leaves.remove(leaf));
        self.starts.remove(leaf);
    }

    /// The places from the first key to the last.
    pub(super) fn places<'a>(&'a self, pool: &'a Leaves) -> impl Iterator<Item = u32> + 'a {
        self.leaves.iter().flat_map(|number| {
            let leaf = pool.at(*number);
            leaf.places[..leaf.len].iter().copied()
        })
    }
}
