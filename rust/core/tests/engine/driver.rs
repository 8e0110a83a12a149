//! An engine with a device under it, driven step by step, with one or two steps in flight. Every request that ends is
//! held against its text: no story can go well with wrong tokens.

use std::collections::{HashMap, HashSet};

use crate::device::{Device, LastStep, next_token};
use chairlift_core::{
    Abandoned, Engine, EngineConfig, Finish, News, Reach, Request, RequestId, Results, Sampling, Slot, Stats,
    Step,
};

pub const VOCAB: u32 = 50;

/// A row of a step, and whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub request: u64,
    pub start: usize,
    pub len: usize,
    pub sampled: bool,
    /// Whether it got its row with this step.
    pub arrives: bool,
    /// Whether what it brings is all generated.
    pub generated: bool,
    /// Whether its last token is brought by the step before.
    pub carried: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct End {
    pub request: u64,
    pub finish: Finish,
    pub tokens: Vec<i32>,
    pub logprobs: Vec<f32>,
    pub cached: usize,
    /// Whether it was ever planned.
    pub started: bool,
}

#[derive(Debug, Clone)]
pub struct InFlight {
    pub slot: Slot,
    pub step: Step,
    pub last: LastStep,
}

pub struct Driver {
    pub engine: Engine,
    device: Device,
    arenas: [Vec<i32>; 2],
    pub now: f64,
    /// Whether a step is committed only when the next one is planned.
    pub late: bool,
    /// Steps in flight, oldest first.
    pub flights: Vec<InFlight>,
    /// The step that was planned last.
    planned: Option<Step>,
    /// Sequences of each request, by the first of them.
    families: HashMap<u64, u64>,
    /// By request.
    prompts: Vec<Vec<i32>>,
    /// By request, the prompt and what the steps planned so far sample.
    texts: Vec<Vec<i32>>,
    ended: HashSet<u64>,
    of_row: HashMap<i32, u64>,
    /// Whose draws have that key.
    of_draws: HashMap<(i32, i32), u64>,
    /// Streamed tokens.
    pub streamed: HashMap<u64, Vec<i32>>,
}

/// A config for stories: one group that sees everything, and no prefix cache.
pub fn config(page_size: u32, num_blocks: u32, tokens: u32) -> EngineConfig {
    EngineConfig {
        page_size,
        num_blocks,
        max_requests_per_batch: 8.min(tokens),
        max_batch_tokens: tokens,
        vocab_size: VOCAB,
        seed: 3,
        match_unit: 0,
        ..EngineConfig::default()
    }
}

/// A prompt whose first `common` tokens all of a family have, and whose others are its own.
pub fn prompt(family: usize, common: usize, own: usize, len: usize) -> Vec<i32> {
    let token = |n: usize| if n < common { family * 7 + n * 13 } else { own + n * 7 };
    (0..len).map(|n| (token(n) % VOCAB as usize) as i32).collect()
}

/// What a text goes on with.
pub fn continuation(prompt: &[i32], tokens: usize) -> Vec<i32> {
    let mut text = prompt.to_vec();
    for _ in 0..tokens {
        text.push(next_token(&text, VOCAB as i32));
    }
    text.split_off(prompt.len())
}

impl Driver {
    pub fn new(config: EngineConfig) -> Self {
        let engine = Engine::new(config).unwrap();
        let (device, arena) = (Device::new(&engine), vec![-7; engine.arena_capacity()]);
        Self {
            engine,
            device,
            arenas: [arena.clone(), arena],
            now: 0.0,
            late: false,
            flights: Vec::new(),
            planned: None,
            families: HashMap::new(),
            prompts: Vec::new(),
            texts: Vec::new(),
            ended: HashSet::new(),
            of_row: HashMap::new(),
            of_draws: HashMap::new(),
            streamed: HashMap::new(),
        }
    }

    /// One whose steps are committed after the next was planned.
    pub fn late(config: EngineConfig) -> Self {
        Self::of(config, true)
    }

    pub fn of(config: EngineConfig, late: bool) -> Self {
        let mut driver = Self::new(config);
        (driver.late, driver.device.late) = (late, late);
        driver
    }

    pub fn stats(&self) -> Stats {
        self.engine.counters().snapshot()
    }

    /// Submits a prompt that stops at a bound.
    pub fn submit(&mut self, prompt: Vec<i32>, max_new_tokens: i64) -> u64 {
        self.request(Request { prompt, max_new_tokens, ..Request::default() }).unwrap()
    }

    pub fn request(&mut self, what: Request) -> chairlift_core::Result<u64> {
        let (first, sequences) = (self.prompts.len() as u64, u64::from(what.n));
        // By this its rows are known on the device.
        let sampling = Sampling::Draw { temperature: 1.0, top_k: first as u32 + 1, top_p: 1.0 };
        let prompt = what.prompt.clone();
        let given = self.engine.inbox().submit(Request { sampling, record_logprobs: true, ..what })?;
        assert_eq!(given.get(), first);
        self.families.insert(first, sequences);
        self.prompts.extend(vec![prompt.clone(); sequences as usize]);
        self.texts.extend(vec![prompt; sequences as usize]);
        Ok(first)
    }

    /// The text of a request as it is going to be.
    pub fn text_of(&self, request: usize, tokens: usize) -> Vec<i32> {
        let prompt = &self.prompts[request];
        let more = tokens.saturating_sub(prompt.len());
        [prompt.clone(), continuation(prompt, more)].concat()
    }

    pub fn cancel(&self, request: u64) {
        self.engine.inbox().cancel(RequestId::from_ordinal(request));
    }

    fn free_slot(&self) -> Slot {
        self.flights.last().map_or(Slot::A, |flight| flight.slot.other())
    }

    /// Plans a step, if there is anything to run and a slot is free.
    pub fn plan(&mut self) -> Option<Vec<Row>> {
        if self.flights.len() == 2 {
            return None;
        }
        self.now += 1.0;
        assert!(self.now < 10_000.0, "it does not come to an end");
        let slot = self.free_slot();
        let step = self.engine.advance(None, Some((slot, &mut self.arenas[slot.index()])), self.now).unwrap();
        self.engine.check_integrity().unwrap();
        let Some(step) = step else {
            // Whoever waits fits an empty pool.
            assert!(!self.flights.is_empty() || self.engine.is_idle(), "somebody waits, and nothing runs");
            return None;
        };
        let arena = &self.arenas[slot.index()];
        let seen = self.device.run(&step, arena);
        let at = &step.layout;
        let arrivals: HashMap<i32, u64> =
            arena[at.row_changes.clone()].chunks(5).map(|change| (change[0], change[3] as u64 - 1)).collect();
        let carried: Vec<i32> = arena[at.carry_overs.clone()].chunks(2).map(|carry| carry[0]).collect();
        let mut draws = arena[at.draws.clone()].chunks(3);
        let mut sampled = self.device.last_step().sampled.iter();
        let mut rows = Vec::new();
        for (n, row) in seen.iter().enumerate() {
            let draw = if row.sampled { draws.next().map(|draw| (draw[0], draw[1])) } else { None };
            if let Some(&first) = arrivals.get(&row.row) {
                self.of_row.insert(row.row, self.arrival(first, draw));
            }
            let request = self.of_row[&row.row];
            if let Some(draw) = draw {
                let of_draws = *self.of_draws.entry(draw).or_insert(request);
                assert_eq!(of_draws, request, "the draws of one request are another's");
            }
            let (text, end) = (&mut self.texts[request as usize], row.start as usize + row.tokens.len());
            assert_eq!(
                row.content,
                text[row.seen_from as usize..end],
                "request {request} reads another text"
            );
            if row.sampled {
                text.truncate(end);
                text.extend(sampled.next());
            }
            rows.push(Row {
                request,
                start: row.start as usize,
                len: row.tokens.len(),
                sampled: row.sampled,
                arrives: arrivals.contains_key(&row.row),
                generated: row.start as usize >= self.prompts[request as usize].len(),
                carried: carried.contains(&(arena[at.cu_seqlens.start + n + 1] - 1)),
            });
        }
        self.planned = Some(step.clone());
        self.flights.push(InFlight { slot, step, last: self.device.last_step().clone() });
        Some(rows)
    }

    /// Which sequence of a request arrives: they come in their order.
    fn arrival(&self, first: u64, draw: Option<(i32, i32)>) -> u64 {
        let known = draw.and_then(|draw| self.of_draws.get(&draw)).copied();
        let is_new = |request: &u64| self.of_draws.values().all(|known| known != request);
        let mut all = first..first + self.families[&first];
        known.or_else(|| all.find(is_new)).unwrap_or(first)
    }

    /// Commits the oldest step in flight.
    pub fn commit(&mut self) {
        self.commit_as(|_| {});
    }

    /// Commits the oldest step in flight as if it had sampled other tokens.
    pub fn commit_as(&mut self, change: impl Fn(&mut [i32])) {
        let InFlight { slot, last, .. } = self.flights.remove(0);
        if self.flights.is_empty() {
            self.device.back_to(LastStep::default());
        }
        let mut tokens = last.sampled;
        change(&mut tokens);
        let logprobs: Vec<f32> = tokens.iter().map(|&token| -(token as f32)).collect();
        let results = Results { slot, tokens: &tokens, logprobs: &logprobs };
        self.engine.advance(Some(results), None, self.now).unwrap();
        self.engine.check_integrity().unwrap();
    }

    /// Abandons the step that was planned last, or the oldest and with it the other.
    pub fn abandon(&mut self, oldest: bool, why: Abandoned<'_>) {
        let at = if oldest { 0 } else { self.flights.len() - 1 };
        let slot = self.flights[at].slot;
        self.flights.truncate(at);
        self.engine.abandon(slot, why, self.now).unwrap();
        self.device.back_to(self.flights.last().map(|flight| flight.last.clone()).unwrap_or_default());
        self.engine.check_integrity().unwrap();
    }

    /// Blocks that the step planned last puts into the table of a request, in the order of its pages.
    pub fn changed_blocks(&self, request: u64) -> Vec<i32> {
        let last = self.planned.as_ref().unwrap();
        let changes = self.arenas[last.slot.index()][last.layout.table_changes.clone()].chunks(4);
        changes.filter(|change| self.of_row[&change[1]] == request).map(|change| change[3]).collect()
    }

    pub fn new_epoch(&mut self) {
        self.engine.new_epoch();
        self.engine.check_integrity().unwrap();
    }

    /// Plans a step and commits it, or the one before it. Tells what was planned; nothing: nothing is left to do.
    pub fn step(&mut self) -> Vec<Row> {
        let planned = self.plan();
        let stays = usize::from(self.late && planned.is_some());
        if self.flights.len() > stays {
            self.commit();
        }
        planned.unwrap_or_default()
    }

    /// Whether anything runs or waits to be committed.
    pub fn goes_on(&mut self) -> bool {
        let in_flight = !self.flights.is_empty();
        !self.step().is_empty() || in_flight
    }

    pub fn run_out(&mut self) -> Vec<End> {
        while self.goes_on() {}
        assert!(self.engine.is_idle());
        assert_eq!(self.engine.inbox().queued(), 0);
        let stats = self.stats();
        assert_eq!(stats.free_blocks + stats.cached_blocks, stats.capacity, "all blocks are back");
        assert_eq!(stats.free_swap_blocks, stats.swap_capacity);
        self.ends()
    }

    /// Who ended since this was asked last, in that order.
    pub fn ends(&mut self) -> Vec<End> {
        let mut ends = Vec::new();
        while let Some(event) = self.engine.outbox().take_next() {
            let request = event.request.get();
            match event.news {
                News::Token { token, .. } => self.streamed.entry(request).or_default().push(token),
                News::End(output) => {
                    assert!(self.ended.insert(request), "request {request} ends twice");
                    let text = &self.prompts[request as usize];
                    assert_eq!(output.prompt, *text);
                    if self.engine.config().groups.contains(&Reach::Full) {
                        let expected = continuation(text, output.tokens.len());
                        assert_eq!(output.tokens, expected, "request {request} saw another text");
                    }
                    let of_tokens: Vec<f32> = output.tokens.iter().map(|&token| -(token as f32)).collect();
                    assert_eq!(output.logprobs, of_tokens, "logprobs of other tokens");
                    assert!(output.cached_tokens as usize <= text.len());
                    ends.push(End {
                        request,
                        finish: output.finish,
                        tokens: output.tokens,
                        logprobs: output.logprobs,
                        cached: output.cached_tokens as usize,
                        started: output.started.is_some(),
                    });
                }
            }
        }
        ends
    }
}
