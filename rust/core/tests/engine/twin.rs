//! The naive twin of the engine: plain lists, searched from end to end, so that it is slow and obviously right.
//!
//! It keeps the pool as a list of blocks with the texts that are known to be in them, and finds a prefix by comparing
//! whole texts. It predicts every row of every step, every event, and the number of blocks in each state.

use std::collections::{BTreeMap, BTreeSet};

use chairlift_core::{
    Abandoned, CONTINUATIONS, EngineConfig, Eviction, Fairness, Finish, Policy, Reach, STEPS_BEFORE_LONGER,
};

/// Steps in flight, by slot.
type Steps = [bool; 2];

/// A request that ended: its tokens, the weights that chose each, how it ended, and what it found in the cache.
type Ended = (u64, Vec<i32>, Vec<u64>, Finish, usize);

#[derive(Debug, Clone, PartialEq)]
pub struct NaiveSeq {
    pub request: u64,
    pub parent: u64,
    pub priority: i32,
    pub tenant: String,
    pub prompt: usize,
    pub max_len: usize,
    pub eos: i32,
    pub salt: i32,
    pub tokens: Vec<i32>,
    /// The weights that chose each generated token.
    pub epochs: Vec<u64>,
    pub computed: usize,
    pub planned: usize,
    /// Tokens that steps in flight sample.
    pub pending: usize,
    pub in_flight: Steps,
    /// A block for each page and group, page by page; `None` where nobody looks any more.
    pub table: Vec<Option<usize>>,
    /// Places of the table that the device has otherwise, and how many of them steps in flight bring.
    pub news: Vec<usize>,
    pub sent: usize,
    pub active: bool,
    /// A token was sampled for it since it last got its row, or is on its way.
    pub decoding: bool,
    pub admitted: u64,
    pub passed_over: u32,
    pub shares: bool,
    pub published: usize,
    pub prefill_len: usize,
    pub cached_tokens: usize,
    pub epoch: u64,
    pub second: bool,
    /// When it was last looked at: what another was computing for it; the blocks it lacked, and how many steps there had been.
    pub follows: Option<Vec<i32>>,
    pub no_room: Option<(usize, u64)>,
    pub swapped: Option<NaiveSwapped>,
}

/// What a victim left on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct NaiveSwapped {
    /// For each place of its table, whether there was a block.
    held: Vec<bool>,
    computed: usize,
    in_flight: Steps,
}

impl NaiveSeq {
    fn known(&self) -> usize {
        self.tokens.len() + self.pending
    }

    /// A prefix, after what must be the same as well.
    fn text(&self, len: usize) -> Vec<i32> {
        [self.salt, i32::from(self.second)].into_iter().chain(self.tokens[..len].iter().copied()).collect()
    }
}

#[derive(Debug, Clone)]
pub struct NaiveBlock {
    group: usize,
    owners: usize,
    busy: Steps,
    /// Texts whose last tokens are known to be in it.
    names: Vec<Vec<i32>>,
    cached_since: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct NaiveRow {
    pub request: u64,
    pub start: usize,
    pub len: usize,
    pub sampled: bool,
    decoding_before: bool,
    blocks_before: usize,
    news: usize,
    arrival: bool,
    fresh: bool,
}

/// A planned step.
#[derive(Debug, Clone, Default)]
pub struct NaiveStep {
    pub slot: usize,
    epoch: u64,
    pub rows: Vec<NaiveRow>,
    /// Blocks that are copied from.
    pins: Vec<usize>,
    /// Whose blocks go to the host.
    victims: Vec<u64>,
    is_trial: bool,
}

#[derive(Debug)]
pub struct Naive {
    pub config: EngineConfig,
    /// In order of arrival.
    pub seqs: Vec<NaiveSeq>,
    /// Submitted sequences of a request, or the request to cancel.
    pub inbox: Vec<Result<Vec<NaiveSeq>, u64>>,
    pub ended: Vec<Ended>,
    /// Whether those that were never admitted are let in.
    pub lets_in: bool,
    pub flights: Vec<NaiveStep>,
    pub blocks: BTreeMap<usize, NaiveBlock>,
    next_block: usize,
    clock: u64,
    admissions: u64,
    cursor: usize,
    /// Steps in a row that had no tokens for some decode.
    without: usize,
    /// Blocks that wait for the step of each slot, in the order of their release.
    waiting: [Vec<usize>; 2],
    /// Rows of sequences that ended in flight.
    busy_rows: Vec<Steps>,
    /// Victims whose blocks go to the host with the next step.
    unsent: Vec<u64>,
    /// The regime that the last step left out.
    owed: Option<bool>,
    /// Who is to be tried with nobody else, the next last; and who is tried now.
    trials: Vec<Vec<u64>>,
    trial: Option<Vec<u64>>,
    /// Most tokens of a step, and the steps that came about since that changed.
    most_tokens: usize,
    went_well: usize,
    pub crossings: u64,
    /// Steps planned so far.
    planned: u64,
    /// Blocks of the host that a step in flight writes, and nobody wants any more.
    busy_host: Vec<(usize, Steps)>,
    epoch: u64,
    /// Texts in the order in which they came into the index.
    entered: BTreeMap<Vec<i32>, usize>,
    next_entry: usize,
    pub soft_resets: u64,
    pub swap_outs: u64,
    pub swap_ins: u64,
    /// What each tenant was served, in the order in which they came.
    tenants: Vec<(String, u64)>,
    /// How many sequences each request had.
    families: BTreeMap<u64, u64>,
}

/// A beginning of a text that is in the cache: so many tokens, in blocks that are known to hold that text.
#[derive(Debug, Clone, Default)]
struct NaiveHit {
    len: usize,
    found_by: Vec<i32>,
}

/// What is left for a step.
struct Budget {
    tokens: usize,
    reads: usize,
    changes: usize,
    second: Option<bool>,
    other_regime: bool,
}

impl Budget {
    fn takes(&mut self, second: bool) -> bool {
        let takes = self.second.is_none_or(|of_step| of_step == second);
        self.other_regime |= !takes;
        takes
    }
}

/// What stands before the tokens in [`NaiveSeq::text`].
const BEFORE_TEXT: usize = 2;

fn first_seen(reach: Reach, position: usize) -> usize {
    match reach {
        Reach::Full => 0,
        Reach::Window(window) => (position + 1).max(window as usize) - window as usize,
        Reach::Chunk(chunk) => position / chunk as usize * chunk as usize,
    }
}

impl Naive {
    pub fn new(config: EngineConfig) -> Self {
        Self {
            trials: vec![],
            trial: None,
            most_tokens: config.max_batch_tokens as usize,
            went_well: 0,
            config,
            seqs: vec![],
            inbox: vec![],
            ended: vec![],
            lets_in: true,
            flights: vec![],
            blocks: BTreeMap::new(),
            next_block: 0,
            clock: 0,
            admissions: 0,
            cursor: 0,
            without: 0,
            waiting: [vec![], vec![]],
            busy_rows: vec![],
            unsent: vec![],
            owed: None,
            crossings: 0,
            planned: 0,
            tenants: vec![],
            busy_host: vec![],
            epoch: 0,
            entered: BTreeMap::new(),
            next_entry: 0,
            soft_resets: 0,
            swap_outs: 0,
            swap_ins: 0,
            families: BTreeMap::new(),
        }
    }

    // ------------------------------------------------------------------ sizes

    fn page(&self) -> usize {
        self.config.page_size as usize
    }

    fn unit(&self) -> usize {
        self.config.match_unit as usize
    }

    fn groups(&self) -> usize {
        self.config.groups.len()
    }

    fn capacity(&self) -> usize {
        self.config.num_blocks as usize * self.groups()
    }

    fn pages(&self, len: usize) -> usize {
        len.div_ceil(self.page()) * self.groups()
    }

    /// Most blocks that a sequence of that length holds as it grows token by token.
    fn to_hold(&self, len: usize) -> usize {
        let page_size = self.page();
        let of_group = |reach: &Reach| {
            let all = len.div_ceil(page_size);
            match *reach {
                Reach::Full => all,
                Reach::Window(seen) | Reach::Chunk(seen) => {
                    // The stretch that starts at the end of a page.
                    let spanned = (page_size - 1 + seen as usize - 1) / page_size + 1;
                    all.min(spanned)
                }
            }
        };
        self.config.groups.iter().map(of_group).sum()
    }

    /// Tokens of the longest sequence.
    pub fn room(&self) -> usize {
        let positions = self.config.max_positions.unwrap_or(u32::MAX) as usize;
        // No story is longer.
        (1..200).rev().find(|&len| self.to_hold(len) <= self.capacity()).unwrap_or(0).min(positions)
    }

    fn reads(&self, planned: usize, more: usize) -> usize {
        let first = self.config.groups.iter().map(|&reach| first_seen(reach, planned)).min().unwrap();
        planned - first + more
    }

    fn table_changes(&self) -> usize {
        let rows = self.config.max_requests_per_batch as usize;
        let tokens = self.config.max_batch_tokens as usize;
        let seen =
            self.config.groups.iter().filter_map(|reach| reach.most_seen()).max().unwrap_or(0) as usize;
        let chunk = 2 * (3 * (tokens / self.page() + 2) + seen / self.page() + 3);
        self.groups() * (3 * rows + chunk + 2 * (self.room() / self.page() + 2))
    }

    fn reserve(&self) -> usize {
        (self.config.safety_margin * self.capacity() as f64).ceil() as usize
    }

    // ----------------------------------------------------------------- blocks

    /// Free, owned, cached and retiring blocks.
    pub fn states(&self) -> [usize; 4] {
        let owned = self.blocks.values().filter(|block| block.owners > 0).count();
        let retiring =
            self.blocks.values().filter(|block| block.owners == 0 && block.busy != [false; 2]).count();
        let cached = self.blocks.len() - owned - retiring;
        [self.capacity() - self.blocks.len(), owned, cached, retiring]
    }

    fn available(&self) -> usize {
        let [free, _, cached, _] = self.states();
        free + cached
    }

    fn is_cached(&self, block: usize) -> bool {
        let block = &self.blocks[&block];
        block.owners == 0 && block.busy == [false; 2]
    }

    /// Free blocks of the host.
    pub fn free_host(&self) -> usize {
        let held = self.seqs.iter().filter_map(|seq| seq.swapped.as_ref());
        let held = held.flat_map(|swapped| &swapped.held).filter(|&&held| held).count();
        let busy: usize = self.busy_host.iter().map(|(count, _)| count).sum();
        self.config.swap_blocks as usize - held - busy
    }

    fn drop_swapped(&mut self, at: usize) {
        if let Some(NaiveSwapped { held, in_flight, .. }) = self.seqs[at].swapped.take()
            && in_flight != [false; 2]
        {
            self.busy_host.push((held.iter().filter(|&&held| held).count(), in_flight));
        }
    }

    fn offload(&mut self, at: usize) {
        let seq = &self.seqs[at];
        let held: Vec<bool> = seq.table.iter().map(Option::is_some).collect();
        let blocks = held.iter().filter(|&&held| held).count();
        let fits = blocks > 0 && blocks <= self.free_host() && held.len() <= self.table_changes() / 2;
        let swapped = NaiveSwapped { held, computed: seq.computed, in_flight: [false; 2] };
        self.leave(at);
        if fits {
            self.seqs[at].swapped = Some(swapped);
            self.unsent.push(self.seqs[at].request);
            self.swap_outs += 1;
        } else {
            self.soft_resets += 1;
        }
    }

    /// Whole pages of a victim that are still in the cache, by their place in its table.
    fn still_cached(&self, seq: &NaiveSeq, swapped: &NaiveSwapped) -> BTreeMap<usize, usize> {
        if self.unit() == 0 || seq.epoch != self.epoch {
            return BTreeMap::new();
        }
        let whole = swapped.computed / self.page() * self.groups();
        let held = (0..whole).filter(|&place| swapped.held[place]);
        let block = |place: usize| {
            let end = (place / self.groups() + 1) * self.page();
            Some((place, self.holder(place % self.groups(), &seq.text(end))?))
        };
        held.filter_map(block).collect()
    }

    fn take_back(&mut self, at: usize) {
        let swapped = self.seqs[at].swapped.clone().unwrap();
        let cached = self.still_cached(&self.seqs[at], &swapped);
        for &block in cached.values() {
            self.share(block);
        }
        let mut table = Vec::new();
        for (place, held) in swapped.held.iter().enumerate() {
            let block = cached.get(&place).copied();
            table
                .push(held.then(|| block.unwrap_or_else(|| self.allocate(place % self.config.groups.len()))));
        }
        let on = self.unit() > 0;
        let seq = &mut self.seqs[at];
        seq.news = (0..table.len()).collect();
        seq.table = table;
        (seq.computed, seq.planned) = (swapped.computed, swapped.computed);
        seq.prefill_len = seq.tokens.len();
        seq.shares = on && seq.epoch == self.epoch;
    }

    fn allocate(&mut self, group: usize) -> usize {
        if self.blocks.len() == self.capacity() {
            let cached = self.blocks.iter().filter(|&(&id, _)| self.is_cached(id));
            let by_age = cached.map(|(&id, block)| (block.cached_since, id));
            let (_, evicted) = match self.config.cache_eviction {
                Eviction::Lru => by_age.min().unwrap(),
                Eviction::Lifo => by_age.max().unwrap(),
            };
            self.blocks.remove(&evicted);
        }
        self.next_block += 1;
        let block = NaiveBlock { group, owners: 1, busy: [false; 2], names: vec![], cached_since: 0 };
        self.blocks.insert(self.next_block, block);
        self.next_block
    }

    fn share(&mut self, block: usize) {
        self.blocks.get_mut(&block).unwrap().owners += 1;
    }

    fn release(&mut self, block: usize, tickets: Steps) {
        let released = self.blocks.get_mut(&block).unwrap();
        released.owners -= 1;
        for (slot, ticket) in tickets.into_iter().enumerate() {
            if ticket && !released.busy[slot] {
                released.busy[slot] = true;
                self.waiting[slot].push(block);
            }
        }
        self.settle(block);
    }

    /// A block that nobody has or waits for is cached when something is known of it, else gone.
    fn settle(&mut self, block: usize) {
        let settled = self.blocks.get_mut(&block).unwrap();
        if settled.owners == 0 && settled.busy == [false; 2] {
            if settled.names.is_empty() {
                self.blocks.remove(&block);
            } else {
                self.clock += 1;
                settled.cached_since = self.clock;
            }
        }
    }

    fn release_table(&mut self, at: usize, keep: usize) {
        let tickets = self.seqs[at].in_flight;
        let mut released: Vec<_> = self.seqs[at].table.drain(keep..).flatten().collect();
        if self.config.cache_eviction == Eviction::Lru {
            released.reverse();
        }
        for block in released {
            self.release(block, tickets);
        }
    }

    fn holder(&self, group: usize, text: &[i32]) -> Option<usize> {
        let holds = |block: &NaiveBlock| block.group == group && block.names.iter().any(|name| name == text);
        self.blocks.iter().find(|(_, block)| holds(block)).map(|(&id, _)| id)
    }

    /// Whether the index has a place for that text: something is known of it, or of a longer one, or a sequence stands
    /// there.
    fn is_known(&self, text: &[i32]) -> bool {
        self.blocks.values().any(|block| block.names.iter().any(|name| name.starts_with(text)))
            || self
                .seqs
                .iter()
                .any(|seq| seq.shares && seq.text(seq.published * self.unit()).starts_with(text))
    }

    /// The block in which a page of the first `hit` tokens lies, if some later token sees any of it and it is known.
    fn block_of_hit(&self, hit: &NaiveHit, page: usize, group: usize) -> Option<usize> {
        self.holder(group, &hit.found_by[..hit.found_by.len().min(BEFORE_TEXT + (page + 1) * self.page())])
    }

    /// Whether a page of the first `hit` tokens is needed: some later token sees some of it, or is to be added to it.
    fn sees(&self, hit: usize, page: usize, group: usize) -> bool {
        let end = (page + 1) * self.page();
        if end > hit {
            return true;
        }
        let first = first_seen(self.config.groups[group], hit);
        (page * self.page()..end).any(|position| position >= first)
    }

    fn is_there(&self, hit: &NaiveHit) -> bool {
        (0..hit.len.div_ceil(self.page())).all(|page| {
            (0..self.groups()).all(|group| {
                !self.sees(hit.len, page, group) || self.block_of_hit(hit, page, group).is_some()
            })
        })
    }

    /// The longest hit, and the longest that ends with a page.
    fn hits(&self, seq: &NaiveSeq) -> [NaiveHit; 2] {
        if self.unit() == 0 {
            return Default::default();
        }
        let len = seq.tokens.len();
        let mut known = 0;
        while (known + 1) * self.unit() <= len && self.is_known(&seq.text((known + 1) * self.unit())) {
            known += 1;
        }
        // The last token is always computed.
        let ends = (1..=known).map(|units| units * self.unit());
        let hits = ends.map(|end| NaiveHit { len: end.min(len - 1), found_by: seq.text(end) });
        let mut there: Vec<NaiveHit> = hits.filter(|hit| self.is_there(hit)).collect();
        there.reverse();
        // Of equals the one that was found by less.
        let longest = there.iter().max_by_key(|hit| hit.len).cloned().unwrap_or_default();
        let longest =
            self.part_hit(seq, known * self.unit()).filter(|part| part.len > longest.len).unwrap_or(longest);
        if self.pages(longest.len) > self.table_changes() / 2 {
            return Default::default();
        }
        there.retain(|hit| hit.len.is_multiple_of(self.page()));
        let whole = there.into_iter().max_by_key(|hit| hit.len).unwrap_or_default();
        [longest, whole]
    }

    /// Of the texts that came last of those that go on behind so many tokens by one unit, the one that does so like `seq`
    /// for the most tokens.
    fn part_hit(&self, seq: &NaiveSeq, whole: usize) -> Option<NaiveHit> {
        let before = seq.text(whole);
        if whole == 0 {
            return None;
        }
        let goes_on =
            |text: &&Vec<i32>| text.len() == before.len() + self.unit() && text.starts_with(&before);
        let mut others: Vec<&Vec<i32>> =
            self.entered.keys().filter(goes_on).filter(|text| self.is_known(text)).collect();
        others.sort_by_key(|text| self.entered[*text]);
        let hits = others.into_iter().rev().take(CONTINUATIONS).map(|text| {
            let pairs = text[before.len()..].iter().zip(&seq.tokens[whole..]);
            let alike = pairs.take_while(|(one, other)| one == other).count();
            NaiveHit { len: (whole + alike).min(seq.tokens.len() - 1), found_by: text.clone() }
        });
        // Of equals the one that came last.
        let there: Vec<NaiveHit> = hits.filter(|hit| hit.len > whole && self.is_there(hit)).collect();
        there.into_iter().rev().max_by_key(|hit| hit.len)
    }

    /// Whether an active sequence computes that text next.
    fn is_being_computed(&self, text: &[i32]) -> bool {
        self.seqs.iter().any(|seq| {
            let end = (seq.published + 1) * self.unit();
            // One that came back from the host says what it computes once it has computed something.
            seq.shares && seq.swapped.is_none() && end <= seq.prefill_len && seq.text(end) == text
        })
    }

    /// The hit that a waiting sequence is offered, and the blocks that it takes; `None` while another computes what it
    /// needs next.
    fn offer(&self, seq: &NaiveSeq) -> Option<(NaiveHit, usize, usize)> {
        if let Some(swapped) = &seq.swapped {
            let cached = self.still_cached(seq, swapped);
            let available = cached.values().filter(|&&block| self.is_cached(block)).count();
            let blocks = self.to_hold(seq.tokens.len()) - cached.len() + available;
            return Some((NaiveHit::default(), swapped.computed, blocks));
        }
        let hits = self.hits(seq);
        if self.unit() > 0 {
            let next = (hits[0].len / self.unit() + 1) * self.unit();
            if next <= seq.tokens.len() && self.is_being_computed(&seq.text(next)) {
                return None;
            }
        }
        let [best, smaller] = hits.map(|hit| {
            let mut blocks = self.to_hold(seq.tokens.len());
            for page in 0..hit.len.div_ceil(self.page()) {
                for group in 0..self.groups() {
                    if self.sees(hit.len, page, group) {
                        let block = self.block_of_hit(&hit, page, group).unwrap();
                        blocks += usize::from(self.is_cached(block));
                        blocks -= usize::from((page + 1) * self.page() <= hit.len);
                    }
                }
            }
            let len = hit.len;
            (hit, len, blocks)
        });
        Some(if best.2 > self.available() { smaller } else { best })
    }

    fn take_hit(&mut self, at: usize, hit: NaiveHit, pins: &mut Vec<usize>) {
        let mut table = Vec::new();
        for page in 0..hit.len.div_ceil(self.page()) {
            for group in 0..self.groups() {
                let seen = self.sees(hit.len, page, group);
                let block = seen.then(|| self.block_of_hit(&hit, page, group).unwrap());
                table.push(block);
            }
        }
        for &block in table.iter().flatten() {
            self.share(block);
        }
        if !hit.len.is_multiple_of(self.page()) {
            let first = table.len() - self.groups();
            for group in 0..self.groups() {
                let own = self.allocate(group);
                pins.extend(table[first + group].replace(own));
            }
        }
        let unit = self.unit();
        let seq = &mut self.seqs[at];
        seq.news = (0..table.len()).collect();
        seq.table = table;
        (seq.computed, seq.planned) = (hit.len, hit.len);
        seq.prefill_len = seq.tokens.len();
        seq.shares = unit > 0;
        seq.epoch = self.epoch;
        seq.published = hit.len.checked_div(unit).unwrap_or(0);
    }

    fn publish(&mut self, at: usize) {
        let (unit, page_size) = (self.unit(), self.page());
        while self.seqs[at].shares && self.seqs[at].computed >= (self.seqs[at].published + 1) * unit {
            let start = self.seqs[at].published * unit;
            let end = start + unit;
            let text = self.seqs[at].text(end);
            if !self.is_known(&text) {
                self.entered.insert(text.clone(), self.next_entry);
                self.next_entry += 1;
            }
            self.seqs[at].published += 1;
            for group in 0..self.groups() {
                let place = start / page_size * self.groups() + group;
                let Some(own) = self.seqs[at].table[place] else { continue };
                let fullest = self.holder(group, &text).unwrap_or(own);
                self.name(fullest, text.clone());
                let text = text.clone();
                // Blocks of this page of which nothing else is known are no use beside the fullest; as far as it is not
                // known to be in them.
                let shorter = (start / page_size * page_size..start).step_by(unit).rev();
                let mut of_page = vec![text];
                of_page.extend(
                    shorter
                        .map(|start| self.seqs[at].text(start + unit))
                        .take_while(|text| self.holder(group, text) != Some(fullest)),
                );
                let redundant: Vec<usize> = self
                    .blocks
                    .iter()
                    .filter(|&(&id, block)| id != fullest && block.group == group && !block.names.is_empty())
                    .filter(|(_, block)| block.names.iter().all(|name| of_page.contains(name)))
                    .map(|(&id, _)| id)
                    .collect();
                for id in redundant {
                    self.blocks.get_mut(&id).unwrap().names.clear();
                    if self.is_cached(id) {
                        self.blocks.remove(&id);
                    }
                }
                for name in of_page {
                    if self.holder(group, &name).is_none() {
                        self.name(fullest, name);
                    }
                }
                if fullest != own && end.is_multiple_of(page_size) {
                    self.share(fullest);
                    self.release(own, self.seqs[at].in_flight);
                    self.seqs[at].table[place] = Some(fullest);
                    self.seqs[at].news.push(place);
                }
            }
        }
    }

    fn name(&mut self, block: usize, text: Vec<i32>) {
        let names = &mut self.blocks.get_mut(&block).unwrap().names;
        if !names.contains(&text) {
            names.push(text);
        }
    }

    fn forget(&mut self, at: usize) {
        for group in 0..self.groups() {
            let first = first_seen(self.config.groups[group], self.seqs[at].computed) / self.page();
            for page in 0..first.min(self.seqs[at].table.len() / self.groups()) {
                let place = page * self.groups() + group;
                if let Some(block) = self.seqs[at].table[place].take() {
                    self.release(block, self.seqs[at].in_flight);
                    self.seqs[at].news.push(place);
                }
            }
        }
    }

    pub fn new_epoch(&mut self) {
        self.epoch += 1;
        for seq in self.seqs.iter_mut().filter(|seq| seq.active) {
            (seq.shares, seq.published) = (false, 0);
        }
        for block in self.blocks.values_mut() {
            block.names.clear();
        }
        self.blocks.retain(|_, block| block.owners > 0 || block.busy != [false; 2]);
    }

    /// While no step is in flight: everything that was computed is given up.
    pub fn recompute_all(&mut self) {
        self.cross_over();
        for at in 0..self.seqs.len() {
            if self.seqs[at].active {
                self.leave(at);
                self.soft_resets += 1;
            } else if self.seqs[at].swapped.is_some() {
                self.drop_swapped(at);
                self.soft_resets += 1;
            }
        }
        self.unsent.clear();
        self.blocks.clear();
    }

    pub fn cancel_all(&mut self) {
        if let Some(slot) = self.flights.first().map(|oldest| oldest.slot) {
            self.abandon(slot, Abandoned::Withdrawn);
        }
        self.trials.clear();
        self.read_inbox();
        let requests: BTreeSet<u64> = self.seqs.iter().map(|seq| seq.request).collect();
        for request in requests {
            self.end(request, Finish::Cancelled);
        }
    }

    // ------------------------------------------------------------- coming, going

    pub fn find(&self, request: u64) -> Option<usize> {
        self.seqs.iter().position(|seq| seq.request == request)
    }

    fn end(&mut self, request: u64, finish: Finish) {
        let Some(at) = self.find(request) else { return };
        self.seqs[at].shares = false;
        self.release_table(at, 0);
        self.drop_swapped(at);
        let seq = self.seqs.remove(at);
        if seq.active && seq.in_flight != [false; 2] {
            self.busy_rows.push(seq.in_flight);
        }
        let tokens = seq.tokens[seq.prompt..].to_vec();
        self.ended.push((request, tokens, seq.epochs, finish, seq.cached_tokens));
    }

    pub fn read_inbox(&mut self) {
        for message in std::mem::take(&mut self.inbox) {
            match message {
                Ok(seqs) => {
                    self.families.insert(seqs[0].request, seqs.len() as u64);
                    for seq in seqs {
                        self.tenant_arrives(&seq.tenant);
                        self.seqs.push(seq);
                    }
                }
                Err(request) => {
                    let number = self.families.get(&request).copied().unwrap_or(1);
                    for child in 0..number {
                        self.end(request + child, Finish::Cancelled);
                    }
                }
            }
        }
    }

    /// What a token costs a tenant.
    fn cost(&self, tenant: &str) -> u64 {
        let Fairness::Tenants(weights) = &self.config.fairness else { return 0 };
        let weight = weights.iter().find(|(name, _)| name == tenant).map_or(1.0, |&(_, weight)| weight);
        (65_536.0 / weight) as u64
    }

    fn served(&mut self, tenant: &str) -> &mut u64 {
        &mut self.tenants.iter_mut().find(|(name, _)| name == tenant).unwrap().1
    }

    /// Whoever was away has no claim from that time.
    fn tenant_arrives(&mut self, tenant: &str) {
        if !self.tenants.iter().any(|(name, _)| name == tenant) {
            self.tenants.push((tenant.to_owned(), 0));
        }
        let is_here = |name: &str| self.seqs.iter().any(|seq| seq.tenant == name);
        if !is_here(tenant) {
            let here = self.tenants.iter().filter(|(name, _)| is_here(name));
            let least = here.map(|&(_, served)| served).min().unwrap_or(0);
            let served = self.served(tenant);
            *served = least.max(*served);
        }
    }

    /// Fresh requests in the order in which they are tried: the first of each tenant, then the second of each, ...
    fn fresh_in_order(&self) -> Vec<usize> {
        let mut waiting: Vec<usize> =
            (0..self.seqs.len()).filter(|&at| !self.seqs[at].active && self.seqs[at].admitted == 0).collect();
        waiting.sort_by_key(|&at| (-self.seqs[at].priority, self.seqs[at].request));
        if self.config.fairness == Fairness::Arrival {
            return waiting;
        }
        let mut tenants: Vec<_> = self.tenants.iter().enumerate().collect();
        tenants.sort_by_key(|(nth, (_, served))| (*served, *nth));
        let of_tenants = tenants.iter().map(|(_, (name, _))| {
            waiting.iter().copied().filter(|&at| self.seqs[at].tenant == *name).collect::<Vec<_>>()
        });
        let of_tenants: Vec<Vec<usize>> = of_tenants.collect();
        (0..waiting.len())
            .flat_map(|nth| of_tenants.iter().filter_map(move |of| of.get(nth).copied()))
            .collect()
    }

    /// Gives up its row and everything computed.
    fn leave(&mut self, at: usize) {
        (self.seqs[at].shares, self.seqs[at].published) = (false, 0);
        self.release_table(at, 0);
        let seq = &mut self.seqs[at];
        (seq.active, seq.decoding, seq.computed, seq.planned) = (false, false, 0, 0);
        seq.news.clear();
    }

    // --------------------------------------------------------------- planning

    fn active_by_age(&self) -> Vec<usize> {
        let mut active: Vec<usize> = (0..self.seqs.len()).filter(|&at| self.seqs[at].active).collect();
        active.sort_by_key(|&at| self.seqs[at].admitted);
        active
    }

    /// The rows of the next step. Empty: nothing can run now.
    pub fn plan(&mut self, slot: usize) -> Vec<NaiveRow> {
        self.cross_over();
        while let Some(trial) = self.trials.pop() {
            let turns = (self.owed, self.cursor, self.without);
            self.trial = Some(trial);
            let rows = self.plan_of(slot, None);
            self.trial = None;
            (self.owed, self.cursor, self.without) = turns;
            if !rows.is_empty() {
                self.flights.last_mut().unwrap().is_trial = true;
                return rows;
            }
        }
        let owed = self.owed.take();
        self.plan_of(slot, owed)
    }

    /// Whether it may be in the step: everybody, but for trials.
    fn may_run(&self, at: usize) -> bool {
        self.trial.as_ref().is_none_or(|trial| trial.contains(&self.seqs[at].request))
    }

    fn plan_of(&mut self, slot: usize, mut owed: Option<bool>) -> Vec<NaiveRow> {
        loop {
            let mut step = NaiveStep { slot, epoch: self.epoch, ..NaiveStep::default() };
            let mut starved: Vec<u64> = Vec::new();
            let mut left = Budget {
                tokens: self.most_tokens,
                reads: self.config.max_cache_reads.unwrap_or(u64::MAX) as usize,
                changes: self.table_changes(),
                second: owed,
                other_regime: false,
            };
            let mut left_out = false;
            let prefills_first = self.config.policy == Policy::PrefillFirst && self.without < 7;
            let (decodes, prefills) = self.active_by_kind();
            if prefills_first {
                self.choose_prefills(&prefills, &mut step, &mut starved, &mut left);
            }
            left_out |= self.choose_decodes(&decodes, &mut step, &mut starved, &mut left);
            if !prefills_first {
                self.choose_prefills(&prefills, &mut step, &mut starved, &mut left);
            }
            self.choose_waiting(&mut step, &mut left);
            if !step.rows.is_empty() {
                self.without = if left_out { self.without + 1 } else { 0 };
                self.owed = left.second.filter(|_| left.other_regime).map(|second| !second);
            } else if owed.take().is_some() {
                continue;
            }
            let relieved = self.reset_victims(&starved);
            if !step.rows.is_empty() {
                // Single tokens first.
                step.rows.sort_by_key(|row| row.len != 1);
                for request in std::mem::take(&mut self.unsent) {
                    if let Some(at) = self.find(request) {
                        self.seqs[at].swapped.as_mut().unwrap().in_flight[slot] = true;
                        step.victims.push(request);
                    }
                }
                self.planned += 1;
                self.flights.push(step.clone());
                return step.rows;
            }
            if !relieved {
                return vec![];
            }
        }
    }

    pub fn is_second(&self, len: usize) -> bool {
        self.config.first_regime.is_some_and(|longest| len > longest as usize)
    }

    fn cross_over(&mut self) {
        for at in self.active_by_age() {
            let seq = &self.seqs[at];
            if seq.in_flight == [false; 2] && !seq.second && self.is_second(seq.tokens.len()) {
                self.leave(at);
                self.seqs[at].second = true;
                self.crossings += 1;
            }
        }
    }

    fn may_prefill(&self, step: &NaiveStep) -> bool {
        step.rows.is_empty() || self.available() >= self.reserve()
    }

    /// Decoding sequences from where the last step left off, each with its place; and the others, by age.
    fn active_by_kind(&self) -> (Vec<(u64, usize)>, Vec<u64>) {
        let order = self.active_by_age();
        let start = if self.cursor < order.len() { self.cursor } else { 0 };
        let places = (start..order.len()).chain(0..start).map(|place| (order[place], place));
        let decodes = places.filter(|&(at, _)| self.seqs[at].decoding && self.may_run(at));
        let prefills = order
            .iter()
            .filter(|&&at| !self.seqs[at].decoding && self.may_run(at))
            .map(|&at| self.seqs[at].request);
        (decodes.map(|(at, place)| (self.seqs[at].request, place)).collect(), prefills.collect())
    }

    /// Tells whether the budgets were too small for some.
    fn choose_decodes(
        &mut self,
        decodes: &[(u64, usize)],
        step: &mut NaiveStep,
        starved: &mut Vec<u64>,
        left: &mut Budget,
    ) -> bool {
        self.cursor = 0;
        let mut left_out = false;
        for &(request, place) in decodes {
            let at = self.find(request).unwrap();
            let seq = &self.seqs[at];
            if seq.known() >= seq.max_len {
                // What is in flight is its last token.
                continue;
            }
            if self.is_second(seq.planned + 1) && !seq.second {
                continue;
            }
            if !left.takes(seq.second) {
                left_out = true;
                continue;
            }
            if left.tokens == 0
                || self.reads(seq.planned, 1) > left.reads
                || self.changes(seq, 1) > left.changes
            {
                left_out = true;
                if self.cursor == 0 {
                    self.cursor = place;
                }
            } else if !self.hold(at, 1, step, left) {
                starved.push(request);
            }
        }
        left_out
    }

    fn choose_prefills(
        &mut self,
        prefills: &[u64],
        step: &mut NaiveStep,
        starved: &mut Vec<u64>,
        left: &mut Budget,
    ) {
        for &request in prefills {
            if left.tokens == 0 || !self.may_prefill(step) {
                break;
            }
            let at = self.find(request).unwrap();
            let seq = &self.seqs[at];
            if !left.takes(seq.second) {
                continue;
            }
            let wanted = self.chunk(seq.known(), seq.planned, left);
            if wanted == 0 || self.changes(seq, wanted) > left.changes {
                continue;
            }
            let chunk = self.fitting(seq, wanted);
            if chunk == 0 || !self.hold(at, chunk, step, left) {
                starved.push(request);
            }
        }
    }

    /// Tokens of a prefill: what is left of it and of the budgets.
    fn chunk(&self, known: usize, planned: usize, left: &Budget) -> usize {
        let most = (known - planned).min(left.tokens);
        (0..=most).rev().find(|&chunk| chunk == 0 || self.reads(planned, chunk) <= left.reads).unwrap()
    }

    /// As many of them as there are blocks for.
    fn fitting(&self, seq: &NaiveSeq, wanted: usize) -> usize {
        let lacking = |more| self.pages(seq.planned + more) - seq.table.len();
        (0..=wanted).rev().find(|&more| more == 0 || lacking(more) <= self.available()).unwrap()
    }

    fn changes(&self, seq: &NaiveSeq, more: usize) -> usize {
        seq.news.len() - seq.sent + self.pages(seq.planned + more).saturating_sub(seq.table.len())
    }

    fn hold(&mut self, at: usize, more: usize, step: &mut NaiveStep, left: &mut Budget) -> bool {
        let seq = &self.seqs[at];
        let (start, before) = (seq.planned, seq.table.len());
        let lacking = self.pages(start + more).saturating_sub(before);
        if lacking > self.available() {
            return false;
        }
        for place in before..before + lacking {
            let block = self.allocate(place % self.groups());
            self.seqs[at].table.push(Some(block));
            self.seqs[at].news.push(place);
        }
        let reads = self.reads(start, more);
        let seq = &mut self.seqs[at];
        let row = NaiveRow {
            request: seq.request,
            start,
            len: more,
            sampled: start + more == seq.known(),
            decoding_before: seq.decoding,
            blocks_before: before,
            news: seq.news.len() - seq.sent,
            arrival: false,
            fresh: false,
        };
        seq.planned = start + more;
        seq.in_flight[step.slot] = true;
        seq.sent += row.news;
        if row.sampled {
            seq.pending += 1;
            seq.decoding = true;
        }
        left.second = Some(seq.second);
        left.tokens -= more;
        left.reads -= reads;
        left.changes -= row.news;
        step.rows.push(row);
        true
    }

    fn choose_waiting(&mut self, step: &mut NaiveStep, left: &mut Budget) {
        let mut head: Option<u64> = None;
        let mut skipped: Vec<u64> = vec![];
        loop {
            let rows = self.seqs.iter().filter(|seq| seq.active).count() + self.busy_rows.len();
            if left.tokens == 0
                || rows == self.config.max_requests_per_batch as usize
                || skipped.len() > 16
                || self.available() == 0
                || !self.may_prefill(step)
            {
                return;
            }
            let victims =
                (0..self.seqs.len()).filter(|&at| !self.seqs[at].active && self.seqs[at].admitted > 0);
            let victim = victims.min_by_key(|&at| (-self.seqs[at].priority, self.seqs[at].admitted));
            let mut fresh = self.fresh_in_order();
            fresh.retain(|&at| !skipped.contains(&self.seqs[at].request));
            let of_trial = self.trial.iter().flatten().filter_map(|&request| self.find(request));
            let mut tried =
                of_trial.filter(|&at| !self.seqs[at].active && !skipped.contains(&self.seqs[at].request));
            let candidate = match victim {
                _ if self.trial.is_some() => match tried.next() {
                    Some(at) if self.lets_in || self.seqs[at].admitted > 0 => at,
                    _ => return,
                },
                Some(at) if skipped.is_empty() => at,
                Some(_) => return,
                None => match fresh.first() {
                    Some(&at) if self.lets_in => at,
                    _ => return,
                },
            };
            let seq = &self.seqs[candidate];
            if seq.follows.as_ref().is_some_and(|text| self.is_being_computed(text)) {
                skipped.push(seq.request);
                continue;
            }
            self.seqs[candidate].follows = None;
            let seq = &self.seqs[candidate];
            // What was looked at not long ago, and needed more than there is, is not looked at again.
            let no_room = seq
                .no_room
                .is_some_and(|(blocks, step)| blocks > self.available() && self.planned < step + 16);
            if !left.takes(seq.second) || no_room {
                if skipped.is_empty() {
                    if seq.passed_over >= 16 {
                        return;
                    }
                    head = Some(seq.request);
                }
                skipped.push(seq.request);
                continue;
            }
            let Some((hit, computed, blocks)) = self.offer(seq) else {
                let next = (self.hits(seq)[0].len / self.unit() + 1) * self.unit();
                let (request, text) = (seq.request, seq.text(next));
                self.seqs[candidate].follows = Some(text);
                skipped.push(request);
                continue;
            };
            let chunk = self.chunk(seq.tokens.len(), computed, left);
            if chunk > 0 && blocks <= self.available() && self.pages(computed + chunk) <= left.changes {
                if let Some(head) = head.take() {
                    let at = self.find(head).unwrap();
                    self.seqs[at].passed_over += 1;
                }
                let seq = &mut self.seqs[candidate];
                let fresh = seq.admitted == 0;
                seq.active = true;
                if fresh {
                    self.admissions += 1;
                    seq.admitted = self.admissions;
                    seq.cached_tokens = hit.len;
                }
                if self.seqs[candidate].swapped.is_some() {
                    self.take_back(candidate);
                } else {
                    self.take_hit(candidate, hit, &mut step.pins);
                }
                let chunk = self.fitting(&self.seqs[candidate], chunk);
                assert!(self.hold(candidate, chunk, step, left));
                let row = step.rows.last_mut().unwrap();
                (row.arrival, row.fresh, row.blocks_before) = (true, fresh, 0);
                if fresh {
                    let seq = &self.seqs[candidate];
                    let (tenant, tokens) = (seq.tenant.clone(), seq.prefill_len - computed);
                    let cost = self.cost(&tenant);
                    *self.served(&tenant) += tokens as u64 * cost;
                }
            } else {
                if skipped.is_empty() {
                    if seq.passed_over >= 16 {
                        return;
                    }
                    head = Some(seq.request);
                }
                skipped.push(seq.request);
                self.seqs[candidate].no_room = Some((blocks, self.planned));
            }
        }
    }

    fn reset_victims(&mut self, starved: &[u64]) -> bool {
        let demand = |naive: &Naive, request: u64| {
            let seq = &naive.seqs[naive.find(request).unwrap()];
            let chunk = (seq.known() - seq.planned).min(naive.config.max_batch_tokens as usize);
            naive.pages(seq.planned + chunk).saturating_sub(seq.table.len())
        };
        let mut left: Vec<u64> = starved.to_vec();
        let mut at_rest: Vec<u64> = starved.to_vec();
        at_rest.retain(|&request| self.seqs[self.find(request).unwrap()].in_flight == [false; 2]);
        at_rest.sort_by_key(|&request| {
            let seq = &self.seqs[self.find(request).unwrap()];
            (-seq.priority, seq.admitted)
        });
        let mut any = false;
        while let Some(newest) = at_rest.pop() {
            let needed: usize = left.iter().map(|&request| demand(self, request)).sum();
            let coming = self.available() + self.states()[3];
            if needed <= coming || self.seqs.iter().filter(|seq| seq.active).count() <= 1 {
                break;
            }
            left.retain(|&request| request != newest);
            self.offload(self.find(newest).unwrap());
            any = true;
        }
        any
    }

    // ------------------------------------------------------ what becomes of it

    /// Commits the oldest step, with a token for each sampled row.
    pub fn commit(&mut self, tokens: &[i32]) {
        let step = self.flights.remove(0);
        self.went_well += 1;
        if self.went_well == STEPS_BEFORE_LONGER as usize {
            self.bound_tokens(self.most_tokens * 2);
        }
        let mut tokens = tokens.iter();
        for &request in &step.victims {
            let at = self.find(request);
            if let Some(swapped) = at.and_then(|at| self.seqs[at].swapped.as_mut()) {
                swapped.in_flight[step.slot] = false;
            }
        }
        for row in &step.rows {
            let token = row.sampled.then(|| *tokens.next().unwrap());
            let Some(at) = self.find(row.request) else { continue };
            let seq = &mut self.seqs[at];
            seq.in_flight[step.slot] = false;
            seq.computed += row.len;
            seq.news.drain(..row.news);
            seq.sent -= row.news;
            if seq.swapped.is_some() {
                self.drop_swapped(at);
                self.swap_ins += 1;
            }
            self.publish(at);
            self.forget(at);
            let Some(token) = token else { continue };
            let tenant = self.seqs[at].tenant.clone();
            let cost = self.cost(&tenant);
            *self.served(&tenant) += 2 * cost;
            let seq = &mut self.seqs[at];
            seq.pending -= 1;
            seq.tokens.push(token);
            seq.epochs.push(step.epoch);
            let (len, max_len, eos) = (seq.tokens.len(), seq.max_len, seq.eos);
            if token == eos {
                self.end(row.request, Finish::Stop);
            } else if len >= max_len {
                self.end(row.request, Finish::Length);
            }
        }
        self.is_in(&step);
    }

    fn bound_tokens(&mut self, most: usize) {
        (self.most_tokens, self.went_well) = (most.min(self.config.max_batch_tokens as usize), 0);
    }

    /// Undoes the step of a slot, and the one planned after it.
    pub fn abandon(&mut self, slot: usize, why: Abandoned<'_>) {
        while let Some(step) = self.flights.pop() {
            let tokens: usize = step.rows.iter().map(|row| row.len).sum();
            let why = if step.slot == slot { why } else { Abandoned::Withdrawn };
            let cause = match why {
                Abandoned::Raised(cause) if step.rows.len() == 1 => Some(cause),
                Abandoned::OutOfMemory(cause) if tokens == 1 => Some(cause),
                _ => None,
            };
            for row in step.rows.iter().rev() {
                let Some(at) = self.find(row.request) else { continue };
                self.seqs[at].in_flight[step.slot] = false;
                if let Some(cause) = cause {
                    self.end(row.request, Finish::Failed(cause.into()));
                    continue;
                }
                let seq = &mut self.seqs[at];
                seq.planned -= row.len;
                seq.pending -= usize::from(row.sampled);
                seq.decoding = row.decoding_before;
                seq.sent -= row.news;
                self.release_table(at, row.blocks_before);
                let seq = &mut self.seqs[at];
                seq.news.retain(|&place| place < row.blocks_before);
                if row.fresh {
                    let (tenant, tokens) = (seq.tenant.clone(), seq.prefill_len - row.start);
                    let cost = self.cost(&tenant);
                    *self.served(&tenant) -= tokens as u64 * cost;
                    let seq = &mut self.seqs[at];
                    (seq.admitted, seq.cached_tokens) = (0, 0);
                    self.admissions -= 1;
                }
                if row.arrival {
                    self.leave(at);
                }
            }
            for &request in &step.victims {
                if let Some(at) = self.find(request).filter(|&at| self.seqs[at].swapped.is_some()) {
                    self.drop_swapped(at);
                    self.soft_resets += 1;
                }
            }
            self.is_in(&step);
            let mut suspects: Vec<u64> = step.rows.iter().map(|row| row.request).collect();
            match why {
                Abandoned::Raised(_) => {
                    suspects.retain(|&request| step.rows.len() > 1 && self.find(request).is_some());
                    let (first, second) = suspects.split_at(suspects.len().div_ceil(2));
                    self.trials.extend([second.to_vec(), first.to_vec()]);
                    self.trials.retain(|trial| !trial.is_empty());
                }
                _ if step.is_trial && cause.is_none() => self.trials.push(suspects),
                _ => {}
            }
            if let Abandoned::OutOfMemory(_) = why {
                self.bound_tokens(if tokens == 1 { usize::MAX } else { tokens / 2 });
            }
            if step.slot == slot {
                return;
            }
        }
    }

    /// Blocks that the step planned last copies within the pool, and to the host.
    pub fn moves(&self) -> (usize, usize) {
        let step = self.flights.last().unwrap();
        let victims = step.victims.iter().map(|&request| &self.seqs[self.find(request).unwrap()]);
        let swapped = victims.map(|seq| seq.swapped.as_ref().unwrap());
        (step.pins.len(), swapped.flat_map(|swapped| &swapped.held).filter(|&&held| held).count())
    }

    fn is_in(&mut self, step: &NaiveStep) {
        for &block in &step.pins {
            self.release(block, [false; 2]);
        }
        for id in std::mem::take(&mut self.waiting[step.slot]) {
            self.blocks.get_mut(&id).unwrap().busy[step.slot] = false;
            self.settle(id);
        }
        for (_, steps) in &mut self.busy_host {
            steps[step.slot] = false;
        }
        self.busy_host.retain(|(_, steps)| *steps != [false; 2]);
        for row in &mut self.busy_rows {
            row[step.slot] = false;
        }
        self.busy_rows.retain(|row| *row != [false; 2]);
    }
}
