//! Brings the tiles of tall items into shared memory, one ahead of the tile that is computed.
//!
//! Beside the accumulators there are no registers for what a loader must know, so that lies in shared memory too: while
//! tile `j` is computed, slot `(j + 1) % 2` says which tile's addresses come next and how much of tile `j + 1`, whose
//! addresses are there, is to be copied.
use simt::{asynchronous::commit_async_copies, block::sync_threads, grid, registers::anew, shared::Shared, thread};

use super::Queue;
use super::copies::{copy_tile, page_of, store_row_address};
use super::shape::{MOST_ROUNDS, Room, Shape};
use super::work::{Cursor, Work};
use crate::abi::parameters::AttendParameters;
use crate::variant::Variant;

/// The next tile whose addresses are to be worked out.
#[derive(Clone, Copy)]
struct Ahead {
    /// Its item and head; [`NONE`] if there is none.
    item: u32,
    head: u32,
    /// Its first key, and one past the item's last.
    token: u32,
    kv_end: u32,
    page_begin: u32,
    /// Keys, counted to the end of the item, of the tile before it, whose addresses are ready; [`NONE`] for no tile.
    ready_rows: u32,
}

const NONE: u32 = u32::MAX;

/// Rounds of a tile's copies whose addresses are in registers at once while a warpgroup's scores are under way.
pub(super) const FEW_ROUNDS_AT_ONCE: usize = 2;

impl Ahead {
    /// The first tile of an item.
    #[inline(always)]
    unsafe fn first_of(p: &AttendParameters, at: Cursor) -> Ahead {
        // SAFETY: an item of the queue, by the kernel's contract.
        let work = unsafe { Work::read(p, at) };
        let Work { kv_begin, kv_end, page_begin, .. } = work;
        Ahead { item: at.item, head: at.head, token: kv_begin, kv_end, page_begin, ready_rows: NONE }
    }

    #[inline(always)]
    unsafe fn load(slot: Shared<[u32; 4]>) -> Ahead {
        // SAFETY: written before the last barrier.
        let ([item, head, token, kv_end], [page_begin, ready_rows, ..]) = unsafe { (slot.load(), slot.add(1).load()) };
        Ahead { item, head, token, kv_end, page_begin, ready_rows }
    }

    #[inline(always)]
    unsafe fn store(self, slot: Shared<[u32; 4]>) {
        if anew(thread::thread_idx_x()) == 0 {
            // SAFETY: read before the last barrier.
            unsafe {
                slot.store([self.item, self.head, self.token, self.kv_end]);
                slot.add(1).store([self.page_begin, self.ready_rows, 0, 0]);
            }
        }
    }

    /// The key of a row; rows past the range repeat its last key, and are not read.
    #[inline(always)]
    fn row_token(&self, row: u32) -> u32 {
        (self.token + row).min(self.kv_end - 1)
    }

    /// The page of this thread's row.
    #[inline(always)]
    unsafe fn look_up(&self, p: &AttendParameters, tile_tokens: u32) -> u32 {
        let row = anew(thread::thread_idx_x());
        if self.item != NONE && row < tile_tokens && self.token < self.kv_end {
            // SAFETY: the page table covers the request's keys, by the kernel's contract.
            unsafe { page_of(p, self.page_begin, self.row_token(row)) }
        } else {
            0
        }
    }

    /// Leaves the tile's addresses in the buffer of `parity`, for after the next barrier; returns the tile after it.
    #[inline(always)]
    unsafe fn publish<const HEAD_DIM: u32, const HOPPER: bool>(
        self,
        p: &AttendParameters,
        room: Room<HEAD_DIM, HOPPER>,
        parity: u32,
        page: u32,
    ) -> Ahead {
        let tile_tokens = Shape::<HEAD_DIM, HOPPER>::TILE.tile_tokens();
        if self.item == NONE {
            return Ahead { ready_rows: NONE, ..self };
        }
        let row = anew(thread::thread_idx_x());
        if row < tile_tokens {
            let slot = if self.token < self.kv_end { p.page_size.divide(self.row_token(row)).1 } else { 0 };
            // SAFETY: the buffer of this parity was read before the last barrier.
            unsafe { store_row_address(p, room.row_address(parity, row), page, slot, self.head) };
        }
        let ready_rows = self.kv_end - self.token;
        let mut next = Ahead { token: self.token + tile_tokens, ready_rows, ..self };
        if next.token >= self.kv_end {
            // SAFETY: the queue of this block, by the kernel's contract.
            unsafe {
                let at = Queue::after_tall(p, self.item, self.head);
                next.item = NONE;
                if at.has_work() {
                    next = Ahead { ready_rows, ..Ahead::first_of(p, at) };
                }
            }
        }
        next
    }
}

/// Where the walk over the tall items is: the stage of the tile to compute.
pub(super) struct Pipeline<const HEAD_DIM: u32, const HOPPER: bool> {
    room: Room<HEAD_DIM, HOPPER>,
    stage: u32,
}

impl<const HEAD_DIM: u32, const HOPPER: bool> Pipeline<HEAD_DIM, HOPPER> {
    const TILE_TOKENS: u32 = Shape::<HEAD_DIM, HOPPER>::TILE.tile_tokens();

    /// Starts the copies of the first tile of the item at `at`, and has the next tile's addresses ready after a barrier.
    /// Addresses need the plan and the page ids alone, so they are worked out while the grid before this one still
    /// runs; queries, keys and values may be what that grid writes.
    #[inline(always)]
    pub unsafe fn begin<V: Variant>(p: &AttendParameters, at: Cursor) -> Self {
        let room = Room::new();
        // SAFETY: the kernel's contract.
        unsafe {
            let first = Ahead::first_of(p, at);
            let second = first.publish(p, room, 0, first.look_up(p, Self::TILE_TOKENS));
            let page = second.look_up(p, Self::TILE_TOKENS);
            sync_threads();
            grid::wait_for_previous_grid();
            grid::allow_next_grid();
            copy::<V, HEAD_DIM, HOPPER, MOST_ROUNDS>(p, room, 0, second.ready_rows, thread::thread_idx_x());
            commit_async_copies();
            second.publish(p, room, 1, page).store(room.tall_slot(1));
        }
        Pipeline { room, stage: 0 }
    }

    /// The stage of the tile to compute.
    #[inline(always)]
    pub fn stage(&self) -> u32 {
        self.stage
    }

    /// Starts the copies of the tile after this one, and the page lookup of the tile after that.
    #[inline(always)]
    pub unsafe fn step<V: Variant>(&self, p: &AttendParameters) -> u32 {
        // SAFETY: the caller's contract.
        unsafe { self.step_by::<V, MOST_ROUNDS>(p) }
    }

    /// The same, with the addresses of so many rounds in registers at once.
    #[inline(always)]
    pub unsafe fn step_by<V: Variant, const AT_ONCE: usize>(&self, p: &AttendParameters) -> u32 {
        let other = self.stage ^ 1;
        // SAFETY: the kernel's contract; the other stage was consumed before the last barrier.
        unsafe {
            let ahead = Ahead::load(self.room.tall_slot(other));
            let page = ahead.look_up(p, Self::TILE_TOKENS);
            if ahead.ready_rows != NONE {
                copy::<V, HEAD_DIM, HOPPER, AT_ONCE>(
                    p,
                    self.room,
                    other,
                    ahead.ready_rows,
                    anew(thread::thread_idx_x()),
                );
            }
            commit_async_copies();
            page
        }
    }

    /// Takes what [`step`](Self::step) looked up, and moves on by a tile.
    #[inline(always)]
    pub unsafe fn advance(&mut self, p: &AttendParameters, page: u32) {
        let (stage, other) = (self.stage, self.stage ^ 1);
        // SAFETY: the kernel's contract; this stage's addresses and slot were read before the last barrier.
        unsafe {
            let ahead = Ahead::load(self.room.tall_slot(other));
            ahead.publish(p, self.room, stage, page).store(self.room.tall_slot(stage));
        }
        self.stage = other;
    }
}

/// Starts the copies of a tile into a stage, by the addresses of the same parity.
#[inline(always)]
unsafe fn copy<V: Variant, const HEAD_DIM: u32, const HOPPER: bool, const AT_ONCE: usize>(
    p: &AttendParameters,
    room: Room<HEAD_DIM, HOPPER>,
    stage: u32,
    rows: u32,
    thread: u32,
) {
    // SAFETY: the kernel's contract; the stage was consumed before the last barrier.
    unsafe {
        if Shape::<HEAD_DIM, HOPPER>::HAS_WARPGROUPS {
            let tiles = (room.key_panels(stage), room.value_panels(stage));
            copy_tile::<V, HEAD_DIM, HOPPER, AT_ONCE>(p, room, stage, tiles, rows, thread);
        } else {
            let tiles = (room.keys(stage), room.values(stage));
            copy_tile::<V, HEAD_DIM, HOPPER, AT_ONCE>(p, room, stage, tiles, rows, thread);
        }
    }
}
