//! Stories of steps that do not come about: who is at fault fails, everybody else comes to the right end.

use crate::driver::{Driver, config, prompt};
use chairlift_core::{Abandoned, EngineConfig, Finish, STEPS_BEFORE_LONGER};

/// Runs everything to its end with a device that raises over every step with one of those requests. Returns how many
/// steps raised.
fn run_over(driver: &mut Driver, at_fault: &[u64]) -> u64 {
    let mut raised = 0;
    loop {
        let rows = driver.plan().unwrap_or_default();
        if rows.iter().any(|row| at_fault.contains(&row.request)) {
            driver.abandon(false, Abandoned::Raised("broken"));
            raised += 1;
        } else if !driver.flights.is_empty() {
            let stays = usize::from(driver.late && !rows.is_empty());
            if driver.flights.len() > stays {
                driver.commit();
            }
        } else {
            return raised;
        }
    }
}

#[test]
fn one_row_at_fault_among_many_fails_alone_and_soon() {
    for late in [false, true] {
        for at_fault in [0, 17, 31] {
            let config = EngineConfig { max_requests_per_batch: 32, match_unit: 4, ..config(4, 256, 512) };
            let mut driver = Driver::of(config, late);
            for own in 0..32 {
                driver.submit(prompt(own % 3, 8, own, 8 + own % 5), 6);
            }
            let raised = run_over(&mut driver, &[at_fault]);
            // Its halves, down to itself: log2 of 32, and the whole.
            assert!(raised <= 6, "{raised} steps");
            let ends = driver.run_out();
            assert_eq!(ends.len(), 32);
            for end in ends {
                if end.request == at_fault {
                    assert_eq!(end.finish, Finish::Failed("broken".into()));
                } else {
                    assert_eq!((end.finish, end.tokens.len()), (Finish::Length, 6));
                }
            }
        }
    }
}

#[test]
fn several_at_fault_fail_and_nobody_else() {
    let at_fault = [1, 2, 9];
    let mut driver = Driver::new(EngineConfig { match_unit: 2, swap_blocks: 4, ..config(4, 24, 24) });
    for own in 0..12 {
        driver.submit(prompt(0, 3, own, 9), 7);
    }
    run_over(&mut driver, &at_fault);
    for end in driver.run_out() {
        assert_eq!(end.finish == Finish::Length, !at_fault.contains(&end.request), "{}", end.request);
    }
    assert_eq!(driver.stats().failed, 3);
}

#[test]
fn a_row_that_ended_before_its_step_raised_may_have_been_at_fault() {
    let mut driver = Driver::new(config(4, 16, 16));
    let [gone, stays] = [0, 1].map(|own| driver.submit(prompt(0, 0, own, 4), 3));
    driver.step();
    driver.plan();
    driver.cancel(gone);
    driver.engine.advance(None, None, driver.now).unwrap();
    driver.abandon(false, Abandoned::Raised("broken"));
    let ends = driver.run_out();
    assert_eq!((ends[0].request, &ends[0].finish), (gone, &Finish::Cancelled));
    assert_eq!((ends[1].request, &ends[1].finish), (stays, &Finish::Length), "it is tried alone");
}

#[test]
fn nobody_else_is_in_a_trial_and_everybody_is_after_it() {
    let mut driver = Driver::new(config(4, 32, 16));
    for own in 0..3 {
        driver.submit(prompt(0, 0, own, 4), 3);
    }
    driver.plan();
    driver.abandon(false, Abandoned::Raised("broken"));
    let younger = driver.submit(prompt(0, 0, 3, 4), 3);
    let requests = |driver: &mut Driver| driver.step().iter().map(|row| row.request).collect::<Vec<_>>();
    assert_eq!(requests(&mut driver), [0, 1]);
    assert_eq!(requests(&mut driver), [2]);
    assert_eq!(requests(&mut driver), [0, 1, 2, younger]);
    assert_eq!(driver.run_out().len(), 4);
}

#[test]
fn steps_grow_again_when_they_go_well() {
    let mut driver = Driver::new(EngineConfig { num_blocks: 1024, ..config(4, 1024, 16) });
    driver.submit(prompt(0, 0, 0, 2000), 1);
    for tokens in [16, 8, 4] {
        assert_eq!(driver.stats().max_step_tokens, tokens);
        assert_eq!(driver.plan().unwrap()[0].len as u64, tokens);
        driver.abandon(false, Abandoned::OutOfMemory("no memory"));
    }
    for tokens in [2, 4, 8] {
        for _ in 0..STEPS_BEFORE_LONGER {
            assert_eq!(driver.stats().max_step_tokens, tokens);
            assert_eq!(driver.step()[0].len as u64, tokens);
        }
    }
    for _ in 0..2 * STEPS_BEFORE_LONGER {
        assert_eq!(driver.step()[0].len, 16);
    }
    let ends = driver.run_out();
    assert_eq!((&ends[0].finish, driver.stats().abandoned_steps), (&Finish::Length, 3));
}

#[test]
fn decodes_take_turns_while_steps_are_short() {
    for late in [false, true] {
        let mut driver = Driver::of(config(4, 64, 16), late);
        for own in 0..8 {
            driver.submit(prompt(0, 0, own, 2), 9);
        }
        driver.step();
        driver.step();
        while driver.plan().is_none_or(|rows| rows.len() > 2) {
            driver.abandon(false, Abandoned::OutOfMemory("no memory"));
        }
        let ends = driver.run_out();
        assert!(ends.iter().all(|end| end.finish == Finish::Length));
        assert_eq!(driver.stats().failed, 0);
    }
}
