//! Stories of a pool that is too small: everybody gets on, nobody loses a token, and everything comes back.

use std::collections::HashSet;

use crate::driver::{Driver, config, prompt};
use chairlift_core::{EngineConfig, Error, Finish, Policy, Request};

/// The same engine with and without a prefix cache, a swap pool and late commits, by either policy.
fn in_every_manner(config: &EngineConfig, mut story: impl FnMut(Driver)) {
    for late in [false, true] {
        for swap_blocks in [0, config.num_blocks / 2] {
            for match_unit in [0, 2] {
                for policy in [Policy::Fifo, Policy::PrefillFirst] {
                    let config = EngineConfig { swap_blocks, match_unit, policy, ..config.clone() };
                    story(Driver::of(config, late));
                }
            }
        }
    }
}

#[test]
fn one_pass_makes_room_for_all_who_starve() {
    for swap_blocks in [0, 12] {
        let config = EngineConfig { max_requests_per_batch: 30, swap_blocks, ..config(4, 33, 200) };
        let mut driver = Driver::new(config);
        for own in 0..30 {
            driver.submit(prompt(0, 0, own, 4), 30);
        }
        driver.step();
        assert_eq!(driver.stats().free_blocks, 3);
        let mut last_in = [0; 30];
        for step in 1.. {
            let rows = driver.step();
            if rows.is_empty() {
                break;
            }
            for row in rows {
                // Whoever starves and is no victim runs in the next step.
                let missed = step - std::mem::replace(&mut last_in[row.request as usize], step) - 1;
                assert!(row.arrives || missed <= 1, "{} starved {missed} times in a row", row.request);
            }
        }
        assert!(driver.stats().starved > 27);
        assert!(driver.ends().iter().all(|end| end.tokens.len() == 30));
    }
}

#[test]
fn what_never_fits_is_refused_and_those_beside_it_run() {
    in_every_manner(&config(4, 8, 16), |mut driver| {
        driver.submit(prompt(0, 0, 0, 9), 5);
        let refused = driver
            .request(Request { prompt: prompt(0, 0, 1, 60), max_new_tokens: 5, ..Request::default() })
            .unwrap_err();
        assert!(matches!(refused, Error::PromptExceedsPool { prompt: 60, capacity: 32, .. }), "{refused}");
        driver.submit(prompt(0, 0, 2, 9), 5);
        let grows = driver.submit(prompt(0, 0, 3, 9), 100);
        for end in driver.run_out() {
            let expected = if end.request == grows { 32 - 9 } else { 5 };
            assert_eq!((end.finish, end.tokens.len()), (Finish::Length, expected));
        }
        driver.submit(prompt(0, 0, 4, 9), 5);
        assert_eq!(driver.run_out().len(), 1);
    });
}

#[test]
fn half_loaded_prompts_get_on_in_every_manner() {
    for num_blocks in 11..=14 {
        in_every_manner(&config(4, num_blocks, 8), |mut driver| {
            for (own, len) in [40, 40, 38].into_iter().enumerate() {
                driver.submit(prompt(0, 0, own, len), 3);
            }
            let ends = driver.run_out();
            assert_eq!(ends.len(), 3);
            assert!(ends.iter().all(|end| end.tokens.len() == 3));
        });
    }
}

#[test]
fn no_answer_is_cut_short_by_a_tight_pool() {
    in_every_manner(&config(4, 40, 24), |mut driver| {
        for own in 0..64 {
            driver.submit(prompt(own % 3, own % 7, own, 2 + own % 9), 30);
        }
        let ends = driver.run_out();
        assert_eq!(ends.len(), 64);
        assert!(ends.iter().all(|end| end.finish == Finish::Length && end.tokens.len() == 30));
    });
}

#[test]
fn every_step_brings_somebody_on() {
    in_every_manner(&config(2, 10, 8), |mut driver| {
        for own in 0..6 {
            driver.submit(prompt(0, 3, own, 5), 12);
        }
        let mut empty = 0;
        while !driver.engine.is_idle() || !driver.flights.is_empty() {
            let rows = driver.step();
            // One that starves in flight is at rest in the step after.
            empty = if rows.is_empty() { empty + 1 } else { 0 };
            assert!(empty <= usize::from(driver.late), "nothing moves");
        }
        assert_eq!(driver.ends().len(), 6);
    });
}

#[test]
fn nobody_suffers_from_those_who_leave_a_full_pool() {
    let full = EngineConfig { max_requests_per_batch: 24, ..config(4, 40, 64) };
    in_every_manner(&full, |mut driver| {
        for own in 0..60 {
            driver.submit(prompt(0, 4, own, 6), 14);
        }
        let mut ends = Vec::new();
        for leaves in (0..60).step_by(2) {
            driver.step();
            driver.cancel(leaves);
            ends.extend(driver.ends());
        }
        ends.extend(driver.run_out());
        assert_eq!(ends.len(), 60);
        for end in ends.iter().filter(|end| end.request % 2 == 1) {
            assert_eq!((&end.finish, end.tokens.len()), (&Finish::Length, 14));
        }
    });
}

#[test]
fn a_cancelled_request_takes_nothing_from_the_next() {
    in_every_manner(&EngineConfig { max_requests_per_batch: 1, ..config(4, 8, 8) }, |mut driver| {
        let text = prompt(0, 6, 0, 6);
        let first = driver.submit(text.clone(), 20);
        for _ in 0..4 {
            driver.step();
        }
        driver.cancel(first);
        let next = driver.submit(text, 8);
        let ends = driver.run_out();
        assert_eq!((ends[0].request, &ends[0].finish), (first, &Finish::Cancelled));
        assert_eq!((ends[1].request, &ends[1].finish, ends[1].tokens.len()), (next, &Finish::Length, 8));
    });
}

#[test]
fn blocks_in_holes_serve_as_well_as_blocks_in_a_row() {
    in_every_manner(&EngineConfig { max_requests_per_batch: 12, ..config(4, 24, 96) }, |mut driver| {
        for own in 0..12 {
            driver.submit(prompt(0, 0, own, 8), if own % 2 == 0 { 1 } else { 9 });
        }
        while driver.ends().is_empty() {
            driver.step();
        }
        // Every second one has left: two blocks here, two there.
        let spans = driver.submit(prompt(0, 0, 30, 20), 3);
        let mut blocks = Vec::new();
        let ends = loop {
            let rows = driver.step();
            if rows.iter().any(|row| row.request == spans && row.arrives) {
                blocks = driver.changed_blocks(spans);
            }
            if rows.is_empty() && driver.flights.is_empty() {
                break driver.ends();
            }
        };
        let distinct: HashSet<i32> = blocks.iter().copied().collect();
        assert_eq!((blocks.len(), distinct.len()), (5, 5));
        assert!(blocks.windows(2).any(|pair| pair[0].abs_diff(pair[1]) > 1), "no holes: {blocks:?}");
        assert!(ends.iter().any(|end| end.request == spans && end.tokens.len() == 3));
    });
}

#[test]
fn a_step_is_filled_with_prefills_while_any_wait() {
    for policy in [Policy::Fifo, Policy::PrefillFirst] {
        for late in [false, true] {
            let mut driver = Driver::of(EngineConfig { policy, ..config(4, 64, 16) }, late);
            for own in 0..8 {
                driver.submit(prompt(0, 0, own, 10), 1);
            }
            let totals: Vec<usize> = (0..5).map(|_| driver.step().iter().map(|row| row.len).sum()).collect();
            assert_eq!(totals, [16; 5]);
        }
    }
}

#[test]
fn prefills_take_all_that_many_decodes_leave_of_a_step() {
    let mut driver = Driver::new(config(4, 64, 8));
    for own in 0..5 {
        driver.submit(prompt(0, 0, own, 1), 20);
    }
    driver.step();
    driver.submit(prompt(0, 0, 5, 10), 1);
    driver.submit(prompt(0, 0, 6, 10), 1);
    let lens: Vec<Vec<usize>> =
        (0..6).map(|_| driver.step().iter().skip(5).map(|row| row.len).collect()).collect();
    // The first ends in the fourth step, and the second takes what it leaves.
    assert_eq!(lens, [vec![3], vec![3], vec![3], vec![1, 2], vec![3], vec![3]]);
}

#[test]
fn an_end_to_everything_starts_nobody_new() {
    in_every_manner(&EngineConfig { max_requests_per_batch: 4, ..config(4, 16, 8) }, |mut driver| {
        for own in 0..40 {
            driver.submit(prompt(0, 0, own, 6), 4);
        }
        driver.step();
        driver.step();
        // One step is in flight, or two.
        driver.plan();
        let started = driver.stats().running;
        driver.flights.clear();
        driver.engine.fail_all("stopped", 9.0);
        driver.engine.check_integrity().unwrap();
        let ends = driver.ends();
        assert_eq!(ends.len(), 40);
        assert!(ends.iter().all(|end| end.finish == Finish::Failed("stopped".into())));
        assert!(ends.iter().filter(|end| end.started).count() as u64 <= started);
        assert!(driver.plan().is_none());
        driver.new_epoch();
        let stats = driver.stats();
        assert_eq!((stats.free_blocks, stats.running, stats.waiting), (16, 0, 0));
    });
}

#[test]
fn when_all_are_cancelled_those_that_wait_do_not_start() {
    in_every_manner(&EngineConfig { max_requests_per_batch: 4, ..config(4, 16, 8) }, |mut driver| {
        for own in 0..40 {
            driver.submit(prompt(0, 0, own, 6), 4);
        }
        driver.step();
        driver.step();
        let started = driver.stats().running;
        (0..40).for_each(|request| driver.cancel(request));
        assert!(driver.step().is_empty());
        let ends = driver.run_out();
        assert_eq!(ends.len(), 40);
        assert!(ends.iter().all(|end| end.finish == Finish::Cancelled));
        assert_eq!(ends.iter().filter(|end| end.started).count() as u64, started);
    });
}
