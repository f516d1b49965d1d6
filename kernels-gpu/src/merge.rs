//! Merging attention states: many (output, LSE) pairs of one row over disjoint keys, folded into one.
//!
//! In: states `(o_i, l_i)` with `l_i` the base-2 log of the sum of weights behind `o_i`. Out: `o = sum(2^(l_i - m)
//! o_i) / sum(2^(l_i - m))` and `l = m + log2(sum)`, with `m` the largest `l_i`. Invariant: the order of summation
//! depends on the number of states alone, so results repeat bit for bit; `(0, -inf)` is neutral, also against
//! itself. Flash-Decoding and FlashInfer (Ye et al., 2025), section 2.2.
//!
//! The attend kernel folds the partial states of its plan with [`fold_row`]; [`merge_states`] is the public operator.
//! Previous in the walk: [`crate::attend`].
use core::marker::PhantomData;

use simt::{
    global::Global,
    grid, math,
    number::{Bf16, F16},
    tensor::Element,
    thread, warp,
};

use crate::abi::parameters::{MergeStatesParameters, RowsView};
use crate::abi::tile::MERGE_THREADS;
use crate::tile::unroll;

/// States that [`merge_states`] has in flight: callers seldom bring more than a few of a row.
const FEW: usize = 4;

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

/// Folds caller-held states; warps take output rows in turn.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`MERGE_THREADS`] threads. `out` may be state 0
/// itself.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn merge_states<V: Values>(p: MergeStatesParameters) {
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        grid::wait_for_previous_grid();
        grid::allow_next_grid();
        let rows = p.tokens * p.heads.get();
        const WARPS: u32 = MERGE_THREADS / 32;
        let mut index = thread::block_idx_x() * WARPS + thread::warp_idx();
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
                let merged = Global::<u8>::new(p.mask).add(token as u64).load_constant();
                if merged == 0 {
                    states = states.min(1);
                }
            }
            fold_row::<V, V, FEW>(
                states,
                p.head_dim,
                |state| {
                    let lse = lse.add_bytes(state as i64 * p.lse_state_stride_bytes).cast::<f32>().load();
                    // Some libraries write +inf for a row that saw no key.
                    if lse == f32::INFINITY { f32::NEG_INFINITY } else { lse * p.lse_in_scale }
                },
                |state| values.add_bytes(state as i64 * p.state_stride_bytes),
                row_of(&p.out, token, head),
                row_of(&p.out_lse, token, head).cast(),
                p.lse_out_scale,
            );
            index += thread::grid_dim_x() * WARPS;
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

/// One warp folds `count` states into one output row, `IN_FLIGHT` (a divisor of 32) at a time: their loads do not wait
/// for each other. The output may be one of the states: a lane reads its columns of
/// every state, and of the columns after them, before it writes them.
///
/// # Safety
/// The addresses given are live, and all lanes of the warp reach this call together.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn fold_row<In: Values, Out: Values, const IN_FLIGHT: usize>(
    count: u32,
    head_dim: u32,
    lse_of: impl Fn(u32) -> f32,
    values_of: impl Fn(u32) -> Global<u8>,
    out: Global<u8>,
    out_lse: Global<f32>,
    lse_scale: f32,
) {
    // SAFETY: the caller's contract covers every access.
    unsafe {
        let lane = thread::lane_idx();
        // The first values are on their way while the maximum is found.
        let mut ahead = Batch::<In, IN_FLIGHT>::load(count, head_dim, 0, 0, &values_of);
        let mut maximum = f32::NEG_INFINITY;
        let mut state = lane;
        while state < count {
            maximum = math::maximum(maximum, lse_of(state));
            state += 32;
        }
        unroll::<5>(|i| maximum = math::maximum(maximum, warp::shuffle_xor_f32(maximum, 1 << i)));
        let origin = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };

        let mut sum = 0.0;
        let mut first_column = 0;
        while first_column < head_dim / 4 {
            let mut output = [0.0; 4];
            sum = 0.0;
            let mut begin = 0;
            while begin < count {
                let batch = ahead;
                let next = begin + IN_FLIGHT as u32;
                let (next, next_column) = if next < count { (next, first_column) } else { (0, first_column + 32) };
                ahead = Batch::load(count, head_dim, next, next_column, &values_of);
                // A lane works out one state's weight; the others take it from there. States past the last weigh 0.
                let state = begin + lane % IN_FLIGHT as u32;
                let lse = if state < count { lse_of(state) } else { f32::NEG_INFINITY };
                let weight = math::exp2(lse - origin).to_bits();
                unroll::<IN_FLIGHT>(|i| {
                    let weight = f32::from_bits(warp::shuffle_u32(weight, i as u32));
                    sum += weight;
                    // What an empty state holds does not matter, NaN included.
                    if weight > 0.0 {
                        output = add_scaled(output, weight, batch.values[i]);
                    }
                });
                begin += IN_FLIGHT as u32;
            }
            let column = first_column + lane;
            if column < head_dim / 4 {
                let inverse = if sum > 0.0 { math::reciprocal(sum) } else { 0.0 };
                let [a, b, c, d] = output;
                let row = [a * inverse, b * inverse, c * inverse, d * inverse];
                Out::store(out.add(4 * Out::BYTES * column as u64), row);
            }
            first_column += 32;
        }
        // The LSE may be written over state 0's, which other lanes read.
        warp::sync_warp();
        if lane == 0 && out_lse.address() != 0 {
            out_lse.store((maximum + math::log2(sum)) * lse_scale);
        }
    }
}

/// A lane's four columns of `IN_FLIGHT` states.
#[derive(Clone, Copy)]
struct Batch<In, const IN_FLIGHT: usize> {
    values: [[f32; 4]; IN_FLIGHT],
    format: PhantomData<In>,
}

impl<In: Values, const IN_FLIGHT: usize> Batch<In, IN_FLIGHT> {
    /// States `begin ..` and columns `first_column ..` (in fours); nothing where there are none.
    ///
    /// # Safety
    /// The states' addresses are live.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn load(
        count: u32,
        head_dim: u32,
        begin: u32,
        first_column: u32,
        values_of: &impl Fn(u32) -> Global<u8>,
    ) -> Self {
        let column = first_column + thread::lane_idx();
        let mut values = [[0.0; 4]; IN_FLIGHT];
        unroll::<IN_FLIGHT>(|i| {
            let state = begin + i as u32;
            if column < head_dim / 4 && state < count {
                // SAFETY: the caller's contract is this function's own.
                values[i] = unsafe { In::load(values_of(state).add(4 * In::BYTES * column as u64)) };
            }
        });
        Batch { values, format: PhantomData }
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
