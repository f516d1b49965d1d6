//! Online softmax of two rows a lane: the algebra of running maximum and sum.
//!
//! In: logits in base-2 units, a tile at a time. Out: weights `2^(logit - maximum)` and the factor by which
//! everything accumulated so far shrinks. Invariant: after any number of tiles the accumulator holds
//! `sum(2^(logit - maximum) * value)`, and `sum` this lane's share of `sum(2^(logit - maximum))`. Milakov and
//! Gimelshein, "Online normalizer calculation for softmax" (2018).
use simt::{math, warp};

use crate::tile::unroll;

/// Running maximum and this lane's part of the running sum, for rows `lane / 4` and `lane / 4 + 8`.
#[derive(Clone, Copy)]
pub struct OnlineSoftmax {
    /// Largest logit so far; the same in the four lanes of a row.
    pub maximum: [f32; 2],
    /// This lane's part of the sum of weights.
    pub sum: [f32; 2],
}

impl OnlineSoftmax {
    /// No key seen yet.
    #[inline(always)]
    pub fn new() -> Self {
        OnlineSoftmax { maximum: [f32::NEG_INFINITY; 2], sum: [0.0; 2] }
    }

    /// What a finished row's output is multiplied by: 0 for a row that has seen no key.
    #[inline(always)]
    pub fn inverse(&self, half: usize) -> f32 {
        if self.sum[half] > 0.0 { math::reciprocal(self.sum[half]) } else { 0.0 }
    }

    /// A finished row's LSE, base 2.
    #[inline(always)]
    pub fn lse(&self, half: usize) -> f32 {
        self.maximum[half] + math::log2(self.sum[half])
    }

    /// Takes four logits of row `half` (0 or 1) and returns their weights and the factor for what came before.
    /// Rows that have seen only -inf keep weight 0: their maximum is replaced by 0 in the exponent, since -inf
    /// minus -inf is NaN.
    ///
    /// # Safety
    /// All 32 lanes of the warp reach this call together.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn update(&mut self, half: usize, logits: [f32; 4]) -> ([f32; 4], f32) {
        let [a, b, c, d] = logits;
        let largest = math::maximum(math::maximum(a, b), math::maximum(c, d));
        // SAFETY: the caller's contract is this function's own.
        let (origin, shrink) = unsafe { self.raise(half, largest, 1.0) };
        let weights = [math::exp2(a - origin), math::exp2(b - origin), math::exp2(c - origin), math::exp2(d - origin)];
        let [a, b, c, d] = weights;
        self.sum[half] = math::multiply_add(self.sum[half], shrink, (a + b) + (c + d));
        (weights, shrink)
    }

    /// Turns the logits of `8 * N` keys, in the layout of `mma`'s C, into weights, and returns the factor of each of the
    /// two rows for what came before. A logit is what is given times `factor`, which is positive. As
    /// [`update`](Self::update) otherwise.
    ///
    /// # Safety
    /// All 32 lanes of the warp reach this call together.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn update_tile<const N: usize>(&mut self, logits: &mut [[f32; 4]; N], factor: f32) -> [f32; 2] {
        let mut shrink = [1.0; 2];
        unroll::<2>(|half| {
            let mut largest = f32::NEG_INFINITY;
            unroll::<N>(|n| {
                largest = math::maximum(largest, math::maximum(logits[n][2 * half], logits[n][2 * half + 1]));
            });
            // SAFETY: the caller's contract is this function's own.
            let (origin, factor_before) = unsafe { self.raise(half, largest, factor) };
            shrink[half] = factor_before;
            let mut sum = 0.0;
            unroll::<N>(|n| {
                unroll::<2>(|i| {
                    let weight = math::exp2(math::multiply_add(logits[n][2 * half + i], factor, -origin));
                    logits[n][2 * half + i] = weight;
                    sum += weight;
                });
            });
            self.sum[half] = math::multiply_add(self.sum[half], shrink[half], sum);
        });
        shrink
    }

    /// Takes `factor` times the largest of a lane's numbers into a row's maximum; returns what to subtract from logits, and
    /// the factor for what came before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn raise(&mut self, half: usize, mut largest: f32, factor: f32) -> (f32, f32) {
        // SAFETY: the caller has the warp's lanes together.
        unsafe {
            largest = math::maximum(largest, warp::shuffle_xor_f32(largest, 1));
            largest = math::maximum(largest, warp::shuffle_xor_f32(largest, 2));
        }
        let maximum = math::maximum(self.maximum[half], largest * factor);
        let origin = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
        let shrink = math::exp2(self.maximum[half] - origin);
        self.maximum[half] = maximum;
        (origin, shrink)
    }

    /// Adds the four lanes' parts of each row's sum.
    ///
    /// # Safety
    /// All 32 lanes of the warp reach this call together.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn finish(&mut self) {
        unroll::<2>(|half| {
            // SAFETY: the caller's contract is this function's own.
            unsafe {
                self.sum[half] += warp::shuffle_xor_f32(self.sum[half], 1);
                self.sum[half] += warp::shuffle_xor_f32(self.sum[half], 2);
            }
        });
    }
}

impl Default for OnlineSoftmax {
    fn default() -> Self {
        Self::new()
    }
}
