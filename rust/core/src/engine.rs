//! The engine: everything that is known about the sequences, and the one call that moves them a step on.
//!
//! It has one owner, the engine's thread. Other threads reach it through the inbox, the outbox and the counters.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use slotmap::SlotMap;

use crate::arena::{ArenaLayout, StepShape};
use crate::config::EngineConfig;
use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::ids::{RequestId, SeqId, Slot};
use crate::inbox::{Inbox, Message};
use crate::outbox::{Event, News, Outbox, Output};
use crate::pool::BlockPool;
use crate::queue::WaitingQueue;
use crate::rows::Rows;
use crate::sequence::{Finish, Phase, Request, Sequence};

/// A planned step: its shape and where its parts lie in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The buffers it uses.
    pub slot: Slot,
    /// Its sizes.
    pub shape: StepShape,
    /// Where each section lies.
    pub layout: ArenaLayout,
}

/// What the device computed in a step, one value per sampled row in the order of `logits_rows`.
#[derive(Debug, Clone, Copy)]
pub struct Results<'a> {
    /// The step's slot.
    pub slot: Slot,
    /// The chosen tokens.
    pub tokens: &'a [i32],
    /// The logarithms of their probabilities; may be empty when no request asked for them.
    pub logprobs: &'a [f32],
}

/// A row of a planned step, with what it takes to undo it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub id: SeqId,
    /// Tokens it brings; they follow its computed ones.
    pub len: u32,
    /// Whether its next token is sampled.
    pub sampled: bool,
    /// Blocks it had before.
    pub blocks_before: u32,
    /// Whether it got its row with this step.
    pub arrival: Arrival,
}

/// How a row came into a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// It was active before.
    No,
    /// Admitted for the first time.
    Fresh,
    /// A victim that found room again.
    Victim,
}

/// Scheduler, block manager and planner in one owner.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) pool: BlockPool,
    pub(crate) rows: Rows,
    pub(crate) seqs: SlotMap<SeqId, Sequence>,
    pub(crate) by_request: HashMap<RequestId, SeqId>,
    pub(crate) queue: WaitingQueue,
    /// Sequences with a row, in order of admission.
    pub(crate) active: Vec<SeqId>,
    pub(crate) admissions: u64,
    /// The step in flight in each slot, by rows.
    pub(crate) in_flight: [Option<Vec<Entry>>; 2],
    /// Where decodes start when the budget of cache reads cut the last step short.
    pub(crate) decode_cursor: usize,
    /// Steps in a row that had no tokens left for some decode.
    pub(crate) steps_without_all_decodes: u32,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) events: Vec<Event>,
    pub(crate) mail: VecDeque<Message>,
    /// Buffers that keep their size from step to step.
    pub(crate) spare: Vec<Vec<Entry>>,
    pub(crate) starved: Vec<SeqId>,
    pub(crate) split: Vec<SeqId>,
}

impl Engine {
    /// An engine with an empty pool.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
    pub fn new(config: EngineConfig) -> Result<Self> {
        config.validate()?;
        let pool_blocks = config.num_blocks * config.num_groups();
        let engine = Self {
            pool: BlockPool::new(pool_blocks),
            rows: Rows::new(config.max_requests_per_batch),
            inbox: Arc::new(Inbox::new(&config)),
            outbox: Arc::default(),
            counters: Arc::default(),
            seqs: SlotMap::with_key(),
            by_request: HashMap::new(),
            queue: WaitingQueue::default(),
            active: Vec::new(),
            admissions: 0,
            in_flight: [None, None],
            decode_cursor: 0,
            steps_without_all_decodes: 0,
            events: Vec::new(),
            mail: VecDeque::new(),
            spare: vec![Vec::new(), Vec::new()],
            starved: Vec::new(),
            split: Vec::new(),
            config,
        };
        engine.publish_gauges();
        Ok(engine)
    }

    /// What it was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Where requests come in.
    pub fn inbox(&self) -> Arc<Inbox> {
        self.inbox.clone()
    }

    /// Where events go out.
    pub fn outbox(&self) -> Arc<Outbox> {
        self.outbox.clone()
    }

    /// Counters and gauges.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    /// Elements that the arena of a slot needs.
    pub fn arena_capacity(&self) -> usize {
        ArenaLayout::capacity(&self.config)
    }

    /// The call of a step: commits the results of one slot, reads the inbox, and plans the next step into the arena
    /// of another (or the same) slot. `None` when there is nothing to run.
    ///
    /// `now` is the time in seconds of the caller's clock; it only grows.
    ///
    /// # Errors
    /// [`Error::SlotMisused`] for a commit of a slot without a step or a plan while one is in flight,
    /// [`Error::BufferTooSmall`] for short buffers. Nothing has changed then.
    pub fn advance(
        &mut self,
        done: Option<Results<'_>>,
        next: Option<(Slot, &mut [i32])>,
        now: f64,
    ) -> Result<Option<Step>> {
        if let Some(results) = done {
            self.commit(results, now)?;
        }
        // While a step is in flight its sequences stay as they are.
        if !self.has_step_in_flight() {
            self.read_inbox(now);
        }
        let step = match next {
            Some((slot, arena)) => self.plan(slot, arena, now),
            None => Ok(None),
        };
        self.publish_gauges();
        self.outbox.deliver(&mut self.events);
        step
    }

    /// Gives a request that cannot be taken an id and its terminal event.
    pub fn refuse(&mut self, cause: &str, now: f64) -> RequestId {
        let request = self.inbox.next_id();
        let finish = Finish::Failed(cause.to_owned());
        let output = Output {
            tokens: vec![],
            logprobs: vec![],
            timestamps: vec![],
            finish,
            started: None,
            ended: now,
        };
        Counters::add(&self.counters.failed, 1);
        self.events.push(Event { request, news: News::End(Box::new(output)) });
        self.publish_gauges();
        self.outbox.deliver(&mut self.events);
        request
    }

    /// Whether a step is in flight.
    pub fn has_step_in_flight(&self) -> bool {
        self.in_flight.iter().any(Option::is_some)
    }

    /// Whether nothing is active, nothing waits and no message is unread.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty() && self.inbox.is_empty()
    }

    /// Ends every request with that cause, those in the inbox too. Steps in flight are forgotten.
    pub fn fail_all(&mut self, cause: &str, now: f64) {
        for entries in self.in_flight.iter_mut().filter_map(Option::take) {
            self.spare.push(entries);
        }
        self.read_inbox(now);
        let ids: Vec<_> = self.seqs.keys().collect();
        for id in ids {
            self.end(id, Finish::Failed(cause.to_owned()), now);
        }
        self.active.clear();
        self.publish_gauges();
        self.outbox.deliver(&mut self.events);
    }

    pub(crate) fn read_inbox(&mut self, now: f64) {
        let mut mail = std::mem::take(&mut self.mail);
        self.inbox.take(&mut mail);
        let mut ended_active = false;
        for message in mail.drain(..) {
            match message {
                Message::Submit(request, what) => self.accept(request, what),
                Message::Cancel(request) => {
                    if let Some(&id) = self.by_request.get(&request) {
                        ended_active |= self.seqs[id].row.is_some();
                        self.end(id, Finish::Cancelled, now);
                    }
                }
            }
        }
        self.mail = mail;
        if ended_active {
            self.drop_ended();
        }
    }

    fn accept(&mut self, request: RequestId, what: Request) {
        let prompt_len = what.prompt.len() as u32;
        let capacity =
            self.config.capacity_tokens().min(u64::from(self.config.max_positions.unwrap_or(u32::MAX)));
        let wanted = u64::from(prompt_len) + what.max_new_tokens as u64;
        let seed = what.seed.unwrap_or_else(|| mix(self.config.seed ^ mix(request.0)));
        let id = self.seqs.insert(Sequence {
            request,
            phase: Phase::Pending,
            tokens: what.prompt,
            prompt_len,
            priority: what.priority,
            computed: 0,
            max_len: wanted.min(capacity) as u32,
            blocks: Vec::new(),
            forgotten: if self.config.has_windows() { vec![0; self.config.groups.len()] } else { Vec::new() },
            forgotten_before: if self.config.has_windows() {
                vec![0; self.config.groups.len()]
            } else {
                Vec::new()
            },
            row: None,
            admitted: 0,
            passed_over: 0,
            eos: what.eos,
            sampling: what.sampling,
            draw_key: mix(seed),
            streaming: what.streaming,
            record_timestamps: what.record_timestamps,
            record_logprobs: what.record_logprobs,
            logprobs: Vec::new(),
            timestamps: Vec::new(),
            started: None,
        });
        self.by_request.insert(request, id);
        self.queue.push(id, &self.seqs[id]);
    }

    /// Takes a sequence out, gives back what it has, and writes its terminal event. The list of active ones is left
    /// to [`Engine::drop_ended`].
    pub(crate) fn end(&mut self, id: SeqId, finish: Finish, now: f64) {
        let Some(mut seq) = self.seqs.remove(id) else { return };
        self.by_request.remove(&seq.request);
        self.pool.release_tail(&mut seq.blocks, 0);
        match seq.row.take() {
            Some(row) => self.rows.give_back(row),
            None => {
                self.queue.remove(&seq);
                if seq.admitted == 0 {
                    self.inbox.left_queue();
                }
            }
        }
        let counter = match finish {
            Finish::Stop | Finish::Length => &self.counters.finished,
            Finish::Cancelled => &self.counters.cancelled,
            Finish::Failed(_) => &self.counters.failed,
        };
        Counters::add(counter, 1);
        let tokens = seq.tokens.split_off(seq.prompt_len as usize);
        let Sequence { logprobs, timestamps, started, request, .. } = seq;
        let output = Output { tokens, logprobs, timestamps, finish, started, ended: now };
        self.events.push(Event { request, news: News::End(Box::new(output)) });
    }

    /// Forgets the active sequences that ended.
    pub(crate) fn drop_ended(&mut self) {
        let seqs = &self.seqs;
        self.active.retain(|&id| seqs.contains_key(id));
    }

    pub(crate) fn publish_gauges(&self) {
        use std::sync::atomic::Ordering::Relaxed;
        let counters = &self.counters;
        let owned = u64::from(self.pool.owned());
        counters.submitted.store(self.inbox.submitted(), Relaxed);
        counters.waiting.store(self.queue.len() as u64, Relaxed);
        counters.running.store(self.active.len() as u64, Relaxed);
        counters.capacity.store(u64::from(self.pool.capacity()), Relaxed);
        counters.free_blocks.store(u64::from(self.pool.available()), Relaxed);
        counters.owned_blocks.store(owned, Relaxed);
        counters.peak_owned_blocks.fetch_max(owned, Relaxed);
    }

    pub(crate) fn check_free(&self, slot: Slot) -> Result<()> {
        if self.has_step_in_flight() {
            return Err(Error::SlotMisused { slot, problem: "cannot be planned while a step is in flight" });
        }
        Ok(())
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input moves every bit of the output.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
