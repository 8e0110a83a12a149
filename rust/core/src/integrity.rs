//! The proof of the books.

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::ids::{SeqId, Slot};
use crate::sequence::Phase;

impl Engine {
    /// Proves that every block is in exactly one state and owned as often as tables name it, that rows, lists and
    /// queue agree with the sequences, and that tables are as long as their tokens need.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first contradiction. Costs O(pool + tokens' pages): for tests and idle moments.
    pub fn check_integrity(&self) -> Result<()> {
        let mut references = vec![0; self.ledger.pool.capacity() as usize];
        for (from, _) in self.in_flight.iter().flatten().flat_map(|flight| &flight.copies) {
            references[from.get() as usize] += 1;
        }
        let mut rows = vec![false; self.rows.capacity() as usize];
        let (mut with_row, mut waiting) = (0, 0);
        for (id, seq) in &self.seqs {
            for block in seq.blocks.iter().filter(|&&block| block != self.ledger.pool.read_trash()) {
                match references.get_mut(block.get() as usize) {
                    Some(count) => *count += 1,
                    None => {
                        return corrupt(format!(
                            "request {} holds block {}, not of the pool",
                            seq.request,
                            block.get()
                        ));
                    }
                }
            }
            if self.by_request.get(&seq.request) != Some(&id) {
                return corrupt(format!("request {} does not lead to its sequence", seq.request));
            }
            match seq.row {
                Some(row) => {
                    with_row += 1;
                    if std::mem::replace(&mut rows[row.get() as usize], true) {
                        return corrupt(format!("row {} has two sequences", row.get()));
                    }
                }
                None => {
                    waiting += 1;
                    if seq.phase != Phase::Pending || !seq.blocks.is_empty() || seq.computed != 0 {
                        return corrupt(format!(
                            "request {} has no row but {:?} and blocks",
                            seq.request, seq.phase
                        ));
                    }
                }
            }
            self.check_lengths(id)?;
        }
        if with_row != self.active.len()
            || self.rows.available() as usize + self.rows.retiring() as usize + with_row != rows.len()
        {
            return corrupt(format!(
                "{with_row} sequences have rows, {} are active, {} rows of {} are free",
                self.active.len(),
                self.rows.available(),
                rows.len()
            ));
        }
        if !self.active.is_sorted_by(|&a, &b| self.seqs[a].rest.admitted < self.seqs[b].rest.admitted) {
            return corrupt("active sequences are not in order of admission".into());
        }
        let queued =
            self.queue.ids().filter(|&id| self.seqs.get(id).is_some_and(|seq| seq.row.is_none())).count();
        if !self.queue.is_sound(self.seqs.values().map(|seq| seq.rest.tenant)) {
            return corrupt("the queue's tenants are not those of the sequences".into());
        }
        if waiting != self.queue.len() || queued != waiting || self.by_request.len() != self.seqs.len() {
            return corrupt(format!(
                "{waiting} sequences wait, the queue counts {} and holds {queued}",
                self.queue.len()
            ));
        }
        self.ledger.check(&references, self.seqs.values().filter_map(|seq| seq.rest.tip))?;
        self.swap.check(self.seqs.values().filter_map(|seq| seq.rest.swapped.as_ref()))?;
        self.check_flights()
    }

    /// What sequences say of the steps in flight is what those say.
    fn check_flights(&self) -> Result<()> {
        for (id, seq) in &self.seqs {
            let (mut len, mut sampled, mut news) = (0, 0, 0);
            for slot in Slot::ALL {
                let flight = self.in_flight[slot.index()].as_ref();
                let mut entries =
                    flight.iter().flat_map(|flight| &flight.entries).filter(|entry| entry.id == id);
                let entry = entries.next();
                if entries.next().is_some() || entry.is_some() != seq.in_flight.has(slot) {
                    return corrupt(format!("request {} is not in slot {slot:?} as it says", seq.request));
                }
                len += entry.map_or(0, |entry| entry.len);
                sampled += entry.map_or(0, |entry| u32::from(entry.sampled));
                news += entry.map_or(0, |entry| entry.news);
            }
            if (seq.computed + len, sampled, news) != (seq.planned, seq.pending, seq.news_sent) {
                return corrupt(format!(
                    "request {}: {} + {len} of {} planned tokens, {sampled} of {} sampled, {news} of {} changes in flight",
                    seq.request, seq.computed, seq.planned, seq.pending, seq.news_sent
                ));
            }
            let unit_end =
                if seq.rest.shares { (seq.rest.published + 1) * self.config.match_unit } else { u32::MAX };
            let held = seq.blocks.len() as u32 / self.config.num_groups() * self.config.page_size;
            if (seq.unit_end, seq.held) != (unit_end, held) {
                return corrupt(format!(
                    "request {}: holds {held} tokens, counted as {}, and its unit ends at {unit_end}, not {}",
                    seq.request, seq.held, seq.unit_end
                ));
            }
            let units = seq.rest.published * self.config.match_unit;
            if units > seq.computed || (seq.rest.published > 0) != seq.rest.tip.is_some() {
                return corrupt(format!(
                    "request {}: {units} of {} tokens published",
                    seq.request, seq.computed
                ));
            }
            if seq.rest.producing.is_some_and(|key| !self.producers.contains_key(&key)) {
                return corrupt(format!("request {} does not stand among the producers", seq.request));
            }
        }
        let producing = self.seqs.values().filter(|seq| seq.rest.producing.is_some()).count();
        let listed: u32 = self.producers.values().sum();
        if producing as u32 != listed {
            return corrupt(format!("{producing} sequences produce, {listed} are listed"));
        }
        Ok(())
    }

    fn check_lengths(&self, id: SeqId) -> Result<()> {
        let seq = &self.seqs[id];
        let held = seq.planned;
        let expected = held.div_ceil(self.config.page_size) * self.config.num_groups();
        if seq.row.is_some() && seq.blocks.len() as u32 != expected {
            return corrupt(format!(
                "request {} holds {} blocks, its {held} tokens need {expected}",
                seq.request,
                seq.blocks.len()
            ));
        }
        for (group, reach) in self.config.groups.iter().enumerate() {
            let forgotten = seq.rest.forgotten.get(group).copied().unwrap_or(0);
            let unseen =
                if seq.computed == 0 { 0 } else { reach.first_seen(seq.computed) / self.config.page_size };
            let of_group = seq.blocks.iter().skip(group).step_by(self.config.groups.len());
            let trash = of_group.map(|&block| block == self.ledger.pool.read_trash());
            if forgotten != unseen
                || !trash.enumerate().all(|(page, trash)| trash == ((page as u32) < forgotten))
            {
                return corrupt(format!(
                    "request {}: group {group} gave back {forgotten} pages, {unseen} are unseen",
                    seq.request
                ));
            }
        }
        let known = seq.tokens.len() as u32;
        if seq.computed >= known || known >= seq.max_len || held > seq.known() {
            return corrupt(format!(
                "request {}: {} of {known} tokens computed, {held} planned, bound {}",
                seq.request, seq.computed, seq.max_len
            ));
        }
        if seq.phase == Phase::Decoding && seq.remaining() != 1 {
            return corrupt(format!(
                "request {} decodes with {} tokens to compute",
                seq.request,
                seq.remaining()
            ));
        }
        Ok(())
    }
}

fn corrupt(what: String) -> Result<()> {
    Err(Error::Corrupt(what))
}
