//! Cuts that do not look at the batch, dealt longest first to the least loaded queue.
//!
//! In: requests with the length of their units' pieces, longest first. Out: the pieces in queues. The rule of
//! [`SplitMode::BatchInvariant`] sees only the request's own lengths; that of [`SplitMode::FixedSplit`] not even
//! those. Which queue runs a piece does not change its result. Graham, "Bounds for certain multiprocessing
//! anomalies" (1966): dealt to the least loaded queue, in any order, the fullest queue holds at most the mean and
//! one longest piece; longest first comes closer.

use super::batch::Batch;
use super::loads::Loads;
use super::queues::Piece;
use super::{SplitMode, Target};
use crate::config::AttentionConfig;

/// Pieces a cut request may have, over all its KV heads and row tiles: about one for each of an H200's 132
/// multiprocessors, so that one request alone can use them. A constant, so that no device changes the cuts.
const REQUEST_PIECES: u32 = 128;

/// Shortest piece of a batch-invariant cut. A partial state is 8 bytes an element, written and read; a key with its
/// value is 4. So with 16 rows a cut adds at most 1/16 to the bytes moved, and with 4 rows 1/64.
const INVARIANT_PIECE_TOKENS: u32 = 512;

/// Tiles of a [`SplitMode::FixedSplit`] piece.
pub(super) fn fixed_piece_tiles(tokens: u32, target: Target) -> u32 {
    tokens.div_ceil(target.tile_tokens)
}

/// Most pieces of all row tiles of a request that [`SplitMode::BatchInvariant`] cuts: one for each KV head is
/// counted in [`REQUEST_PIECES`].
pub(super) fn most_request_pieces(config: &AttentionConfig) -> u32 {
    REQUEST_PIECES / config.kv_heads
}

/// Most pieces of a unit under [`SplitMode::BatchInvariant`], within a limit of keys.
pub(super) fn most_invariant_pieces(config: &AttentionConfig, target: Target, max_kv_len_tokens: u32) -> u32 {
    let shortest_tiles = INVARIANT_PIECE_TOKENS.div_ceil(target.tile_tokens);
    most_request_pieces(config).min(max_kv_len_tokens.div_ceil(target.tile_tokens) / shortest_tiles)
}

/// How long the pieces of a request's units are.
#[derive(Clone, Copy, Debug)]
pub(super) enum PieceRule {
    /// All tiles.
    Whole,
    /// So many tiles.
    Fixed(u32),
    /// By the request's own lengths: at most so many pieces over its row tiles, of at least so many tiles.
    Invariant { most_pieces: u32, shortest_tiles: u32 },
}

impl PieceRule {
    pub fn new(config: &AttentionConfig, target: Target, mode: SplitMode) -> PieceRule {
        match mode {
            SplitMode::Balanced | SplitMode::Unsplit => PieceRule::Whole,
            SplitMode::FixedSplit { tokens } => PieceRule::Fixed(fixed_piece_tiles(tokens, target)),
            SplitMode::BatchInvariant => PieceRule::Invariant {
                most_pieces: most_request_pieces(config),
                shortest_tiles: INVARIANT_PIECE_TOKENS.div_ceil(target.tile_tokens),
            },
        }
    }

    /// Tiles of a piece of any unit of a request with `tiles` tiles; at most all of them, at least 1.
    #[inline]
    pub fn piece_tiles(self, row_tiles: impl FnOnce() -> u32, tiles: u32) -> u32 {
        match self {
            PieceRule::Whole => tiles.max(1),
            PieceRule::Fixed(piece_tiles) => piece_tiles.min(tiles).max(1),
            PieceRule::Invariant { most_pieces, shortest_tiles } => {
                let pieces = (most_pieces / row_tiles()).min(tiles / shortest_tiles).max(1);
                tiles.div_ceil(pieces).max(1)
            }
        }
    }
}

/// Deals the batch; returns a fair share.
pub(super) fn deal(batch: &Batch, pieces: &mut Vec<Piece>, loads: &mut Loads) -> u64 {
    loads.restart(batch.totals().costliest_piece);
    pieces.clear();
    let mut total = 0;
    for request in batch.requests() {
        for tile in batch.row_tiles(request) {
            let mut begin = 0;
            loop {
                let (queue, _) = loads.least();
                let end_tiles = match batch.cut_multiple_tiles() {
                    Some(multiple) => ((tile.first_tile + begin) / multiple + 1) * multiple - tile.first_tile,
                    None => begin + request.piece_tiles,
                }
                .min(tile.tiles);
                let cost = tile.cost.of(end_tiles - begin);
                loads.add(queue, cost);
                total += cost;
                pieces.push(Piece::new(queue, &tile, end_tiles));
                begin = end_tiles;
                if begin == tile.tiles {
                    break;
                }
            }
        }
    }
    total.div_ceil(batch.teams as u64)
}
