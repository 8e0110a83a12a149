//! Counters and gauges, written by the engine's thread and read by anybody without stopping it.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The live numbers.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        /// All numbers at one moment (each exact, not necessarily of the same step).
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Reads all numbers.
            pub fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl Stats {
            /// Names and values, in order of declaration.
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Requests submitted.
    submitted,
    /// Sequences that wait, victims among them.
    waiting,
    /// Sequences with a row.
    running,
    /// Blocks of the pool.
    capacity,
    /// Blocks nobody owns.
    free_blocks,
    /// Blocks with an owner.
    owned_blocks,
    /// Most blocks owned at once since the engine was made.
    peak_owned_blocks,
    /// Committed steps.
    steps,
    /// Steps abandoned.
    abandoned_steps,
    /// Prompt tokens computed (again, after a soft reset), in committed steps.
    prompt_tokens,
    /// Tokens generated, in committed steps.
    generated_tokens,
    /// Requests that ended by an end token or a bound.
    finished,
    /// Requests that ended by an error.
    failed,
    /// Requests that were cancelled.
    cancelled,
    /// Times that an active sequence got no block for its next tokens.
    starved,
    /// Victims whose tokens joined their prompt.
    soft_resets,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        // One writer: a load and a store are enough, and cheaper than a locked addition.
        counter.store(counter.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
    }
}
