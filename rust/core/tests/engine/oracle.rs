//! The engine against its naive twin, driven with the same random operations.
//!
//! The twin predicts every row of every step, every event and the number of blocks in each state. The device checks
//! that the arena leads each row to its own tokens.

use crate::device::{Device, LastStep, next_token};
use crate::twin::{Naive, NaiveSeq};
use chairlift_core::{
    Abandoned, Engine, EngineConfig, Eviction, Fairness, Finish, KEY_BITS, News, Policy, Reach, Request,
    RequestId, Results, Sampling, Slot, Stats,
};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const VOCAB: u32 = 50;

#[derive(Debug, Clone)]
struct Submit {
    prompt: usize,
    /// Last tokens of the prompt that no other prompt of its family has.
    own: usize,
    family: i32,
    salt: i32,
    tenant: u32,
    n: u32,
    max_new: i64,
    eos: i32,
    priority: i32,
}

#[derive(Debug, Clone)]
enum Op {
    Submit(Submit),
    Cancel(usize),
    Step,
    /// Of the step in flight that was planned last, or first.
    Abandon {
        oldest: bool,
    },
    Fail {
        oldest: bool,
    },
    RunOutOfMemory {
        oldest: bool,
    },
    NewEpoch,
    /// Lets nobody in from here on who was never admitted; or lets them in again.
    LetIn(bool),
    RecomputeAll,
    CancelAll,
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let reach = prop_oneof![
        3 => Just(Reach::Full),
        1 => (1..20_u32).prop_map(Reach::Window),
        1 => (1..20_u32).prop_map(Reach::Chunk),
    ];
    let groups = prop::collection::vec(reach, 1..4);
    let sizes = (1..9_u32, 3..61_u32, groups, 1..9_u32, 1..33_u32);
    let policy = prop::sample::select(vec![Policy::Fifo, Policy::PrefillFirst]);
    let eviction = prop::sample::select(vec![Eviction::Lru, Eviction::Lifo]);
    let rules = (
        any::<bool>(),
        policy,
        prop::sample::select(vec![0.0, 0.15, 0.5, 1.0]),
        prop::option::of(8..60_u32),
        (
            0..5_usize,
            eviction,
            prop::sample::select(vec![0, 0, 5, 20, 100]),
            any::<bool>(),
            prop::option::weighted(0.2, 1..50_u32),
        ),
    );
    (sizes, rules).prop_map(
        |(
            (page, blocks, groups, rows, tokens),
            (gathers, policy, margin, positions, (unit, eviction, swap, fair, first_regime)),
        )| {
            let weights = [("0", 1.0), ("1", 2.0), ("2", 0.5)];
            let fairness =
                Fairness::Tenants(weights.map(|(name, weight)| (name.to_owned(), weight)).to_vec());
            let units: Vec<u32> = (1..=page).filter(|unit| page.is_multiple_of(*unit)).collect();
            EngineConfig {
                page_size: page,
                num_blocks: blocks.div_ceil(groups.len() as u32),
                // What a sequence reads at most is at most what a story has tokens for.
                max_cache_reads: gathers
                    .then_some(u64::from(page * blocks.div_ceil(groups.len() as u32)).max(200)),
                groups,
                max_requests_per_batch: rows.min(tokens),
                max_batch_tokens: tokens,
                safety_margin: margin,
                policy,
                vocab_size: VOCAB,
                max_positions: Some(positions.unwrap_or(150)),
                seed: 1,
                // One story in five goes without a prefix cache.
                match_unit: if unit == 0 { 0 } else { units[unit % units.len()] },
                cache_eviction: eviction,
                swap_blocks: swap,
                first_regime,
                fairness: if fair { fairness } else { Fairness::Arrival },
                ..EngineConfig::default()
            }
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let sizes = (1..40_usize, 0..6_usize, 0..3_i32, prop::sample::select(vec![1, 1, 1, 2, 3]));
    let rules = (1..30_i64, 0..VOCAB as i32 * 3, -1..2_i32, prop::sample::select(vec![0, 0, 0, 1]), 0..4_u32);
    let submit =
        (sizes, rules).prop_map(|((prompt, own, family, n), (max_new, eos, priority, salt, tenant))| {
            Op::Submit(Submit {
                prompt,
                own: own.min(prompt),
                family,
                salt,
                tenant,
                n,
                max_new,
                eos,
                priority,
            })
        });
    prop_oneof![
        4 => submit,
        1 => (0..40_usize).prop_map(Op::Cancel),
        14 => Just(Op::Step),
        1 => any::<bool>().prop_map(|oldest| Op::Abandon { oldest }),
        2 => any::<bool>().prop_map(|oldest| Op::Fail { oldest }),
        1 => (any::<bool>(), 0..4).prop_map(|(oldest, nth)| match nth {
            0 => Op::RunOutOfMemory { oldest },
            _ => Op::Step,
        }),
        1 => prop::sample::select(vec![Op::NewEpoch, Op::Step, Op::Step, Op::Step]),
        1 => prop::sample::select(vec![Op::LetIn(false), Op::LetIn(true), Op::LetIn(true), Op::RecomputeAll]),
        1 => (0..8).prop_map(|nth| if nth == 0 { Op::CancelAll } else { Op::Step }),
    ]
}

struct Pair {
    engine: Engine,
    /// `None` where keys are so short that they collide: then only the device checks.
    naive: Option<Naive>,
    device: Device,
    arenas: [Vec<i32>; 2],
    /// Whether a step is committed only after the next was planned.
    late: bool,
    /// Steps in flight, oldest first, with what they sampled.
    flights: Vec<(Slot, LastStep)>,
    /// Prompts by request.
    prompts: Vec<Vec<i32>>,
    requests: usize,
    ops: u64,
    now: f64,
}

impl Pair {
    fn new(config: EngineConfig, late: bool) -> Self {
        let engine = Engine::new(config.clone()).unwrap();
        let (mut device, arena) = (Device::new(&engine), vec![-7; engine.arena_capacity()]);
        device.late = late;
        let naive = (config.hash_bits == KEY_BITS).then(|| Naive::new(config));
        let arenas = [arena.clone(), arena];
        Self {
            engine,
            naive,
            device,
            arenas,
            late,
            flights: vec![],
            prompts: vec![],
            requests: 0,
            ops: 0,
            now: 0.0,
        }
    }

    fn submit(&mut self, what: &Submit) {
        let common = (0..(what.prompt - what.own) as i32).map(|n| (n * 13 + what.family * 7) % VOCAB as i32);
        let own = (0..what.own as i32).map(|n| (n * 11 + self.requests as i32 * 3) % VOCAB as i32);
        let tokens: Vec<i32> = common.chain(own).collect();
        let request = Request {
            prompt: tokens.clone(),
            max_new_tokens: what.max_new,
            n: what.n,
            eos: [what.eos].into(),
            sampling: Sampling::Greedy,
            priority: what.priority,
            cache_salt: what.salt.to_string(),
            tenant: what.tenant.to_string(),
            streaming: self.requests.is_multiple_of(2),
            record_timestamps: true,
            record_logprobs: true,
            ..Request::default()
        };
        let submitted = self.engine.inbox().submit(request);
        let room = self.naive.as_ref().map(Naive::room);
        assert!(room.is_none_or(|room| submitted.is_ok() == (what.prompt < room)), "{submitted:?}");
        let Ok(first) = submitted else { return };
        let first = first.get();
        assert_eq!(first as usize, self.prompts.len());
        self.prompts.extend(vec![tokens.clone(); what.n as usize]);
        self.requests += 1;
        let (Some(naive), Some(room)) = (&mut self.naive, room) else { return };
        let naive_second = naive.is_second(what.prompt);
        let sequence = |child| NaiveSeq {
            request: first + child,
            parent: first,
            priority: what.priority,
            tenant: what.tenant.to_string(),
            prompt: what.prompt,
            max_len: (what.prompt + what.max_new as usize).min(room),
            eos: what.eos,
            salt: what.salt,
            tokens: tokens.clone(),
            epochs: vec![],
            computed: 0,
            planned: 0,
            pending: 0,
            in_flight: [false; 2],
            table: vec![],
            news: vec![],
            sent: 0,
            active: false,
            decoding: false,
            admitted: 0,
            passed_over: 0,
            shares: false,
            published: 0,
            prefill_len: 0,
            cached_tokens: 0,
            epoch: 0,
            second: naive_second,
            follows: None,
            no_room: None,
            swapped: None,
        };
        // The first of them is the last that the engine takes in.
        naive.inbox.push(Ok((0..u64::from(what.n)).map(sequence).collect()));
    }

    /// Plans a step if a slot is free, and commits the oldest one unless it may stay in flight. Tells whether anything
    /// happened.
    fn step(&mut self) -> bool {
        let planned = self.flights.len() < 1 + usize::from(self.late) && self.plan();
        let most = usize::from(self.late && planned);
        let committed = self.flights.len() > most;
        if committed {
            self.commit();
        }
        planned || committed
    }

    fn plan(&mut self) -> bool {
        self.now += 1.0;
        let slot = self.flights.last().map_or(Slot::A, |(slot, _)| slot.other());
        let expected = self.naive.as_mut().map(|naive| {
            naive.read_inbox();
            naive.plan(slot.index())
        });
        let arena = &mut self.arenas[slot.index()];
        let step = self.engine.advance(None, Some((slot, arena)), self.now).unwrap();
        self.check();
        let Some(step) = step else {
            if let (Some(expected), Some(naive)) = (expected, &self.naive) {
                assert_eq!(expected, []);
                assert!(
                    naive.seqs.is_empty() || !self.flights.is_empty() || !naive.lets_in,
                    "nothing planned, but something waits"
                );
            }
            return false;
        };
        let seen = self.device.run(&step, &self.arenas[slot.index()]);
        self.flights.push((slot, self.device.last_step().clone()));
        if let (Some(expected), Some(naive)) = (expected, &self.naive) {
            let rows: Vec<_> =
                seen.iter().map(|seen| (seen.start as usize, seen.tokens.len(), seen.sampled)).collect();
            let of_twin: Vec<_> = expected.iter().map(|row| (row.start, row.len, row.sampled)).collect();
            assert_eq!(rows, of_twin);
            assert_eq!((step.shape.copies, step.shape.swap_outs), naive.moves(), "copies, swap-outs");
            for (seen, row) in seen.iter().zip(&expected) {
                let mut text = naive.seqs[naive.find(row.request).unwrap()].tokens.clone();
                // And what earlier steps in flight sampled for it.
                for (step, (_, last)) in naive.flights.iter().zip(&self.flights[..self.flights.len() - 1]) {
                    let sampled = step.rows.iter().filter(|row| row.sampled).zip(&last.sampled);
                    text.extend(sampled.filter(|(of, _)| of.request == row.request).map(|(_, &token)| token));
                }
                let known = row.start + row.len;
                assert_eq!(seen.content, text[seen.seen_from as usize..known], "the row reads another text");
            }
        }
        true
    }

    fn commit(&mut self) {
        let (slot, LastStep { sampled: tokens, .. }) = self.flights.remove(0);
        if self.flights.is_empty() {
            // Nothing is left that a step could build on.
            self.device.back_to(LastStep::default());
        }
        let logprobs: Vec<f32> = tokens.iter().map(|&token| -(token as f32)).collect();
        let results = Results { slot, tokens: &tokens, logprobs: &logprobs };
        self.engine.advance(Some(results), None, self.now).unwrap();
        if let Some(naive) = &mut self.naive {
            naive.commit(&tokens);
            // The call that commits reads the inbox as well.
            naive.read_inbox();
        }
        self.check();
    }

    fn abandon(&mut self, oldest: bool, why: Abandoned<'_>) {
        if self.flights.is_empty() && !self.plan() {
            return;
        }
        if self.late && self.flights.len() < 2 {
            self.plan();
        }
        let at = if oldest { 0 } else { self.flights.len() - 1 };
        let (slot, _) = self.flights[at];
        self.flights.truncate(at);
        self.engine.abandon(slot, why, self.now).unwrap();
        if let Some(naive) = &mut self.naive {
            naive.abandon(slot.index(), why);
        }
        self.device.back_to(self.flights.last().map(|(_, last)| last.clone()).unwrap_or_default());
        self.check();
    }

    fn new_epoch(&mut self) {
        self.engine.new_epoch();
        if let Some(naive) = &mut self.naive {
            naive.new_epoch();
        }
        self.check();
    }

    fn let_in(&mut self, fresh: bool) {
        self.engine.let_in(fresh);
        if let Some(naive) = &mut self.naive {
            naive.lets_in = fresh;
        }
    }

    fn recompute_all(&mut self) {
        let done = self.engine.recompute_all();
        assert_eq!(done.is_ok(), self.flights.is_empty(), "{done:?}");
        if let Some(naive) = self.naive.as_mut().filter(|_| done.is_ok()) {
            naive.recompute_all();
        }
        self.check();
    }

    fn cancel_all(&mut self) {
        self.engine.cancel_all(self.now);
        self.flights.clear();
        self.device.back_to(LastStep::default());
        if let Some(naive) = &mut self.naive {
            naive.cancel_all();
        }
        self.check();
        assert!(self.engine.is_idle());
    }

    /// Books, states and events.
    fn check(&mut self) {
        self.ops += 1;
        self.engine.check_integrity().unwrap();
        let mut ended = Vec::new();
        while let Some(event) = self.engine.outbox().take_next() {
            if let News::End(output) = event.news {
                assert_eq!(output.tokens.len(), output.logprobs.len());
                assert_eq!(output.tokens.len(), output.timestamps.len());
                let pairs = output.tokens.iter().zip(&output.logprobs);
                assert!(pairs.into_iter().all(|(&token, &logprob)| -(token as f32) == logprob));
                let places = 0..output.tokens.len() as u32;
                let runs = output.epochs.iter().rev();
                let epoch_of = |place| runs.clone().find(|&&(first, _)| first <= place).unwrap().1;
                ended.push((
                    event.request.get(),
                    output.tokens,
                    places.map(epoch_of).collect(),
                    output.finish,
                    output.cached_tokens as usize,
                ));
            }
        }
        if let Some(naive) = &mut self.naive {
            assert_eq!(ended, std::mem::take(&mut naive.ended));
            let stats = self.engine.counters().snapshot();
            let states = [stats.free_blocks, stats.owned_blocks, stats.cached_blocks, stats.retiring_blocks];
            assert_eq!(states.map(|count| count as usize), naive.states(), "free, owned, cached, retiring");
            assert_eq!(stats.free_swap_blocks as usize, naive.free_host());
            let offloads = [stats.soft_resets, stats.swap_outs, stats.swap_ins, stats.crossings];
            let of_twin = [naive.soft_resets, naive.swap_outs, naive.swap_ins, naive.crossings];
            assert_eq!(offloads, of_twin, "soft resets, swaps out and in, crossings");
        }
        let sees_all = self.engine.config().groups.contains(&Reach::Full);
        for (request, tokens, _, finish, _) in ended {
            if let Finish::Failed(cause) = finish {
                assert_eq!(cause, "broken", "{tokens:?}");
            }
            let mut text = self.prompts[request as usize].clone();
            for token in tokens.into_iter().filter(|_| sees_all) {
                assert_eq!(token, next_token(&text, VOCAB as i32), "request {request} saw another text");
                text.push(token);
            }
        }
    }

    /// The counters at the end, and how many operations there were.
    fn drive(mut self, ops: &[Op]) -> Result<(Stats, u64), TestCaseError> {
        for op in ops {
            self.ops += u64::from(matches!(op, Op::Submit(_) | Op::Cancel(_)));
            match op {
                Op::Submit(what) => self.submit(what),
                Op::Cancel(request) => {
                    self.engine.inbox().cancel(RequestId::from_ordinal(*request as u64));
                    if let Some(naive) = &mut self.naive {
                        naive.inbox.push(Err(*request as u64));
                    }
                }
                Op::Step => drop(self.step()),
                Op::Abandon { oldest } => self.abandon(*oldest, Abandoned::Withdrawn),
                Op::Fail { oldest } => self.abandon(*oldest, Abandoned::Raised("broken")),
                Op::RunOutOfMemory { oldest } => self.abandon(*oldest, Abandoned::OutOfMemory("broken")),
                Op::NewEpoch => self.new_epoch(),
                Op::LetIn(fresh) => self.let_in(*fresh),
                Op::RecomputeAll => self.recompute_all(),
                Op::CancelAll => self.cancel_all(),
            }
        }
        self.let_in(true);
        // Whatever was left ends by itself, and everything comes back.
        let mut steps = 0;
        while self.step() {
            steps += 1;
            prop_assert!(steps < 20_000, "the engine does not come to an end");
        }
        let stats = self.engine.counters().snapshot();
        prop_assert_eq!(stats.free_blocks + stats.cached_blocks, stats.capacity);
        prop_assert_eq!(stats.finished + stats.failed + stats.cancelled, stats.submitted);
        prop_assert!(self.engine.is_idle());
        prop_assert_eq!(self.engine.inbox().queued(), 0);
        self.engine.new_epoch();
        prop_assert_eq!(self.engine.counters().snapshot().free_blocks, stats.capacity);
        prop_assert_eq!(stats.free_swap_blocks, stats.swap_capacity);
        Ok((stats, self.ops))
    }
}

/// The same stories every time, so that a failure can be seen again; others with `CHAIRLIFT_SEED=N`, or any with
/// `CHAIRLIFT_SEED=random`.
fn seed() -> RngSeed {
    match std::env::var("CHAIRLIFT_SEED").as_deref() {
        Ok("random") => RngSeed::Random,
        Ok(seed) => RngSeed::Fixed(seed.parse().expect("CHAIRLIFT_SEED is a number or random")),
        Err(_) => RngSeed::Fixed(20),
    }
}

fn cases(default: u32) -> u32 {
    std::env::var("CHAIRLIFT_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}

fn stories(
    name: &'static str,
    keys: impl Strategy<Value = u32>,
    story: impl Fn(EngineConfig, bool, &[Op]) -> Result<(Stats, u64), TestCaseError>,
) {
    let config_of_run = ProptestConfig {
        cases: cases(1700),
        rng_seed: seed(),
        failure_persistence: None,
        test_name: Some(name),
        ..ProptestConfig::default()
    };
    let strategy = (config(), any::<bool>(), keys, prop::collection::vec(op(), 1..160));
    let (met, operations) = (Mutex::new(BTreeMap::new()), AtomicU64::new(0));
    let run = TestRunner::new(config_of_run).run(&strategy, |(config, late, hash_bits, ops)| {
        let (stats, ops) = story(EngineConfig { hash_bits, ..config }, late, &ops)?;
        operations.fetch_add(ops, Ordering::Relaxed);
        let mut met = met.lock().unwrap();
        for (what, count) in stats.entries() {
            *met.entry(what).or_insert(0) += u64::from(count > 0);
        }
        Ok(())
    });
    if let Err(failure) = run {
        panic!("{failure}");
    }
    println!("{name}: {} operations", operations.into_inner());
    // Stories that never meet something prove nothing about it.
    let met = met.into_inner().unwrap();
    for what in [
        "abandoned_steps",
        "finished",
        "failed",
        "cancelled",
        "starved",
        "soft_resets",
        "swap_outs",
        "swap_ins",
        "cached_tokens",
        "evictions",
        "crossings",
        "merged_blocks",
        "copied_blocks",
        "epoch",
    ] {
        assert!(met[what] >= 10, "only {} stories have any {what}", met[what]);
    }
}

#[test]
fn every_step_and_every_event_is_what_the_naive_twin_says() {
    stories("twin", Just(KEY_BITS), |config, late, ops| Pair::new(config, late).drive(ops));
}

#[test]
fn prompts_whose_keys_collide_share_nothing_wrongly() {
    stories("collisions", 1..9_u32, |config, late, ops| {
        // One group that sees everything, so that every token depends on the whole text.
        let groups = [vec![Reach::Full], config.groups[1..].to_vec()].concat();
        Pair::new(EngineConfig { groups, ..config }, late).drive(ops)
    });
}
