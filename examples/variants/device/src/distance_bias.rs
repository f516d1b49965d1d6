//! A learned bias: each query head adds one of four to its logits, by the distance from query to key.
//!
//! Unsafe: the biases' address is the caller's.
use core::f32::consts::LOG2_E;
use kernels_gpu::simt::global::Global;
use kernels_gpu::variant::{RowAt, Variant};

/// The variant.
#[derive(Clone, Copy)]
pub struct DistanceBias(DistanceBiasParameters);

/// What it is launched with.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct DistanceBiasParameters {
    /// `[query_heads, 4]` f32, 16-byte aligned: added at distance 0, up to 15, up to 255, and beyond.
    pub biases: u64,
}

impl Variant for DistanceBias {
    type Parameters = DistanceBiasParameters;
    type Row = (i32, [f32; 4]); // The position and the head's biases.
    fn bind(parameters: DistanceBiasParameters) -> Self {
        DistanceBias(parameters)
    }
    unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> (i32, [f32; 4]) {
        let RowAt { query_head, position, .. } = at();
        // SAFETY: the parameters' address has four biases for each query head.
        (position, unsafe { Global::new(self.0.biases).add(query_head as u64).load_constant() })
    }
    fn logit(&self, (position, [own, near, middle, far]): (i32, [f32; 4]), score: f32, key: u32) -> f32 {
        let distance = position.abs_diff(key as i32);
        let of_others = if distance < 16 {
            near
        } else if distance < 256 {
            middle
        } else {
            far
        };
        score + LOG2_E * if distance == 0 { own } else { of_others }
    }
}
kernels_gpu::attend_kernels! { variant: DistanceBias, name: "distance_bias", elements: [bf16, f16], head_dims: [64, 128] }
