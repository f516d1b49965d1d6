//! The table of attention cases: every executor runs all it can afford of it.
//!
//! Names beginning with a letter and a number are faults found in other libraries' public trackers, reduced.

use crate::layout::{LAYOUTS, Layout};
use crate::variants::{Modifiers, variant_cases};
use kernels_gpu::abi::tile::ATTEND_HEAD_DIMS;
use oxattn::MaskForm;
use oxattn::config::{AttentionConfig, DType};

/// One batch.
#[derive(Clone, Debug)]
pub struct Case {
    /// Says what it is about.
    pub name: String,
    /// Heads, dims, dtype, mask.
    pub config: AttentionConfig,
    /// New tokens of each request.
    pub query_lens: Vec<u32>,
    /// Cached tokens of each request.
    pub kv_lens: Vec<u32>,
    /// Where the cache's rows lie.
    pub layout: Layout,
    /// What queries, keys and values are.
    pub values: Values,
    /// What the slots hold that no request owns.
    pub unused: Unused,
    /// Which pages the requests own.
    pub pages: Pages,
    /// Elements from a query token to the next where they are part of a wider matrix.
    pub query_row_elements: Option<usize>,
    /// What each request's numbers depend on, besides heads, dims and positions.
    pub seeds: Vec<u64>,
    /// Leading keys that each request has in common with the one before it: in the same pages as far as these hold nothing
    /// else, else in copies. Empty where the table says nothing.
    pub shared_tokens: Vec<u32>,
    /// What the config's variants read.
    pub modifiers: Modifiers,
}

/// What queries, keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Normal numbers.
    Normal,
    /// Queries of 0, so that every visible key weighs the same.
    ZeroQuery,
    /// Queries of 64, keys of -64, values of 1: raw scores of `-4096 * head_dim`, finite and far down.
    ExtremeNegative,
}

/// What unused slots and padding hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unused {
    /// A large number, in K and V.
    Large,
    /// NaN in K.
    NanKeys,
    /// NaN in V.
    NanValues,
    /// NaN in both.
    Nan,
}

/// Which pages the requests own, or, of ragged keys and values, which rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Their own, scattered over a pool with pages to spare; ragged, with rows between them that none owns.
    Scattered,
    /// Ragged only: one after another.
    Adjacent,
    /// Their own, and each list is one page longer than its tokens need.
    OneTooMany,
    /// All the same ones.
    Shared,
    /// Their own, with ids from [`HIGH_PAGE`] on, or rows from [`HIGH_ROW`] on after a request without keys. The cache's view begins that many pages before the memory, so an
    /// executor that moves addresses region by region cannot run it.
    HighIds,
}

/// Pages of 32 KiB before this one are 8 GiB, 2^32 elements of 2 bytes.
pub const HIGH_PAGE: u32 = 262_144;
/// Rows of 512 bytes before this one are 8 GiB.
pub const HIGH_ROW: u32 = 1 << 24;

impl Case {
    pub(crate) fn new(
        name: impl Into<String>,
        (query_heads, kv_heads): (u32, u32),
        head_dim: u32,
        page_size_tokens: u32,
        query_lens: &[u32],
        kv_lens: &[u32],
    ) -> Case {
        Case {
            name: name.into(),
            config: AttentionConfig::new(query_heads, kv_heads, head_dim, page_size_tokens),
            query_lens: query_lens.to_vec(),
            kv_lens: kv_lens.to_vec(),
            layout: Layout::Nhd,
            values: Values::Normal,
            unused: Unused::Nan,
            pages: Pages::Scattered,
            query_row_elements: None,
            seeds: (0..kv_lens.len() as u64).collect(),
            shared_tokens: Vec::new(),
            modifiers: Modifiers::default(),
        }
    }

    /// The same batch with ragged keys and values.
    pub fn ragged(mut self) -> Case {
        let AttentionConfig { query_heads, kv_heads, head_dim, .. } = self.config;
        let AttentionConfig { page_size_tokens, ragged, .. } = AttentionConfig::ragged(query_heads, kv_heads, head_dim);
        (self.config.page_size_tokens, self.config.ragged) = (page_size_tokens, ragged);
        self
    }

    /// The same batch with values of another head dim.
    pub(crate) fn values_of(mut self, value_head_dim: u32) -> Case {
        self.config = self.config.with_value_head_dim(value_head_dim);
        self
    }

    pub(crate) fn f16(mut self) -> Case {
        self.config = self.config.with_dtype(DType::F16);
        self
    }

    fn dtype(mut self, dtype: DType) -> Case {
        self.config = self.config.with_dtype(dtype);
        self
    }

    pub(crate) fn non_causal(mut self) -> Case {
        self.config = self.config.non_causal();
        self
    }

    pub(crate) fn layout(self, layout: Layout) -> Case {
        Case { layout, ..self }
    }

    pub(crate) fn values(self, values: Values) -> Case {
        Case { values, ..self }
    }

    pub(crate) fn unused(self, unused: Unused) -> Case {
        Case { unused, ..self }
    }

    pub(crate) fn pages(self, pages: Pages) -> Case {
        Case { pages, ..self }
    }

    /// Multiplications of one product, an upper bound: what a slow executor chooses by.
    pub fn cost(&self) -> u64 {
        let pairs: u64 = self.query_lens.iter().zip(&self.kv_lens).map(|(&q, &kv)| q as u64 * kv as u64).sum();
        pairs * self.config.query_heads as u64 * self.config.head_dim as u64
    }

    /// Tiles of 16 rows times their keys and elements, with two tiles of 64 keys for what every item costs: what the
    /// emulator chooses by, which takes about a second for 8 million.
    pub fn tile_cost(&self) -> u64 {
        let tiles = |query_len: u32| (query_len * self.config.group()).div_ceil(16) as u64;
        let lens = self.query_lens.iter().zip(&self.kv_lens);
        let keys: u64 = lens.map(|(&query_len, &kv_len)| tiles(query_len) * (kv_len as u64 + 128)).sum();
        keys * self.config.kv_heads as u64 * self.config.head_dim as u64
    }

    /// First query token of each request, and their total.
    pub fn query_begin(&self) -> Vec<u32> {
        let sums = self.query_lens.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        });
        std::iter::once(0).chain(sums).collect()
    }
}

/// The table.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    lengths_around_a_page(&mut cases);
    groups(&mut cases);
    head_dims(&mut cases);
    cases.extend(padded_head_dims());
    decode_grid(&mut cases);
    several_tokens(&mut cases);
    field_cases(&mut cases);
    ragged(&mut cases);
    scales(&mut cases);
    cases.extend(variant_cases());
    cases
}

/// Scales that are not positive: the largest score is then not the largest logit. And one that is large.
fn scales(cases: &mut Vec<Case>) {
    for scale in [-0.3, 0.0, 1.0] {
        let mut case = Case::new(format!("softmax scale {scale}"), (4, 2), 64, 16, &[1, 9, 40], &[40, 25, 70]);
        case.config = case.config.with_softmax_scale(scale);
        cases.push(case);
    }
}

fn lengths_around_a_page(cases: &mut Vec<Case>) {
    for (index, page) in [1u32, 2, 3, 5, 16, 64, 1000].into_iter().enumerate() {
        let kv_lens = [0, 1, page - 1, page, page + 1, 3 * page];
        let name = format!("lengths around a page of {page}");
        let dtype = if index % 2 == 0 { DType::Bf16 } else { DType::F16 };
        cases.push(Case::new(name, (8, 2), 64, page, &[1; 6], &kv_lens).layout(LAYOUTS[index % 4]).dtype(dtype));
    }
}

fn groups(cases: &mut Vec<Case>) {
    let heads = [(5, 1), (40, 8), (24, 4), (28, 4), (36, 3), (28, 1), (64, 4), (64, 1), (71, 1), (71, 71), (128, 1)];
    for (index, heads) in heads.into_iter().enumerate() {
        let name = format!("D1: {} query heads on {} KV heads", heads.0, heads.1);
        cases.push(Case::new(name, heads, 128, 16, &[1, 3], &[35, 20]).layout(LAYOUTS[index % 4]));
    }
}

fn head_dims(cases: &mut Vec<Case>) {
    for (index, head_dim) in ATTEND_HEAD_DIMS.into_iter().enumerate() {
        for dtype in [DType::Bf16, DType::F16] {
            let name = format!("D3: head dim {head_dim}, {dtype}");
            let case = Case::new(name, (6, 2), head_dim, 5, &[1, 5], &[33, 17]);
            cases.push(case.layout(LAYOUTS[(index + 1) % 4]).dtype(dtype));
        }
        let name = format!("D3: head dim {head_dim}, several tiles");
        cases.push(Case::new(name, (2, 1), head_dim, 16, &[1, 9], &[450, 150]).layout(LAYOUTS[index % 4]));
    }
}

/// Head dims of queries and keys and of values that differ, or that no kernel has: decodes, a few tokens and a prompt, in
/// pages and ragged, plain and with what a variant does. What follows a row is another head's or, in
/// [`Layout::Padded`] and behind a token's last query, NaN.
pub fn padded_head_dims() -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, [head_dim, value_head_dim]) in [
        [192, 128],
        [128, 64],
        [64, 128],
        [96, 96],
        [72, 72],
        [40, 24],
        [16, 16],
        [8, 8],
        [8, 136],
        [176, 40],
        [200, 248],
        [320, 256],
        [512, 512],
    ]
    .into_iter()
    .enumerate()
    {
        let of = |what: &str, heads: (u32, u32), query_lens: &[u32], kv_lens: &[u32]| {
            let name = format!("head dims {head_dim} and {value_head_dim}, {what}");
            let case = Case::new(name, heads, head_dim, [5, 16][index % 2], query_lens, kv_lens);
            // Behind the queries of a token lies something else.
            let query_row_elements = Some((heads.0 * head_dim + 8) as usize);
            Case { query_row_elements, ..case }.values_of(value_head_dim).layout(LAYOUTS[index % 4])
        };
        let prompt = of("a prompt", (2, 1), &[1, 5, 40], &[33, 17, 75]);
        cases.push(prompt.clone().layout(Layout::Padded));
        cases.push(prompt.f16().ragged());
        let decode = of("decodes", (6, 2), &[1, 1, 1], &[150, 0, 64]);
        cases.push(decode.clone().layout(Layout::Padded).f16());
        cases.push(Case { name: format!("{}, ragged", decode.name), ..decode.ragged().layout(Layout::Padded) });
        let changed = |config: AttentionConfig| config.with_window(Some(30), None).with_sinks().with_soft_cap(20.0);
        let changed = of("", (3, 1), &[1, 30], &[70, 40])
            .changed(format!("head dims {head_dim} and {value_head_dim}, a window, sinks and a soft cap"), changed);
        cases.push(changed);
    }
    cases
}

/// FlashInfer's `test_batch_decode_kernels.py`, thinned: every pair of (length, page) with both head counts, batch
/// and head dim taken in turn.
fn decode_grid(cases: &mut Vec<Case>) {
    let mut turn = 0;
    for kv_len in [54, 97, 512] {
        for page in [1, 8, 16] {
            for query_heads in [4, 32] {
                let batch = [12, 17][turn % 2];
                let head_dim = if kv_len == 512 { [128, 256] } else { [128, 512] }[turn / 2 % 2];
                let name = format!("decode {batch} x {kv_len}, page {page}, {query_heads}/4 heads, dim {head_dim}");
                let case = Case::new(name, (query_heads, 4), head_dim, page, &vec![1; batch], &vec![kv_len; batch]);
                cases.push(case.f16().layout(LAYOUTS[turn % 4]).unused(Unused::Large));
                turn += 1;
            }
        }
    }
}

fn several_tokens(cases: &mut Vec<Case>) {
    let (query_lens, kv_lens) = ([2, 3, 8, 4, 1, 3, 40], [40, 3, 8, 2, 0, 0, 150]);
    for (heads, page) in [((8, 2), 16), ((5, 1), 3)] {
        let case = Case::new(format!("several tokens, {heads:?}"), heads, 64, page, &query_lens, &kv_lens);
        cases.push(case.clone());
        cases.push(Case { name: format!("{}, non-causal", case.name), ..case.non_causal().f16() });
    }
}

/// Prompts without a cache, decodes, no tokens, no keys, and keys enough for several tiles; K and V apart or in one
/// tensor, with strides of their own.
fn ragged(cases: &mut Vec<Case>) {
    let (prompts, query_lens, kv_lens) = ([1, 0, 17, 2, 70], [1, 3, 0, 2, 5, 1, 40], [37, 129, 9, 1, 0, 1, 150]);
    for (index, layout) in LAYOUTS.into_iter().enumerate() {
        let heads = [(4, 2), (5, 1), (4, 4), (6, 2)][index];
        let dtype = if index % 2 == 0 { DType::Bf16 } else { DType::F16 };
        let pages = if index % 2 == 0 { Pages::Scattered } else { Pages::Adjacent };
        let prompts = Case::new(format!("ragged prompts, {layout:?}"), heads, 64, 1, &prompts, &prompts);
        let mixed = Case::new(format!("ragged mix, {layout:?}"), heads, 80, 1, &query_lens, &kv_lens);
        for case in [prompts, mixed] {
            let case = case.ragged().layout(layout).dtype(dtype).pages(pages);
            cases.push(case.clone());
            cases.push(Case { name: format!("{}, non-causal", case.name), ..case.clone().non_causal() });
            let windowed = |config: AttentionConfig| config.with_window(Some(40), None).with_sinks();
            cases.push(case.clone().changed(format!("{}, windows and sinks", case.name), windowed));
            let all = |config: AttentionConfig| {
                let form = if index % 2 == 0 { MaskForm::Bits } else { MaskForm::Bytes };
                let config = config.non_causal().with_mask(form).with_window(Some(40), Some(3));
                config.with_soft_cap(20.0).with_alibi().with_temperatures()
            };
            cases.push(case.clone().changed(format!("{}, a mask and all the rest", case.name), all));
        }
    }
    let ragged = |name: &str, heads, head_dim, query_lens: &[u32], kv_lens: &[u32]| {
        Case::new(name, heads, head_dim, 1, query_lens, kv_lens).ragged()
    };
    cases.extend([
        ragged("ragged, an empty batch", (4, 2), 64, &[], &[]),
        ragged("ragged, no keys at all", (4, 2), 64, &[2, 1], &[0, 0]),
        ragged("ragged, NaN before and after each request's keys", (4, 2), 64, &[2, 1, 3, 20], &[0, 40, 5, 20]),
        ragged("ragged, one long request", (4, 1), 128, &[1], &[450]),
        ragged("ragged, head dim 256", (2, 1), 256, &[20, 1], &[20, 90]).unused(Unused::NanValues),
        ragged("ragged, queries inside fused QKV", (4, 2), 128, &[9, 3], &[9, 5]).fused(1024),
        ragged("ragged, offsets past 32 bits", (4, 2), 128, &[1, 2, 1], &[0, 65, 100]).pages(Pages::HighIds),
    ]);
}

fn field_cases(cases: &mut Vec<Case>) {
    let small = |name: &str, query_lens: &[u32], kv_lens: &[u32]| Case::new(name, (8, 2), 128, 16, query_lens, kv_lens);
    cases.extend([
        small("an empty batch", &[], &[]),
        small("B4: the only request has no tokens", &[0], &[20]),
        small("B4: a request without tokens among others", &[3, 0, 2], &[8, 16, 2]),
        small("B1: a request without keys in a decode batch", &[1, 1, 1], &[5, 0, 17]),
        small("B2: a request without keys in a prefill", &[4, 3], &[0, 7]).non_causal(),
        small("B5: more tokens than keys", &[4], &[2]),
        small("B15: page lists one page too long", &[1, 2], &[16, 32]).pages(Pages::OneTooMany).unused(Unused::Large),
        Case::new("A1: page offsets past 32 bits", (4, 2), 128, 64, &[1, 2], &[65, 100]).pages(Pages::HighIds),
        Case::new("D6: queries inside fused QKV, 3 tokens", (32, 2), 128, 16, &[3], &[9]).fused(4608),
        Case::new("D6: queries inside fused QKV, 1 token", (32, 2), 128, 16, &[1], &[9]).fused(4608),
        Case::new("A5: 65536 requests", (1, 1), 64, 16, &vec![1; 65_536], &vec![1; 65_536]).pages(Pages::Shared),
        Case::new("C14: page 1, one long request", (4, 1), 128, 1, &[1], &[37]),
        Case::new("D4: head dim 512, 16 heads on one", (16, 1), 512, 16, &[1, 2], &[33, 70]),
    ]);
    for dtype in [DType::Bf16, DType::F16] {
        let extreme = small("", &[1, 1], &[1, 2]).values(Values::ExtremeNegative).dtype(dtype);
        cases.push(Case { name: format!("B7: finite logits far down, {dtype}"), ..extreme });
        for (page, kv_len) in [(4, 13), (16, 1), (16, 4090)] {
            for unused in [Unused::NanKeys, Unused::NanValues, Unused::Nan] {
                let name = format!("B10: {unused:?}, page {page}, {kv_len} keys, {dtype}");
                cases.push(Case::new(name, (4, 1), 64, page, &[1], &[kv_len]).unused(unused).dtype(dtype));
            }
        }
    }
    for kv_len in [1, 255, 256, 257, 300] {
        let case = Case::new(format!("B12: the mean of {kv_len} values"), (8, 8), 128, 16, &[1], &[kv_len]);
        cases.push(case.values(Values::ZeroQuery).non_causal());
    }
}

impl Case {
    fn fused(self, row_elements: usize) -> Case {
        Case { query_row_elements: Some(row_elements), ..self }
    }
}

/// C5: short queries over long keys, for plans that cut the keys into many pieces.
pub fn split_cases() -> Vec<Case> {
    [(1, 4096), (16, 4096), (64, 1024), (100, 1000), (1, 8192)]
        .into_iter()
        .map(|(query_len, kv_len)| {
            let name = format!("C5: {query_len} tokens over {kv_len} keys");
            Case::new(name, (2, 1), 64, 16, &[query_len, 1, 2], &[kv_len, 3, 0])
        })
        .collect()
}

/// H1: one request of 3000 keys, alone or as number `at` of a batch of `batch`.
pub fn among_others(batch: usize, at: usize) -> Case {
    let mut kv_lens: Vec<u32> = (0..batch as u32).map(|index| 1 + 37 * index % 700).collect();
    kv_lens[at] = 3000;
    let mut case = Case::new(format!("H1: number {at} of {batch}"), (4, 1), 64, 16, &vec![1; batch], &kv_lens);
    case.seeds[at] = 3000;
    case
}

/// H1: tokens `begin..end` of one prompt.
pub fn prompt(begin: u32, end: u32) -> Case {
    Case::new(format!("H1: tokens {begin} to {end}"), (4, 1), 64, 16, &[end - begin], &[end])
}

/// C14: the same logical batch in pages of `page_size_tokens`.
pub fn paged(page_size_tokens: u32, layout: Layout) -> Case {
    let name = format!("C14: pages of {page_size_tokens}, {layout:?}");
    Case::new(name, (4, 2), 64, page_size_tokens, &[1, 3, 2], &[37, 129, 1]).layout(layout)
}
