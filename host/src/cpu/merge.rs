//! Folding partial states: those of a plan, and those a caller brings.
//!
//! In: states (output, LSE) of one row over disjoint keys. Out: the row's output and LSE, by `exp2(lse - max)`
//! weights in the states' order. A state with LSE -inf is neutral whatever its output holds, also against itself;
//! so is +inf, which some libraries return for a row without keys.

use super::memory::{load_row, offset, read, row_address, store_row, write};
use crate::config::DType;
use kernels_gpu::abi::parameters::MergeStatesParameters;
use rayon::prelude::*;
use std::cell::RefCell;

/// Folds a caller's states, of `dtype` like the output. The output may be state 0.
///
/// # Safety
/// `parameters` describe live memory as [the module](super) says.
pub unsafe fn merge_states(parameters: &MergeStatesParameters, dtype: DType) {
    let heads = parameters.heads.get();
    (0..parameters.tokens).into_par_iter().for_each(|token| {
        // States counted from the first of `state_token`.
        // SAFETY: the caller's.
        let (states, state_token, kept) = unsafe {
            let (states, state_token) = match parameters.state_begin {
                0 => (0..parameters.states, token),
                begin => (read::<u32>(begin, token as usize)..read::<u32>(begin, token as usize + 1), 0),
            };
            (states, state_token, parameters.mask != 0 && read::<u8>(parameters.mask, token as usize) == 0)
        };
        let states = if kept { states.start..states.end.min(states.start + 1) } else { states };
        for head in 0..heads {
            let values = row_address(&parameters.values, state_token, head);
            let lse = row_address(&parameters.lse, state_token, head);
            // SAFETY: the caller's. A row's states are read before its output is written, so they may be the same.
            unsafe {
                fold(
                    parameters.head_dim as usize,
                    states.clone().map(|state| State {
                        lse_log2: read::<f32>(offset(lse, state as i64, parameters.lse_state_stride_bytes), 0)
                            * parameters.lse_in_scale,
                        values: offset(values, state as i64, parameters.state_stride_bytes),
                        dtype,
                    }),
                    |out, lse_log2| {
                        store_row(row_address(&parameters.out, token, head), dtype, out);
                        if parameters.out_lse.address != 0 {
                            let lse = lse_log2 * parameters.lse_out_scale;
                            write(row_address(&parameters.out_lse, token, head), 0, lse);
                        }
                    },
                );
            }
        }
    });
}

pub(super) struct State {
    pub lse_log2: f32,
    /// Address of the output row.
    pub values: u64,
    pub dtype: DType,
}

impl State {
    fn is_empty(&self) -> bool {
        self.lse_log2.is_infinite()
    }
}

/// Hands `finish` the folded output and its LSE in base 2.
///
/// # Safety
/// The states' rows are live.
pub(super) unsafe fn fold(
    head_dim: usize,
    states: impl Iterator<Item = State> + Clone,
    finish: impl FnOnce(&[f32], f32),
) {
    let states = states.filter(|state| !state.is_empty());
    let max = states.clone().map(|state| state.lse_log2).fold(f32::NEG_INFINITY, f32::max);
    SCRATCH.with_borrow_mut(|(row, out)| {
        row.resize(head_dim, 0.0);
        out.clear();
        out.resize(head_dim, 0.0);
        let mut sum = 0.0;
        for state in states {
            let weight = (state.lse_log2 - max).exp2();
            sum += weight;
            // SAFETY: the caller's.
            unsafe { load_row(state.values, state.dtype, row) };
            out.iter_mut().zip(row.iter()).for_each(|(out, value)| *out += weight * value);
        }
        if sum == 0.0 {
            finish(out, f32::NEG_INFINITY);
        } else {
            let reciprocal = 1.0 / sum;
            out.iter_mut().for_each(|out| *out *= reciprocal);
            finish(out, max + sum.log2());
        }
    });
}

thread_local! {
    /// One state's output and the sum, f32.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = RefCell::default();
}
