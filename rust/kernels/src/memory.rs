//! Memory of the kernels' own that is read as a whole, again and again: held in large pages where the system has them,
//! so that reading it needs few address translations.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of a large page of x86-64 and of most 64-bit ARM systems.
const HUGE_PAGE: usize = 2 << 20;
const CACHE_LINE: usize = 64;
/// Bytes of a chunk that several share: each of them alone may be smaller than a large page.
const CHUNK: usize = 16 << 20;

/// Bytes that begin at a cache line.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    _chunk: Arc<Chunk>,
}

// SAFETY: its bytes are its own, and it hands out no reference to them.
unsafe impl Send for Memory {}
// SAFETY: as above; whoever writes through `start` sees to it that nobody reads.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many zeros.
    ///
    /// # Panics
    /// If the system has no more.
    pub fn zeros(bytes: usize) -> Self {
        /// The chunk that was begun last, and how much of it is given out. It goes with the last one that has a part.
        static BEGUN: Mutex<(Weak<Chunk>, usize)> = Mutex::new((Weak::new(), 0));

        let needed = bytes.next_multiple_of(CACHE_LINE).max(CACHE_LINE);
        if needed > CHUNK / 2 {
            return Self::at(Arc::new(Chunk::new(needed)), 0, bytes);
        }
        let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
        let (chunk, used) = match begun.0.upgrade() {
            Some(chunk) if begun.1 + needed <= chunk.bytes => (chunk, begun.1),
            _ => (Arc::new(Chunk::new(CHUNK)), 0),
        };
        *begun = (Arc::downgrade(&chunk), used + needed);
        Self::at(chunk, used, bytes)
    }

    fn at(chunk: Arc<Chunk>, offset: usize, bytes: usize) -> Self {
        // SAFETY: there are so many bytes from there on.
        let start = unsafe { chunk.start.add(offset) };
        Self { start, bytes, _chunk: chunk }
    }

    pub const fn len(&self) -> usize {
        self.bytes
    }

    pub const fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// Memory from the system, zeros at first.
#[derive(Debug)]
struct Chunk {
    start: NonNull<u8>,
    bytes: usize,
    #[cfg(unix)]
    mapped: (NonNull<u8>, usize),
}

// SAFETY: as for `Memory`.
unsafe impl Send for Chunk {}
// SAFETY: as for `Memory`.
unsafe impl Sync for Chunk {}

#[cfg(unix)]
impl Chunk {
    fn new(bytes: usize) -> Self {
        let length = bytes + HUGE_PAGE;
        // SAFETY: a new mapping touches nobody's memory.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert!(map != libc::MAP_FAILED, "the system has no {bytes} bytes for packed weights");
        let map = NonNull::new(map.cast::<u8>()).expect("a mapping is nowhere at 0");
        // SAFETY: the mapping has room for it.
        let start = unsafe { map.add(map.as_ptr().align_offset(HUGE_PAGE)) };
        prefer_huge_pages(start.as_ptr(), bytes);
        Self { start, bytes, mapped: (map, length) }
    }
}

#[cfg(unix)]
impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, of which nobody has a part any more.
        unsafe { libc::munmap(self.mapped.0.as_ptr().cast(), self.mapped.1) };
    }
}

#[cfg(not(unix))]
impl Chunk {
    fn layout(bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(bytes, CACHE_LINE).expect("no weight is that large")
    }

    fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: of at least a cache line.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        Self { start, bytes }
    }
}

#[cfg(not(unix))]
impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with that layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), Self::layout(self.bytes)) };
    }
}

/// Asks the system to hold memory in large pages. Those that lie in it whole are concerned, as they are first written.
/// Does nothing where the system knows none.
fn prefer_huge_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        let skipped = start.align_offset(HUGE_PAGE);
        let whole = bytes.saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
        if whole > 0 {
            // SAFETY: advice on how memory is held does not change what is in it.
            unsafe { libc::madvise(start.wrapping_add(skipped).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_chunk_are_zeros_of_their_own() {
        let sizes = [1, 100, 3 << 20, 7 << 20, 5 << 20, 20 << 20, 0, 64];
        let parts: Vec<Memory> = sizes.iter().map(|&bytes| Memory::zeros(bytes)).collect();
        for (index, part) in parts.iter().enumerate() {
            assert_eq!(part.start().align_offset(CACHE_LINE), 0);
            for at in 0..part.len() {
                // SAFETY: within the part, whose only user this is.
                unsafe {
                    assert_eq!(part.start().add(at).read(), 0);
                    part.start().add(at).write(index as u8 + 1);
                }
            }
        }
        for (index, part) in parts.iter().enumerate() {
            // SAFETY: as above.
            let ends = [0, part.len().saturating_sub(1)].map(|at| unsafe { part.start().add(at).read() });
            assert!(part.len() == 0 || ends == [index as u8 + 1; 2], "part {index} was written by another");
        }
    }
}
