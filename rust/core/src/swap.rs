//! The swap pool: blocks of host memory that take K and V of victims. Owns which of them are free; never knows what is
//! in them.

use crate::error::{Error, Result};
use crate::ids::{BlockId, Slot};
use crate::pool::Tickets;

/// A block of host memory, `0 .. swap_blocks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SwapId(pub(crate) u32);

/// What a victim left on the host.
#[derive(Debug)]
pub(crate) struct Swapped {
    /// As the block table was: a block of the host for each page and group, `None` where the entry was trash.
    pub blocks: Vec<Option<SwapId>>,
    /// Leading tokens whose K and V they are.
    pub computed: u32,
    /// The weights that computed them.
    pub epoch: u64,
    /// Steps in flight that copy them.
    pub in_flight: Tickets,
}

/// Every block of the host.
#[derive(Debug)]
pub(crate) struct SwapPool {
    free: Vec<SwapId>,
    /// Given back while a step in flight copies.
    retiring: Vec<(SwapId, Tickets)>,
    capacity: u32,
    /// Copies to the host that no step carries yet.
    pub unsent: Vec<(BlockId, SwapId)>,
}

impl SwapPool {
    pub fn new(capacity: u32) -> Self {
        let free = (0..capacity).rev().map(SwapId).collect();
        Self { free, retiring: Vec::new(), capacity, unsent: Vec::new() }
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    pub fn available(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes a sequence's blocks in, if there is room for all of them: where they go to.
    pub fn take_in(&mut self, table: &[BlockId], trash: BlockId) -> Option<Vec<Option<SwapId>>> {
        let held = table.iter().filter(|&&block| block != trash).count();
        if held == 0 || held > self.free.len() {
            return None;
        }
        let mut place = |&block: &BlockId| {
            let swap = if block == trash { None } else { self.free.pop() }?;
            self.unsent.push((block, swap));
            Some(swap)
        };
        Some(table.iter().map(&mut place).collect())
    }

    /// Frees what a victim left. Copies to it that no step carries yet are not made.
    pub fn release(&mut self, swapped: Swapped) {
        for swap in swapped.blocks.into_iter().flatten() {
            self.unsent.retain(|&(_, to)| to != swap);
            if swapped.in_flight.is_empty() {
                self.free.push(swap);
            } else {
                self.retiring.push((swap, swapped.in_flight));
            }
        }
    }

    /// The step of a slot is in.
    pub fn step_is_in(&mut self, slot: Slot) {
        let free = &mut self.free;
        self.retiring.retain_mut(|(swap, tickets)| {
            tickets.remove(slot);
            if tickets.is_empty() {
                free.push(*swap);
            }
            !tickets.is_empty()
        });
    }

    /// Proves that each block is free, retiring or held once.
    pub fn check<'a>(&self, held: impl Iterator<Item = &'a Swapped>) -> Result<()> {
        let held = held.flat_map(|swapped| swapped.blocks.iter().copied().flatten());
        let all = held.chain(self.free.iter().copied()).chain(self.retiring.iter().map(|&(swap, _)| swap));
        let mut seen = vec![0; self.capacity as usize];
        for swap in all {
            seen[swap.0 as usize] += 1;
        }
        match seen.iter().position(|&times| times != 1) {
            Some(swap) => {
                Err(Error::Corrupt(format!("host block {swap} is accounted for {} times", seen[swap])))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRASH: BlockId = BlockId(9);

    fn victim(pool: &mut SwapPool, table: &[BlockId]) -> Option<Swapped> {
        let blocks = pool.take_in(table, TRASH)?;
        Some(Swapped { blocks, computed: 0, epoch: 0, in_flight: Tickets::NONE })
    }

    #[test]
    fn what_does_not_fit_leaves_no_trace() {
        let mut pool = SwapPool::new(2);
        assert!(victim(&mut pool, &[BlockId(0), TRASH, BlockId(1), BlockId(2)]).is_none());
        assert!(victim(&mut pool, &[TRASH]).is_none(), "nothing to copy");
        assert_eq!((pool.available(), pool.unsent.len()), (2, 0));
    }

    #[test]
    fn a_copy_that_no_step_carries_yet_is_not_made_for_a_victim_that_is_gone() {
        let mut pool = SwapPool::new(4);
        let gone = victim(&mut pool, &[BlockId(0), BlockId(1)]).unwrap();
        let other = victim(&mut pool, &[BlockId(2)]).unwrap();
        pool.release(gone);
        assert_eq!(pool.unsent.iter().map(|&(from, _)| from).collect::<Vec<_>>(), [BlockId(2)]);
        // Its places can be given again, and are written once.
        let next = victim(&mut pool, &[BlockId(3), BlockId(4), BlockId(5)]).unwrap();
        let places: std::collections::HashSet<_> = pool.unsent.iter().map(|&(_, to)| to).collect();
        assert_eq!((pool.unsent.len(), places.len(), pool.available()), (4, 4, 0));
        pool.check([&other, &next].into_iter()).unwrap();
    }

    #[test]
    fn a_place_that_a_step_in_flight_copies_to_waits_for_it() {
        let mut pool = SwapPool::new(1);
        let mut victim = victim(&mut pool, &[BlockId(0)]).unwrap();
        victim.in_flight.add(Slot::B);
        pool.release(victim);
        pool.step_is_in(Slot::A);
        assert_eq!(pool.available(), 0);
        pool.step_is_in(Slot::B);
        assert_eq!(pool.available(), 1);
    }
}
