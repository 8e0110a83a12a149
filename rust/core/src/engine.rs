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
use crate::hash::PrefixHasher;
use crate::ids::{BlockId, RequestId, SeqId, Slot};
use crate::inbox::{Inbox, Message};
use crate::ledger::Ledger;
use crate::outbox::{Event, News, Outbox, Output};
use crate::prefix::ByKey;
use crate::queue::WaitingQueue;
use crate::retry::Retries;
use crate::rows::Rows;
use crate::sequence::{Finish, Phase, Rest, Sequence};
use crate::swap::{SwapId, SwapPool};

/// A planned step: its shape and where its parts lie in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The buffers it uses.
    pub slot: Slot,
    /// Whether its rows are of the second regime.
    pub second_regime: bool,
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
    /// Position of the first token it brings.
    pub start: u32,
    /// Tokens it brings.
    pub len: u32,
    /// Whether its next token is sampled.
    pub sampled: bool,
    /// Blocks it had before.
    pub blocks_before: u32,
    /// Changes of its block table that the step brings.
    pub news: u32,
    /// Where it stood before.
    pub phase_before: Phase,
    /// Whether it got its row with this step.
    pub arrival: Arrival,
}

/// A planned step: what it takes to commit or undo it.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    /// Counts the steps as they are planned.
    pub number: u64,
    /// The weights that it is computed with.
    pub epoch: u64,
    pub entries: Vec<Entry>,
    /// Rows that a token is sampled for, and whether some of them record its logprob.
    pub sampled: usize,
    pub wants_logprobs: bool,
    /// Leading rows that bring one token.
    pub decodes: usize,
    /// Tokens, table changes, arrivals and carry-overs of its rows.
    pub tokens: usize,
    pub news: usize,
    pub arrivals: usize,
    pub carry_overs: usize,
    /// Blocks that it copies, from and to. It owns those it copies from until it is in.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Blocks that it copies to the host and back.
    pub swap_outs: Vec<(BlockId, SwapId)>,
    pub swap_ins: Vec<(SwapId, BlockId)>,
    /// Whose blocks go to the host.
    pub victims: Vec<SeqId>,
    /// Whether its rows are suspects of a step that raised.
    pub is_trial: bool,
}

impl Flight {
    pub fn clear(&mut self) {
        self.entries.clear();
        (self.sampled, self.wants_logprobs) = (0, false);
        (self.tokens, self.news, self.arrivals, self.carry_overs) = (0, 0, 0, 0);
        self.copies.clear();
        self.swap_outs.clear();
        self.swap_ins.clear();
        self.victims.clear();
        self.is_trial = false;
    }
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
    pub(crate) ledger: Ledger,
    pub(crate) swap: SwapPool,
    pub(crate) num_swapped: u64,
    /// Victims whose copies to the host no step carries yet.
    pub(crate) unsent_victims: Vec<SeqId>,
    /// The version of the weights, and of the cache.
    pub(crate) epoch: u64,
    pub(crate) hasher: PrefixHasher,
    /// Match units that active sequences compute next, and how many do.
    pub(crate) producers: ByKey<u32>,
    pub(crate) rows: Rows,
    pub(crate) seqs: SlotMap<SeqId, Sequence>,
    pub(crate) by_request: HashMap<RequestId, SeqId>,
    pub(crate) queue: WaitingQueue,
    /// Sequences with a row, in order of admission.
    pub(crate) active: Vec<SeqId>,
    pub(crate) admissions: u64,
    /// Sequences that came through the inbox.
    pub(crate) arrived: u64,
    /// Tokens of one sequence that pool and positions bear.
    pub(crate) longest: u32,
    /// Table changes that a step has room for.
    pub(crate) table_changes: u32,
    /// Available blocks with fewer than which prefills wait.
    pub(crate) reserve: u32,
    arena_capacity: usize,
    /// The step in flight in each slot.
    pub(crate) in_flight: [Option<Flight>; 2],
    pub(crate) planned_steps: u64,
    pub(crate) retries: Retries,
    /// The regime that the last step left out: the next step is its.
    pub(crate) owed_regime: Option<bool>,
    /// Whether sequences that were never admitted are let in.
    pub(crate) lets_in: bool,
    /// Requests of several sequences, by their first: how many they had, and how many of them live.
    pub(crate) families: HashMap<RequestId, (u32, u32)>,
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
    pub(crate) spare: Vec<Flight>,
    pub(crate) starved: Vec<SeqId>,
    pub(crate) split: Vec<SeqId>,
    pub(crate) longer: Vec<Entry>,
    pub(crate) skipped: Vec<SeqId>,
}

impl Engine {
    /// An engine with an empty pool.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
    pub fn new(config: EngineConfig) -> Result<Self> {
        config.validate()?;
        let outbox = Arc::new(Outbox::default());
        let engine = Self {
            ledger: Ledger::new(&config),
            swap: SwapPool::new(config.swap_blocks),
            num_swapped: 0,
            unsent_victims: Vec::new(),
            epoch: 0,
            hasher: PrefixHasher::new(&config),
            producers: ByKey::default(),
            rows: Rows::new(config.max_requests_per_batch),
            inbox: Arc::new(Inbox::new(&config, outbox.clone())),
            outbox,
            counters: Arc::new(Counters::new(config.groups.len())),
            seqs: SlotMap::with_key(),
            by_request: HashMap::new(),
            queue: WaitingQueue::new(config.fairness.clone()),
            active: Vec::new(),
            admissions: 0,
            arrived: 0,
            longest: config.longest(),
            table_changes: ArenaLayout::table_changes(&config) as u32,
            reserve: config.reserve(),
            arena_capacity: ArenaLayout::capacity(&config),
            in_flight: [None, None],
            planned_steps: 0,
            retries: Retries::new(config.max_batch_tokens),
            owed_regime: None,
            lets_in: true,
            families: HashMap::new(),
            decode_cursor: 0,
            steps_without_all_decodes: 0,
            events: Vec::new(),
            mail: VecDeque::new(),
            spare: Vec::new(),
            starved: Vec::new(),
            split: Vec::new(),
            longer: Vec::new(),
            skipped: Vec::new(),
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
        self.arena_capacity
    }

    /// The call of a step: commits the results of one slot, reads the inbox, and plans the next step into the arena
    /// of another (or the same) slot. `None` when there is nothing to run before a step in flight is in.
    ///
    /// One step may be in flight while the next is planned: tokens that it samples stand in the new step as
    /// *carry-overs*, to be copied on the device. Steps are committed in the order in which they were planned.
    ///
    /// `now` is the time in seconds of the caller's clock; it only grows.
    ///
    /// # Errors
    /// [`Error::SlotMisused`] for a commit of a slot without a step or out of order, or a plan into a slot that has one,
    /// [`Error::BufferTooSmall`] for short buffers. Nothing has changed then.
    pub fn advance(
        &mut self,
        done: Option<Results<'_>>,
        next: Option<(Slot, &mut [i32])>,
        now: f64,
    ) -> Result<Option<Step>> {
        if let Some((slot, arena)) = &next {
            // What the plan could refuse is looked at before anything is committed.
            if done.is_none_or(|results| results.slot != *slot) {
                self.check_free(*slot)?;
            }
            self.check_arena(*slot, arena.len())?;
        }
        if let Some(results) = done {
            self.commit(results, now)?;
        }
        self.read_inbox(now);
        let step = match next {
            Some((slot, arena)) => self.plan(slot, arena, now),
            None => None,
        };
        self.publish_gauges();
        self.outbox.deliver(&mut self.events);
        Ok(step)
    }

    /// Gives a request that cannot be taken an id and its terminal event.
    pub fn refuse(&mut self, cause: &str, now: f64) -> RequestId {
        let request = self.inbox.next_id();
        let finish = Finish::Failed(cause.to_owned());
        let output = Output {
            prompt: vec![],
            tokens: vec![],
            logprobs: vec![],
            timestamps: vec![],
            epochs: vec![],
            cached_tokens: 0,
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

    /// The slot of the step that was planned first of those in flight.
    pub(crate) fn oldest_in_flight(&self) -> Option<Slot> {
        let number = |slot: &Slot| self.in_flight[slot.index()].as_ref().map(|flight| flight.number);
        Slot::ALL.into_iter().filter(|slot| number(slot).is_some()).min_by_key(number)
    }

    /// Forgets everything that is cached: the weights changed, or the caller wants it so. What is being computed goes on,
    /// and nothing of it is shared any more.
    pub fn new_epoch(&mut self) {
        let ids = std::mem::take(&mut self.active);
        for &id in &ids {
            self.stop_sharing(id);
        }
        self.active = ids;
        self.ledger.clear();
        self.epoch += 1;
        for seq in self.seqs.values_mut() {
            let sampled = seq.known() - seq.rest.prompt_len;
            seq.rest.epochs.changed(sampled, self.epoch);
        }
        Counters::add(&self.counters.epoch, 1);
        self.publish_gauges();
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
        self.end_all(&Finish::Failed(cause.to_owned()), now);
    }

    /// Ends every request alike, in the order of their ids.
    pub(crate) fn end_all(&mut self, finish: &Finish, now: f64) {
        // In the reverse order of their planning.
        if let Some(oldest) = self.oldest_in_flight() {
            self.undo(oldest.other(), None, now);
            self.undo(oldest, None, now);
        }
        self.read_inbox(now);
        let mut ids: Vec<_> = self.seqs.iter().map(|(id, seq)| (seq.request, id)).collect();
        ids.sort_unstable();
        for (_, id) in ids {
            self.end(id, finish.clone(), now);
        }
        self.active.clear();
        self.retries.forget();
        self.publish_gauges();
        self.outbox.deliver(&mut self.events);
    }

    /// Takes a sequence out, gives back what it has, and writes its terminal event. The list of active ones is left
    /// to [`Engine::drop_ended`].
    pub(crate) fn end(&mut self, id: SeqId, finish: Finish, now: f64) {
        if !self.seqs.contains_key(id) {
            return;
        }
        self.stop_sharing(id);
        self.drop_swapped(id);
        let Some(mut seq) = self.seqs.remove(id) else { return };
        self.by_request.remove(&seq.request);
        if let Some((_, living)) = self.families.get_mut(&seq.rest.parent) {
            *living -= 1;
            if *living == 0 {
                self.families.remove(&seq.rest.parent);
            }
        }
        self.ledger.release_tail(&mut seq.blocks, 0, seq.in_flight);
        match seq.row.take() {
            Some(row) => self.rows.give_back(row, seq.in_flight),
            None => {
                self.queue.remove(&seq);
                if seq.rest.admitted == 0 {
                    self.inbox.left_queue();
                }
            }
        }
        self.queue.leaves(seq.rest.tenant);
        let counter = match finish {
            Finish::Stop | Finish::Length => &self.counters.finished,
            Finish::Cancelled => &self.counters.cancelled,
            Finish::Failed(_) => &self.counters.failed,
        };
        Counters::add(counter, 1);
        let Sequence { tokens, request, rest, .. } = seq;
        let (mut prompt, tokens) = tokens.split(rest.prompt_len as usize);
        let Rest { logprobs, timestamps, cached_tokens, started, epochs, .. } = *rest;
        let epochs = epochs.of(tokens.len());
        // It had room for all that was to come.
        prompt.shrink_to_fit();
        let output = Output {
            prompt,
            tokens,
            logprobs,
            timestamps,
            epochs,
            cached_tokens,
            finish,
            started,
            ended: now,
        };
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
        let (pool, total) = (&self.ledger.pool, self.ledger.pool.total());
        counters.submitted.store(self.inbox.submitted(), Relaxed);
        counters.waiting.store(self.queue.len() as u64, Relaxed);
        counters.running.store(self.active.len() as u64, Relaxed);
        counters.capacity.store(u64::from(pool.capacity()), Relaxed);
        counters.free_blocks.store(u64::from(pool.free()), Relaxed);
        counters.owned_blocks.store(u64::from(total.owned), Relaxed);
        counters.cached_blocks.store(u64::from(total.cached), Relaxed);
        counters.retiring_blocks.store(u64::from(total.retiring), Relaxed);
        counters.peak_owned_blocks.fetch_max(u64::from(total.owned), Relaxed);
        counters.max_step_tokens.store(u64::from(self.retries.most_tokens()), Relaxed);
        counters.swapped.store(self.num_swapped, Relaxed);
        counters.swap_capacity.store(u64::from(self.swap.capacity()), Relaxed);
        counters.free_swap_blocks.store(u64::from(self.swap.available()), Relaxed);
        counters.publish_groups(pool.by_group());
        counters.evictions.store(self.ledger.evictions, Relaxed);
    }

    fn check_arena(&self, slot: Slot, have: usize) -> Result<()> {
        let need = self.arena_capacity;
        if have < need {
            return Err(Error::BufferTooSmall { slot, buffer: "arena", have, need });
        }
        Ok(())
    }

    pub(crate) fn check_free(&self, slot: Slot) -> Result<()> {
        if self.in_flight[slot.index()].is_some() {
            return Err(Error::SlotMisused {
                slot,
                problem: "cannot be planned while its step is in flight",
            });
        }
        Ok(())
    }
}
