//! Digests of large buffers, at the speed of memory.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use twox_hash::XxHash3_128;

use crate::buffers::Bytes;

/// XXH3 of each buffer, 128 bits, in the canonical order of bytes.
#[pyfunction]
pub fn digests<'py>(
    py: Python<'py>,
    buffers: Vec<Bound<'py, PyAny>>,
    num_threads: usize,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let buffers = buffers.iter().map(Bytes::new).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: the caller promises that nobody writes them during the call; see `_native.pyi`.
    let slices: Vec<_> = buffers.iter().map(|bytes| unsafe { bytes.as_slice() }).collect();
    let digests = py.detach(|| digest_each(&slices, num_threads));
    Ok(digests.into_iter().map(|digest| PyBytes::new(py, &digest.to_be_bytes())).collect())
}

fn digest_each(buffers: &[&[u8]], num_threads: usize) -> Vec<u128> {
    let next = AtomicUsize::new(0);
    let work = || {
        let take = || next.fetch_add(1, Ordering::Relaxed);
        std::iter::repeat_with(take)
            .map_while(|index| Some((index, XxHash3_128::oneshot(buffers.get(index)?))))
            .collect::<Vec<_>>()
    };
    let mut digests = vec![0; buffers.len()];
    thread::scope(|scope| {
        // A thread that the system will not give leaves more to the others.
        let others: Vec<_> = (1..num_threads.min(buffers.len()))
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let own = work();
        let theirs =
            others.into_iter().flat_map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        for (index, digest) in own.into_iter().chain(theirs) {
            digests[index] = digest;
        }
    });
    digests
}
