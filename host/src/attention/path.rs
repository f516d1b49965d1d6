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
    /// For batches of prompts, on Hopper: head dims 64, 128 and 256, page sizes that are multiples of 8 tokens, and split
    /// modes whose results may depend on the batch.
    Prefill,
}

/// Packed rows past which a request is a prompt: with up to 64, keys take longer to arrive than to compute, and the attend
/// kernel has more of them on their way. 64 requests of 4096 keys and 32 rows took an H200 260 us by it, 268 by the prefill
/// kernel; 4 of 8192 keys and 2048 rows 702 and 470.
const PROMPT_ROWS: u32 = 64;

/// The prefill kernel takes batches of whose work prompts are at least this part. 64 decodes of 4096 keys beside a prompt of
/// 2048, which is a third, took 330 us by the attend kernel and 337 by the prefill kernel.
const PROMPT_PART: (u64, u64) = (1, 2);

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
    /// `None` where there is no such kernel for the attention.
    pub fn new(
        config: AttentionConfig,
        multiprocessors: u32,
        mode: SplitMode,
        limits: Limits,
    ) -> Result<Option<Prefill>, Error> {
        let is_free = matches!(mode, SplitMode::Balanced | SplitMode::Unsplit);
        let Some(tile) = PrefillTile::new(config.head_dim) else { return Ok(None) };
        let page_tokens = if config.ragged { RAGGED_PAGE_TOKENS } else { config.page_size_tokens };
        let Some(box_tokens) = tile.box_tokens(page_tokens) else { return Ok(None) };
        if !is_free || config.custom_variant.is_some() {
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
