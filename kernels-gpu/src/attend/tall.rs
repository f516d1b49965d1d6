//! Tall items: many packed rows against a range of keys, each warp its own rows, so that a key read serves them all.
//!
//! In: a block's tall items. Out: output rows and LSE, or partial states. Invariant: at the top of an iteration the
//! tile to compute, and with an item's first tile its query rows, are on their way or there. A row's result depends on
//! its keys and on the tiles they lie in, not on the rows beside it nor on the height of the item.
//!
//! Warp `w` of `W` takes rows `16 w ..` of the item and, of items taller than `16 W`, rows `16 (W + w) ..` too: two
//! blocks of 16 rows share each fragment of keys and values, which comes from shared memory about as fast as the tensor
//! cores then consume it. FlashAttention-2 (Dao, 2023).
use simt::{
    asynchronous::{commit_async_copies, wait_async_copies},
    block::sync_threads,
    global::Global,
    math,
    registers::anew,
    tensor::{Element, load_matrix_x4, load_matrix_x4_transposed},
    thread, warp,
};

use super::ahead::Pipeline;
use super::copies::copy_queries;
use super::shape::{Room, Shape};
use super::work::{Cursor, Work};
use super::{Queue, shrink};
use crate::{
    abi::{parameters::AttendParameters, tile::ATTEND_TILE_ROWS},
    merge::Values,
    softmax::OnlineSoftmax,
    tile::{SharedTile, unroll},
    variant::{Piece, Variant},
};

/// Keys whose scores a warp has at once: 16 registers a block of rows.
const STEP_TOKENS: u32 = 32;
/// Their columns of 8.
const COLUMNS: usize = STEP_TOKENS as usize / 8;

/// Scores, logits and weights of a block of rows, in the layout of `mma`'s C.
type Scores = [[f32; 4]; COLUMNS];
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
        let mut pipeline = Pipeline::<HEAD_DIM, HOPPER>::begin(p, at);
        start_queries::<HEAD_DIM, HOPPER>(p, at);
        while at.has_work() {
            let pieces =
                if tile.tall_blocks(V::IS_LIGHT) == 2 && Work::read(p, at).rows > ATTEND_TILE_ROWS * tile.warps() {
                    item::<E, V, HEAD_DIM, HOPPER, STEPS, 2>(p, variant, &mut pipeline, at.item, at.head)
                } else {
                    item::<E, V, HEAD_DIM, HOPPER, STEPS, 1>(p, variant, &mut pipeline, at.item, at.head)
                };
            split |= pieces > 1;
            at = after(p, at.item, at.head);
        }
    }
    split
}

/// The place after an item and head in the block's queue.
#[inline(always)]
unsafe fn after(p: &AttendParameters, item: u32, head: u32) -> Cursor {
    // SAFETY: the kernel's contract.
    let mut at = Cursor { item, head, ..unsafe { Queue::read(p).tall() } };
    at.advance();
    at
}

/// One item, whose rows are up to `BLOCKS` blocks a warp; returns its pieces. At the end the query rows of the item
/// after it are on their way.
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
    item: u32,
    head: u32,
) -> u32 {
    let tile = Shape::<HEAD_DIM, HOPPER>::TILE;
    let room = Room::<HEAD_DIM, HOPPER>::new();
    let at = Cursor { item, item_end: 0, head, head_begin: 0, head_end: 0 };
    // What follows from the thread is this item's, not kept from the kernel's start.
    let thread = anew(thread::thread_idx_x());
    let (warp, lane) = (thread / 32, thread % 32);
    let (row, quad) = (lane / 4, lane % 4);
    // The first row of each of the warp's blocks.
    let block_row = |block: usize| ATTEND_TILE_ROWS * (warp + block as u32 * tile.warps());

    // SAFETY: the kernel's contract.
    unsafe {
        let work = Work::read(p, at);
        let is_active = block_row(0) < work.rows;
        let last_row = (block_row(BLOCKS - 1) + ATTEND_TILE_ROWS).min(work.rows) - 1;
        // One past the last key that the warp's first row sees, and its last.
        let (first_limit, last_limit) = (work.limit(p, block_row(0)), work.limit(p, last_row));
        let end_rows = [look_at(p, &variant, &work, block_row(0)), look_at(p, &variant, &work, last_row)];
        let mut softmax = [OnlineSoftmax::new(); BLOCKS];
        unroll::<BLOCKS>(|block| {
            unroll::<2>(|half| {
                let row = look_at(p, &variant, &work, block_row(block) + row + 8 * half as u32);
                let piece = Piece { index: work.piece, count: work.pieces, keys: [work.kv_begin, work.kv_end] };
                let [maximum, sum] = variant.start(row, piece);
                softmax[block].maximum[half] = maximum;
                softmax[block].sum[half] = if quad == 0 { sum } else { 0.0 };
            });
        });
        let mut outputs: [[Columns; STEPS]; BLOCKS] = core::mem::zeroed();
        let (mut token, kv_end, item_rows) = (work.kv_begin, work.kv_end, work.rows);
        loop {
            wait_async_copies::<0>();
            sync_threads();
            let page = pipeline.step(p);

            let (keys, values) = (room.keys(pipeline.stage()), room.values(pipeline.stage()));
            let tile_end = token + tile.tile_tokens();
            // Keys past the range, and past what the last row sees, change nothing.
            let end = if is_active { tile_end.min(kv_end).min(last_limit.max(0) as u32) } else { 0 };
            let mut step_token = token;
            while step_token < end {
                let step = Step {
                    p,
                    variant,
                    at,
                    lane,
                    rows: block_row(0),
                    item_rows,
                    key: step_token,
                    kv_end,
                    may_hide: (step_token + STEP_TOKENS) as i32 > first_limit
                        || variant.may_hide(end_rows, [step_token, step_token + STEP_TOKENS]),
                    keys: keys.rows_from(step_token - token),
                    values: values.rows_from(step_token - token),
                };
                step.run::<E, HOPPER, STEPS, BLOCKS>(&mut softmax, &mut outputs);
                step_token += STEP_TOKENS;
            }

            pipeline.advance(p, page);
            token = tile_end;
            if token >= kv_end {
                break;
            }
        }

        sync_threads();
        let work = Work::read_again(p, at);
        start_queries::<HEAD_DIM, HOPPER>(p, after(p, item, head));
        if is_active {
            unroll::<BLOCKS>(|block| {
                softmax[block].finish();
                let row = anew(block_row(block) + row);
                write::<E, HEAD_DIM, STEPS>(p, &work, row, quad, &softmax[block], &outputs[block]);
            });
        }
        work.pieces
    }
}

/// A row of the item as the variant keeps it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
unsafe fn look_at<V: Variant>(p: &AttendParameters, variant: &V, work: &Work, row: u32) -> V::Row {
    // SAFETY: a row of the batch, by the kernel's contract.
    unsafe { variant.row(|| work.at(p, row)) }
}

/// A few keys of a tile against a warp's rows.
struct Step<'a, V: Variant, const HEAD_DIM: u32> {
    p: &'a AttendParameters,
    variant: V,
    at: Cursor,
    lane: u32,
    /// The warp's first row.
    rows: u32,
    /// The item's rows.
    item_rows: u32,
    /// The first key.
    key: u32,
    /// One past the item's last key.
    kv_end: u32,
    /// Whether a row might not see one of the keys.
    may_hide: bool,
    keys: SharedTile<HEAD_DIM>,
    values: SharedTile<HEAD_DIM>,
}

impl<V: Variant, const HEAD_DIM: u32> Step<'_, V, HEAD_DIM> {
    #[inline(always)]
    unsafe fn run<E: Element, const HOPPER: bool, const STEPS: usize, const BLOCKS: usize>(
        &self,
        softmax: &mut [OnlineSoftmax; BLOCKS],
        outputs: &mut [[Columns; STEPS]; BLOCKS],
    ) {
        let block_rows = ATTEND_TILE_ROWS * Shape::<HEAD_DIM, HOPPER>::TILE.warps();
        // SAFETY: the kernel's contract; the warp's lanes are together, and the rows are there.
        unsafe {
            let mut scores: [Scores; BLOCKS] = core::mem::zeroed();
            let queries = Room::<HEAD_DIM, HOPPER>::new().tall_queries().rows_from(self.rows);
            multiply_keys::<E, HEAD_DIM, STEPS, BLOCKS>(self.lane, queries, block_rows, self.keys, &mut scores);
            unroll::<BLOCKS>(|block| self.to_logits(self.rows + block as u32 * block_rows, &mut scores[block]));
            unroll::<BLOCKS>(|block| {
                let (softmax, outputs) = (&mut softmax[block], &mut outputs[block]);
                if self.variant.is_softmax() {
                    let [upper, lower] = softmax.update_tile(&mut scores[block]);
                    // A row's maximum seldom grows after its first keys. The barrier keeps the branch one: as
                    // selections the products would need as many registers again.
                    if warp::vote_ballot(upper != 1.0 || lower != 1.0) != 0 {
                        warp::sync_warp();
                        unroll::<STEPS>(|n| unroll::<2>(|i| outputs[n][i] = shrink(outputs[n][i], upper, lower)));
                    }
                } else {
                    let weight = |logit| self.variant.weight(logit);
                    unroll::<COLUMNS>(|n| scores[block][n] = scores[block][n].map(weight));
                }
            });
            add_values::<E, HEAD_DIM, STEPS, BLOCKS>(self.lane, self.values, &scores, outputs);
        }
    }

    /// Turns the scores of the block from `block_row` on into logits, -inf for keys that a row does not see.
    #[inline(always)]
    unsafe fn to_logits(&self, block_row: u32, scores: &mut Scores) {
        // What follows from the row is worked out anew: only few steps hide keys, and a heavy variant's rows take more
        // registers than there are.
        let row = anew(block_row + self.lane / 4);
        let key_of = |n: usize, i: usize| self.key + 2 * (self.lane % 4) + 8 * n as u32 + i as u32 % 2;
        // SAFETY: rows of the batch, by the kernel's contract.
        unsafe {
            let work = Work::read_for_rows(self.p, self.at, self.item_rows, self.kv_end);
            let rows = [look_at(self.p, &self.variant, &work, row), look_at(self.p, &self.variant, &work, row + 8)];
            if V::IS_LIGHT {
                unroll::<COLUMNS>(|n| {
                    unroll::<4>(|i| scores[n][i] = self.variant.logit(rows[i / 2], scores[n][i], key_of(n, i)));
                });
                if self.may_hide {
                    let limits = work.limits(self.p, row);
                    unroll::<COLUMNS>(|n| {
                        unroll::<4>(|i| {
                            let key = key_of(n, i);
                            if key as i32 >= limits[i / 2] || self.variant.hides(rows[i / 2], key) {
                                scores[n][i] = f32::NEG_INFINITY;
                            }
                        });
                    });
                }
            } else {
                // It branches for each score anyway, and in two passes it takes more registers than there are.
                let limits = if self.may_hide { work.limits(self.p, row) } else { [i32::MAX; 2] };
                unroll::<COLUMNS>(|n| {
                    unroll::<4>(|i| {
                        let (row, key) = (rows[i / 2], key_of(n, i));
                        let logit = self.variant.logit(row, scores[n][i], key);
                        let hides = self.may_hide && (key as i32 >= limits[i / 2] || self.variant.hides(row, key));
                        scores[n][i] = if hides { f32::NEG_INFINITY } else { logit };
                    });
                });
            }
        }
    }
}

/// Starts the copies of the query rows of an item, if there is one.
#[inline(always)]
unsafe fn start_queries<const HEAD_DIM: u32, const HOPPER: bool>(p: &AttendParameters, at: Cursor) {
    if at.has_work() {
        // SAFETY: the kernel's contract; the rows before were read before the last barrier.
        unsafe {
            // All blocks that are read, rows past the item's being zeros.
            let warp_blocks = ATTEND_TILE_ROWS * Shape::<HEAD_DIM, HOPPER>::TILE.warps();
            let rows = Work::read_again(p, at).rows;
            let filled = rows.next_multiple_of(if rows <= warp_blocks { ATTEND_TILE_ROWS } else { 2 * warp_blocks });
            copy_queries::<HEAD_DIM, HOPPER>(p, at, Room::<HEAD_DIM, HOPPER>::new().tall_queries(), filled);
            commit_async_copies();
        }
    }
}

/// `scores += Q K^T` of blocks of 16 rows, `block_rows` apart.
#[inline(always)]
unsafe fn multiply_keys<E: Element, const HEAD_DIM: u32, const STEPS: usize, const BLOCKS: usize>(
    lane: u32,
    queries: SharedTile<HEAD_DIM>,
    block_rows: u32,
    keys: SharedTile<HEAD_DIM>,
    scores: &mut [Scores; BLOCKS],
) {
    let queries = queries.lane(lane % 16, lane / 16);
    let keys = keys.lane(lane % 8 + 8 * (lane / 16), lane / 8 % 2);
    unroll::<STEPS>(|k| {
        // SAFETY: the warp's lanes are together, and the rows are there.
        unsafe {
            let mut a = [[0; 4]; BLOCKS];
            unroll::<BLOCKS>(|block| {
                a[block] = load_matrix_x4(queries.piece(block as u32 * block_rows, k));
            });
            unroll::<{ COLUMNS / 2 }>(|n| {
                let b = load_matrix_x4(keys.piece(16 * n as u32, k));
                unroll::<BLOCKS>(|block| {
                    E::multiply_accumulate(&mut scores[block][2 * n], a[block], [b[0], b[1]]);
                    E::multiply_accumulate(&mut scores[block][2 * n + 1], a[block], [b[2], b[3]]);
                });
            });
        }
    });
}

/// `outputs += P V`.
#[inline(always)]
unsafe fn add_values<E: Element, const HEAD_DIM: u32, const STEPS: usize, const BLOCKS: usize>(
    lane: u32,
    values: SharedTile<HEAD_DIM>,
    weights: &[Scores; BLOCKS],
    outputs: &mut [[Columns; STEPS]; BLOCKS],
) {
    let values = values.lane(lane % 16, lane / 16);
    unroll::<{ COLUMNS / 2 }>(|k| {
        let mut a = [[0; 4]; BLOCKS];
        unroll::<BLOCKS>(|block| {
            let (left, right) = (weights[block][2 * k], weights[block][2 * k + 1]);
            a[block] = [
                E::pack(left[0], left[1]),
                E::pack(left[2], left[3]),
                E::pack(right[0], right[1]),
                E::pack(right[2], right[3]),
            ];
        });
        unroll::<STEPS>(|n| {
            // SAFETY: the warp's lanes are together, and the rows are there.
            unsafe {
                let b = load_matrix_x4_transposed(values.piece(16 * k as u32, n));
                unroll::<BLOCKS>(|block| {
                    E::multiply_accumulate(&mut outputs[block][n][0], a[block], [b[0], b[1]]);
                    E::multiply_accumulate(&mut outputs[block][n][1], a[block], [b[2], b[3]]);
                });
            }
        });
    });
}

/// Writes a lane's columns of rows `row` and `row + 8` of the item: outputs, or partial states.
#[inline(always)]
unsafe fn write<E: Element, const HEAD_DIM: u32, const STEPS: usize>(
    p: &AttendParameters,
    work: &Work,
    row: u32,
    quad: u32,
    softmax: &OnlineSoftmax,
    outputs: &[Columns; STEPS],
) {
    unroll::<2>(|half| {
        let row = row + 8 * half as u32;
        if row < work.rows {
            let (maximum, sum) = (softmax.maximum[half], softmax.sum[half]);
            let inverse = if sum > 0.0 { math::reciprocal(sum) } else { 0.0 };
            let lse = maximum + math::log2(sum);
            let pair = |n: usize, i: usize| outputs[n][i].map(|value| value * inverse);
            // The lane's part apart, so that the rest of an address ends up in the instruction.
            let column = |n: usize, i: usize| (16 * n + 8 * i) as u64;
            // SAFETY: output rows and states by the kernel's contract.
            unsafe {
                if work.pieces == 1 {
                    let target = work.row(&p.out, p.group, row).add(4 * quad as u64);
                    unroll::<STEPS>(|n| {
                        unroll::<2>(|i| {
                            let values = pair(n, i);
                            let target = target.add(2 * column(n, i)).cast::<u32>();
                            target.store(E::pack(values[2 * half], values[2 * half + 1]));
                        })
                    });
                    if quad == 0 && p.lse.address != 0 {
                        work.row(&p.lse, p.group, row).cast::<f32>().store(lse * p.lse_scale);
                    }
                } else {
                    let state = work.states(row) + work.piece as u64;
                    let target = Global::<f32>::new(p.partial_out).add(state * HEAD_DIM as u64 + 2 * quad as u64);
                    unroll::<STEPS>(|n| {
                        unroll::<2>(|i| {
                            let values = pair(n, i);
                            let target = target.add(column(n, i)).cast::<[f32; 2]>();
                            target.store([values[2 * half], values[2 * half + 1]]);
                        })
                    });
                    if quad == 0 {
                        Global::<f32>::new(p.partial_lse).add(state).store(lse);
                    }
                }
            }
        }
    });
}
