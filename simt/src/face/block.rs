//! Block-wide barriers.
use crate::body;

/// Waits for every thread of the block; orders their shared and global accesses.
///
/// # Safety
/// Every thread of the block that has not exited reaches this call, and warps exit whole.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync_threads() {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::sync_threads() }
}

/// Waits at barrier `id` (1 to 15) until `threads` threads, a multiple of 32, have arrived at it.
///
/// # Safety
/// Whole warps reach this call, and exactly `threads` threads of the block take part in each phase of `id`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync_named_barrier(id: u32, threads: u32) {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::sync_named_barrier(id, threads) }
}

/// Arrives at barrier `id` (1 to 15) without waiting: what this warp did is ordered before what the threads do that
/// [wait](sync_named_barrier) at it in the same phase.
///
/// # Safety
/// As [`sync_named_barrier`]; the arriving threads count too.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive_named_barrier(id: u32, threads: u32) {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::arrive_named_barrier(id, threads) }
}
