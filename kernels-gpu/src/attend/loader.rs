//! Brings the tiles of short items into shared memory, ahead of their use.
use simt::{asynchronous::commit_async_copies, block::sync_threads, grid, thread};

use super::copies::{copy_queries, copy_tile, page_of, store_row_address};
use super::shape::{MOST_ROUNDS, Room, Shape, next};
use super::work::{Cursor, Work};
use crate::abi::parameters::AttendParameters;
use crate::abi::tile::{ATTEND_TILE_ROWS, AttendTile};
use crate::variant::Variant;

/// A tile whose addresses lie in shared memory.
#[derive(Clone, Copy)]
struct Ready {
    /// Keys it holds, counted to the end of its range; `u32::MAX` for no tile.
    rows: u32,
    /// Its item, if it is the item's first.
    at: Cursor,
    first: bool,
}

/// Brings tiles in, `STAGES - 1` ahead of the one computed and whatever item they belong to, and an item's query rows
/// with its first tile.
pub(super) struct Loader<const HEAD_DIM: u32, const HOPPER: bool> {
    /// The next tile whose addresses are to be worked out.
    at: Cursor,
    work: Work,
    token: u32,
    ready: Ready,
    stage: u32,
    slot: u32,
    parity: u32,
}

impl<const HEAD_DIM: u32, const HOPPER: bool> Loader<HEAD_DIM, HOPPER> {
    const TILE: AttendTile = Shape::<HEAD_DIM, HOPPER>::TILE;

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn new(p: &AttendParameters, at: Cursor) -> Self {
        // SAFETY: items of the queue, by the kernel's contract.
        let work = if at.has_work() { unsafe { Work::read(p, at) } } else { Work::none() };
        let token = work.kv_begin;
        let ready = Ready { rows: u32::MAX, at, first: false };
        Loader { at, work, token, ready, stage: 0, slot: 0, parity: 0 }
    }

    /// Fills the pipeline: the first `STAGES - 1` tiles on their way, the next one's addresses ready after a barrier.
    /// Addresses need the plan and the page ids alone, so they are worked out while the grid before this one still
    /// runs; queries, keys and values may be what that grid writes.
    #[inline(always)]
    pub unsafe fn begin<V: Variant>(&mut self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>) {
        // SAFETY: the kernel's contract.
        unsafe {
            let page = self.look_up(p);
            self.publish(p, room, page);
            let first = self.ready;
            if Self::TILE.stages == 3 {
                let page = self.look_up(p);
                self.publish(p, room, page);
            }
            let page = self.look_up(p);
            sync_threads();
            grid::wait_for_previous_grid();
            grid::allow_next_grid();
            self.copy::<V>(p, room, first, 0, thread::thread_idx_x());
            if Self::TILE.stages == 3 {
                self.copy::<V>(p, room, self.ready, 1, thread::thread_idx_x());
                sync_threads();
            }
            self.publish(p, room, page);
        }
    }

    /// Starts the copies of the tile whose addresses are ready, and the page lookup of the tile after it. `thread` is
    /// this thread, whose places in a tile are kept in registers, or worked out anew if it is.
    #[inline(always)]
    pub unsafe fn step<V: Variant>(&mut self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>, thread: u32) -> u32 {
        // SAFETY: the kernel's contract.
        unsafe {
            let page = self.look_up(p);
            self.copy::<V>(p, room, self.ready, self.parity ^ 1, thread);
            page
        }
    }

    /// Starts the copies of a tile, and of the query rows where it is its item's first.
    #[inline(always)]
    unsafe fn copy<V: Variant>(
        &mut self,
        p: &AttendParameters,
        room: Room<HEAD_DIM, HOPPER>,
        ready: Ready,
        parity: u32,
        thread: u32,
    ) {
        // SAFETY: the kernel's contract; the stage was consumed before the last barrier.
        unsafe {
            if ready.rows != u32::MAX {
                // `STAGES - 1` tiles ahead is at most as many items ahead, so the slot's item is done.
                if ready.first {
                    copy_queries::<V, HEAD_DIM, HOPPER>(p, ready.at, room.queries(self.slot), ATTEND_TILE_ROWS);
                    self.slot = next(self.slot, Self::TILE.stages);
                }
                let tiles = (room.keys(self.stage), room.values(self.stage));
                copy_tile::<V, HEAD_DIM, HOPPER, MOST_ROUNDS>(p, room, parity, tiles, ready.rows, thread);
                self.stage = next(self.stage, Self::TILE.stages);
            }
            commit_async_copies();
        }
    }

    /// The page of this thread's row of the next tile.
    #[inline(always)]
    unsafe fn look_up(&self, p: &AttendParameters) -> u32 {
        let row = thread::thread_idx_x();
        if self.at.has_work() && row < Self::TILE.tile_tokens() && self.work.kv_begin < self.work.kv_end {
            // SAFETY: the page table covers the request's keys, by the kernel's contract.
            unsafe { page_of(p, self.work.page_begin, self.row_token(row)) }
        } else {
            0
        }
    }

    /// The key of a row; rows past the range repeat its last key, and are not read.
    #[inline(always)]
    fn row_token(&self, row: u32) -> u32 {
        (self.token + row).min(self.work.kv_end - 1)
    }

    /// Leaves the next tile's addresses in shared memory, where they are read after the next barrier, and moves on.
    #[inline(always)]
    pub unsafe fn publish(&mut self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>, page: u32) {
        if !self.at.has_work() {
            self.ready.rows = u32::MAX;
            return;
        }
        let row = thread::thread_idx_x();
        if row < Self::TILE.tile_tokens() {
            let slot =
                if self.work.kv_begin < self.work.kv_end { p.page_size.divide(self.row_token(row)).1 } else { 0 };
            // SAFETY: the buffer of this parity was read before the last barrier.
            unsafe { store_row_address(p, room.row_address(self.parity, row), page, slot, self.work.kv_head) };
        }
        self.parity ^= 1;
        self.ready.rows = self.work.kv_end - self.token;
        self.ready.first = self.token == self.work.kv_begin;
        if self.ready.first {
            self.ready.at = self.at;
        }
        self.token += Self::TILE.tile_tokens();
        if self.token >= self.work.kv_end {
            self.at.advance();
            if self.at.has_work() {
                // SAFETY: items of the queue, by the kernel's contract.
                self.work = unsafe { Work::read(p, self.at) };
                self.token = self.work.kv_begin;
            }
        }
    }
}
