//! Short items: up to 16 packed rows, so few that the keys and values of an item are read at the speed of memory.
//!
//! In: a block's short items. Out: output rows and LSE, or partial states. Invariant: at the top of an iteration the
//! tile to compute and `STAGES - 2` younger ones are on their way or there, whichever items and heads they belong to;
//! the pipeline never drains between items.
//!
//! A tile is `16 * KV_WARPS` keys and values. Each warp takes 16 of the keys and keeps its own softmax over them;
//! at the end of an item the warps' states are folded through the stage just consumed.
use simt::{
    asynchronous::wait_async_copies,
    block::sync_threads,
    global::Global,
    math,
    registers::anew,
    shared::Shared,
    tensor::{Element, load_matrix_x4, load_matrix_x4_transposed},
    thread,
};

use super::loader::Loader;
use super::shape::{BATCH, MOST_BATCHES, Room, Shape, next};
use super::work::{Cursor, Work};
use super::{finish, look_at, shrink};
use crate::{
    abi::{
        parameters::AttendParameters,
        tile::{ATTEND_TILE_ROWS, AttendTile},
    },
    merge::Values,
    softmax::OnlineSoftmax,
    tile::{Rows, unroll, zeros},
    variant::Variant,
};

/// Walks the short items from `at` on; returns whether one of them is counted. `QUERY_STEPS` and
/// `OUTPUT_STEPS` are [`super::attend`]'s.
///
/// # Safety
/// [`super::attend`]'s contract; nobody uses the shared memory.
#[inline(always)]
pub(super) unsafe fn walk<
    E: Element + Values,
    V: Variant,
    const HEAD_DIM: u32,
    const HOPPER: bool,
    const QUERY_STEPS: usize,
    const OUTPUT_STEPS: usize,
>(
    p: &AttendParameters,
    variant: V,
    mut at: Cursor,
) -> bool {
    let shape = const { Shape::<HEAD_DIM, HOPPER>::checked(QUERY_STEPS, OUTPUT_STEPS) };
    let (lane, warp) = (thread::lane_idx(), thread::warp_idx());
    let kv_warp = warp / shape.output_warps;
    let (row, quad) = (lane / 4, lane % 4);
    let room = Room::<HEAD_DIM, HOPPER>::new();
    // Wide heads leave no registers for what a variant keeps of its rows; they are looked at again for every tile.
    let rows_resident = V::IS_LIGHT || Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES;

    // Of wide heads only the plainest kernel has registers for a thread's places in a tile.
    let places_resident = HEAD_DIM <= 128 || HOPPER && V::IS_LIGHT;

    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let mut loader = Loader::<HEAD_DIM, HOPPER>::new(p, at);
        loader.begin::<V>(p, room);

        let (mut stage, mut slot) = (0, 0);
        let mut split = false;
        while at.has_work() {
            let work = Work::read(p, at);
            let limits = work.limits(p, row);
            let first_limit = work.limit(p, 0);
            // The lane's two rows, and the first and last of the item.
            let look_at_all = |work: &Work| {
                let look_at = |row: u32| look_at(p, &variant, work, row);
                [[look_at(row), look_at(row + 8)], [look_at(0), look_at(work.rows - 1)]]
            };
            let variant_rows = look_at_all(&work);
            let mut queries: [[u32; 4]; QUERY_STEPS] = core::mem::zeroed();
            let mut outputs: [[f32; 4]; OUTPUT_STEPS] = core::mem::zeroed();
            let mut outputs_right: [[f32; 4]; OUTPUT_STEPS] = core::mem::zeroed();
            let mut softmax = OnlineSoftmax::new();
            let mut token = work.kv_begin;
            loop {
                if shape.stages == 3 {
                    wait_async_copies::<1>()
                } else {
                    wait_async_copies::<0>()
                }
                sync_threads();
                let thread = thread::thread_idx_x();
                let page = loader.step::<V>(p, room, if places_resident { thread } else { anew(thread) });
                if V::TRANSFORMS {
                    let (threads, end) = (shape.threads(), (token + shape.tile_tokens()).min(work.kv_end));
                    variant.transform_keys::<E, HEAD_DIM>(room.keys(stage), [token, end], threads);
                    if token == work.kv_begin {
                        let work = Work::read_again(p, at);
                        let query_at = |row: u32| work.query_at(p, row);
                        variant.transform_queries::<E, HEAD_DIM>(room.queries(slot), work.rows, threads, query_at);
                    }
                    sync_threads();
                }

                // Wide heads leave no registers for the queries; their fragments are read again for every tile.
                let lane_queries = room.queries(slot).lane(lane % 16, lane / 16);
                let query = |k: usize| load_matrix_x4(lane_queries.piece(0, k));
                if Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES && token == work.kv_begin {
                    unroll::<QUERY_STEPS>(|k| queries[k] = query(k));
                }

                // S = Q K^T for this warp's 16 keys: columns 0..8 and 8..16. Even and odd steps add up apart, which
                // halves the chain of dependent products, and fragments come a batch at a time, which shows the latency
                // of shared memory once a batch.
                let keys = room.keys(stage);
                let lane_keys = keys.lane(kv_warp * 16 + lane % 8 + 8 * (lane / 16), lane / 8 % 2);
                let mut even = zeros::<2, 4>();
                let mut odd = zeros::<2, 4>();
                unroll::<MOST_BATCHES>(|batch| {
                    let steps = Shape::<HEAD_DIM, HOPPER>::steps_of_batch(batch, V::IS_LIGHT);
                    let mut fragments = [[0; 4]; BATCH];
                    unroll::<BATCH>(|i| {
                        if i < steps.1 {
                            fragments[i] = load_matrix_x4(lane_keys.piece(0, steps.0 + i));
                        }
                    });
                    unroll::<BATCH>(|i| {
                        if i < steps.1 {
                            let k = steps.0 + i;
                            let a = if Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES { queries[k] } else { query(k) };
                            let b = fragments[i];
                            let scores = if k.is_multiple_of(2) { &mut even } else { &mut odd };
                            E::multiply_accumulate(&mut scores[0], a, [b[0], b[1]]);
                            E::multiply_accumulate(&mut scores[1], a, [b[2], b[3]]);
                        }
                    });
                });
                let mut scores = zeros::<2, 4>();
                unroll::<2>(|n| unroll::<4>(|i| scores[n][i] = even[n][i] + odd[n][i]));

                // Where registers allow, the values' fragments are on their way while the softmax is worked out.
                let values = room.values(stage);
                let (lane, warp) = if places_resident { (lane, warp) } else { (anew(lane), anew(warp)) };
                let (kv_warp, output_warp) = (warp / shape.output_warps, warp % shape.output_warps);
                // A warp's columns that are whole 128 bytes of a row keep their places in it.
                let first_column = 16 * output_warp * OUTPUT_STEPS as u32;
                let lane_values = values.columns_from(first_column).lane(kv_warp * 16 + lane % 16, lane / 16);
                let value = |n: usize| {
                    if OUTPUT_STEPS.is_multiple_of(4) {
                        return load_matrix_x4_transposed(lane_values.piece(0, n));
                    }
                    let column = first_column / 8 + 2 * n as u32 + lane / 16;
                    load_matrix_x4_transposed(values.chunk(kv_warp * 16 + lane % 16, column))
                };
                let mut fragments = [[0; 4]; OUTPUT_STEPS];
                if Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES && V::IS_LIGHT {
                    unroll::<OUTPUT_STEPS>(|n| fragments[n] = value(n));
                }

                let (limits, first_limit, [variant_rows, end_rows]) = if rows_resident {
                    (limits, first_limit, variant_rows)
                } else {
                    let work = Work::read_again(p, at);
                    (work.limits(p, row), work.limit(p, 0), look_at_all(&work))
                };
                let key = token + kv_warp * 16 + 2 * quad;
                unroll::<2>(|n| {
                    unroll::<4>(|i| {
                        let (half, key) = (i / 2, key + 8 * n as u32 + i as u32 % 2);
                        scores[n][i] = variant.logit(variant_rows[half], scores[n][i], key);
                    })
                });
                let tile_end = token + shape.tile_tokens();
                if (tile_end as i32 > first_limit) | variant.may_hide(end_rows, [token, tile_end]) {
                    unroll::<2>(|n| {
                        unroll::<4>(|i| {
                            let (half, key) = (i / 2, key + 8 * n as u32 + i as u32 % 2);
                            if key as i32 >= limits[half] || variant.hides(variant_rows[half], key) {
                                scores[n][i] = f32::NEG_INFINITY;
                            }
                        })
                    });
                }

                // Weights, and what they do to the accumulators.
                let [left, right] = scores;
                let (upper, lower) = ([left[0], left[1], right[0], right[1]], [left[2], left[3], right[2], right[3]]);
                let ((upper, shrink_upper), (lower, shrink_lower)) =
                    (softmax.update(0, upper), softmax.update(1, lower));
                let weights = [
                    E::pack(upper[0], upper[1]),
                    E::pack(lower[0], lower[1]),
                    E::pack(upper[2], upper[3]),
                    E::pack(lower[2], lower[3]),
                ];
                unroll::<OUTPUT_STEPS>(|n| {
                    outputs[n] = shrink(outputs[n], shrink_upper, shrink_lower);
                    outputs_right[n] = shrink(outputs_right[n], shrink_upper, shrink_lower);
                });

                // O += P V for this warp's 16 values and its columns.
                unroll::<OUTPUT_STEPS>(|n| {
                    let early = Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES && V::IS_LIGHT;
                    let b = if early { fragments[n] } else { value(n) };
                    E::multiply_accumulate(&mut outputs[n], weights, [b[0], b[1]]);
                    E::multiply_accumulate(&mut outputs_right[n], weights, [b[2], b[3]]);
                });

                loader.publish(p, room, page);
                let consumed = stage;
                stage = next(stage, shape.stages);
                token += shape.tile_tokens();
                if token >= work.kv_end {
                    let work = Work::read_again(p, at);
                    // What rows start with counts once: in one warp.
                    finish(p, variant, &work, row, kv_warp == 0, &mut softmax);
                    sync_threads();
                    let fold =
                        Fold::<HEAD_DIM, HOPPER> { outputs: room.stage(consumed).cast(), states: room.warp_states() };
                    unroll::<2>(|half| {
                        let row = row + 8 * half as u32;
                        if row < work.rows {
                            if warp % shape.output_warps == 0 && quad == 0 {
                                fold.state(kv_warp, row).store([softmax.maximum[half], softmax.sum[half]]);
                            }
                            unroll::<OUTPUT_STEPS>(|n| {
                                let column =
                                    16 * (warp % shape.output_warps * OUTPUT_STEPS as u32 + n as u32) + 2 * quad;
                                let pair = |outputs: [f32; 4]| {
                                    [
                                        outputs[2 * half] * softmax.shrink[half],
                                        outputs[2 * half + 1] * softmax.shrink[half],
                                    ]
                                };
                                fold.pair(kv_warp, row, column).store(pair(outputs[n]));
                                fold.pair(kv_warp, row, column + 8).store(pair(outputs_right[n]));
                            });
                        }
                    });
                    sync_threads();
                    split |= work.is_counted();
                    let thread = thread::thread_idx_x();
                    fold.write::<E, V>(p, &work, if V::TRANSFORMS { anew(thread) } else { thread });
                    break;
                }
            }
            at.advance();
            slot = next(slot, shape.stages);
        }
        split
    }
}

/// The warps' states of an item, in shared memory, on their way to one.
#[derive(Clone, Copy)]
struct Fold<const HEAD_DIM: u32, const HOPPER: bool> {
    /// `[kv_warps][16][HEAD_DIM]`.
    outputs: Shared<f32>,
    /// `[kv_warps][16]` pairs of maximum and sum.
    states: Shared<[f32; 2]>,
}

impl<const HEAD_DIM: u32, const HOPPER: bool> Fold<HEAD_DIM, HOPPER> {
    const TILE: AttendTile = Shape::<HEAD_DIM, HOPPER>::TILE;

    #[inline(always)]
    fn state(self, kv_warp: u32, row: u32) -> Shared<[f32; 2]> {
        self.states.add(kv_warp * ATTEND_TILE_ROWS + row)
    }

    /// Two columns of a row (four, where `column` is a multiple of 4). Rows of a multiple of 32 columns start in the
    /// same bank, so there groups of 8 columns trade places by row: a warp's stores then touch every bank once.
    #[inline(always)]
    fn pair(self, kv_warp: u32, row: u32, column: u32) -> Shared<[f32; 2]> {
        let column = if HEAD_DIM.is_multiple_of(32) { column ^ (8 * (row & 3)) } else { column };
        self.outputs.add((kv_warp * ATTEND_TILE_ROWS + row) * HEAD_DIM + column).cast()
    }

    /// Folds the warps' states in order and writes the rows' outputs, or their partial states.
    #[inline(always)]
    unsafe fn write<E: Element + Values, V: Variant>(self, p: &AttendParameters, work: &Work, thread: u32) {
        const COLUMNS: u32 = 4;
        let pieces = HEAD_DIM / COLUMNS;
        let mut index = thread;
        while index < work.rows * pieces {
            let (row, column) = (index / pieces, COLUMNS * (index % pieces));
            let mut sum = 0.0;
            let mut output = [0.0; 4];
            let mut maximum = f32::MIN;
            // SAFETY: written before the last barrier; output addresses by the kernel's contract.
            unsafe {
                unroll::<4>(|w| {
                    if (w as u32) < Self::TILE.kv_warps {
                        maximum = math::maximum(maximum, self.state(w as u32, row).load()[0]);
                    }
                });
                unroll::<4>(|w| {
                    if (w as u32) < Self::TILE.kv_warps {
                        let [warp_maximum, warp_sum] = self.state(w as u32, row).load();
                        let weight = math::exp2(warp_maximum - maximum);
                        let [a, b, c, d] = self.pair(w as u32, row, column).cast::<[f32; 4]>().load();
                        sum = math::multiply_add(weight, warp_sum, sum);
                        output[0] = math::multiply_add(weight, a, output[0]);
                        output[1] = math::multiply_add(weight, b, output[1]);
                        output[2] = math::multiply_add(weight, c, output[2]);
                        output[3] = math::multiply_add(weight, d, output[3]);
                    }
                });
                let inverse = if sum > 0.0 { math::reciprocal(sum) } else { 0.0 };
                let lse = maximum + math::log2(sum);
                let [a, b, c, d] = [output[0] * inverse, output[1] * inverse, output[2] * inverse, output[3] * inverse];
                if work.pieces == 1 {
                    if !V::PADS || column < 8 * p.value_pieces {
                        let target = work.row(&p.out, p.group, row).add(2 * column as u64);
                        target.cast::<[u32; 2]>().store([E::pack(a, b), E::pack(c, d)]);
                    }
                    if column == 0 && p.lse.address != 0 {
                        work.row(&p.lse, p.group, row).cast::<f32>().store(lse * p.lse_scale);
                    }
                } else {
                    let state = work.state(p, row);
                    let target = Global::<f32>::new(p.partial_out).add(state * HEAD_DIM as u64 + column as u64);
                    target.cast::<[f32; 4]>().store([a, b, c, d]);
                    if column == 0 {
                        Global::<f32>::new(p.partial_lse).add(state).store(lse);
                    }
                }
            }
            index += Self::TILE.threads();
        }
    }
}
