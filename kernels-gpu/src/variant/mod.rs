//! What a user may change about attention: one trait, bound by value, inlined into the hot loop.
//!
//! A variant is built once per block from its parameters and asked for every score. Hooks default to what plain
//! attention does. The kernels are generic over it, so a variant costs what its arithmetic costs.

/// Where a score lies.
#[derive(Clone, Copy, Debug)]
pub struct ScoreAt {
    /// Index of the request in the batch.
    pub request: u32,
    /// Query head.
    pub query_head: u32,
    /// Position of the query token among the request's keys: `t + kv_len - query_len`.
    pub query_position: i32,
    /// Position of the key.
    pub key_position: u32,
}

/// A kind of attention.
pub trait Variant: Copy {
    /// Plain data the host passes at launch.
    type Parameters: Copy;

    /// Reads the parameters once.
    fn bind(parameters: Self::Parameters) -> Self;

    /// Turns a raw score (query times key) into a logit in base-2 units: softmax is `2^logit`, normalised.
    fn logit(&self, score: f32, at: impl FnOnce() -> ScoreAt) -> f32;
}

/// Plain softmax attention.
#[derive(Clone, Copy)]
pub struct Standard {
    scale_log2: f32,
}

/// [`Standard`]'s parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct StandardParameters {
    /// The softmax scale times log2(e).
    pub scale_log2: f32,
}

impl Variant for Standard {
    type Parameters = StandardParameters;

    #[inline(always)]
    fn bind(parameters: StandardParameters) -> Self {
        Standard { scale_log2: parameters.scale_log2 }
    }

    #[inline(always)]
    fn logit(&self, score: f32, _at: impl FnOnce() -> ScoreAt) -> f32 {
        score * self.scale_log2
    }
}
