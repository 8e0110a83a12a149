//! Places of largest elements against a plain search, over random rows with ties, infinities and what is no number.

use chairlift_kernels::element::Dtype;
use chairlift_kernels::isa::Isa;
use chairlift_kernels::largest::largest;
use chairlift_kernels::linear::Matrix;
use chairlift_kernels::team::Team;
use proptest::prelude::*;

mod common;

use common::{Noise, Tensor, cases};

#[derive(Clone, Debug)]
struct Story {
    dtype: Dtype,
    rows: usize,
    columns: usize,
    gap: usize,
    /// Numbers are so many different ones.
    values: usize,
    /// One element in so many is none of them.
    odd_every: Option<usize>,
    at_end: bool,
    threads: usize,
    seed: u64,
}

fn stories() -> impl Strategy<Value = Story> {
    let dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)];
    let columns = prop_oneof![1_usize..40, 40_usize..600, 600_usize..3000];
    let values = prop_oneof![Just(1_usize), 2_usize..10, 10_usize..1000];
    let odd_every = prop_oneof![3 => Just(None), 1 => (1_usize..500).prop_map(Some)];
    (dtype, 1_usize..7, columns, 0_usize..3, values, odd_every, any::<bool>(), 1_usize..4, any::<u64>())
        .prop_map(|(dtype, rows, columns, gap, values, odd_every, at_end, threads, seed)| Story {
            dtype,
            rows,
            columns,
            gap,
            values,
            odd_every,
            at_end,
            threads,
            seed,
        })
}

fn check(story: &Story, isa: Isa, team: Team) {
    let &Story { dtype, rows, columns, gap, values, odd_every, .. } = story;
    let row_stride = columns + gap;
    let mut tensor = Tensor::new((rows - 1) * row_stride + columns, dtype, story.at_end);
    let mut noise = Noise(story.seed);
    let mut expected = Vec::with_capacity(rows);
    for row in 0..rows {
        let mut best: Option<(f64, i64)> = None;
        for column in 0..columns {
            let number = (noise.next() * values as f32).round() - 0.5 * values as f32;
            let odd = odd_every.is_some_and(|every| noise.next().abs() < 1.0 / every as f32);
            let number = match odd {
                true => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][(noise.next().abs() * 2.99) as usize],
                false => number,
            };
            tensor.set(row * row_stride + column, number);
            let number = tensor.get(row * row_stride + column);
            let is_better = |(best, _): (f64, i64)| !best.is_nan() && (number.is_nan() || number > best);
            if best.is_none_or(is_better) {
                best = Some((number, column as i64));
            }
        }
        expected.extend(best.map(|(_, column)| column));
    }
    let matrix = Matrix { data: tensor.memory.data(), rows, columns, row_stride };
    let mut out = vec![-1; rows];
    // SAFETY: the tensor is there, and nobody else touches it.
    unsafe { largest(&matrix, dtype, &mut out, isa, team, story.threads) }.expect("it fits");
    assert_eq!(out, expected, "{isa}, {}", team.name());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(200), ..ProptestConfig::default() })]

    #[test]
    fn they_are_the_first_of_the_largest(story in stories()) {
        for isa in Isa::available() {
            check(&story, isa, Team::Serial);
        }
        check(&story, Isa::best(), Team::of_process());
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let numbers = [1.0_f32; 6];
    let matrix = |rows, columns| Matrix {
        data: numbers.as_ptr().cast_mut().cast(),
        rows,
        columns,
        row_stride: columns,
    };
    let mut out = [-1; 2];
    for (of, expected) in [(matrix(3, 2), "[3, 2] for 2 results"), (matrix(2, 0), "[2, 0] for 2 results")] {
        // SAFETY: the numbers are there.
        let refusal = unsafe { largest(&of, Dtype::F32, &mut out, Isa::best(), Team::Serial, 1) }
            .expect_err("it does not fit");
        assert!(refusal.to_string().starts_with(expected), "{refusal}");
        assert_eq!(out, [-1; 2]);
    }
}
