//! Packed linear layers against their formula in fp64, over random shapes, strides and dtypes, with everything that is
//! not to be read or written poisoned or out of reach.

use chairlift_kernels::element::Dtype;
use chairlift_kernels::isa::Isa;
use chairlift_kernels::linear::{Joined, Matrix, PackedLinear};
use chairlift_kernels::rowwise::{Binary, Instruction, Operand, Place, Program, Rows, Step, Unary};
use chairlift_kernels::team::Team;
use proptest::prelude::*;

mod common;

use common::{Noise, Tensor, cases};

#[derive(Clone, Debug)]
struct Story {
    dtype: Dtype,
    rows: usize,
    in_size: usize,
    out_size: usize,
    /// Elements between the rows of weight, input and output.
    gaps: [usize; 3],
    has_bias: bool,
    at_end: bool,
    threads: usize,
    seed: u64,
}

fn stories() -> impl Strategy<Value = Story> {
    let dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)];
    let rows = prop_oneof![3 => 1_usize..40, 1 => 40_usize..200];
    let in_size =
        prop_oneof![2 => 1_usize..70, 2 => 70_usize..400, 1 => (1_usize..40).prop_map(|tiles| 32 * tiles)];
    let out_size =
        prop_oneof![2 => 1_usize..70, 1 => 70_usize..400, 1 => (1_usize..9).prop_map(|panels| 48 * panels)];
    let gaps = [0_usize..3, 0..3, 0..3];
    (dtype, rows, in_size, out_size, gaps, any::<bool>(), any::<bool>(), 1_usize..4, any::<u64>()).prop_map(
        |(dtype, rows, in_size, out_size, gaps, has_bias, at_end, threads, seed)| Story {
            dtype,
            rows,
            in_size,
            out_size,
            gaps,
            has_bias,
            at_end,
            threads,
            seed,
        },
    )
}

/// A matrix with gaps between its rows, of numbers that look random; and the numbers.
fn random(
    story: &Story,
    noise: &mut Noise,
    rows: usize,
    columns: usize,
    gap: usize,
) -> (Tensor, Matrix, Vec<f64>) {
    let (mut tensor, matrix) = empty(story, rows, columns, gap);
    let mut numbers = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            numbers.push(tensor.set(row * matrix.row_stride + column, noise.next()));
        }
    }
    (tensor, matrix, numbers)
}

/// A matrix of NaN.
fn empty(story: &Story, rows: usize, columns: usize, gap: usize) -> (Tensor, Matrix) {
    let row_stride = columns + gap;
    let tensor = Tensor::new((rows - 1) * row_stride + columns, story.dtype, story.at_end);
    let matrix = Matrix { data: tensor.memory.data(), rows, columns, row_stride };
    (tensor, matrix)
}

fn check(story: &Story, isa: Isa, team: Team) {
    let &Story { dtype, rows, in_size, out_size, gaps, threads, .. } = story;
    let mut noise = Noise(story.seed);
    let (_weight, weight, weights) = random(story, &mut noise, out_size, in_size, gaps[0]);
    let (_input, input, inputs) = random(story, &mut noise, rows, in_size, gaps[1]);
    let (_bias, bias, biases) = random(story, &mut noise, 1, out_size, 0);
    let (mut result, out) = empty(story, rows, out_size, gaps[2]);
    // SAFETY: the tensors are there, and nobody else touches them.
    unsafe {
        let packed = PackedLinear::new(dtype, &weight, isa, team, threads).expect("it can be packed");
        packed.call(&input, story.has_bias.then_some(&bias), &out, team, threads).expect("it fits");
    }
    // Sums in fp32, in any order; then one rounding.
    let rounding = match dtype {
        Dtype::F32 => 0.0,
        Dtype::Bf16 => 2.0_f64.powi(-8),
        Dtype::F16 => 2.0_f64.powi(-11),
    };
    for row in 0..rows {
        for column in 0..out_size {
            let of_row = &inputs[row * in_size..(row + 1) * in_size];
            let of_column = &weights[column * in_size..(column + 1) * in_size];
            let products = of_row.iter().zip(of_column).map(|(a, b)| a * b);
            let size: f64 = products.clone().map(f64::abs).sum();
            let right = products.sum::<f64>() + if story.has_bias { biases[column] } else { 0.0 };
            let allowed = 2e-6 * (size + 1.0) + rounding * right.abs() * 1.01 + 1e-7;
            let got = result.get(row * out.row_stride + column);
            assert!(
                (got - right).abs() <= allowed,
                "{isa}: [{row}, {column}] is {got}, and should be {right} (within {allowed})"
            );
        }
        for gap in out_size..if row + 1 < rows { out.row_stride } else { out_size } {
            assert!(result.get(row * out.row_stride + gap).is_nan(), "{isa}: written beside row {row}");
        }
    }
}

/// `silu(a) * b` of so many columns.
fn gate(columns: usize, dtype: Dtype, isa: Isa) -> Program {
    let place = |register| Place { register, groups: 1, length: columns };
    let instructions = vec![
        Instruction { step: Step::Unary(Unary::Silu, Operand::Place(place(0))), to: place(2), dtype },
        Instruction {
            step: Step::Binary(Binary::Mul, Operand::Place(place(2)), Operand::Place(place(1))),
            to: place(3),
            dtype,
        },
    ];
    Program::new(vec![place(0), place(1)], instructions, vec![place(3)], isa).expect("a program")
}

/// Two layers joined give to the bit what they give one after the other.
fn check_joined(story: &Story, isa: Isa, team: Team) {
    let &Story { dtype, rows, in_size, out_size, gaps, threads, .. } = story;
    let mut noise = Noise(story.seed);
    let program = gate(out_size, dtype, isa);
    let (_input, input, _) = random(story, &mut noise, rows, in_size, gaps[1]);
    let (mut together, out) = empty(story, rows, out_size, gaps[2]);
    let (mut apart, expected) = empty(story, rows, out_size, gaps[2]);
    let mut kept = Vec::new();
    let (mut layers, mut biases, mut results) = (Vec::new(), Vec::new(), Vec::new());
    // SAFETY: the tensors are there, and nobody else touches them.
    unsafe {
        for _ in 0..2 {
            let (weight_memory, weight, _) = random(story, &mut noise, out_size, in_size, gaps[0]);
            let (bias_memory, bias, _) = random(story, &mut noise, 1, out_size, 0);
            let (memory, result) = empty(story, rows, out_size, 0);
            let linear = PackedLinear::new(dtype, &weight, isa, team, threads).expect("it can be packed");
            biases.push(story.has_bias.then_some(bias));
            linear.call(&input, biases[layers.len()].as_ref(), &result, team, threads).expect("it fits");
            layers.push(linear);
            results.push(rows_of(&result, dtype));
            kept.extend([weight_memory, bias_memory, memory]);
        }
        program.run(&results, &[rows_of(&expected, dtype)], rows, team, threads).expect("it fits");
        let layers: Vec<&PackedLinear> = layers.iter().collect();
        let joined = Joined::new(&layers, &program).expect("they can be joined");
        joined.call(&input, &biases, &out, team, threads).expect("it fits");
    }
    for index in 0..(rows - 1) * out.row_stride + out_size {
        let (got, right) = (together.get(index), apart.get(index));
        let same = got == right || (got.is_nan() && right.is_nan());
        assert!(same, "{isa}: element {index} is {got}, and {right} of the layers apart");
    }
}

fn rows_of(matrix: &Matrix, dtype: Dtype) -> Rows {
    Rows { data: matrix.data, dtype, row_stride: matrix.row_stride, group_stride: matrix.columns }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(100)))]

    #[test]
    fn every_layer_gives_what_the_formula_gives(story in stories()) {
        for isa in Isa::available() {
            check(&story, isa, Team::of_process());
        }
    }

    #[test]
    fn joined_layers_give_what_they_give_apart(story in stories()) {
        for isa in Isa::available() {
            check_joined(&story, isa, Team::of_process());
        }
    }
}

#[test]
fn one_rows_results_do_not_depend_on_its_neighbours_place() {
    let story = Story {
        dtype: Dtype::F32,
        rows: 150,
        in_size: 300,
        out_size: 130,
        gaps: [0; 3],
        has_bias: false,
        at_end: true,
        threads: 2,
        seed: 1,
    };
    for isa in Isa::available() {
        let mut noise = Noise(7);
        let (_weight, weight, _) = random(&story, &mut noise, story.out_size, story.in_size, 0);
        let (_input, input, _) = random(&story, &mut noise, story.rows, story.in_size, 0);
        let (mut all, out) = empty(&story, story.rows, story.out_size, 0);
        let team = Team::of_process();
        // SAFETY: as above.
        let packed = unsafe {
            let packed = PackedLinear::new(story.dtype, &weight, isa, team, 2).expect("it can be packed");
            packed.call(&input, None, &out, team, 2).expect("it fits");
            packed
        };
        for first in [0, 3, 64, 101] {
            let rows = 40;
            let (mut some, out) = empty(&story, rows, story.out_size, 0);
            let data = input.data.wrapping_add(first * story.in_size * story.dtype.bytes());
            // SAFETY: these rows are among the input's.
            unsafe { packed.call(&Matrix { data, rows, ..input }, None, &out, team, 2).expect("it fits") };
            for index in 0..rows * story.out_size {
                assert_eq!(
                    some.get(index),
                    all.get(first * story.out_size + index),
                    "{isa}: from row {first}"
                );
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_its_sizes() {
    let story = Story {
        dtype: Dtype::Bf16,
        rows: 4,
        in_size: 32,
        out_size: 16,
        gaps: [0; 3],
        has_bias: true,
        at_end: true,
        threads: 1,
        seed: 3,
    };
    let (_weight, weight) = empty(&story, 16, 32, 0);
    let (_input, input) = empty(&story, 4, 32, 0);
    let (_out, out) = empty(&story, 4, 16, 0);
    let (_bias, bias) = empty(&story, 1, 16, 0);
    // SAFETY: the tensors are there.
    unsafe {
        let packed =
            PackedLinear::new(story.dtype, &weight, Isa::best(), Team::Serial, 1).expect("it can be packed");
        for (input, bias, out, wrong) in [
            (Matrix { columns: 31, ..input }, bias, out, "the input is [4, 31]: [4, 32]"),
            (input, bias, Matrix { rows: 3, ..out }, "the input is [4, 32]: [3, 32]"),
            (input, bias, Matrix { columns: 17, ..out }, "the output is [4, 17]: [4, 16]"),
            (input, Matrix { columns: 15, ..bias }, out, "the bias is [1, 15]: [1, 16]"),
        ] {
            let error = packed.call(&input, Some(&bias), &out, Team::Serial, 1).expect_err(wrong);
            assert!(error.to_string().contains(wrong), "{error}");
        }
        let nothing = Matrix { rows: 0, ..weight };
        let error =
            PackedLinear::new(story.dtype, &nothing, Isa::best(), Team::Serial, 1).expect_err("no rows");
        assert!(error.to_string().contains("[0, 32]"), "{error}");
    }
}

#[test]
fn what_cannot_be_joined_is_refused() {
    let story = Story {
        dtype: Dtype::F32,
        rows: 2,
        in_size: 8,
        out_size: 16,
        gaps: [0; 3],
        has_bias: false,
        at_end: true,
        threads: 1,
        seed: 3,
    };
    let isa = Isa::best();
    let layer = |out_size| {
        let (_memory, weight) = empty(&story, out_size, 8, 0);
        // SAFETY: the tensor is there.
        unsafe { PackedLinear::new(story.dtype, &weight, isa, Team::Serial, 1).expect("it can be packed") }
    };
    let (one, other, wider) = (layer(16), layer(16), layer(17));
    let place = |register, length| Place { register, groups: 1, length };
    let mean = Instruction { step: Step::Mean(place(0, 16)), to: place(2, 1), dtype: Dtype::F32 };
    let mean = Program::new(vec![place(0, 16), place(1, 16)], vec![mean], vec![place(0, 16)], isa)
        .expect("a program");
    let fits = gate(16, Dtype::F32, isa);
    for (layers, program, wrong) in [
        (vec![], &fits, "0 layers: 1 to 4"),
        (vec![&one, &wider], &fits, "all must be of the same shape"),
        (vec![&one, &other], &mean, "does not compute each of 16 columns"),
        (vec![&wider, &wider], &fits, "does not compute each of 17 columns"),
        (vec![&one], &fits, "2 inputs and 1 outputs for 1 layers"),
    ] {
        let error = Joined::new(&layers, program).expect_err(wrong);
        assert!(error.to_string().contains(wrong), "{error}");
    }
    let (_input, input) = empty(&story, 2, 8, 0);
    let (_out, out) = empty(&story, 2, 16, 0);
    let layers = [&one, &other];
    let joined = Joined::new(&layers, &fits).expect("they can be joined");
    let narrow = Matrix { columns: 15, ..out };
    for (biases, out, wrong) in
        [(vec![None], out, "1 biases of 2 layers"), (vec![None, None], narrow, "the output is [2, 15]")]
    {
        // SAFETY: the tensors are there.
        let error = unsafe { joined.call(&input, &biases, &out, Team::Serial, 1) }.expect_err(wrong);
        assert!(error.to_string().contains(wrong), "{error}");
    }
}
