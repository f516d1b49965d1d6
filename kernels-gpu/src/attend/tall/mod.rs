//! Tall items: many packed rows against a range of keys, each warp its own rows, so that a key read serves them all.
//!
//! In: a block's tall items. Out: output rows and LSE, or partial states. Invariant: at the top of an iteration the
//! tile to compute, and with an item's first tile its query rows, are on their way or there. A row's result depends on
//! its keys and on the tiles they lie in, not on the rows beside it nor on the height of the item.
//!
//! Warp `w` of `W` takes rows `16 w ..` of the item and, of items taller than `16 W`, rows `16 (W + w) ..` too. The
//! products are `mma.sync`'s ([`warp`](self::warp)) or, on Hopper, `wgmma`'s ([`warpgroup`]), in which four warps take
//! their rows together. FlashAttention-2 (Dao, 2023).

mod warp;
mod warpgroup;

use simt::{
    asynchronous::{commit_async_copies, fence_proxy_async, wait_async_copies},
    block::sync_threads,
    global::Global,
    registers::anew,
    tensor::Element,
    thread, warp as lanes,
};

use super::ahead::Pipeline;
use super::copies::copy_queries;
use super::logits::Keys;
use super::shape::{Room, Shape};
use super::work::{Cursor, Work};
use super::{Queue, finish, look_at, shrink};
use crate::{
    abi::{parameters::AttendParameters, tile::ATTEND_TILE_ROWS},
    merge::Values,
    softmax::OnlineSoftmax,
    tile::unroll,
    variant::Variant,
};

/// 16 columns of a block's output: `mma`'s C twice.
type Columns = [[f32; 4]; 2];

/// Walks the block's tall items, at least one; returns whether one of them was a piece of a split. `STEPS` is
/// `HEAD_DIM / 16`.
///
/// # Safety
/// [`super::attend`]'s contract; nobody uses the shared memory, and nobody does when this returns.
#[inline(always)]
pub(super) unsafe fn walk<
    E: Element + Values,
    V: Variant,
    const HEAD_DIM: u32,
    const HOPPER: bool,
    const STEPS: usize,
>(
    p: &AttendParameters,
    variant: V,
) -> bool {
    let tile = Shape::<HEAD_DIM, HOPPER>::TILE;
    let mut split = false;
    // SAFETY: the caller's contract.
    unsafe {
        let mut at = Queue::read(p).tall();
        let mut pipeline = Pipeline::<HEAD_DIM, HOPPER>::begin::<V>(p, at);
        start_queries::<V, HEAD_DIM, HOPPER>(p, at);
        while at.has_work() {
            split |= if tile.tall_blocks(V::IS_LIGHT) == 2
                && Work::read(p, at).rows > Shape::<HEAD_DIM, HOPPER>::TALL_BLOCK_ROWS
            {
                item::<E, V, HEAD_DIM, HOPPER, STEPS, 2>(p, variant, &mut pipeline, at)
            } else {
                item::<E, V, HEAD_DIM, HOPPER, STEPS, 1>(p, variant, &mut pipeline, at)
            };
            at = Queue::after_tall(p, at.item, at.head);
        }
    }
    split
}

/// One item, whose rows are up to `BLOCKS` blocks a warp; returns whether it is counted. At the end the query rows of the
/// item after it are on their way.
#[inline(always)]
unsafe fn item<
    E: Element + Values,
    V: Variant,
    const HEAD_DIM: u32,
    const HOPPER: bool,
    const STEPS: usize,
    const BLOCKS: usize,
>(
    p: &AttendParameters,
    variant: V,
    pipeline: &mut Pipeline<HEAD_DIM, HOPPER>,
    at: Cursor,
) -> bool {
    let tile = Shape::<HEAD_DIM, HOPPER>::TILE;
    // What follows from the thread is this item's, not kept from the kernel's start.
    let thread = anew(thread::thread_idx_x());
    let (warp, lane) = (thread / 32, thread % 32);
    let (row, quad) = (lane / 4, lane % 4);
    // The first row of each of the warp's blocks, and of the warps that keep together.
    let block_rows = Shape::<HEAD_DIM, HOPPER>::TALL_BLOCK_ROWS;
    let block_row = |block: usize| ATTEND_TILE_ROWS * warp + block as u32 * block_rows;
    let together = Shape::<HEAD_DIM, HOPPER>::WARPS_TOGETHER;
    let first_row = ATTEND_TILE_ROWS * (warp / together * together);
    let last_block = first_row + (BLOCKS as u32 - 1) * block_rows;
    let step_tokens = Shape::<HEAD_DIM, HOPPER>::STEP_TOKENS;

    // SAFETY: the kernel's contract.
    unsafe {
        let work = Work::read(p, at);
        let last_row = (last_block + ATTEND_TILE_ROWS * together).min(work.rows) - 1;
        // One past the last key that the first row sees; and the last one, or any of the range.
        let first_limit = work.limit(p, first_row);
        let visible_end = if first_row < work.rows { work.limit(p, last_row).max(0) as u32 } else { 0 };
        let end_rows = [look_at(p, &variant, &work, first_row), look_at(p, &variant, &work, last_row)];
        let mut softmax = [OnlineSoftmax::new(); BLOCKS];
        let mut outputs: [[Columns; STEPS]; BLOCKS] = core::mem::zeroed();
        let (mut token, kv_end, item_rows) = (work.kv_begin, work.kv_end, work.rows);
        loop {
            wait_async_copies::<0>();
            if V::TRANSFORMS {
                sync_threads();
                transform::<E, V, HEAD_DIM, HOPPER>(p, variant, at, pipeline.stage(), [token, kv_end]);
            }
            if Shape::<HEAD_DIM, HOPPER>::HAS_WARPGROUPS {
                fence_proxy_async();
            }
            sync_threads();
            // And worked out for each tile: beside a warpgroup's scores there is no register to keep it in.
            let thread = anew(thread);
            let (warp, lane) = (thread / 32, thread % 32);
            let tile_end = token + tile.tile_tokens();
            // Other keys change nothing.
            let end = tile_end.min(visible_end);
            let keys_at = |key: u32| {
                let hides = variant.may_hide(end_rows, [key, key + step_tokens]);
                let may_hide = (key + step_tokens) as i32 > first_limit || hides;
                Keys { p, variant, at, lane, item_rows, key, kv_end, may_hide }
            };
            let step_at = |key: u32, stage: u32| Step::<V, HEAD_DIM, HOPPER> {
                keys: keys_at(key),
                rows: ATTEND_TILE_ROWS * warp,
                stage,
                tile_row: key - token,
            };
            if Shape::<HEAD_DIM, HOPPER>::HAS_WARPGROUPS && token < end {
                step_at(token, pipeline.stage()).run_warpgroup::<E, STEPS, BLOCKS>(
                    pipeline,
                    &mut softmax,
                    &mut outputs,
                );
            } else {
                let page = pipeline.step::<V>(p);
                let mut key = token;
                while !Shape::<HEAD_DIM, HOPPER>::HAS_WARPGROUPS && key < end {
                    step_at(key, pipeline.stage()).run_warp::<E, STEPS, BLOCKS>(&mut softmax, &mut outputs);
                    key += step_tokens;
                }
                pipeline.advance(p, page);
            }
            token = tile_end;
            if token >= kv_end {
                break;
            }
        }

        sync_threads();
        let work = Work::read_again(p, at);
        start_queries::<V, HEAD_DIM, HOPPER>(p, Queue::after_tall(p, at.item, at.head));
        if first_row < work.rows {
            unroll::<BLOCKS>(|block| {
                let row = anew(block_row(block) + row);
                finish(p, variant, &work, row, true, &mut softmax[block]);
                write::<E, V, HEAD_DIM, STEPS>(p, &work, row, quad, &softmax[block], &outputs[block]);
            });
        }
        work.is_counted()
    }
}

/// Has the variant change a tile's keys, from `token` on, and with an item's first tile its query rows.
#[inline(always)]
unsafe fn transform<E: Element, V: Variant, const HEAD_DIM: u32, const HOPPER: bool>(
    p: &AttendParameters,
    variant: V,
    at: Cursor,
    stage: u32,
    [token, kv_end]: [u32; 2],
) {
    let tile = Shape::<HEAD_DIM, HOPPER>::TILE;
    let (room, threads) = (Room::<HEAD_DIM, HOPPER>::new(), tile.threads());
    let keys = [token, (token + tile.tile_tokens()).min(kv_end)];
    // SAFETY: the kernel's contract; the tile, and with an item's first tile its query rows, are there.
    unsafe {
        let work = Work::read_again(p, at);
        let query_at = |row: u32| work.query_at(p, row);
        if Shape::<HEAD_DIM, HOPPER>::HAS_WARPGROUPS {
            variant.transform_keys::<E, HEAD_DIM>(room.key_panels(stage), keys, threads);
            if token == work.kv_begin {
                variant.transform_queries::<E, HEAD_DIM>(room.query_panels(), work.rows, threads, query_at);
            }
        } else {
            variant.transform_keys::<E, HEAD_DIM>(room.keys(stage), keys, threads);
            if token == work.kv_begin {
                variant.transform_queries::<E, HEAD_DIM>(room.tall_queries(), work.rows, threads, query_at);
            }
        }
    }
}

/// A few keys of a tile against a warp's rows.
struct Step<'a, V: Variant, const HEAD_DIM: u32, const HOPPER: bool> {
    keys: Keys<'a, V>,
    /// The warp's first row.
    rows: u32,
    /// Where the tile lies, and the first key in it.
    stage: u32,
    tile_row: u32,
}

impl<V: Variant, const HEAD_DIM: u32, const HOPPER: bool> Step<'_, V, HEAD_DIM, HOPPER> {
    /// From a block of the warp's rows to the next.
    const BLOCK_ROWS: u32 = Shape::<HEAD_DIM, HOPPER>::TALL_BLOCK_ROWS;

    /// Turns a block's logits into weights, and shrinks what its rows have so far.
    #[inline(always)]
    unsafe fn to_weights<const COLUMNS: usize, const STEPS: usize>(
        &self,
        softmax: &mut OnlineSoftmax,
        scores: &mut [[f32; 4]; COLUMNS],
        outputs: &mut [Columns; STEPS],
    ) {
        // SAFETY: the warp's lanes are together.
        unsafe {
            let [upper, lower] = softmax.update_tile(scores, self.keys.variant.factor().unwrap_or(1.0));
            // A row's maximum seldom grows after its first keys. The barrier keeps the branch one: as selections the
            // products would need as many registers again.
            if lanes::vote_ballot(upper != 1.0 || lower != 1.0) != 0 {
                lanes::sync_warp();
                unroll::<STEPS>(|n| unroll::<2>(|i| outputs[n][i] = shrink(outputs[n][i], upper, lower)));
            }
        }
    }
}

/// Starts the copies of the query rows of an item, if there is one.
#[inline(always)]
unsafe fn start_queries<V: Variant, const HEAD_DIM: u32, const HOPPER: bool>(p: &AttendParameters, at: Cursor) {
    if at.has_work() {
        // SAFETY: the kernel's contract; the rows before were read before the last barrier.
        unsafe {
            // All blocks that are read, rows past the item's being zeros.
            let block_rows = Shape::<HEAD_DIM, HOPPER>::TALL_BLOCK_ROWS;
            let rows = Work::read_again(p, at).rows;
            let filled = if rows <= block_rows {
                rows.next_multiple_of(ATTEND_TILE_ROWS * Shape::<HEAD_DIM, HOPPER>::WARPS_TOGETHER)
            } else {
                2 * block_rows
            };
            let room = Room::<HEAD_DIM, HOPPER>::new();
            if Shape::<HEAD_DIM, HOPPER>::HAS_WARPGROUPS {
                copy_queries::<V, HEAD_DIM, HOPPER>(p, at, room.query_panels(), filled);
            } else {
                copy_queries::<V, HEAD_DIM, HOPPER>(p, at, room.tall_queries(), filled);
            }
            commit_async_copies();
        }
    }
}

/// Writes a lane's columns of rows `row` and `row + 8` of the item: outputs, or partial states.
#[inline(always)]
unsafe fn write<E: Element, V: Variant, const HEAD_DIM: u32, const STEPS: usize>(
    p: &AttendParameters,
    work: &Work,
    row: u32,
    quad: u32,
    softmax: &OnlineSoftmax,
    outputs: &[Columns; STEPS],
) {
    // Calls, not a loop: a closure of that size is not inlined twice.
    // SAFETY: output rows and states by the kernel's contract.
    unsafe {
        if work.pieces == 1 {
            write_output::<E, V, STEPS, 0>(p, work, row, quad, softmax, outputs);
            write_output::<E, V, STEPS, 1>(p, work, row + 8, quad, softmax, outputs);
        } else {
            write_states::<HEAD_DIM, STEPS>(p, work, row, quad, softmax, outputs);
        }
    }
}

/// Writes a lane's columns of the partial states of rows `row` and `row + 8`.
#[inline(always)]
pub(super) unsafe fn write_states<const HEAD_DIM: u32, const STEPS: usize>(
    p: &AttendParameters,
    work: &Work,
    row: u32,
    quad: u32,
    softmax: &OnlineSoftmax,
    outputs: &[Columns; STEPS],
) {
    // SAFETY: states by the kernel's contract.
    unsafe {
        write_state::<HEAD_DIM, STEPS, 0>(p, work, row, quad, softmax, outputs);
        write_state::<HEAD_DIM, STEPS, 1>(p, work, row + 8, quad, softmax, outputs);
    }
}

/// Writes a lane's columns of row `row` of the output, which is half `HALF` of its accumulators.
#[inline(always)]
unsafe fn write_output<E: Element, V: Variant, const STEPS: usize, const HALF: usize>(
    p: &AttendParameters,
    work: &Work,
    row: u32,
    quad: u32,
    softmax: &OnlineSoftmax,
    outputs: &[Columns; STEPS],
) {
    if row >= work.rows {
        return;
    }
    let inverse = softmax.inverse(HALF);
    // SAFETY: the caller's contract.
    unsafe {
        // The lane's part apart, so that the rest of an address ends up in the instruction.
        let target = work.row(&p.out, p.group, row).add(4 * quad as u64);
        unroll::<STEPS>(|n| {
            unroll::<2>(|i| {
                if !V::PADS || ((2 * n + i) as u32) < p.value_pieces {
                    let word = E::pack(outputs[n][i][2 * HALF] * inverse, outputs[n][i][2 * HALF + 1] * inverse);
                    target.add(32 * n as u64 + 16 * i as u64).cast::<u32>().store(word);
                }
            })
        });
        if quad == 0 {
            write_lse(p, work, row, softmax.lse(HALF));
        }
    }
}

/// Writes a row's LSE, given in base 2, where it is asked for.
#[inline(always)]
pub(super) unsafe fn write_lse(p: &AttendParameters, work: &Work, row: u32, lse_log2: f32) {
    if p.lse.address != 0 {
        // SAFETY: the caller's contract.
        unsafe { work.row(&p.lse, p.group, row).cast::<f32>().store(lse_log2 * p.lse_scale) };
    }
}

/// Writes a lane's columns of the partial state of row `row`, which is half `HALF` of its accumulators.
#[inline(always)]
unsafe fn write_state<const HEAD_DIM: u32, const STEPS: usize, const HALF: usize>(
    p: &AttendParameters,
    work: &Work,
    row: u32,
    quad: u32,
    softmax: &OnlineSoftmax,
    outputs: &[Columns; STEPS],
) {
    if row >= work.rows {
        return;
    }
    let inverse = softmax.inverse(HALF);
    // SAFETY: the caller's contract.
    unsafe {
        let state = work.state(p, row);
        let target = Global::<f32>::new(p.partial_out).add(state * HEAD_DIM as u64 + 2 * quad as u64);
        unroll::<STEPS>(|n| {
            unroll::<2>(|i| {
                let pair = [outputs[n][i][2 * HALF] * inverse, outputs[n][i][2 * HALF + 1] * inverse];
                target.add(16 * n as u64 + 8 * i as u64).cast::<[f32; 2]>().store(pair);
            })
        });
        if quad == 0 {
            Global::<f32>::new(p.partial_lse).add(state).store(softmax.lse(HALF));
        }
    }
}
