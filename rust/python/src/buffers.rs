//! Buffers of the caller that the engine reads and writes while the GIL is released. The only unsafe code of the
//! binding.

use std::ops::Range;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A one-dimensional, contiguous, writable buffer. Holding it keeps its memory alive and in place.
pub struct Pinned<T: Element> {
    buffer: PyBuffer<T>,
}

impl<T: Element> Pinned<T> {
    pub fn new(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let buffer = PyBuffer::<T>::get(object)?;
        if buffer.dimensions() != 1 || !buffer.is_c_contiguous() || buffer.readonly() {
            return Err(PyValueError::new_err(format!(
                "the {name} buffer must be one-dimensional, contiguous and writable"
            )));
        }
        Ok(Self { buffer })
    }

    fn parts(&self) -> (*mut T, usize) {
        parts(&self.buffer)
    }

    /// The bytes it occupies.
    pub fn address(&self) -> Range<usize> {
        let (start, len) = self.parts();
        start.addr()..start.addr() + len * size_of::<T>()
    }

    /// The elements, to read.
    ///
    /// # Safety
    /// Nobody may write them meanwhile. The engine's protocol sees to it: a slot's buffers belong to the device from
    /// the plan of its step until its results are in, and to the engine from then on.
    pub unsafe fn as_slice(&self) -> &[T] {
        let (start, len) = self.parts();
        // SAFETY: the buffer protocol exported `len` elements at `start`, checked to be contiguous and of type `T`,
        // and keeps them there as long as `self.buffer` lives; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    /// The elements, to write.
    ///
    /// # Safety
    /// Nobody may read or write them meanwhile; see [`Pinned::as_slice`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_slice(&self) -> &mut [T] {
        let (start, len) = self.parts();
        // SAFETY: as above, and the export was checked to be writable.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }
}

// SAFETY: the exported memory does not move and is not freed before the buffer is released; what PyBuffer itself does
// on any thread (release) attaches to the interpreter first. Access to the elements is governed by the protocol above.
unsafe impl<T: Element> Sync for Pinned<T> {}
// SAFETY: as for Sync.
unsafe impl<T: Element> Send for Pinned<T> {}

/// Contiguous bytes to read, of any shape. Holding them keeps their memory alive and in place.
pub struct Bytes {
    buffer: PyBuffer<u8>,
}

impl Bytes {
    pub fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyBuffer::<u8>::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("a buffer of bytes must be contiguous"));
        }
        Ok(Self { buffer })
    }

    /// The bytes.
    ///
    /// # Safety
    /// Nobody may write them meanwhile.
    pub unsafe fn as_slice(&self) -> &[u8] {
        let (start, len) = parts(&self.buffer);
        // SAFETY: the buffer protocol exported `len` bytes at `start`, checked to be contiguous, and keeps them there
        // as long as `self.buffer` lives; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(start, len) }
    }
}

fn parts<T: Element>(buffer: &PyBuffer<T>) -> (*mut T, usize) {
    let len = buffer.item_count();
    // An empty buffer may have no address; a slice must.
    let start = if len == 0 { std::ptr::dangling_mut() } else { buffer.buf_ptr().cast() };
    (start, len)
}
