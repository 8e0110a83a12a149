//! What paged attention on the CPU costs: `cargo bench -p chairlift-benches --bench attention`.
//!
//! 9 heads over 3 heads of K and V of size 64 (SmolLM2-135M's), page 256, `CHAIRLIFT_THREADS` threads (all cores unless
//! set). Decodes are quoted in bytes of K and V, beside a plain sum of as many bytes on as many threads; prefills in
//! multiplications and additions.

#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use chairlift_core::Reach;
use chairlift_kernels::attention::{Call, NewRows, PagedAttention, Pages, Rows, StepRows, Table};
use chairlift_kernels::element::Dtype;
use chairlift_kernels::isa::Isa;
use chairlift_kernels::team::Team;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const PAGE: usize = 256;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const SIZE: usize = 64;

/// A step with its tensors. All numbers are equal small ones: how long they take does not depend on them.
struct Step {
    attention: PagedAttention,
    dtype: Dtype,
    pool: Vec<u32>,
    new: Vec<u32>,
    query: Vec<u32>,
    out: Vec<u32>,
    tokens: usize,
    blocks: usize,
    threads: usize,
}

impl Step {
    /// `(context, tokens)` of each row, decodes first; the first `shared` tokens of all contexts are the same.
    fn new(rows: &[(usize, usize)], shared: usize, dtype: Dtype) -> Self {
        let mut attention =
            PagedAttention::new(PAGE, &[Reach::Full], Isa::best(), Team::of_process()).unwrap();
        let width = rows.iter().map(|(context, new)| (context + new).div_ceil(PAGE)).max().unwrap();
        let (mut table, mut slots, mut bounds, mut lens) = (Vec::new(), Vec::new(), vec![0_i32], Vec::new());
        let mut next = shared / PAGE;
        let mut tokens = 0;
        for &(context, new) in rows {
            let own: Vec<usize> = (0..width)
                .map(|page| {
                    if page >= shared / PAGE {
                        next += 1;
                        next - 1
                    } else {
                        page
                    }
                })
                .collect();
            slots.extend((context..context + new).map(|at| (own[at / PAGE] * PAGE + at % PAGE) as i32));
            table.extend(own.iter().map(|&block| block as i32));
            tokens += new;
            bounds.push(tokens as i32);
            lens.push((context + new) as i32);
        }
        let decodes = rows.iter().take_while(|(_, new)| *new == 1).count();
        let step = StepRows { cu_seqlens: &bounds, kv_lens: &lens, decodes };
        attention.begin(step, &[(Table { blocks: &table, pages: width }, &slots)]).unwrap();
        let small = match dtype {
            Dtype::F32 => 0.01_f32.to_bits(),
            Dtype::Bf16 => 0x3C24_3C24,
            Dtype::F16 => 0x211F_211F,
        };
        let words = |elements: usize| vec![small; (elements * dtype.bytes()).div_ceil(4)];
        Self {
            attention,
            dtype,
            pool: words(next * 2 * PAGE * KV_HEADS * SIZE),
            new: words(tokens * KV_HEADS * SIZE),
            query: words(tokens * HEADS * SIZE),
            out: words(tokens * HEADS * SIZE),
            tokens,
            blocks: next,
            threads: threads(),
        }
    }

    fn run(&mut self) {
        let page = PAGE * KV_HEADS * SIZE;
        let pages = |data: *mut u8| Pages {
            data,
            blocks: self.blocks,
            page_size: PAGE,
            kv_heads: KV_HEADS,
            block_stride: 2 * page,
            token_stride: KV_HEADS * SIZE,
            head_stride: SIZE,
            size: SIZE,
        };
        let rows = |data: *mut u32, heads: usize| Rows {
            data: data.cast(),
            heads,
            tokens: self.tokens,
            size: SIZE,
            token_stride: heads * SIZE,
            head_stride: SIZE,
        };
        let pool = self.pool.as_mut_ptr().cast::<u8>();
        let new = rows(self.new.as_mut_ptr(), KV_HEADS);
        let call = Call {
            dtype: self.dtype,
            k_pages: pages(pool),
            v_pages: pages(pool.wrapping_add(page * self.dtype.bytes())),
            new: Some(NewRows { k: new, v: new }),
            query: rows(self.query.as_mut_ptr(), HEADS),
            out: rows(self.out.as_mut_ptr(), HEADS),
            scale: 0.125,
            softcap: None,
            sinks: None,
        };
        // SAFETY: the vectors have that many elements.
        unsafe { self.attention.attend(0, &call, self.threads) }.unwrap();
    }
}

fn threads() -> usize {
    let set = std::env::var("CHAIRLIFT_THREADS").ok().and_then(|count| count.parse().ok());
    set.unwrap_or_else(|| thread::available_parallelism().unwrap().get())
}

/// Sums all words on so many threads.
fn plain_sum(words: &[u32]) -> u64 {
    let part = words.len().div_ceil(threads());
    let total = std::sync::atomic::AtomicU64::new(0);
    Team::of_process().share_out(threads(), threads(), &|_, index| {
        let words = &words[(index * part).min(words.len())..((index + 1) * part).min(words.len())];
        // SAFETY: any bytes are numbers.
        let (_, wide, _) = unsafe { words.align_to::<u64>() };
        let mut sums = [0_u64; 16];
        for chunk in wide.chunks_exact(16) {
            for (sum, word) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*word);
            }
        }
        let sum = sums.iter().fold(0, |all: u64, sum| all.wrapping_add(*sum));
        total.fetch_add(sum, std::sync::atomic::Ordering::Relaxed);
    });
    total.into_inner()
}

fn decodes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (rows, context) in [(1, 1_000), (1, 10_000), (1, 100_000), (64, 300), (64, 2_000)] {
            let mut step = Step::new(&vec![(context, 1); rows], 0, dtype);
            let bytes = rows * (context + 1) * 2 * KV_HEADS * SIZE * dtype.bytes();
            group.throughput(Throughput::Bytes(bytes as u64));
            let name = format!("{dtype:?} {rows} x {context}");
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| bencher.iter(|| step.run()));
        }
    }
    let words = vec![1_u32; 40 << 20];
    group.throughput(Throughput::Bytes(4 * words.len() as u64));
    group.bench_function("plain sum of 160 MiB", |bencher| bencher.iter(|| black_box(plain_sum(&words))));
    group.finish();
}

/// Decodes that share 1,500 tokens, against the same without sharing.
fn cascade(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("64 decodes of 1,600 tokens");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (name, shared) in [("1,536 shared", 1_536), ("none shared", 0)] {
            let mut step = Step::new(&vec![(1_600, 1); 64], shared, dtype);
            let name = format!("{dtype:?}, {name}");
            group.bench_function(name, |bencher| bencher.iter(|| step.run()));
        }
    }
    group.finish();
}

fn prefills(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefill");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (rows, context, new) in [(1, 0, 512), (1, 2_000, 512), (8, 0, 64), (1, 0, 4_096)] {
            let mut step = Step::new(&vec![(context, new); rows], 0, dtype);
            let pairs = rows * (new * context + new * (new + 1) / 2);
            group.throughput(Throughput::Elements((pairs * HEADS * SIZE * 4) as u64));
            let name = format!("{dtype:?} {rows} x {new} after {context}");
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| bencher.iter(|| step.run()));
        }
    }
    group.finish();
}

/// The bandwidth of long decodes as a share of the plain sum's, in turns, medians.
fn shares(_: &mut Criterion) {
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2].as_secs_f64()
    };
    println!();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for (rows, context) in [(1, 100_000), (64, 2_000)] {
            let mut step = Step::new(&vec![(context, 1); rows], 0, dtype);
            let words = vec![1_u32; rows * (context + 1) * 2 * KV_HEADS * SIZE * dtype.bytes() / 4];
            let (mut own, mut plain) = (Vec::new(), Vec::new());
            for _ in 0..31 {
                let start = Instant::now();
                step.run();
                own.push(start.elapsed());
                let start = Instant::now();
                black_box(plain_sum(&words));
                plain.push(start.elapsed());
            }
            let share = median(plain) / median(own.clone());
            let rate = 4e-9 * words.len() as f64 / median(own);
            println!(
                "{dtype:?} {rows} x {context}: {rate:.1} GB/s, {share:.2} of a plain sum's bandwidth ({}, {} threads)",
                Isa::best(),
                threads()
            );
        }
    }
}

criterion_group! {
    name = all;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = decodes, cascade, prefills, shares
}
criterion_main!(all);
