//! Stable rows: a sequence's place in the tables that live on the device, from admission to end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::ids::{RowId, Slot};
use crate::pool::Tickets;

/// Hands out row numbers, the lowest first, so that the rows in use stay dense.
#[derive(Debug)]
pub struct Rows {
    free: BinaryHeap<Reverse<u32>>,
    /// Given back while steps in flight have them.
    retiring: Vec<(RowId, Tickets)>,
    capacity: u32,
}

impl Rows {
    /// `capacity` free rows.
    pub fn new(capacity: u32) -> Self {
        Self { free: (0..capacity).map(Reverse).collect(), retiring: Vec::new(), capacity }
    }

    /// Rows all together, without the trash row that follows them.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Rows that can be had now.
    pub fn available(&self) -> u32 {
        self.free.len() as u32
    }

    /// Rows nobody has, but steps in flight do.
    pub fn retiring(&self) -> u32 {
        self.retiring.len() as u32
    }

    /// Takes the lowest free row.
    pub fn take(&mut self) -> Option<RowId> {
        self.free.pop().map(|Reverse(row)| RowId(row))
    }

    /// Gives a row back, that those steps in flight have.
    pub fn give_back(&mut self, row: RowId, tickets: Tickets) {
        debug_assert!(row.0 < self.capacity);
        if tickets.is_empty() {
            self.free.push(Reverse(row.0));
        } else {
            self.retiring.push((row, tickets));
        }
    }

    /// The step of a slot is in.
    pub fn step_is_in(&mut self, slot: Slot) {
        let free = &mut self.free;
        self.retiring.retain_mut(|(row, tickets)| {
            tickets.remove(slot);
            if tickets.is_empty() {
                free.push(Reverse(row.0));
            }
            !tickets.is_empty()
        });
    }
}
