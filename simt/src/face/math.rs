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

/// Hyperbolic tangent, to 4e-7 of its value: the hardware's `tanh.approx` is off by up to 5e-4.
///
/// Near zero an odd polynomial, fitted to tanh(x) / x for |x| up to 1/2 and within 2e-8 of it; beyond, `1 - 2 / (1 +
/// e^2x)`, whose last bits would be lost near zero.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let square = x * x;
    let mut series = multiply_add(square, 0.017_235_477, -0.053_042_205);
    series = multiply_add(square, series, 0.133_258_22);
    series = multiply_add(square, series, -0.333_331_4);
    if square < 0.25 { multiply_add(x * square, series, x) } else { tanh_far_from_zero(x) }
}

/// [`tanh`], to 2e-7 and not to a part of its value.
#[inline(always)]
pub fn tanh_far_from_zero(x: f32) -> f32 {
    multiply_add(-2.0, reciprocal(1.0 + exp2(x * (2.0 * core::f32::consts::LOG2_E))), 1.0)
}

/// Cosine and sine of `turn / 2^32` turns, to 2e-7. The hardware's `sin.approx` takes radians, and is
/// worse with every turn.
///
/// The nearest quarter turn comes off in whole numbers, exactly. What remains, at most pi / 4 either way, goes through
/// Taylor's series, whose first terms left out are 2e-9 (sine) and 3e-8 (cosine).
#[inline(always)]
pub fn cos_sin_of_turn(turn: u32) -> (f32, f32) {
    const RADIANS: f32 = (core::f64::consts::TAU / (1u64 << 32) as f64) as f32;
    let quarters = turn.wrapping_add(1 << 29) >> 30;
    let x = turn.wrapping_sub(quarters << 30) as i32 as f32 * RADIANS;
    let square = x * x;
    let mut series = multiply_add(square, 1.0 / 362_880.0, -1.0 / 5040.0);
    series = multiply_add(square, series, 1.0 / 120.0);
    series = multiply_add(square, series, -1.0 / 6.0);
    let sine = multiply_add(x * square, series, x);
    let mut series = multiply_add(square, 1.0 / 40_320.0, -1.0 / 720.0);
    series = multiply_add(square, series, 1.0 / 24.0);
    series = multiply_add(square, series, -0.5);
    let cosine = multiply_add(square, series, 1.0);
    let (cosine, sine) = if quarters & 1 == 0 { (cosine, sine) } else { (-sine, cosine) };
    if quarters & 2 == 0 { (cosine, sine) } else { (-cosine, -sine) }
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
