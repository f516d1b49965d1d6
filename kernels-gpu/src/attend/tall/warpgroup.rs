//! A step of a tall item by `wgmma`: a tile's 64 keys against one or two blocks of 64 rows.
//!
//! Of two blocks, one's products run while the other's weights are worked out; so do those of the multiprocessor's other
//! blocks of threads. FlashAttention-3 (Shah et al., 2024) overlaps in the same way.
use simt::tensor::Element;
use simt::warp::shuffle_u32;
use simt::wgmma::{self, Descriptor, MnMajor};

use super::{Columns, Step};
use crate::attend::ahead::{FEW_ROUNDS_AT_ONCE, Pipeline};
use crate::attend::operand;
use crate::attend::shape::{Room, Shape};
use crate::softmax::OnlineSoftmax;
use crate::tile::unroll;
use crate::variant::Variant;

/// Columns of 8 keys of a tile.
const COLUMNS: usize = 8;

/// Scores, logits and weights of a warp's rows, in the layout of `mma`'s C.
type Scores = [[f32; 4]; COLUMNS];

impl<V: Variant, const HEAD_DIM: u32, const HOPPER: bool> Step<'_, V, HEAD_DIM, HOPPER> {
    /// Takes the tile, and `pipeline` on to the next one.
    ///
    /// # Safety
    /// The kernel's contract; the warpgroup's threads are together, and tile and query rows are there, visible to the
    /// async proxy.
    #[inline(always)]
    pub(super) unsafe fn run_warpgroup<E: Element, const STEPS: usize, const BLOCKS: usize>(
        &self,
        pipeline: &mut Pipeline<HEAD_DIM, HOPPER>,
        softmax: &mut [OnlineSoftmax; BLOCKS],
        outputs: &mut [[Columns; STEPS]; BLOCKS],
    ) {
        let room = Room::<HEAD_DIM, HOPPER>::new();
        let (queries, keys) = (room.query_panels(), room.key_panels(self.stage));
        let values = room.value_panels(self.stage).mn_major::<E>(0);
        let key_operand = keys.k_major::<E>(0);
        // The warpgroup's first row: a warp is one of four. By way of a shuffle, so that ptxas knows it to be the same in a
        // warp, and descriptors stay in uniform registers.
        // SAFETY: the caller has the warps' lanes together.
        let first_row = unsafe { shuffle_u32(self.rows / 64 * 64, 0) };
        let start = |block: usize, scores: &mut Scores| {
            let query_operand = queries.k_major::<E>(first_row + block as u32 * Self::BLOCK_ROWS);
            // SAFETY: the caller's contract.
            unsafe {
                wgmma::settle(scores);
                wgmma::fence();
                unroll::<STEPS>(|k| {
                    let a = query_operand.advance_bytes(queries.step_bytes(k));
                    let b = key_operand.advance_bytes(keys.step_bytes(k));
                    wgmma::multiply_shared(scores, a, b, k > 0);
                });
                wgmma::commit_group();
            }
        };
        // SAFETY: the caller's contract.
        unsafe {
            // What the pipeline has to do takes no tensor cores, so it is done while they work; but where an item is not
            // as tall as it could be, memory is what it waits for, and that comes first.
            let waits_for_memory = const { (BLOCKS as u32) < Shape::<HEAD_DIM, HOPPER>::TILE.tall_blocks(V::IS_LIGHT) };
            let mut page = if waits_for_memory { pipeline.step::<V>(self.keys.p) } else { 0 };
            let mut scores: [Scores; BLOCKS] = core::mem::zeroed();
            start(0, &mut scores[0]);
            if BLOCKS == 2 {
                start(1, &mut scores[BLOCKS - 1]);
            }
            if !waits_for_memory {
                page = pipeline.step_by::<V, FEW_ROUNDS_AT_ONCE>(self.keys.p);
            }
            if BLOCKS == 2 {
                wgmma::wait_group::<1, COLUMNS>(&mut scores[0]);
            } else {
                wgmma::wait_group::<0, COLUMNS>(&mut scores[0]);
            }
            // Calls, not a loop: a closure of that size is not inlined twice.
            self.take_scores::<E, STEPS>(0, values, &mut softmax[0], &mut scores[0], &mut outputs[0]);
            if BLOCKS == 2 {
                let block = BLOCKS - 1;
                // Younger than the scores are the first block's outputs.
                wgmma::wait_group::<1, COLUMNS>(&mut scores[block]);
                let (softmax, scores) = (&mut softmax[block], &mut scores[block]);
                self.take_scores::<E, STEPS>(1, values, softmax, scores, &mut outputs[block]);
            }
            pipeline.advance(self.keys.p, page);
            unroll::<BLOCKS>(|block| finish::<HEAD_DIM, STEPS>(block == 0, &mut outputs[block]));
        }
    }

    /// Makes weights of a block's scores, and starts their products with the values.
    #[inline(always)]
    unsafe fn take_scores<E: Element, const STEPS: usize>(
        &self,
        block: u32,
        values: Descriptor<E, MnMajor>,
        softmax: &mut OnlineSoftmax,
        scores: &mut Scores,
        outputs: &mut [Columns; STEPS],
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            self.keys.to_logits(self.rows + block * Self::BLOCK_ROWS, scores);
            self.to_weights(softmax, scores, outputs);
            add_values::<E, HEAD_DIM, STEPS>(values, scores, outputs);
        }
    }
}

/// Calls `$function` with a block's outputs as the accumulator of as many columns as the head has.
macro_rules! as_accumulator {
    ($outputs:ident, $function:ident($($argument:expr),*)) => {
        match HEAD_DIM {
            64 => $function(accumulator::<STEPS, 8>($outputs), $($argument),*),
            128 => $function(accumulator::<STEPS, 16>($outputs), $($argument),*),
            192 => $function(accumulator::<STEPS, 24>($outputs), $($argument),*),
            _ => $function(accumulator::<STEPS, 32>($outputs), $($argument),*),
        }
    };
}

/// `TILES` is `2 * STEPS`, wherever this is called.
#[inline(always)]
unsafe fn accumulator<const STEPS: usize, const TILES: usize>(
    outputs: &mut [Columns; STEPS],
) -> &mut [[f32; 4]; TILES] {
    // SAFETY: the same numbers in another grouping.
    unsafe { &mut *(&raw mut *outputs).cast() }
}

/// Starts `outputs += P V`.
#[inline(always)]
unsafe fn add_values<E: Element, const HEAD_DIM: u32, const STEPS: usize>(
    values: Descriptor<E, MnMajor>,
    weights: &Scores,
    outputs: &mut [Columns; STEPS],
) {
    let mut a = [[0; 4]; COLUMNS / 2];
    unroll::<{ COLUMNS / 2 }>(|k| {
        a[k] = operand::<E>([weights[2 * k], weights[2 * k + 1]]);
        wgmma::pin(&mut a[k]);
    });
    // SAFETY: the warpgroup's threads are together, and the rows are there.
    unsafe { as_accumulator!(outputs, multiply_values(values, a)) }
}

#[inline(always)]
unsafe fn multiply_values<E: Element, const TILES: usize>(
    outputs: &mut [[f32; 4]; TILES],
    values: Descriptor<E, MnMajor>,
    a: [[u32; 4]; COLUMNS / 2],
) {
    // SAFETY: the caller's contract.
    unsafe {
        wgmma::settle(outputs);
        wgmma::fence();
        // 16 rows of 128 bytes a step.
        unroll::<{ COLUMNS / 2 }>(|k| {
            wgmma::multiply_registers(outputs, a[k], values.advance_bytes(2048 * k as u32), true)
        });
        wgmma::commit_group();
    }
}

/// Waits for a block's outputs, or takes them after the wait for the first ones.
#[inline(always)]
unsafe fn finish<const HEAD_DIM: u32, const STEPS: usize>(waits: bool, outputs: &mut [Columns; STEPS]) {
    // SAFETY: the warpgroup's threads are together.
    unsafe { as_accumulator!(outputs, wait(waits)) }
}

#[inline(always)]
unsafe fn wait<const TILES: usize>(outputs: &mut [[f32; 4]; TILES], waits: bool) {
    if waits {
        // SAFETY: the caller's contract.
        unsafe { wgmma::wait_group::<0, TILES>(outputs) }
    } else {
        wgmma::settle(outputs);
    }
}
