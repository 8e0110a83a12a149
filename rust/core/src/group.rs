//! Kinds, groups and the one block size that serves them all.
//!
//! Attention calls that are alike (heads, head sizes, dtype, window) are of one *kind*. A *page* holds K and V of
//! `page_size` tokens of one call; a *block* holds one page per call of a *group*. Blocks of every group have the
//! same bytes, so that any block can go to any group: a kind with many calls is split into several groups, and
//! where that does not come out even, a block has padding pages.

use std::ops::Range;

use crate::error::{Error, Result};

/// Blocks start at multiples of this many bytes: a cache line, and more than any dtype needs.
pub const BLOCK_ALIGNMENT: u64 = 64;

/// A group costs every sequence one more block table, so one more group must save at least this part of the pool.
const GROUP_WORTH: f64 = 0.02;

/// How far back the calls of a group look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// To the first token.
    Full,
    /// Over so many tokens, the query's own included; at least 1.
    Window(u32),
    /// To the start of the query's chunk; chunks are so many tokens long, at least 1.
    Chunk(u32),
}

impl Reach {
    /// The first position that a query at `position` sees.
    pub fn first_seen(self, position: u32) -> u32 {
        match self {
            Reach::Full => 0,
            Reach::Window(window) => (position + 1).saturating_sub(window),
            Reach::Chunk(chunk) => position - position % chunk,
        }
    }

    /// Tokens that a query sees at most, its own included; `None`: all.
    pub fn most_seen(self) -> Option<u32> {
        match self {
            Reach::Full => None,
            Reach::Window(tokens) | Reach::Chunk(tokens) => Some(tokens),
        }
    }

    /// Pages that hold what the last of `len` tokens sees, at most.
    pub(crate) fn pages(self, len: u32, page_size: u32) -> u32 {
        let all = len.div_ceil(page_size);
        // A stretch of tokens that starts at the end of a page lies in one page more than it fills.
        self.most_seen().map_or(all, |seen| all.min((seen - 1).div_ceil(page_size) + 1))
    }
}

/// Calls that are alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// Calls that have pages of their own (those that read another call's pages are not counted).
    pub num_calls: u32,
    /// Bytes of a page: K and V of `page_size` tokens of one call.
    pub page_bytes: u64,
}

/// Some calls of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Index of the kind.
    pub kind: usize,
    /// The group's calls, counted among the calls of the kind; the n-th of them has the n-th page of a block.
    pub calls: Range<u32>,
}

/// How the calls of a model share blocks of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a block of any group.
    pub block_bytes: u64,
    /// The groups, those of a kind side by side.
    pub groups: Vec<Group>,
    /// Bytes of a whole-model block (one block per group) that hold no page.
    pub padding_bytes: u64,
}

impl Geometry {
    /// The split with the fewest bytes for `page_size` tokens of the whole model, a further group counting as 2 %.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when there is no kind, or a kind without calls or bytes.
    pub fn split(kinds: &[Kind]) -> Result<Self> {
        if kinds.is_empty() || kinds.iter().any(|kind| kind.num_calls == 0 || kind.page_bytes == 0) {
            return Err(Error::InvalidConfig {
                name: "kinds",
                value: format!("{kinds:?}"),
                bound: "at least one kind, each with calls and bytes",
            });
        }
        let largest_page = kinds.iter().map(|kind| kind.page_bytes).max().unwrap_or(0);
        let candidates = kinds
            .iter()
            .flat_map(|kind| (1..=u64::from(kind.num_calls)).map(|pages| pages * kind.page_bytes))
            .filter(|&bytes| bytes >= largest_page);
        let groups_at = |bytes: u64| -> u64 {
            kinds.iter().map(|kind| u64::from(kind.num_calls).div_ceil(bytes / kind.page_bytes)).sum()
        };
        let cost = |bytes: u64| -> f64 {
            let groups = groups_at(bytes) as f64;
            groups * bytes as f64 * (1.0 + GROUP_WORTH * groups)
        };
        // Of equals the larger block: fewer groups.
        let bytes =
            candidates.max_by(|&a, &b| cost(b).total_cmp(&cost(a)).then(a.cmp(&b))).unwrap_or(largest_page);
        let groups: Vec<_> = kinds
            .iter()
            .enumerate()
            .flat_map(|(index, kind)| even_parts(kind.num_calls, bytes / kind.page_bytes, index))
            .collect();
        let block_bytes = bytes.next_multiple_of(BLOCK_ALIGNMENT);
        let pages: u64 = kinds.iter().map(|kind| u64::from(kind.num_calls) * kind.page_bytes).sum();
        let padding_bytes = groups.len() as u64 * block_bytes - pages;
        Ok(Self { block_bytes, groups, padding_bytes })
    }
}

/// Groups of at most `most` calls, as even as they come.
fn even_parts(num_calls: u32, most: u64, kind: usize) -> Vec<Group> {
    let parts = u64::from(num_calls).div_ceil(most) as u32;
    let bounds = |part: u32| (u64::from(num_calls) * u64::from(part) / u64::from(parts)) as u32;
    (0..parts).map(|part| Group { kind, calls: bounds(part)..bounds(part + 1) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kind_is_one_group_without_padding() {
        let split = Geometry::split(&[Kind { num_calls: 30, page_bytes: 24_576 }]).unwrap();
        assert_eq!(split.groups, [Group { kind: 0, calls: 0..30 }]);
        assert_eq!((split.block_bytes, split.padding_bytes), (30 * 24_576, 0));
    }

    #[test]
    fn kinds_of_unlike_numbers_meet_at_a_common_block() {
        // Gemma-3 like: 52 windowed calls, 10 full ones, pages alike.
        let kinds = [Kind { num_calls: 52, page_bytes: 1024 }, Kind { num_calls: 10, page_bytes: 1024 }];
        let split = Geometry::split(&kinds).unwrap();
        assert!(split.padding_bytes * 10 <= 62 * 1024, "at most a tenth is padding: {split:?}");
        assert!(split.groups.len() <= 8, "{split:?}");
    }

    #[test]
    fn each_call_has_one_page_in_one_group_and_fits_its_block() {
        for calls_a in 1..20 {
            for calls_b in 1..8 {
                for (bytes_a, bytes_b) in [(64, 64), (96, 64), (1000, 24)] {
                    let kinds = [
                        Kind { num_calls: calls_a, page_bytes: bytes_a },
                        Kind { num_calls: calls_b, page_bytes: bytes_b },
                    ];
                    let split = Geometry::split(&kinds).unwrap();
                    for (index, kind) in kinds.iter().enumerate() {
                        let of_kind: Vec<_> =
                            split.groups.iter().filter(|group| group.kind == index).collect();
                        let calls: Vec<u32> = of_kind.iter().flat_map(|group| group.calls.clone()).collect();
                        assert_eq!(calls, (0..kind.num_calls).collect::<Vec<_>>());
                        for group in of_kind {
                            assert!(group.calls.len() as u64 * kind.page_bytes <= split.block_bytes);
                        }
                    }
                    assert_eq!(split.block_bytes % BLOCK_ALIGNMENT, 0);
                }
            }
        }
    }

    #[test]
    fn nothing_to_split_is_refused() {
        assert!(Geometry::split(&[]).is_err());
        assert!(Geometry::split(&[Kind { num_calls: 0, page_bytes: 8 }]).is_err());
    }
}
