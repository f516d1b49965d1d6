//! Every stock change to plain attention in one variant, each switched on by its parameters.
//!
//! In: [`ModifiedParameters`], whose addresses are 0 where a change is off. With query position `p` and key `k`, the
//! logit is `softcap(score * scale / temperature) + slope * (k - p)`, in base 2, and `-inf` for keys that window or mask
//! hide. A row's softmax starts with the head's sink. Without a softmax a weight is `sigmoid(logit + bias)`. Switches
//! are the same for all lanes of a launch, so a change that is off costs a branch.
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

    use simt::{global::Global, math};

    use super::ModifiedParameters;
    use crate::variant::{Piece, RowAt, Variant, Window};

    /// Attention with any of the stock changes.
    #[derive(Clone, Copy)]
    pub struct Modified(ModifiedParameters);

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
            logit
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
            if self.0.mask == 0 {
                return false;
            }
            let element = row.mask_element + key as u64;
            let (byte, bit) = (element >> self.0.mask_shift, element as u32 & ((1 << self.0.mask_shift) - 1));
            // SAFETY: an element for each query token and key of a request, by the trait's contract.
            let byte = unsafe { Global::<u8>::new(self.0.mask).add(byte).load_constant() };
            byte as u32 >> bit & 1 == 0
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn start(&self, row: Row, piece: Piece) -> [f32; 2] {
            if self.0.sigmoid != 0 {
                // Pieces with equal sums that add up to 1 are folded by adding their outputs.
                return [0.0, math::reciprocal(piece.count as f32)];
            }
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

        #[inline(always)]
        fn weight(&self, logit: f32) -> f32 {
            math::reciprocal(1.0 + math::exp2(-logit - self.0.sigmoid_bias_log2))
        }
    }
}
