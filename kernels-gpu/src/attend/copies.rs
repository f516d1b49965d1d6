//! The copies that fill shared memory, and the addresses they start from.
//!
//! The copies of a tile need 16 bytes from each row's address, and an address costs a page lookup and a division. So
//! one thread a row works the addresses out an iteration early and leaves them in shared memory.
use simt::{asynchronous::copy_async_16, global::Global, registers::anew, shared::Shared, thread};

use super::shape::{MOST_ROUNDS, Room, Shape};
use super::work::{Cursor, Work};
use crate::abi::parameters::{AttendParameters, CacheView};
use crate::tile::{Rows, unroll};
use crate::variant::Variant;

/// Starts the copies of a tile of `rows` rows, whose addresses are those of `parity`; rows past them, and of padded rows
/// the columns past their own, become zero. Keys and values lie in the same way. `AT_ONCE` rounds have their addresses in registers at once, four a round.
///
/// # Safety
/// The kernel's contract; all threads call together, and the stage was consumed before the last barrier.
#[inline(always)]
pub(super) unsafe fn copy_tile<V: Variant, const HEAD_DIM: u32, const HOPPER: bool, const AT_ONCE: usize>(
    p: &AttendParameters,
    room: Room<HEAD_DIM, HOPPER>,
    parity: u32,
    (keys, values): (impl Rows, impl Rows),
    rows: u32,
    thread: u32,
) {
    let tile = Shape::<HEAD_DIM, HOPPER>::TILE;
    // SAFETY: the caller's contract.
    unsafe {
        let (threads, chunks) = (tile.threads(), Shape::<HEAD_DIM, HOPPER>::CHUNKS);
        let place = |round: u32| {
            let index = thread + round * threads;
            let (row, chunk) = (index / chunks, index % chunks);
            Place {
                addresses: room.row_address(parity, row),
                k: keys.chunk(row, chunk),
                v: values.chunk(row, chunk),
                row,
                further: 0,
                chunk,
            }
        };
        // Where the threads are whole rows, a thread's pieces of every round, or of every second one, lie in the same
        // place in their eight rows: constants apart.
        let rows_of_round = if threads.is_multiple_of(chunks) { threads / chunks } else { 0 };
        let apart = if rows_of_round.is_multiple_of(8) { 1 } else { 2 };
        let is_regular = rows_of_round > 0 && (apart * rows_of_round).is_multiple_of(8);
        let first = if is_regular { [place(0).anew(), place(1).anew()] } else { [place(0); 2] };
        let place = |round: u32| {
            if is_regular {
                first[(round % apart) as usize].rows_further(round / apart * apart * rows_of_round, keys.row_bytes())
            } else {
                place(round)
            }
        };
        // The addresses of some rounds first, so that their latency shows once for all of them.
        unroll::<MOST_ROUNDS>(|batch| {
            let mut addresses = [[0; 4]; AT_ONCE];
            let round = |i: usize| batch * AT_ONCE + i;
            unroll::<AT_ONCE>(|i| {
                if round(i) < Shape::<HEAD_DIM, HOPPER>::ROUNDS {
                    addresses[i] = place(round(i) as u32).addresses.load();
                }
            });
            unroll::<AT_ONCE>(|i| {
                if round(i) < Shape::<HEAD_DIM, HOPPER>::ROUNDS {
                    let Place { k, v, row, further, chunk, .. } = place(round(i) as u32);
                    let bytes = if (row as i32) < rows as i32 - further as i32 { 16 } else { 0 };
                    let [k_low, k_high, v_low, v_high] = addresses[i];
                    let of = |pieces: u32| if V::PADS && chunk >= pieces { 0 } else { bytes };
                    copy_async_16(k, address(k_low, k_high).add(16 * chunk as u64), of(p.key_pieces));
                    copy_async_16(v, address(v_low, v_high).add(16 * chunk as u64), of(p.value_pieces));
                }
            });
        });
    }
}

/// A thread's 16 bytes of K and of V in a round.
#[derive(Clone, Copy)]
struct Place {
    /// Where the addresses of its row are.
    addresses: Shared<[u32; 4]>,
    k: Shared<u8>,
    v: Shared<u8>,
    /// Its row, but for `further` rows, which are constant.
    row: u32,
    further: u32,
    chunk: u32,
}

impl Place {
    /// [`anew`] of each address.
    #[inline(always)]
    fn anew(self) -> Self {
        Place { addresses: self.addresses.anew(), k: self.k.anew(), v: self.v.anew(), ..self }
    }

    #[inline(always)]
    fn rows_further(self, rows: u32, row_bytes: u32) -> Self {
        let bytes = rows * row_bytes;
        Place {
            addresses: self.addresses.add(rows),
            k: self.k.add_bytes(bytes),
            v: self.v.add_bytes(bytes),
            further: rows,
            ..self
        }
    }
}

/// The page of a key of the request whose page ids start at `page_begin`.
///
/// # Safety
/// The page table covers the key.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub(super) unsafe fn page_of(p: &AttendParameters, page_begin: u32, token: u32) -> u32 {
    let (page, _) = p.page_size.divide(token);
    // SAFETY: the caller's contract.
    // An ordered load: a read-only one may be moved down to its use, where its latency shows.
    unsafe { Global::<u32>::new(p.page_indices).add(page_begin as u64 + page as u64).load() }
}

/// Leaves K's and V's address of a token of a page at `to`.
///
/// # Safety
/// Nobody else uses what is at `to`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub(super) unsafe fn store_row_address(p: &AttendParameters, to: Shared<[u32; 4]>, page: u32, slot: u32, kv_head: u32) {
    let (k, v) = (row_address(&p.k, page, slot, kv_head), row_address(&p.v, page, slot, kv_head));
    // SAFETY: the caller's contract.
    unsafe { to.store([k as u32, (k >> 32) as u32, v as u32, (v >> 32) as u32]) };
}

/// Starts the copies of an item's query rows, and fills up to `filled` rows, and padded ones, with zeros.
///
/// # Safety
/// The kernel's contract; nobody reads the rows that were there before.
#[inline(always)]
pub(super) unsafe fn copy_queries<V: Variant, const HEAD_DIM: u32, const HOPPER: bool>(
    p: &AttendParameters,
    at: Cursor,
    tile: impl Rows,
    filled: u32,
) {
    // SAFETY: an item of the queue, by the kernel's contract.
    let work = unsafe { Work::read_again(p, at) };
    let mut index = thread::thread_idx_x();
    while index < filled * Shape::<HEAD_DIM, HOPPER>::CHUNKS {
        let row = index / Shape::<HEAD_DIM, HOPPER>::CHUNKS;
        let chunk = index % Shape::<HEAD_DIM, HOPPER>::CHUNKS;
        let valid = row < work.rows;
        let source = work.row(&p.q, p.group, if valid { row } else { 0 }).add(16 * chunk as u64);
        // Worked out here, and not kept: the widest kernels have no register for it.
        let has = valid && (!V::PADS || anew(chunk) < p.key_pieces);
        // SAFETY: a live query row, by the kernel's contract.
        unsafe { copy_async_16(tile.chunk(row, chunk), source, if has { 16 } else { 0 }) };
        index += Shape::<HEAD_DIM, HOPPER>::TILE.threads();
    }
}

#[inline(always)]
fn address(low: u32, high: u32) -> Global<u8> {
    Global::new(low as u64 | (high as u64) << 32)
}

#[inline(always)]
fn row_address(cache: &CacheView, page: u32, slot: u32, kv_head: u32) -> u64 {
    cache
        .address
        .wrapping_add((page as i64 * cache.page_stride_bytes) as u64)
        .wrapping_add((slot as i64 * cache.token_stride_bytes) as u64)
        .wrapping_add((kv_head as i64 * cache.head_stride_bytes) as u64)
}
