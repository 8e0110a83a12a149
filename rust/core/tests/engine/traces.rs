//! Scheduling stories as data: each file of `traces/` tells a story and, indented, what the engine did.
//!
//! `engine NAME=VALUE ...` makes one, the other words act on it:
//!
//! - `submit NAME=VALUE ...`: the first `common` tokens of a prompt are those of its `family`, the others its own; or it is
//!   the text of a request as it is going to be (`text_of`). `stop`: the token that ends it.
//! - `cancel N`: of that request.
//! - `plan`: one more step is in flight. `commit`: the oldest is in. `step`: both; in an engine with `late=true` the step
//!   before the one that was planned is in.
//! - `abandon`, `fail`, `no_memory`: a step is planned and does not come about, for no fault, as it raises, or as it needs
//!   too much; `abandon_both` takes the one before it along.
//! - `reset`: a new epoch.
//!
//! The indented lines are the plan log; after a change that means them to differ, `UPDATE_TRACES=1 cargo test --test engine
//! traces` writes them anew, to be read before they are committed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::driver::{Driver, End, Row, config, continuation, prompt};
use chairlift_core::{Abandoned, EngineConfig, Eviction, Fairness, Finish, Policy, Reach, Request, Stats};

/// `NAME=VALUE` words of a command.
struct Values<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Values<'a> {
    fn parse(words: impl Iterator<Item = &'a str>) -> Self {
        Self(
            words
                .map(|word| word.split_once('=').unwrap_or_else(|| panic!("{word:?} is no NAME=VALUE")))
                .collect(),
        )
    }

    fn text(&self, name: &str, default: &'a str) -> &'a str {
        self.0.iter().find(|value| value.0 == name).map_or(default, |value| value.1)
    }

    fn number<T: std::str::FromStr>(&self, name: &str, default: &'a str) -> T {
        let text = self.text(name, default);
        text.parse().unwrap_or_else(|_| panic!("{name}={text:?} is no number"))
    }

    fn known(&self, names: &[&str]) {
        for (name, _) in &self.0 {
            assert!(names.contains(name), "{name:?} is none of {names:?}");
        }
    }
}

fn reach(word: &str) -> Reach {
    match word.split_once(':') {
        None if word == "full" => Reach::Full,
        Some(("window", tokens)) => Reach::Window(tokens.parse().unwrap()),
        Some(("chunk", tokens)) => Reach::Chunk(tokens.parse().unwrap()),
        _ => panic!("{word:?} is no reach"),
    }
}

fn engine(values: &Values<'_>) -> Driver {
    values.known(&[
        "page_size",
        "num_blocks",
        "tokens",
        "rows",
        "margin",
        "policy",
        "groups",
        "positions",
        "match_unit",
        "eviction",
        "swap",
        "late",
        "tenants",
        "first_regime",
        "queue",
    ]);
    let weight = |word: &str| {
        let (name, weight) = word.split_once(':').unwrap_or_else(|| panic!("{word:?} is no NAME:WEIGHT"));
        (name.to_owned(), weight.parse().unwrap())
    };
    let config = EngineConfig {
        fairness: match values.text("tenants", "") {
            "" => Fairness::Arrival,
            weights => Fairness::Tenants(weights.split(',').map(weight).collect()),
        },
        first_regime: match values.number("first_regime", "0") {
            0 => None,
            longest => Some(longest),
        },
        max_queue_size: values.number("queue", "0"),
        groups: values.text("groups", "full").split(',').map(reach).collect(),
        max_requests_per_batch: values.number("rows", "8"),
        safety_margin: values.number("margin", "0"),
        policy: match values.text("policy", "fifo") {
            "fifo" => Policy::Fifo,
            "prefill_first" => Policy::PrefillFirst,
            other => panic!("{other:?} is no policy"),
        },
        max_positions: Some(values.number("positions", "10000")),
        match_unit: values.number("match_unit", "0"),
        cache_eviction: match values.text("eviction", "lru") {
            "lru" => Eviction::Lru,
            "lifo" => Eviction::Lifo,
            other => panic!("{other:?} is no order of eviction"),
        },
        swap_blocks: values.number("swap", "0"),
        ..config(
            values.number("page_size", "4"),
            values.number("num_blocks", "16"),
            values.number("tokens", "64"),
        )
    };
    Driver::of(config, values.number("late", "false"))
}

fn submit(driver: &mut Driver, submitted: &mut usize, values: &Values<'_>, log: &mut String) {
    values.known(&[
        "prompt", "new", "priority", "times", "family", "common", "text_of", "salt", "n", "stop", "tenant",
    ]);
    for _ in 0..values.number("times", "1") {
        let len = values.number("prompt", "4");
        let prompt = match values.text("text_of", "") {
            "" => prompt(values.number("family", "0"), values.number("common", "0"), *submitted, len),
            request => driver.text_of(request.parse().unwrap(), len),
        };
        let eos = match values.number("stop", "0") {
            0 => [].into(),
            tokens => [continuation(&prompt, tokens)[tokens - 1]].into(),
        };
        let what = Request {
            prompt,
            eos,
            max_new_tokens: values.number("new", "1"),
            priority: values.number("priority", "0"),
            cache_salt: values.text("salt", "").to_owned(),
            tenant: values.text("tenant", "").to_owned(),
            n: values.number("n", "1"),
            ..Request::default()
        };
        match driver.request(what) {
            Ok(_) => *submitted += 1,
            Err(refused) => tell(log, &format!("refused: {refused}")),
        }
    }
}

fn tell(log: &mut String, what: &str) {
    writeln!(log, "    {what}").unwrap();
}

fn told(row: &Row) -> String {
    let Row { request, start, len, sampled, arrives, generated, carried } = *row;
    let mut told = match len {
        1 if sampled && (generated || !arrives) => format!("{request} decodes {start}"),
        _ => format!("{request} prefills {start} to {}", start + len - 1),
    };
    if carried {
        told += ", carried over";
    }
    if !sampled {
        told += " of its prompt";
    }
    if arrives && start > 0 {
        write!(told, ", {start} are there").unwrap();
    }
    told
}

/// Does one thing to an engine, and tells what came of it.
fn act(driver: &mut Driver, command: &str, log: &mut String) {
    let before = driver.stats();
    let plans = !matches!(command, "commit" | "reset");
    let planned = plans && tell_plan(driver, log);
    match command {
        "plan" => {}
        "reset" => driver.new_epoch(),
        "abandon" if planned => driver.abandon(false, Abandoned::Withdrawn),
        "abandon_both" if planned => driver.abandon(true, Abandoned::Withdrawn),
        "fail" if planned => driver.abandon(false, Abandoned::Raised("broken")),
        "no_memory" if planned => driver.abandon(false, Abandoned::OutOfMemory("no memory")),
        // A late step stays in flight until the next is planned.
        "step" if driver.flights.len() <= usize::from(driver.late && planned) => {}
        "step" | "commit" => driver.commit(),
        other => panic!("{other:?} is no command, or not now"),
    }
    tell_changes(&before, &driver.stats(), log);
    for End { request, finish, tokens, cached, .. } in driver.ends() {
        let how = match finish {
            Finish::Stop => "stop".to_owned(),
            Finish::Length => "length".to_owned(),
            Finish::Cancelled => "cancelled".to_owned(),
            Finish::Failed(cause) => format!("failed ({cause})"),
        };
        let cached = if cached > 0 { format!(", {cached} of its prompt were cached") } else { String::new() };
        tell(log, &format!("{request} ends: {how}, {} tokens{cached}", tokens.len()));
    }
    tell_state(&driver.stats(), log);
}

fn tell_plan(driver: &mut Driver, log: &mut String) -> bool {
    let Some(rows) = driver.plan() else {
        tell(log, if driver.flights.is_empty() { "nothing to run" } else { "nothing to plan" });
        return false;
    };
    tell(log, &rows.iter().map(told).collect::<Vec<_>>().join("; "));
    let shape = driver.flights.last().unwrap().step.shape;
    tell_count("copied pages", shape.copies as u64, log);
    tell_count("blocks to the host", shape.swap_outs as u64, log);
    tell_count("blocks from the host", shape.swap_ins as u64, log);
    true
}

fn tell_changes(before: &Stats, now: &Stats, log: &mut String) {
    tell_count("soft resets", now.soft_resets - before.soft_resets, log);
    tell_count("victims for the host", now.swap_outs - before.swap_outs, log);
    tell_count("evictions", now.evictions - before.evictions, log);
    tell_count("merged blocks", now.merged_blocks - before.merged_blocks, log);
}

/// Tells what there is of blocks that are neither free nor owned only where there is any.
fn tell_state(stats: &Stats, log: &mut String) {
    let mut state = format!("{} free", stats.free_blocks);
    for (what, count) in [("cached", stats.cached_blocks), ("retiring", stats.retiring_blocks)] {
        if count > 0 {
            write!(state, ", {count} {what}").unwrap();
        }
    }
    write!(state, ", {} running, {} waiting", stats.running, stats.waiting).unwrap();
    if stats.swapped > 0 {
        write!(state, ", {} swapped", stats.swapped).unwrap();
    }
    tell(log, &state);
}

fn tell_count(what: &str, count: u64, log: &mut String) {
    if count > 0 {
        tell(log, &format!("{what}: {count}"));
    }
}

/// The story with the log of what happens now.
fn retell(told: &str) -> String {
    let mut driver: Option<Driver> = None;
    let (mut submitted, mut log) = (0, String::new());
    for line in told.lines().filter(|line| !line.starts_with(' ')) {
        writeln!(log, "{line}").unwrap();
        let mut words = line.split_whitespace();
        let command = words.next().unwrap_or("#");
        if command.starts_with('#') {
            continue;
        }
        if command == "engine" {
            driver = Some(engine(&Values::parse(words)));
            continue;
        }
        let driver = driver.as_mut().unwrap();
        match command {
            "submit" => submit(driver, &mut submitted, &Values::parse(words), &mut log),
            "cancel" => driver.cancel(words.next().unwrap().parse().unwrap()),
            _ => {
                for _ in 0..words.next().map_or(1, |times| times.parse().unwrap()) {
                    act(driver, command, &mut log);
                }
            }
        }
    }
    log
}

#[test]
fn every_story_goes_as_it_is_told() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engine/traces");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        let told = std::fs::read_to_string(&file).unwrap();
        let happened = retell(&told);
        if std::env::var_os("UPDATE_TRACES").is_some() {
            std::fs::write(&file, happened).unwrap();
        } else {
            assert_eq!(told, happened, "{} goes otherwise", file.display());
        }
    }
}
