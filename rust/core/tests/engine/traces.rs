//! Scheduling stories as data: each file of `traces/` tells a story and, indented, what the engine did.
//!
//! `engine NAME=VALUE ...` makes one, `submit`, `cancel N`, `step`, `abandon` and `fail` act on it. The indented lines
//! are the plan log; after a change that means them to differ, `UPDATE_TRACES=1 cargo test --test engine traces` writes them
//! anew, to be read before they are committed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::device::{Device, next_token};
use chairlift_core::{
    Engine, EngineConfig, Finish, News, Policy, Reach, Request, RequestId, Results, Sampling, Slot,
};

const VOCAB: u32 = 50;

struct Story {
    engine: Engine,
    device: Device,
    arena: Vec<i32>,
    now: f64,
    /// Which request has a row.
    of_row: std::collections::HashMap<i32, u64>,
    texts: Vec<Vec<i32>>,
}

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

impl Story {
    fn new(values: &Values<'_>) -> Self {
        values.known(&[
            "page_size",
            "num_blocks",
            "tokens",
            "rows",
            "margin",
            "policy",
            "groups",
            "positions",
        ]);
        let tokens = values.number("tokens", "64");
        let engine = Engine::new(EngineConfig {
            page_size: values.number("page_size", "4"),
            num_blocks: values.number("num_blocks", "16"),
            groups: values.text("groups", "full").split(',').map(reach).collect(),
            max_requests_per_batch: values.number("rows", "8"),
            max_batch_tokens: tokens,
            max_cache_reads: None,
            safety_margin: values.number("margin", "0"),
            policy: match values.text("policy", "fifo") {
                "fifo" => Policy::Fifo,
                "prefill_first" => Policy::PrefillFirst,
                other => panic!("{other:?} is no policy"),
            },
            vocab_size: VOCAB,
            max_positions: Some(values.number("positions", "10000")),
            max_queue_size: 0,
            seed: 0,
            match_unit: 0,
            ..EngineConfig::default()
        })
        .unwrap();
        let (device, arena) = (Device::new(&engine), vec![0; engine.arena_capacity()]);
        Self { engine, device, arena, now: 0.0, of_row: Default::default(), texts: Vec::new() }
    }

    fn submit(&mut self, values: &Values<'_>, log: &mut String) {
        values.known(&["prompt", "new", "priority", "times"]);
        for _ in 0..values.number("times", "1") {
            // Each prompt starts with a token of its own, by which its row is known.
            let prompt: usize = values.number("prompt", "4");
            let first = self.texts.len() as i32 % VOCAB as i32;
            let tokens: Vec<i32> = (0..prompt as i32).map(|n| (first + n * 7) % VOCAB as i32).collect();
            let request = Request {
                prompt: tokens.clone(),
                max_new_tokens: values.number("new", "1"),
                eos: [].into(),
                sampling: Sampling::Greedy,
                priority: values.number("priority", "0"),
                seed: None,
                streaming: false,
                record_timestamps: false,
                record_logprobs: false,
                ..Request::default()
            };
            match self.engine.inbox().submit(request) {
                Ok(_) => self.texts.push(tokens),
                Err(refused) => writeln!(log, "    refused: {refused}").unwrap(),
            }
        }
    }

    fn step(&mut self, outcome: &str, log: &mut String) {
        self.now += 1.0;
        let before = self.engine.counters().snapshot();
        let step = self.engine.advance(None, Some((Slot::A, &mut self.arena)), self.now).unwrap();
        self.engine.check_integrity().unwrap();
        let resets = self.engine.counters().snapshot().soft_resets - before.soft_resets;
        if let Some(step) = step {
            let rows = self.device.run(&step, &self.arena);
            let mut tokens = Vec::new();
            let mut told = Vec::new();
            for row in &rows {
                if row.start == 0 {
                    let fits =
                        |text: &&Vec<i32>| text.starts_with(&row.tokens) || row.tokens.starts_with(text);
                    let request = self.texts.iter().rposition(|text| fits(&text)).unwrap() as u64;
                    self.of_row.insert(row.row, request);
                }
                let request = self.of_row[&row.row];
                let end = row.start as usize + row.tokens.len();
                let samples = if row.sampled { "" } else { " of its prompt" };
                told.push(match row.tokens.len() {
                    1 if row.sampled && row.start > 0 => format!("{request} decodes {}", row.start),
                    _ => format!("{request} prefills {} to {}{samples}", row.start, end - 1),
                });
                if row.sampled {
                    tokens.push(next_token(&self.texts[request as usize][..end], VOCAB as i32));
                }
            }
            writeln!(log, "    {}", told.join("; ")).unwrap();
            match outcome {
                "abandon" => self.engine.abandon(Slot::A, None, self.now).unwrap(),
                "fail" => self.engine.abandon(Slot::A, Some("broken"), self.now).unwrap(),
                _ => {
                    let sampled = rows.iter().filter(|row| row.sampled);
                    for (row, &token) in sampled.zip(&tokens) {
                        self.texts[self.of_row[&row.row] as usize].push(token);
                    }
                    let results = Results { slot: Slot::A, tokens: &tokens, logprobs: &[] };
                    self.engine.advance(Some(results), None, self.now).unwrap();
                }
            }
            self.engine.check_integrity().unwrap();
        } else {
            writeln!(log, "    nothing to run").unwrap();
        }
        if resets > 0 {
            writeln!(log, "    soft resets: {resets}").unwrap();
        }
        self.tell_ends(log);
        let stats = self.engine.counters().snapshot();
        writeln!(log, "    {} free, {} running, {} waiting", stats.free_blocks, stats.running, stats.waiting)
            .unwrap();
    }

    fn tell_ends(&self, log: &mut String) {
        while let Some(event) = self.engine.outbox().take_next() {
            if let News::End(output) = event.news {
                let how = match output.finish {
                    Finish::Stop => "stop".to_owned(),
                    Finish::Length => "length".to_owned(),
                    Finish::Cancelled => "cancelled".to_owned(),
                    Finish::Failed(cause) => format!("failed ({cause})"),
                };
                writeln!(log, "    {} ends: {how}, {} tokens", event.request, output.tokens.len()).unwrap();
            }
        }
    }
}

/// The story with the log of what happens now.
fn retell(told: &str) -> String {
    let mut story: Option<Story> = None;
    let mut log = String::new();
    for line in told.lines().filter(|line| !line.starts_with(' ')) {
        writeln!(log, "{line}").unwrap();
        let mut words = line.split_whitespace();
        let command = words.next().unwrap_or("#");
        match command {
            comment if comment.starts_with('#') => {}
            "engine" => story = Some(Story::new(&Values::parse(words))),
            "submit" => story.as_mut().unwrap().submit(&Values::parse(words), &mut log),
            "cancel" => {
                let request = RequestId::from_ordinal(words.next().unwrap().parse().unwrap());
                story.as_ref().unwrap().engine.inbox().cancel(request);
            }
            "step" | "abandon" | "fail" => {
                for _ in 0..words.next().map_or(1, |times| times.parse().unwrap()) {
                    story.as_mut().unwrap().step(command, &mut log);
                }
            }
            other => panic!("{other:?} is no command"),
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
