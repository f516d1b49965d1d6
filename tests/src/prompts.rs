//! Cases for the prefill kernels: the table of [`cases`](crate::cases) in pages that their boxes fit, and what only they
//! do: rows around a warpgroup's 64 and an item's 128, keys around a tile, and pieces of many tiles.

use crate::cases::{Case, Pages, Unused, cases, padded_head_dims, split_cases};
use crate::layout::LAYOUTS;
use crate::prefixes::prefix_cases;
use crate::rotary::{rotary_cases, rotary_prefix_cases};
use kernels_gpu::abi::plan::RAGGED_PAGE_TOKENS;
use kernels_gpu::abi::tile::{PREFILL_HEAD_DIMS, PREFILL_ROTARY_HEAD_DIMS, PrefillTile};
use oxattn::config::AttentionConfig;
use oxattn::{MaskForm, RopeConfig};

/// Page sizes of every box: 8 tokens to a whole tile, of pages that are powers of two and not.
pub const PAGE_SIZES: [u32; 8] = [8, 16, 24, 48, 64, 128, 256, 1000];

impl Case {
    /// As [`tile_cost`](Self::tile_cost), of items of 128 rows whatever rows there are, and whole tiles of 128 keys.
    pub fn prefill_cost(&self) -> u64 {
        let items = |query_len: u32| (query_len * self.config.group()).div_ceil(128) as u64;
        let lens = self.query_lens.iter().zip(&self.kv_lens);
        let keys: u64 = lens.map(|(&query_len, kv_len)| items(query_len) * kv_len.next_multiple_of(128) as u64).sum();
        8 * keys * self.config.kv_heads as u64 * self.config.head_dim as u64
    }

    /// The tile of the kernel of the case's head dims, if there is one.
    pub fn prefill_tile(&self) -> Option<PrefillTile> {
        self.config.prefill_tile()
    }

    /// Whether the kernel's head dims are the case's own.
    fn has_prefill_dims(&self) -> bool {
        PREFILL_HEAD_DIMS.contains(&[self.config.head_dim, self.config.value_head_dim])
    }

    /// Whether there is a kernel for the case.
    fn suits_prefill(&self) -> bool {
        let page_tokens = if self.config.ragged { RAGGED_PAGE_TOKENS } else { self.config.page_size_tokens };
        self.prefill_tile().is_some_and(|tile| tile.box_tokens(page_tokens).is_some())
    }

    fn in_pages_of(mut self, page_size_tokens: u32) -> Case {
        self.config.page_size_tokens = page_size_tokens;
        Case { name: format!("{}, now of {page_size_tokens}", self.name), ..self }
    }
}

/// The table.
pub fn prefill_cases() -> Vec<Case> {
    let mut table = cases();
    table.extend(split_cases());
    // Variants of a head dim without a kernel have one instead.
    for case in &mut table {
        let AttentionConfig { head_dim, value_head_dim, kv_heads, .. } = case.config;
        let is_common = head_dim == value_head_dim && case.query_row_elements.is_none();
        if !case.config.is_plain() && is_common && !case.has_prefill_dims() {
            let head_dim = if kv_heads > 2 { 64 } else { 256 };
            (case.config.head_dim, case.config.value_head_dim) = (head_dim, head_dim);
        }
    }
    table.extend(rotary_cases());
    table.retain(Case::has_prefill_dims);
    table.extend(
        padded_head_dims().into_iter().filter(|case| case.prefill_tile().is_some() && !case.has_prefill_dims()),
    );
    let fit = |(index, case): (usize, Case)| match case.suits_prefill() {
        true => case,
        false => case.in_pages_of(PAGE_SIZES[index % PAGE_SIZES.len()]),
    };
    let mut table: Vec<Case> = table.into_iter().enumerate().map(fit).collect();
    lengths(&mut table);
    rows(&mut table);
    rows_without_keys(&mut table);
    pieces(&mut table);
    changed_rows(&mut table);
    debug_assert!(table.iter().all(Case::suits_prefill));
    table
}

/// The table of shared prefixes, as far as there are kernels for it.
pub fn prefill_prefix_cases() -> Vec<Case> {
    let mut table = prefix_cases();
    table.extend(rotary_prefix_cases());
    table.retain(Case::suits_prefill);
    table
}

/// Keys around a page and a tile, for every head dim and page size.
fn lengths(cases: &mut Vec<Case>) {
    for (index, page) in PAGE_SIZES.into_iter().enumerate() {
        for (turn, dims @ [head_dim, _]) in PREFILL_HEAD_DIMS.into_iter().enumerate() {
            let tile = PrefillTile::new(head_dim, dims[1], true).map_or(0, |tile| tile.tile_tokens);
            let name = format!("keys around pages of {page} and a tile, head dim {head_dim}");
            let kv_lens = match (index + turn) % 3 {
                0 => [1, page.min(300), page.min(300) + 1, tile - 1],
                1 => [tile, tile + 1, 2 * tile, 0],
                _ => [3 * tile - 8, 3 * tile - 7, 9, page.min(300) - 1],
            };
            let case = Case::new(name, (3, 1), head_dim, page, &[2, 40, 1, 3], &kv_lens).values_of(dims[1]);
            let unused = [Unused::Nan, Unused::NanKeys, Unused::NanValues][(index + 2 * turn) % 3];
            let case = case.layout(LAYOUTS[(index + turn) % 4]).unused(unused);
            cases.push(if (index + turn) % 2 == 0 { case } else { case.f16() });
        }
    }
}

/// Rows around a warpgroup's and an item's, in groups that divide neither.
fn rows(cases: &mut Vec<Case>) {
    for (index, (group, query_lens)) in [
        (1, [63, 64, 65, 127, 128, 129]),
        (5, [12, 13, 25, 26, 51, 52]),
        (7, [9, 10, 18, 19, 36, 37]),
        (128, [1, 2, 0, 1, 0, 0]),
    ]
    .into_iter()
    .enumerate()
    {
        for (turn, [head_dim, value_dim]) in PREFILL_HEAD_DIMS.into_iter().enumerate() {
            let name = format!("rows around an item's, {group} heads, head dim {head_dim}");
            let page = PAGE_SIZES[(3 * index + turn) % 7];
            let case = Case::new(name, (group, 1), head_dim, page, &query_lens, &[70, 64, 100, 128, 129, 40]);
            let case = case.values_of(value_dim).layout(LAYOUTS[(index + turn) % 4]);
            cases.push(if turn == 1 { case.f16() } else { case });
        }
    }
    let heads = Case::new("more heads than blocks", (16, 8), 64, 32, &[9, 1], &[40, 200]);
    cases.extend([heads.clone().layout(LAYOUTS[1]), heads.pages(Pages::OneTooMany).layout(LAYOUTS[3]).f16()]);
}

/// Prompts longer than their keys, whose first rows see none of them: whole warpgroups, and all rows of an item.
fn rows_without_keys(cases: &mut Vec<Case>) {
    let longer = |page| Case::new("more tokens than keys", (4, 2), 64, page, &[100, 40, 70, 3], &[20, 33, 0, 9]);
    cases.push(longer(24));
    cases.push(longer(8).non_causal().f16());
    cases.push(longer(48).changed("sinks of rows without keys", AttentionConfig::with_sinks));
    let windowed = |config: AttentionConfig| config.with_sinks().with_window(Some(10), None);
    cases.push(longer(16).changed("sinks of rows without keys, in windows", windowed));
    cases.push(longer(64).changed("sigmoid of rows without keys", |config| config.with_sigmoid(-0.5)));
    let masked = |config: AttentionConfig| config.non_causal().with_mask(MaskForm::Bits).with_sinks();
    let case = longer(128).changed("sinks of rows without keys, by a mask", masked);
    cases.push(case.masked(|_, token, key| token % 3 != 1 && (token + key) % 5 != 0));
}

/// Prompts over long keys, which a balanced plan cuts.
fn pieces(cases: &mut Vec<Case>) {
    for (index, [head_dim, value_dim]) in PREFILL_HEAD_DIMS.into_iter().enumerate() {
        let (name, page) = (format!("pieces, head dim {head_dim}"), [48, 64, 16, 256][index]);
        let long = Case::new(name, (2, 1), head_dim, page, &[40], &[1190]).values_of(value_dim);
        let all = |config: AttentionConfig| {
            let config = config.with_soft_cap(20.0).with_alibi().with_sinks().with_temperatures();
            config.with_mask(MaskForm::Bytes).with_window(Some(1180), None)
        };
        cases.push(long.clone());
        cases.push(long.clone().f16().changed(format!("pieces of all together, head dim {head_dim}"), all));
        let sinks = long.changed(format!("pieces with sinks, head dim {head_dim}"), AttentionConfig::with_sinks);
        cases.push(sinks.sinks(|head| 3.0 - head as f32));
    }
    let two = Case::new("", (2, 1), 64, 16, &[40, 20], &[1300, 300]);
    cases.push(two.clone().changed("pieces of a sigmoid", |config| config.with_sigmoid(-2.0)));
    // Far past what the short way to a hyperbolic tangent is good for.
    cases.push(two.changed("pieces of a soft cap of 5000", |config| config.with_soft_cap(5000.0)));
}

/// Queries and keys that the kernel normalises and rotates: tiles that both warpgroups change and that one does, items that
/// only one has rows of beside items of both, keys that end in each half of a tile.
fn changed_rows(cases: &mut Vec<Case>) {
    for (index, head_dim) in PREFILL_ROTARY_HEAD_DIMS.into_iter().enumerate() {
        let config = |config: AttentionConfig| {
            let rope = RopeConfig::new(config.head_dim);
            config.with_query_norm(1e-6).with_key_norm(1e-5).with_rope(if index == 1 {
                rope.interleaved()
            } else {
                rope
            })
        };
        let page = [16, 48, 8][index];
        let mixed = Case::new("", (3, 1), head_dim, page, &[90, 1, 30, 0, 22], &[300, 200, 31, 7, 97]);
        let mixed = if index == 0 { mixed.f16() } else { mixed };
        cases
            .push(mixed.layout(LAYOUTS[index]).changed(format!("norms and rope of both, head dim {head_dim}"), config));
        let long = Case::new("", (2, 1), head_dim, page, &[70], &[1190]);
        cases.push(long.changed(format!("pieces with norms and rope, head dim {head_dim}"), config));
    }
}
