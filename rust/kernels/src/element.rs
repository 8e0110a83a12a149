//! What K, V, queries and results are held in. Everything is computed in fp32.

use half::{bf16, f16};

use crate::simd::Simd;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit IEEE.
    F32,
    /// The upper half of it.
    Bf16,
    /// 16-bit IEEE.
    F16,
}

impl Dtype {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// An element type, read and written as vectors of fp32.
///
/// # Safety
/// All methods: the machine must have the instructions of `S`; pointers must be valid for the lanes (or the `count`
/// elements) that a method reads or writes.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    const DTYPE: Dtype;

    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    /// The first `count` lanes, zeros in the others.
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::V;
    fn from_f32(value: f32) -> Self;
    fn to_f32(self) -> f32;

    /// Rounded to the nearest that there is.
    unsafe fn rounded<S: Simd>(value: S::V) -> S::V;

    /// Writes all lanes, rounded to the nearest.
    unsafe fn store<S: Simd>(to: *mut Self, value: S::V);

    /// Writes the first `count` lanes, rounded to the nearest.
    #[inline(always)]
    unsafe fn store_part<S: Simd>(to: *mut Self, value: S::V, count: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            if count == S::LANES {
                return Self::store::<S>(to, value);
            }
            let lanes = S::lanes(value);
            for (index, lane) in lanes[..count].iter().enumerate() {
                to.add(index).write(Self::from_f32(*lane));
            }
        }
    }
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load_part(from, count) }
    }

    #[inline(always)]
    unsafe fn rounded<S: Simd>(value: S::V) -> S::V {
        value
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, value: S::V) {
        // SAFETY: as promised by the caller.
        unsafe { S::store(to, value) }
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: as promised by the caller; the type is its 16 bits.
        unsafe { S::load_bf16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::V {
        // SAFETY: as above.
        unsafe { S::load_part_16(from.cast(), count, S::load_bf16) }
    }

    #[inline(always)]
    unsafe fn rounded<S: Simd>(value: S::V) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::round_bf16(value) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, value: S::V) {
        // SAFETY: as promised by the caller.
        unsafe { S::store_bf16(to.cast(), value) }
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: as promised by the caller; the type is its 16 bits.
        unsafe { S::load_f16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::V {
        // SAFETY: as above.
        unsafe { S::load_part_16(from.cast(), count, S::load_f16) }
    }

    #[inline(always)]
    unsafe fn rounded<S: Simd>(value: S::V) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::round_f16(value) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, value: S::V) {
        // SAFETY: as promised by the caller.
        unsafe { S::store_f16(to.cast(), value) }
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
}
