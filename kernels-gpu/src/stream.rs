//! Plain streams over device memory: what the GPU suite calls the ceilings.
//!
//! In: 16-byte pieces. Out: nothing (the read folds them and writes only if the fold hits one value, so that no load
//! can be dropped), or the same pieces elsewhere (the copy). Eight loads a thread are in flight together.
use simt::{global::Global, thread};

use crate::abi::{parameters::StreamParameters, tile::STREAM_THREADS};
use crate::tile::unroll;

const IN_FLIGHT: usize = 8;

/// Reads every piece once.
///
/// # Safety
/// `p` describes live memory; the launch has [`STREAM_THREADS`] threads.
#[inline(always)]
pub unsafe fn read(p: StreamParameters) {
    let mut fold = [0u32; 4];
    // SAFETY: the caller's contract.
    unsafe {
        for_each_group(p, |pieces| {
            unroll::<IN_FLIGHT>(|i| unroll::<4>(|j| fold[j] ^= pieces[i][j]));
        });
        if (fold[0] ^ fold[1] ^ fold[2] ^ fold[3]) == 0x9e37_79b9 {
            Global::<u32>::new(p.destination).store(fold[0]);
        }
    }
}

/// Copies every piece; `pieces` is a multiple of what a block's threads have in flight.
///
/// # Safety
/// As [`read`].
#[inline(always)]
pub unsafe fn copy(p: StreamParameters) {
    let stride = thread::grid_dim_x() as u64 * STREAM_THREADS as u64 * IN_FLIGHT as u64;
    let mut base = group_begin();
    // SAFETY: the caller's contract.
    unsafe {
        while base < p.pieces {
            let source = Global::<[u32; 4]>::new(p.source).add(base);
            let target = Global::<[u32; 4]>::new(p.destination).add(base);
            let mut pieces = [[0u32; 4]; IN_FLIGHT];
            unroll::<IN_FLIGHT>(|i| pieces[i] = source.add(i as u64 * STREAM_THREADS as u64).load_constant());
            unroll::<IN_FLIGHT>(|i| target.add(i as u64 * STREAM_THREADS as u64).store(pieces[i]));
            base += stride;
        }
    }
}

#[inline(always)]
fn group_begin() -> u64 {
    thread::block_idx_x() as u64 * STREAM_THREADS as u64 * IN_FLIGHT as u64 + thread::thread_idx_x() as u64
}

#[inline(always)]
unsafe fn for_each_group(p: StreamParameters, mut each: impl FnMut([[u32; 4]; IN_FLIGHT])) {
    let stride = thread::grid_dim_x() as u64 * STREAM_THREADS as u64 * IN_FLIGHT as u64;
    let mut base = group_begin();
    // SAFETY: the caller's contract.
    unsafe {
        while base < p.pieces {
            let source = Global::<[u32; 4]>::new(p.source).add(base);
            let mut pieces = [[0u32; 4]; IN_FLIGHT];
            unroll::<IN_FLIGHT>(|i| pieces[i] = source.add(i as u64 * STREAM_THREADS as u64).load_constant());
            each(pieces);
            base += stride;
        }
    }
}
