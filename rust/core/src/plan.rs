//! Planning a step: which rows, with how many tokens, in which blocks. A sequence that does not fit leaves no trace.

use std::cmp::Reverse;

use crate::config::Policy;
use crate::counters::Counters;
use crate::engine::{Arrival, Engine, Entry, Flight, Step};
use crate::ids::{SeqId, Slot};
use crate::pool::Tickets;
use crate::sequence::Phase;
use crate::swap::Swapped;

/// What is left for the step that is being planned.
pub(crate) struct Budget {
    slot: Slot,
    pub tokens: u32,
    cache_reads: u64,
    pub table_changes: u32,
    /// Whether it was too small for some decode.
    left_out: bool,
    /// The regime of the step, once it has a row.
    second_regime: Option<bool>,
    /// Whether something of the other regime was left out.
    other_regime: bool,
}

impl Budget {
    /// Whether a row of that regime may be in the step.
    pub fn takes_regime(&mut self, second: bool) -> bool {
        let takes = self.second_regime.is_none_or(|of_step| of_step == second);
        self.other_regime |= !takes;
        takes
    }
}

/// With `prefill_first`, a decoding sequence is in at least one of so many steps.
pub const MAX_STEPS_WITHOUT_DECODES: u32 = 8;

impl Engine {
    /// Plans a step into a slot that is free and an arena that is long enough.
    pub(crate) fn plan(&mut self, slot: Slot, arena: &mut [i32], now: f64) -> Option<Step> {
        let mut flight = self.spare.pop().unwrap_or_default();
        flight.clear();
        self.cross_over();
        flight.is_trial = self.plan_trial(slot, &mut flight, now);
        if !flight.is_trial {
            let owed_regime = self.owed_regime.take();
            self.choose_rows_and_victims(slot, &mut flight, now, owed_regime);
        }
        if flight.entries.is_empty() {
            debug_assert!(
                self.seqs.is_empty() || self.has_step_in_flight() || !self.lets_in,
                "nothing could be planned although sequences are there"
            );
            self.spare.push(flight);
            return None;
        }
        self.singles_first(&mut flight.entries);
        flight.decodes = flight.entries.iter().take_while(|entry| entry.len == 1).count();
        flight.swap_outs.append(&mut self.swap.unsent);
        flight.victims.append(&mut self.unsent_victims);
        for &id in &flight.victims {
            if let Some(swapped) = self.seqs.get_mut(id).and_then(|seq| seq.rest.swapped.as_mut()) {
                swapped.in_flight.add(slot);
            }
        }
        let step = self.write(slot, &flight, arena);
        self.planned_steps += 1;
        (flight.number, flight.epoch) = (self.planned_steps, self.epoch);
        self.in_flight[slot.index()] = Some(flight);
        Some(step)
    }

    /// Sequences that have outgrown the first regime wait again, to be computed from the start in the second.
    pub(crate) fn cross_over(&mut self) {
        if self.config.first_regime.is_none() {
            return;
        }
        let mut crossing = std::mem::take(&mut self.split);
        crossing.clear();
        crossing.extend(self.active.iter().copied().filter(|&id| {
            let seq = &self.seqs[id];
            seq.in_flight.is_empty()
                && !seq.second_regime
                && self.config.is_second_regime(seq.tokens.len() as u32)
        }));
        for &id in &crossing {
            self.leave(id);
            let seq = &mut self.seqs[id];
            seq.second_regime = true;
            seq.rest.root = self.hasher.second_regime(seq.rest.root);
            seq.rest.keys.clear();
        }
        Counters::add(&self.counters.crossings, crossing.len() as u64);
        self.split = crossing;
    }

    /// Rows that bring one token stand first: kernels may have a faster path for them.
    fn singles_first(&mut self, entries: &mut Vec<Entry>) {
        let longer = &mut self.longer;
        entries.retain(|entry| {
            if entry.len != 1 {
                longer.push(*entry);
            }
            entry.len == 1
        });
        entries.append(longer);
    }

    pub(crate) fn choose_rows_and_victims(
        &mut self,
        slot: Slot,
        flight: &mut Flight,
        now: f64,
        mut owed_regime: Option<bool>,
    ) {
        let mut first_pass = true;
        loop {
            self.choose_rows(slot, flight, now, owed_regime);
            if flight.entries.is_empty() && owed_regime.take().is_some() {
                continue;
            }
            if std::mem::take(&mut first_pass) {
                Counters::add(&self.counters.starved, self.starved.len() as u64);
            }
            // Victims make room: for the next step when this one has rows, for this one when it has none.
            let relieved = !self.starved.is_empty() && self.choose_victims();
            if !flight.entries.is_empty() || !relieved {
                break;
            }
        }
    }

    fn choose_rows(&mut self, slot: Slot, flight: &mut Flight, now: f64, second_regime: Option<bool>) {
        self.starved.clear();
        let mut budget = Budget {
            slot,
            tokens: self.retries.most_tokens(),
            cache_reads: self.config.max_cache_reads.unwrap_or(u64::MAX),
            table_changes: self.table_changes,
            left_out: false,
            second_regime,
            other_regime: false,
        };
        let prefills_first = self.config.policy == Policy::PrefillFirst
            && self.steps_without_all_decodes + 1 < MAX_STEPS_WITHOUT_DECODES;
        if prefills_first {
            self.choose_split_prefills(flight, &mut budget);
            self.choose_decodes(flight, &mut budget);
        } else {
            self.choose_decodes(flight, &mut budget);
            self.choose_split_prefills(flight, &mut budget);
        }
        self.admit(flight, &mut budget, now);
        if !flight.entries.is_empty() {
            self.steps_without_all_decodes =
                if budget.left_out { self.steps_without_all_decodes + 1 } else { 0 };
            self.owed_regime = budget.second_regime.filter(|_| budget.other_regime).map(|second| !second);
        }
    }

    fn choose_decodes(&mut self, flight: &mut Flight, budget: &mut Budget) {
        let (count, num_groups) = (self.active.len(), self.config.num_groups());
        let start = if self.decode_cursor < count { self.decode_cursor } else { 0 };
        self.decode_cursor = 0;
        for at in (start..count).chain(0..start) {
            let id = self.active[at];
            let seq = &self.seqs[id];
            // One whose prompt comes to its end in this very step decodes from the next.
            if seq.phase != Phase::Decoding || seq.ends_in_flight() || seq.in_flight.has(budget.slot) {
                continue;
            }
            if !self.retries.lets_run(id) {
                continue;
            }
            if self.config.is_second_regime(seq.planned + 1) && !seq.second_regime {
                // It is computed again when its last token is there.
                continue;
            }
            if !budget.takes_regime(seq.second_regime) {
                budget.left_out = true;
                continue;
            }
            let reads = self.reads(seq.planned, 1);
            let changes = seq.unsent().len() as u32 + if seq.planned < seq.held { 0 } else { num_groups };
            if budget.tokens == 0 || reads > budget.cache_reads || changes > budget.table_changes {
                // The ones that this step leaves out are first in the next.
                budget.left_out = true;
                if self.decode_cursor == 0 {
                    self.decode_cursor = at;
                }
                continue;
            }
            if !self.extend(id, 1, flight, budget) {
                self.starved.push(id);
            }
        }
    }

    fn choose_split_prefills(&mut self, flight: &mut Flight, budget: &mut Budget) {
        let mut split = std::mem::take(&mut self.split);
        split.clear();
        let prefills = |&id: &SeqId| self.seqs[id].phase == Phase::Prefilling && self.retries.lets_run(id);
        split.extend(self.active.iter().copied().filter(prefills));
        for &id in &split {
            if budget.tokens == 0 || !self.prefills_go_on(flight) {
                break;
            }
            let seq = &self.seqs[id];
            if !budget.takes_regime(seq.second_regime) {
                continue;
            }
            let chunk = self.chunk(seq.known(), seq.planned, budget);
            if chunk == 0 || self.changes(id, chunk) > budget.table_changes {
                continue;
            }
            // With blocks for a part of it, a part goes on.
            let chunk = chunk.min(self.room(id));
            if chunk == 0 || !self.extend(id, chunk, flight, budget) {
                self.starved.push(id);
            }
        }
        self.split = split;
    }

    /// Tested before each prefill: with fewer blocks available than the reserve it waits, but a step that would be
    /// empty takes one.
    pub(crate) fn prefills_go_on(&self, flight: &Flight) -> bool {
        self.ledger.pool.available() >= self.reserve || flight.entries.is_empty()
    }

    /// How many of its `known` tokens a prefill brings after the first `planned`, for all that the budgets say.
    pub(crate) fn chunk(&self, known: u32, planned: u32, budget: &Budget) -> u32 {
        let seen_before = self.reads(planned, 1) - 1;
        let readable = budget.cache_reads.saturating_sub(seen_before).min(u64::from(u32::MAX)) as u32;
        (known - planned).min(budget.tokens).min(readable)
    }

    /// Tokens of K and V that the group that looks farthest back reads for the next `len` tokens.
    fn reads(&self, planned: u32, len: u32) -> u64 {
        if self.config.max_cache_reads.is_none() {
            return u64::from(len);
        }
        let first_seen = self.config.groups.iter().map(|reach| reach.first_seen(planned)).min().unwrap_or(0);
        u64::from(planned - first_seen) + u64::from(len)
    }

    /// Changes of its block table that a row brings with `len` more tokens.
    fn changes(&self, id: SeqId, len: u32) -> u32 {
        let seq = &self.seqs[id];
        let lacking = seq.blocks_lacking(seq.planned + len, self.config.page_size, self.config.num_groups());
        seq.unsent().len() as u32 + lacking
    }

    /// Tokens that the available blocks extend a sequence by.
    pub(crate) fn room(&self, id: SeqId) -> u32 {
        let available = self.ledger.pool.available();
        self.seqs[id].room(available, self.config.page_size, self.config.num_groups())
    }

    /// Plans `len` more tokens of a sequence with a row, if their blocks can be had.
    pub(crate) fn extend(&mut self, id: SeqId, len: u32, flight: &mut Flight, budget: &mut Budget) -> bool {
        let num_groups = self.config.num_groups();
        let reads = self.reads(self.seqs[id].planned, len);
        let seq = &mut self.seqs[id];
        let (start, end) = (seq.planned, seq.planned + len);
        let blocks_before = seq.blocks.len() as u32;
        if end > seq.held {
            let lacking = seq.blocks_lacking(end, self.config.page_size, num_groups);
            if lacking > self.ledger.pool.available() {
                return false;
            }
            for place in blocks_before..blocks_before + lacking {
                seq.blocks.extend(self.ledger.allocate((place % num_groups) as usize));
                seq.news.push(place);
            }
            seq.held += lacking / num_groups * self.config.page_size;
        }
        let entry = Entry {
            id,
            start,
            len,
            sampled: end == seq.known(),
            blocks_before,
            news: seq.unsent().len() as u32,
            phase_before: seq.phase,
            arrival: Arrival::No,
        };
        seq.planned = end;
        seq.in_flight.add(budget.slot);
        seq.news_sent += entry.news;
        if entry.sampled {
            seq.pending += 1;
            seq.phase = Phase::Decoding;
            flight.sampled += 1;
            flight.wants_logprobs |= seq.record_logprobs;
        }
        flight.tokens += len as usize;
        flight.news += entry.news as usize;
        flight.carry_overs += usize::from(end as usize > seq.tokens.len());
        flight.entries.push(entry);
        budget.second_regime = Some(seq.second_regime);
        budget.tokens -= len;
        budget.table_changes -= entry.news;
        budget.cache_reads -= reads;
        true
    }

    /// Makes room by taking the blocks of starved sequences, of the lowest priority the newest first, as few as the demand of the
    /// others needs, and never the last active one. Tells whether there was a victim.
    ///
    /// A sequence in flight is no victim: starved, it is left out of this step and so at rest by the next.
    fn choose_victims(&mut self) -> bool {
        let starved = std::mem::take(&mut self.starved);
        let (page_size, num_groups) = (self.config.page_size, self.config.num_groups());
        let demand_of = |engine: &Self, id: SeqId| {
            let seq = &engine.seqs[id];
            let chunk = seq.remaining().min(engine.config.max_batch_tokens);
            seq.blocks_lacking(seq.planned + chunk, page_size, num_groups)
        };
        let mut demand: u32 = starved.iter().map(|&id| demand_of(self, id)).sum();
        let mut newest_first = std::mem::take(&mut self.split);
        newest_first.clear();
        newest_first.extend(starved.iter().filter(|&&id| self.seqs[id].in_flight.is_empty()));
        newest_first
            .sort_unstable_by_key(|&id| (self.seqs[id].rest.priority, Reverse(self.seqs[id].rest.admitted)));
        let mut victims = 0;
        for &id in &newest_first {
            // Blocks that wait for a step in flight are as good as there.
            let coming = self.ledger.pool.available() + self.ledger.pool.total().retiring;
            if demand <= coming || self.active.len() <= 1 {
                break;
            }
            demand -= demand_of(self, id);
            self.offload(id);
            victims += 1;
        }
        self.split = newest_first;
        self.starved = starved;
        victims > 0
    }

    /// Takes everything from a victim. What fits the swap pool is copied there.
    fn offload(&mut self, id: SeqId) {
        let seq = &self.seqs[id];
        let (computed, epoch) = (seq.computed, seq.rest.epoch);
        // What comes back brings its whole table in one step.
        let fits = seq.blocks.len() as u32 <= self.table_changes / 2;
        let blocks = if fits { self.swap.take_in(&seq.blocks, self.ledger.pool.read_trash()) } else { None };
        self.leave(id);
        match blocks {
            Some(blocks) => {
                self.seqs[id].rest.swapped =
                    Some(Swapped { blocks, computed, epoch, in_flight: Tickets::NONE });
                self.unsent_victims.push(id);
                self.num_swapped += 1;
                Counters::add(&self.counters.swap_outs, 1);
            }
            None => Counters::add(&self.counters.soft_resets, 1),
        }
    }
}
