//! Products in tile registers (AMX) of bf16: up to 32 rows times a panel of 32 columns at a time, summed in fp32.
//!
//! The right side of a product is packed in panels; see [`place`]. The compiler knows nothing of tile registers, so all
//! that happens in them between [`enter`] and [`leave`] is written out here.

use std::arch::asm;

/// Columns of a panel: two tiles.
pub(crate) const WIDTH: usize = 32;
/// Elements of a row that a tile holds.
pub(crate) const DEPTH: usize = 32;
/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Bytes of a tile.
pub(crate) const TILE: usize = 1024;
/// Bytes of a panel between what is multiplied and what is asked for.
const AHEAD: usize = 6144;

/// Where in a panel a pair of elements is: 16 columns of 16 pairs are a tile, pair by pair, and the tile of the next 16
/// columns follows.
#[inline(always)]
pub(crate) const fn place(column: usize, pair: usize) -> usize {
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

/// Sixteen rows of elements.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub start: *const u8,
    /// Bytes from a row to the next.
    pub stride: usize,
}

/// Where sums are kept: fp32, two tiles beside each other.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    pub start: *mut u8,
    /// Bytes from a row to the next.
    pub stride: usize,
}

/// Makes the tile registers ready, of this thread alone.
///
/// # Safety
/// The machine must have them, and the process their permission.
#[inline(always)]
pub(crate) unsafe fn enter() {
    // SAFETY: as promised by the caller; the configuration is a valid one.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly)) };
}

/// Leaves the tile registers as nobody's.
///
/// # Safety
/// As for [`enter`].
#[inline(always)]
pub(crate) unsafe fn leave() {
    // SAFETY: as promised by the caller.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// A part of a product.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub upper: Rows,
    /// The sixteen rows below, where there are any.
    pub lower: Option<Rows>,
    /// The panel, from the first tile on that is multiplied.
    pub panel: *const u8,
    /// Tiles of its depth.
    pub count: usize,
    pub sums: Sums,
    /// Whether the sums are added to what is there.
    pub adds: bool,
    /// Cache lines of the panel that are asked for with each tile, far ahead.
    pub lines: usize,
}

/// Multiplies rows with a panel.
///
/// # Safety
/// The registers must be ready; all must be valid for what is read or written: whole tiles.
#[inline(always)]
pub(crate) unsafe fn multiply(part: Part) {
    // SAFETY: as promised by the caller.
    unsafe {
        match part.lower {
            Some(lower) => multiply_two(part, lower),
            None => multiply_one(part),
        }
    }
}

#[inline(always)]
unsafe fn multiply_two(part: Part, lower: Rows) {
    let Part { upper, panel, count, sums, adds, lines, .. } = part;
    let below = sums.start.wrapping_add(ROWS * sums.stride);
    // SAFETY: as promised by the caller; no tile register is used by compiled code.
    unsafe {
        if adds {
            asm!(
                "tileloadd tmm0, [{sums} + {stride}]",
                "tileloadd tmm1, [{sums} + {stride} + 64]",
                "tileloadd tmm2, [{below} + {stride}]",
                "tileloadd tmm3, [{below} + {stride} + 64]",
                sums = in(reg) sums.start,
                below = in(reg) below,
                stride = in(reg) sums.stride,
                options(nostack, readonly),
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{panel} + {line}]",
            "tileloadd tmm5, [{panel} + {line} + 1024]",
            "tileloadd tmm6, [{upper} + {upper_stride}]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            "tileloadd tmm7, [{lower} + {lower_stride}]",
            "tdpbf16ps tmm1, tmm6, tmm5",
            "mov {left}, {lines}",
            "lea {ahead}, [{panel} + {distance}]",
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
            "add {panel}, 2048",
            "add {upper}, 64",
            "add {lower}, 64",
            "dec {count}",
            "jnz 2b",
            panel = inout(reg) panel => _,
            upper = inout(reg) upper.start => _,
            lower = inout(reg) lower.start => _,
            upper_stride = in(reg) upper.stride,
            lower_stride = in(reg) lower.stride,
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
            "tilestored [{below} + {stride}], tmm2",
            "tilestored [{below} + {stride} + 64], tmm3",
            sums = in(reg) sums.start,
                below = in(reg) below,
            stride = in(reg) sums.stride,
            options(nostack),
        );
    }
}

#[inline(always)]
unsafe fn multiply_one(part: Part) {
    let Part { upper, panel, count, sums, adds, lines, .. } = part;
    // SAFETY: as above.
    unsafe {
        if adds {
            asm!(
                "tileloadd tmm0, [{sums} + {stride}]",
                "tileloadd tmm1, [{sums} + {stride} + 64]",
                sums = in(reg) sums.start,
                stride = in(reg) sums.stride,
                options(nostack, readonly),
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{panel} + {line}]",
            "tileloadd tmm5, [{panel} + {line} + 1024]",
            "tileloadd tmm6, [{upper} + {upper_stride}]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            "mov {left}, {lines}",
            "lea {ahead}, [{panel} + {distance}]",
            "test {left}, {left}",
            "jz 4f",
            "3:",
            "prefetcht1 [{ahead}]",
            "add {ahead}, 64",
            "dec {left}",
            "jnz 3b",
            "4:",
            "tdpbf16ps tmm1, tmm6, tmm5",
            "add {panel}, 2048",
            "add {upper}, 64",
            "dec {count}",
            "jnz 2b",
            panel = inout(reg) panel => _,
            upper = inout(reg) upper.start => _,
            upper_stride = in(reg) upper.stride,
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
            sums = in(reg) sums.start,
            stride = in(reg) sums.stride,
            options(nostack),
        );
    }
}
