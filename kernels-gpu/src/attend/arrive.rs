//! The end of split items: who finishes an item's last piece folds the pieces' partial states.
use core::ops::Range;

use simt::{atomic::fetch_add, block::sync_threads, global::Global, shared::Shared, tensor::Element, thread};

use super::work::{Cursor, Work};
use crate::abi::parameters::AttendParameters;
use crate::abi::tile::ATTEND_TILE_ROWS;
use crate::merge::{TILES_TOGETHER, TileStates, Values, fold_rows, fold_tiles, states_together};
use crate::variant::Variant;

/// Row tiles that are not worth folding together, each by a warp. Four tiles of 27 pieces, which do not fit together, took
/// an H200 41 us a warp each and 25 one after another.
const FEW_TILES: u32 = 4;

/// Counts the block's pieces of split items in; the block that counts an item's last piece folds the pieces' states,
/// in their order, so that the result does not depend on who that is. It comes after the last item of `queue`, apart
/// from the loop, whose registers it competes for: a kernel without any fold ran 0.5 to 7% faster on uncut batches.
///
/// It goes in rounds of as many items as there are threads: the queue's, one a thread, and after each of these rounds,
/// for every shared item in it, the items that stand for the row tiles which that one covers.
///
/// With `TOGETHER`, which takes registers, the row tiles that a shared item covers are folded side by side.
///
/// The barrier orders the block's partial states before the counts, a count's release and acquire order them before
/// the fold, and the second barrier hands that order to the block. All `threads` of the block call this together, and
/// nobody uses its first `shared_bytes`.
#[inline(always)]
pub(super) unsafe fn arrive<E: Element + Values, V: Variant, const HEAD_DIM: u32, const TOGETHER: bool>(
    p: &AttendParameters,
    queue: Cursor,
    threads: u32,
    shared_bytes: u32,
) {
    let thread = thread::thread_idx_x();
    let complete = Shared::<u32>::dynamic();
    // For a shared item of the round, where the row tiles it covers are named, their number just before; else 0.
    let shared = complete.add(threads);
    let behind_items = Global::<u32>::new(p.items);
    let words = complete.add(2 * threads).cast::<[u32; 4]>();
    let room = words.add(3 * threads).cast();
    let room = (room, shared_bytes - 56 * threads, threads);
    let mut head = queue.head_begin;
    // SAFETY: the kernel's contract; shared memory is free after the last item.
    unsafe {
        while head < queue.head_end {
            let mut own = queue.item;
            while own < queue.item_end {
                let own_items = threads.min(queue.item_end - own);
                let (mut first, mut end, mut is_cover) = (own, own + own_items, false);
                let mut next_shared = 0;
                loop {
                    sync_threads();
                    let mine = first + thread;
                    let (mut is_complete, mut covers) = (false, 0);
                    if mine < end {
                        let item = if is_cover { behind_items.add(mine as u64).load() } else { mine };
                        let work = Work::read_again(p, Cursor { item, head, ..queue });
                        if work.is_shared() {
                            covers = 1 + work.group;
                        } else if work.pieces > 1 {
                            let arrivals = Global::<u32>::new(p.arrivals).add(work.group as u64 + head as u64);
                            is_complete = fetch_add(arrivals, 1) + 1 == work.pieces;
                            if is_complete {
                                arrivals.store(0);
                                // The acquire has emptied the first-level cache, so the item goes by shared memory.
                                let [a, b, c] = work.to_words();
                                let slot = words.add(3 * thread);
                                slot.store(a);
                                slot.add(1).store(b);
                                slot.add(2).store(c);
                            }
                        }
                    }
                    complete.add(thread).store(is_complete as u32);
                    if !is_cover {
                        shared.add(thread).store(covers);
                    }
                    sync_threads();
                    let round = Complete { p, complete, words, queue, head };
                    let (mut i, round_items) = (0, threads.min(end.saturating_sub(first)));
                    while i < round_items {
                        if TOGETHER && is_cover {
                            // Often all of them: their last state was the shared item's.
                            let folded = round.fold_some::<E, V, HEAD_DIM>(i..round_items, room);
                            if folded > 0 {
                                i += folded;
                                continue;
                            }
                        }
                        if complete.add(i).load() == 1 {
                            fold_item::<E, V, HEAD_DIM>(p, &round.item(i), room);
                        }
                        i += 1;
                    }
                    first += threads;
                    if first < end {
                        continue;
                    }
                    while next_shared < own_items && shared.add(next_shared).load() == 0 {
                        next_shared += 1;
                    }
                    if next_shared == own_items {
                        break;
                    }
                    first = shared.add(next_shared).load();
                    end = first + behind_items.add(first as u64 - 1).load();
                    (is_cover, next_shared) = (true, next_shared + 1);
                }
                own += threads;
            }
            head += 1;
        }
    }
}

/// Items of a round, which may be complete.
#[derive(Clone, Copy)]
struct Complete<'a> {
    p: &'a AttendParameters,
    complete: Shared<u32>,
    words: Shared<[u32; 4]>,
    queue: Cursor,
    head: u32,
}

impl Complete<'_> {
    /// An item of the round, if it is complete; else one without rows.
    #[inline(always)]
    unsafe fn item(&self, i: u32) -> Work {
        // SAFETY: the round's flags and the complete items' words are there.
        unsafe {
            if self.complete.add(i).load() == 0 {
                return Work::none();
            }
            let slot = self.words.add(3 * i);
            let words = [slot.load(), slot.add(1).load(), slot.add(2).load()];
            Work::from_words(words, Cursor { head: self.head, ..self.queue })
        }
    }

    #[inline(always)]
    unsafe fn states<const HEAD_DIM: u32>(&self, i: u32) -> TileStates {
        // SAFETY: as in `item`.
        let work = unsafe { self.item(i) };
        let first = work.states(0);
        TileStates {
            rows: work.rows,
            pieces: work.pieces,
            values: Global::new(self.p.partial_out).add(first * HEAD_DIM as u64),
            lse: Global::new(self.p.partial_lse).add(first),
        }
    }

    /// Folds the complete ones of the first of some items, as many as fit; returns how many these are.
    #[inline(always)]
    unsafe fn fold_some<E: Element + Values, V: Variant, const HEAD_DIM: u32>(
        &self,
        items: Range<u32>,
        room: (Shared<u8>, u32, u32),
    ) -> u32 {
        let (_, room_bytes, threads) = room;
        let most = items.end.min(items.start + TILES_TOGETHER as u32);
        // SAFETY: the kernel's contract; the states are complete.
        unsafe {
            let mut free = states_together::<HEAD_DIM>(room_bytes);
            let mut end = items.start;
            while end < most {
                let states = self.states::<HEAD_DIM>(end).states();
                if states > free.min(threads) {
                    break;
                }
                free -= states;
                end += 1;
            }
            // A few are folded faster one after another, each by all warps.
            if end - items.start < FEW_TILES {
                return 0;
            }
            fold_tiles::<HEAD_DIM>(
                room,
                items.start..end,
                |i| self.states::<HEAD_DIM>(i),
                |i, row, column, values, lse| write_row::<E, V>(self.p, &self.item(i), row, column, values, lse),
            );
            end - items.start
        }
    }
}

/// Writes four columns of a row of an item, and its LSE with the first.
#[inline(always)]
unsafe fn write_row<E: Element + Values, V: Variant>(
    p: &AttendParameters,
    work: &Work,
    row: u32,
    column: u32,
    values: [f32; 4],
    lse_log2: f32,
) {
    if V::PADS && column >= 8 * p.value_pieces {
        return;
    }
    // SAFETY: the kernel's contract.
    unsafe {
        E::store(work.row(&p.out, p.group, row).add(2 * column as u64), values);
        if column == 0 && p.lse.address != 0 {
            work.row(&p.lse, p.group, row).cast::<f32>().store(lse_log2 * p.lse_scale);
        }
    }
}

/// Folds the partial states of an item's rows.
#[inline(always)]
unsafe fn fold_item<E: Element + Values, V: Variant, const HEAD_DIM: u32>(
    p: &AttendParameters,
    work: &Work,
    room: (Shared<u8>, u32, u32),
) {
    let mut first = 0;
    while first < work.rows {
        let states = work.states(first);
        let values = Global::<f32>::new(p.partial_out).add(states * HEAD_DIM as u64);
        let lse = Global::new(p.partial_lse).add(states);
        let rows = (work.rows - first).min(ATTEND_TILE_ROWS);
        // SAFETY: the kernel's contract; the states are complete.
        unsafe {
            fold_rows::<HEAD_DIM>(room, (rows, work.pieces), (values, lse), |row, column, values, lse_log2| {
                write_row::<E, V>(p, work, first + row, column, values, lse_log2);
            });
        }
        first += ATTEND_TILE_ROWS;
    }
}
