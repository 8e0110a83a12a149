//! The waiting queue: victims first, then fresh requests; each by priority, then by age.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::ids::SeqId;
use crate::sequence::Sequence;

/// How far behind its head the queue is searched for a request that fits, and how many steps the head may be passed
/// over before nobody younger is admitted.
pub const MAX_PASSED_OVER: u32 = 16;

/// Where a sequence stands in the queue. Smaller is earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// It was admitted before; ordered by its first admission.
    Victim(Reverse<i32>, u64),
    /// Ordered by arrival.
    Fresh(Reverse<i32>, u64),
}

impl Place {
    fn of(seq: &Sequence) -> Self {
        let priority = Reverse(seq.rest.priority);
        if seq.rest.admitted > 0 {
            Place::Victim(priority, seq.rest.admitted)
        } else {
            Place::Fresh(priority, seq.request.0)
        }
    }
}

/// Sequences without blocks.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    waiting: BTreeMap<Place, SeqId>,
}

impl WaitingQueue {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn push(&mut self, id: SeqId, seq: &Sequence) {
        let stood_there = self.waiting.insert(Place::of(seq), id);
        debug_assert!(stood_there.is_none(), "two sequences in one place");
    }

    /// Takes a sequence out, for a row or for good.
    pub fn remove(&mut self, seq: &Sequence) {
        let removed = self.waiting.remove(&Place::of(seq));
        debug_assert!(removed.is_some(), "it did not wait");
    }

    /// The `n`-th candidate for admission: of the victims only the first, and of the fresh ones only while no victim
    /// waits.
    pub fn candidate(&self, n: usize) -> Option<SeqId> {
        match self.waiting.first_key_value()? {
            (Place::Victim(..), &victim) => (n == 0).then_some(victim),
            (Place::Fresh(..), _) => self.waiting.values().nth(n).copied(),
        }
    }

    /// All that wait, the earliest first.
    pub fn ids(&self) -> impl Iterator<Item = SeqId> + '_ {
        self.waiting.values().copied()
    }
}
