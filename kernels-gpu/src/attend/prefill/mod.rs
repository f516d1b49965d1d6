//! Tall items by a kernel of their own: for batches of prompts, on Hopper.
//!
//! In: a plan whose items are all tall, queries, page ids, and tensor maps of the caches. Out: output rows and LSE, or
//! partial states. Invariant: tile `t` of the block, counted over all its items, lies in stage `t % STAGES`; the producer
//! fills a stage that all consumers have released, and they read one that it has filled.
//!
//! A block is three warpgroups, or four where head dims are 64 and attention is plain. The first walks the items and lets
//! the hardware copy their keys and values, box by box, a box within a page (`produce.rs`). The others take 64 rows of
//! each item (`consume.rs`): their next scores are under way while the last weights meet their values, and one computes
//! weights while another multiplies; their rows leave as `write.rs` says.
//! FlashAttention-3 (Shah et al., 2024).

mod consume;
mod produce;
mod room;
mod write;

use simt::{
    block::{sync_named_barrier, sync_threads},
    bulk::TensorMap,
    global::Global,
    mbarrier::fence_mbarrier_initialisation,
    registers::{lower_register_limit, raise_register_limit},
    tensor::Element,
    thread,
};

use super::Queue;
use super::arrive::arrive;
use crate::abi::parameters::AttendParameters;
use crate::{merge::Values, variant::Variant};
use room::Room;

/// Registers of a thread while all warpgroups are alike: 128 times the producers' and the consumers' are at most the
/// block's threads times this.
const REGISTERS: u32 = 168;
/// The same where there are three consumers.
const REGISTERS_OF_FOUR: u32 = 128;

/// The named barrier at which all of the block are done with their items; consumers have others.
const DONE: u32 = 4;

/// The kernel. `HEAD_DIM` is that of queries and keys. `COLUMNS` is an eighth of a tile's keys, `DEPTH` half of that,
/// `STEPS` is `HEAD_DIM / 16`, `VALUE_STEPS` is `VALUE_DIM / 16`, and `TILES` twice that: parameters only because array
/// lengths must be.
///
/// The hardware fills boxes with zeros past the columns of narrower rows, so only their queries and outputs take care.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says, for this block's queue; `maps` are the tensor maps of its K and V,
/// with boxes of 64 columns of `p.box_tokens` tokens; the launch has the threads and shared memory of
/// [`PrefillTile`](crate::abi::tile::PrefillTile).
#[inline(always)]
pub unsafe fn prefill<
    E: Element + Values,
    V: Variant,
    const HEAD_DIM: u32,
    const VALUE_DIM: u32,
    const COLUMNS: usize,
    const DEPTH: usize,
    const STEPS: usize,
    const VALUE_STEPS: usize,
    const TILES: usize,
>(
    p: AttendParameters,
    variant: V::Parameters,
    maps: Global<TensorMap>,
) {
    let variant = V::bind(variant);
    let room = const { Room::<V, HEAD_DIM, VALUE_DIM>::checked(COLUMNS, DEPTH, STEPS, VALUE_STEPS, TILES) };
    let is_first = thread::thread_idx_x() == 0;
    let threads = Room::<V, HEAD_DIM, VALUE_DIM>::TILE.threads();
    let are_three = Room::<V, HEAD_DIM, VALUE_DIM>::TILE.warpgroups == 3;
    // Those of head dim 256 have more panels; of 64 and a variant, consumers have some to spare.
    let producers_need_more = HEAD_DIM == 256 || HEAD_DIM == 64 && !V::IS_LIGHT;
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        if is_first {
            room.initialise();
            fence_mbarrier_initialisation();
        }
        sync_threads();
        if thread::warp_idx() < 4 {
            if are_three {
                lower_register_limit::<32>();
            } else if producers_need_more {
                lower_register_limit::<56>();
            } else {
                lower_register_limit::<40>();
            }
            if thread::warp_idx() < 2 * Room::<V, HEAD_DIM, VALUE_DIM>::PANEL_WARPS {
                produce::produce(&p, maps, room, thread::warp_idx());
            }
            // A consumer that came late might still wait for the registers that this takes back.
            sync_named_barrier(DONE, threads);
            if are_three {
                raise_register_limit::<REGISTERS_OF_FOUR>();
            } else {
                raise_register_limit::<REGISTERS>();
            }
        } else {
            if are_three {
                raise_register_limit::<160>();
            } else if producers_need_more {
                raise_register_limit::<224>();
            } else {
                raise_register_limit::<232>();
            }
            consume::consume::<E, V, HEAD_DIM, VALUE_DIM, COLUMNS, DEPTH, STEPS, VALUE_STEPS, TILES>(&p, variant, room);
            if are_three {
                lower_register_limit::<REGISTERS_OF_FOUR>();
            } else {
                lower_register_limit::<REGISTERS>();
            }
            sync_named_barrier(DONE, threads);
        }
        if room.split().load() != 0 {
            arrive::<E, V, VALUE_DIM>(&p, Queue::read(&p).all, threads, room.free_bytes());
        }
    }
}
