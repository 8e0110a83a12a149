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

/// Multiplies tile after tile of a panel's depth, with what one or two tiles of rows need.
macro_rules! each_tile {
    ($part:ident, [$($load:literal)?], [$($product:literal),*], [$($advance:literal)?], $($operands:tt)*) => {
        asm!(
            "2:",
            "tileloadd tmm4, [{panel} + {line}]",
            "tileloadd tmm5, [{panel} + {line} + 1024]",
            "tileloadd tmm6, [{upper} + {upper_stride}]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            $($load,)?
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
            $($product,)*
            "add {panel}, 2048",
            "add {upper}, 64",
            $($advance,)?
            "dec {count}",
            "jnz 2b",
            panel = inout(reg) $part.panel => _,
            upper = inout(reg) $part.upper.start => _,
            upper_stride = in(reg) $part.upper.stride,
            line = in(reg) 64_usize,
            ahead = out(reg) _,
            distance = const AHEAD,
            lines = in(reg) $part.lines,
            left = out(reg) _,
            count = inout(reg) $part.count => _,
            $($operands)*
            options(nostack, readonly),
        )
    };
}

/// Multiplies rows with a panel.
///
/// # Safety
/// The registers must be ready; all must be valid for what is read or written: whole tiles.
#[inline(always)]
pub(crate) unsafe fn multiply(part: Part) {
    let sums = part.sums;
    let below = Sums { start: sums.start.wrapping_add(ROWS * sums.stride), ..sums };
    // SAFETY: as promised by the caller; no tile register is used by compiled code.
    unsafe {
        if part.adds {
            load_upper(sums);
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
        }
        let Some(lower) = part.lower else {
            each_tile!(part, [], [], [],);
            return store_upper(sums);
        };
        if part.adds {
            load_lower(below);
        } else {
            asm!("tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
        each_tile!(
            part,
            ["tileloadd tmm7, [{lower} + {lower_stride}]"],
            ["tdpbf16ps tmm2, tmm7, tmm4", "tdpbf16ps tmm3, tmm7, tmm5"],
            ["add {lower}, 64"],
            lower = inout(reg) lower.start => _,
            lower_stride = in(reg) lower.stride,
        );
        store_upper(sums);
        store_lower(below);
    }
}

/// Moves a pair of tiles between registers and memory.
macro_rules! moves {
    ($($name:ident: $first:literal, $second:literal;)+) => {$(
        #[inline(always)]
        unsafe fn $name(sums: Sums) {
            // SAFETY: as promised by the caller of `multiply`.
            unsafe {
                asm!($first, $second, sums = in(reg) sums.start, stride = in(reg) sums.stride, options(nostack));
            }
        }
    )+};
}

moves! {
    load_upper: "tileloadd tmm0, [{sums} + {stride}]", "tileloadd tmm1, [{sums} + {stride} + 64]";
    load_lower: "tileloadd tmm2, [{sums} + {stride}]", "tileloadd tmm3, [{sums} + {stride} + 64]";
    store_upper: "tilestored [{sums} + {stride}], tmm0", "tilestored [{sums} + {stride} + 64], tmm1";
    store_lower: "tilestored [{sums} + {stride}], tmm2", "tilestored [{sums} + {stride} + 64], tmm3";
}
