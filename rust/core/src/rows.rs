//! Stable rows: a sequence's place in the tables that live on the device, from admission to end.

use crate::ids::RowId;

/// Hands out row numbers, the lowest first, so that the rows in use stay dense.
#[derive(Debug)]
pub struct Rows {
    free: std::collections::BinaryHeap<std::cmp::Reverse<u32>>,
    capacity: u32,
}

impl Rows {
    /// `capacity` free rows.
    pub fn new(capacity: u32) -> Self {
        Self { free: (0..capacity).map(std::cmp::Reverse).collect(), capacity }
    }

    /// Rows all together, without the trash row that follows them.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Rows nobody has.
    pub fn available(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes the lowest free row.
    pub fn take(&mut self) -> Option<RowId> {
        self.free.pop().map(|std::cmp::Reverse(row)| RowId(row))
    }

    /// Gives a row back.
    pub fn give_back(&mut self, row: RowId) {
        debug_assert!(row.0 < self.capacity);
        self.free.push(std::cmp::Reverse(row.0));
    }
}
