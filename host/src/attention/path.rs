//! Which kernel does a batch: each with a planner of its own.
//!
//! In: the batch's lengths. Out: the attend kernel, which reads as fast as memory can for requests with few query rows
//! and takes tall items on the side; or the prefill kernel, which computes faster and has tall items alone. Where the device
//! has a [`Tuning`](crate::Tuning) that knows such batches, its times decide; else a rule, which follows from lengths and
//! shared prefixes alone and from the measurements beside [`PROMPT_PART`] and [`Choice::SharedPrefixes`].

use std::fmt;

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::plan::RAGGED_PAGE_TOKENS;
use kernels_gpu::abi::tile::{PREFILL_ROTARY_HEAD_DIMS, PrefillTile, Teams};

use crate::Error;
use crate::config::{AttentionConfig, ConfigError};
use crate::page_table::{PageTable, QueryLengths};
use crate::plan::{Explain, Limits, Planner, SplitMode, Target};
use crate::tuning::{Bucket, Measured, Times};
use crate::workspace::WorkspaceLayout;

/// A kernel of an [`Attention`](super::Attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kernel {
    /// For all batches, on every device.
    Attend,
    /// For batches with prompts, on Hopper: head dims up to 256, page sizes that are multiples of 8 tokens, and split
    /// modes whose results may depend on the batch; with RoPE or norms inside attention of head dims 64, 128 and 256;
    /// with a custom variant, where its bundle has one. Rows are padded to head dims of 64, 128, 256, or 192 with values
    /// of 128; so padded, prompts of head dim 96 took an H200 0.54 to 0.59 of the attend kernel's time.
    Prefill,
}

impl Kernel {
    /// Its name in symbols and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Attend => "attend",
            Kernel::Prefill => "prefill",
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a batch has its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Choice {
    /// There is no other for the device, the attention and its split mode.
    Only,
    /// [`Attention::with_kernel`](super::Attention::with_kernel) said so.
    Given,
    /// Calls that are captured into graphs have one kernel for all batches.
    Graphs,
    /// A rule of its lengths.
    Lengths,
    /// It shares prefixes: rows of several requests together are as many as a prompt's. With 8192 keys in common and 128 of
    /// each request's own, 16 requests took an H200 24.7 us by the attend kernel and 21.4 by the prefill kernel, 64 took
    /// 49.1 and 43.7; with 32768, 48.8 and 45.7, 107.8 and 89.8.
    SharedPrefixes,
    /// The device's [`Tuning`](crate::Tuning) has times of batches like it: these.
    Tuning(Times),
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Only => f.write_str("the only one for this device, attention and split mode"),
            Choice::Given => f.write_str("chosen by the caller"),
            Choice::Graphs => f.write_str("the one of all graphs, unless the caller chooses"),
            Choice::Lengths => f.write_str("chosen by the batch's lengths"),
            Choice::SharedPrefixes => f.write_str("chosen as the batch shares prefixes"),
            Choice::Tuning(times) => {
                let [attend, prefill] = [Kernel::Attend, Kernel::Prefill].map(|kernel| times.mean_us(kernel));
                let batches = if times.batches == 1 { "a batch" } else { "batches" };
                write!(
                    f,
                    "chosen by tuning: {batches} like this took {attend:.1} us by attend, {prefill:.1} by prefill"
                )
            }
        }
    }
}

/// Why a batch is done as it is: the kernel, and its plan's figures.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// The kernel.
    pub kernel: Kernel,
    /// Why this one.
    pub choice: Choice,
    /// The plan.
    pub plan: Explain,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel    {}: {}\n{}", self.kernel, self.choice, self.plan)
    }
}

/// Packed rows past which a request counts as a prompt, several tokens being verified too. With 32 rows an H200 took by the
/// attend kernel and by the prefill kernel: one request of 32768 keys 56 and 44 us, 8 of 8192 76 and 75, 64 of 1024 72 and
/// 69, 64 of 4096 266 and 260, 128 of 4096 514 and 516; but with 20 rows 64 of 4096 255 and 261.
const PROMPT_ROWS: u32 = 24;

/// The same under a mask, whose bytes arrive while nothing else is under way: one consumer's rows. 64 requests of 4096
/// keys with 32 rows took an H200 390 us by the attend kernel and 593 by the prefill kernel, 8 prompts of 2048 tokens
/// 1623 and 1450; between 32 rows and these nothing was timed.
const MASKED_PROMPT_ROWS: u32 = 64;

/// The prefill kernel takes batches of whose work prompts are at least this part. Half of its queues begin with the prompts
/// and half with the rest, so that memory and tensor cores are busy at once. 128 decodes of 4096 keys beside 512 new
/// tokens of 4096, a ninth, took an H200 641 us by the attend kernel and 551 by the prefill kernel; 64 beside a prompt of
/// 2048, a third, 334 and 300. With less nothing was timed, and decodes alone are the attend kernel's.
const PROMPT_PART: (u64, u64) = (1, 10);

/// The prefill kernel takes batches that share if so great a part of all keys is read for others too. Where 64 requests had
/// 1.21 of their 1.74 million keys in common, it took an H200 517 us, and 1098 without sharing; where they had 32 thousand of
/// a million, 736, but the attend kernel, without sharing, 707.
const SHARED_PART: (u64, u64) = (1, 2);

/// Row tiles for each team from which all multiprocessors are used, and a block may take several heads of an item: with
/// fewer, items of several heads balance worse than what idle multiprocessors cost.
const MANY_ROW_TILES: u64 = 4;

/// A kernel and its planner.
#[derive(Debug)]
pub(super) struct Path {
    pub planner: Planner,
    pub teams: Teams,
    pub team_blocks: Divisor,
}

impl Path {
    pub fn new(config: AttentionConfig, target: Target, mode: SplitMode, limits: Limits) -> Result<Path, Error> {
        let planner = Planner::new(config, target, mode, limits)?;
        let teams = target.teams(config.kv_heads);
        let team_blocks = Divisor::new(teams.blocks).ok_or(ConfigError::Zero { field: "team blocks" })?;
        Ok(Path { planner, teams, team_blocks })
    }

    pub fn layout(&self) -> WorkspaceLayout {
        self.planner.workspace_size()
    }

    #[cfg(any(feature = "cuda", feature = "emulator", test))]
    pub fn blocks(&self) -> u32 {
        self.teams.teams * self.teams.blocks
    }
}

/// The prefill kernel's paths.
#[derive(Debug)]
pub(super) struct Prefill {
    /// For batches of few row tiles and of many.
    paths: [Path; 2],
    pub tile: PrefillTile,
    pub box_tokens: u32,
}

impl Prefill {
    /// `None` where there is no such kernel for the attention; whether a custom variant has one is the caller's to know.
    pub fn new(
        config: AttentionConfig,
        multiprocessors: u32,
        mode: SplitMode,
        limits: Limits,
    ) -> Result<Option<Prefill>, Error> {
        let is_free = matches!(mode, SplitMode::Balanced | SplitMode::Unsplit);
        if config.changes_rows() && !PREFILL_ROTARY_HEAD_DIMS.contains(&config.head_dim) {
            return Ok(None);
        }
        let Some(tile) = config.prefill_tile() else { return Ok(None) };
        let page_tokens = if config.ragged { RAGGED_PAGE_TOKENS } else { config.page_size_tokens };
        let Some(box_tokens) = tile.box_tokens(page_tokens) else { return Ok(None) };
        if !is_free {
            return Ok(None);
        }
        let path = |all_busy| Path::new(config, Target::for_prefill(multiprocessors, tile, all_busy), mode, limits);
        Ok(Some(Prefill { paths: [path(false)?, path(true)?], tile, box_tokens }))
    }

    pub fn path(&self, many: bool) -> &Path {
        &self.paths[many as usize]
    }

    pub fn path_mut(&mut self, many: bool) -> &mut Path {
        &mut self.paths[many as usize]
    }

    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.paths.iter()
    }

    /// Whether there are so many row tiles that every multiprocessor counts.
    pub fn are_many(&self, row_tiles: u64) -> bool {
        row_tiles >= MANY_ROW_TILES * self.paths[1].teams.teams as u64
    }

    /// Whether a batch shares enough to be this kernel's.
    pub fn suits_shared(&mut self, table: &PageTable<'_>, queries: QueryLengths<'_>, lengths: &BatchLengths) -> bool {
        let many = self.are_many(lengths.row_tiles);
        let saved = self.path_mut(many).planner.saved_kv_tokens(table, queries);
        saved > 0 && saved * SHARED_PART.1 >= lengths.keys * SHARED_PART.0
    }

    /// Whether row tiles are many in a graph: for all batches, so by the limits.
    pub fn are_many_within(&self, limits: &Limits, group: u32) -> bool {
        self.are_many(limits.max_query_tokens as u64 * group as u64 / self.tile.rows() as u64)
    }
}

/// Sums over a batch by which its kernel is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BatchLengths {
    pub requests: u64,
    /// Packed query rows.
    pub rows: u64,
    pub keys: u64,
    pub row_tiles: u64,
    /// Keys, each counted once a row tile.
    pub work: u64,
    /// Those of prompts.
    pub prompt_work: u64,
}

impl BatchLengths {
    /// Of as many requests as there are query lengths for.
    pub fn new(table: &PageTable<'_>, queries: QueryLengths<'_>, config: &AttentionConfig) -> BatchLengths {
        let group = config.group();
        // Of a config without a prefill kernel nobody asks for row tiles.
        let tile_rows = config.prefill_tile().map_or(u32::MAX, PrefillTile::rows);
        let most_rows = if config.mask.is_some() { MASKED_PROMPT_ROWS } else { PROMPT_ROWS };
        let mut sums = BatchLengths { requests: table.requests() as u64, ..BatchLengths::default() };
        for (request, &kv_len) in table.kv_lens().iter().enumerate() {
            let packed_rows = queries.len_of(request).saturating_mul(group);
            let row_tiles = packed_rows.div_ceil(tile_rows) as u64;
            let work = kv_len as u64 * row_tiles;
            sums.rows += packed_rows as u64;
            sums.keys += kv_len as u64;
            sums.row_tiles += row_tiles;
            sums.work += work;
            if packed_rows > most_rows {
                sums.prompt_work += work;
            }
        }
        sums
    }

    /// The kernel for the batch where there are both, and why.
    pub fn kernel(&self, measured: &Measured) -> (Kernel, Choice) {
        if let Some(times) = measured.get(Bucket::new(self)) {
            return (times.faster(), Choice::Tuning(times));
        }
        let has_prompts = self.prompt_work > 0 && self.prompt_work * PROMPT_PART.1 >= self.work * PROMPT_PART.0;
        (if has_prompts { Kernel::Prefill } else { Kernel::Attend }, Choice::Lengths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { max_requests: 8, max_query_tokens: 8192, max_kv_len_tokens: 8192, max_kv_tokens: 65_536 };

    /// 8 KV heads of 4 query heads on 132 multiprocessors: 33 teams of 4 blocks for many row tiles.
    fn prefill() -> Prefill {
        let config = AttentionConfig::new(32, 8, 128, 16);
        Prefill::new(config, 132, SplitMode::Balanced, LIMITS).unwrap().unwrap()
    }

    fn lengths(requests: &[(u32, u32)]) -> BatchLengths {
        lengths_of(AttentionConfig::new(32, 8, 128, 16), requests)
    }

    fn lengths_of(config: AttentionConfig, requests: &[(u32, u32)]) -> BatchLengths {
        let kv_lens: Vec<u32> = requests.iter().map(|request| request.1).collect();
        let mut begin = vec![0];
        requests.iter().for_each(|request| begin.push(begin[begin.len() - 1] + request.0));
        let table = PageTable::block_table(16, 512, &kv_lens).unwrap();
        BatchLengths::new(&table, QueryLengths::indptr(&begin).unwrap(), &config)
    }

    #[test]
    fn batches_of_prompts_suit_the_prefill_kernel() {
        for (requests, suits) in [
            (&[][..], false),
            (&[(0, 100)], false),
            (&[(1, 8000), (1, 1)], false),
            // 6 tokens are 24 rows; one more makes a prompt.
            (&[(6, 100)], false),
            (&[(7, 100)], true),
            (&[(100, 0)], false),
            // A row tile each, so the keys decide: a tenth of them.
            (&[(32, 600), (1, 5400)], true),
            (&[(32, 600), (1, 5401)], false),
            (&[(1, 2700), (32, 600), (1, 2700)], true),
            // Two row tiles of a prompt count its keys twice.
            (&[(33, 300), (1, 5400)], true),
            (&[(33, 300), (1, 5401)], false),
            (&[(0, 8000), (32, 10)], true),
        ] {
            let kernel = if suits { Kernel::Prefill } else { Kernel::Attend };
            let chosen = lengths(requests).kernel(&Measured::default());
            assert_eq!(chosen, (kernel, Choice::Lengths), "{requests:?}");
        }
    }

    #[test]
    fn masks_leave_verification_to_the_attend_kernel() {
        let masked = AttentionConfig::new(32, 8, 128, 16).non_causal().with_mask(crate::MaskForm::Bits);
        for (tokens, kernel) in [(8, Kernel::Attend), (16, Kernel::Attend), (17, Kernel::Prefill)] {
            assert_eq!(lengths_of(masked, &[(tokens, 4096)]).kernel(&Measured::default()).0, kernel, "{tokens} tokens");
        }
    }

    #[test]
    fn four_row_tiles_a_team_are_many() {
        let prefill = prefill();
        assert_eq!((prefill.path(true).teams.teams, prefill.path(false).teams.teams), (33, 16));
        assert_eq!((prefill.path(true).blocks(), prefill.path(false).blocks()), (132, 128));
        // 32 tokens are a row tile, and of two requests each has its own last one.
        let are_many = |requests: &[(u32, u32)]| prefill.are_many(lengths(requests).row_tiles);
        assert!(are_many(&[(132 * 32, 5000)]) && !are_many(&[(131 * 32, 5000)]));
        assert!(are_many(&[(130 * 32 + 1, 5000), (1, 1)]) && !are_many(&[(130 * 32 + 1, 5000)]));
        let within = |max_query_tokens| prefill.are_many_within(&Limits { max_query_tokens, ..LIMITS }, 4);
        assert!(within(132 * 32) && !within(132 * 32 - 1));
    }

    #[test]
    fn only_some_attentions_have_a_prefill_kernel() {
        let has = |head_dim, page, mode| {
            let config = AttentionConfig::new(32, 8, head_dim, page);
            Prefill::new(config, 132, mode, LIMITS).unwrap().map(|prefill| prefill.box_tokens)
        };
        let has_dims = |head_dim, value_head_dim| {
            let config = AttentionConfig::new(32, 8, head_dim, 16).with_value_head_dim(value_head_dim);
            Prefill::new(config, 132, SplitMode::Balanced, LIMITS).unwrap().is_some()
        };
        assert!(has_dims(64, 64) && has_dims(192, 128) && has_dims(256, 256));
        assert!(has_dims(96, 96) && has_dims(192, 192) && has_dims(128, 64) && has_dims(8, 8));
        assert!(!has_dims(264, 64) && !has_dims(64, 512));
        assert_eq!(has(64, 48, SplitMode::Balanced), Some(16));
        assert_eq!(has(128, 1024, SplitMode::Unsplit), Some(128));
        assert_eq!(has(256, 1024, SplitMode::Unsplit), Some(64));
        assert_eq!(has(128, 4, SplitMode::Balanced), None);
        assert_eq!(has(96, 16, SplitMode::Balanced), Some(16));
        assert_eq!(has(512, 16, SplitMode::Balanced), None);
        let has_rotated = |head_dim: u32| {
            let config = AttentionConfig::new(32, 8, head_dim, 16).with_rope(crate::RopeConfig::new(head_dim));
            Prefill::new(config, 132, SplitMode::Balanced, LIMITS).unwrap().is_some()
        };
        assert!(has_rotated(64) && has_rotated(128) && has_rotated(256) && !has_rotated(96));
        assert_eq!(has(128, 16, SplitMode::BatchInvariant), None);
        assert_eq!(has(128, 16, SplitMode::FixedSplit { tokens: 128 }), None);
    }
}
