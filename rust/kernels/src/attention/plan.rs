//! What a step's attention is cut into: once for all calls of a group.
//!
//! A *piece* is some of the step's tokens over a stretch of keys that they read from the same pages. Rows whose tables
//! begin with the same blocks have pieces together for each stretch of blocks that they share, so that those K and V
//! are read once, and pieces of their own for the rest. Where a token has more than one piece, each leaves a partial
//! result (weighted sum of V, largest score, sum of weights), and these are merged by their log-sum-exp.
//!
//! Pieces are cut to like cost, counted in tokens of context, so that threads end together whatever the requests' lengths.

use std::ops::Range;

use chairlift_core::Reach;

/// Keys that are computed at once: pieces start at a multiple of it after the first key of their stretch.
pub(crate) const KEYS: usize = 64;
/// Query rows (tokens x heads of a group) that a tile aims at: enough that packing its keys costs little.
const TILE_ROWS: usize = 192;
/// Query rows of a piece of several rows, at most: keys are packed again for the next ones, which costs little then.
const SHARED_ROWS: usize = 4 * TILE_ROWS;
/// Heads of a group up to which a single token's scores are dot products; above it a tile is worth packing.
pub(crate) const MAX_DOT_HEADS: usize = 8;
/// Reads of a token's K and V that a shared stretch must save to be worth a partial result for each of its tokens.
const WORTH_SHARING: usize = 64;
/// Tasks for each thread, so that the last ones to end are short.
const TASKS_PER_THREAD: usize = 6;
/// Least cost of a task in keys: below it, handing it out costs more than it computes.
const LEAST_KEYS: usize = 256;

/// The rows of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepRows<'a> {
    /// First token of each row, and after the last row the number of tokens: rows + 1.
    pub cu_seqlens: &'a [i32],
    /// Tokens of each row's sequence with K and V after the step.
    pub kv_lens: &'a [i32],
    /// Leading rows with one token.
    pub decodes: usize,
}

/// The block table of a group, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// Row after row, each [`Table::pages`] blocks.
    pub blocks: &'a [i32],
    /// Blocks of a row.
    pub pages: usize,
}

/// The shape of a group's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of K and V, of which `heads` is a multiple.
    pub kv_heads: usize,
}

/// Some tokens over some keys.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// Which of [`Plan::tokens`].
    pub tokens: Range<usize>,
    /// Positions.
    pub keys: Range<usize>,
    /// The row whose table is read.
    pub row: usize,
    /// The first of the tokens' partial results; `None` where these are all their keys.
    pub partials: Option<usize>,
}

/// A part of the work that one thread does.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub piece: usize,
    pub kv_heads: Range<usize>,
    cost: usize,
}

/// A token whose result is merged from partial ones.
#[derive(Clone, Debug)]
pub(crate) struct Merge {
    pub token: usize,
    /// Which of [`Plan::merged`].
    pub partials: Range<usize>,
}

/// A group's part of a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    /// Blocks of each row, [`Plan::pages`] each.
    pub blocks: Vec<i32>,
    pub pages: usize,
    /// The first key that each token of the step sees, and the first that it does not.
    pub seen: Vec<Range<usize>>,
    /// Tokens of the step, as the pieces name them.
    pub tokens: Vec<usize>,
    pub pieces: Vec<Piece>,
    /// The most costly first.
    pub tasks: Vec<Task>,
    pub merges: Vec<Merge>,
    /// Indices of partial results.
    pub merged: Vec<usize>,
    pub num_partials: usize,
    /// Partial results by token, while a plan is made: (token, partial).
    left: Vec<(usize, usize)>,
    /// Pieces of each token, while a plan is made.
    counts: Vec<u32>,
    stack: Vec<Stretch>,
    order: Vec<usize>,
}

/// Rows whose tables are alike up to some page.
#[derive(Clone, Debug)]
struct Stretch {
    /// Which of the sorted rows.
    rows: Range<usize>,
    /// The first page that is in no piece yet.
    from: usize,
    /// The first page that has not been compared yet.
    page: usize,
}

impl Plan {
    /// Cuts a step. What the arguments say was checked: see `PagedAttention::begin`.
    pub fn make(
        &mut self,
        rows: StepRows<'_>,
        table: Table<'_>,
        page_size: usize,
        reach: Reach,
        heads: Heads,
        threads: usize,
    ) {
        self.clear();
        self.blocks.extend_from_slice(table.blocks);
        self.pages = table.pages;
        for (bounds, &len) in rows.cu_seqlens.windows(2).zip(rows.kv_lens) {
            let count = bounds[1] - bounds[0];
            self.seen.extend(
                (len - count..len)
                    .map(|position| reach.first_seen(position as u32) as usize..position as usize + 1),
            );
        }
        let tokens_of = |rows: usize| (rows * heads.kv_heads / heads.heads).max(1);
        self.make_pieces(rows, page_size, tokens_of(TILE_ROWS), tokens_of(SHARED_ROWS));
        self.cut_long_pieces(heads, threads);
        self.find_merges();
        self.share_out(heads);
    }

    fn clear(&mut self) {
        self.blocks.clear();
        self.seen.clear();
        self.tokens.clear();
        self.pieces.clear();
        self.tasks.clear();
        self.merges.clear();
        self.merged.clear();
        self.left.clear();
    }

    fn add_piece(&mut self, tokens: impl IntoIterator<Item = usize>, keys: Range<usize>, row: usize) {
        let start = self.tokens.len();
        self.tokens.extend(tokens);
        self.pieces.push(Piece { tokens: start..self.tokens.len(), keys, row, partials: None });
    }

    /// Makes the pieces, of at most so many tokens: of one row, and of several.
    fn make_pieces(&mut self, step: StepRows<'_>, page_size: usize, of_one: usize, of_several: usize) {
        let mut order = std::mem::take(&mut self.order);
        let mut stack = std::mem::take(&mut self.stack);
        let tokens = |row: usize| step.cu_seqlens[row] as usize..step.cu_seqlens[row + 1] as usize;
        order.clear();
        order.extend((0..step.kv_lens.len()).filter(|&row| !tokens(row).is_empty()));
        // What its first token sees: the others see all of that which stands behind its start.
        let seen = |plan: &Self, row: usize| plan.seen[tokens(row).start].clone();
        let first_page = |plan: &Self, row: usize| seen(plan, row).start / page_size;
        order.sort_by_key(|&row| first_page(self, row));
        let mut start = 0;
        for rows in order.chunk_by(|&a, &b| first_page(self, a) == first_page(self, b)) {
            let page = first_page(self, rows[0]);
            stack.push(Stretch { rows: start..start + rows.len(), from: page, page });
            start += rows.len();
        }
        while let Some(mut stretch) = stack.pop() {
            let rows = &mut order[stretch.rows.clone()];
            if let [row] = *rows {
                self.add_row(row, tokens(row), stretch.from * page_size, of_one);
                continue;
            }
            // As far as all go together.
            let full_pages = rows.iter().map(|&row| seen(self, row).end / page_size).min().unwrap_or(0);
            let block = |row: usize, page: usize| self.blocks[row * self.pages + page];
            while stretch.page < full_pages
                && rows.iter().all(|&row| block(row, stretch.page) == block(rows[0], stretch.page))
            {
                stretch.page += 1;
            }
            if (stretch.page - stretch.from) * page_size * (rows.len() - 1) >= WORTH_SHARING {
                let first = rows.iter().map(|&row| seen(self, row).start).min().unwrap_or(0);
                let keys = first.max(stretch.from * page_size)..stretch.page * page_size;
                self.add_shared(rows[0], rows.iter().flat_map(|&row| tokens(row)), keys, of_several);
                stretch.from = stretch.page;
            }
            // From there on, those that go on with the same block stay together.
            let ends = |row: usize| self.seen[tokens(row).end - 1].end <= stretch.page * page_size;
            let next = |row: usize| {
                if seen(self, row).end < (stretch.page + 1) * page_size {
                    None
                } else {
                    Some(self.blocks[row * self.pages + stretch.page])
                }
            };
            rows.sort_unstable_by_key(|&row| (ends(row), next(row), row));
            let mut start = stretch.rows.start;
            for alike in rows.chunk_by(|&a, &b| !ends(a) && next(a).is_some() && next(a) == next(b)) {
                // One whose keys are all in shared pieces has no piece of its own.
                if !ends(alike[0]) || stretch.from < stretch.page {
                    stack.push(Stretch { rows: start..start + alike.len(), ..stretch });
                }
                start += alike.len();
            }
        }
        self.order = order;
        self.stack = stack;
    }

    /// Adds the pieces of a row over its keys from some position on.
    fn add_row(&mut self, row: usize, mut tokens: Range<usize>, from: usize, at_once: usize) {
        while !tokens.is_empty() {
            let part = tokens.start..tokens.end.min(tokens.start + at_once);
            tokens.start = part.end;
            let keys = self.seen[part.start].start.max(from)..self.seen[part.end - 1].end;
            self.add_piece(part, keys, row);
        }
    }

    /// Adds the pieces of several rows over keys that stand in the table of one of them.
    fn add_shared(
        &mut self,
        row: usize,
        tokens: impl Iterator<Item = usize>,
        keys: Range<usize>,
        at_once: usize,
    ) {
        let start = self.tokens.len();
        self.tokens.extend(tokens);
        // By what they see, as tokens of one sequence stand too.
        let seen = &self.seen;
        self.tokens[start..].sort_unstable_by_key(|&token| seen[token].end);
        let end = self.tokens.len();
        for first in (start..end).step_by(at_once) {
            let tokens = first..end.min(first + at_once);
            self.pieces.push(Piece { tokens, keys: keys.clone(), row, partials: None });
        }
    }

    /// Cost of a piece for one of its tasks, in keys.
    fn cost(&self, piece: &Piece, heads: Heads) -> usize {
        if self.is_dot(piece, heads) {
            return piece.keys.len() * heads.kv_heads;
        }
        let rows = piece.tokens.len() * heads.heads / heads.kv_heads;
        piece.keys.len() * (1 + rows / 8)
    }

    /// Whether a piece is one token, computed by dot products for all heads in one task.
    pub fn is_dot(&self, piece: &Piece, heads: Heads) -> bool {
        piece.tokens.len() == 1 && heads.heads / heads.kv_heads <= MAX_DOT_HEADS
    }

    fn cut_long_pieces(&mut self, heads: Heads, threads: usize) {
        if threads <= 1 {
            return;
        }
        let tasks_of =
            |plan: &Self, piece: &Piece| if plan.is_dot(piece, heads) { 1 } else { heads.kv_heads };
        let total: usize =
            self.pieces.iter().map(|piece| self.cost(piece, heads) * tasks_of(self, piece)).sum();
        let most = (total / (threads * TASKS_PER_THREAD)).max(LEAST_KEYS * heads.kv_heads);
        for index in 0..self.pieces.len() {
            let piece = self.pieces[index].clone();
            let parts = self.cost(&piece, heads).div_ceil(most);
            let keys = piece.keys.len().div_ceil(parts).next_multiple_of(KEYS);
            let mut start = piece.keys.start;
            self.pieces[index].keys.end = piece.keys.end.min(start + keys);
            start += keys;
            while start < piece.keys.end {
                let keys = start..piece.keys.end.min(start + keys);
                start = keys.end;
                self.pieces.push(Piece { keys, ..piece.clone() });
            }
        }
    }

    /// Gives partial results to the pieces of tokens that have several.
    fn find_merges(&mut self) {
        let mut counts = std::mem::take(&mut self.counts);
        counts.clear();
        counts.resize(self.seen.len(), 0);
        for piece in &self.pieces {
            for &token in &self.tokens[piece.tokens.clone()] {
                counts[token] += 1;
            }
        }
        let mut partials = 0;
        for piece in &mut self.pieces {
            let tokens = &self.tokens[piece.tokens.clone()];
            if tokens.iter().any(|&token| counts[token] > 1) {
                piece.partials = Some(partials);
                self.left.extend(tokens.iter().zip(partials..).map(|(&token, partial)| (token, partial)));
                partials += tokens.len();
            }
        }
        self.counts = counts;
        self.num_partials = partials;
        self.left.sort_unstable();
        self.merged.extend(self.left.iter().map(|&(_, partial)| partial));
        let mut start = 0;
        for of_token in self.left.chunk_by(|a, b| a.0 == b.0) {
            let partials = start..start + of_token.len();
            start = partials.end;
            self.merges.push(Merge { token: of_token[0].0, partials });
        }
    }

    fn share_out(&mut self, heads: Heads) {
        let mut tasks = std::mem::take(&mut self.tasks);
        for (index, piece) in self.pieces.iter().enumerate() {
            let cost = self.cost(piece, heads);
            if self.is_dot(piece, heads) {
                tasks.push(Task { piece: index, kv_heads: 0..heads.kv_heads, cost });
            } else {
                tasks.extend((0..heads.kv_heads).map(|head| Task {
                    piece: index,
                    kv_heads: head..head + 1,
                    cost,
                }));
            }
        }
        tasks.sort_by_key(|task| std::cmp::Reverse(task.cost));
        self.tasks = tasks;
    }
}
