//! Plans against brute force: every (query row, visible key) pair exactly once, within the layout, evenly dealt.
//!
//! What a row may see is worked out here from the contract's words, one token at a time; nothing of the planner's
//! own arithmetic is used.

use std::collections::HashMap;
use std::mem::replace;
use std::ops::Range;

use kernels_gpu::abi::plan::{MaskRequest, PlanHeader, WorkItem};
use kernels_gpu::abi::tile::PrefillTile;
use oxattn::{AttentionConfig, Limits, MaskForm, PageTable, Plan, PlanError, Planner, QueryLengths, SplitMode, Target};
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

/// Keys that query token `t` sees, from the contract: with `p = t + kv_len - query_len`, `k <= p` if causal, and `p -
/// window_left <= k <= p + window_right`.
fn visible_keys(config: &AttentionConfig, (query_len, kv_len): Request, token: u32) -> Range<u32> {
    let position = token as i64 + kv_len as i64 - query_len as i64;
    let sees = |key: u32| {
        let ahead = key as i64 - position;
        (!config.causal || ahead <= 0)
            && config.window_left.is_none_or(|left| -ahead <= left as i64)
            && config.window_right.is_none_or(|right| ahead <= right as i64)
    };
    let begin = (0..kv_len).find(|&key| sees(key)).unwrap_or(0);
    begin..(begin..kv_len).find(|&key| !sees(key)).unwrap_or(kv_len)
}

/// From the first key that a row of `rows` sees to one past the last; `0..0` where none sees any.
fn keys_of_rows(config: &AttentionConfig, request: Request, rows: Range<u32>) -> Range<u32> {
    let keys = rows.map(|row| visible_keys(config, request, row / config.group())).filter(|keys| !keys.is_empty());
    keys.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

fn check(plan: &Plan, requests: &[Request]) {
    check_layout(plan);
    let config = *plan.config();
    let (group, heads) = (config.group(), config.kv_heads);
    let batch = Batch::new(config.page_size_tokens, requests);

    // The pieces of each (request, first row); an item covers all KV heads.
    let mut units: HashMap<(u32, u32), Vec<&WorkItem>> = HashMap::new();
    for item in plan.items() {
        let request = item.request as usize;
        let (query_len, kv_len) = requests[request];
        assert_eq!(item.query_position as i64, kv_len as i64 - query_len as i64);
        let begins = (batch.query_indptr[request], batch.page_indptr[request]);
        assert_eq!((item.query_begin_tokens, item.page_begin), begins);
        assert!(item.kv_end_tokens <= kv_len && item.kv_begin_tokens.is_multiple_of(plan.target().tile_tokens));
        let empty = (item.kv_begin_tokens, item.kv_end_tokens, item.pieces) == (0, 0, 1);
        assert!(item.kv_begin_tokens < item.kv_end_tokens || empty, "only a row tile without keys reads none");
        assert!(item.rows >= 1);
        assert!(item.row_begin + item.rows <= query_len * group);
        units.entry((item.request, item.row_begin)).or_default().push(item);
    }

    // Requests of more rows than a short item holds have tall ones, but for a last one that would be short; where
    // chunkings must not show, all items are tall.
    let tall_rows = plan.target().tall_rows;
    for (run, begin) in plan.queue_begin().windows(2).enumerate() {
        for item in &plan.items()[begin[0] as usize..begin[1] as usize] {
            let packed_rows = requests[item.request as usize].0 * group;
            let only_tall = has_only_tall(plan);
            let of_tall = tall_rows > 0 && packed_rows > 16 || only_tall;
            let tile_rows = if of_tall { tall_rows_of_batch(plan, requests) } else { 16 };
            assert_eq!(item.rows, tile_rows.min(packed_rows - item.row_begin));
            assert!(item.row_begin.is_multiple_of(tile_rows));
            let first = if plan.target().all_tall {
                // Even queues begin with prompts, odd ones with requests of few rows.
                (packed_rows > 64) == (run / 2 % 2 == 0)
            } else {
                of_tall && (item.rows > 16 || only_tall)
            };
            assert_eq!(run % 2 == 0, first, "{item:?} in the wrong run");
        }
    }

    // Who writes each partial state, and whose folds each count counts.
    let mut states = vec![false; plan.header().partial_rows as usize];
    let mut groups = vec![false; plan.header().groups as usize];
    let mut rows_written = 0;
    for pieces in units.values_mut() {
        pieces.sort_by_key(|item| item.piece);
        let (first, count) = (*pieces[0], pieces.len() as u32);
        assert!(pieces.iter().map(|item| item.piece).eq(0..count), "{pieces:?}");
        assert!(pieces.windows(2).all(|pair| pair[0].kv_end_tokens == pair[1].kv_begin_tokens), "{pieces:?}");
        for item in pieces.iter() {
            assert_eq!((item.rows, item.pieces), (first.rows, count));
            assert_eq!((item.partial_begin, item.group), (first.partial_begin, first.group));
        }
        // From the tile of the first key that any row sees to the last such key: nothing missed, no tile read in vain.
        let rows = first.row_begin..first.row_begin + first.rows;
        let seen = keys_of_rows(&config, requests[first.request as usize], rows);
        let tile_tokens = plan.target().tile_tokens;
        assert_eq!(seen.start / tile_tokens * tile_tokens, first.kv_begin_tokens);
        assert_eq!(Some(seen.end), pieces.last().map(|item| item.kv_end_tokens));
        rows_written += first.rows * heads;
        if count == 1 {
            assert_eq!((first.partial_begin, first.group), (0, 0));
            continue;
        }
        for head in 0..heads {
            assert!(!replace(&mut groups[(first.group + head) as usize], true), "count used twice");
            for row in 0..first.rows {
                for item in pieces.iter() {
                    let state = item.partial_begin + (head * item.rows + row) * item.pieces + item.piece;
                    assert!(!replace(&mut states[state as usize], true), "state {state} written twice");
                }
            }
        }
    }
    assert_eq!(rows_written, batch.query_indptr.last().unwrap() * config.query_heads, "every output row once");
    assert!(states.iter().all(|&written| written) && groups.iter().all(|&used| used), "none allotted in vain");
}

fn check_layout(plan: &Plan) {
    let (header, layout) = (plan.header(), plan.workspace());
    assert_eq!(bytemuck::pod_read_unaligned::<PlanHeader>(&plan.image()[..size_of::<PlanHeader>()]), header);
    assert_eq!(header.teams, plan.target().teams(plan.config().kv_heads).teams);
    assert_eq!(header.image_bytes, plan.image().len() as u64);
    assert!(header.items <= layout.max_items && header.groups <= layout.max_groups);
    assert!(header.partial_rows <= layout.max_partial_rows);
    let arrays = [
        (0, 48),
        (header.arrivals_offset_bytes as u64, 4 * layout.max_groups as u64),
        (header.queue_begin_offset_bytes as u64, 4 * (2 * header.teams as u64 + 1)),
        (header.items_offset_bytes as u64, 48 * layout.max_items as u64),
        (layout.partial_out_offset_bytes, 4 * layout.max_partial_rows as u64 * plan.config().head_dim as u64),
        (layout.partial_lse_offset_bytes, 4 * layout.max_partial_rows as u64),
        (layout.total_bytes, 0),
    ];
    assert!(arrays.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    assert!(arrays.iter().all(|array| array.0.is_multiple_of(256)));
    let offsets = (layout.arrivals_offset_bytes, layout.queue_begin_offset_bytes, layout.items_offset_bytes);
    assert_eq!((arrays[1].0, arrays[2].0, arrays[3].0), offsets);
    assert!(header.image_bytes <= layout.image_bytes && layout.image_bytes <= layout.partial_out_offset_bytes);
    let queue_begin = plan.queue_begin();
    assert_eq!(queue_begin.len() as u32, 2 * header.teams + 1);
    assert_eq!((queue_begin[0], queue_begin[2 * header.teams as usize]), (0, header.items));
    assert!(queue_begin.is_sorted());
    // The arrays that the accessors show are the bytes that are uploaded; counts start at zero.
    let array = |offset: u32, bytes: usize| &plan.image()[offset as usize..offset as usize + bytes];
    assert_eq!(array(header.items_offset_bytes, 48 * plan.items().len()), bytemuck::cast_slice::<_, u8>(plan.items()));
    let bytes: &[u8] = bytemuck::cast_slice(queue_begin);
    assert_eq!(array(header.queue_begin_offset_bytes, 4 * queue_begin.len()), bytes);
    assert!(array(header.arrivals_offset_bytes, 4 * header.groups as usize).iter().all(|&byte| byte == 0));
}

/// Rows of the batch's tall tiles: half of the target's where full ones, with a tile for each other request, are fewer
/// than one and a half a team, if the mode lets a batch matter and there are short items too.
fn tall_rows_of_batch(plan: &Plan, requests: &[Request]) -> u32 {
    let tall_rows = plan.target().tall_rows;
    let tiles = |request: &Request| (request.0 * plan.config().group()).div_ceil(tall_rows);
    let few = 2 * requests.iter().map(tiles).sum::<u32>() + 1 < 3 * plan.header().teams;
    let is_free = !plan.target().all_tall && matches!(plan.mode(), SplitMode::Balanced | SplitMode::Unsplit);
    if few && is_free { tall_rows / 2 } else { tall_rows }
}

fn item_tiles(plan: &Plan, item: &WorkItem) -> u64 {
    (item.kv_end_tokens - item.kv_begin_tokens).div_ceil(plan.target().tile_tokens) as u64
}

/// Whether an item of so many rows is tall.
fn is_tall(plan: &Plan, rows: u32) -> bool {
    has_only_tall(plan) || plan.target().tall_rows > 0 && rows > 16
}

/// What `rows` rows cost with `tiles` tiles, in tiles of a short item: by the documentation of `Cost`.
fn cost(plan: &Plan, rows: u32, tiles: u64) -> f64 {
    let tall_rows = plan.target().tall_rows;
    match is_tall(plan, rows) {
        false => tiles as f64 + 1.0,
        true if 2 * rows <= tall_rows && !plan.target().all_tall => tiles as f64 + 2.0,
        true => 1.5 * tiles as f64 + 3.0,
    }
}

/// The fullest queue of a balanced plan against the mean of the uncut units, which no plan beats.
fn check_balance(plan: &Plan, requests: &[Request]) {
    let (config, target) = (plan.config(), plan.target());
    let mut unit_costs = Vec::new();
    let mut has_tall = false;
    for &request in requests {
        let packed_rows = request.0 * config.group();
        let tile_rows = if is_tall(plan, packed_rows) { tall_rows_of_batch(plan, requests) } else { 16 };
        for row in (0..packed_rows).step_by(tile_rows as usize) {
            let rows = tile_rows.min(packed_rows - row);
            let keys = keys_of_rows(config, request, row..row + rows);
            let tiles = keys.end.div_ceil(target.tile_tokens) - keys.start / target.tile_tokens;
            unit_costs.push(cost(plan, rows, tiles as u64));
            has_tall |= is_tall(plan, rows);
        }
    }
    let mean = unit_costs.iter().sum::<f64>() / plan.header().teams as f64;
    let balance = plan.balance();
    assert_eq!(balance.queue_loads.len() as u32, plan.header().teams);
    // An item's cost for the cuts, and room too short for a piece, 3 tiles; of tall items 3 and 9, and what stays whole
    // past the share is up to 3 more of their tiles. Then rounding, and the slack that keeps a plan uncut.
    let (for_cuts, whole) = if has_tall { (13.0, 4.5) } else { (4.0, 1.0) };
    let share = mean + for_cuts + mean / 512.0;
    assert!(balance.max <= share + (share / 25.0).max(whole), "max {} mean {mean}\n{}", balance.max, plan.explain());
    // So it is within 4/3 of the mean, or of the longest unit that is no longer than two of the shortest pieces.
    let shortest = if has_tall { 9.0 } else { 3.0 };
    let uncuttable = unit_costs.iter().copied().filter(|cost| *cost < 2.0 * shortest - 1.0).fold(0.0, f64::max);
    let least = mean.max(uncuttable);
    let most = (4.0 * least / 3.0).max(least + for_cuts + whole);
    assert!(balance.max <= most, "max {} least {least}\n{}", balance.max, plan.explain());

    let cut = plan.items().iter().filter(|item| item.pieces > 1);
    let shortest = |item: &WorkItem| if is_tall(plan, item.rows) { 4 } else { 2 };
    assert!(cut.clone().all(|item| item_tiles(plan, item) >= shortest(item)), "a piece too short");
    let cuts: u64 = cut.filter(|item| item.piece > 0).count() as u64;
    assert!(cuts <= plan.header().teams as u64, "{cuts} cuts for {} queues", plan.header().teams);
}

/// Pieces dealt to the least loaded queue: the mean and one longest piece, to 1/512 of it.
fn check_spread(plan: &Plan) {
    let balance = plan.balance();
    let costs = plan.items().iter().map(|item| cost(plan, item.rows, item_tiles(plan, item)));
    let longest = costs.fold(0.0, f64::max);
    assert!(balance.max <= balance.mean + longest * (1.0 + 1.0 / 256.0) + 1.0, "{balance:?}");
}

fn modes() -> impl Strategy<Value = SplitMode> {
    prop_oneof![
        3 => Just(SplitMode::Balanced),
        2 => Just(SplitMode::BatchInvariant),
        1 => (1u32..700).prop_map(|tokens| SplitMode::FixedSplit { tokens }),
        1 => Just(SplitMode::Unsplit),
    ]
}

/// What a target's kernel makes of rows.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Tall items of so many rows, and short ones.
    Mixed { tall_rows: u32 },
    /// Tall items alone.
    Tall { all_busy: bool },
}

impl Kind {
    fn target(self, blocks: u32, tile_tokens: u32) -> Target {
        let mut target = Target::new(blocks, tile_tokens);
        match self {
            Kind::Mixed { tall_rows } => target.tall_rows = tall_rows,
            Kind::Tall { all_busy } => {
                (target.tall_rows, target.all_tall, target.all_busy) = (128, true, all_busy);
            }
        }
        target
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    let mixed = [0, 64, 128].map(|tall_rows| Kind::Mixed { tall_rows });
    let tall = [false, true].map(|all_busy| Kind::Tall { all_busy });
    prop::sample::select([mixed.as_slice(), &tall].concat())
}

/// Whether the plan has no short items: its kernel has none, or its mode wants none.
fn has_only_tall(plan: &Plan) -> bool {
    let target = plan.target();
    target.tall_rows > 0 && (target.all_tall || matches!(plan.mode(), SplitMode::FixedSplit { .. }))
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let query = prop_oneof![4 => Just(1u32), 1 => Just(0), 2 => 0u32..12, 1 => 0u32..90];
    let kv = prop_oneof![1 => Just(0u32), 3 => 0u32..40, 3 => 0u32..3000, 1 => 0u32..20_000];
    prop::collection::vec((query, kv), 0..24)
}

fn configs() -> impl Strategy<Value = AttentionConfig> {
    let heads = vec![(1, 1), (8, 2), (5, 1), (40, 8), (32, 8), (64, 1), (71, 71), (36, 3), (128, 1), (64, 8)];
    let pages = vec![1u32, 3, 16, 64];
    let window = || prop::option::weighted(0.3, prop_oneof![0u32..100, 0u32..3000, Just(u32::MAX)]);
    let shape = (prop::sample::select(heads), prop::sample::select(pages));
    (shape, any::<bool>(), window(), window()).prop_map(|(((query, kv), page), causal, left, right)| {
        let config = AttentionConfig::new(query, kv, 128, page).with_window(left, right);
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
        blocks in 1u32..300,
        tile_tokens in prop::sample::select(vec![16u32, 32, 48, 64, 128]),
        kind in kinds(),
    ) {
        let target = kind.target(blocks, tile_tokens);
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
    fn any_batch_within_any_limits_fits(
        config in configs(),
        requests in requests(),
        mode in modes(),
        blocks in 1u32..300,
        room in (0u32..8, 0u32..200, 0u32..5000, 0u64..50_000),
        kind in kinds(),
    ) {
        let tight = tight_limits(&requests);
        let limits = Limits {
            max_requests: tight.max_requests + room.0,
            max_query_tokens: tight.max_query_tokens + room.1,
            max_kv_len_tokens: tight.max_kv_len_tokens + room.2,
            max_kv_tokens: tight.max_kv_tokens + room.3,
        };
        let mut planner = Planner::new(config, kind.target(blocks, 64), mode, limits).unwrap();
        let (layout, page) = (planner.workspace_size(), config.page_size_tokens);
        // The batch, and as many like its longest request as the limits hold.
        let longest = requests.iter().copied().max_by_key(|request| request.1).unwrap_or((1, 1));
        let mut many = Vec::new();
        let (mut query_tokens, mut kv_tokens) = (0, 0);
        while many.len() < limits.max_requests as usize {
            query_tokens += longest.0;
            kv_tokens += longest.1 as u64;
            if query_tokens > limits.max_query_tokens || kv_tokens > limits.max_kv_tokens {
                break;
            }
            many.push(longest);
        }
        for batch in [&requests, &many] {
            let plan = Batch::new(page, batch).plan(&mut planner, page);
            check(plan, batch);
            prop_assert_eq!(*plan.workspace(), layout);
        }
    }

    #[test]
    fn a_refreshed_plan_equals_a_fresh_one(
        config in configs(),
        first in requests(),
        second in requests(),
        mode in modes(),
        blocks in 1u32..140,
        kind in kinds(),
    ) {
        let (a, b) = (tight_limits(&first), tight_limits(&second));
        let limits = Limits {
            max_requests: a.max_requests.max(b.max_requests),
            max_query_tokens: a.max_query_tokens.max(b.max_query_tokens),
            max_kv_len_tokens: a.max_kv_len_tokens.max(b.max_kv_len_tokens),
            max_kv_tokens: a.max_kv_tokens.max(b.max_kv_tokens),
        };
        let (page, target) = (config.page_size_tokens, kind.target(blocks, 64));
        let mut planner = Planner::new(config, target, mode, limits).unwrap();
        let layout = planner.workspace_size();
        Batch::new(page, &first).plan(&mut planner, page);
        let refreshed = Batch::new(page, &second).plan(&mut planner, page);
        check(refreshed, &second);
        prop_assert_eq!(refreshed.epoch(), 2);
        prop_assert_eq!(*refreshed.workspace(), layout);
        // The bytes of a planner that never saw the first batch, but for the epoch.
        let epoch = std::mem::offset_of!(PlanHeader, epoch);
        let mut fresh = Planner::new(config, target, mode, limits).unwrap();
        let fresh = Batch::new(page, &second).plan(&mut fresh, page);
        prop_assert_eq!(&refreshed.image()[..epoch], &fresh.image()[..epoch]);
        prop_assert_eq!(&refreshed.image()[epoch + 8..], &fresh.image()[epoch + 8..]);
    }

    #[test]
    fn batch_mates_do_not_change_invariant_cuts(
        config in configs(),
        mates in requests(),
        request in (0u32..20, 0u32..20_000),
        slot in 0usize..24,
        blocks in 1u32..300,
        fixed_tokens in prop::option::of(1u32..700),
        kind in kinds(),
    ) {
        let mode = fixed_tokens.map_or(SplitMode::BatchInvariant, |tokens| SplitMode::FixedSplit { tokens });
        let cuts = |requests: &[Request], slot: usize, blocks: u32| {
            let target = kind.target(blocks, 64);
            let mut planner = Planner::new(config, target, mode, tight_limits(requests)).unwrap();
            let plan = Batch::new(config.page_size_tokens, requests).plan(&mut planner, config.page_size_tokens);
            let of_slot = plan.items().iter().filter(|item| item.request == slot as u32);
            let mut cuts: Vec<_> = of_slot
                .map(|i| (i.row_begin, i.rows, i.kv_begin_tokens, i.kv_end_tokens, i.pieces, i.piece))
                .collect();
            cuts.sort_unstable();
            cuts
        };
        let slot = slot.min(mates.len());
        let mut mixed = mates;
        mixed.insert(slot, request);
        prop_assert_eq!(cuts(&mixed, slot, blocks), cuts(&[request], 0, 132));
    }
}

fn balanced(config: AttentionConfig, blocks: u32, requests: &[Request]) -> Planner {
    let target = Target::new(blocks, 64);
    let mut planner = Planner::new(config, target, SplitMode::Balanced, tight_limits(requests)).unwrap();
    Batch::new(config.page_size_tokens, requests).plan(&mut planner, config.page_size_tokens);
    planner
}

#[test]
fn equal_units_that_nearly_fill_the_queues_stay_whole() {
    // 64 units of 128 tiles + 1 on 33 queues: two a queue on 32 of them is 258, a fair share 250.2.
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &[(1, 8192); 64]);
    let plan = planner.latest().unwrap();
    assert_eq!((plan.items().len(), plan.header().partial_rows, plan.header().groups), (64, 0, 0));
    assert_eq!(plan.balance().max, 258.0);
}

#[test]
fn one_long_request_uses_all_teams() {
    // 512 tiles on 33 queues are 15.5 each: 17 pieces of 16 tiles and 16 of 15 fill them evenly.
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &[(1, 32_768)]);
    let plan = planner.latest().unwrap();
    assert_eq!((plan.items().len(), plan.balance().min, plan.balance().max), (33, 16.0, 17.0));
    assert_eq!(plan.balance().queue_loads.iter().filter(|load| **load == 17.0).count(), 17);
    assert!(plan.items().iter().all(|item| item.pieces == 33));
    assert!(plan.queues().all(|queue| queue.len() == 1));
    // 4 rows of 8 heads, 33 states each, and a count a head.
    assert_eq!((plan.header().partial_rows, plan.header().groups), (4 * 8 * 33, 8));
}

#[test]
fn many_rows_make_tall_items_beside_short_ones() {
    // 4 heads a token: 40 tokens are 160 rows, a tall tile of 128 and one of 32; 33 tokens leave a short one of 4; and a
    // token alone is short.
    let config = AttentionConfig::new(32, 8, 128, 16);
    let requests = [(40, 40), (33, 33), (1, 1000)];
    let target = Target::new(8, 64).with_tall_rows(128);
    let mut planner = Planner::new(config, target, SplitMode::Unsplit, tight_limits(&requests)).unwrap();
    let plan = Batch::new(16, &requests).plan(&mut planner, 16);
    check(plan, &requests);
    let rows = |items: &[WorkItem]| items.iter().map(|i| (i.request, i.row_begin, i.rows)).collect::<Vec<_>>();
    let (tall, short) = plan.items().split_at(plan.queue_begin()[1] as usize);
    assert_eq!(rows(tall), [(0, 128, 32), (0, 0, 128), (1, 0, 128)]);
    assert_eq!(rows(short), [(2, 0, 4), (1, 128, 4)]);
    // 1 + 2 and 1.5 + 3 twice; 16 + 1 and 1 + 1.
    assert_eq!(plan.balance().max, 3.0 + 4.5 + 4.5 + 17.0 + 2.0);
    assert_eq!(plan.explain().tall_units, 3);
    assert!(plan.explain().to_string().contains("5 (request, row tile), 3 tall"), "{}", plan.explain());
}

#[test]
fn items_of_a_prefill_are_all_tall_and_cost_the_same() {
    // 4 heads a token: 160 rows are 2 tiles, 4 rows one, and 20 one; none is of 64 rows for all the 8 idle blocks.
    let config = AttentionConfig::new(32, 8, 128, 16);
    let requests = [(40, 40), (1, 1000), (5, 300), (2, 0)];
    for all_busy in [false, true] {
        let target = Target::for_prefill(132, PrefillTile::new(128, 128, true).unwrap(), all_busy);
        assert_eq!((target.tall_rows, target.tile_tokens, target.all_tall), (128, 128, true));
        let mut planner = Planner::new(config, target, SplitMode::Unsplit, tight_limits(&requests)).unwrap();
        let plan = Batch::new(16, &requests).plan(&mut planner, 16);
        check(plan, &requests);
        let mut rows: Vec<_> = plan.items().iter().map(|i| (i.request, i.row_begin, i.rows)).collect();
        rows.sort_unstable();
        assert_eq!(rows, [(0, 0, 128), (0, 128, 32), (1, 0, 4), (2, 0, 20), (3, 0, 8)]);
        // An item a team at most: 1.5 a tile of 128 keys and 3, whatever the rows; 8, 3, 1, 1 and no tiles.
        let mut loads = plan.balance().queue_loads;
        loads.sort_unstable_by(f64::total_cmp);
        assert_eq!(loads.len(), if all_busy { 33 } else { 16 });
        assert_eq!(loads[loads.len() - 6..], [0.0, 3.0, 4.5, 4.5, 7.5, 15.0]);
        assert_eq!(plan.explain().tall_units, 5);
    }
}

#[test]
fn one_long_request_among_short_ones_is_cut() {
    // 63 units of 8 + 1 tiles and one of 1563 + 1 are 2131, 64.6 a queue; uncut, the longest is 1564.
    let mut requests = vec![(1, 512); 63];
    requests.push((1, 100_000));
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &requests);
    let plan = planner.latest().unwrap();
    assert!(plan.balance().max <= 66.0, "{}", plan.explain());
    let whole = plan.items().iter().filter(|item| item.pieces == 1).count();
    assert!(whole >= 62, "all but one short unit stay whole: {}", plan.explain());
}

#[test]
fn units_of_mixed_lengths_are_hardly_cut() {
    // 128 lengths from 150 to 6800 tokens, 4 units a queue, two of them longer than a share of 54 tiles. The shortest
    // units of 3 tiles, too short to cut, leave gaps of as much.
    let lengths = |i: u32| 150 + (i * i * i) / 400 % 1800 + if i % 50 == 49 { 6000 } else { 0 };
    let requests: Vec<_> = (0..128).map(|i| (1, lengths(i))).collect();
    let planner = balanced(AttentionConfig::new(32, 8, 128, 16), 264, &requests);
    let explain = planner.latest().unwrap().explain();
    assert!(explain.cut_units == 2 && explain.balance.efficiency() > 0.95, "{explain}");
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
fn zero_lengths_are_planned_for_any_block_count() {
    // 24 requests of 5 query tokens, 40 query heads on 8 KV heads, some of them without keys.
    let config = AttentionConfig::new(40, 8, 128, 16);
    for empty in [0, 1, 7, 24] {
        let requests: Vec<_> = (0..24).map(|r| (5, if r < empty { 0 } else { 100 * r })).collect();
        for blocks in 1..=132 {
            check(balanced(config, blocks, &requests).latest().unwrap(), &requests);
        }
    }
}

#[test]
fn unsplit_is_one_item_a_row_tile() {
    // 3 and 40 pages of 16 tokens: two units, whatever the blocks.
    let requests = [(1, 48), (1, 640)];
    for blocks in [1, 8, 264] {
        let target = Target::new(blocks, 64);
        let config = AttentionConfig::new(32, 8, 128, 16);
        let mut planner = Planner::new(config, target, SplitMode::Unsplit, tight_limits(&requests)).unwrap();
        let plan = Batch::new(16, &requests).plan(&mut planner, 16);
        assert_eq!((plan.items().len(), plan.workspace().max_items, plan.workspace().max_partial_rows), (2, 2, 0));
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
        // 2 row tiles for 8 heads, then 16.
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
    // 33 teams cut as many units at most, so 66 pieces of 16 rows for 8 heads: 8448 states, and 264 counts.
    assert_eq!((layout.max_partial_rows, layout.max_groups), (8448, 264));
    assert_eq!(layout.partial_lse_offset_bytes - layout.partial_out_offset_bytes, 8448 * 256 * 4);
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

    let refused = |target, mode, limits| Planner::new(config, target, mode, limits).map(drop).unwrap_err();
    let balanced = SplitMode::Balanced;
    assert_eq!(refused(Target::new(0, 64), balanced, limits).to_string(), "target.blocks is 0; it must be at least 1");
    assert_eq!(
        refused(target, SplitMode::FixedSplit { tokens: 0 }, limits).to_string(),
        "FixedSplit tokens is 0; it must be at least 1"
    );
    assert_eq!(
        refused(target.with_tall_rows(100), balanced, limits).to_string(),
        "target.tall_rows is 100; it must be a multiple of 16, or 0"
    );
    let wide = Limits { max_requests: 1 << 28, max_query_tokens: 1 << 28, ..limits };
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
    // 32768 keys x 8 heads x (K and V) x 128 elements x 2 bytes; the image is 256 bytes each of header and
    // counts, 512 of queue_begin, and 33 items of 48.
    assert_eq!(explain.kv_bytes, 134_217_728);
    assert_eq!(
        explain.to_string(),
        "batch     1 requests, 1 query tokens, 32768 keys\n\
         tile      16 packed query rows x 64 keys\n\
         units     1 (request, row tile), 0 tall, the longest 512 tiles\n\
         items     33; 1 units cut, in at most 33 pieces\n\
         why       cut where a queue reached its share of 17 tiles; the longest unit has 512\n\
         teams     33 of 8 blocks, 1 KV heads a block; load min 16 mean 16.5 max 17 tiles, 97.1% busy\n\
         fold      1056 partial states, 544896 bytes\n\
         bytes     134217728 of keys and values, 2608 of plan"
    );
}

/// A window's keys are planned, and the rest of their tiles; the plan's work follows the window, not the length.
#[test]
fn only_a_window_s_tiles_are_planned() {
    let keys = |config: AttentionConfig, mode, requests: &[Request]| {
        let mut planner = Planner::new(config, Target::new(264, 64), mode, tight_limits(requests)).unwrap();
        let plan = Batch::new(16, requests).plan(&mut planner, 16);
        check(plan, requests);
        plan.items().iter().map(|item| (item.kv_end_tokens - item.kv_begin_tokens) as u64).sum::<u64>()
    };
    let config = AttentionConfig::new(32, 8, 128, 16);
    let decode = [(1, 100_000)];
    // Position 99,999 sees keys 99,000 and later; their first tile begins at 98,944.
    for mode in [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::Unsplit] {
        assert_eq!(keys(config.with_window(Some(999), None), mode, &decode), 100_000 - 98_944);
        assert_eq!(keys(config.with_window(Some(0), None), mode, &decode), 32);
        assert_eq!(keys(config.with_window(Some(u32::MAX), None), mode, &decode), 100_000);
    }
    // Four tokens a row tile, the last of which sees key 4 + 10 at most: positions 96 to 99 and 100 to 103 of 104.
    let both = config.non_causal().with_window(Some(10), Some(10));
    assert_eq!(keys(both, SplitMode::Unsplit, &[(8, 104)]), (104 - 64) + (104 - 64));
    assert_eq!(keys(both, SplitMode::Unsplit, &[(8, 200)]), (200 - 128) * 2);
    // Tokens before the first key, which see it through their window or not at all.
    assert_eq!(keys(config.non_causal().with_window(None, Some(2)), SplitMode::Unsplit, &[(8, 2)]), 2);
}

/// Each request's part of a mask starts with a byte of its own.
#[test]
fn masks_are_placed_one_after_another() {
    let requests = [(3, 5), (0, 7), (1, 9), (2, 0), (2, 8)];
    for (form, begins, bytes) in
        [(MaskForm::Bits, [0, 16, 16, 32, 32], 2 + 2 + 2), (MaskForm::Bytes, [0, 15, 15, 24, 24], 15 + 9 + 16)]
    {
        let config = AttentionConfig::new(8, 2, 128, 16).with_mask(form);
        let mut planner =
            Planner::new(config, Target::new(4, 64), SplitMode::Balanced, tight_limits(&requests)).unwrap();
        let plan = Batch::new(16, &requests).plan(&mut planner, 16);
        check(plan, &requests);
        assert_eq!(plan.mask_bytes(), bytes);
        let offset = plan.workspace().mask_requests_offset_bytes as usize;
        let places: &[MaskRequest] = bytemuck::cast_slice(&plan.image()[offset..offset + 16 * requests.len()]);
        assert!(places.iter().map(|place| place.begin_elements).eq(begins));
        assert!(places.iter().map(|place| place.kv_len_tokens).eq([5, 7, 9, 0, 8]));
    }
}

/// Rows without pages change nothing of a plan but where keys are looked for: request by request, in one page each.
#[test]
fn ragged_requests_have_a_page_each() {
    let requests = [(3, 5), (0, 7), (1, 900), (2, 0), (70, 300)];
    let batch = Batch::new(16, &requests);
    let query = QueryLengths::indptr(&batch.query_indptr).unwrap();
    let (adjacent, spread) = ([0u32, 5, 12, 912, 912, 1212], [0u32, 6, 20, 920, 923, 1223]);
    let tables = [
        (PageTable::ragged(&adjacent).unwrap(), adjacent),
        (PageTable::ragged_with_lens(&spread, &batch.kv_lens).unwrap(), spread),
    ];
    for mode in [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 128 }] {
        let planner = |config: AttentionConfig| {
            Planner::new(config.with_mask(MaskForm::Bits), Target::new(8, 64), mode, tight_limits(&requests)).unwrap()
        };
        let mut paged = planner(AttentionConfig::new(8, 2, 128, 16));
        let paged = batch.plan(&mut paged, 16);
        let mut ragged = planner(AttentionConfig::ragged(8, 2, 128));
        for (table, row_begin) in &tables {
            let plan = ragged.plan(table, query).unwrap();
            check_layout(plan);
            let expected = paged.items().iter().map(|item| WorkItem { page_begin: item.request, ..*item });
            assert!(plan.items().iter().copied().eq(expected), "{mode:?}");
            assert_eq!(plan.queue_begin(), paged.queue_begin());
            let layout = plan.workspace();
            let (begin, end) = (layout.first_kv_rows_offset_bytes as usize, layout.items_offset_bytes as usize);
            assert!(layout.mask_requests_offset_bytes as usize + 16 * requests.len() <= begin);
            assert!(begin + 4 * requests.len() <= end);
            let first_rows: &[u32] = bytemuck::cast_slice(&plan.image()[begin..][..4 * requests.len()]);
            assert_eq!(first_rows, &row_begin[..requests.len()]);
        }
    }
}
