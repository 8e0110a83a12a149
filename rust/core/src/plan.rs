//! Planning a step: which rows, with how many tokens, in which blocks. A sequence that does not fit leaves no trace.

use std::cmp::Reverse;

use crate::arena::{ArenaLayout, DRAW_WIDTH, ROW_CHANGE_WIDTH, StepShape, TABLE_CHANGE_WIDTH};
use crate::config::Policy;
use crate::counters::Counters;
use crate::engine::{Arrival, Engine, Entry, Step};
use crate::error::{Error, Result};
use crate::ids::{SeqId, Slot};
use crate::queue::MAX_PASSED_OVER;
use crate::sequence::{Phase, Sampling, Sequence};

/// What is left for the step that is being planned.
struct Budget {
    tokens: u32,
    cache_reads: u64,
    /// Whether it was too small for some decode.
    left_out: bool,
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
        let mut entries = self.spare.pop().unwrap_or_default();
        entries.clear();
        let mut first_pass = true;
        loop {
            self.choose_rows(&mut entries, now);
            if std::mem::take(&mut first_pass) {
                Counters::add(&self.counters.starved, self.starved.len() as u64);
            }
            // Victims make room: for the next step when this one has rows, for this one when it has none.
            let relieved = !self.starved.is_empty() && self.choose_victims();
            if !entries.is_empty() || !relieved {
                break;
            }
        }
        // Rows that bring one token stand first: kernels may have a faster path for them.
        entries.sort_by_key(|entry| entry.len != 1);
        if entries.is_empty() {
            debug_assert!(self.seqs.is_empty(), "nothing could be planned although sequences are there");
            self.spare.push(entries);
            return Ok(None);
        }
        let step = self.write(slot, &entries, arena);
        self.in_flight[slot.index()] = Some(entries);
        Ok(Some(step))
    }

    fn choose_rows(&mut self, entries: &mut Vec<Entry>, now: f64) {
        self.starved.clear();
        let mut budget = Budget {
            tokens: self.config.max_batch_tokens,
            cache_reads: self.config.max_cache_reads.unwrap_or(u64::MAX),
            left_out: false,
        };
        let prefills_first = self.config.policy == Policy::PrefillFirst
            && self.steps_without_all_decodes + 1 < MAX_STEPS_WITHOUT_DECODES;
        if prefills_first {
            self.choose_split_prefills(entries, &mut budget);
            self.choose_decodes(entries, &mut budget);
        } else {
            self.choose_decodes(entries, &mut budget);
            self.choose_split_prefills(entries, &mut budget);
        }
        self.admit(entries, &mut budget, now);
        if !entries.is_empty() {
            self.steps_without_all_decodes =
                if budget.left_out { self.steps_without_all_decodes + 1 } else { 0 };
        }
    }

    fn choose_decodes(&mut self, entries: &mut Vec<Entry>, budget: &mut Budget) {
        let count = self.active.len();
        let start = if self.decode_cursor < count { self.decode_cursor } else { 0 };
        self.decode_cursor = 0;
        for at in (start..count).chain(0..start) {
            let id = self.active[at];
            let seq = &self.seqs[id];
            if seq.phase != Phase::Decoding {
                continue;
            }
            let reads = self.reads(id, 1);
            if budget.tokens == 0 || reads > budget.cache_reads {
                // The ones that this step leaves out are first in the next.
                budget.left_out = true;
                if self.decode_cursor == 0 {
                    self.decode_cursor = at;
                }
                continue;
            }
            if !self.extend(id, 1, entries) {
                self.starved.push(id);
                continue;
            }
            budget.tokens -= 1;
            budget.cache_reads -= reads;
        }
    }

    fn choose_split_prefills(&mut self, entries: &mut Vec<Entry>, budget: &mut Budget) {
        let mut split = std::mem::take(&mut self.split);
        split.clear();
        split.extend(self.active.iter().copied().filter(|&id| self.seqs[id].phase != Phase::Decoding));
        for &id in &split {
            if budget.tokens == 0 || !self.prefills_go_on(entries) {
                break;
            }
            let chunk = self.chunk(id, budget);
            if chunk == 0 {
                continue;
            }
            // With blocks for a part of it, a part goes on.
            let chunk = chunk.min(self.room(id));
            if chunk > 0 && self.extend(id, chunk, entries) {
                budget.tokens -= chunk;
                budget.cache_reads -= self.reads(id, chunk);
            } else {
                self.starved.push(id);
            }
        }
        self.split = split;
    }

    fn admit(&mut self, entries: &mut Vec<Entry>, budget: &mut Budget, now: f64) {
        let mut at = 0;
        let mut head_passed_over = None;
        // A head that waited long enough lets nobody past.
        while budget.tokens > 0 && self.rows.available() > 0 && at <= MAX_PASSED_OVER as usize {
            if self.pool.available() == 0 || !self.prefills_go_on(entries) {
                break;
            }
            let Some(id) = self.queue.candidate(at) else { break };
            let seq = &self.seqs[id];
            let lacking = self.config.blocks_to_hold(seq.tokens.len() as u32);
            let chunk = self.chunk(id, budget).min(self.room(id));
            if chunk == 0 || lacking > self.pool.available() {
                if at == 0 {
                    if seq.passed_over >= MAX_PASSED_OVER {
                        break;
                    }
                    head_passed_over = Some(id);
                }
                at += 1;
                continue;
            };
            self.queue.remove(&self.seqs[id]);
            if let Some(head) = head_passed_over.take() {
                self.seqs[head].passed_over += 1;
            }
            let arrival = self.give_row(id, now);
            let planned = self.extend(id, chunk, entries);
            debug_assert!(planned, "its blocks were counted");
            if let Some(entry) = entries.last_mut() {
                entry.arrival = arrival;
            }
            budget.tokens -= chunk;
            budget.cache_reads -= self.reads(id, chunk);
        }
    }

    fn give_row(&mut self, id: SeqId, now: f64) -> Arrival {
        let row = self.rows.take();
        let seq = &mut self.seqs[id];
        seq.row = row;
        seq.phase = Phase::Prefilling;
        if seq.admitted == 0 {
            self.admissions += 1;
            seq.admitted = self.admissions;
            seq.started = Some(now);
            self.inbox.left_queue();
            self.active.push(id);
            return Arrival::Fresh;
        }
        // It comes back to its place among the active ones.
        let admitted = seq.admitted;
        let seqs = &self.seqs;
        let at = self.active.partition_point(|&other| seqs[other].admitted < admitted);
        self.active.insert(at, id);
        Arrival::Victim
    }

    /// Tested before each prefill: with fewer blocks available than the reserve it waits, but a step that would be
    /// empty takes one.
    fn prefills_go_on(&self, entries: &[Entry]) -> bool {
        self.pool.available() >= self.config.reserve() || entries.is_empty()
    }

    /// How many of its known tokens a prefill brings, for all that the budgets say.
    fn chunk(&self, id: SeqId, budget: &Budget) -> u32 {
        let seq = &self.seqs[id];
        let seen_before = self.reads(id, 1) - 1;
        let readable = budget.cache_reads.saturating_sub(seen_before).min(u64::from(u32::MAX)) as u32;
        seq.remaining().min(budget.tokens).min(readable)
    }

    /// Tokens of K and V that the group that looks farthest back reads for the next `len` tokens.
    fn reads(&self, id: SeqId, len: u32) -> u64 {
        let computed = self.seqs[id].computed;
        let first_seen = self.config.groups.iter().map(|reach| reach.first_seen(computed)).min().unwrap_or(0);
        u64::from(computed - first_seen) + u64::from(len)
    }

    /// Tokens that the available blocks extend a sequence by.
    fn room(&self, id: SeqId) -> u32 {
        self.seqs[id].room(self.pool.available(), self.config.page_size, self.config.num_groups())
    }

    /// Plans `len` more tokens of a sequence with a row, if their blocks can be had.
    fn extend(&mut self, id: SeqId, len: u32, entries: &mut Vec<Entry>) -> bool {
        let seq = &mut self.seqs[id];
        let end = seq.computed + len;
        let lacking = seq.blocks_lacking(end, self.config.page_size, self.config.num_groups());
        if lacking > self.pool.available() {
            return false;
        }
        entries.push(Entry {
            id,
            len,
            sampled: end as usize == seq.tokens.len(),
            blocks_before: seq.blocks.len() as u32,
            arrival: Arrival::No,
        });
        for _ in 0..lacking {
            seq.blocks.extend(self.pool.allocate());
        }
        true
    }

    /// Makes room by resetting starved sequences, of the lowest priority the newest first, as few as the demand of the others needs, and never
    /// the last active one. Tells whether there was a victim.
    fn choose_victims(&mut self) -> bool {
        let starved = std::mem::take(&mut self.starved);
        let (page_size, num_groups) = (self.config.page_size, self.config.num_groups());
        let demand_of = |engine: &Self, id: SeqId| {
            let seq = &engine.seqs[id];
            let chunk = seq.remaining().min(engine.config.max_batch_tokens);
            seq.blocks_lacking(seq.computed + chunk, page_size, num_groups)
        };
        let mut demand: u32 = starved.iter().map(|&id| demand_of(self, id)).sum();
        let mut newest_first = starved.clone();
        newest_first.sort_unstable_by_key(|&id| (self.seqs[id].priority, Reverse(self.seqs[id].admitted)));
        let mut victims = 0;
        for id in newest_first {
            if demand <= self.pool.available() || self.active.len() <= 1 {
                break;
            }
            demand -= demand_of(self, id);
            self.soft_reset(id);
            victims += 1;
        }
        self.starved = starved;
        victims > 0
    }

    /// The generated tokens join the prompt, the blocks and the row go, and the sequence queues again as itself.
    fn soft_reset(&mut self, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(id) else { return };
        self.pool.release_tail(&mut seq.blocks, 0);
        seq.forgotten.fill(0);
        seq.forgotten_before.fill(0);
        seq.computed = 0;
        seq.phase = Phase::Pending;
        if let Some(row) = seq.row.take() {
            self.rows.give_back(row);
        }
        self.active.retain(|&other| other != id);
        self.queue.push(id, &self.seqs[id]);
        Counters::add(&self.counters.soft_resets, 1);
    }

    /// Writes the step into the arena.
    fn write(&self, slot: Slot, entries: &[Entry], arena: &mut [i32]) -> Step {
        let num_groups = self.config.num_groups() as usize;
        let page_size = self.config.page_size;
        let mut shape = StepShape { rows: entries.len(), ..StepShape::default() };
        for entry in entries {
            shape.tokens += entry.len as usize;
            shape.sampled += usize::from(entry.sampled);
            let seq = &self.seqs[entry.id];
            shape.table_changes += seq.blocks.len() - entry.blocks_before as usize;
            shape.table_changes += forgotten_pages(seq).count();
            shape.row_changes += usize::from(entry.arrival != Arrival::No);
        }
        shape.decodes = entries.iter().take_while(|entry| entry.len == 1).count();
        let layout = ArenaLayout::new(&shape, num_groups);

        let (mut token_at, mut sampled_at, mut table_at, mut row_at) = (0, 0, 0, 0);
        arena[layout.cu_seqlens.start] = 0;
        for (n, entry) in entries.iter().enumerate() {
            let seq = &self.seqs[entry.id];
            let row = seq.row.map_or(0, |row| row.get()) as i32;
            let (start, end) = (seq.computed, seq.computed + entry.len);
            arena[layout.rows.start + n] = row;
            arena[layout.kv_lens.start + n] = end as i32;
            let tokens = layout.tokens.start + token_at;
            arena[tokens..tokens + entry.len as usize]
                .copy_from_slice(&seq.tokens[start as usize..end as usize]);
            for (offset, position) in (start..end).enumerate() {
                arena[layout.positions.start + token_at + offset] = position as i32;
                let first_block = (position / page_size) as usize * num_groups;
                for group in 0..num_groups {
                    let block = seq.blocks[first_block + group].get();
                    arena[layout.write_slots.start + group * shape.tokens + token_at + offset] =
                        (block * page_size + position % page_size) as i32;
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
                sampled_at += 1;
            }
            let news = entry.blocks_before as usize..seq.blocks.len();
            let news = news.map(|at| (at % num_groups, at / num_groups));
            for (group, page) in forgotten_pages(seq).chain(news) {
                let change = layout.table_changes.start + TABLE_CHANGE_WIDTH * table_at;
                let block = seq.blocks[page * num_groups + group].get();
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
                let (draws, temperature, top_k, top_p) = match seq.sampling {
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
        Step { slot, shape, layout }
    }
}

/// Group and page of what the last commit gave back.
fn forgotten_pages(seq: &Sequence) -> impl Iterator<Item = (usize, usize)> + '_ {
    let pages = seq.forgotten_before.iter().zip(&seq.forgotten);
    pages
        .enumerate()
        .flat_map(|(group, (&before, &now))| (before..now).map(move |page| (group, page as usize)))
}
