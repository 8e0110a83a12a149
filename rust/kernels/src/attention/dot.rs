//! One token over a stretch of keys: its scores are dot products, K and V are read where they lie, once for all heads of
//! a group.

use super::call::{Attend, Scratch};
use super::plan::{KEYS, Piece};
use super::softmax::{Running, finish, scale_row, weigh};
use crate::element::{Dtype, Element};
use crate::simd::Simd;

impl<E: Element> Attend<'_, E> {
    /// A piece of one token.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`; the call was checked.
    #[inline(always)]
    pub(super) unsafe fn dot_piece<S: Simd>(&self, piece: &Piece, scratch: &mut Scratch) {
        let token = self.plan.tokens[piece.tokens.start];
        let group = self.call.heads.heads / self.call.heads.kv_heads;
        let (size, size_v) = (self.call.k_pages.size, self.call.v_pages.size);
        let (width, width_v) = (size.next_multiple_of(S::LANES), size_v.next_multiple_of(S::LANES));
        let seen = &self.plan.seen[token];
        let keys = piece.keys.start.max(seen.start)..piece.keys.end.min(seen.end);
        let heads = self.call.heads.heads;
        // Products of bf16 pairs take the query as it is.
        let pairs = S::DOT_BF16 && E::DTYPE == Dtype::Bf16 && size.is_multiple_of(2 * S::LANES);
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
                        let k = self.k(&part, kv_head);
                        let count = part.count;
                        let mut done = 0;
                        while done < group {
                            let scores = scores.add(done * KEYS + part.offset);
                            let left = group - done;
                            let raw = |index: usize| self.query(token, head + done + index).cast::<u16>();
                            let query = queries.add((head + done) * width);
                            let stride = self.call.k_pages.token_stride;
                            done += match (pairs, S::WIDE_FILE && left >= 3, left >= 2) {
                                (true, true, _) => score_pairs::<S, 3>(
                                    [raw(0), raw(1), raw(2)],
                                    k.cast(),
                                    stride,
                                    count,
                                    size,
                                    scores,
                                ),
                                (true, _, true) => score_pairs::<S, 2>(
                                    [raw(0), raw(1)],
                                    k.cast(),
                                    stride,
                                    count,
                                    size,
                                    scores,
                                ),
                                (true, ..) => {
                                    score_pairs::<S, 1>([raw(0)], k.cast(), stride, count, size, scores)
                                }
                                (_, true, _) => {
                                    score::<S, E, 3>(query, width, k, stride, count, size, scores)
                                }
                                (_, _, true) => {
                                    score::<S, E, 2>(query, width, k, stride, count, size, scores)
                                }
                                _ => score::<S, E, 1>(query, width, k, stride, count, size, scores),
                            };
                        }
                    }
                    let count = end - start;
                    for index in 0..group {
                        let running = &mut *running.add(head + index);
                        let factor =
                            weigh::<S>(scores.add(index * KEYS), count, 0..count, self.call.form, running);
                        if factor != 1.0 {
                            scale_row::<S>(sums.add((head + index) * width_v), width_v, factor);
                        }
                    }
                    for part in self.parts(piece.row, start..end) {
                        let v = self.v(&part, kv_head);
                        let count = part.count;
                        let mut done = 0;
                        while done < group {
                            let weights = scores.add(done * KEYS + part.offset);
                            let left = group - done;
                            let sums = sums.add((head + done) * width_v);
                            let stride = self.call.v_pages.token_stride;
                            done += match (S::WIDE_FILE && left >= 3, left >= 2) {
                                (true, _) => {
                                    add_values::<S, E, 3>(weights, v, stride, count, size_v, sums, width_v)
                                }
                                (_, true) => {
                                    add_values::<S, E, 2>(weights, v, stride, count, size_v, sums, width_v)
                                }
                                _ => add_values::<S, E, 1>(weights, v, stride, count, size_v, sums, width_v),
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

/// Dot products of `HEADS` queries with `count` keys; four keys at a time, and so up to three numbers beyond.
#[inline(always)]
unsafe fn score<S: Simd, E: Element, const HEADS: usize>(
    queries: *const f32,
    query_stride: usize,
    keys: *const E,
    key_stride: usize,
    count: usize,
    size: usize,
    scores: *mut f32,
) -> usize {
    // SAFETY: as promised by the caller; the last key stands for those that are missing to four.
    unsafe {
        for first in (0..count).step_by(4) {
            let keys: [*const E; 4] =
                std::array::from_fn(|index| keys.add((first + index).min(count - 1) * key_stride));
            let mut sums = [[S::splat(0.0); 4]; HEADS];
            let whole = size - size % S::LANES;
            for at in (0..whole).step_by(S::LANES) {
                let keys = [
                    E::load::<S>(keys[0].add(at)),
                    E::load::<S>(keys[1].add(at)),
                    E::load::<S>(keys[2].add(at)),
                    E::load::<S>(keys[3].add(at)),
                ];
                for (head, sums) in sums.iter_mut().enumerate() {
                    let query = S::load(queries.add(head * query_stride + at));
                    for (sum, key) in sums.iter_mut().zip(keys) {
                        *sum = S::mul_add(query, key, *sum);
                    }
                }
            }
            if whole < size {
                let rest = size - whole;
                for (index, key) in keys.into_iter().enumerate() {
                    let key = E::load_part::<S>(key.add(whole), rest);
                    for (head, sums) in sums.iter_mut().enumerate() {
                        let query = S::load(queries.add(head * query_stride + whole));
                        sums[index] = S::mul_add(query, key, sums[index]);
                    }
                }
            }
            write_scores::<S, HEADS>(sums, first, count, scores);
        }
    }
    HEADS
}

/// As `score`, by products of bf16 pairs.
#[inline(always)]
unsafe fn score_pairs<S: Simd, const HEADS: usize>(
    queries: [*const u16; HEADS],
    keys: *const u16,
    key_stride: usize,
    count: usize,
    size: usize,
    scores: *mut f32,
) -> usize {
    // SAFETY: as above.
    unsafe {
        for first in (0..count).step_by(4) {
            let keys: [*const u16; 4] =
                std::array::from_fn(|index| keys.add((first + index).min(count - 1) * key_stride));
            let mut sums = [[S::splat(0.0); 4]; HEADS];
            for at in (0..size).step_by(2 * S::LANES) {
                for (head, sums) in sums.iter_mut().enumerate() {
                    for (sum, key) in sums.iter_mut().zip(keys) {
                        *sum = S::dot_bf16(*sum, queries[head].add(at), key.add(at));
                    }
                }
            }
            write_scores::<S, HEADS>(sums, first, count, scores);
        }
    }
    HEADS
}

#[inline(always)]
unsafe fn write_scores<S: Simd, const HEADS: usize>(
    sums: [[S::V; 4]; HEADS],
    first: usize,
    count: usize,
    scores: *mut f32,
) {
    // SAFETY: the scores of each head are `KEYS` apart, and `count` of them are written.
    unsafe {
        for (head, sums) in sums.into_iter().enumerate() {
            let sums = S::sums(sums);
            let to = scores.add(head * KEYS + first);
            std::ptr::copy_nonoverlapping(sums.as_ptr(), to, 4.min(count - first));
        }
    }
}

/// Adds `count` rows of V, weighted for each of `HEADS` heads.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element, const HEADS: usize>(
    weights: *const f32,
    values: *const E,
    stride: usize,
    count: usize,
    size: usize,
    sums: *mut f32,
    sum_stride: usize,
) -> usize {
    // SAFETY: as promised by the caller; columns are taken in whole vectors, the last ones in part.
    unsafe {
        let mut at = 0;
        if S::WIDE_FILE {
            while at + 4 * S::LANES <= size {
                add_columns::<S, E, HEADS, 4>(
                    weights,
                    values.add(at),
                    stride,
                    count,
                    sums.add(at),
                    sum_stride,
                );
                at += 4 * S::LANES;
            }
        }
        while at + 2 * S::LANES <= size {
            add_columns::<S, E, HEADS, 2>(weights, values.add(at), stride, count, sums.add(at), sum_stride);
            at += 2 * S::LANES;
        }
        while at + S::LANES <= size {
            add_columns::<S, E, HEADS, 1>(weights, values.add(at), stride, count, sums.add(at), sum_stride);
            at += S::LANES;
        }
        if at < size {
            for head in 0..HEADS {
                let to = sums.add(head * sum_stride + at);
                let mut sum = S::load(to);
                for key in 0..count {
                    let value = E::load_part::<S>(values.add(key * stride + at), size - at);
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
    values: *const E,
    stride: usize,
    count: usize,
    to: *mut f32,
    sum_stride: usize,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        let mut sums = [[S::splat(0.0); VECTORS]; HEADS];
        for (head, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(to.add(head * sum_stride + vector * S::LANES));
            }
        }
        for key in 0..count {
            let mut row = [S::splat(0.0); VECTORS];
            for (vector, value) in row.iter_mut().enumerate() {
                *value = E::load::<S>(values.add(key * stride + vector * S::LANES));
            }
            for (head, sums) in sums.iter_mut().enumerate() {
                let weight = S::splat(*weights.add(head * KEYS + key));
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum = S::mul_add(weight, value, *sum);
                }
            }
        }
        for (head, sums) in sums.iter().enumerate() {
            for (vector, sum) in sums.iter().enumerate() {
                S::store(to.add(head * sum_stride + vector * S::LANES), *sum);
            }
        }
    }
}
