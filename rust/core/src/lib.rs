//! The engine of chairlift: it decides which tokens of which sequences run in the next step and in which blocks
//! their K and V lie. Pure Rust: no Python, no I/O, no threads of its own, no clock but the one it is told.
//!
//! Requests come in through the [`Inbox`], [`Engine::advance`] commits one step and plans the next into an arena,
//! and events go out through the [`Outbox`].
//!
//! ```
//! use chairlift_core::{Engine, EngineConfig, News, Request, Results, Slot};
//!
//! let mut engine = Engine::new(EngineConfig {
//!     page_size: 4, match_unit: 4, num_blocks: 8, max_requests_per_batch: 4, max_batch_tokens: 16, vocab_size: 97,
//!     ..EngineConfig::default()
//! })?;
//! let id = engine.inbox().submit(Request {
//!     prompt: vec![5, 6, 7], max_new_tokens: 1, ..Request::default()
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

mod accept;
mod admit;
mod arena;
mod commit;
mod config;
mod counters;
mod engine;
mod epochs;
mod error;
mod group;
mod hash;
mod ids;
mod inbox;
mod integrity;
#[cfg(all(test, loom))]
mod interleavings;
mod ledger;
mod live;
mod outbox;
mod pause;
mod plan;
mod pool;
mod prefix;
mod queue;
mod retry;
mod rows;
mod sequence;
mod swap;
mod sync;
mod text;
mod write;

pub use arena::{ArenaLayout, DRAW_WIDTH, PAIR_WIDTH, ROW_CHANGE_WIDTH, StepShape, TABLE_CHANGE_WIDTH};
pub use config::{EngineConfig, Eviction, Fairness, Policy};
pub use counters::{Counters, Stats};
pub use engine::{Engine, Results, Step};
pub use error::{Error, Result};
pub use group::{BLOCK_ALIGNMENT, Geometry, Group, Kind, Reach};
pub use hash::KEY_BITS;
pub use ids::{BlockId, RequestId, RowId, SeqId, Slot};
pub use inbox::Inbox;
pub use live::Live;
pub use outbox::{Event, News, Outbox, Output, Waited};
pub use plan::MAX_STEPS_WITHOUT_DECODES;
pub use pool::{BlockCounts, BlockPool, BlockState, NUM_TRASH_BLOCKS, Tickets};
pub use prefix::CONTINUATIONS;
pub use queue::MAX_PASSED_OVER;
pub use retry::{Abandoned, STEPS_BEFORE_LONGER};
pub use sequence::{Finish, Phase, Request, Sampling};
