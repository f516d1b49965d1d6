//! Spells decided cuts as work items.
//!
//! In: whole units, or a unit's pieces one after another. Out: items in that order, with the pieces of a cut unit
//! given partial states and counts, for every KV head, as [`WorkItem`] documents.

use kernels_gpu::abi::plan::WorkItem;

use super::batch::{Batch, Request, RowTile};

pub(super) struct Writer<'a> {
    batch: &'a Batch,
    items: &'a mut [WorkItem],
    written: Written,
    /// First item of the unit that is being cut.
    first_piece: usize,
}

/// How much a writer has written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub items: usize,
    pub groups: u32,
    pub partial_rows: u32,
}

impl<'a> Writer<'a> {
    pub fn new(batch: &'a Batch, items: &'a mut [WorkItem]) -> Writer<'a> {
        Writer { batch, items, written: Written::default(), first_piece: 0 }
    }

    /// Items written so far.
    pub fn items(&self) -> usize {
        self.written.items
    }

    /// A unit, uncut.
    #[inline]
    pub fn whole(&mut self, request: &Request, tile: &RowTile) {
        self.items[self.written.items] = item(request, tile, 0, tile.kv_end);
        self.written.items += 1;
        self.first_piece = self.written.items;
    }

    /// The next piece of a unit, tiles `begin .. end`; the piece that ends the unit closes it.
    pub fn piece(&mut self, request: &Request, tile: &RowTile, begin: u32, end: u32) {
        let tile_tokens = self.batch.tile_tokens.get();
        let last = end == tile.tiles;
        let kv_end = if last { tile.kv_end } else { end * tile_tokens };
        self.items[self.written.items] = item(request, tile, begin * tile_tokens, kv_end);
        self.written.items += 1;
        if last {
            let pieces = self.written.items - self.first_piece;
            let (partial_begin, group) = self.take_states(tile, pieces as u32);
            for (piece, slot) in (0..).zip(&mut self.items[self.first_piece..self.written.items]) {
                (slot.pieces, slot.piece, slot.partial_begin, slot.group) =
                    (pieces as u32, piece, partial_begin, group);
            }
            self.first_piece = self.written.items;
        }
    }

    /// A unit in pieces of `piece_tiles`; each goes to the place that the cursor of its queue names.
    pub fn spread<'q>(
        &mut self,
        request: &Request,
        tile: &RowTile,
        piece_tiles: u32,
        queue_of: &mut impl Iterator<Item = &'q u32>,
        cursors: &mut [u32],
    ) {
        let tile_tokens = self.batch.tile_tokens.get();
        let pieces = tile.tiles.div_ceil(piece_tiles).max(1);
        let (partial_begin, group) = if pieces > 1 { self.take_states(tile, pieces) } else { (0, 0) };
        for (piece, &queue) in (0..pieces).zip(queue_of) {
            let kv_begin = piece * piece_tiles * tile_tokens;
            let kv_end = if piece + 1 == pieces { tile.kv_end } else { kv_begin + piece_tiles * tile_tokens };
            let cursor = &mut cursors[queue as usize];
            let item = item(request, tile, kv_begin, kv_end);
            self.items[*cursor as usize] = WorkItem { pieces, piece, partial_begin, group, ..item };
            *cursor += 1;
            self.written.items += 1;
        }
    }

    /// Takes the partial states and counts of a unit in `pieces` pieces, for every KV head.
    fn take_states(&mut self, tile: &RowTile, pieces: u32) -> (u32, u32) {
        let taken = (self.written.partial_rows, self.written.groups);
        self.written.partial_rows += self.batch.heads * tile.rows * pieces;
        self.written.groups += self.batch.heads;
        taken
    }

    pub fn finish(self) -> Written {
        self.written
    }
}

#[inline]
fn item(request: &Request, tile: &RowTile, kv_begin: u32, kv_end: u32) -> WorkItem {
    WorkItem {
        request: request.index,
        query_begin_tokens: request.query_begin,
        row_begin: tile.row_begin,
        rows: tile.rows,
        kv_begin_tokens: kv_begin,
        kv_end_tokens: kv_end,
        query_position: request.kv_len as i32 - request.query_len as i32,
        page_begin: request.page_begin,
        pieces: 1,
        piece: 0,
        partial_begin: 0,
        group: 0,
    }
}
