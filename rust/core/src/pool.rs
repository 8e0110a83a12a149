//! The pool of equal blocks. Owns which state each block is in; never knows sequences, pages or tokens.
//!
//! Any block can go to any group. Two further blocks, the trash, are never given to anybody: padding reads the one and
//! writes the other.
//!
//! ```text
//!            allocate                     last release, and a step in flight uses it
//!   free ───────────────► owned ─────────────────────────────────────────► retiring
//!    ▲                    │   ▲ share                                        │
//!    │   last release,    │   └───────────┐                  its steps are in│
//!    ├────────────────────┘               │                                  │
//!    │   not indexed      last release, indexed                              │
//!    │                    └──────────► cached ◄──────────────────────────────┤
//!    └── evicted, or not indexed any more ─┘          (free when not indexed)┘
//! ```

use crate::config::Eviction;
use crate::error::{Error, Result};
use crate::ids::{BlockId, Slot};

/// Blocks that padding uses and nobody owns: one to read, one to write.
pub const NUM_TRASH_BLOCKS: u32 = 2;

/// Steps in flight, as a set of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tickets(u8);

impl Tickets {
    /// No step.
    pub const NONE: Self = Self(0);

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Adds the step of a slot.
    pub fn add(&mut self, slot: Slot) {
        self.0 |= 1 << slot.index();
    }

    /// Takes the step of a slot out.
    pub fn remove(&mut self, slot: Slot) {
        self.0 &= !(1 << slot.index());
    }

    /// Whether the step of a slot is among them.
    pub fn has(self, slot: Slot) -> bool {
        self.0 & (1 << slot.index()) != 0
    }
}

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// Nobody's, and nothing in it is known.
    Free,
    /// Of one sequence or more.
    Owned,
    /// Nobody's, but the index knows what is in it.
    Cached,
    /// Nobody's, but a step in flight uses it.
    Retiring,
}

/// Blocks by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Owned ones.
    pub owned: u32,
    /// Cached ones.
    pub cached: u32,
    /// Retiring ones.
    pub retiring: u32,
}

/// No block: the end of a list.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Block {
    state: BlockState,
    owners: u32,
    group: u32,
    /// Steps in flight that somebody used it in who has released it since.
    busy: Tickets,
    /// Neighbours in the list of cached blocks, in order of their caching.
    older: u32,
    newer: u32,
}

/// Every block, and what state it is in.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    oldest: u32,
    newest: u32,
    eviction: Eviction,
    counts: Vec<BlockCounts>,
    /// Blocks that wait for the step of a slot, once for each that released them.
    waiting: [Vec<BlockId>; 2],
}

impl BlockPool {
    /// A pool of `capacity` free blocks for `num_groups` groups.
    pub fn new(capacity: u32, num_groups: usize, eviction: Eviction) -> Self {
        let block = Block {
            state: BlockState::Free,
            owners: 0,
            group: 0,
            busy: Tickets::NONE,
            older: NONE,
            newer: NONE,
        };
        Self {
            blocks: vec![block; capacity as usize],
            // Popped from the end: block 0 goes first, so that tables read in order.
            free: (0..capacity).rev().map(BlockId).collect(),
            oldest: NONE,
            newest: NONE,
            eviction,
            counts: vec![BlockCounts::default(); num_groups],
            waiting: [Vec::new(), Vec::new()],
        }
    }

    /// Blocks that can be given out, all together.
    pub fn capacity(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that can be had now: free and cached ones.
    pub fn available(&self) -> u32 {
        self.free() + self.total().cached
    }

    /// Free blocks.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Blocks that are not free, by state.
    pub fn total(&self) -> BlockCounts {
        self.counts.iter().fold(BlockCounts::default(), |sum, of_group| BlockCounts {
            owned: sum.owned + of_group.owned,
            cached: sum.cached + of_group.cached,
            retiring: sum.retiring + of_group.retiring,
        })
    }

    /// Blocks that are not free, by the group that uses them and by state.
    pub fn by_group(&self) -> &[BlockCounts] {
        &self.counts
    }

    /// A block for a group, now with one owner: a free one, else the cached one whose turn it is; and whether it was
    /// cached.
    pub fn allocate(&mut self, group: usize) -> Option<(BlockId, bool)> {
        let free = self.free.pop();
        let block = free.or_else(|| self.next_to_evict())?;
        let evicted = free.is_none();
        self.set_state(block, BlockState::Owned, Some(group));
        self.blocks[block.0 as usize].owners = 1;
        Some((block, evicted))
    }

    fn next_to_evict(&self) -> Option<BlockId> {
        let next = match self.eviction {
            Eviction::Lru => self.oldest,
            Eviction::Lifo => self.newest,
        };
        (next != NONE).then_some(BlockId(next))
    }

    /// One owner more for a block that is not free.
    pub fn share(&mut self, block: BlockId) -> Result<()> {
        match self.blocks.get_mut(block.0 as usize) {
            None => Err(Error::NotShareable { block: block.0 }),
            Some(Block { state: BlockState::Free, .. }) => Err(Error::NotShareable { block: block.0 }),
            Some(shared) => {
                shared.owners += 1;
                self.set_state(block, BlockState::Owned, None);
                Ok(())
            }
        }
    }

    /// Takes one owner from a block, who used it in the steps in flight that `tickets` tells. Without owners it
    /// retires until those are in; then it is cached when the index knows it, else free.
    pub fn release(&mut self, block: BlockId, tickets: Tickets, indexed: bool) -> Result<()> {
        let Some(released) = self.blocks.get_mut(block.0 as usize).filter(|block| block.owners > 0) else {
            return Err(Error::DoubleFree { block: block.0 });
        };
        released.owners -= 1;
        for slot in Slot::ALL {
            if tickets.has(slot) && !released.busy.has(slot) {
                released.busy.add(slot);
                self.waiting[slot.index()].push(block);
            }
        }
        if released.owners == 0 {
            self.settle(block, indexed);
        }
        Ok(())
    }

    /// Says that the step of a slot is in: calls `indexed` for each block that waited for it.
    pub fn step_is_in(&mut self, slot: Slot, indexed: impl Fn(BlockId) -> bool) {
        let mut waiting = std::mem::take(&mut self.waiting[slot.index()]);
        for block in waiting.drain(..) {
            let waited = &mut self.blocks[block.0 as usize];
            waited.busy.remove(slot);
            if waited.owners == 0 {
                self.settle(block, indexed(block));
            }
        }
        self.waiting[slot.index()] = waiting;
    }

    /// The index has forgotten what is in a block.
    pub fn not_indexed_any_more(&mut self, block: BlockId) {
        if self.blocks[block.0 as usize].state == BlockState::Cached {
            self.settle(block, false);
        }
    }

    /// The index has forgotten everything.
    pub fn clear_cached(&mut self) {
        while self.oldest != NONE {
            self.settle(BlockId(self.oldest), false);
        }
    }

    fn settle(&mut self, block: BlockId, indexed: bool) {
        let settled = &self.blocks[block.0 as usize];
        debug_assert_eq!(settled.owners, 0);
        let state = match (settled.busy.is_empty(), indexed) {
            (false, _) => BlockState::Retiring,
            (true, true) => BlockState::Cached,
            (true, false) => BlockState::Free,
        };
        self.set_state(block, state, None);
    }

    /// The one place where a block changes its state.
    fn set_state(&mut self, block: BlockId, state: BlockState, group: Option<usize>) {
        let Block { state: before, group: group_before, .. } = self.blocks[block.0 as usize];
        if before == BlockState::Cached {
            self.unlink(block);
        }
        if let Some(count) = self.count_mut(before, group_before) {
            *count -= 1;
        }
        let changed = &mut self.blocks[block.0 as usize];
        changed.state = state;
        changed.group = group.map_or(group_before, |group| group as u32);
        let group = changed.group;
        if let Some(count) = self.count_mut(state, group) {
            *count += 1;
        }
        match state {
            BlockState::Cached => self.link(block),
            BlockState::Free if before != BlockState::Free => self.free.push(block),
            _ => {}
        }
    }

    fn count_mut(&mut self, state: BlockState, group: u32) -> Option<&mut u32> {
        let counts = &mut self.counts[group as usize];
        match state {
            BlockState::Free => None,
            BlockState::Owned => Some(&mut counts.owned),
            BlockState::Cached => Some(&mut counts.cached),
            BlockState::Retiring => Some(&mut counts.retiring),
        }
    }

    fn link(&mut self, block: BlockId) {
        let older = std::mem::replace(&mut self.newest, block.0);
        match self.blocks.get_mut(older as usize) {
            Some(neighbour) => neighbour.newer = block.0,
            None => self.oldest = block.0,
        }
        let linked = &mut self.blocks[block.0 as usize];
        (linked.older, linked.newer) = (older, NONE);
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { older, newer, .. } = self.blocks[block.0 as usize];
        match self.blocks.get_mut(older as usize) {
            Some(neighbour) => neighbour.newer = newer,
            None => self.oldest = newer,
        }
        match self.blocks.get_mut(newer as usize) {
            Some(neighbour) => neighbour.older = older,
            None => self.newest = older,
        }
    }

    /// The block that stands in a table for a page that was given back. Padding reads it too.
    pub fn read_trash(&self) -> BlockId {
        BlockId(self.capacity())
    }

    /// Whether the cache evicts a sequence's blocks rightly when it gives back the tail first.
    pub(crate) fn tail_first(&self) -> bool {
        self.eviction == Eviction::Lru
    }

    /// The state of a block; `None` for a number outside the pool, the trash included.
    pub fn state(&self, block: BlockId) -> Option<BlockState> {
        self.blocks.get(block.0 as usize).map(|block| block.state)
    }

    /// Owners of a block; `None` for a number outside the pool, the trash included.
    pub fn owners(&self, block: BlockId) -> Option<u32> {
        self.blocks.get(block.0 as usize).map(|block| block.owners)
    }

    /// Proves that each block is in the one state that its owners, its tickets and the lists say, given the references
    /// that tables hold and what the index knows.
    pub(crate) fn check(&self, references: &[u32], indexed: impl Fn(BlockId) -> bool) -> Result<()> {
        let mut listed = vec![None; self.blocks.len()];
        let mut cached = Vec::new();
        let (mut next, mut older) = (self.oldest, NONE);
        while next != NONE && cached.len() <= self.blocks.len() {
            cached.push(BlockId(next));
            if self.blocks[next as usize].older != older {
                return corrupt(format!("cached block {next} does not know its older neighbour"));
            }
            (older, next) = (next, self.blocks[next as usize].newer);
        }
        if older != self.newest {
            return corrupt(format!("the newest cached block is {older}, not {}", self.newest));
        }
        let lists = [(BlockState::Free, &self.free), (BlockState::Cached, &cached)];
        for (state, block) in
            lists.iter().flat_map(|(state, list)| list.iter().map(move |block| (*state, block)))
        {
            let Some(seen) = listed.get_mut(block.0 as usize) else {
                return corrupt(format!("block {} on a list is not of the pool", block.0));
            };
            if let Some(before) = seen.replace(state) {
                return corrupt(format!("block {} is listed as {state:?} and as {before:?}", block.0));
            }
        }
        let mut counts = vec![BlockCounts::default(); self.counts.len()];
        for (number, block) in self.blocks.iter().enumerate() {
            let id = BlockId(number as u32);
            let state = match (block.owners > 0, block.busy.is_empty(), indexed(id)) {
                (true, ..) => BlockState::Owned,
                (false, false, _) => BlockState::Retiring,
                (false, true, true) => BlockState::Cached,
                (false, true, false) => BlockState::Free,
            };
            let list = matches!(state, BlockState::Free | BlockState::Cached).then_some(state);
            if block.state != state || listed[number] != list {
                return corrupt(format!(
                    "block {number} is {:?} and listed as {:?}, but should be {state:?}",
                    block.state, listed[number]
                ));
            }
            if block.owners != references[number] {
                let (owners, found) = (block.owners, references[number]);
                return corrupt(format!("block {number} has {owners} owners, tables name it {found} times"));
            }
            for slot in Slot::ALL {
                let waits = self.waiting[slot.index()].iter().filter(|&&waits| waits == id).count();
                if waits != usize::from(block.busy.has(slot)) {
                    return corrupt(format!("block {number} waits {waits} times for slot {slot:?}"));
                }
            }
            let counts = &mut counts[block.group as usize];
            match state {
                BlockState::Free => {}
                BlockState::Owned => counts.owned += 1,
                BlockState::Cached => counts.cached += 1,
                BlockState::Retiring => counts.retiring += 1,
            }
        }
        if counts != self.counts {
            return corrupt(format!("blocks by state are {counts:?}, counted as {:?}", self.counts));
        }
        Ok(())
    }
}

fn corrupt(what: String) -> Result<()> {
    Err(Error::Corrupt(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(capacity: u32, eviction: Eviction) -> BlockPool {
        BlockPool::new(capacity, 1, eviction)
    }

    #[test]
    fn a_block_released_twice_is_an_error_and_is_free_once() {
        let mut pool = pool(2, Eviction::Lru);
        let (block, _) = pool.allocate(0).unwrap();
        pool.release(block, Tickets::NONE, false).unwrap();
        let again = pool.release(block, Tickets::NONE, false);
        assert_eq!(again, Err(Error::DoubleFree { block: block.get() }));
        assert_eq!(pool.available(), 2);
        pool.check(&[0, 0], |_| false).unwrap();
    }

    #[test]
    fn trash_is_given_to_nobody_and_taken_from_nobody() {
        let mut pool = pool(3, Eviction::Lru);
        let given: Vec<_> = std::iter::from_fn(|| pool.allocate(0)).map(|(block, _)| block).collect();
        assert_eq!(given.len(), 3);
        let capacity = pool.capacity();
        for trash in (0..NUM_TRASH_BLOCKS).map(|n| BlockId(capacity + n)) {
            assert!(!given.contains(&trash));
            assert!(pool.release(trash, Tickets::NONE, false).is_err());
            assert!(pool.share(trash).is_err());
        }
    }

    #[test]
    fn a_free_block_cannot_be_shared() {
        let mut pool = pool(1, Eviction::Lru);
        assert_eq!(pool.share(BlockId(0)), Err(Error::NotShareable { block: 0 }));
    }

    #[test]
    fn free_blocks_go_before_cached_ones_and_those_one_at_a_time_in_their_order() {
        for (eviction, order) in [(Eviction::Lru, [3, 0, 1, 2]), (Eviction::Lifo, [3, 2, 1, 0])] {
            let mut pool = pool(4, eviction);
            let blocks: Vec<_> = (0..4).map(|_| pool.allocate(0).unwrap().0).collect();
            for (&block, indexed) in blocks.iter().zip([true, true, true, false]) {
                pool.release(block, Tickets::NONE, indexed).unwrap();
            }
            let total = pool.total();
            assert_eq!((pool.free(), total.cached, pool.available()), (1, 3, 4));
            let given: Vec<_> = (0..4).map(|_| pool.allocate(0).unwrap()).collect();
            assert_eq!(given.iter().map(|(block, _)| block.get()).collect::<Vec<_>>(), order);
            assert_eq!(
                given.iter().map(|&(_, evicted)| evicted).collect::<Vec<_>>(),
                [false, true, true, true]
            );
        }
    }

    #[test]
    fn what_a_step_in_flight_uses_is_available_when_the_step_is_in() {
        let mut pool = pool(1, Eviction::Lru);
        let (block, _) = pool.allocate(0).unwrap();
        let mut both = Tickets::NONE;
        Slot::ALL.into_iter().for_each(|slot| both.add(slot));
        pool.release(block, both, false).unwrap();
        assert_eq!((pool.available(), pool.total().retiring), (0, 1));
        pool.step_is_in(Slot::A, |_| false);
        assert_eq!(pool.available(), 0);
        pool.step_is_in(Slot::B, |_| false);
        assert_eq!((pool.available(), pool.total().retiring), (1, 0));
        pool.check(&[0], |_| false).unwrap();
    }

    #[test]
    fn a_block_that_one_owner_used_in_flight_retires_after_the_last_owner_too() {
        let mut pool = pool(1, Eviction::Lru);
        let (block, _) = pool.allocate(0).unwrap();
        pool.share(block).unwrap();
        let mut ticket = Tickets::NONE;
        ticket.add(Slot::A);
        pool.release(block, ticket, true).unwrap();
        pool.release(block, Tickets::NONE, true).unwrap();
        assert_eq!(pool.state(block), Some(BlockState::Retiring));
        // It can be shared meanwhile: what is in it stays.
        pool.share(block).unwrap();
        pool.step_is_in(Slot::A, |_| true);
        assert_eq!(pool.state(block), Some(BlockState::Owned));
        pool.release(block, Tickets::NONE, true).unwrap();
        assert_eq!(pool.state(block), Some(BlockState::Cached));
        pool.check(&[0], |_| true).unwrap();
    }
}
