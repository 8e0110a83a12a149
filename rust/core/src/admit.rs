//! Admission: who gets a row, and what of it is in the cache or on the host already.

use crate::engine::{Arrival, Engine, Flight};
use crate::ids::{BlockId, SeqId};
use crate::plan::Budget;
use crate::prefix::Hit;
use crate::queue::MAX_PASSED_OVER;
use crate::sequence::Phase;

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

/// Steps after which a sequence that did not fit is looked at anew, whatever there is.
const LOOK_AGAIN: u64 = 16;

impl Engine {
    /// Takes in who waits, as far as budgets, rows and blocks go.
    pub(crate) fn admit(&mut self, flight: &mut Flight, budget: &mut Budget, now: f64) {
        self.queue.settle();
        let mut skipped = std::mem::take(&mut self.skipped);
        skipped.clear();
        let mut head_passed_over = None;
        // A head that waited long enough lets nobody past.
        while budget.tokens > 0 && self.rows.available() > 0 && skipped.len() <= MAX_PASSED_OVER as usize {
            if self.ledger.pool.available() == 0 || !self.prefills_go_on(flight) {
                break;
            }
            let Some(id) = self.next_to_admit(&skipped) else { break };
            if !self.lets_in && self.seqs[id].rest.admitted == 0 {
                break;
            }
            if self.waits_for_another(id) {
                // That one is active and gets on, so this is no passing over.
                skipped.push(id);
                continue;
            }
            // With the other regime the next step is its.
            let takes_regime = budget.takes_regime(self.seqs[id].second_regime);
            if !takes_regime || self.found_no_room(id) {
                if skipped.is_empty() {
                    if self.seqs[id].rest.passed_over >= MAX_PASSED_OVER {
                        break;
                    }
                    head_passed_over = Some(id);
                }
                skipped.push(id);
                continue;
            }
            let Some(offer) = self.offer(id) else {
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
                self.seqs[id].rest.no_room = Some((offer.blocks, self.planned_steps));
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
            flight.arrivals += 1;
            if arrival == Arrival::Fresh {
                let seq = &self.seqs[id];
                self.queue.charge(seq.rest.tenant, seq.rest.prefill_len - offer.computed);
            }
        }
        self.skipped = skipped;
    }

    fn next_to_admit(&self, skipped: &[SeqId]) -> Option<SeqId> {
        let waits =
            |id: &&SeqId| !skipped.contains(id) && self.seqs.get(**id).is_some_and(|seq| seq.row.is_none());
        match self.retries.trial() {
            Some(trial) => trial.iter().find(waits).copied(),
            None => self.queue.next(skipped),
        }
    }

    /// Whether another still computes the match unit that it needed when it was last looked at.
    fn waits_for_another(&mut self, id: SeqId) -> bool {
        let follows = &mut self.seqs[id].rest.follows;
        *follows = follows.filter(|key| self.producers.contains_key(key));
        follows.is_some()
    }

    /// Whether there are fewer blocks than it needed when it was last looked at, not long ago: to look costs as much as its
    /// text is long, and what it needs becomes less only when others compute its beginning.
    fn found_no_room(&self, id: SeqId) -> bool {
        let available = self.ledger.pool.available();
        let no_room = self.seqs[id].rest.no_room;
        no_room.is_some_and(|(blocks, step)| blocks > available && self.planned_steps < step + LOOK_AGAIN)
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
        if let Some(&key) = next.filter(|key| self.producers.contains_key(key)) {
            self.seqs[id].rest.follows = Some(key);
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
}
