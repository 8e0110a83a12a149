//! What a pause asks of the engine while the loop rests between two steps.

use crate::counters::Counters;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::sequence::Finish;

impl Engine {
    /// Whether sequences that were never admitted are let in from here on. Those that were admitted go on, victims among
    /// them, and those that are not stay in the queue.
    pub fn let_in(&mut self, fresh: bool) {
        self.lets_in = fresh;
    }

    /// Sequences that were admitted and have not ended: those with a row, and victims.
    pub fn admitted(&self) -> usize {
        self.active.len() + self.queue.victims()
    }

    /// Ends every request as cancelled, those in the inbox too. Steps in flight are forgotten.
    pub fn cancel_all(&mut self, now: f64) {
        self.end_all(&Finish::Cancelled, now);
    }

    /// Gives up all K and V: what is cached, and what sequences have computed or left on the host. They wait again, each
    /// with its tokens and its place, to be computed anew.
    ///
    /// # Errors
    /// [`Error::SlotMisused`] while a step is in flight. Nothing has changed then.
    pub fn recompute_all(&mut self) -> Result<()> {
        if let Some(slot) = self.oldest_in_flight() {
            let problem =
                "has a step in flight, whose K and V cannot be given up: commit or abandon it first";
            return Err(Error::SlotMisused { slot, problem });
        }
        // Those that have outgrown a regime come back in the next.
        self.cross_over();
        for id in self.active.clone() {
            self.leave(id);
            Counters::add(&self.counters.soft_resets, 1);
        }
        let on_host = |id: &_| self.seqs[*id].rest.swapped.is_some();
        for id in self.queue.ids().filter(on_host).collect::<Vec<_>>() {
            self.drop_swapped(id);
            Counters::add(&self.counters.soft_resets, 1);
        }
        self.unsent_victims.clear();
        self.ledger.clear();
        self.publish_gauges();
        Ok(())
    }
}
