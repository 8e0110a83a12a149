//! What follows on a step that did not come about: its rows are planned again, in steps that tell more or take less.
//!
//! A step that raised may have done so over one of its rows. They are tried in halves, each in a step of its own and
//! with nobody else, until that one is alone and fails with the cause; whoever is in a half that comes about goes on.
//! Trials are lists of suspects and nothing besides: what they need is planned as ever, and who ends or waits meanwhile
//! is simply not in them.
//!
//! A step that ran out of memory is followed by steps of half its tokens, and those by longer ones when they go well.

use crate::engine::{Engine, Flight};
use crate::error::{Error, Result};
use crate::ids::{SeqId, Slot};

/// Why a step does not come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned<'a> {
    /// Nothing is wrong with it.
    Withdrawn,
    /// It raised, for that cause.
    Raised(&'a str),
    /// There was not the memory for it; the cause says so.
    OutOfMemory(&'a str),
}

/// Steps that come about before the bound on tokens is doubled, where memory had lowered it.
pub const STEPS_BEFORE_LONGER: u32 = 32;

#[derive(Debug)]
pub(crate) struct Retries {
    /// Lists of suspects, the next one last.
    trials: Vec<Vec<SeqId>>,
    /// Who alone may be in the step that is planned. Empty: everybody.
    trial: Vec<SeqId>,
    /// Most tokens of a step.
    most_tokens: u32,
    /// Steps that came about since that changed.
    went_well: u32,
}

impl Retries {
    pub fn new(max_batch_tokens: u32) -> Self {
        Self { trials: Vec::new(), trial: Vec::new(), most_tokens: max_batch_tokens, went_well: 0 }
    }

    pub fn most_tokens(&self) -> u32 {
        self.most_tokens
    }

    /// Those of the trial that is planned, when one is.
    pub fn trial(&self) -> Option<&[SeqId]> {
        (!self.trial.is_empty()).then_some(&self.trial)
    }

    /// Whether a sequence may be in the step that is planned.
    pub fn lets_run(&self, id: SeqId) -> bool {
        self.trial.is_empty() || self.trial.contains(&id)
    }

    /// One more list of suspects, to be tried before the others.
    pub fn add(&mut self, suspects: Vec<SeqId>) {
        if !suspects.is_empty() {
            self.trials.push(suspects);
        }
    }

    pub fn forget(&mut self) {
        self.trials.clear();
    }

    fn set_most_tokens(&mut self, most: u32) {
        (self.most_tokens, self.went_well) = (most, 0);
    }

    /// A step came about.
    pub fn step_went_well(&mut self, max_batch_tokens: u32) {
        if self.most_tokens == max_batch_tokens {
            return;
        }
        self.went_well += 1;
        if self.went_well == STEPS_BEFORE_LONGER {
            self.set_most_tokens(self.most_tokens.saturating_mul(2).min(max_batch_tokens));
        }
    }
}

impl Engine {
    /// Undoes a step that did not come about, and the one planned on top of it. Their rows stand where they stood
    /// before; arrivals wait at the head of the queue.
    ///
    /// Rows of a step that raised are tried in halves; the one that raises alone ends failed with the cause. After one
    /// that ran out of memory, steps have at most half its tokens for a while; what needs too much with one token
    /// ends failed.
    ///
    /// # Errors
    /// [`Error::SlotMisused`] when no step is in flight in the slot.
    pub fn abandon(&mut self, slot: Slot, why: Abandoned<'_>, now: f64) -> Result<()> {
        let Some(flight) = &mut self.in_flight[slot.index()] else {
            return Err(Error::SlotMisused { slot, problem: "has no step to abandon" });
        };
        let (tokens, mut suspects) = (flight.tokens as u32, Vec::new());
        let cause = match why {
            Abandoned::Withdrawn => None,
            Abandoned::Raised(cause) if flight.entries.len() == 1 => Some(cause),
            Abandoned::Raised(_) => {
                suspects.extend(flight.entries.iter().map(|entry| entry.id));
                // Its parts are tried, not the whole again.
                flight.is_trial = false;
                None
            }
            Abandoned::OutOfMemory(cause) => (tokens == 1).then_some(cause),
        };
        if self.oldest_in_flight() == Some(slot) {
            self.undo(slot.other(), None, now);
        }
        self.undo(slot, cause, now);
        if cause.is_some() {
            self.drop_ended();
        }
        suspects.retain(|&id| self.seqs.contains_key(id));
        let second_half = suspects.split_off(suspects.len().div_ceil(2));
        self.retries.add(second_half);
        self.retries.add(suspects);
        if let Abandoned::OutOfMemory(_) = why {
            // Of one token it was not the length that was too much.
            self.retries.set_most_tokens(if tokens == 1 { self.config.max_batch_tokens } else { tokens / 2 });
        }
        self.publish_gauges();
        self.outbox.deliver(&mut self.events);
        Ok(())
    }

    /// Plans a step of the next suspects of whom some can run. Tells whether there is one.
    pub(crate) fn plan_trial(&mut self, slot: Slot, flight: &mut Flight, now: f64) -> bool {
        while let Some(trial) = self.retries.trials.pop() {
            // Whose turn it is among all is not for trials to say.
            let turns = (self.owed_regime, self.decode_cursor, self.steps_without_all_decodes);
            self.retries.trial = trial;
            self.choose_rows_and_victims(slot, flight, now, None);
            self.retries.trial.clear();
            (self.owed_regime, self.decode_cursor, self.steps_without_all_decodes) = turns;
            if !flight.entries.is_empty() {
                return true;
            }
        }
        false
    }
}
