//! The table of rotations, and what each must leave behind, by an oracle of its own in f64.
//!
//! The oracle takes angles in radians, from the definition; the product of position and frequency is kept to twice f64,
//! since at position 2^31 its rounding alone would be 2.4e-7.

use crate::buffer::{Access, Buffer};
use crate::executors::{RopeLaunch, Rotations};
use crate::number::{decode, encode};
use crate::random::Random;
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{RopeParameters, RowsView};
use kernels_gpu::abi::tile::ROPE_HEADS;
use oxattn::config::DType;
use oxattn::rope::{RopeAngles, RopeConfig, RopeScaling};
use std::f64::consts::PI;

/// Where tokens stand.
#[derive(Clone, Debug)]
pub enum Where {
    /// A position each.
    Ids(Vec<i32>),
    /// By the tokens and the offset of each request, with tokens of no request after them.
    Offsets {
        /// Tokens of each request.
        lens: Vec<u32>,
        /// Position of each request's first token.
        offsets: Vec<i32>,
        /// Tokens after the last request's.
        padding_tokens: usize,
    },
}

impl Where {
    /// The position of every token; `None` for one that is to be skipped.
    pub(crate) fn positions(&self) -> Vec<Option<u64>> {
        match self {
            Where::Ids(ids) => ids.iter().map(|&id| u64::try_from(id).ok()).collect(),
            Where::Offsets { lens, offsets, padding_tokens } => {
                let of_request = |(&len, &offset): (&u32, &i32)| {
                    (0..len as i64).map(move |index| u64::try_from(offset as i64 + index).ok())
                };
                let tokens = lens.iter().zip(offsets).flat_map(of_request);
                tokens.chain(std::iter::repeat_n(None, *padding_tokens)).collect()
            }
        }
    }
}

/// One of queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Heads; 0 where there is no tensor.
    pub heads: usize,
    /// Whether it is rotated in place.
    pub in_place: bool,
}

/// One rotation.
#[derive(Clone, Debug)]
pub struct RopeCase {
    /// Says what it is about.
    pub name: String,
    /// What is rotated by what. The address of a table is not used.
    pub config: RopeConfig,
    /// Of the rows.
    pub dtype: DType,
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Where tokens stand.
    pub positions: Where,
    /// Elements between a row and the next.
    pub row_padding: usize,
    /// Elements between a token's last row and the next token's.
    pub token_padding: usize,
}

/// Positions of field case F7, and the last ones there are.
const FAR: [i32; 12] =
    [0, 1, 255, 257, 15_962, 131_071, 262_145, 1_048_575, 1_999_999_999, 1 << 30, i32::MAX - 1, i32::MAX];

/// The table.
pub fn rope_cases() -> Vec<RopeCase> {
    let here = |heads| Tensor { heads, in_place: true };
    let elsewhere = |heads| Tensor { heads, in_place: false };
    let case = |name: &str, config: RopeConfig| RopeCase {
        name: name.into(),
        config,
        dtype: DType::Bf16,
        q: here(5),
        k: here(2),
        positions: Where::Ids(vec![3, 0, 77, -1, 4096, 12, i32::MIN]),
        row_padding: 0,
        token_padding: 0,
    };
    let offsets = |lens: &[u32], offsets: &[i32], padding_tokens| Where::Offsets {
        lens: lens.to_vec(),
        offsets: offsets.to_vec(),
        padding_tokens,
    };
    let plain = RopeConfig::new(128);
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, old_context_tokens: 8192 };
    let cached = |config: RopeConfig| config.with_cos_sin_cache(0, 78);
    let mut cases = Vec::new();
    for (what, config) in [
        ("theta 1e4", plain),
        ("theta 5e5, interleaved", plain.with_theta(5e5).interleaved()),
        ("Llama 3.1", plain.with_theta(5e5).with_scaling(llama3)),
        ("positions divided by 4", plain.with_scaling(RopeScaling::Linear { factor: 4.0 })),
        ("theta 1e6, 48 of 80", RopeConfig::new(80).with_rotary_dim(48).with_theta(1e6)),
    ] {
        let name = format!("F7: far positions, {what}");
        cases.push(RopeCase { positions: Where::Ids(FAR.to_vec()), dtype: DType::F32, ..case(&name, config) });
    }
    for dtype in [DType::Bf16, DType::F16, DType::F32] {
        for (head_dim, rotary_dim) in [(64, 64), (64, 16), (72, 64), (80, 32), (128, 128), (256, 64), (512, 512)] {
            for interleaved in [false, true] {
                let config = RopeConfig::new(head_dim).with_rotary_dim(rotary_dim);
                let config = if interleaved { config.interleaved() } else { config };
                let name = format!("{rotary_dim} of {head_dim}, {dtype}, interleaved {interleaved}");
                let here_and_there = RopeCase { dtype, ..case(&name, config) };
                cases.extend([
                    RopeCase { name: format!("{name}, in place"), ..here_and_there.clone() },
                    RopeCase {
                        name: format!("{name}, elsewhere with gaps"),
                        q: elsewhere(5),
                        k: elsewhere(2),
                        row_padding: 8,
                        token_padding: 24,
                        ..here_and_there.clone()
                    },
                    RopeCase { name: format!("{name}, keys elsewhere"), k: elsewhere(3), ..here_and_there.clone() },
                    RopeCase { name: format!("{name}, from a table"), config: cached(config), ..here_and_there },
                ]);
            }
        }
    }
    cases.extend([
        RopeCase { k: here(0), ..case("queries alone", plain) },
        RopeCase { q: here(0), k: elsewhere(1), ..case("keys alone, elsewhere", plain.with_rotary_dim(64)) },
        RopeCase { q: here(32), k: here(8), ..case("32 and 8 heads", plain) },
        RopeCase { q: here(71), k: here(1), row_padding: 8, ..case("71 heads and one", plain) },
        RopeCase { positions: Where::Ids(vec![]), ..case("no tokens", plain) },
        RopeCase { positions: offsets(&[], &[], 3), ..case("no requests, three tokens", plain) },
        RopeCase { positions: offsets(&[0, 0], &[5, 6], 1), ..case("requests without tokens", plain) },
        RopeCase { positions: offsets(&[3, 0, 1, 0, 6], &[9, 1, 1000, 2, -2], 2), ..case("by offsets", plain) },
        RopeCase {
            positions: offsets(&[1; 37], &(0..37).map(|request| request * 997).collect::<Vec<_>>(), 0),
            q: elsewhere(4),
            ..case("a decode batch by offsets", RopeConfig::new(64))
        },
        RopeCase {
            positions: offsets(&[2, 4], &[i32::MAX - 1, i32::MAX], 0),
            dtype: DType::F32,
            ..case("past the last i32", plain)
        },
        RopeCase {
            positions: offsets(&[5, 2], &[75, 100], 1),
            k: elsewhere(2),
            ..case("over the table's end by offsets", cached(plain))
        },
        RopeCase { dtype: DType::F16, ..case("Llama 3.1", plain.with_theta(5e5).with_scaling(llama3)) },
    ]);
    cases
}

/// The definition's frequency of a pair, in radians a position.
pub(crate) fn frequency(config: &RopeConfig, pair: usize) -> f64 {
    let RopeAngles::Computed { theta, scaling } = config.angles else { return 0.0 };
    let frequency = theta.powf(-((2 * pair) as f64) / config.rotary_dim as f64);
    match scaling {
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, old_context_tokens } => {
            let (context, wavelength) = (old_context_tokens as f64, 2.0 * PI / frequency);
            if wavelength < context / high_freq_factor {
                frequency
            } else if wavelength > context / low_freq_factor {
                frequency / factor
            } else {
                let smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
        _ => frequency,
    }
}

/// Cosine and sine of a pair at a position.
fn cos_sin(config: &RopeConfig, table: &[f32], position: u64, pair: usize) -> (f64, f64) {
    if let RopeAngles::Cached { .. } = config.angles {
        let (row, half) = (position as usize * config.rotary_dim as usize, config.rotary_dim as usize / 2);
        return (table[row + pair] as f64, table[row + half + pair] as f64);
    }
    let (position, frequency) = (position as f64, frequency(config, pair));
    let angle = position * frequency;
    let rest = position.mul_add(frequency, -angle);
    let (sine, cosine) = angle.sin_cos();
    (cosine - rest * sine, sine + rest * cosine)
}

/// A row rotated, and how far off each element may be but for its own rounding.
pub(crate) fn rotated(config: &RopeConfig, table: &[f32], position: u64, row: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut slack) = (row.to_vec(), vec![0.0; row.len()]);
    let half = config.rotary_dim as usize / 2;
    for pair in 0..half {
        let (a, b) = if config.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
        let (cosine, sine) = cos_sin(config, table, position, pair);
        out[a] = row[a] * cosine - row[b] * sine;
        out[b] = row[a] * sine + row[b] * cosine;
        // Cosines and sines are good to 1e-6.
        (slack[a], slack[b]) = (1e-6 * (row[a].abs() + row[b].abs()), 1e-6 * (row[a].abs() + row[b].abs()));
    }
    (out, slack)
}

/// Half of the distance between neighbours near `value`, a little more where it is subnormal in f16.
pub(crate) fn rounding(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::Bf16 => value.abs() / 256.0,
        DType::F16 => value.abs() / 2048.0 + 2f64.powi(-25),
        _ => value.abs() / 16_777_216.0,
    }
}

/// The memory of one of queries and keys: as it is, and where its rows go.
struct Memory {
    heads: usize,
    in_place: bool,
    row_elements: usize,
    token_elements: usize,
    /// What is read.
    input: Buffer,
    /// What is written, unless it is the input.
    output: Buffer,
    before: Vec<u8>,
}

impl Memory {
    fn new(case: &RopeCase, tensor: Tensor, tokens: usize, random: &mut Random) -> Memory {
        let row_elements = case.config.head_dim as usize + case.row_padding;
        let token_elements = tensor.heads * row_elements + case.token_padding;
        let values: Vec<f32> = (0..tokens * token_elements).map(|_| random.normal()).collect();
        let input = Buffer::of(&encode(case.dtype, &values));
        let before = input.as_slice::<u8>().to_vec();
        let output = Buffer::filled(before.len(), 0xcc);
        Memory { heads: tensor.heads, in_place: tensor.in_place, row_elements, token_elements, input, output, before }
    }

    fn views(&mut self, dtype: DType) -> (RowsView, RowsView) {
        let bytes = dtype.bytes();
        let view = |address| RowsView {
            address: if self.heads == 0 { 0 } else { address },
            token_stride_bytes: (self.token_elements * bytes) as i64,
            head_stride_bytes: (self.row_elements * bytes) as i64,
        };
        let (input, output) = (self.input.address(), self.output.address());
        (view(input), view(if self.in_place { input } else { output }))
    }

    /// Holds what was written against the oracle's rows, and everything else against what was there.
    fn check(&self, case: &RopeCase, table: &[f32], positions: &[Option<u64>]) -> Result<(), String> {
        let head_dim = case.config.head_dim as usize;
        let input = decode(case.dtype, &self.before);
        let untouched = if self.in_place { self.before.clone() } else { vec![0xcc; self.before.len()] };
        if !self.in_place && self.input.as_slice::<u8>() != self.before {
            return Err("the input was written".into());
        }
        let bytes = if self.in_place { self.input.as_slice::<u8>() } else { self.output.as_slice::<u8>() };
        let (got, untouched) = (decode(case.dtype, bytes), decode(case.dtype, &untouched));
        let cached = match case.config.angles {
            RopeAngles::Cached { positions, .. } => positions as u64,
            _ => u64::MAX,
        };
        for (token, position) in positions.iter().enumerate() {
            let begin = token * self.token_elements;
            let mut expected = untouched[begin..][..self.token_elements].to_vec();
            let mut slack = vec![0.0; self.token_elements];
            for row in (0..self.heads).map(|head| head * self.row_elements) {
                if let Some(position) = position.filter(|&position| position < cached) {
                    let of_row = rotated(&case.config, table, position, &input[begin + row..][..head_dim]);
                    expected[row..][..head_dim].copy_from_slice(&of_row.0);
                    slack[row..][..case.config.rotary_dim as usize]
                        .iter_mut()
                        .zip(of_row.0.iter().zip(of_row.1))
                        .for_each(|(slack, (&value, error))| *slack = rounding(case.dtype, value) + 1.01 * error);
                }
            }
            for (element, (expected, slack)) in expected.into_iter().zip(slack).enumerate() {
                let found = got[begin + element];
                let same = found == expected || found.is_nan() && expected.is_nan();
                if !same && (found.is_nan() || (found - expected).abs() > slack) {
                    let (row, column) = (element / self.row_elements, element % self.row_elements);
                    return Err(format!(
                        "token {token} at {position:?}, head {row}, element {column}: {found:e}, not {expected:e}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Runs `case` and compares all that was or could have been written.
pub fn check(case: &RopeCase, executor: &dyn Rotations) -> Result<(), String> {
    let mut random = Random::new(11);
    let positions = case.positions.positions();
    let mut q = Memory::new(case, case.q, positions.len(), &mut random);
    let mut k = Memory::new(case, case.k, positions.len(), &mut random);
    let table = launch(case, &mut q, &mut k, positions.len(), executor);
    q.check(case, &table, &positions).map_err(|difference| format!("q: {difference}"))?;
    k.check(case, &table, &positions).map_err(|difference| format!("k: {difference}"))
}

/// Launches and returns the table of cosines and sines, which is of random numbers.
fn launch(case: &RopeCase, q: &mut Memory, k: &mut Memory, tokens: usize, executor: &dyn Rotations) -> Vec<f32> {
    let RopeConfig { head_dim, rotary_dim, interleaved, angles, .. } = case.config;
    let cached_positions = match angles {
        RopeAngles::Cached { positions, .. } => positions,
        _ => 0,
    };
    let mut random = Random::new(12);
    let table: Vec<f32> = (0..cached_positions * rotary_dim).map(|_| random.normal()).collect();
    let mut cos_sin = Buffer::of(&table);
    let mut turns = Buffer::of(&case.config.turns());
    let (ids, lens, offsets) = match &case.positions {
        Where::Ids(ids) => (ids.clone(), vec![], vec![]),
        Where::Offsets { lens, offsets, .. } => (vec![], lens.clone(), offsets.clone()),
    };
    let begins: Vec<u32> = (0..=lens.len()).map(|request| lens[..request].iter().sum()).collect();
    let (mut ids, mut begins, mut offsets) = (Buffer::of(&ids), Buffer::of(&begins), Buffer::of(&offsets));
    let by_ids = matches!(case.positions, Where::Ids(_));
    let given = |present: bool, buffer: &mut Buffer| if present { buffer.address() } else { 0 };
    let copies = [(q.heads, q.in_place), (k.heads, k.in_place)].iter().any(|&(heads, in_place)| heads > 0 && !in_place);
    let units = if copies { head_dim.div_ceil(16) } else { rotary_dim / 16 };
    let heads = (q.heads + k.heads) as u32;
    let ((q_view, q_out), (k_view, k_out)) = (q.views(case.dtype), k.views(case.dtype));
    let parameters = RopeParameters {
        q: q_view,
        k: k_view,
        q_out,
        k_out,
        positions: given(by_ids, &mut ids),
        query_begin: given(!by_ids, &mut begins),
        offsets: given(!by_ids, &mut offsets),
        turns: given(cached_positions == 0, &mut turns),
        cos_sin: given(cached_positions != 0, &mut cos_sin),
        cached_positions,
        request_count: lens.len() as u32,
        tokens: tokens as u32,
        query_heads: q.heads as u32,
        heads,
        head_dim,
        rotary_dim,
        interleaved: interleaved as u32,
        units: Divisor::new(units).unwrap(),
        token_units: Divisor::new(units * heads.div_ceil(ROPE_HEADS)).unwrap(),
    };
    let config = match angles {
        RopeAngles::Cached { positions, .. } => case.config.with_cos_sin_cache(cos_sin.address(), positions),
        _ => case.config,
    };
    let inputs = [&mut cos_sin, &mut turns, &mut ids, &mut begins, &mut offsets];
    let mut regions = inputs.map(|buffer| buffer.region(Access::Read)).to_vec();
    for memory in [q, k] {
        let access = if memory.in_place { Access::Update } else { Access::Read };
        regions.extend([memory.input.region(access), memory.output.region(Access::Produce)]);
    }
    executor.rope(&RopeLaunch { config, parameters, dtype: case.dtype, regions });
    table
}

/// F11: with theta 1 every pair turns by a radian a position; elements 1 to 16 at position 1, in both pairings.
pub fn check_by_hand(executor: &dyn Rotations) {
    const COSINE: f64 = 0.540_302_305_868_139_8;
    const SINE: f64 = 0.841_470_984_807_896_5;
    let pairs: [(bool, [usize; 2]); 2] = [(false, [0, 8]), (true, [0, 1])];
    for (interleaved, [first, second]) in pairs {
        let config = RopeConfig::new(16).with_theta(1.0);
        let case = RopeCase {
            name: String::new(),
            config: if interleaved { config.interleaved() } else { config },
            dtype: DType::F32,
            q: Tensor { heads: 1, in_place: true },
            k: Tensor { heads: 0, in_place: true },
            positions: Where::Ids(vec![1]),
            row_padding: 0,
            token_padding: 0,
        };
        let mut random = Random::new(0);
        let mut q = Memory::new(&case, case.q, 1, &mut random);
        let mut k = Memory::new(&case, case.k, 1, &mut random);
        let row: Vec<f32> = (1..=16).map(|element| element as f32).collect();
        q.input.as_mut_slice::<f32>().copy_from_slice(&row);
        launch(&case, &mut q, &mut k, 1, executor);
        let got = q.input.as_slice::<f32>();
        let (a, b) = (row[first] as f64, row[second] as f64);
        for (found, wanted) in [(got[first], a * COSINE - b * SINE), (got[second], b * COSINE + a * SINE)] {
            assert!((found as f64 - wanted).abs() < 1e-5, "interleaved {interleaved}: {found}, not {wanted}");
        }
    }
}
