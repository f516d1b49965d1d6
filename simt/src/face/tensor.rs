//! `ldmatrix` and `mma.sync`: the tensor cores' fragments.
//!
//! The fragments of `mma.m16n8k16` (lane = 4 * row + quad, row 0..8, quad 0..4); each register holds two
//! neighbouring 16-bit values, the lower column (or row of B) in the low half:
//!
//! ```text
//!        A (16 x 16)                     B (16 x 8)                 C and D (16 x 8, f32)
//!        cols 0..8     cols 8..16        cols 0..8                  cols 0..8
//! rows  +-----------+-----------+  rows +-----------+        rows  +--------------+
//! 0..8  |  a[0]     |  a[2]     |  0..8 |  b[0]     |        0..8  |  c[0], c[1]  |
//!       +-----------+-----------+       +-----------+              +--------------+
//! 8..16 |  a[1]     |  a[3]     | 8..16 |  b[1]     |        8..16 |  c[2], c[3]  |
//!       +-----------+-----------+       +-----------+              +--------------+
//!
//! a[i]: lane holds (row, 2 quad) and (row, 2 quad + 1) of its 8 x 8 quarter
//! b[i]: lane holds (2 quad, row) and (2 quad + 1, row) of its 8 x 8 half: B is stored by column
//! c:    lane holds (row, 2 quad) and (row, 2 quad + 1), then the same eight rows further down
//! ```
//!
//! `ldmatrix.x4` reads four 8 x 8 matrices of 16-bit values: lane `l` gives the address of row `l % 8` of matrix
//! `l / 8`, and register `i` of the result is matrix `i` in the layout of a quarter of A. Transposed, it is in the
//! layout of a half of B for a matrix stored by row.
use crate::{
    body,
    number::{Bf16, F16},
    shared::Shared,
};

/// A 16-bit format the tensor cores multiply, accumulating in f32.
pub trait Element: Copy + 'static {
    /// Whether the format is bfloat16; the other one is binary16.
    const IS_BF16: bool;

    /// `c += a * b` for one 16 x 8 x 16 product of the warp.
    ///
    /// # Safety
    /// All 32 lanes of the warp reach this call together.
    unsafe fn multiply_accumulate(c: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);

    /// Two values rounded to nearest even, `low` in the low half.
    fn pack(low: f32, high: f32) -> u32;

    /// The two values of a register, low half first.
    fn unpack(pair: u32) -> (f32, f32);
}

impl Element for Bf16 {
    const IS_BF16: bool = true;

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn multiply_accumulate(c: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mma_m16n8k16_bf16(c, a, b) }
    }
    #[inline(always)]
    fn pack(low: f32, high: f32) -> u32 {
        body::pack_bf16(low, high)
    }
    #[inline(always)]
    fn unpack(pair: u32) -> (f32, f32) {
        (f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000))
    }
}

impl Element for F16 {
    const IS_BF16: bool = false;

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn multiply_accumulate(c: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mma_m16n8k16_f16(c, a, b) }
    }
    #[inline(always)]
    fn pack(low: f32, high: f32) -> u32 {
        body::pack_f16(low, high)
    }
    #[inline(always)]
    fn unpack(pair: u32) -> (f32, f32) {
        body::unpack_f16(pair)
    }
}

/// Four 8 x 8 matrices, one row address a lane.
///
/// # Safety
/// All 32 lanes reach this call together; each address is 16-byte aligned, inside shared memory, and its 16 bytes
/// are written and ordered before this read.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_matrix_x4(row: Shared<u8>) -> [u32; 4] {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::load_matrix_x4(row.address()) }
}

/// Four 8 x 8 matrices, each transposed.
///
/// # Safety
/// As [`load_matrix_x4`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_matrix_x4_transposed(row: Shared<u8>) -> [u32; 4] {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::load_matrix_x4_transposed(row.address()) }
}
