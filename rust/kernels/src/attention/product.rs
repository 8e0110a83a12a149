//! Matrix products of a tile, in registers.

use crate::factors::Factors;
use crate::simd::Simd;

/// Left and right side of a product, and where it goes, in fp32; rows apart by the strides.
#[derive(Clone, Copy)]
pub(crate) struct Product<F: Factors> {
    /// [rows, depth]
    pub left: *const F::Given,
    pub left_stride: usize,
    /// [depth, columns], where pairs are multiplied [depth / 2, columns] of them.
    pub right: *const F::Stored,
    /// Columns from a row to the next.
    pub right_stride: usize,
    /// [rows, columns]
    pub out: *mut f32,
    pub out_stride: usize,
    pub rows: usize,
    /// A multiple of what is multiplied at once.
    pub depth: usize,
    /// A multiple of the lanes.
    pub columns: usize,
}

/// Writes the product to `out`, or adds it to what is there.
///
/// # Safety
/// The machine must have the instructions of `S`; the pointers must be valid for what the sizes say.
#[inline(always)]
pub(crate) unsafe fn write<S: Simd, F: Factors, const ADDS: bool>(product: Product<F>) {
    let mut column = 0;
    // SAFETY: blocks within the sizes.
    unsafe {
        if S::WIDE_FILE {
            while column + 4 * S::LANES <= product.columns {
                write_columns::<S, F, 4, ADDS>(product, column);
                column += 4 * S::LANES;
            }
        }
        while column + 2 * S::LANES <= product.columns {
            write_columns::<S, F, 2, ADDS>(product, column);
            column += 2 * S::LANES;
        }
        if column < product.columns {
            write_columns::<S, F, 1, ADDS>(product, column);
        }
    }
}

/// `VECTORS` vectors of columns.
#[inline(always)]
unsafe fn write_columns<S: Simd, F: Factors, const VECTORS: usize, const ADDS: bool>(
    product: Product<F>,
    column: usize,
) {
    // SAFETY: within the sizes.
    unsafe {
        let mut row = 0;
        while row + 6 <= product.rows {
            write_block::<S, F, 6, VECTORS, ADDS>(product, row, column);
            row += 6;
        }
        match product.rows - row {
            1 => write_block::<S, F, 1, VECTORS, ADDS>(product, row, column),
            2 => write_block::<S, F, 2, VECTORS, ADDS>(product, row, column),
            3 => write_block::<S, F, 3, VECTORS, ADDS>(product, row, column),
            4 => write_block::<S, F, 4, VECTORS, ADDS>(product, row, column),
            5 => write_block::<S, F, 5, VECTORS, ADDS>(product, row, column),
            _ => {}
        }
    }
}

/// `ROWS` rows of `VECTORS` vectors, whose sums stay in registers.
#[inline(always)]
unsafe fn write_block<S: Simd, F: Factors, const ROWS: usize, const VECTORS: usize, const ADDS: bool>(
    product: Product<F>,
    row: usize,
    column: usize,
) {
    // SAFETY: within the sizes.
    unsafe {
        let left = product.left.add(row * product.left_stride);
        let right = product.right.add(column * F::DEPTH);
        let out = product.out.add(row * product.out_stride + column);
        let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
        for (row, sums) in sums.iter_mut().enumerate().filter(|_| ADDS) {
            for (vector, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(out.add(row * product.out_stride + vector * S::LANES));
            }
        }
        for step in 0..product.depth / F::DEPTH {
            let mut factors = [S::splat(0.0); VECTORS];
            for (vector, factor) in factors.iter_mut().enumerate() {
                let columns = step * product.right_stride + vector * S::LANES;
                *factor = F::load::<S>(right.add(columns * F::DEPTH));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let given = left.add(row * product.left_stride + step * F::DEPTH);
                for (sum, factor) in sums.iter_mut().zip(factors) {
                    *sum = F::multiply::<S>(*sum, given, factor);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (vector, sum) in sums.iter().enumerate() {
                S::store(out.add(row * product.out_stride + vector * S::LANES), *sum);
            }
        }
    }
}
