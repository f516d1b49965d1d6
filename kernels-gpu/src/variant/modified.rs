//! Every stock change to plain attention in one variant, each switched on by its parameters.
//!
//! In: [`ModifiedParameters`], whose addresses are 0 where a change is off. With query position `p` and key `k`, the
//! logit is `softcap(score * scale / temperature) + slope * (k - p)`, in base 2, and `-inf` for keys that window or mask
//! hide. A row's softmax starts with the head's sink. With a sigmoid, weights are `sigmoid(logit + bias)`, not normalised;
//! their logarithm is what the kernel takes for a logit then. Switches are the same for all lanes of a launch, so a change
//! that is off costs a branch.
//!
//! Soft cap: Gemma 2 (2024). ALiBi: Press et al., "Train short, test long" (2021). Sinks: one logit a head that holds no
//! value, as in gpt-oss. Sigmoid: Ramapuram et al., "Theory, analysis, and best practices for sigmoid self-attention"
//! (2024).

/// [`Modified`]'s parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct ModifiedParameters {
    /// `[query_heads]` f32, natural logarithms: a logit that each row's softmax counts besides its keys'. 0 for none.
    pub sinks: u64,
    /// `[query_heads]` f32 slopes of ALiBi, or 0 for none.
    pub alibi_slopes: u64,
    /// `[requests]` f32 that divide scaled scores, or 0 for none.
    pub temperatures: u64,
    /// A bit or byte for each (query token, key) of each request, 1 where they may meet; or 0 for none.
    pub mask: u64,
    /// `[requests]` [`MaskRequest`](crate::abi::plan::MaskRequest).
    pub mask_requests: u64,
    /// Multiplies a score: the softmax scale times log2(e), or over the soft cap where there is one.
    pub scale: f32,
    /// The soft cap times log2(e): logits are `cap_log2 * tanh(score * scale)`. 0 for none.
    pub cap_log2: f32,
    /// Keys that a query sees before its own, or `i32::MAX`.
    pub window_left: i32,
    /// Keys that a query sees after its own, or `i32::MAX`.
    pub window_right: i32,
    /// log2 of the elements of a mask byte: 3, or 0 for a byte each.
    pub mask_shift: u32,
    /// 1 for weights of `sigmoid(logit + bias)` in place of a softmax.
    pub sigmoid: u32,
    /// The sigmoid's bias times log2(e).
    pub sigmoid_bias_log2: f32,
    /// Fills the struct to a multiple of 8 bytes.
    pub padding: u32,
}

const _: () = assert!(size_of::<ModifiedParameters>() == 5 * 8 + 8 * 4);

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub use device::Modified;

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
mod device {
    use core::f32::consts::LOG2_E;

    use simt::{global::Global, math, registers::anew};

    use super::ModifiedParameters;
    use crate::tile::unroll;
    use crate::variant::{Piece, RowAt, Variant, Window, key_of};

    /// Attention with any of the stock changes.
    #[derive(Clone, Copy)]
    pub struct Modified(ModifiedParameters);

    /// Caps up to which a tall item's logits are right to 5e-5 by the short way to a hyperbolic tangent.
    const MOST_SHORT_CAP_LOG2: f32 = 256.0;

    /// Columns of a tile's scores that are changed together.
    const TOGETHER: usize = 2;

    /// [`TOGETHER`] columns of eight keys, or what is left of so many, of a tile's scores.
    struct Columns(usize);

    /// The columns of a tile, some together. With a branch for each score and change, prompts with sinks took 3.4 times as
    /// long as now; and what does not branch is laid out side by side, for all of a tile in more registers than there are.
    #[inline(always)]
    fn for_each_group<const COLUMNS: usize>(mut visit: impl FnMut(Columns)) {
        unroll::<COLUMNS>(|n| {
            if n % TOGETHER == 0 {
                visit(Columns(n));
            }
        });
    }

    impl Columns {
        /// Changes each score, told which key after the tile's first it is of and which of the lane's rows.
        #[inline(always)]
        fn change<const COLUMNS: usize>(
            &self,
            scores: &mut [[f32; 4]; COLUMNS],
            change: impl Fn(f32, u32, usize) -> f32,
        ) {
            unroll::<TOGETHER>(|m| {
                let n = self.0 + m;
                if n < COLUMNS {
                    unroll::<4>(|i| scores[n][i] = change(scores[n][i], key_of(0, n, i), i / 2));
                }
            });
        }

        /// The same for pairs of neighbouring keys, told the first.
        #[inline(always)]
        fn change_pairs<const COLUMNS: usize>(
            &self,
            scores: &mut [[f32; 4]; COLUMNS],
            change: impl Fn([f32; 2], u32, usize) -> [f32; 2],
        ) {
            unroll::<TOGETHER>(|m| {
                let n = self.0 + m;
                if n < COLUMNS {
                    unroll::<2>(|half| {
                        let pair = change([scores[n][2 * half], scores[n][2 * half + 1]], key_of(0, n, 0), half);
                        [scores[n][2 * half], scores[n][2 * half + 1]] = pair;
                    });
                }
            });
        }
    }

    /// A query row.
    #[derive(Clone, Copy)]
    pub struct Row {
        query_head: u32,
        position: i32,
        scale: f32,
        slope_log2: f32,
        /// The mask's element of key 0.
        mask_element: u64,
    }

    impl Modified {
        #[inline(always)]
        fn window(&self) -> Window {
            Window { left: self.0.window_left, right: self.0.window_right }
        }

        /// The logarithm of a logit's weight where that is a sigmoid, both in base 2; exact far from 0 too.
        #[inline(always)]
        fn log2_of_sigmoid(&self, logit: f32) -> f32 {
            let x = logit + self.0.sigmoid_bias_log2;
            x.min(0.0) - math::log2(1.0 + math::exp2(-x.abs()))
        }

        /// Whether the mask, which there is, hides a key from a row.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn is_masked(&self, row: Row, key: u32) -> bool {
            let element = row.mask_element + key as u64;
            let (byte, bit) = (element >> self.0.mask_shift, element as u32 & ((1 << self.0.mask_shift) - 1));
            // SAFETY: an element for each query token and key of a request, by the trait's contract.
            let byte = unsafe { Global::<u8>::new(self.0.mask).add(byte).load_constant() };
            byte as u32 >> bit & 1 == 0
        }

        /// The logits of two neighbouring keys, whose mask elements are `first + key` and the next; -inf where the mask, which
        /// there is, hides one. `key` is a multiple of 8, so that both have the bits of `first` and the next in their bytes,
        /// which are the same unless that is the last bit of one. Behind a row's last key there are none, and logits are -inf.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn masked(&self, first: u64, key: u32, logits: [f32; 2]) -> [f32; 2] {
            let last_bit = (1 << self.0.mask_shift) - 1;
            let bit = first as u32 & last_bit;
            let bytes =
                Global::<u8>::new(self.0.mask).add(first >> self.0.mask_shift).add((key >> self.0.mask_shift) as u64);
            let is_seen = logits.map(|logit| logit != f32::NEG_INFINITY);
            let mut both = 0;
            // SAFETY: an element for each query token and key of a request, by the trait's contract.
            unsafe {
                if is_seen[0] || is_seen[1] && bit < last_bit {
                    both = bytes.load_constant() as u32 & ((2 << last_bit) - 1);
                }
                if is_seen[1] && bit == last_bit {
                    both |= (bytes.add(1).load_constant() as u32) << (last_bit + 1);
                }
            }
            let hidden = |i: u32| both >> (bit + i) & 1 == 0;
            [0, 1].map(|i| if hidden(i) { f32::NEG_INFINITY } else { logits[i as usize] })
        }

        /// Entry `index` of an array of the parameters, or `absent` where it is off.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn entry(array: u64, index: u32, absent: f32) -> f32 {
            if array == 0 {
                return absent;
            }
            // SAFETY: an entry for each row, by the trait's contract.
            unsafe { Global::<f32>::new(array).add(index as u64).load_constant() }
        }
    }

    impl Variant for Modified {
        type Parameters = ModifiedParameters;
        type Row = Row;

        #[inline(always)]
        fn bind(parameters: ModifiedParameters) -> Self {
            Modified(parameters)
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> Row {
            let (p, at) = (&self.0, at());
            let mut row = Row {
                query_head: at.query_head,
                position: at.position,
                scale: p.scale,
                slope_log2: 0.0,
                mask_element: 0,
            };
            // SAFETY: the trait's contract.
            unsafe {
                if p.temperatures != 0 {
                    row.scale *= math::reciprocal(Self::entry(p.temperatures, at.request, 1.0));
                }
                row.slope_log2 = LOG2_E * Self::entry(p.alibi_slopes, at.query_head, 0.0);
                if p.mask != 0 {
                    let request = Global::<[u32; 4]>::new(p.mask_requests).add(at.request as u64).load_constant();
                    let [begin_low, begin_high, kv_len, _] = request;
                    let begin = begin_low as u64 | (begin_high as u64) << 32;
                    row.mask_element = begin + at.token as u64 * kv_len as u64;
                }
            }
            row
        }

        #[inline(always)]
        fn logit(&self, row: Row, score: f32, key: u32) -> f32 {
            let p = &self.0;
            let mut logit = score * row.scale;
            if p.cap_log2 != 0.0 {
                logit = p.cap_log2 * math::tanh(logit);
            }
            if p.alibi_slopes != 0 {
                logit = math::multiply_add(row.slope_log2, (key as i32 - row.position) as f32, logit);
            }
            if p.sigmoid != 0 { self.log2_of_sigmoid(logit) } else { logit }
        }

        #[inline(always)]
        fn factor(&self) -> Option<f32> {
            let p = &self.0;
            let is_scale = p.cap_log2 == 0.0 && p.alibi_slopes == 0 && p.temperatures == 0 && p.scale > 0.0;
            if is_scale && p.sigmoid == 0 { Some(p.scale) } else { None }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn tile_logits<const COLUMNS: usize>(
            &self,
            rows: [Row; 2],
            first_key: u32,
            limits: Option<[i32; 2]>,
            scores: &mut [[f32; 4]; COLUMNS],
        ) {
            let p = &self.0;
            // What follows from it is worked out anew for each group: there are no registers to keep it.
            let position_of = |row: Row| anew(row.position as u32) as i32;
            if self.factor().is_none() {
                for_each_group::<COLUMNS>(|columns| {
                    columns.change(scores, |score, _, half| score * rows[half].scale);
                    if p.cap_log2 > MOST_SHORT_CAP_LOG2 {
                        columns.change(scores, |x, _, _| p.cap_log2 * math::tanh(x));
                    } else if p.cap_log2 != 0.0 {
                        columns.change(scores, |x, _, _| p.cap_log2 * math::tanh_far_from_zero(x));
                    }
                    if p.alibi_slopes != 0 {
                        let ahead = rows.map(|row| (first_key as i32 - position_of(row)) as f32);
                        columns.change(scores, |logit, key, half| {
                            math::multiply_add(rows[half].slope_log2, ahead[half] + key as f32, logit)
                        });
                    }
                    if p.sigmoid != 0 {
                        columns.change(scores, |logit, _, _| self.log2_of_sigmoid(logit));
                    }
                });
            }
            let Some(limits) = limits else { return };
            for_each_group::<COLUMNS>(|columns| {
                let windows = rows.map(|row| self.window().keys(position_of(row)));
                let begin = windows.map(|[begin, _]| begin.saturating_sub(first_key as i32));
                let end = [0, 1].map(|half| windows[half][1].min(limits[half]).saturating_sub(first_key as i32));
                columns.change(scores, |logit, key, half| {
                    if (key as i32) < begin[half] || key as i32 >= end[half] { f32::NEG_INFINITY } else { logit }
                });
                if p.mask != 0 {
                    // A row's elements begin anywhere in a byte, and 8 keys further they do so in the same place.
                    let first = rows.map(|row| row.mask_element + anew(first_key) as u64);
                    columns.change_pairs(scores, |pair, key, half| {
                        // SAFETY: the caller's contract.
                        unsafe { self.masked(first[half], key, pair) }
                    });
                }
            });
        }

        #[inline(always)]
        fn may_hide(&self, [first, last]: [Row; 2], [begin, end]: [u32; 2]) -> bool {
            self.0.mask != 0 || self.window().may_hide([first.position, last.position], [begin, end])
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn hides(&self, row: Row, key: u32) -> bool {
            if self.window().hides(row.position, key) {
                return true;
            }
            // SAFETY: the trait's contract.
            self.0.mask != 0 && unsafe { self.is_masked(row, key) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn start(&self, row: Row, piece: Piece) -> [f32; 2] {
            if self.0.sinks == 0 || !piece.is_own(row.position) {
                return [f32::NEG_INFINITY, 0.0];
            }
            // SAFETY: the trait's contract.
            let sink = unsafe { Self::entry(self.0.sinks, row.query_head, f32::NEG_INFINITY) };
            [sink * LOG2_E, if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 }]
        }

        #[inline(always)]
        fn is_softmax(&self) -> bool {
            self.0.sigmoid == 0
        }
    }
}
