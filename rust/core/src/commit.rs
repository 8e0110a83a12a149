//! What becomes of a planned step: committed with its results, or abandoned without a trace.

use crate::config::EngineConfig;
use crate::counters::Counters;
use crate::engine::{Arrival, Engine, Results};
use crate::error::{Error, Result};
use crate::ids::Slot;
use crate::outbox::{Event, News};
use crate::pool::BlockPool;
use crate::sequence::{Finish, Phase, Sequence};

impl Engine {
    pub(crate) fn commit(&mut self, results: Results<'_>, now: f64) -> Result<()> {
        let slot = results.slot;
        let Some(entries) = self.in_flight[slot.index()].take() else {
            return Err(Error::SlotMisused { slot, problem: "has no step to commit" });
        };
        let sampled = entries.iter().filter(|entry| entry.sampled).count();
        let wants_logprobs = entries.iter().any(|entry| entry.sampled && self.seqs[entry.id].record_logprobs);
        let short = [
            ("token buffer", results.tokens.len(), true),
            ("logprob buffer", results.logprobs.len(), wants_logprobs),
        ]
        .into_iter()
        .find(|&(_, have, wanted)| wanted && have < sampled);
        if let Some((buffer, have, _)) = short {
            self.in_flight[slot.index()] = Some(entries);
            return Err(Error::BufferTooSmall { slot, buffer, have, need: sampled });
        }

        let (mut at, mut prompt_tokens, mut any_ended) = (0, 0, false);
        for entry in &entries {
            let seq = &mut self.seqs[entry.id];
            seq.computed += entry.len;
            if !seq.forgotten.is_empty() {
                forget_pages(seq, &self.config, &mut self.pool);
            }
            if seq.phase == Phase::Prefilling {
                prompt_tokens += u64::from(entry.len);
            }
            if !entry.sampled {
                continue;
            }
            seq.phase = Phase::Decoding;
            let (token, logprob) = (results.tokens[at], results.logprobs.get(at).copied());
            at += 1;
            if token < 0 || token as u32 >= self.config.vocab_size {
                let cause = format!("the model's sampled token {token} is outside the vocabulary");
                self.end(entry.id, Finish::Failed(cause), now);
                any_ended = true;
                continue;
            }
            seq.tokens.push(token);
            let logprob = logprob.filter(|_| seq.record_logprobs);
            seq.logprobs.extend(logprob);
            if seq.record_timestamps {
                seq.timestamps.push(now);
            }
            if let Some(finish) = seq.end() {
                self.end(entry.id, finish, now);
                any_ended = true;
            } else if seq.streaming {
                let news = News::Token { token, logprob, time: now };
                self.events.push(Event { request: seq.request, news });
            }
        }
        if any_ended {
            self.drop_ended();
        }
        Counters::add(&self.counters.steps, 1);
        Counters::add(&self.counters.prompt_tokens, prompt_tokens);
        Counters::add(&self.counters.generated_tokens, sampled as u64);
        self.spare.push(entries);
        Ok(())
    }

    /// Undoes a step that did not come about. Its rows stand where they stood before it was planned; arrivals wait
    /// at the head of the queue. With a cause, its rows end failed with it.
    ///
    /// # Errors
    /// [`Error::SlotMisused`] when no step is in flight in the slot.
    pub fn abandon(&mut self, slot: Slot, cause: Option<&str>, now: f64) -> Result<()> {
        let Some(entries) = self.in_flight[slot.index()].take() else {
            return Err(Error::SlotMisused { slot, problem: "has no step to abandon" });
        };
        // Backwards, so that blocks and rows are free again in the order in which they were.
        for entry in entries.iter().rev() {
            if let Some(cause) = cause {
                self.end(entry.id, Finish::Failed(cause.to_owned()), now);
                continue;
            }
            let seq = &mut self.seqs[entry.id];
            self.pool.release_tail(&mut seq.blocks, entry.blocks_before as usize);
            if entry.arrival == Arrival::No {
                continue;
            }
            seq.phase = Phase::Pending;
            if let Some(row) = seq.row.take() {
                self.rows.give_back(row);
            }
            self.active.retain(|&other| other != entry.id);
            if entry.arrival == Arrival::Fresh {
                seq.started = None;
                seq.admitted = 0;
                self.admissions -= 1;
                self.inbox.back_in_queue();
            }
            self.queue.push(entry.id, &self.seqs[entry.id]);
        }
        if cause.is_some() {
            self.drop_ended();
        }
        Counters::add(&self.counters.abandoned_steps, 1);
        self.spare.push(entries);
        self.publish_gauges();
        self.outbox.deliver(&mut self.events);
        Ok(())
    }
}

/// Gives back the pages that no later token of the sequence sees. Their places in the table stay, as trash.
fn forget_pages(seq: &mut Sequence, config: &EngineConfig, pool: &mut BlockPool) {
    let num_groups = config.groups.len();
    seq.forgotten_before.copy_from_slice(&seq.forgotten);
    for (group, reach) in config.groups.iter().enumerate() {
        let first_seen = (reach.first_seen(seq.computed) / config.page_size) as usize;
        for page in seq.forgotten[group] as usize..first_seen.min(seq.blocks.len() / num_groups) {
            let block = std::mem::replace(&mut seq.blocks[page * num_groups + group], pool.read_trash());
            let released = pool.release(block);
            debug_assert!(released.is_ok(), "{released:?}");
            seq.forgotten[group] = page as u32 + 1;
        }
    }
}
