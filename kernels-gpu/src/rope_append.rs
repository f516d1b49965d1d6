//! Rotary position embedding and append in one launch: what an engine does to new tokens before it attends.
//!
//! In: rows of queries, keys and values, a position for each token to rotate by, and its place in the cache. Out: the
//! rotated queries, as [`rope`](crate::rope) leaves them, and in the cache the rotated keys and the values, where
//! [`append`](crate::append) puts them. Invariant: keys are rounded once, from f32 to the cache's dtype; a token with no
//! position to rotate by is skipped whole, one without a place is not stored.
//!
//! The first blocks rotate, the others copy values, so that no warp does both, and both are under way at once.
use simt::{grid, tensor::Element, thread};

use crate::abi::parameters::{AppendParameters, RopeAppendParameters, RopeParameters};
use crate::abi::tile::{APPEND_PIECES, APPEND_THREADS, ROPE_HEADS, ROPE_THREADS};
use crate::append::{append_from, cache_piece, destination};
use crate::pieces::{Pieces, pack_cache};
use crate::rope::{Output, Row, ToRows, position_of, turn_unit};

// A block does either job.
const _: () = assert!(ROPE_THREADS == APPEND_THREADS);

/// Rotates and appends; blocks take [`ROPE_THREADS`] units of the rotation, or as many times [`APPEND_PIECES`] pieces of
/// values, in turn.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`ROPE_THREADS`] threads.
#[inline(always)]
pub unsafe fn rope_append<T: Pieces, Cache: Element>(p: RopeAppendParameters) {
    grid::wait_for_previous_grid();
    grid::allow_next_grid();
    let units = p.rope.tokens * p.rope.token_units.get();
    let pieces = p.append.tokens * p.append.token_chunks.get();
    let rotating_blocks = units.div_ceil(ROPE_THREADS);
    let blocks = rotating_blocks + pieces.div_ceil(APPEND_THREADS * APPEND_PIECES);
    let mut block = thread::block_idx_x();
    while block < blocks {
        // SAFETY: the caller's contract.
        unsafe {
            if block < rotating_blocks {
                let index = block * ROPE_THREADS + thread::thread_idx_x();
                if index < units {
                    turn_unit::<T, _>(&p.rope, index, KeysToCache::<Cache>::new(&p.append));
                }
            } else {
                let base = (block - rotating_blocks) * APPEND_THREADS * APPEND_PIECES + thread::thread_idx_x();
                append_from::<T, Cache, false>(&p.append, base, |token| position_of(&p.rope, token).is_some());
            }
        }
        block += thread::grid_dim_x();
    }
}

/// Queries go to `q_out`, keys to the cache.
struct KeysToCache<'a, Cache> {
    append: &'a AppendParameters,
    cache: core::marker::PhantomData<Cache>,
}

impl<'a, Cache> KeysToCache<'a, Cache> {
    #[inline(always)]
    fn new(append: &'a AppendParameters) -> Self {
        KeysToCache { append, cache: core::marker::PhantomData }
    }
}

impl<Cache> Clone for KeysToCache<'_, Cache> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<Cache> Copy for KeysToCache<'_, Cache> {}

impl<Cache: Element> KeysToCache<'_, Cache> {
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn store(self, p: &RopeParameters, place: Option<(u32, u32)>, at: Row, piece: u32, words: [u32; 4]) {
        if let Some((page, slot)) = place {
            // SAFETY: the caller's contract is this function's own.
            unsafe { cache_piece(&self.append.k, page, slot, at.head - p.query_heads, piece).store(words) }
        }
    }
}

impl<T: Pieces, Cache: Element> Output<T> for KeysToCache<'_, Cache> {
    /// Page and slot, looked up where there are keys among the heads.
    type Place = Option<(u32, u32)>;

    #[inline(always)]
    unsafe fn place(self, p: &RopeParameters, token: u32, first_head: u32) -> Option<(u32, u32)> {
        if first_head + ROPE_HEADS <= p.query_heads {
            return None;
        }
        // SAFETY: the caller's contract is this function's own.
        unsafe { destination(self.append, token) }
    }

    #[inline(always)]
    fn takes_rest(self, p: &RopeParameters, head: u32) -> bool {
        head >= p.query_heads || Output::<T>::takes_rest(ToRows, p, head)
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn put(self, p: &RopeParameters, place: Self::Place, at: Row, piece: u32, values: [f32; 8]) {
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            if at.head < p.query_heads {
                Output::<T>::put(ToRows, p, (), at, piece, values);
            } else {
                self.store(p, place, at, piece, pack_cache::<Cache>(values));
            }
        }
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn put_rest(self, p: &RopeParameters, place: Self::Place, at: Row, piece: u32, value: T::Piece) {
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            if at.head < p.query_heads {
                Output::<T>::put_rest(ToRows, p, (), at, piece, value);
            } else {
                self.store(p, place, at, piece, T::to_cache::<Cache>(value));
            }
        }
    }
}
