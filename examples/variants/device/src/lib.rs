//! Two variants of attention: what runs on the GPU, and under the emulator.
#![cfg_attr(
    target_arch = "nvptx64",
    no_std,
    feature(abi_ptx, asm_experimental_arch),
    allow(improper_ctypes_definitions)
)]

mod chunked;
mod distance_bias;

pub use chunked::Chunked;
pub use distance_bias::DistanceBias;
