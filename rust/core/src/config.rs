//! What an engine is made with. Values are resolved by the caller; here they are only checked.

use crate::error::{Error, Result};
use crate::group::Reach;
use crate::hash::KEY_BITS;

/// Match units are at most so long unless set: short prompts share too.
const LONGEST_MATCH_UNIT: u32 = 32;

/// The order in which a step takes its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Decodes, then split prefills, then arrivals.
    #[default]
    Fifo,
    /// Split prefills, then decodes, then arrivals. Decodes that got no tokens for seven steps go first in the eighth.
    PrefillFirst,
}

/// Which cached block goes first when a block is needed and none is free. One at a time, and of a sequence that ended
/// the tail before the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Eviction {
    /// The one that was cached (or, if shared meanwhile, cached again) the longest ago.
    #[default]
    Lru,
    /// The one that was cached last.
    Lifo,
}

/// Who is next among those that wait for the first time.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Fairness {
    /// Whoever came first.
    #[default]
    Arrival,
    /// The tenant that was served least, by its weight: prompt tokens count once, generated ones twice. Tenants that are
    /// not named weigh 1.
    Tenants(Vec<(String, f64)>),
}

impl Fairness {
    pub(crate) fn is_on(&self) -> bool {
        matches!(self, Fairness::Tenants(_))
    }

    pub(crate) fn weight(&self, tenant: &str) -> f64 {
        match self {
            Fairness::Arrival => 1.0,
            Fairness::Tenants(weights) => {
                weights.iter().find(|(name, _)| name == tenant).map_or(1.0, |&(_, weight)| weight)
            }
        }
    }

    fn is_valid(&self) -> bool {
        match self {
            Fairness::Arrival => true,
            Fairness::Tenants(weights) => weights.iter().all(|(_, weight)| (1e-3..=1e3).contains(weight)),
        }
    }
}

/// Sizes and bounds of an engine. Start from [`EngineConfig::default`]: a field that is not named keeps its value.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Tokens of a page.
    pub page_size: u32,
    /// Whole-model blocks of the pool: the pool has so many for each group.
    pub num_blocks: u32,
    /// Groups of calls, by how far back they look; each takes a block for the same tokens.
    pub groups: Vec<Reach>,
    /// Rows of the device-resident tables: sequences that can be active at once.
    pub max_requests_per_batch: u32,
    /// Tokens of a step.
    pub max_batch_tokens: u32,
    /// Tokens of K and V that a step may read, for backends that gather them; `None` for the others.
    pub max_cache_reads: Option<u64>,
    /// Part of the pool below which prefills wait, 0 to 1.
    pub safety_margin: f64,
    /// The order within a step.
    pub policy: Policy,
    /// Who is next among those that wait.
    pub fairness: Fairness,
    /// Token ids go from 0 to below this.
    pub vocab_size: u32,
    /// Positions of the model, when they end.
    pub max_positions: Option<u32>,
    /// Longest sequence of the first *regime*, where a model computes longer ones otherwise (RoPE with long factors):
    /// sequences of two regimes are never in one step, and one that outgrows the first is computed again.
    pub first_regime: Option<u32>,
    /// Bound on requests that wait to be admitted for the first time; 0 is none.
    pub max_queue_size: usize,
    /// Bytes of outputs that nobody took, with more than which no request is taken; `None` is no bound.
    pub max_output_bytes: Option<u64>,
    /// Seed of requests that bring none, and of the keys of the prefix cache.
    pub seed: u64,
    /// Tokens of an entry of the prefix cache; a divisor of the page. 0: no prefix cache.
    pub match_unit: u32,
    /// The order in which cached blocks are given to others.
    pub cache_eviction: Eviction,
    /// Blocks of host memory that take K and V of victims; 0: victims are computed again.
    pub swap_blocks: u32,
    /// Bits of a key of the prefix cache that count. All of them, but in tests of what happens when keys collide.
    pub hash_bits: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            page_size: 256,
            num_blocks: 64,
            groups: vec![Reach::Full],
            max_requests_per_batch: 64,
            max_batch_tokens: 8192,
            max_cache_reads: None,
            safety_margin: 0.0,
            policy: Policy::Fifo,
            fairness: Fairness::Arrival,
            vocab_size: 1 << 16,
            max_positions: None,
            first_regime: None,
            max_queue_size: 0,
            max_output_bytes: None,
            seed: 0,
            match_unit: Self::default_match_unit(256),
            cache_eviction: Eviction::Lru,
            swap_blocks: 0,
            hash_bits: KEY_BITS,
        }
    }
}

impl EngineConfig {
    /// Checks every bound.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field, its value and its bound.
    pub fn validate(&self) -> Result<()> {
        let checks = [
            ("page_size", self.page_size >= 1, self.page_size.to_string(), "at least 1"),
            ("num_blocks", self.num_blocks >= 1, self.num_blocks.to_string(), "at least 1"),
            (
                "groups",
                !self.groups.is_empty() && self.groups.iter().all(|reach| reach.most_seen() != Some(0)),
                format!("{:?}", self.groups),
                "at least one, windows and chunks at least one token long",
            ),
            (
                "max_requests_per_batch",
                self.max_requests_per_batch >= 1 && self.max_requests_per_batch <= self.max_batch_tokens,
                self.max_requests_per_batch.to_string(),
                "at least 1 and at most max_batch_tokens",
            ),
            ("max_batch_tokens", self.max_batch_tokens >= 1, self.max_batch_tokens.to_string(), "at least 1"),
            (
                "safety_margin",
                (0.0..=1.0).contains(&self.safety_margin),
                self.safety_margin.to_string(),
                "between 0 and 1",
            ),
            (
                "match_unit",
                self.match_unit == 0 || self.page_size.is_multiple_of(self.match_unit),
                self.match_unit.to_string(),
                "0 (no prefix cache) or a divisor of page_size",
            ),
            (
                "fairness",
                self.fairness.is_valid(),
                format!("{:?}", self.fairness),
                "with weights from 0.001 to 1000",
            ),
            (
                "hash_bits",
                (1..=KEY_BITS).contains(&self.hash_bits),
                self.hash_bits.to_string(),
                "at least 1 and at most 128",
            ),
            (
                "first_regime",
                self.first_regime != Some(0),
                format!("{:?}", self.first_regime),
                "at least 1 token, or none",
            ),
            ("vocab_size", self.vocab_size >= 1, self.vocab_size.to_string(), "at least 1"),
            (
                "num_blocks",
                self.pool_blocks().is_some_and(|blocks| {
                    // Write slots are int32, the trash blocks included.
                    (u64::from(blocks) + 2) * u64::from(self.page_size) <= i32::MAX as u64
                }),
                self.num_blocks.to_string(),
                "so small that (num_blocks * groups + 2) * page_size stays below 2^31",
            ),
            (
                "max_cache_reads",
                self.max_cache_reads.is_none_or(|reads| reads >= self.most_reads()),
                format!("{:?}", self.max_cache_reads),
                "at least what one sequence may read that fills the pool",
            ),
        ];
        match checks.into_iter().find(|(_, holds, ..)| !holds) {
            Some((name, _, value, bound)) => Err(Error::InvalidConfig { name, value, bound }),
            None => Ok(()),
        }
    }

    /// The largest divisor of a page that is at most 32.
    pub fn default_match_unit(page_size: u32) -> u32 {
        (1..=LONGEST_MATCH_UNIT.min(page_size))
            .rev()
            .find(|unit| page_size.is_multiple_of(*unit))
            .unwrap_or(1)
    }

    /// Groups of calls.
    pub fn num_groups(&self) -> u32 {
        self.groups.len() as u32
    }

    /// Blocks of the pool, `None` beyond what a block number can count.
    pub fn pool_blocks(&self) -> Option<u32> {
        self.num_blocks.checked_mul(self.num_groups())
    }

    /// Blocks that hold `len` tokens of one sequence while it grows by one token a step.
    pub(crate) fn blocks_to_hold(&self, len: u32) -> u32 {
        self.groups.iter().map(|reach| reach.pages(len, self.page_size)).sum()
    }

    /// Tokens of one sequence that an empty pool bears; positions are counted in int32.
    pub fn capacity_tokens(&self) -> u64 {
        let pool = self.num_blocks.saturating_mul(self.num_groups());
        let (mut fits, mut too_many) = (0, i32::MAX as u32);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            if self.blocks_to_hold(middle) <= pool { fits = middle } else { too_many = middle }
        }
        u64::from(fits)
    }

    /// Whether a sequence of that length is beyond the first regime.
    pub(crate) fn is_second_regime(&self, len: u32) -> bool {
        self.first_regime.is_some_and(|longest| len > longest)
    }

    /// Tokens of one sequence that pool and positions bear.
    pub(crate) fn longest(&self) -> u32 {
        let positions = self.max_positions.map_or(u64::MAX, u64::from);
        self.capacity_tokens().min(positions) as u32
    }

    /// Tokens that one sequence reads in a step that brings one token, at most.
    fn most_reads(&self) -> u64 {
        let seen = |reach: &Reach| reach.most_seen().map_or(u64::MAX, u64::from);
        let longest = self.capacity_tokens().min(self.max_positions.map_or(u64::MAX, u64::from));
        self.groups.iter().map(seen).max().unwrap_or(0).min(longest)
    }

    /// Available blocks with fewer than which prefills wait.
    pub(crate) fn reserve(&self) -> u32 {
        let pool = self.num_blocks * self.num_groups();
        (self.safety_margin * f64::from(pool)).ceil() as u32
    }

    /// Whether some group forgets tokens.
    pub(crate) fn has_windows(&self) -> bool {
        self.groups.iter().any(|&reach| reach != Reach::Full)
    }
}
