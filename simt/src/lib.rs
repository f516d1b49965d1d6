//! The GPU's vocabulary, written once and given two bodies.
//!
//! A kernel is an ordinary generic `unsafe fn` that speaks only the functions of this crate: thread and block
//! ids, warp shuffles and votes, barriers (`mbarrier` too), shared and global pointers, asynchronous and bulk
//! copies, `ldmatrix`, `mma`, `wgmma`, atomics and fast math. Compiled for `nvptx64-nvidia-cuda` each function is the
//! PTX instruction it is named after (the module `ptx`); on any other target the same call runs inside the `emulator`
//! of a thread block, which reports what hardware would let pass in silence (feature `emulator`; its module page has
//! the rules).
//!
//! The face (the modules below) holds names, signatures and documentation; the bodies hold no documentation of
//! their own. Names follow `cuda_std` where it has one.
//!
//! # Convergence
//!
//! `asm!` is not *convergent*: LLVM may copy or sink it across a divergent branch. So every collective goes
//! through a convergent LLVM intrinsic, and `mma` and `wgmma`, which have none, are volatile `asm!` that stands in
//! the same basic block as one. `xtask ptx` audits the result.
#![cfg_attr(
    target_arch = "nvptx64",
    no_std,
    feature(asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx),
    allow(internal_features)
)]

pub mod number;

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
mod face {
    pub mod asynchronous;
    pub mod atomic;
    pub mod block;
    pub mod bulk;
    pub mod global;
    pub mod grid;
    pub mod math;
    pub mod mbarrier;
    pub mod registers;
    pub mod shared;
    pub mod tensor;
    pub mod thread;
    pub mod warp;
    pub mod wgmma;
}
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub use face::*;

#[cfg(all(not(target_arch = "nvptx64"), feature = "emulator"))]
pub mod emulator;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(all(not(target_arch = "nvptx64"), feature = "emulator"))]
use emulator::body;
#[cfg(target_arch = "nvptx64")]
use ptx as body;

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub use body::Word;
