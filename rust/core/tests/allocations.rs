//! Steps in which nobody comes and nobody ends allocate nothing, once the lists have their size.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use chairlift_core::{Engine, EngineConfig, Reach, Request, Results, Slot};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator as it came; counting touches nothing but a number of the thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations of `steps` decode steps after as many for warming up.
fn decode(config: EngineConfig, late: bool, steps: usize) -> u64 {
    let rows = config.max_requests_per_batch as usize;
    let mut engine = Engine::new(config).unwrap();
    let mut arenas = [vec![0; engine.arena_capacity()], vec![0; engine.arena_capacity()]];
    let outbox = engine.outbox();
    for n in 0..rows {
        let request = Request {
            // No two begin alike: all start in the first step.
            prompt: (0..20 + n as i32).map(|at| at + 100 * n as i32).collect(),
            max_new_tokens: 100_000,
            streaming: n % 2 == 0,
            record_logprobs: n % 3 == 0,
            record_timestamps: n % 3 == 0,
            ..Request::default()
        };
        engine.inbox().submit(request).unwrap();
    }
    let mut before = 0;
    let mut in_flight = Vec::with_capacity(2);
    let (tokens, logprobs) = (vec![1; rows], vec![0.0; rows]);
    let mut slot = Slot::A;
    for step in 0..2 * steps {
        if step == steps {
            before = ALLOCATIONS.with(Cell::get);
        }
        let planned = engine.advance(None, Some((slot, &mut arenas[slot.index()])), 0.0).unwrap().unwrap();
        assert_eq!(planned.shape.rows, rows);
        in_flight.push(slot);
        slot = slot.other();
        if in_flight.len() > usize::from(late) {
            let results = Results { slot: in_flight.remove(0), tokens: &tokens, logprobs: &logprobs };
            engine.advance(Some(results), None, 0.0).unwrap();
        }
        while outbox.take_next().is_some() {}
    }
    ALLOCATIONS.with(Cell::get) - before
}

fn config() -> EngineConfig {
    EngineConfig {
        page_size: 16,
        match_unit: 4,
        num_blocks: 600,
        max_requests_per_batch: 8,
        max_batch_tokens: 512,
        ..EngineConfig::default()
    }
}

#[test]
fn steps_without_arrivals_and_ends_allocate_nothing() {
    for groups in [vec![Reach::Full], vec![Reach::Full, Reach::Window(40), Reach::Chunk(32)]] {
        for late in [false, true] {
            for match_unit in [0, 4] {
                let config = EngineConfig { groups: groups.clone(), match_unit, ..config() };
                assert_eq!(
                    decode(config, late, 300),
                    0,
                    "{groups:?}, late: {late}, match unit: {match_unit}"
                );
            }
        }
    }
}

#[test]
fn an_allocation_would_be_counted() {
    let before = ALLOCATIONS.with(Cell::get);
    std::hint::black_box(vec![0_u8; 100]);
    assert!(ALLOCATIONS.with(Cell::get) > before);
}
