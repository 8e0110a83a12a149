//! The place of the largest element of each row: the token that greedy decoding chooses.

use std::marker::PhantomData;

use half::{bf16, f16};

use crate::attention::Invalid;
use crate::element::{Dtype, Element};
use crate::isa::Isa;
use crate::linear::Matrix;
use crate::simd::{self, Kernel, Simd};
use crate::team::Team;

/// Vectors whose largest element is known before that of the next ones.
const STRETCH: usize = 32;

/// Writes the column of each row's largest element: the first of equals, and the first that is no number before all
/// others, as torch has it.
///
/// # Errors
/// Rows without elements, another number of results than of rows, or an instruction set that this machine does not
/// have; nothing is written then.
///
/// # Safety
/// The matrix must be there as its pointer, sizes and stride say, of elements of that type, and nobody may write it
/// meanwhile.
pub unsafe fn largest(
    of: &Matrix,
    dtype: Dtype,
    out: &mut [i64],
    isa: Isa,
    team: Team,
    threads: usize,
) -> Result<(), Invalid> {
    if of.columns == 0 || of.rows != out.len() {
        return Err(Invalid::new(format!(
            "[{}, {}] for {} results: rows with elements, and one result for each, are expected",
            of.rows,
            of.columns,
            out.len()
        )));
    }
    if !isa.runs_here() {
        return Err(Invalid::new(format!("this machine does not have {isa}")));
    }
    let call = Call { of: *of, out: out.as_mut_ptr() };
    team.share_out(threads, of.rows, &|_, row| {
        // SAFETY: the machine has the instructions; rows and results are there, each result written by one thread.
        unsafe {
            match dtype {
                Dtype::F32 => simd::run(isa, OfRow::<f32> { call: &call, row, element: PhantomData }),
                Dtype::Bf16 => simd::run(isa, OfRow::<bf16> { call: &call, row, element: PhantomData }),
                Dtype::F16 => simd::run(isa, OfRow::<f16> { call: &call, row, element: PhantomData }),
            }
        }
    });
    Ok(())
}

struct Call {
    of: Matrix,
    out: *mut i64,
}

// SAFETY: it points to what the call's maker keeps, and each thread writes results of its own.
unsafe impl Sync for Call {}

struct OfRow<'a, E> {
    call: &'a Call,
    row: usize,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for OfRow<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { call, row, .. } = self;
        let columns = call.of.columns;
        // SAFETY: the row is the call's.
        unsafe {
            let from = call.of.data.cast::<E>().add(row * call.of.row_stride);
            call.out.add(row).write(first_largest::<S, E>(from, columns) as i64);
        }
    }
}

#[inline(always)]
unsafe fn first_largest<S: Simd, E: Element>(from: *const E, columns: usize) -> usize {
    // SAFETY: as promised by the caller.
    unsafe {
        let (zero, infinity) = (S::splat(0.0), S::splat(f32::INFINITY));
        let mut odd = zero;
        let (mut best, mut near) = (f32::NEG_INFINITY, 0);
        for start in (0..columns).step_by(STRETCH * S::LANES) {
            let end = columns.min(start + STRETCH * S::LANES);
            let mut high = [S::splat(f32::NEG_INFINITY); 4];
            let whole = start + (end - start) / S::LANES * S::LANES;
            for (index, at) in (start..whole).step_by(S::LANES).enumerate() {
                let value = E::load::<S>(from.add(at));
                high[index % 4] = S::max(high[index % 4], value);
                // What is not below infinity is infinite or no number.
                odd = S::add(odd, S::if_less(S::abs(value), infinity, zero, S::splat(1.0)));
            }
            let high = S::max(S::max(high[0], high[1]), S::max(high[2], high[3]));
            let mut found = S::largest(high);
            for at in whole..end {
                let value = (*from.add(at)).to_f32();
                if !value.is_finite() {
                    odd = S::splat(1.0);
                }
                found = found.max(value);
            }
            if found > best {
                (best, near) = (found, start);
            }
        }
        if S::sum(odd) > 0.0 {
            return plainly(from, columns);
        }
        let mut at = near;
        while (*from.add(at)).to_f32() < best {
            at += 1;
        }
        at
    }
}

/// The same for rows with infinities or what is no number, an element at a time.
unsafe fn plainly<E: Element>(from: *const E, columns: usize) -> usize {
    let (mut best, mut place) = (f32::NEG_INFINITY, 0);
    for at in 0..columns {
        // SAFETY: as promised by the caller.
        let value = unsafe { *from.add(at) }.to_f32();
        if value.is_nan() {
            return at;
        }
        if value > best {
            (best, place) = (value, at);
        }
    }
    place
}
