//! oxattn's device code, in the order the data moves.
//!
//! [`abi`] is what host and device both see: the plan image, the kernels' parameters and their manifest. The
//! kernels follow: `attend` walks a queue of work items, writes outputs, and folds the partial states of what was
//! split; `merge` folds states that a caller brings, `append` writes the cache, `rope`
//! rotates queries and keys by their positions, `rope_append` does both, and `validate` checks page ids and slots on
//! request. The crate compiles to PTX with the nightly compiler (`cargo xtask ptx`) and, with the feature `emulator`, to
//! ordinary host code that runs under [`simt`]'s emulator. [`custom`] is for crates that make kernels of variants of their
//! own.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(stdarch_nvptx), allow(improper_ctypes_definitions))]
#![cfg_attr(all(target_arch = "nvptx64", feature = "entries"), feature(abi_ptx, asm_experimental_arch))]

pub mod abi;
pub mod variant;

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod append;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod attend;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod merge;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod pieces;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod rope;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod rope_append;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod softmax;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod stream;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod tile;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub mod validate;

pub mod custom;
pub mod entries;

/// The vocabulary that device code speaks.
pub use simt;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { core::arch::nvptx::trap() }
}
