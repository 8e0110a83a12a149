//! The index of the prefix cache: which block holds K and V of which prefix. Never knows sequences or block states.
//!
//! It is a tree over match units. A node stands for a text: its parent's, and the tokens of one unit more. It names at
//! most one block for each group, which holds K and V of that unit and of the units before it in the same page. A
//! block is known by its *tip*: the deepest node that names it; all others that do are above it, in the same page.
//! Keys only lead to nodes: a node is the one looked for when its parent and its tokens are.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::config::EngineConfig;
use crate::error::{Error, Result};
use crate::group::Reach;
use crate::hash::Key;
use crate::ids::BlockId;

const NONE: u32 = u32::MAX;

/// Continuations of a text that are looked at for one that goes on alike for some tokens, the newest first: to look must
/// not take longer the more there are.
pub const CONTINUATIONS: usize = 8;

/// A node, as long as something holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeId(u32);

#[derive(Debug, Clone, Copy)]
struct Node {
    key: Key,
    /// `NONE` at the root.
    parent: u32,
    /// Units before it.
    depth: u32,
    /// Children, blocks that it names, and sequences that stand at it. Without any it goes.
    refs: u32,
    /// The child that was made last, and among the children of its own parent those made right before and after it.
    newest_child: u32,
    older: u32,
    newer: u32,
}

impl Node {
    const VACANT: Self =
        Self { key: 0, parent: NONE, depth: 0, refs: 0, newest_child: NONE, older: NONE, newer: NONE };
}

/// What a key leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// The text looked for.
    Node(NodeId),
    /// Nothing.
    Nothing,
    /// Another text with the same key.
    Collision,
}

/// A beginning of a text that is in the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Hit {
    /// Tokens whose K and V are there, as far as later tokens see them.
    pub tokens: u32,
    /// Units that it was found by: one more than needed, where the one before names no block.
    pub units: u32,
}

/// Keys are hashes already.
#[derive(Debug, Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }

    fn write_u128(&mut self, key: Key) {
        self.0 = key as u64 ^ (key >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(crate) type ByKey<T> = HashMap<Key, T, BuildHasherDefault<KeyHasher>>;

#[derive(Debug)]
pub(crate) struct PrefixIndex {
    match_unit: usize,
    page_size: u32,
    units_per_page: u32,
    reaches: Vec<Reach>,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    /// By node, `match_unit` each.
    tokens: Vec<i32>,
    /// By node, one a group.
    blocks: Vec<u32>,
    /// Roots of nodes without a parent; unlike keys they are never shortened.
    roots: HashMap<u32, Key>,
    by_key: ByKey<u32>,
    /// By block, the deepest node that names it.
    tips: Vec<u32>,
    /// Nodes of the text that was looked up last, and the one of whose unit it has a part.
    path: Vec<u32>,
    part: Option<NodeId>,
    /// Per group, the first page of the unbroken stretch of pages up to the one that is looked at.
    unbroken_from: Vec<u32>,
}

impl PrefixIndex {
    pub fn new(config: &EngineConfig, capacity: u32) -> Self {
        let match_unit = config.match_unit;
        let units_per_page = config.page_size.checked_div(match_unit).unwrap_or(0);
        // So that a full pool of whole pages finds its places made.
        let nodes = (capacity as usize).div_ceil(config.groups.len()) * units_per_page as usize;
        Self {
            match_unit: match_unit as usize,
            page_size: config.page_size,
            units_per_page,
            reaches: config.groups.clone(),
            nodes: Vec::with_capacity(nodes),
            vacant: Vec::with_capacity(nodes),
            tokens: Vec::with_capacity(nodes * match_unit as usize),
            blocks: Vec::with_capacity(nodes * config.groups.len()),
            roots: HashMap::new(),
            by_key: ByKey::with_capacity_and_hasher(nodes, BuildHasherDefault::default()),
            tips: vec![NONE; capacity as usize],
            path: Vec::new(),
            part: None,
            unbroken_from: vec![0; config.groups.len()],
        }
    }

    /// Whether there is a cache at all.
    pub fn is_on(&self) -> bool {
        self.match_unit > 0
    }

    fn num_groups(&self) -> usize {
        self.reaches.len()
    }

    /// Whether some node names that block.
    pub fn knows(&self, block: BlockId) -> bool {
        self.tips.get(block.0 as usize).is_some_and(|&tip| tip != NONE)
    }

    /// The node of a text: of the parent's (or the root's) and the tokens of a unit.
    pub fn find(&self, parent: Option<NodeId>, root: Key, key: Key, tokens: &[i32]) -> Found {
        let Some(&at) = self.by_key.get(&key) else { return Found::Nothing };
        let node = &self.nodes[at as usize];
        let place = at as usize * self.match_unit;
        let same_parent = match parent {
            Some(parent) => node.parent == parent.0,
            None => node.parent == NONE && self.roots.get(&at) == Some(&root),
        };
        if same_parent && self.tokens[place..place + self.match_unit] == *tokens {
            Found::Node(NodeId(at))
        } else {
            Found::Collision
        }
    }

    /// Makes the node of a text. Nothing holds it yet.
    pub fn insert(&mut self, parent: Option<NodeId>, root: Key, key: Key, tokens: &[i32]) -> NodeId {
        let at = self.vacant.pop().unwrap_or_else(|| {
            let at = self.nodes.len() as u32;
            self.nodes.push(Node::VACANT);
            self.tokens.resize(self.tokens.len() + self.match_unit, 0);
            self.blocks.resize(self.blocks.len() + self.num_groups(), NONE);
            at
        });
        let mut node = Node { key, ..Node::VACANT };
        match parent {
            Some(parent) => {
                let above = &mut self.nodes[parent.0 as usize];
                above.refs += 1;
                node.parent = parent.0;
                node.depth = above.depth + 1;
                node.older = std::mem::replace(&mut above.newest_child, at);
                if let Some(older) = self.nodes.get_mut(node.older as usize) {
                    older.newer = at;
                }
            }
            None => {
                self.roots.insert(at, root);
            }
        }
        self.nodes[at as usize] = node;
        let place = at as usize * self.match_unit;
        self.tokens[place..place + self.match_unit].copy_from_slice(tokens);
        let vacant = self.by_key.insert(key, at);
        debug_assert!(vacant.is_none(), "a key leads to one node");
        NodeId(at)
    }

    /// Keeps a node, whatever becomes of its blocks.
    pub fn hold(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].refs += 1;
    }

    /// Ends one [`PrefixIndex::hold`].
    pub fn let_go(&mut self, node: NodeId) {
        self.unref(node.0);
    }

    fn unref(&mut self, mut at: u32) {
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            node.refs -= 1;
            if node.refs > 0 {
                return;
            }
            let Node { key, parent, older, newer, .. } = *node;
            self.by_key.remove(&key);
            if parent == NONE {
                self.roots.remove(&at);
            } else {
                if let Some(older) = self.nodes.get_mut(older as usize) {
                    older.newer = newer;
                }
                match self.nodes.get_mut(newer as usize) {
                    Some(newer) => newer.older = older,
                    None => self.nodes[parent as usize].newest_child = older,
                }
            }
            self.vacant.push(at);
            at = parent;
        }
    }

    /// The block that a node names for a group.
    pub fn block(&self, node: NodeId, group: usize) -> Option<BlockId> {
        let block = self.blocks[node.0 as usize * self.num_groups() + group];
        (block != NONE).then_some(BlockId(block))
    }

    /// Says that a block holds K and V of a node's unit and of those before it in its page, and returns the block that
    /// the node names from now on: that one, or the one that it named before.
    ///
    /// Blocks of which all that is known is in the block returned are known no more; they are put into `redundant`.
    pub fn register(
        &mut self,
        node: NodeId,
        group: usize,
        block: BlockId,
        redundant: &mut Vec<BlockId>,
    ) -> BlockId {
        let num_groups = self.num_groups();
        let place = node.0 as usize * num_groups + group;
        if self.blocks[place] == NONE {
            self.blocks[place] = block.0;
            let Node { depth, .. } = self.nodes[node.0 as usize];
            self.nodes[node.0 as usize].refs += 1;
            // A block that came out of the cache may be named further down already.
            let tip = &mut self.tips[block.0 as usize];
            if self.nodes.get(*tip as usize).is_none_or(|tip| tip.depth < depth) {
                *tip = node.0;
            }
        }
        let fullest = self.blocks[place];
        // Upwards, as far as the fullest is not named yet: whoever is met first at its own tip has nothing that the
        // fullest lacks.
        let mut at = node.0;
        loop {
            let place = at as usize * num_groups + group;
            let named = self.blocks[place];
            if named == fullest && at != node.0 {
                return BlockId(fullest);
            }
            if named == NONE {
                self.blocks[place] = fullest;
                self.nodes[at as usize].refs += 1;
            } else if named != fullest {
                if self.tips[named as usize] == at {
                    self.tips[named as usize] = NONE;
                    redundant.push(BlockId(named));
                }
                if self.tips[named as usize] == NONE {
                    self.blocks[place] = fullest;
                }
            }
            let Node { depth, parent, .. } = self.nodes[at as usize];
            if depth.is_multiple_of(self.units_per_page) {
                return BlockId(fullest);
            }
            at = parent;
        }
    }

    /// Forgets what is in a block.
    pub fn forget(&mut self, block: BlockId) {
        let num_groups = self.num_groups();
        let mut at = std::mem::replace(&mut self.tips[block.0 as usize], NONE);
        while at != NONE {
            let Node { depth, parent, .. } = self.nodes[at as usize];
            let named = &mut self.blocks[at as usize * num_groups..][..num_groups];
            if let Some(named) = named.iter_mut().find(|named| **named == block.0) {
                *named = NONE;
                // What it takes along names no block, so nothing is missed above.
                self.unref(at);
            }
            at = if depth.is_multiple_of(self.units_per_page) { NONE } else { parent };
        }
    }

    /// Forgets everything. Nobody may hold a node.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.vacant.clear();
        self.tokens.clear();
        self.blocks.clear();
        self.roots.clear();
        self.by_key.clear();
        self.look_up_nothing();
        self.tips.fill(NONE);
    }

    /// How much of a text is in the cache, given the keys of its units, and how much that ends with a page; at least one
    /// token is left to compute. Behind whole units that match, a part of one counts too. The nodes they were found by are
    /// kept for [`PrefixIndex::block_of_hit`].
    pub fn longest_hits(&mut self, root: Key, keys: &[Key], text: &[i32]) -> [Hit; 2] {
        let (match_unit, page_size) = (self.match_unit as u32, self.page_size);
        let most = text.len() as u32 - 1;
        let (mut hit, mut whole_pages) = (Hit::default(), Hit::default());
        self.look_up_nothing();
        self.unbroken_from.fill(0);
        let units = text.chunks_exact(self.match_unit.max(1));
        for ((unit, tokens), &key) in (0..).zip(units).zip(keys) {
            let parent = self.path.last().map(|&at| NodeId(at));
            let Found::Node(node) = self.find(parent, root, key, tokens) else { break };
            self.path.push(node.0);
            let end = (unit + 1) * match_unit;
            if end.is_multiple_of(page_size) {
                for group in 0..self.reaches.len() {
                    if self.block(node, group).is_none() {
                        self.unbroken_from[group] = end / page_size;
                    }
                }
            }
            let tokens = end.min(most);
            if tokens > hit.tokens && self.is_there(node, tokens) {
                hit = Hit { tokens, units: unit + 1 };
                if tokens.is_multiple_of(page_size) {
                    whole_pages = hit;
                }
            }
        }
        if let Some((node, tokens)) = self.longest_part(text, most)
            && tokens > hit.tokens
        {
            hit = Hit { tokens, units: self.path.len() as u32 + 1 };
            self.part = Some(node);
        }
        [hit, whole_pages]
    }

    /// Of the continuations of the text that was looked up last, the one that goes on like `text` for the most tokens, if
    /// any does, and how many tokens match in all, at most `most`.
    fn longest_part(&self, text: &[i32], most: u32) -> Option<(NodeId, u32)> {
        let parent = *self.path.last()?;
        let whole = self.path.len() * self.match_unit;
        let rest = &text[whole..(most as usize).max(whole)];
        let mut longest = None;
        let mut at = self.nodes[parent as usize].newest_child;
        for _ in 0..CONTINUATIONS {
            if at == NONE {
                break;
            }
            let tokens = &self.tokens[at as usize * self.match_unit..][..self.match_unit];
            let alike = tokens.iter().zip(rest).take_while(|(one, other)| one == other).count();
            let end = (whole + alike) as u32;
            if alike > 0 && longest.is_none_or(|(_, longest)| end > longest) && self.is_there(NodeId(at), end)
            {
                longest = Some((NodeId(at), end));
            }
            at = self.nodes[at as usize].older;
        }
        longest
    }

    /// Whether all that a query at position `tokens` sees is in blocks, along the path that ends with `node`. Of the page
    /// that is to be continued everything must be there, seen or not: what a node names holds its page from the start.
    fn is_there(&self, node: NodeId, tokens: u32) -> bool {
        let page_size = self.page_size;
        let page = tokens / page_size;
        self.reaches.iter().enumerate().all(|(group, reach)| {
            let first_page = reach.first_seen(tokens) / page_size;
            let whole_pages = first_page >= page || self.unbroken_from[group] <= first_page;
            whole_pages && (tokens.is_multiple_of(page_size) || self.block(node, group).is_some())
        })
    }

    /// The block that a page of a hit in the text that was looked up last lies in; `None` where no later token sees any
    /// of it.
    pub fn block_of_hit(&self, hit: Hit, page: u32, group: usize) -> Option<BlockId> {
        if page < self.reaches[group].first_seen(hit.tokens) / self.page_size {
            return None;
        }
        self.block(self.node_of_last_hit(hit.units.min((page + 1) * self.units_per_page) - 1), group)
    }

    /// The block that a whole page of the text that was looked up last lies in.
    pub fn block_of_page(&self, page: u32, group: usize) -> Option<BlockId> {
        let last = (page + 1) * self.units_per_page;
        if last == 0 || last as usize > self.path.len() {
            return None;
        }
        self.block(self.node_of_last_hit(last - 1), group)
    }

    /// As if a text had been looked up of which nothing is known.
    pub fn look_up_nothing(&mut self) {
        self.path.clear();
        self.part = None;
    }

    /// The node of the `unit`-th unit of the text that was looked up last, of which the last may match in part.
    pub fn node_of_last_hit(&self, unit: u32) -> NodeId {
        match (self.path.get(unit as usize), self.part) {
            (None, Some(part)) => part,
            _ => NodeId(self.path[unit as usize]),
        }
    }

    /// Proves that nodes and blocks agree both ways, given the nodes that sequences hold.
    pub fn check(&self, held: impl Iterator<Item = NodeId>) -> Result<()> {
        let corrupt = |what: String| Err(Error::Corrupt(what));
        let num_groups = self.num_groups();
        let mut refs = vec![0; self.nodes.len()];
        for node in held {
            refs[node.0 as usize] += 1;
        }
        let mut named = vec![(0_u32, NONE, NONE); self.tips.len()];
        let mut listed = 0;
        for &at in self.by_key.values() {
            let node = &self.nodes[at as usize];
            let (mut child, mut newer) = (node.newest_child, NONE);
            while child != NONE {
                let of_child = &self.nodes[child as usize];
                if of_child.parent != at || of_child.newer != newer {
                    return corrupt(format!("node {child} stands in the list of children of {at}"));
                }
                listed += 1;
                (child, newer) = (of_child.older, child);
            }
            if node.parent != NONE {
                refs[node.parent as usize] += 1;
                if self.nodes[node.parent as usize].depth + 1 != node.depth {
                    return corrupt(format!("node {at} is not one deeper than its parent"));
                }
            }
            for group in 0..num_groups {
                let block = self.blocks[at as usize * num_groups + group];
                if block == NONE {
                    continue;
                }
                refs[at as usize] += 1;
                let (count, deepest, of_group) = &mut named[block as usize];
                *count += 1;
                if *of_group != NONE && *of_group != group as u32 {
                    return corrupt(format!("block {block} is named for two groups"));
                }
                *of_group = group as u32;
                if *deepest == NONE || self.nodes[*deepest as usize].depth < node.depth {
                    *deepest = at;
                }
            }
        }
        for &at in self.by_key.values() {
            if self.nodes[at as usize].refs != refs[at as usize] || refs[at as usize] == 0 {
                let counted = self.nodes[at as usize].refs;
                return corrupt(format!(
                    "node {at} counts {counted} references, {} are there",
                    refs[at as usize]
                ));
            }
        }
        if listed + self.roots.len() != self.by_key.len() {
            return corrupt(format!("{listed} nodes are in lists of children, but not all"));
        }
        if self.by_key.len() + self.vacant.len() != self.nodes.len() {
            return corrupt("nodes in use and vacant ones are not all nodes".into());
        }
        for (block, &(count, deepest, group)) in named.iter().enumerate() {
            if self.tips[block] != deepest {
                return corrupt(format!("block {block} has the tip {}, not {deepest}", self.tips[block]));
            }
            // All that name it are above its tip, in its page.
            let (mut at, mut found) = (deepest, 0);
            while at != NONE {
                let Node { depth, parent, .. } = self.nodes[at as usize];
                found += u32::from(self.blocks[at as usize * num_groups + group as usize] == block as u32);
                at = if depth.is_multiple_of(self.units_per_page) { NONE } else { parent };
            }
            if found != count {
                return corrupt(format!("block {block} is named {count} times, {found} of them in its page"));
            }
        }
        Ok(())
    }
}
