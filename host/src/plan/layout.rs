//! Capacities and offsets: what the largest plan within the limits needs, and where each array lies.
//!
//! In: config, target, split mode and limits. Out: a [`WorkspaceLayout`], used both to size the caller's workspace
//! and to place the arrays of the host image, which [`Arrays`] holds. Nothing here depends on a batch.

use bytemuck::{cast_slice, cast_slice_mut};
use kernels_gpu::abi::plan::{MaskRequest, PlanHeader, SharedRow, WorkItem};
use kernels_gpu::abi::tile::ATTEND_TILE_ROWS;

use super::cost::Cost;
use super::queues::Written;
use super::shared::{NotShared, most_member_rows};
use super::{Limits, PlanError, SplitMode, Target, spread};
use crate::config::AttentionConfig;
use crate::page_table::MAX_KV_LEN_TOKENS;
use crate::workspace::{OFFSET_ALIGNMENT_BYTES, WorkspaceLayout};

/// The largest counts of a plan.
struct Capacity {
    items: u128,
    groups: u128,
    partial_rows: u128,
    shared_rows: u128,
    folds: u128,
}

/// Adds what shared prefixes may need. A request that takes part has one row tile of at most [`most_member_rows`] rows,
/// and on each level a place in one row tile of a unit, whole or in pieces. So without cuts it has a state a row for each
/// level and one for its own keys; a cut of a unit adds a state for each of its rows, as it does without sharing.
fn with_shared(config: &AttentionConfig, target: Target, limits: &Limits, flat: Capacity) -> Capacity {
    let levels = config.shared_prefix_levels as u128;
    let (heads, packed_rows) = (config.kv_heads as u128, limits.max_query_tokens as u128 * config.group() as u128);
    let members = limits.max_requests.min(limits.max_query_tokens) as u128;
    let member_rows = packed_rows.min(members * most_member_rows(target) as u128);
    Capacity {
        items: flat.items + levels * members,
        groups: flat.groups,
        partial_rows: flat.partial_rows + member_rows * (levels + 1) * heads,
        shared_rows: levels * member_rows,
        folds: flat.groups / heads + members,
    }
}

fn capacity(config: &AttentionConfig, target: Target, mode: SplitMode, limits: &Limits) -> Capacity {
    let rows_of_tile = ATTEND_TILE_ROWS as u128;
    let (requests, tokens) = (limits.max_requests as u128, limits.max_query_tokens as u128);
    let (heads, group) = (config.kv_heads as u128, config.group() as u128);
    let output_rows = tokens * config.query_heads as u128;
    // Row tiles: a request's last one may be as short as a row, and a token begins at most ceil(group / 16).
    let occupied = requests.min(tokens);
    let row_tiles =
        ((tokens * group + occupied * (rows_of_tile - 1)) / rows_of_tile).min(tokens * group.div_ceil(rows_of_tile));
    let rows_of_tile = rows_of_tile.max(target.tall_rows as u128).min(tokens * group);
    let kv_tiles = limits.max_kv_len_tokens.div_ceil(target.tile_tokens) as u128;
    let uncut = Capacity { items: row_tiles, groups: 0, partial_rows: 0, shared_rows: 0, folds: 0 };
    let may_share = NotShared::always(config, mode).is_none();
    match mode {
        SplitMode::Unsplit if may_share => with_shared(config, target, limits, uncut),
        SplitMode::Unsplit => uncut,
        SplitMode::Balanced => {
            // A queue cuts at most one row tile, and `c` cuts of `n` row tiles make `c + n` pieces.
            let teams = target.teams(config.kv_heads).teams as u128;
            let most_cuts = (kv_tiles / Cost::SHORT.shortest_tiles as u128).saturating_sub(1);
            let levels = if may_share { config.shared_prefix_levels as u128 } else { 0 };
            let cuts = teams.min((row_tiles + levels * occupied) * most_cuts);
            let cut = cuts.min(row_tiles);
            let (items, groups) = (row_tiles + cuts, cut * heads);
            let flat = Capacity { items, groups, partial_rows: rows_of_tile * (cuts + cut) * heads, ..uncut };
            if may_share { with_shared(config, target, limits, flat) } else { flat }
        }
        SplitMode::BatchInvariant => {
            // A unit has at most `most_pieces`, all cut units of a request together `most_request_pieces`.
            let most_pieces = spread::most_invariant_pieces(config, target, limits.max_kv_len_tokens) as u128;
            if most_pieces < 2 {
                return uncut;
            }
            let pieces = occupied * spread::most_request_pieces(config) as u128;
            Capacity {
                items: (row_tiles * most_pieces).min(row_tiles + pieces),
                groups: row_tiles.min(pieces / 2) * heads,
                partial_rows: (output_rows * most_pieces).min(pieces * rows_of_tile * heads),
                ..uncut
            }
        }
        SplitMode::FixedSplit { tokens: piece_tokens } => {
            let piece_tiles = spread::fixed_piece_tiles(piece_tokens, target) as u128;
            let most_pieces = kv_tiles.div_ceil(piece_tiles);
            if most_pieces < 2 {
                return uncut;
            }
            let piece_tokens = piece_tiles * target.tile_tokens as u128;
            let pieces_of_batch = limits.max_kv_tokens as u128 / piece_tokens + requests;
            let row_tiles_of_request = (tokens * group).div_ceil(ATTEND_TILE_ROWS as u128);
            let items = (row_tiles * most_pieces).min(row_tiles_of_request * pieces_of_batch);
            Capacity {
                items,
                groups: row_tiles * heads,
                partial_rows: (output_rows * most_pieces).min(rows_of_tile * items * heads),
                ..uncut
            }
        }
    }
}

/// Lays out the workspace: header, `arrivals`, `queue_begin`, `mask_requests`, `first_kv_rows`, items, and right behind a
/// plan's last item its `shared_rows` and `folds`; then partial outputs and their LSE.
///
/// # Errors
/// Refuses limits that lead to indices or image offsets past 32 bits.
pub(super) fn place(
    config: &AttentionConfig,
    target: Target,
    mode: SplitMode,
    limits: &Limits,
) -> Result<WorkspaceLayout, PlanError> {
    let fits = |field, got: u128, supported: u64| {
        if got > supported as u128 { Err(PlanError::Unrepresentable { field, got, supported }) } else { Ok(got as u64) }
    };
    let positions = MAX_KV_LEN_TOKENS as u64;
    fits("max_kv_len_tokens", limits.max_kv_len_tokens as u128, positions)?;
    fits(
        "max_query_tokens * query heads of a KV head",
        limits.max_query_tokens as u128 * config.group() as u128,
        positions,
    )?;
    if config.shared_prefix_levels > 0 {
        // A shared item's rows count from the end of its keys.
        let got = limits.max_kv_len_tokens as u128 + limits.max_query_tokens as u128;
        fits("max_kv_len_tokens + max_query_tokens, with shared prefixes,", got, positions)?;
    }
    fits("target.blocks", target.blocks as u128, positions)?;
    fits("target.tile_tokens", target.tile_tokens as u128, positions)?;

    let capacity = capacity(config, target, mode, limits);
    let max_items = fits("work items", capacity.items, positions)?;
    let max_groups = fits("arrival counts", capacity.groups, positions)?;
    let max_partial_rows = fits("partial states", capacity.partial_rows, u32::MAX as u64)?;
    let max_shared_rows = fits("rows of shared items", capacity.shared_rows, positions)?;
    let max_folds = fits("row tiles to fold", capacity.folds, positions)?;

    let align = |bytes: u64| bytes.next_multiple_of(OFFSET_ALIGNMENT_BYTES);
    let teams = target.teams(config.kv_heads).teams as u64;
    let arrivals_offset_bytes = align(size_of::<PlanHeader>() as u64);
    let queue_begin_offset_bytes = align(arrivals_offset_bytes + 4 * max_groups);
    let mask_requests_offset_bytes = align(queue_begin_offset_bytes + 4 * (2 * teams + 1));
    let mask_requests = if config.mask.is_some() { limits.max_requests as u64 } else { 0 };
    let first_kv_rows_offset_bytes =
        align(mask_requests_offset_bytes + size_of::<MaskRequest>() as u64 * mask_requests);
    let first_kv_rows = if config.ragged { limits.max_requests as u64 } else { 0 };
    let items_offset_bytes = align(first_kv_rows_offset_bytes + 4 * first_kv_rows);
    let items_bytes = size_of::<WorkItem>() as u64 * max_items;
    let image_bytes =
        align(items_offset_bytes + items_bytes + size_of::<SharedRow>() as u64 * max_shared_rows + 4 * max_folds);
    fits("plan image bytes", image_bytes as u128, u32::MAX as u64)?;
    let partial_out_offset_bytes = image_bytes;
    let state_columns = target.state_columns_of(config) as u64;
    let partial_lse_offset_bytes = align(partial_out_offset_bytes + 4 * max_partial_rows * state_columns);
    Ok(WorkspaceLayout {
        arrivals_offset_bytes,
        queue_begin_offset_bytes,
        mask_requests_offset_bytes,
        first_kv_rows_offset_bytes,
        items_offset_bytes,
        image_bytes,
        partial_out_offset_bytes,
        partial_lse_offset_bytes,
        total_bytes: align(partial_lse_offset_bytes + 4 * max_partial_rows),
        max_items: max_items as u32,
        max_groups: max_groups as u32,
        max_partial_rows: max_partial_rows as u32,
        max_shared_rows: max_shared_rows as u32,
        max_folds: max_folds as u32,
    })
}

/// The host image at full capacity, seen as its arrays. Bytes between arrays are zero.
#[derive(Debug)]
pub(super) struct Arrays {
    layout: WorkspaceLayout,
    teams: u32,
    /// `u64` for the alignment of the header's epoch.
    words: Vec<u64>,
}

impl Arrays {
    pub fn new(layout: WorkspaceLayout, teams: u32) -> Arrays {
        Arrays { layout, teams, words: vec![0; layout.image_bytes as usize / 8] }
    }

    pub fn layout(&self) -> &WorkspaceLayout {
        &self.layout
    }

    pub fn image(&self) -> &[u8] {
        cast_slice(&self.words)
    }

    pub fn set_header(&mut self, header: PlanHeader) {
        cast_slice_mut(&mut self.words)[..size_of::<PlanHeader>()].copy_from_slice(bytemuck::bytes_of(&header));
    }

    fn queue_begin_bytes(&self) -> std::ops::Range<usize> {
        let begin = self.layout.queue_begin_offset_bytes as usize;
        begin..begin + 4 * (2 * self.teams as usize + 1)
    }

    fn items_bytes(&self) -> std::ops::Range<usize> {
        let begin = self.layout.items_offset_bytes as usize;
        begin..begin + size_of::<WorkItem>() * self.layout.max_items as usize
    }

    pub fn queue_begin(&self) -> &[u32] {
        cast_slice(&self.image()[self.queue_begin_bytes()])
    }

    pub fn items(&self) -> &[WorkItem] {
        cast_slice(&self.image()[self.items_bytes()])
    }

    /// `queue_begin` and items, at full capacity.
    pub fn split_mut(&mut self) -> (&mut [u32], &mut [WorkItem]) {
        let ranges = [self.queue_begin_bytes(), self.items_bytes()];
        let bytes: &mut [u8] = cast_slice_mut(&mut self.words);
        let [queue_begin, items] = bytes.get_disjoint_mut(ranges).expect("the layout places arrays one after another");
        (cast_slice_mut(queue_begin), cast_slice_mut(items))
    }

    /// Where a plan's items, its `shared_rows` and its `folds` end: each right behind the one before.
    pub fn ends_bytes(&self, items: usize, written: Written) -> [usize; 3] {
        let items_end = self.layout.items_offset_bytes as usize + size_of::<WorkItem>() * items;
        let rows_end = items_end + size_of::<SharedRow>() * written.shared_rows as usize;
        [items_end, rows_end, rows_end + 4 * written.folds as usize]
    }

    /// Where the rows of shared items leave their states.
    pub fn shared_rows_mut(&mut self, items: usize, written: Written) -> &mut [SharedRow] {
        let [begin, end, _] = self.ends_bytes(items, written);
        let bytes: &mut [u8] = cast_slice_mut(&mut self.words);
        cast_slice_mut(&mut bytes[begin..end])
    }

    /// A plan's items, and the indices of those that stand for row tiles to fold.
    pub fn items_and_folds_mut(&mut self, items: usize, written: Written) -> (&[WorkItem], &mut [u32]) {
        let [items_end, begin, end] = self.ends_bytes(items, written);
        let bytes: &mut [u8] = cast_slice_mut(&mut self.words);
        let (before, folds) = bytes[..end].split_at_mut(begin);
        let items = &before[self.layout.items_offset_bytes as usize..items_end];
        (cast_slice(items), cast_slice_mut(folds))
    }

    /// The first rows of the requests, for the first `requests` of the limits'.
    pub fn first_kv_rows_mut(&mut self, requests: usize) -> &mut [u32] {
        let begin = self.layout.first_kv_rows_offset_bytes as usize;
        let bytes: &mut [u8] = cast_slice_mut(&mut self.words);
        cast_slice_mut(&mut bytes[begin..][..4 * requests])
    }

    /// Where the requests' parts of a mask are, for the first `requests` of the limits'.
    pub fn mask_requests_mut(&mut self, requests: usize) -> &mut [MaskRequest] {
        let begin = self.layout.mask_requests_offset_bytes as usize;
        let bytes: &mut [u8] = cast_slice_mut(&mut self.words);
        cast_slice_mut(&mut bytes[begin..][..requests * size_of::<MaskRequest>()])
    }
}
