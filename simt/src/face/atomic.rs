//! Atomic operations on global memory, at GPU scope.
//!
//! Rust's own atomics lose their ordering on this target (LLVM 22 drops it for read-modify-write), so these are
//! the PTX instructions themselves.
use crate::{body, global::Global};

/// Adds and returns the old value, with acquire and release ordering.
///
/// # Safety
/// The address is aligned and inside live memory, and concurrent accesses to it are atomic too.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn fetch_add(target: Global<u32>, value: u32) -> u32 {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::atomic_fetch_add(target.address(), value) }
}

/// Takes the minimum and returns the old value, relaxed.
///
/// # Safety
/// As [`fetch_add`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn fetch_min(target: Global<u32>, value: u32) -> u32 {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::atomic_fetch_min(target.address(), value) }
}
