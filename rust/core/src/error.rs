//! The one error type of the core. Messages name the value met, the bound, and what to do.

use crate::ids::Slot;

/// Everything that the core refuses or finds broken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A prompt without tokens.
    #[error("the prompt is empty: a request needs at least one token")]
    EmptyPrompt,
    /// A prompt token that the model has no embedding for.
    #[error(
        "token {token} at position {position} of the prompt is outside the vocabulary: \
         ids go from 0 to {}", vocab_size - 1
    )]
    TokenOutsideVocabulary {
        /// Index into the prompt.
        position: usize,
        /// The offending id.
        token: i64,
        /// Number of ids.
        vocab_size: u32,
    },
    /// A prompt that an empty pool could not hold together with one generated token.
    #[error(
        "the prompt has {prompt} tokens and needs room for {} with its first generated token, but the whole pool \
         holds {capacity} ({num_blocks} blocks of {page_size} tokens): raise num_blocks or shorten the prompt",
        prompt + 1
    )]
    PromptExceedsPool {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of one sequence that an empty pool holds.
        capacity: u64,
        /// Whole-model blocks of the pool.
        num_blocks: u32,
        /// Tokens of a block.
        page_size: u32,
    },
    /// A prompt that leaves no position for a generated token.
    #[error(
        "the prompt has {prompt} tokens, but the model has positions for {max_positions} tokens, prompt and \
         generated together: shorten the prompt to at most {}", max_positions - 1
    )]
    PromptExceedsPositions {
        /// Tokens of the prompt.
        prompt: usize,
        /// Positions of the model.
        max_positions: u32,
    },
    /// A bound on the generated tokens below 1.
    #[error("max_new_tokens is {value}, but a request generates at least 1 token")]
    InvalidMaxNewTokens {
        /// The value met.
        value: i64,
    },
    /// A request for no sequence at all.
    #[error("n is {value}, but a request has at least 1 sequence")]
    InvalidN {
        /// The value met.
        value: u32,
    },
    /// The waiting queue is at its bound.
    #[error(
        "the queue is full: {waiting} requests wait and {wanted} more would be over the bound of {limit} (max_queue_size); \
         try again later"
    )]
    QueueFull {
        /// Sequences that wait.
        waiting: usize,
        /// Sequences that would join them.
        wanted: usize,
        /// `max_queue_size`.
        limit: usize,
    },
    /// Outputs that nobody took are at their bound.
    #[error(
        "outputs that nobody took yet hold {:.1} MiB, more than the bound of {:.1} MiB (output_space): take some before \
         more requests come", *bytes as f64 / 1_048_576.0, *limit as f64 / 1_048_576.0
    )]
    OutputsFull {
        /// Bytes that they hold.
        bytes: u64,
        /// `max_output_bytes`.
        limit: u64,
    },
    /// The engine takes no more requests.
    #[error("{cause}")]
    Closed {
        /// Why it was closed.
        cause: String,
    },
    /// A step was planned or committed against the order of the slots.
    #[error("slot {slot:?} {problem}")]
    SlotMisused {
        /// The slot named.
        slot: Slot,
        /// What is wrong with the call.
        problem: &'static str,
    },
    /// A buffer of a slot is shorter than the step needs.
    #[error("the {buffer} of slot {slot:?} has {have} elements, the step needs {need}")]
    BufferTooSmall {
        /// The slot named.
        slot: Slot,
        /// Which buffer.
        buffer: &'static str,
        /// Elements there are.
        have: usize,
        /// Elements needed.
        need: usize,
    },
    /// A configuration value out of its bounds.
    #[error("{name} is {value}, but must be {bound}")]
    InvalidConfig {
        /// The field.
        name: &'static str,
        /// The value met.
        value: String,
        /// The bound, in words.
        bound: &'static str,
    },
    /// A block was given back that nobody owns.
    #[error("block {block} was released but nobody owns it")]
    DoubleFree {
        /// The block's number.
        block: u32,
    },
    /// A block was to be shared that nobody has, or that is not of the pool.
    #[error("block {block} cannot be shared: nothing is known of what is in it")]
    NotShareable {
        /// The block's number.
        block: u32,
    },
    /// The books do not balance: a fault of the engine itself.
    #[error("the engine's books do not balance: {0}")]
    Corrupt(String),
}

/// The result of the core's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
