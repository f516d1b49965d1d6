//! Queries and keys that attention normalises and rotates itself: alone, together, and beside everything else a config
//! may say.
//!
//! Every case has requests of one and of several query tokens, of none and without keys, an odd group or page size, and
//! slots that hold NaN; some have enough rows for tall items, enough keys for several tiles.

use crate::cases::Case;
use crate::layout::LAYOUTS;
use oxattn::config::AttentionConfig;
use oxattn::{MaskForm, RopeConfig, RopeScaling};

/// What Llama 3.1 does to its frequencies.
pub const LLAMA3: RopeScaling =
    RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, old_context_tokens: 8192 };

type Change = (&'static str, fn(AttentionConfig) -> AttentionConfig);

fn halves(config: AttentionConfig) -> AttentionConfig {
    config.with_rope(RopeConfig::new(config.head_dim))
}

fn neighbours(config: AttentionConfig) -> AttentionConfig {
    config.with_rope(RopeConfig::new(config.head_dim).with_theta(5e5).interleaved())
}

fn normed(config: AttentionConfig) -> AttentionConfig {
    config.with_query_norm(1e-6).with_key_norm(1e-5)
}

/// What is asked of the kernels for each head dim.
const EVERYWHERE: [Change; 8] = [
    ("rope, halves", halves),
    ("rope, neighbours", neighbours),
    ("rope of the first 16 elements, neighbours", |config| {
        config.with_rope(RopeConfig::new(config.head_dim).with_rotary_dim(16).interleaved())
    }),
    ("rope of half of a row, Llama 3.1", |config| {
        let rope = RopeConfig::new(config.head_dim).with_rotary_dim(config.head_dim / 2);
        config.with_rope(rope.with_theta(5e5).with_scaling(LLAMA3))
    }),
    ("norms", normed),
    ("a norm of queries", |config| config.with_query_norm(1e-3)),
    ("norms and rope of 48 elements", |config| {
        normed(config).with_rope(RopeConfig::new(config.head_dim).with_rotary_dim(48))
    }),
    ("rope, windows, a soft cap and sinks", |config| {
        halves(config).with_window(Some(37), None).with_soft_cap(20.0).with_sinks()
    }),
];

/// What is asked of some.
const ELSEWHERE: [Change; 8] = [
    ("a norm of keys", |config| config.with_key_norm(1.0)),
    ("norms and rope, neighbours", |config| normed(neighbours(config))),
    ("rope of positions divided by 4, non-causal", |config| {
        let rope = RopeConfig::new(config.head_dim).with_scaling(RopeScaling::Linear { factor: 4.0 });
        config.with_rope(rope).non_causal()
    }),
    ("rope and a mask", |config| halves(config).non_causal().with_mask(MaskForm::Bits)),
    ("norms, rope, ALiBi and temperatures", |config| normed(halves(config)).with_alibi().with_temperatures()),
    ("rope and sigmoid", |config| halves(config).with_sigmoid(-1.0)),
    ("norms, rope and a window on both sides", |config| {
        normed(neighbours(config)).non_causal().with_window(Some(20), Some(31))
    }),
    ("rope with a scale of its own", |config| halves(config).with_softmax_scale(0.3)),
];

fn base(index: usize, head_dim: u32) -> Case {
    let heads = [(6, 2), (5, 1), (4, 4), (3, 1)][index % 4];
    let page = [5, 16, 1, 3][index / 2 % 4];
    let case = Case::new("", heads, head_dim, page, &[1, 5, 3, 2, 0, 18], &[150, 71, 2, 0, 9, 90]);
    let case = case.layout(LAYOUTS[index % 4]);
    if index.is_multiple_of(2) { case } else { case.f16() }
}

/// The table.
pub fn rotary_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, head_dim) in kernels_gpu::abi::tile::ROTARY_HEAD_DIMS.into_iter().enumerate() {
        for (index, (name, change)) in EVERYWHERE.into_iter().enumerate() {
            cases.push(base(index + turn, head_dim).changed(format!("{name}, head dim {head_dim}"), change));
        }
        let tall = Case::new("", (3, 1), head_dim, 16, &[50, 1, 23], &[80, 40, 23]);
        let name = format!("norms and rope of many rows, head dim {head_dim}");
        cases.push(tall.changed(name, |config| normed(halves(config)).with_sinks()));
    }
    for (index, (name, change)) in ELSEWHERE.into_iter().enumerate() {
        cases.push(base(index, [64, 128, 96, 64][index % 4]).changed(name, change));
        let ragged = base(index + 1, [128, 64, 64, 96][index % 4]).ragged();
        cases.push(ragged.changed(format!("{name}, ragged"), change));
    }
    for page in [1, 5, 16] {
        let lens = Case::new("", (4, 2), 64, page, &[1; 5], &[0, 1, page, page + 1, 3 * page]);
        cases.push(lens.changed(format!("rope, lengths around a page of {page}"), halves));
    }
    positions(&mut cases);
    cases
}

/// Positions of queries that are given: their places, others as far from them in every request, negative ones, far ones.
fn positions(cases: &mut Vec<Case>) {
    let given = |config: AttentionConfig| halves(config).with_rope_positions();
    let neighbours = |config: AttentionConfig| normed(neighbours(config)).with_rope_positions();
    cases.extend([
        base(0, 64).changed("positions that are the places", given),
        base(1, 128)
            .changed("positions apart from the places", given)
            .at_positions(|seed, place| 2 * place + seed as i32),
        base(2, 96).changed("negative positions", neighbours).at_positions(|seed, place| place - 40 * seed as i32 - 3),
        base(3, 128)
            .changed("positions above a million", neighbours)
            .at_positions(|seed, place| 5_000_000 * (seed as i32 + 1) + place),
        base(5, 64).changed("the last positions there are", given).at_positions(|seed, place| match seed % 2 {
            0 => i32::MAX - place.max(0),
            _ => i32::MIN + place.max(0),
        }),
    ]);
    let tall = Case::new("", (2, 1), 128, 16, &[70, 1], &[90, 30]);
    cases.push(tall.changed("positions of many rows", given).at_positions(|_, place| place / 2));
}

/// Requests that share prefixes: those plans for which the position of every row is given.
pub fn rotary_prefix_cases() -> Vec<Case> {
    let shared =
        |name: &str, heads, head_dim, requests: &[(u32, u32, u32)], change: fn(AttentionConfig) -> AttentionConfig| {
            let lens = |of: fn(&(u32, u32, u32)) -> u32| requests.iter().map(of).collect::<Vec<u32>>();
            let mut case = Case::new("", heads, head_dim, 16, &lens(|r| r.0), &lens(|r| r.1));
            case.shared_tokens = lens(|r| r.2);
            case.config = case.config.with_shared_prefixes(2).always_sharing();
            case.changed(name, change)
        };
    let group: Vec<(u32, u32, u32)> =
        (0..7).map(|member| (1 + member % 2, 330 + 7 * member, if member == 0 { 0 } else { 320 })).collect();
    vec![
        shared("a shared prefix, rope", (4, 1), 64, &group, |config| halves(config).with_rope_positions()),
        shared("a shared prefix, norms and rope, sinks", (4, 2), 128, &group, |config| {
            normed(neighbours(config)).with_rope_positions().with_sinks()
        }),
        shared("a shared prefix, norms", (5, 1), 64, &group, normed),
        shared("a shared prefix, norms, wide", (4, 1), 256, &group, |config| normed(config).with_soft_cap(9.0)),
    ]
}
