//! The vectors that every 64-bit ARM has.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each block is one or few instructions, whose need is the trait's promise"
)]

use std::arch::aarch64::*;

use half::f16;

use super::Simd;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon;

impl Simd for Neon {
    const LANES: usize = 4;
    const WIDE_FILE: bool = true;
    type V = float32x4_t;

    #[inline(always)]
    unsafe fn splat(value: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: float32x4_t) {
        unsafe { vst1q_f32(to, value) }
    }

    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmaxq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    unsafe fn sqrt(value: float32x4_t) -> float32x4_t {
        unsafe { vsqrtq_f32(value) }
    }

    #[inline(always)]
    unsafe fn round(value: float32x4_t) -> float32x4_t {
        unsafe { vrndnq_f32(value) }
    }

    #[inline(always)]
    unsafe fn exp2_whole(value: float32x4_t) -> float32x4_t {
        unsafe {
            let exponent = vaddq_s32(vcvtq_s32_f32(value), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        }
    }

    #[inline(always)]
    unsafe fn abs(value: float32x4_t) -> float32x4_t {
        unsafe { vabsq_f32(value) }
    }

    #[inline(always)]
    unsafe fn if_less(
        a: float32x4_t,
        b: float32x4_t,
        then: float32x4_t,
        otherwise: float32x4_t,
    ) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_f32(a, b), then, otherwise) }
    }

    #[inline(always)]
    unsafe fn sums(values: [float32x4_t; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = values;
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
            out
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> float32x4_t {
        // The conversion of fp16 vectors is not in stable Rust; of four at a time it is in `half`.
        let lanes: [f32; 4] = std::array::from_fn(|lane| f16::from_bits(unsafe { *from.add(lane) }).to_f32());
        unsafe { vld1q_f32(lanes.as_ptr()) }
    }
}
