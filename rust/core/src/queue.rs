//! The waiting queue: victims first, then fresh requests; of equals the higher priority, then the older.
//!
//! With fairness between tenants the tenants take turns: whoever was served least, by its weight, is next (virtual token
//! counters; Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Without, all are one tenant.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::config::Fairness;
use crate::ids::SeqId;
use crate::sequence::Sequence;

/// How far behind its head the queue is searched for a request that fits, and how many steps the head may be passed
/// over before nobody younger is admitted.
pub const MAX_PASSED_OVER: u32 = 16;

/// What a generated token counts beside one of the prompt; as in the paper.
const GENERATED: u64 = 2;
/// A token of a tenant of weight 1 in the units that counters count.
const UNIT: f64 = 65_536.0;
/// Tenants that are kept, before those of whom nothing is here are forgotten.
const KEPT_TENANTS: usize = 1024;

/// Where a sequence stands among its likes: by priority, then by first admission (of victims) or arrival.
type Place = (Reverse<i32>, u64);

/// A tenant's place in the list of tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(u32);

#[derive(Debug)]
struct Tenant {
    name: String,
    waiting: BTreeMap<Place, SeqId>,
    /// Sequences that wait or run.
    sequences: u32,
    /// What it was served, by its weight.
    served: u64,
    /// What it was served since the counters were settled.
    unsettled: u64,
    /// What a token costs it.
    cost: u64,
}

/// Sequences without blocks.
#[derive(Debug)]
pub(crate) struct WaitingQueue {
    victims: BTreeMap<Place, SeqId>,
    fresh: usize,
    tenants: Vec<Tenant>,
    by_name: HashMap<String, TenantId>,
    vacant: Vec<TenantId>,
    /// Tenants of whom something fresh waits, the least served first.
    order: BTreeSet<(u64, TenantId)>,
    /// Tenants whose counters are to be settled.
    unsettled: Vec<TenantId>,
    fairness: Fairness,
    /// Names with which those that are away are forgotten.
    most_kept: usize,
}

impl WaitingQueue {
    pub fn new(fairness: Fairness) -> Self {
        Self {
            victims: BTreeMap::new(),
            fresh: 0,
            tenants: Vec::new(),
            by_name: HashMap::new(),
            vacant: Vec::new(),
            order: BTreeSet::new(),
            unsettled: Vec::new(),
            fairness,
            most_kept: KEPT_TENANTS,
        }
    }

    pub fn len(&self) -> usize {
        self.victims.len() + self.fresh
    }

    /// Victims that wait.
    pub fn victims(&self) -> usize {
        self.victims.len()
    }

    /// A sequence of a tenant comes. One that had nothing here has no claim from the time when it was away.
    pub fn arrives(&mut self, name: &str) -> TenantId {
        self.settle();
        let name = if self.fairness.is_on() { name } else { "" };
        let id = self.by_name.get(name).copied().unwrap_or_else(|| self.make(name));
        if self.tenants[id.0 as usize].sequences == 0 {
            let here = self.tenants.iter().filter(|tenant| tenant.sequences > 0);
            let least = here.map(|tenant| tenant.served).min().unwrap_or(0);
            let tenant = &mut self.tenants[id.0 as usize];
            tenant.served = tenant.served.max(least);
        }
        self.tenants[id.0 as usize].sequences += 1;
        id
    }

    fn make(&mut self, name: &str) -> TenantId {
        if self.by_name.len() >= self.most_kept {
            self.forget_idle();
        }
        let tenant = Tenant {
            name: name.to_owned(),
            waiting: BTreeMap::new(),
            sequences: 0,
            served: 0,
            unsettled: 0,
            cost: (UNIT / self.fairness.weight(name)).max(1.0) as u64,
        };
        let id = self.vacant.pop().unwrap_or(TenantId(self.tenants.len() as u32));
        if id.0 as usize == self.tenants.len() {
            self.tenants.push(tenant);
        } else {
            self.tenants[id.0 as usize] = tenant;
        }
        self.by_name.insert(name.to_owned(), id);
        id
    }

    /// Forgets tenants that are away. Those that were served no more than whoever is here lose nothing by it; the others
    /// gain a little, which is the price of not keeping everybody for ever.
    fn forget_idle(&mut self) {
        let (tenants, vacant) = (&self.tenants, &mut self.vacant);
        self.by_name.retain(|_, id| {
            let stays = tenants[id.0 as usize].sequences > 0;
            if !stays {
                vacant.push(*id);
            }
            stays
        });
        self.most_kept = KEPT_TENANTS.max(2 * self.by_name.len());
    }

    /// A sequence of a tenant is gone for good.
    pub fn leaves(&mut self, tenant: TenantId) {
        self.tenants[tenant.0 as usize].sequences -= 1;
    }

    /// A tenant is served at once: the choice of the next to be admitted counts on it.
    pub fn charge(&mut self, tenant: TenantId, prompt_tokens: u32) {
        self.change(tenant, |tenant| tenant.served += u64::from(prompt_tokens) * tenant.cost);
    }

    /// Undoes a charge.
    pub fn refund(&mut self, tenant: TenantId, prompt_tokens: u32) {
        self.change(tenant, |tenant| tenant.served -= u64::from(prompt_tokens) * tenant.cost);
    }

    /// A tenant is served a generated token; counters are settled before the next sequence is admitted.
    pub fn charge_generated(&mut self, tenant: TenantId) {
        if self.fairness.is_on() {
            let charged = &mut self.tenants[tenant.0 as usize];
            if charged.unsettled == 0 {
                self.unsettled.push(tenant);
            }
            charged.unsettled += GENERATED * charged.cost;
        }
    }

    /// Brings the counters up to date.
    pub fn settle(&mut self) {
        while let Some(tenant) = self.unsettled.pop() {
            self.change(tenant, |tenant| tenant.served += std::mem::take(&mut tenant.unsettled));
        }
    }

    fn change(&mut self, id: TenantId, change: impl FnOnce(&mut Tenant)) {
        if !self.fairness.is_on() {
            return;
        }
        let tenant = &mut self.tenants[id.0 as usize];
        let waits = self.order.remove(&(tenant.served, id));
        change(tenant);
        if waits {
            self.order.insert((tenant.served, id));
        }
    }

    pub fn push(&mut self, id: SeqId, seq: &Sequence) {
        let tenant = &mut self.tenants[seq.rest.tenant.0 as usize];
        let stood_there = if seq.rest.admitted > 0 {
            self.victims.insert(place(seq), id)
        } else {
            self.fresh += 1;
            self.order.insert((tenant.served, seq.rest.tenant));
            tenant.waiting.insert(place(seq), id)
        };
        debug_assert!(stood_there.is_none(), "two sequences in one place");
    }

    /// Takes a sequence out, for a row or for good.
    pub fn remove(&mut self, seq: &Sequence) {
        let tenant = &mut self.tenants[seq.rest.tenant.0 as usize];
        let removed = if seq.rest.admitted > 0 {
            self.victims.remove(&place(seq))
        } else {
            self.fresh -= 1;
            let removed = tenant.waiting.remove(&place(seq));
            if tenant.waiting.is_empty() {
                self.order.remove(&(tenant.served, seq.rest.tenant));
            }
            removed
        };
        debug_assert!(removed.is_some(), "it did not wait");
    }

    /// The next candidate for admission after those that were skipped: of the victims only the first, and of the fresh
    /// ones only while no victim waits. Those that are first of their tenants come before any second one.
    pub fn next(&self, skipped: &[SeqId]) -> Option<SeqId> {
        if let Some((_, victim)) = self.victims.first_key_value() {
            return skipped.is_empty().then_some(*victim);
        }
        (0..=skipped.len()).find_map(|nth| {
            let waiting = self.order.iter().map(|(_, tenant)| &self.tenants[tenant.0 as usize].waiting);
            let of_tenants = waiting.filter_map(|waiting| waiting.values().nth(nth));
            of_tenants.copied().find(|id| !skipped.contains(id))
        })
    }

    /// All that wait.
    pub fn ids(&self) -> impl Iterator<Item = SeqId> + '_ {
        let fresh = self.tenants.iter().flat_map(|tenant| tenant.waiting.values());
        self.victims.values().chain(fresh).copied()
    }

    /// Whether counts and orders agree with the sequences that each tenant has.
    pub fn is_sound(&self, sequences: impl Iterator<Item = TenantId>) -> bool {
        let mut counts = vec![0; self.tenants.len()];
        sequences.for_each(|tenant| counts[tenant.0 as usize] += 1);
        let ordered = |id: TenantId, tenant: &Tenant| {
            self.order.contains(&(tenant.served, id)) != tenant.waiting.is_empty()
        };
        let mut tenants = self.tenants.iter().enumerate();
        let waiting: usize = self.tenants.iter().map(|tenant| tenant.waiting.len()).sum();
        let known = self.by_name.iter().all(|(name, id)| self.tenants[id.0 as usize].name == *name);
        waiting == self.fresh
            && known
            && self.order.len() == self.tenants.iter().filter(|tenant| !tenant.waiting.is_empty()).count()
            && tenants
                .all(|(at, tenant)| tenant.sequences == counts[at] && ordered(TenantId(at as u32), tenant))
    }
}

fn place(seq: &Sequence) -> Place {
    let age = if seq.rest.admitted > 0 { seq.rest.admitted } else { seq.rest.arrived };
    (Reverse(seq.rest.priority), age)
}
