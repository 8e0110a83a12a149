//! Scores to weights, some keys at a time: the softmax with a running largest score.

use std::f32::consts::LOG2_E;

use crate::element::Element;
use crate::math::{exp2, tanh};
use crate::simd::Simd;

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

/// Turns the products of a query with some keys into their weights, in place, and returns what the sum of V so far is
/// to be multiplied with. Products outside `visible` give weight zero.
///
/// # Safety
/// The machine must have the instructions of `S`; `scores` must be valid for `count` numbers rounded up to a whole
/// vector.
#[inline(always)]
pub(crate) unsafe fn weigh<S: Simd>(
    scores: *mut f32,
    count: usize,
    visible: std::ops::Range<usize>,
    form: Form,
    running: &mut Running,
) -> f32 {
    let padded = count.next_multiple_of(S::LANES);
    // SAFETY: in bounds, as promised by the caller.
    unsafe {
        for index in (0..visible.start.min(padded)).chain(visible.end..padded) {
            scores.add(index).write(f32::NEG_INFINITY);
        }
        // What the numbers that stand there are multiplied with to be exponents of two.
        let mut unit = form.scale * LOG2_E;
        let mut largest = S::splat(f32::NEG_INFINITY);
        if form.softcap.is_none() && unit > 0.0 {
            for index in (0..padded).step_by(S::LANES) {
                largest = S::max(largest, S::load(scores.add(index)));
            }
        } else {
            unit = LOG2_E;
            let scale = S::splat(form.scale);
            for index in (0..padded).step_by(S::LANES) {
                let at = scores.add(index);
                let product = S::load(at);
                let mut score = S::mul(product, scale);
                if let Some(cap) = form.softcap {
                    let cap = S::splat(cap);
                    score = S::mul(cap, tanh::<S>(S::div(score, cap)));
                }
                // What is not visible stays so.
                score = S::if_less(product, S::splat(f32::MIN), product, score);
                S::store(at, score);
                largest = S::max(largest, score);
            }
        }
        let before = running.largest;
        let mut now = before.max(S::largest(largest) * unit);
        if now == f32::NEG_INFINITY {
            // Nothing is visible yet; or what is, is no number, which a largest lane may not show.
            if (0..count).any(|index| (*scores.add(index)).is_nan()) {
                now = f32::NAN;
            }
        }
        if now == f32::NEG_INFINITY {
            for index in (0..padded).step_by(S::LANES) {
                S::store(scores.add(index), S::splat(0.0));
            }
            return 1.0;
        }
        let (unit, shift) = (S::splat(unit), S::splat(now));
        let mut sum = S::splat(0.0);
        for index in (0..padded).step_by(S::LANES) {
            let at = scores.add(index);
            // Rounded before it is subtracted, as the largest was: fused, the largest of huge scores would lie above itself.
            let weight = exp2::<S>(S::sub(S::mul(S::load(at), unit), shift));
            S::store(at, weight);
            sum = S::add(sum, weight);
        }
        let factor = if before == now { 1.0 } else { (before - now).exp2() };
        *running = Running { largest: now, sum: running.sum * factor + S::sum(sum) };
        factor
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

    struct Weigh<'a> {
        scores: &'a mut [f32; 32],
        form: Form,
        running: &'a mut Running,
    }

    impl Kernel for Weigh<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            // SAFETY: the scores are whole vectors.
            unsafe { weigh::<S>(self.scores.as_mut_ptr(), 32, 0..32, self.form, self.running) };
        }
    }

    #[test]
    fn huge_scores_have_weights_of_at_most_one() {
        for isa in Isa::available() {
            for (size, softcap) in [(1.0, None), (1e4, None), (1e12, None), (3e37, None), (1e12, Some(1e11))]
            {
                for scale in [0.125, 1.0, -0.37] {
                    let mut scores: [f32; 32] = std::array::from_fn(|at| (at as f32 * 0.7).sin() * size);
                    let mut running = Running::NONE;
                    let form = Form { scale, softcap };
                    // SAFETY: the machine has the instructions.
                    unsafe { run(isa, Weigh { scores: &mut scores, form, running: &mut running }) };
                    let largest = scores.iter().copied().fold(0.0, f32::max);
                    assert!((largest - 1.0).abs() < 1e-6, "{isa}, {size}, {scale}: {largest}");
                    assert!(
                        scores.iter().all(|weight| (0.0..1.000_001).contains(weight)),
                        "{isa}: {scores:?}"
                    );
                    assert!((1.0..32.1).contains(&running.sum), "{isa}: {}", running.sum);
                }
            }
        }
    }
}
