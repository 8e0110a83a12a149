//! One attention call over a step: its tensors, and where things are in them.

use std::marker::PhantomData;
use std::ops::Range;

use super::plan::{Heads, Plan, Task};
use super::softmax::{Form, Running};
use crate::element::{Dtype, Element};
use crate::numbers::Numbers;
use crate::simd::{Kernel, Simd};

/// K or V of one call: [blocks, page, kv heads, size], the last dimension contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// The first element.
    pub data: *mut u8,
    /// Blocks, trash included.
    pub blocks: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Elements from a block to the next.
    pub block_stride: usize,
    /// Elements from a token to the next in a page.
    pub token_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
    /// The head size.
    pub size: usize,
}

/// Something of each head of each token: [heads, tokens, size], the last dimension contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The first element.
    pub data: *mut u8,
    /// Heads.
    pub heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// The head size.
    pub size: usize,
    /// Elements from a token to the next.
    pub token_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
}

/// K and V of the step's tokens, on their way into the pages.
#[derive(Clone, Copy, Debug)]
pub struct NewRows {
    /// K.
    pub k: Rows,
    /// V.
    pub v: Rows,
}

/// A call's tensors, and how it computes.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// What all tensors are of.
    pub dtype: Dtype,
    /// K.
    pub k_pages: Pages,
    /// V.
    pub v_pages: Pages,
    /// `None` where the pages are another call's, which has written them.
    pub new: Option<NewRows>,
    /// Queries.
    pub query: Rows,
    /// Results, of V's head size.
    pub out: Rows,
    /// Factor of the scores.
    pub scale: f32,
    /// Scores are squeezed into (-softcap, softcap) by tanh.
    pub softcap: Option<f32>,
    /// A logit for each head that takes part in the softmax and contributes no value.
    pub sinks: Option<&'a [f32]>,
}

/// What the kernel sees of a [`Call`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallView<'a> {
    pub heads: Heads,
    pub k_pages: Pages,
    pub v_pages: Pages,
    pub query: Rows,
    pub out: Rows,
    pub form: Form,
    pub sinks: Option<&'a [f32]>,
}

impl CallView<'_> {
    pub fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[head])
    }
}

/// A part of some keys that lies in one page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    block: usize,
    /// Its first token in the page.
    first: usize,
    /// Its first key among those asked for.
    pub offset: usize,
    pub count: usize,
}

/// A call over a planned step, and its partial results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attend<'a, E> {
    pub plan: &'a Plan,
    pub call: CallView<'a>,
    pub page_size: usize,
    /// Whether products of many rows are computed in tile registers.
    #[cfg(target_arch = "x86_64")]
    pub in_tiles: bool,
    /// [partials, heads, size of V]
    pub partial_sums: *mut f32,
    /// [partials, heads]
    pub partial_running: *mut Running,
    pub element: PhantomData<E>,
}

// SAFETY: the pointers are to tensors of the caller that outlive the call; tasks write disjoint rows of the output and
// of the partial results, and only read the rest.
unsafe impl<E: Element> Sync for Attend<'_, E> {}

impl<E: Element> Attend<'_, E> {
    /// The parts in which some keys of a row lie.
    #[inline(always)]
    pub fn parts(&self, row: usize, keys: Range<usize>) -> impl Iterator<Item = Part> {
        let (page_size, start) = (self.page_size, keys.start);
        let table = &self.plan.blocks[row * self.plan.pages..(row + 1) * self.plan.pages];
        let mut at = start;
        std::iter::from_fn(move || {
            if at >= keys.end {
                return None;
            }
            let (page, first) = (at / page_size, at % page_size);
            let count = (page_size - first).min(keys.end - at);
            let part = Part { block: table[page] as usize, first, offset: at - start, count };
            at += count;
            Some(part)
        })
    }

    /// Where a key of a row lies, if it is one of `keys`.
    #[inline(always)]
    pub fn place(&self, row: usize, keys: &Range<usize>, key: usize) -> Option<Part> {
        keys.contains(&key).then(|| Part {
            block: self.plan.blocks[row * self.plan.pages + key / self.page_size] as usize,
            first: key % self.page_size,
            offset: key - keys.start,
            count: 1,
        })
    }

    /// # Safety
    /// The part must be of a checked table; as for all of these, head and token must be the call's.
    #[inline(always)]
    pub unsafe fn k(&self, part: &Part, kv_head: usize) -> *const E {
        // SAFETY: block, token and head are within the pages.
        unsafe { in_page(&self.call.k_pages, part, kv_head) }
    }

    #[inline(always)]
    pub unsafe fn v(&self, part: &Part, kv_head: usize) -> *const E {
        // SAFETY: as above.
        unsafe { in_page(&self.call.v_pages, part, kv_head) }
    }

    #[inline(always)]
    pub unsafe fn query(&self, token: usize, head: usize) -> *const E {
        // SAFETY: token and head are the call's.
        unsafe { at::<E>(&self.call.query, token, head) }
    }

    #[inline(always)]
    pub unsafe fn out(&self, token: usize, head: usize) -> *mut E {
        // SAFETY: as above.
        unsafe { at::<E>(&self.call.out, token, head) }
    }

    /// Where a partial result of a head is kept.
    #[inline(always)]
    pub unsafe fn partial(&self, partial: usize, head: usize) -> (*mut f32, *mut Running) {
        let index = partial * self.call.heads.heads + head;
        // SAFETY: there is room for all partial results of the plan.
        unsafe { (self.partial_sums.add(index * self.call.v_pages.size), self.partial_running.add(index)) }
    }

    /// Copies a row to fp32, zeros up to a whole vector.
    #[inline(always)]
    pub unsafe fn load_row<S: Simd>(&self, from: *const E, size: usize, to: *mut f32) {
        let whole = size - size % S::LANES;
        // SAFETY: as promised by the caller.
        unsafe {
            for index in (0..whole).step_by(S::LANES) {
                S::store(to.add(index), E::load::<S>(from.add(index)));
            }
            if whole < size {
                S::store(to.add(whole), E::load_part::<S>(from.add(whole), size - whole));
            }
        }
    }
}

#[inline(always)]
unsafe fn in_page<E>(pages: &Pages, part: &Part, kv_head: usize) -> *const E {
    let index =
        part.block * pages.block_stride + part.first * pages.token_stride + kv_head * pages.head_stride;
    // SAFETY: within the pages, as promised by the caller.
    unsafe { pages.data.cast::<E>().add(index) }
}

#[inline(always)]
unsafe fn at<E>(rows: &Rows, token: usize, head: usize) -> *mut E {
    // SAFETY: within the rows, as promised by the caller.
    unsafe { rows.data.cast::<E>().add(token * rows.token_stride + head * rows.head_stride) }
}

/// A task of the plan.
pub(crate) struct RunTask<'a, E> {
    pub attend: &'a Attend<'a, E>,
    pub task: &'a Task,
    /// What this thread is likely to be given next.
    pub next: Option<&'a Task>,
    pub scratch: &'a mut Scratch,
}

impl<E: Element> Kernel for RunTask<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let piece = &self.attend.plan.pieces[self.task.piece];
        // SAFETY: the call was checked.
        unsafe {
            if self.attend.plan.is_dot(piece, self.attend.call.heads) {
                let next = self.next.map(|task| &self.attend.plan.pieces[task.piece]);
                self.attend.dot_piece::<S>(piece, next, self.scratch);
            } else {
                for kv_head in self.task.kv_heads.clone() {
                    #[cfg(target_arch = "x86_64")]
                    if self.attend.in_tiles {
                        self.attend.amx_piece::<S>(piece, kv_head, self.scratch);
                        continue;
                    }
                    self.attend.tile_piece::<S>(piece, kv_head, self.scratch);
                }
            }
        }
    }
}

/// A thread's own memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub queries: Numbers,
    pub scores: Numbers,
    pub sums: Numbers,
    pub keys: Numbers,
    pub values: Numbers,
    pub staging: Numbers,
    running: Vec<Running>,
}

impl Scratch {
    #[inline(always)]
    pub fn queries(&mut self, count: usize) -> *mut f32 {
        self.queries.room(count)
    }

    #[inline(always)]
    pub fn scores(&mut self, count: usize) -> *mut f32 {
        self.scores.room(count)
    }

    /// Zeros.
    #[inline(always)]
    pub fn sums(&mut self, count: usize) -> *mut f32 {
        self.sums.zeros(count)
    }

    #[inline(always)]
    pub fn keys(&mut self, count: usize) -> *mut f32 {
        self.keys.room(count)
    }

    #[inline(always)]
    pub fn values(&mut self, count: usize) -> *mut f32 {
        self.values.room(count)
    }

    #[inline(always)]
    pub fn staging(&mut self, count: usize) -> *mut f32 {
        self.staging.room(count)
    }

    /// Nothing seen yet, for so many rows.
    #[inline(always)]
    pub fn running(&mut self, count: usize) -> *mut Running {
        self.running.clear();
        self.running.resize(count, Running::NONE);
        self.running.as_mut_ptr()
    }
}
