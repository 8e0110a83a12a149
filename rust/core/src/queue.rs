//! The waiting queue: victims first, then fresh requests in order of arrival.

use std::collections::VecDeque;

use slotmap::SlotMap;

use crate::ids::{RequestId, SeqId};
use crate::sequence::Sequence;

/// How far behind its head the queue is searched for a request that fits, and how many steps the head may be passed
/// over before nobody younger is admitted.
pub const MAX_PASSED_OVER: u32 = 16;

/// Sequences without blocks. A cancelled one stays as a stale key and is dropped when it is met.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    /// Victims, the earliest admitted first. While one waits, nobody fresh is admitted.
    victims: VecDeque<SeqId>,
    fresh: VecDeque<SeqId>,
    /// Live sequences in both.
    len: usize,
}

impl WaitingQueue {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn push_fresh(&mut self, id: SeqId) {
        self.fresh.push_back(id);
        self.len += 1;
    }

    /// Puts a request whose admission was undone back to its place, by arrival.
    pub fn return_fresh(&mut self, id: SeqId, request: RequestId, seqs: &SlotMap<SeqId, Sequence>) {
        let later = |&other: &SeqId| seqs.get(other).is_some_and(|seq| seq.request > request);
        let at = self.fresh.iter().position(later).unwrap_or(self.fresh.len());
        self.fresh.insert(at, id);
        self.len += 1;
    }

    /// Puts a victim among the victims, by age.
    pub fn push_victim(&mut self, id: SeqId, admitted: u64, seqs: &SlotMap<SeqId, Sequence>) {
        let younger = |&other: &SeqId| seqs.get(other).is_some_and(|seq| seq.admitted > admitted);
        let at = self.victims.iter().position(younger).unwrap_or(self.victims.len());
        self.victims.insert(at, id);
        self.len += 1;
    }

    /// A sequence that waited is gone from the engine.
    pub fn forget_one(&mut self) {
        self.len -= 1;
        if self.len == 0 {
            self.victims.clear();
            self.fresh.clear();
        }
    }

    /// The `n`-th candidate for admission: of the victims only the first, and of the fresh ones only while no victim
    /// waits.
    pub fn candidate(&mut self, n: usize, seqs: &SlotMap<SeqId, Sequence>) -> Option<SeqId> {
        while self.victims.front().is_some_and(|&id| !seqs.contains_key(id)) {
            self.victims.pop_front();
        }
        if let Some(&victim) = self.victims.front() {
            return (n == 0).then_some(victim);
        }
        while let Some(&id) = self.fresh.get(n) {
            if seqs.contains_key(id) {
                return Some(id);
            }
            self.fresh.remove(n);
        }
        None
    }

    /// Takes the `n`-th candidate out.
    pub fn take(&mut self, n: usize) {
        let queue = if self.victims.is_empty() { &mut self.fresh } else { &mut self.victims };
        if queue.remove(n).is_some() {
            self.len -= 1;
        }
    }

    /// Every key that stands in the queue, stale ones included.
    pub fn keys(&self) -> impl Iterator<Item = SeqId> + '_ {
        self.victims.iter().chain(&self.fresh).copied()
    }
}
