//! FlashInfer's own merges, whole: `test_triton_cascade.py` and the masks of `test_shared_prefix_kernels.py`, in f16 with
//! 32 heads of 128.
//!
//! Where two states meet, every row is held against the oracle ([`pairs`], for [`crate::states::check`]). Where many do,
//! values are a [`Periodic`] buffer and rows are sampled.
//!
//! Unsafe: an operator takes addresses; the function owns the memory behind them and waits.

use crate::number::{lse_agrees, row_error, row_tolerance, value};
use crate::periodic::Periodic;
use crate::random::Random;
use crate::states::MergeCase;
use oxattn::config::DType;
use oxattn::operators::{State, StateOrder, States, merge_states};
use oxattn::{Device, Lse2, Rows, Stream, oracle};

const HEADS: usize = 32;
const HEAD_DIM: usize = 128;
/// Rows that are checked.
const SAMPLES: usize = 200;

/// Merges of two states: empty ones, 2048 tokens apart and in place, and 512 in place under no mask, masks of ones and
/// of zeros, and `random_masks` others; the original draws 50.
pub fn pairs(random_masks: usize) -> Vec<MergeCase> {
    let case = |name: &str, tokens: usize| MergeCase {
        name: name.into(),
        counts: vec![2; tokens],
        ragged: false,
        heads: HEADS as u32,
        head_dim: HEAD_DIM as u32,
        dtype: DType::F16,
        lse: vec![],
        gaps: false,
        natural: false,
        mask: None,
        in_place: false,
    };
    let in_place = |name: &str, tokens| MergeCase { in_place: true, ..case(name, tokens) };
    let empty = |case: MergeCase| MergeCase { heads: 2, head_dim: 64, lse: vec![f32::NEG_INFINITY; 2], ..case };
    let masked = |name: &str, mask: Vec<u8>| MergeCase { mask: Some(mask), ..in_place(name, 512) };
    let mut cases = vec![
        empty(case("one token, both states empty", 1)),
        empty(case("two tokens, both states empty", 2)),
        empty(case("three tokens, both states empty", 3)),
        empty(in_place("both states empty, in place", 2)),
        case("2048 tokens", 2048),
        in_place("2048 tokens in place", 2048),
        in_place("512 tokens in place", 512),
        masked("all merged", vec![1; 512]),
        masked("none merged", vec![0; 512]),
    ];
    let mut random = Random::new(7);
    for index in 0..random_masks {
        let mask = (0..512).map(|_| random.below(2) as u8).collect();
        cases.push(masked(&format!("random mask {index}"), mask));
    }
    cases
}

/// 100 states of each token, and 1 to 511: the original has 2048 tokens.
pub fn check_many_states(device: &Device, tokens: usize) {
    check_states(device, &vec![100; tokens]);
    let mut random = Random::new(8);
    check_states(device, &(0..tokens).map(|_| 1 + random.below(511) as u32).collect::<Vec<_>>());
}

/// Merges `counts` states of each token, one after another in memory where counts are equal, and else by offsets.
fn check_states(device: &Device, counts: &[u32]) {
    let tokens = counts.len();
    let mut begin = vec![0u32];
    counts.iter().for_each(|count| begin.push(begin[begin.len() - 1] + count));
    let total = begin[tokens] as usize;
    let mut random = Random::new(9);
    let values = Periodic::new(device, total * HEADS * HEAD_DIM, 524_287, DType::F16);
    let state_lse: Vec<f32> = (0..total * HEADS).map(|_| random.normal()).collect();
    let lse = device.upload(&state_lse).unwrap();
    let offsets = device.upload(&begin).unwrap();
    let (out, out_lse) = (device.allocate(2 * tokens * HEADS * HEAD_DIM).unwrap(), device.allocate(4 * tokens * HEADS));
    let out_lse = out_lse.unwrap();
    out.fill(0xff).unwrap();
    out_lse.fill(0xff).unwrap();
    let rows =
        |address, tokens: usize| Rows::contiguous(address, DType::F16, tokens as u64, HEADS as u32, HEAD_DIM as u32);
    let uniform = counts.windows(2).all(|pair| pair[0] == pair[1]);
    let states = States {
        out: rows(values.memory.address(), total),
        lse: Lse2::contiguous(lse.address(), total as u64, HEADS as u32),
        order: if uniform {
            StateOrder::Uniform { per_token: counts[0] }
        } else {
            StateOrder::Csr { begin: offsets.address() }
        },
    };
    let merged = State {
        out: rows(out.address(), tokens),
        lse: Lse2::contiguous(out_lse.address(), tokens as u64, HEADS as u32),
    };
    // SAFETY: the buffers live until they are downloaded, which waits.
    unsafe { merge_states(device, &states, &merged, Stream::default()) }.unwrap();

    let (out, out_lse) = (out.download::<u16>().unwrap(), out_lse.download::<f32>().unwrap());
    for sample in 0..SAMPLES {
        // The first and the last row, then others.
        let row = [0, tokens * HEADS - 1].get(sample).copied().unwrap_or_else(|| random.below(tokens * HEADS));
        let (token, head) = (row / HEADS, row % HEADS);
        let of_state = |state: u32| {
            let row = state as usize * HEADS + head;
            let lse = state_lse[row] as f64 * std::f64::consts::LN_2;
            oracle::State { out: values.row(row * HEAD_DIM, HEAD_DIM), lse }
        };
        let expected = oracle::merge(&(begin[token]..begin[token + 1]).map(of_state).collect::<Vec<_>>());
        let got = &out[row * HEAD_DIM..][..HEAD_DIM];
        let got: Vec<f64> = got.iter().map(|&bits| value(DType::F16, bits) as f64).collect();
        let (error, tolerance) = (row_error(&got, &expected.out), row_tolerance(DType::F16));
        let place = format!("{} states of token {token}, head {head}", counts[token]);
        assert!(error <= tolerance, "{place}: output is off by {error:.2e}, more than {tolerance:.0e}");
        let lse = out_lse[row];
        assert!(lse_agrees(lse as f64, expected.lse2()), "{place}: LSE is {lse}, not {}", expected.lse2());
    }
}
