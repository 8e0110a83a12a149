//! Planning a step: which rows, with how many tokens, in which blocks. A sequence that does not fit leaves no trace.

use std::cmp::Reverse;

use crate::arena::{ArenaLayout, DRAW_WIDTH, PAIR_WIDTH, ROW_CHANGE_WIDTH, StepShape, TABLE_CHANGE_WIDTH};
use crate::config::Policy;
use crate::counters::Counters;
use crate::engine::{Arrival, Engine, Entry, Flight, Step};
use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqId, Slot};
use crate::pool::Tickets;
use crate::prefix::Hit;
use crate::queue::MAX_PASSED_OVER;
use crate::sequence::{Phase, Sampling};
use crate::swap::Swapped;

/// What is left for the step that is being planned.
struct Budget {
    slot: Slot,
    tokens: u32,
    cache_reads: u64,
    table_changes: u32,
    /// Whether it was too small for some decode.
    left_out: bool,
    /// The regime of the step, once it has a row.
    second_regime: Option<bool>,
    /// Whether something of the other regime was left out.
    other_regime: bool,
}

impl Budget {
    /// Whether a row of that regime may be in the step.
    fn takes_regime(&mut self, second: bool) -> bool {
        let takes = self.second_regime.is_none_or(|of_step| of_step == second);
        self.other_regime |= !takes;
        takes
    }
}

/// What an admission starts from.
#[derive(Debug, Clone, Copy)]
struct Offer {
    /// What is in the cache.
    hit: Hit,
    /// Tokens that need not be computed: those in the cache, or those that a victim left on the host.
    computed: u32,
    /// Blocks that its admission takes from the available ones, and will take until all of its known tokens are computed.
    blocks: u32,
}

/// With `prefill_first`, a decoding sequence is in at least every so manieth step.
pub const MAX_STEPS_WITHOUT_DECODES: u32 = 8;

impl Engine {
    pub(crate) fn plan(&mut self, slot: Slot, arena: &mut [i32], now: f64) -> Result<Option<Step>> {
        self.check_free(slot)?;
        let need = self.arena_capacity();
        if arena.len() < need {
            return Err(Error::BufferTooSmall { slot, buffer: "arena", have: arena.len(), need });
        }
        let mut flight = self.spare.pop().unwrap_or_default();
        flight.clear();
        self.cross_over();
        let mut owed_regime = self.owed_regime.take();
        let mut first_pass = true;
        loop {
            self.choose_rows(slot, &mut flight, now, owed_regime);
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
        if flight.entries.is_empty() {
            debug_assert!(
                self.seqs.is_empty() || self.has_step_in_flight(),
                "nothing could be planned although sequences are there"
            );
            self.spare.push(flight);
            return Ok(None);
        }
        self.singles_first(&mut flight.entries);
        flight.swap_outs.append(&mut self.swap.unsent);
        flight.victims.append(&mut self.unsent_victims);
        for &id in &flight.victims {
            if let Some(swapped) = self.seqs.get_mut(id).and_then(|seq| seq.rest.swapped.as_mut()) {
                swapped.in_flight.add(slot);
            }
        }
        let step = self.write(slot, &flight, arena);
        self.planned_steps += 1;
        flight.number = self.planned_steps;
        self.in_flight[slot.index()] = Some(flight);
        Ok(Some(step))
    }

    /// Sequences that have outgrown the first regime wait again, to be computed from the start in the second.
    fn cross_over(&mut self) {
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

    fn choose_rows(&mut self, slot: Slot, flight: &mut Flight, now: f64, second_regime: Option<bool>) {
        self.starved.clear();
        let mut budget = Budget {
            slot,
            tokens: self.config.max_batch_tokens,
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
        split.extend(self.active.iter().copied().filter(|&id| self.seqs[id].phase == Phase::Prefilling));
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

    fn admit(&mut self, flight: &mut Flight, budget: &mut Budget, now: f64) {
        self.queue.settle();
        let mut skipped = std::mem::take(&mut self.skipped);
        skipped.clear();
        let mut head_passed_over = None;
        // A head that waited long enough lets nobody past.
        while budget.tokens > 0 && self.rows.available() > 0 && skipped.len() <= MAX_PASSED_OVER as usize {
            if self.ledger.pool.available() == 0 || !self.prefills_go_on(flight) {
                break;
            }
            let Some(id) = self.queue.next(&skipped) else { break };
            if !budget.takes_regime(self.seqs[id].second_regime) {
                // The next step is its.
                skipped.push(id);
                continue;
            }
            let Some(offer) = self.offer(id) else {
                // What it needs next is being computed by another. That one is active, so this is no passing over.
                skipped.push(id);
                continue;
            };
            let chunk = self.chunk(self.seqs[id].known(), offer.computed, budget);
            let page_size = self.config.page_size;
            let changes = (offer.computed + chunk).div_ceil(page_size) * self.config.num_groups();
            if chunk == 0 || offer.blocks > self.ledger.pool.available() || changes > budget.table_changes {
                if skipped.is_empty() {
                    if self.seqs[id].rest.passed_over >= MAX_PASSED_OVER {
                        break;
                    }
                    head_passed_over = Some(id);
                }
                skipped.push(id);
                continue;
            };
            self.queue.remove(&self.seqs[id]);
            if let Some(head) = head_passed_over.take() {
                self.seqs[head].rest.passed_over += 1;
            }
            let arrival = self.give_row(id, now);
            self.seqs[id].reserve(&self.config);
            match self.seqs[id].rest.swapped {
                Some(_) => self.take_back(id, flight),
                None => self.take_hit(id, offer.hit, arrival, flight),
            }
            let planned = self.extend(id, chunk.min(self.room(id)), flight, budget);
            debug_assert!(planned, "its blocks were counted");
            if let Some(entry) = flight.entries.last_mut() {
                entry.arrival = arrival;
                entry.blocks_before = 0;
            }
            if arrival == Arrival::Fresh {
                let seq = &self.seqs[id];
                self.queue.charge(seq.rest.tenant, seq.rest.prefill_len - offer.computed);
            }
        }
        self.skipped = skipped;
    }

    /// What the cache has for a sequence that waits; `None` while another computes the match unit that it needs next.
    fn offer(&mut self, id: SeqId) -> Option<Offer> {
        let seq = &mut self.seqs[id];
        let len = seq.known();
        let whole = self.config.blocks_to_hold(len);
        if let Some(swapped) = &seq.rest.swapped {
            let computed = swapped.computed;
            let (mut shared, mut available) = (0, 0);
            self.look_up_swapped(id);
            self.blocks_of_swapped(id, |_, block| {
                shared += 1;
                available += u32::from(self.ledger.is_cached(block));
            });
            return Some(Offer { hit: Hit::default(), computed, blocks: whole - shared + available });
        }
        if !self.ledger.index.is_on() {
            return Some(Offer { hit: Hit::default(), computed: 0, blocks: whole });
        }
        let text = seq.tokens.whole();
        self.hasher.extend(seq.rest.root, &mut seq.rest.keys, text);
        let mut hits = self.ledger.index.longest_hits(seq.rest.root, &seq.rest.keys, text);
        let seq = &self.seqs[id];
        let pages = |hit: u32| hit.div_ceil(self.config.page_size) * self.config.num_groups();
        if pages(hits[0].tokens) > self.table_changes / 2 {
            hits = Default::default();
        }
        let next = seq.rest.keys.get((hits[0].tokens / self.config.match_unit) as usize);
        if next.is_some_and(|key| self.producers.contains_key(key)) {
            return None;
        }
        // To copy a page takes a block more until the copy is made; where that is too much, it is computed.
        let [best, smaller] = hits.map(|hit| {
            let (mut shared, mut available) = (0, 0);
            self.blocks_of_hit(hit, |block, whole_page| {
                shared += u32::from(whole_page);
                available += u32::from(self.ledger.is_cached(block));
            });
            Offer { hit, computed: hit.tokens, blocks: whole - shared + available }
        });
        Some(if best.blocks > self.ledger.pool.available() { smaller } else { best })
    }

    /// Calls back for each block of a hit, in the order of the block table, and whether it is shared or copied from.
    fn blocks_of_hit(&self, hit: Hit, mut each: impl FnMut(BlockId, bool)) {
        let page_size = self.config.page_size;
        for page in 0..hit.tokens.div_ceil(page_size) {
            for group in 0..self.config.groups.len() {
                if let Some(block) = self.ledger.index.block_of_hit(hit, page, group) {
                    each(block, (page + 1) * page_size <= hit.tokens);
                }
            }
        }
    }

    /// Gives an arrival what was found for it: whole pages are shared, and one that matches in part is copied.
    fn take_hit(&mut self, id: SeqId, hit: Hit, arrival: Arrival, flight: &mut Flight) {
        let (page_size, match_unit) = (self.config.page_size, self.config.match_unit);
        let num_groups = self.config.groups.len();
        let mut blocks = std::mem::take(&mut self.seqs[id].blocks);
        // All that is shared or copied from has its owner before a block is allocated, which may evict others.
        for page in 0..hit.tokens.div_ceil(page_size) {
            for group in 0..num_groups {
                let block = self.ledger.index.block_of_hit(hit, page, group);
                if let Some(block) = block {
                    self.ledger.share(block);
                }
                blocks.push(block.unwrap_or(self.ledger.pool.read_trash()));
            }
        }
        if !hit.tokens.is_multiple_of(page_size) {
            for (group, place) in blocks.iter_mut().rev().take(num_groups).rev().enumerate() {
                let Some(block) = self.ledger.allocate(group) else { continue };
                let from = std::mem::replace(place, block);
                if from != self.ledger.pool.read_trash() {
                    flight.copies.push((from, block));
                }
            }
        }
        let seq = &mut self.seqs[id];
        seq.news.extend(0..blocks.len() as u32);
        seq.blocks = blocks;
        seq.held = hit.tokens.next_multiple_of(page_size);
        (seq.computed, seq.planned) = (hit.tokens, hit.tokens);
        for (forgotten, reach) in seq.rest.forgotten.iter_mut().zip(&self.config.groups) {
            *forgotten = reach.first_seen(hit.tokens) / page_size;
        }
        seq.rest.prefill_len = seq.tokens.len() as u32;
        seq.rest.epoch = self.epoch;
        if arrival == Arrival::Fresh {
            seq.rest.cached_tokens = hit.tokens;
        }
        seq.rest.shares = self.ledger.index.is_on();
        if seq.rest.shares {
            seq.rest.published = hit.tokens / match_unit;
            seq.unit_end = (seq.rest.published + 1) * match_unit;
            if seq.rest.published > 0 {
                let tip = self.ledger.index.node_of_last_hit(seq.rest.published - 1);
                self.ledger.index.hold(tip);
                seq.rest.tip = Some(tip);
            }
            self.claim_next_unit(id);
        }
    }

    /// Looks up which pages that a victim left on the host are still in the cache.
    fn look_up_swapped(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        let same_weights = seq.rest.swapped.as_ref().is_some_and(|swapped| swapped.epoch == self.epoch);
        if same_weights && self.ledger.index.is_on() {
            let text = seq.tokens.whole();
            self.hasher.extend(seq.rest.root, &mut seq.rest.keys, text);
            self.ledger.index.longest_hits(seq.rest.root, &seq.rest.keys, text);
        } else {
            self.ledger.index.look_up_nothing();
        }
    }

    /// Calls back for each whole page of a victim that is still in the cache, with its place in the block table.
    fn blocks_of_swapped(&self, id: SeqId, mut each: impl FnMut(usize, BlockId)) {
        let (num_groups, page_size) = (self.config.groups.len(), self.config.page_size);
        let Some(swapped) = &self.seqs[id].rest.swapped else { return };
        let whole_pages = (swapped.computed / page_size) as usize;
        for (place, swap) in swapped.blocks.iter().enumerate().take(whole_pages * num_groups) {
            if swap.is_some()
                && let Some(block) =
                    self.ledger.index.block_of_page((place / num_groups) as u32, place % num_groups)
            {
                each(place, block);
            }
        }
    }

    /// Gives a victim back what it left on the host: what is still in the cache is shared, the rest copied.
    fn take_back(&mut self, id: SeqId, flight: &mut Flight) {
        let num_groups = self.config.groups.len();
        let trash = self.ledger.pool.read_trash();
        let seq = &mut self.seqs[id];
        let Some(swapped) = &seq.rest.swapped else { return };
        let mut blocks = std::mem::take(&mut seq.blocks);
        blocks.resize(swapped.blocks.len(), trash);
        self.blocks_of_swapped(id, |place, block| blocks[place] = block);
        for &block in blocks.iter().filter(|&&block| block != trash) {
            self.ledger.share(block);
        }
        let seq = &mut self.seqs[id];
        let Some(swapped) = &seq.rest.swapped else { return };
        for (place, &swap) in swapped.blocks.iter().enumerate() {
            if let Some(swap) = swap.filter(|_| blocks[place] == trash)
                && let Some(block) = self.ledger.allocate(place % num_groups)
            {
                blocks[place] = block;
                flight.swap_ins.push((swap, block));
            }
        }
        (seq.computed, seq.planned) = (swapped.computed, swapped.computed);
        seq.rest.epoch = swapped.epoch;
        seq.rest.shares = self.ledger.index.is_on() && seq.rest.epoch == self.epoch;
        if seq.rest.shares {
            seq.unit_end = self.config.match_unit;
        }
        seq.news.extend(0..blocks.len() as u32);
        seq.held = (blocks.len() / num_groups) as u32 * self.config.page_size;
        seq.blocks = blocks;
        seq.rest.prefill_len = seq.tokens.len() as u32;
        if seq.rest.prefill_len > seq.rest.prompt_len && seq.remaining() == 1 {
            seq.phase = Phase::Decoding;
        }
        for (forgotten, reach) in seq.rest.forgotten.iter_mut().zip(&self.config.groups) {
            *forgotten = reach.first_seen(seq.computed) / self.config.page_size;
        }
    }

    fn give_row(&mut self, id: SeqId, now: f64) -> Arrival {
        let row = self.rows.take();
        let seq = &mut self.seqs[id];
        seq.row = row;
        seq.phase = Phase::Prefilling;
        if seq.rest.admitted == 0 {
            self.admissions += 1;
            seq.rest.admitted = self.admissions;
            seq.rest.started = Some(now);
            self.inbox.left_queue();
            self.active.push(id);
            return Arrival::Fresh;
        }
        // It comes back to its place among the active ones.
        let admitted = seq.rest.admitted;
        let seqs = &self.seqs;
        let at = self.active.partition_point(|&other| seqs[other].rest.admitted < admitted);
        self.active.insert(at, id);
        Arrival::Victim
    }

    /// Tested before each prefill: with fewer blocks available than the reserve it waits, but a step that would be
    /// empty takes one.
    fn prefills_go_on(&self, flight: &Flight) -> bool {
        self.ledger.pool.available() >= self.reserve || flight.entries.is_empty()
    }

    /// How many of its `known` tokens a prefill brings after the first `planned`, for all that the budgets say.
    fn chunk(&self, known: u32, planned: u32, budget: &Budget) -> u32 {
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
    fn room(&self, id: SeqId) -> u32 {
        let available = self.ledger.pool.available();
        self.seqs[id].room(available, self.config.page_size, self.config.num_groups())
    }

    /// Plans `len` more tokens of a sequence with a row, if their blocks can be had.
    fn extend(&mut self, id: SeqId, len: u32, flight: &mut Flight, budget: &mut Budget) -> bool {
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
        flight.entries.push(entry);
        budget.second_regime = Some(seq.second_regime);
        budget.tokens -= len;
        budget.table_changes -= entry.news;
        budget.cache_reads -= reads;
        true
    }

    /// Makes room by resetting starved sequences, of the lowest priority the newest first, as few as the demand of the
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

    /// Writes the step into the arena.
    fn write(&mut self, slot: Slot, flight: &Flight, arena: &mut [i32]) -> Step {
        let num_groups = self.config.num_groups() as usize;
        let page_size = self.config.page_size;
        let mut shape = StepShape {
            rows: flight.entries.len(),
            copies: flight.copies.len(),
            swap_outs: flight.swap_outs.len(),
            swap_ins: flight.swap_ins.len(),
            ..StepShape::default()
        };
        for entry in &flight.entries {
            shape.tokens += entry.len as usize;
            shape.sampled += usize::from(entry.sampled);
            shape.table_changes += entry.news as usize;
            shape.row_changes += usize::from(entry.arrival != Arrival::No);
            let seq = &self.seqs[entry.id];
            shape.carry_overs += usize::from((entry.start + entry.len) as usize > seq.tokens.len());
        }
        shape.decodes = flight.entries.iter().take_while(|entry| entry.len == 1).count();
        let layout = ArenaLayout::new(&shape, num_groups);

        let (mut token_at, mut sampled_at, mut table_at, mut row_at, mut carry_at) = (0, 0, 0, 0, 0);
        arena[layout.cu_seqlens.start] = 0;
        for (n, entry) in flight.entries.iter().enumerate() {
            let seq = &mut self.seqs[entry.id];
            let row = seq.row.map_or(0, |row| row.get()) as i32;
            let (start, end) = (entry.start, entry.start + entry.len);
            arena[layout.rows.start + n] = row;
            arena[layout.kv_lens.start + n] = end as i32;
            let tokens = layout.tokens.start + token_at;
            let there = end.min(seq.tokens.len() as u32).max(start);
            seq.tokens.copy_to(start as usize, &mut arena[tokens..tokens + (there - start) as usize]);
            if there < end {
                // One token at most: the step before this one samples it.
                let place = token_at + entry.len as usize - 1;
                arena[layout.tokens.start + place] = -1;
                let carry = layout.carry_overs.start + PAIR_WIDTH * carry_at;
                arena[carry] = place as i32;
                arena[carry + 1] = seq.sampled_at[slot.other().index()] as i32;
                carry_at += 1;
            }
            let last_page = seq.held - page_size;
            if start >= last_page && entry.len == 1 {
                // Of a decode nothing needs to be divided.
                arena[layout.positions.start + token_at] = start as i32;
                let blocks = &seq.blocks[seq.blocks.len() - num_groups..];
                for (group, block) in blocks.iter().enumerate() {
                    arena[layout.write_slots.start + group * shape.tokens + token_at] =
                        (block.get() * page_size + start - last_page) as i32;
                }
            } else {
                for (offset, position) in (start..end).enumerate() {
                    arena[layout.positions.start + token_at + offset] = position as i32;
                    let first_block = (position / page_size) as usize * num_groups;
                    for group in 0..num_groups {
                        let block = seq.blocks[first_block + group].get();
                        arena[layout.write_slots.start + group * shape.tokens + token_at + offset] =
                            (block * page_size + position % page_size) as i32;
                    }
                }
            }
            token_at += entry.len as usize;
            arena[layout.cu_seqlens.start + n + 1] = token_at as i32;
            if entry.sampled {
                arena[layout.logits_rows.start + sampled_at] = token_at as i32 - 1;
                let draw = layout.draws.start + DRAW_WIDTH * sampled_at;
                arena[draw] = seq.draw_key as u32 as i32;
                arena[draw + 1] = (seq.draw_key >> 32) as u32 as i32;
                arena[draw + 2] = end as i32;
                seq.sampled_at[slot.index()] = sampled_at as u32;
                sampled_at += 1;
            }
            let unsent = seq.news_sent as usize;
            for &place in &seq.news[unsent - entry.news as usize..unsent] {
                let (group, page) = (place as usize % num_groups, place as usize / num_groups);
                let change = layout.table_changes.start + TABLE_CHANGE_WIDTH * table_at;
                let block = seq.blocks[place as usize].get();
                arena[change..change + TABLE_CHANGE_WIDTH].copy_from_slice(&[
                    group as i32,
                    row,
                    page as i32,
                    block as i32,
                ]);
                table_at += 1;
            }
            if entry.arrival != Arrival::No {
                let change = layout.row_changes.start + ROW_CHANGE_WIDTH * row_at;
                let (draws, temperature, top_k, top_p) = match seq.rest.sampling {
                    Sampling::Greedy => (0, 1.0, 0, 1.0),
                    Sampling::Draw { temperature, top_k, top_p } => (1, temperature, top_k, top_p),
                };
                let top_k = i32::try_from(top_k).unwrap_or(i32::MAX);
                arena[change..change + ROW_CHANGE_WIDTH].copy_from_slice(&[
                    row,
                    draws,
                    f32::to_bits(temperature) as i32,
                    top_k,
                    f32::to_bits(top_p) as i32,
                ]);
                row_at += 1;
            }
        }
        let copies = flight.copies.iter().map(|&(from, to)| [from.get(), to.get()]);
        let swap_outs = flight.swap_outs.iter().map(|&(from, to)| [from.get(), to.0]);
        let swap_ins = flight.swap_ins.iter().map(|&(from, to)| [from.0, to.get()]);
        write_pairs(&mut arena[layout.copies.clone()], copies);
        write_pairs(&mut arena[layout.swap_outs.clone()], swap_outs);
        write_pairs(&mut arena[layout.swap_ins.clone()], swap_ins);
        let second_regime = flight.entries.first().is_some_and(|entry| self.seqs[entry.id].second_regime);
        Step { slot, second_regime, shape, layout }
    }
}

fn write_pairs(section: &mut [i32], pairs: impl Iterator<Item = [u32; PAIR_WIDTH]>) {
    for (place, pair) in section.chunks_exact_mut(PAIR_WIDTH).zip(pairs) {
        place.copy_from_slice(&pair.map(|number| number as i32));
    }
}
