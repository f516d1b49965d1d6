//! Plans of shared prefixes against brute force: every (query row, visible key) pair exactly once, every state and
//! every split row tile folded once, within the layout.
//!
//! What requests have in common is worked out here from the table's array, one pair of requests at a time.

use std::collections::{BTreeSet, HashMap};

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::plan::{NOT_COUNTED, PlanHeader, SHARED, WorkItem};
use kernels_gpu::abi::tile::PrefillTile;
use oxattn::{
    AttentionConfig, Limits, MaskForm, NotShared, PageTable, PageTableError, Plan, Planner, QueryLengths, Sharing,
    SplitMode, Target,
};
use proptest::prelude::*;

/// Where an image says which plan of its planner it is.
const EPOCH: usize = std::mem::offset_of!(PlanHeader, epoch);

/// (query_len, kv_len, keys in common with the request before).
type Request = (u32, u32, u32);

/// A batch with its own metadata.
struct Batch {
    query_indptr: Vec<u32>,
    page_indptr: Vec<u32>,
    kv_lens: Vec<u32>,
    shared_tokens: Vec<u32>,
}

impl Batch {
    fn new(page_size_tokens: u32, requests: &[Request]) -> Batch {
        let sums = |of: &dyn Fn(&Request) -> u32| {
            let mut sums = vec![0];
            requests.iter().for_each(|request| sums.push(sums[sums.len() - 1] + of(request)));
            sums
        };
        Batch {
            query_indptr: sums(&|request| request.0),
            page_indptr: sums(&|request| request.1.div_ceil(page_size_tokens)),
            kv_lens: requests.iter().map(|request| request.1).collect(),
            shared_tokens: requests.iter().map(|request| request.2).collect(),
        }
    }

    fn table(&self, page_size_tokens: u32) -> PageTable<'_> {
        PageTable::csr(page_size_tokens, &self.page_indptr, &self.kv_lens).unwrap()
    }

    fn plan<'a>(&self, planner: &'a mut Planner, page_size_tokens: u32) -> &'a Plan {
        let table = self.table(page_size_tokens).with_shared_prefixes(&self.shared_tokens).unwrap();
        planner.plan(&table, QueryLengths::indptr(&self.query_indptr).unwrap()).unwrap()
    }

    fn plan_flat<'a>(&self, planner: &'a mut Planner, page_size_tokens: u32) -> &'a Plan {
        planner.plan(&self.table(page_size_tokens), QueryLengths::indptr(&self.query_indptr).unwrap()).unwrap()
    }

    /// The request of a query token.
    fn request_of(&self, token: u32) -> usize {
        self.query_indptr.partition_point(|&begin| begin <= token) - 1
    }

    /// Keys that two requests have in common.
    fn in_common(&self, first: usize, second: usize) -> u32 {
        (first + 1..=second).map(|request| self.shared_tokens[request]).min().unwrap_or(u32::MAX)
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

/// What a row of the batch meets in an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Meeting {
    kv_begin: u32,
    /// One past the last key of the item that the row sees.
    kv_end: u32,
    /// State of KV head 0, and how far that of the next one is.
    state: u32,
    head_states: u32,
    /// What an own item says of all pieces; 0 for a shared one.
    pieces: u32,
}

/// Holds a plan against the batch; returns whether it shares.
fn check(plan: &Plan, requests: &[Request]) -> bool {
    let config = *plan.config();
    let (group, heads) = (config.group(), config.kv_heads);
    let batch = Batch::new(config.page_size_tokens, requests);
    let (header, layout, items) = (plan.header(), plan.workspace(), plan.items());
    assert!(header.items <= layout.max_items && header.groups <= layout.max_groups);
    assert!(header.partial_rows <= layout.max_partial_rows);
    assert!(plan.shared_rows().len() as u32 <= layout.max_shared_rows);
    assert!(header.image_bytes <= layout.image_bytes && header.image_bytes == plan.image().len() as u64);
    assert!(header.folds <= layout.max_folds);
    // Both arrays by the offsets that kernels use.
    let behind = &plan.image()[header.items_offset_bytes as usize..];
    let word = |index: u32| u32::from_ne_bytes(behind[4 * index as usize..][..4].try_into().unwrap());

    let mut meetings: HashMap<(u32, u32), Vec<Meeting>> = HashMap::new();
    let shares = items.iter().any(|item| item.is_shared());
    let mut arrivals = vec![0; header.groups as usize];
    let mut expected_arrivals = vec![0; header.groups as usize];
    let mut split_tiles = BTreeSet::new();
    let mut states = vec![false; header.partial_rows as usize];
    for item in items {
        let request = item.request as usize;
        assert_eq!(
            (item.query_begin_tokens, item.page_begin),
            (batch.query_indptr[request], batch.page_indptr[request])
        );
        assert!(item.kv_begin_tokens.is_multiple_of(plan.target().tile_tokens) && item.rows >= 1);
        for row in 0..item.rows {
            let (token, head) = ((item.row_begin + row) / group, (item.row_begin + row) % group);
            let owner = batch.request_of(item.query_begin_tokens + token);
            let (query_len, kv_len, _) = requests[owner];
            let own_token = item.query_begin_tokens + token - batch.query_indptr[owner];
            let position = own_token as i64 + kv_len as i64 - query_len as i64;
            let limit = if config.causal { (position + 1).clamp(0, kv_len as i64) as u32 } else { kv_len };
            let (state, head_states, pieces) = if item.is_shared() {
                assert!(item.kv_end_tokens <= batch.in_common(request, owner), "{item:?} for request {owner}");
                assert!(item.kv_end_tokens <= limit && item.kv_end_tokens as i64 <= position, "hidden keys");
                assert!(item.query_position as i64 >= item.kv_end_tokens as i64);
                let index = 2 * (item.partial_begin + row);
                (word(index) + item.piece, word(index + 1), 0)
            } else {
                assert_eq!((owner, item.query_position as i64), (request, kv_len as i64 - query_len as i64));
                let state = item.partial_begin + row * item.pieces + item.piece;
                (state, item.rows * item.pieces, item.pieces)
            };
            let (kv_begin, kv_end) = (item.kv_begin_tokens, item.kv_end_tokens.min(limit).max(item.kv_begin_tokens));
            let meeting = Meeting { kv_begin, kv_end, state, head_states, pieces };
            meetings.entry((item.query_begin_tokens + token, head)).or_default().push(meeting);
        }
        if !item.is_shared() && item.pieces > 1 {
            split_tiles.insert((item.request, item.row_begin));
        }
        if shares {
            assert!(item.pieces == 1 || item.group == NOT_COUNTED, "{item:?} is folded twice");
        } else if item.pieces > 1 {
            for head in 0..heads {
                let count = (item.group + head) as usize;
                arrivals[count] += 1;
                expected_arrivals[count] = item.pieces;
            }
        }
    }
    assert_eq!(arrivals, expected_arrivals);
    let folds = &plan.image()[header.folds_offset_bytes as usize..][..4 * header.folds as usize];
    let folds: Vec<u32> = folds.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(folds, plan.folds());
    let folded = folds.iter().map(|&index| items[index as usize]).inspect(|item| {
        assert!(!item.is_shared() && item.pieces > 1, "{item:?} says not where the states are");
    });
    let folded: BTreeSet<_> = folded.map(|item| (item.request, item.row_begin)).collect();
    assert_eq!(folded.len(), folds.len(), "a row tile folded twice");
    assert_eq!(folded, if shares { split_tiles } else { BTreeSet::new() });

    for (owner, &(query_len, kv_len, _)) in requests.iter().enumerate() {
        for token in 0..query_len {
            let position = token as i64 + kv_len as i64 - query_len as i64;
            let end = if config.causal { (position + 1).clamp(0, kv_len as i64) as u32 } else { kv_len };
            for head in 0..group {
                let mut of_row = meetings.remove(&(batch.query_indptr[owner] + token, head)).expect("every row");
                of_row.sort_unstable();
                let mut seen = 0;
                for meeting in &of_row {
                    // Pieces past the row's own key are there for rows after it.
                    assert!(meeting.kv_begin == seen || meeting.kv_begin >= end, "{of_row:?}");
                    seen = meeting.kv_end.min(end).max(seen);
                }
                assert_eq!(seen, end, "{of_row:?}");
                let own = of_row.last().expect("one at least");
                assert_eq!(own.pieces, of_row.len() as u32, "own keys come last: {of_row:?}");
                if own.pieces == 1 {
                    continue;
                }
                for (piece, meeting) in of_row.iter().enumerate() {
                    assert_eq!(meeting.state, of_row[0].state + piece as u32, "{of_row:?}");
                    assert_eq!(meeting.head_states, own.head_states);
                    for kv_head in 0..heads {
                        let state = &mut states[(meeting.state + kv_head * meeting.head_states) as usize];
                        assert!(!std::mem::replace(state, true), "a state written twice");
                    }
                }
            }
        }
    }
    assert!(meetings.is_empty() && states.iter().all(|&written| written));
    shares
}

fn targets() -> impl Strategy<Value = Target> {
    let kind = prop::sample::select(vec![(0, false), (48, false), (64, false), (128, false), (128, true)]);
    (1u32..200, prop::sample::select(vec![16u32, 64, 128]), kind).prop_map(|(blocks, tile_tokens, (rows, all_tall))| {
        let mut target = Target::new(blocks, tile_tokens).with_tall_rows(rows);
        target.all_tall = all_tall;
        target
    })
}

fn configs() -> impl Strategy<Value = AttentionConfig> {
    let heads = vec![(1, 1), (8, 2), (5, 1), (32, 8), (7, 1), (64, 1), (71, 71)];
    let shape = (prop::sample::select(heads), prop::sample::select(vec![1u32, 3, 16, 64]));
    (shape, 1u32..=8, any::<bool>()).prop_map(|(((query, kv), page), levels, causal)| {
        let config = AttentionConfig::new(query, kv, 128, page).with_shared_prefixes(levels).always_sharing();
        if causal { config } else { config.non_causal() }
    })
}

/// Requests most of which have some keys in common with the one before; few lengths, so that groups nest.
fn requests() -> impl Strategy<Value = Vec<Request>> {
    let query = prop_oneof![6 => Just(1u32), 1 => Just(0), 2 => 0u32..12, 1 => 0u32..90];
    let kv = prop_oneof![1 => 0u32..40, 5 => 500u32..1200, 1 => 0u32..6000];
    let shared =
        prop_oneof![3 => prop::sample::select(vec![0u32, 128, 300, 301, 640]), 2 => Just(u32::MAX), 1 => any::<u32>()];
    prop::collection::vec((query, kv, shared), 0..40).prop_map(|mut requests: Vec<Request>| {
        for index in 0..requests.len() {
            let before = if index == 0 { 0 } else { requests[index - 1].1 };
            let most = before.min(requests[index].1);
            let request = &mut requests[index].2;
            *request =
                if *request > 1 << 20 && *request != u32::MAX { *request % (most + 1) } else { most.min(*request) };
        }
        requests
    })
}

fn mode() -> impl Strategy<Value = SplitMode> {
    prop_oneof![3 => Just(SplitMode::Balanced), 1 => Just(SplitMode::Unsplit)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_meets_every_visible_key_once(
        config in configs(),
        requests in requests(),
        mode in mode(),
        target in targets(),
    ) {
        let mut planner = Planner::new(config, target, mode, tight_limits(&requests)).unwrap();
        let batch = Batch::new(config.page_size_tokens, &requests);
        let plan = batch.plan(&mut planner, config.page_size_tokens);
        let shares = check(plan, &requests);
        let sharing = plan.sharing();
        prop_assert_eq!(shares, sharing.shared_requests > 0);
        prop_assert_eq!(shares, sharing.saved_kv_tokens > 0);
        prop_assert_eq!(shares || requests.iter().all(|request| request.2 == 0), sharing.not_shared.is_none());

        // Within larger limits too, over another plan, and with the same bytes but for the epoch at 32.
        let image = plan.image().to_vec();
        let tight = tight_limits(&requests);
        let mut again = Planner::new(config, target, mode, tight).unwrap();
        batch.plan_flat(&mut again, config.page_size_tokens);
        let refreshed = batch.plan(&mut again, config.page_size_tokens);
        prop_assert_eq!(&refreshed.image()[..EPOCH], &image[..EPOCH]);
        prop_assert_eq!(&refreshed.image()[EPOCH + 8..], &image[EPOCH + 8..]);
        prop_assert_eq!(refreshed.sharing(), sharing);
    }

    /// The pages that items name for the check of ids are those that the plan reads, where prefixes are whole pages.
    #[test]
    fn each_page_that_is_read_is_named(
        config in configs(),
        requests in requests(),
        mode in mode(),
        target in targets(),
    ) {
        let page = config.page_size_tokens;
        let whole_pages = requests.iter().map(|&(query_len, kv_len, shared)| (query_len, kv_len, shared / page * page));
        let requests: Vec<Request> = whole_pages.collect();
        let batch = Batch::new(page, &requests);
        let mut ids: Vec<u32> = (0..*batch.page_indptr.last().unwrap()).collect();
        for request in 1..requests.len() {
            let [before, own] = [request - 1, request].map(|request| batch.page_indptr[request] as usize);
            ids.copy_within(before..before + (batch.shared_tokens[request] / page) as usize, own);
        }
        let mut planner = Planner::new(config, target, mode, tight_limits(&requests)).unwrap();
        let plan = batch.plan(&mut planner, page);
        let id_of = |item: &WorkItem, position: u32| ids[(item.page_begin + position) as usize];
        let divisor = |value| Divisor::new(value).unwrap();
        let mut named = Vec::new();
        let mut read = BTreeSet::new();
        for item in plan.items() {
            let pages = item.first_read_pages(divisor(page), divisor(config.group()), config.keys_after());
            named.extend(pages.map(|position| id_of(item, position)));
            let pages = item.kv_begin_tokens / page..item.kv_end_tokens.div_ceil(page);
            read.extend(pages.map(|position| id_of(item, position)));
        }
        prop_assert!(named.iter().copied().collect::<BTreeSet<_>>() == read);
    }

    /// By the cost model, sharing never costs more; and what is not named is not shared.
    #[test]
    fn sharing_pays(config in configs(), requests in requests(), target in targets()) {
        let page = config.page_size_tokens;
        let mut planner = Planner::new(config, target, SplitMode::Unsplit, tight_limits(&requests)).unwrap();
        let batch = Batch::new(page, &requests);
        let cost = |plan: &Plan| plan.balance().queue_loads.iter().sum::<f64>();
        let shared = cost(batch.plan(&mut planner, page));
        let flat = batch.plan_flat(&mut planner, page);
        prop_assert!(shared <= cost(flat), "{shared} instead of {}", cost(flat));
        prop_assert_eq!(flat.sharing(), Sharing::default());
        let mut plain = Planner::new(config.with_shared_prefixes(0), target, SplitMode::Unsplit, tight_limits(&requests)).unwrap();
        let plain = batch.plan_flat(&mut plain, page);
        prop_assert_eq!(flat.items(), plain.items());
        prop_assert_eq!(flat.queue_begin(), plain.queue_begin());
    }
}

fn config() -> AttentionConfig {
    AttentionConfig::new(32, 8, 128, 16).with_shared_prefixes(1).always_sharing()
}

/// `members` decodes with `prefix` keys in common and `suffix` of their own.
fn group(members: u32, prefix: u32, suffix: u32) -> Vec<Request> {
    (0..members).map(|member| (1, prefix + suffix, if member == 0 { 0 } else { prefix })).collect()
}

fn planner(config: AttentionConfig, mode: SplitMode, requests: &[Request]) -> Planner {
    Planner::new(config, Target::new(264, 64).with_tall_rows(128), mode, tight_limits(requests)).unwrap()
}

#[test]
fn a_prefix_is_read_once_for_as_many_rows_as_a_tile_has() {
    // 64 requests of 4 rows on 2 tall tiles of 128; 512 tiles of the prefix, and 2 of each suffix.
    let requests = group(64, 32_768, 128);
    let mut planner = planner(config(), SplitMode::Unsplit, &requests);
    let plan = Batch::new(16, &requests).plan(&mut planner, 16);
    assert!(check(plan, &requests));
    let shared: Vec<&WorkItem> = plan.items().iter().filter(|item| item.is_shared()).collect();
    let mut rows: Vec<_> = shared.iter().map(|item| (item.row_begin, item.rows, item.kv_end_tokens)).collect();
    rows.sort_unstable();
    assert_eq!(rows, [(0, 128, 32_768), (128, 128, 32_768)]);
    assert!(shared.iter().all(|item| item.pieces == SHARED | 1 && item.request == 0));
    assert_eq!(plan.items().len(), 66);
    let sharing = plan.sharing();
    assert_eq!((sharing.shared_requests, sharing.saved_kv_tokens, sharing.not_shared), (64, 62 * 32_768, None));
    assert_eq!(plan.explain().kv_bytes, (2 * 32_768 + 64 * 128) * 2 * 8 * 128 * 2);
    let text = plan.explain().to_string();
    assert!(text.contains("shared    2031616 keys of 64 requests are not read once more\n"), "{text}");
}

#[test]
fn shared_row_tiles_are_cut_like_others() {
    let requests = group(64, 32_768, 128);
    let mut planner = planner(config(), SplitMode::Balanced, &requests);
    let plan = Batch::new(16, &requests).plan(&mut planner, 16);
    assert!(check(plan, &requests));
    let explain = plan.explain();
    assert!(explain.balance.efficiency() > 0.9 && explain.most_pieces > 10, "{explain}");
    assert!(plan.items().iter().filter(|item| item.is_shared()).all(|item| item.pieces & !SHARED > 10));
    // 64 suffixes on 33 queues: whoever folds last folds few.
    for queue in plan.queues() {
        let shared = queue.iter().filter(|item| item.is_shared()).count();
        assert!((1..=2).contains(&shared) && queue.len() - shared <= 2, "{explain}");
    }
}

/// A level more reads a document once for those who share it, and the prompt once for all.
#[test]
fn levels_are_limited() {
    // 4 documents of 4096 keys for 8 requests each, after a prompt of 2048.
    let requests: Vec<Request> = (0..32)
        .map(|r| {
            (
                1,
                6144 + 64,
                if r == 0 {
                    0
                } else if r % 8 == 0 {
                    2048
                } else {
                    6144
                },
            )
        })
        .collect();
    let ranges = |levels| {
        let mut planner = planner(config().with_shared_prefixes(levels), SplitMode::Unsplit, &requests);
        let plan = Batch::new(16, &requests).plan(&mut planner, 16);
        assert!(check(plan, &requests));
        let shared = plan.items().iter().filter(|item| item.is_shared());
        let mut ranges: Vec<_> = shared.map(|i| (i.request, i.rows, i.kv_begin_tokens, i.kv_end_tokens)).collect();
        ranges.sort_unstable();
        ranges
    };
    // One level: each document's readers read the prompt too, which is better than all the prompt alone.
    assert_eq!(ranges(1), [0, 8, 16, 24].map(|request| (request, 32, 0, 6144)));
    let documents = [0, 8, 16, 24].map(|request| (request, 32, 2048, 6144));
    let mut two = [&[(0, 128, 0, 2048)], documents.as_slice()].concat();
    two.sort_unstable();
    assert_eq!((ranges(2), ranges(8)), (two.clone(), two));
}

/// Each request has a little more in common with the one before than that with its own: 64 levels of a tile each, of which
/// none pays alone.
#[test]
fn some_of_many_levels_are_shared() {
    let requests: Vec<Request> = (0..256).map(|request| (1, 4096, 15 * request)).collect();
    for (levels, most_part) in [(1, 0.52), (2, 0.39), (8, 0.29)] {
        let mut planner = planner(config().with_shared_prefixes(levels), SplitMode::Unsplit, &requests);
        let batch = Batch::new(16, &requests);
        let plan = batch.plan(&mut planner, 16);
        assert!(check(plan, &requests));
        let (sharing, all) = (plan.sharing(), plan.kv_tokens());
        let common: u64 = (0..256).map(|request| 15 * request).sum();
        let part = (common - sharing.saved_kv_tokens) as f64 / common as f64;
        assert!(part < most_part, "{levels} levels: {part} of {common} keys in common of {all} are read again");
    }
}

#[test]
fn what_does_not_pay_is_not_shared() {
    let sharing = |requests: &[Request]| {
        let mut planner = planner(config(), SplitMode::Balanced, requests);
        let plan = Batch::new(16, requests).plan(&mut planner, 16);
        check(plan, requests);
        plan.sharing()
    };
    let refused = |requests: &[Request]| {
        let Sharing { shared_requests, saved_kv_tokens, not_shared, .. } = sharing(requests);
        (shared_requests, saved_kv_tokens, not_shared) == (0, 0, Some(NotShared::DoesNotPay))
    };
    // Less than a tile; a tile, which two requests save once, for two partial states; and what they would wait for.
    assert!(refused(&group(64, 63, 1)) && refused(&group(2, 64, 1)) && refused(&group(2, 192, 1)));
    assert_eq!(sharing(&group(2, 256, 1)).saved_kv_tokens, 256);
    assert_eq!(sharing(&group(1, 8192, 1)), Sharing::default());
    // Rows of which two do not fit a row tile may stand between; those on each side have row tiles of their own.
    let mut chunks = group(6, 8192, 100);
    chunks[2].0 = 17;
    let Sharing { shared_requests, saved_kv_tokens, .. } = sharing(&chunks);
    assert_eq!((shared_requests, saved_kv_tokens), (5, 3 * 8192));
    chunks[2].0 = 16;
    assert_eq!(sharing(&chunks).shared_requests, 6);
}

#[test]
fn flat_plans_say_why() {
    let requests = group(16, 4096, 64);
    let flat = |config: AttentionConfig, mode, expected| {
        let mut planner = planner(config, mode, &requests);
        let batch = Batch::new(16, &requests);
        let plan = batch.plan(&mut planner, 16);
        assert_eq!(plan.sharing().not_shared, Some(expected));
        assert_eq!((plan.workspace().max_shared_rows, plan.shared_rows().len(), plan.folds().len()), (0, 0, 0));
        let text = plan.explain().to_string();
        assert!(text.contains(&format!("shared    nothing: {expected}\n")), "{text}");
        let image = plan.image().to_vec();
        let flat = batch.plan_flat(&mut planner, 16);
        assert_eq!((&flat.image()[..EPOCH], &flat.image()[EPOCH + 8..]), (&image[..EPOCH], &image[EPOCH + 8..]));
        assert!(!flat.explain().to_string().contains("shared"));
    };
    let (config, balanced) = (config(), SplitMode::Balanced);
    flat(config.with_shared_prefixes(0), balanced, NotShared::NoLevels);
    flat(config, SplitMode::BatchInvariant, NotShared::SplitMode);
    flat(config, SplitMode::FixedSplit { tokens: 512 }, NotShared::SplitMode);
    flat(config.with_window(Some(100), None), balanced, NotShared::Window);
    flat(config.non_causal().with_window(None, Some(100)), balanced, NotShared::Window);
    flat(config.with_alibi(), balanced, NotShared::Alibi);
    flat(config.with_mask(MaskForm::Bits), balanced, NotShared::Mask);
    flat(config.with_temperatures(), balanced, NotShared::Temperatures);
    flat(config.with_sigmoid(0.5), balanced, NotShared::Sigmoid);
    flat(config.with_custom_variant("near"), balanced, NotShared::CustomVariant);
    for config in [config.with_sinks().with_soft_cap(30.0), config.non_causal(), config.with_window(None, Some(9))] {
        let mut planner = planner(config, balanced, &requests);
        assert_eq!(Batch::new(16, &requests).plan(&mut planner, 16).sharing().shared_requests, 16);
    }
}

#[test]
fn prefixes_that_cannot_be_are_refused() {
    let table = || PageTable::csr(16, &[0u32, 2, 4, 4], &[20u32, 32, 0]).unwrap();
    let refused = |tokens: &[i32]| table().with_shared_prefixes(tokens).unwrap_err().to_string();
    assert_eq!(refused(&[0, 4]), "shared_tokens has 2 entries; expected 3");
    assert_eq!(refused(&[4, 4, 0]), "shared_tokens[0] is 4; it must be 0");
    assert_eq!(refused(&[0, -1, 0]), "shared_tokens[1] is -1; it must not be negative");
    assert_eq!(refused(&[0, 21, 0]), "shared_tokens[1] is 21; requests 0 and 1 have 20 keys to share at most");
    assert_eq!(refused(&[0, 20, 1]), "shared_tokens[2] is 1; requests 1 and 2 have 0 keys to share at most");
    assert_eq!(table().with_shared_prefixes(&[0u32, 20, 0]).unwrap().shared_tokens(), [0, 20, 0]);
    let empty = PageTable::csr(16, &[0u32], &[0u32; 0]).unwrap();
    assert!(empty.with_shared_prefixes(&[0u32; 0]).is_ok());
    let ragged = PageTable::ragged(&[0u32, 3]).unwrap();
    assert_eq!(ragged.with_shared_prefixes(&[0u32]).unwrap_err(), PageTableError::RaggedPrefixes);

    let limits = Limits { max_requests: 1, max_query_tokens: 1, max_kv_len_tokens: i32::MAX as u32, max_kv_tokens: 1 };
    let error = Planner::new(config(), Target::new(4, 64), SplitMode::Balanced, limits).unwrap_err().to_string();
    assert!(error.starts_with("max_kv_len_tokens + max_query_tokens, with shared prefixes, is 2147483648;"), "{error}");
}

/// Whole pages, but for the last of the shorter request.
#[test]
fn equal_leading_pages_are_found() {
    let ids = [7u32, 3, 8, 7, 3, 9, 7, 3, 9, 1, 3, 9];
    let found = |table: PageTable<'_>| table.shared_tokens_of_pages(&ids).unwrap();
    assert_eq!(found(PageTable::block_table(16, 3, &[48u32, 40, 37, 48]).unwrap()), [0, 32, 37, 0]);
    assert_eq!(found(PageTable::csr(16, &[0u32, 3, 6, 9, 12], &[48u32, 40, 37, 48]).unwrap()), [0, 32, 37, 0]);
    assert_eq!(found(PageTable::block_table(16, 3, &[20u32, 48, 0, 1]).unwrap()), [0, 20, 0, 0]);
    assert_eq!(found(PageTable::csr(16, &[0u32, 3], &[48u32]).unwrap()), [0]);
    let short = PageTable::block_table(16, 3, &[20u32; 5]).unwrap().shared_tokens_of_pages(&ids);
    assert_eq!(short.unwrap_err().to_string(), "page_indices has 12 entries; expected 15");
    let ragged = PageTable::ragged(&[0u32, 3]).unwrap().shared_tokens_of_pages(&ids);
    assert_eq!(ragged.unwrap_err(), PageTableError::NoPageIds);
}

#[test]
fn a_batch_shares_where_it_saves_more_than_it_waits() {
    // 128 keys of each request's own; what an H200 took is beside the constant of the rule.
    let attend = Target::new(264, 64).with_tall_rows(128);
    let prefill = Target::for_prefill(132, PrefillTile::new(128, 128, true).unwrap(), false);
    for (target, requests, prefix, shares) in [
        (attend, 16, 1024, false),
        (attend, 16, 2048, true),
        (attend, 64, 512, false),
        (attend, 64, 1024, true),
        (attend, 64, 32768, true),
        (attend, 4, 2048, false),
        (attend, 256, 1024, true),
        (prefill, 16, 1024, false),
        (prefill, 16, 2048, true),
        (prefill, 64, 256, false),
        (prefill, 64, 512, true),
    ] {
        let config = AttentionConfig::new(32, 8, 128, 16).with_shared_prefixes(1);
        let (kv_lens, mut shared) = (vec![prefix + 128; requests], vec![prefix; requests]);
        shared[0] = 0;
        let limits = Limits {
            max_requests: requests as u32,
            max_query_tokens: requests as u32,
            max_kv_len_tokens: prefix + 128,
            max_kv_tokens: requests as u64 * (prefix as u64 + 128),
        };
        let mut planner = Planner::new(config, target, SplitMode::Balanced, limits).unwrap();
        let table = PageTable::block_table(16, (prefix + 128) / 16, &kv_lens).unwrap();
        let table = table.with_shared_prefixes(&shared).unwrap();
        let plan = planner.plan(&table, QueryLengths::uniform(1)).unwrap();
        let sharing = plan.sharing();
        assert_eq!(sharing.shared_requests, if shares { requests } else { 0 }, "{target:?}: {requests} with {prefix}");
        assert_eq!(
            sharing.not_shared,
            (!shares).then_some(NotShared::DoesNotPay),
            "{target:?}: {requests} with {prefix}"
        );
    }
}
