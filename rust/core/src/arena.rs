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
//! | `carry_overs` | 2 x O | a token of the step that is not known yet (-1 in `tokens`), and the sampled row of the step before it whose token it is |
//! | `copies` | 2 x B | block to copy from, block to copy to |
//! | `swap_outs` | 2 x V | block to copy to the host, block of the host |
//! | `swap_ins` | 2 x W | block of the host, block to copy to |
//!
//! Swap-outs come before anything else that the step does, then swap-ins, then copies: what is copied from may be
//! written later in the same step.

use std::ops::Range;

use crate::config::EngineConfig;

/// Elements of one entry of `draws`.
pub const DRAW_WIDTH: usize = 3;
/// Elements of one entry of `table_changes`.
pub const TABLE_CHANGE_WIDTH: usize = 4;
/// Elements of one entry of `row_changes`.
pub const ROW_CHANGE_WIDTH: usize = 5;
/// Elements of one entry of `carry_overs`, `copies`, `swap_outs` and `swap_ins`.
pub const PAIR_WIDTH: usize = 2;

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
    /// Tokens that the step before it brings.
    pub carry_overs: usize,
    /// Blocks that are copied.
    pub copies: usize,
    /// Blocks that go to the host.
    pub swap_outs: usize,
    /// Blocks that come back.
    pub swap_ins: usize,
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
    pub carry_overs: Range<usize>,
    pub copies: Range<usize>,
    pub swap_outs: Range<usize>,
    pub swap_ins: Range<usize>,
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
            carry_overs: section(PAIR_WIDTH * shape.carry_overs),
            copies: section(PAIR_WIDTH * shape.copies),
            swap_outs: section(PAIR_WIDTH * shape.swap_outs),
            swap_ins: section(PAIR_WIDTH * shape.swap_ins),
        }
    }

    /// Elements of the whole.
    pub fn len(&self) -> usize {
        self.swap_ins.end
    }

    /// Never: there is always the end of `cu_seqlens`.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements that no step exceeds.
    pub fn capacity(config: &EngineConfig) -> usize {
        let (rows, tokens) = (config.max_requests_per_batch as usize, config.max_batch_tokens as usize);
        let shape = StepShape {
            rows,
            decodes: rows,
            tokens,
            sampled: rows,
            table_changes: Self::table_changes(config),
            row_changes: rows,
            carry_overs: rows,
            copies: rows * config.groups.len(),
            swap_outs: config.swap_blocks as usize,
            swap_ins: config.swap_blocks as usize,
        };
        Self::new(&shape, config.groups.len()).len()
    }

    /// Table changes that a step has room for: enough for every row to decode, and for any one row whatever it does.
    pub(crate) fn table_changes(config: &EngineConfig) -> usize {
        let (rows, tokens) = (config.max_requests_per_batch as usize, config.max_batch_tokens as usize);
        let page_size = config.page_size as usize;
        let seen = config.groups.iter().filter_map(|reach| reach.most_seen()).max().unwrap_or(0) as usize;
        // A decode starts a page, while another was merged and a third was given back.
        let decodes = 3 * rows;
        // The pages of a chunk are started, merged and given back, and with them what the window left behind; twice, as
        // two steps are in flight.
        let of_a_chunk = 2 * (3 * (tokens / page_size + 2) + seen / page_size + 3);
        let whole_table = config.longest().min(LONGEST_TABLE_TOKENS) as usize / page_size + 2;
        // Twice, as half of it is what one row may begin with.
        config.groups.len() * (decodes + of_a_chunk + 2 * whole_table)
    }
}

/// A table that begins with a hit is brought in one step; a longer hit is not taken.
const LONGEST_TABLE_TOKENS: u32 = 1 << 20;
