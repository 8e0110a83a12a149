//! Models that compute longer sequences otherwise: two regimes, never in one step.

use chairlift_core::{Engine, EngineConfig, News, Request, RequestId, Results, Slot};

use crate::device::{Device, next_token};

const VOCAB: i32 = 50;

struct Story {
    engine: Engine,
    device: Device,
    arena: Vec<i32>,
}

impl Story {
    fn new(config: EngineConfig) -> Self {
        let config = EngineConfig {
            page_size: 4,
            match_unit: 4,
            vocab_size: VOCAB as u32,
            max_requests_per_batch: 8,
            first_regime: Some(16),
            ..config
        };
        let engine = Engine::new(config).unwrap();
        let (device, arena) = (Device::new(&engine), vec![0; engine.arena_capacity()]);
        Self { engine, device, arena }
    }

    fn submit(&self, prompt: &[i32], max_new_tokens: i64) -> RequestId {
        let request = Request { prompt: prompt.to_vec(), max_new_tokens, ..Request::default() };
        self.engine.inbox().submit(request).unwrap()
    }

    /// One step: its rows by start and length, and whether it was of the second regime.
    fn step(&mut self) -> Option<(Vec<(i32, usize)>, bool)> {
        let step = self.engine.advance(None, Some((Slot::A, &mut self.arena)), 0.0).unwrap()?;
        let rows = self.device.run(&step, &self.arena);
        let tokens = self.device.last_step().sampled.clone();
        self.engine
            .advance(Some(Results { slot: Slot::A, tokens: &tokens, logprobs: &[] }), None, 0.0)
            .unwrap();
        self.engine.check_integrity().unwrap();
        Some((rows.iter().map(|row| (row.start, row.tokens.len())).collect(), step.second_regime))
    }
}

fn text(len: i32, seed: i32) -> Vec<i32> {
    (0..len).map(|n| (n * 13 + seed * 7) % VOCAB).collect()
}

#[test]
fn who_outgrows_the_first_regime_is_computed_again_in_the_second() {
    let mut story =
        Story::new(EngineConfig { num_blocks: 16, max_batch_tokens: 8, ..EngineConfig::default() });
    let prompt = text(14, 0);
    let request = story.submit(&prompt, 5);
    let steps: Vec<_> = std::iter::from_fn(|| story.step()).collect();
    let of_one_row = |start, len, second| (vec![(start, len)], second);
    assert_eq!(
        steps,
        [
            of_one_row(0, 8, false),
            of_one_row(8, 6, false),
            of_one_row(14, 1, false),
            of_one_row(15, 1, false),
            // Its 17th token is beyond: all of it once more.
            of_one_row(0, 8, true),
            of_one_row(8, 8, true),
            of_one_row(16, 1, true),
            of_one_row(17, 1, true),
        ]
    );
    let News::End(output) = story.engine.outbox().take_for(request).unwrap().news else { panic!("no end") };
    let mut expected = prompt;
    (0..5).for_each(|_| expected.push(next_token(&expected, VOCAB)));
    assert_eq!(output.tokens, expected[14..]);
    assert_eq!(story.engine.counters().snapshot().crossings, 1);
}

#[test]
fn the_regimes_take_turns() {
    let mut story =
        Story::new(EngineConfig { num_blocks: 64, max_batch_tokens: 64, ..EngineConfig::default() });
    story.submit(&text(4, 1), 8);
    story.submit(&text(20, 2), 8);
    let turns: Vec<bool> = std::iter::from_fn(|| story.step()).map(|(_, second)| second).collect();
    assert_eq!(turns[..8], [false, true, false, true, false, true, false, true]);
}

#[test]
fn the_head_of_the_queue_is_not_passed_over_for_ever_by_the_other_regime() {
    let mut story =
        Story::new(EngineConfig { num_blocks: 16, max_batch_tokens: 64, ..EngineConfig::default() });
    // Short ones that always leave too few blocks for the long one.
    for seed in 0..4 {
        story.submit(&text(8, seed), 8);
    }
    story.step();
    let long = story.submit(&text(40, 99), 4);
    for seed in 4..200 {
        story.submit(&text(8, seed), 8);
        story.step();
    }
    let is_long = |request: RequestId| request == long;
    let ended: Vec<_> =
        std::iter::from_fn(|| story.engine.outbox().take_next()).map(|event| event.request).collect();
    assert!(ended.iter().copied().any(is_long), "{} others ended", ended.len());
}
