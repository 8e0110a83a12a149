//! One token over a stretch of keys: its scores are dot products, K and V are read where they lie, once for all heads of
//! a group.

use super::call::{Attend, Pages, Scratch};
use super::plan::{KEYS, Piece};
use super::softmax::{Running, Scores, finish};
use crate::element::{Dtype, Element};
use crate::simd::Simd;

impl<E: Element> Attend<'_, E> {
    /// A piece of one token. While its last keys are computed, the first ones of `next` are asked for.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`; the call was checked.
    #[inline(always)]
    pub(super) unsafe fn dot_piece<S: Simd>(
        &self,
        piece: &Piece,
        next: Option<&Piece>,
        scratch: &mut Scratch,
    ) {
        let token = self.plan.tokens[piece.tokens.start];
        let group = self.call.heads.heads / self.call.heads.kv_heads;
        let (size, size_v) = (self.call.k_pages.size, self.call.v_pages.size);
        let (width, width_v) = (size.next_multiple_of(S::LANES), size_v.next_multiple_of(S::LANES));
        let seen = &self.plan.seen[token];
        let keys = piece.keys.start.max(seen.start)..piece.keys.end.min(seen.end);
        let heads = self.call.heads.heads;
        // Products of bf16 pairs take the query as it is.
        let pairs = S::DOT_BF16 && E::DTYPE == Dtype::Bf16 && size.is_multiple_of(2 * S::LANES);
        // The rows that will be read after those of a tile.
        let soon = |start: usize, offset: usize| {
            self.place(piece.row, &keys, start + offset + KEYS)
                .or_else(|| next.and_then(|next| self.place(next.row, &next.keys, next.keys.start + offset)))
        };
        // SAFETY: rows of scratch were made for these sizes; K and V are read at visible keys, whose blocks were
        // checked.
        unsafe {
            let queries = scratch.queries(heads * width);
            if !pairs {
                for head in 0..heads {
                    self.load_row::<S>(self.query(token, head), size, queries.add(head * width));
                }
            }
            let scores = scratch.scores(group * KEYS);
            let sums = scratch.sums(heads * width_v);
            let running = scratch.running(heads);
            let mut start = keys.start;
            while start < keys.end {
                let end = keys.end.min(start + KEYS);
                for kv_head in 0..self.call.heads.kv_heads {
                    let head = kv_head * group;
                    for part in self.parts(piece.row, start..end) {
                        let ahead = soon(start, part.offset).map(|place| self.k(&place, 0));
                        let k = self.k(&part, kv_head);
                        let strip = Strip::new(k, &self.call.k_pages, kv_head, part.count, ahead);
                        let mut done = 0;
                        while done < group {
                            let scores = scores.add(done * KEYS + part.offset);
                            let query = queries.add((head + done) * width);
                            let raw = |index: usize| self.query(token, head + done + index).cast::<u16>();
                            // Rows are asked for once, not for each of the heads.
                            let asks = done == 0;
                            let left = group - done;
                            done += match (pairs, S::WIDE_FILE) {
                                (true, true) if left >= 4 => {
                                    score_pairs::<S, E, 4>(std::array::from_fn(raw), strip, asks, scores)
                                }
                                (true, true) if left == 3 => {
                                    score_pairs::<S, E, 3>(std::array::from_fn(raw), strip, asks, scores)
                                }
                                (true, _) if left >= 2 => {
                                    score_pairs::<S, E, 2>(std::array::from_fn(raw), strip, asks, scores)
                                }
                                (true, _) => score_pairs::<S, E, 1>([raw(0)], strip, asks, scores),
                                (_, true) if left >= 4 => score::<S, E, 4>(query, width, strip, asks, scores),
                                (_, true) if left == 3 => score::<S, E, 3>(query, width, strip, asks, scores),
                                _ if left >= 2 => score::<S, E, 2>(query, width, strip, asks, scores),
                                _ => score::<S, E, 1>(query, width, strip, asks, scores),
                            };
                        }
                    }
                    let count = end - start;
                    Scores {
                        scores,
                        rows: group,
                        count,
                        form: self.call.form,
                        running: running.add(head),
                        sums: sums.add(head * width_v),
                        width: width_v,
                    }
                    .weigh::<S>(|_| 0..count);
                    for part in self.parts(piece.row, start..end) {
                        let ahead = soon(start, part.offset).map(|place| self.v(&place, 0));
                        let v = self.v(&part, kv_head);
                        let strip = Strip::new(v, &self.call.v_pages, kv_head, part.count, ahead);
                        let mut done = 0;
                        while done < group {
                            let weights = scores.add(done * KEYS + part.offset);
                            let sums = sums.add((head + done) * width_v);
                            let asks = done == 0;
                            let left = group - done;
                            done += match S::WIDE_FILE {
                                true if left >= 4 => {
                                    add_values::<S, E, 4>(weights, strip, asks, sums, width_v)
                                }
                                true if left == 3 => {
                                    add_values::<S, E, 3>(weights, strip, asks, sums, width_v)
                                }
                                _ if left >= 2 => add_values::<S, E, 2>(weights, strip, asks, sums, width_v),
                                _ => add_values::<S, E, 1>(weights, strip, asks, sums, width_v),
                            };
                        }
                    }
                }
                start = end;
            }
            for head in 0..heads {
                let sum = sums.add(head * width_v);
                self.leave::<S>(piece, 0, token, head, sum, *running.add(head));
            }
        }
    }

    /// Hands a head's result on: to the output, or to the partial results.
    ///
    /// # Safety
    /// As for `dot_piece`; `sum` must be valid for a row of V in whole vectors.
    #[inline(always)]
    pub(super) unsafe fn leave<S: Simd>(
        &self,
        piece: &Piece,
        index: usize,
        token: usize,
        head: usize,
        sum: *const f32,
        running: Running,
    ) {
        let size = self.call.v_pages.size;
        // SAFETY: token and head are the call's; partial results have room for all of the plan's.
        unsafe {
            match piece.partials {
                None => finish::<S, E>(sum, running, self.call.sink(head), self.out(token, head), size),
                Some(first) => {
                    let (to, kept) = self.partial(first + index, head);
                    std::ptr::copy_nonoverlapping(sum, to, size);
                    kept.write(running);
                }
            }
        }
    }
}

/// Rows of K or V of one head that lie in one page.
#[derive(Clone, Copy)]
struct Strip<E> {
    rows: *const E,
    stride: usize,
    count: usize,
    size: usize,
    /// What is asked for while the first row is read.
    ahead: *const E,
    /// Elements from there to what is asked for while the next one is read.
    ahead_stride: usize,
}

impl<E: Element> Strip<E> {
    /// Some rows of a head; `ahead` is the first row, of the first head, of as many that will be read after the next
    /// tile's worth of keys.
    #[inline(always)]
    fn new(rows: *const E, pages: &Pages, kv_head: usize, count: usize, ahead: Option<*const E>) -> Self {
        let (stride, size) = (pages.token_stride, pages.size);
        let (ahead, ahead_stride) = match ahead {
            // The heads ask for all rows together, in the order in which they lie in memory: that is faster than head
            // by head, as they are read.
            Some(first) if pages.head_stride == size && stride == pages.kv_heads * size => {
                (first.wrapping_add(kv_head * count * size), size)
            }
            Some(first) => (first.wrapping_add(kv_head * pages.head_stride), stride),
            None => (rows, stride),
        };
        Self { rows, stride, count, size, ahead, ahead_stride }
    }

    /// Four rows from `first` on; the last one stands for those that are missing.
    #[inline(always)]
    unsafe fn four(&self, first: usize) -> [*const E; 4] {
        // SAFETY: `first` and all that stand for it are below `count`.
        std::array::from_fn(|index| unsafe {
            self.rows.add((first + index).min(self.count - 1) * self.stride)
        })
    }

    /// Asks for some bytes of a row that will be read soon: rows are too far apart for the machine to see them coming,
    /// and asked for all at once they would hold up what is computed meanwhile.
    #[inline(always)]
    unsafe fn ask<S: Simd>(&self, row: usize, at: usize, size: usize) {
        let row = self.ahead.wrapping_add(row * self.ahead_stride + at).cast::<u8>();
        for line in (0..size * size_of::<E>()).step_by(64) {
            // SAFETY: any address may be asked for.
            unsafe { S::prefetch(row.wrapping_add(line)) };
        }
    }
}

/// Dot products of `HEADS` queries with the rows of a strip; returns `HEADS`.
#[inline(always)]
unsafe fn score<S: Simd, E: Element, const HEADS: usize>(
    queries: *const f32,
    query_stride: usize,
    strip: Strip<E>,
    asks: bool,
    scores: *mut f32,
) -> usize {
    let whole = strip.size - strip.size % S::LANES;
    // SAFETY: as promised by the caller.
    unsafe {
        for first in (0..strip.count).step_by(4) {
            let keys = strip.four(first);
            let mut sums = [[S::splat(0.0); 4]; HEADS];
            for at in (0..whole).step_by(S::LANES) {
                let mut of_keys = [S::splat(0.0); 4];
                for (value, key) in of_keys.iter_mut().zip(keys) {
                    *value = E::load::<S>(key.add(at));
                }
                for (head, sums) in sums.iter_mut().enumerate() {
                    let query = S::load(queries.add(head * query_stride + at));
                    for (sum, key) in sums.iter_mut().zip(of_keys) {
                        *sum = S::mul_add(query, key, *sum);
                    }
                }
            }
            if whole < strip.size {
                for (index, key) in keys.into_iter().enumerate() {
                    let key = E::load_part::<S>(key.add(whole), strip.size - whole);
                    for (head, sums) in sums.iter_mut().enumerate() {
                        let query = S::load(queries.add(head * query_stride + whole));
                        sums[index] = S::mul_add(query, key, sums[index]);
                    }
                }
            }
            write_scores::<S, E, HEADS>(sums, strip, first, asks, scores);
        }
    }
    HEADS
}

/// As `score`, by products of bf16 pairs.
#[inline(always)]
unsafe fn score_pairs<S: Simd, E: Element, const HEADS: usize>(
    queries: [*const u16; HEADS],
    strip: Strip<E>,
    asks: bool,
    scores: *mut f32,
) -> usize {
    // SAFETY: as above; elements are bf16, and rows whole vectors of them.
    unsafe {
        for first in (0..strip.count).step_by(4) {
            let keys = strip.four(first);
            let mut sums = [[S::splat(0.0); 4]; HEADS];
            for at in (0..strip.size).step_by(2 * S::LANES) {
                for (query, sums) in queries.iter().zip(&mut sums) {
                    for (sum, key) in sums.iter_mut().zip(keys) {
                        *sum = S::dot_bf16(*sum, query.add(at), key.cast::<u16>().add(at));
                    }
                }
            }
            write_scores::<S, E, HEADS>(sums, strip, first, asks, scores);
        }
    }
    HEADS
}

#[inline(always)]
unsafe fn write_scores<S: Simd, E: Element, const HEADS: usize>(
    sums: [[S::V; 4]; HEADS],
    strip: Strip<E>,
    first: usize,
    asks: bool,
    scores: *mut f32,
) {
    let count = 4.min(strip.count - first);
    // SAFETY: the scores of each head are `KEYS` apart, and those of the strip are written.
    unsafe {
        for (head, sums) in sums.into_iter().enumerate() {
            let sums = S::sums(sums);
            let to = scores.add(head * KEYS + first);
            // No copy of `count`: that would be a call, for which all registers are saved.
            match count {
                4 => to.cast::<[f32; 4]>().write(sums),
                _ => sums[..count].iter().enumerate().for_each(|(index, sum)| to.add(index).write(*sum)),
            }
        }
        if asks {
            (first..first + count).for_each(|row| strip.ask::<S>(row, 0, strip.size));
        }
    }
}

/// Adds the rows of a strip, weighted for each of `HEADS` heads; returns `HEADS`.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element, const HEADS: usize>(
    weights: *const f32,
    strip: Strip<E>,
    asks: bool,
    sums: *mut f32,
    sum_stride: usize,
) -> usize {
    let mut at = 0;
    // SAFETY: as promised by the caller; columns are taken in whole vectors, the last ones in part.
    unsafe {
        if S::WIDE_FILE {
            while at + 4 * S::LANES <= strip.size {
                add_columns::<S, E, HEADS, 4>(weights, strip, at, asks, sums, sum_stride);
                at += 4 * S::LANES;
            }
        }
        while at + 2 * S::LANES <= strip.size {
            add_columns::<S, E, HEADS, 2>(weights, strip, at, asks, sums, sum_stride);
            at += 2 * S::LANES;
        }
        while at + S::LANES <= strip.size {
            add_columns::<S, E, HEADS, 1>(weights, strip, at, asks, sums, sum_stride);
            at += S::LANES;
        }
        if at < strip.size {
            for head in 0..HEADS {
                let to = sums.add(head * sum_stride + at);
                let mut sum = S::load(to);
                for key in 0..strip.count {
                    let value = E::load_part::<S>(strip.rows.add(key * strip.stride + at), strip.size - at);
                    sum = S::mul_add(S::splat(*weights.add(head * KEYS + key)), value, sum);
                }
                S::store(to, sum);
            }
        }
    }
    HEADS
}

#[inline(always)]
unsafe fn add_columns<S: Simd, E: Element, const HEADS: usize, const VECTORS: usize>(
    weights: *const f32,
    strip: Strip<E>,
    at: usize,
    asks: bool,
    sums: *mut f32,
    sum_stride: usize,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        let to = sums.add(at);
        let mut sums = [[S::splat(0.0); VECTORS]; HEADS];
        for (head, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(to.add(head * sum_stride + vector * S::LANES));
            }
        }
        for key in 0..strip.count {
            let mut row = [S::splat(0.0); VECTORS];
            for (vector, value) in row.iter_mut().enumerate() {
                *value = E::load::<S>(strip.rows.add(key * strip.stride + at + vector * S::LANES));
            }
            for (head, sums) in sums.iter_mut().enumerate() {
                let weight = S::splat(*weights.add(head * KEYS + key));
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum = S::mul_add(weight, value, *sum);
                }
            }
            if asks {
                strip.ask::<S>(key, at, VECTORS * S::LANES);
            }
        }
        for (head, sums) in sums.iter().enumerate() {
            for (vector, sum) in sums.iter().enumerate() {
                S::store(to.add(head * sum_stride + vector * S::LANES), *sum);
            }
        }
    }
}
