//! The inspector: which query rows meet which keys, cut into work items and dealt to queues.
//!
//! In: a [`PageTable`], [`QueryLengths`] and an [`AttentionConfig`]; integers in host memory, no GPU. Out: a [`Plan`],
//! one byte image in the layout of [`kernels_gpu::abi::plan`]. Invariant: every (query row, visible key) pair lies
//! in exactly one item, and every query row is written by one direct item or by the pieces of one split. A *unit* is
//! one row tile (up to 16 packed rows, or many of them where a request has more) of one request, with all keys any of its
//! rows may see, for all KV heads; planning means cutting units along their keys and choosing a team of blocks for each piece.
//!
//! Teams run at once, each its own queue, and each team's blocks share the heads; so all queues should take equally
//! long, and nothing else matters.
//!
//! The files in reading order: `cost` says what units cost, `batch` derives them, `shared` those of prefixes in common,
//! `balanced` and `spread` decide their cuts and queues by the
//! `loads` so far, `queues` spells the items, `masks` places each request's part of a mask, `layout` fixes the image's
//! capacities and offsets, `explain` reports, `predict` says how long it will take.

mod balanced;
mod batch;
mod cost;
mod explain;
mod layout;
mod loads;
mod masks;
mod predict;
mod queues;
mod shared;
mod spread;

use kernels_gpu::abi::plan::{PLAN_MAGIC, PlanHeader, SharedRow, WorkItem};
use kernels_gpu::abi::tile::{ATTEND_TILE_ROWS, AttendTile, PrefillTile, Teams};

pub use cost::{Cost, TILE_COST};
pub use explain::{Balance, Explain};
pub use shared::{NotShared, Sharing};

use crate::config::{AttentionConfig, ConfigError};
use crate::page_table::{PageTable, PageTableError, Pages, QueryLengths};
use crate::workspace::WorkspaceLayout;
use batch::Batch;
use layout::Arrays;
use loads::Loads;
use queues::{Piece, SharedWriter, Written};

/// What the plan is for: how many blocks work at once, and in what steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Target {
    /// Blocks of the attend kernel that run at once: multiprocessors times blocks per multiprocessor.
    pub blocks: u32,
    /// Keys of a tile, the step in which the kernel walks a range; cuts fall on multiples of it.
    pub tile_tokens: u32,
    /// Packed rows of a tall item, at most; 0 where all items are short.
    pub tall_rows: u32,
    /// Whether all items are tall, whatever their rows, and cost the same.
    pub all_tall: bool,
    /// Whether every block counts, even if some then take several KV heads one after another.
    pub all_busy: bool,
    /// Columns of a partial state, if more than the values have: the kernel's head dim.
    pub state_columns: u32,
    /// What the device reads from its memory, where that is known: for predictions, never for a plan.
    pub read_gb_per_s: Option<u32>,
}

impl Target {
    /// `blocks` blocks that walk tiles of `tile_tokens` keys, with short items alone.
    pub const fn new(blocks: u32, tile_tokens: u32) -> Target {
        Target {
            blocks,
            tile_tokens,
            tall_rows: 0,
            all_tall: false,
            all_busy: false,
            state_columns: 0,
            read_gb_per_s: None,
        }
    }

    /// The same with tall items of up to `tall_rows` packed rows.
    pub const fn with_tall_rows(self, tall_rows: u32) -> Target {
        Target { tall_rows, ..self }
    }

    /// Columns of a partial state of an attention.
    pub(crate) const fn state_columns_of(self, config: &AttentionConfig) -> u32 {
        if self.state_columns > config.value_head_dim { self.state_columns } else { config.value_head_dim }
    }

    /// The same with partial states of `state_columns` columns, or as many as the values have where that is more.
    pub const fn with_state_columns(self, state_columns: u32) -> Target {
        Target { state_columns, ..self }
    }

    /// The same on a device that reads `read_gb_per_s` gigabytes a second; 0 if that is not known.
    pub const fn with_read_gb_per_s(self, read_gb_per_s: u32) -> Target {
        Target { read_gb_per_s: if read_gb_per_s == 0 { None } else { Some(read_gb_per_s) }, ..self }
    }

    /// How the blocks stand in teams, each with a queue.
    pub const fn teams(self, kv_heads: u32) -> Teams {
        if self.all_busy { Teams::busiest(kv_heads, self.blocks) } else { Teams::new(kv_heads, self.blocks) }
    }

    /// The prefill kernel of `tile` on a device with `multiprocessors`.
    pub const fn for_prefill(multiprocessors: u32, tile: PrefillTile, all_busy: bool) -> Target {
        Target {
            all_tall: true,
            all_busy,
            state_columns: tile.value_dim,
            ..Target::new(multiprocessors, tile.tile_tokens).with_tall_rows(tile.rows())
        }
    }

    /// Rows up to which a tall item costs less.
    pub(crate) const fn half_rows(self) -> u32 {
        if self.all_tall { 0 } else { self.tall_rows / 2 }
    }

    /// The attend kernel of `tile` on a device with `multiprocessors`; `is_plain` says that no variant takes its registers.
    pub const fn for_tile(multiprocessors: u32, tile: AttendTile, is_plain: bool) -> Target {
        let blocks = multiprocessors.saturating_mul(tile.blocks_per_multiprocessor);
        Target::new(blocks, tile.tile_tokens())
            .with_tall_rows(tile.tall_rows(is_plain))
            .with_state_columns(tile.head_dim)
    }
}

/// How units are cut along their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitMode {
    /// Cut where it evens out the queues: the fastest. A request's cuts depend on the whole batch, so its result may
    /// differ in the last bit from batch to batch.
    Balanced,
    /// Cut each request by its own `kv_len` and `query_len` alone: bit-equal results whatever the batch and slot.
    /// A unit has at most `max(1, 128 / kv_heads)` pieces.
    BatchInvariant,
    /// Cut at multiples of `tokens`, rounded up to whole tiles: results depend neither on the batch nor on how a
    /// prompt was chunked. For that all items are tall, so decoding is slower. Short pieces of long requests need a large
    /// workspace.
    FixedSplit {
        /// Keys of a piece, at least 1.
        tokens: u32,
    },
    /// Never cut.
    Unsplit,
}

/// The largest batch a planner will see. All memory and all offsets follow from these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests of a batch.
    pub max_requests: u32,
    /// Query tokens of a batch.
    pub max_query_tokens: u32,
    /// Keys of one request.
    pub max_kv_len_tokens: u32,
    /// Keys of a batch.
    pub max_kv_tokens: u64,
}

/// A batch, or limits, that cannot be planned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The attention itself is unsupported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The batch's metadata contradicts itself.
    #[error(transparent)]
    PageTable(#[from] PageTableError),
    /// A parameter of the planner is zero.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// Tall items are made of blocks of rows.
    #[error("target.tall_rows is {got}; it must be a multiple of {multiple_of}, or 0")]
    TallRows {
        /// The value given.
        got: u32,
        /// Rows of a block.
        multiple_of: u32,
    },
    /// Limits for which indices or offsets would not fit the image.
    #[error("{field} is {got}; supported is at most {supported}; lower the limits or cut into fewer pieces")]
    Unrepresentable {
        /// The field.
        field: &'static str,
        /// The value the limits lead to.
        got: u128,
        /// The largest value supported.
        supported: u64,
    },
    /// A batch past the planner's limits.
    #[error("batch has {got} {what}; the planner's {limit_field} is {limit}")]
    OverLimit {
        /// What there is too much of.
        what: &'static str,
        /// The field of [`Limits`].
        limit_field: &'static str,
        /// The value found.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// A request past the planner's limits.
    #[error("kv_len of request {request} is {kv_len}; the planner's max_kv_len_tokens is {limit}")]
    RequestOverLimit {
        /// The request.
        request: usize,
        /// Its keys.
        kv_len: u32,
        /// The limit.
        limit: u32,
    },
    /// A table of another page size.
    #[error("page table has pages of {got} tokens; the planner's config has page_size_tokens = {expected}")]
    PageSizeMismatch {
        /// The table's.
        got: u32,
        /// The config's.
        expected: u32,
    },
    /// Rows without pages for an attention over pages.
    #[error(
        "page table is ragged; the planner's config has pages of {page_size_tokens} tokens, not \
         AttentionConfig::ragged"
    )]
    RaggedTable {
        /// The config's.
        page_size_tokens: u32,
    },
    /// Pages for an attention over rows without pages.
    #[error(
        "page table has pages of {page_size_tokens} tokens; the planner's config is ragged, which takes \
         PageTable::ragged"
    )]
    PagedTable {
        /// The table's.
        page_size_tokens: u32,
    },
}

/// Makes plans for one attention, one device and one set of limits. All memory is allocated by [`Planner::new`];
/// [`Planner::plan`] refreshes the plan in place.
#[derive(Debug)]
pub struct Planner {
    limits: Limits,
    batch: Batch,
    /// The pieces of all units, in the order dealt.
    pieces: Vec<Piece>,
    loads: Loads,
    shared_writer: SharedWriter,
    plan: Plan,
}

/// A planned batch.
#[derive(Debug)]
pub struct Plan {
    config: AttentionConfig,
    target: Target,
    mode: SplitMode,
    arrays: Arrays,
    header: PlanHeader,
    totals: Totals,
    written: Written,
    sharing: Sharing,
    mask_bytes: u64,
}

/// Sums over the batch of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Totals {
    requests: usize,
    query_tokens: u64,
    max_query_len_tokens: u32,
    kv_tokens: u64,
    units: u64,
    longest_unit_tiles: u32,
    /// The cost of the costliest piece by rule.
    costliest_piece: u64,
    /// Units that are tall.
    tall_units: u64,
    /// Cost of all units, uncut.
    cost: u64,
    /// What a queue should cost.
    share: u64,
}

impl Planner {
    /// A planner whose every batch stays within `limits`.
    ///
    /// # Errors
    /// Refuses an unsupported attention, zero blocks, tiles or split lengths, and limits for which indices would not
    /// fit 32 bits.
    pub fn new(config: AttentionConfig, target: Target, mode: SplitMode, limits: Limits) -> Result<Planner, PlanError> {
        config.validate()?;
        for (field, value) in [("target.blocks", target.blocks), ("target.tile_tokens", target.tile_tokens)] {
            if value == 0 {
                return Err(PlanError::Zero { field });
            }
        }
        if !target.tall_rows.is_multiple_of(ATTEND_TILE_ROWS) {
            return Err(PlanError::TallRows { got: target.tall_rows, multiple_of: ATTEND_TILE_ROWS });
        }
        if mode == (SplitMode::FixedSplit { tokens: 0 }) {
            return Err(PlanError::Zero { field: "FixedSplit tokens" });
        }
        let layout = layout::place(&config, target, mode, &limits)?;
        let teams = target.teams(config.kv_heads).teams;
        let plan = Plan {
            config,
            target,
            mode,
            arrays: Arrays::new(layout, teams),
            header: PlanHeader {
                magic: PLAN_MAGIC,
                teams,
                items: 0,
                groups: 0,
                partial_rows: 0,
                arrivals_offset_bytes: layout.arrivals_offset_bytes as u32,
                queue_begin_offset_bytes: layout.queue_begin_offset_bytes as u32,
                items_offset_bytes: layout.items_offset_bytes as u32,
                folds: 0,
                folds_offset_bytes: 0,
                epoch: 0,
                image_bytes: 0,
            },
            totals: Totals::default(),
            written: Written::default(),
            sharing: Sharing::default(),
            mask_bytes: 0,
        };
        let batch = Batch::new(&config, target, mode, &limits);
        let pieces = Vec::with_capacity(layout.max_items as usize);
        let requests = if layout.max_shared_rows > 0 { limits.max_requests as usize } else { 0 };
        let shared_writer = SharedWriter::new(requests, requests * config.shared_prefix_levels as usize);
        Ok(Planner { limits, batch, pieces, loads: Loads::new(teams), shared_writer, plan })
    }

    /// What the caller's workspace must hold. It depends on the limits only, so one workspace serves every plan.
    pub fn workspace_size(&self) -> WorkspaceLayout {
        *self.plan.arrays.layout()
    }

    /// Columns of a partial state.
    #[cfg(feature = "cuda")]
    pub(crate) fn state_columns(&self) -> u32 {
        self.plan.target.state_columns_of(&self.plan.config)
    }

    /// The limits given to [`Planner::new`].
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Plans a batch in place: no allocation, the epoch grows by one. On an error the last plan stays as it was.
    ///
    /// # Errors
    /// Refuses a batch past the limits, a table of another page size, a ragged table for an attention over pages and
    /// the other way round, and query lengths for another number of requests.
    pub fn plan(&mut self, table: &PageTable<'_>, query: QueryLengths<'_>) -> Result<&Plan, PlanError> {
        let expected = self.plan.config.page_size_tokens;
        match (table.is_ragged(), self.plan.config.ragged) {
            (true, false) => return Err(PlanError::RaggedTable { page_size_tokens: expected }),
            (false, true) => return Err(PlanError::PagedTable { page_size_tokens: table.page_size_tokens() }),
            _ => {}
        }
        if table.page_size_tokens() != expected {
            return Err(PlanError::PageSizeMismatch { got: table.page_size_tokens(), expected });
        }
        query.check_requests(table.requests())?;
        self.batch.gather(table, query, &self.limits)?;

        let share = match self.plan.mode {
            SplitMode::Balanced => balanced::deal(&self.batch, &mut self.pieces, &mut self.loads),
            _ => spread::deal(&self.batch, &mut self.pieces, &mut self.loads),
        };

        let plan = &mut self.plan;
        plan.mask_bytes = match plan.config.mask {
            Some(form) => masks::write(form, table.kv_lens(), query, plan.arrays.mask_requests_mut(table.requests())),
            None => 0,
        };
        if let Pages::Ragged(indptr) = table.pages() {
            let requests = table.requests();
            plan.arrays.first_kv_rows_mut(requests).copy_from_slice(&indptr[..requests]);
        }
        let written = if self.batch.shared.units().is_empty() {
            let (queue_begin, items) = plan.arrays.split_mut();
            queues::write(&self.batch, &self.pieces, queue_begin, items)
        } else {
            self.shared_writer.write(&self.batch, &self.pieces, &mut plan.arrays)
        };
        let [_, rows_end, image_end] = plan.arrays.ends_bytes(self.pieces.len(), written);
        plan.header = PlanHeader {
            items: self.pieces.len() as u32,
            groups: written.groups,
            partial_rows: written.partial_rows,
            epoch: plan.header.epoch + 1,
            folds: written.folds,
            folds_offset_bytes: rows_end as u32,
            image_bytes: image_end as u64,
            ..plan.header
        };
        plan.arrays.set_header(plan.header);
        plan.totals = Totals { share, ..self.batch.totals() };
        (plan.written, plan.sharing) = (written, self.batch.sharing);
        Ok(&self.plan)
    }

    /// The keys that a plan of a batch within the limits would not read once more. The latest plan stays as it is.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(crate) fn saved_kv_tokens(&mut self, table: &PageTable<'_>, query: QueryLengths<'_>) -> u64 {
        if table.requests() > self.limits.max_requests as usize {
            return 0;
        }
        self.batch.find_sharing(table, query).saved_kv_tokens
    }

    /// Counts on from another planner's plans, so that no two plans of both have the same number.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(crate) fn count_on_from(&mut self, epoch: u64) {
        self.plan.header.epoch = self.plan.header.epoch.max(epoch);
    }

    /// The last plan made, if any.
    pub fn latest(&self) -> Option<&Plan> {
        (self.plan.header.epoch > 0).then_some(&self.plan)
    }
}

impl Plan {
    /// The bytes to upload to the start of the workspace, in one copy: everything up to the last item, and what shared ones
    /// need. The counts
    /// before the queues are zeros; a balanced plan has at most one for each team and KV head.
    pub fn image(&self) -> &[u8] {
        &self.arrays.image()[..self.header.image_bytes as usize]
    }

    /// What the image holds and where.
    pub fn header(&self) -> PlanHeader {
        self.header
    }

    /// First item of the two runs of each queue, tall ones and short ones, and the end of the last: `2 * teams + 1` values.
    pub fn queue_begin(&self) -> &[u32] {
        self.arrays.queue_begin()
    }

    /// Work items, by queue.
    pub fn items(&self) -> &[WorkItem] {
        &self.arrays.items()[..self.header.items as usize]
    }

    /// The work items of each team's queue with what each costs.
    pub fn costs(&self) -> impl Iterator<Item = impl Iterator<Item = (&WorkItem, Cost)>> {
        self.queue_begin().windows(3).step_by(2).map(|begin| {
            let cost = |item: u32| {
                let rows = self.items()[item as usize].rows;
                let is_tall = self.target.all_tall || item < begin[1];
                (&self.items()[item as usize], Cost::new(is_tall, rows, self.target.half_rows()))
            };
            (begin[0]..begin[2]).map(cost)
        })
    }

    /// Tiles of an item.
    pub fn tiles(&self, item: &WorkItem) -> u32 {
        (item.kv_end_tokens - item.kv_begin_tokens).div_ceil(self.target.tile_tokens)
    }

    /// The work items of each team's queue, in order.
    pub fn queues(&self) -> impl Iterator<Item = &[WorkItem]> {
        self.queue_begin().windows(3).step_by(2).map(|begin| &self.items()[begin[0] as usize..begin[2] as usize])
    }

    /// Where the rows of shared items leave their states; empty where nothing is shared.
    pub fn shared_rows(&self) -> &[SharedRow] {
        let [begin, end, _] = self.arrays.ends_bytes(self.header.items as usize, self.written);
        bytemuck::cast_slice(&self.image()[begin..end])
    }

    /// An item of each row tile that the fold kernel folds; empty where nothing is shared.
    pub fn folds(&self) -> &[u32] {
        let [_, begin, end] = self.arrays.ends_bytes(self.header.items as usize, self.written);
        bytemuck::cast_slice(&self.image()[begin..end])
    }

    /// What became of the prefixes that the table says requests have in common.
    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Counts the plans of one planner, from 1.
    pub fn epoch(&self) -> u64 {
        self.header.epoch
    }

    /// Requests of the batch.
    pub fn requests(&self) -> usize {
        self.totals.requests
    }

    /// Query tokens of the batch: the rows `q` and `out` must have.
    pub fn query_tokens(&self) -> u64 {
        self.totals.query_tokens
    }

    /// Query tokens of the request that has the most.
    pub fn max_query_len_tokens(&self) -> u32 {
        self.totals.max_query_len_tokens
    }

    /// Bytes of the batch's mask, if the attention has one.
    pub fn mask_bytes(&self) -> u64 {
        self.mask_bytes
    }

    /// Keys of all requests.
    pub fn kv_tokens(&self) -> u64 {
        self.totals.kv_tokens
    }

    /// The attention planned for.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The blocks and tiles planned for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// How units were cut.
    pub fn mode(&self) -> SplitMode {
        self.mode
    }

    /// The workspace the plan is made for.
    pub fn workspace(&self) -> &WorkspaceLayout {
        self.arrays.layout()
    }
}
