//! A step of a tall item by `mma.sync`: a warp's one or two blocks of 16 rows.
//!
//! Two blocks share each fragment of keys and values, which comes from shared memory about as fast as the tensor cores
//! then consume it.
use simt::tensor::{Element, load_matrix_x4, load_matrix_x4_transposed};

use super::{Columns, Step};
use crate::attend::operand;
use crate::attend::shape::Room;
use crate::softmax::OnlineSoftmax;
use crate::tile::{SharedTile, unroll};
use crate::variant::Variant;

/// Columns of 8 keys of a step.
const COLUMNS: usize = 4;

/// Scores, logits and weights of a block of rows, in the layout of `mma`'s C.
type Scores = [[f32; 4]; COLUMNS];

impl<V: Variant, const HEAD_DIM: u32, const HOPPER: bool> Step<'_, V, HEAD_DIM, HOPPER> {
    /// # Safety
    /// The kernel's contract; the warp's lanes are together, and tile and query rows are there.
    #[inline(always)]
    pub(super) unsafe fn run_warp<E: Element, const STEPS: usize, const BLOCKS: usize>(
        &self,
        softmax: &mut [OnlineSoftmax; BLOCKS],
        outputs: &mut [[Columns; STEPS]; BLOCKS],
    ) {
        let room = Room::<HEAD_DIM, HOPPER>::new();
        let keys = room.keys(self.stage).rows_from(self.tile_row);
        let values = room.values(self.stage).rows_from(self.tile_row);
        let queries = room.tall_queries().rows_from(self.rows);
        // SAFETY: the caller's contract.
        unsafe {
            let mut scores: [Scores; BLOCKS] = core::mem::zeroed();
            multiply_keys::<E, HEAD_DIM, STEPS, BLOCKS>(self.keys.lane, queries, Self::BLOCK_ROWS, keys, &mut scores);
            unroll::<BLOCKS>(|block| {
                self.keys.to_logits(self.rows + block as u32 * Self::BLOCK_ROWS, &mut scores[block])
            });
            unroll::<BLOCKS>(|block| self.to_weights(&mut softmax[block], &mut scores[block], &mut outputs[block]));
            add_values::<E, HEAD_DIM, STEPS, BLOCKS>(self.keys.lane, values, &scores, outputs);
        }
    }
}

/// `scores += Q K^T` of blocks of 16 rows, `block_rows` apart.
#[inline(always)]
unsafe fn multiply_keys<E: Element, const HEAD_DIM: u32, const STEPS: usize, const BLOCKS: usize>(
    lane: u32,
    queries: SharedTile<HEAD_DIM>,
    block_rows: u32,
    keys: SharedTile<HEAD_DIM>,
    scores: &mut [Scores; BLOCKS],
) {
    let queries = queries.lane(lane % 16, lane / 16);
    let keys = keys.lane(lane % 8 + 8 * (lane / 16), lane / 8 % 2);
    unroll::<STEPS>(|k| {
        // SAFETY: the warp's lanes are together, and the rows are there.
        unsafe {
            let mut a = [[0; 4]; BLOCKS];
            unroll::<BLOCKS>(|block| {
                a[block] = load_matrix_x4(queries.piece(block as u32 * block_rows, k));
            });
            unroll::<{ COLUMNS / 2 }>(|n| {
                let b = load_matrix_x4(keys.piece(16 * n as u32, k));
                unroll::<BLOCKS>(|block| {
                    E::multiply_accumulate(&mut scores[block][2 * n], a[block], [b[0], b[1]]);
                    E::multiply_accumulate(&mut scores[block][2 * n + 1], a[block], [b[2], b[3]]);
                });
            });
        }
    });
}

/// `outputs += P V`.
#[inline(always)]
unsafe fn add_values<E: Element, const HEAD_DIM: u32, const STEPS: usize, const BLOCKS: usize>(
    lane: u32,
    values: SharedTile<HEAD_DIM>,
    weights: &[Scores; BLOCKS],
    outputs: &mut [[Columns; STEPS]; BLOCKS],
) {
    let values = values.lane(lane % 16, lane / 16);
    unroll::<{ COLUMNS / 2 }>(|k| {
        let mut a = [[0; 4]; BLOCKS];
        unroll::<BLOCKS>(|block| {
            a[block] = operand::<E>([weights[block][2 * k], weights[block][2 * k + 1]]);
        });
        unroll::<STEPS>(|n| {
            // SAFETY: the warp's lanes are together, and the rows are there.
            unsafe {
                let b = load_matrix_x4_transposed(values.piece(16 * k as u32, n));
                unroll::<BLOCKS>(|block| {
                    E::multiply_accumulate(&mut outputs[block][n][0], a[block], [b[0], b[1]]);
                    E::multiply_accumulate(&mut outputs[block][n][1], a[block], [b[2], b[3]]);
                });
            }
        });
    });
}
