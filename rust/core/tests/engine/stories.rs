//! Scheduling stories: one behaviour each, told by what the steps bring.

use crate::device::{Device, SeenRow, next_token};
use chairlift_core::{
    Abandoned, Engine, EngineConfig, Error, Finish, News, Policy, Reach, Request, RequestId, Results,
    Sampling, Slot,
};

const VOCAB: u32 = 50;

fn config(page_size: u32, num_blocks: u32, tokens: u32) -> EngineConfig {
    EngineConfig {
        page_size,
        num_blocks,
        groups: vec![Reach::Full],
        max_requests_per_batch: 8.min(tokens),
        max_batch_tokens: tokens,
        max_cache_reads: None,
        safety_margin: 0.0,
        policy: Policy::Fifo,
        vocab_size: VOCAB,
        max_positions: None,
        max_queue_size: 0,
        seed: 3,
        match_unit: 0,
        ..EngineConfig::default()
    }
}

fn request(prompt: usize, max_new_tokens: i64) -> Request {
    Request {
        prompt: (0..prompt).map(|n| (n % VOCAB as usize) as i32).collect(),
        max_new_tokens,
        eos: [].into(),
        sampling: Sampling::Greedy,
        priority: 0,
        seed: None,
        streaming: false,
        record_timestamps: false,
        record_logprobs: false,
        ..Request::default()
    }
}

struct Story {
    engine: Engine,
    device: Device,
    arena: Vec<i32>,
    now: f64,
}

impl Story {
    fn new(config: EngineConfig) -> Self {
        let engine = Engine::new(config).unwrap();
        let (device, arena) = (Device::new(&engine), vec![0; engine.arena_capacity()]);
        Self { engine, device, arena, now: 0.0 }
    }

    fn submit(&self, prompt: usize, max_new_tokens: i64) -> RequestId {
        self.engine.inbox().submit(request(prompt, max_new_tokens)).unwrap()
    }

    fn plan(&mut self) -> Vec<SeenRow> {
        self.now += 1.0;
        let step = self.engine.advance(None, Some((Slot::A, &mut self.arena)), self.now).unwrap();
        self.engine.check_integrity().unwrap();
        step.map_or(Vec::new(), |step| self.device.run(&step, &self.arena))
    }

    fn commit(&mut self, rows: &[SeenRow]) {
        let sampled = rows.iter().filter(|row| row.sampled);
        let tokens: Vec<i32> = sampled.map(|row| next_token(&row.content, VOCAB as i32)).collect();
        let results = Results { slot: Slot::A, tokens: &tokens, logprobs: &[] };
        self.engine.advance(Some(results), None, self.now).unwrap();
        self.engine.check_integrity().unwrap();
    }

    /// `(start, tokens)` of each row of the next step, which is then committed.
    fn step(&mut self) -> Vec<(i32, usize)> {
        let rows = self.plan();
        if !rows.is_empty() {
            self.commit(&rows);
        }
        rows.iter().map(|row| (row.start, row.tokens.len())).collect()
    }

    fn ends(&self) -> Vec<(u64, Finish, usize)> {
        let mut ends = Vec::new();
        while let Some(event) = self.engine.outbox().take_next() {
            if let News::End(output) = event.news {
                ends.push((event.request.get(), output.finish, output.tokens.len()));
            }
        }
        ends
    }

    fn run_out(&mut self) -> Vec<(u64, Finish, usize)> {
        while !self.step().is_empty() {}
        self.ends()
    }
}

#[test]
fn a_long_prompt_is_cut_and_decodes_go_first() {
    let mut story = Story::new(config(4, 32, 8));
    story.submit(5, 4);
    story.submit(20, 1);
    assert_eq!(story.step(), [(0, 5), (0, 3)]);
    assert_eq!(story.step(), [(5, 1), (3, 7)]);
    assert_eq!(story.step(), [(6, 1), (10, 7)]);
    assert_eq!(story.step(), [(7, 1), (17, 3)]);
    assert_eq!(story.ends(), [(0, Finish::Length, 4), (1, Finish::Length, 1)]);
}

#[test]
fn with_prefill_first_split_prompts_go_before_decodes() {
    let mut story = Story::new(EngineConfig { policy: Policy::PrefillFirst, ..config(4, 32, 8) });
    story.submit(5, 4);
    story.submit(20, 1);
    assert_eq!(story.step(), [(0, 5), (0, 3)]);
    // All tokens for the split prompt, twice; what is left of the third step is the decode's.
    assert_eq!(story.step(), [(3, 8)]);
    assert_eq!(story.step(), [(11, 8)]);
    assert_eq!(story.step(), [(19, 1), (5, 1)]);
}

#[test]
fn with_prefill_first_a_decode_is_in_at_least_every_eighth_step() {
    let mut story = Story::new(EngineConfig { policy: Policy::PrefillFirst, ..config(4, 64, 4) });
    story.submit(1, 4);
    story.submit(200, 1);
    story.step();
    let decoded: Vec<bool> = (0..24).map(|_| story.step()[0].1 == 1).collect();
    let at: Vec<usize> = (0..24).filter(|&n| decoded[n]).collect();
    assert_eq!(at, [7, 15, 23]);
}

#[test]
fn every_prefill_step_is_full_while_work_waits() {
    let mut story = Story::new(config(4, 64, 16));
    for _ in 0..4 {
        story.submit(10, 1);
    }
    let totals: Vec<usize> = (0..3).map(|_| story.step().iter().map(|row| row.1).sum()).collect();
    assert_eq!(totals, [16, 16, 8]);
}

#[test]
fn a_small_request_runs_past_a_head_that_does_not_fit() {
    let mut story = Story::new(config(4, 12, 64));
    story.submit(30, 20);
    story.step();
    story.submit(36, 1);
    story.submit(3, 1);
    // 4 blocks are free, the head needs 9, the next one needs 1.
    assert_eq!(story.step(), [(30, 1), (0, 3)]);
}

#[test]
fn a_head_is_passed_over_sixteen_steps_at_most() {
    let mut story = Story::new(config(1, 40, 64));
    story.submit(12, 25);
    story.step();
    story.submit(30, 1);
    let mut passed = 0;
    for _ in 0..24 {
        story.submit(1, 1);
        passed += usize::from(story.step().len() == 2);
    }
    assert_eq!(passed, 16);
    let mut ended_in = std::collections::HashMap::new();
    for step in 0.. {
        let ran = !story.step().is_empty();
        ended_in.extend(story.ends().into_iter().map(|end| (end.0, step)));
        if !ran {
            break;
        }
    }
    assert!(ended_in[&1] <= ended_in[&18], "the head was not admitted before those behind it: {ended_in:?}");
}

#[test]
fn below_the_reserve_prefills_wait_and_decodes_go_on() {
    // The admission reserve: 10 blocks of 64, half of them reserved.
    let mut story = Story::new(EngineConfig { safety_margin: 0.5, ..config(64, 10, 640) });
    story.submit(64 * 5 - 2, 3);
    assert_eq!(story.step(), [(0, 318)]);
    // Five blocks are available: exactly the reserve admits.
    story.submit(64, 1);
    assert_eq!(story.step(), [(318, 1), (0, 64)]);
    // The first needs its sixth block; with four available the next prefill waits.
    story.submit(64, 1);
    assert_eq!(story.step(), [(319, 1), (0, 64)]);
    story.submit(64, 40);
    story.submit(64, 1);
    let first = story.step();
    assert_eq!(first, [(0, 64), (0, 64)]);
}

#[test]
fn a_margin_of_one_serialises() {
    let mut story = Story::new(EngineConfig { safety_margin: 1.0, ..config(4, 16, 64) });
    for _ in 0..3 {
        story.submit(4, 3);
    }
    loop {
        let rows = story.step();
        assert!(rows.len() <= 1, "two at once: {rows:?}");
        if rows.is_empty() {
            break;
        }
    }
    assert_eq!(story.ends().len(), 3);
}

#[test]
fn half_loaded_prompts_that_hold_what_the_other_needs_both_end() {
    for num_blocks in 11..=14 {
        let mut story = Story::new(config(4, num_blocks, 8));
        for prompt in [40, 40, 38] {
            story.submit(prompt, 3);
        }
        let ends = story.run_out();
        assert!(ends.iter().all(|end| end.1 == Finish::Length && end.2 == 3), "{ends:?}");
        assert_eq!(ends.len(), 3);
    }
}

#[test]
fn victims_are_the_newest_and_no_more_than_needed() {
    let mut story = Story::new(EngineConfig { max_requests_per_batch: 30, ..config(4, 33, 200) });
    for _ in 0..30 {
        story.submit(4, 30);
    }
    assert_eq!(story.step().len(), 30);
    // All thirty need a second block, three are free.
    assert_eq!(story.step().len(), 3);
    let resets = story.engine.counters().snapshot().soft_resets;
    // Each victim gives one block and asks for none: 27 starved, 14 of them make room for 13.
    assert_eq!(resets, 14);
    let ran = story.step();
    assert_eq!(ran.len(), 16, "everybody left runs: {ran:?}");
    assert_eq!(story.run_out().len(), 30);
}

#[test]
fn a_victim_comes_back_before_anybody_fresh_and_keeps_its_tokens() {
    let mut story = Story::new(config(2, 8, 32));
    let (first, second) = (story.submit(4, 11), story.submit(4, 11));
    while story.engine.counters().snapshot().soft_resets == 0 {
        assert!(!story.step().is_empty());
    }
    let fresh = story.submit(2, 1);
    // There is room for the fresh one (two blocks), but the victim, which needs more, stands before it.
    let mut prefills = Vec::new();
    loop {
        let rows = story.step();
        prefills.extend(rows.iter().filter(|row| row.0 == 0 && row.1 > 1).map(|row| row.1));
        if rows.is_empty() {
            break;
        }
    }
    assert!(prefills[0] > 4, "the victim prefills first, its tokens with it: {prefills:?}");
    assert_eq!(prefills[1..], [2]);
    let ends = story.ends();
    assert!(ends.contains(&(first.get(), Finish::Length, 11)), "{ends:?}");
    assert!(ends.contains(&(second.get(), Finish::Length, 11)), "{ends:?}");
    assert!(ends.contains(&(fresh.get(), Finish::Length, 1)), "{ends:?}");
}

#[test]
fn a_higher_priority_is_admitted_first_and_reset_last() {
    let mut story = Story::new(EngineConfig { max_requests_per_batch: 1, ..config(4, 16, 16) });
    for priority in [0, -1, 5, 5, 0] {
        story.engine.inbox().submit(Request { priority, ..request(2, 1) }).unwrap();
    }
    let order: Vec<u64> = story.run_out().into_iter().map(|end| end.0).collect();
    assert_eq!(order, [2, 3, 0, 4, 1]);

    let mut story = Story::new(config(2, 8, 32));
    for priority in [0, 7] {
        story.engine.inbox().submit(Request { priority, ..request(4, 11) }).unwrap();
    }
    let order: Vec<u64> = story.run_out().into_iter().map(|end| end.0).collect();
    assert_eq!(order, [1, 0], "the older one was reset, as it matters less");
    assert!(story.engine.counters().snapshot().soft_resets > 0);
}

#[test]
fn a_request_of_exactly_the_pool_runs_and_one_token_more_is_refused() {
    let mut story = Story::new(config(4, 4, 64));
    let inbox = story.engine.inbox();
    let refused = inbox.submit(request(16, 1)).unwrap_err();
    assert!(matches!(refused, Error::PromptExceedsPool { prompt: 16, capacity: 16, .. }), "{refused}");
    story.submit(15, 100);
    assert_eq!(story.run_out(), [(0, Finish::Length, 1)]);
}

#[test]
fn a_growing_request_ends_with_the_pool() {
    let mut story = Story::new(config(4, 8, 64));
    story.submit(9, 100);
    story.submit(5, 6);
    assert_eq!(story.run_out(), [(1, Finish::Length, 6), (0, Finish::Length, 23)]);
}

#[test]
fn positions_end_a_sequence_and_bound_its_prompt() {
    let mut story = Story::new(EngineConfig { max_positions: Some(12), ..config(4, 32, 64) });
    let inbox = story.engine.inbox();
    for prompt in [12, 13] {
        let refused = inbox.submit(request(prompt, 1)).unwrap_err();
        assert!(refused.to_string().contains("at most 11"), "{refused}");
    }
    story.submit(9, 100);
    assert_eq!(story.run_out(), [(0, Finish::Length, 3)]);
}

#[test]
fn a_window_gives_back_the_pages_that_no_later_token_sees() {
    let mut story =
        Story::new(EngineConfig { groups: vec![Reach::Full, Reach::Window(4)], ..config(4, 16, 64) });
    story.submit(10, 20);
    let owned = |story: &Story| story.engine.counters().snapshot().owned_blocks;
    assert_eq!(story.step(), [(0, 10)]);
    // Token 10 sees tokens 7 to 10: of the window's pages the first is gone.
    assert_eq!(owned(&story), 3 + 2);
    story.step();
    assert_eq!(owned(&story), 3 + 1, "token 11 sees 8 to 11, a page of its own");
    while owned(&story) < 4 + 2 {
        story.step();
    }
    assert_eq!(story.run_out(), [(0, Finish::Length, 20)]);
    let stats = story.engine.counters().snapshot();
    assert_eq!(stats.free_blocks, stats.capacity);
}

#[test]
fn windows_alone_outgrow_the_pool_and_full_attention_does_not() {
    let windows =
        EngineConfig { groups: vec![Reach::Window(8)], max_positions: Some(1000), ..config(4, 3, 8) };
    let mut story = Story::new(windows.clone());
    story.submit(50, 200);
    assert_eq!(story.run_out(), [(0, Finish::Length, 200)]);
    let full = Story::new(EngineConfig { groups: vec![Reach::Window(8), Reach::Full], ..windows });
    assert!(matches!(full.engine.inbox().submit(request(50, 1)), Err(Error::PromptExceedsPool { .. })));
}

#[test]
fn a_chunk_is_forgotten_whole_when_the_next_begins() {
    let mut story = Story::new(EngineConfig { groups: vec![Reach::Chunk(8)], ..config(4, 8, 64) });
    story.submit(7, 20);
    let mut owned = Vec::new();
    for _ in 0..11 {
        story.step();
        owned.push(story.engine.counters().snapshot().owned_blocks);
    }
    // Tokens 0 to 7 fill two pages; token 8 starts a chunk and sees none of them.
    assert_eq!(owned, [2, 0, 1, 1, 1, 1, 2, 2, 2, 0, 1]);
}

#[test]
fn a_prefill_with_blocks_for_a_part_goes_on_with_that_part() {
    let windows =
        EngineConfig { groups: vec![Reach::Window(4)], max_positions: Some(1000), ..config(4, 5, 64) };
    let mut story = Story::new(windows);
    story.submit(64, 1);
    let chunks: Vec<usize> = std::iter::from_fn(|| story.step().first().map(|row| row.1)).collect();
    assert_eq!(chunks.iter().sum::<usize>(), 64);
    assert!(chunks[0] == 20 && chunks.len() > 3, "{chunks:?}");
    assert_eq!(story.ends(), [(0, Finish::Length, 1)]);
}

#[test]
fn a_cancel_ends_a_request_wherever_it_stands() {
    let mut story = Story::new(EngineConfig { max_requests_per_batch: 2, ..config(4, 32, 8) });
    let decoding = story.submit(3, 50);
    let prefilling = story.submit(30, 50);
    let waiting = story.submit(3, 50);
    story.step();
    for request in [decoding, prefilling, waiting] {
        story.engine.inbox().cancel(request);
    }
    let unread = story.submit(3, 50);
    story.engine.inbox().cancel(unread);
    story.engine.inbox().cancel(unread);
    story.engine.inbox().cancel(RequestId::from_ordinal(99));
    assert!(story.step().is_empty());
    let ends = story.ends();
    assert_eq!(ends.iter().map(|end| end.0).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(ends.iter().all(|end| end.1 == Finish::Cancelled));
    let stats = story.engine.counters().snapshot();
    assert_eq!((stats.free_blocks, stats.waiting, stats.running), (32, 0, 0));
    assert_eq!(story.engine.inbox().queued(), 0);
}

#[test]
fn a_cancel_in_the_step_of_the_last_token_gives_one_end() {
    let mut story = Story::new(config(4, 8, 8));
    let request = story.submit(3, 1);
    let rows = story.plan();
    story.engine.inbox().cancel(request);
    story.commit(&rows);
    assert_eq!(story.ends(), [(0, Finish::Length, 1)]);
    assert!(story.step().is_empty());
    assert!(story.ends().is_empty());
}

#[test]
fn an_abandoned_step_leaves_no_trace() {
    let mut story = Story::new(config(4, 16, 8));
    story.submit(6, 3);
    story.step();
    story.submit(9, 2);
    let before = story.engine.counters().snapshot();
    let planned = story.plan();
    assert_eq!(planned.len(), 2);
    story.engine.abandon(Slot::A, Abandoned::Withdrawn, story.now).unwrap();
    story.engine.check_integrity().unwrap();
    let mut after = story.engine.counters().snapshot();
    assert_eq!(after.abandoned_steps, 1);
    (after.abandoned_steps, after.submitted, after.waiting) = (0, before.submitted, before.waiting);
    after.peak_owned_blocks = before.peak_owned_blocks;
    assert_eq!(after, before);
    assert_eq!(story.plan(), planned, "the same step again");
}

#[test]
fn a_failed_step_fails_its_rows_alone() {
    let mut story = Story::new(EngineConfig { max_requests_per_batch: 1, ..config(4, 16, 8) });
    story.submit(6, 3);
    story.submit(6, 3);
    story.plan();
    story.engine.abandon(Slot::A, Abandoned::Raised("no memory"), 1.0).unwrap();
    story.engine.check_integrity().unwrap();
    assert_eq!(story.run_out(), [(0, Finish::Failed("no memory".into()), 0), (1, Finish::Length, 3)]);
}

#[test]
fn a_budget_of_cache_reads_lets_every_decode_have_its_turn() {
    let mut story = Story::new(EngineConfig { max_cache_reads: Some(64), ..config(4, 16, 16) });
    for _ in 0..3 {
        story.submit(16, 4);
    }
    let mut steps = 0;
    loop {
        let rows = story.step();
        let reads: i32 = rows.iter().map(|row| row.0 + row.1 as i32).sum();
        assert!(reads <= 64, "{rows:?}");
        if rows.is_empty() {
            break;
        }
        steps += 1;
    }
    assert_eq!(story.ends().len(), 3);
    assert!(steps < 12);
}

#[test]
fn a_closed_inbox_and_a_full_queue_refuse_at_once() {
    let story = Story::new(EngineConfig { max_queue_size: 2, ..config(4, 16, 16) });
    story.submit(3, 1);
    story.submit(3, 1);
    let inbox = story.engine.inbox();
    assert_eq!(inbox.submit(request(3, 1)), Err(Error::QueueFull { waiting: 2, wanted: 1, limit: 2 }));
    inbox.close("stopped");
    assert_eq!(inbox.submit(request(3, 1)), Err(Error::Closed { cause: "stopped".into() }));
    inbox.reopen();
    assert_eq!(inbox.submit(request(3, 1)), Err(Error::QueueFull { waiting: 2, wanted: 1, limit: 2 }));
}

#[test]
fn failing_all_ends_what_is_active_what_waits_and_what_nobody_read() {
    let mut story = Story::new(EngineConfig { max_requests_per_batch: 1, ..config(4, 16, 8) });
    story.submit(6, 3);
    story.submit(6, 3);
    story.plan();
    story.submit(6, 3);
    story.engine.fail_all("gone", 2.0);
    story.engine.check_integrity().unwrap();
    let ends = story.ends();
    assert_eq!(ends.len(), 3);
    assert!(ends.iter().all(|end| end.1 == Finish::Failed("gone".into())));
    assert!(story.engine.is_idle());
}

#[test]
fn while_nobody_fresh_is_let_in_those_that_were_admitted_end() {
    let mut story = Story::new(EngineConfig { max_requests_per_batch: 2, ..config(2, 8, 32) });
    let (first, second) = (story.submit(4, 11), story.submit(4, 11));
    story.step();
    let fresh = story.submit(2, 1);
    story.engine.let_in(false);
    // One of the two loses its blocks on the way: a victim comes back all the same.
    let ends = story.run_out();
    assert!(story.engine.counters().snapshot().soft_resets > 0);
    assert_eq!(story.engine.admitted(), 0);
    assert_eq!(ends.iter().map(|end| end.0).collect::<Vec<_>>(), [first.get(), second.get()]);
    story.engine.let_in(true);
    assert_eq!(story.run_out(), [(fresh.get(), Finish::Length, 1)]);
}

#[test]
fn outputs_that_nobody_takes_hold_up_new_requests_and_are_never_dropped() {
    let mut story = Story::new(EngineConfig { max_output_bytes: Some(1000), ..config(4, 64, 64) });
    let (inbox, outbox) = (story.engine.inbox(), story.engine.outbox());
    let mut requests = vec![];
    while outbox.bytes() <= 1000 {
        // What is in flight already still comes.
        requests.extend([story.submit(5, 2), story.submit(5, 2)]);
        story.step();
        story.step();
    }
    let refused = inbox.submit(request(5, 2)).unwrap_err();
    assert_eq!(refused, Error::OutputsFull { bytes: outbox.bytes(), limit: 1000 });
    assert_eq!(inbox.queued(), 0);
    assert_eq!(outbox.take_for(requests[1]).map(|event| event.request), Some(requests[1]));
    while outbox.bytes() > 1000 {
        outbox.take_next().unwrap();
    }
    inbox.submit(request(5, 2)).unwrap();
    while outbox.take_next().is_some() {}
    assert_eq!(outbox.bytes(), 0);
    story.run_out();
    assert_eq!(story.engine.counters().snapshot().finished as usize, requests.len() + 1);
}

#[test]
fn what_was_computed_is_given_up_and_computed_again() {
    let mut story = Story::new(EngineConfig { match_unit: 4, ..config(4, 16, 16) });
    let request = story.submit(6, 4);
    story.step();
    story.step();
    story.plan();
    let refused = story.engine.recompute_all().unwrap_err();
    assert!(matches!(refused, Error::SlotMisused { .. }), "{refused}");
    story.engine.abandon(Slot::A, Abandoned::Withdrawn, story.now).unwrap();
    story.engine.recompute_all().unwrap();
    story.engine.check_integrity().unwrap();
    let stats = story.engine.counters().snapshot();
    assert_eq!((stats.free_blocks, stats.waiting, stats.running, stats.soft_resets), (16, 1, 0, 1));
    // The two tokens that it has so far are computed with the prompt.
    assert_eq!(story.step(), [(0, 8)]);
    assert_eq!(story.run_out(), [(request.get(), Finish::Length, 4)]);
}

#[test]
fn an_output_tells_which_weights_chose_each_token() {
    let mut story = Story::new(config(4, 16, 16));
    story.engine.new_epoch();
    story.submit(6, 5);
    story.submit(6, 1);
    story.step();
    story.step();
    story.engine.new_epoch();
    story.engine.new_epoch();
    story.submit(3, 1);
    while !story.step().is_empty() {}
    let mut epochs = Vec::new();
    while let Some(event) = story.engine.outbox().take_next() {
        if let News::End(output) = event.news {
            epochs.push((event.request.get(), output.epochs));
        }
    }
    assert_eq!(epochs, [(1, vec![(0, 1)]), (2, vec![(0, 3)]), (0, vec![(0, 1), (2, 3)])]);
}

#[test]
fn the_draws_of_two_requests_differ_and_those_of_one_seed_do_not() {
    let mut story = Story::new(config(4, 16, 32));
    let draw = |seed| Request {
        sampling: Sampling::Draw { temperature: 0.5, top_k: 7, top_p: 0.25 },
        seed,
        ..request(2, 2)
    };
    for seed in [None, None, Some(9), Some(9)] {
        story.engine.inbox().submit(draw(seed)).unwrap();
    }
    let step = story.engine.advance(None, Some((Slot::A, &mut story.arena)), 0.0).unwrap().unwrap();
    let draws: Vec<&[i32]> = story.arena[step.layout.draws.clone()].chunks(3).collect();
    assert_ne!(draws[0], draws[1]);
    assert_eq!(draws[2], draws[3]);
    assert!(draws.iter().all(|draw| draw[2] == 2), "the position of the token to be drawn");
    let change = &story.arena[step.layout.row_changes.clone()][..5];
    assert_eq!((change[1], change[3]), (1, 7));
    assert_eq!(f32::from_bits(change[2] as u32), 0.5);
    assert_eq!(f32::from_bits(change[4] as u32), 0.25);
}

#[test]
fn every_value_out_of_bounds_is_named() {
    let good = config(4, 16, 16);
    for (bad, name) in [
        (EngineConfig { page_size: 0, ..good.clone() }, "page_size"),
        (EngineConfig { num_blocks: 0, ..good.clone() }, "num_blocks"),
        (EngineConfig { groups: vec![], ..good.clone() }, "groups"),
        (EngineConfig { groups: vec![Reach::Window(0)], ..good.clone() }, "groups"),
        (EngineConfig { num_blocks: 1 << 30, ..good.clone() }, "num_blocks"),
        (EngineConfig { num_blocks: u32::MAX, groups: vec![Reach::Full; 3], ..good.clone() }, "num_blocks"),
        (EngineConfig { max_batch_tokens: 0, ..good.clone() }, "max_requests_per_batch"),
        (EngineConfig { max_requests_per_batch: 17, ..good.clone() }, "max_requests_per_batch"),
        (EngineConfig { safety_margin: 1.5, ..good.clone() }, "safety_margin"),
        (EngineConfig { safety_margin: f64::NAN, ..good.clone() }, "safety_margin"),
        (EngineConfig { vocab_size: 0, ..good.clone() }, "vocab_size"),
        (EngineConfig { max_cache_reads: Some(63), ..good.clone() }, "max_cache_reads"),
    ] {
        let refused = Engine::new(bad).unwrap_err();
        assert!(refused.to_string().starts_with(name), "{refused}");
    }
}
