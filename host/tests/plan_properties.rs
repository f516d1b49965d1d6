//! Plans against brute force: every (query row, visible key) pair exactly once, within the layout, evenly dealt.
//!
//! What a row may see is worked out here from the contract's words, one token at a time; nothing of the planner's
//! own arithmetic is used.

use std::collections::{HashMap, HashSet};

use kernels_gpu::abi::plan::{DIRECT, PlanHeader, WorkItem};
use oxattn::plan::{ITEM_COST_TILES, MIN_PIECE_TILES};
use oxattn::{AttentionConfig, Limits, PageTable, Plan, PlanError, Planner, QueryLengths, SplitMode, Target};
use proptest::prelude::*;

/// (query_len, kv_len).
type Request = (u32, u32);

/// A batch with its own metadata.
struct Batch {
    query_indptr: Vec<u32>,
    page_indptr: Vec<u32>,
    kv_lens: Vec<u32>,
}

impl Batch {
    fn new(page_size_tokens: u32, requests: &[Request]) -> Batch {
        let mut batch = Batch { query_indptr: vec![0], page_indptr: vec![0], kv_lens: vec![] };
        for &(query_len, kv_len) in requests {
            batch.query_indptr.push(batch.query_indptr.last().unwrap() + query_len);
            batch.page_indptr.push(batch.page_indptr.last().unwrap() + kv_len.div_ceil(page_size_tokens));
            batch.kv_lens.push(kv_len);
        }
        batch
    }

    fn plan<'a>(&self, planner: &'a mut Planner, page_size_tokens: u32) -> &'a Plan {
        let table = PageTable::csr(page_size_tokens, &self.page_indptr, &self.kv_lens).unwrap();
        planner.plan(&table, QueryLengths::indptr(&self.query_indptr).unwrap()).unwrap()
    }
}

fn tight_limits(requests: &[Request]) -> Limits {
    Limits {
        max_requests: requests.len() as u32,
        max_query_tokens: requests.iter().map(|request| request.0).sum(),
        max_kv_len_tokens: requests.iter().map(|request| request.1).max().unwrap_or(0),
        max_kv_tokens: requests.iter().map(|request| request.1 as u64).sum(),
    }
}

/// Keys that query token `t` sees, from the contract: `k <= t + kv_len - query_len` if causal.
fn visible_keys(causal: bool, (query_len, kv_len): Request, token: u32) -> u32 {
    let last = token as i64 + kv_len as i64 - query_len as i64;
    (0..kv_len as i64).filter(|&key| !causal || key <= last).count() as u32
}

fn check(plan: &Plan, requests: &[Request]) {
    check_layout(plan);
    let config = *plan.config();
    let group = config.group();
    let batch = Batch::new(config.page_size_tokens, requests);

    // The pieces of each (request, head, first row).
    let mut units: HashMap<(u32, u32, u32), Vec<&WorkItem>> = HashMap::new();
    for item in plan.items() {
        let request = item.request as usize;
        let (query_len, kv_len) = requests[request];
        assert_eq!((item.query_len_tokens, item.kv_len_tokens), (query_len, kv_len));
        let begins = (batch.query_indptr[request], batch.page_indptr[request]);
        assert_eq!((item.query_begin_tokens, item.page_begin), begins);
        assert!(item.kv_end_tokens <= kv_len && item.kv_begin_tokens.is_multiple_of(plan.target().tile_tokens));
        let empty = item.kv_end_tokens == 0 && item.kv_begin_tokens == 0 && item.partial_begin == DIRECT;
        assert!(item.kv_begin_tokens < item.kv_end_tokens || empty);
        assert!((1..=16).contains(&item.rows()) && item.tile_rows == 16 && item.row_begin.is_multiple_of(16));
        assert!(item.row_begin + item.rows() <= query_len * group && item.kv_head() < config.kv_heads);
        units.entry((item.request, item.kv_head(), item.row_begin)).or_default().push(item);
    }

    // The output row that each partial state belongs to.
    let mut states: Vec<Option<(u32, u32)>> = vec![None; plan.header().partial_rows as usize];
    let (mut covered_rows, mut cut_rows) = (0, 0);
    for pieces in units.values_mut() {
        pieces.sort_by_key(|item| item.kv_begin_tokens);
        let first = pieces[0];
        assert_eq!(first.kv_begin_tokens, 0);
        assert!(pieces.iter().all(|item| item.rows() == first.rows()));
        assert!(pieces.windows(2).all(|pair| pair[0].kv_end_tokens == pair[1].kv_begin_tokens), "{pieces:?}");
        let rows = first.row_begin..first.row_begin + first.rows();
        let request = requests[first.request as usize];
        // The range ends with the last key that any row of the tile sees: nothing missed, nothing read in vain.
        let seen = rows.clone().map(|row| visible_keys(config.causal, request, row / group)).max();
        assert_eq!(seen, pieces.last().map(|item| item.kv_end_tokens));
        covered_rows += first.rows();
        if pieces.len() == 1 {
            assert_eq!((first.partial_begin, first.partial_stride), (DIRECT, 0));
            continue;
        }
        cut_rows += first.rows();
        for item in pieces.iter() {
            for (j, row) in rows.clone().enumerate() {
                let state = item.partial_begin + j as u32 * item.partial_stride;
                let output = (item.query_begin_tokens + row / group, item.kv_head() * group + row % group);
                assert_eq!(states[state as usize].replace(output), None, "state {state} written twice");
            }
        }
    }
    assert_eq!(covered_rows, batch.query_indptr.last().unwrap() * config.query_heads, "every output row once");

    let mut merged = 0;
    let mut outputs = HashSet::new();
    for row in plan.merge_rows() {
        assert!(row.count >= 2 && outputs.insert((row.token, row.head)));
        for state in row.partial_begin..row.partial_begin + row.count {
            assert_eq!(states[state as usize], Some((row.token, row.head)));
        }
        merged += row.count;
    }
    assert_eq!(plan.merge_rows().len() as u32, cut_rows);
    assert_eq!(merged, plan.header().partial_rows, "every state is folded");
}

fn check_layout(plan: &Plan) {
    let (header, layout) = (plan.header(), plan.workspace());
    assert_eq!(bytemuck::pod_read_unaligned::<PlanHeader>(&plan.image()[..48]), header);
    assert_eq!(header.image_bytes, plan.image().len() as u64);
    assert!(header.items <= layout.max_items && header.merge_rows <= layout.max_merge_rows);
    assert!(header.partial_rows <= layout.max_partial_rows);
    let arrays = [
        (0, 48),
        (header.queue_begin_offset_bytes as u64, 4 * (header.queues as u64 + 1)),
        (header.merge_rows_offset_bytes as u64, 16 * layout.max_merge_rows as u64),
        (header.items_offset_bytes as u64, 48 * layout.max_items as u64),
        (layout.partial_out_offset_bytes, 4 * layout.max_partial_rows as u64 * plan.config().head_dim as u64),
        (layout.partial_lse_offset_bytes, 4 * layout.max_partial_rows as u64),
        (layout.total_bytes, 0),
    ];
    assert!(arrays.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    assert!(arrays.iter().all(|array| array.0.is_multiple_of(256)));
    assert!(header.image_bytes <= layout.image_bytes && layout.image_bytes <= layout.partial_out_offset_bytes);
    let queue_begin = plan.queue_begin();
    assert_eq!(queue_begin.len() as u32, header.queues + 1);
    assert_eq!((queue_begin[0], queue_begin[header.queues as usize]), (0, header.items));
    assert!(queue_begin.is_sorted());
    // The arrays that the accessors show are the bytes that are uploaded.
    let array = |offset: u32, bytes: usize| &plan.image()[offset as usize..offset as usize + bytes];
    assert_eq!(array(header.items_offset_bytes, 48 * plan.items().len()), bytes_of(plan.items()));
    assert_eq!(array(header.merge_rows_offset_bytes, 16 * plan.merge_rows().len()), bytes_of(plan.merge_rows()));
    assert_eq!(array(header.queue_begin_offset_bytes, 4 * queue_begin.len()), bytes_of(queue_begin));
}

fn bytes_of<T: bytemuck::NoUninit>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// The fullest queue against what no plan can beat.
fn check_balance(plan: &Plan, requests: &[Request]) {
    let (config, target) = (plan.config(), plan.target());
    let mut unit_tiles = Vec::new();
    for &request in requests {
        let packed_rows = request.0 * config.group();
        for row in (0..packed_rows).step_by(16) {
            let last = (row + 15).min(packed_rows - 1);
            let keys = visible_keys(config.causal, request, last / config.group());
            unit_tiles.push(keys.div_ceil(target.tile_tokens) as u64);
        }
    }
    // In time `m` a queue runs pieces of at most `m` less an item's cost, and a unit pays for each of its pieces.
    let feasible = |m: u64| {
        let cost = |tiles: &u64| tiles + ITEM_COST_TILES * tiles.div_ceil(m - ITEM_COST_TILES).max(1);
        unit_tiles.iter().map(cost).sum::<u64>() * config.kv_heads as u64 <= target.queues as u64 * m
    };
    let least = (1 + ITEM_COST_TILES..).find(|&m| feasible(m)).unwrap();
    let balance = plan.balance();
    assert_eq!(balance.queue_loads.len(), target.queues as usize);
    // Within 4/3; where a share is no more than a few pieces, within two of the shortest.
    let allowed = (least * 4 / 3).max(least + 2 * (ITEM_COST_TILES + MIN_PIECE_TILES as u64));
    assert!(balance.max <= allowed, "max {} least {least} queues {}", balance.max, target.queues);
}

/// Pieces dealt to the least loaded queue: the mean and one longest piece, to 1/512 of it.
fn check_spread(plan: &Plan) {
    let balance = plan.balance();
    let tiles =
        |item: &WorkItem| (item.kv_end_tokens - item.kv_begin_tokens).div_ceil(plan.target().tile_tokens) as u64;
    let longest = plan.items().iter().map(|item| tiles(item) + ITEM_COST_TILES).max().unwrap_or(0);
    assert!(balance.max as f64 <= balance.mean + (longest + longest / 512) as f64, "{balance:?}");
}

fn modes() -> impl Strategy<Value = SplitMode> {
    prop_oneof![
        3 => Just(SplitMode::Balanced),
        2 => Just(SplitMode::BatchInvariant),
        1 => (1u32..700).prop_map(|tokens| SplitMode::FixedSplit { tokens }),
        1 => Just(SplitMode::Unsplit),
    ]
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let query = prop_oneof![4 => Just(1u32), 1 => Just(0), 2 => 0u32..12, 1 => 0u32..90];
    let kv = prop_oneof![1 => Just(0u32), 3 => 0u32..40, 3 => 0u32..3000, 1 => 0u32..20_000];
    prop::collection::vec((query, kv), 0..24)
}

fn configs() -> impl Strategy<Value = AttentionConfig> {
    let heads = vec![(1, 1), (8, 2), (5, 1), (40, 8), (32, 8), (64, 1), (71, 71), (36, 3), (128, 1)];
    let pages = vec![1u32, 3, 16, 64];
    (prop::sample::select(heads), prop::sample::select(pages), any::<bool>()).prop_map(|((query, kv), page, causal)| {
        let config = AttentionConfig::new(query, kv, 128, page);
        if causal { config } else { config.non_causal() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_meets_every_visible_key_once(
        config in configs(),
        requests in requests(),
        mode in modes(),
        queues in 1u32..300,
        tile_tokens in prop::sample::select(vec![16u32, 32, 48, 64]),
    ) {
        let target = Target::new(queues, tile_tokens);
        let mut planner = Planner::new(config, target, mode, tight_limits(&requests)).unwrap();
        let plan = Batch::new(config.page_size_tokens, &requests).plan(&mut planner, config.page_size_tokens);
        check(plan, &requests);
        if mode == SplitMode::Balanced {
            check_balance(plan, &requests);
        } else {
            check_spread(plan);
        }
    }

    #[test]
    fn a_refreshed_plan_equals_a_fresh_one(
        config in configs(),
        first in requests(),
        second in requests(),
        mode in modes(),
        queues in 1u32..140,
    ) {
        let (a, b) = (tight_limits(&first), tight_limits(&second));
        let limits = Limits {
            max_requests: a.max_requests.max(b.max_requests),
            max_query_tokens: a.max_query_tokens.max(b.max_query_tokens),
            max_kv_len_tokens: a.max_kv_len_tokens.max(b.max_kv_len_tokens),
            max_kv_tokens: a.max_kv_tokens.max(b.max_kv_tokens),
        };
        let (page, target) = (config.page_size_tokens, Target::new(queues, 64));
        let mut planner = Planner::new(config, target, mode, limits).unwrap();
        let layout = planner.workspace_size();
        Batch::new(page, &first).plan(&mut planner, page);
        let refreshed = Batch::new(page, &second).plan(&mut planner, page);
        check(refreshed, &second);
        prop_assert_eq!(refreshed.epoch(), 2);
        prop_assert_eq!(*refreshed.workspace(), layout);
        // The bytes of a planner that never saw the first batch, but for the epoch at 32.
        let mut fresh = Planner::new(config, target, mode, limits).unwrap();
        let fresh = Batch::new(page, &second).plan(&mut fresh, page);
        prop_assert_eq!(&refreshed.image()[..32], &fresh.image()[..32]);
        prop_assert_eq!(&refreshed.image()[40..], &fresh.image()[40..]);
    }

    #[test]
    fn batch_mates_do_not_change_invariant_cuts(
        config in configs(),
        mates in requests(),
        request in (0u32..20, 0u32..20_000),
        slot in 0usize..24,
        queues in 1u32..300,
        fixed_tokens in prop::option::of(1u32..700),
    ) {
        let mode = fixed_tokens.map_or(SplitMode::BatchInvariant, |tokens| SplitMode::FixedSplit { tokens });
        let cuts = |requests: &[Request], slot: usize, queues: u32| {
            let target = Target::new(queues, 64);
            let mut planner = Planner::new(config, target, mode, tight_limits(requests)).unwrap();
            let plan = Batch::new(config.page_size_tokens, requests).plan(&mut planner, config.page_size_tokens);
            let of_slot = plan.items().iter().filter(|item| item.request == slot as u32);
            let mut cuts: Vec<_> = of_slot
                .map(|i| (i.kv_head(), i.row_begin, i.rows(), i.kv_begin_tokens, i.kv_end_tokens, i.partial_stride))
                .collect();
            cuts.sort_unstable();
            cuts
        };
        let slot = slot.min(mates.len());
        let mut mixed = mates;
        mixed.insert(slot, request);
        prop_assert_eq!(cuts(&mixed, slot, queues), cuts(&[request], 0, 132));
    }
}

fn balanced(config: AttentionConfig, queues: u32, requests: &[Request]) -> Planner {
    let target = Target::new(queues, 64);
    let mut planner = Planner::new(config, target, SplitMode::Balanced, tight_limits(requests)).unwrap();
    Batch::new(config.page_size_tokens, requests).plan(&mut planner, config.page_size_tokens);
    planner
}

#[test]
fn equal_units_that_nearly_fill_the_queues_stay_whole() {
    // 64 requests x 8 heads are 512 units of 128 tiles + 2: two a queue on 256 queues is 260, a fair share 252.1.
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &[(1, 8192); 64]);
    let plan = planner.latest().unwrap();
    assert_eq!((plan.items().len(), plan.merge_rows().len()), (512, 0));
    assert_eq!(plan.balance().max, 260);
}

#[test]
fn one_long_request_uses_all_queues() {
    // 8 heads of 512 tiles: 33 queues a head are 15.5 tiles + 2 each, so no plan beats 18.
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &[(1, 32_768)]);
    let plan = planner.latest().unwrap();
    assert_eq!(plan.balance().max, 18);
    assert!(plan.queues().filter(|queue| !queue.is_empty()).count() >= 256);
    assert_eq!(plan.merge_rows().len(), 32);
}

#[test]
fn one_long_request_among_short_ones_is_cut() {
    // 63 x 8 units of 8 + 2 tiles and 8 of 1563 + 2 are 17560, 66.5 a queue; uncut, the longest unit is 1565.
    let mut requests = vec![(1, 512); 63];
    requests.push((1, 100_000));
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &requests);
    let plan = planner.latest().unwrap();
    assert!(plan.balance().max <= 72, "{}", plan.explain());
    // The short units stay whole: 8 long ones of 4 rows are merged.
    assert_eq!(plan.merge_rows().len(), 32);
}

#[test]
fn queries_longer_than_the_keys_leave_rows_without_keys() {
    // 4 queries on 2 keys, bottom-right: tokens 0 and 1 see nothing, token 2 key 0, token 3 both. With 16 heads a
    // token is a tile of its own.
    let planner = balanced(AttentionConfig::new(16, 1, 128, 16), 4, &[(4, 2)]);
    let items = planner.latest().unwrap().items();
    let mut ranges: Vec<_> = items.iter().map(|i| (i.row_begin, i.kv_begin_tokens, i.kv_end_tokens)).collect();
    ranges.sort_unstable();
    assert_eq!(ranges, [(0, 0, 0), (16, 0, 0), (32, 0, 1), (48, 0, 2)]);
}

#[test]
fn zero_lengths_are_planned_for_any_queue_count() {
    // 24 requests of 5 query tokens, 40 query heads on 8 KV heads, some of them without keys.
    let config = AttentionConfig::new(40, 8, 128, 16);
    for empty in [0, 1, 7, 24] {
        let requests: Vec<_> = (0..24).map(|r| (5, if r < empty { 0 } else { 100 * r })).collect();
        for queues in 1..=132 {
            check(balanced(config, queues, &requests).latest().unwrap(), &requests);
        }
    }
}

#[test]
fn nothing_to_do_is_a_plan() {
    for requests in [&[][..], &[(0, 0)], &[(0, 100), (0, 7)]] {
        let planner = balanced(AttentionConfig::new(8, 2, 128, 16), 132, requests);
        let plan = planner.latest().unwrap();
        assert_eq!((plan.items().len(), plan.query_tokens(), plan.requests()), (0, 0, requests.len()));
        check(plan, requests);
    }
}

#[test]
fn the_longest_query_is_a_difference() {
    let planner = balanced(AttentionConfig::new(8, 2, 128, 16), 132, &[(3, 8), (2, 8)]);
    assert_eq!(planner.latest().unwrap().max_query_len_tokens(), 3);
}

#[test]
fn invariant_pieces_are_bounded() {
    // 8 KV heads: at most 128 / 8 pieces of at least 512 keys, in tiles of 64.
    let config = AttentionConfig::new(32, 8, 128, 16);
    for (request, pieces) in [
        ((1, 960), 1),
        ((1, 961), 2),
        ((1, 8192), 16),
        ((1, 131_072), 16),
        // 2 row tiles x 8 heads, then 16 x 8.
        ((8, 8192), 8),
        ((64, 8192), 1),
    ] {
        let requests = [request];
        let target = Target::new(132, 64);
        let mut planner = Planner::new(config, target, SplitMode::BatchInvariant, tight_limits(&requests)).unwrap();
        let plan = Batch::new(16, &requests).plan(&mut planner, 16);
        assert_eq!(plan.explain().most_pieces, pieces, "{request:?}");
    }
}

#[test]
fn the_workspace_follows_from_the_limits() {
    let limits =
        Limits { max_requests: 512, max_query_tokens: 8192, max_kv_len_tokens: 131_072, max_kv_tokens: 4 << 20 };
    let config = AttentionConfig::new(64, 8, 256, 16);
    let planner = Planner::new(config, Target::new(264, 64), SplitMode::Balanced, limits).unwrap();
    let layout = planner.workspace_size();
    // 263 boundaries between queues cut as many units at most, so 526 pieces of 16 rows.
    assert_eq!(layout.max_partial_rows, 16 * 2 * 263);
    assert_eq!(layout.partial_lse_offset_bytes - layout.partial_out_offset_bytes, 16 * 2 * 263 * 256 * 4);
    layout.check(0x7000_0010, layout.total_bytes).unwrap();
    let (needed, available) = (layout.total_bytes, layout.total_bytes - 1);
    assert_eq!(
        layout.check(0x7000_0010, available).unwrap_err().to_string(),
        format!("workspace has {available} bytes; the planner's limits need {needed}")
    );
    assert_eq!(
        layout.check(0x7000_0008, needed).unwrap_err().to_string(),
        "workspace address 0x70000008 is not a multiple of 16 bytes"
    );
}

#[test]
fn refusals_name_the_field_and_both_values() {
    let config = AttentionConfig::new(8, 2, 128, 16);
    let limits = Limits { max_requests: 2, max_query_tokens: 4, max_kv_len_tokens: 100, max_kv_tokens: 150 };
    let target = Target::new(4, 64);
    let mut planner = Planner::new(config, target, SplitMode::Balanced, limits).unwrap();
    let cases: [(u32, &[u32], u32, &str); 6] = [
        (16, &[1, 1, 1], 1, "batch has 3 requests; the planner's max_requests is 2"),
        (16, &[1, 1], 3, "batch has 6 query tokens; the planner's max_query_tokens is 4"),
        (16, &[1, 1], u32::MAX, "batch has 8589934590 query tokens; the planner's max_query_tokens is 4"),
        (16, &[1, 101], 1, "kv_len of request 1 is 101; the planner's max_kv_len_tokens is 100"),
        (16, &[100, 51], 1, "batch has 151 keys; the planner's max_kv_tokens is 150"),
        (8, &[1], 1, "page table has pages of 8 tokens; the planner's config has page_size_tokens = 16"),
    ];
    for (page_size_tokens, kv_lens, query_len, message) in cases {
        let table = PageTable::block_table(page_size_tokens, 20, kv_lens).unwrap();
        assert_eq!(planner.plan(&table, QueryLengths::uniform(query_len)).unwrap_err().to_string(), message);
    }
    let table = PageTable::block_table(16, 20, &[1u32, 1]).unwrap();
    let query = QueryLengths::indptr(&[0u32, 1]).unwrap();
    assert_eq!(planner.plan(&table, query).unwrap_err().to_string(), "query_indptr has 2 entries; expected 3");
    assert!(planner.latest().is_none(), "a refused batch leaves no plan");

    let refused = |target, mode, limits| Planner::new(config, target, mode, limits).unwrap_err();
    let balanced = SplitMode::Balanced;
    assert_eq!(refused(Target::new(0, 64), balanced, limits).to_string(), "target.queues is 0; it must be at least 1");
    assert_eq!(
        refused(target, SplitMode::FixedSplit { tokens: 0 }, limits).to_string(),
        "FixedSplit tokens is 0; it must be at least 1"
    );
    let wide = Limits { max_requests: 1 << 20, max_query_tokens: 1 << 28, ..limits };
    assert!(matches!(refused(target, balanced, wide), PlanError::Unrepresentable { field: "plan image bytes", .. }));
    let long = Limits { max_kv_len_tokens: u32::MAX, ..limits };
    assert!(matches!(refused(target, balanced, long), PlanError::Unrepresentable { field: "max_kv_len_tokens", .. }));
}

#[test]
fn a_refused_batch_leaves_the_last_plan() {
    let mut planner = balanced(AttentionConfig::new(8, 2, 128, 16), 4, &[(1, 10)]);
    let before = planner.latest().unwrap().image().to_vec();
    let table = PageTable::block_table(16, 20, &[11u32]).unwrap();
    planner.plan(&table, QueryLengths::uniform(1)).unwrap_err();
    assert_eq!(planner.latest().unwrap().image(), before);
    assert_eq!(planner.latest().unwrap().kv_tokens(), 10);
}

#[test]
fn a_plan_explains_itself() {
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &[(1, 32_768)]);
    let explain = planner.latest().unwrap().explain();
    // 32768 keys x 8 heads x (K and V) x 128 elements x 2 bytes; the image is 256 bytes of header, 1280 of
    // queue_begin, 512 of merge rows and 256 items of 48.
    assert_eq!(explain.kv_bytes, 134_217_728);
    assert_eq!(
        explain.to_string(),
        "batch     1 requests, 1 query tokens, 32768 keys\n\
         tile      16 packed query rows x 64 keys\n\
         units     8 (request, KV head, row tile), the longest 512 tiles\n\
         items     256; 8 units cut, in at most 32 pieces\n\
         why       cut where a queue reached its share of 18 tiles; the longest unit has 512\n\
         queues    264, load min 0 mean 17.5 max 18 tiles, 97.0% busy\n\
         merge     32 output rows from 1024 partial states, 528384 bytes\n\
         bytes     134217728 of keys and values, 14336 of plan"
    );
}
