//! Merging attention states: many (output, LSE) pairs of one row over disjoint keys, folded into one.
//!
//! In: states `(o_i, l_i)` with `l_i` the base-2 log of the sum of weights behind `o_i`. Out: `o = sum(2^(l_i - m)
//! o_i) / sum(2^(l_i - m))` and `l = m + log2(sum)`, with `m` the largest `l_i`. Invariant: the order of summation
//! depends on the number of states alone, so results repeat bit for bit; `(0, -inf)` is neutral, also against
//! itself. Flash-Decoding and FlashInfer (Ye et al., 2025), section 2.2.
//!
//! Two kernels share the fold: [`merge`] folds the partial states of a plan, [`merge_states`] is the public
//! operator. Previous in the walk: [`crate::attend`].
use simt::{
    block::sync_threads,
    global::Global,
    grid, math,
    number::{Bf16, F16},
    shared::Shared,
    tensor::Element,
    thread, warp,
};

use crate::abi::parameters::{MergeParameters, MergeStatesParameters, RowsView};
use crate::abi::plan::MergeRow;
use crate::abi::tile::MERGE_THREADS;
use crate::tile::unroll;

const WARPS: u32 = MERGE_THREADS / 32;
/// States a warp has in flight: their loads do not wait for each other.
const IN_FLIGHT: usize = 4;

/// A format partial and merged values are stored in, four elements at a time.
pub trait Values: Copy + 'static {
    /// Bytes of an element.
    const BYTES: u64;
    /// Reads four elements.
    ///
    /// # Safety
    /// `at` is live and aligned to four elements.
    unsafe fn load(at: Global<u8>) -> [f32; 4];
    /// Writes four elements.
    ///
    /// # Safety
    /// `at` is live and aligned to four elements.
    unsafe fn store(at: Global<u8>, values: [f32; 4]);
}

impl Values for f32 {
    const BYTES: u64 = 4;
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn load(at: Global<u8>) -> [f32; 4] {
        // SAFETY: the caller's contract is this function's own.
        unsafe { at.cast::<[f32; 4]>().load() }
    }
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn store(at: Global<u8>, values: [f32; 4]) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { at.cast().store(values) }
    }
}

macro_rules! sixteen_bit_values {
    ($type:ty) => {
        impl Values for $type {
            const BYTES: u64 = 2;
            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            unsafe fn load(at: Global<u8>) -> [f32; 4] {
                // SAFETY: the caller's contract is this function's own.
                let [low, high] = unsafe { at.cast::<[u32; 2]>().load() };
                let ((a, b), (c, d)) = (<$type>::unpack(low), <$type>::unpack(high));
                [a, b, c, d]
            }
            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            unsafe fn store(at: Global<u8>, [a, b, c, d]: [f32; 4]) {
                // SAFETY: the caller's contract is this function's own.
                unsafe { at.cast::<[u32; 2]>().store([<$type>::pack(a, b), <$type>::pack(c, d)]) }
            }
        }
    };
}
sixteen_bit_values!(Bf16);
sixteen_bit_values!(F16);

/// Folds the plan's partial states into output rows; blocks take rows in turn.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`MERGE_THREADS`] threads and
/// [`MERGE_SHARED_BYTES`](crate::abi::tile::MERGE_SHARED_BYTES) of shared memory.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn merge<Out: Values>(p: MergeParameters) {
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let rows = Global::<u32>::new(p.row_count).load_constant();
        grid::wait_for_previous_grid();
        grid::allow_next_grid();
        let mut index = thread::block_idx_x();
        while index < rows {
            let words = Global::<[u32; 4]>::new(p.rows).add(index as u64).load_constant();
            let row = MergeRow { token: words[0], head: words[1], partial_begin: words[2], count: words[3] };
            let lse = Global::<f32>::new(p.partial_lse).add(row.partial_begin as u64);
            let values = Global::<f32>::new(p.partial_out).add(row.partial_begin as u64 * p.head_dim as u64);
            fold::<f32, Out>(
                row.count,
                p.head_dim,
                |state| lse.add(state as u64).load(),
                |state| values.add(state as u64 * p.head_dim as u64).cast(),
                row_of(&p.out, row.token, row.head),
                row_of(&p.lse, row.token, row.head).cast(),
                p.lse_scale,
            );
            index += thread::grid_dim_x();
        }
    }
}

/// Folds caller-held states, one output row a block in turn.
///
/// # Safety
/// As [`merge`]. `out` may be state 0 itself: a row is read whole before it is written.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn merge_states<V: Values>(p: MergeStatesParameters) {
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        grid::wait_for_previous_grid();
        grid::allow_next_grid();
        let rows = p.tokens * p.heads.get();
        let mut index = thread::block_idx_x();
        while index < rows {
            let (token, head) = p.heads.divide(index);
            let (mut values, mut lse) = (row_of(&p.values, token, head), row_of(&p.lse, token, head));
            let mut states = p.states;
            if p.state_begin != 0 {
                let begin = Global::<u32>::new(p.state_begin).add(token as u64);
                let first = begin.load_constant();
                states = begin.add(1).load_constant() - first;
                values = row_of(&p.values, 0, head).add_bytes(first as i64 * p.state_stride_bytes);
                lse = row_of(&p.lse, 0, head).add_bytes(first as i64 * p.lse_state_stride_bytes);
            }
            if p.mask != 0 {
                let word = Global::<u16>::new((p.mask + token as u64) & !1).load_constant();
                let byte = if (p.mask + token as u64) & 1 == 0 { word & 0xff } else { word >> 8 };
                if byte == 0 {
                    states = states.min(1);
                }
            }
            fold::<V, V>(
                states,
                p.head_dim,
                |state| lse.add_bytes(state as i64 * p.lse_state_stride_bytes).cast::<f32>().load() * p.lse_in_scale,
                |state| values.add_bytes(state as i64 * p.state_stride_bytes),
                row_of(&p.out, token, head),
                row_of(&p.out_lse, token, head).cast(),
                p.lse_out_scale,
            );
            index += thread::grid_dim_x();
        }
    }
}

#[inline(always)]
fn row_of(view: &RowsView, token: u32, head: u32) -> Global<u8> {
    if view.address == 0 {
        return Global::new(0);
    }
    Global::new(view.address)
        .add_bytes(token as i64 * view.token_stride_bytes)
        .add_bytes(head as i64 * view.head_stride_bytes)
}

/// One output row from `count` states: each warp folds every fourth state, then warp 0's lanes (and those of the
/// others, for wide rows) fold the warps.
///
/// # Safety
/// The addresses given are live, and every thread of the block reaches this call.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
unsafe fn fold<In: Values, Out: Values>(
    count: u32,
    head_dim: u32,
    lse_of: impl Fn(u32) -> f32,
    values_of: impl Fn(u32) -> Global<u8>,
    out: Global<u8>,
    out_lse: Global<f32>,
    lse_scale: f32,
) {
    let (lane, warp) = (thread::lane_idx(), thread::warp_idx());
    let outputs = Shared::<[f32; 4]>::dynamic();
    let sums = outputs.add(WARPS * 128).cast::<f32>();
    // SAFETY: the caller's contract covers global memory; shared memory is written before it is read, with a barrier
    // between.
    unsafe {
        let mut maximum = f32::NEG_INFINITY;
        let mut state = lane;
        while state < count {
            maximum = math::maximum(maximum, lse_of(state));
            state += 32;
        }
        unroll::<5>(|i| maximum = math::maximum(maximum, warp::shuffle_xor_f32(maximum, 1 << i)));
        let origin = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };

        let mut column = lane;
        while column < head_dim / 4 {
            let mut sum = 0.0;
            let mut output = [0.0; 4];
            let mut state = warp;
            while state < count {
                let mut weights = [0.0; IN_FLIGHT];
                let mut values = [[0.0; 4]; IN_FLIGHT];
                unroll::<IN_FLIGHT>(|i| {
                    let state = state + i as u32 * WARPS;
                    if state < count {
                        weights[i] = lse_of(state);
                        values[i] = In::load(values_of(state).add(4 * In::BYTES * column as u64));
                    } else {
                        weights[i] = f32::NEG_INFINITY;
                    }
                });
                unroll::<IN_FLIGHT>(|i| {
                    let weight = math::exp2(weights[i] - origin);
                    sum += weight;
                    output = add_scaled(output, weight, values[i]);
                });
                state += IN_FLIGHT as u32 * WARPS;
            }
            outputs.add(warp * 128 + column).store(output);
            if column == 0 {
                sums.add(warp).store(sum);
            }
            column += 32;
        }
        sync_threads();
        let mut column = thread::thread_idx_x();
        while column < head_dim / 4 {
            let mut sum = 0.0;
            let mut output = [0.0; 4];
            unroll::<{ WARPS as usize }>(|w| {
                sum += sums.add(w as u32).load();
                output = add_scaled(output, 1.0, outputs.add(w as u32 * 128 + column).load());
            });
            let inverse = if sum > 0.0 { math::reciprocal(sum) } else { 0.0 };
            let [a, b, c, d] = output;
            Out::store(out.add(4 * Out::BYTES * column as u64), [a * inverse, b * inverse, c * inverse, d * inverse]);
            if column == 0 && out_lse.address() != 0 {
                out_lse.store((maximum + math::log2(sum)) * lse_scale);
            }
            column += MERGE_THREADS;
        }
        sync_threads();
    }
}

#[inline(always)]
fn add_scaled(sum: [f32; 4], weight: f32, values: [f32; 4]) -> [f32; 4] {
    [
        math::multiply_add(weight, values[0], sum[0]),
        math::multiply_add(weight, values[1], sum[1]),
        math::multiply_add(weight, values[2], sum[2]),
        math::multiply_add(weight, values[3], sum[3]),
    ]
}
