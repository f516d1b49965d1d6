//! The emulator's 16-bit conversions against the crate `half`, and its fast functions at their edges.
use half::{bf16, f16};
use simt::{
    math::{cos_sin_of_turn, exp2, log2, maximum, multiply_add, reciprocal, tanh},
    number::{Bf16, F16},
    tensor::Element,
};

/// Every sign and exponent with mantissas that lie at, just below and just above each rounding boundary of both
/// formats.
fn inputs() -> impl Iterator<Item = f32> {
    let tails =
        [0, 1, 2, 0x7fff, 0x8000, 0x8001, 0xffff, 0x17fff, 0x18000, 0x18001, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000]
            .into_iter()
            .chain((0..23).map(|bit| 1 << bit))
            .chain((0..23).map(|bit| 0x7f_ffff ^ (1 << bit)))
            .chain((0..512).map(|step| step * 0x3fff % 0x80_0000))
            .chain([0x7f_ffff, 0x40_0000, 0x40_0001, 0x3f_ffff]);
    let tails: Vec<u32> = tails.collect();
    (0..512u32).flat_map(move |head| tails.clone().into_iter().map(move |tail| f32::from_bits(head << 23 | tail)))
}

#[test]
fn pack_rounds_to_nearest_even() {
    for x in inputs() {
        let packed = [Bf16::pack(x, -x), F16::pack(x, -x)];
        let wanted = [
            bf16::from_f32(x).to_bits() as u32 | (bf16::from_f32(-x).to_bits() as u32) << 16,
            f16::from_f32(x).to_bits() as u32 | (f16::from_f32(-x).to_bits() as u32) << 16,
        ];
        // The hardware has one NaN, whatever the input's.
        let wanted = if x.is_nan() { [0x7fff_7fff; 2] } else { wanted };
        assert_eq!(packed, wanted, "{x:e} ({:#x})", x.to_bits());
    }
}

#[test]
fn unpack_is_exact() {
    for bits in 0..=u16::MAX {
        let pair = bits as u32 | 0x3c00 << 16;
        for ((low, high), wanted, one) in [
            (F16::unpack(pair), f16::from_bits(bits).to_f32(), 1.0),
            (Bf16::unpack(pair), bf16::from_bits(bits).to_f32(), bf16::from_bits(0x3c00).to_f32()),
        ] {
            assert_eq!(high, one);
            assert!(low.to_bits() == wanted.to_bits() || (low.is_nan() && wanted.is_nan()), "{bits:#x}: {low}");
        }
    }
}

#[test]
fn fast_functions() {
    assert_eq!([exp2(f32::NEG_INFINITY), exp2(0.0), exp2(-3.0), exp2(f32::INFINITY)], [0.0, 1.0, 0.125, f32::INFINITY]);
    assert_eq!([log2(0.0), log2(8.0), log2(f32::INFINITY)], [f32::NEG_INFINITY, 3.0, f32::INFINITY]);
    assert_eq!([reciprocal(4.0), reciprocal(-0.0)], [0.25, f32::NEG_INFINITY]);
    // Results and operands below the normal range are flushed to zero.
    assert_eq!([exp2(-127.0), reciprocal(f32::MAX), log2(1e-40)], [0.0, 0.0, f32::NEG_INFINITY]);
    assert!(exp2(f32::NAN).is_nan() && log2(-1.0).is_nan());
    assert_eq!([maximum(f32::NAN, 1.0), maximum(2.0, f32::NAN), maximum(-1.0, 3.0)], [1.0, 2.0, 3.0]);
    // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: only a single rounding keeps the last term.
    let x = 1.0 + 2f32.powi(-12);
    assert_eq!(multiply_add(x, x, -1.0 - 2f32.powi(-11)), 2f32.powi(-24));
}

#[test]
fn tanh_is_good_to_its_last_bits() {
    let magnitudes =
        (-149..128).flat_map(|exponent| (0..64).map(move |step| 2f32.powi(exponent) * (1.0 + step as f32 / 64.0)));
    for x in magnitudes.flat_map(|x| [x, -x]) {
        let (got, wanted) = (tanh(x) as f64, (x as f64).tanh());
        assert!((got - wanted).abs() <= 4e-7 * wanted.abs(), "tanh({x:e}) is {got:e}, not {wanted:e}");
    }
    assert_eq!([tanh(0.0), tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)], [0.0, 1.0, -1.0]);
    assert!(tanh(f32::NAN).is_nan());
}

#[test]
fn cosine_and_sine_are_good_to_2e_7_all_around() {
    let near = |turn: u32| (0..200).flat_map(move |step| [turn.wrapping_add(step), turn.wrapping_sub(step)]);
    let eighths = (0..8).flat_map(|eighth| near(eighth << 29));
    for turn in eighths.chain((0..1 << 20).map(|step| step * 4095)) {
        let (sine, cosine) = (turn as f64 / (1u64 << 32) as f64 * std::f64::consts::TAU).sin_cos();
        let got = cos_sin_of_turn(turn);
        let error = (got.0 as f64 - cosine).abs().max((got.1 as f64 - sine).abs());
        assert!(error <= 2e-7, "{turn:#x}: {got:?}, not {cosine} and {sine}");
    }
    assert_eq!([0, 1, 2, 3].map(|quarter| cos_sin_of_turn(quarter << 30)), [(1., 0.), (0., 1.), (-1., 0.), (0., -1.)]);
}
