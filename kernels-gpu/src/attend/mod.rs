//! Attention over paged or ragged keys and values: each team of blocks walks its queue of work items, a block for its
//! own KV heads.
//!
//! In: the plan's items, queries, page ids, K and V. Out: output rows and LSE. Pieces of split items leave partial
//! states, which the block that finishes the last piece folds; or, where prefixes are shared and one block's last piece
//! would complete many rows at once, a launch of [`fold`] behind this one. A queue's tall items come first: many packed
//! rows, each warp its own, where arithmetic takes the time. Then the short ones: up to 16 packed rows, whose keys the
//! warps share, where memory does.
//!
//! FlashAttention-2 (Dao, 2023) gives the online softmax, Flash-Decoding the split over keys, FlashInfer (Ye et al.,
//! 2025) the packing of query heads into rows and the plan.
//!
//! A kernel also takes rows narrower than its head dim, if its variant [pads](Variant::PADS): what they lack is zeros in
//! shared memory, and of outputs it is not written.
//!
//! Previous in the walk: [`crate::abi::plan`]. Next: [`crate::merge::fold_rows`].

mod ahead;
mod arrive;
mod copies;
pub mod fold;
mod loader;
mod logits;
pub mod prefill;
mod shape;
mod short;
mod tall;
mod work;

use simt::{global::Global, math, registers::anew, tensor::Element, thread};

use crate::{abi::parameters::AttendParameters, merge::Values, softmax::OnlineSoftmax, tile::unroll, variant::Variant};
use shape::Shape;
use work::{Cursor, Work};

/// The kernel. `QUERY_STEPS` is `HEAD_DIM / 16` and `OUTPUT_STEPS` the 16-column steps of a warp's share of a short
/// item's output: they are parameters only because array lengths must be.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says, for this block's queue; the launch has the threads and shared
/// memory of [`AttendTile`](crate::abi::tile::AttendTile).
#[inline(always)]
pub unsafe fn attend<
    E: Element + Values,
    V: Variant,
    const HEAD_DIM: u32,
    const HOPPER: bool,
    const QUERY_STEPS: usize,
    const OUTPUT_STEPS: usize,
>(
    p: AttendParameters,
    variant: V::Parameters,
) {
    let variant = V::bind(variant);
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let mut queue = Queue::read(&p);
        let mut split = false;
        if Shape::<HEAD_DIM, HOPPER>::TILE.tall_rows(V::IS_LIGHT) > 0 && queue.tall().has_work() {
            split = tall::walk::<E, V, HEAD_DIM, HOPPER, QUERY_STEPS>(&p, variant);
            // Read again: there were no registers to keep it.
            queue = Queue::read(&p);
        }
        split |= short::walk::<E, V, HEAD_DIM, HOPPER, QUERY_STEPS, OUTPUT_STEPS>(&p, variant, queue.short());
        if split {
            if V::TRANSFORMS {
                queue = Queue::read(&p);
            }
            let tile = Shape::<HEAD_DIM, HOPPER>::TILE;
            arrive::arrive::<E, V, HEAD_DIM>(&p, queue.all, tile.threads(), tile.addresses_offset_bytes());
        }
    }
}

/// The items of this block's team and the block's heads: tall items, then short ones.
struct Queue {
    all: Cursor,
    short_begin: u32,
}

impl Queue {
    #[inline(always)]
    unsafe fn read(p: &AttendParameters) -> Queue {
        let (team, member) = p.team_blocks.divide(anew(thread::block_idx_x()));
        let head_begin = member * p.heads_per_block;
        let head_end = (head_begin + p.heads_per_block).min(p.kv_heads);
        let queue = Global::<u32>::new(p.queue_begin).add(2 * team as u64);
        // SAFETY: the kernel's contract.
        unsafe {
            let (item, item_end) = (queue.load_constant(), queue.add(2).load_constant());
            let all = Cursor { item, item_end, head: head_begin, head_begin, head_end };
            Queue { all, short_begin: queue.add(1).load_constant() }
        }
    }

    /// The tall items.
    #[inline(always)]
    fn tall(&self) -> Cursor {
        Cursor { item_end: self.short_begin, ..self.all }
    }

    /// The short items.
    #[inline(always)]
    fn short(&self) -> Cursor {
        Cursor { item: self.short_begin, ..self.all }
    }

    /// The place after a tall item and one of its heads; the queue is read for it, as there are no registers to keep it.
    #[inline(always)]
    unsafe fn after_tall(p: &AttendParameters, item: u32, head: u32) -> Cursor {
        // SAFETY: the kernel's contract.
        let mut at = Cursor { item, head, ..unsafe { Queue::read(p).tall() } };
        at.advance();
        at
    }
}

/// A row of an item as the variant keeps it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
unsafe fn look_at<V: Variant>(p: &AttendParameters, variant: &V, work: &Work, row: u32) -> V::Row {
    // SAFETY: a row of the batch, by the kernel's contract.
    unsafe { variant.row(|| work.at(p, row)) }
}

/// Ends the softmax of rows `row` and `row + 8` of an item. What they start with counts here, unless it does so elsewhere.
///
/// # Safety
/// All 32 lanes of the warp reach this call together; rows are of the batch, by the kernel's contract.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
unsafe fn finish<V: Variant>(
    p: &AttendParameters,
    variant: V,
    work: &Work,
    row: u32,
    counts_here: bool,
    softmax: &mut OnlineSoftmax,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut starts = [[0.0, if counts_here { math::reciprocal(work.pieces as f32) } else { 0.0 }]; 2];
        if variant.is_softmax() {
            unroll::<2>(|half| {
                let row = look_at(p, &variant, work, row + 8 * half as u32);
                let [logit, sum] = variant.start(row, work.piece());
                starts[half] = [if counts_here { logit } else { f32::NEG_INFINITY }, sum];
            });
        }
        softmax.finish(starts, variant.is_softmax());
    }
}

/// Two neighbouring tiles of 8 columns of weights as `mma`'s A.
#[inline(always)]
fn operand<E: Element>([left, right]: [[f32; 4]; 2]) -> [u32; 4] {
    [E::pack(left[0], left[1]), E::pack(left[2], left[3]), E::pack(right[0], right[1]), E::pack(right[2], right[3])]
}

/// What an accumulator's four values of two rows become.
#[inline(always)]
fn shrink(c: [f32; 4], upper: f32, lower: f32) -> [f32; 4] {
    [c[0] * upper, c[1] * upper, c[2] * lower, c[3] * lower]
}
