//! Bulk copies (TMA): one thread starts a copy of a whole tile and the hardware does the rest. sm_90 only.
//!
//! In: addresses, and for tiles a [`TensorMap`] that says how the tensor lies in global memory and what a box of it is.
//! Loads complete on an [`Mbarrier`]: the bytes are there for who has waited for the phase that was told to expect
//! them. Stores complete in groups of the issuing thread, as [`wait_bulk_stores`] says.
//!
//! A tensor map is opaque: on a GPU the driver encodes it (`cuTensorMapEncodeTiled`), for the emulator
//! `emulator::TensorMapDescription` does, from the same arguments. It lies in global memory, at a multiple of 64 bytes.
//!
//! The invariant: from its start to its wait nobody touches a copy's destination and nobody writes its source. What it
//! overwrites in shared memory with ordinary stores before, or what a store reads, is fenced with
//! [`fence_proxy_async`](crate::asynchronous::fence_proxy_async).
use crate::{body, global::Global, mbarrier::Mbarrier, shared::Shared};

/// 128 opaque bytes that describe a tensor in global memory and a box of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);

/// Starts to copy the box of `map` that begins at `coordinates` (elements, innermost first) to `destination`, densely
/// but for the map's swizzle. What of the box lies outside of the tensor becomes zero; it counts among the bytes the
/// barrier expects all the same. One thread calls this.
///
/// # Safety
/// `map` is a live tensor map of 1 to 5 dimensions, `RANK` of them, and what it describes is live memory. The
/// destination is a multiple of 128 bytes (of eight rows where swizzled) and inside shared memory; nobody touches it
/// until the barrier's phase is waited for. The barrier's initialisation was fenced.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_tensor_box<const RANK: usize>(
    destination: Shared<u8>,
    map: Global<TensorMap>,
    coordinates: [i32; RANK],
    barrier: Mbarrier,
) {
    const { assert!(RANK >= 1 && RANK <= 5, "a tensor map has 1 to 5 dimensions") }
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::bulk_load_tensor(destination.address(), map.address(), coordinates, barrier.address()) }
}

/// Starts to fetch a tensor map, so that the first copy by it need not wait.
///
/// # Safety
/// `map` is a live tensor map.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn prefetch_tensor_map(map: Global<TensorMap>) {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::prefetch_tensor_map(map.address()) }
}

/// Starts to copy `bytes` from global to shared memory. One thread calls this.
///
/// # Safety
/// Addresses and `bytes` are multiples of 16 and inside live memory; else as [`load_tensor_box`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_bulk(destination: Shared<u8>, source: Global<u8>, bytes: u32, barrier: Mbarrier) {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::bulk_load(destination.address(), source.address(), bytes, barrier.address()) }
}

/// Starts to copy `bytes` from shared to global memory, in this thread's current group.
///
/// # Safety
/// Addresses and `bytes` are multiples of 16 and inside live memory. What other threads wrote to the source is fenced
/// and ordered before this.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_bulk(destination: Global<u8>, source: Shared<u8>, bytes: u32) {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::bulk_store(destination.address(), source.address(), bytes) }
}

/// Closes this thread's current group of bulk stores.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn commit_bulk_stores() {
    body::commit_bulk_stores()
}

/// Waits until at most `PENDING` of this thread's youngest groups are unfinished: the others' bytes are in global
/// memory.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait_bulk_stores<const PENDING: u32>() {
    body::wait_bulk_stores::<PENDING>()
}

/// Waits until at most `PENDING` of this thread's youngest groups have not read their sources, which may then be
/// written again. Enough before the thread exits.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait_bulk_stores_read<const PENDING: u32>() {
    body::wait_bulk_stores_read::<PENDING>()
}
