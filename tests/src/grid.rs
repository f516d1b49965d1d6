//! FlashInfer's own grids of decode and append attention, whole: every point of version 0.6.18's tests that asks for
//! nothing this library lacks.
//!
//! [`crate::lab`] runs them. The emulator and [`crate::cases`] keep to a thinned selection. Merges are in
//! [`crate::merge_grid`], appends to the cache in [`crate::new_tokens`]. Left out:
//! - what has tables of its own ([`crate::variants`], [`crate::rotary`], [`crate::prefixes`] and others) or does not exist
//!   here: RoPE inside attention, ALiBi, soft caps, custom masks, sliding windows, sinks, FP8 and FP4 caches, value
//!   scales, ragged (unpaged) keys, shared prefixes, multi-item scoring, head dims that differ between keys and values;
//! - what has no numbers to compare: refused arguments (see [`crate::scenarios`]), and 256 random lengths of
//!   BatchAttention that its test draws anew;
//! - of BatchAttention's product of lengths, pages, heads, dims, mask, layout and dtype: mask, layout and dtype are
//!   taken in turn instead of multiplied, an eighth of it;
//! - tests that hold two of its backends against each other on lengths like these: POD, Hopper, Blackwell.
//!
//! A few grids leave something open: single requests lie in pages of 16 here, the batches of several tokens under a
//! graph have 54 and 2048 keys, and the small appends of head dim 512 are 12 requests.

use oxattn::config::{AttentionConfig, DType};
use oxattn::{Layout, SplitMode};

/// One batch on one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Heads, dims, dtype, mask.
    pub config: AttentionConfig,
    /// How it is cut.
    pub mode: SplitMode,
    /// The order of a page's two middle dims.
    pub layout: Layout,
    /// Whether K and V lie in one tensor, page by page.
    pub together: bool,
    /// New tokens and cached tokens of each request.
    pub requests: Vec<(u32, u32)>,
}

impl Point {
    /// New tokens of all requests.
    pub fn query_tokens(&self) -> usize {
        self.requests.iter().map(|&(query_len, _)| query_len as usize).sum()
    }

    /// Pages of all requests.
    pub fn pages(&self) -> usize {
        self.requests.iter().map(|&(_, kv_len)| kv_len.div_ceil(self.config.page_size_tokens) as usize).sum()
    }

    /// Multiplications of one product, an upper bound: what a slow executor chooses by.
    pub fn cost(&self) -> u64 {
        let pairs: u64 = self.requests.iter().map(|&(query_len, kv_len)| query_len as u64 * kv_len as u64).sum();
        pairs * self.config.query_heads as u64 * self.config.head_dim as u64
    }
}

impl std::fmt::Display for Point {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Point { config, mode, layout, together, requests } = self;
        let AttentionConfig { query_heads, kv_heads, head_dim, page_size_tokens, dtype, causal, .. } = config;
        let (query_len, kv_len) = requests[0];
        write!(
            f,
            "{} requests, the first {query_len} over {kv_len}; {query_heads}/{kv_heads} heads of {head_dim}, {dtype}, \
             pages of {page_size_tokens}, {layout:?}, together {together}, causal {causal}, {mode:?}",
            requests.len()
        )
    }
}

/// A point with K and V in one tensor, tokens outside heads.
fn point((query_heads, kv_heads): (u32, u32), head_dim: u32, page_size: u32, requests: Vec<(u32, u32)>) -> Point {
    let config = AttentionConfig::new(query_heads, kv_heads, head_dim, page_size).with_dtype(DType::F16);
    Point { config, mode: SplitMode::Balanced, layout: Layout::Nhd, together: true, requests }
}

/// A decode batch of equal lengths.
fn decode(heads: (u32, u32), head_dim: u32, page_size: u32, batch: u32, kv_len: u32) -> Point {
    point(heads, head_dim, page_size, vec![(1, kv_len); batch as usize])
}

/// `f` of every combination, the first list outermost: points of one configuration follow each other where lengths come
/// last.
fn product<A: Copy, B: Copy, C: Copy>(a: &[A], b: &[B], c: &[C]) -> Vec<(A, B, C)> {
    a.iter().flat_map(|&a| b.iter().flat_map(move |&b| c.iter().map(move |&c| (a, b, c)))).collect()
}

const BATCHES: [u32; 3] = [12, 17, 128];

/// `test_batch_decode_kernels.py`: one tensor, then K and V apart (head dims 128 and 256).
pub fn batch_decode() -> Vec<Point> {
    let mut points = Vec::new();
    for (together, head_dims) in [(true, &[128, 256, 512][..]), (false, &[128, 256])] {
        for (head_dim, page, query_heads) in product(head_dims, &[1, 8, 16], &[4, 32]) {
            for (batch, kv_len, ()) in product(&BATCHES, &[54, 97, 512, 2048, 16_384], &[()]) {
                points.push(Point { together, ..decode((query_heads, 4), head_dim, page, batch, kv_len) });
            }
        }
    }
    points
}

/// The same under a graph: each group is captured at its first point and replayed at all.
pub fn graph_decode() -> Vec<Vec<Point>> {
    let mut groups = Vec::new();
    for (head_dim, page, query_heads) in product(&[128, 256, 512], &[1, 8, 16], &[4, 32]) {
        for batch in BATCHES {
            let of_len = |kv_len| decode((query_heads, 4), head_dim, page, batch, kv_len);
            groups.push([54, 2048, 16_384].map(of_len).to_vec());
        }
    }
    for (batch, kv_heads, group) in product(&[4, 8], &[2, 8], &[4, 8]) {
        for query_len in [2, 3] {
            let requests = |kv_len| vec![(query_len, kv_len); batch];
            groups.push([54, 2048].map(|kv_len| point((group * kv_heads, kv_heads), 128, 16, requests(kv_len))).into());
        }
    }
    groups
}

const LAYOUTS: [Layout; 2] = [Layout::Hnd, Layout::Nhd];

/// `test_tensor_cores_decode.py`: single requests, then batches.
pub fn tensor_core_decode() -> Vec<Point> {
    let mut points = Vec::new();
    for (kv_heads, group, head_dim) in product(&[4, 8], &[1, 4, 8], &[64, 128, 256]) {
        for (layout, kv_len, ()) in product(&LAYOUTS, &[54, 128, 999, 32_789], &[()]) {
            let single = decode((group * kv_heads, kv_heads), head_dim, 16, 1, kv_len);
            points.push(Point { layout, together: false, ..single });
        }
    }
    for (page, group, head_dim) in product(&[1, 8, 16], &[1, 4, 8], &[128, 256]) {
        for (layout, batch, kv_len) in product(&LAYOUTS, &[12, 17], &[54, 97, 512]) {
            points.push(Point { layout, ..decode((4 * group, 4), head_dim, page, batch, kv_len) });
        }
    }
    points
}

/// `test_batch_invariant_fa2.py`: batches, and how many of their first requests must have the same bits alone. Cut at
/// multiples of 2048 keys, or not at all.
pub fn batch_invariant() -> Vec<(Point, usize)> {
    const MODES: [SplitMode; 2] = [SplitMode::FixedSplit { tokens: 2048 }, SplitMode::Unsplit];
    let mut points = Vec::new();
    for (mode, page, group) in product(&MODES, &[1, 8, 16], &[1, 4, 8]) {
        for (head_dim, layout, ()) in product(&[128, 256], &LAYOUTS, &[()]) {
            let of = |batch: usize, query_len: u32, kv_len: u32, invariant: usize| {
                let point = point((4 * group, 4), head_dim, page, vec![(query_len, kv_len); batch]);
                (Point { mode, layout, ..point }, invariant)
            };
            for (batch, kv_len, ()) in product(&[5, 12], &[4096, 8192, 5000], &[()]) {
                points.push(of(batch, 1, kv_len, 4));
            }
            for (batch, kv_len, query_len) in product(&[3, 4], &[4096, 5000], &[128, 256]) {
                let (decode_or_append, invariant) = of(batch, query_len, kv_len, 2);
                let config = decode_or_append.config.non_causal();
                points.push((Point { config, ..decode_or_append }, invariant));
            }
        }
    }
    points.sort_by_key(|(point, _)| point.config.causal);
    points
}

/// `test_batch_prefill_kernels.py`, append attention: one tensor, K and V apart (head dims 128 and 256), and small
/// batches of head dim 512. More tokens than keys under a causal mask, which the original skips, are here.
pub fn batch_append() -> Vec<Point> {
    let mut points = Vec::new();
    let (kv_lens, query_lens) = ([54, 97, 512, 2048], [37, 17, 127, 577]);
    for (together, head_dims, batches, kv_lens, query_lens) in [
        (true, &[64, 128, 256][..], &BATCHES[..], &kv_lens[..], &query_lens[..]),
        (false, &[128, 256], &BATCHES, &kv_lens, &query_lens),
        (true, &[512], &[12], &[54, 512], &[17, 127]),
    ] {
        for (head_dim, page, query_heads) in product(head_dims, &[1, 5, 16], &[4, 32]) {
            for causal in [true, false] {
                for (batch, kv_len, query_len) in product(batches, kv_lens, query_lens) {
                    let requests = vec![(query_len, kv_len); batch as usize];
                    let point = point((query_heads, 4), head_dim, page, requests);
                    let config = if causal { point.config } else { point.config.non_causal() };
                    points.push(Point { config, together, ..point });
                }
            }
        }
    }
    points
}

/// `test_batch_attention.py`: decodes and prompts in one batch.
pub fn mixed() -> Vec<Point> {
    let lengths: [Vec<(u32, u32)>; 9] = [
        vec![(146, 146)],
        vec![(67, 67)],
        vec![(7939, 8190)],
        vec![(1, 2048); 77],
        vec![(129, 4099); 2],
        [vec![(1, 600); 264], vec![(3, 5000); 128]].concat(),
        [vec![(1, 1024); 100], vec![(17, 8192); 8]].concat(),
        [vec![(2, 766); 99], vec![(512, 1024)]].concat(),
        vec![(235, 2), (13_353, 1)],
    ];
    let mut points = Vec::new();
    for (page, kv_heads, group) in product(&[1, 8, 16], &[1, 4], &[1, 4, 7, 8]) {
        for head_dim in [64, 128, 256] {
            for requests in &lengths {
                // 9 lists to a round, an odd number: every list meets all eight combinations.
                let turn = points.len();
                let point = point((group * kv_heads, kv_heads), head_dim, page, requests.clone());
                let config = point.config.with_dtype([DType::Bf16, DType::F16][turn % 2]);
                let config = if turn / 2 % 2 == 0 { config } else { config.non_causal() };
                points.push(Point { config, layout: LAYOUTS[turn / 4 % 2], ..point });
            }
        }
    }
    points.sort_by_key(|Point { config, .. }| {
        let AttentionConfig { query_heads, kv_heads, head_dim, page_size_tokens, dtype, causal, .. } = config;
        (*dtype == DType::F16, *head_dim, *page_size_tokens, *kv_heads, *query_heads, *causal)
    });
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The products of the originals' parameters, counted by hand; no point is there twice.
    #[test]
    fn no_point_is_missing() {
        let all_differ =
            |points: &[Point]| points.iter().enumerate().all(|(index, point)| !points[..index].contains(point));
        let decode = batch_decode();
        assert_eq!(decode.len(), 3 * 5 * 3 * 2 * (3 + 2));
        assert!(all_differ(&decode));
        assert_eq!(graph_decode().len(), 3 * 3 * 2 * 3 + 2 * 2 * 2 * 2);
        let tensor_core = tensor_core_decode();
        assert_eq!(tensor_core.len(), 4 * 2 * 3 * 3 * 2 + 2 * 3 * 3 * 3 * 2 * 2);
        assert!(all_differ(&tensor_core));
        assert_eq!(batch_invariant().len(), 2 * 3 * 2 * 3 * 3 * 2 * 2 + 2 * 2 * 2 * 2 * 3 * 3 * 2 * 2);
        let append = batch_append();
        assert_eq!(append.len(), 3 * 4 * 4 * 3 * 2 * 2 * (3 + 2) + 2 * 2 * 3 * 2 * 2);
        assert!(all_differ(&append));
        let mixed = mixed();
        assert_eq!(mixed.len(), 9 * 3 * 2 * 4 * 3);
        for list in &mixed {
            let of_list = mixed.iter().filter(|point| point.requests == list.requests);
            let combinations: Vec<_> =
                of_list.map(|point| (point.config.causal, point.layout == Layout::Nhd, point.config.dtype)).collect();
            let count = |all: &[(bool, bool, DType)]| {
                all.iter().enumerate().filter(|(index, one)| !all[..*index].contains(one)).count()
            };
            assert_eq!(count(&combinations), 8, "{list}");
        }
    }
}
