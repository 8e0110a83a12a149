//! Attacks: what a hostile, careless or unlucky caller can hand to the core, and what the core makes of it.

use crate::driver::{Driver, config, prompt};
use chairlift_core::{
    Abandoned, BlockPool, BlockState, Engine, EngineConfig, Error, Eviction, Finish, Reach, Request,
    RequestId, Results, Slot, Tickets,
};

// ------------------------------------------------------------------ keys that collide

fn short_keys(hash_bits: u32, match_unit: u32) -> EngineConfig {
    EngineConfig { hash_bits, match_unit, ..config(4, 64, 64) }
}

fn cached(driver: &mut Driver, what: Request) -> usize {
    let request = driver.request(what).unwrap();
    let ends = driver.run_out();
    assert_eq!(ends.len(), 1);
    assert_eq!(ends[0].request, request);
    ends[0].cached
}

fn text(tokens: impl IntoIterator<Item = i32>) -> Request {
    Request { prompt: tokens.into_iter().collect(), ..Request::default() }
}

#[test]
fn of_texts_with_one_key_the_first_is_found_and_no_other() {
    // Two keys are all there are, so of three texts two have the same.
    let mut driver = Driver::new(short_keys(1, 4));
    let texts: Vec<Request> = (0..3).map(|n| text([n, n, n, n, 9])).collect();
    for what in &texts {
        assert_eq!(cached(&mut driver, what.clone()), 0);
    }
    let again: Vec<usize> = texts.iter().map(|what| cached(&mut driver, what.clone())).collect();
    assert_eq!(again[0], 4);
    assert!(again.contains(&0), "{again:?}");
}

#[test]
fn the_same_tokens_with_the_same_key_after_another_text_are_another_text() {
    // Of the seeds some give the second units one key, and the first units others.
    for seed in 0..100 {
        let mut driver = Driver::new(EngineConfig { seed, ..short_keys(2, 4) });
        for round in 0..2 {
            for before in 0..3 {
                let found = cached(&mut driver, text([[before; 4], [5; 4], [6; 4]].concat()));
                assert!(round == 1 || found == 0, "seed {seed}: {found}");
            }
        }
    }
}

#[test]
fn with_two_keys_a_salt_and_an_adapter_still_part_equal_prompts() {
    let mut driver = Driver::new(short_keys(1, 4));
    for n in 0..20 {
        let salted = Request { cache_salt: n.to_string(), ..text([7; 9]) };
        assert_eq!(cached(&mut driver, salted), 0);
        let adapted = Request { adapter: n.to_string(), ..text([7; 9]) };
        assert_eq!(cached(&mut driver, adapted), 0);
    }
}

#[test]
fn many_prompts_with_colliding_keys_at_once_each_read_their_own() {
    for bits in [1, 8] {
        for match_unit in [1, 2, 4] {
            for late in [false, true] {
                let config =
                    EngineConfig { num_blocks: 30, max_batch_tokens: 16, ..short_keys(bits, match_unit) };
                let mut driver = Driver::of(config, late);
                for own in 0..50 {
                    driver.submit(prompt(own % 4, own % 17, own, 17), 4);
                }
                assert_eq!(driver.run_out().len(), 50);
            }
        }
    }
}

#[test]
fn an_adapter_and_a_salt_of_one_name_share_nothing() {
    let with = |cache_salt: &str, adapter: &str| Request {
        cache_salt: cache_salt.to_owned(),
        adapter: adapter.to_owned(),
        ..text(0..9)
    };
    let mut driver = Driver::new(EngineConfig { match_unit: 4, ..config(4, 64, 64) });
    let all = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("aa", ""), ("", "aa")];
    for (salt, adapter) in all {
        assert_eq!(cached(&mut driver, with(salt, adapter)), 0, "salt {salt:?}, adapter {adapter:?}");
    }
    for (salt, adapter) in all {
        assert_eq!(cached(&mut driver, with(salt, adapter)), 8, "salt {salt:?}, adapter {adapter:?}");
    }
}

// ------------------------------------------------------------------ blocks, ids, slots, buffers

#[test]
fn a_block_named_twice_in_one_release_is_free_once() {
    let mut pool = BlockPool::new(3, 1, Eviction::Lru);
    let (block, _) = pool.allocate(0).unwrap();
    pool.share(block).unwrap();
    pool.release(block, Tickets::NONE, false).unwrap();
    assert_eq!((pool.owners(block), pool.free()), (Some(1), 2));
    pool.release(block, Tickets::NONE, false).unwrap();
    for _ in 0..2 {
        let again = pool.release(block, Tickets::NONE, false);
        assert_eq!(again, Err(Error::DoubleFree { block: block.get() }));
    }
    assert_eq!((pool.state(block), pool.free()), (Some(BlockState::Free), 3));
    let given: Vec<u32> = std::iter::from_fn(|| pool.allocate(0)).map(|(block, _)| block.get()).collect();
    assert_eq!(given.iter().collect::<std::collections::HashSet<_>>().len(), 3, "{given:?}");
}

#[test]
fn a_block_that_is_cached_or_retires_cannot_be_released_again() {
    let mut pool = BlockPool::new(2, 1, Eviction::Lru);
    let (cached, _) = pool.allocate(0).unwrap();
    let (retiring, _) = pool.allocate(0).unwrap();
    let mut in_flight = Tickets::NONE;
    in_flight.add(Slot::B);
    pool.release(cached, Tickets::NONE, true).unwrap();
    pool.release(retiring, in_flight, true).unwrap();
    for block in [cached, retiring] {
        assert!(pool.release(block, Tickets::NONE, true).is_err());
    }
    assert_eq!((pool.available(), pool.total().cached, pool.total().retiring), (1, 1, 1));
}

#[test]
fn trash_has_no_owner_to_release_it() {
    let mut pool = BlockPool::new(1, 1, Eviction::Lru);
    let trash = pool.read_trash();
    assert_eq!(pool.release(trash, Tickets::NONE, true), Err(Error::DoubleFree { block: 1 }));
    assert_eq!(pool.share(trash), Err(Error::NotShareable { block: 1 }));
    assert_eq!((pool.state(trash), pool.available()), (None, 1));
}

#[test]
fn the_id_of_a_request_that_ended_cancels_nobody() {
    let mut driver = Driver::new(EngineConfig { max_requests_per_batch: 1, ..config(4, 8, 8) });
    let stale = driver.submit(prompt(0, 0, 0, 3), 1);
    driver.run_out();
    // It has the row and the block that the first had.
    let next = driver.submit(prompt(0, 0, 1, 3), 5);
    driver.step();
    for id in [stale, stale, next + 1, u64::MAX] {
        driver.engine.inbox().cancel(RequestId::from_ordinal(id));
    }
    let ends = driver.run_out();
    assert_eq!((ends[0].request, &ends[0].finish, ends[0].tokens.len()), (next, &Finish::Length, 5));
    assert_eq!(driver.stats().cancelled, 0);
}

#[test]
fn a_sample_is_cancelled_alone_and_the_first_takes_all_along_even_when_it_has_ended() {
    let mut driver = Driver::new(EngineConfig { match_unit: 4, ..config(4, 32, 64) });
    let first = driver
        .request(Request { prompt: prompt(0, 9, 0, 9), max_new_tokens: 4, n: 4, ..Request::default() })
        .unwrap();
    driver.step();
    driver.cancel(first + 2);
    driver.step();
    assert_eq!(driver.ends().iter().map(|end| end.request).collect::<Vec<_>>(), [first + 2]);
    // The first started one step before the others, and ends before them.
    let mut ended = Vec::new();
    while ended.is_empty() {
        driver.step();
        ended = driver.ends();
    }
    assert_eq!((ended.len(), ended[0].request), (1, first));
    driver.cancel(first);
    let rest = driver.run_out();
    assert_eq!(rest.iter().map(|end| end.request).collect::<Vec<_>>(), [first + 1, first + 3]);
    assert!(rest.iter().all(|end| end.finish == Finish::Cancelled));
}

/// An engine of its own, to be misused.
fn engine() -> (Engine, [Vec<i32>; 2]) {
    let engine = Engine::new(config(4, 16, 8)).unwrap();
    let what =
        Request { prompt: vec![1, 2, 3], max_new_tokens: 5, record_logprobs: true, ..Request::default() };
    engine.inbox().submit(what).unwrap();
    let arena = vec![0; engine.arena_capacity()];
    (engine, [arena.clone(), arena])
}

fn commit(slot: Slot) -> Option<Results<'static>> {
    Some(Results { slot, tokens: &[1, 1], logprobs: &[0.0, 0.0] })
}

#[test]
fn slots_out_of_order_are_refused_and_nothing_has_changed() {
    let (mut engine, [mut a, mut b]) = engine();
    let misused = |refused: Result<_, Error>, slot: Slot| match refused {
        Err(Error::SlotMisused { slot: named, .. }) => assert_eq!(named, slot),
        other => panic!("{other:?}"),
    };
    for slot in Slot::ALL {
        misused(engine.advance(commit(slot), None, 1.0).map(|_| ()), slot);
        misused(engine.abandon(slot, Abandoned::Withdrawn, 1.0), slot);
    }
    engine.advance(None, Some((Slot::B, &mut b)), 1.0).unwrap().unwrap();
    misused(engine.advance(None, Some((Slot::B, &mut b)), 1.0).map(|_| ()), Slot::B);
    engine.advance(None, Some((Slot::A, &mut a)), 2.0).unwrap().unwrap();
    let before = engine.counters().snapshot();
    // A was planned on top of B.
    misused(engine.advance(commit(Slot::A), None, 3.0).map(|_| ()), Slot::A);
    for slot in Slot::ALL {
        misused(engine.advance(None, Some((slot, &mut a.clone())), 3.0).map(|_| ()), slot);
    }
    assert_eq!(engine.counters().snapshot(), before);
    engine.check_integrity().unwrap();
    engine.advance(commit(Slot::B), None, 3.0).unwrap();
    engine.advance(commit(Slot::A), None, 4.0).unwrap();
    misused(engine.advance(commit(Slot::A), None, 4.0).map(|_| ()), Slot::A);
    assert_eq!(engine.counters().snapshot().generated_tokens, 2);
    engine.check_integrity().unwrap();
}

#[test]
fn buffers_too_short_are_refused_and_the_step_is_still_there() {
    let (mut engine, [mut a, _]) = engine();
    let short = |refused: Result<_, Error>, what: &str, need: usize| match refused {
        Err(Error::BufferTooSmall { buffer, have, need: named, .. }) => {
            assert!(buffer.contains(what), "{buffer}");
            assert_eq!((have, named), (need - 1, need));
        }
        other => panic!("{other:?}"),
    };
    let need = engine.arena_capacity();
    let refused = engine.advance(None, Some((Slot::A, &mut a[1..])), 1.0);
    short(refused.map(|_| ()), "arena", need);
    assert!(!engine.has_step_in_flight());
    engine.advance(None, Some((Slot::A, &mut a)), 1.0).unwrap().unwrap();
    let results = |tokens, logprobs| Some(Results { slot: Slot::A, tokens, logprobs });
    short(engine.advance(results(&[], &[0.0]), None, 1.0).map(|_| ()), "token", 1);
    short(engine.advance(results(&[1], &[]), None, 1.0).map(|_| ()), "logprob", 1);
    assert_eq!(engine.counters().snapshot().steps, 0);
    engine.check_integrity().unwrap();
    engine.advance(results(&[1], &[0.0]), None, 1.0).unwrap();
    assert_eq!(engine.counters().snapshot().generated_tokens, 1);
}

#[test]
fn a_sampled_token_outside_the_vocabulary_fails_its_request_and_no_other() {
    for (late, forged) in [(false, 50), (false, -1), (true, i32::MAX), (true, i32::MIN)] {
        let mut driver = Driver::of(EngineConfig { match_unit: 1, ..config(4, 16, 8) }, late);
        let (bad, good) = (driver.submit(prompt(0, 0, 0, 3), 5), driver.submit(prompt(0, 0, 1, 3), 5));
        driver.plan();
        if late {
            driver.plan();
        }
        driver.commit_as(|tokens| tokens[0] = forged);
        let ends = driver.run_out();
        assert_eq!((ends[0].request, ends[0].tokens.len()), (bad, 0));
        assert!(matches!(&ends[0].finish, Finish::Failed(cause) if cause.contains(&forged.to_string())));
        assert_eq!((ends[1].request, &ends[1].finish), (good, &Finish::Length));
    }
}

// ------------------------------------------------------------------ sizes at their bounds

#[test]
fn a_request_of_exactly_the_pool_runs_beside_its_own_cached_prefix() {
    for match_unit in [1, 2, 4] {
        for len in 1..16 {
            let mut driver = Driver::new(EngineConfig { match_unit, ..config(4, 4, 64) });
            let text = prompt(0, len, 0, len);
            for round in 0..3 {
                driver.submit(text.clone(), 100);
                let ends = driver.run_out();
                assert_eq!((&ends[0].finish, ends[0].tokens.len()), (&Finish::Length, 16 - len));
                let whole_pages = (len - 1) / 4 * 4;
                assert!(round == 0 || ends[0].cached >= whole_pages, "{} of {len}", ends[0].cached);
            }
        }
        // The last page cannot be copied beside itself: of fifteen tokens the three whole pages are taken.
        let mut driver = Driver::new(EngineConfig { match_unit, ..config(4, 4, 64) });
        for found in [0, 12] {
            driver.submit(prompt(0, 15, 0, 15), 1);
            assert_eq!(driver.run_out()[0].cached, found, "match unit {match_unit}");
        }
    }
}

#[test]
fn a_prompt_shares_all_that_it_begins_alike_once_that_is_a_whole_unit() {
    for match_unit in [1, 2, 4] {
        for len in 1..=17_usize {
            let mut driver = Driver::new(EngineConfig { match_unit, ..config(4, 200, 64) });
            let base = |n: usize| (n * 13 % 25) as i32;
            driver.submit((0..17).map(base).collect(), 1);
            driver.run_out();
            for common in 0..=len {
                let own = |n: usize| 25 + ((common + n) % 25) as i32;
                let other: Vec<i32> = (0..len).map(|n| if n < common { base(n) } else { own(n) }).collect();
                driver.submit(other, 1);
                let unit = match_unit as usize;
                // Of the first text whole units are kept; and at least one token is left to compute.
                let kept = 17 / unit * unit;
                let expected = if common < unit { 0 } else { common.min(kept).min(len - 1) };
                let found = driver.run_out()[0].cached;
                assert_eq!(found, expected, "{common} of {len} alike, match unit {match_unit}");
            }
        }
    }
}

#[test]
fn windows_and_chunks_of_every_size_share_beside_full_attention_and_alone() {
    for seen in [1, 2, 3, 4, 5, 7, 8, 9, 16, 20] {
        for reach in [Reach::Window(seen), Reach::Chunk(seen)] {
            for groups in [vec![reach], vec![Reach::Full, reach], vec![reach, Reach::Window(4)]] {
                for (match_unit, tokens) in [(1, 3), (1, 64), (2, 5), (4, 3), (4, 64)] {
                    for late in [false, true] {
                        let config =
                            EngineConfig { groups: groups.clone(), match_unit, ..config(4, 40, tokens) };
                        let mut driver = Driver::of(config, late);
                        for own in 0..3 {
                            driver.submit(prompt(0, 13, own, 18), 6);
                        }
                        let mut ends = driver.run_out();
                        driver.submit(prompt(0, 13, 7, 18), 6);
                        ends.extend(driver.run_out());
                        let cached: Vec<usize> = ends.iter().map(|end| end.cached).collect();
                        let whole_units = 13 / match_unit as usize * match_unit as usize;
                        assert_eq!(cached[0], 0);
                        assert_eq!(cached[3], 13, "{groups:?}, match unit {match_unit}, {tokens} tokens");
                        // Those that come together may be admitted before the unit that parts them is there.
                        assert!(
                            cached[1..3].iter().all(|&cached| (whole_units..=13).contains(&cached)),
                            "{cached:?}"
                        );
                    }
                }
            }
        }
    }
}

// ------------------------------------------------------------------ producers that die

#[derive(Debug, Clone, Copy, PartialEq)]
enum Death {
    Cancelled,
    Failed,
    Abandoned,
}

#[test]
fn a_producer_may_die_at_any_step_and_its_followers_go_on_from_where_it_came_to() {
    for death in [Death::Cancelled, Death::Failed, Death::Abandoned] {
        for late in [false, true] {
            for match_unit in [1, 2, 4] {
                for steps in 0..7 {
                    let mut driver = Driver::of(EngineConfig { match_unit, ..config(4, 64, 7) }, late);
                    let producer = driver.submit(prompt(0, 40, 0, 40), 3);
                    let followers = [1, 2].map(|own| driver.submit(prompt(0, 40, own, 41), 3));
                    for _ in 0..steps {
                        driver.step();
                    }
                    match death {
                        Death::Cancelled => driver.cancel(producer),
                        Death::Failed | Death::Abandoned => {
                            if driver.flights.is_empty() {
                                driver.plan();
                            }
                            let failed = death == Death::Failed;
                            let why = if failed { Abandoned::Raised("broken") } else { Abandoned::Withdrawn };
                            driver.abandon(true, why);
                        }
                    }
                    let committed = driver.stats().prompt_tokens;
                    let ends = driver.run_out();
                    let what =
                        format!("{death:?} after {steps} steps, late: {late}, match unit {match_unit}");
                    assert_eq!(ends.len(), 3, "{what}");
                    for &follower in &followers {
                        let end = ends.iter().find(|end| end.request == follower).unwrap();
                        if end.finish == Finish::Length {
                            assert_eq!(end.tokens.len(), 3, "{what}");
                        } else {
                            assert_eq!(end.finish, Finish::Failed("broken".into()), "{what}");
                            assert!(
                                death == Death::Failed && steps >= 6,
                                "{what}: it was in the step itself"
                            );
                        }
                    }
                    // Of what they share a part of a unit at most is computed twice, and what was in flight.
                    let again = driver.stats().prompt_tokens - 40;
                    let wasted = u64::from(match_unit) - 1;
                    assert!(again <= 3 * (wasted + 1) + 7, "{what}: {again} of {committed} again");
                }
            }
        }
    }
}
