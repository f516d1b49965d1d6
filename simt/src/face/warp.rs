//! Warp-wide collectives. All 32 lanes take part, always: a lane that is missing is an error in the emulator
//! and undefined behaviour on the GPU.
//!
//! # Safety
//!
//! Every function here must be reached by all 32 lanes of the warp at the same call.
use crate::body;

/// The value of the lane whose index is this lane's index xor `lane_mask`.
///
/// # Safety
/// All 32 lanes of the warp reach this call together.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn shuffle_xor_f32(value: f32, lane_mask: u32) -> f32 {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::shuffle_xor_f32(value, lane_mask) }
}

/// The value of the lane whose index is this lane's index xor `lane_mask`.
///
/// # Safety
/// All 32 lanes of the warp reach this call together.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn shuffle_xor_u32(value: u32, lane_mask: u32) -> u32 {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::shuffle_xor_u32(value, lane_mask) }
}

/// The value of lane `source_lane` (taken modulo 32).
///
/// # Safety
/// All 32 lanes of the warp reach this call together.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn shuffle_u32(value: u32, source_lane: u32) -> u32 {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::shuffle_u32(value, source_lane) }
}

/// Bit `i` of the result is lane `i`'s predicate.
///
/// # Safety
/// All 32 lanes of the warp reach this call together.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn vote_ballot(predicate: bool) -> u32 {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::vote_ballot(predicate) }
}

/// Orders the memory accesses of the warp's lanes before and after it.
///
/// # Safety
/// All 32 lanes of the warp reach this call together.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync_warp() {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::sync_warp() }
}
