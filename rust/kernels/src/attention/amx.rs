//! Many query rows over a stretch of keys, of bf16, by products in tile registers.

use std::ops::Range;

use half::bf16;

use super::call::{Attend, Scratch};
use super::plan::{KEYS, Piece};
use super::softmax::Scores;
use crate::element::Element;
use crate::simd::Simd;
use crate::tiles::{self, DEPTH, Part, Sums, TILE, WIDTH};

/// Rows whose scores are there at once: two tiles.
const ROWS: usize = 2 * tiles::ROWS;
/// Bytes of an element.
const BYTES: usize = size_of::<bf16>();

impl<E: Element> Attend<'_, E> {
    /// The heads of one group of a piece. Weights are rounded to bf16 before they meet V.
    ///
    /// # Safety
    /// The machine must have the instructions of `S` and tile registers; the call was checked and is of bf16.
    #[inline(always)]
    pub(super) unsafe fn amx_piece<S: Simd>(&self, piece: &Piece, kv_head: usize, scratch: &mut Scratch) {
        let tokens = &self.plan.tokens[piece.tokens.clone()];
        let group = self.call.heads.heads / self.call.heads.kv_heads;
        let rows = tokens.len() * group;
        let (size, size_v) = (self.call.k_pages.size, self.call.v_pages.size);
        let (depth, panels_v) = (size.div_ceil(DEPTH), size_v.div_ceil(WIDTH));
        let (width, width_v) = (depth * DEPTH, panels_v * WIDTH);
        let head = kv_head * group;
        // SAFETY: rows of scratch were made for these sizes, in whole tiles; K and V are read at keys that some token
        // sees, whose blocks were checked.
        unsafe {
            // Rows are taken 32 at a time from any on.
            let queries = scratch.queries.zeros((rows + ROWS) * width * BYTES / 4).cast::<bf16>();
            for row in 0..rows {
                let from = self.query(tokens[row / group], head + row % group).cast::<bf16>();
                std::ptr::copy_nonoverlapping(from, queries.add(row * width), size);
            }
            let scores = scratch.scores.room(ROWS * KEYS);
            let weights = scratch.staging.room(ROWS * KEYS * BYTES / 4).cast::<u16>();
            let sums = scratch.sums.zeros((rows + ROWS) * width_v);
            let keys = scratch.keys.zeros(KEYS * width * BYTES / 4).cast::<u8>();
            let values = scratch.values.zeros(KEYS * width_v * BYTES / 4).cast::<u8>();
            let running = scratch.running(rows);
            tiles::enter();

            let seen = |index: usize| &self.plan.seen[tokens[index]];
            for (Range { start, end }, seeing) in self.stretches(piece) {
                let seeing = seeing.start * group..seeing.end * group;
                self.pack(piece.row, start..end, kv_head, keys, values);
                for rows in
                    (seeing.start..seeing.end).step_by(ROWS).map(|row| row..seeing.end.min(row + ROWS))
                {
                    // Along the diagonal the first rows see few of the keys.
                    let count = seen((rows.end - 1) / group).end.clamp(start, end) - start;
                    let has_lower = rows.len() > tiles::ROWS;
                    let of = |start: *const u8, stride: usize| {
                        let below = start.wrapping_add(tiles::ROWS * stride);
                        let lower = has_lower.then_some(tiles::Rows { start: below, stride });
                        (tiles::Rows { start, stride }, lower)
                    };
                    let (upper, lower) = of(queries.add(rows.start * width).cast(), width * BYTES);
                    for panel in 0..count.div_ceil(WIDTH) {
                        tiles::multiply(Part {
                            upper,
                            lower,
                            panel: keys.add(panel * depth * 2 * TILE),
                            count: depth,
                            sums: Sums { start: scores.add(panel * WIDTH).cast(), stride: 4 * KEYS },
                            adds: false,
                            lines: 0,
                        });
                    }
                    let deep = count.div_ceil(DEPTH);
                    Scores {
                        scores,
                        rows: rows.len(),
                        count,
                        form: self.call.form,
                        running: running.add(rows.start),
                        sums: sums.add(rows.start * width_v),
                        width: width_v,
                    }
                    .weigh_bf16::<S>(
                        |row| {
                            let seen = seen((rows.start + row) / group);
                            seen.start.clamp(start, end) - start..seen.end.clamp(start, end) - start
                        },
                        weights,
                        KEYS,
                    );
                    let weighed = count.next_multiple_of(S::LANES);
                    for row in 0..rows.len() {
                        let beyond = (deep * DEPTH).saturating_sub(weighed);
                        weights.add(row * KEYS + weighed).write_bytes(0, beyond);
                    }
                    // Rows of the tiles that are none of these add nothing.
                    weights.add(rows.len() * KEYS).write_bytes(0, (ROWS - rows.len()) * KEYS);
                    let (upper, lower) = of(weights.cast_const().cast(), KEYS * BYTES);
                    for panel in 0..panels_v {
                        let to = sums.add(rows.start * width_v + panel * WIDTH);
                        tiles::multiply(Part {
                            upper,
                            lower,
                            panel: values.add(panel * (KEYS / DEPTH) * 2 * TILE),
                            count: deep,
                            sums: Sums { start: to.cast(), stride: 4 * width_v },
                            adds: true,
                            lines: 0,
                        });
                    }
                }
            }
            tiles::leave();
            self.leave_all::<S>(piece, head, sums, width_v, running);
        }
    }

    /// Packs some keys of a row in panels: K as columns of `size` elements, V as columns of keys.
    ///
    /// # Safety
    /// As for `amx_piece`; the targets must have room for `KEYS` keys in whole tiles, and what is beyond the sizes must
    /// be zero in them.
    #[inline(always)]
    unsafe fn pack(
        &self,
        row: usize,
        keys: Range<usize>,
        kv_head: usize,
        to_keys: *mut u8,
        to_values: *mut u8,
    ) {
        let (k_pages, v_pages) = (&self.call.k_pages, &self.call.v_pages);
        let depth = k_pages.size.div_ceil(DEPTH);
        let count = keys.len();
        let mut of_values = [std::ptr::null::<u16>(); KEYS];
        // SAFETY: as promised by the caller.
        unsafe {
            for part in self.parts(row, keys) {
                let (k, v) = (self.k(&part, kv_head), self.v(&part, kv_head));
                for index in 0..part.count {
                    let key = part.offset + index;
                    let from = k.add(index * k_pages.token_stride).cast::<u16>();
                    let to = to_keys.add(key / WIDTH * depth * 2 * TILE).cast::<u32>();
                    for pair in 0..k_pages.size / 2 {
                        let value = from.add(2 * pair).cast::<u32>().read_unaligned();
                        to.add(tiles::place(key % WIDTH, pair)).write(value);
                    }
                    if !k_pages.size.is_multiple_of(2) {
                        let last = k_pages.size - 1;
                        to.add(tiles::place(key % WIDTH, last / 2)).write(u32::from(*from.add(last)));
                    }
                    of_values[key] = v.add(index * v_pages.token_stride).cast();
                }
            }
            // Pairs of keys; those that are not there have weight zero, and must not be what was there before.
            for pair in 0..count.next_multiple_of(DEPTH) / 2 {
                for panel in 0..v_pages.size.div_ceil(WIDTH) {
                    let columns = WIDTH.min(v_pages.size - panel * WIDTH);
                    let to = to_values.add(panel * (KEYS / DEPTH) * 2 * TILE).cast::<u32>();
                    for half in 0..columns.div_ceil(16) {
                        let to = to.add(tiles::place(half * 16, pair));
                        let at = panel * WIDTH + half * 16;
                        let columns = 16.min(columns - half * 16);
                        let [even, odd] = [2 * pair, 2 * pair + 1]
                            .map(|key| if key < count { of_values[key].add(at) } else { ZEROS.as_ptr() });
                        for column in 0..columns {
                            let (even, odd) = (*even.add(column), *odd.add(column));
                            to.add(column).write(u32::from(even) | u32::from(odd) << 16);
                        }
                    }
                }
            }
        }
    }
}

/// Stands for the V of a key that is not there.
static ZEROS: [u16; 16] = [0; 16];
