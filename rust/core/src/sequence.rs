//! A sequence: one stream of tokens of a request, and how far it has come.

use std::sync::Arc;

use crate::ids::{BlockId, RequestId, RowId};

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

/// What a user submits.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The prompt's token ids.
    pub prompt: Vec<i32>,
    /// Bound on the generated tokens, at least 1.
    pub max_new_tokens: i64,
    /// Tokens that end the sequence. Ids outside the vocabulary never come up, and do no harm.
    pub eos: Arc<[i32]>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Requests of a higher one are admitted first and reset last; 0 is usual.
    pub priority: i32,
    /// Seed of the request's draws; `None` derives one from the engine's seed and the request's ordinal.
    pub seed: Option<u64>,
    /// An event for each token, not only the terminal one.
    pub streaming: bool,
    /// Keep the time of each token.
    pub record_timestamps: bool,
    /// Keep the logarithm of each token's probability.
    pub record_logprobs: bool,
}

/// Where a live sequence stands. The ends (finished, failed, cancelled) are not here: a sequence that ended is gone
/// from the engine, and its terminal event tells how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// In the queue, without blocks or row.
    Pending,
    /// Some of its known tokens have no K and V yet.
    Prefilling,
    /// All but its last token have K and V.
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

/// A live sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub request: RequestId,
    pub phase: Phase,
    /// Prompt and generated tokens.
    pub tokens: Vec<i32>,
    pub prompt_len: u32,
    pub priority: i32,
    /// Leading tokens whose K and V are in the blocks: those of committed steps only.
    pub computed: u32,
    /// Length at which it ends, prompt included.
    pub max_len: u32,
    /// Block numbers, page-major: `blocks[page * num_groups + group]`.
    pub blocks: Vec<BlockId>,
    /// Pages that each group has given back, as no later token sees them: their entries are trash. Empty where no
    /// group forgets.
    pub forgotten: Vec<u32>,
    /// The same before the last commit: what is between the two is news for the tables on the device.
    pub forgotten_before: Vec<u32>,
    pub row: Option<RowId>,
    /// Order of first admission: what "newest" means when victims are chosen. 0 before.
    pub admitted: u64,
    /// Steps in which others were admitted past it while it was the head of the queue.
    pub passed_over: u32,
    pub eos: Arc<[i32]>,
    pub sampling: Sampling,
    /// Stream of its random draws.
    pub draw_key: u64,
    pub streaming: bool,
    pub record_timestamps: bool,
    pub record_logprobs: bool,
    pub logprobs: Vec<f32>,
    pub timestamps: Vec<f64>,
    /// When it was first planned; before, `None`.
    pub started: Option<f64>,
}

impl Sequence {
    /// Known tokens without K and V: 1 for a decoding sequence.
    pub fn remaining(&self) -> u32 {
        self.tokens.len() as u32 - self.computed
    }

    /// Blocks it lacks to hold `len` tokens.
    pub fn blocks_lacking(&self, len: u32, page_size: u32, num_groups: u32) -> u32 {
        (len.div_ceil(page_size) * num_groups).saturating_sub(self.blocks.len() as u32)
    }

    /// Tokens that it can be extended by with `available` more blocks.
    pub fn room(&self, available: u32, page_size: u32, num_groups: u32) -> u32 {
        let pages = self.blocks.len() as u32 / num_groups + available / num_groups;
        (pages * page_size).saturating_sub(self.computed)
    }

    /// Whether the newest token ends it, and how.
    pub fn end(&self) -> Option<Finish> {
        let last = self.tokens.last()?;
        if self.eos.contains(last) {
            Some(Finish::Stop)
        } else if self.tokens.len() as u32 >= self.max_len {
            Some(Finish::Length)
        } else {
            None
        }
    }
}
