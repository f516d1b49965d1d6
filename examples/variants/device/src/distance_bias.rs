//! A learned bias: each query head adds one of four to its logits, by the distance from query to key.
//!
//! Unsafe: the biases' address is the caller's.
use core::f32::consts::LOG2_E;
use kernels_gpu::{attend_kernels, simt::global::Global, variant::RowAt, variant::Variant};

/// The variant, and what it is launched with.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct DistanceBias {
    /// `[query_heads, 4]` f32, 16-byte aligned: added at distance 0, up to 15, up to 255, and beyond.
    pub biases: u64,
}

impl Variant for DistanceBias {
    type Parameters = DistanceBias;
    type Row = (i32, [f32; 4]); // The position and the head's biases, in base 2.
    fn bind(parameters: DistanceBias) -> Self {
        parameters
    }
    unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> (i32, [f32; 4]) {
        let RowAt { query_head, position, .. } = at();
        // SAFETY: the parameters' address has four biases for each query head.
        let biases: [f32; 4] = unsafe { Global::new(self.biases).add(query_head as u64).load_constant() };
        (position, biases.map(|bias| bias * LOG2_E))
    }
    fn logit(&self, (position, [own, near, middle, far]): (i32, [f32; 4]), score: f32, key: u32) -> f32 {
        let distance = position.abs_diff(key as i32);
        // Halved twice, not asked for one after another: fewer registers, and the prefill kernel fits.
        let bias = if distance < 16 {
            if distance == 0 { own } else { near }
        } else {
            if distance < 256 { middle } else { far }
        };
        score + bias
    }
}
attend_kernels! { variant: DistanceBias, name: "distance_bias", elements: [bf16, f16], head_dims: [96, 128] }
