//! The end of split items: who finishes an item's last piece folds the pieces' partial states.
use simt::{atomic::fetch_add, block::sync_threads, global::Global, shared::Shared, tensor::Element, thread};

use super::fold::fold_item;
use super::work::{Cursor, Work};
use crate::abi::parameters::AttendParameters;
use crate::merge::Values;
use crate::variant::Variant;

/// Counts the block's pieces of split items in; the block that counts an item's last piece folds the pieces' states,
/// in their order, so that the result does not depend on who that is. It comes after the queue's last item, apart
/// from the loop, whose registers it competes for: a kernel without any fold ran 0.5 to 7% faster on uncut batches.
///
/// The barrier orders the block's partial states before the counts, a count's release and acquire order them before
/// the fold, and the second barrier hands that order to the block. All `threads` of the block call this together, and
/// nobody uses its first `shared_bytes`.
#[inline(always)]
pub(super) unsafe fn arrive<E: Element + Values, V: Variant, const HEAD_DIM: u32>(
    p: &AttendParameters,
    queue: Cursor,
    threads: u32,
    shared_bytes: u32,
) {
    let thread = thread::thread_idx_x();
    let complete = Shared::<u32>::dynamic();
    let words = complete.add(threads).cast::<[u32; 4]>();
    let room = words.add(3 * threads).cast();
    let room = (room, shared_bytes - 52 * threads, threads);
    let mut head = queue.head_begin;
    // SAFETY: the kernel's contract; shared memory is free after the last item.
    unsafe {
        while head < queue.head_end {
            let mut first = queue.item;
            while first < queue.item_end {
                sync_threads();
                let mine = first + thread;
                let mut is_complete = false;
                if mine < queue.item_end {
                    let work = Work::read_again(p, Cursor { item: mine, head, ..queue });
                    if work.is_counted() {
                        let arrivals = Global::<u32>::new(p.arrivals).add(work.group as u64 + head as u64);
                        is_complete = fetch_add(arrivals, 1) + 1 == work.pieces;
                        if is_complete {
                            arrivals.store(0);
                            // The acquire has emptied the first-level cache, so the item goes by shared memory.
                            let [a, b, c] = work.to_words();
                            let slot = words.add(3 * thread);
                            slot.store(a);
                            slot.add(1).store(b);
                            slot.add(2).store(c);
                        }
                    }
                }
                complete.add(thread).store(is_complete as u32);
                sync_threads();
                let mut i = 0;
                while i < threads && first + i < queue.item_end {
                    if complete.add(i).load() == 1 {
                        let slot = words.add(3 * i);
                        let item = [slot.load(), slot.add(1).load(), slot.add(2).load()];
                        let work = Work::from_words(item, Cursor { item: first + i, head, ..queue });
                        fold_item::<E>(p, V::PADS, HEAD_DIM, &work, room);
                    }
                    i += 1;
                }
                first += threads;
            }
            head += 1;
        }
    }
}
