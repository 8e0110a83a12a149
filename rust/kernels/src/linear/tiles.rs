//! Products in tile registers (AMX): 32 rows times 32 columns at a time, of bf16.

use std::arch::asm;
use std::ops::Range;

use super::{Product, Scratch, even_parts};
use crate::element::Element;
use crate::simd::Simd;

/// Columns of a panel: two tiles.
pub(super) const WIDTH: usize = 32;
/// Elements of a row that a tile holds.
pub(super) const DEPTH: usize = 32;
/// Rows of a tile.
const ROWS: usize = 16;
/// Bytes of a tile.
const TILE: usize = 1024;
/// Bytes of a panel between what is multiplied and what is asked for.
const AHEAD: usize = 6144;
/// Tiles of a panel's column that are multiplied with all rows before the next ones: they stay near.
const TILES_AT_ONCE: usize = 20;

/// Where in a panel a pair of elements is: 16 columns of 16 pairs are a tile, pair by pair, and the tile of the next 16
/// columns follows.
#[inline(always)]
pub(super) const fn place(column: usize, pair: usize) -> usize {
    (pair / 16 * 2 + column / 16) * (TILE / 4) + pair % 16 * 16 + column % 16
}

/// `LDTILECFG`'s operand: eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
        tile += 1;
    }
    config
};

/// Two tiles of the input, one above the other.
#[derive(Clone, Copy)]
struct Pair {
    upper: Rows,
    lower: Rows,
}

/// Sixteen rows.
#[derive(Clone, Copy)]
struct Rows {
    start: *const u8,
    stride: usize,
}

impl<E: Element> Product<'_, E> {
    /// Some panels, by tiles.
    ///
    /// # Safety
    /// The call must be a checked one of bf16, packed for tiles; the machine must have them.
    #[inline(always)]
    pub(super) unsafe fn tiles<S: Simd>(&self, panels: Range<usize>, scratch: &mut Scratch) {
        let (rows, size) = (self.input.rows, self.linear.in_size);
        let tiles = size.div_ceil(DEPTH);
        let block = even_parts(tiles, TILES_AT_ONCE);
        let padded = rows.next_multiple_of(2 * ROWS);
        let Scratch { sums, input } = scratch;
        let sums = sums.room(padded * WIDTH);
        // What is no whole tile is read from a copy with zeros around it.
        let whole = if size.is_multiple_of(DEPTH) { rows / ROWS * ROWS } else { 0 };
        let copied_stride = tiles * DEPTH;
        let copied = input.zeros((padded - whole) * copied_stride / 2).cast::<E>();
        // SAFETY: all within the tensors, the packed weight and the scratch.
        unsafe {
            for row in whole..rows {
                let to = copied.add((row - whole) * copied_stride);
                std::ptr::copy_nonoverlapping(self.input(row), to, size);
            }
            let of_tile = |first: usize| match first < whole {
                true => Rows { start: self.input(first).cast(), stride: self.input.row_stride * 2 },
                false => Rows {
                    start: copied.add((first - whole) * copied_stride).cast_const().cast(),
                    stride: copied_stride * 2,
                },
            };
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
            for panel in panels {
                let weights = self.linear.packed.start().add(panel * self.linear.panel).cast_const();
                for start in (0..tiles).step_by(block) {
                    let count = block.min(tiles - start);
                    let weights = weights.add(start * 2 * TILE);
                    for first in (0..rows).step_by(2 * ROWS) {
                        // The first rows bring the panel near, the others find it there.
                        let lines = if first == 0 { 2 * TILE / 64 } else { 0 };
                        let mut upper = of_tile(first);
                        upper.start = upper.start.add(start * 64);
                        let sums = sums.add(first * WIDTH).cast::<u8>();
                        if rows - first > ROWS {
                            let mut lower = of_tile(first + ROWS);
                            lower.start = lower.start.add(start * 64);
                            multiply_two(Pair { upper, lower }, weights, count, sums, start > 0, lines);
                        } else {
                            multiply_one(upper, weights, count, sums, start > 0, lines);
                        }
                    }
                }
                self.write::<S>(sums, 0..rows, panel);
            }
            // Others find the registers as nobody's.
            asm!("tilerelease", options(nostack, nomem));
        }
    }
}

/// Two tiles of rows times a panel, over `count` tiles of the input's columns; asks for so many lines with each.
///
/// # Safety
/// Tiles must be configured; all must be valid for what is read or written.
#[inline(always)]
unsafe fn multiply_two(
    rows: Pair,
    weights: *const u8,
    count: usize,
    sums: *mut u8,
    adds: bool,
    lines: usize,
) {
    // SAFETY: as promised by the caller; no tile register is used by compiled code.
    unsafe {
        if adds {
            asm!(
                "tileloadd tmm0, [{sums} + {stride}]",
                "tileloadd tmm1, [{sums} + {stride} + 64]",
                "tileloadd tmm2, [{sums} + {stride} + 2048]",
                "tileloadd tmm3, [{sums} + {stride} + 2112]",
                sums = in(reg) sums,
                stride = in(reg) 4 * WIDTH,
                options(nostack, readonly),
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{weights} + {line}]",
            "tileloadd tmm5, [{weights} + {line} + 1024]",
            "tileloadd tmm6, [{upper} + {upper_stride}]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            "tileloadd tmm7, [{lower} + {lower_stride}]",
            "tdpbf16ps tmm1, tmm6, tmm5",
            "mov {left}, {lines}",
            "lea {ahead}, [{weights} + {distance}]",
            "test {left}, {left}",
            "jz 4f",
            "3:",
            "prefetcht1 [{ahead}]",
            "add {ahead}, 64",
            "dec {left}",
            "jnz 3b",
            "4:",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tdpbf16ps tmm3, tmm7, tmm5",
            "add {weights}, 2048",
            "add {upper}, 64",
            "add {lower}, 64",
            "dec {count}",
            "jnz 2b",
            weights = inout(reg) weights => _,
            upper = inout(reg) rows.upper.start => _,
            lower = inout(reg) rows.lower.start => _,
            upper_stride = in(reg) rows.upper.stride,
            lower_stride = in(reg) rows.lower.stride,
            line = in(reg) 64_usize,
            ahead = out(reg) _,
            distance = const AHEAD,
            lines = in(reg) lines,
            left = out(reg) _,
            count = inout(reg) count => _,
            options(nostack, readonly),
        );
        asm!(
            "tilestored [{sums} + {stride}], tmm0",
            "tilestored [{sums} + {stride} + 64], tmm1",
            "tilestored [{sums} + {stride} + 2048], tmm2",
            "tilestored [{sums} + {stride} + 2112], tmm3",
            sums = in(reg) sums,
            stride = in(reg) 4 * WIDTH,
            options(nostack),
        );
    }
}

/// As [`multiply_two`], with one tile of rows.
#[inline(always)]
unsafe fn multiply_one(
    rows: Rows,
    weights: *const u8,
    count: usize,
    sums: *mut u8,
    adds: bool,
    lines: usize,
) {
    // SAFETY: as above.
    unsafe {
        if adds {
            asm!(
                "tileloadd tmm0, [{sums} + {stride}]",
                "tileloadd tmm1, [{sums} + {stride} + 64]",
                sums = in(reg) sums,
                stride = in(reg) 4 * WIDTH,
                options(nostack, readonly),
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{weights} + {line}]",
            "tileloadd tmm5, [{weights} + {line} + 1024]",
            "tileloadd tmm6, [{upper} + {upper_stride}]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            "mov {left}, {lines}",
            "lea {ahead}, [{weights} + {distance}]",
            "test {left}, {left}",
            "jz 4f",
            "3:",
            "prefetcht1 [{ahead}]",
            "add {ahead}, 64",
            "dec {left}",
            "jnz 3b",
            "4:",
            "tdpbf16ps tmm1, tmm6, tmm5",
            "add {weights}, 2048",
            "add {upper}, 64",
            "dec {count}",
            "jnz 2b",
            weights = inout(reg) weights => _,
            upper = inout(reg) rows.start => _,
            upper_stride = in(reg) rows.stride,
            line = in(reg) 64_usize,
            ahead = out(reg) _,
            distance = const AHEAD,
            lines = in(reg) lines,
            left = out(reg) _,
            count = inout(reg) count => _,
            options(nostack, readonly),
        );
        asm!(
            "tilestored [{sums} + {stride}], tmm0",
            "tilestored [{sums} + {stride} + 64], tmm1",
            sums = in(reg) sums,
            stride = in(reg) 4 * WIDTH,
            options(nostack),
        );
    }
}
