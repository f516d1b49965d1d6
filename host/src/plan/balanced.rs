//! Balanced cuts: McNaughton's wrap-around rule with a price on cutting.
//!
//! In: units, longest first. Out: each queue's items, so that the fullest queue holds little more than a fair share.
//! McNaughton, "Scheduling with deadlines and loss functions" (1959): lay all jobs on a line, cut it into equal
//! shares; a job that straddles a boundary is split. That is optimal when splitting is free. Here a piece costs
//! [`ITEM_COST_TILES`] and a merge, so a unit that ends a little past its queue's share stays whole, no piece is
//! shorter than [`MIN_PIECE_TILES`], and the share is the smallest found at which everything fits.
//!
//! One pass over the units decides; it runs first to find the share and then, at that share, to write, so a plan
//! costs a few nanoseconds a unit and its items are written in the order of the image.

use super::batch::{Batch, Request, RowTile};
use super::writer::Writer;

/// Fixed cost of an item in tiles: loading the queries, filling the pipeline, folding the warps' states.
pub const ITEM_COST_TILES: u64 = 2;

/// Shortest piece a unit is cut into, in tiles: below it the partial states cost more than the balance gains.
pub const MIN_PIECE_TILES: u32 = 2;

/// A unit stays whole if it ends at most 1/25 of a share past the share: 4% of a queue's time against a merge.
const WHOLE_UNIT_SLACK: u64 = 25;

/// A failed share grows by at least 1/64, so that few passes find one that fits.
const SHARE_STEP: u64 = 64;

/// Where a pass puts what it decides.
trait Sink {
    fn whole(&mut self, request: &Request, tile: &RowTile, heads: std::ops::Range<u32>);
    fn piece(&mut self, request: &Request, tile: &RowTile, head: u32, begin: u32, end: u32);
    fn end_queue(&mut self);
}

/// Deals the batch to the queues; returns the share in tiles.
pub(super) fn deal(batch: &Batch, writer: &mut Writer<'_>, queue_begin: &mut [u32]) -> u64 {
    let queues = batch.queues as u64;
    let total = batch.totals().cost_tiles;
    let mut share = total.div_ceil(queues).max(ITEM_COST_TILES + MIN_PIECE_TILES as u64);
    loop {
        let left_over = wrap(batch, share, total, &mut Trial);
        if left_over == 0 {
            break;
        }
        share += left_over.div_ceil(queues).max(share / SHARE_STEP);
    }
    let mut sink = Queues { writer, queue_begin, ended: 0 };
    wrap(batch, share, total, &mut sink);
    sink.end();
    share
}

/// Fills queue after queue up to `share`. Returns the cost that found no queue, 0 if all did.
#[inline(always)]
fn wrap(batch: &Batch, share: u64, total: u64, sink: &mut impl Sink) -> u64 {
    let whole_limit = share + share / WHOLE_UNIT_SLACK;
    let heads = batch.heads;
    let mut queues_left = batch.queues - 1;
    // Cost in this queue; cost in the queues before it; pieces beyond one a unit.
    let (mut load, mut dealt, mut cuts) = (0, 0, 0);
    for request in batch.requests() {
        for tile in batch.row_tiles(request) {
            let cost = tile.tiles as u64 + ITEM_COST_TILES;
            let mut head = 0;
            loop {
                let first = head;
                if load + cost * (heads - head) as u64 <= whole_limit {
                    load += cost * (heads - head) as u64;
                    head = heads;
                } else {
                    while load + cost <= whole_limit {
                        load += cost;
                        head += 1;
                    }
                }
                if head > first {
                    sink.whole(request, &tile, first..head);
                }
                if head == heads {
                    break;
                }
                let mut begin = 0;
                loop {
                    let rest = tile.tiles - begin;
                    if begin > 0 && load + rest as u64 + ITEM_COST_TILES <= whole_limit {
                        sink.piece(request, &tile, head, begin, tile.tiles);
                        load += rest as u64 + ITEM_COST_TILES;
                        break;
                    }
                    let room = share.saturating_sub(load + ITEM_COST_TILES).min(u32::MAX as u64) as u32;
                    if room >= MIN_PIECE_TILES && rest >= 2 * MIN_PIECE_TILES {
                        let end = begin + room.min(rest - MIN_PIECE_TILES);
                        sink.piece(request, &tile, head, begin, end);
                        load += (end - begin) as u64 + ITEM_COST_TILES;
                        cuts += 1;
                        begin = end;
                    }
                    if queues_left == 0 {
                        return total + cuts * ITEM_COST_TILES - dealt - load;
                    }
                    queues_left -= 1;
                    sink.end_queue();
                    dealt += load;
                    load = 0;
                    if begin == 0 {
                        break;
                    }
                }
                if begin > 0 {
                    head += 1;
                }
                if head == heads {
                    break;
                }
            }
        }
    }
    0
}

/// Decides and forgets.
struct Trial;

impl Sink for Trial {
    fn whole(&mut self, _: &Request, _: &RowTile, _: std::ops::Range<u32>) {}
    fn piece(&mut self, _: &Request, _: &RowTile, _: u32, _: u32, _: u32) {}
    fn end_queue(&mut self) {}
}

/// Writes items and where each queue begins.
struct Queues<'a, 'b> {
    writer: &'a mut Writer<'b>,
    queue_begin: &'a mut [u32],
    ended: usize,
}

impl Queues<'_, '_> {
    fn end(mut self) {
        self.queue_begin[0] = 0;
        while self.ended + 1 < self.queue_begin.len() {
            self.end_queue();
        }
    }
}

impl Sink for Queues<'_, '_> {
    #[inline(always)]
    fn whole(&mut self, request: &Request, tile: &RowTile, heads: std::ops::Range<u32>) {
        self.writer.whole(request, tile, heads);
    }

    fn piece(&mut self, request: &Request, tile: &RowTile, head: u32, begin: u32, end: u32) {
        self.writer.piece(request, tile, head, begin, end);
    }

    #[inline(always)]
    fn end_queue(&mut self) {
        self.ended += 1;
        self.queue_begin[self.ended] = self.writer.items().len() as u32;
    }
}
