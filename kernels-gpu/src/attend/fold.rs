//! The fold of split rows: by the block that finishes their last piece, or by a launch of its own.
//!
//! In: partial states, and an item of each split row tile. Out: output rows and LSE. Invariant: the order of the states
//! is that of the pieces, whoever folds them, so both ways give the same bits.
//!
//! Where requests share a prefix, the last piece of it completes the rows of all of them at once: one block folded them
//! for 1.8 us each, while all others had gone. So plans that share name their split row tiles in `folds`, and a launch
//! behind the attention has a block for each of them and KV head.
use simt::{global::Global, grid, shared::Shared, tensor::Element, thread};

use super::work::{Cursor, Work};
use crate::abi::parameters::{AttendParameters, FoldParameters};
use crate::abi::plan::PlanHeader;
use crate::abi::tile::{ATTEND_TILE_ROWS, FOLD_SHARED_BYTES, FOLD_THREADS};
use crate::merge::{Values, fold_rows};

/// The kernel. Without row tiles to fold it does nothing.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`FOLD_THREADS`] threads and [`FOLD_SHARED_BYTES`]
/// of shared memory, and a state has at most 4 columns for each thread.
#[inline(always)]
pub unsafe fn fold<E: Element + Values>(p: FoldParameters) {
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let word = |offset: usize| Global::<u32>::new(p.plan).add(offset as u64 / 4).load_constant();
        let folds = word(core::mem::offset_of!(PlanHeader, folds));
        let first = Global::<u32>::new(p.plan + word(core::mem::offset_of!(PlanHeader, folds_offset_bytes)) as u64);
        // The next attention may begin on its plan meanwhile: what it waits for is this launch, whose every block waits.
        grid::allow_next_grid();
        grid::wait_for_previous_grid();
        let (p, state_columns) = (&p.attend, p.state_columns);
        let mut index = thread::block_idx_x();
        while index < folds * p.kv_heads {
            let (tile, head) = (index / p.kv_heads, index % p.kv_heads);
            let item = first.add(tile as u64).load_constant();
            let at = Cursor { item, item_end: item + 1, head, head_begin: head, head_end: head + 1 };
            let room = (Shared::dynamic(), FOLD_SHARED_BYTES, FOLD_THREADS);
            fold_item::<E>(p, true, state_columns, &Work::read(p, at), room);
            index += thread::grid_dim_x();
        }
    }
}

/// Folds the partial states of an item's rows, which may have more columns than the output if it `pads`.
///
/// # Safety
/// The kernel's contract; the states are complete, and the room is as [`fold_rows`] wants it.
#[inline(always)]
pub(super) unsafe fn fold_item<E: Element + Values>(
    p: &AttendParameters,
    pads: bool,
    state_columns: u32,
    work: &Work,
    room: (Shared<u8>, u32, u32),
) {
    let mut first = 0;
    while first < work.rows {
        let states = work.states(first);
        let values = Global::<f32>::new(p.partial_out).add(states * state_columns as u64);
        let lse = Global::new(p.partial_lse).add(states);
        let rows = (work.rows - first).min(ATTEND_TILE_ROWS);
        // SAFETY: the caller's contract.
        unsafe {
            fold_rows(state_columns, room, (rows, work.pieces), (values, lse), |row, column, values, lse_log2| {
                if pads && column >= 8 * p.value_pieces {
                    return;
                }
                let row = first + row;
                E::store(work.row(&p.out, p.group, row).add(2 * column as u64), values);
                if column == 0 && p.lse.address != 0 {
                    work.row(&p.lse, p.group, row).cast::<f32>().store(lse_log2 * p.lse_scale);
                }
            });
        }
        first += ATTEND_TILE_ROWS;
    }
}
