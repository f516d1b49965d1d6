//! Two variants of attention: what runs on the GPU, and under the emulator.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_ptx), allow(improper_ctypes_definitions))]
#![cfg_attr(target_feature = "sm_90a", feature(asm_experimental_arch))]

mod chunked;
mod distance_bias;

pub use chunked::Chunked;
pub use distance_bias::DistanceBias;
