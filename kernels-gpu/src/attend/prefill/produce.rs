//! The producers: warps that have the keys and values of the block's items copied into stages.
//!
//! A tile is as many boxes as fit it; a lane has a box, whose page it looks up. The hardware takes one box after another
//! from a warp, some 70 cycles each, so keys and values have warps of their own, and their panels of 64 columns two. Boxes past the item's keys are not
//! copied. Rows of values past them become zeros, whatever lies in the rest of a page: their weights are zeros, and zero
//! times NaN is not. Keys need no zeros, as their scores are replaced.
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
use crate::attend::work::Work;
use crate::tile::{PanelTile, Rows};

/// Walks the block's items. Warp `warp` of the warpgroup copies keys or values, and of those some of the panels.
///
/// # Safety
/// [`super::prefill`]'s contract; one whole warp calls this.
#[inline(always)]
pub(super) unsafe fn produce<const HEAD_DIM: u32>(
    p: &AttendParameters,
    maps: Global<TensorMap>,
    room: Room<HEAD_DIM>,
    warp: u32,
) {
    let tile_tokens = Room::<HEAD_DIM>::TILE.tile_tokens;
    let (is_values, part) = (warp / Room::<HEAD_DIM>::PANEL_WARPS, warp % Room::<HEAD_DIM>::PANEL_WARPS);
    let map = maps.add(is_values as u64);
    let lane = thread::lane_idx();
    let own_row = lane * p.box_tokens;
    let is_ragged = p.page_size.get() == RAGGED_PAGE_TOKENS;
    let box_bytes = p.box_tokens * 2 * HEAD_DIM / Room::<HEAD_DIM>::PANEL_WARPS;
    // SAFETY: the caller's contract.
    unsafe {
        if lane == 0 {
            prefetch_tensor_map(map);
        }
        let mut at = Queue::read(p).all;
        let (mut turn, mut rests) = (0, 0);
        grid::wait_for_previous_grid();
        grid::allow_next_grid();
        while at.has_work() {
            let work = Work::read(p, at);
            let mut token = work.kv_begin;
            while token < work.kv_end {
                let rows = (work.kv_end - token).min(tile_tokens);
                let has_box = own_row < rows;
                let key = token + own_row;
                let page = if has_box { page_of(p, work.page_begin, key) } else { 0 };
                let (_, slot) = p.page_size.divide(key);
                // Ragged rows are one page, and a page's number is its first row.
                let (row, page) = if is_ragged { (slot + page, 0) } else { (slot, page) };
                let place = [row as i32, work.kv_head as i32, page as i32];
                let has_rest = is_values == 1 && rows < tile_tokens;
                let [full, empty] = if is_values == 1 {
                    [room.values_full(turn), room.values_empty(turn)]
                } else {
                    [room.keys_full(turn), room.keys_empty(turn)]
                };
                let tile = if is_values == 1 { room.values(turn) } else { room.keys(turn) };
                let copied = if has_rest { room.rest_full(part) } else { full };

                // What this turn finds in its stage is the phase before its own.
                empty.wait(room.parity(turn) ^ 1);
                if lane == 0 {
                    copied.arrive_and_expect_bytes(rows.div_ceil(p.box_tokens) * box_bytes);
                }
                warp::sync_warp();
                let mut panel = part;
                while panel < HEAD_DIM / 64 {
                    if has_box {
                        let [row, head, page] = place;
                        let coordinates = [64 * panel as i32, row, head, page];
                        load_tensor_box(tile.chunk(own_row, 8 * panel), map, coordinates, copied);
                    }
                    panel += Room::<HEAD_DIM>::PANEL_WARPS;
                }
                if has_rest {
                    copied.wait(rests % 2);
                    rests += 1;
                    let mut panel = part;
                    while panel < HEAD_DIM / 64 {
                        clear(tile, rows, panel);
                        panel += Room::<HEAD_DIM>::PANEL_WARPS;
                    }
                    fence_proxy_async();
                    warp::sync_warp();
                    if lane == 0 {
                        full.arrive();
                    }
                }
                turn += 1;
                token += tile_tokens;
            }
            at.advance();
        }
    }
}

/// Makes a panel's rows from `row` on zeros.
#[inline(always)]
unsafe fn clear(tile: PanelTile, row: u32, panel: u32) {
    let mut index = 8 * row + thread::lane_idx();
    while index < 8 * tile.rows() {
        // SAFETY: the copies into the panel are done, and nobody reads it before it is full.
        unsafe { tile.chunk(index / 8, 8 * panel + index % 8).cast::<[u32; 4]>().store([0; 4]) };
        index += 32;
    }
}
