//! Balanced cuts: longest first to the least loaded queue, cut only where a queue would pass its share.
//!
//! In: units, longest first. Out: pieces in queues, the fullest little more than a fair share. A unit goes whole to
//! the least loaded queue if that queue then stays within a slack of its share. Otherwise a piece of it fills the
//! queue and the rest goes on to the queue least loaded then. Dealing (Graham, 1966) alone leaves a long unit as it
//! is; cutting at the share (McNaughton, "Scheduling with deadlines and loss functions", 1959) is optimal where cuts
//! are free, but cuts at nearly every queue. Together they cut the few units that must be.
//!
//! The share starts at the mean and grows until everything fits. A cut fills its queue to the share, so there are at
//! most as many cuts as queues. Where something is left over, no queue has room for a piece: each is within 2 tiles of
//! the share. So the share ends at most 3 tiles past the mean of the uncut units, one of them for the cuts, and what
//! [`Loads`] rounds.

use super::batch::Batch;
use super::cost::{Cost, TILE_COST};
use super::loads::Loads;
use super::queues::Piece;

/// Nothing is cut, and nothing need be folded, where dealing alone keeps every queue within 1/25 of its share.
const UNCUT_SLACK: u64 = 25;

/// Where something must be cut, a queue may still pass its share by 1/100, or by less than a piece, to save a cut.
const CUT_SLACK: u64 = 100;

/// Even shares may cost this part of the pieces more; each piece is a partial state to write and to fold.
const EVEN_SHARES_COST: usize = 16;

/// Even shares are tried where a queue has at most so many pieces: longer queues are even enough.
const EVEN_SHARES_MOST_PIECES: usize = 4;

/// A share may grow by this part if each queue then has one piece, where [`Batch::folds_are_long`]: a queue of two
/// pieces folds two row tiles at its end, one after the other. 64x8192 of one KV head of 256 and 8 query heads took
/// 137.6 us with 193 pieces on 132 queues, 134.2 with 128; but 16x8192 of 4 rows of 128 is 1% slower for it.
const SINGLE_PIECE_SLACK: u64 = 32;

/// Deals the batch; returns the share.
pub(super) fn deal(batch: &Batch, pieces: &mut Vec<Piece>, loads: &mut Loads) -> u64 {
    let teams = batch.teams as u64;
    let share = whole_tiles(batch.totals().cost.div_ceil(teams)).max(Cost::SHORT.shortest());
    let uncut = Bounds { cut_at: 0, lower_shares: 0, limit: share + share / UNCUT_SLACK };
    if deal_within(batch, uncut, pieces, loads) == 0 {
        return share;
    }
    let equal = cut(batch, share, Shares::Equal, pieces, loads);
    let (queues, most_pieces, longest) = (teams as usize, pieces.len() + pieces.len() / EVEN_SHARES_COST, loads.most());
    if pieces.len() > queues * EVEN_SHARES_MOST_PIECES {
        return equal;
    }
    if batch.folds_are_long && (queues + 1..2 * queues).contains(&pieces.len()) {
        for larger in (equal..=equal + equal / SINGLE_PIECE_SLACK).step_by(TILE_COST as usize).skip(1) {
            let share = cut(batch, larger, Shares::Equal, pieces, loads);
            if pieces.len() <= queues {
                return share;
            }
        }
    }
    let even = cut(batch, share, Shares::Even, pieces, loads);
    if pieces.len() <= most_pieces && loads.most() <= longest {
        return even;
    }
    cut(batch, share, Shares::Equal, pieces, loads)
}

/// A cost rounded up to what a number of short tiles costs.
fn whole_tiles(cost: u64) -> u64 {
    cost.next_multiple_of(TILE_COST)
}

/// How whole tiles make shares.
#[derive(Clone, Copy, PartialEq)]
enum Shares {
    /// All rounded up: equal units are cut alike, and the last queues may stay short.
    Equal,
    /// Some a tile lower, so that they add up to the work and no queue stays short.
    Even,
}

/// Deals with cuts at the share, which grows from `share` until everything fits.
fn cut(batch: &Batch, share: u64, shares: Shares, pieces: &mut Vec<Piece>, loads: &mut Loads) -> u64 {
    let teams = batch.teams as u64;
    let mut room = match shares {
        Shares::Equal => share * teams,
        Shares::Even => batch.totals().cost.max(Cost::SHORT.shortest() * teams),
    };
    // What stays whole past the share, and so what a cut leaves over at least, is a tile short of the shortest piece.
    let slack = |cost: Cost| (cost.shortest_tiles - 1) as u64 * cost.tile;
    let slack = if batch.totals().tall_units > 0 { slack(Cost::FULL) } else { slack(Cost::SHORT) };
    loop {
        if shares == Shares::Equal {
            room = room.next_multiple_of(TILE_COST * teams);
        }
        let share = whole_tiles(room.div_ceil(teams));
        let limit = share + (share / CUT_SLACK).max(slack);
        let bounds = Bounds { cut_at: share, lower_shares: (share * teams - room) / TILE_COST, limit };
        let left_over = deal_within(batch, bounds, pieces, loads);
        if left_over == 0 {
            return share;
        }
        room += left_over;
    }
}

/// How full queues may be.
#[derive(Clone, Copy)]
struct Bounds {
    /// Load to which a piece fills a queue; 0 for no cuts.
    cut_at: u64,
    /// Queues, from the first, that are filled to a tile less.
    lower_shares: u64,
    /// Load up to which a unit, or its rest, stays whole.
    limit: u64,
}

/// Deals what fits; returns the cost that does not, 0 if all does.
fn deal_within(batch: &Batch, bounds: Bounds, pieces: &mut Vec<Piece>, loads: &mut Loads) -> u64 {
    let Bounds { cut_at, lower_shares, limit } = bounds;
    let mut left = batch.totals().cost;
    loads.restart(limit);
    pieces.clear();
    for request in batch.requests() {
        for tile in batch.row_tiles(request) {
            let mut begin = 0;
            loop {
                let (queue, load) = loads.least();
                let Cost { tile: tile_cost, item: item_cost, shortest_tiles } = tile.cost;
                let mut tiles = tile.tiles - begin;
                if load + tile.cost.of(tiles) > limit {
                    let lower = if (queue as u64) < lower_shares { TILE_COST } else { 0 };
                    let room = cut_at.saturating_sub(lower + load + item_cost) / tile_cost;
                    if room < shortest_tiles as u64 {
                        return left;
                    }
                    // The unit passes more than the slack, so the rest is not too short for a piece.
                    tiles = room.min(u32::MAX as u64) as u32;
                    left += item_cost;
                }
                let cost = tile.cost.of(tiles);
                loads.add(queue, cost);
                left -= cost;
                begin += tiles;
                pieces.push(Piece::new(queue, &tile, begin));
                if begin == tile.tiles {
                    break;
                }
            }
        }
    }
    left
}
