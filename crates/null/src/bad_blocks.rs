//! The list of bad blocks: sorted disjoint ranges, as in Linux's block/badblocks.c.

/// Maximum number of ranges, as in Linux: one page of them.
pub(crate) const RANGES_MAX: usize = 512;

/// A range of bad sectors; `end` is exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// Bad sectors. Does not allocate after creation.
#[derive(Debug)]
pub(crate) struct BadBlocks {
    ranges: Vec<BadRange>,
}

impl Default for BadBlocks {
    fn default() -> BadBlocks {
        // One more than the maximum: `add` inserts a range before it merges.
        BadBlocks { ranges: Vec::with_capacity(RANGES_MAX + 1) }
    }
}

impl BadBlocks {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The first bad range that overlaps the sectors from `start` up to, not including, `end`.
    pub(crate) fn first_in(&self, start: u64, end: u64) -> Option<BadRange> {
        let index = self.ranges.partition_point(|range| range.end <= start);
        self.ranges.get(index).copied().filter(|range| range.start < end)
    }

    /// Adds a range; `false` if the list is full.
    pub(crate) fn add(&mut self, added: BadRange) -> bool {
        // Adjacent ranges are merged too.
        let first = self.ranges.partition_point(|range| range.end < added.start);
        let after = self.ranges.partition_point(|range| range.start <= added.end);
        if first == after {
            if self.ranges.len() == RANGES_MAX {
                return false;
            }
            self.ranges.insert(first, added);
            return true;
        }
        let merged = BadRange {
            start: added.start.min(self.ranges[first].start),
            end: added.end.max(self.ranges[after - 1].end),
        };
        self.ranges[first] = merged;
        self.ranges.drain(first + 1..after);
        true
    }

    /// Removes a range; `false` if that would split one and the list is full.
    pub(crate) fn remove(&mut self, removed: BadRange) -> bool {
        let first = self.ranges.partition_point(|range| range.end <= removed.start);
        let after = self.ranges.partition_point(|range| range.start < removed.end);
        if first >= after {
            return true;
        }
        let before = BadRange { start: self.ranges[first].start, end: removed.start };
        let rest = BadRange { start: removed.end, end: self.ranges[after - 1].end };
        let keeps = |range: BadRange| range.start < range.end;
        let kept = usize::from(keeps(before)) + usize::from(keeps(rest));
        if self.ranges.len() - (after - first) + kept > RANGES_MAX {
            return false;
        }
        self.ranges.drain(first..after);
        if keeps(rest) {
            self.ranges.insert(first, rest);
        }
        if keeps(before) {
            self.ranges.insert(first, before);
        }
        true
    }
}

/// Parses `+START-END` or `-START-END`, END inclusive. Returns whether to add, and the range.
pub(crate) fn parse(text: &str) -> Result<(bool, BadRange), String> {
    let wanted = || "`+START-END` to add or `-START-END` to clear, END inclusive".to_owned();
    let (add, rest) = match text.trim().split_at_checked(1) {
        Some(("+", rest)) => (true, rest),
        Some(("-", rest)) => (false, rest),
        _ => return Err(wanted()),
    };
    let (start, last) = rest.split_once('-').ok_or_else(wanted)?;
    let start: u64 = start.parse().map_err(|_| wanted())?;
    let last: u64 = last.parse().map_err(|_| wanted())?;
    let end = last.checked_add(1).ok_or_else(wanted)?;
    if start < end { Ok((add, BadRange { start, end })) } else { Err(wanted()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_vector_model() {
        let mut list = BadBlocks::default();
        let mut plain = [false; 200];
        let mut random = 0x2545_f491_4f6c_dd1du64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for _ in 0..5000 {
            let start = next(190);
            let range = BadRange { start, end: start + 1 + next(10) };
            let add = next(2) == 0;
            assert!(if add { list.add(range) } else { list.remove(range) });
            plain[start as usize..range.end as usize].fill(add);
            let (from, to) = (next(100), 100 + next(100));
            let first = (from..to).find(|&sector| plain[sector as usize]);
            let found = list.first_in(from, to);
            assert_eq!(found.map(|range| range.start.max(from)), first);
            assert!(list.ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }

    #[test]
    fn the_list_is_bounded() {
        let mut list = BadBlocks::default();
        for index in 0..RANGES_MAX as u64 {
            assert!(list.add(BadRange { start: index * 10, end: index * 10 + 5 }));
        }
        assert!(!list.add(BadRange { start: 7, end: 8 }));
        assert!(!list.remove(BadRange { start: 2, end: 3 }));
        assert!(list.remove(BadRange { start: 0, end: 3 }));
        assert!(list.add(BadRange { start: 5, end: 11 }));
    }

    #[test]
    fn invalid_texts_are_refused() {
        assert_eq!(parse("+8-15"), Ok((true, BadRange { start: 8, end: 16 })));
        assert_eq!(parse("-0-0\n"), Ok((false, BadRange { start: 0, end: 1 })));
        for bad in ["", "8-15", "+8", "+15-8", "+a-b", "+0-18446744073709551615", "+-1-2", "é"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
