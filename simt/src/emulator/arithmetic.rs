//! The face's arithmetic on a host: 16-bit conversions, and the fast functions with their flush to zero.

/// The NaN every PTX conversion to a 16-bit format gives.
const NAN_16: u32 = 0x7fff;

/// Subnormals become zero of the same sign, as `.ftz` has it.
#[inline]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

#[inline]
pub fn exp2(x: f32) -> f32 {
    flush(flush(x).exp2())
}

#[inline]
pub fn log2(x: f32) -> f32 {
    flush(x).log2()
}

#[inline]
pub fn reciprocal(x: f32) -> f32 {
    flush(flush(x).recip())
}

/// Round to nearest even by adding just under half of the last place kept.
#[inline]
pub fn bf16_from_f32(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() { NAN_16 } else { (bits + 0x7fff + (bits >> 16 & 1)) >> 16 }
}

#[inline]
pub fn f16_from_f32(x: f32) -> u32 {
    if x.is_nan() {
        return NAN_16;
    }
    let sign = x.to_bits() >> 16 & 0x8000;
    let magnitude = x.abs();
    // Half of the step above the largest finite value, 65504: from there on the result is infinite.
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    if magnitude < 2f32.powi(-14) {
        // Subnormal: a multiple of 2^-24. Added to 0.5, whose last place is 2^-24, the sum rounds to nearest even.
        return sign | ((magnitude + 0.5).to_bits() - 0.5f32.to_bits());
    }
    let bits = magnitude.to_bits() - ((127 - 15) << 23);
    sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13
}

/// Exponent and mantissa move into place; the product puts the bias right, for subnormals too.
#[inline]
pub fn f32_from_f16(half: u32) -> f32 {
    let magnitude = f32::from_bits((half & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let infinite_or_nan = if magnitude >= 65536.0 { 0xff << 23 } else { 0 };
    f32::from_bits(magnitude.to_bits() | infinite_or_nan | (half & 0x8000) << 16)
}

#[inline]
pub fn f32_from_bf16(half: u32) -> f32 {
    f32::from_bits(half << 16)
}
