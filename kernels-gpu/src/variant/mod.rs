//! What a user may change about attention: one trait, bound by value, inlined into the hot loop.
//!
//! A variant is built once a block from its parameters, looks at each query row once an item, and is then asked for
//! every score. Hooks default to what plain attention does. The kernels are generic over it, so a variant costs what
//! its arithmetic costs.
//!
//! The planner's limits and the causal rule are the kernel's: a variant hides keys inside them.

mod modified;
mod rotary;
mod standard;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
mod window;

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub use modified::Modified;
pub use modified::ModifiedParameters;
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub use rotary::Rotary;
pub use rotary::RotaryParameters;
pub use standard::{Standard, StandardParameters};
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub(crate) use window::Window;

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
use crate::tile::{Rows, unroll};
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
use simt::tensor::Element;

/// Where a query row is.
#[derive(Clone, Copy, Debug)]
pub struct RowAt {
    /// Index of the request in the batch.
    pub request: u32,
    /// Query token in the request.
    pub token: u32,
    /// Query head.
    pub query_head: u32,
    /// Position of the token among the request's keys: `token + kv_len - query_len`.
    pub position: i32,
}

/// Where the query of a row is.
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
#[derive(Clone, Copy, Debug)]
pub struct QueryAt {
    /// Its token's index in the batch.
    pub query: u32,
    /// Position of the token among the request's keys: `token + kv_len - query_len`. Not to be used where a plan may
    /// share prefixes: an item's rows may then be those of several requests.
    pub position: i32,
}

/// The part of a row's keys that an item has.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Which of the row's pieces it is, in the order of the keys.
    pub index: u32,
    /// Pieces there are.
    pub count: u32,
    /// The first key, and one past the last.
    pub keys: [u32; 2],
}

impl Piece {
    /// Whether this is the one of a row's pieces that holds the key at the row's own position; the first, where that is
    /// before all keys. It depends neither on the batch nor on the rows beside it.
    #[inline(always)]
    pub fn is_own(&self, position: i32) -> bool {
        let [begin, end] = self.keys;
        if position < 0 { self.index == 0 } else { begin <= position as u32 && (position as u32) < end }
    }
}

/// A kind of attention.
pub trait Variant: Copy {
    /// Plain data the host passes at launch.
    type Parameters: Copy;
    /// What a lane keeps of each of its two query rows while keys pass by: registers.
    type Row: Copy;

    /// Whether [`Row`](Self::Row) and the arithmetic leave registers to spare: then the values' fragments are read
    /// while a tile's weights are worked out, and a warp takes twice as many rows of a tall item.
    const IS_LIGHT: bool = false;

    /// Whether it is plain attention, of which prefill kernels may have more warpgroups; the host has to know too.
    #[doc(hidden)]
    const IS_PLAIN: bool = false;

    /// Whether the kernels take rows narrower than their head dim, which costs a comparison a copy.
    #[doc(hidden)]
    const PADS: bool = true;

    /// Whether queries and keys are changed after they arrive in shared memory and before they are multiplied.
    const TRANSFORMS: bool = false;

    /// Reads the parameters once.
    fn bind(parameters: Self::Parameters) -> Self;

    /// Looks at a query row of the batch, once an item. `at` costs a division, so it is only for those who ask.
    ///
    /// # Safety
    /// What the parameters point at is live and has an entry for the row.
    unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> Self::Row;

    /// Changes the first `rows` rows of an item's tile of queries, in place; `at` says where a row is. So many `threads` call
    /// together, with [`TRANSFORMS`](Self::TRANSFORMS) alone: all of a block, or a warpgroup, and the index in the block
    /// modulo `threads` is a thread's among them. Rows past these are zeros.
    ///
    /// # Safety
    /// The tile's bytes are there, and nobody else uses them before the next barrier; and as [`row`](Self::row).
    #[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
    #[inline(always)]
    unsafe fn transform_queries<E: Element, const HEAD_DIM: u32>(
        &self,
        _tile: impl Rows,
        _rows: u32,
        _threads: u32,
        _at: impl Fn(u32) -> QueryAt,
    ) {
    }

    /// Changes a tile of the keys from `keys[0]` to before `keys[1]` of a request, in place, in the same way.
    ///
    /// # Safety
    /// As [`transform_queries`](Self::transform_queries).
    #[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
    #[inline(always)]
    unsafe fn transform_keys<E: Element, const HEAD_DIM: u32>(&self, _tile: impl Rows, _keys: [u32; 2], _threads: u32) {
    }

    /// Turns a raw score (query times key) into a logit in base-2 units: softmax is `2^logit`, normalised. In kernels of
    /// [`attend_kernels!`](crate::attend_kernels) the score is already multiplied by the config's scale and log2(e), so
    /// that it is plain attention's logit.
    fn logit(&self, row: Self::Row, score: f32, key: u32) -> f32;

    /// Where [`logit`](Self::logit) is the score times a positive number, that number; the tall items' softmax then
    /// multiplies and subtracts its maximum in one instruction. The same for all lanes.
    #[inline(always)]
    fn factor(&self) -> Option<f32> {
        None
    }

    /// Whether a row of an item's tile might not see a key of a tile; where not, [`hides`](Self::hides) is not asked.
    /// `rows` are the first and the last row, `keys` the first key and one past the last. The answer is the same for
    /// all lanes.
    #[inline(always)]
    fn may_hide(&self, _rows: [Self::Row; 2], _keys: [u32; 2]) -> bool {
        false
    }

    /// Whether a row does not see a key, one that the planner and the causal rule let it see.
    ///
    /// # Safety
    /// As [`row`](Self::row).
    #[inline(always)]
    unsafe fn hides(&self, _row: Self::Row, _key: u32) -> bool {
        false
    }

    /// What [`logit`](Self::logit), unless there is a [`factor`](Self::factor), and [`hides`](Self::hides) make of a lane's
    /// scores of two rows in a tall item's tile: `scores[n][i]` is `rows[i / 2]`'s, and of key `first_key + 8 n + i % 2`.
    /// `limits` are one past the last keys of the two rows, where a row might not see one.
    ///
    /// # Safety
    /// As [`row`](Self::row); all 32 lanes of the warp call together.
    #[doc(hidden)]
    #[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn tile_logits<const COLUMNS: usize>(
        &self,
        rows: [Self::Row; 2],
        first_key: u32,
        limits: Option<[i32; 2]>,
        scores: &mut [[f32; 4]; COLUMNS],
    ) {
        let has_factor = self.factor().is_some();
        let logit = |score: f32, n: usize, i: usize| {
            if has_factor { score } else { self.logit(rows[i / 2], score, key_of(first_key, n, i)) }
        };
        let hides = |limits: [i32; 2], n: usize, i: usize| {
            let key = key_of(first_key, n, i);
            // SAFETY: the caller's contract.
            key as i32 >= limits[i / 2] || unsafe { self.hides(rows[i / 2], key) }
        };
        if Self::IS_LIGHT {
            unroll::<COLUMNS>(|n| unroll::<4>(|i| scores[n][i] = logit(scores[n][i], n, i)));
            if let Some(limits) = limits {
                unroll::<COLUMNS>(|n| {
                    unroll::<4>(|i| scores[n][i] = if hides(limits, n, i) { f32::NEG_INFINITY } else { scores[n][i] });
                });
            }
        } else {
            // In two passes a heavy variant takes more registers than there are.
            unroll::<COLUMNS>(|n| {
                unroll::<4>(|i| scores[n][i] = logit(scores[n][i], n, i));
                if let Some(limits) = limits {
                    unroll::<4>(|i| scores[n][i] = if hides(limits, n, i) { f32::NEG_INFINITY } else { scores[n][i] });
                }
            });
        }
    }

    /// A logit without a value that the row's softmax starts with in a piece of its keys, and the sum of weights relative to
    /// it: `[sink, 1]` for a sink, `[-inf, 0]` for nothing.
    ///
    /// # Safety
    /// As [`row`](Self::row).
    #[inline(always)]
    unsafe fn start(&self, _row: Self::Row, _piece: Piece) -> [f32; 2] {
        [f32::NEG_INFINITY, 0.0]
    }

    /// Whether weights, which are `2^logit`, are normalised; else outputs are sums and [`start`](Self::start) is not asked.
    /// The same for all lanes.
    #[inline(always)]
    fn is_softmax(&self) -> bool {
        true
    }
}

/// The key of element `[n][i]` of a lane's scores, whose first is `first_key`.
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
#[inline(always)]
fn key_of(first_key: u32, n: usize, i: usize) -> u32 {
    first_key + 8 * n as u32 + i as u32 % 2
}
