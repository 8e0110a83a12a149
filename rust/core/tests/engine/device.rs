//! A device that believes only the arena: it keeps tables by row and a memory of what was written where, and checks
//! on every step that each row reads back its own tokens, all of them, in order.

use std::collections::{HashMap, HashSet};

use chairlift_core::{Engine, Reach, Step};

/// What a row of a step brought, as the arena tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenRow {
    pub row: i32,
    pub start: i32,
    pub tokens: Vec<i32>,
    pub sampled: bool,
    /// Where `content` starts.
    pub seen_from: i32,
    /// What the row's first new token and all after it see, read back through its block tables.
    pub content: Vec<i32>,
}

pub struct Device {
    page_size: usize,
    num_groups: usize,
    reaches: Vec<Reach>,
    trash: i32,
    tables: HashMap<(i32, i32, i32), i32>,
    memory: Memory,
    /// What is in host memory.
    host: Memory,
    first_regime: Option<u32>,
    last: LastStep,
    vocab_size: i32,
    /// Whether a step may be planned before the one before it is committed.
    pub late: bool,
}

/// What a step leaves to the next.
#[derive(Debug, Clone, Default)]
pub struct LastStep {
    pub sampled: Vec<i32>,
    /// Where each row started.
    starts: HashMap<i32, i32>,
}

impl Device {
    pub fn new(engine: &Engine) -> Self {
        let config = engine.config();
        Self {
            page_size: config.page_size as usize,
            num_groups: config.num_groups() as usize,
            reaches: config.groups.clone(),
            trash: (config.num_blocks * config.num_groups()) as i32,
            tables: HashMap::new(),
            memory: HashMap::new(),
            host: HashMap::new(),
            first_regime: config.first_regime,
            last: LastStep::default(),
            vocab_size: config.vocab_size as i32,
            late: false,
        }
    }

    pub fn run(&mut self, step: &Step, arena: &[i32]) -> Vec<SeenRow> {
        let at = &step.layout;
        for change in arena[at.table_changes.clone()].chunks(4) {
            // Only the trash that is read may stand in a table, where nobody reads.
            assert!(change[3] <= self.trash);
            self.tables.insert((change[0], change[1], change[2]), change[3]);
        }
        let page_size = self.page_size as i32;
        for pair in arena[at.swap_outs.clone()].chunks(2) {
            move_page(&self.memory, pair[0], &mut self.host, pair[1], page_size);
        }
        for pair in arena[at.swap_ins.clone()].chunks(2) {
            move_page(&self.host, pair[0], &mut self.memory, pair[1], page_size);
        }
        let hosts: HashSet<i32> = arena[at.swap_outs.clone()].chunks(2).map(|pair| pair[1]).collect();
        assert_eq!(hosts.len(), step.shape.swap_outs, "two blocks to one place of the host");
        self.copy(&arena[at.copies.clone()]);
        let rows = &arena[at.rows.clone()];
        assert_eq!(rows.iter().collect::<HashSet<_>>().len(), rows.len(), "a row twice in a step");
        let bounds = &arena[at.cu_seqlens.clone()];
        assert_eq!(*bounds.last().unwrap() as usize, step.shape.tokens);
        let (mut tokens, positions) = (arena[at.tokens.clone()].to_vec(), &arena[at.positions.clone()]);
        for carry in arena[at.carry_overs.clone()].chunks(2) {
            let place =
                std::mem::replace(&mut tokens[carry[0] as usize], self.last.sampled[carry[1] as usize]);
            assert_eq!(place, -1, "a token that is known needs no carry-over");
        }
        assert!(!tokens.contains(&-1), "a token that nobody brings");
        let slots = &arena[at.write_slots.clone()];
        assert_eq!(slots.iter().collect::<HashSet<_>>().len(), slots.len(), "two writes to one place");
        for group in 0..self.num_groups {
            for (n, &row) in rows.iter().enumerate() {
                let of_row = bounds[n] as usize..bounds[n + 1] as usize;
                let mut before = self.context_before(group, row, positions[of_row.start]);
                for n in of_row {
                    let (position, token) = (positions[n], tokens[n]);
                    let alone = self.first_seen(group, position) == position;
                    let context = after(if alone { 0 } else { before }, token);
                    let slot = slots[group * step.shape.tokens + n];
                    self.memory.insert(
                        slot,
                        Kv { group, position, token, context, second_regime: step.second_regime },
                    );
                    before = context;
                }
            }
        }
        let logits: HashSet<i32> = arena[at.logits_rows.clone()].iter().copied().collect();
        assert_eq!(logits.len(), step.shape.sampled);
        let seen: Vec<SeenRow> = (0..rows.len())
            .map(|n| {
                let (from, to) = (bounds[n] as usize, bounds[n + 1] as usize);
                assert!(to > from, "a row without tokens");
                let kv_len = arena[at.kv_lens.start + n];
                let start = kv_len - (to - from) as i32;
                let within = self.first_regime.is_none_or(|longest| kv_len <= longest as i32);
                assert!(step.second_regime || within, "too long for the first regime");
                assert_eq!(positions[from..to], (start..kv_len).collect::<Vec<_>>());
                let contents: Vec<Vec<i32>> = (0..self.num_groups)
                    .map(|group| self.read(step, group, rows[n], start, kv_len))
                    .collect();
                let content = contents.iter().max_by_key(|content| content.len()).unwrap().clone();
                assert!(contents.iter().all(|shorter| content.ends_with(shorter)));
                SeenRow {
                    row: rows[n],
                    start,
                    tokens: tokens[from..to].to_vec(),
                    sampled: logits.contains(&(to as i32 - 1)),
                    seen_from: kv_len - content.len() as i32,
                    content,
                }
            })
            .collect();
        let sampled = seen.iter().filter(|row| row.sampled);
        self.last = LastStep {
            sampled: sampled.map(|row| next_token(&row.content, self.vocab_size)).collect(),
            starts: seen.iter().map(|row| (row.row, row.start)).collect(),
        };
        let decodes = seen.iter().take_while(|row| row.tokens.len() == 1).count();
        assert_eq!(decodes, step.shape.decodes);
        seen
    }

    /// What the last step leaves, its tokens chosen by any function of what its rows see: it serves as a model.
    pub fn last_step(&self) -> &LastStep {
        &self.last
    }

    /// The steps after this one were undone.
    pub fn back_to(&mut self, last: LastStep) {
        self.last = last;
    }

    fn copy(&mut self, copies: &[i32]) {
        let page_size = self.page_size as i32;
        let targets: HashSet<i32> = copies.chunks(2).map(|pair| pair[1]).collect();
        assert_eq!(targets.len(), copies.len() / 2, "two copies to one block");
        assert!(copies.chunks(2).all(|pair| !targets.contains(&pair[0])), "copies are made in no order");
        for pair in copies.chunks(2) {
            for offset in 0..page_size {
                match self.memory.get(&(pair[0] * page_size + offset)).copied() {
                    Some(kv) => self.memory.insert(pair[1] * page_size + offset, kv),
                    None => self.memory.remove(&(pair[1] * page_size + offset)),
                };
            }
        }
    }

    fn first_seen(&self, group: usize, position: i32) -> i32 {
        self.reaches[group].first_seen(position as u32) as i32
    }

    fn kv(&self, group: usize, row: i32, position: i32) -> Kv {
        let page_size = self.page_size as i32;
        let block = self.tables[&(group as i32, row, position / page_size)];
        self.memory[&(block * page_size + position % page_size)]
    }

    fn context_before(&self, group: usize, row: i32, position: i32) -> u64 {
        let alone = self.first_seen(group, position) == position;
        if alone { 0 } else { self.kv(group, row, position - 1).context }
    }

    fn read(&self, step: &Step, group: usize, row: i32, start: i32, kv_len: i32) -> Vec<i32> {
        let page_size = self.page_size as i32;
        let first_seen = self.first_seen(group, start);
        // What was unseen by the last committed token is given back.
        let before = self.last.starts.get(&row).copied().filter(|_| self.late);
        let given_back = self.first_seen(group, before.unwrap_or(start));
        for page in 0..given_back / page_size {
            assert_eq!(
                self.tables[&(group as i32, row, page)],
                self.trash,
                "a page that nobody sees any more"
            );
        }
        let mut before = None;
        (first_seen..kv_len)
            .map(|position| {
                let kv = self.kv(group, row, position);
                assert_eq!((kv.group, kv.position), (group, position), "another's K and V");
                assert_eq!(kv.second_regime, step.second_regime, "K and V of another regime");
                if self.first_seen(group, position) == position {
                    before = Some(0);
                }
                let expected = before.map_or(kv.context, |before| after(before, kv.token));
                assert_eq!(kv.context, expected, "K and V of that token after another text");
                before = Some(kv.context);
                kv.token
            })
            .collect()
    }
}

/// What is in a place.
#[derive(Debug, Clone, Copy)]
struct Kv {
    group: usize,
    position: i32,
    token: i32,
    /// Stands for all that the token saw, and what those tokens saw.
    context: u64,
    second_regime: bool,
}

type Memory = HashMap<i32, Kv>;

fn after(before: u64, token: i32) -> u64 {
    (before ^ (token as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

fn move_page(from: &Memory, from_page: i32, to: &mut Memory, to_page: i32, page_size: i32) {
    for offset in 0..page_size {
        match from.get(&(from_page * page_size + offset)) {
            Some(&kv) => to.insert(to_page * page_size + offset, kv),
            None => to.remove(&(to_page * page_size + offset)),
        };
    }
}

/// The next token of a text: any function of all its tokens serves as a model.
pub fn next_token(content: &[i32], vocab_size: i32) -> i32 {
    let hash =
        content.iter().fold(17_u64, |hash, &token| hash.wrapping_mul(31).wrapping_add(token as u64 + 7));
    ((hash >> 7) % vocab_size as u64) as i32
}
