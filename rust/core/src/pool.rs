//! The pool of equal blocks. Owns who holds which block; never knows sequences, groups or tokens.
//!
//! Any block can go to any group. Two further blocks, the trash, are never given to anybody: padding reads the
//! one and writes the other.

use crate::error::{Error, Result};
use crate::ids::BlockId;

/// Blocks that padding uses and nobody owns: one to read, one to write.
pub const NUM_TRASH_BLOCKS: u32 = 2;

/// Free and owned blocks, with an owner count for each.
#[derive(Debug)]
pub struct BlockPool {
    owners: Vec<u32>,
    free: Vec<BlockId>,
}

impl BlockPool {
    /// A pool of `capacity` free blocks.
    pub fn new(capacity: u32) -> Self {
        // Popped from the end: block 0 goes first, so that tables read in order.
        let free = (0..capacity).rev().map(BlockId).collect();
        Self { owners: vec![0; capacity as usize], free }
    }

    /// Blocks that can be given out, all together.
    pub fn capacity(&self) -> u32 {
        self.owners.len() as u32
    }

    /// Blocks that can be had now.
    pub fn available(&self) -> u32 {
        self.free.len() as u32
    }

    /// Blocks with an owner.
    pub fn owned(&self) -> u32 {
        self.capacity() - self.available()
    }

    /// A free block, now with one owner.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.owners[block.0 as usize] = 1;
        Some(block)
    }

    /// Takes one owner from a block; without owners it is free again.
    pub fn release(&mut self, block: BlockId) -> Result<()> {
        match self.owners.get_mut(block.0 as usize) {
            None | Some(0) => Err(Error::DoubleFree { block: block.0 }),
            Some(owners) => {
                *owners -= 1;
                if *owners == 0 {
                    self.free.push(block);
                }
                Ok(())
            }
        }
    }

    /// The block that stands in a table for a page that was given back. Padding reads it too.
    pub fn read_trash(&self) -> BlockId {
        BlockId(self.capacity())
    }

    /// Takes one owner from each block after the first `keep` (but the trash), and the blocks from the table.
    pub(crate) fn release_tail(&mut self, table: &mut Vec<BlockId>, keep: usize) {
        // The tail first: what is allocated next is then the head again, in order.
        let trash = self.read_trash();
        for block in table.drain(keep..).rev().filter(|&block| block != trash) {
            let released = self.release(block);
            debug_assert!(released.is_ok(), "{released:?}");
        }
    }

    /// Owners of a block; `None` for a number outside the pool, the trash included.
    pub fn owners(&self, block: BlockId) -> Option<u32> {
        self.owners.get(block.0 as usize).copied()
    }

    /// Proves that each block is either on the free list once or owned, given the references that tables hold.
    pub(crate) fn check(&self, references: &[u32]) -> Result<()> {
        let mut listed = vec![false; self.owners.len()];
        for block in &self.free {
            let seen = listed.get_mut(block.0 as usize).ok_or_else(|| {
                Error::Corrupt(format!("block {} on the free list is not of the pool", block.0))
            })?;
            if std::mem::replace(seen, true) {
                return Err(Error::Corrupt(format!("block {} is on the free list twice", block.0)));
            }
        }
        for (number, (&owners, &listed)) in self.owners.iter().zip(&listed).enumerate() {
            if listed != (owners == 0) {
                return Err(Error::Corrupt(format!(
                    "block {number} has {owners} owners, listed as free: {listed}"
                )));
            }
            if owners != references[number] {
                let found = references[number];
                return Err(Error::Corrupt(format!(
                    "block {number} has {owners} owners, tables name it {found} times"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_released_twice_is_an_error_and_is_free_once() {
        let mut pool = BlockPool::new(2);
        let block = pool.allocate().unwrap();
        pool.release(block).unwrap();
        assert_eq!(pool.release(block), Err(Error::DoubleFree { block: block.get() }));
        assert_eq!(pool.available(), 2);
        pool.check(&[0, 0]).unwrap();
    }

    #[test]
    fn trash_is_given_to_nobody_and_taken_from_nobody() {
        let mut pool = BlockPool::new(3);
        let given: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(given.len(), 3);
        let capacity = pool.capacity();
        for trash in (0..NUM_TRASH_BLOCKS).map(|n| BlockId(capacity + n)) {
            assert!(!given.contains(&trash));
            assert!(pool.release(trash).is_err());
        }
    }
}
