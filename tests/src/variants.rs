//! What is not plain attention: windows, soft caps, sinks, ALiBi, temperatures, masks, trees, items, sigmoid.
//!
//! Every case has requests of one and of several query tokens, an odd group or page size, and slots that hold NaN.

use crate::cases::{Case, Values};
use crate::layout::LAYOUTS;
use crate::multi_item::multi_item_cases;
use crate::random::Random;
use oxattn::config::AttentionConfig;
use oxattn::{MaskForm, alibi_slopes, tree_mask};

/// What the variants of a case's config read, as long as the config needs it.
#[derive(Clone, Debug, Default)]
pub struct Modifiers {
    /// Of each query head.
    pub sinks: Vec<f32>,
    /// Of each query head.
    pub slopes: Vec<f32>,
    /// Of each request.
    pub temperatures: Vec<f32>,
    /// Of each request: `[query_len, kv_len]`.
    pub masks: Vec<Vec<bool>>,
    /// Of each element of a query row.
    pub query_norm: Vec<f32>,
    /// Of each element of a key row.
    pub key_norm: Vec<f32>,
    /// Of each query token of the batch.
    pub positions: Vec<i32>,
}

impl Case {
    /// The same case with a config that `change` makes of its own, and what that reads.
    pub fn changed(mut self, name: impl Into<String>, change: impl Fn(AttentionConfig) -> AttentionConfig) -> Case {
        self.name = name.into();
        self.config = change(self.config);
        let (heads, mut random) = (self.config.query_heads, Random::new(11));
        if self.config.sinks {
            self.modifiers.sinks = (0..heads).map(|_| 2.0 * random.normal()).collect();
        }
        if self.config.alibi {
            self.modifiers.slopes = alibi_slopes(heads);
        }
        if self.config.temperatures {
            self.modifiers.temperatures = self.seeds.iter().map(|&seed| 0.5 + 0.4 * seed as f32).collect();
        }
        let mut weights = |asked: bool| match asked {
            true => (0..self.config.head_dim).map(|_| 1.0 + 0.3 * random.normal()).collect(),
            false => Vec::new(),
        };
        self.modifiers.query_norm = weights(self.config.query_norm.is_some());
        self.modifiers.key_norm = weights(self.config.key_norm.is_some());
        if self.config.rope_positions {
            self = self.at_positions(|_, place| place);
        }
        if self.config.mask.is_some() {
            self = self.masked(|seed, token, key| Random::keyed(&[seed, 9, token as u64, key as u64]).below(3) > 0);
        }
        self
    }

    /// The same with other sinks.
    pub fn sinks(mut self, sink: impl Fn(usize) -> f32) -> Case {
        self.modifiers.sinks = (0..self.config.query_heads as usize).map(sink).collect();
        self
    }

    /// The same with query tokens at positions that `position` makes of a request's seed and their places.
    pub fn at_positions(mut self, position: impl Fn(u64, i32) -> i32) -> Case {
        let lens = self.query_lens.iter().zip(&self.kv_lens).zip(&self.seeds);
        let of_request = |((&query_len, &kv_len), &seed): ((&u32, &u32), &u64)| {
            let first = kv_len as i32 - query_len as i32;
            (0..query_len as i32).map(|token| position(seed, first + token)).collect::<Vec<_>>()
        };
        self.modifiers.positions = lens.flat_map(of_request).collect();
        self
    }

    /// The same with other masks: whether, by a request's seed, token and key meet.
    pub fn masked(mut self, mask: impl Fn(u64, u32, u32) -> bool) -> Case {
        let lens = self.query_lens.iter().zip(&self.kv_lens).zip(&self.seeds);
        let elements = |((&query_len, &kv_len), &seed): ((&u32, &u32), &u64)| {
            (0..query_len * kv_len).map(|element| mask(seed, element / kv_len, element % kv_len)).collect()
        };
        self.modifiers.masks = lens.map(elements).collect();
        self
    }
}

/// Odd groups and pages, several tokens, fewer keys than tokens, no keys, no tokens, and enough keys for several tiles.
fn base(index: usize) -> Case {
    let heads = [(6, 2), (5, 1), (8, 8)][index % 3];
    let page = [5, 16, 3, 1][index % 4];
    let case = Case::new("", heads, [64, 80, 128][index / 2 % 3], page, &[1, 5, 3, 2, 0, 18], &[150, 71, 2, 0, 9, 90]);
    let case = case.layout(LAYOUTS[index % 4]);
    if index.is_multiple_of(2) { case } else { case.f16() }
}

/// The table, which [`cases`](crate::cases::cases) ends with.
pub fn variant_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    windows(&mut cases);
    scores(&mut cases);
    masks(&mut cases);
    sigmoids(&mut cases);
    cases.extend(lone_keys(64));
    cases.extend(lone_keys(128));
    together(&mut cases);
    cases
}

fn windows(cases: &mut Vec<Case>) {
    for (index, left) in [0, 1, 5, 6, 40, 64, 1000, u32::MAX].into_iter().enumerate() {
        let name = format!("C3: {left} keys to the left");
        cases.push(base(index).changed(name, |config| config.with_window(Some(left), None)));
    }
    for (index, (left, right)) in [
        (Some(3), Some(0)),
        (Some(0), Some(4)),
        (None, Some(7)),
        (Some(33), None),
        (Some(20), Some(31)),
        (Some(200), Some(200)),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("C1: {left:?} to the left and {right:?} to the right, non-causal");
        cases.push(base(index + 1).changed(name, |config| config.non_causal().with_window(left, right)));
    }
    let name = "a right window does not lift the causal rule";
    cases.push(base(2).changed(name, |config| config.with_window(Some(30), Some(9))));
    let long = Case::new("", (8, 2), 128, 16, &[300], &[400]);
    cases.push(long.changed("C1: 300 tokens, non-causal, 133 to the left", |config| {
        config.non_causal().with_window(Some(133), None)
    }));
}

fn scores(cases: &mut Vec<Case>) {
    for (index, cap) in [0.5, 1.0, 5.0, 30.0, 50.0, 1e-6, 1e9].into_iter().enumerate() {
        cases.push(base(index).changed(format!("soft cap {cap}"), |config| config.with_soft_cap(cap)));
    }
    let far = Case::new("", (8, 2), 128, 16, &[1, 3], &[5, 70]).values(Values::ExtremeNegative);
    cases.push(far.changed("C9: a cap of 50 far below it", |config| config.with_soft_cap(50.0)));
    let sinks = |index: usize, name: &str, sink: &dyn Fn(usize) -> f32| {
        base(index).changed(name, AttentionConfig::with_sinks).sinks(sink)
    };
    cases.extend([
        base(0).changed("C9: sinks", AttentionConfig::with_sinks),
        sinks(1, "C9: sinks, one of them -inf", &|head| if head == 1 { f32::NEG_INFINITY } else { 1.0 }),
        sinks(2, "C9: sinks that leave the keys nothing", &|_| 1e4),
        sinks(3, "C9: sinks far down", &|_| -1e4),
        sinks(4, "C9: no sink at all", &|_| f32::NEG_INFINITY),
        sinks(5, "C9: a sink of 2", &|_| 2.0),
    ]);
    let window = |config: AttentionConfig| config.with_sinks().with_window(Some(10), None);
    let c9 = Case::new("", (4, 2), 64, 16, &[1, 2, 1], &[300, 300, 0]);
    cases.push(c9.changed("C9: a sink, and pieces that see no key", window).sinks(|_| 2.0));
    for index in 0..3 {
        cases.push(base(index).changed("ALiBi", AttentionConfig::with_alibi));
        cases.push(base(index + 3).changed("ALiBi, non-causal", |config| config.non_causal().with_alibi()));
        cases.push(base(index + 1).changed("temperatures", AttentionConfig::with_temperatures));
    }
}

fn masks(cases: &mut Vec<Case>) {
    for form in [MaskForm::Bits, MaskForm::Bytes] {
        let with_mask = |config: AttentionConfig| config.non_causal().with_mask(form);
        let masked = |index: usize, name: &str| base(index).changed(format!("C10: {name}, {form:?}"), with_mask);
        cases.extend([
            masked(0, "any mask"),
            masked(1, "any mask"),
            masked(2, "a row of zeros").masked(|_, token, key| token != 1 && key % 3 != 0),
            masked(3, "nothing at all").masked(|_, _, _| false),
            masked(4, "everything").masked(|_, _, _| true),
        ]);
        let small = Case::new("", (4, 2), 64, 16, &[3, 1, 3], &[5, 7, 5]);
        cases.push(small.changed(format!("C10: 15 elements, {form:?}"), with_mask));
        let causal = |config: AttentionConfig| config.with_mask(form);
        cases.push(base(5).changed(format!("a mask and the causal rule, {form:?}"), causal));
        let windowed = |config: AttentionConfig| config.with_mask(form).with_window(Some(20), None);
        cases.push(base(6).changed(format!("a mask and a window, {form:?}"), windowed));
    }
    let trees: [&[Option<u32>]; 3] = [
        &[None, Some(0), Some(0), Some(1), Some(1), Some(2), Some(5)],
        &[None, None, Some(0), Some(1)],
        &[None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(5), Some(6), Some(7), Some(8)],
    ];
    let kv_lens = [150, 4, 75];
    let lens = trees.map(|parents| parents.len() as u32);
    let case = Case::new("", (6, 2), 128, 5, &lens, &kv_lens);
    let mut case = case.changed("trees of draft tokens", |config| config.with_mask(MaskForm::Bits));
    case.modifiers.masks =
        trees.iter().zip(kv_lens).map(|(parents, kv_len)| tree_mask(parents, kv_len).unwrap()).collect();
    cases.push(case);
    cases.extend(multi_item_cases());
}

fn sigmoids(cases: &mut Vec<Case>) {
    for (index, bias) in [0.0, -5.0, 1.5].into_iter().enumerate() {
        cases.push(base(index).changed(format!("sigmoid, bias {bias}"), |config| config.with_sigmoid(bias)));
    }
    let all = |config: AttentionConfig| {
        let config = config.with_sigmoid(-1.0).with_window(Some(40), None).with_mask(MaskForm::Bits);
        config.with_soft_cap(3.0).with_alibi().with_temperatures()
    };
    cases.push(base(3).changed("sigmoid with all the rest", all));
}

/// Rows that see one key or two, whose weight is not 1: what bf16 rounds of it is off in all of an output. Enough rows for
/// weights just above a power of two, which round worst.
fn lone_keys(head_dim: u32) -> [Case; 4] {
    let rows = |name: &str, change: &dyn Fn(AttentionConfig) -> AttentionConfig| {
        let case = Case::new("", (16, 2), head_dim, 5, &[33, 1, 16], &[40, 9, 70]);
        case.changed(format!("{name}, head dim {head_dim}"), change)
    };
    [
        rows("sinks beside a key a row", &|config| config.with_sinks().with_window(Some(0), None)),
        rows("sinks beside two keys a row", &|config| config.with_sinks().with_window(Some(1), None)),
        rows("the sigmoid of a key a row", &|config| config.with_sigmoid(-0.3).with_window(Some(0), None)),
        rows("sinks beside the last keys", &|config| config.non_causal().with_sinks().with_window(Some(0), None)),
    ]
}

fn together(cases: &mut Vec<Case>) {
    let all = |config: AttentionConfig| {
        let config = config.with_window(Some(37), Some(3)).with_mask(MaskForm::Bits).with_soft_cap(20.0);
        config.with_alibi().with_sinks().with_temperatures()
    };
    for index in 0..4 {
        cases.push(base(index).changed("all together", all));
        cases.push(base(index).changed("all together, non-causal", |config| all(config.non_causal())));
    }
    for head_dim in kernels_gpu::abi::tile::ATTEND_HEAD_DIMS {
        let case = Case::new("", (6, 2), head_dim, 5, &[1, 3], &[75, 40]);
        cases.push(case.changed(format!("all together, head dim {head_dim}"), all));
    }
}
