//! Paged attention against its formula in fp64, over random steps: every shape, stride, window, page size and dtype,
//! with everything that is not to be read poisoned or out of reach.

use chairlift_core::Reach;
use chairlift_kernels::attention::{Call, NewRows, PagedAttention, Pages, Rows, StepRows, Table};
use chairlift_kernels::element::Dtype;
use chairlift_kernels::isa::Isa;
use chairlift_kernels::team::Team;
use proptest::prelude::*;

mod common;

use common::{Noise, Tensor, cases};

/// One sequence of a step.
#[derive(Clone, Debug)]
struct Sequence {
    /// Tokens before the step.
    context: usize,
    /// Tokens of the step.
    new: usize,
    /// How many of its first pages are those of the sequence before, as far as both have them whole.
    shared_pages: usize,
}

#[derive(Clone, Debug)]
struct Story {
    sequences: Vec<Sequence>,
    page_size: usize,
    kv_heads: usize,
    group: usize,
    size: usize,
    size_v: usize,
    reach: Reach,
    dtype: Dtype,
    softcap: Option<f32>,
    sinks: bool,
    padding: usize,
    token_major: bool,
    at_end: bool,
    threads: usize,
    seed: u64,
}

fn stories() -> impl Strategy<Value = Story> {
    let decode = (0_usize..600, 0_usize..40).prop_map(|(context, shared_pages)| Sequence {
        context,
        new: 1,
        shared_pages,
    });
    let prefill = (prop_oneof![Just(0_usize), 0_usize..300], 1_usize..180, 0_usize..40)
        .prop_map(|(context, new, shared_pages)| Sequence { context, new, shared_pages });
    let reach = prop_oneof![
        2 => Just(Reach::Full),
        1 => (1_u32..150).prop_map(Reach::Window),
        1 => (1_u32..150).prop_map(Reach::Chunk),
    ];
    let size =
        prop_oneof![3 => Just(64_usize), 1 => Just(16), 1 => Just(128), 1 => Just(256), 2 => 1_usize..200];
    let shape =
        (1_usize..4, prop_oneof![3 => 1_usize..5, 1 => 5_usize..12], size.clone(), size, any::<bool>());
    let form = (
        prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)],
        prop::option::weighted(0.3, 1.0_f32..60.0),
        prop::bool::weighted(0.3),
        0_usize..3,
        any::<bool>(),
        any::<bool>(),
        1_usize..4,
        any::<u64>(),
    );
    (
        prop::collection::vec(decode, 0..8),
        prop::collection::vec(prefill, 0..3),
        prop_oneof![Just(1_usize), Just(3), Just(16), Just(64), Just(256), 2_usize..100],
        reach,
        shape,
        form,
    )
        .prop_filter("a step has rows", |(decodes, prefills, ..)| !decodes.is_empty() || !prefills.is_empty())
        .prop_map(|(mut sequences, prefills, page_size, reach, shape, form)| {
            sequences.extend(prefills);
            let (kv_heads, group, size, other, alike) = shape;
            let (dtype, softcap, sinks, padding, token_major, at_end, threads, seed) = form;
            Story {
                sequences,
                page_size,
                kv_heads,
                group,
                size,
                size_v: if alike { size } else { other },
                reach,
                dtype,
                softcap,
                sinks,
                padding,
                token_major,
                at_end,
                threads,
                seed,
            }
        })
}

/// Index of a row of [heads, tokens, size], either way around.
fn index_of(token_major: bool, heads: usize, tokens: usize, size: usize) -> (usize, usize) {
    if token_major { (heads * size, size) } else { (size, tokens * size) }
}

fn rows(tensor: &Tensor, story: &Story, heads: usize, tokens: usize, size: usize) -> Rows {
    let (token_stride, head_stride) = index_of(story.token_major, heads, tokens, size);
    Rows { data: tensor.memory.data(), heads, tokens, size, token_stride, head_stride }
}

fn check(story: &Story, isa: Isa, team: Team) {
    let mut noise = Noise(story.seed);
    let page_size = story.page_size;
    let heads = story.kv_heads * story.group;
    // Tables: blocks in an order of no meaning, block 0 left out as nobody's.
    let mut tables: Vec<Vec<usize>> = Vec::new();
    let mut next_block = 1;
    for (index, sequence) in story.sequences.iter().enumerate() {
        let len = sequence.context + sequence.new;
        let mut table: Vec<usize> = Vec::new();
        if index > 0 {
            let whole = (story.sequences[index - 1].context / page_size).min(sequence.context / page_size);
            table.extend(&tables[index - 1][..whole.min(sequence.shared_pages)]);
        }
        while table.len() * page_size < len {
            table.push(next_block);
            next_block += 1;
        }
        tables.push(table);
    }
    let blocks = next_block;
    let shuffled = |block: usize| (block * 7919) % next_prime(blocks);
    let blocks = next_prime(blocks);
    for table in &mut tables {
        for block in table {
            *block = shuffled(*block);
        }
    }
    let new_tokens: usize = story.sequences.iter().map(|sequence| sequence.new).sum();
    let tokens = new_tokens + story.padding;

    // K and V of each block, in pages with a gap between them: [blocks, K page | V page | gap].
    let (k_page, v_page) =
        (page_size * story.kv_heads * story.size, page_size * story.kv_heads * story.size_v);
    let block_stride = k_page + v_page + 5;
    let mut pool = Tensor::new(blocks * block_stride - 5, story.dtype, story.at_end);
    let place = |sequence: usize, position: usize, head: usize| {
        let at = tables[sequence][position / page_size] * block_stride;
        let in_page = (position % page_size) * story.kv_heads + head;
        (at + in_page * story.size, at + k_page + in_page * story.size_v)
    };
    let mut k_new = Tensor::new(
        new_tokens.max(1) * story.kv_heads * story.size + story.padding * story.kv_heads * story.size,
        story.dtype,
        story.at_end,
    );
    let mut v_new = Tensor::new(tokens * story.kv_heads * story.size_v, story.dtype, story.at_end);
    let mut query = Tensor::new(tokens * heads * story.size, story.dtype, story.at_end);
    let mut out = Tensor::new(tokens * heads * story.size_v, story.dtype, story.at_end);
    let lens: Vec<usize> = story.sequences.iter().map(|sequence| sequence.context + sequence.new).collect();
    let zeros =
        |size: usize| lens.iter().map(|len| vec![0.0_f64; len * story.kv_heads * size]).collect::<Vec<_>>();
    let (mut k_of, mut v_of) = (zeros(story.size), zeros(story.size_v));
    let mut q_of = vec![0.0_f64; tokens * heads * story.size];
    let row_of = |position: usize, head: usize, size: usize| (position * story.kv_heads + head) * size;
    let mut token = 0;
    let (mut cu_seqlens, mut kv_lens, mut slots) = (vec![0], Vec::new(), Vec::new());
    for (index, sequence) in story.sequences.iter().enumerate() {
        for position in 0..sequence.context + sequence.new {
            let is_new = position >= sequence.context;
            // What no query of the step sees is never read, and stays NaN.
            let visible = position >= story.reach.first_seen(sequence.context as u32) as usize;
            for head in 0..story.kv_heads {
                let (at_k, at_v) = place(index, position, head);
                for at in 0..story.size {
                    let value = noise.next();
                    let value = if is_new {
                        let (token_stride, head_stride) =
                            index_of(story.token_major, story.kv_heads, tokens, story.size);
                        k_new.set(token * token_stride + head * head_stride + at, value)
                    } else if pool.get(at_k + at).is_nan() {
                        if !visible {
                            continue;
                        }
                        pool.set(at_k + at, value)
                    } else {
                        pool.get(at_k + at)
                    };
                    k_of[index][row_of(position, head, story.size) + at] = value;
                }
                for at in 0..story.size_v {
                    let value = noise.next();
                    let value = if is_new {
                        let (token_stride, head_stride) =
                            index_of(story.token_major, story.kv_heads, tokens, story.size_v);
                        v_new.set(token * token_stride + head * head_stride + at, value)
                    } else if pool.get(at_v + at).is_nan() {
                        if !visible {
                            continue;
                        }
                        pool.set(at_v + at, value)
                    } else {
                        pool.get(at_v + at)
                    };
                    v_of[index][row_of(position, head, story.size_v) + at] = value;
                }
            }
            if is_new {
                for head in 0..heads {
                    for at in 0..story.size {
                        let (token_stride, head_stride) =
                            index_of(story.token_major, heads, tokens, story.size);
                        let value =
                            query.set(token * token_stride + head * head_stride + at, 3.0 * noise.next());
                        q_of[(token * heads + head) * story.size + at] = value;
                    }
                }
                slots.push((tables[index][position / page_size] * page_size + position % page_size) as i32);
                token += 1;
            }
        }
        cu_seqlens.push(token as i32);
        kv_lens.push((sequence.context + sequence.new) as i32);
    }
    slots.extend(vec![0; story.padding]);
    let width = tables.iter().map(Vec::len).max().unwrap_or(0);
    let table: Vec<i32> = tables
        .iter()
        // Beyond a row's own pages any number stands.
        .flat_map(|table| {
            table.iter().map(|&block| block as i32).chain(std::iter::repeat(i32::MAX)).take(width)
        })
        .collect();
    let sinks: Option<Vec<f32>> = story.sinks.then(|| (0..heads).map(|_| 2.0 * noise.next()).collect());
    let scale = 1.0 / (story.size as f32).sqrt();

    let reaches = [story.reach];
    let mut attention = PagedAttention::new(page_size, &reaches, isa, team).expect("this machine has it");
    let decodes = story.sequences.iter().take_while(|sequence| sequence.new == 1).count();
    let step = StepRows { cu_seqlens: &cu_seqlens, kv_lens: &kv_lens, decodes };
    attention.begin(step, &[(Table { blocks: &table, pages: width }, &slots)]).expect("a whole step");
    let pages = |offset: usize, size: usize| Pages {
        // SAFETY: within the pool, which has at least one block.
        data: unsafe { pool.memory.data().add(offset * story.dtype.bytes()) },
        blocks,
        page_size,
        kv_heads: story.kv_heads,
        block_stride,
        token_stride: story.kv_heads * size,
        head_stride: size,
        size,
    };
    let call = Call {
        dtype: story.dtype,
        k_pages: pages(0, story.size),
        v_pages: pages(k_page, story.size_v),
        new: Some(NewRows {
            k: rows(&k_new, story, story.kv_heads, tokens, story.size),
            v: rows(&v_new, story, story.kv_heads, tokens, story.size_v),
        }),
        query: rows(&query, story, heads, tokens, story.size),
        out: rows(&out, story, heads, tokens, story.size_v),
        scale,
        softcap: story.softcap,
        sinks: sinks.as_deref(),
    };
    // SAFETY: the tensors above.
    unsafe { attention.attend(0, &call, story.threads) }.expect("a call that fits");

    let tolerance = match story.dtype {
        Dtype::F32 => 2e-5,
        Dtype::Bf16 => 1.0 / 128.0,
        Dtype::F16 => 1.0 / 1024.0,
    };
    let (token_stride, head_stride) = index_of(story.token_major, heads, tokens, story.size_v);
    let mut token = 0;
    for (index, sequence) in story.sequences.iter().enumerate() {
        for position in sequence.context..sequence.context + sequence.new {
            let seen = story.reach.first_seen(position as u32) as usize..position + 1;
            for head in 0..heads {
                let kv_head = head / story.group;
                let query = &q_of[(token * heads + head) * story.size..][..story.size];
                let mut scores: Vec<f64> = seen
                    .clone()
                    .map(|key| {
                        let key = &k_of[index][row_of(key, kv_head, story.size)..][..story.size];
                        let product: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                        let score = product * f64::from(scale);
                        story.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                    })
                    .collect();
                let sink = sinks.as_ref().map(|sinks| f64::from(sinks[head]));
                let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                for score in &mut scores {
                    *score = (*score - largest).exp();
                }
                let sum: f64 = scores.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
                let mut sums = vec![0.0; story.size_v];
                for (key, weight) in seen.clone().zip(&scores) {
                    let value = &v_of[index][row_of(key, kv_head, story.size_v)..][..story.size_v];
                    sums.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
                }
                for (at, weighted) in sums.into_iter().enumerate() {
                    let right = weighted / sum;
                    let got = out.get(token * token_stride + head * head_stride + at);
                    assert!(
                        (got - right).abs() <= tolerance * (1.0 + right.abs()),
                        "{isa}: token {token} head {head} element {at}: {got}, not {right}"
                    );
                }
            }
            token += 1;
        }
    }
    for token in new_tokens..tokens {
        for head in 0..heads {
            for at in 0..story.size_v {
                assert_eq!(out.get(token * token_stride + head * head_stride + at), 0.0, "padding");
            }
        }
    }
    // What was written is in the pages, bit for bit.
    for (index, sequence) in story.sequences.iter().enumerate() {
        for position in sequence.context..sequence.context + sequence.new {
            for head in 0..story.kv_heads {
                let (at_k, at_v) = place(index, position, head);
                for at in 0..story.size {
                    assert_eq!(pool.get(at_k + at), k_of[index][row_of(position, head, story.size) + at]);
                }
                for at in 0..story.size_v {
                    assert_eq!(pool.get(at_v + at), v_of[index][row_of(position, head, story.size_v) + at]);
                }
            }
        }
    }
}

fn next_prime(from: usize) -> usize {
    // 7919 is prime itself, so that a step through a prime number of blocks meets each once.
    (from.max(2)..)
        .find(|&n| n != 7919 && (2..n).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d)))
        .expect("there are enough")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(120)))]

    #[test]
    fn every_step_gives_what_the_formula_gives(story in stories()) {
        for isa in Isa::available() {
            check(&story, isa, Team::of_process());
        }
    }
}
