//! Memory for fp32 numbers.

/// A cache line of numbers.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "reached by pointer")] [f32; 16]);

/// Numbers that start at a cache line; grown, never shrunk.
#[derive(Debug, Default)]
pub(crate) struct Numbers(Vec<Line>);

impl Numbers {
    /// Room for so many, of any value.
    #[inline(always)]
    pub fn room(&mut self, count: usize) -> *mut f32 {
        let lines = count.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        self.0.as_mut_ptr().cast()
    }

    /// So many zeros.
    #[inline(always)]
    pub fn zeros(&mut self, count: usize) -> *mut f32 {
        self.room(count);
        self.0[..count.div_ceil(16)].fill(Line([0.0; 16]));
        self.0.as_mut_ptr().cast()
    }
}
