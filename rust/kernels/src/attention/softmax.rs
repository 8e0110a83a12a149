//! Scores to weights, some keys at a time: the softmax with a running largest score.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::plan::KEYS;
use crate::element::Element;
use crate::math::{exp2, tanh};
use crate::simd::Simd;

/// Rows whose lanes are joined at once.
const TOGETHER: usize = 4;

/// How a call makes its scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// What is kept of the keys so far, beside the weighted sum of V. Weights are powers of two: scores are taken times
/// log2 e.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Running {
    /// The largest score; minus infinity before the first.
    pub largest: f32,
    /// The sum of weights, each relative to the largest.
    pub sum: f32,
}

impl Running {
    pub const NONE: Self = Self { largest: f32::NEG_INFINITY, sum: 0.0 };
}

/// Products of some rows of queries with some keys, to be turned into weights, and what is kept of the rows.
#[derive(Clone, Copy)]
pub(crate) struct Scores {
    /// Rows are `KEYS` apart.
    pub scores: *mut f32,
    pub rows: usize,
    pub count: usize,
    pub form: Form,
    /// One for each row.
    pub running: *mut Running,
    /// The sum of V so far of each row, in whole vectors: it is made to fit a score larger than all before.
    pub sums: *mut f32,
    pub width: usize,
}

impl Scores {
    /// Turns products into weights, in place. Products outside what is `visible` to a row give weight zero.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`; scores must be valid for `count` numbers rounded up to a whole
    /// vector in every row, the others for what they say.
    #[inline(always)]
    pub unsafe fn weigh<S: Simd>(self, visible: impl Fn(usize) -> Range<usize>) {
        // SAFETY: as promised by the caller.
        unsafe { self.weigh_to::<S, false>(visible, std::ptr::null_mut(), 0) }
    }

    /// As `weigh`, with weights rounded to bf16, in rows apart by the stride. They may overlay the scores: none is
    /// written beyond the scores that were read.
    ///
    /// # Safety
    /// As for `weigh`; the weights must have room as the scores have.
    #[inline(always)]
    pub unsafe fn weigh_bf16<S: Simd>(
        self,
        visible: impl Fn(usize) -> Range<usize>,
        weights: *mut u16,
        stride: usize,
    ) {
        // SAFETY: as promised by the caller.
        unsafe { self.weigh_to::<S, true>(visible, weights, stride) }
    }

    #[inline(always)]
    unsafe fn weigh_to<S: Simd, const BF16: bool>(
        self,
        visible: impl Fn(usize) -> Range<usize>,
        weights: *mut u16,
        stride: usize,
    ) {
        // Four rows together: their lanes are joined in a few instructions.
        for first in (0..self.rows).step_by(TOGETHER) {
            let rows = TOGETHER.min(self.rows - first);
            // SAFETY: in bounds, as promised by the caller.
            unsafe {
                // What the numbers that stand there are multiplied with to be exponents of two.
                let mut unit = 0.0;
                let mut largest = [S::splat(f32::NEG_INFINITY); TOGETHER];
                for (index, largest) in largest.iter_mut().enumerate().take(rows) {
                    self.hide::<S>(first + index, visible(first + index));
                    (*largest, unit) = self.largest::<S>(first + index);
                }
                let largest = S::largests(largest);
                let mut factors = [1.0; TOGETHER];
                let mut sum = [S::splat(0.0); TOGETHER];
                for index in 0..rows {
                    let row = first + index;
                    let running = &mut *self.running.add(row);
                    let before = running.largest;
                    let mut now = before.max(largest[index] * unit);
                    if now == f32::NEG_INFINITY {
                        // Nothing is visible yet; or what is, is no number, which a largest lane may not show.
                        if (0..self.count).any(|at| (*self.at(row).add(at)).is_nan()) {
                            now = f32::NAN;
                        }
                    }
                    // Where nothing is visible, all weights are zero, whatever is subtracted.
                    let shift = if now == f32::NEG_INFINITY { 0.0 } else { now };
                    let (unit, shift) = (S::splat(unit), S::splat(shift));
                    for at in (0..self.count).step_by(S::LANES) {
                        let score = self.at(row).add(at);
                        // Rounded before it is subtracted, as the largest was: fused, the largest of huge scores would
                        // lie above itself.
                        let weight = exp2::<S>(S::sub(S::mul(S::load(score), unit), shift));
                        match BF16 {
                            true => S::store_bf16(weights.add(row * stride + at), weight),
                            false => S::store(score, weight),
                        }
                        sum[index] = S::add(sum[index], weight);
                    }
                    if before != now {
                        factors[index] = (before - now).exp2();
                        scale_row::<S>(self.sums.add(row * self.width), self.width, factors[index]);
                    }
                    running.largest = now;
                }
                let sum = S::sums(sum);
                for index in 0..rows {
                    let running = &mut *self.running.add(first + index);
                    running.sum = running.sum * factors[index] + sum[index];
                }
            }
        }
    }

    #[inline(always)]
    fn at(&self, row: usize) -> *mut f32 {
        self.scores.wrapping_add(row * KEYS)
    }

    /// Makes the scores of a row outside `visible` the lowest.
    #[inline(always)]
    unsafe fn hide<S: Simd>(&self, row: usize, visible: Range<usize>) {
        let padded = self.count.next_multiple_of(S::LANES);
        for index in (0..visible.start.min(padded)).chain(visible.end..padded) {
            // SAFETY: in bounds, as promised by the caller.
            unsafe { self.at(row).add(index).write(f32::NEG_INFINITY) };
        }
    }

    /// The largest of a row in each lane, and what the scores are to be multiplied with to be exponents of two. Makes
    /// scores of products first, where that takes more than a multiplication.
    #[inline(always)]
    unsafe fn largest<S: Simd>(&self, row: usize) -> (S::V, f32) {
        let Form { scale, softcap } = self.form;
        // SAFETY: in bounds, as promised by the caller.
        unsafe {
            let mut largest = S::splat(f32::NEG_INFINITY);
            if softcap.is_none() && scale > 0.0 {
                for at in (0..self.count).step_by(S::LANES) {
                    largest = S::max(largest, S::load(self.at(row).add(at)));
                }
                return (largest, scale * LOG2_E);
            }
            for at in (0..self.count).step_by(S::LANES) {
                let at = self.at(row).add(at);
                let product = S::load(at);
                let mut score = S::mul(product, S::splat(scale));
                if let Some(cap) = softcap {
                    let cap = S::splat(cap);
                    score = S::mul(cap, tanh::<S>(S::div(score, cap)));
                }
                // What is not visible stays so.
                score = S::if_less(product, S::splat(f32::MIN), product, score);
                S::store(at, score);
                largest = S::max(largest, score);
            }
            (largest, LOG2_E)
        }
    }
}

/// Multiplies a row of whole vectors.
///
/// # Safety
/// The machine must have the instructions of `S`; `row` must be valid for `len` numbers, a multiple of the lanes.
#[inline(always)]
pub(crate) unsafe fn scale_row<S: Simd>(row: *mut f32, len: usize, factor: f32) {
    // SAFETY: in bounds, as promised by the caller.
    unsafe {
        let factor = S::splat(factor);
        for index in (0..len).step_by(S::LANES) {
            let at = row.add(index);
            S::store(at, S::mul(S::load(at), factor));
        }
    }
}

/// Writes a result: the weighted sum of V over the sum of weights, the sink's among them.
///
/// # Safety
/// The machine must have the instructions of `S`; `sum` must be valid for `size` numbers rounded up to a whole vector,
/// `out` for `size`.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd, E: Element>(
    sum: *const f32,
    running: Running,
    sink: Option<f32>,
    out: *mut E,
    size: usize,
) {
    let (mut weights, mut factor) = (running.sum, 1.0);
    if let Some(sink) = sink {
        let sink = sink * LOG2_E;
        let largest = running.largest.max(sink);
        factor = (running.largest - largest).exp2();
        weights = running.sum * factor + (sink - largest).exp2();
    }
    // SAFETY: in bounds, as promised by the caller.
    unsafe {
        let factor = S::splat(factor / weights);
        for index in (0..size).step_by(S::LANES) {
            let value = S::mul(S::load(sum.add(index)), factor);
            E::store_part::<S>(out.add(index), value, S::LANES.min(size - index));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{Kernel, run};

    /// Weighs rows of `count` products, all of them visible, and returns the weights.
    struct Weigh<'a> {
        scores: &'a mut [f32],
        count: usize,
        form: Form,
        running: &'a mut [Running],
        halves: bool,
    }

    impl Kernel for Weigh<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            let rows = self.running.len();
            let mut sums = vec![1.0; rows * 16];
            let start = self.scores.as_mut_ptr();
            let scores = Scores {
                scores: start,
                rows,
                count: self.count,
                form: self.form,
                running: self.running.as_mut_ptr(),
                sums: sums.as_mut_ptr(),
                width: 16,
            };
            // SAFETY: there are as many rows of whole vectors.
            unsafe {
                if !self.halves {
                    return scores.weigh::<S>(|_| 0..self.count);
                }
                scores.weigh_bf16::<S>(|_| 0..self.count, start.cast(), 2 * KEYS);
            }
            for row in self.scores.chunks_mut(KEYS) {
                for at in (0..self.count).rev() {
                    // SAFETY: two of them lie in each number.
                    let half = unsafe { *row.as_ptr().cast::<u16>().add(at) };
                    row[at] = half::bf16::from_bits(half).to_f32();
                }
            }
        }
    }

    #[test]
    fn huge_scores_have_weights_of_at_most_one() {
        for isa in Isa::available() {
            for (size, softcap) in [(1.0, None), (1e4, None), (1e12, None), (3e37, None), (1e12, Some(1e11))]
            {
                for scale in [0.125, 1.0, -0.37] {
                    let mut scores: [f32; KEYS] = std::array::from_fn(|at| (at as f32 * 0.7).sin() * size);
                    let mut running = [Running::NONE];
                    let form = Form { scale, softcap };
                    let kernel =
                        Weigh { scores: &mut scores, count: 32, form, running: &mut running, halves: false };
                    // SAFETY: the machine has the instructions.
                    unsafe { run(isa, kernel) };
                    let scores = &scores[..32];
                    let largest = scores.iter().copied().fold(0.0, f32::max);
                    assert!((largest - 1.0).abs() < 1e-6, "{isa}, {size}, {scale}: {largest}");
                    assert!(
                        scores.iter().all(|weight| (0.0..1.000_001).contains(weight)),
                        "{isa}: {scores:?}"
                    );
                    assert!((1.0..32.1).contains(&running[0].sum), "{isa}: {}", running[0].sum);
                }
            }
        }
    }

    #[test]
    fn rows_are_weighed_each_by_itself_and_halves_overlay_the_scores() {
        let form = Form { scale: 0.5, softcap: None };
        for isa in Isa::available() {
            for (rows, count) in [(1, 64), (2, 16), (3, 17), (4, 64), (5, 40), (7, 1), (9, 63)] {
                let product = |row: usize, at: usize| ((row * 67 + at * 13) as f32 * 0.37).sin() * 9.0;
                let mut scores = vec![0.0; rows * KEYS];
                let mut running = vec![Running { largest: 2.0, sum: 3.0 }; rows];
                for halves in [false, true] {
                    for (index, score) in scores.iter_mut().enumerate() {
                        *score = product(index / KEYS, index % KEYS);
                    }
                    running.fill(Running { largest: 2.0, sum: 3.0 });
                    let kernel = Weigh { scores: &mut scores, count, form, running: &mut running, halves };
                    // SAFETY: the machine has the instructions.
                    unsafe { run(isa, kernel) };
                    for row in 0..rows {
                        let exponents: Vec<f64> = (0..count)
                            .map(|at| f64::from(product(row, at)) * 0.5 * std::f64::consts::LOG2_E)
                            .collect();
                        let largest = exponents.iter().copied().fold(2.0, f64::max);
                        let weights: Vec<f64> = exponents.iter().map(|x| (x - largest).exp2()).collect();
                        let sum = 3.0 * (2.0 - largest).exp2() + weights.iter().sum::<f64>();
                        let bound = if halves { 1.0 / 256.0 } else { 1e-5 };
                        for (at, weight) in weights.iter().enumerate() {
                            let found = f64::from(scores[row * KEYS + at]);
                            assert!(
                                (found - weight).abs() <= bound * weight,
                                "{isa}, row {row}, {at}: {found}, {weight}"
                            );
                        }
                        let Running { largest: kept, sum: found } = running[row];
                        assert!((f64::from(kept) - largest).abs() < 1e-5, "{isa}: {kept}, {largest}");
                        assert!((f64::from(found) - sum).abs() < 1e-5 * sum, "{isa}: {found}, {sum}");
                    }
                }
            }
        }
    }
}
