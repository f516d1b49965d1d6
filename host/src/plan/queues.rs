//! Spells dealt pieces as work items, queue after queue.
//!
//! In: the pieces of all units, one after another, each with its queue. Out: `queue_begin` and the items as
//! [`WorkItem`] documents; a queue keeps the order in which its pieces were dealt, and the pieces of a cut unit get
//! partial states and counts, for every KV head. Where keys are shared, a member's states are for the pieces of the units
//! above it too, and `shared_rows` says which, so all pieces are counted before the first item is written; and nothing is
//! counted by the kernel, but `folds` names an item of each split row tile.

use kernels_gpu::abi::plan::{NOT_COUNTED, SHARED, SharedRow, WorkItem};

use super::batch::{Batch, Request, RowTile};
use super::layout::Arrays;
use super::shared::{Member, UnitRows};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Written {
    pub groups: u32,
    pub partial_rows: u32,
    /// Units in two or more pieces.
    pub cut_units: u64,
    /// Of one unit.
    pub most_pieces: u32,
    pub shared_rows: u32,
    pub folds: u32,
}

/// Makes runs of items of the counts of pieces: each entry says where its run begins.
fn begin_runs(pieces: &[Piece], queue_begin: &mut [u32]) {
    queue_begin.fill(0);
    for piece in pieces {
        queue_begin[piece.run as usize + 1] += 1;
    }
    for i in 1..queue_begin.len() {
        queue_begin[i] += queue_begin[i - 1];
    }
}

/// Each run's entry has become the next one's.
fn end_runs(queue_begin: &mut [u32]) {
    queue_begin.rotate_right(1);
    queue_begin[0] = 0;
}

/// Writes the queues of a plan that shares nothing. `queue_begin` has two entries a queue, for its two runs, and the end.
pub(super) fn write(batch: &Batch, pieces: &[Piece], queue_begin: &mut [u32], items: &mut [WorkItem]) -> Written {
    begin_runs(pieces, queue_begin);
    let mut writer = Writer { batch, pieces, queue_begin, items, written: Written::default(), items_end_rows: 0 };
    for request in batch.requests() {
        // Most requests have one row tile, which needs no loop.
        match batch.only_row_tile(request) {
            Some(tile) => writer.unit(request, tile),
            None => batch.row_tiles(request).for_each(|tile| writer.unit(request, tile)),
        }
    }
    let written = writer.written;
    end_runs(queue_begin);
    written
}

/// Where the states of a member's one row tile are.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    pieces: u32,
    /// Pieces of units above it: all, or those so far.
    shared_pieces: u32,
    partial_begin: u32,
}

/// Where a unit's row tile begins in `shared_rows`.
#[derive(Clone, Copy, Debug, Default)]
struct UnitPlace {
    pieces: u32,
    shared_row: u32,
}

/// Spells plans that share. All memory is allocated at first.
#[derive(Debug)]
pub(super) struct SharedWriter {
    /// By request.
    places: Vec<Place>,
    /// By row tile of all units.
    unit_places: Vec<UnitPlace>,
}

impl SharedWriter {
    /// Room for so many requests, and row tiles of units.
    pub fn new(requests: usize, unit_row_tiles: usize) -> SharedWriter {
        SharedWriter { places: Vec::with_capacity(requests), unit_places: Vec::with_capacity(unit_row_tiles) }
    }

    /// Writes the queues of a plan that shares, and what stands behind its items.
    pub fn write(&mut self, batch: &Batch, pieces: &[Piece], arrays: &mut Arrays) -> Written {
        let mut written = self.count(batch, pieces);
        self.place_rows(batch, arrays.shared_rows_mut(pieces.len(), written));

        let (queue_begin, items) = arrays.split_mut();
        begin_runs(pieces, queue_begin);
        let items_end_rows = (pieces.len() * (size_of::<WorkItem>() / size_of::<SharedRow>())) as u32;
        let mut writer = Writer { batch, pieces, queue_begin, items, written, items_end_rows };
        for request in batch.requests() {
            // From the last to the first, as the row tiles were dealt.
            let mut unit_tile = self.first_unit_place(batch, request) + batch.row_tiles(request).len();
            for tile in batch.row_tiles(request) {
                if request.unit().is_some() {
                    unit_tile -= 1;
                    writer.shared(request, tile, self.unit_places[unit_tile]);
                } else if request.first_tile > 0 {
                    writer.member(request, tile, self.places[request.index as usize]);
                } else {
                    writer.unit(request, tile);
                }
            }
        }
        written = writer.written;
        end_runs(queue_begin);
        (written.groups, written.folds) = (0, leave_to_fold(&mut arrays.split_mut().1[..pieces.len()]));
        name_folds(arrays, pieces.len(), written);
        written
    }

    /// The number of a unit's first row tile among all.
    fn first_unit_place(&self, batch: &Batch, request: &Request) -> usize {
        request.unit().map_or(0, |unit| batch.shared.units()[unit].first_row_tile as usize)
    }

    /// Counts the pieces of units and members, and places what follows from them.
    fn count(&mut self, batch: &Batch, mut pieces: &[Piece]) -> Written {
        self.places.clear();
        self.places.resize(batch.totals().requests, Place::default());
        self.unit_places.clear();
        let row_tiles = batch.shared.units().iter().map(|unit| unit.row_tiles as usize).sum();
        self.unit_places.resize(row_tiles, UnitPlace::default());
        for request in batch.requests() {
            let mut unit_tile = self.first_unit_place(batch, request) + batch.row_tiles(request).len();
            for tile in batch.row_tiles(request) {
                let count = take_unit(&mut pieces, &tile).len() as u32;
                if request.unit().is_some() {
                    unit_tile -= 1;
                    self.unit_places[unit_tile].pieces = count;
                } else if request.first_tile > 0 {
                    self.places[request.index as usize].pieces = count;
                }
            }
        }
        let mut written = Written::default();
        for_each_row_tile(batch, |tile, rows, members| {
            let unit_place = &mut self.unit_places[tile];
            unit_place.shared_row = written.shared_rows;
            written.shared_rows += rows.rows;
            for member in members {
                self.places[member.request as usize].pieces += unit_place.pieces;
            }
        });
        for member in batch.shared.members() {
            if batch.shared.first_tile(member.request as usize) > 0 {
                let place = &mut self.places[member.request as usize];
                place.partial_begin = written.partial_rows;
                written.partial_rows += batch.heads * member.rows * place.pieces;
            }
        }
        written
    }

    /// Says where the rows of units leave their states, outer units' before inner ones'.
    fn place_rows(&mut self, batch: &Batch, shared_rows: &mut [SharedRow]) {
        let mut shared_rows = shared_rows.iter_mut();
        for_each_row_tile(batch, |tile, _, members| {
            for member in members {
                let place = &mut self.places[member.request as usize];
                let first = place.partial_begin + place.shared_pieces;
                for (row, to) in (0..member.rows).zip(&mut shared_rows) {
                    *to = SharedRow { state: first + row * place.pieces, head_states: member.rows * place.pieces };
                }
                place.shared_pieces += self.unit_places[tile].pieces;
            }
        });
    }
}

/// Whether an item is the last piece of a split row tile: an own one of its request, even where others are shared.
fn is_last_piece(item: &WorkItem) -> bool {
    item.pieces > 1 && !item.is_shared() && item.piece + 1 == item.pieces
}

/// Has no item counted by the kernel; returns how many row tiles are split.
fn leave_to_fold(items: &mut [WorkItem]) -> u32 {
    let mut folds = 0;
    for item in items {
        if item.pieces > 1 {
            item.group = NOT_COUNTED;
        }
        folds += u32::from(is_last_piece(item));
    }
    folds
}

/// Names an item of each split row tile.
fn name_folds(arrays: &mut Arrays, items: usize, written: Written) {
    let (items, folds) = arrays.items_and_folds_mut(items, written);
    let last_pieces = (0..).zip(items).filter(|(_, item)| is_last_piece(item));
    for (fold, (index, _)) in folds.iter_mut().zip(last_pieces) {
        *fold = index;
    }
}

/// The row tiles of all units, in the order of their numbers: outer units' before inner ones'.
fn for_each_row_tile(batch: &Batch, mut visit: impl FnMut(usize, &UnitRows, &[Member])) {
    let mut tile = 0;
    for unit in 0..batch.shared.units().len() {
        for rows in batch.shared.row_tiles_of(unit) {
            let members = &batch.shared.members()[rows.first_member as usize..][..rows.members as usize];
            visit(tile, rows, members);
            tile += 1;
        }
    }
}

/// Takes the pieces of a unit off those of the units to come.
#[inline(always)]
fn take_unit<'a>(pieces: &mut &'a [Piece], tile: &RowTile) -> &'a [Piece] {
    let count = 1 + pieces.iter().take_while(|piece| piece.end_tiles < tile.tiles).count();
    let (unit, rest) = pieces.split_at(count);
    *pieces = rest;
    unit
}

struct Writer<'a> {
    batch: &'a Batch,
    /// Those of the units to come.
    pieces: &'a [Piece],
    /// A run's entry serves as its cursor, and ends where the next run begins.
    queue_begin: &'a mut [u32],
    items: &'a mut [WorkItem],
    written: Written,
    /// Where the items of a plan that shares end, counted in [`SharedRow`]s.
    items_end_rows: u32,
}

impl Writer<'_> {
    /// A row tile with all its keys.
    #[inline(always)]
    fn whole(&self, request: &Request, tile: &RowTile) -> WorkItem {
        WorkItem {
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
        }
    }

    #[inline(always)]
    fn unit(&mut self, request: &Request, tile: RowTile) {
        let whole = self.whole(request, &tile);
        if self.pieces[0].end_tiles == tile.tiles {
            *self.next_item(self.pieces[0].run) = whole;
            self.pieces = &self.pieces[1..];
            return;
        }
        let unit = take_unit(&mut self.pieces, &tile);
        let Written { groups, partial_rows, .. } = &mut self.written;
        let item = WorkItem { pieces: unit.len() as u32, partial_begin: *partial_rows, group: *groups, ..whole };
        *partial_rows += self.batch.heads * tile.rows * item.pieces;
        *groups += self.batch.heads;
        self.cut(unit, &tile, item);
    }

    /// The own keys of a request that shares the ones before.
    fn member(&mut self, request: &Request, tile: RowTile, place: Place) {
        let unit = take_unit(&mut self.pieces, &tile);
        let Place { pieces, shared_pieces: piece, partial_begin } = place;
        self.cut(unit, &tile, WorkItem { pieces, piece, partial_begin, ..self.whole(request, &tile) });
    }

    /// Keys that several requests share.
    fn shared(&mut self, request: &Request, tile: RowTile, place: UnitPlace) {
        let unit = take_unit(&mut self.pieces, &tile);
        let item = WorkItem {
            query_position: tile.kv_end as i32,
            pieces: SHARED | place.pieces,
            partial_begin: self.items_end_rows + place.shared_row,
            ..self.whole(request, &tile)
        };
        self.cut(unit, &tile, item);
    }

    /// Writes the pieces of a unit, whose first one `item` describes.
    #[inline(always)]
    fn cut(&mut self, unit: &[Piece], tile: &RowTile, mut item: WorkItem) {
        self.written.cut_units += u64::from(unit.len() > 1);
        self.written.most_pieces = self.written.most_pieces.max(unit.len() as u32);
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
