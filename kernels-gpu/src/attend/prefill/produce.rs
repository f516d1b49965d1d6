//! The producers: warps that have the keys and values of the block's items copied into stages.
//!
//! A tile is as many boxes as fit it; a lane has a box, whose page it looks up. The hardware takes one box after another
//! from a warp, some 70 cycles each, so keys and values have warps of their own, and their panels of 64 columns two. Boxes
//! past the item's keys are not copied. Rows of values past them become zeros, whatever lies in the rest of a page: their
//! weights are zeros, and zero times NaN is not. Keys may be anything, as their scores are replaced: what an earlier tile
//! left in the stage, or zeros where there was none, since no memory is read that nobody wrote.
use simt::{
    asynchronous::fence_proxy_async,
    bulk::{TensorMap, load_tensor_box, prefetch_tensor_map},
    global::Global,
    grid, thread, warp,
};

use super::room::Room;
use crate::abi::parameters::AttendParameters;
use crate::abi::plan::RAGGED_PAGE_TOKENS;
use crate::attend::Queue;
use crate::attend::copies::page_of;
use crate::attend::work::{Cursor, Work};
use crate::tile::{PanelTile, Rows};
use crate::variant::Variant;

/// Walks the block's items. Warp `warp_idx` of the warpgroup copies keys or values, and of those some of the panels.
///
/// # Safety
/// [`super::prefill`]'s contract; one whole warp calls this.
#[inline(always)]
pub(super) unsafe fn produce<V: Variant, const HEAD_DIM: u32, const VALUE_DIM: u32>(
    p: &AttendParameters,
    maps: Global<TensorMap>,
    room: Room<V, HEAD_DIM, VALUE_DIM>,
    warp_idx: u32,
) {
    // By way of a shuffle, so that ptxas knows it to be the same in a warp: boxes then take 10 instructions each, not 13.
    // SAFETY: the warp's lanes are together.
    let warp = unsafe { warp::shuffle_u32(warp_idx, 0) };
    let tile_tokens = Room::<V, HEAD_DIM, VALUE_DIM>::TILE.tile_tokens;
    let (is_values, part) =
        (warp / Room::<V, HEAD_DIM, VALUE_DIM>::PANEL_WARPS, warp % Room::<V, HEAD_DIM, VALUE_DIM>::PANEL_WARPS);
    let map = maps.add(is_values as u64);
    let lane = thread::lane_idx();
    let own_row = lane * p.box_tokens;
    let is_ragged = p.page_size.get() == RAGGED_PAGE_TOKENS;
    let panel_warps = Room::<V, HEAD_DIM, VALUE_DIM>::PANEL_WARPS;
    // Of three panels of keys the first warp has two.
    let panels = if is_values == 1 { VALUE_DIM / 64 } else { HEAD_DIM / 64 };
    let is_even = HEAD_DIM == VALUE_DIM && (HEAD_DIM / 64).is_multiple_of(panel_warps);
    let own_panels = if is_even { HEAD_DIM / 64 / panel_warps } else { (panels - part).div_ceil(panel_warps) };
    let box_bytes = p.box_tokens * 128 * own_panels;
    // SAFETY: the caller's contract.
    unsafe {
        if lane == 0 {
            prefetch_tensor_map(map);
        }
        let mut walk = Walk::begin(p);
        let mut tile = walk.look_up(own_row, is_ragged);
        let (mut turn, mut rests) = (0, 0);
        grid::wait_for_previous_grid();
        grid::allow_next_grid();
        while tile.is_there {
            // The next tile's item and pages arrive while this one waits for room.
            walk.advance(tile_tokens);
            let next = walk.look_up(own_row, is_ragged);
            let rows = tile.rows.min(tile_tokens);
            let is_fresh = turn < Room::<V, HEAD_DIM, VALUE_DIM>::TILE.stages;
            let has_rest = rows < tile_tokens && (is_values == 1 || is_fresh);
            let [full, empty] = if is_values == 1 {
                [room.values_full(turn), room.values_empty(turn)]
            } else {
                [room.keys_full(turn), room.keys_empty(turn)]
            };
            let place = if is_values == 1 { room.values(turn) } else { room.keys(turn) };
            let copied = if has_rest { room.rest_full(warp) } else { full };

            // What this turn finds in its stage is the phase before its own.
            empty.wait(room.parity(turn) ^ 1);
            if lane == 0 {
                copied.arrive_and_expect_bytes(rows.div_ceil(p.box_tokens) * box_bytes);
            }
            warp::sync_warp();
            let mut panel = part;
            while panel < panels {
                if own_row < rows {
                    let [row, head, page] = tile.place;
                    let coordinates = [64 * panel as i32, row, head, page];
                    load_tensor_box(place.chunk(own_row, 8 * panel), map, coordinates, copied);
                }
                panel += panel_warps;
            }
            if has_rest {
                copied.wait(rests % 2);
                rests += 1;
                clear(place, rows, part, [panels, panel_warps]);
                if lane == 0 {
                    full.arrive();
                }
            }
            turn += 1;
            tile = next;
        }
    }
}

/// A tile to copy.
struct Tile {
    is_there: bool,
    /// Keys up to the item's end.
    rows: u32,
    /// Where the lane's box begins: row, head and page of the tensor map.
    place: [i32; 3],
}

/// A place among the keys of the block's items. An item without keys has a tile like all others.
struct Walk<'a> {
    p: &'a AttendParameters,
    at: Cursor,
    work: Work,
    token: u32,
}

impl<'a> Walk<'a> {
    /// The first tile of the first item.
    #[inline(always)]
    unsafe fn begin(p: &'a AttendParameters) -> Self {
        // SAFETY: the kernel's contract.
        unsafe {
            let mut walk = Walk { p, at: Queue::read(p).all, work: Work::none(), token: 0 };
            walk.read();
            walk
        }
    }

    /// The first tile of the item here, if there is one.
    #[inline(always)]
    unsafe fn read(&mut self) {
        if self.at.has_work() {
            // SAFETY: an item of the queue, by the kernel's contract.
            self.work = unsafe { Work::read(self.p, self.at) };
            self.token = self.work.kv_begin;
        }
    }

    /// Goes `tokens`, a tile, further, and past the item's end to the next.
    #[inline(always)]
    unsafe fn advance(&mut self, tokens: u32) {
        self.token += tokens;
        if self.token >= self.work.kv_end {
            self.at.advance();
            // SAFETY: as in `begin`.
            unsafe { self.read() };
        }
    }

    /// The tile here, for a lane whose box begins `own_row` rows into it.
    #[inline(always)]
    unsafe fn look_up(&self, own_row: u32, is_ragged: bool) -> Tile {
        let is_there = self.at.has_work();
        let rows = if is_there { self.work.kv_end - self.token } else { 0 };
        let mut place = [0; 3];
        if own_row < rows {
            let key = self.token + own_row;
            // SAFETY: a key of the item, by the kernel's contract.
            let page = unsafe { page_of(self.p, self.work.page_begin, key) };
            let (_, slot) = self.p.page_size.divide(key);
            // Ragged rows are one page, and a page's number is its first row.
            let [row, page] = if is_ragged { [slot + page, 0] } else { [slot, page] };
            place = [row as i32, self.work.kv_head as i32, page as i32];
        }
        Tile { is_there, rows, place }
    }
}

/// Makes rows from `row` on zeros in the warp's panels, for all to see: of `panels`, every `step`-th from `first` on.
#[inline(always)]
unsafe fn clear(tile: PanelTile, row: u32, first: u32, [panels, step]: [u32; 2]) {
    // SAFETY: no copy into these rows is under way, and nobody reads them before they are full.
    unsafe {
        let mut panel = first;
        while panel < panels {
            let mut index = 8 * row + thread::lane_idx();
            while index < 8 * tile.rows() {
                tile.chunk(index / 8, 8 * panel + index % 8).cast::<[u32; 4]>().store([0; 4]);
                index += 32;
            }
            panel += step;
        }
        fence_proxy_async();
        warp::sync_warp();
    }
}
