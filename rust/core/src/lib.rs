//! The engine of chairlift: it decides which tokens of which sequences run in the next step and in which blocks
//! their K and V lie. Pure Rust: no Python, no I/O, no threads of its own, no clock but the one it is told.
//!
//! Requests come in through the [`Inbox`], [`Engine::advance`] commits one step and plans the next into an arena,
//! and events go out through the [`Outbox`].
//!
//! ```
//! use chairlift_core::{Engine, EngineConfig, Policy, Reach, Request, Results, Sampling, Slot, News};
//!
//! let mut engine = Engine::new(EngineConfig {
//!     page_size: 4, num_blocks: 8, groups: vec![Reach::Full], max_requests_per_batch: 4, max_batch_tokens: 16,
//!     max_cache_reads: None, safety_margin: 0.15, policy: Policy::Fifo, vocab_size: 97, max_positions: None,
//!     max_queue_size: 0, seed: 0,
//! })?;
//! let id = engine.inbox().submit(Request {
//!     prompt: vec![5, 6, 7], max_new_tokens: 1, eos: [].into(), sampling: Sampling::Greedy, priority: 0, seed: None,
//!     streaming: false, record_timestamps: false, record_logprobs: false,
//! })?;
//! let mut arena = vec![0; engine.arena_capacity()];
//! let step = engine.advance(None, Some((Slot::A, &mut arena)), 0.1)?.expect("one request waits");
//! assert_eq!(&arena[step.layout.tokens.clone()], &[5, 6, 7]);
//! // ... the device computes, and chooses token 42 for the one sampled row ...
//! engine.advance(Some(Results { slot: Slot::A, tokens: &[42], logprobs: &[] }), None, 0.2)?;
//! let event = engine.outbox().take_for(id).expect("it has ended");
//! assert!(matches!(event.news, News::End(output) if output.tokens == [42]));
//! # Ok::<(), chairlift_core::Error>(())
//! ```

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod arena;
mod commit;
mod config;
mod counters;
mod engine;
mod error;
mod group;
mod ids;
mod inbox;
mod integrity;
mod outbox;
mod plan;
mod pool;
mod queue;
mod rows;
mod sequence;

pub use arena::{ArenaLayout, DRAW_WIDTH, ROW_CHANGE_WIDTH, StepShape, TABLE_CHANGE_WIDTH};
pub use config::{EngineConfig, Policy};
pub use counters::{Counters, Stats};
pub use engine::{Engine, Results, Step};
pub use error::{Error, Result};
pub use group::{BLOCK_ALIGNMENT, Geometry, Group, Kind, Reach};
pub use ids::{BlockId, RequestId, RowId, SeqId, Slot};
pub use inbox::Inbox;
pub use outbox::{Event, News, Outbox, Output, Waited};
pub use plan::MAX_STEPS_WITHOUT_DECODES;
pub use pool::{BlockPool, NUM_TRASH_BLOCKS};
pub use queue::MAX_PASSED_OVER;
pub use sequence::{Finish, Phase, Request, Sampling};
