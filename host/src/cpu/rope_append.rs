//! Rotating queries and keys and appending keys and values, a token at a time.
//!
//! In: rows, a position for each token to rotate by, and its place in the cache. Out: rotated queries, and in the cache
//! rotated keys, rounded once, and values. A token with no position to rotate by is skipped whole; one without a place
//! is not stored.

use super::append::{cell, convert_row};
use super::memory::{cache_address, row_address};
use super::rope::{Scratch, each_token, rotate};
use crate::config::DType;
use kernels_gpu::abi::parameters::RopeAppendParameters;

/// Rotates rows of `source` and appends them to a cache of `cache` elements.
///
/// # Safety
/// `parameters` describe live memory as [the module](super) says; queries may be rotated in place.
pub unsafe fn rope_append(parameters: &RopeAppendParameters, source: DType, cache: DType) {
    let RopeAppendParameters { rope, append } = parameters;
    let store = |token: u32, scratch: &mut Scratch| {
        // SAFETY: the caller's.
        let Some((page, offset)) = (unsafe { cell(append, token) }) else { return };
        for head in 0..append.kv_heads {
            let [k, v] = [&append.k, &append.v].map(|view| cache_address(view, page, offset, head));
            // SAFETY: the caller's; tokens name different cells.
            unsafe {
                rotate(rope, [row_address(&rope.k, token, head), k], [source, cache], scratch);
                let value = row_address(&append.new_v, token, head);
                convert_row(value, source, v, cache, 8 * append.value_chunks as usize);
            }
        }
    };
    // SAFETY: the caller's.
    unsafe { each_token(rope, source, store) }
}
