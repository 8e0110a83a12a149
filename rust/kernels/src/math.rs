//! Functions of vectors. Constants are those of Cephes' single-precision `expf` and `tanhf`, but for `exp2`.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "arithmetic on vectors, whose need is the caller's promise"
)]

use crate::simd::Simd;

/// Below it the exponential is taken as zero: its result would be no normal number.
const LOWEST: f32 = -87.336_54;

/// e to the power of `x`, at most 88; within 2 units in the last place. Zero for what is no normal number, minus
/// infinity among them; NaN stays NaN.
///
/// # Safety
/// The machine must have the instructions of `S`.
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "as published")]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    unsafe {
        let zero = S::splat(0.0);
        let lowest = S::splat(LOWEST);
        let bounded = S::max(lowest, x);
        let whole = S::round(S::mul(bounded, S::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, so that the difference is exact.
        let rest = S::mul_add(whole, S::splat(-0.693_359_375), bounded);
        let rest = S::mul_add(whole, S::splat(2.121_944_4e-4), rest);
        let mut series = S::splat(1.987_569_15e-4);
        for coefficient in [
            1.398_199_950_7e-3,
            8.333_451_907_3e-3,
            4.166_579_589_4e-2,
            1.666_666_545_9e-1,
            5.000_000_120_1e-1,
        ] {
            series = S::mul_add(series, rest, S::splat(coefficient));
        }
        let power = S::mul_add(S::mul(rest, rest), series, S::add(rest, S::splat(1.0)));
        S::if_less(x, lowest, zero, S::mul(power, S::exp2_whole(whole)))
    }
}

/// Two to the power of `x`, at most 127; within 2 units in the last place. Zero from -150 downwards; what is no normal
/// number may be zero or right. NaN stays NaN.
///
/// The series is a fit of least relative error (less than a thirtieth of a unit) over exponents from -0.5 to 0.5; 2^0 is
/// exactly 1.
///
/// # Safety
/// The machine must have the instructions of `S`.
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "as fitted")]
pub(crate) unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    unsafe {
        let bounded = S::max(S::splat(-160.0), x);
        let whole = S::round(bounded);
        let rest = S::sub(bounded, whole);
        let mut series = S::splat(1.534_581_242_6e-4);
        for coefficient in [
            1.339_993_090_3e-3,
            9.618_489_071_7e-3,
            5.550_328_642_1e-2,
            2.402_264_624_8e-1,
            6.931_471_824_6e-1,
            1.0,
        ] {
            series = S::mul_add(series, rest, S::splat(coefficient));
        }
        S::times_exp2(series, whole)
    }
}

/// The hyperbolic tangent, within 3 units in the last place; NaN stays NaN.
///
/// # Safety
/// The machine must have the instructions of `S`.
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "as published")]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    unsafe {
        let size = S::abs(x);
        let square = S::mul(x, x);
        let mut series = S::splat(-5.704_988_727_45e-3);
        for coefficient in
            [2.063_908_879_54e-2, -5.373_971_555_31e-2, 1.333_144_220_36e-1, -3.333_328_194_22e-1]
        {
            series = S::mul_add(series, square, S::splat(coefficient));
        }
        let small = S::mul_add(S::mul(series, square), x, x);
        // From 9.02 on it is 1 in single precision; the bound keeps the exponential finite.
        let doubled = S::sub(S::splat(0.0), S::max(S::splat(-40.0), S::mul(S::splat(-2.0), size)));
        let large = S::sub(S::splat(1.0), S::div(S::splat(2.0), S::add(exp::<S>(doubled), S::splat(1.0))));
        let signed = S::if_less(x, S::splat(0.0), S::sub(S::splat(0.0), large), large);
        S::if_less(size, S::splat(0.625), small, signed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{Kernel, MAX_LANES, run};

    struct Both<'a> {
        x: &'a [f32; MAX_LANES],
        exp: &'a mut [f32; MAX_LANES],
        tanh: &'a mut [f32; MAX_LANES],
    }

    struct PowersOfTwo<'a> {
        x: &'a [f32; MAX_LANES],
        exp2: &'a mut [f32; MAX_LANES],
    }

    impl Kernel for PowersOfTwo<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for start in (0..MAX_LANES).step_by(S::LANES) {
                unsafe {
                    let x = S::load(self.x.as_ptr().add(start));
                    S::store(self.exp2.as_mut_ptr().add(start), exp2::<S>(x));
                }
            }
        }
    }

    fn powers_of_two(isa: Isa, x: &[f32; MAX_LANES]) -> [f32; MAX_LANES] {
        let mut exp2 = [f32::NAN; MAX_LANES];
        unsafe { run(isa, PowersOfTwo { x, exp2: &mut exp2 }) };
        exp2
    }

    #[test]
    fn powers_of_two_are_right_to_two_units_in_the_last_place() {
        for isa in Isa::available() {
            let mut x = -126.4_f32;
            while x < 126.9 {
                let inputs: [f32; MAX_LANES] = std::array::from_fn(|lane| x + 0.0007 * lane as f32);
                for (got, x) in powers_of_two(isa, &inputs).into_iter().zip(inputs) {
                    let right = f64::from(x).exp2();
                    if x < -126.0 {
                        assert!(got == 0.0 || ulps(got, right) <= 2.0, "{isa}: exp2({x}) = {got}");
                    } else {
                        assert!(ulps(got, right) <= 2.0, "{isa}: exp2({x}) = {got}");
                    }
                }
                x += 0.0113;
            }
            for whole in -126..=127 {
                assert_eq!(
                    powers_of_two(isa, &[whole as f32; MAX_LANES]),
                    [(whole as f32).exp2(); MAX_LANES]
                );
            }
            for x in [-150.0, -151.3, -1e4, f32::MIN, f32::NEG_INFINITY] {
                assert_eq!(powers_of_two(isa, &[x; MAX_LANES]), [0.0; MAX_LANES], "{isa}: exp2({x})");
            }
            assert!(powers_of_two(isa, &[f32::NAN; MAX_LANES]).iter().all(|got| got.is_nan()), "{isa}");
        }
    }

    impl Kernel for Both<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for start in (0..MAX_LANES).step_by(S::LANES) {
                unsafe {
                    let x = S::load(self.x.as_ptr().add(start));
                    S::store(self.exp.as_mut_ptr().add(start), exp::<S>(x));
                    S::store(self.tanh.as_mut_ptr().add(start), tanh::<S>(x));
                }
            }
        }
    }

    /// Distance in units in the last place of the right result.
    fn ulps(got: f32, right: f64) -> f64 {
        let unit = f64::from((right as f32).abs().next_up()) - f64::from((right as f32).abs());
        (f64::from(got) - right).abs() / unit
    }

    #[test]
    fn they_are_right_to_a_few_units_in_the_last_place() {
        for isa in Isa::available() {
            let mut x = -95.0_f32;
            while x < 88.0 {
                let inputs: [f32; MAX_LANES] = std::array::from_fn(|lane| x + 0.0007 * lane as f32);
                let (mut exps, mut tanhs) = ([f32::NAN; MAX_LANES], [f32::NAN; MAX_LANES]);
                unsafe { run(isa, Both { x: &inputs, exp: &mut exps, tanh: &mut tanhs }) };
                for lane in 0..MAX_LANES {
                    let right = f64::from(inputs[lane]).exp();
                    if inputs[lane] < LOWEST {
                        assert!(exps[lane] == 0.0, "{isa}: exp({})", inputs[lane]);
                    } else {
                        assert!(ulps(exps[lane], right) <= 2.0, "{isa}: exp({})", inputs[lane]);
                    }
                    let right = f64::from(inputs[lane]).tanh();
                    assert!(
                        ulps(tanhs[lane], right) <= 3.0,
                        "{isa}: tanh({}) = {}",
                        inputs[lane],
                        tanhs[lane]
                    );
                }
                x += 0.0113;
            }
        }
    }

    #[test]
    fn the_exponential_of_minus_infinity_is_zero() {
        for isa in Isa::available() {
            let (mut exps, mut tanhs) = ([f32::NAN; MAX_LANES], [f32::NAN; MAX_LANES]);
            unsafe {
                run(isa, Both { x: &[f32::NEG_INFINITY; MAX_LANES], exp: &mut exps, tanh: &mut tanhs })
            };
            assert_eq!(exps, [0.0; MAX_LANES]);
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        for isa in Isa::available() {
            let (mut exps, mut tanhs) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
            unsafe { run(isa, Both { x: &[f32::NAN; MAX_LANES], exp: &mut exps, tanh: &mut tanhs }) };
            assert!(exps.iter().chain(&tanhs).all(|value| value.is_nan()), "{isa}");
        }
    }
}
