//! Only benchmarks: `cargo bench -p chairlift-benches`.
