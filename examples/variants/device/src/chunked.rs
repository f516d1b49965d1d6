//! Chunked attention, as in Llama 4: a token sees the keys of its own chunk of the sequence.
//!
//! Unsafe: the trait's contract; nothing is read here.
use kernels_gpu::{attend_kernels, variant::RowAt, variant::Variant};

/// The variant, and what it is launched with.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct Chunked {
    /// log2 of a chunk's tokens.
    pub chunk_tokens_log2: u32,
}

impl Variant for Chunked {
    type Parameters = Chunked;
    type Row = i32; // Its chunk.
    fn bind(parameters: Chunked) -> Self {
        parameters
    }
    unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> i32 {
        at().position >> self.chunk_tokens_log2
    }
    fn logit(&self, _chunk: i32, score: f32, _key: u32) -> f32 {
        score
    }
    fn may_hide(&self, rows: [i32; 2], [begin, end]: [u32; 2]) -> bool {
        let chunk = |key: u32| (key >> self.chunk_tokens_log2) as i32;
        rows != [chunk(begin); 2] || chunk(end - 1) != chunk(begin)
    }
    unsafe fn hides(&self, chunk: i32, key: u32) -> bool {
        chunk != (key >> self.chunk_tokens_log2) as i32
    }
}
attend_kernels! { variant: Chunked, name: "chunked", elements: [bf16, f16], head_dims: [64, 128, 256] }
