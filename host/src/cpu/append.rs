//! Writing new tokens into the cache.
//!
//! In: rows of new keys and values, and for each token a slot, or a request and a position in it. Out: the cache
//! rows, in the cache's dtype; nothing else is written. Tokens whose slot, request or position is negative are
//! skipped. No two tokens of a call may name the same cell.

use super::memory::{cache_address, copy_row, load_row, read, row_address, store_row, write};
use crate::config::DType;
use kernels_gpu::abi::parameters::{AppendParameters, CacheView, PositionsParameters, RowsView};
use rayon::prelude::*;
use std::cell::RefCell;

/// Tokens a thread takes at least: copies of a few KiB are not worth a task each.
const MIN_TOKENS: usize = 16;

/// Writes the new tokens, of `source` elements, into a cache of `cache` elements.
///
/// # Safety
/// `parameters` describe live memory as [the module](super) says.
pub unsafe fn append(parameters: &AppendParameters, source: DType, cache: DType) {
    (0..parameters.tokens).into_par_iter().with_min_len(MIN_TOKENS).for_each(|token| {
        // SAFETY: the caller's.
        let Some((page, offset)) = (unsafe { cell(parameters, token) }) else { return };
        for head in 0..parameters.kv_heads {
            let copy = |new: &RowsView, view: &CacheView, chunks: u32| {
                let (from, to) = (row_address(new, token, head), cache_address(view, page, offset, head));
                // SAFETY: the caller's; tokens name different cells.
                unsafe { convert_row(from, source, to, cache, 8 * chunks as usize) };
            };
            copy(&parameters.new_k, &parameters.k, parameters.key_chunks);
            copy(&parameters.new_v, &parameters.v, parameters.value_chunks);
        }
    });
}

/// Spells out the request and position of every new token.
///
/// # Safety
/// `parameters` describe live memory as [the module](super) says.
pub unsafe fn positions(parameters: &PositionsParameters) {
    let put = |token: u32, request: i32, position: i32| {
        // SAFETY: the caller's.
        unsafe {
            write(parameters.requests, token as usize, request);
            write(parameters.positions, token as usize, position);
        }
    };
    let mut written = 0;
    for request in 0..parameters.request_count {
        // SAFETY: the caller's.
        let (begin, end, kv_len) = unsafe {
            let begin = |index| read::<u32>(parameters.append_begin, index as usize);
            (begin(request), begin(request + 1), read::<u32>(parameters.kv_lens, request as usize))
        };
        for token in begin..end.min(parameters.tokens) {
            put(token, request as i32, (kv_len - (end - token)) as i32);
        }
        written = end;
    }
    for token in written..parameters.tokens {
        put(token, -1, -1);
    }
}

/// The page and the offset in it that new token `token` goes to.
///
/// # Safety
/// As [`append`]'s.
pub unsafe fn cell(parameters: &AppendParameters, token: u32) -> Option<(u32, u32)> {
    // SAFETY: the caller's.
    unsafe {
        if parameters.slots != 0 {
            let slot = u64::try_from(read::<i64>(parameters.slots, token as usize)).ok()?;
            let page_size = parameters.page_size.get() as u64;
            return Some(((slot / page_size) as u32, (slot % page_size) as u32));
        }
        let request = usize::try_from(read::<i32>(parameters.requests, token as usize)).ok()?;
        let position = u32::try_from(read::<i32>(parameters.positions, token as usize)).ok()?;
        let (page, offset) = parameters.page_size.divide(position);
        let page_begin = read::<u32>(parameters.page_begin, request);
        Some((read(parameters.page_indices, page_begin as usize + page as usize), offset))
    }
}

/// Copies a row of `elements`; the bytes stay as they are where the dtype does.
///
/// # Safety
/// Both rows are live and nobody else uses the second.
pub unsafe fn convert_row(from: u64, source: DType, to: u64, cache: DType, elements: usize) {
    // SAFETY: the caller's.
    unsafe {
        if source == cache {
            return copy_row(from, to, elements * cache.bytes());
        }
        SCRATCH.with_borrow_mut(|row| {
            row.resize(elements, 0.0);
            load_row(from, source, row);
            store_row(to, cache, row);
        });
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = RefCell::default();
}
