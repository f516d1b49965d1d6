//! Cuts that do not look at the batch, dealt longest first to the least loaded queue.
//!
//! In: units and a rule for the length of their pieces. Out: the pieces in queues. The rule of
//! [`SplitMode::BatchInvariant`] sees only the request's own lengths; that of [`SplitMode::FixedSplit`] not even
//! those. Which queue runs a piece does not change its result. Graham, "Bounds for certain multiprocessing
//! anomalies" (1966): dealt to the least loaded queue, in any order, the fullest queue holds at most the mean and
//! one longest piece; requests with longer pieces go first to come closer.

use kernels_gpu::abi::tile::ATTEND_TILE_ROWS;

use super::balanced::ITEM_COST_TILES;
use super::batch::{Batch, Request};
use super::writer::Writer;
use super::{SplitMode, Target};
use crate::config::AttentionConfig;

/// Pieces a cut request may have, over all its KV heads and row tiles: about one for each multiprocessor of the
/// largest devices (132), so that one request alone can use them. A constant, so that no device changes the cuts.
pub(super) const REQUEST_PIECES: u32 = 128;

/// Shortest piece of a batch-invariant cut. A partial state is 8 bytes an element, written and read; a key with its
/// value is 4. So with 16 rows a cut adds at most 1/16 to the bytes moved, and with 4 rows 1/64.
const INVARIANT_PIECE_TOKENS: u32 = 512;

/// Tiles of a [`SplitMode::FixedSplit`] piece.
pub(super) fn fixed_piece_tiles(tokens: u32, target: Target) -> u32 {
    tokens.div_ceil(target.tile_tokens)
}

/// Most pieces of a unit under [`SplitMode::BatchInvariant`], within a limit of keys.
pub(super) fn most_invariant_pieces(config: &AttentionConfig, target: Target, max_kv_len_tokens: u32) -> u32 {
    let shortest_tiles = INVARIANT_PIECE_TOKENS.div_ceil(target.tile_tokens);
    (REQUEST_PIECES / config.kv_heads).min(max_kv_len_tokens.div_ceil(target.tile_tokens) / shortest_tiles)
}

#[derive(Debug)]
pub(super) struct Spread {
    mode: SplitMode,
    fixed_piece_tiles: u32,
    /// Tiles of a piece (inverted, so that the longest sorts first) and position of each request of the batch.
    order: Vec<u64>,
    /// Queue of each item, in the order dealt.
    queue_of: Vec<u32>,
    loads: Loads,
}

impl Spread {
    pub fn new(target: Target, teams: u32, mode: SplitMode, max_requests: u32, max_items: u32) -> Spread {
        Spread {
            mode,
            fixed_piece_tiles: match mode {
                SplitMode::FixedSplit { tokens } => fixed_piece_tiles(tokens, target),
                _ => u32::MAX,
            },
            order: Vec::with_capacity(max_requests as usize),
            queue_of: vec![0; max_items as usize],
            loads: Loads::new(teams),
        }
    }

    /// Tiles of a piece of any unit of `request`, at most all of them.
    fn piece_tiles(&self, batch: &Batch, request: &Request) -> u32 {
        if self.mode != SplitMode::BatchInvariant {
            return self.fixed_piece_tiles.min(request.tiles).max(1);
        }
        let row_tiles = (request.query_len * batch.group.get()).div_ceil(ATTEND_TILE_ROWS);
        let units = row_tiles as u64 * batch.heads as u64;
        let most_by_length = request.tiles / batch.tiles(INVARIANT_PIECE_TOKENS);
        let pieces = (REQUEST_PIECES as u64 / units).min(most_by_length as u64).max(1);
        request.tiles.div_ceil(pieces as u32).max(1)
    }

    /// Deals the batch to the queues; returns a fair share in tiles.
    pub fn deal(&mut self, batch: &Batch, writer: &mut Writer<'_>, queue_begin: &mut [u32]) -> u64 {
        self.order.clear();
        for (position, request) in (0u64..).zip(batch.requests()) {
            self.order.push((u64::from(u32::MAX - self.piece_tiles(batch, request)) << 32) | position);
        }
        self.order.sort_unstable();
        let longest = self.order.first().map_or(0, |&key| piece_and_request(batch, key).0);

        self.loads.restart(longest as u64 + ITEM_COST_TILES);
        queue_begin.fill(0);
        let (mut items, mut total) = (0, 0);
        for &key in &self.order {
            let (piece_tiles, request) = piece_and_request(batch, key);
            for tile in batch.row_tiles(request) {
                let pieces = tile.tiles.div_ceil(piece_tiles).max(1);
                let last = (tile.tiles - (pieces - 1) * piece_tiles) as u64 + ITEM_COST_TILES;
                let full = piece_tiles as u64 + ITEM_COST_TILES;
                total += full * (pieces - 1) as u64 + last;
                for piece in 1..=pieces {
                    let queue = self.loads.deal(if piece == pieces { last } else { full });
                    self.queue_of[items] = queue;
                    queue_begin[queue as usize + 1] += 1;
                    items += 1;
                }
            }
        }
        for i in 1..queue_begin.len() {
            queue_begin[i] += queue_begin[i - 1];
        }

        // Each queue's entry serves as its cursor, and ends where the next queue begins.
        let mut queue_of = self.queue_of.iter();
        for &key in &self.order {
            let (piece_tiles, request) = piece_and_request(batch, key);
            for tile in batch.row_tiles(request) {
                writer.spread(request, &tile, piece_tiles, &mut queue_of, queue_begin);
            }
        }
        queue_begin.rotate_right(1);
        queue_begin[0] = 0;
        total.div_ceil(batch.teams as u64)
    }
}

fn piece_and_request(batch: &Batch, key: u64) -> (u32, &Request) {
    (u32::MAX - (key >> 32) as u32, &batch.requests()[key as u32 as usize])
}

/// The queues by load. Dealing always to the least loaded, the smallest load never falls, so a ring of buckets
/// indexed by load finds it in constant time.
#[derive(Debug)]
struct Loads {
    /// First queue of each bucket, or [`NONE`].
    first: [u32; BUCKETS],
    /// The queue after each in its bucket.
    next: Vec<u32>,
    load: Vec<u64>,
    /// Bucket of the least loaded queues, not reduced to the ring.
    least: u64,
    /// A bucket spans `2^shift` tiles, so that the longest piece spans less than the ring.
    shift: u32,
}

const BUCKETS: usize = 2048;
const NONE: u32 = u32::MAX;

impl Loads {
    fn new(queues: u32) -> Loads {
        let next = vec![NONE; queues as usize];
        Loads { first: [NONE; BUCKETS], load: vec![0; queues as usize], next, least: 0, shift: 0 }
    }

    /// All queues empty, lowest number first; no piece will cost more than `longest`.
    fn restart(&mut self, longest: u64) {
        self.shift = (u64::BITS - longest.leading_zeros()).saturating_sub(BUCKETS.ilog2() - 1);
        self.least = 0;
        self.load.fill(0);
        self.first.fill(NONE);
        for queue in (0..self.next.len()).rev() {
            self.next[queue] = std::mem::replace(&mut self.first[0], queue as u32);
        }
    }

    /// Adds a piece to a least loaded queue; returns which.
    fn deal(&mut self, cost: u64) -> u32 {
        while self.first[self.least as usize % BUCKETS] == NONE {
            self.least += 1;
        }
        let queue = self.first[self.least as usize % BUCKETS];
        self.first[self.least as usize % BUCKETS] = self.next[queue as usize];
        self.load[queue as usize] += cost;
        let bucket = (self.load[queue as usize] >> self.shift) as usize % BUCKETS;
        self.next[queue as usize] = std::mem::replace(&mut self.first[bucket], queue);
        queue
    }
}
