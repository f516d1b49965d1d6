//! Spells dealt pieces as work items, queue after queue.
//!
//! In: the pieces of all units, one after another, each with its queue. Out: `queue_begin` and the items as
//! [`WorkItem`] documents; a queue keeps the order in which its pieces were dealt, and the pieces of a cut unit get
//! partial states and counts, for every KV head.

use kernels_gpu::abi::plan::WorkItem;

use super::batch::Batch;

/// Some tiles of a unit, from the end of the piece before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub queue: u32,
    /// One past its last tile; the unit's last piece ends with the unit.
    pub end_tiles: u32,
}

/// What the arrays hold.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub groups: u32,
    pub partial_rows: u32,
}

/// Writes the queues. `queue_begin` has an entry more than there are queues.
pub(super) fn write(batch: &Batch, pieces: &[Piece], queue_begin: &mut [u32], items: &mut [WorkItem]) -> Written {
    queue_begin.fill(0);
    for piece in pieces {
        queue_begin[piece.queue as usize + 1] += 1;
    }
    for i in 1..queue_begin.len() {
        queue_begin[i] += queue_begin[i - 1];
    }

    // A queue's entry serves as its cursor, and ends where the next queue begins.
    let mut written = Written::default();
    let mut rest = pieces;
    for request in batch.requests() {
        for tile in batch.row_tiles(request) {
            let pieces = 1 + rest.iter().take_while(|piece| piece.end_tiles < tile.tiles).count();
            let (unit, others) = rest.split_at(pieces);
            rest = others;
            let mut item = WorkItem {
                request: request.index,
                query_begin_tokens: request.query_begin,
                row_begin: tile.row_begin,
                rows: tile.rows,
                kv_begin_tokens: tile.first_tile * batch.tile_tokens.get(),
                kv_end_tokens: tile.kv_end,
                query_position: request.kv_len as i32 - request.query_len as i32,
                page_begin: request.page_begin,
                pieces: unit.len() as u32,
                piece: 0,
                partial_begin: 0,
                group: 0,
            };
            if unit.len() > 1 {
                (item.partial_begin, item.group) = (written.partial_rows, written.groups);
                written.partial_rows += batch.heads * tile.rows * unit.len() as u32;
                written.groups += batch.heads;
            }
            for piece in unit {
                let end_tiles = tile.first_tile.saturating_add(piece.end_tiles);
                item.kv_end_tokens = tile.kv_end.min(end_tiles.saturating_mul(batch.tile_tokens.get()));
                let cursor = &mut queue_begin[piece.queue as usize];
                items[*cursor as usize] = item;
                *cursor += 1;
                item.kv_begin_tokens = item.kv_end_tokens;
                item.piece += 1;
            }
        }
    }
    queue_begin.rotate_right(1);
    queue_begin[0] = 0;
    written
}
