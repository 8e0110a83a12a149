//! Linear layers for CPUs, their weights packed once: `out = input x weight^T + bias`.
//!
//! A weight is read in the order in which it is packed, a panel of output columns after the other, and asked for ahead
//! of its use: with few rows a layer takes as long as its weight takes to arrive, and with many as long as it takes to
//! multiply. See [`PackedLinear`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod joined;
mod vectors;

use std::fmt;
use std::marker::PhantomData;

use half::{bf16, f16};

pub use self::joined::{Joined, MOST_LAYERS};
use self::vectors::MakeReady;
use crate::attention::Invalid;
use crate::element::{Dtype, Element};
use crate::factors::{Lanes, Pairs};
use crate::isa::Isa;
use crate::memory::Memory;
use crate::numbers::Numbers;
use crate::simd::{self, Kernel, Simd};
use crate::team::Team;
#[cfg(target_arch = "x86_64")]
use crate::tiles;

/// Parts of a layer for each thread: the next thread that is free takes the next.
const PARTS: usize = 4;
/// Operations of a part, at least.
const PART_WORK: usize = 1 << 18;
/// Rows of an input that a thread makes ready at once.
const READY_ROWS: usize = 64;

/// Rows of elements, each row contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The first element.
    pub data: *mut u8,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Elements from a row to the next.
    pub row_stride: usize,
}

/// How the products of a layer are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// In tile registers, of bf16.
    Tiles,
    /// By dot products of bf16 pairs.
    Pairs,
    /// In fp32.
    Lanes,
}

/// The packed copy of a weight. Sums are kept in fp32 whatever it is of, and rounded once.
pub struct PackedLinear {
    dtype: Dtype,
    isa: Isa,
    way: Way,
    out_size: usize,
    in_size: usize,
    /// Output columns of a panel.
    width: usize,
    /// Bytes of a panel.
    panel: usize,
    packed: Memory,
}

impl fmt::Debug for PackedLinear {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PackedLinear")
            .field("shape", &(self.out_size, self.in_size))
            .field("dtype", &self.dtype)
            .field("isa", &self.isa)
            .finish_non_exhaustive()
    }
}

impl PackedLinear {
    /// Packs a weight of `[out, in]`.
    ///
    /// # Errors
    /// A weight without elements, or an instruction set that this machine does not have.
    ///
    /// # Safety
    /// The weight must be there as its pointer, sizes and stride say, of elements of that type, and nobody may write it
    /// meanwhile.
    pub unsafe fn new(
        dtype: Dtype,
        weight: &Matrix,
        isa: Isa,
        team: Team,
        threads: usize,
    ) -> Result<Self, Invalid> {
        if weight.rows == 0 || weight.columns == 0 {
            return Err(Invalid::new(format!(
                "a weight of [{}, {}]: nothing can be packed of it",
                weight.rows, weight.columns
            )));
        }
        if !isa.runs_here() {
            return Err(Invalid::new(format!("this machine does not have {isa}")));
        }
        let way = match (dtype, isa) {
            (Dtype::Bf16, Isa::AmxBf16) => Way::Tiles,
            (Dtype::Bf16, Isa::Avx512Bf16) => Way::Pairs,
            _ => Way::Lanes,
        };
        let (width, depth) = match way {
            #[cfg(target_arch = "x86_64")]
            Way::Tiles => (tiles::WIDTH, tiles::DEPTH),
            _ => (vectors::width(isa), if way == Way::Pairs { 2 } else { 1 }),
        };
        let panel = width * weight.columns.next_multiple_of(depth) * dtype.bytes();
        let panels = weight.rows.div_ceil(width);
        let packed = Memory::zeros(panels * panel);
        let linear =
            Self { dtype, isa, way, out_size: weight.rows, in_size: weight.columns, width, panel, packed };
        let from = Shared(*weight);
        team.share_out(threads, panels, &|_, panel| {
            // SAFETY: panels are written by one thread each, within the copy; the weight is read, as promised.
            unsafe { linear.pack(&from.get(), panel) };
        });
        Ok(linear)
    }

    /// Packs a panel. What it has beyond the weight stays zero.
    unsafe fn pack(&self, weight: &Matrix, panel: usize) {
        // SAFETY: as promised by the caller, of elements of that size.
        unsafe {
            match (self.dtype, self.way) {
                (Dtype::F32, _) => self.pack_units::<u32>(weight, panel, self.in_size),
                (_, Way::Lanes) => self.pack_units::<u16>(weight, panel, self.in_size),
                (_, Way::Tiles | Way::Pairs) => {
                    self.pack_units::<u32>(weight, panel, self.in_size / 2);
                    if !self.in_size.is_multiple_of(2) {
                        self.pack_last(weight, panel);
                    }
                }
            }
        }
    }

    /// Rows of the weight that are columns of a panel.
    fn columns(&self, panel: usize) -> std::ops::Range<usize> {
        panel * self.width..self.out_size.min((panel + 1) * self.width)
    }

    /// Packs so many elements of each column, or pairs of 16-bit elements.
    unsafe fn pack_units<U: Copy>(&self, weight: &Matrix, panel: usize, units: usize) {
        /// Units of a column before those of the next: where they go to stays near.
        const AT_ONCE: usize = 64;
        let row_bytes = weight.row_stride * self.dtype.bytes();
        // SAFETY: within the weight and within the panel.
        unsafe {
            let to = self.packed.start().add(panel * self.panel).cast::<U>();
            for start in (0..units).step_by(AT_ONCE) {
                for (column, row) in self.columns(panel).enumerate() {
                    let from = weight.data.add(row * row_bytes).cast::<U>();
                    for unit in start..units.min(start + AT_ONCE) {
                        to.add(self.place(column, unit)).write(from.add(unit).read_unaligned());
                    }
                }
            }
        }
    }

    /// Packs the last element of each column, which has no other to make a pair with.
    unsafe fn pack_last(&self, weight: &Matrix, panel: usize) {
        let index = self.in_size - 1;
        // SAFETY: as above.
        unsafe {
            let to = self.packed.start().add(panel * self.panel).cast::<u16>();
            for (column, row) in self.columns(panel).enumerate() {
                let from = weight.data.cast::<u16>().add(row * weight.row_stride + index);
                to.add(2 * self.place(column, index / 2)).write(from.read());
            }
        }
    }

    /// Where in a panel an element is, or a pair where pairs are multiplied.
    #[inline(always)]
    fn place(&self, column: usize, unit: usize) -> usize {
        match self.way {
            #[cfg(target_arch = "x86_64")]
            Way::Tiles => tiles::place(column, unit),
            _ => unit * self.width + column,
        }
    }

    /// Output columns.
    #[must_use]
    pub const fn out_size(&self) -> usize {
        self.out_size
    }

    /// Input columns.
    #[must_use]
    pub const fn in_size(&self) -> usize {
        self.in_size
    }

    /// The element type of weight, input and output.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The instruction set in use.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes of the copy.
    #[must_use]
    pub const fn num_bytes(&self) -> usize {
        self.packed.len()
    }

    /// The layer: `input` `[rows, in]` to `out` `[rows, out]`, with a bias of `out` elements where one is given.
    ///
    /// # Errors
    /// What does not fit together; nothing is read or written then.
    ///
    /// # Safety
    /// The tensors must be there as their pointers, sizes and strides say, of elements of the weight's type; nobody
    /// else may write them during the call, and `out` must not overlap the others, nor its own rows each other.
    pub unsafe fn call(
        &self,
        input: &Matrix,
        bias: Option<&Matrix>,
        out: &Matrix,
        team: Team,
        threads: usize,
    ) -> Result<(), Invalid> {
        self.check(input, bias, out)?;
        if input.rows == 0 {
            return Ok(());
        }
        // SAFETY: as promised by the caller, of elements of that type.
        unsafe {
            match self.dtype {
                Dtype::F32 => self.call_in::<f32>(input, bias, out, team, threads),
                Dtype::Bf16 => self.call_in::<bf16>(input, bias, out, team, threads),
                Dtype::F16 => self.call_in::<f16>(input, bias, out, team, threads),
            }
        }
        Ok(())
    }

    /// Checks that a call's tensors fit together.
    fn check(&self, input: &Matrix, bias: Option<&Matrix>, out: &Matrix) -> Result<(), Invalid> {
        let expected = [
            ("the input", input, (out.rows, self.in_size)),
            ("the output", out, (input.rows, self.out_size)),
        ];
        let bias_expected = bias.map(|bias| ("the bias", bias, (1, self.out_size)));
        for (name, matrix, (rows, columns)) in expected.into_iter().chain(bias_expected) {
            if (matrix.rows, matrix.columns) != (rows, columns) {
                return Err(Invalid::new(format!(
                    "{name} is [{}, {}]: [{rows}, {columns}] is expected",
                    matrix.rows, matrix.columns
                )));
            }
        }
        Ok(())
    }

    /// How many panels there are, and how many of them a thread takes at a time of a call of so many rows.
    fn parts(&self, rows: usize, threads: usize) -> (usize, usize) {
        let panels = self.out_size.div_ceil(self.width);
        let at_least = PART_WORK.div_ceil(2 * rows * self.in_size * self.width);
        (panels, panels.div_ceil(threads.max(1) * PARTS).max(at_least).min(panels))
    }

    /// Bytes of a row of the input as the products read it.
    const fn row_bytes(&self) -> usize {
        match self.way {
            Way::Lanes => self.in_size * size_of::<f32>(),
            Way::Tiles | Way::Pairs => self.in_size * self.dtype.bytes(),
        }
    }

    unsafe fn call_in<E: Element>(
        &self,
        input: &Matrix,
        bias: Option<&Matrix>,
        out: &Matrix,
        team: Team,
        threads: usize,
    ) {
        let (panels, each) = self.parts(input.rows, threads);
        let mut copy = READY.take();
        // SAFETY: as promised by the caller.
        let input = unsafe { self.ready::<E>(input, &mut copy, team, threads) };
        let call = Product::<E> {
            linear: self,
            input,
            bias: bias.map(|bias| bias.data.cast_const().cast()),
            out: *out,
            element: PhantomData,
        };
        team.share_out(threads, panels.div_ceil(each), &|_, part| {
            let panels = part * each..panels.min((part + 1) * each);
            Scratch::of_thread(|scratch| {
                // SAFETY: the machine has the instructions; the call was checked.
                unsafe { simd::run(self.isa, RunPanels { call: &call, panels, scratch }) };
            });
        });
        READY.set(copy);
    }

    /// The input as the products read it: where it is, or a copy.
    ///
    /// # Safety
    /// The input must be there as it says, of elements of that type.
    unsafe fn ready<E: Element>(
        &self,
        input: &Matrix,
        copy: &mut Numbers,
        team: Team,
        threads: usize,
    ) -> Matrix {
        let in_pairs = self.way == Way::Pairs;
        let as_it_is = match self.way {
            Way::Tiles => true,
            Way::Pairs => self.in_size.is_multiple_of(2),
            Way::Lanes => self.dtype == Dtype::F32,
        };
        if as_it_is {
            return *input;
        }
        let row_stride = (self.in_size + 1).next_multiple_of(simd::MAX_LANES);
        let to = Shared(Matrix { data: copy.room(input.rows * row_stride).cast(), row_stride, ..*input });
        let (from, count) = (Shared(*input), input.rows);
        team.share_out(threads, count.div_ceil(READY_ROWS), &|_, part| {
            let (from, to) = (from.get(), to.get());
            let first = part * READY_ROWS;
            let rows = first..count.min(first + READY_ROWS);
            let kernel = MakeReady::<E> { from, to, rows, in_pairs, element: PhantomData };
            // SAFETY: rows are written by one thread each, within the copy; the machine has the instructions.
            unsafe { simd::run(self.isa, kernel) };
        });
        to.0
    }
}

thread_local! {
    /// Where the inputs of a thread's calls are made ready.
    static READY: std::cell::RefCell<Numbers> = std::cell::RefCell::default();
}

/// A layer's call, checked.
pub(crate) struct Product<'a, E> {
    linear: &'a PackedLinear,
    /// As its way reads it.
    input: Matrix,
    bias: Option<*const E>,
    out: Matrix,
    element: PhantomData<E>,
}

// SAFETY: its pointers are to tensors that the call's maker keeps, and each thread writes columns of its own.
unsafe impl<E: Sync> Sync for Product<'_, E> {}

/// A matrix that several threads read, or write rows of their own of.
struct Shared(Matrix);
// SAFETY: nobody else touches it meanwhile, as its owner promised.
unsafe impl Sync for Shared {}

impl Shared {
    const fn get(&self) -> Matrix {
        self.0
    }
}

impl<E: Element> Product<'_, E> {
    /// Where the output's columns of a panel are, from a row on.
    ///
    /// # Safety
    /// Row and panel must be the call's.
    #[inline(always)]
    unsafe fn written(&self, row: usize, panel: usize) -> Written<E> {
        let first = panel * self.linear.width;
        // SAFETY: in bounds.
        unsafe {
            Written {
                // Of some columns the others may not be there.
                to: self.out.data.cast::<E>().wrapping_add(row * self.out.row_stride + first),
                row_stride: self.out.row_stride,
                columns: self.linear.width.min(self.linear.out_size - first),
                bias: self.bias.map(|bias| bias.add(first)),
            }
        }
    }
}

/// Some rows of the output in the columns of a panel.
#[derive(Clone, Copy)]
struct Written<E> {
    to: *mut E,
    row_stride: usize,
    columns: usize,
    bias: Option<*const E>,
}

impl<E: Element> Written<E> {
    /// Whether all columns of a panel of that width are there, and sums are written as they are.
    #[inline(always)]
    const fn is_plain(&self, width: usize) -> bool {
        self.columns == width && self.bias.is_none()
    }

    /// Writes a vector of sums, where everything [is plain](Self::is_plain).
    ///
    /// # Safety
    /// The machine must have the instructions of `S`; the row must be one of these, the column a panel's.
    #[inline(always)]
    unsafe fn write_whole<S: Simd>(&self, row: usize, column: usize, sum: S::V) {
        // SAFETY: in bounds.
        unsafe { E::store::<S>(self.to.add(row * self.row_stride + column), sum) };
    }

    /// Writes the sums of some rows, `width` apart.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`; the rows must be these, and the sums be there.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, sums: *const f32, rows: usize, width: usize) {
        // SAFETY: in bounds.
        unsafe {
            for row in 0..rows {
                for column in (0..self.columns).step_by(S::LANES) {
                    let count = S::LANES.min(self.columns - column);
                    let mut sum = S::load(sums.add(row * width + column));
                    if let Some(bias) = self.bias {
                        sum = S::add(sum, E::load_part::<S>(bias.add(column), count));
                    }
                    E::store_part::<S>(self.to.add(row * self.row_stride + column), sum, count);
                }
            }
        }
    }
}

/// Some panels of a call.
struct RunPanels<'a, E> {
    call: &'a Product<'a, E>,
    panels: std::ops::Range<usize>,
    scratch: &'a mut Scratch,
}

impl<E: Element> Kernel for RunPanels<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { call, panels, scratch } = self;
        // SAFETY: the call was checked; the machine has what its way needs.
        unsafe {
            match call.linear.way {
                #[cfg(target_arch = "x86_64")]
                Way::Tiles => call.tiles::<S>(panels, scratch),
                Way::Pairs => call.vectors::<S, Pairs>(panels, scratch),
                _ => call.vectors::<S, Lanes<E>>(panels, scratch),
            }
        }
    }
}

/// A thread's own memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    sums: Numbers,
    /// What is no whole tile of the input.
    #[cfg(target_arch = "x86_64")]
    input: Numbers,
    /// Of a panel.
    unpacked: Numbers,
}

impl Scratch {
    /// That of the calling thread.
    fn of_thread(body: impl FnOnce(&mut Self)) {
        thread_local! {
            static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::default();
        }
        SCRATCH.with_borrow_mut(body);
    }
}

/// `total` in parts of about `most`, each as large as the others or nearly so.
#[inline(always)]
fn even_parts(total: usize, most: usize) -> usize {
    total.div_ceil(total.div_ceil(most.max(1)).max(1)).max(1)
}
