//! What stands between the large operators of a forward, for CPUs: sums, products, norms, activations and rotations,
//! computed row by row in one pass instead of an operator at a time.
//!
//! A row is a token's part of each tensor: `groups` runs of `length` elements (heads of some size, say). A [`Program`]
//! computes rows of its outputs from the same rows of its inputs, all in between stays in the nearest cache. Every
//! computed result is rounded to its own dtype, as if it had been written to a tensor.

use half::{bf16, f16};

use crate::attention::Invalid;
use crate::element::{Dtype, Element};
use crate::isa::Isa;
use crate::math::{exp, tanh};
use crate::numbers::Numbers;
use crate::simd::{self, Kernel, MAX_LANES, Simd};
use crate::team::Team;

/// Parts of a call for each thread: the next thread that is free takes the next.
const PARTS: usize = 4;
/// Elements of a part, at least.
const PART_ELEMENTS: usize = 8192;
/// Elements of a register, at most: no row of a model is nearly that long.
const MOST_ELEMENTS: usize = 1 << 28;

macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err(Invalid::new(format!($($message)+)));
        }
    };
}

/// A register as some step sees it: so many groups of so many elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which register.
    pub register: usize,
    /// Groups of a row.
    pub groups: usize,
    /// Elements of a group.
    pub length: usize,
}

impl Place {
    /// Elements of a row; those of no register where they are more than can be counted.
    const fn size(self) -> usize {
        self.groups.saturating_mul(self.length)
    }
}

/// What a step reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// A register; one group, or one element of each, stands for all.
    Place(Place),
    /// A number.
    Number(f32),
}

/// An operation of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what they are called")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

/// An operation of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    /// The same, rounded to the result's dtype.
    Copy,
    /// With the other sign.
    Neg,
    /// Times itself.
    Square,
    /// The square root.
    Sqrt,
    /// One over the square root.
    Rsqrt,
    /// e to its power.
    Exp,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `x * sigmoid(x)`
    Silu,
    /// The larger one of it and zero.
    Relu,
    /// GELU by its approximation with a hyperbolic tangent.
    GeluTanh,
}

/// One step of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// `to = a op b`
    Binary(Binary, Operand, Operand),
    /// `to = op(a)`
    Unary(Unary, Operand),
    /// The mean of each group.
    Mean(Place),
    /// Elements of each group from one on, as they are.
    Slice(Place, usize),
    /// The groups of some registers, one behind the other, as they are.
    Cat(Vec<Place>),
}

/// A step with where its result goes and the dtype that this is rounded to.
#[derive(Clone, Debug, PartialEq)]
pub struct Instruction {
    /// What is computed.
    pub step: Step,
    /// Where to: the register after those of the inputs and of the instructions before.
    pub to: Place,
    /// Of the result.
    pub dtype: Dtype,
}

/// Rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The first element.
    pub data: *mut u8,
    /// Of the elements.
    pub dtype: Dtype,
    /// Elements from a row to the next; 0: all rows are the same.
    pub row_stride: usize,
    /// Elements from a group to the next.
    pub group_stride: usize,
}

/// A program over rows.
#[derive(Debug)]
pub struct Program {
    inputs: Vec<Place>,
    instructions: Vec<Instruction>,
    outputs: Vec<Place>,
    /// Where each register begins in a thread's memory.
    starts: Vec<usize>,
    room: usize,
    /// Elements that each register is read and written by: whole vectors go beyond others.
    granules: Vec<usize>,
    isa: Isa,
}

impl Program {
    /// A program whose inputs stand in registers of their own at first.
    ///
    /// # Errors
    /// A step that does not fit its operands, a register that is read before it is written or out of order, or an
    /// instruction set that this machine does not have.
    pub fn new(
        inputs: Vec<Place>,
        instructions: Vec<Instruction>,
        outputs: Vec<Place>,
        isa: Isa,
    ) -> Result<Self, Invalid> {
        ensure!(isa.runs_here(), "this machine does not have {isa}");
        let mut sizes = Vec::with_capacity(inputs.len() + instructions.len());
        for &input in &inputs {
            write(&mut sizes, input)?;
        }
        for (index, instruction) in instructions.iter().enumerate() {
            check(&sizes, instruction)
                .and_then(|()| write(&mut sizes, instruction.to))
                .map_err(|reason| Invalid::new(format!("instruction {index}: {reason}")))?;
        }
        for &output in &outputs {
            read(&sizes, output)?;
        }
        let mut granules = vec![0; sizes.len()];
        let mut used = |place: Place, by: usize| {
            let granule: &mut usize = &mut granules[place.register];
            *granule = greatest_common_divisor(*granule, by);
        };
        inputs.iter().chain(&outputs).for_each(|&place| used(place, place.length));
        for instruction in &instructions {
            let mut operand = |operand: Operand| {
                if let Operand::Place(place) = operand {
                    used(place, place.length);
                }
            };
            match &instruction.step {
                &Step::Binary(_, a, b) => [a, b].into_iter().for_each(operand),
                &Step::Unary(_, a) => operand(a),
                &Step::Mean(from) => used(from, from.length),
                // Parts begin and end anywhere.
                &Step::Slice(from, _) => used(from, 1),
                Step::Cat(parts) => parts.iter().for_each(|&part| used(part, 1)),
            }
            let copies = matches!(instruction.step, Step::Slice(..) | Step::Cat(_));
            used(instruction.to, if copies { 1 } else { instruction.to.length });
        }
        let (mut starts, mut room) = (Vec::with_capacity(sizes.len()), 0);
        for size in sizes {
            starts.push(room);
            // Whole vectors are written.
            room += size.next_multiple_of(MAX_LANES) + MAX_LANES;
        }
        Ok(Self { inputs, instructions, outputs, starts, room, granules, isa })
    }

    /// The inputs.
    #[must_use]
    pub fn inputs(&self) -> &[Place] {
        &self.inputs
    }

    /// The outputs.
    #[must_use]
    pub fn outputs(&self) -> &[Place] {
        &self.outputs
    }

    /// Whether each of so many columns of its outputs is computed from the same column of its inputs alone.
    #[must_use]
    pub fn is_columnwise(&self, columns: usize) -> bool {
        let whole = |place: Place| (place.groups, place.length) == (1, columns);
        let lanewise = |instruction: &Instruction| match instruction.step {
            Step::Binary(_, a, b) => [a, b].into_iter().all(|operand| match operand {
                Operand::Place(place) => whole(place),
                Operand::Number(_) => true,
            }),
            Step::Unary(_, Operand::Place(place)) => whole(place),
            Step::Unary(_, Operand::Number(_)) => true,
            Step::Mean(_) | Step::Slice(..) | Step::Cat(_) => false,
        };
        let results = self.instructions.iter().map(|instruction| instruction.to);
        self.inputs.iter().chain(&self.outputs).copied().chain(results).all(whole)
            && self.instructions.iter().all(lanewise)
    }

    /// The same over fewer columns, of a program that [is columnwise](Self::is_columnwise).
    pub(crate) fn narrowed(&self, columns: usize) -> Self {
        let narrow = |place: Place| Place { length: columns, ..place };
        let operand = |operand: Operand| match operand {
            Operand::Place(place) => Operand::Place(narrow(place)),
            number => number,
        };
        let step = |step: &Step| match *step {
            Step::Binary(op, a, b) => Step::Binary(op, operand(a), operand(b)),
            Step::Unary(op, a) => Step::Unary(op, operand(a)),
            ref other => other.clone(),
        };
        let instructions = self.instructions.iter();
        Self {
            inputs: self.inputs.iter().copied().map(narrow).collect(),
            instructions: instructions
                .map(|instruction| Instruction {
                    step: step(&instruction.step),
                    to: narrow(instruction.to),
                    dtype: instruction.dtype,
                })
                .collect(),
            outputs: self.outputs.iter().copied().map(narrow).collect(),
            // Registers stay where they are, with room to spare.
            starts: self.starts.clone(),
            granules: vec![columns; self.granules.len()],
            ..*self
        }
    }

    /// Computes some rows on this thread.
    ///
    /// # Safety
    /// As of [`Self::run`], with as many tensors as the program has inputs and outputs.
    pub(crate) unsafe fn run_here(&self, inputs: &[Rows], outputs: &[Rows], rows: std::ops::Range<usize>) {
        thread_local! {
            static SCRATCH: std::cell::RefCell<(Numbers, Vec<*mut f32>)> = std::cell::RefCell::default();
        }
        let tensors = Tensors { inputs, outputs };
        SCRATCH.with_borrow_mut(|(memory, places)| {
            let memory = memory.room(self.room);
            // SAFETY: the machine has the instructions; the tensors are as promised by the caller.
            unsafe { simd::run(self.isa, RunRows { program: self, tensors, rows, memory, places }) };
        });
    }

    /// Whether a row of a tensor can be a register as it is: fp32, whole vectors, and nothing between its groups.
    #[inline(always)]
    fn is_register<S: Simd>(&self, place: Place, rows: &Rows) -> bool {
        self.granules[place.register].is_multiple_of(S::LANES)
            && rows.dtype == Dtype::F32
            && (place.groups == 1 || rows.group_stride == place.length)
    }

    /// Computes so many rows.
    ///
    /// # Errors
    /// Not as many tensors as the program has inputs and outputs.
    ///
    /// # Safety
    /// The tensors must have so many rows of the groups and elements of their places, where their pointers and strides
    /// say; nobody else may write them during the call, and no output may overlap another tensor or its own rows.
    pub unsafe fn run(
        &self,
        inputs: &[Rows],
        outputs: &[Rows],
        rows: usize,
        team: Team,
        threads: usize,
    ) -> Result<(), Invalid> {
        ensure!(
            inputs.len() == self.inputs.len() && outputs.len() == self.outputs.len(),
            "{} inputs and {} outputs of a program of {} and {}",
            inputs.len(),
            outputs.len(),
            self.inputs.len(),
            self.outputs.len()
        );
        let elements: usize = self.instructions.iter().map(|instruction| instruction.to.size()).sum();
        let each =
            rows.div_ceil(threads.max(1) * PARTS).max(PART_ELEMENTS / elements.max(1)).clamp(1, rows.max(1));
        let tensors = Tensors { inputs, outputs };
        team.share_out(threads, rows.div_ceil(each), &|_, part| {
            let Tensors { inputs, outputs } = &tensors;
            // SAFETY: as promised by the caller.
            unsafe { self.run_here(inputs, outputs, part * each..rows.min((part + 1) * each)) };
        });
        Ok(())
    }
}

const fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Marks the next register as written.
fn write(sizes: &mut Vec<usize>, to: Place) -> Result<(), Invalid> {
    ensure!(
        (1..=MOST_ELEMENTS).contains(&to.size()),
        "register {} has {} groups of {} elements: 1 to {MOST_ELEMENTS} elements are possible",
        to.register,
        to.groups,
        to.length
    );
    ensure!(
        to.register == sizes.len(),
        "register {} is written, and {} is the next",
        to.register,
        sizes.len()
    );
    sizes.push(to.size());
    Ok(())
}

/// Checks that a register was written with so many elements.
fn read(sizes: &[usize], from: Place) -> Result<(), Invalid> {
    let size = sizes.get(from.register);
    ensure!(
        size == Some(&from.size()),
        "register {} is read as {} groups of {}, and holds {} elements",
        from.register,
        from.groups,
        from.length,
        size.unwrap_or(&0)
    );
    Ok(())
}

/// Checks that a step fits what it reads.
fn check(sizes: &[usize], instruction: &Instruction) -> Result<(), Invalid> {
    let to = instruction.to;
    let operand = |operand: Operand| {
        let Operand::Place(from) = operand else { return Ok(()) };
        read(sizes, from)?;
        ensure!(
            (from.groups == to.groups || from.groups == 1) && (from.length == to.length || from.length == 1),
            "{} groups of {} do not become {} of {}",
            from.groups,
            from.length,
            to.groups,
            to.length
        );
        Ok(())
    };
    match &instruction.step {
        &Step::Binary(_, a, b) => operand(a).and(operand(b)),
        &Step::Unary(_, a) => operand(a),
        &Step::Mean(from) => {
            ensure!(
                to.length == 1 && to.groups == from.groups,
                "a mean of {} groups goes to {} of {}",
                from.groups,
                to.groups,
                to.length
            );
            read(sizes, from)
        }
        &Step::Slice(from, start) => {
            ensure!(
                to.groups == from.groups && start.saturating_add(to.length) <= from.length,
                "{} elements from {start} on of {}",
                to.length,
                from.length
            );
            read(sizes, from)
        }
        Step::Cat(parts) => {
            let length = parts.iter().fold(0, |length: usize, part| length.saturating_add(part.length));
            ensure!(
                length == to.length && parts.iter().all(|part| part.groups == to.groups),
                "parts of {length} elements together become {}",
                to.length
            );
            parts.iter().try_for_each(|&part| read(sizes, part))
        }
    }
}

/// The tensors of a call.
#[derive(Clone, Copy)]
struct Tensors<'a> {
    inputs: &'a [Rows],
    outputs: &'a [Rows],
}

// SAFETY: their pointers are to tensors that the call's maker keeps, and each thread writes rows of its own.
unsafe impl Sync for Tensors<'_> {}

struct RunRows<'a> {
    program: &'a Program,
    tensors: Tensors<'a>,
    rows: std::ops::Range<usize>,
    memory: *mut f32,
    /// Where the registers are.
    places: &'a mut Vec<*mut f32>,
}

impl Kernel for RunRows<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { program, tensors, rows, memory, places } = self;
        // SAFETY: registers are within the memory, rows within the tensors.
        unsafe {
            places.clear();
            places.extend(program.starts.iter().map(|&start| memory.add(start)));
            for row in rows.clone() {
                for (&place, input) in program.inputs.iter().zip(tensors.inputs) {
                    if row > rows.start && input.row_stride == 0 {
                        continue;
                    }
                    if program.is_register::<S>(place, input) {
                        places[place.register] = input.data.cast::<f32>().add(row * input.row_stride);
                        continue;
                    }
                    let to = places[place.register];
                    match input.dtype {
                        Dtype::F32 => load_row::<S, f32>(input, row, place, to),
                        Dtype::Bf16 => load_row::<S, bf16>(input, row, place, to),
                        Dtype::F16 => load_row::<S, f16>(input, row, place, to),
                    }
                }
                for (&place, output) in program.outputs.iter().zip(tensors.outputs) {
                    if place.register >= program.inputs.len() && program.is_register::<S>(place, output) {
                        places[place.register] = output.data.cast::<f32>().add(row * output.row_stride);
                    }
                }
                let register = |place: Place| places[place.register];
                for instruction in &program.instructions {
                    match instruction.dtype {
                        Dtype::F32 => step::<S, f32>(instruction, &register),
                        Dtype::Bf16 => step::<S, bf16>(instruction, &register),
                        Dtype::F16 => step::<S, f16>(instruction, &register),
                    }
                }
                for (&place, output) in program.outputs.iter().zip(tensors.outputs) {
                    let from = register(place);
                    if from.cast() == output.data.wrapping_add(row * output.row_stride * size_of::<f32>()) {
                        continue;
                    }
                    match output.dtype {
                        Dtype::F32 => store_row::<S, f32>(output, row, place, from),
                        Dtype::Bf16 => store_row::<S, bf16>(output, row, place, from),
                        Dtype::F16 => store_row::<S, f16>(output, row, place, from),
                    }
                }
            }
        }
    }
}

/// Runs of a row that can be taken as one where nothing lies between them.
#[inline(always)]
fn runs(rows: &Rows, place: Place) -> (usize, usize) {
    match rows.group_stride == place.length {
        true => (1, place.size()),
        false => (place.groups, place.length),
    }
}

#[inline(always)]
unsafe fn load_row<S: Simd, E: Element>(rows: &Rows, row: usize, place: Place, to: *mut f32) {
    let (groups, length) = runs(rows, place);
    // SAFETY: as promised by the caller; the last vector goes beyond the run, where the next one or nothing is.
    unsafe {
        for group in 0..groups {
            let from = rows.data.cast::<E>().add(row * rows.row_stride + group * rows.group_stride);
            let to = to.add(group * length);
            for at in (0..length).step_by(S::LANES) {
                let value = match length - at >= S::LANES {
                    true => E::load::<S>(from.add(at)),
                    false => E::load_part::<S>(from.add(at), length - at),
                };
                S::store(to.add(at), value);
            }
        }
    }
}

#[inline(always)]
unsafe fn store_row<S: Simd, E: Element>(rows: &Rows, row: usize, place: Place, from: *const f32) {
    let (groups, length) = runs(rows, place);
    // SAFETY: as promised by the caller.
    unsafe {
        for group in 0..groups {
            let to = rows.data.cast::<E>().add(row * rows.row_stride + group * rows.group_stride);
            let from = from.add(group * length);
            for at in (0..length).step_by(S::LANES) {
                E::store_part::<S>(to.add(at), S::load(from.add(at)), S::LANES.min(length - at));
            }
        }
    }
}

#[inline(always)]
unsafe fn step<S: Simd, E: Element>(instruction: &Instruction, register: &impl Fn(Place) -> *mut f32) {
    let to = instruction.to;
    // SAFETY: the program was checked.
    unsafe {
        match &instruction.step {
            &Step::Binary(op, a, b) => match op {
                Binary::Add => lanewise::<S, E, Add>(a, b, to, register),
                Binary::Sub => lanewise::<S, E, Sub>(a, b, to, register),
                Binary::Mul => lanewise::<S, E, Mul>(a, b, to, register),
                Binary::Div => lanewise::<S, E, Div>(a, b, to, register),
            },
            &Step::Unary(op, a) => {
                let none = Operand::Number(0.0);
                match op {
                    Unary::Copy => lanewise::<S, E, Same>(a, none, to, register),
                    Unary::Neg => lanewise::<S, E, Neg>(a, none, to, register),
                    Unary::Square => lanewise::<S, E, Square>(a, none, to, register),
                    Unary::Sqrt => lanewise::<S, E, Sqrt>(a, none, to, register),
                    Unary::Rsqrt => lanewise::<S, E, Rsqrt>(a, none, to, register),
                    Unary::Exp => lanewise::<S, E, Exp>(a, none, to, register),
                    Unary::Tanh => lanewise::<S, E, Tanh>(a, none, to, register),
                    Unary::Sigmoid => lanewise::<S, E, Sigmoid>(a, none, to, register),
                    Unary::Silu => lanewise::<S, E, Silu>(a, none, to, register),
                    Unary::Relu => lanewise::<S, E, Relu>(a, none, to, register),
                    Unary::GeluTanh => lanewise::<S, E, GeluTanh>(a, none, to, register),
                }
            }
            &Step::Mean(from) => {
                for group in 0..from.groups {
                    let mean =
                        sum::<S>(register(from).add(group * from.length), from.length) / from.length as f32;
                    let rounded = S::lanes(E::rounded::<S>(S::splat(mean)));
                    register(to).add(group).write(rounded[0]);
                }
            }
            &Step::Slice(from, start) => {
                for group in 0..to.groups {
                    let from = register(from).add(group * from.length + start);
                    copy::<S>(from, register(to).add(group * to.length), to.length);
                }
            }
            Step::Cat(parts) => {
                for group in 0..to.groups {
                    let mut at = register(to).add(group * to.length);
                    for &part in parts {
                        copy::<S>(register(part).add(group * part.length), at, part.length);
                        at = at.add(part.length);
                    }
                }
            }
        }
    }
}

/// Copies elements; the last vector may go beyond them, into what is written next or belongs to nobody.
#[inline(always)]
unsafe fn copy<S: Simd>(from: *const f32, to: *mut f32, length: usize) {
    for at in (0..length).step_by(S::LANES) {
        // SAFETY: registers end with a whole vector to spare.
        unsafe { S::store(to.add(at), S::load(from.add(at))) };
    }
}

#[inline(always)]
unsafe fn sum<S: Simd>(from: *const f32, length: usize) -> f32 {
    // SAFETY: as promised by the caller.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        let whole = length - length % S::LANES;
        for (index, at) in (0..whole).step_by(S::LANES).enumerate() {
            sums[index % 4] = S::add(sums[index % 4], S::load(from.add(at)));
        }
        if whole < length {
            sums[0] = S::add(sums[0], S::load_part(from.add(whole), length - whole));
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}

/// e to the power of any number; infinity from 88.8 on.
#[inline(always)]
unsafe fn bounded_exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: as promised by the caller. The exponential proper ends at 88: the square of that of half the way. A
    // minimum is written as a maximum, in which what is no number stays none.
    unsafe {
        let bounded = S::sub(S::splat(0.0), S::max(S::splat(-176.0), S::sub(S::splat(0.0), x)));
        let half = exp::<S>(S::mul(S::splat(0.5), bounded));
        S::mul(half, half)
    }
}

#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: S::V) -> S::V {
    // SAFETY: as promised by the caller.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, bounded_exp::<S>(S::sub(S::splat(0.0), x))))
    }
}

/// An operation on lanes; those of one operand leave the other alone. No closures: what is not inlined is compiled
/// without the instruction set.
///
/// # Safety
/// The machine must have the instructions of `S`.
trait Lanewise {
    unsafe fn of<S: Simd>(a: S::V, b: S::V) -> S::V;
}

macro_rules! lanewise {
    ($($name:ident($a:pat, $b:pat) = $result:expr;)+) => {$(
        struct $name;
        impl Lanewise for $name {
            #[inline(always)]
            #[allow(unused_unsafe, reason = "one of them does nothing")]
            unsafe fn of<S: Simd>($a: S::V, $b: S::V) -> S::V {
                // SAFETY: as promised by the caller.
                unsafe { $result }
            }
        }
    )+};
}

lanewise! {
    Add(a, b) = S::add(a, b);
    Sub(a, b) = S::sub(a, b);
    Mul(a, b) = S::mul(a, b);
    Div(a, b) = S::div(a, b);
    Same(a, _) = a;
    Neg(a, _) = S::sub(S::splat(-0.0), a);
    Square(a, _) = S::mul(a, a);
    Sqrt(a, _) = S::sqrt(a);
    Rsqrt(a, _) = S::div(S::splat(1.0), S::sqrt(a));
    Exp(a, _) = bounded_exp::<S>(a);
    Tanh(a, _) = tanh::<S>(a);
    Sigmoid(a, _) = sigmoid::<S>(a);
    Silu(a, _) = S::mul(a, sigmoid::<S>(a));
    Relu(a, _) = S::max(S::splat(0.0), a);
    GeluTanh(a, _) = {
        let cube = S::mul(S::mul(a, a), a);
        let inner = S::mul_add(S::splat(0.044_715), cube, a);
        let inner = S::mul(S::splat((2.0 / std::f32::consts::PI).sqrt()), inner);
        S::mul(S::mul(S::splat(0.5), a), S::add(S::splat(1.0), tanh::<S>(inner)))
    };
}

/// How an operand is read along a run.
#[derive(Clone, Copy)]
enum Source {
    Run(*const f32),
    One(f32),
}

/// A result of `to`'s groups, group by group, or all as one run where the operands are laid out alike.
#[inline(always)]
unsafe fn lanewise<S: Simd, E: Element, O: Lanewise>(
    a: Operand,
    b: Operand,
    to: Place,
    register: &impl Fn(Place) -> *mut f32,
) {
    let is_alike = |operand: Operand| match operand {
        Operand::Place(place) => (place.groups, place.length) == (to.groups, to.length),
        Operand::Number(_) => true,
    };
    let (groups, length) = match is_alike(a) && is_alike(b) {
        true => (1, to.size()),
        false => (to.groups, to.length),
    };
    // SAFETY: as promised by the caller.
    unsafe {
        let source = |operand: Operand, group: usize| match operand {
            Operand::Number(number) => Source::One(number),
            Operand::Place(place) => {
                let first = register(place).add(if place.groups == 1 { 0 } else { group * place.length });
                match place.length == 1 && to.length > 1 {
                    true => Source::One(*first),
                    false => Source::Run(first),
                }
            }
        };
        for group in 0..groups {
            let to = register(to).add(group * length);
            match (source(a, group), source(b, group)) {
                (Source::Run(a), Source::Run(b)) => {
                    for at in (0..length).step_by(S::LANES) {
                        let value = O::of::<S>(S::load(a.add(at)), S::load(b.add(at)));
                        S::store(to.add(at), E::rounded::<S>(value));
                    }
                }
                (Source::Run(a), Source::One(b)) => {
                    let b = S::splat(b);
                    for at in (0..length).step_by(S::LANES) {
                        S::store(to.add(at), E::rounded::<S>(O::of::<S>(S::load(a.add(at)), b)));
                    }
                }
                (Source::One(a), Source::Run(b)) => {
                    let a = S::splat(a);
                    for at in (0..length).step_by(S::LANES) {
                        S::store(to.add(at), E::rounded::<S>(O::of::<S>(a, S::load(b.add(at)))));
                    }
                }
                (Source::One(a), Source::One(b)) => {
                    let value = E::rounded::<S>(O::of::<S>(S::splat(a), S::splat(b)));
                    for at in (0..length).step_by(S::LANES) {
                        S::store(to.add(at), value);
                    }
                }
            }
        }
    }
}
