//! Merging attention states: many (output, LSE) pairs of one row over disjoint keys, folded into one.
//!
//! In: states `(o_i, l_i)` with `l_i` the base-2 log of the sum of weights behind `o_i`. Out: `o = sum(2^(l_i - m)
//! o_i) / sum(2^(l_i - m))` and `l = m + log2(sum)`, with `m` the largest `l_i`. Invariant: the order of summation
//! depends on the number of states alone, so results repeat bit for bit; `(0, -inf)` is neutral, also against
//! itself. Flash-Decoding and FlashInfer (Ye et al., 2025), section 2.2.
//!
//! The partial states of a plan are folded with [`fold_rows`], by [`crate::attend::fold`]; [`merge_states`] is the public
//! operator.
//! Previous in the walk: [`crate::attend`].
use simt::{
    asynchronous::{commit_async_copies, copy_async_16, wait_async_copies},
    block::sync_threads,
    global::Global,
    grid, math,
    number::{Bf16, F16},
    shared::Shared,
    tensor::Element,
    thread, warp,
};

use crate::abi::parameters::{MergeStatesParameters, RowsView};
use crate::abi::tile::{ATTEND_TILE_ROWS, MERGE_THREADS};
use crate::tile::unroll;

/// States whose LSE a thread of [`fold_rows`] brings, at most.
const LSES_A_THREAD: usize = 2;
/// States that [`fold_rows`] adds up without a branch between them.
const SUMMED_TOGETHER: usize = 4;

/// States that [`fold_row`] has in flight: callers seldom bring more than a few of a row.
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
            fold_row::<V>(
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

/// A block folds the states of `rows` rows, `pieces` of each, that lie one after another in `values` (`[rows, pieces,
/// head_dim]`) and `lse` (`[rows, pieces]`, base 2). It brings into shared memory as many as fit, and so waits for
/// memory once where all do; 33 states of 4 rows of 128 take 0.6 us to arrive, the most a multiprocessor can read.
/// `finish` takes a row, a column, its four values and the row's LSE.
///
/// # Safety
/// `room` is `room_bytes` of shared memory nobody else uses, all `threads` of the block call together, the states are
/// live, `head_dim / 4` is at most `threads`, and `rows` at most [`ATTEND_TILE_ROWS`].
#[inline(always)]
pub unsafe fn fold_rows(
    head_dim: u32,
    (room, room_bytes, threads): (Shared<u8>, u32, u32),
    (rows, pieces): (u32, u32),
    (values, lse): (Global<f32>, Global<f32>),
    finish: impl Fn(u32, u32, [f32; 4], f32),
) {
    let quads = head_dim / 4;
    // A pair for each row: the largest LSE so far, and what it makes of sums over the rounds before.
    let row_states = room.cast::<[f32; 2]>();
    let staged = row_states.add(ATTEND_TILE_ROWS).cast::<[f32; 4]>();
    let capacity = (room_bytes - 8 * ATTEND_TILE_ROWS) / (4 * head_dim + 4);
    let capacity = capacity.min(LSES_A_THREAD as u32 * threads);
    let weights = staged.add(quads * capacity).cast::<f32>();
    let (thread, lane, warp) = (thread::thread_idx_x(), thread::lane_idx(), thread::warp_idx());
    let mut row = 0;
    while row < rows {
        // A row of more pieces than fit is alone, and each thread keeps its columns' sums from round to round.
        let rows_at_once = (capacity / pieces).clamp(1, rows - row);
        let (mut sum, mut output) = (0.0, [0.0; 4]);
        let mut begin = 0;
        while begin < pieces {
            let count = (pieces - begin).min(capacity);
            let states = rows_at_once * count;
            let first = row as u64 * pieces as u64 + begin as u64;
            // SAFETY: the caller's contract; barriers part the rounds' uses of the room.
            unsafe {
                sync_threads();
                // The logarithms go first: they wait for memory beside the values, not behind them.
                let mut lses = [0.0; LSES_A_THREAD];
                let state = |k: usize| thread + k as u32 * threads;
                unroll::<LSES_A_THREAD>(|k| {
                    if state(k) < states {
                        lses[k] = lse.add(first + state(k) as u64).load();
                    }
                });
                let source = values.add(first * head_dim as u64).cast::<u8>();
                let mut quad = thread;
                while quad < states * quads {
                    copy_async_16(staged.add(quad).cast(), source.add(16 * quad as u64), 16);
                    quad += threads;
                }
                commit_async_copies();
                unroll::<LSES_A_THREAD>(|k| {
                    if state(k) < states {
                        weights.add(state(k)).store(lses[k]);
                    }
                });
                wait_async_copies::<0>();
                sync_threads();

                // A warp a row turns its logarithms into weights.
                let mut of_round = warp;
                while of_round < rows_at_once {
                    let weights = weights.add(of_round * count);
                    let before = if begin == 0 { f32::NEG_INFINITY } else { row_states.load()[0] };
                    let mut maximum = before;
                    let mut piece = lane;
                    while piece < count {
                        maximum = math::maximum(maximum, weights.add(piece).load());
                        piece += 32;
                    }
                    unroll::<5>(|i| maximum = math::maximum(maximum, warp::shuffle_xor_f32(maximum, 1 << i)));
                    let origin = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
                    let mut piece = lane;
                    while piece < count {
                        let weight = weights.add(piece);
                        weight.store(math::exp2(weight.load() - origin));
                        piece += 32;
                    }
                    // Other lanes have read what lane 0 writes over.
                    warp::sync_warp();
                    if lane == 0 {
                        row_states.add(of_round).store([maximum, math::exp2(before - origin)]);
                    }
                    of_round += threads / 32;
                }
                sync_threads();

                let mut i = thread;
                while i < rows_at_once * quads {
                    let (of_round, quad) = (i / quads, i % quads);
                    let [maximum, shrink] = row_states.add(of_round).load();
                    if begin == 0 {
                        (sum, output) = (0.0, [0.0; 4]);
                    }
                    sum *= shrink;
                    output = output.map(|value| value * shrink);
                    let mut add = |state: u32| {
                        let weight = weights.add(state).load();
                        let values = staged.add(state * quads + quad).load();
                        sum += weight;
                        // What an empty state holds does not matter, NaN included.
                        let values = values.map(|value| if weight > 0.0 { value } else { 0.0 });
                        output = add_scaled(output, weight, values);
                    };
                    let (mut state, end) = (of_round * count, (of_round + 1) * count);
                    while state + SUMMED_TOGETHER as u32 <= end {
                        unroll::<SUMMED_TOGETHER>(|k| add(state + k as u32));
                        state += SUMMED_TOGETHER as u32;
                    }
                    while state < end {
                        add(state);
                        state += 1;
                    }
                    if begin + count == pieces {
                        let inverse = if sum > 0.0 { math::reciprocal(sum) } else { 0.0 };
                        let values = output.map(|value| value * inverse);
                        finish(row + of_round, 4 * quad, values, maximum + math::log2(sum));
                    }
                    i += threads;
                }
            }
            begin += count;
        }
        row += rows_at_once;
    }
}

/// One warp folds `count` states into one output row, [`FEW`] at a time: their loads do not wait
/// for each other. The output may be one of the states: a lane reads its columns of
/// every state, and of the columns after them, before it writes them.
///
/// # Safety
/// The addresses given are live, and all lanes of the warp reach this call together.
#[inline(always)]
unsafe fn fold_row<V: Values>(
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
        let mut ahead = Batch::load::<V>(count, head_dim, 0, 0, &values_of);
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
                let next = begin + FEW as u32;
                let (next, next_column) = if next < count { (next, first_column) } else { (0, first_column + 32) };
                ahead = Batch::load::<V>(count, head_dim, next, next_column, &values_of);
                // A lane works out one state's weight; the others take it from there. States past the last weigh 0.
                let state = begin + lane % FEW as u32;
                let lse = if state < count { lse_of(state) } else { f32::NEG_INFINITY };
                let weight = math::exp2(lse - origin).to_bits();
                unroll::<FEW>(|i| {
                    let weight = f32::from_bits(warp::shuffle_u32(weight, i as u32));
                    sum += weight;
                    // What an empty state holds does not matter, NaN included.
                    if weight > 0.0 {
                        output = add_scaled(output, weight, batch.values[i]);
                    }
                });
                begin += FEW as u32;
            }
            let column = first_column + lane;
            if column < head_dim / 4 {
                let inverse = if sum > 0.0 { math::reciprocal(sum) } else { 0.0 };
                let [a, b, c, d] = output;
                let row = [a * inverse, b * inverse, c * inverse, d * inverse];
                V::store(out.add(4 * V::BYTES * column as u64), row);
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

/// A lane's four columns of [`FEW`] states.
#[derive(Clone, Copy)]
struct Batch {
    values: [[f32; 4]; FEW],
}

impl Batch {
    /// States `begin ..` and columns `first_column ..` (in fours); nothing where there are none.
    ///
    /// # Safety
    /// The states' addresses are live.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn load<V: Values>(
        count: u32,
        head_dim: u32,
        begin: u32,
        first_column: u32,
        values_of: &impl Fn(u32) -> Global<u8>,
    ) -> Self {
        let column = first_column + thread::lane_idx();
        let mut values = [[0.0; 4]; FEW];
        unroll::<FEW>(|i| {
            let state = begin + i as u32;
            if column < head_dim / 4 && state < count {
                // SAFETY: the caller's contract is this function's own.
                values[i] = unsafe { V::load(values_of(state).add(4 * V::BYTES * column as u64)) };
            }
        });
        Batch { values }
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
