//! Row programs against plain arithmetic, over random programs, shapes, strides and dtypes, with everything that is not
//! to be read or written poisoned or out of reach.

use chairlift_kernels::element::Dtype;
use chairlift_kernels::isa::Isa;
use chairlift_kernels::rowwise::{Binary, Instruction, Operand, Place, Program, Rows, Step, Unary};
use chairlift_kernels::team::Team;
use half::{bf16, f16};
use proptest::prelude::*;

mod common;

use common::{Noise, Tensor, cases};

const BINARIES: [Binary; 4] = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div];
const UNARIES: [Unary; 11] = [
    Unary::Copy,
    Unary::Neg,
    Unary::Square,
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Exp,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::Silu,
    Unary::Relu,
    Unary::GeluTanh,
];

#[derive(Clone, Debug)]
struct Story {
    groups: usize,
    length: usize,
    rows: usize,
    /// Of each input: dtype, whether all rows are the same, whether it has one group, one element of each.
    inputs: Vec<(Dtype, bool, bool, bool)>,
    /// Of each step: what it is, which registers, and the result's dtype.
    steps: Vec<(usize, usize, usize, Dtype)>,
    gap: usize,
    at_end: bool,
    threads: usize,
    seed: u64,
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop_oneof![2 => Just(Dtype::F32), 2 => Just(Dtype::Bf16), 1 => Just(Dtype::F16)]
}

fn stories() -> impl Strategy<Value = Story> {
    let length = prop_oneof![1_usize..40, Just(64), 40_usize..150];
    let inputs = prop::collection::vec((dtypes(), any::<bool>(), any::<bool>(), any::<bool>()), 1..4);
    let steps = prop::collection::vec((0_usize..20, any::<usize>(), any::<usize>(), dtypes()), 1..7);
    (1_usize..5, length, 1_usize..30, inputs, steps, 0_usize..3, any::<bool>(), 1_usize..4, any::<u64>())
        .prop_map(|(groups, length, rows, inputs, steps, gap, at_end, threads, seed)| Story {
            groups,
            length,
            rows,
            inputs,
            steps,
            gap,
            at_end,
            threads,
            seed,
        })
}

fn rounded(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
    }
}

fn binary(op: Binary, a: f32, b: f32) -> f32 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
    }
}

fn unary(op: Unary, x: f32) -> f32 {
    let x = f64::from(x);
    let sigmoid = 1.0 / (1.0 + (-x).exp());
    let result = match op {
        Unary::Copy => x,
        Unary::Neg => -x,
        Unary::Square => x * x,
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Exp => x.exp(),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => sigmoid,
        Unary::Silu => x * sigmoid,
        Unary::Relu => {
            if x.is_nan() {
                x
            } else {
                x.max(0.0)
            }
        }
        Unary::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
        }
    };
    result as f32
}

/// Distance of neighbours, relative to the number; of fp32 what arithmetic takes.
fn unit(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => 2e-6,
        Dtype::Bf16 => 2.0_f32.powi(-7),
        Dtype::F16 => 2.0_f32.powi(-10),
    }
}

/// One row of a register: the value, and how far off it may be.
type Row = Vec<(f32, f32)>;

/// The result of a step, element by element.
fn evaluate(instruction: &Instruction, registers: &[Row]) -> Row {
    let to = instruction.to;
    let at = |operand: Operand, group: usize, index: usize| match operand {
        Operand::Number(number) => (number, 0.0),
        Operand::Place(place) => {
            let group = if place.groups == 1 { 0 } else { group };
            let index = if place.length == 1 { 0 } else { index };
            registers[place.register][group * place.length + index]
        }
    };
    // What a difference of the operands makes, and what arithmetic and rounding add.
    let unit = unit(instruction.dtype);
    // Of fp16 the smallest numbers lie at equal distances.
    let least = if instruction.dtype == Dtype::F16 { 2.0_f32.powi(-24) } else { 0.0 };
    let finish = |value: f32, moved: f32| {
        let value = rounded(value, instruction.dtype);
        (value, moved + value.abs() * unit + least + 1e-7)
    };
    let mut row = Vec::new();
    for group in 0..to.groups {
        for index in 0..to.length {
            row.push(match &instruction.step {
                &Step::Binary(op, a, b) => {
                    let ((a, da), (b, db)) = (at(a, group, index), at(b, group, index));
                    let value = binary(op, a, b);
                    let corners = [(a - da, b - db), (a + da, b - db), (a - da, b + db), (a + da, b + db)];
                    let moved = corners.map(|(a, b)| (binary(op, a, b) - value).abs());
                    finish(value, moved.into_iter().fold(0.0, f32::max))
                }
                &Step::Unary(op, a) => {
                    let (a, da) = at(a, group, index);
                    let value = unary(op, a);
                    let moved = [a - da, a + da].map(|a| (unary(op, a) - value).abs());
                    // The formula of this one takes 1 from nearly 1.
                    let lost = if op == Unary::GeluTanh { 3e-7 * a.abs() } else { 0.0 };
                    finish(value, moved.into_iter().fold(0.0, f32::max) + value.abs() * 3e-6 + lost)
                }
                &Step::Mean(from) => {
                    let run = &registers[from.register][group * from.length..][..from.length];
                    let sum: f64 = run.iter().map(|&(value, _)| f64::from(value)).sum();
                    let size: f32 = run.iter().map(|&(value, off)| value.abs() * 1e-6 + off).sum();
                    finish((sum / from.length as f64) as f32, size / from.length as f32)
                }
                &Step::Slice(from, start) => registers[from.register][group * from.length + start + index],
                Step::Cat(parts) => {
                    let mut index = index;
                    let part = parts.iter().find(|part| {
                        let is_in = index < part.length;
                        if !is_in {
                            index -= part.length;
                        }
                        is_in
                    });
                    let part = part.expect("it is in one");
                    registers[part.register][group * part.length + index]
                }
            });
        }
    }
    row
}

/// The steps of a story as a program over places.
fn instructions(story: &Story, inputs: &[Place]) -> Vec<Instruction> {
    let mut places = inputs.to_vec();
    let mut made = Vec::new();
    for &(kind, a, b, dtype) in &story.steps {
        let register = places.len();
        let (a, b) = (places[a % places.len()], places[b % places.len()]);
        let common = |a: Place, b: Place| Place {
            register,
            groups: a.groups.max(b.groups),
            length: a.length.max(b.length),
        };
        let fits = |a: usize, b: usize| a == b || a == 1 || b == 1;
        let (step, to) = match kind {
            0..4 if fits(a.groups, b.groups) && fits(a.length, b.length) => {
                (Step::Binary(BINARIES[kind], Operand::Place(a), Operand::Place(b)), common(a, b))
            }
            4 => (Step::Binary(Binary::Mul, Operand::Place(a), Operand::Number(0.75)), common(a, a)),
            5 => (Step::Binary(Binary::Sub, Operand::Number(1.5), Operand::Place(a)), common(a, a)),
            6 => (Step::Mean(a), Place { register, groups: a.groups, length: 1 }),
            7 => {
                let start = a.length / 3;
                (Step::Slice(a, start), Place { register, groups: a.groups, length: a.length - start })
            }
            8 if a.groups == b.groups && a.length + b.length < 400 => {
                (Step::Cat(vec![a, b]), Place { register, groups: a.groups, length: a.length + b.length })
            }
            _ => (Step::Unary(UNARIES[kind % UNARIES.len()], Operand::Place(a)), common(a, a)),
        };
        // Parts are taken as they are.
        made.push(Instruction { step, to, dtype });
        places.push(to);
    }
    made
}

fn check(story: &Story, isa: Isa, team: Team) {
    let rows = story.rows;
    let mut noise = Noise(story.seed);
    let mut inputs = Vec::new();
    let mut tensors = Vec::new();
    let mut values: Vec<Vec<Row>> = vec![Vec::new(); rows];
    for (register, &(dtype, is_constant, one_group, one_element)) in story.inputs.iter().enumerate() {
        let place = Place {
            register,
            groups: if one_group { 1 } else { story.groups },
            length: if one_element { 1 } else { story.length },
        };
        let group_stride = place.length + story.gap;
        let row_stride = if is_constant { 0 } else { place.groups * group_stride };
        let elements = (rows - 1) * row_stride + (place.groups - 1) * group_stride + place.length;
        let mut tensor = Tensor::new(elements, dtype, story.at_end);
        for (row, registers) in values.iter_mut().enumerate() {
            let mut numbers = Row::new();
            for group in 0..place.groups {
                for index in 0..place.length {
                    let at = row * row_stride + group * group_stride + index;
                    if row == 0 || row_stride > 0 {
                        tensor.set(at, 3.0 * noise.next());
                    }
                    numbers.push((tensor.get(at) as f32, 0.0));
                }
            }
            registers.push(numbers);
        }
        inputs.push(place);
        tensors.push((tensor, dtype, row_stride, group_stride));
    }
    let instructions = instructions(story, &inputs);
    for registers in &mut values {
        for instruction in &instructions {
            let row = evaluate(instruction, registers);
            registers.push(row);
        }
    }
    let outputs: Vec<Place> = instructions.iter().map(|instruction| instruction.to).collect();
    let mut results: Vec<_> = instructions
        .iter()
        .map(|instruction| {
            let to = instruction.to;
            let group_stride = to.length + story.gap;
            let row_stride = to.groups * group_stride;
            let elements = (rows - 1) * row_stride + (to.groups - 1) * group_stride + to.length;
            (Tensor::new(elements, instruction.dtype, story.at_end), row_stride, group_stride)
        })
        .collect();
    let given: Vec<Rows> = tensors
        .iter()
        .map(|(tensor, dtype, row_stride, group_stride)| Rows {
            data: tensor.memory.data(),
            dtype: *dtype,
            row_stride: *row_stride,
            group_stride: *group_stride,
        })
        .collect();
    let taken: Vec<Rows> = results
        .iter()
        .map(|(tensor, row_stride, group_stride)| Rows {
            data: tensor.memory.data(),
            dtype: tensor.dtype,
            row_stride: *row_stride,
            group_stride: *group_stride,
        })
        .collect();
    let program =
        Program::new(inputs.clone(), instructions.clone(), outputs, isa).expect("the story is a program");
    // SAFETY: the tensors are there, and nobody else touches them.
    unsafe { program.run(&given, &taken, rows, team, story.threads) }.expect("there are as many tensors");
    for (index, instruction) in instructions.iter().enumerate() {
        let to = instruction.to;
        let (tensor, row_stride, group_stride) = &mut results[index];
        for (row, registers) in values.iter().enumerate() {
            for group in 0..to.groups {
                for at in 0..to.length {
                    let (right, allowed) = registers[inputs.len() + index][group * to.length + at];
                    // An output is written in the dtype of its tensor.
                    let got = tensor.get(row * *row_stride + group * *group_stride + at) as f32;
                    let right = rounded(right, instruction.dtype);
                    let allowed = allowed + right.abs() * unit(instruction.dtype);
                    assert!(
                        got == right
                            || (got - right).abs() <= allowed
                            || !allowed.is_finite()
                            || allowed.is_nan()
                            || (got.is_nan() && right.is_nan()),
                        "{isa}: instruction {index}, row {row}: {got}, and should be {right} (within {allowed}): {instruction:?}"
                    );
                }
                for gap in 0..if group + 1 < to.groups { *group_stride - to.length } else { 0 } {
                    let at = row * *row_stride + group * *group_stride + to.length + gap;
                    assert!(tensor.get(at).is_nan(), "{isa}: written beside a group");
                }
            }
        }
    }
}

#[test]
fn registers_that_are_tensors_are_not_left_by_short_groups() {
    let place = |register, groups, length| Place { register, groups, length };
    let step = |step, to| Instruction { step, to, dtype: Dtype::F32 };
    let negative = Step::Unary(Unary::Neg, Operand::Place(place(0, 16, 4)));
    let doubled = Step::Binary(Binary::Add, Operand::Place(place(1, 1, 64)), Operand::Place(place(1, 1, 64)));
    let squared = Step::Unary(Unary::Square, Operand::Place(place(2, 1, 64)));
    for isa in Isa::available() {
        let instructions = vec![
            step(negative.clone(), place(1, 16, 4)),
            step(doubled.clone(), place(2, 1, 64)),
            step(squared.clone(), place(3, 1, 64)),
        ];
        let outputs = vec![place(1, 1, 64), place(2, 1, 64), place(3, 1, 64)];
        let program = Program::new(vec![place(0, 1, 64)], instructions, outputs, isa).expect("a program");
        let rows = 5;
        let mut tensors: Vec<Tensor> = (0..4).map(|_| Tensor::new(rows * 64, Dtype::F32, true)).collect();
        for index in 0..rows * 64 {
            tensors[0].set(index, index as f32);
        }
        let of = |tensor: &Tensor| Rows {
            data: tensor.memory.data(),
            dtype: Dtype::F32,
            row_stride: 64,
            group_stride: 64,
        };
        let given: Vec<Rows> = tensors.iter().map(of).collect();
        // SAFETY: the tensors are there, and nobody else touches them.
        unsafe { program.run(&given[..1], &given[1..], rows, Team::Serial, 1).expect("it fits") };
        for index in 0..rows * 64 {
            let x = index as f64;
            assert_eq!([1, 2, 3].map(|n: usize| tensors[n].get(index)), [-x, -2.0 * x, 4.0 * x * x], "{isa}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(200)))]

    #[test]
    fn every_program_gives_what_its_steps_give(story in stories()) {
        for isa in Isa::available() {
            check(&story, isa, Team::of_process());
        }
    }
}

#[test]
fn large_and_small_numbers_stay_what_they_are() {
    let x: Vec<f32> =
        vec![-1e30, -1e4, -200.0, -90.0, -30.0, -0.0, 30.0, 90.0, 200.0, 1e4, 1e30, f32::INFINITY, f32::NAN];
    for isa in Isa::available() {
        for op in [Unary::Sigmoid, Unary::Silu, Unary::Tanh, Unary::Exp, Unary::Relu] {
            let place = |register| Place { register, groups: 1, length: x.len() };
            let step = Step::Unary(op, Operand::Place(place(0)));
            let instruction = Instruction { step, to: place(1), dtype: Dtype::F32 };
            let program = Program::new(vec![place(0)], vec![instruction], vec![place(1)], isa)
                .expect("it is a program");
            let mut out = vec![0.0_f32; x.len()];
            let rows = |data: *const f32| Rows {
                data: data.cast_mut().cast(),
                dtype: Dtype::F32,
                row_stride: x.len(),
                group_stride: x.len(),
            };
            // SAFETY: both are there.
            unsafe { program.run(&[rows(x.as_ptr())], &[rows(out.as_mut_ptr())], 1, Team::Serial, 1) }
                .expect("one of each");
            for (&x, &got) in x.iter().zip(&out) {
                let right = unary(op, x);
                let is_near = got == right || (got - right).abs() <= 1e-5 * right.abs() + 1e-36;
                assert!(
                    is_near || (got.is_nan() && right.is_nan()),
                    "{isa}: {op:?}({x}) = {got}, not {right}"
                );
            }
        }
    }
}

#[test]
fn a_program_that_does_not_fit_is_refused() {
    let place = |register, groups, length| Place { register, groups, length };
    let instruction = |step, to| Instruction { step, to, dtype: Dtype::F32 };
    let add = |a, b, to| instruction(Step::Binary(Binary::Add, Operand::Place(a), Operand::Place(b)), to);
    let (a, b) = (place(0, 2, 8), place(1, 1, 8));
    for (instruction, wrong) in [
        (add(a, b, place(2, 2, 7)), "2 groups of 8 do not become 2 of 7"),
        (add(a, place(3, 1, 8), place(2, 2, 8)), "register 3 is read as 1 groups of 8, and holds 0"),
        (add(place(0, 1, 8), b, place(2, 1, 8)), "register 0 is read as 1 groups of 8, and holds 16"),
        (add(a, b, place(1, 2, 8)), "register 1 is written, and 2 is the next"),
        (instruction(Step::Slice(b, 3), place(2, 1, 6)), "6 elements from 3 on of 8"),
        (instruction(Step::Slice(b, usize::MAX), place(2, 1, 6)), "on of 8"),
        (
            instruction(Step::Mean(place(0, 1 << 33, (1 << 31) + 1)), place(2, 1 << 33, 1)),
            "register 0 is read as",
        ),
        (add(a, b, place(2, 1 << 33, 1 << 31)), "do not become"),
        (instruction(Step::Cat(vec![place(1, 1, usize::MAX), b]), place(2, 1, 7)), "together become 7"),
        (instruction(Step::Cat(vec![b, b]), place(2, 1, 15)), "parts of 16 elements together become 15"),
        (instruction(Step::Mean(a), place(2, 1, 1)), "a mean of 2 groups goes to 1 of 1"),
    ] {
        let error = Program::new(vec![a, b], vec![instruction], vec![], Isa::best()).expect_err(wrong);
        assert!(error.to_string().contains(wrong), "{error}");
    }
    for place in [place(0, 0, 8), place(0, (1 << 32) + 1, 1 << 32), place(0, 1, 1 << 29)] {
        let error = Program::new(vec![place], vec![], vec![], Isa::best()).expect_err("no such register");
        assert!(error.to_string().contains("1 to 268435456 elements are possible"), "{error}");
    }
    let program = Program::new(vec![a], vec![], vec![a], Isa::best()).expect("it only copies");
    // SAFETY: nothing is read.
    let error = unsafe { program.run(&[], &[], 1, Team::Serial, 1) }.expect_err("an input is missing");
    assert!(error.to_string().contains("0 inputs"), "{error}");
}
