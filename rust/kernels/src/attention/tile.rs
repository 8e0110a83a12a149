//! Many query rows over a stretch of keys: matrix products of tiles, the keys' tile unpacked once for all rows.

use std::ops::Range;

use super::call::{Attend, Scratch};
use super::plan::{KEYS, Piece};
use super::product::{self, Product};
use super::softmax::{Running, scale_row, weigh};
use crate::element::Element;
use crate::simd::Simd;

/// Rows whose scores are there at once, in the nearest cache: some blocks of a product.
const ROWS: usize = 24;

impl<E: Element> Attend<'_, E> {
    /// The heads of one group of a piece.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`; the call was checked.
    #[inline(always)]
    pub(super) unsafe fn tile_piece<S: Simd>(&self, piece: &Piece, kv_head: usize, scratch: &mut Scratch) {
        let tokens = &self.plan.tokens[piece.tokens.clone()];
        let group = self.call.heads.heads / self.call.heads.kv_heads;
        let rows = tokens.len() * group;
        let (size, size_v) = (self.call.k_pages.size, self.call.v_pages.size);
        let (width, width_v) = (size.next_multiple_of(S::LANES), size_v.next_multiple_of(S::LANES));
        let head = kv_head * group;
        // SAFETY: rows of scratch were made for these sizes; K and V are read at keys that some token sees, whose
        // blocks were checked.
        unsafe {
            let queries = scratch.queries(rows * width);
            for (row, to) in (0..rows).map(|row| (row, queries.add(row * width))) {
                self.load_row::<S>(self.query(tokens[row / group], head + row % group), size, to);
            }
            let scores = scratch.scores(ROWS * KEYS);
            let sums = scratch.sums(rows * width_v);
            let running = scratch.running(rows);
            let keys = scratch.keys(size * KEYS);
            let values = scratch.values(KEYS * width_v);
            let staging = scratch.staging(width);

            let seen = |index: usize| &self.plan.seen[tokens[index]];
            for (Range { start, end }, seeing) in self.stretches(piece) {
                let seeing = seeing.start * group..seeing.end * group;
                self.unpack::<S>(piece.row, start..end, kv_head, keys, staging, values);
                for rows in
                    (seeing.start..seeing.end).step_by(ROWS).map(|row| row..seeing.end.min(row + ROWS))
                {
                    // Along the diagonal the first rows see few of the keys.
                    let count = seen((rows.end - 1) / group).end.clamp(start, end) - start;
                    product::write::<S, false>(Product {
                        left: queries.add(rows.start * width),
                        left_stride: width,
                        right: keys,
                        right_stride: KEYS,
                        out: scores,
                        out_stride: KEYS,
                        rows: rows.len(),
                        depth: size,
                        columns: count.next_multiple_of(S::LANES),
                    });
                    for row in rows.clone() {
                        let seen = seen(row / group);
                        let visible =
                            seen.start.clamp(start, end) - start..seen.end.clamp(start, end) - start;
                        let scores = scores.add((row - rows.start) * KEYS);
                        let factor =
                            weigh::<S>(scores, count, visible, self.call.form, &mut *running.add(row));
                        if factor != 1.0 {
                            scale_row::<S>(sums.add(row * width_v), width_v, factor);
                        }
                    }
                    product::write::<S, true>(Product {
                        left: scores,
                        left_stride: KEYS,
                        right: values,
                        right_stride: width_v,
                        out: sums.add(rows.start * width_v),
                        out_stride: width_v,
                        rows: rows.len(),
                        depth: count,
                        columns: width_v,
                    });
                }
            }
            self.leave_all::<S>(piece, head, sums, width_v, running);
        }
    }

    /// The keys of a piece, some at a time, with the tokens of the piece that see any of them; without those that none
    /// sees.
    pub(super) fn stretches(&self, piece: &Piece) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let tokens = &self.plan.tokens[piece.tokens.clone()];
        let seen = |index: usize| &self.plan.seen[tokens[index]];
        let (mut first, mut last) = (0, 0);
        let keys = piece.keys.clone();
        keys.clone().step_by(KEYS).filter_map(move |start| {
            let end = keys.end.min(start + KEYS);
            // Both ends of what they see rise from token to token.
            while first < tokens.len() && seen(first).end <= start {
                first += 1;
            }
            while last < tokens.len() && seen(last).start < end {
                last += 1;
            }
            (first < last).then_some((start..end, first..last))
        })
    }

    /// Hands on the results of all tokens of a piece for the heads of a group, token by token, the first head given.
    ///
    /// # Safety
    /// As for `tile_piece`; `sums` must be rows of `width` numbers, and `running` as many.
    #[inline(always)]
    pub(super) unsafe fn leave_all<S: Simd>(
        &self,
        piece: &Piece,
        head: usize,
        sums: *const f32,
        width: usize,
        running: *const Running,
    ) {
        let group = self.call.heads.heads / self.call.heads.kv_heads;
        for (index, &token) in self.plan.tokens[piece.tokens.clone()].iter().enumerate() {
            for in_group in 0..group {
                let row = index * group + in_group;
                // SAFETY: as promised by the caller.
                unsafe {
                    let (sum, running) = (sums.add(row * width), *running.add(row));
                    self.leave::<S>(piece, index, token, head + in_group, sum, running);
                }
            }
        }
    }

    /// Reads some keys of a row: K to [size, `KEYS`], V to [keys, size of V in whole vectors], both fp32.
    ///
    /// # Safety
    /// As for `tile_piece`; the targets must have that room, and `staging` that of a row of K in whole vectors.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(
        &self,
        row: usize,
        keys: Range<usize>,
        kv_head: usize,
        to_keys: *mut f32,
        staging: *mut f32,
        to_values: *mut f32,
    ) {
        let (k_pages, v_pages) = (&self.call.k_pages, &self.call.v_pages);
        let width_v = v_pages.size.next_multiple_of(S::LANES);
        // SAFETY: as promised by the caller.
        unsafe {
            for part in self.parts(row, keys) {
                let (k, v) = (self.k(&part, kv_head), self.v(&part, kv_head));
                for index in 0..part.count {
                    let key = part.offset + index;
                    self.load_row::<S>(k.add(index * k_pages.token_stride), k_pages.size, staging);
                    for at in 0..k_pages.size {
                        *to_keys.add(at * KEYS + key) = *staging.add(at);
                    }
                    let to = to_values.add(key * width_v);
                    self.load_row::<S>(v.add(index * v_pages.token_stride), v_pages.size, to);
                }
            }
        }
    }
}
