//! Counters and gauges, written by the engine's thread and read by anybody without stopping it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::pool::BlockCounts;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The live numbers.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            /// By group: owned, cached and retiring blocks.
            groups: Vec<[AtomicU64; 3]>,
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
    /// Blocks nobody owns, of which nothing is known.
    free_blocks,
    /// Blocks with an owner.
    owned_blocks,
    /// Blocks nobody owns, kept for prompts that begin alike.
    cached_blocks,
    /// Blocks nobody owns, but a step in flight uses.
    retiring_blocks,
    /// Most blocks owned at once since the engine was made.
    peak_owned_blocks,
    /// Committed steps.
    steps,
    /// Steps abandoned.
    abandoned_steps,
    /// Most tokens of the next step: `max_batch_tokens`, unless a step ran out of memory not long ago.
    max_step_tokens,
    /// Rows of the step that was committed last.
    batch_rows,
    /// Those of them that brought one token.
    batch_decodes,
    /// Tokens of that step.
    batch_tokens,
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
    /// Sequences that were computed again as they outgrew the first regime.
    crossings,
    /// Sequences whose K and V are in host memory.
    swapped,
    /// Blocks of host memory.
    swap_capacity,
    /// Those of them that nothing is in.
    free_swap_blocks,
    /// Victims whose K and V were copied to host memory.
    swap_outs,
    /// Victims whose K and V were copied back.
    swap_ins,
    /// Tokens that were found in the prefix cache instead of computed, in all admissions.
    cached_tokens,
    /// Tokens that were looked up in the prefix cache, in all admissions.
    looked_up_tokens,
    /// Cached blocks that were given to others.
    evictions,
    /// Blocks that were given up for another one with the same K and V.
    merged_blocks,
    /// Partly matching pages that were copied.
    copied_blocks,
    /// Times that everything cached was forgotten: weights changed, or the cache was reset.
    epoch,
}

impl Counters {
    pub(crate) fn new(num_groups: usize) -> Self {
        Self { groups: (0..num_groups).map(|_| Default::default()).collect(), ..Self::default() }
    }

    /// Blocks that are not free, by the group that uses them.
    pub fn by_group(&self) -> Vec<BlockCounts> {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed) as u32;
        let counts = self.groups.iter().map(|[owned, cached, retiring]| BlockCounts {
            owned: read(owned),
            cached: read(cached),
            retiring: read(retiring),
        });
        counts.collect()
    }

    pub(crate) fn publish_groups(&self, counts: &[BlockCounts]) {
        for (gauges, counts) in self.groups.iter().zip(counts) {
            for (gauge, count) in gauges.iter().zip([counts.owned, counts.cached, counts.retiring]) {
                gauge.store(u64::from(count), Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        // One writer: a load and a store are enough, and cheaper than a locked addition.
        counter.store(counter.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
    }
}
