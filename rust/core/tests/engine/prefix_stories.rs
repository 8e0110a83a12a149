//! Stories of the prefix cache: what is found in it, who computes what others wait for, and what is thrown out.

use crate::driver::{Driver, config, continuation, prompt};
use chairlift_core::{EngineConfig, Eviction, Finish, Reach, Request};

fn sharing(match_unit: u32, num_blocks: u32, tokens: u32) -> EngineConfig {
    EngineConfig { match_unit, ..config(4, num_blocks, tokens) }
}

/// Runs a prompt to its end; tells how many of its tokens were cached.
fn cached(driver: &mut Driver, prompt: Vec<i32>) -> usize {
    let request = driver.submit(prompt, 3);
    let ends = driver.run_out();
    assert_eq!((ends.len(), ends[0].request, &ends[0].finish), (1, request, &Finish::Length));
    assert_eq!(ends[0].tokens.len(), 3);
    ends[0].cached
}

#[test]
fn a_prompt_of_whole_pages_sent_again_computes_its_last_token_alone() {
    for match_unit in [1, 2, 4] {
        for len in [4, 8, 12, 16] {
            let mut driver = Driver::new(sharing(match_unit, 32, 64));
            let text = prompt(0, len, 0, len);
            let found: Vec<usize> = (0..3).map(|_| cached(&mut driver, text.clone())).collect();
            assert_eq!(found, [0, len - 1, len - 1], "{len} tokens, match unit {match_unit}");
            assert_eq!(driver.stats().prompt_tokens, len as u64 + 2);
        }
    }
}

#[test]
fn equal_prompts_that_come_together_are_computed_once() {
    for late in [false, true] {
        for tokens in [5, 64] {
            let mut driver = Driver::of(sharing(4, 32, tokens), late);
            for _ in 0..2 {
                driver.submit(prompt(0, 17, 0, 17), 4);
            }
            let ends = driver.run_out();
            assert_eq!(ends.iter().map(|end| end.cached).collect::<Vec<_>>(), [0, 16]);
            assert_eq!(driver.stats().prompt_tokens, 17 + 1);
        }
    }
}

#[test]
fn a_follower_starts_as_soon_as_what_it_shares_is_there() {
    let mut driver = Driver::new(sharing(4, 32, 8));
    driver.submit(prompt(0, 8, 0, 40), 1);
    let follower = driver.submit(prompt(0, 8, 1, 12), 1);
    let first: Vec<u64> = driver.step().iter().map(|row| row.request).collect();
    assert_eq!(first, [0], "it waits for what is being computed");
    while driver.ends().is_empty() {
        driver.step();
    }
    // Eight tokens a step, and the producer goes first: the follower gets what its last part leaves.
    assert!(driver.run_out().iter().any(|end| end.request == follower && end.cached == 8));
}

#[test]
fn who_waits_for_another_lets_those_behind_it_past() {
    let mut driver = Driver::new(sharing(4, 32, 16));
    driver.submit(prompt(0, 12, 0, 12), 9);
    driver.submit(prompt(0, 12, 0, 12), 1);
    driver.submit(prompt(1, 4, 2, 4), 1);
    assert_eq!(driver.step().iter().map(|row| row.request).collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn blocks_used_again_are_not_found_under_their_old_text() {
    for eviction in [Eviction::Lru, Eviction::Lifo] {
        let mut driver = Driver::new(EngineConfig { cache_eviction: eviction, ..sharing(4, 6, 64) });
        let old = prompt(0, 17, 0, 17);
        assert_eq!(cached(&mut driver, old.clone()), 0);
        // Takes every block of the pool.
        assert_eq!(cached(&mut driver, prompt(1, 21, 0, 21)), 0);
        assert_eq!(driver.stats().evictions, 4);
        assert_eq!(cached(&mut driver, old), 0);
    }
}

#[test]
fn nothing_of_a_prompt_cancelled_half_way_is_shared_but_what_was_computed() {
    for late in [false, true] {
        for steps in 1..=25 {
            let mut driver = Driver::of(sharing(4, 64, 8), late);
            let text = prompt(0, 200, 0, 200);
            let first = driver.submit(text.clone(), 2);
            for _ in 0..steps {
                driver.step();
            }
            driver.cancel(first);
            driver.submit(text, 2);
            let ends = driver.run_out();
            let committed = if late { steps - 1 } else { steps };
            assert_eq!((ends[0].request, &ends[0].finish), (first, &Finish::Cancelled));
            // In late mode the second is planned before the step that was in flight is in.
            assert_eq!(ends[1].cached, (8 * committed).min(199), "{steps} steps, late: {late}");
            assert_eq!(ends[1].tokens.len(), 2);
        }
    }
}

#[test]
fn blocks_of_which_nothing_is_known_go_before_cached_ones() {
    let mut driver = Driver::new(sharing(4, 10, 64));
    for family in 0..2 {
        cached(&mut driver, prompt(family, 17, 0, 17));
    }
    // Of each the last page holds one token of the prompt and no whole unit: it is free.
    let stats = driver.stats();
    assert_eq!((stats.free_blocks, stats.cached_blocks), (2, 8));
    cached(&mut driver, prompt(2, 4, 0, 4));
    assert_eq!(driver.stats().evictions, 0);
    for family in 0..2 {
        assert_eq!(cached(&mut driver, prompt(family, 17, 0, 17)), 16);
    }
}

#[test]
fn an_eviction_takes_the_tail_of_a_prompt_and_leaves_its_beginning() {
    for eviction in [Eviction::Lru, Eviction::Lifo] {
        let mut driver = Driver::new(EngineConfig { cache_eviction: eviction, ..sharing(4, 4, 64) });
        let text = prompt(0, 12, 0, 12);
        driver.submit(text.clone(), 1);
        driver.run_out();
        assert_eq!(driver.stats().cached_blocks, 3);
        // The free block, and one of those.
        driver.submit(prompt(1, 5, 0, 5), 1);
        driver.run_out();
        assert_eq!(driver.stats().evictions, 1);
        driver.submit(text, 1);
        assert_eq!(driver.run_out()[0].cached, 8, "{eviction:?}");
    }
}

#[test]
fn a_block_that_many_share_is_counted_once_and_comes_back_once() {
    let config = EngineConfig { max_requests_per_batch: 64, ..sharing(4, 96, 256) };
    let mut driver = Driver::new(config);
    for own in 0..64 {
        driver.submit(prompt(0, 16, own, 17), 2);
    }
    driver.step();
    driver.step();
    let stats = driver.stats();
    // The first has ended. Four shared pages, and a page of its own for each.
    assert_eq!((stats.running, stats.owned_blocks), (63, 4 + 63));
    driver.run_out();
    let stats = driver.stats();
    assert_eq!((stats.free_blocks, stats.cached_blocks), (92, 4));
}

#[test]
fn whatever_was_matched_everything_can_be_evicted_afterwards() {
    for match_unit in [1, 2, 4] {
        let mut driver = Driver::new(sharing(match_unit, 16, 64));
        for common in [6, 10, 14, 6, 10, 14] {
            cached(&mut driver, prompt(0, common, common, 16));
        }
        // One that needs every block gets every block.
        driver.submit(prompt(1, 63, 0, 63), 1);
        assert_eq!(driver.run_out()[0].finish, Finish::Length);
        let stats = driver.stats();
        assert_eq!(stats.peak_owned_blocks, 16);
        driver.new_epoch();
        assert_eq!(driver.stats().free_blocks, 16);
    }
}

#[test]
fn a_match_without_room_for_the_rest_keeps_nothing() {
    let mut driver = Driver::new(sharing(4, 8, 64));
    cached(&mut driver, prompt(0, 8, 0, 9));
    // One that runs leaves room for what is cached and nothing else.
    let long = driver.submit(prompt(1, 21, 0, 21), 4);
    driver.step();
    let waits = driver.submit(prompt(0, 8, 1, 20), 1);
    let before = driver.stats();
    driver.step();
    let after = driver.stats();
    assert_eq!(after.waiting, 1, "two pages match, three more are needed");
    assert_eq!((after.free_blocks, after.cached_blocks), (before.free_blocks, before.cached_blocks));
    driver.cancel(waits);
    driver.cancel(long);
    let ends = driver.run_out();
    assert!(ends.iter().all(|end| end.finish == Finish::Cancelled));
    driver.new_epoch();
    assert_eq!(driver.stats().free_blocks, 8);
}

#[test]
fn a_prompt_that_matches_nothing_does_not_wait_behind_those_that_match() {
    let mut driver = Driver::new(EngineConfig { max_requests_per_batch: 2, ..sharing(4, 12, 64) });
    cached(&mut driver, prompt(0, 8, 0, 9));
    for own in 0..2 {
        driver.submit(prompt(0, 8, own, 9), 2);
    }
    let cold = driver.submit(prompt(1, 20, 0, 20), 1);
    let mut ran_in = None;
    for step in 0..12 {
        driver.submit(prompt(0, 8, step, 9), 2);
        if driver.step().iter().any(|row| row.request == cold) {
            ran_in = Some(step);
            break;
        }
    }
    assert_eq!(ran_in, Some(2), "those that came before it, and nobody after it");
}

#[test]
fn the_prompts_cached_tokens_are_those_of_its_first_admission() {
    for swap_blocks in [0, 32] {
        let mut driver = Driver::new(EngineConfig { swap_blocks, ..sharing(1, 8, 64) });
        cached(&mut driver, prompt(0, 5, 9, 6));
        let prompts: Vec<_> = (0..5).map(|own| prompt(0, 5, own, 7)).collect();
        for text in &prompts {
            driver.submit(text.clone(), 20);
        }
        let ends = driver.run_out();
        let stats = driver.stats();
        // More than there are sequences: one of them was a victim twice.
        assert!(stats.soft_resets + stats.swap_outs > 5, "{stats:?}");
        assert_eq!(stats.swap_outs > 0, swap_blocks > 0);
        for end in ends {
            assert_eq!((end.tokens.len(), end.cached), (20, 5), "swap: {swap_blocks}");
        }
    }
}

#[test]
fn only_the_last_window_of_a_prompt_needs_to_be_there() {
    // What the last token sees of sixteen: tokens 13 to 15, a page; without it nothing is found.
    for (evicted, found) in [(1, 16), (3, 16), (4, 0)] {
        let groups = vec![Reach::Window(4)];
        let mut driver = Driver::new(EngineConfig { groups, ..sharing(4, 5, 64) });
        driver.submit(prompt(0, 17, 0, 17), 1);
        driver.run_out();
        assert_eq!(driver.stats().cached_blocks, 4);
        driver.submit(prompt(1, 4 * (evicted + 1), 0, 4 * (evicted + 1) - 1), 1);
        driver.run_out();
        assert_eq!(driver.stats().evictions, evicted as u64);
        driver.submit(prompt(0, 16, 1, 17), 1);
        assert_eq!(driver.run_out()[0].cached, found, "{evicted} evicted");
    }
}

#[test]
fn a_last_window_with_a_hole_is_not_found() {
    // Of four pages the last token sees the last three.
    let windows = EngineConfig { groups: vec![Reach::Window(12)], ..sharing(4, 6, 64) };
    let mut driver = Driver::new(EngineConfig { cache_eviction: Eviction::Lifo, ..windows });
    driver.submit(prompt(0, 16, 0, 17), 1);
    driver.run_out();
    // The first two pages are cached last now, and of those the second goes.
    driver.submit(prompt(0, 8, 1, 9), 1);
    assert_eq!(driver.run_out()[0].cached, 8);
    driver.submit(prompt(1, 9, 0, 9), 1);
    driver.run_out();
    assert_eq!(driver.stats().evictions, 1);
    driver.submit(prompt(0, 16, 2, 17), 1);
    assert_eq!(driver.run_out()[0].cached, 4, "the first page stands alone");
}

#[test]
fn samples_cost_one_prompt_and_a_block_each() {
    let mut driver = Driver::new(sharing(4, 32, 64));
    let first = driver
        .request(Request { prompt: prompt(0, 9, 0, 9), max_new_tokens: 3, n: 6, ..Request::default() })
        .unwrap();
    driver.step();
    driver.step();
    assert_eq!(driver.stats().owned_blocks, 2 + 6);
    let ends = driver.run_out();
    assert_eq!(
        ends.iter().map(|end| end.request).collect::<Vec<_>>(),
        (first..first + 6).collect::<Vec<_>>()
    );
    assert_eq!(driver.stats().prompt_tokens, 9 + 5);
}

#[test]
fn what_one_generated_another_finds_in_its_prompt() {
    let mut driver = Driver::new(sharing(2, 32, 64));
    let text = prompt(0, 5, 0, 5);
    driver.submit(text.clone(), 8);
    driver.run_out();
    // The turn that follows: the prompt, the answer and something more. Of the answer's last token nothing was computed.
    let turn = [text.clone(), continuation(&text, 8), vec![1, 2]].concat();
    assert_eq!(cached(&mut driver, turn), 12);
}

#[test]
fn nothing_is_shared_across_a_change_of_the_weights() {
    for late in [false, true] {
        for steps in 1..6 {
            let mut driver = Driver::of(sharing(2, 32, 4), late);
            driver.submit(prompt(0, 16, 0, 16), 4);
            for _ in 0..steps {
                driver.step();
            }
            driver.new_epoch();
            driver.submit(prompt(0, 16, 0, 16), 4);
            let ends = driver.run_out();
            let cached: Vec<usize> = ends.iter().map(|end| end.cached).collect();
            assert_eq!(cached, [0, 0], "{steps} steps, late: {late}");
            // All of it computed twice.
            assert_eq!(driver.stats().prompt_tokens, 32);
        }
    }
}

#[test]
fn what_a_victim_left_on_the_host_is_not_shared_after_a_change_of_the_weights() {
    let mut driver = Driver::new(EngineConfig { swap_blocks: 8, ..sharing(4, 4, 64) });
    for own in 0..2 {
        driver.submit(prompt(0, 0, own, 7), 4);
    }
    while driver.stats().swapped == 0 {
        driver.step();
    }
    driver.new_epoch();
    let text = driver.text_of(1, 9);
    let ends = driver.run_out();
    assert_eq!(driver.stats().swap_ins, 1);
    assert_eq!(ends.len(), 2);
    assert_eq!(cached(&mut driver, text), 0, "its K and V are of the old weights");
}

#[test]
fn what_comes_back_from_the_host_is_not_completed_with_k_and_v_of_other_weights() {
    for (weights_change, copied_back) in [(false, 1), (true, 2)] {
        let mut driver = Driver::new(EngineConfig { swap_blocks: 2, ..sharing(4, 5, 64) });
        cached(&mut driver, prompt(0, 4, 9, 5));
        for own in 0..4 {
            driver.submit(prompt(0, 4, own, 7), 6);
        }
        // They share the first page and need a third at once: the newest goes to the host, the one before it is reset.
        while driver.stats().soft_resets == 0 {
            driver.step();
        }
        assert_eq!(driver.stats().swapped, 1);
        if weights_change {
            driver.new_epoch();
        }
        // That one comes back first, and what it computes of their first page is in the cache.
        let mut swap_ins = 0;
        while driver.plan().is_some() {
            swap_ins += driver.flights[0].step.shape.swap_ins;
            driver.commit();
        }
        assert_eq!(swap_ins, copied_back, "weights change: {weights_change}");
        assert_eq!(driver.ends().len(), 4);
    }
}

#[test]
fn behind_whole_units_the_continuation_that_goes_on_alike_the_longest_is_shared() {
    // Page 8, unit 4: a unit that two texts have in common, then tokens of their own, and a third that goes on like the
    // first for three of them and like the second for one.
    let mut driver = Driver::new(EngineConfig { match_unit: 4, ..config(8, 32, 64) });
    let system = [1, 2, 3, 4];
    for own in [[5, 6, 7, 8], [5, 9, 9, 9]] {
        assert!(cached(&mut driver, [&system[..], &own, &[10, 11]].concat()) <= 5);
    }
    let third = [&system[..], &[5, 6, 7, 20, 21, 22]].concat();
    assert_eq!(cached(&mut driver, third), 7);
    // Nothing is shared that does not begin with a whole unit, and a part is no text of its own.
    assert_eq!(cached(&mut driver, vec![1, 2, 3, 20, 21]), 0);
    assert_eq!(cached(&mut driver, [&system[..], &[5, 6, 20, 20, 20]].concat()), 6);
}

#[test]
fn of_many_continuations_only_the_newest_are_looked_at() {
    let mut driver = Driver::new(EngineConfig { match_unit: 4, ..config(8, 64, 64) });
    let text = |own: i32| vec![1, 2, 3, 4, own, own, own, own, 45];
    for own in 10..10 + chairlift_core::CONTINUATIONS as i32 + 1 {
        assert!(cached(&mut driver, text(own)) <= 4);
    }
    let like = |own: i32| vec![1, 2, 3, 4, own, own, 46, 46, 46];
    // The first is one too old; the second is the oldest that counts. What asks is a continuation itself, afterwards.
    assert_eq!(cached(&mut driver, like(11)), 6);
    assert_eq!(cached(&mut driver, like(10)), 4);
}
