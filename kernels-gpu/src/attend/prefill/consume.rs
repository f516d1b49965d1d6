//! A consumer: a warpgroup with 64 rows of each of the block's items.
//!
//! The scores of a tile are under way while the weights of the one before meet their values; both then wait for this
//! warpgroup's softmax, during which the tensor cores are the other warpgroup's.
use simt::{
    asynchronous::{commit_async_copies, copy_async_16, fence_proxy_async, wait_async_copies},
    block::sync_named_barrier,
    grid,
    mbarrier::Mbarrier,
    registers::{anew, keep_order},
    tensor::Element,
    thread, warp,
    wgmma::{self, commit_group, multiply_registers, multiply_shared, wait_group},
};

use super::room::Room;
use crate::abi::parameters::AttendParameters;
use crate::attend::logits::Keys;
use crate::attend::tall;
use crate::attend::work::{Cursor, Work};
use crate::attend::{Queue, operand, shrink};
use crate::softmax::OnlineSoftmax;
use crate::tile::{Rows, unroll};
use crate::variant::{Piece, Variant};

/// Rows of a warpgroup: the height of a `wgmma`.
const ROWS: u32 = 64;
/// Threads of a warpgroup.
const THREADS: u32 = 128;

/// The first of the named barriers in which a warpgroup waits for itself alone.
const ALONE: u32 = 1;

/// Walks the block's items.
///
/// # Safety
/// [`super::prefill`]'s contract; the threads of the consumers call this.
#[inline(always)]
pub(super) unsafe fn consume<
    E: Element,
    V: Variant,
    const HEAD_DIM: u32,
    const COLUMNS: usize,
    const DEPTH: usize,
    const STEPS: usize,
    const TILES: usize,
>(
    p: &AttendParameters,
    variant: V,
    room: Room<HEAD_DIM>,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut at = Queue::read(p).all;
        let mut turn = 0;
        grid::wait_for_previous_grid();
        start_queries::<HEAD_DIM>(p, at, room);
        while at.has_work() {
            // What follows from the thread is this item's, not kept from the kernel's start.
            let thread = anew(thread::thread_idx_x());
            let group = thread / THREADS - 1;
            let first_row = ROWS * group;
            let (lane, quad) = (thread % 32, thread % 4);
            let lane_row = first_row + thread % THREADS / 32 * 16 + lane / 4;
            let work = Work::read(p, at);
            if work.pieces > 1 && thread == THREADS {
                room.split().store(1);
            }
            let last_row = (first_row + ROWS).min(work.rows) - 1;
            let end_rows = [tall::look_at(p, &variant, &work, first_row), tall::look_at(p, &variant, &work, last_row)];
            let first_limit = work.limit(p, first_row);
            let mut softmax = OnlineSoftmax::new();
            unroll::<2>(|half| {
                let row = tall::look_at(p, &variant, &work, lane_row + 8 * half as u32);
                let piece = Piece { index: work.piece, count: work.pieces, keys: [work.kv_begin, work.kv_end] };
                let [maximum, sum] = variant.start(row, piece);
                softmax.maximum[half] = maximum;
                softmax.sum[half] = if quad == 0 { sum } else { 0.0 };
            });
            let (mut token, kv_end, item_rows) = (work.kv_begin, work.kv_end, work.rows);
            let rows = WarpRows {
                p,
                variant,
                at,
                lane,
                item_rows,
                kv_end,
                first_limit,
                end_rows,
                first_row: lane_row - lane / 4,
            };
            let mut outputs: [[f32; 4]; TILES] = core::mem::zeroed();
            let mut scores: [[f32; 4]; COLUMNS] = core::mem::zeroed();
            let mut weights: [[u32; 4]; DEPTH] = core::mem::zeroed();

            wait_async_copies::<0>();
            fence_proxy_async();
            sync_named_barrier(ALONE + group, THREADS);
            if token < kv_end {
                room.keys_full(turn).wait(room.parity(turn));
                start_scores::<E, HEAD_DIM, COLUMNS, STEPS>(room, turn, first_row, &mut scores);
                wait_group::<0, COLUMNS>(&mut scores);
                release(room.keys_empty(turn));
                rows.weigh(token, &mut softmax, &mut scores);
                pack::<E, COLUMNS, DEPTH>(&scores, &mut weights);
                token += 8 * COLUMNS as u32;
                while token < kv_end {
                    let next = turn + 1;
                    room.keys_full(next).wait(room.parity(next));
                    start_scores::<E, HEAD_DIM, COLUMNS, STEPS>(room, next, first_row, &mut scores);
                    room.values_full(turn).wait(room.parity(turn));
                    start_outputs::<E, HEAD_DIM, DEPTH, TILES>(room, turn, &mut weights, &mut outputs);
                    wait_group::<1, COLUMNS>(&mut scores);
                    release(room.keys_empty(next));
                    let [upper, lower] = rows.weigh(token, &mut softmax, &mut scores);
                    // The products of the values overlap with the weights only if they are waited for after them.
                    keep_order();
                    wait_group::<0, TILES>(&mut outputs);
                    release(room.values_empty(turn));
                    if warp::vote_ballot(upper != 1.0 || lower != 1.0) != 0 {
                        warp::sync_warp();
                        unroll::<TILES>(|n| outputs[n] = shrink(outputs[n], upper, lower));
                    }
                    pack::<E, COLUMNS, DEPTH>(&scores, &mut weights);
                    turn = next;
                    token += 8 * COLUMNS as u32;
                }
                room.values_full(turn).wait(room.parity(turn));
                start_outputs::<E, HEAD_DIM, DEPTH, TILES>(room, turn, &mut weights, &mut outputs);
                wait_group::<0, TILES>(&mut outputs);
                release(room.values_empty(turn));
                turn += 1;
            }

            let done = at;
            at.advance();
            sync_named_barrier(ALONE + group, THREADS);
            start_queries::<HEAD_DIM>(p, at, room);
            softmax.finish();
            let work = Work::read_again(p, done);
            let columns: &[[[f32; 4]; 2]; STEPS] = &*(&raw const outputs).cast();
            tall::write::<E, HEAD_DIM, STEPS>(p, &work, anew(lane_row), quad, &softmax, columns);
        }
    }
}

/// A warp's rows of an item, for their weights.
struct WarpRows<'a, V: Variant> {
    p: &'a AttendParameters,
    variant: V,
    at: Cursor,
    lane: u32,
    /// The item's rows.
    item_rows: u32,
    /// One past the item's last key.
    kv_end: u32,
    /// One past the last key that the warpgroup's first row sees.
    first_limit: i32,
    /// The warpgroup's first and last row.
    end_rows: [V::Row; 2],
    /// The warp's first row.
    first_row: u32,
}

impl<V: Variant> WarpRows<'_, V> {
    /// Turns scores of the keys from `token` on into weights; returns what the sums before them shrink by.
    #[inline(always)]
    unsafe fn weigh<const COLUMNS: usize>(
        &self,
        key: u32,
        softmax: &mut OnlineSoftmax,
        scores: &mut [[f32; 4]; COLUMNS],
    ) -> [f32; 2] {
        let WarpRows { p, variant, at, lane, item_rows, kv_end, .. } = *self;
        let tile_end = key + 8 * COLUMNS as u32;
        let may_hide = tile_end as i32 > self.first_limit || variant.may_hide(self.end_rows, [key, tile_end]);
        let keys = Keys { p, variant, at, lane, item_rows, key, kv_end, may_hide };
        // SAFETY: the kernel's contract.
        unsafe {
            keys.to_logits(self.first_row, scores);
            if variant.is_softmax() {
                return softmax.update_tile(scores, variant.factor().unwrap_or(1.0));
            }
        }
        unroll::<COLUMNS>(|n| scores[n] = scores[n].map(|logit| variant.weight(logit)));
        [1.0; 2]
    }
}

/// Starts `S = Q K^T`.
#[inline(always)]
unsafe fn start_scores<E: Element, const HEAD_DIM: u32, const COLUMNS: usize, const STEPS: usize>(
    room: Room<HEAD_DIM>,
    turn: u32,
    first_row: u32,
    scores: &mut [[f32; 4]; COLUMNS],
) {
    let (queries, keys) = (room.queries(), room.keys(turn));
    let (query_operand, key_operand) = (queries.k_major::<E>(first_row), keys.k_major::<E>(0));
    // SAFETY: the caller's contract; both are there.
    unsafe {
        wgmma::settle(scores);
        wgmma::fence();
        unroll::<STEPS>(|k| {
            let a = query_operand.advance_bytes(queries.step_bytes(k));
            let b = key_operand.advance_bytes(keys.step_bytes(k));
            multiply_shared(scores, a, b, k > 0);
        });
        commit_group();
    }
}

/// Starts `O += P V`.
#[inline(always)]
unsafe fn start_outputs<E: Element, const HEAD_DIM: u32, const DEPTH: usize, const TILES: usize>(
    room: Room<HEAD_DIM>,
    turn: u32,
    weights: &mut [[u32; 4]; DEPTH],
    outputs: &mut [[f32; 4]; TILES],
) {
    let values = room.values(turn).mn_major::<E>(0);
    // SAFETY: the caller's contract; the values are there.
    unsafe {
        wgmma::settle(outputs);
        unroll::<DEPTH>(|k| wgmma::pin(&mut weights[k]));
        wgmma::fence();
        // 16 rows of 128 bytes a step.
        unroll::<DEPTH>(|k| multiply_registers(outputs, weights[k], values.advance_bytes(2048 * k as u32), true));
        commit_group();
    }
}

/// Weights as the products' A: two of their columns of 8 a step.
#[inline(always)]
fn pack<E: Element, const COLUMNS: usize, const DEPTH: usize>(
    scores: &[[f32; 4]; COLUMNS],
    weights: &mut [[u32; 4]; DEPTH],
) {
    unroll::<DEPTH>(|k| {
        weights[k] = operand::<E>([scores[2 * k], scores[2 * k + 1]]);
    });
}

/// This warp has read a stage: one lane says so for all, after all have waited for the product.
#[inline(always)]
unsafe fn release(empty: Mbarrier) {
    // SAFETY: a consumer warp comes here as a whole.
    unsafe {
        warp::sync_warp();
        if thread::lane_idx() == 0 {
            empty.arrive();
        }
    }
}

/// Starts the copies of the warpgroup's query rows of an item, if there is one; rows past the item's become zeros.
#[inline(always)]
unsafe fn start_queries<const HEAD_DIM: u32>(p: &AttendParameters, at: Cursor, room: Room<HEAD_DIM>) {
    if !at.has_work() {
        return;
    }
    let chunks = HEAD_DIM / 8;
    // SAFETY: an item of the queue, by the kernel's contract; the warpgroup has read the rows that were there.
    unsafe {
        let work = Work::read_again(p, at);
        let thread = anew(thread::thread_idx_x());
        let first_row = ROWS * (thread / THREADS - 1);
        let mut index = thread % THREADS;
        while index < ROWS * chunks {
            let (row, chunk) = (first_row + index / chunks, index % chunks);
            let valid = row < work.rows;
            let source = work.row(&p.q, p.group, if valid { row } else { 0 }).add(16 * chunk as u64);
            copy_async_16(room.queries().chunk(row, chunk), source, if valid { 16 } else { 0 });
            index += THREADS;
        }
        commit_async_copies();
    }
}
