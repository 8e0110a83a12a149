//! The arena: what a step tells the device, in one int32 tensor. Owns the layout; never knows what is in it.
//!
//! It carries what is new in the step and nothing else. Block tables and sampling parameters live on the device by
//! row, and the arena brings the changes to them. Sections, in order, for a step of R rows, T tokens, G groups,
//! S sampled rows, C block table changes and P row changes:
//!
//! | section | elements | content |
//! | --- | --- | --- |
//! | `rows` | R | row number; decodes (one token) first |
//! | `cu_seqlens` | R + 1 | start of each row's tokens in the step, and their end |
//! | `kv_lens` | R | tokens of the row with K and V after the step |
//! | `tokens` | T | token ids |
//! | `positions` | T | position of each token in its sequence |
//! | `write_slots` | G x T | where K and V of each token go: block * `page_size` + offset |
//! | `logits_rows` | S | tokens of the step whose logits are needed |
//! | `draws` | 3 x S | low and high half of the draw key, and the position of the token to be drawn |
//! | `table_changes` | 4 x C | group, row, page, block |
//! | `row_changes` | 5 x P | row, 1 for a draw or 0 for greedy, temperature, top-k, top-p (floats as bits) |

use std::ops::Range;

use crate::config::EngineConfig;
use crate::group::Reach;

/// Elements of one entry of `draws`.
pub const DRAW_WIDTH: usize = 3;
/// Elements of one entry of `table_changes`.
pub const TABLE_CHANGE_WIDTH: usize = 4;
/// Elements of one entry of `row_changes`.
pub const ROW_CHANGE_WIDTH: usize = 5;

/// The sizes that a layout follows from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Rows in the step.
    pub rows: usize,
    /// Leading rows that bring one token.
    pub decodes: usize,
    /// Tokens in the step.
    pub tokens: usize,
    /// Rows that a token is sampled for.
    pub sampled: usize,
    /// New block table entries.
    pub table_changes: usize,
    /// Rows whose sampling parameters are new.
    pub row_changes: usize,
}

/// Where each section of a step's arena lies, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the table above
pub struct ArenaLayout {
    pub rows: Range<usize>,
    pub cu_seqlens: Range<usize>,
    pub kv_lens: Range<usize>,
    pub tokens: Range<usize>,
    pub positions: Range<usize>,
    pub write_slots: Range<usize>,
    pub logits_rows: Range<usize>,
    pub draws: Range<usize>,
    pub table_changes: Range<usize>,
    pub row_changes: Range<usize>,
}

impl ArenaLayout {
    /// The layout of a step of that shape over `num_groups` groups.
    pub fn new(shape: &StepShape, num_groups: usize) -> Self {
        let mut end = 0;
        let mut section = |len: usize| {
            let start = end;
            end += len;
            start..end
        };
        Self {
            rows: section(shape.rows),
            cu_seqlens: section(shape.rows + 1),
            kv_lens: section(shape.rows),
            tokens: section(shape.tokens),
            positions: section(shape.tokens),
            write_slots: section(num_groups * shape.tokens),
            logits_rows: section(shape.sampled),
            draws: section(DRAW_WIDTH * shape.sampled),
            table_changes: section(TABLE_CHANGE_WIDTH * shape.table_changes),
            row_changes: section(ROW_CHANGE_WIDTH * shape.row_changes),
        }
    }

    /// Elements of the whole.
    pub fn len(&self) -> usize {
        self.row_changes.end
    }

    /// Never: there is always the end of `cu_seqlens`.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements that no step exceeds.
    pub fn capacity(config: &EngineConfig) -> usize {
        let (rows, tokens) = (config.max_requests_per_batch as usize, config.max_batch_tokens as usize);
        let (page_size, num_groups) = (config.page_size as usize, config.groups.len());
        // A row starts at most one page more than its tokens fill.
        let started = num_groups * (tokens / page_size + rows);
        // What a row forgot in its last step it had started there, or its tokens saw it. Rows that were left out since
        // bring their news together, so each may have had a whole step for itself.
        let forgotten = |reach: &Reach| {
            reach.most_seen().map_or(0, |seen| rows * (tokens / page_size + seen as usize / page_size + 3))
        };
        let forgotten: usize = config.groups.iter().map(forgotten).sum();
        let shape = StepShape {
            rows,
            decodes: rows,
            tokens,
            sampled: rows,
            table_changes: started + forgotten,
            row_changes: rows,
        };
        Self::new(&shape, num_groups).len()
    }
}
