//! The table of merges of a caller's states, and what each must give.

use crate::buffer::{Access, Buffer};
use crate::executors::Operators;
use crate::number::{decode, encode, lse_agrees, row_error, row_tolerance};
use crate::random::Random;
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{MergeStatesParameters, RowsView};
use oxattn::config::DType;
use oxattn::oracle::{State, merge};
use std::f32::consts::{LN_2, LOG2_E};

/// One merge.
#[derive(Clone, Debug)]
pub struct MergeCase {
    /// Says what it is about.
    pub name: String,
    /// States of each token. All the same unless `ragged`.
    pub counts: Vec<u32>,
    /// Whether a token's states are rows of `[total, heads, head_dim]` rather than of
    /// `[tokens, states, heads, head_dim]`.
    pub ragged: bool,
    /// Heads.
    pub heads: u32,
    /// Elements of a row.
    pub head_dim: u32,
    /// Of values and output.
    pub dtype: DType,
    /// LSE of each state, for all tokens and heads; beyond the list they are random.
    pub lse: Vec<f32>,
    /// Whether one state in three is empty, at random.
    pub gaps: bool,
    /// Whether LSE are natural logarithms rather than base 2.
    pub natural: bool,
    /// Tokens with 0 keep state 0.
    pub mask: Option<Vec<u8>>,
    /// Whether the output is state 0.
    pub in_place: bool,
}

const EMPTY: f32 = f32::NEG_INFINITY;

/// The table.
pub fn merge_cases() -> Vec<MergeCase> {
    let case = |name: &str, tokens: usize, states: u32| MergeCase {
        name: name.into(),
        counts: vec![states; tokens],
        ragged: false,
        heads: 3,
        head_dim: 64,
        dtype: DType::F32,
        lse: vec![],
        gaps: false,
        natural: false,
        mask: None,
        in_place: false,
    };
    let given = |name: &str, lse: &[f32]| MergeCase { lse: lse.to_vec(), ..case(name, 2, lse.len() as u32) };
    let mut cases = vec![
        given("B9: two empty states", &[EMPTY, EMPTY]),
        given("B9: two empty states, then one with keys", &[EMPTY, EMPTY, 3.0]),
        given("B9: one with keys among empty states", &[EMPTY, 3.0, EMPTY]),
        given("B8: +inf stands for a row without keys", &[f32::INFINITY, 3.0]),
        given("B8: +inf alone", &[f32::INFINITY]),
        given("LSE far apart", &[-60_000.0, 60_000.0, 0.0]),
        given("LSE far down", &[-66_855.86, -66_854.86]),
        given("equal LSE", &[7.5; 5]),
        case("no tokens", 0, 2),
        case("tokens without states", 3, 0),
        case("one state", 4, 1),
        case("many states", 2, 67),
        MergeCase { counts: vec![2, 0, 1, 5, 0], ragged: true, ..case("ragged", 0, 0) },
        MergeCase { counts: vec![3, 1, 9], ragged: true, gaps: true, natural: true, ..case("ragged with gaps", 0, 0) },
    ];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for head_dim in [64, 80, 128, 512] {
            let pair = MergeCase { dtype, head_dim, gaps: true, ..case(&format!("two of {head_dim} {dtype}"), 7, 2) };
            let mask = Some(vec![1, 0, 1, 1, 0, 0, 7]);
            let name = |what: &str| format!("{}, {what}", pair.name);
            cases.extend([
                MergeCase { natural: true, name: name("natural"), ..pair.clone() },
                MergeCase { in_place: true, name: name("in place"), ..pair.clone() },
                MergeCase { mask: mask.clone(), name: name("masked"), ..pair.clone() },
                MergeCase { in_place: true, mask, name: name("masked in place"), ..pair.clone() },
                pair,
            ]);
        }
    }
    cases
}

/// Runs `case` and holds each row against the oracle's.
pub fn check(case: &MergeCase, executor: &dyn Operators) -> Result<(), String> {
    let (tokens, heads, head_dim) = (case.counts.len(), case.heads as usize, case.head_dim as usize);
    let element = case.dtype.bytes();
    let total: usize = case.counts.iter().sum::<u32>() as usize;
    let begin: Vec<u32> = (0..=tokens).map(|token| case.counts[..token].iter().sum()).collect();

    // Row `state * heads + head` of all tokens' states, in order: with equal counts this is `[tokens, states, ..]`.
    let mut random = Random::new(4);
    let mut row_lse = vec![0.0f32; total * heads];
    let mut row_values = vec![0.0f32; total * heads * head_dim];
    for token in 0..tokens {
        for state in begin[token]..begin[token + 1] {
            let given = case.lse.get((state - begin[token]) as usize).copied();
            for head in 0..heads {
                let row = state as usize * heads + head;
                let empty = case.gaps && random.below(3) == 0;
                row_lse[row] = given.unwrap_or(if empty { EMPTY } else { 6.0 * random.normal() });
                if row_lse[row].is_finite() {
                    row_values[row * head_dim..][..head_dim].fill_with(|| random.normal());
                }
            }
        }
    }

    let states = case.counts.first().copied().unwrap_or(0);
    let mut values = Buffer::of(&encode(case.dtype, &row_values));
    let mut lse = Buffer::of(&row_lse);
    let before = decode(case.dtype, values.as_slice());
    let mut out = Buffer::filled(tokens * heads * head_dim * element, 0xff);
    let mut out_lse = Buffer::filled(4 * tokens * heads, 0xff);
    let mut state_begin = Buffer::of(&begin);
    let mut mask = Buffer::of(case.mask.as_deref().unwrap_or_default());
    let rows = |buffer: &mut Buffer, row_bytes: usize, tokens_apart: usize| RowsView {
        address: buffer.address(),
        token_stride_bytes: (row_bytes * heads * tokens_apart) as i64,
        head_stride_bytes: row_bytes as i64,
    };
    let apart = if case.ragged { 1 } else { states as usize };
    let values_view = rows(&mut values, head_dim * element, apart);
    let lse_view = rows(&mut lse, 4, apart);
    let out_view = if case.in_place { values_view } else { rows(&mut out, head_dim * element, 1) };
    let out_lse_view = if case.in_place { lse_view } else { rows(&mut out_lse, 4, 1) };
    let parameters = MergeStatesParameters {
        values: values_view,
        lse: lse_view,
        state_stride_bytes: (heads * head_dim * element) as i64,
        lse_state_stride_bytes: (heads * 4) as i64,
        state_begin: if case.ragged { state_begin.address() } else { 0 },
        mask: if case.mask.is_some() { mask.address() } else { 0 },
        out: out_view,
        out_lse: out_lse_view,
        tokens: tokens as u32,
        states: if case.ragged { 0 } else { states },
        heads: Divisor::new(case.heads).unwrap(),
        head_dim: case.head_dim,
        lse_in_scale: if case.natural { LOG2_E } else { 1.0 },
        lse_out_scale: if case.natural { LN_2 } else { 1.0 },
    };
    let values_access = if case.in_place { Access::Update } else { Access::Read };
    let regions = [
        values.region(values_access),
        lse.region(values_access),
        state_begin.region(Access::Read),
        mask.region(Access::Read),
        out.region(Access::Produce),
        out_lse.region(Access::Produce),
    ];
    executor.merge_states(&parameters, case.dtype, &regions);

    let to_natural = if case.natural { 1.0 } else { std::f64::consts::LN_2 };
    let (out, out_lse) = if case.in_place { (&values, &lse) } else { (&out, &out_lse) };
    let out = decode(case.dtype, out.as_slice());
    let out_lse: &[f32] = out_lse.as_slice();
    for token in 0..tokens {
        let kept = case.mask.as_ref().is_some_and(|mask| mask[token] == 0);
        for head in 0..heads {
            let count = if kept { 1 } else { case.counts[token] };
            let states: Vec<State> = (begin[token]..begin[token] + count)
                .map(|state| {
                    let row = state as usize * heads + head;
                    let lse = if row_lse[row] == f32::INFINITY { EMPTY } else { row_lse[row] };
                    State { out: before[row * head_dim..][..head_dim].to_vec(), lse: lse as f64 * to_natural }
                })
                .collect();
            let expected = match states.as_slice() {
                [] => State { out: vec![0.0; head_dim], lse: f64::NEG_INFINITY },
                states => merge(states),
            };
            let row = if case.in_place { begin[token] as usize * heads + head } else { token * heads + head };
            let (out, lse) = (&out[row * head_dim..][..head_dim], out_lse[row] as f64);
            let place = format!("token {token}, head {head}");
            // One state with keys, or none, leaves nothing to round.
            let exact = states.iter().filter(|state| state.lse.is_finite()).count() <= 1;
            let tolerance = if exact { 0.0 } else { row_tolerance(case.dtype) };
            let error = row_error(out, &expected.out);
            if error.is_nan() || error > tolerance {
                return Err(format!("{place}: output is off by {error:.2e}, more than {tolerance:.0e}"));
            }
            if !lse_agrees(lse, expected.lse / to_natural) {
                return Err(format!("{place}: LSE is {lse}, not {}", expected.lse / to_natural));
            }
        }
    }
    Ok(())
}
