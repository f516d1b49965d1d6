//! Spells dealt pieces as work items, queue after queue.
//!
//! In: the pieces of all units, one after another, each with its queue. Out: `queue_begin` and the items as
//! [`WorkItem`] documents; a queue keeps the order in which its pieces were dealt, and the pieces of a cut unit get
//! partial states and counts, for every KV head.

use kernels_gpu::abi::plan::WorkItem;

use super::batch::{Batch, Request, RowTile};

/// Some tiles of a unit, from the end of the piece before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// `2 * queue` for the queue's first run, one more for the second.
    run: u32,
    /// One past its last tile; the unit's last piece ends with the unit.
    end_tiles: u32,
}

impl Piece {
    /// The tiles of a row tile up to `end_tiles`, in a queue.
    #[inline(always)]
    pub fn new(queue: u32, tile: &RowTile, end_tiles: u32) -> Piece {
        Piece { run: 2 * queue + tile.runs[queue as usize % 2], end_tiles }
    }
}

/// What the arrays hold.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub groups: u32,
    pub partial_rows: u32,
}

/// Writes the queues. `queue_begin` has two entries a queue, for its two runs, and the
/// end.
pub(super) fn write(batch: &Batch, pieces: &[Piece], queue_begin: &mut [u32], items: &mut [WorkItem]) -> Written {
    queue_begin.fill(0);
    for piece in pieces {
        queue_begin[piece.run as usize + 1] += 1;
    }
    for i in 1..queue_begin.len() {
        queue_begin[i] += queue_begin[i - 1];
    }

    let mut writer = Writer { batch, pieces, queue_begin, items, written: Written::default() };
    for request in batch.requests() {
        // Most requests have one row tile, which needs no loop.
        match batch.only_row_tile(request) {
            Some(tile) => writer.unit(request, tile),
            None => batch.row_tiles(request).for_each(|tile| writer.unit(request, tile)),
        }
    }
    let written = writer.written;
    queue_begin.rotate_right(1);
    queue_begin[0] = 0;
    written
}

struct Writer<'a> {
    batch: &'a Batch,
    /// Those of the units to come.
    pieces: &'a [Piece],
    /// A run's entry serves as its cursor, and ends where the next run begins.
    queue_begin: &'a mut [u32],
    items: &'a mut [WorkItem],
    written: Written,
}

impl Writer<'_> {
    #[inline(always)]
    fn unit(&mut self, request: &Request, tile: RowTile) {
        let whole = WorkItem {
            request: request.index,
            query_begin_tokens: request.query_begin,
            row_begin: tile.row_begin,
            rows: tile.rows,
            kv_begin_tokens: tile.first_tile * self.batch.tile_tokens.get(),
            kv_end_tokens: tile.kv_end,
            query_position: request.kv_len as i32 - request.query_len as i32,
            page_begin: request.page_begin,
            pieces: 1,
            piece: 0,
            partial_begin: 0,
            group: 0,
        };
        if self.pieces[0].end_tiles == tile.tiles {
            *self.next_item(self.pieces[0].run) = whole;
            self.pieces = &self.pieces[1..];
            return;
        }
        let pieces = 1 + self.pieces.iter().take_while(|piece| piece.end_tiles < tile.tiles).count();
        let (unit, rest) = self.pieces.split_at(pieces);
        self.pieces = rest;
        let Written { groups, partial_rows } = &mut self.written;
        let mut item = WorkItem { pieces: pieces as u32, partial_begin: *partial_rows, group: *groups, ..whole };
        *partial_rows += self.batch.heads * tile.rows * item.pieces;
        *groups += self.batch.heads;
        for piece in unit {
            let end_tiles = tile.first_tile.saturating_add(piece.end_tiles);
            item.kv_end_tokens = tile.kv_end.min(end_tiles.saturating_mul(self.batch.tile_tokens.get()));
            *self.next_item(piece.run) = item;
            item.kv_begin_tokens = item.kv_end_tokens;
            item.piece += 1;
        }
    }

    #[inline(always)]
    fn next_item(&mut self, run: u32) -> &mut WorkItem {
        let cursor = &mut self.queue_begin[run as usize];
        let item = &mut self.items[*cursor as usize];
        *cursor += 1;
        item
    }
}
