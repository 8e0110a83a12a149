//! Products in vector registers: some rows times a panel of columns, in as many accumulators as there are.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Matrix, Product, Scratch, Written, even_parts};
use crate::element::Element;
use crate::factors::Factors;
use crate::isa::Isa;
use crate::simd::{self, Kernel, Simd};

/// Bytes of the input that all panels of a part are multiplied with before what follows of it: they stay in the second
/// cache, which every machine has 256 KiB of.
const INPUT_BYTES: usize = 192 << 10;
/// Rows of it, at least: as many that a panel's way to the first cache is lost among them; and at most.
const LEAST_ROWS: usize = 48;
const MOST_ROWS: usize = 512;
/// Bytes of a panel that are multiplied with these rows before its next ones: they stay in the first cache.
const BLOCK_BYTES: usize = 28 << 10;
/// Bytes of a panel between what a few rows are multiplied with and what is asked for.
const FEW_AHEAD: usize = 4096;

/// Columns of a panel for an instruction set.
pub(super) fn width(isa: Isa) -> usize {
    struct Width<'a>(&'a mut usize);
    impl Kernel for Width<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            *self.0 = panel_vectors::<S>() * S::LANES;
        }
    }
    let mut width = 0;
    // SAFETY: no instruction of the set is used.
    unsafe { simd::run(isa, Width(&mut width)) };
    width
}

/// Rows of an input of so many bytes each that meet all panels of a part together.
pub(super) fn rows_at_once(isa: Isa, row_bytes: usize) -> usize {
    struct Count<'a>(&'a mut usize, usize);
    impl Kernel for Count<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            *self.0 = rows_that_stay::<S>(self.1);
        }
    }
    let mut count = 0;
    // SAFETY: no instruction of the set is used.
    unsafe { simd::run(isa, Count(&mut count, row_bytes)) };
    count
}

#[inline(always)]
fn rows_that_stay<S: Simd>(row_bytes: usize) -> usize {
    (INPUT_BYTES / row_bytes).clamp(LEAST_ROWS, MOST_ROWS).next_multiple_of(row_count::<S>())
}

/// Vectors of a panel's row: with [`row_count`] rows at a time the accumulators fill the registers.
#[inline(always)]
const fn panel_vectors<S: Simd>() -> usize {
    if S::WIDE_FILE { 3 } else { 2 }
}

/// Rows at a time.
#[inline(always)]
const fn row_count<S: Simd>() -> usize {
    if S::WIDE_FILE { 8 } else { 6 }
}

/// Rows of the input as a kernel reads them.
#[derive(Clone, Copy)]
struct Given<T> {
    start: *const T,
    stride: usize,
}

/// What is asked for while other things are multiplied: what lies ahead in the packed weight.
#[derive(Clone, Copy)]
struct Ahead {
    next: *const u8,
    lines: usize,
}

impl<E: Element> Product<'_, E> {
    /// Some panels, by vectors.
    ///
    /// # Safety
    /// The call must be a checked one whose weight is packed for `F`; the machine must have the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn vectors<S: Simd, F: Factors>(&self, panels: Range<usize>, scratch: &mut Scratch) {
        // SAFETY: as promised by the caller.
        unsafe {
            if S::WIDE_FILE {
                self.panels::<S, F, 3>(panels, scratch);
            } else {
                self.panels::<S, F, 2>(panels, scratch);
            }
        }
    }

    #[inline(always)]
    unsafe fn panels<S: Simd, F: Factors, const VECTORS: usize>(
        &self,
        panels: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let linear = self.linear;
        let width = VECTORS * S::LANES;
        let steps = linear.in_size.div_ceil(F::DEPTH);
        let step_bytes = width * F::DEPTH * linear.dtype.bytes();
        let few = self.input.rows <= row_count::<S>();
        let unpacks = F::UNPACKS && !few;
        let near_bytes = if unpacks { width * size_of::<f32>() } else { step_bytes };
        let block = if few { steps } else { even_parts(steps, BLOCK_BYTES / near_bytes) };
        let rows_at_once = rows_that_stay::<S>(linear.row_bytes());
        let Scratch { sums, unpacked, .. } = scratch;
        let sums = sums.room(rows_at_once * width);
        let unpacked = if unpacks { unpacked.room(block * width) } else { std::ptr::null_mut() };
        let given =
            Given::<F::Given> { start: self.input.data.cast_const().cast(), stride: self.input.row_stride };
        let parts = (0..self.input.rows).step_by(rows_at_once);
        for (first, panel) in parts.flat_map(|first| panels.clone().map(move |panel| (first, panel))) {
            let rows = first..self.input.rows.min(first + rows_at_once);
            // SAFETY: all within the tensors, the packed weight and the scratch.
            unsafe {
                let weights = linear.packed.start().add(panel * linear.panel).cast_const();
                for start in (0..steps).step_by(block) {
                    let count = block.min(steps - start);
                    let weights = weights.add(start * step_bytes);
                    let bytes = count * step_bytes;
                    let lines = bytes.div_ceil(64).div_ceil(rows.len().div_ceil(row_count::<S>()));
                    let mut ahead = Ahead { next: weights.wrapping_add(bytes), lines };
                    if unpacks {
                        F::unpack::<S>(weights.cast(), count * width, unpacked);
                    }
                    let is_last = start + count == steps;
                    let mut at = rows.start;
                    while at < rows.end {
                        let left = rows.end - at;
                        let given = Given {
                            start: given.start.add(at * given.stride + start * F::DEPTH),
                            stride: given.stride,
                        };
                        let sums = Sums {
                            near: sums.add((at - rows.start) * width),
                            adds: start > 0,
                            written: if is_last { Some(self.written(at, panel)) } else { None },
                        };
                        at += if few {
                            let weights = weights.cast();
                            some_rows::<E, S, F, VECTORS, true>(left, given, weights, count, sums, ahead)
                        } else if unpacks {
                            let weights = unpacked.cast_const().cast();
                            some_rows::<E, S, F::Unpacked, VECTORS, false>(
                                left, given, weights, count, sums, ahead,
                            )
                        } else {
                            let weights = weights.cast();
                            some_rows::<E, S, F, VECTORS, false>(left, given, weights, count, sums, ahead)
                        };
                        ahead.next = ahead.next.wrapping_add(64 * lines);
                    }
                }
            }
        }
    }
}

/// Makes some rows of an input ready for [`Factors`]: as they are, with a zero after the last one where pairs are
/// multiplied, or in fp32.
pub(super) struct MakeReady<E> {
    pub from: Matrix,
    pub to: Matrix,
    pub rows: Range<usize>,
    pub in_pairs: bool,
    pub element: PhantomData<E>,
}

impl<E: Element> Kernel for MakeReady<E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let size = self.from.columns;
        // SAFETY: within both, as promised by who made this.
        unsafe {
            for row in self.rows {
                let from = self.from.data.cast::<E>().add(row * self.from.row_stride);
                if self.in_pairs {
                    let to = self.to.data.cast::<E>().add(row * self.to.row_stride);
                    std::ptr::copy_nonoverlapping(from, to, size);
                    to.add(size).write(E::from_f32(0.0));
                    continue;
                }
                let to = self.to.data.cast::<f32>().add(row * self.to.row_stride);
                for at in (0..size).step_by(S::LANES) {
                    S::store(to.add(at), E::load_part::<S>(from.add(at), S::LANES.min(size - at)));
                }
            }
        }
    }
}

/// Where the sums of some rows are kept, and where they go to.
#[derive(Clone, Copy)]
struct Sums<E> {
    /// Rows of a panel's width.
    near: *mut f32,
    /// Whether there are sums already.
    adds: bool,
    /// The output, once the sums are whole. From the registers, row by row as they are computed: kept until all rows
    /// are there and written at once, the output's lines come late (a tenth of the time of a large layer).
    written: Option<Written<E>>,
}

/// As many of the rows as are computed at a time; returns how many.
#[inline(always)]
unsafe fn some_rows<E: Element, S: Simd, F: Factors, const VECTORS: usize, const FEW: bool>(
    rows: usize,
    given: Given<F::Given>,
    weights: *const F::Stored,
    steps: usize,
    sums: Sums<E>,
    ahead: Ahead,
) -> usize {
    // SAFETY: as promised by the caller.
    unsafe {
        match rows {
            1 => block::<E, S, F, VECTORS, 1, FEW>(given, weights, steps, sums, ahead),
            2 => block::<E, S, F, VECTORS, 2, FEW>(given, weights, steps, sums, ahead),
            3 => block::<E, S, F, VECTORS, 3, FEW>(given, weights, steps, sums, ahead),
            4 => block::<E, S, F, VECTORS, 4, FEW>(given, weights, steps, sums, ahead),
            5 => block::<E, S, F, VECTORS, 5, FEW>(given, weights, steps, sums, ahead),
            _ if !S::WIDE_FILE => block::<E, S, F, VECTORS, 6, FEW>(given, weights, steps, sums, ahead),
            6 => block::<E, S, F, VECTORS, 6, FEW>(given, weights, steps, sums, ahead),
            7 => block::<E, S, F, VECTORS, 7, FEW>(given, weights, steps, sums, ahead),
            _ => block::<E, S, F, VECTORS, 8, FEW>(given, weights, steps, sums, ahead),
        }
    }
}

/// Adds the products of one step.
#[inline(always)]
unsafe fn one_step<S: Simd, F: Factors, const VECTORS: usize, const ROWS: usize>(
    totals: &mut [[S::V; VECTORS]; ROWS],
    given: Given<F::Given>,
    weights: *const F::Stored,
    step: usize,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        let from = weights.add(step * VECTORS * S::LANES * F::DEPTH);
        let mut stored = [S::splat(0.0); VECTORS];
        for (vector, stored) in stored.iter_mut().enumerate() {
            *stored = F::load::<S>(from.add(vector * S::LANES * F::DEPTH));
        }
        for (row, totals) in totals.iter_mut().enumerate() {
            let given = given.start.add(row * given.stride + step * F::DEPTH);
            for (total, &stored) in totals.iter_mut().zip(&stored) {
                *total = F::multiply::<S>(*total, given, stored);
            }
        }
    }
}

/// `ROWS` rows times a panel, over `steps` of the input's columns; returns `ROWS`. `FEW`: they are all that a panel
/// meets, and wait for nothing but its arrival.
#[inline(always)]
unsafe fn block<E: Element, S: Simd, F: Factors, const VECTORS: usize, const ROWS: usize, const FEW: bool>(
    given: Given<F::Given>,
    weights: *const F::Stored,
    steps: usize,
    sums: Sums<E>,
    ahead: Ahead,
) -> usize {
    let width = VECTORS * S::LANES;
    // SAFETY: as promised by the caller.
    unsafe {
        let mut totals = [[S::splat(0.0); VECTORS]; ROWS];
        if sums.adds {
            for (row, totals) in totals.iter_mut().enumerate() {
                for (vector, total) in totals.iter_mut().enumerate() {
                    *total = S::load(sums.near.add(row * width + vector * S::LANES));
                }
            }
        }
        if FEW {
            let step_bytes = width * F::DEPTH * size_of::<F::Stored>();
            for step in 0..steps {
                let soon = weights.cast::<u8>().wrapping_add(step * step_bytes + FEW_AHEAD);
                for line in (0..step_bytes).step_by(64) {
                    S::prefetch(soon.wrapping_add(line));
                }
                one_step::<S, F, VECTORS, ROWS>(&mut totals, given, weights, step);
            }
        } else {
            // Steps that read a line of the input.
            let group = 64 / size_of::<F::Given>() / F::DEPTH;
            let at_a_time = ahead.lines.div_ceil(steps.div_ceil(group));
            let mut asked = 0;
            for start in (0..steps).step_by(group) {
                let until = ahead.lines.min(asked + at_a_time);
                while asked < until {
                    S::prefetch(ahead.next.wrapping_add(64 * asked));
                    asked += 1;
                }
                for row in ROWS..2 * ROWS {
                    let soon = given.start.wrapping_add(row * given.stride + start * F::DEPTH);
                    S::prefetch_near(soon.cast());
                }
                for step in start..steps.min(start + group) {
                    one_step::<S, F, VECTORS, ROWS>(&mut totals, given, weights, step);
                }
            }
        }
        // Each branch a loop of its own without further ones, or the sums leave their registers.
        match sums.written {
            Some(written) if written.is_plain(width) => {
                for (row, totals) in totals.iter().enumerate() {
                    for (vector, total) in totals.iter().enumerate() {
                        written.write_whole::<S>(row, vector * S::LANES, *total);
                    }
                }
            }
            written => {
                for (row, totals) in totals.iter().enumerate() {
                    for (vector, total) in totals.iter().enumerate() {
                        S::store(sums.near.add(row * width + vector * S::LANES), *total);
                    }
                }
                if let Some(written) = written {
                    written.write::<S>(sums.near, ROWS, width);
                }
            }
        }
    }
    ROWS
}
