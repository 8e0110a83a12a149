//! Attention over the pages of a step, for CPUs.
//!
//! K and V are read where they lie, through the block tables, and written there; nothing is gathered and no mask is
//! made. See [`PagedAttention`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod call;
mod dot;
mod plan;
mod product;
mod softmax;
mod tile;

use std::fmt;
use std::marker::PhantomData;

use chairlift_core::Reach;
use half::{bf16, f16};

use self::call::{Attend, CallView, RunTask, Scratch};
pub use self::call::{Call, NewRows, Pages, Rows};
use self::plan::Plan;
pub use self::plan::{Heads, StepRows, Table};
use self::softmax::{Form, Running, finish};
use crate::element::{Dtype, Element};
use crate::isa::Isa;
use crate::numbers::Numbers;
use crate::simd::{self, Kernel, Simd};
use crate::team::{PerWorker, Team};

/// Bytes of new K and V that a thread writes at once: below it, one thread writes all.
const WRITE_BYTES: usize = 128 << 10;
/// Merges that a thread takes at once.
const MERGES_AT_ONCE: usize = 8;

/// What is wrong with a step or a call. Nothing was read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(String);

impl Invalid {
    pub(crate) fn new(reason: String) -> Self {
        Self(reason)
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Invalid {}

macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err(Invalid(format!($($message)+)));
        }
    };
}

/// What a group's calls have in common in a step.
#[derive(Debug)]
struct Group {
    reach: Reach,
    /// A plan for each shape of calls that the group has met, and whether it is of this step.
    plans: Vec<(Heads, bool, Plan)>,
    /// Row after row.
    blocks: Vec<i32>,
    pages: usize,
    /// Where K and V of each token go: block * page size + token of the page.
    write_slots: Vec<i32>,
    /// The highest block that is read or written.
    highest_block: usize,
}

/// Attention of the calls of a model, step by step: [`PagedAttention::begin`], then a call of
/// [`PagedAttention::attend`] for each of the model's.
#[derive(Debug)]
pub struct PagedAttention {
    page_size: usize,
    groups: Vec<Group>,
    isa: Isa,
    team: Team,
    cu_seqlens: Vec<i32>,
    kv_lens: Vec<i32>,
    decodes: usize,
    partial_sums: Numbers,
    partial_running: Vec<Running>,
    scratch: PerWorker<Scratch>,
}

impl PagedAttention {
    /// For pages of so many tokens and groups that look so far back.
    ///
    /// # Errors
    /// A page or a window without tokens, or an instruction set that this machine does not have.
    pub fn new(page_size: usize, reaches: &[Reach], isa: Isa, team: Team) -> Result<Self, Invalid> {
        ensure!(page_size > 0, "page_size is 0: a page holds at least one token");
        ensure!(
            reaches.iter().all(|reach| reach.most_seen() != Some(0)),
            "{reaches:?}: a query sees its own token at least"
        );
        ensure!(isa.runs_here(), "this machine does not have {isa}");
        let group = |&reach: &Reach| Group {
            reach,
            plans: Vec::new(),
            blocks: Vec::new(),
            pages: 0,
            write_slots: Vec::new(),
            highest_block: 0,
        };
        Ok(Self {
            page_size,
            groups: reaches.iter().map(group).collect(),
            isa,
            team,
            cu_seqlens: Vec::new(),
            kv_lens: Vec::new(),
            decodes: 0,
            partial_sums: Numbers::default(),
            partial_running: Vec::new(),
            scratch: PerWorker::new(),
        })
    }

    /// The instruction set in use.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// The threads in use.
    #[must_use]
    pub const fn team(&self) -> Team {
        self.team
    }

    /// Takes a step in: its rows, and for each group the block table and where each token's K and V go (padding after
    /// the last row included).
    ///
    /// # Errors
    /// What does not fit together. The step before is forgotten.
    pub fn begin(&mut self, rows: StepRows<'_>, groups: &[(Table<'_>, &[i32])]) -> Result<(), Invalid> {
        self.cu_seqlens.clear();
        self.kv_lens.clear();
        // All groups, before anything can be refused: no call may find the tables of another step.
        self.groups.iter_mut().for_each(Group::forget);
        let (bounds, lens) = (rows.cu_seqlens, rows.kv_lens);
        ensure!(
            bounds.len() == lens.len() + 1 && bounds[0] == 0,
            "cu_seqlens has {} entries for {} rows: one more than rows is needed, from 0 on",
            bounds.len(),
            lens.len()
        );
        ensure!(rows.decodes <= lens.len(), "{} decodes among {} rows", rows.decodes, lens.len());
        for (row, (bounds, &len)) in bounds.windows(2).zip(lens).enumerate() {
            let count = bounds[1].checked_sub(bounds[0]).unwrap_or(-1);
            ensure!(
                count >= 1 && count <= len,
                "row {row} brings {count} tokens to a sequence of {len}: 1 to {len} are possible"
            );
            ensure!(
                row >= rows.decodes || count == 1,
                "row {row} brings {count} tokens as a decode, which brings 1"
            );
        }
        ensure!(
            groups.len() == self.groups.len(),
            "{} tables for {} groups",
            groups.len(),
            self.groups.len()
        );
        let tokens = bounds.last().map_or(0, |&tokens| tokens as usize);
        for (group, (table, write_slots)) in self.groups.iter_mut().zip(groups) {
            group.take(rows, *table, write_slots, tokens, self.page_size)?;
        }
        self.cu_seqlens.extend_from_slice(bounds);
        self.kv_lens.extend_from_slice(lens);
        self.decodes = rows.decodes;
        Ok(())
    }

    /// One call of a group over the step's tokens: writes their K and V into the pages, and the results to `out`.
    /// Results of padding are zeros.
    ///
    /// # Errors
    /// What does not fit together; nothing is read or written then.
    ///
    /// # Safety
    /// The tensors must be there as their pointers, sizes and strides say, `out` and the pages to be written, and
    /// nobody else may write them during the call. `out` must not overlap the others, nor its own rows each other, and
    /// no two tokens of the step may have the same write slot.
    pub unsafe fn attend(&mut self, group: usize, call: &Call<'_>, threads: usize) -> Result<(), Invalid> {
        // SAFETY: as promised by the caller, of elements of that type.
        unsafe {
            match call.dtype {
                Dtype::F32 => self.attend_in::<f32>(group, call, threads),
                Dtype::Bf16 => self.attend_in::<bf16>(group, call, threads),
                Dtype::F16 => self.attend_in::<f16>(group, call, threads),
            }
        }
    }

    unsafe fn attend_in<E: Element>(
        &mut self,
        group: usize,
        call: &Call<'_>,
        threads: usize,
    ) -> Result<(), Invalid> {
        let heads = self.check(group, call)?;
        let tokens = self.cu_seqlens.last().map_or(0, |&tokens| tokens as usize);
        let group = &mut self.groups[group];
        if let Some(new) = &call.new {
            // SAFETY: checked; as promised by the caller.
            unsafe { group.write::<E>(call, new, tokens, self.page_size, self.team, threads) };
        }
        let rows = StepRows { cu_seqlens: &self.cu_seqlens, kv_lens: &self.kv_lens, decodes: self.decodes };
        let plan = group.plan(rows, heads, self.page_size, threads);
        self.partial_running
            .resize(self.partial_running.len().max(plan.num_partials * heads.heads), Running::NONE);
        let attend = Attend::<E> {
            plan,
            call: CallView {
                heads,
                k_pages: call.k_pages,
                v_pages: call.v_pages,
                query: call.query,
                out: call.out,
                form: Form { scale: call.scale, softcap: call.softcap },
                sinks: call.sinks,
            },
            page_size: self.page_size,
            #[cfg(target_arch = "x86_64")]
            in_tiles: self.isa == Isa::AmxBf16 && E::DTYPE == Dtype::Bf16,
            partial_sums: self.partial_sums.room(plan.num_partials * heads.heads * call.v_pages.size),
            partial_running: self.partial_running.as_mut_ptr(),
            element: PhantomData,
        };
        self.scratch.reserve(threads.max(1));
        let (isa, scratch) = (self.isa, &self.scratch);
        self.team.share_out(threads, plan.tasks.len(), &|worker, task| {
            // SAFETY: a worker uses its own scratch only; the machine has the instructions; the call was checked.
            unsafe {
                let scratch = scratch.of(worker);
                let next = plan.tasks.get(task + threads);
                simd::run(isa, RunTask { attend: &attend, task: &plan.tasks[task], next, scratch });
            }
        });
        let parts = plan.merges.len().div_ceil(MERGES_AT_ONCE);
        self.team.share_out(threads, parts, &|worker, part| {
            let start = part * MERGES_AT_ONCE;
            let merges = start..plan.merges.len().min(start + MERGES_AT_ONCE);
            // SAFETY: as above.
            unsafe {
                let scratch = scratch.of(worker);
                simd::run(isa, MergePartials { attend: &attend, merges, scratch });
            }
        });
        for token in plan.seen.len()..call.out.tokens {
            for head in 0..heads.heads {
                // SAFETY: within the output.
                unsafe { attend.out(token, head).write_bytes(0, call.v_pages.size) };
            }
        }
        Ok(())
    }

    /// Whether a call fits the step, and the shape of its heads.
    fn check(&self, group: usize, call: &Call<'_>) -> Result<Heads, Invalid> {
        ensure!(group < self.groups.len(), "group {group} of {}", self.groups.len());
        let (k, v, query, out) = (&call.k_pages, &call.v_pages, &call.query, &call.out);
        for (name, pages) in [("K", k), ("V", v)] {
            ensure!(
                pages.page_size == self.page_size && pages.kv_heads == k.kv_heads && pages.blocks == k.blocks,
                "pages of {name} are [{}, {}, {}, {}]: [{}, {}, {}, head size] is expected",
                pages.blocks,
                pages.page_size,
                pages.kv_heads,
                pages.size,
                k.blocks,
                self.page_size,
                k.kv_heads
            );
            ensure!(pages.size > 0, "the head size of {name} is 0");
        }
        ensure!(
            k.kv_heads > 0 && query.heads > 0 && query.heads.is_multiple_of(k.kv_heads),
            "{} heads of queries over {} heads of K and V, of which they must be a multiple",
            query.heads,
            k.kv_heads
        );
        let tokens = self.groups[group].write_slots.len();
        let of_new = call
            .new
            .iter()
            .flat_map(|new| [("K", &new.k, k.kv_heads, k.size), ("V", &new.v, k.kv_heads, v.size)]);
        for (name, rows, heads, size) in
            [("the queries", query, query.heads, k.size), ("the results", out, query.heads, v.size)]
                .into_iter()
                .chain(of_new)
        {
            ensure!(
                (rows.heads, rows.tokens, rows.size) == (heads, tokens, size),
                "{name} are [{}, {}, {}] (heads, tokens, head size): [{heads}, {tokens}, {size}] is expected",
                rows.heads,
                rows.tokens,
                rows.size
            );
        }
        if let Some(sinks) = call.sinks {
            ensure!(sinks.len() == query.heads, "{} sinks for {} heads", sinks.len(), query.heads);
        }
        ensure!(
            self.groups[group].highest_block < k.blocks,
            "the step reads or writes block {}, and the pages have {}",
            self.groups[group].highest_block,
            k.blocks
        );
        Ok(Heads { heads: query.heads, kv_heads: k.kv_heads })
    }
}

impl Group {
    /// Is of no step.
    fn forget(&mut self) {
        for (_, is_current, _) in &mut self.plans {
            *is_current = false;
        }
        self.blocks.clear();
        self.pages = 0;
        self.write_slots.clear();
        self.highest_block = 0;
    }

    /// Checks and copies what a step brings for this group, which is of no step yet.
    fn take(
        &mut self,
        rows: StepRows<'_>,
        table: Table<'_>,
        write_slots: &[i32],
        tokens: usize,
        page_size: usize,
    ) -> Result<(), Invalid> {
        let num_rows = rows.kv_lens.len();
        ensure!(
            num_rows.checked_mul(table.pages) == Some(table.blocks.len()),
            "a table of {} blocks for {num_rows} rows of {} pages",
            table.blocks.len(),
            table.pages
        );
        ensure!(write_slots.len() >= tokens, "{} write slots for {tokens} tokens", write_slots.len());
        let mut highest = 0;
        for (row, (bounds, &len)) in rows.cu_seqlens.windows(2).zip(rows.kv_lens).enumerate() {
            let first = self.reach.first_seen((len - (bounds[1] - bounds[0])) as u32) as usize;
            let pages = first / page_size..(len as usize).div_ceil(page_size);
            ensure!(
                pages.end <= table.pages,
                "row {row} has {len} tokens, more than {} pages of {page_size}",
                table.pages
            );
            for page in pages {
                let block = table.blocks[row * table.pages + page];
                ensure!(block >= 0, "page {page} of row {row} is block {block}");
                highest = highest.max(block as usize);
            }
        }
        for (token, &slot) in write_slots.iter().enumerate() {
            ensure!(slot >= 0, "token {token} is written to slot {slot}");
            highest = highest.max(slot as usize / page_size);
        }
        self.blocks.extend_from_slice(table.blocks);
        self.pages = table.pages;
        self.write_slots.extend_from_slice(write_slots);
        self.highest_block = highest;
        Ok(())
    }

    /// The plan of this step for calls of that shape.
    fn plan(&mut self, rows: StepRows<'_>, heads: Heads, page_size: usize, threads: usize) -> &Plan {
        let index = self.plans.iter().position(|(shape, ..)| *shape == heads).unwrap_or_else(|| {
            self.plans.push((heads, false, Plan::default()));
            self.plans.len() - 1
        });
        let (_, is_current, plan) = &mut self.plans[index];
        if !*is_current {
            let table = Table { blocks: &self.blocks, pages: self.pages };
            plan.make(rows, table, page_size, self.reach, heads, threads);
            *is_current = true;
        }
        plan
    }

    /// Writes K and V of the step's tokens into their pages. Padding is left out: nobody reads it.
    unsafe fn write<E: Element>(
        &self,
        call: &Call<'_>,
        new: &NewRows,
        tokens: usize,
        page_size: usize,
        team: Team,
        threads: usize,
    ) {
        let (k, v) = (SendPages(call.k_pages), SendPages(call.v_pages));
        let (new_k, new_v) = (SendRows(new.k), SendRows(new.v));
        let bytes = call.k_pages.kv_heads * (call.k_pages.size + call.v_pages.size) * size_of::<E>();
        let at_once = (WRITE_BYTES / bytes).max(1);
        team.share_out(threads, tokens.div_ceil(at_once), &|_, part| {
            for token in part * at_once..tokens.min((part + 1) * at_once) {
                let slot = self.write_slots[token] as usize;
                // SAFETY: checked; each token has a slot of its own, as the caller promises.
                unsafe {
                    k.write::<E>(slot / page_size, slot % page_size, &new_k, token);
                    v.write::<E>(slot / page_size, slot % page_size, &new_v, token);
                }
            }
        });
    }
}

/// Pages that several threads write, each its own tokens.
#[derive(Clone, Copy)]
struct SendPages(Pages);
// SAFETY: the memory is the caller's and outlives the call; tokens are disjoint.
unsafe impl Sync for SendPages {}

/// Rows that several threads read.
#[derive(Clone, Copy)]
struct SendRows(Rows);
// SAFETY: as above, and only read.
unsafe impl Sync for SendRows {}

impl SendPages {
    unsafe fn write<E: Element>(&self, block: usize, in_page: usize, rows: &SendRows, token: usize) {
        let (pages, rows) = (&self.0, &rows.0);
        for head in 0..pages.kv_heads {
            // SAFETY: block, place and token were checked to be within.
            unsafe {
                let from = rows.data.cast::<E>().add(token * rows.token_stride + head * rows.head_stride);
                let index =
                    block * pages.block_stride + in_page * pages.token_stride + head * pages.head_stride;
                std::ptr::copy_nonoverlapping(from, pages.data.cast::<E>().add(index), pages.size);
            }
        }
    }
}

/// Joins partial results by their log-sum-exp.
struct MergePartials<'a, E> {
    attend: &'a Attend<'a, E>,
    merges: std::ops::Range<usize>,
    scratch: &'a mut Scratch,
}

impl<E: Element> Kernel for MergePartials<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (attend, plan) = (self.attend, self.attend.plan);
        let size = attend.call.v_pages.size;
        let whole = size - size % S::LANES;
        for merge in &plan.merges[self.merges] {
            let partials = &plan.merged[merge.partials.clone()];
            for head in 0..attend.call.heads.heads {
                // SAFETY: partial results of the plan, each written by its task; the token's row of the output.
                unsafe {
                    let kept = |&partial: &usize| *attend.partial(partial, head).1;
                    let largest = partials
                        .iter()
                        .map(kept)
                        .fold(f32::NEG_INFINITY, |largest, kept| largest.max(kept.largest));
                    let sum = self.scratch.sums(size.next_multiple_of(S::LANES));
                    let mut weights = 0.0;
                    for partial in partials {
                        let (from, kept) = attend.partial(*partial, head);
                        let factor = ((*kept).largest - largest).exp2();
                        weights += (*kept).sum * factor;
                        for at in (0..whole).step_by(S::LANES) {
                            let to = sum.add(at);
                            S::store(to, S::mul_add(S::load(from.add(at)), S::splat(factor), S::load(to)));
                        }
                        for at in whole..size {
                            *sum.add(at) += *from.add(at) * factor;
                        }
                    }
                    let running = Running { largest, sum: weights };
                    finish::<S, E>(sum, running, attend.call.sink(head), attend.out(merge.token, head), size);
                }
            }
        }
    }
}
