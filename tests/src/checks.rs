//! The tables of checks of values on the device, and what each must report.
//!
//! What a batch reads is worked out here from lengths alone: the pages that hold the keys of each request with query
//! tokens. Every entry of the page id array that is not read holds an id out of range.

use crate::buffer::{Access, Buffer, Region};
use crate::cases::{Case, paged};
use crate::executors::CheckLaunches;
use crate::layout::LAYOUTS;
use crate::plans::planned;
use crate::random::Random;
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{CheckAppendParameters, CheckPageIdsParameters};
use oxattn::config::AttentionConfig;
use oxattn::validate::{REPORT_BYTES, verdict};
use oxattn::{DeviceValueError, SplitMode, Target};

/// What a check reported.
pub type Verdict = Result<(), DeviceValueError>;

/// A planned batch with the page ids it would read.
#[derive(Clone, Debug)]
pub struct PageIdCase {
    /// Says what it is about.
    pub name: String,
    /// Heads, page size, mask and lengths; its numbers play no part.
    pub batch: Case,
    /// How it is cut.
    pub mode: SplitMode,
    /// For how many blocks, in tiles of how many keys.
    pub target: Target,
    /// Where each request's page ids start, and their total.
    pub page_begin: Vec<u32>,
    /// The ids.
    pub page_indices: Vec<u32>,
    /// What the report must say.
    pub expected: Verdict,
}

/// Pages of every cache here.
pub const PAGES: u32 = 50;

/// Which of the ids that are read are out of range.
#[derive(Clone, Copy, Debug)]
enum Planted {
    None,
    First,
    Last,
    Some,
    All,
}

fn batches() -> Vec<Case> {
    let batch = |heads: (u32, u32), page_size, query_lens: &[u32], kv_lens: &[u32]| Case {
        name: format!("{query_lens:?} tokens over {kv_lens:?} keys, {heads:?} heads, pages of {page_size}"),
        config: AttentionConfig::new(heads.0, heads.1, 64, page_size),
        query_lens: query_lens.to_vec(),
        kv_lens: kv_lens.to_vec(),
        seeds: vec![0; kv_lens.len()],
        ..paged(16, LAYOUTS[0])
    };
    let non_causal = |case: Case| Case { config: case.config.non_causal(), ..case };
    let windowed = |case: Case, left, right| Case { config: case.config.with_window(left, right), ..case };
    let many: Vec<u32> = (0..300).map(|request| 1 + request * 7 % 90).collect();
    vec![
        batch((8, 2), 16, &[1; 4], &[35, 16, 0, 700]),
        batch((8, 2), 64, &[40, 3, 8, 1], &[150, 3, 9, 300]),
        non_causal(batch((8, 2), 64, &[40, 3, 8, 1], &[150, 3, 9, 300])),
        batch((5, 1), 1000, &[1, 30], &[2500, 1800]),
        batch((4, 1), 1, &[1, 2], &[300, 257]),
        batch((28, 1), 3, &[7, 2], &[90, 40]),
        non_causal(batch((71, 1), 7, &[5, 3], &[77, 200])),
        batch((4, 2), 16, &[40, 6], &[20, 3]),
        batch((8, 8), 16, &[3, 0, 2], &[80, 160, 20]),
        batch((8, 2), 5, &[200], &[1000]),
        windowed(batch((8, 2), 16, &[1, 90, 3], &[700, 300, 2]), Some(100), None),
        windowed(batch((4, 1), 7, &[120], &[400]), Some(3), None),
        windowed(non_causal(batch((4, 1), 7, &[120, 9], &[400, 30])), Some(50), Some(9)),
        windowed(non_causal(batch((8, 1), 16, &[60], &[600])), None, Some(20)),
        batch((1, 1), 16, &[1; 300], &many),
        batch((8, 2), 16, &[], &[]),
    ]
}

/// The table.
pub fn page_id_cases() -> Vec<PageIdCase> {
    const MODES: [SplitMode; 4] =
        [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 40 }, SplitMode::Unsplit];
    let mut cases = Vec::new();
    for batch in batches() {
        for (mode, (blocks, tile_tokens)) in MODES.into_iter().zip([(264, 64), (7, 16), (33, 16), (1, 32)]) {
            for planted in [Planted::None, Planted::First, Planted::Last, Planted::Some, Planted::All] {
                let tall_rows = if blocks % 2 == 1 { 64 } else { 0 };
                let target = Target::new(blocks, tile_tokens).with_tall_rows(tall_rows);
                cases.push(page_id_case(&batch, mode, target, planted));
            }
        }
    }
    cases
}

/// Whether each key of a request lies in a tile that a row tile of 16 rows sees some key of.
fn tiles_seen(config: &AttentionConfig, query_len: u32, kv_len: u32, tile_tokens: u32) -> Vec<bool> {
    let mut seen = vec![false; kv_len as usize];
    let rows: Vec<i64> = (0..query_len * config.group())
        .map(|row| (row / config.group()) as i64 + kv_len as i64 - query_len as i64)
        .collect();
    for positions in rows.chunks(16) {
        let end = (positions[positions.len() - 1] + config.keys_after() as i64 + 1).clamp(0, kv_len as i64) as usize;
        let begin = (positions[0] - config.window_left.unwrap_or(u32::MAX) as i64).max(0) as usize;
        let begin = (begin / tile_tokens as usize * tile_tokens as usize).min(end);
        seen[begin..end].fill(true);
    }
    seen
}

fn page_id_case(batch: &Case, mode: SplitMode, target: Target, planted: Planted) -> PageIdCase {
    let mut random = Random::new(6);
    let page_size = batch.config.page_size_tokens;
    let (mut page_begin, mut page_indices, mut read) = (vec![0], Vec::new(), Vec::new());
    for (&query_len, &kv_len) in batch.query_lens.iter().zip(&batch.kv_lens) {
        let seen = tiles_seen(&batch.config, query_len, kv_len, target.tile_tokens);
        // A device's own tiles may be as long as this; no tile reads the pages outside.
        let seen_by_any = tiles_seen(&batch.config, query_len, kv_len, 128);
        for page in 0..kv_len.div_ceil(page_size) {
            let is_in =
                |seen: &[bool]| (page * page_size..kv_len.min((page + 1) * page_size)).any(|key| seen[key as usize]);
            if is_in(&seen) {
                read.push(page_indices.len());
            }
            let fine = random.below(PAGES as usize) as u32;
            page_indices.push(if is_in(&seen_by_any) { fine } else { PAGES + 1 });
        }
        page_indices.extend([PAGES, u32::MAX]);
        page_begin.push(page_indices.len() as u32);
    }
    let bad: Vec<usize> = match planted {
        Planted::None => Vec::new(),
        Planted::First => read.first().copied().into_iter().collect(),
        Planted::Last => read.last().copied().into_iter().collect(),
        Planted::Some => read.iter().copied().filter(|_| random.below(3) == 0).collect(),
        Planted::All => read,
    };
    for &index in &bad {
        page_indices[index] = [PAGES, PAGES + 7, u32::MAX][random.below(3)];
    }
    let expected = bad.first().map_or(Ok(()), |&first| {
        let (value, bad) = (page_indices[first] as i64, bad.len() as u32);
        Err(DeviceValueError::OutOfRange {
            field: "page_indices",
            index: first as u64,
            value,
            supported: PAGES as u64,
            bad,
        })
    });
    let name = format!("{}, {mode:?}, {planted:?} out of range", batch.name);
    PageIdCase { name, batch: batch.clone(), mode, target, page_begin, page_indices, expected }
}

/// Checks a planned batch by the parameters of a launch.
pub fn page_ids(case: &PageIdCase, executor: &dyn CheckLaunches) -> Verdict {
    let PageIdCase { batch, mode, target, page_begin, page_indices, .. } = case;
    let mut plan = planned(batch, page_begin, *target, *mode);
    let header = plan.header();
    let mut page_indices = Buffer::of(page_indices);
    let mut report = Buffer::filled(REPORT_BYTES, 0xcc);
    let image = plan.image.address();
    let parameters = CheckPageIdsParameters {
        queue_begin: image + header.queue_begin_offset_bytes as u64,
        items: image + header.items_offset_bytes as u64,
        page_indices: page_indices.address(),
        report: report.address(),
        pages: PAGES as u64,
        teams: header.teams,
        keys_after: batch.config.keys_after(),
        page_size: Divisor::new(batch.config.page_size_tokens).unwrap(),
        group: Divisor::new(batch.config.group()).unwrap(),
    };
    // Without the entries past the last one that is read.
    let ids = page_indices.region(Access::Read);
    let ids = Region { bytes: ids.bytes.saturating_sub(8), ..ids };
    let regions = [plan.image.region(Access::Read), ids, report.region(Access::Produce)];
    executor.check_page_ids(&parameters, &regions);
    verdict(report.as_slice().try_into().unwrap())
}

/// Where an append would write.
#[derive(Clone, Debug)]
pub struct AppendCheck {
    /// Says what it is about.
    pub name: String,
    /// Tokens of a page.
    pub page_size: u32,
    /// Where each token goes.
    pub tokens: Tokens,
    /// What the report must say.
    pub expected: Verdict,
}

/// Where each token goes.
#[derive(Clone, Debug)]
pub enum Tokens {
    /// By slots.
    Slots(Vec<i64>),
    /// By requests and positions.
    Positions {
        /// Request of each token.
        requests: Vec<i32>,
        /// Position of each token.
        positions: Vec<i32>,
        /// First page id of each request.
        page_begin: Vec<u32>,
        /// Page ids.
        page_indices: Vec<u32>,
    },
}

impl Tokens {
    /// How many there are.
    pub fn count(&self) -> u64 {
        match self {
            Tokens::Slots(slots) => slots.len() as u64,
            Tokens::Positions { requests, .. } => requests.len() as u64,
        }
    }
}

/// The table, worked by hand: 50 pages of 4 tokens are 200 slots.
pub fn append_checks() -> Vec<AppendCheck> {
    let wrong =
        |field, index, value, supported, bad| Err(DeviceValueError::OutOfRange { field, index, value, supported, bad });
    let slots = |name: &str, slots: &[i64], expected| AppendCheck {
        name: name.into(),
        page_size: 4,
        tokens: Tokens::Slots(slots.to_vec()),
        expected,
    };
    // Request 0 holds pages 7, 2 and 49, 12 tokens; request 1 none; request 2 pages 3 and 50, 8 tokens, in a cache of 50.
    let positions = |name: &str, tokens: &[(i32, i32)], expected| AppendCheck {
        name: name.into(),
        page_size: 4,
        tokens: Tokens::Positions {
            requests: tokens.iter().map(|token| token.0).collect(),
            positions: tokens.iter().map(|token| token.1).collect(),
            page_begin: vec![0, 3, 3],
            page_indices: vec![7, 2, 49, 3, 50],
        },
        expected,
    };
    // More tokens than the block has threads.
    let thirds = |bad: i64| (0..4000).map(move |token| if token % 3 == 2 { bad } else { token % 200 });
    let long: Vec<i64> = thirds(200).collect();
    let late: Vec<i64> = thirds(5).chain([-1, 201, 7]).collect();
    let long_positions: Vec<(i32, i32)> = (0..3000).map(|token| (0, if token % 2 == 0 { 3 } else { 12 })).collect();
    vec![
        slots("no slots", &[], Ok(())),
        slots("slots in the cache, some skipped", &[0, 199, -1, 17, i64::MIN, 17], Ok(())),
        slots("a slot one past the cache", &[5, 200, 6], wrong("slots", 1, 200, 200, 1)),
        slots("slots far out", &[5, i64::MAX, -3, 1 << 32, 199], wrong("slots", 1, i64::MAX, 200, 2)),
        slots("a third of many slots", &long, wrong("slots", 2, 200, 200, 1333)),
        slots("a late slot of many", &late, wrong("slots", 4001, 201, 200, 1)),
        positions("no tokens", &[], Ok(())),
        positions("positions in their pages, some skipped", &[(0, 0), (0, 11), (2, 3), (-1, 99), (9, -1)], Ok(())),
        positions("a request that is not there", &[(2, 1), (3, 0)], wrong("requests", 1, 3, 3, 1)),
        positions("a position past its request's pages", &[(0, 12), (2, 0)], wrong("positions", 0, 12, 12, 1)),
        positions("a position past the last request's", &[(2, 0), (2, 8)], wrong("positions", 1, 8, 8, 1)),
        positions("a position in a request without pages", &[(1, 0)], wrong("positions", 0, 0, 0, 1)),
        positions("a page past the cache", &[(0, 3), (2, 4), (2, 7)], wrong("page_indices", 4, 50, 50, 2)),
        positions(
            "one of each",
            &[(0, i32::MAX), (i32::MAX, 0), (2, 5), (0, 0)],
            wrong("positions", 0, i32::MAX as i64, 12, 3),
        ),
        positions("half of many tokens", &long_positions, wrong("positions", 1, 12, 12, 1500)),
        AppendCheck {
            tokens: Tokens::Positions {
                requests: vec![0, 1, 1],
                positions: vec![4, 0, 4],
                page_begin: vec![0, 2],
                page_indices: vec![1],
            },
            ..positions("page ids that end too soon", &[], wrong("positions", 0, 4, 4, 3))
        },
    ]
}

/// Checks an append by the parameters of a launch.
pub fn append(case: &AppendCheck, executor: &dyn CheckLaunches) -> Verdict {
    let mut report = Buffer::filled(REPORT_BYTES, 0xcc);
    let mut regions = vec![report.region(Access::Produce)];
    let mut arrays: Vec<Buffer> = match &case.tokens {
        Tokens::Slots(slots) => vec![Buffer::of(slots)],
        Tokens::Positions { requests, positions, page_begin, page_indices } => {
            vec![Buffer::of(requests), Buffer::of(positions), Buffer::of(page_begin), Buffer::of(page_indices)]
        }
    };
    regions.extend(arrays.iter_mut().map(|array| array.region(Access::Read)));
    let address = |array: usize| regions.get(1 + array).map_or(0, |region| region.address);
    let by_slots = matches!(case.tokens, Tokens::Slots(_));
    let of_positions = |array| if by_slots { 0 } else { address(array) };
    let (request_count, page_index_len) = match &case.tokens {
        Tokens::Slots(_) => (0, 0),
        Tokens::Positions { page_begin, page_indices, .. } => (page_begin.len() as u32, page_indices.len() as u64),
    };
    let parameters = CheckAppendParameters {
        slots: if by_slots { address(0) } else { 0 },
        requests: of_positions(0),
        positions: of_positions(1),
        page_begin: of_positions(2),
        page_indices: of_positions(3),
        page_index_len,
        report: regions[0].address,
        pages: PAGES as u64,
        tokens: case.tokens.count() as u32,
        request_count,
        page_size: Divisor::new(case.page_size).unwrap(),
        padding: 0,
    };
    executor.check_append(&parameters, &regions);
    verdict(report.as_slice().try_into().unwrap())
}
