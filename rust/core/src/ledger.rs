//! The ledger: the pool and the index of the prefix cache, kept in step. Never knows sequences.

use crate::config::EngineConfig;
use crate::error::Result;
use crate::ids::{BlockId, Slot};
use crate::pool::{BlockPool, BlockState, Tickets};
use crate::prefix::{NodeId, PrefixIndex};

#[derive(Debug)]
pub(crate) struct Ledger {
    pub pool: BlockPool,
    pub index: PrefixIndex,
    /// Cached blocks that were given to somebody else.
    pub evictions: u64,
    redundant: Vec<BlockId>,
}

impl Ledger {
    pub fn new(config: &EngineConfig) -> Self {
        let capacity = config.num_blocks * config.num_groups();
        Self {
            pool: BlockPool::new(capacity, config.groups.len(), config.cache_eviction),
            index: PrefixIndex::new(config, capacity),
            evictions: 0,
            redundant: Vec::new(),
        }
    }

    /// A block for a group, with one owner; what was cached in it is forgotten.
    pub fn allocate(&mut self, group: usize) -> Option<BlockId> {
        let (block, evicted) = self.pool.allocate(group)?;
        if evicted {
            self.index.forget(block);
            self.evictions += 1;
        }
        Some(block)
    }

    /// One owner more.
    pub fn share(&mut self, block: BlockId) {
        let shared = self.pool.share(block);
        debug_assert!(shared.is_ok(), "{shared:?}");
    }

    /// One owner less, who used the block in those steps in flight. The trash has no owners.
    pub fn release(&mut self, block: BlockId, tickets: Tickets) {
        if block != self.pool.read_trash() {
            let released = self.pool.release(block, tickets, self.index.knows(block));
            debug_assert!(released.is_ok(), "{released:?}");
        }
    }

    /// One owner less for each block after the first `keep`, which leave the table; in the order that has the cache
    /// lose the tail of a sequence before its head.
    pub fn release_tail(&mut self, table: &mut Vec<BlockId>, keep: usize, tickets: Tickets) {
        if self.pool.tail_first() {
            while table.len() > keep {
                if let Some(block) = table.pop() {
                    self.release(block, tickets);
                }
            }
        } else {
            for block in table.drain(keep..) {
                self.release(block, tickets);
            }
        }
    }

    /// Whether a block is to be had: taking an owner on makes one fewer available.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.pool.state(block) == Some(BlockState::Cached)
    }

    /// Registers a block for a node (see [`PrefixIndex::register`]); blocks that are known no more are free unless
    /// owned.
    pub fn register(&mut self, node: NodeId, group: usize, block: BlockId) -> BlockId {
        let named = self.index.register(node, group, block, &mut self.redundant);
        for redundant in self.redundant.drain(..) {
            self.pool.not_indexed_any_more(redundant);
        }
        named
    }

    /// The step of a slot is in.
    pub fn step_is_in(&mut self, slot: Slot) {
        let index = &self.index;
        self.pool.step_is_in(slot, |block| index.knows(block));
    }

    /// Forgets everything that is cached. No sequence may hold a node.
    pub fn clear(&mut self) {
        self.index.clear();
        self.pool.clear_cached();
    }

    /// Proves both, given how often tables name each block and which nodes sequences hold.
    pub fn check(&self, references: &[u32], held: impl Iterator<Item = NodeId>) -> Result<()> {
        self.pool.check(references, |block| self.index.knows(block))?;
        self.index.check(held)
    }
}
