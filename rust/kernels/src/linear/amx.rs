//! Products in tile registers: 32 rows times 32 columns at a time, of bf16.

use std::ops::Range;

use super::{Product, Scratch, even_parts};
use crate::element::Element;
use crate::simd::Simd;
use crate::tiles::{self, DEPTH, Part, ROWS, Rows, Sums, TILE, WIDTH};

/// Tiles of a panel's column that are multiplied with all rows before the next ones: they stay near.
const TILES_AT_ONCE: usize = 20;

impl<E: Element> Product<'_, E> {
    /// Some panels, by tiles.
    ///
    /// # Safety
    /// The call must be a checked one of bf16, packed for tiles; the machine must have them.
    #[inline(always)]
    pub(super) unsafe fn tiles<S: Simd>(&self, panels: Range<usize>, scratch: &mut Scratch) {
        let (rows, size) = (self.input.rows, self.linear.in_size);
        let depth = size.div_ceil(DEPTH);
        let block = even_parts(depth, TILES_AT_ONCE);
        let padded = rows.next_multiple_of(2 * ROWS);
        let Scratch { sums, input, .. } = scratch;
        let sums = sums.room(padded * WIDTH);
        // What is no whole tile is read from a copy with zeros around it.
        let whole = if size.is_multiple_of(DEPTH) { rows / ROWS * ROWS } else { 0 };
        let copied_stride = depth * DEPTH;
        let copied = input.zeros((padded - whole) * copied_stride / 2).cast::<E>();
        // SAFETY: all within the tensors, the packed weight and the scratch.
        unsafe {
            let input_row =
                |row: usize| self.input.data.cast::<E>().cast_const().add(row * self.input.row_stride);
            for row in whole..rows {
                let to = copied.add((row - whole) * copied_stride);
                std::ptr::copy_nonoverlapping(input_row(row), to, size);
            }
            let of_tile = |first: usize| match first < whole {
                true => Rows { start: input_row(first).cast(), stride: self.input.row_stride * 2 },
                false => Rows {
                    start: copied.add((first - whole) * copied_stride).cast_const().cast(),
                    stride: copied_stride * 2,
                },
            };
            tiles::enter();
            for panel in panels {
                let weights = self.linear.packed.start().add(panel * self.linear.panel).cast_const();
                for start in (0..depth).step_by(block) {
                    let count = block.min(depth - start);
                    let weights = weights.add(start * 2 * TILE);
                    for first in (0..rows).step_by(2 * ROWS) {
                        // The first rows bring the panel near, the others find it there.
                        let lines = if first == 0 { 2 * TILE / 64 } else { 0 };
                        let mut upper = of_tile(first);
                        upper.start = upper.start.add(start * 64);
                        let lower = (rows - first > ROWS).then(|| {
                            let lower = of_tile(first + ROWS);
                            Rows { start: lower.start.add(start * 64), ..lower }
                        });
                        tiles::multiply(Part {
                            upper,
                            lower,
                            panel: weights,
                            count,
                            sums: Sums { start: sums.add(first * WIDTH).cast(), stride: 4 * WIDTH },
                            adds: start > 0,
                            lines,
                        });
                        if start + count == depth {
                            let count = (rows - first).min(2 * ROWS);
                            self.written(first, panel).write::<S>(sums.add(first * WIDTH), count, WIDTH);
                        }
                    }
                }
            }
            tiles::leave();
        }
    }
}
