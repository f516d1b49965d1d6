//! Cuts that do not look at the batch, dealt longest first to the least loaded queue.
//!
//! In: units and a rule for the length of their pieces. Out: the pieces in queues. The rule of
//! [`SplitMode::BatchInvariant`] sees only the request's own lengths; that of [`SplitMode::FixedSplit`] not even
//! those. Which queue runs a piece does not change its result. Graham, "Bounds on multiprocessing timing anomalies"
//! (1969): the fullest queue holds at most 4/3 of what the best deal of the same pieces would give it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use bytemuck::Zeroable;
use kernels_gpu::abi::plan::WorkItem;
use kernels_gpu::abi::tile::ATTEND_TILE_ROWS;

use super::balanced::ITEM_COST_TILES;
use super::batch::{Batch, Request};
use super::writer::Writer;
use super::{SplitMode, Target};
use crate::config::AttentionConfig;

/// Pieces a cut request may have, over all its KV heads and row tiles: nearly the 264 blocks of 132 multiprocessors
/// with two each, so that one request alone can fill them. A constant, so that no device changes the cuts.
pub(super) const REQUEST_PIECES: u32 = 256;

/// Shortest piece of a batch-invariant cut.
const INVARIANT_PIECE_TOKENS: u32 = 256;

/// Keys of a batch-invariant piece for each of its query rows: a partial state is 8 bytes an element written and
/// read, so against 4 bytes an element of key and value it adds at most 1/16 to the bytes moved.
const INVARIANT_PIECE_TOKENS_PER_ROW: u32 = 32;

/// Tiles of a [`SplitMode::FixedSplit`] piece.
pub(super) fn fixed_piece_tiles(tokens: u32, target: Target) -> u32 {
    tokens.div_ceil(target.tile_tokens)
}

/// Most pieces of a unit under [`SplitMode::BatchInvariant`] within a limit of keys.
pub(super) fn most_invariant_pieces(config: &AttentionConfig, target: Target, max_kv_len_tokens: u32) -> u32 {
    let shortest_tiles = INVARIANT_PIECE_TOKENS.div_ceil(target.tile_tokens);
    (REQUEST_PIECES / config.kv_heads).min(max_kv_len_tokens.div_ceil(target.tile_tokens) / shortest_tiles)
}

#[derive(Debug)]
pub(super) struct Spread {
    mode: SplitMode,
    fixed_piece_tiles: u32,
    /// The items as cut, before they are put in queue order.
    cut: Vec<WorkItem>,
    /// Cost (inverted, so that the longest sorts first) and index of each item.
    order: Vec<u64>,
    /// Load in tiles and number of each queue, the least loaded on top.
    loads: BinaryHeap<Reverse<(u64, u32)>>,
    /// Queue of each item, in the order dealt.
    queue: Vec<u32>,
}

impl Spread {
    pub fn new(target: Target, mode: SplitMode, max_items: u32) -> Spread {
        Spread {
            mode,
            fixed_piece_tiles: match mode {
                SplitMode::FixedSplit { tokens } => fixed_piece_tiles(tokens, target),
                _ => u32::MAX,
            },
            cut: vec![WorkItem::zeroed(); max_items as usize],
            order: Vec::with_capacity(max_items as usize),
            loads: BinaryHeap::with_capacity(target.queues as usize),
            queue: vec![0; max_items as usize],
        }
    }

    /// Tiles of a piece of any unit of `request`.
    fn piece_tiles(&self, batch: &Batch, request: &Request) -> u32 {
        if self.mode != SplitMode::BatchInvariant {
            return self.fixed_piece_tiles;
        }
        let packed_rows = request.query_len * batch.group.get();
        let units = packed_rows.div_ceil(ATTEND_TILE_ROWS) as u64 * batch.heads as u64;
        let rows = packed_rows.min(ATTEND_TILE_ROWS);
        let shortest = batch.tiles(INVARIANT_PIECE_TOKENS.max(INVARIANT_PIECE_TOKENS_PER_ROW * rows));
        let pieces = (REQUEST_PIECES as u64 / units).min((request.tiles / shortest) as u64).max(1);
        request.tiles.div_ceil(pieces as u32).max(1)
    }

    /// Deals the batch to the queues; returns a fair share in tiles.
    pub fn deal(&mut self, batch: &Batch, writer: &mut Writer<'_>, queue_begin: &mut [u32]) -> u64 {
        for request in batch.requests() {
            let piece_tiles = self.piece_tiles(batch, request);
            for tile in batch.row_tiles(request) {
                if tile.tiles <= piece_tiles {
                    writer.whole(request, &tile, 0..batch.heads);
                    continue;
                }
                for head in 0..batch.heads {
                    for begin in (0..tile.tiles).step_by(piece_tiles as usize) {
                        let end = tile.tiles.min(begin.saturating_add(piece_tiles));
                        writer.piece(request, &tile, head, begin, end);
                    }
                }
            }
        }
        self.place(batch, writer.items_mut(), queue_begin)
    }

    /// Longest item first to the least loaded queue, ties by index; then puts `items` in queue order.
    fn place(&mut self, batch: &Batch, items: &mut [WorkItem], queue_begin: &mut [u32]) -> u64 {
        let cut = &mut self.cut[..items.len()];
        cut.copy_from_slice(items);
        self.order.clear();
        self.order.extend(cut.iter().zip(0u64..).map(|(item, index)| {
            let tiles = batch.tiles(item.kv_end_tokens - item.kv_begin_tokens);
            ((u32::MAX - tiles) as u64) << 32 | index
        }));
        self.order.sort_unstable();

        self.loads.clear();
        self.loads.extend((0..batch.queues).map(|queue| Reverse((0, queue))));
        queue_begin.fill(0);
        let queue = &mut self.queue[..items.len()];
        let mut total = 0;
        for (&key, queue) in self.order.iter().zip(queue.iter_mut()) {
            let cost = (u32::MAX - (key >> 32) as u32) as u64 + ITEM_COST_TILES;
            total += cost;
            if let Some(mut least) = self.loads.peek_mut() {
                least.0.0 += cost;
                *queue = least.0.1;
                queue_begin[*queue as usize + 1] += 1;
            }
        }
        for i in 1..queue_begin.len() {
            queue_begin[i] += queue_begin[i - 1];
        }
        // Each queue's entry serves as its cursor, and ends as the next queue's beginning.
        for (&key, &queue) in self.order.iter().zip(queue.iter()) {
            let at = &mut queue_begin[queue as usize];
            items[*at as usize] = cut[key as u32 as usize];
            *at += 1;
        }
        queue_begin.rotate_right(1);
        queue_begin[0] = 0;
        total.div_ceil(batch.queues as u64)
    }
}
