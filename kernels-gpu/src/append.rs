//! Writing new keys and values into the paged cache, and spelling out where they go.
//!
//! In: new K and V rows, and for each token either a slot (page * page size + offset) or a (request, position).
//! Out: the cache rows. Invariant: nothing but the named rows is touched; a negative slot, request or position
//! skips its token. Source and cache may differ in dtype; values are rounded to nearest even. Rows of keys and of values
//! may differ in width.
use simt::{global::Global, grid, tensor::Element, thread};

use crate::abi::parameters::{AppendParameters, CacheView, PositionsParameters, RowsView};
use crate::abi::tile::{APPEND_PIECES, APPEND_THREADS};
use crate::pieces::Pieces;
use crate::tile::unroll;

/// Appends; threads take 16-byte pieces of the new rows in turn.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`APPEND_THREADS`] threads.
#[inline(always)]
pub unsafe fn append<S: Pieces, Cache: Element>(p: AppendParameters) {
    grid::wait_for_previous_grid();
    grid::allow_next_grid();
    let pieces = p.tokens * p.token_chunks.get();
    let mut base = thread::block_idx_x() * APPEND_THREADS * APPEND_PIECES + thread::thread_idx_x();
    while base < pieces {
        // SAFETY: the caller's contract.
        unsafe { append_from::<S, Cache, true>(&p, base, |_| true) };
        base += thread::grid_dim_x() * APPEND_THREADS * APPEND_PIECES;
    }
}

/// Appends pieces `base`, `base + APPEND_THREADS`, ... of values, and of keys unless they are to be left out, of tokens
/// that are `kept`.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
pub unsafe fn append_from<S: Pieces, Cache: Element, const KEYS: bool>(
    p: &AppendParameters,
    base: u32,
    kept: impl Fn(u32) -> bool,
) {
    let pieces = p.tokens * p.token_chunks.get();
    let mut data = [([0; 4], [0; 4]); APPEND_PIECES as usize];
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        // New rows first: their loads do not wait for the four that lead to a destination.
        unroll::<{ APPEND_PIECES as usize }>(|i| {
            if let Some((token, head, chunk)) = piece(p, base + i as u32 * APPEND_THREADS, pieces) {
                let load = |view: &RowsView| {
                    let row = row_of(view, token, head).add(S::PIECE_BYTES * chunk as u64);
                    S::to_cache::<Cache>(S::load_constant(row))
                };
                if KEYS && chunk < p.key_chunks {
                    data[i].0 = load(&p.new_k);
                }
                if chunk < p.value_chunks {
                    data[i].1 = load(&p.new_v);
                }
            }
        });
        unroll::<{ APPEND_PIECES as usize }>(|i| {
            if let Some((token, head, chunk)) = piece(p, base + i as u32 * APPEND_THREADS, pieces)
                && kept(token)
                && let Some((page, slot)) = destination(p, token)
            {
                if KEYS && chunk < p.key_chunks {
                    cache_piece(&p.k, page, slot, head, chunk).store(data[i].0);
                }
                if chunk < p.value_chunks {
                    cache_piece(&p.v, page, slot, head, chunk).store(data[i].1);
                }
            }
        });
    }
}

/// Token, head and 16-byte piece of the row, or `None` past the last.
#[inline(always)]
fn piece(p: &AppendParameters, index: u32, pieces: u32) -> Option<(u32, u32, u32)> {
    let (token, piece) = p.token_chunks.divide(index);
    let (head, chunk) = p.chunks.divide(piece);
    (index < pieces).then_some((token, head, chunk))
}

/// Page and slot of a token, or `None` where it is to be skipped.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
pub unsafe fn destination(p: &AppendParameters, token: u32) -> Option<(u32, u32)> {
    // SAFETY: the kernel's contract.
    unsafe {
        if p.slots != 0 {
            let slot = Global::<u64>::new(p.slots).add(token as u64).load_constant() as i64;
            return (slot >= 0).then(|| divide_slot(p, slot as u64));
        }
        let request = Global::<u32>::new(p.requests).add(token as u64).load_constant() as i32;
        let position = Global::<u32>::new(p.positions).add(token as u64).load_constant() as i32;
        if request < 0 || position < 0 {
            return None;
        }
        let (page, slot) = p.page_size.divide(position as u32);
        let begin = Global::<u32>::new(p.page_begin).add(request as u64).load_constant();
        let index = Global::<u32>::new(p.page_indices).add(begin as u64 + page as u64);
        Some((index.load_constant(), slot))
    }
}

/// Slots below 2^31 take the fast division; past it, real division, whose zero check the compiler must see fail.
#[inline(always)]
fn divide_slot(p: &AppendParameters, slot: u64) -> (u32, u32) {
    if slot < 1 << 31 {
        return p.page_size.divide(slot as u32);
    }
    let page_size = p.page_size.get().max(1) as u64;
    ((slot / page_size) as u32, (slot % page_size) as u32)
}

#[inline(always)]
fn row_of(view: &RowsView, token: u32, head: u32) -> Global<u8> {
    Global::new(view.address)
        .add_bytes(token as i64 * view.token_stride_bytes)
        .add_bytes(head as i64 * view.head_stride_bytes)
}

/// Where a 16-byte piece of a row lies in the cache.
#[inline(always)]
pub fn cache_piece(cache: &CacheView, page: u32, slot: u32, head: u32, chunk: u32) -> Global<[u32; 4]> {
    Global::<u8>::new(cache.address)
        .add_bytes(page as i64 * cache.page_stride_bytes)
        .add_bytes(slot as i64 * cache.token_stride_bytes)
        .add_bytes(head as i64 * cache.head_stride_bytes)
        .add(16 * chunk as u64)
        .cast()
}

/// Spells out request and position of each new token, a thread a token; -1 past the last.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`APPEND_THREADS`] threads.
#[inline(always)]
pub unsafe fn positions(p: PositionsParameters) {
    grid::wait_for_previous_grid();
    grid::allow_next_grid();
    let mut token = thread::block_idx_x() * APPEND_THREADS + thread::thread_idx_x();
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let begin = |request: u32| Global::<u32>::new(p.append_begin).add(request as u64).load_constant();
        let total = begin(p.request_count);
        while token < p.tokens {
            let (mut request, mut position) = (u32::MAX, u32::MAX);
            if token < total {
                // The last request that begins at or before the token; empty ones before it begin there too.
                let (mut low, mut high) = (0, p.request_count);
                while high - low > 1 {
                    let middle = (low + high) / 2;
                    if begin(middle) <= token { low = middle } else { high = middle }
                }
                request = low;
                let kv_len = Global::<u32>::new(p.kv_lens).add(low as u64).load_constant();
                position = kv_len - (begin(low + 1) - token);
            }
            Global::<u32>::new(p.requests).add(token as u64).store(request);
            Global::<u32>::new(p.positions).add(token as u64).store(position);
            token += thread::grid_dim_x() * APPEND_THREADS;
        }
    }
}
