//! What the core itself costs, without the boundary: `cargo bench -p chairlift-benches`.
//!
//! Page 256. A step is the whole of `advance`: commit of one step and plan of the next. No device: results are constant.

#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use chairlift_core::{Engine, EngineConfig, Request, Results, Slot};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const PAGE: u32 = 256;
const VOCAB: u32 = 50_000;
/// Steps until the sequences of a measurement are made anew.
const STEPS: u32 = 2_000;

struct Bench {
    engine: Engine,
    arena: Vec<i32>,
    tokens: Vec<i32>,
}

impl Bench {
    fn new(config: EngineConfig) -> Self {
        let tokens = vec![1; config.max_requests_per_batch as usize];
        let engine = Engine::new(EngineConfig { page_size: PAGE, vocab_size: VOCAB, ..config }).unwrap();
        let arena = vec![0; engine.arena_capacity()];
        Self { engine, arena, tokens }
    }

    fn submit(&self, prompt: Vec<i32>, max_new_tokens: i64, streaming: bool) {
        let request = Request { prompt, max_new_tokens, streaming, ..Request::default() };
        self.engine.inbox().submit(request).unwrap();
    }

    /// Commits the last step, if there was one, and plans the next.
    fn step(&mut self, commit: bool) -> usize {
        let results = Results { slot: Slot::A, tokens: &self.tokens, logprobs: &[] };
        let step =
            self.engine.advance(commit.then_some(results), Some((Slot::A, &mut self.arena)), 0.0).unwrap();
        step.map_or(0, |step| step.shape.tokens)
    }

    fn drain(&self) {
        while let Some(event) = self.engine.outbox().take_next() {
            black_box(event);
        }
    }
}

/// A prompt that no other begins like.
fn prompt(len: u32, n: u32) -> Vec<i32> {
    (0..len).map(|at| ((at + n * 7) % VOCAB) as i32).collect()
}

fn decode(running: u32, match_unit: u32) -> Bench {
    let mut bench = Bench::new(EngineConfig {
        num_blocks: running * (STEPS / PAGE + 5),
        max_requests_per_batch: running,
        max_batch_tokens: running * 768,
        match_unit,
        ..EngineConfig::default()
    });
    for n in 0..running {
        // Pages and match units are complete in most steps for some, as in use.
        bench.submit(prompt(256 + n * 512 / running, n), 1 << 20, false);
    }
    bench.step(false);
    bench
}

fn decode_steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode step");
    for (name, match_unit) in [("prefix cache", 32), ("no prefix cache", 0)] {
        for running in [256, 1024, 4096] {
            group.throughput(Throughput::Elements(u64::from(running)));
            group.bench_function(BenchmarkId::new(name, running), |b| {
                let (mut bench, mut steps) = (decode(running, match_unit), 0);
                b.iter_custom(|rounds| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..rounds {
                        if steps == STEPS {
                            (bench, steps) = (decode(running, match_unit), 0);
                        }
                        steps += 1;
                        let start = Instant::now();
                        assert_eq!(bench.step(true), running as usize);
                        spent += start.elapsed();
                    }
                    spent
                });
            });
        }
    }
    group.finish();
}

/// An 8,192-token prompt that is cached: hashed when it was submitted, admitted here.
fn full_hit(c: &mut Criterion) {
    c.bench_function("admission of 8,192 cached tokens", |b| {
        let mut bench = Bench::new(EngineConfig {
            num_blocks: 128,
            max_requests_per_batch: 4,
            max_batch_tokens: 8192,
            ..EngineConfig::default()
        });
        bench.submit(prompt(8192, 0), 1, false);
        while bench.step(false) > 0 {
            bench.step(true);
        }
        bench.drain();
        b.iter_custom(|rounds| {
            let mut spent = Duration::ZERO;
            for _ in 0..rounds {
                bench.submit(prompt(8192, 0), 1, false);
                let start = Instant::now();
                assert_eq!(bench.step(false), 1);
                spent += start.elapsed();
                assert_eq!(bench.step(true), 0);
                bench.drain();
            }
            spent
        });
    });
}

fn submit(c: &mut Criterion) {
    c.bench_function("submit of a 128-token prompt", |b| {
        let bench = Bench::new(EngineConfig { num_blocks: 128, ..EngineConfig::default() });
        let like = Request { prompt: prompt(128, 0), max_new_tokens: 16, ..Request::default() };
        let inbox = bench.engine.inbox();
        b.iter_batched(
            || (0..1000).map(|_| like.clone()).collect::<Vec<_>>(),
            |requests| inbox.submit_all(requests, false).unwrap(),
            BatchSize::PerIteration,
        );
    });
}

criterion_group! {
    name = core;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = decode_steps, full_hit, submit
}
criterion_main!(core);
