//! Balanced cuts: McNaughton's wrap-around rule with a price on cutting.
//!
//! In: units, longest first. Out: each team's items, so that the fullest queue holds little more than a fair share.
//! McNaughton, "Scheduling with deadlines and loss functions" (1959): lay all jobs on a line, cut it into equal
//! shares; a job that straddles a boundary is split. That is optimal when splitting is free. Here a piece costs
//! [`ITEM_COST_TILES`] and a fold, so nothing is cut where whole units nearly fill the queues, a unit that ends a
//! little past its queue's share stays whole, no piece is shorter than [`MIN_PIECE_TILES`], and the share is the
//! smallest found at which everything fits.
//!
//! One pass over the units decides; it runs first to find the share and then, at that share, to write, so a plan
//! costs a few nanoseconds a unit and its items are written in the order of the image.

use super::batch::{Batch, Request, RowTile};
use super::writer::Writer;

/// Fixed cost of an item in tiles: loading the queries, filling the pipeline, folding the warps' states.
pub const ITEM_COST_TILES: u64 = 2;

/// Shortest piece a unit is cut into, in tiles: below it the partial states cost more than the balance gains.
pub const MIN_PIECE_TILES: u32 = 2;

const SHORTEST_PIECE_COST: u64 = ITEM_COST_TILES + MIN_PIECE_TILES as u64;

/// Nothing is cut, and nothing need be folded, if whole units fill the queues to within 1/25 of a share.
const UNCUT_SLACK: u64 = 25;

/// Where something must be cut, a queue may still pass its share by 1/100 to save a cut.
const CUT_SLACK: u64 = 100;

/// Deals the batch to the queues; returns the share in tiles.
pub(super) fn deal(batch: &Batch, writer: &mut Writer<'_>, queue_begin: &mut [u32]) -> u64 {
    let totals = batch.totals();
    let teams = batch.teams as u64;
    let mut share = totals.cost_tiles.div_ceil(teams).max(SHORTEST_PIECE_COST);
    let mut rule = Rule { share, limit: share + share / UNCUT_SLACK, cut: false };
    if fill(batch, rule, &mut Trial) > 0 {
        loop {
            rule = Rule { share, limit: share + share / CUT_SLACK, cut: true };
            let left_over = fill(batch, rule, &mut Trial);
            if left_over == 0 {
                break;
            }
            share += left_over.div_ceil(teams);
        }
    }
    queue_begin[0] = 0;
    let mut queues = Queues { writer, queue_begin, ended: 0 };
    fill(batch, rule, &mut queues);
    while queues.ended < batch.teams as usize {
        queues.end_queue();
    }
    share
}

/// How queues are filled.
#[derive(Clone, Copy)]
struct Rule {
    /// Load at which a unit is cut.
    share: u64,
    /// Load up to which a unit, or its rest, stays whole.
    limit: u64,
    /// Whether units may be cut at all.
    cut: bool,
}

/// Where a pass puts what it decides.
trait Sink {
    fn whole(&mut self, request: &Request, tile: &RowTile);
    fn piece(&mut self, request: &Request, tile: &RowTile, begin: u32, end: u32);
    fn end_queue(&mut self);
}

/// Fills queue after queue by `rule`. Returns the cost that found no queue, 0 if all did.
#[inline(always)]
fn fill(batch: &Batch, rule: Rule, sink: &mut impl Sink) -> u64 {
    let mut queues_left = batch.teams - 1;
    let (mut load, mut left_over) = (0, 0);
    for request in batch.requests() {
        for tile in batch.row_tiles(request) {
            let mut begin = 0;
            loop {
                let rest = tile.tiles - begin;
                let cost = rest as u64 + ITEM_COST_TILES;
                if load + cost <= rule.limit || left_over > 0 {
                    if begin == 0 {
                        sink.whole(request, &tile);
                    } else {
                        sink.piece(request, &tile, begin, tile.tiles);
                    }
                    if left_over > 0 {
                        left_over += cost
                    } else {
                        load += cost
                    }
                    break;
                }
                let room = rule.share.saturating_sub(load + ITEM_COST_TILES).min(u32::MAX as u64) as u32;
                if rule.cut && room >= MIN_PIECE_TILES && rest >= 2 * MIN_PIECE_TILES {
                    let end = begin + room.min(rest - MIN_PIECE_TILES);
                    sink.piece(request, &tile, begin, end);
                    begin = end;
                }
                if queues_left == 0 || (!rule.cut && cost > rule.limit) {
                    left_over = 1;
                } else {
                    queues_left -= 1;
                    sink.end_queue();
                    load = 0;
                }
            }
        }
    }
    left_over
}

/// Decides and forgets.
struct Trial;

impl Sink for Trial {
    fn whole(&mut self, _: &Request, _: &RowTile) {}
    fn piece(&mut self, _: &Request, _: &RowTile, _: u32, _: u32) {}
    fn end_queue(&mut self) {}
}

/// Writes items and where each queue begins.
struct Queues<'a, 'b> {
    writer: &'a mut Writer<'b>,
    queue_begin: &'a mut [u32],
    ended: usize,
}

impl Sink for Queues<'_, '_> {
    #[inline(always)]
    fn whole(&mut self, request: &Request, tile: &RowTile) {
        self.writer.whole(request, tile);
    }

    fn piece(&mut self, request: &Request, tile: &RowTile, begin: u32, end: u32) {
        self.writer.piece(request, tile, begin, end);
    }

    fn end_queue(&mut self) {
        self.ended += 1;
        self.queue_begin[self.ended] = self.writer.items() as u32;
    }
}
