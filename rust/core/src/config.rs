//! What an engine is made with. Values are resolved by the caller; here they are only checked.

use crate::error::{Error, Result};

/// The order in which a step takes its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Decodes, then split prefills, then arrivals.
    #[default]
    Fifo,
}

/// Sizes and bounds of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Tokens of a page.
    pub page_size: u32,
    /// Whole-model blocks of the pool: the pool has `num_blocks * num_groups` blocks.
    pub num_blocks: u32,
    /// Groups of calls; each takes a block for the same tokens.
    pub num_groups: u32,
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
    /// Token ids go from 0 to below this.
    pub vocab_size: u32,
    /// Positions of the model, when they end.
    pub max_positions: Option<u32>,
    /// Bound on requests that wait to be admitted for the first time; 0 is none.
    pub max_queue_size: usize,
    /// Seed of requests that bring none.
    pub seed: u64,
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
            ("num_groups", self.num_groups >= 1, self.num_groups.to_string(), "at least 1"),
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
                self.max_cache_reads.is_none_or(|reads| reads >= self.capacity_tokens()),
                format!("{:?}", self.max_cache_reads),
                "at least the tokens of one sequence that the pool holds",
            ),
        ];
        match checks.into_iter().find(|(_, holds, ..)| !holds) {
            Some((name, _, value, bound)) => Err(Error::InvalidConfig { name, value, bound }),
            None => Ok(()),
        }
    }

    /// Blocks of the pool, `None` beyond what a block number can count.
    pub fn pool_blocks(&self) -> Option<u32> {
        self.num_blocks.checked_mul(self.num_groups)
    }

    /// Tokens of one sequence that an empty pool holds.
    pub fn capacity_tokens(&self) -> u64 {
        u64::from(self.num_blocks) * u64::from(self.page_size)
    }

    /// Available blocks with fewer than which prefills wait.
    pub(crate) fn reserve(&self) -> u32 {
        let pool = self.num_blocks * self.num_groups;
        (self.safety_margin * f64::from(pool)).ceil() as u32
    }
}
