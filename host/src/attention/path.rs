//! Which kernel does a batch: each with a planner of its own.
//!
//! In: the batch's lengths. Out: the attend kernel, which reads as fast as memory can for requests with few query rows
//! and takes tall items on the side; or the prefill kernel, which computes faster and has tall items alone. The choice
//! follows from lengths alone, and from the measurements beside [`PROMPT_PART`].

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::plan::RAGGED_PAGE_TOKENS;
use kernels_gpu::abi::tile::{PREFILL_ROWS, PrefillTile, Teams};

use crate::Error;
use crate::config::{AttentionConfig, ConfigError};
use crate::page_table::{PageTable, QueryLengths};
use crate::plan::{Limits, Planner, SplitMode, Target};
use crate::workspace::WorkspaceLayout;

/// A kernel of an [`Attention`](super::Attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kernel {
    /// For all batches, on every device.
    Attend,
    /// For batches with prompts, on Hopper: head dims 64, 128 and 256, page sizes that are multiples of 8 tokens, and split
    /// modes whose results may depend on the batch; not with RoPE or norms inside attention; with a custom variant, where its
    /// bundle has one.
    Prefill,
}

/// Packed rows past which a request counts as a prompt, several tokens being verified too. With 32 rows an H200 took by the
/// attend kernel and by the prefill kernel: one request of 32768 keys 56 and 44 us, 8 of 8192 76 and 75, 64 of 1024 72 and
/// 69, 64 of 4096 266 and 260, 128 of 4096 514 and 516; but with 20 rows 64 of 4096 255 and 261.
const PROMPT_ROWS: u32 = 24;

/// The prefill kernel takes batches of whose work prompts are at least this part. Half of its queues begin with the prompts
/// and half with the rest, so that memory and tensor cores are busy at once. 128 decodes of 4096 keys beside 512 new
/// tokens of 4096, a ninth, took an H200 641 us by the attend kernel and 551 by the prefill kernel; 64 beside a prompt of
/// 2048, a third, 334 and 300. With less nothing was timed, and decodes alone are the attend kernel's.
const PROMPT_PART: (u64, u64) = (1, 10);

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
        if config.changes_rows() {
            return Ok(None);
        }
        let Some(tile) = PrefillTile::new(config.head_dim) else { return Ok(None) };
        let page_tokens = if config.ragged { RAGGED_PAGE_TOKENS } else { config.page_size_tokens };
        let Some(box_tokens) = tile.box_tokens(page_tokens) else { return Ok(None) };
        if !is_free {
            return Ok(None);
        }
        let path = |all_busy| Path::new(config, Target::for_prefill(multiprocessors, tile, all_busy), mode, limits);
        Ok(Some(Prefill { paths: [path(false)?, path(true)?], box_tokens }))
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

    /// Whether so many row tiles are many.
    fn are_many(&self, row_tiles: u64) -> bool {
        row_tiles >= MANY_ROW_TILES * self.paths[1].teams.teams as u64
    }

    /// What a batch of a graph means for the kernel: the same for all, so by the limits.
    pub fn look_at_limits(&self, limits: &Limits, group: u32) -> Look {
        let packed_rows = limits.max_query_tokens as u64 * group as u64;
        Look { suits: false, many: self.are_many(packed_rows / PREFILL_ROWS as u64) }
    }

    /// What a batch means for the kernel.
    pub fn look_at(&self, table: &PageTable<'_>, queries: QueryLengths<'_>, group: u32) -> Look {
        let (mut prompts, mut all, mut row_tiles) = (0, 0, 0);
        for (request, &kv_len) in table.kv_lens().iter().enumerate() {
            let packed_rows = queries.len_of(request).saturating_mul(group);
            let tiles = packed_rows.div_ceil(PREFILL_ROWS) as u64;
            row_tiles += tiles;
            all += kv_len as u64 * tiles;
            if packed_rows > PROMPT_ROWS {
                prompts += kv_len as u64 * tiles;
            }
        }
        Look { suits: prompts > 0 && prompts * PROMPT_PART.1 >= all * PROMPT_PART.0, many: self.are_many(row_tiles) }
    }
}

/// A batch, as far as the choice of a kernel goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Whether it is better off with the prefill kernel.
    pub suits: bool,
    /// Whether it has so many row tiles that every multiprocessor counts.
    pub many: bool,
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

    fn look(requests: &[(u32, u32)]) -> Look {
        let kv_lens: Vec<u32> = requests.iter().map(|request| request.1).collect();
        let mut begin = vec![0];
        requests.iter().for_each(|request| begin.push(begin[begin.len() - 1] + request.0));
        let table = PageTable::block_table(16, 512, &kv_lens).unwrap();
        prefill().look_at(&table, QueryLengths::indptr(&begin).unwrap(), 4)
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
            assert_eq!(look(requests).suits, suits, "{requests:?}");
        }
    }

    #[test]
    fn four_row_tiles_a_team_are_many() {
        let prefill = prefill();
        assert_eq!((prefill.path(true).teams.teams, prefill.path(false).teams.teams), (33, 16));
        assert_eq!((prefill.path(true).blocks(), prefill.path(false).blocks()), (132, 128));
        // 32 tokens are a row tile, and of two requests each has its own last one.
        assert!(look(&[(132 * 32, 5000)]).many && !look(&[(131 * 32, 5000)]).many);
        assert!(look(&[(130 * 32 + 1, 5000), (1, 1)]).many && !look(&[(130 * 32 + 1, 5000)]).many);
        let of_limits = |max_query_tokens| prefill.look_at_limits(&Limits { max_query_tokens, ..LIMITS }, 4);
        assert_eq!(of_limits(132 * 32), Look { suits: false, many: true });
        assert_eq!(of_limits(132 * 32 - 1), Look { suits: false, many: false });
    }

    #[test]
    fn only_some_attentions_have_a_prefill_kernel() {
        let has = |head_dim, page, mode| {
            let config = AttentionConfig::new(32, 8, head_dim, page);
            Prefill::new(config, 132, mode, LIMITS).unwrap().map(|prefill| prefill.box_tokens)
        };
        assert_eq!(has(64, 48, SplitMode::Balanced), Some(16));
        assert_eq!(has(128, 1024, SplitMode::Unsplit), Some(128));
        assert_eq!(has(256, 1024, SplitMode::Unsplit), Some(64));
        assert_eq!(has(128, 4, SplitMode::Balanced), None);
        assert_eq!(has(96, 16, SplitMode::Balanced), None);
        let rotated = AttentionConfig::new(32, 8, 128, 16).with_rope(crate::RopeConfig::new(128));
        assert!(Prefill::new(rotated, 132, SplitMode::Balanced, LIMITS).unwrap().is_none());
        assert_eq!(has(128, 16, SplitMode::BatchInvariant), None);
        assert_eq!(has(128, 16, SplitMode::FixedSplit { tokens: 128 }), None);
    }
}
