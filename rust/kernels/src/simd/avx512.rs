//! AVX-512, with or without the dot products of bf16 pairs.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each block is one or few instructions, whose need is the trait's promise"
)]

use std::arch::x86_64::*;

use super::Simd;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const BF16: bool>;

impl<const BF16: bool> Simd for Avx512<BF16> {
    const LANES: usize = 16;
    const WIDE_FILE: bool = true;
    const DOT_BF16: bool = BF16;
    type V = __m512;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        unsafe { _mm512_storeu_ps(to, value) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sqrt(value: __m512) -> __m512 {
        unsafe { _mm512_sqrt_ps(value) }
    }

    #[inline(always)]
    unsafe fn round(value: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(value) }
    }

    #[inline(always)]
    unsafe fn exp2_whole(value: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(_mm512_set1_ps(1.0), value) }
    }

    #[inline(always)]
    unsafe fn times_exp2(value: __m512, whole: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(value, whole) }
    }

    #[inline(always)]
    unsafe fn abs(value: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(value) }
    }

    #[inline(always)]
    unsafe fn if_less(a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), otherwise, then) }
    }

    #[inline(always)]
    unsafe fn sums(values: [__m512; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = values.map(|value| {
                _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps::<1>(value))
            });
            let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        }
    }

    #[inline(always)]
    unsafe fn largests(values: [__m512; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = values.map(|value| {
                let half = _mm256_max_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps::<1>(value));
                _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half))
            });
            // Lanes of two and two vectors side by side, then of all four.
            let ab = _mm_max_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
            let cd = _mm_max_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
            let largest = _mm_max_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), largest);
            out
        }
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_near(from: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn dot_bf16(sum: __m512, a: *const u16, b: *const u16) -> __m512 {
        unsafe {
            let a: __m512bh = std::mem::transmute(_mm512_loadu_si512(a.cast()));
            let b: __m512bh = std::mem::transmute(_mm512_loadu_si512(b.cast()));
            _mm512_dpbf16_ps(sum, a, b)
        }
    }

    #[inline(always)]
    unsafe fn dot_bf16_pair(sum: __m512, a: u32, b: __m512) -> __m512 {
        unsafe {
            let a: __m512bh = std::mem::transmute(_mm512_set1_epi32(a.cast_signed()));
            let b: __m512bh = std::mem::transmute(b);
            _mm512_dpbf16_ps(sum, a, b)
        }
    }

    #[inline(always)]
    unsafe fn round_bf16(value: __m512) -> __m512 {
        unsafe {
            let halves: __m256i = bf16_of::<BF16>(value);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }

    #[inline(always)]
    unsafe fn round_f16(value: __m512) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value)) }
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, value: __m512) {
        unsafe {
            let halves = bf16_of::<BF16>(value);
            _mm256_storeu_si256(to.cast(), halves);
        }
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, value: __m512) {
        unsafe {
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value));
        }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
    }

    #[inline(always)]
    unsafe fn sum(value: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(value) }
    }

    #[inline(always)]
    unsafe fn largest(value: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(value) }
    }
}

/// Rounded to the nearest bf16, ties to even.
#[inline(always)]
unsafe fn bf16_of<const BF16: bool>(value: __m512) -> __m256i {
    unsafe {
        if BF16 {
            std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(value))
        } else {
            // Half of the last kept bit, less one where that bit is 0: a tie goes to the even one.
            let bits = _mm512_castps_si512(value);
            let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
            // What is no number must not become infinity.
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let kept = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
            _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(kept))
        }
    }
}

/// The first `count` of 16 lanes.
#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    ((1_u32 << count) - 1) as __mmask16
}
