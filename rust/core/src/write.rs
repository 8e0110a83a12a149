//! Writing a planned step into the arena.

use crate::arena::{ArenaLayout, DRAW_WIDTH, PAIR_WIDTH, ROW_CHANGE_WIDTH, StepShape, TABLE_CHANGE_WIDTH};
use crate::engine::{Arrival, Engine, Flight, Step};
use crate::ids::Slot;
use crate::sequence::{Sampling, Sequence};

/// The sections of an arena that is written row by row.
struct Sections<'a> {
    rows: &'a mut [i32],
    cu_seqlens: &'a mut [i32],
    kv_lens: &'a mut [i32],
    tokens: &'a mut [i32],
    positions: &'a mut [i32],
    write_slots: &'a mut [i32],
    logits_rows: &'a mut [i32],
    draws: &'a mut [i32],
    table_changes: &'a mut [i32],
    row_changes: &'a mut [i32],
    carry_overs: &'a mut [i32],
}

impl<'a> Sections<'a> {
    /// Cuts the arena, which lies in the order of the layout.
    fn cut(mut arena: &'a mut [i32], layout: &ArenaLayout) -> Self {
        let mut cut = |section: &std::ops::Range<usize>| {
            let (cut, rest) = std::mem::take(&mut arena).split_at_mut(section.len());
            arena = rest;
            cut
        };
        Self {
            rows: cut(&layout.rows),
            cu_seqlens: cut(&layout.cu_seqlens),
            kv_lens: cut(&layout.kv_lens),
            tokens: cut(&layout.tokens),
            positions: cut(&layout.positions),
            write_slots: cut(&layout.write_slots),
            logits_rows: cut(&layout.logits_rows),
            draws: cut(&layout.draws),
            table_changes: cut(&layout.table_changes),
            row_changes: cut(&layout.row_changes),
            carry_overs: cut(&layout.carry_overs),
        }
    }
}

/// How far the sections are written.
#[derive(Default)]
struct Written {
    tokens: usize,
    sampled: usize,
    table_changes: usize,
    row_changes: usize,
    carry_overs: usize,
}

impl Engine {
    /// Writes the step into the arena.
    pub(crate) fn write(&mut self, slot: Slot, flight: &Flight, arena: &mut [i32]) -> Step {
        let (num_groups, page_size) = (self.config.groups.len(), self.config.page_size);
        let shape = StepShape {
            rows: flight.entries.len(),
            decodes: flight.decodes,
            tokens: flight.tokens,
            sampled: flight.sampled,
            table_changes: flight.news,
            row_changes: flight.arrivals,
            carry_overs: flight.carry_overs,
            copies: flight.copies.len(),
            swap_outs: flight.swap_outs.len(),
            swap_ins: flight.swap_ins.len(),
        };
        let layout = ArenaLayout::new(&shape, num_groups);
        let to = Sections::cut(arena, &layout);
        let mut at = Written::default();
        to.cu_seqlens[0] = 0;
        for (n, entry) in flight.entries.iter().enumerate() {
            let seq = &mut self.seqs[entry.id];
            let row = seq.row.map_or(0, |row| row.get()) as i32;
            let (start, end, len) = (entry.start, entry.start + entry.len, entry.len as usize);
            to.rows[n] = row;
            to.kv_lens[n] = end as i32;
            let tokens = &mut to.tokens[at.tokens..at.tokens + len];
            let known = (seq.tokens.len() - start as usize).min(len);
            seq.tokens.copy_to(start as usize, &mut tokens[..known]);
            if known < len {
                // One token at most: the step before this one samples it.
                tokens[known] = -1;
                let carry = &mut to.carry_overs[PAIR_WIDTH * at.carry_overs..][..PAIR_WIDTH];
                carry.copy_from_slice(&[
                    (at.tokens + known) as i32,
                    seq.sampled_at[slot.other().index()] as i32,
                ]);
                at.carry_overs += 1;
            }
            let last_page = seq.held - page_size;
            if start >= last_page && len == 1 {
                // Of a decode nothing needs to be divided.
                to.positions[at.tokens] = start as i32;
                for (group, block) in seq.last_page(num_groups).iter().enumerate() {
                    to.write_slots[group * shape.tokens + at.tokens] =
                        (block.get() * page_size + start - last_page) as i32;
                }
            } else {
                for (offset, position) in (start..end).enumerate() {
                    to.positions[at.tokens + offset] = position as i32;
                    let first_block = (position / page_size) as usize * num_groups;
                    for group in 0..num_groups {
                        let block = seq.blocks[first_block + group].get();
                        to.write_slots[group * shape.tokens + at.tokens + offset] =
                            (block * page_size + position % page_size) as i32;
                    }
                }
            }
            at.tokens += len;
            to.cu_seqlens[n + 1] = at.tokens as i32;
            if entry.sampled {
                to.logits_rows[at.sampled] = at.tokens as i32 - 1;
                let draw = &mut to.draws[DRAW_WIDTH * at.sampled..][..DRAW_WIDTH];
                let key = seq.draw_key;
                draw.copy_from_slice(&[key as u32 as i32, (key >> 32) as u32 as i32, end as i32]);
                seq.sampled_at[slot.index()] = at.sampled as u32;
                at.sampled += 1;
            }
            let unsent = seq.news_sent as usize;
            for &place in &seq.news[unsent - entry.news as usize..unsent] {
                let (group, page) = (place as usize % num_groups, place as usize / num_groups);
                let change = &mut to.table_changes[TABLE_CHANGE_WIDTH * at.table_changes..];
                let block = seq.blocks[place as usize].get();
                change[..TABLE_CHANGE_WIDTH].copy_from_slice(&[group as i32, row, page as i32, block as i32]);
                at.table_changes += 1;
            }
            if entry.arrival != Arrival::No {
                let change = &mut to.row_changes[ROW_CHANGE_WIDTH * at.row_changes..][..ROW_CHANGE_WIDTH];
                change.copy_from_slice(&row_change(row, seq));
                at.row_changes += 1;
            }
        }
        let copies = flight.copies.iter().map(|&(from, to)| [from.get(), to.get()]);
        let swap_outs = flight.swap_outs.iter().map(|&(from, to)| [from.get(), to.0]);
        let swap_ins = flight.swap_ins.iter().map(|&(from, to)| [from.0, to.get()]);
        write_pairs(&mut arena[layout.copies.clone()], copies);
        write_pairs(&mut arena[layout.swap_outs.clone()], swap_outs);
        write_pairs(&mut arena[layout.swap_ins.clone()], swap_ins);
        let second_regime = flight.entries.first().is_some_and(|entry| self.seqs[entry.id].second_regime);
        Step { slot, second_regime, shape, layout }
    }
}

fn row_change(row: i32, seq: &Sequence) -> [i32; ROW_CHANGE_WIDTH] {
    let (draws, temperature, top_k, top_p) = match seq.rest.sampling {
        Sampling::Greedy => (0, 1.0, 0, 1.0),
        Sampling::Draw { temperature, top_k, top_p } => (1, temperature, top_k, top_p),
    };
    let top_k = i32::try_from(top_k).unwrap_or(i32::MAX);
    [row, draws, f32::to_bits(temperature) as i32, top_k, f32::to_bits(top_p) as i32]
}

fn write_pairs(section: &mut [i32], pairs: impl Iterator<Item = [u32; PAIR_WIDTH]>) {
    for (place, pair) in section.chunks_exact_mut(PAIR_WIDTH).zip(pairs) {
        place.copy_from_slice(&pair.map(|number| number as i32));
    }
}
