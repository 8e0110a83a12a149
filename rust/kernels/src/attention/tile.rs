//! Many query rows over a stretch of keys: matrix products of tiles, the keys' tile made ready once for all rows.

use std::ops::Range;

use super::call::{Attend, Scratch};
use super::plan::{KEYS, Piece};
use super::product::{self, Product};
use super::softmax::{Running, Scores};
use crate::element::{Dtype, Element};
use crate::factors::{Factors, Lanes, Pairs};
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
        // SAFETY: as promised by the caller.
        unsafe {
            match S::DOT_BF16 && E::DTYPE == Dtype::Bf16 {
                true => self.tile_piece_of::<S, Pairs>(piece, kv_head, scratch),
                false => self.tile_piece_of::<S, Lanes<f32>>(piece, kv_head, scratch),
            }
        }
    }

    #[inline(always)]
    unsafe fn tile_piece_of<S: Simd, T: Tile>(&self, piece: &Piece, kv_head: usize, scratch: &mut Scratch) {
        let tokens = &self.plan.tokens[piece.tokens.clone()];
        let group = self.call.heads.heads / self.call.heads.kv_heads;
        let rows = tokens.len() * group;
        let (size, size_v) = (self.call.k_pages.size, self.call.v_pages.size);
        let (width, width_v) = (size.next_multiple_of(S::LANES), size_v.next_multiple_of(S::LANES));
        let head = kv_head * group;
        // SAFETY: rows of scratch were made for these sizes; K and V are read at keys that some token sees, whose
        // blocks were checked.
        unsafe {
            let queries = scratch.queries(rows * width).cast::<T::Given>();
            for row in 0..rows {
                T::query::<S>(self, tokens[row / group], head + row % group, queries.add(row * width));
            }
            let scores = scratch.scores(ROWS * KEYS);
            let sums = scratch.sums(rows * width_v);
            let running = scratch.running(rows);
            let keys = scratch.keys(size.next_multiple_of(2) * KEYS).cast::<T::Stored>();
            let values = scratch.values(KEYS * width_v).cast::<T::Stored>();
            let staging = scratch.staging(width);

            let seen = |index: usize| &self.plan.seen[tokens[index]];
            for (Range { start, end }, seeing) in self.stretches(piece) {
                let seeing = seeing.start * group..seeing.end * group;
                T::make_ready::<S>(self, piece.row, start..end, kv_head, keys, staging, values);
                for rows in
                    (seeing.start..seeing.end).step_by(ROWS).map(|row| row..seeing.end.min(row + ROWS))
                {
                    // Along the diagonal the first rows see few of the keys.
                    let count = seen((rows.end - 1) / group).end.clamp(start, end) - start;
                    product::write::<S, T, false>(Product {
                        left: queries.add(rows.start * width),
                        left_stride: width,
                        right: keys,
                        right_stride: KEYS,
                        out: scores,
                        out_stride: KEYS,
                        rows: rows.len(),
                        depth: size.next_multiple_of(T::DEPTH),
                        columns: count.next_multiple_of(S::LANES),
                    });
                    let made = Scores {
                        scores,
                        rows: rows.len(),
                        count,
                        form: self.call.form,
                        running: running.add(rows.start),
                        sums: sums.add(rows.start * width_v),
                        width: width_v,
                    };
                    let (weights, weights_stride) = T::weights::<S>(made, |row| {
                        let seen = seen((rows.start + row) / group);
                        seen.start.clamp(start, end) - start..seen.end.clamp(start, end) - start
                    });
                    product::write::<S, T, true>(Product {
                        left: weights,
                        left_stride: weights_stride,
                        right: values,
                        right_stride: width_v,
                        out: sums.add(rows.start * width_v),
                        out_stride: width_v,
                        rows: rows.len(),
                        depth: count.next_multiple_of(T::DEPTH),
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
}

/// How the numbers of a tile are held for its products.
///
/// # Safety
/// All methods: as for `tile_piece`; what is written to must have the room of whole vectors.
trait Tile: Factors {
    /// Writes a query.
    unsafe fn query<S: Simd>(
        attend: &Attend<'_, impl Element>,
        token: usize,
        head: usize,
        to: *mut Self::Given,
    );

    /// Reads some keys of a row: K to [size, `KEYS`], V to [keys, size of V in whole vectors].
    unsafe fn make_ready<S: Simd>(
        attend: &Attend<'_, impl Element>,
        row: usize,
        keys: Range<usize>,
        kv_head: usize,
        to_keys: *mut Self::Stored,
        staging: *mut f32,
        to_values: *mut Self::Stored,
    );

    /// Turns products into weights that V is multiplied with, and says how far apart their rows are. See
    /// [`Scores::weigh`].
    unsafe fn weights<S: Simd>(
        scores: Scores,
        visible: impl Fn(usize) -> Range<usize>,
    ) -> (*const Self::Given, usize);
}

/// In fp32.
impl Tile for Lanes<f32> {
    #[inline(always)]
    unsafe fn query<S: Simd>(attend: &Attend<'_, impl Element>, token: usize, head: usize, to: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe { attend.load_row::<S>(attend.query(token, head), attend.call.k_pages.size, to) };
    }

    #[inline(always)]
    unsafe fn make_ready<S: Simd>(
        attend: &Attend<'_, impl Element>,
        row: usize,
        keys: Range<usize>,
        kv_head: usize,
        to_keys: *mut f32,
        staging: *mut f32,
        to_values: *mut f32,
    ) {
        let (k_pages, v_pages) = (&attend.call.k_pages, &attend.call.v_pages);
        let width_v = v_pages.size.next_multiple_of(S::LANES);
        // SAFETY: as promised by the caller.
        unsafe {
            for part in attend.parts(row, keys) {
                let (k, v) = (attend.k(&part, kv_head), attend.v(&part, kv_head));
                for index in 0..part.count {
                    let key = part.offset + index;
                    attend.load_row::<S>(k.add(index * k_pages.token_stride), k_pages.size, staging);
                    for at in 0..k_pages.size {
                        *to_keys.add(at * KEYS + key) = *staging.add(at);
                    }
                    let to = to_values.add(key * width_v);
                    attend.load_row::<S>(v.add(index * v_pages.token_stride), v_pages.size, to);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn weights<S: Simd>(
        scores: Scores,
        visible: impl Fn(usize) -> Range<usize>,
    ) -> (*const f32, usize) {
        // SAFETY: as promised by the caller.
        unsafe { scores.weigh::<S>(visible) };
        (scores.scores, KEYS)
    }
}

/// In pairs of bf16, along the elements of K and along the keys of V. Weights are rounded.
impl Tile for Pairs {
    #[inline(always)]
    unsafe fn query<S: Simd>(attend: &Attend<'_, impl Element>, token: usize, head: usize, to: *mut u16) {
        let size = attend.call.k_pages.size;
        // SAFETY: as promised by the caller: the query is of bf16.
        unsafe {
            std::ptr::copy_nonoverlapping(attend.query(token, head).cast(), to, size);
            if !size.is_multiple_of(2) {
                to.add(size).write(0);
            }
        }
    }

    #[inline(always)]
    unsafe fn make_ready<S: Simd>(
        attend: &Attend<'_, impl Element>,
        row: usize,
        keys: Range<usize>,
        kv_head: usize,
        to_keys: *mut u16,
        _: *mut f32,
        to_values: *mut u16,
    ) {
        let (k_pages, v_pages) = (&attend.call.k_pages, &attend.call.v_pages);
        let width_v = v_pages.size.next_multiple_of(S::LANES);
        let count = keys.len();
        let mut of_values = [std::ptr::null::<u16>(); KEYS];
        let to_keys = to_keys.cast::<u32>();
        // SAFETY: as promised by the caller: K and V are of bf16.
        unsafe {
            for part in attend.parts(row, keys) {
                let (k, v) = (attend.k(&part, kv_head), attend.v(&part, kv_head));
                for index in 0..part.count {
                    let key = part.offset + index;
                    let from = k.add(index * k_pages.token_stride).cast::<u16>();
                    for pair in 0..k_pages.size / 2 {
                        let value = from.add(2 * pair).cast::<u32>().read_unaligned();
                        to_keys.add(pair * KEYS + key).write(value);
                    }
                    if !k_pages.size.is_multiple_of(2) {
                        let last = k_pages.size - 1;
                        to_keys.add(last / 2 * KEYS + key).write(u32::from(*from.add(last)));
                    }
                    of_values[key] = v.add(index * v_pages.token_stride).cast();
                }
            }
            for pair in 0..count.div_ceil(2) {
                let to = to_values.cast::<u32>().add(pair * width_v);
                let even = of_values[2 * pair];
                if 2 * pair + 1 < count {
                    let odd = of_values[2 * pair + 1];
                    for at in 0..v_pages.size {
                        to.add(at).write(u32::from(*even.add(at)) | u32::from(*odd.add(at)) << 16);
                    }
                } else {
                    // The key that is not there has weight zero, and must not be what was there before.
                    for at in 0..v_pages.size {
                        to.add(at).write(u32::from(*even.add(at)));
                    }
                }
                // What is beyond a row of V is computed, and dropped.
                to.add(v_pages.size).write_bytes(0, width_v - v_pages.size);
            }
        }
    }

    #[inline(always)]
    unsafe fn weights<S: Simd>(
        scores: Scores,
        visible: impl Fn(usize) -> Range<usize>,
    ) -> (*const u16, usize) {
        let (to, stride) = (scores.scores.cast::<u16>(), 2 * KEYS);
        // SAFETY: as promised by the caller.
        unsafe { scores.weigh_bf16::<S>(visible, to, stride) };
        (to, stride)
    }
}
