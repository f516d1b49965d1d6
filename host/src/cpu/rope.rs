//! Rotary position embedding of queries and keys.
//!
//! In: rows, a position for each token, and the pairs' angles or a table of cosines and sines. Out: the rotated rows,
//! in place or elsewhere; rows of tokens that are to be skipped are left alone. Cosines and sines are a token's, once
//! for all its heads, from f64; the rotation is in f32.

use super::append::convert_row;
use super::memory::{load_row, read, row_address, store_row};
use crate::config::DType;
use kernels_gpu::abi::parameters::{RopeParameters, RowsView};
use rayon::prelude::*;
use std::cell::RefCell;
use std::f64::consts::TAU;

/// Tokens a thread takes at least.
const MIN_TOKENS: usize = 4;

/// A token's cosines and sines, and a row.
#[derive(Default)]
pub struct Scratch {
    cosines: Vec<f32>,
    sines: Vec<f32>,
    row: Vec<f32>,
}

/// Rotates rows of `dtype`.
///
/// # Safety
/// `parameters` describe live memory as [the module](super) says; an output may be its own input.
pub unsafe fn rope(parameters: &RopeParameters, dtype: DType) {
    let keys = |token: u32, scratch: &mut Scratch| {
        for head in 0..parameters.heads - parameters.query_heads {
            let [from, to] = [&parameters.k, &parameters.k_out].map(|view: &RowsView| row_address(view, token, head));
            // SAFETY: the caller's; no two rows overlap.
            unsafe { rotate(parameters, [from, to], [dtype; 2], scratch) };
        }
    };
    // SAFETY: the caller's.
    unsafe { each_token(parameters, dtype, keys) }
}

/// Rotates the queries of every token that has a position, and has `keys` see to its keys, with its angles.
///
/// # Safety
/// As [`rope`]'s.
pub unsafe fn each_token(parameters: &RopeParameters, dtype: DType, keys: impl Fn(u32, &mut Scratch) + Sync) {
    (0..parameters.tokens).into_par_iter().with_min_len(MIN_TOKENS).for_each(|token| {
        // SAFETY: the caller's.
        let Some(position) = (unsafe { position_of(parameters, token) }) else { return };
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the caller's; no two rows overlap.
            unsafe {
                angles(parameters, position, scratch);
                for head in 0..parameters.query_heads {
                    let [from, to] = [&parameters.q, &parameters.q_out].map(|view| row_address(view, token, head));
                    rotate(parameters, [from, to], [dtype; 2], scratch);
                }
            }
            keys(token, scratch);
        });
    });
}

/// # Safety
/// As [`rope`]'s.
unsafe fn position_of(parameters: &RopeParameters, token: u32) -> Option<u32> {
    // SAFETY: the caller's.
    let position = unsafe {
        if parameters.positions != 0 {
            read::<i32>(parameters.positions, token as usize) as i64
        } else {
            let begin = |request: u32| read::<u32>(parameters.query_begin, request as usize);
            if token >= begin(parameters.request_count) {
                return None;
            }
            // The last request that begins at or before the token; empty ones before it begin there too.
            let (mut request, mut past) = (0, parameters.request_count);
            while past - request > 1 {
                let middle = (request + past) / 2;
                if begin(middle) <= token { request = middle } else { past = middle }
            }
            read::<i32>(parameters.offsets, request as usize) as i64 + (token - begin(request)) as i64
        }
    };
    let cached = parameters.turns != 0 || position < parameters.cached_positions as i64;
    (position >= 0 && cached).then_some(position as u32)
}

/// The cosines and sines of a position's pairs.
///
/// # Safety
/// As [`rope`]'s.
unsafe fn angles(parameters: &RopeParameters, position: u32, scratch: &mut Scratch) {
    let pairs = parameters.rotary_dim as usize / 2;
    scratch.cosines.resize(pairs, 0.0);
    scratch.sines.resize(pairs, 0.0);
    for pair in 0..pairs {
        // SAFETY: the caller's.
        let (sine, cosine) = unsafe {
            if parameters.turns == 0 {
                let row = position as usize * 2 * pairs;
                (read(parameters.cos_sin, row + pairs + pair), read(parameters.cos_sin, row + pair))
            } else {
                // Overflow is whole turns.
                let turn = read::<u64>(parameters.turns, pair).wrapping_mul(position as u64);
                let (sine, cosine) = (turn as f64 * (TAU / 2f64.powi(64))).sin_cos();
                (sine as f32, cosine as f32)
            }
        };
        (scratch.sines[pair], scratch.cosines[pair]) = (sine, cosine);
    }
}

/// Rotates a row from one place and dtype to another, by the scratch's angles.
///
/// # Safety
/// As [`rope`]'s; the rows are the same, of one dtype, or do not overlap.
pub unsafe fn rotate(
    parameters: &RopeParameters,
    [from, to]: [u64; 2],
    [source, target]: [DType; 2],
    scratch: &mut Scratch,
) {
    let Scratch { cosines, sines, row } = scratch;
    let (head_dim, rotary_dim) = (parameters.head_dim as usize, parameters.rotary_dim as usize);
    row.resize(rotary_dim, 0.0);
    // SAFETY: the caller's.
    unsafe { load_row(from, source, row) };
    for (pair, (cosine, sine)) in cosines.iter().zip(sines.iter()).enumerate() {
        let (first, second) =
            if parameters.interleaved != 0 { (2 * pair, 2 * pair + 1) } else { (pair, pair + rotary_dim / 2) };
        let (a, b) = (row[first], row[second]);
        row[first] = a * cosine - b * sine;
        row[second] = b * cosine + a * sine;
    }
    let past = |address: u64, dtype: DType| address + (rotary_dim * dtype.bytes()) as u64;
    // SAFETY: the caller's; the rows differ where they are copied.
    unsafe {
        store_row(to, target, row);
        if from != to {
            convert_row(past(from, source), source, past(to, target), target, head_dim - rotary_dim);
        }
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}
