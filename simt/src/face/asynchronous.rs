//! `cp.async`: copies from global to shared memory that run on their own until they are waited for.
use crate::{body, global::Global, shared::Shared};

/// Starts a copy of 16 bytes, of which the first `source_bytes` (0 to 16) are read and the rest become zero.
/// With 0 nothing is read. The bytes may be read by this thread after [`wait_async_copies`], by others after a
/// barrier that follows it.
///
/// # Safety
/// Both addresses are 16-byte aligned and live, and nobody touches the destination before the wait.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn copy_async_16(destination: Shared<u8>, source: Global<u8>, source_bytes: u32) {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::copy_async_16(destination.address(), source.address(), source_bytes) }
}

/// Closes this thread's current group of copies.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn commit_async_copies() {
    body::commit_async_copies()
}

/// Waits until at most `PENDING` of this thread's youngest groups are unfinished.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait_async_copies<const PENDING: u32>() {
    body::wait_async_copies::<PENDING>()
}

/// Makes this thread's earlier writes to shared memory, by stores and by copies it has waited for, visible to the async
/// proxy: to `wgmma` and to bulk copies that read them after a barrier that follows. sm_90 only.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn fence_proxy_async() {
    body::fence_proxy_async()
}
