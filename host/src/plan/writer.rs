//! Spells decided cuts as work items and merge rows.
//!
//! In: whole units, or a unit's pieces one after another. Out: items in that order, with the pieces of a cut unit
//! given partial states so that the states of one output row lie side by side: row `j` of piece `i` of `n` writes
//! state `base + j * n + i`.

use kernels_gpu::abi::plan::{DIRECT, MergeRow, WorkItem};
use kernels_gpu::abi::tile::ATTEND_TILE_ROWS;

use super::batch::{Batch, Request, RowTile};

pub(super) struct Writer<'a> {
    batch: &'a Batch,
    items: &'a mut [WorkItem],
    merge_rows: &'a mut [MergeRow],
    written: Written,
    /// First item of the unit that is being cut.
    first_piece: usize,
}

/// How much a writer has written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub items: usize,
    pub merge_rows: usize,
    pub partial_rows: u32,
}

impl<'a> Writer<'a> {
    pub fn new(batch: &'a Batch, items: &'a mut [WorkItem], merge_rows: &'a mut [MergeRow]) -> Writer<'a> {
        Writer { batch, items, merge_rows, written: Written::default(), first_piece: 0 }
    }

    /// Items written so far.
    pub fn items(&self) -> &[WorkItem] {
        &self.items[..self.written.items]
    }

    /// The units of `heads`, uncut.
    #[inline]
    pub fn whole(&mut self, request: &Request, tile: &RowTile, heads: std::ops::Range<u32>) {
        let item = item(request, tile, heads.start, 0, tile.kv_end);
        let count = (heads.end - heads.start) as usize;
        let items = &mut self.items[self.written.items..self.written.items + count];
        for (head, slot) in items.iter_mut().enumerate() {
            *slot = WorkItem { rows_and_head: item.rows_and_head + WorkItem::pack(0, head as u32), ..item };
        }
        self.written.items += count;
        self.first_piece = self.written.items;
    }

    /// The next piece of one unit, tiles `begin .. end`; the piece that ends the unit closes it.
    pub fn piece(&mut self, request: &Request, tile: &RowTile, head: u32, begin: u32, end: u32) {
        let tile_tokens = self.batch.tile_tokens.get();
        let last = end == tile.tiles;
        let kv_end = if last { tile.kv_end } else { end * tile_tokens };
        self.items[self.written.items] = item(request, tile, head, begin * tile_tokens, kv_end);
        self.written.items += 1;
        if last {
            self.close(request, tile, head);
        }
    }

    /// One unit in pieces of `piece_tiles`; each goes to the place that the cursor of its queue names.
    pub fn spread<'q>(
        &mut self,
        request: &Request,
        tile: &RowTile,
        head: u32,
        piece_tiles: u32,
        queue_of: &mut impl Iterator<Item = &'q u32>,
        cursors: &mut [u32],
    ) {
        let tile_tokens = self.batch.tile_tokens.get();
        let count = tile.tiles.div_ceil(piece_tiles).max(1);
        let base = self.written.partial_rows;
        for (piece, &queue) in (0..count).zip(queue_of) {
            let kv_begin = piece * piece_tiles * tile_tokens;
            let kv_end = if piece + 1 == count { tile.kv_end } else { kv_begin + piece_tiles * tile_tokens };
            let cursor = &mut cursors[queue as usize];
            let slot = &mut self.items[*cursor as usize];
            *slot = item(request, tile, head, kv_begin, kv_end);
            if count > 1 {
                (slot.partial_begin, slot.partial_stride) = (base + piece, count);
            }
            *cursor += 1;
            self.written.items += 1;
        }
        if count > 1 {
            self.merge(request, tile, head, count);
        }
    }

    /// Gives the pieces of a finished unit their partial states.
    fn close(&mut self, request: &Request, tile: &RowTile, head: u32) {
        let pieces = &mut self.items[self.first_piece..self.written.items];
        let count = pieces.len() as u32;
        let base = self.written.partial_rows;
        for (piece, partial_begin) in pieces.iter_mut().zip(base..) {
            (piece.partial_begin, piece.partial_stride) = (partial_begin, count);
        }
        self.first_piece = self.written.items;
        self.merge(request, tile, head, count);
    }

    /// Takes the partial states of a unit in `count` pieces, and names them for each of its rows.
    fn merge(&mut self, request: &Request, tile: &RowTile, head: u32, count: u32) {
        let base = self.written.partial_rows;
        let rows = &mut self.merge_rows[self.written.merge_rows..self.written.merge_rows + tile.rows as usize];
        for (row, slot) in rows.iter_mut().enumerate() {
            let (token, head_of_group) = self.batch.group.divide(tile.row_begin + row as u32);
            *slot = MergeRow {
                token: request.query_begin + token,
                head: head * self.batch.group.get() + head_of_group,
                partial_begin: base + row as u32 * count,
                count,
            };
        }
        self.written.merge_rows += tile.rows as usize;
        self.written.partial_rows += tile.rows * count;
    }

    pub fn finish(self) -> Written {
        self.written
    }
}

#[inline]
fn item(request: &Request, tile: &RowTile, head: u32, kv_begin: u32, kv_end: u32) -> WorkItem {
    WorkItem {
        request: request.index,
        query_begin_tokens: request.query_begin,
        row_begin: tile.row_begin,
        rows_and_head: WorkItem::pack(tile.rows, head),
        kv_begin_tokens: kv_begin,
        kv_end_tokens: kv_end,
        kv_len_tokens: request.kv_len,
        query_len_tokens: request.query_len,
        page_begin: request.page_begin,
        partial_begin: DIRECT,
        partial_stride: 0,
        tile_rows: ATTEND_TILE_ROWS,
    }
}
