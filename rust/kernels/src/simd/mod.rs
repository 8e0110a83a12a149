//! Vectors of fp32 lanes, one implementation for each instruction set.
//!
//! A kernel is written once, generic over [`Simd`], and [`run`] compiles it for every instruction set: all of a kernel
//! must be inlined into the entry that enables the instructions, hence `#[inline(always)]` on every generic function.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;

use crate::isa::Isa;

/// Lanes of the widest vector.
pub(crate) const MAX_LANES: usize = 16;

/// Vectors of an instruction set.
///
/// # Safety
/// All methods: the machine must have the instructions, as it does inside [`run`]; pointers must be valid for the
/// lanes that a method reads or writes, in any alignment.
pub(crate) trait Simd: Copy + 'static {
    /// fp32 numbers of a vector; at most [`MAX_LANES`].
    const LANES: usize;
    /// Whether there are registers for 24 accumulators; else for 8.
    const WIDE_FILE: bool;
    /// Whether [`Simd::dot_bf16`] is there.
    const DOT_BF16: bool = false;
    /// A vector.
    type V: Copy;

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, value: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; where `b` is NaN, NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn sqrt(value: Self::V) -> Self::V;
    /// To the nearest whole number.
    unsafe fn round(value: Self::V) -> Self::V;
    /// 2 to the power of whole numbers from -126 to 127.
    unsafe fn exp2_whole(value: Self::V) -> Self::V;
    /// `value` times 2 to the power of whole numbers up to 127; zero for those below -126, or right. A NaN in `value` stays.
    #[inline(always)]
    unsafe fn times_exp2(value: Self::V, whole: Self::V) -> Self::V {
        // SAFETY: as promised by the caller.
        unsafe {
            let lowest = Self::splat(-126.0);
            let scaled = Self::mul(value, Self::exp2_whole(Self::max(lowest, whole)));
            Self::if_less(whole, lowest, Self::splat(0.0), scaled)
        }
    }
    unsafe fn abs(value: Self::V) -> Self::V;
    /// Lane by lane: `a < b ? then : otherwise`.
    unsafe fn if_less(a: Self::V, b: Self::V, then: Self::V, otherwise: Self::V) -> Self::V;
    /// Sums of the lanes of four vectors.
    unsafe fn sums(values: [Self::V; 4]) -> [f32; 4];
    /// The largest lane of each of four vectors.
    #[inline(always)]
    unsafe fn largests(values: [Self::V; 4]) -> [f32; 4] {
        // SAFETY: as promised by the caller.
        values.map(|value| unsafe { Self::largest(value) })
    }

    /// From bf16.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// From fp16.
    unsafe fn load_f16(from: *const u16) -> Self::V;

    /// Asks for a cache line that will be read soon, at any address.
    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        let _ = from;
    }

    /// As [`Simd::prefetch`], for a line that will be read very soon.
    #[inline(always)]
    unsafe fn prefetch_near(from: *const u8) {
        let _ = from;
    }

    /// Adds the products of twice as many pairs of bf16 as there are lanes. See [`Simd::DOT_BF16`].
    unsafe fn dot_bf16(sum: Self::V, a: *const u16, b: *const u16) -> Self::V {
        let _ = (a, b);
        sum
    }

    /// Adds, lane by lane, the products of two pairs of bf16: the same pair `a` everywhere, and those of `b`, which are
    /// held as the bits of its lanes. See [`Simd::DOT_BF16`].
    unsafe fn dot_bf16_pair(sum: Self::V, a: u32, b: Self::V) -> Self::V {
        let _ = (a, b);
        sum
    }

    /// Rounded to the nearest bf16.
    #[inline(always)]
    unsafe fn round_bf16(value: Self::V) -> Self::V {
        let mut halves = [0; MAX_LANES];
        // SAFETY: there is room for the widest vector.
        unsafe {
            Self::store_bf16(halves.as_mut_ptr(), value);
            Self::load_bf16(halves.as_ptr())
        }
    }

    /// Rounded to the nearest fp16.
    #[inline(always)]
    unsafe fn round_f16(value: Self::V) -> Self::V {
        let mut halves = [0; MAX_LANES];
        // SAFETY: as above.
        unsafe {
            Self::store_f16(halves.as_mut_ptr(), value);
            Self::load_f16(halves.as_ptr())
        }
    }

    /// As bf16, rounded to the nearest.
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, value: Self::V) {
        // SAFETY: as promised by the caller.
        unsafe {
            for (index, lane) in Self::lanes(value)[..Self::LANES].iter().enumerate() {
                to.add(index).write(half::bf16::from_f32(*lane).to_bits());
            }
        }
    }

    /// As fp16, rounded to the nearest.
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, value: Self::V) {
        // SAFETY: as promised by the caller.
        unsafe {
            for (index, lane) in Self::lanes(value)[..Self::LANES].iter().enumerate() {
                to.add(index).write(half::f16::from_f32(*lane).to_bits());
            }
        }
    }

    /// The first `count` lanes, at most all; zeros in the others. Reads nothing beyond them.
    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self::V {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: the caller's pointer is valid for `count`, which is at most the lanes.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
            Self::load(lanes.as_ptr())
        }
    }

    /// As [`Simd::load_part`], from 16-bit numbers that `load` reads.
    #[inline(always)]
    unsafe fn load_part_16(
        from: *const u16,
        count: usize,
        load: unsafe fn(*const u16) -> Self::V,
    ) -> Self::V {
        let mut lanes = [0; MAX_LANES];
        // SAFETY: as above.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
            load(lanes.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn lanes(value: Self::V) -> [f32; MAX_LANES] {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: there is room for the widest vector.
        unsafe { Self::store(lanes.as_mut_ptr(), value) };
        lanes
    }

    /// The sum of the lanes.
    #[inline(always)]
    unsafe fn sum(value: Self::V) -> f32 {
        // SAFETY: as promised by the caller.
        let lanes = unsafe { Self::lanes(value) };
        lanes[..Self::LANES].iter().sum()
    }

    /// The largest lane.
    #[inline(always)]
    unsafe fn largest(value: Self::V) -> f32 {
        // SAFETY: as promised by the caller.
        let lanes = unsafe { Self::lanes(value) };
        lanes[..Self::LANES].iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }
}

/// A computation that is compiled for every instruction set.
pub(crate) trait Kernel {
    /// Computes it. To be inlined always.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`, and whatever the kernel asks for.
    unsafe fn run<S: Simd>(self);
}

/// Runs a kernel with an instruction set.
///
/// # Safety
/// The machine must have it ([`Isa::runs_here`]), and whatever the kernel asks for.
pub(crate) unsafe fn run<K: Kernel>(isa: Isa, kernel: K) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn with_avx512_bf16<K: Kernel>(kernel: K) {
        // SAFETY: enabled here.
        unsafe { kernel.run::<avx512::Avx512<true>>() }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn with_avx512<K: Kernel>(kernel: K) {
        // SAFETY: enabled here.
        unsafe { kernel.run::<avx512::Avx512<false>>() }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn with_avx2<K: Kernel>(kernel: K) {
        // SAFETY: enabled here.
        unsafe { kernel.run::<avx2::Avx2>() }
    }

    // SAFETY: the machine has it, as promised.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::AmxBf16 | Isa::Avx512Bf16 => with_avx512_bf16(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => with_avx512(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => with_avx2(kernel),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => kernel.run::<neon::Neon>(),
            _ => kernel.run::<plain::Plain>(),
        }
    }
}
