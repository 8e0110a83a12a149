//! A sequence: one stream of tokens of a request, and how far it has come.

use std::sync::Arc;

use crate::config::EngineConfig;
use crate::epochs::TokenEpochs;
use crate::hash::Key;
use crate::ids::{BlockId, RequestId, RowId};
use crate::pool::Tickets;
use crate::prefix::NodeId;
use crate::queue::TenantId;
use crate::swap::Swapped;
use crate::text::Text;

/// How the next token is chosen from the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// The largest logit.
    Greedy,
    /// A draw, after temperature, top-k and top-p (in that order, as `generate` applies them).
    Draw {
        /// Divides the logits; above 0.
        temperature: f32,
        /// Only so many of the largest logits count; 0 is all.
        top_k: u32,
        /// Only the most probable tokens that together reach this probability count; 1 is all.
        top_p: f32,
    },
}

/// Groups whose blocks of the last page stand in the sequence itself.
pub(crate) const LAST_BLOCKS: usize = 3;

/// Tokens that a sequence gets room for at its admission, at most.
const MOST_RESERVED: u32 = 1 << 16;

/// What a user submits.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The prompt's token ids.
    pub prompt: Vec<i32>,
    /// Bound on the generated tokens, at least 1.
    pub max_new_tokens: i64,
    /// Sequences that continue the prompt, at least 1. Each has an id: the request's, and those that follow it. To
    /// cancel the first one cancels all.
    pub n: u32,
    /// Tokens that end a sequence. Ids outside the vocabulary never come up, and do no harm.
    pub eos: Arc<[i32]>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Requests of a higher one are admitted first and reset last; 0 is usual.
    pub priority: i32,
    /// Seed of the request's draws; `None` derives one from the engine's seed and the request's ordinal.
    pub seed: Option<u64>,
    /// Whose it is, where tenants share fairly.
    pub tenant: String,
    /// Prompts share the prefix cache only with those of the same salt.
    pub cache_salt: String,
    /// The adapter that computes K and V; prompts share only with those of the same one.
    pub adapter: String,
    /// An event for each token, not only the terminal one.
    pub streaming: bool,
    /// Keep the time of each token.
    pub record_timestamps: bool,
    /// Keep the logarithm of each token's probability.
    pub record_logprobs: bool,
}

impl Default for Request {
    /// One greedy token after an empty prompt, which nobody takes: to be filled in.
    fn default() -> Self {
        Self {
            prompt: Vec::new(),
            max_new_tokens: 1,
            n: 1,
            eos: [].into(),
            sampling: Sampling::Greedy,
            priority: 0,
            seed: None,
            tenant: String::new(),
            cache_salt: String::new(),
            adapter: String::new(),
            streaming: false,
            record_timestamps: false,
            record_logprobs: false,
        }
    }
}

/// Where a live sequence stands. The ends (finished, failed, cancelled) are not here: a sequence that ended is gone
/// from the engine, and its terminal event tells how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// In the queue, without blocks or row.
    Pending,
    /// Some of its known tokens have no K and V yet, and are not on their way.
    Prefilling,
    /// A token was sampled for it, or is on its way: one token at a time from here on.
    Decoding,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// An end token came up; it is the last of the tokens.
    Stop,
    /// The bound on tokens, the model's positions or the pool's size was reached.
    Length,
    /// Its user gave it up.
    Cancelled,
    /// Something broke, in these words.
    Failed(String),
}

/// A live sequence: what a step of a decoding one reads and writes, side by side, and the rest.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub request: RequestId,
    /// Prompt and generated tokens.
    pub tokens: Text,
    /// Block numbers, page-major: `blocks[page * num_groups + group]`.
    pub blocks: Vec<BlockId>,
    /// Places of `blocks` that the tables on the device do not have yet, or have otherwise.
    pub news: Vec<u32>,
    /// Stream of its random draws.
    pub draw_key: u64,
    pub row: Option<RowId>,
    /// Leading ones of `news` that steps in flight bring.
    pub news_sent: u32,
    /// Leading tokens whose K and V are in the blocks: those of committed steps only.
    pub computed: u32,
    /// The same with all planned steps done.
    pub planned: u32,
    /// Tokens that the blocks have room for.
    pub held: u32,
    /// Tokens that steps in flight sample for it: placeholders until their commit.
    pub pending: u32,
    /// The blocks of its last page, for the first groups, so that a decode need not look for them; of a table of so many
    /// blocks.
    pub last_blocks: [BlockId; LAST_BLOCKS],
    pub last_blocks_of: u32,
    /// By slot, its place among the sampled rows of the step.
    pub sampled_at: [u32; 2],
    /// Length at which it ends, prompt included.
    pub max_len: u32,
    /// Computed tokens with which its next match unit is complete; beyond all lengths when it shares nothing.
    pub unit_end: u32,
    /// The first of the tokens that end it; `-1`: none.
    pub first_eos: i32,
    /// With all planned steps done.
    pub phase: Phase,
    /// Steps in flight that it is in.
    pub in_flight: Tickets,
    pub streaming: bool,
    pub record_timestamps: bool,
    pub record_logprobs: bool,
    /// Whether some group gives pages back.
    pub forgets: bool,
    /// Whether it is of the second regime.
    pub second_regime: bool,
    /// Whether there are more tokens that end it than the first.
    pub more_eos: bool,
    pub rest: Box<Rest>,
}

/// What a step of a decoding sequence leaves alone, mostly.
#[derive(Debug)]
pub(crate) struct Rest {
    /// The first of the sequences of its request.
    pub parent: RequestId,
    pub prompt_len: u32,
    pub tenant: TenantId,
    pub priority: i32,
    /// Pages that each group has given back, as no later token sees them: their entries are trash. Empty where no
    /// group forgets.
    pub forgotten: Vec<u32>,
    /// Order of arrival: of equals in the queue the older is first.
    pub arrived: u64,
    /// Order of first admission: what "newest" means when victims are chosen. 0 before.
    pub admitted: u64,
    /// Steps in which others were admitted past it while it was the head of the queue.
    pub passed_over: u32,
    /// Tokens that it was admitted with, this time: what it prefills.
    pub prefill_len: u32,
    /// Root and keys of its match units, as far as they were needed.
    pub root: Key,
    pub keys: Vec<Key>,
    /// Whether it takes part in the prefix cache.
    pub shares: bool,
    /// Leading match units that stand in the index, and the node of the last of them, which it holds.
    pub published: u32,
    pub tip: Option<NodeId>,
    /// The match unit of its known tokens that it computes next: others that need it wait.
    pub producing: Option<Key>,
    /// Tokens of the prompt that were cached when it was first admitted.
    pub cached_tokens: u32,
    /// While it waits: the match unit that another was computing for it, and the blocks that it lacked with the number of
    /// steps planned by then, when it was last looked at.
    pub follows: Option<Key>,
    pub no_room: Option<(u32, u64)>,
    /// The weights that computed its K and V.
    pub epoch: u64,
    /// The weights that chose its tokens.
    pub epochs: TokenEpochs,
    /// What it left on the host as a victim.
    pub swapped: Option<Swapped>,
    pub eos: Arc<[i32]>,
    pub sampling: Sampling,
    pub logprobs: Vec<f32>,
    pub timestamps: Vec<f64>,
    /// When it was first planned; before, `None`.
    pub started: Option<f64>,
}

impl Sequence {
    /// Tokens that it will have when all planned steps are done.
    pub fn known(&self) -> u32 {
        self.tokens.len() as u32 + self.pending
    }

    /// Those of them without K and V by then: 1 for a decoding sequence.
    pub fn remaining(&self) -> u32 {
        self.known() - self.planned
    }

    /// Whether the steps in flight bring it to its bound, so that no more are needed.
    pub fn ends_in_flight(&self) -> bool {
        self.known() >= self.max_len
    }

    /// Blocks it lacks to hold `len` tokens.
    pub fn blocks_lacking(&self, len: u32, page_size: u32, num_groups: u32) -> u32 {
        len.saturating_sub(self.held).div_ceil(page_size) * num_groups
    }

    /// Tokens that it can be extended by with `available` more blocks.
    pub fn room(&self, available: u32, page_size: u32, num_groups: u32) -> u32 {
        (self.held + available / num_groups * page_size).saturating_sub(self.planned)
    }

    /// Gives its lists room for what is to come, so that they need not grow while it decodes.
    pub fn reserve(&mut self, config: &EngineConfig) {
        let more = (self.max_len.min(MOST_RESERVED) as usize).saturating_sub(self.tokens.len());
        let longest = self.tokens.len() + more;
        self.tokens.reserve(more);
        let pages = longest.div_ceil(config.page_size as usize) + 1;
        self.blocks.reserve(pages * config.groups.len());
        // A page may be started, merged and given back before a step brings the news.
        self.news.reserve(4 * config.groups.len());
        if let Some(units) = longest.checked_div(config.match_unit as usize) {
            self.rest.keys.reserve_exact(units.saturating_sub(self.rest.keys.len()));
        }
        if self.record_logprobs {
            self.rest.logprobs.reserve(more);
        }
        if self.record_timestamps {
            self.rest.timestamps.reserve(more);
        }
    }

    /// The blocks of its last page.
    pub fn last_page(&mut self, num_groups: usize) -> &[BlockId] {
        let first = self.blocks.len() - num_groups;
        if num_groups > LAST_BLOCKS {
            return &self.blocks[first..];
        }
        if self.last_blocks_of != self.blocks.len() as u32 {
            self.last_blocks_of = self.blocks.len() as u32;
            self.last_blocks[..num_groups].copy_from_slice(&self.blocks[first..]);
        }
        &self.last_blocks[..num_groups]
    }

    /// Places of `blocks` that no step has brought yet.
    pub fn unsent(&self) -> &[u32] {
        &self.news[self.news_sent as usize..]
    }

    /// Whether the newest token ends it, and how.
    pub fn end(&self) -> Option<Finish> {
        let last = self.tokens.last()?;
        if last == self.first_eos || self.more_eos && self.rest.eos.contains(&last) {
            Some(Finish::Stop)
        } else if self.tokens.len() as u32 >= self.max_len {
            Some(Finish::Length)
        } else {
            None
        }
    }
}
