//! What can be seen of the sequences that live, for those who watch.

use crate::engine::Engine;
use crate::ids::{RequestId, SeqId};
use crate::sequence::Phase;

/// A sequence as it stands between two calls of the engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Live {
    /// Its id.
    pub request: RequestId,
    /// The first of the sequences of its request; itself, where it is the only one.
    pub parent: RequestId,
    /// Where it stands.
    pub phase: Phase,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens generated in committed steps.
    pub generated: u32,
    /// Leading tokens whose K and V are there, in blocks or on the host.
    pub computed: u32,
    /// Blocks that it holds.
    pub blocks: u32,
    /// Whether its K and V wait on the host.
    pub on_host: bool,
    /// Its priority.
    pub priority: i32,
    /// When it was first planned, if it was.
    pub started: Option<f64>,
}

impl Engine {
    /// All that live: those with a row in the order of their admission, then those that wait, victims first. What stands in
    /// the inbox is not among them.
    pub fn live(&self) -> Vec<Live> {
        self.active.iter().copied().chain(self.queue.ids()).map(|id| self.seen(id)).collect()
    }

    /// One of them.
    pub fn live_one(&self, request: RequestId) -> Option<Live> {
        self.by_request.get(&request).map(|&id| self.seen(id))
    }

    /// Its prompt and what it generated.
    pub fn tokens_of(&self, request: RequestId) -> Option<Vec<i32>> {
        let tokens = &self.seqs[*self.by_request.get(&request)?].tokens;
        let mut copy = vec![0; tokens.len()];
        tokens.copy_to(0, &mut copy);
        Some(copy)
    }

    fn seen(&self, id: SeqId) -> Live {
        let seq = &self.seqs[id];
        let swapped = seq.rest.swapped.as_ref();
        let trash = self.ledger.pool.read_trash();
        Live {
            request: seq.request,
            parent: seq.rest.parent,
            phase: seq.phase,
            prompt: seq.rest.prompt_len,
            generated: seq.tokens.len() as u32 - seq.rest.prompt_len,
            computed: swapped.map_or(seq.computed, |swapped| swapped.computed),
            blocks: seq.blocks.iter().filter(|&&block| block != trash).count() as u32,
            on_host: swapped.is_some(),
            priority: seq.rest.priority,
            started: seq.rest.started,
        }
    }
}
