//! What a variant, the causal rule and the ends of ranges make of a warp's scores in a tall item.
use simt::registers::anew;

use super::look_at;
use super::work::{Cursor, Work};
use crate::abi::parameters::AttendParameters;
use crate::variant::Variant;

/// A few keys of an item, as a lane meets them.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a, V: Variant> {
    pub p: &'a AttendParameters,
    pub variant: V,
    pub at: Cursor,
    pub lane: u32,
    /// The item's rows.
    pub item_rows: u32,
    /// The first key.
    pub key: u32,
    /// One past the item's last key.
    pub kv_end: u32,
    /// Whether a row might not see one of the keys.
    pub may_hide: bool,
}

impl<V: Variant> Keys<'_, V> {
    /// Turns the scores of the block of 16 rows from `block_row` on into logits but for the variant's factor, -inf for keys
    /// that a row does not see. Scores are in the layout of `mma`'s C.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    pub unsafe fn to_logits<const COLUMNS: usize>(self, block_row: u32, scores: &mut [[f32; 4]; COLUMNS]) {
        if self.variant.factor().is_some() && !self.may_hide {
            return;
        }
        // What follows from the row is worked out anew: only few steps hide keys, and a heavy variant's rows take more
        // registers than there are.
        let row = anew(block_row + self.lane / 4);
        // SAFETY: rows of the batch, by the kernel's contract.
        unsafe {
            let work = Work::read_for_rows(self.p, self.at, self.item_rows, self.kv_end);
            let rows = [look_at(self.p, &self.variant, &work, row), look_at(self.p, &self.variant, &work, row + 8)];
            let limits = if self.may_hide { Some(work.limits(self.p, row)) } else { None };
            self.variant.tile_logits(rows, self.key + 2 * (self.lane % 4), limits, scores);
        }
    }
}
