//! Tensors of torch by pointer and stride, as DLPack hands them over. Holding one keeps its memory alive and in place.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::slice;

use chairlift_kernels::element::Dtype;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// The name of a capsule that nobody has taken the tensor out of.
const UNUSED: &CStr = c"dltensor";
/// `kDLCPU`
const CPU: i32 = 1;
/// `kDLInt`, `kDLFloat` and `kDLBfloat`
const INT: u8 = 0;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;

/// `DLTensor` of DLPack's ABI, version 0 (a `DLManagedTensor` begins with it).
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// A tensor on the CPU.
pub struct Tensor<'py> {
    _capsule: Bound<'py, PyCapsule>,
    tensor: NonNull<DlTensor>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Tensor<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let capsule = object.cast::<PyCapsule>()?.to_owned();
        let pointer = capsule.pointer_checked(Some(UNUSED)).map_err(|_| {
            PyTypeError::new_err(
                "an unused DLPack capsule is expected, as torch.utils.dlpack.to_dlpack makes them",
            )
        })?;
        let tensor = Self { _capsule: capsule, tensor: pointer.cast() };
        let raw = tensor.raw();
        if raw.device_type != CPU {
            return Err(PyValueError::new_err(format!(
                "a tensor on the CPU is expected, and this one is on DLPack's device type {}",
                raw.device_type
            )));
        }
        if raw.lanes != 1 {
            return Err(PyValueError::new_err(format!("a tensor of vectors of {} elements", raw.lanes)));
        }
        Ok(tensor)
    }
}

impl Tensor<'_> {
    fn raw(&self) -> &DlTensor {
        // SAFETY: the capsule's name says that it holds a managed tensor, which lives as long as the capsule.
        unsafe { self.tensor.as_ref() }
    }

    /// The element type; an error that names the tensor where it is none of those that the kernels know.
    pub fn dtype(&self, name: &str) -> PyResult<Dtype> {
        match (self.raw().code, self.raw().bits) {
            (FLOAT, 32) => Ok(Dtype::F32),
            (FLOAT, 16) => Ok(Dtype::F16),
            (BFLOAT, 16) => Ok(Dtype::Bf16),
            (code, bits) => Err(PyTypeError::new_err(format!(
                "{name}: float32, bfloat16 or float16 is expected, not {bits} bits of DLPack's type {code}"
            ))),
        }
    }

    /// Sizes and strides (in elements) of a tensor of `N` dimensions.
    pub fn layout<const N: usize>(&self, name: &str) -> PyResult<([usize; N], [usize; N])> {
        let raw = self.raw();
        if raw.ndim != N as i32 {
            return Err(PyValueError::new_err(format!("{name} has {} dimensions, not {N}", raw.ndim)));
        }
        let (mut shape, mut strides) = ([0; N], [1; N]);
        self.read_layout(name, &mut shape, &mut strides)?;
        Ok((shape, strides))
    }

    /// Size and stride (in elements) of each dimension.
    pub fn any_layout(&self, name: &str) -> PyResult<Vec<(usize, usize)>> {
        let dimensions = usize::try_from(self.raw().ndim).unwrap_or(0);
        let (mut shape, mut strides) = (vec![0; dimensions], vec![1; dimensions]);
        self.read_layout(name, &mut shape, &mut strides)?;
        Ok(shape.into_iter().zip(strides).collect())
    }

    /// Reads as many sizes and strides as the tensor has dimensions.
    fn read_layout(&self, name: &str, shape: &mut [usize], strides: &mut [usize]) -> PyResult<()> {
        let (raw, dimensions) = (self.raw(), shape.len());
        if dimensions == 0 {
            return Ok(());
        }
        let wrong = |_| PyValueError::new_err(format!("{name} has a negative size or stride"));
        // SAFETY: a tensor has as many sizes as dimensions.
        let sizes = unsafe { slice::from_raw_parts(raw.shape, dimensions) };
        for (to, &size) in shape.iter_mut().zip(sizes) {
            *to = usize::try_from(size).map_err(wrong)?;
        }
        if raw.strides.is_null() {
            for at in (0..dimensions - 1).rev() {
                strides[at] = strides[at + 1] * shape[at + 1];
            }
        } else {
            // SAFETY: and as many strides, where it has any.
            let given = unsafe { slice::from_raw_parts(raw.strides, dimensions) };
            for (to, &stride) in strides.iter_mut().zip(given) {
                *to = usize::try_from(stride).map_err(wrong)?;
            }
        }
        Ok(())
    }

    /// The first element.
    pub fn data(&self) -> *mut u8 {
        let raw = self.raw();
        // DLPack's offset is within the allocation.
        raw.data.cast::<u8>().wrapping_add(raw.byte_offset as usize)
    }

    /// A contiguous tensor of int32 as a slice.
    ///
    /// # Safety
    /// Nobody may write it meanwhile.
    pub unsafe fn as_i32<const N: usize>(&self, name: &str) -> PyResult<([usize; N], &[i32])> {
        if (self.raw().code, self.raw().bits) != (INT, 32) {
            return Err(PyTypeError::new_err(format!("{name}: int32 is expected")));
        }
        let shape = self.contiguous::<N>(name)?;
        // SAFETY: contiguous, of that type and size; alive as long as `self`; the caller keeps writers away.
        Ok((shape, unsafe { self.elements(shape) }))
    }

    /// A contiguous tensor of float32 as a slice.
    ///
    /// # Safety
    /// Nobody may write it meanwhile.
    pub unsafe fn as_f32<const N: usize>(&self, name: &str) -> PyResult<([usize; N], &[f32])> {
        if self.dtype(name)? != Dtype::F32 {
            return Err(PyTypeError::new_err(format!("{name}: float32 is expected")));
        }
        let shape = self.contiguous::<N>(name)?;
        // SAFETY: as above.
        Ok((shape, unsafe { self.elements(shape) }))
    }

    /// A contiguous tensor of int64 as a slice to write.
    ///
    /// # Safety
    /// Nobody else may touch it meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the tensor's memory is not this value's; see the promise above")]
    pub unsafe fn as_i64_mut<const N: usize>(&self, name: &str) -> PyResult<([usize; N], &mut [i64])> {
        if (self.raw().code, self.raw().bits) != (INT, 64) {
            return Err(PyTypeError::new_err(format!("{name}: int64 is expected")));
        }
        let shape = self.contiguous::<N>(name)?;
        let count = shape.iter().product();
        if count == 0 {
            return Ok((shape, &mut []));
        }
        // SAFETY: contiguous, of that type and size; alive as long as `self`; the caller keeps others away.
        Ok((shape, unsafe { slice::from_raw_parts_mut(self.data().cast(), count) }))
    }

    fn contiguous<const N: usize>(&self, name: &str) -> PyResult<[usize; N]> {
        let (shape, strides) = self.layout::<N>(name)?;
        let mut expected = 1;
        for at in (0..N).rev() {
            if shape[at] > 1 && strides[at] != expected {
                return Err(PyValueError::new_err(format!("{name} is not contiguous")));
            }
            expected *= shape[at];
        }
        Ok(shape)
    }

    unsafe fn elements<T, const N: usize>(&self, shape: [usize; N]) -> &[T] {
        let count = shape.iter().product();
        if count == 0 {
            return &[];
        }
        // SAFETY: promised by the caller.
        unsafe { slice::from_raw_parts(self.data().cast(), count) }
    }
}
