//! Elements of a dtype to and from f32, through `half`.

use half::{bf16, f16};
use oxattn::config::DType;

/// The bits of `value` in a 16-bit `dtype`, rounded to nearest.
pub fn bits(dtype: DType, value: f32) -> u16 {
    match dtype {
        DType::Bf16 => bf16::from_f32(value).to_bits(),
        DType::F16 => f16::from_f32(value).to_bits(),
        other => panic!("{other} is not a 16-bit dtype"),
    }
}

/// The number that `bits` of a 16-bit `dtype` are.
pub fn value(dtype: DType, bits: u16) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_bits(bits).to_f32(),
        DType::F16 => f16::from_bits(bits).to_f32(),
        other => panic!("{other} is not a 16-bit dtype"),
    }
}

/// The relative error, in the 2-norm of a row, that rounding to `dtype` explains.
pub fn row_tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 4e-3,
        DType::F16 => 1e-3,
        _ => 1e-5,
    }
}

/// Whether an LSE is that of `expected`: exactly where it is infinite, else within 2e-4, or what f32 resolves of a
/// large one.
pub fn lse_agrees(got: f64, expected: f64) -> bool {
    if expected.is_infinite() { got == expected } else { (got - expected).abs() <= 2e-4 + 1e-6 * expected.abs() }
}

/// Whether an LSE is that of `expected` where queries and keys were rounded to `dtype` on the way. What two computations
/// round differs where they end near the middle between two numbers, about once in 10^4 elements; then a logit is off by
/// half of what a row's tolerance is.
pub fn lse_agrees_rounded(dtype: DType, got: f64, expected: f64) -> bool {
    (got - expected).abs() <= row_tolerance(dtype) / 2.0
}

/// Relative 2-norm error of a row; a row that should be 0 must be.
pub fn row_error(got: &[f64], expected: &[f64]) -> f64 {
    let difference: f64 = got.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    let size: f64 = expected.iter().map(|b| b * b).sum();
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

/// `values` in `dtype`, rounded to nearest.
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => bytemuck::cast_slice(values).to_vec(),
        _ => values.iter().flat_map(|&value| bits(dtype, value).to_ne_bytes()).collect(),
    }
}

/// The numbers in `bytes`.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    bytes
        .chunks_exact(dtype.bytes())
        .map(|element| match dtype {
            DType::F32 => bytemuck::pod_read_unaligned::<f32>(element) as f64,
            _ => value(dtype, bytemuck::pod_read_unaligned(element)) as f64,
        })
        .collect()
}
