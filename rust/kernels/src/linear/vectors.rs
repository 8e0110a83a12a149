//! Products in vector registers: some rows times a panel of columns, in as many accumulators as there are.

use std::marker::PhantomData;
use std::ops::Range;

use super::{BLOCK_BYTES, Matrix, Product, ROWS_AT_ONCE, Scratch, even_parts};
use crate::element::{Dtype, Element};
use crate::isa::Isa;
use crate::simd::{self, Kernel, Simd};

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

/// Vectors of a panel's row: with [`row_count`] rows at a time the accumulators fill the registers.
#[inline(always)]
const fn panel_vectors<S: Simd>() -> usize {
    if S::WIDE_FILE { 3 } else { 2 }
}

/// Rows at a time.
#[inline(always)]
const fn row_count<S: Simd>() -> usize {
    if S::WIDE_FILE { 8 } else { 4 }
}

/// How an element of the input and a vector of the weight are multiplied.
///
/// # Safety
/// All methods: the machine must have the instructions of `S`, and pointers be valid for what is read.
pub(super) trait Factors {
    /// Of the input.
    type Given: Copy;
    /// Of the packed weight.
    type Stored: Copy;
    /// Elements of each that are multiplied at once.
    const DEPTH: usize;
    /// As these, of a panel that was [unpacked](Self::unpack).
    type Unpacked: Factors<Given = Self::Given>;
    /// Whether a panel that meets many rows is unpacked before.
    const UNPACKS: bool = false;

    unsafe fn load<S: Simd>(from: *const Self::Stored) -> S::V;
    unsafe fn multiply<S: Simd>(sum: S::V, given: *const Self::Given, stored: S::V) -> S::V;

    /// Unpacks so many elements, a multiple of the lanes, to where [`Self::Unpacked`] reads them.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(from: *const Self::Stored, count: usize, to: *mut f32) {
        let _ = (from, count, to);
    }
}

/// Dot products of pairs.
pub(super) struct Pairs;

impl Factors for Pairs {
    type Given = u16;
    type Stored = u16;
    const DEPTH: usize = 2;
    type Unpacked = Self;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u16) -> S::V {
        // SAFETY: as promised by the caller: twice as many halves as lanes.
        unsafe { S::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn multiply<S: Simd>(sum: S::V, given: *const u16, stored: S::V) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::dot_bf16_pair(sum, given.cast::<u32>().read_unaligned(), stored) }
    }
}

/// Products in fp32, of weights held as `E`.
pub(super) struct Lanes<E>(PhantomData<E>);

impl<E: Element> Factors for Lanes<E> {
    type Given = f32;
    type Stored = E;
    const DEPTH: usize = 1;
    type Unpacked = Lanes<f32>;
    const UNPACKS: bool = !matches!(E::DTYPE, Dtype::F32);

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const E) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { E::load::<S>(from) }
    }

    #[inline(always)]
    unsafe fn multiply<S: Simd>(sum: S::V, given: *const f32, stored: S::V) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::mul_add(S::splat(*given), stored, sum) }
    }

    #[inline(always)]
    unsafe fn unpack<S: Simd>(from: *const E, count: usize, to: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe {
            for at in (0..count).step_by(S::LANES) {
                S::store(to.add(at), E::load::<S>(from.add(at)));
            }
        }
    }
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
        let Scratch { sums, unpacked, .. } = scratch;
        let sums = sums.room(ROWS_AT_ONCE * width);
        let unpacked = if unpacks { unpacked.room(block * width) } else { std::ptr::null_mut() };
        // SAFETY: all within the tensors, the packed weight and the scratch.
        unsafe {
            let given = Given::<F::Given> {
                start: self.input.data.cast_const().cast(),
                stride: self.input.row_stride,
            };
            for panel in panels {
                let weights = linear.packed.start().add(panel * linear.panel).cast_const();
                for first in (0..self.input.rows).step_by(ROWS_AT_ONCE) {
                    let rows = first..self.input.rows.min(first + ROWS_AT_ONCE);
                    // Rows after the first ones find the panel near.
                    let is_first = first == 0;
                    for start in (0..steps).step_by(block) {
                        let count = block.min(steps - start);
                        let weights = weights.add(start * step_bytes);
                        let bytes = count * step_bytes;
                        let calls = rows.len().div_ceil(row_count::<S>());
                        let lines = if is_first { bytes.div_ceil(64).div_ceil(calls) } else { 0 };
                        let mut ahead =
                            Ahead { next: weights.wrapping_add(if few { 4096 } else { bytes }), lines };
                        if unpacks {
                            F::unpack::<S>(weights.cast(), count * width, unpacked);
                        }
                        let mut at = rows.start;
                        while at < rows.end {
                            let given = Given {
                                start: given.start.add(at * given.stride + start * F::DEPTH),
                                stride: given.stride,
                            };
                            let sums = sums.add((at - rows.start) * width);
                            let (left, adds) = (rows.end - at, start > 0);
                            at += if unpacks {
                                let weights = unpacked.cast_const().cast();
                                some_rows::<S, F::Unpacked, VECTORS>(
                                    left, given, weights, count, sums, adds, ahead,
                                )
                            } else {
                                some_rows::<S, F, VECTORS>(
                                    left,
                                    given,
                                    weights.cast(),
                                    count,
                                    sums,
                                    adds,
                                    ahead,
                                )
                            };
                            ahead.next = ahead.next.wrapping_add(64 * lines);
                        }
                    }
                    self.write::<S>(sums, rows, panel);
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

/// As many of the rows as are computed at a time; returns how many.
#[inline(always)]
unsafe fn some_rows<S: Simd, F: Factors, const VECTORS: usize>(
    rows: usize,
    given: Given<F::Given>,
    weights: *const F::Stored,
    steps: usize,
    sums: *mut f32,
    adds: bool,
    ahead: Ahead,
) -> usize {
    // SAFETY: as promised by the caller.
    unsafe {
        match rows {
            1 => block::<S, F, VECTORS, 1>(given, weights, steps, sums, adds, ahead),
            2 => block::<S, F, VECTORS, 2>(given, weights, steps, sums, adds, ahead),
            3 => block::<S, F, VECTORS, 3>(given, weights, steps, sums, adds, ahead),
            4 => block::<S, F, VECTORS, 4>(given, weights, steps, sums, adds, ahead),
            _ if !S::WIDE_FILE => block::<S, F, VECTORS, 4>(given, weights, steps, sums, adds, ahead),
            5 => block::<S, F, VECTORS, 5>(given, weights, steps, sums, adds, ahead),
            6 => block::<S, F, VECTORS, 6>(given, weights, steps, sums, adds, ahead),
            7 => block::<S, F, VECTORS, 7>(given, weights, steps, sums, adds, ahead),
            _ => block::<S, F, VECTORS, 8>(given, weights, steps, sums, adds, ahead),
        }
    }
}

/// `ROWS` rows times a panel, over `steps` of the input's columns; returns `ROWS`.
#[inline(always)]
unsafe fn block<S: Simd, F: Factors, const VECTORS: usize, const ROWS: usize>(
    given: Given<F::Given>,
    weights: *const F::Stored,
    steps: usize,
    sums: *mut f32,
    adds: bool,
    ahead: Ahead,
) -> usize {
    let width = VECTORS * S::LANES;
    // SAFETY: as promised by the caller.
    unsafe {
        let mut totals = [[S::splat(0.0); VECTORS]; ROWS];
        if adds {
            for (row, totals) in totals.iter_mut().enumerate() {
                for (vector, total) in totals.iter_mut().enumerate() {
                    *total = S::load(sums.add(row * width + vector * S::LANES));
                }
            }
        }
        let mut asked = 0;
        let at_a_time = ahead.lines.div_ceil(steps);
        for step in 0..steps {
            let from = weights.add(step * width * F::DEPTH);
            let mut stored = [S::splat(0.0); VECTORS];
            for (vector, stored) in stored.iter_mut().enumerate() {
                *stored = F::load::<S>(from.add(vector * S::LANES * F::DEPTH));
            }
            let until = ahead.lines.min(asked + at_a_time);
            while asked < until {
                S::prefetch(ahead.next.wrapping_add(64 * asked));
                asked += 1;
            }
            if ROWS > 1 && step.is_multiple_of(64 / size_of::<F::Given>() / F::DEPTH) {
                for row in ROWS..2 * ROWS {
                    let soon = given.start.wrapping_add(row * given.stride + step * F::DEPTH);
                    S::prefetch_near(soon.cast());
                }
            }
            for (row, totals) in totals.iter_mut().enumerate() {
                let given = given.start.add(row * given.stride + step * F::DEPTH);
                for (total, &stored) in totals.iter_mut().zip(&stored) {
                    *total = F::multiply::<S>(*total, given, stored);
                }
            }
        }
        for (row, totals) in totals.iter().enumerate() {
            for (vector, total) in totals.iter().enumerate() {
                S::store(sums.add(row * width + vector * S::LANES), *total);
            }
        }
    }
    ROWS
}
