//! Fast f32 arithmetic. Approximate functions are the hardware's (`ex2.approx.ftz` and kin); the emulator
//! computes them to f32 rounding.
use crate::body;

/// `2^x`; `2^-inf` is 0.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    body::exp2(x)
}

/// Base-2 logarithm; `log2(0)` is -inf.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    body::log2(x)
}

/// `1 / x`.
#[inline(always)]
pub fn reciprocal(x: f32) -> f32 {
    body::reciprocal(x)
}

/// `a * b + c`, rounded once.
#[inline(always)]
pub fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    body::multiply_add(a, b, c)
}

/// The larger of the two; a NaN loses.
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    body::maximum(a, b)
}

/// The upper 32 bits of the 64-bit product.
#[inline(always)]
pub fn multiply_high(a: u32, b: u32) -> u32 {
    ((a as u64 * b as u64) >> 32) as u32
}
