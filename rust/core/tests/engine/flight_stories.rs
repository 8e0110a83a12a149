//! Stories of two steps in flight: what is planned before its tokens are known, and what becomes of it.

use crate::driver::{Driver, Row, config, continuation, prompt};
use chairlift_core::{Abandoned, EngineConfig, Finish, Request};

fn of(rows: &[Row], request: u64) -> Option<Row> {
    rows.iter().copied().find(|row| row.request == request)
}

#[test]
fn a_token_in_flight_is_carried_over_and_a_known_one_is_not() {
    let mut driver = Driver::late(config(4, 16, 8));
    driver.submit(prompt(0, 0, 0, 3), 9);
    let first = driver.plan().unwrap();
    let second = driver.plan().unwrap();
    assert!(!first[0].carried);
    assert!(second[0].carried && second[0].start == 3);
    driver.commit();
    driver.commit();
    let third = driver.plan().unwrap();
    assert!(!third[0].carried && third[0].start == 4, "its token is known by now");
}

#[test]
fn no_more_steps_than_its_bound_are_planned_for_a_sequence() {
    for max_new in 1..5 {
        let mut driver = Driver::late(config(4, 16, 8));
        driver.submit(prompt(0, 0, 0, 3), max_new);
        let mut planned = 0;
        loop {
            let rows = driver.step();
            planned += rows.len();
            if rows.is_empty() && driver.flights.is_empty() {
                break;
            }
        }
        assert_eq!(planned as i64, max_new);
    }
}

#[test]
fn a_row_planned_past_an_end_token_is_dropped_without_a_trace() {
    let text = prompt(0, 0, 0, 3);
    let stop = continuation(&text, 9);
    for (at, &eos) in stop.iter().enumerate().filter(|&(at, eos)| !stop[..at].contains(eos)) {
        let mut driver = Driver::late(config(4, 16, 8));
        driver
            .request(Request {
                prompt: text.clone(),
                max_new_tokens: 20,
                eos: [eos].into(),
                streaming: true,
                ..Request::default()
            })
            .unwrap();
        let ends = driver.run_out();
        assert_eq!((&ends[0].finish, &ends[0].tokens), (&Finish::Stop, &stop[..=at].to_vec()));
        // The last one comes with the end.
        assert_eq!(driver.streamed.remove(&0).unwrap_or_default(), stop[..at]);
        assert_eq!(driver.stats().generated_tokens, at as u64 + 1);
    }
}

#[test]
fn a_victim_whose_token_is_in_flight_delivers_it_once() {
    for (swap_blocks, match_unit) in [(0, 0), (0, 1), (64, 0), (64, 2)] {
        let mut driver = Driver::late(EngineConfig { swap_blocks, match_unit, ..config(2, 9, 16) });
        for own in 0..4 {
            driver
                .request(Request {
                    prompt: prompt(0, 0, own, 3),
                    max_new_tokens: 11,
                    streaming: true,
                    ..Request::default()
                })
                .unwrap();
        }
        let ends = driver.run_out();
        let stats = driver.stats();
        assert!(stats.soft_resets + stats.swap_outs > 2, "{stats:?}");
        for end in ends {
            assert_eq!((end.tokens.len(), end.logprobs.len()), (11, 11));
            assert_eq!(driver.streamed[&end.request], end.tokens[..10], "each token streamed once");
        }
    }
}

#[test]
fn who_starves_with_a_step_in_flight_is_reset_only_when_that_step_is_in() {
    let mut driver = Driver::late(config(4, 4, 16));
    for own in 0..4 {
        driver.submit(prompt(0, 0, own, 3), 9);
    }
    driver.step();
    // The fourth tokens fit; for the fifth all need a block.
    assert_eq!(driver.step().len(), 4);
    assert!(driver.step().is_empty());
    assert_eq!(driver.stats().soft_resets, 0, "all of them are in flight");
    let rows = driver.step();
    assert_eq!(driver.stats().soft_resets, 2);
    assert_eq!(rows.iter().map(|row| row.request).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(driver.run_out().len(), 4);
}

#[test]
fn blocks_that_wait_for_a_step_in_flight_spare_a_victim() {
    let mut driver = Driver::late(config(4, 4, 16));
    let leaves = driver.submit(prompt(0, 0, 0, 5), 9);
    for own in 1..3 {
        driver.submit(prompt(0, 0, own, 3), 9);
    }
    driver.step();
    driver.step();
    // The other two starve; before the next step both are at rest.
    assert_eq!(driver.step().len(), 1);
    driver.cancel(leaves);
    assert!(driver.plan().is_none());
    let stats = driver.stats();
    assert_eq!((stats.retiring_blocks, stats.soft_resets), (2, 0), "those are enough for both");
    driver.commit();
    assert_eq!(driver.step().len(), 2);
}

#[test]
fn a_prompt_in_parts_goes_on_while_its_last_part_is_in_flight() {
    let mut driver = Driver::late(config(4, 64, 8));
    for own in 0..3 {
        driver.submit(prompt(0, 0, own, 30), 3);
    }
    let mut starts = vec![Vec::new(); 3];
    loop {
        let rows = driver.step();
        assert!(rows.iter().map(|row| row.len).sum::<usize>() <= 8);
        for row in &rows {
            starts[row.request as usize].push((row.start, row.len));
        }
        if rows.is_empty() && driver.flights.is_empty() {
            break;
        }
    }
    for parts in starts {
        // Each token once, in order.
        let ends: Vec<usize> = parts.iter().map(|(start, len)| start + len).collect();
        assert_eq!(parts.iter().skip(1).map(|part| part.0).collect::<Vec<_>>(), ends[..ends.len() - 1]);
        assert_eq!(*ends.last().unwrap(), 32);
    }
    assert_eq!(driver.ends().len(), 3);
}

#[test]
fn a_cancel_around_the_last_token_gives_one_end_whenever_it_lands() {
    let mut finishes = Vec::new();
    for late in [false, true] {
        for match_unit in [0, 1, 2, 4] {
            for lands_before_call in 0..12 {
                let mut driver = Driver::of(EngineConfig { match_unit, ..config(4, 4, 8) }, late);
                let request = driver.submit(prompt(0, 0, 0, 3), 4);
                for call in 0.. {
                    if call == lands_before_call {
                        driver.cancel(request);
                    }
                    let in_flight = driver.flights.len();
                    if call % 2 == 0 {
                        driver.plan();
                    } else if in_flight > usize::from(late && call < 9) {
                        driver.commit();
                    }
                    if call > 12 && driver.flights.is_empty() {
                        break;
                    }
                }
                // And once more, of one that has ended.
                driver.cancel(request);
                let ends = driver.run_out();
                assert_eq!(ends.len(), 1);
                assert_eq!(ends[0].finish == Finish::Length, ends[0].tokens.len() == 4);
                finishes.push(ends[0].finish.clone());
            }
        }
    }
    for finish in [Finish::Length, Finish::Cancelled] {
        assert!(finishes.iter().filter(|&met| *met == finish).count() > 10, "{finishes:?}");
    }
}

#[test]
fn blocks_and_row_of_one_cancelled_in_flight_wait_for_its_steps() {
    let mut driver = Driver::late(EngineConfig { max_requests_per_batch: 1, ..config(4, 2, 8) });
    let first = driver.submit(prompt(0, 0, 0, 3), 5);
    let second = driver.submit(prompt(0, 0, 1, 3), 1);
    driver.plan();
    driver.plan();
    driver.cancel(first);
    driver.commit();
    let stats = driver.stats();
    assert_eq!((stats.retiring_blocks, stats.free_blocks, stats.running), (1, 1, 0));
    assert!(driver.plan().is_none(), "the row is in the step in flight");
    driver.commit();
    assert_eq!(driver.stats().free_blocks, 2);
    assert!(of(&driver.plan().unwrap(), second).is_some());
}

#[test]
fn abandoning_the_second_step_leaves_the_first_as_it_is() {
    let mut driver = Driver::late(EngineConfig { match_unit: 2, ..config(4, 16, 8) });
    driver.submit(prompt(0, 0, 0, 6), 5);
    driver.plan();
    driver.submit(prompt(0, 0, 1, 9), 2);
    let planned = driver.plan().unwrap();
    driver.abandon(false, Abandoned::Withdrawn);
    assert_eq!(driver.plan().unwrap(), planned, "the same step again");
    assert_eq!(driver.flights.len(), 2);
    assert_eq!(driver.run_out().len(), 2);
}

#[test]
fn abandoning_the_first_step_takes_the_second_along() {
    let mut driver = Driver::late(EngineConfig { match_unit: 2, ..config(4, 16, 8) });
    driver.submit(prompt(0, 0, 0, 6), 5);
    let before = driver.stats();
    let planned = driver.plan().unwrap();
    driver.submit(prompt(0, 0, 1, 9), 2);
    driver.plan();
    driver.abandon(true, Abandoned::Withdrawn);
    let after = driver.stats();
    assert_eq!((after.free_blocks, after.running, after.waiting), (16, 0, 2));
    assert_eq!(after.generated_tokens, before.generated_tokens);
    let again = driver.plan().unwrap();
    assert_eq!(of(&again, 0), of(&planned, 0));
    assert_eq!(driver.run_out().len(), 2);
}

#[test]
fn a_failed_first_step_fails_its_own_rows_and_undoes_the_second() {
    let mut driver = Driver::late(config(4, 16, 8));
    driver.submit(prompt(0, 0, 0, 6), 5);
    driver.plan();
    driver.submit(prompt(0, 0, 1, 9), 2);
    driver.plan();
    driver.abandon(true, Abandoned::Raised("no memory"));
    let ends = driver.run_out();
    assert_eq!(ends[0].finish, Finish::Failed("no memory".into()));
    assert_eq!((ends[1].request, &ends[1].finish), (1, &Finish::Length), "it was in the second alone");
}

#[test]
fn copies_that_were_abandoned_are_made_again() {
    for both in [false, true] {
        let mut driver = Driver::late(EngineConfig { match_unit: 2, ..config(4, 8, 8) });
        driver.submit(prompt(0, 7, 0, 7), 1);
        driver.run_out();
        driver.submit(prompt(0, 6, 1, 7), 2);
        driver.plan();
        assert_eq!(driver.flights[0].step.shape.copies, 1);
        driver.plan();
        driver.abandon(both, Abandoned::Withdrawn);
        if both {
            driver.plan();
            assert_eq!(driver.flights[0].step.shape.copies, 1);
        }
        assert_eq!(driver.run_out()[0].cached, 6);
    }
}

#[test]
fn an_arrival_that_was_abandoned_and_never_came_again_had_nothing() {
    let mut driver = Driver::late(EngineConfig { match_unit: 2, ..config(4, 8, 8) });
    driver.submit(prompt(0, 7, 0, 7), 1);
    driver.run_out();
    let request = driver.submit(prompt(0, 6, 1, 7), 2);
    driver.plan();
    driver.abandon(true, Abandoned::Withdrawn);
    driver.cancel(request);
    let ends = driver.run_out();
    assert_eq!((&ends[0].finish, ends[0].cached, ends[0].started), (&Finish::Cancelled, 0, false));
}

#[test]
fn a_victim_whose_copy_to_the_host_broke_is_computed_again() {
    let mut driver = Driver::new(EngineConfig { swap_blocks: 8, ..config(4, 4, 64) });
    for own in 0..2 {
        driver.submit(prompt(0, 0, own, 7), 4);
    }
    loop {
        driver.plan();
        if driver.flights[0].step.shape.swap_outs > 0 {
            break;
        }
        driver.commit();
    }
    driver.abandon(false, Abandoned::Withdrawn);
    let stats = driver.stats();
    assert_eq!((stats.swapped, stats.soft_resets, stats.free_swap_blocks), (0, 1, 8));
    let ends = driver.run_out();
    assert!(ends.iter().all(|end| end.tokens.len() == 4));
    assert_eq!(driver.stats().swap_ins, 0);
}

#[test]
fn a_victim_cancelled_on_the_host_leaves_it_empty_when_its_copy_is_made() {
    let mut driver = Driver::late(EngineConfig { swap_blocks: 8, ..config(4, 4, 64) });
    for own in 0..2 {
        driver.submit(prompt(0, 0, own, 7), 9);
    }
    while driver.flights.last().is_none_or(|flight| flight.step.shape.swap_outs == 0) {
        driver.step();
    }
    driver.cancel(1);
    driver.plan();
    let stats = driver.stats();
    assert_eq!((stats.swapped, stats.free_swap_blocks), (0, 6), "a step in flight writes two of them");
    driver.commit();
    assert_eq!(driver.stats().free_swap_blocks, 8);
    let ends = driver.run_out();
    assert_eq!((ends[0].request, &ends[0].finish), (1, &Finish::Cancelled));
    assert_eq!(driver.stats().swap_ins, 0);
}
