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
    /// The largest logit so far, or less by up to the slack; the same in the four lanes of a row. [`f32::MIN`], from which
    /// -inf can be subtracted without a NaN, where all were -inf.
    pub maximum: [f32; 2],
    /// This lane's part of the sum of weights.
    pub sum: [f32; 2],
    /// What accumulators are multiplied by beside the sum's inverse, once a row is finished: 1, unless it started above
    /// its logits.
    pub shrink: [f32; 2],
    /// How far above the maxima logits may be that do not raise them: see [`raise_tile`](Self::raise_tile).
    slack: f32,
}

/// The most that a row's logits may be above its maximum without raising it: weights are then up to 2^8, and sums of them in
/// every range.
const MOST_SLACK: f32 = 8.0;
/// How far above a whole number a logit relative to the maximum has to be, at least, to be above the slack.
const JUST_ABOVE: f32 = 0.1875;

/// Whether a row's largest logit, `above` its maximum by so much, has to raise it.
#[inline(always)]
fn must_raise(above: f32, slack: f32, keys_before: Option<u32>) -> bool {
    if keys_before.is_none() {
        return above > 0.0;
    }
    // Adding it rounds what is below 2^22 to a whole number.
    const ROUNDS: f32 = 12_582_912.0;
    let centred = above - 0.5 * JUST_ABOVE;
    let off = centred - ((centred + ROUNDS) - ROUNDS);
    (above > slack) & ((off.abs() < 0.5 * JUST_ABOVE) | (above > MOST_SLACK))
}

/// What a tile's logits did to two rows.
#[derive(Clone, Copy)]
pub struct Raised {
    /// The factor for what came before.
    pub shrink: [f32; 2],
    /// Whether a factor of the warp's rows may be other than one; the same in all lanes.
    pub any: bool,
}

impl OnlineSoftmax {
    /// No key seen yet.
    #[inline(always)]
    pub fn new() -> Self {
        OnlineSoftmax { maximum: [f32::MIN; 2], sum: [0.0; 2], shrink: [1.0; 2], slack: 0.0 }
    }

    /// What a finished row's output is multiplied by: 0 for a row that has seen no key.
    #[inline(always)]
    pub fn inverse(&self, half: usize) -> f32 {
        if self.sum[half] > 0.0 { math::reciprocal(self.sum[half]) * self.shrink[half] } else { 0.0 }
    }

    /// A finished row's LSE, base 2.
    #[inline(always)]
    pub fn lse(&self, half: usize) -> f32 {
        self.maximum[half] + math::log2(self.sum[half])
    }

    /// Takes four logits of row `half` (0 or 1) and returns their weights and the factor for what came before.
    ///
    /// # Safety
    /// All 32 lanes of the warp reach this call together.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn update(&mut self, half: usize, logits: [f32; 4]) -> ([f32; 4], f32) {
        let [a, b, c, d] = logits;
        let largest = math::maximum(math::maximum(a, b), math::maximum(c, d));
        // SAFETY: the caller's contract is this function's own.
        let shrink = unsafe { self.raise(half, largest, 1.0) };
        let maximum = self.maximum[half];
        let weights =
            [math::exp2(a - maximum), math::exp2(b - maximum), math::exp2(c - maximum), math::exp2(d - maximum)];
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
            shrink[half] = unsafe { self.raise(half, largest, factor) };
            self.weigh_row(half, shrink, logits, factor);
        });
        shrink
    }

    /// The first half of [`update_tile`](Self::update_tile), for tiles of which few raise a maximum of the warp's 16 rows:
    /// nothing is passed between lanes then. The second is [`weigh_row`](Self::weigh_row).
    ///
    /// Where `keys_before` is given, at least as many as the rows have seen, a maximum may stay below the largest logit. The
    /// largest weight is then no power of two, and rounding it to bf16 is off by up to 2^-8, which alone is nearly all that
    /// an output may be off. So a maximum stays where it is in two cases alone:
    ///
    /// - The row has seen too much for the weight to matter so. For `n` keys whose weights' sum is `s` the squares' sum is
    ///   `s^2 / n` at least; a weight up to `s (2 / n)^0.5` has at most 0.82 of the output's norm, wherever values point.
    /// - The weight is at least 2^0.1875 times a power of two, as those just above one round worst, and at most
    ///   2^8: then it is off by 0.88 of 2^-8.
    ///
    /// # Safety
    /// All 32 lanes of the warp reach this call together.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn raise_tile<const N: usize>(
        &mut self,
        logits: &[[f32; 4]; N],
        factor: f32,
        keys_before: Option<u32>,
    ) -> Raised {
        // As integers, because Hopper takes the largest of three of those at once. Of numbers not all negative the largest
        // integer is the largest number; of negative ones it is one of them. Two chains a row, as one waits for itself.
        let mut chains = [[i32::MIN; 2]; 2];
        unroll::<N>(|n| {
            unroll::<2>(|half| {
                let [a, b] = [2 * half, 2 * half + 1].map(|i| logits[n][i].to_bits() as i32);
                chains[half][n % 2] = chains[half][n % 2].max(a).max(b);
            });
        });
        let largest = chains.map(|[even, odd]| even.max(odd));
        let of_integer = |half: usize| f32::from_bits(largest[half] as u32);
        let mut raised = Raised { shrink: [1.0; 2], any: false };
        let slack = if keys_before.is_some() { self.slack } else { 0.0 };
        // Without branches, which would part the rows' chains.
        let may_raise = |half: usize| {
            let maximum = self.maximum[half];
            let above = math::multiply_add(of_integer(half), factor, -maximum);
            must_raise(above, slack, keys_before) | (largest[half] < 0) & (maximum + slack < 0.0)
        };
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            if warp::vote_ballot(may_raise(0) | may_raise(1)) != 0 {
                warp::sync_warp();
                let mut row = [of_integer(0), of_integer(1)];
                if warp::vote_ballot((largest[0] < 0) | (largest[1] < 0)) != 0 {
                    warp::sync_warp();
                    unroll::<2>(|half| {
                        let pair = |n: usize| math::maximum(logits[n][2 * half], logits[n][2 * half + 1]);
                        row[half] = pair(0);
                        unroll::<N>(|n| row[half] = math::maximum(row[half], pair(n)));
                    });
                }
                unroll::<2>(|half| row[half] = math::maximum(row[half], warp::shuffle_xor_f32(row[half], 1)));
                unroll::<2>(|half| row[half] = math::maximum(row[half], warp::shuffle_xor_f32(row[half], 2)));
                let mut slack = 0.0;
                if let Some(keys) = keys_before {
                    // One for both rows, as there are no registers for two.
                    let mut sum = self.sum;
                    unroll::<2>(|half| sum[half] += warp::shuffle_xor_f32(sum[half], 1));
                    unroll::<2>(|half| sum[half] += warp::shuffle_xor_f32(sum[half], 2));
                    let least = math::log2(sum[0].min(sum[1])) - 0.5 * math::log2(keys.max(1) as f32);
                    slack = math::maximum((least + 0.5).min(MOST_SLACK), 0.0);
                }
                let above = |half: usize| math::multiply_add(row[half], factor, -self.maximum[half]);
                let raises = [0, 1].map(|half| must_raise(above(half), slack, keys_before));
                self.slack = if raises[0] | raises[1] { 0.0 } else { slack };
                raised.any = warp::vote_ballot(raises[0] | raises[1]) != 0;
                unroll::<2>(|half| {
                    let before = self.maximum[half];
                    if raises[half] {
                        self.maximum[half] = row[half] * factor;
                        raised.shrink[half] = math::exp2(before - self.maximum[half]);
                    }
                });
            }
        }
        raised
    }

    /// Makes weights of the logits of row `half`, and adds them up; `shrink` are the factors for what came before.
    #[inline(always)]
    pub fn weigh_row<const N: usize>(
        &mut self,
        half: usize,
        shrink: [f32; 2],
        logits: &mut [[f32; 4]; N],
        factor: f32,
    ) {
        let mut sum = 0.0;
        unroll::<N>(|n| {
            unroll::<2>(|i| {
                let weight = math::exp2(math::multiply_add(logits[n][2 * half + i], factor, -self.maximum[half]));
                logits[n][2 * half + i] = weight;
                sum += weight;
            });
        });
        self.sum[half] = math::multiply_add(self.sum[half], shrink[half], sum);
    }

    /// Takes `factor` times the largest of a lane's numbers into a row's maximum; returns the factor for what came before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn raise(&mut self, half: usize, mut largest: f32, factor: f32) -> f32 {
        // SAFETY: the caller has the warp's lanes together.
        unsafe {
            largest = math::maximum(largest, warp::shuffle_xor_f32(largest, 1));
            largest = math::maximum(largest, warp::shuffle_xor_f32(largest, 2));
        }
        let before = self.maximum[half];
        self.maximum[half] = math::maximum(before, largest * factor);
        math::exp2(before - self.maximum[half])
    }

    /// Adds the four lanes' parts of each row's sum, and what the two rows start with: a logit and a sum of weights
    /// relative to it, both without values. They are first in meaning alone. A maximum that were such a logit from the
    /// start would leave a row's largest weight no power of two, and where the row sees but one key, rounding that weight
    /// to bf16 is off by up to 2^-8, nearly all that an output may be off.
    ///
    /// Where weights are not normalised, outputs are sums and the starts' logits are 0. Their sums say how much states
    /// weigh that are folded: pieces of a row whose starts add up to 1 fold into the sum of all.
    ///
    /// # Safety
    /// All 32 lanes of the warp reach this call together.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn finish(&mut self, starts: [[f32; 2]; 2], is_normalised: bool) {
        unroll::<2>(|half| {
            // SAFETY: the caller's contract is this function's own.
            unsafe {
                self.sum[half] += warp::shuffle_xor_f32(self.sum[half], 1);
                self.sum[half] += warp::shuffle_xor_f32(self.sum[half], 2);
            }
            let ([start, start_sum], before) = (starts[half], self.maximum[half]);
            // Without branches, behind which the compiler would store to a place that it chooses, in memory then.
            let is_above = start > before || !is_normalised;
            let smaller = math::exp2(if is_above { before - start } else { start - before });
            let weight = if is_above { 1.0 } else { smaller };
            let shrink = if is_above { smaller } else { 1.0 };
            let keys_sum = if is_normalised { self.sum[half] } else { 0.0 };
            let share = if start == f32::NEG_INFINITY { 0.0 } else { start_sum * weight };
            self.sum[half] = math::multiply_add(keys_sum, shrink, share);
            self.maximum[half] = if is_above { start } else { before };
            self.shrink[half] = shrink;
        });
    }
}

impl Default for OnlineSoftmax {
    fn default() -> Self {
        Self::new()
    }
}
