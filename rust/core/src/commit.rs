//! What becomes of a planned step: committed with its results, or abandoned without a trace.

use std::sync::atomic::Ordering::Relaxed;

use crate::counters::Counters;
use crate::engine::{Arrival, Engine, Flight, Results};
use crate::error::{Error, Result};
use crate::ids::{SeqId, Slot};
use crate::outbox::{Event, News};
use crate::pool::Tickets;
use crate::prefix::Found;
use crate::sequence::{Finish, Phase};

impl Engine {
    pub(crate) fn commit(&mut self, results: Results<'_>, now: f64) -> Result<()> {
        let slot = results.slot;
        if self.oldest_in_flight() != Some(slot) {
            let problem = match self.in_flight[slot.index()] {
                None => "has no step to commit",
                Some(_) => "holds a step that was planned on top of another: commit that one first",
            };
            return Err(Error::SlotMisused { slot, problem });
        }
        let Some(mut flight) = self.in_flight[slot.index()].take() else { return Ok(()) };
        let sampled = flight.sampled;
        let short = [
            ("token buffer", results.tokens.len(), true),
            ("logprob buffer", results.logprobs.len(), flight.wants_logprobs),
        ]
        .into_iter()
        .find(|&(_, have, wanted)| wanted && have < sampled);
        if let Some((buffer, have, _)) = short {
            self.in_flight[slot.index()] = Some(flight);
            return Err(Error::BufferTooSmall { slot, buffer, have, need: sampled });
        }

        for &id in &flight.victims {
            if let Some(swapped) = self.seqs.get_mut(id).and_then(|seq| seq.rest.swapped.as_mut()) {
                swapped.in_flight.remove(slot);
            }
        }
        let tenants_share = self.config.fairness.is_on();
        let (mut at, mut prompt_tokens, mut generated, mut any_ended) = (0, 0, 0, false);
        for entry in &flight.entries {
            let sampled_at = at;
            at += usize::from(entry.sampled);
            // It may have ended while this step was in flight: what was computed for it is lost.
            let Some(seq) = self.seqs.get_mut(entry.id) else { continue };
            seq.in_flight.remove(slot);
            seq.computed += entry.len;
            if entry.news > 0 {
                seq.news.drain(..entry.news as usize);
                seq.news_sent -= entry.news;
            }
            if entry.phase_before == Phase::Prefilling {
                prompt_tokens += u64::from(entry.len);
            }
            let (unit_is_complete, forgets) = (seq.computed >= seq.unit_end, seq.forgets);
            if entry.arrival != Arrival::No {
                self.has_arrived(entry.id, entry.start);
            }
            if unit_is_complete {
                self.publish(entry.id);
            }
            if forgets {
                self.forget_pages(entry.id);
            }
            if !entry.sampled {
                continue;
            }
            generated += 1;
            let seq = &mut self.seqs[entry.id];
            if tenants_share {
                self.queue.charge_generated(seq.rest.tenant);
            }
            seq.pending -= 1;
            let (token, logprob) = (results.tokens[sampled_at], results.logprobs.get(sampled_at).copied());
            if token < 0 || token as u32 >= self.config.vocab_size {
                let cause = format!("the model's sampled token {token} is outside the vocabulary");
                self.end(entry.id, Finish::Failed(cause), now);
                any_ended = true;
                continue;
            }
            seq.tokens.push(token);
            let logprob = logprob.filter(|_| seq.record_logprobs);
            if seq.record_logprobs {
                seq.rest.logprobs.extend(logprob);
            }
            if seq.record_timestamps {
                seq.rest.timestamps.push(now);
            }
            if let Some(finish) = seq.end() {
                self.end(entry.id, finish, now);
                any_ended = true;
            } else if seq.streaming {
                let news = News::Token { token, logprob, time: now, epoch: flight.epoch };
                self.events.push(Event { request: seq.request, news });
            }
        }
        if any_ended {
            self.drop_ended();
        }
        Counters::add(&self.counters.copied_blocks, flight.copies.len() as u64);
        self.step_is_in(slot, &mut flight);
        self.retries.step_went_well(self.config.max_batch_tokens);
        self.counters.batch_rows.store(flight.entries.len() as u64, Relaxed);
        self.counters.batch_decodes.store(flight.decodes as u64, Relaxed);
        self.counters.batch_tokens.store(flight.tokens as u64, Relaxed);
        Counters::add(&self.counters.steps, 1);
        Counters::add(&self.counters.prompt_tokens, prompt_tokens);
        Counters::add(&self.counters.generated_tokens, generated);
        self.spare.push(flight);
        Ok(())
    }

    /// An arrival's first step is in.
    fn has_arrived(&mut self, id: SeqId, start: u32) {
        let rest = &self.seqs[id].rest;
        if rest.swapped.is_some() {
            // It is back, and so is everything that it left.
            self.drop_swapped(id);
            Counters::add(&self.counters.swap_ins, 1);
        } else if rest.shares {
            // It started where its hit ended.
            Counters::add(&self.counters.cached_tokens, u64::from(start));
            Counters::add(&self.counters.looked_up_tokens, u64::from(rest.prefill_len));
        }
    }

    /// Whoever waited for the step of a slot has waited long enough.
    fn step_is_in(&mut self, slot: Slot, flight: &mut Flight) {
        for (from, _) in flight.copies.drain(..) {
            self.ledger.release(from, Tickets::NONE);
        }
        self.ledger.step_is_in(slot);
        self.rows.step_is_in(slot);
        self.swap.step_is_in(slot);
    }

    /// Undoes a step in flight, the newest. With a cause, its rows end failed with it.
    pub(crate) fn undo(&mut self, slot: Slot, cause: Option<&str>, now: f64) {
        let Some(mut flight) = self.in_flight[slot.index()].take() else { return };
        // Backwards, so that blocks and rows are free again in the order in which they were.
        for at in (0..flight.entries.len()).rev() {
            let entry = flight.entries[at];
            let Some(seq) = self.seqs.get_mut(entry.id) else { continue };
            seq.in_flight.remove(slot);
            if let Some(cause) = cause {
                self.end(entry.id, Finish::Failed(cause.to_owned()), now);
                continue;
            }
            seq.planned -= entry.len;
            seq.pending -= u32::from(entry.sampled);
            let sampled = seq.known() - seq.rest.prompt_len;
            seq.rest.epochs.sampled_so_far(sampled);
            seq.phase = entry.phase_before;
            seq.news_sent -= entry.news;
            self.ledger.release_tail(&mut seq.blocks, entry.blocks_before as usize, seq.in_flight);
            seq.last_blocks_of = 0;
            seq.held = entry.blocks_before / self.config.num_groups() * self.config.page_size;
            let there = seq.blocks.len() as u32;
            seq.news.retain(|&place| place < there);
            if entry.arrival == Arrival::No {
                continue;
            }
            if entry.arrival == Arrival::Fresh {
                self.queue.refund(seq.rest.tenant, seq.rest.prefill_len - entry.start);
                seq.rest.started = None;
                seq.rest.admitted = 0;
                seq.rest.cached_tokens = 0;
                self.admissions -= 1;
                self.inbox.back_in_queue();
            }
            self.leave(entry.id);
        }
        // Whether their K and V reached the host before the step broke, nobody knows.
        for &id in &flight.victims {
            if self.seqs.get(id).is_some_and(|seq| seq.rest.swapped.is_some()) {
                self.drop_swapped(id);
                Counters::add(&self.counters.soft_resets, 1);
            }
        }
        if flight.is_trial {
            self.retries.add(flight.entries.iter().map(|entry| entry.id).collect());
        }
        self.step_is_in(slot, &mut flight);
        Counters::add(&self.counters.abandoned_steps, 1);
        self.spare.push(flight);
    }

    /// Takes its place from an active sequence: it waits again, as itself, with nothing computed.
    pub(crate) fn leave(&mut self, id: SeqId) {
        self.stop_sharing(id);
        let seq = &mut self.seqs[id];
        self.ledger.release_tail(&mut seq.blocks, 0, seq.in_flight);
        (seq.held, seq.last_blocks_of) = (0, 0);
        seq.news.clear();
        seq.rest.forgotten.fill(0);
        (seq.computed, seq.planned) = (0, 0);
        seq.phase = Phase::Pending;
        if let Some(row) = seq.row.take() {
            self.rows.give_back(row, seq.in_flight);
        }
        self.active.retain(|&other| other != id);
        self.queue.push(id, &self.seqs[id]);
    }

    /// Frees what a sequence left on the host.
    pub(crate) fn drop_swapped(&mut self, id: SeqId) {
        if let Some(swapped) = self.seqs[id].rest.swapped.take() {
            self.swap.release(swapped);
            self.num_swapped -= 1;
        }
    }

    /// Enters the match units that a sequence has computed into the index. A page that another block holds already is
    /// given up for that one.
    fn publish(&mut self, id: SeqId) {
        let (match_unit, page_size) = (self.config.match_unit as usize, self.config.page_size as usize);
        let num_groups = self.config.groups.len();
        let ledger = &mut self.ledger;
        let seq = &mut self.seqs[id];
        while seq.computed >= seq.unit_end {
            let unit = seq.rest.published as usize;
            let end = (unit + 1) * match_unit;
            let tokens = &seq.tokens.whole()[unit * match_unit..end];
            if seq.rest.keys.len() == unit {
                let before = if unit == 0 { seq.rest.root } else { seq.rest.keys[unit - 1] };
                seq.rest.keys.push(self.hasher.next(before, tokens));
            }
            let key = seq.rest.keys[unit];
            let node = match ledger.index.find(seq.rest.tip, seq.rest.root, key, tokens) {
                Found::Node(node) => node,
                Found::Nothing => ledger.index.insert(seq.rest.tip, seq.rest.root, key, tokens),
                // Another text has the key. What follows could not be found either.
                Found::Collision => return self.stop_sharing(id),
            };
            ledger.index.hold(node);
            if let Some(before) = seq.rest.tip.replace(node) {
                ledger.index.let_go(before);
            }
            seq.rest.published += 1;
            seq.unit_end += match_unit as u32;
            for group in 0..num_groups {
                let place = unit * match_unit / page_size * num_groups + group;
                let own = seq.blocks[place];
                if own == ledger.pool.read_trash() {
                    continue;
                }
                let named = ledger.register(node, group, own);
                if named != own && end.is_multiple_of(page_size) {
                    ledger.share(named);
                    ledger.release(own, seq.in_flight);
                    seq.blocks[place] = named;
                    seq.news.push(place as u32);
                    Counters::add(&self.counters.merged_blocks, 1);
                }
            }
        }
        self.claim_next_unit(id);
    }

    /// Says which match unit of its known tokens a sequence computes next.
    pub(crate) fn claim_next_unit(&mut self, id: SeqId) {
        self.produces_no_more(id);
        let seq = &mut self.seqs[id];
        if (seq.rest.published + 1) * self.config.match_unit <= seq.rest.prefill_len {
            let key = seq.rest.keys[seq.rest.published as usize];
            *self.producers.entry(key).or_default() += 1;
            seq.rest.producing = Some(key);
        }
    }

    fn produces_no_more(&mut self, id: SeqId) {
        let Some(key) = self.seqs[id].rest.producing.take() else { return };
        if let Some(count) = self.producers.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.producers.remove(&key);
            }
        }
    }

    /// Takes a sequence out of the prefix cache. What it entered stays.
    pub(crate) fn stop_sharing(&mut self, id: SeqId) {
        self.produces_no_more(id);
        let seq = &mut self.seqs[id];
        seq.rest.shares = false;
        seq.rest.published = 0;
        seq.unit_end = u32::MAX;
        if let Some(tip) = seq.rest.tip.take() {
            self.ledger.index.let_go(tip);
        }
    }

    /// Gives back the pages that no later token of the sequence sees. Their places in the table stay, as trash.
    fn forget_pages(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        let num_groups = self.config.groups.len();
        for (group, forgotten) in seq.rest.forgotten.iter_mut().enumerate() {
            let first_seen = self.config.groups[group].first_seen(seq.computed) / self.config.page_size;
            for page in *forgotten..first_seen.min((seq.blocks.len() / num_groups) as u32) {
                let place = page as usize * num_groups + group;
                let block = std::mem::replace(&mut seq.blocks[place], self.ledger.pool.read_trash());
                self.ledger.release(block, seq.in_flight);
                seq.news.push(place as u32);
                *forgotten = page + 1;
            }
        }
    }
}
