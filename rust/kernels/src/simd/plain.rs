//! Eight lanes in plain Rust, for the compiler to make of them what the machine has.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each block reads or writes one vector, as the trait's caller promises"
)]

use std::array::from_fn;

use half::{bf16, f16};

use super::Simd;

const LANES: usize = 8;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

impl Simd for Plain {
    const LANES: usize = LANES;
    const WIDE_FILE: bool = false;
    type V = [f32; LANES];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        unsafe { to.cast::<Self::V>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|lane| a[lane] - b[lane])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|lane| a[lane] / b[lane])
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Not `f32::mul_add`, which calls a function where the machine has no such instruction.
        from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    unsafe fn sqrt(value: Self::V) -> Self::V {
        value.map(f32::sqrt)
    }

    #[inline(always)]
    unsafe fn round(value: Self::V) -> Self::V {
        value.map(f32::round_ties_even)
    }

    #[inline(always)]
    unsafe fn exp2_whole(value: Self::V) -> Self::V {
        value.map(|lane| f32::from_bits(((lane as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn abs(value: Self::V) -> Self::V {
        value.map(f32::abs)
    }

    #[inline(always)]
    unsafe fn if_less(a: Self::V, b: Self::V, then: Self::V, otherwise: Self::V) -> Self::V {
        from_fn(|lane| if a[lane] < b[lane] { then[lane] } else { otherwise[lane] })
    }

    #[inline(always)]
    unsafe fn sums(values: [Self::V; 4]) -> [f32; 4] {
        values.map(|value| value.iter().sum())
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::V {
        from_fn(|lane| bf16::from_bits(unsafe { from.add(lane).read_unaligned() }).to_f32())
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::V {
        from_fn(|lane| f16::from_bits(unsafe { from.add(lane).read_unaligned() }).to_f32())
    }
}
