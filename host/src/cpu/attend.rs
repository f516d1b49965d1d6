//! Attention of a plan's work items.
//!
//! In: items of the plan image, queries, and the paged cache. Out: rows of `out` and `lse`. The pieces of a split
//! item, and shared items, first leave partial states, `sum(p v) / sum(p)` and `max + log2(sum(p))`, or (0, -inf) for
//! none, which a second pass folds in the order of the pieces.
//!
//! Each item takes its keys in blocks of [`BLOCK_KEYS`]: the block's keys and values become f32 once and serve all
//! rows of the tile, by the online softmax in base 2 (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1). What
//! [`ModifiedParameters`] switch on is done to the scores of a block, a row at a time; what [`RotaryParameters`] do besides
//! is done to queries and keys as they become f32.

use super::memory::{cache_address, load_row, prefetch, read, row_address, store_row, write};
use super::merge::{State, fold};
use super::rotary::{Angles, Transform};
use crate::config::DType;
use kernels_gpu::abi::parameters::{AttendParameters, CacheView};
use kernels_gpu::abi::plan::{MaskRequest, PlanHeader, SharedRow, WorkItem};
use kernels_gpu::variant::{ModifiedParameters, RotaryParameters};
use rayon::prelude::*;
use std::cell::RefCell;
use std::f32::consts::LOG2_E;

/// Keys whose f32 copies are held at once: K and V of head dim 128 are 32 KiB, the first-level cache.
const BLOCK_KEYS: usize = 32;
/// f32 sums a loop keeps side by side; rows are padded with zeros to a multiple.
const LANES: usize = 16;

/// Runs the items of all queues.
///
/// `variant` is what the attention does beside plain softmax, its arrays in host memory; `dtype` is that of queries,
/// cache and outputs.
///
/// # Safety
/// `parameters` and `header` describe live memory as [the module](super) says.
pub unsafe fn attend(parameters: &AttendParameters, header: &PlanHeader, dtype: DType, variant: &RotaryParameters) {
    let [head_dim, value_head_dim] = [parameters.key_pieces, parameters.value_pieces].map(|pieces| 8 * pieces as usize);
    let launch = Launch { parameters, head_dim, value_head_dim, dtype, variant: &variant.modified, rotary: variant };
    // SAFETY: the caller's. The queues lie end to end, so their items are one range.
    let (first, end) = unsafe {
        (read::<u32>(parameters.queue_begin, 0), read::<u32>(parameters.queue_begin, 2 * header.teams as usize))
    };
    let run = attend_item_for_this_host();
    let heads = parameters.kv_heads as usize;
    // SAFETY: the caller's.
    let item_and_head = |job: usize| unsafe { (read::<WorkItem>(parameters.items, job / heads), (job % heads) as u32) };
    let jobs = first as usize * heads..end as usize * heads;
    jobs.clone().into_par_iter().for_each(|job| {
        let (item, kv_head) = item_and_head(job);
        // SAFETY: the caller's; jobs write different rows.
        SCRATCH.with_borrow_mut(|scratch| unsafe { run(&launch, &item, kv_head, scratch) })
    });
    if header.partial_rows != 0 {
        jobs.into_par_iter().for_each(|job| {
            let (item, kv_head) = item_and_head(job);
            // A row tile's own keys come last, and there is at least one.
            if item.pieces > 1 && item.piece + 1 == item.pieces && !item.is_shared() {
                // SAFETY: the caller's; the states were written above, and jobs write different rows.
                unsafe { launch.fold(&item, kv_head) }
            }
        });
    }
}

struct Launch<'a> {
    parameters: &'a AttendParameters,
    /// Elements of a query or key row.
    head_dim: usize,
    /// Elements of a value or output row.
    value_head_dim: usize,
    dtype: DType,
    variant: &'a ModifiedParameters,
    rotary: &'a RotaryParameters,
}

/// Partial state of piece 0 of a row of an item's tile; the other pieces' follow it.
fn states_of(item: &WorkItem, kv_head: u32, row: usize) -> usize {
    item.partial_begin as usize + (kv_head as usize * item.rows as usize + row) * item.pieces as usize
}

impl Launch<'_> {
    /// The partial state that a piece leaves of a row.
    ///
    /// # Safety
    /// As [`attend`]'s.
    unsafe fn state_of(&self, item: &WorkItem, kv_head: u32, row: usize) -> usize {
        let first = if item.is_shared() {
            // SAFETY: the caller's.
            let row: SharedRow = unsafe { read(self.parameters.items, item.partial_begin as usize + row) };
            row.state as usize + kv_head as usize * row.head_states as usize
        } else {
            states_of(item, kv_head, row)
        };
        first + item.piece as usize
    }

    /// Turns the scaled scores of a row and the keys from `begin` on into logits, -inf for those the mask hides.
    ///
    /// # Safety
    /// As [`attend`]'s.
    #[inline(always)]
    unsafe fn modify(&self, row: &Row, begin: u32, scores: &mut [f32]) {
        let variant = self.variant;
        if variant.cap_log2 != 0.0 {
            scores.iter_mut().for_each(|score| *score = variant.cap_log2 * score.tanh());
        }
        if variant.alibi_slopes != 0 {
            for (key, score) in (begin as i64..).zip(scores.iter_mut()) {
                *score += row.slope_log2 * (key - row.position) as f32;
            }
        }
        if variant.mask != 0 {
            for (key, score) in (begin as u64..).zip(scores.iter_mut()) {
                let element = row.mask_element + key;
                // SAFETY: the caller's; an element for each query token and key.
                let byte: u8 = unsafe { read(variant.mask, (element >> variant.mask_shift) as usize) };
                let bit = element & ((1 << variant.mask_shift) - 1);
                if byte >> bit & 1 == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// Folds the states of a split item's rows.
    ///
    /// # Safety
    /// As [`attend`]'s.
    unsafe fn fold(&self, item: &WorkItem, kv_head: u32) {
        let parameters = self.parameters;
        for row in 0..item.rows {
            let (token, head_in_group) = parameters.group.divide(item.row_begin + row);
            let token = item.query_begin_tokens + token;
            let head = kv_head * parameters.group.get() + head_in_group;
            let states = (states_of(item, kv_head, row as usize)..).take(item.pieces as usize);
            // SAFETY: the caller's.
            unsafe {
                fold(
                    self.value_head_dim,
                    states.map(|state| State {
                        lse_log2: read(parameters.partial_lse, state),
                        values: parameters.partial_out + 4 * (state * self.value_head_dim) as u64,
                        dtype: DType::F32,
                    }),
                    |out, lse_log2| self.write_row(token, head, out, lse_log2),
                );
            }
        }
    }

    /// Writes a finished row.
    ///
    /// # Safety
    /// As [`attend`]'s.
    unsafe fn write_row(&self, token: u32, head: u32, out: &[f32], lse_log2: f32) {
        let parameters = self.parameters;
        // SAFETY: the caller's.
        unsafe {
            store_row(row_address(&parameters.out, token, head), self.dtype, out);
            if parameters.lse.address != 0 {
                write(row_address(&parameters.lse, token, head), 0, lse_log2 * parameters.lse_scale);
            }
        }
    }
}

/// A packed row of the tile on its way through the keys.
#[derive(Clone, Copy)]
struct Row {
    token: u32,
    head: u32,
    /// Its place among the request's keys.
    position: i64,
    /// First key it sees, but for a mask.
    visible_begin: u32,
    /// One past the last.
    visible_end: u32,
    slope_log2: f32,
    /// The mask's element of key 0.
    mask_element: u64,
    max: f32,
    sum: f32,
}

/// A thread's buffers: f32 rows, each of as many [`LANES`] as it fits.
#[derive(Default)]
struct Scratch {
    rows: Vec<Row>,
    q: Vec<f32>,
    out: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    angles: Angles,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// # Safety
/// As [`attend`]'s.
#[inline(always)]
unsafe fn attend_item<const FUSED: bool>(launch: &Launch, item: &WorkItem, kv_head: u32, scratch: &mut Scratch) {
    let parameters = launch.parameters;
    let [key_row, value_row] = [launch.head_dim, launch.value_head_dim].map(|dim| dim.next_multiple_of(LANES));
    // SAFETY: the caller's.
    unsafe { scratch.begin(launch, item, kv_head) };
    let kv_end = scratch.rows.iter().map(|row| row.visible_end).max().unwrap_or(0);
    let mut scores = [0.0f32; BLOCK_KEYS];
    for begin in (item.kv_begin_tokens..kv_end).step_by(BLOCK_KEYS) {
        let keys = (kv_end - begin).min(BLOCK_KEYS as u32) as usize;
        // SAFETY: the caller's.
        unsafe {
            let [k, v] = [&mut scratch.k[..keys * key_row], &mut scratch.v[..keys * value_row]];
            load_block(launch, item, kv_head, (&parameters.k, launch.head_dim), begin, k);
            load_block(launch, item, kv_head, (&parameters.v, launch.value_head_dim), begin, v);
            Transform::of_keys(launch.rotary).apply(k, key_row, begin as i32, &mut scratch.angles);
        }
        let rows = scratch.rows.iter_mut().zip(scratch.q.chunks_exact(key_row));
        for ((row, q), out) in rows.zip(scratch.out.chunks_exact_mut(value_row)) {
            let hidden = keys.min(row.visible_begin.saturating_sub(begin) as usize);
            let visible = keys.min(row.visible_end.saturating_sub(begin) as usize);
            if hidden >= visible {
                continue;
            }
            let p = &mut scores[hidden..visible];
            dot_rows::<FUSED>(p, q, &scratch.k[hidden * key_row..]);
            // SAFETY: the caller's.
            unsafe { launch.modify(row, begin + hidden as u32, p) };
            let values = &scratch.v[hidden * value_row..];
            if launch.variant.sigmoid != 0 {
                let bias_log2 = launch.variant.sigmoid_bias_log2;
                p.iter_mut().for_each(|p| *p = 1.0 / (1.0 + (-*p - bias_log2).exp2()));
                accumulate::<FUSED>(out, 1.0, p, values);
                continue;
            }
            let max = p.iter().copied().fold(row.max, f32::max);
            // Scores of -inf alone must give weights of 0, not of -inf - -inf.
            let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
            for p in p.iter_mut() {
                *p = (*p - base).exp2();
            }
            let correction = (row.max - base).exp2();
            row.max = max;
            row.sum = row.sum * correction + p.iter().sum::<f32>();
            accumulate::<FUSED>(out, correction, p, values);
        }
    }
    // SAFETY: the caller's.
    unsafe { scratch.finish(launch, item, kv_head) };
}

/// Addresses of an item's cache rows, by key.
///
/// # Safety
/// As [`attend`]'s.
#[inline(always)]
unsafe fn key_address(launch: &Launch, item: &WorkItem, kv_head: u32, view: &CacheView, key: u32) -> u64 {
    let (page, token) = launch.parameters.page_size.divide(key);
    // SAFETY: the caller's.
    let page = unsafe { read::<u32>(launch.parameters.page_indices, item.page_begin as usize + page as usize) };
    cache_address(view, page, token, kv_head)
}

/// Reads a block of cache rows of `head_dim` elements, as many as `to` holds, from key `begin` on, and asks for the block
/// after it: rows of one head lie too far apart for the processor to guess.
///
/// # Safety
/// As [`attend`]'s.
#[inline(always)]
unsafe fn load_block(
    launch: &Launch,
    item: &WorkItem,
    kv_head: u32,
    (view, head_dim): (&CacheView, usize),
    begin: u32,
    to: &mut [f32],
) {
    for (key, to) in (begin..).zip(to.chunks_exact_mut(head_dim.next_multiple_of(LANES))) {
        // SAFETY: the caller's.
        unsafe {
            let ahead = key + BLOCK_KEYS as u32;
            if ahead < item.kv_end_tokens {
                prefetch(key_address(launch, item, kv_head, view, ahead), head_dim * launch.dtype.bytes());
            }
            let (row, padding) = to.split_at_mut(head_dim);
            load_row(key_address(launch, item, kv_head, view, key), launch.dtype, row);
            padding.fill(0.0);
        }
    }
}

impl Scratch {
    /// Reads the tile's queries, scaled, and clears its rows.
    ///
    /// # Safety
    /// As [`attend`]'s.
    unsafe fn begin(&mut self, launch: &Launch, item: &WorkItem, kv_head: u32) {
        let (parameters, variant) = (launch.parameters, launch.variant);
        let [key_row, value_row] = [launch.head_dim, launch.value_head_dim].map(|dim| dim.next_multiple_of(LANES));
        let rows = item.rows as usize;
        let entry = |array: u64, index: u32, absent: f32| match array {
            0 => absent,
            // SAFETY: the caller's; an entry for each head and request.
            _ => unsafe { read(array, index as usize) },
        };
        let scale = variant.scale / entry(variant.temperatures, item.request, 1.0);
        self.rows.clear();
        self.q.resize(rows * key_row, 0.0);
        self.out.clear();
        self.out.resize(rows * value_row, 0.0);
        self.k.resize(BLOCK_KEYS * key_row, 0.0);
        self.v.resize(BLOCK_KEYS * value_row, 0.0);
        for (packed, q) in (item.row_begin..).zip(self.q.chunks_exact_mut(key_row)) {
            let (token, head_in_group) = parameters.group.divide(packed);
            let head = kv_head * parameters.group.get() + head_in_group;
            let position = token as i64 + item.query_position as i64;
            let ahead = if parameters.causal == 1 { 0 } else { variant.window_right as i64 };
            let in_item = |key: i64| key.clamp(item.kv_begin_tokens as i64, item.kv_end_tokens as i64) as u32;
            let mut row = Row {
                token: item.query_begin_tokens + token,
                head,
                position,
                visible_begin: in_item(position - variant.window_left as i64),
                visible_end: in_item(position + ahead + 1),
                slope_log2: entry(variant.alibi_slopes, head, 0.0) * LOG2_E,
                mask_element: 0,
                max: f32::NEG_INFINITY,
                sum: 0.0,
            };
            if variant.mask != 0 {
                // SAFETY: the caller's.
                let part: MaskRequest = unsafe { read(variant.mask_requests, item.request as usize) };
                row.mask_element = part.begin_elements + token as u64 * part.kv_len_tokens as u64;
            }
            // The sink counts in the piece that holds the row's own key, whatever rows lie beside it.
            let own_piece = if position < 0 {
                item.piece == 0
            } else {
                (item.kv_begin_tokens as i64..item.kv_end_tokens as i64).contains(&position)
            };
            if variant.sigmoid != 0 {
                // Pieces with equal sums that add up to 1 are folded by adding their outputs.
                (row.max, row.sum) = (0.0, 1.0 / item.pieces as f32);
            } else if own_piece {
                row.max = entry(variant.sinks, head, f32::NEG_INFINITY) * LOG2_E;
                row.sum = if row.max == f32::NEG_INFINITY { 0.0 } else { 1.0 };
            }
            let (q, padding) = q.split_at_mut(launch.head_dim);
            // SAFETY: the caller's.
            unsafe {
                load_row(row_address(&parameters.q, row.token, row.head), launch.dtype, q);
                let position = match launch.rotary.positions {
                    0 => position as i32,
                    positions => read(positions, row.token as usize),
                };
                Transform::of_queries(launch.rotary).apply(q, launch.head_dim, position, &mut self.angles);
            }
            padding.fill(0.0);
            q.iter_mut().for_each(|q| *q *= scale);
            self.rows.push(row);
        }
    }

    /// Normalises the rows and writes them where the item says.
    ///
    /// # Safety
    /// As [`attend`]'s.
    unsafe fn finish(&mut self, launch: &Launch, item: &WorkItem, kv_head: u32) {
        let (parameters, head_dim) = (launch.parameters, launch.value_head_dim);
        let outputs = self.out.chunks_exact_mut(head_dim.next_multiple_of(LANES));
        for (index, (row, out)) in self.rows.iter().zip(outputs).enumerate() {
            let out = &mut out[..head_dim];
            let (reciprocal, lse_log2) =
                if row.sum == 0.0 { (0.0, f32::NEG_INFINITY) } else { (1.0 / row.sum, row.max + row.sum.log2()) };
            out.iter_mut().for_each(|out| *out *= reciprocal);
            // SAFETY: the caller's.
            unsafe {
                if item.pieces == 1 {
                    launch.write_row(row.token, row.head, out, lse_log2);
                } else {
                    let state = launch.state_of(item, kv_head, index);
                    store_row(parameters.partial_out + 4 * (state * head_dim) as u64, DType::F32, out);
                    write(parameters.partial_lse, state, lse_log2);
                }
            }
        }
    }
}

/// `scores[i] = sum(q * rows[i])`, over rows of `q.len()`, a multiple of [`LANES`].
///
/// In two passes: with the sum over lanes in the first one, LLVM builds its tree backwards into the loop and
/// multiplies pairs instead of eights.
#[inline(always)]
fn dot_rows<const FUSED: bool>(scores: &mut [f32], q: &[f32], rows: &[f32]) {
    let mut sums = [[0.0f32; LANES]; BLOCK_KEYS];
    for (sums, row) in sums.iter_mut().zip(rows.chunks_exact(q.len())).take(scores.len()) {
        let mut lanes = [0.0f32; LANES];
        for (q, k) in q.as_chunks::<LANES>().0.iter().zip(row.as_chunks::<LANES>().0) {
            for lane in 0..LANES {
                lanes[lane] = multiply_add::<FUSED>(q[lane], k[lane], lanes[lane]);
            }
        }
        *sums = lanes;
    }
    for (score, sums) in scores.iter_mut().zip(&sums) {
        let eight: [f32; 8] = std::array::from_fn(|lane| sums[lane] + sums[lane + 8]);
        let four: [f32; 4] = std::array::from_fn(|lane| eight[lane] + eight[lane + 4]);
        *score = (four[0] + four[2]) + (four[1] + four[3]);
    }
}

/// `out = out * correction + sum(weights * rows)`, over rows of `out.len()`, a multiple of [`LANES`].
#[inline(always)]
fn accumulate<const FUSED: bool>(out: &mut [f32], correction: f32, weights: &[f32], rows: &[f32]) {
    let head_dim = out.len();
    for (chunk, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut lanes = out.map(|out| out * correction);
        for (&weight, row) in weights.iter().zip(rows.chunks_exact(head_dim)) {
            let row = &row.as_chunks::<LANES>().0[chunk];
            for lane in 0..LANES {
                lanes[lane] = multiply_add::<FUSED>(weight, row[lane], lanes[lane]);
            }
        }
        *out = lanes;
    }
}

/// `a * b + c`, in one rounding where the processor has the instruction: without it `mul_add` is a library call.
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

type AttendItem = unsafe fn(&Launch, &WorkItem, u32, &mut Scratch);

/// [`attend_item`] compiled for what this processor has.
fn attend_item_for_this_host() -> AttendItem {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return attend_item_avx2;
    }
    attend_item::<{ cfg!(target_arch = "aarch64") }>
}

/// # Safety
/// As [`attend`]'s, on a processor with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn attend_item_avx2(launch: &Launch, item: &WorkItem, kv_head: u32, scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe { attend_item::<true>(launch, item, kv_head, scratch) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_agree_with_sums_by_hand() {
        for elements in [16, 80, 512] {
            let a: Vec<f32> = (0..elements).map(|i| i as f32 - 7.0).collect();
            let b: Vec<f32> = (0..elements).map(|i| (i % 5) as f32).collect();
            let rows = [a.clone(), b.clone()].concat();
            let product = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
            for dot_rows in [dot_rows::<false>, dot_rows::<true>] {
                let mut scores = [0.0; 2];
                dot_rows(&mut scores, &b, &rows);
                assert_eq!(scores, [product(&b, &a), product(&b, &b)]);
            }
            let mut out = a.clone();
            accumulate::<false>(&mut out, 0.5, &[2.0, 4.0], &rows);
            let by_hand: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 2.5 * a + 4.0 * b).collect();
            assert_eq!(out, by_hand);
        }
    }
}
