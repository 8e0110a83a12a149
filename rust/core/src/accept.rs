//! What comes through the inbox: requests become sequences, and cancellations end them.

use crate::engine::Engine;
use crate::epochs::TokenEpochs;
use crate::hash::Key;
use crate::ids::{BlockId, RequestId};
use crate::inbox::Message;
use crate::pool::Tickets;
use crate::sequence::{Finish, LAST_BLOCKS, Phase, Request, Rest, Sequence};

impl Engine {
    pub(crate) fn read_inbox(&mut self, now: f64) {
        let mut mail = std::mem::take(&mut self.mail);
        self.inbox.take(&mut mail);
        let mut ended_active = false;
        for message in mail.drain(..) {
            match message {
                Message::Submit(request, what, root, keys) => self.accept(request, what, root, keys),
                Message::Cancel(request) => {
                    let number = self.families.get(&request).map_or(1, |&(number, _)| number);
                    for child in 0..u64::from(number) {
                        if let Some(&id) = self.by_request.get(&RequestId(request.0 + child)) {
                            ended_active |= self.seqs[id].row.is_some();
                            self.end(id, Finish::Cancelled, now);
                        }
                    }
                }
            }
        }
        self.mail = mail;
        if ended_active {
            self.drop_ended();
        }
    }

    fn accept(&mut self, first: RequestId, what: Request, root: Key, keys: Vec<Key>) {
        if what.n > 1 {
            self.families.insert(first, (what.n, what.n));
        }
        let arrived = self.arrived;
        self.arrived += u64::from(what.n);
        let seed = what.seed.unwrap_or_else(|| mix(self.config.seed ^ mix(first.0)));
        for child in 1..u64::from(what.n) {
            self.accept_sequence(first, child, arrived + child, seed, what.clone(), root, keys.clone());
        }
        self.accept_sequence(first, 0, arrived, seed, what, root, keys);
    }

    #[allow(clippy::too_many_arguments)] // of a message, taken apart
    fn accept_sequence(
        &mut self,
        first: RequestId,
        child: u64,
        arrived: u64,
        seed: u64,
        what: Request,
        root: Key,
        keys: Vec<Key>,
    ) {
        let request = RequestId(first.0 + child);
        let prompt_len = what.prompt.len() as u32;
        let wanted = u64::from(prompt_len) + what.max_new_tokens as u64;
        let forgotten = if self.config.has_windows() { self.config.groups.len() } else { 0 };
        let id = self.seqs.insert(Sequence {
            request,
            tokens: what.prompt.into(),
            blocks: Vec::new(),
            news: Vec::new(),
            draw_key: mix(seed ^ mix(child)),
            row: None,
            news_sent: 0,
            computed: 0,
            planned: 0,
            held: 0,
            pending: 0,
            last_blocks: [BlockId(0); LAST_BLOCKS],
            last_blocks_of: 0,
            sampled_at: [0; 2],
            max_len: wanted.min(u64::from(self.longest)) as u32,
            unit_end: u32::MAX,
            first_eos: what.eos.first().copied().unwrap_or(-1),
            phase: Phase::Pending,
            in_flight: Tickets::NONE,
            streaming: what.streaming,
            record_timestamps: what.record_timestamps,
            record_logprobs: what.record_logprobs,
            forgets: forgotten > 0,
            second_regime: self.config.is_second_regime(prompt_len),
            more_eos: what.eos.len() > 1,
            rest: Box::new(Rest {
                parent: first,
                prompt_len,
                tenant: self.queue.arrives(&what.tenant),
                priority: what.priority,
                forgotten: vec![0; forgotten],
                arrived,
                admitted: 0,
                passed_over: 0,
                prefill_len: 0,
                root,
                keys,
                shares: false,
                published: 0,
                tip: None,
                producing: None,
                cached_tokens: 0,
                follows: None,
                no_room: None,
                epoch: 0,
                epochs: TokenEpochs::new(self.epoch),
                swapped: None,
                eos: what.eos,
                sampling: what.sampling,
                logprobs: Vec::new(),
                timestamps: Vec::new(),
                started: None,
            }),
        });
        self.by_request.insert(request, id);
        self.queue.push(id, &self.seqs[id]);
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input moves every bit of the output.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
