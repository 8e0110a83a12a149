//! What matrix products multiply: numbers in fp32, 16-bit numbers unpacked, or pairs of bf16.

use std::marker::PhantomData;

use crate::element::{Dtype, Element};
use crate::simd::Simd;

/// How an element of the left side of a matrix product and a vector of the right side are multiplied: an input and a
/// packed weight, or queries and keys.
///
/// # Safety
/// All methods: the machine must have the instructions of `S`, and pointers be valid for what is read.
pub(crate) trait Factors: Copy {
    /// Of the left side.
    type Given: Copy;
    /// Of the right side.
    type Stored: Copy;
    /// Elements of each that are multiplied at once.
    const DEPTH: usize;
    /// As these, of a right side that was [unpacked](Self::unpack).
    type Unpacked: Factors<Given = Self::Given>;
    /// Whether a right side that meets many rows is unpacked before.
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
#[derive(Clone, Copy)]
pub(crate) struct Pairs;

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
#[derive(Clone, Copy)]
pub(crate) struct Lanes<E>(PhantomData<E>);

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
