//! The plan image: one flat block of bytes that the planner writes, one copy uploads, and the kernel walks.
//!
//! ```text
//! PlanHeader | arrivals: [u32] | queue_begin: [u32; 2 * teams + 1] | mask_requests: [MaskRequest]
//!     | first_kv_rows: [u32] | items: [WorkItem] | shared_rows: [SharedRow] | folds: [u32]
//! ```
//!
//! Ragged keys and values, rows without page ids, are to the kernel one page a request, of [`RAGGED_PAGE_TOKENS`]: pages
//! and tokens are both a row apart, and `first_kv_rows`, each request's first row, are the page ids. The image has them
//! only where keys are ragged.
//!
//! The attend kernel's blocks stand in *teams*: the blocks of a team walk the same queue at the same time, each for
//! its own KV heads. All heads of a request cost the same, so a team is balanced by itself, a schedule has as many
//! items as requests (and cuts), not heads times as many, and the rows of neighbouring heads, which lie side by side
//! in memory, are read at about the same time. Team `t` runs items `queue_begin[2 t] .. queue_begin[2 t + 2]`, in order:
//! the *tall* items up to `queue_begin[2 t + 1]`, whose many rows keep the tensor cores busy, then the *short* ones. Where
//! all items are tall for the prefill kernel, the two runs are prompts and requests of few rows: in this order in even
//! queues and the other way round in odd ones, so that some blocks wait for memory while others compute.
//!
//! Every (query row, key) pair of the batch lies in exactly one item. An item that holds all of its rows' keys writes
//! the output itself. The pieces of a split item write partial states; whichever block finishes a head's last piece
//! (it counts in `arrivals`) folds that head's states, in the order of the pieces, and leaves the count at zero.
//!
//! # Shared prefixes
//! Where requests have their first keys in common, a plan may have *shared* items: the packed rows of several requests
//! that stand side by side, against keys in the pages of the first one. Such a row's pieces come from several items: in
//! the order of the keys those of each shared item above its request, then those of the request's own items, which begin
//! where the last shared one ends. All lie in the array of the request's row tile, so one fold does for them.
//! [`SharedRow`] says where in it a shared item's rows go. These follow the last item in use, and a shared item says how
//! far from the first item its part of them lies.
//!
//! The last piece of a shared item would complete the rows of all its requests at once. So plans that share count nothing:
//! behind the shared rows, `folds` names an item of each split row tile, shared or not, for a launch of the fold kernel
//! after this one. Plans that share nothing have neither array.
//!
//! A *packed row* is one (query token, query head) pair of the heads that share a KV head: packed row `r` of a
//! request is token `r / group` and head `kv_head * group + r % group`.

use core::ops::Range;

use super::divisor::Divisor;

/// Tokens of a ragged request's one page: more than any request has, and the most that [`Divisor`] divides by.
pub const RAGGED_PAGE_TOKENS: u32 = 1 << 31;

/// First bytes of an image.
pub const PLAN_MAGIC: u32 = 0x6f78_6135; // "oxa5"

/// Bit of [`WorkItem::pieces`] that makes an item a shared one.
pub const SHARED: u32 = 1 << 31;

/// [`WorkItem::group`] of items that are not counted, because a launch of its own folds them.
pub const NOT_COUNTED: u32 = u32::MAX;

/// What the image holds and where. Offsets are bytes from the start of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct PlanHeader {
    /// [`PLAN_MAGIC`], which changes with the layout.
    pub magic: u32,
    /// Queues, one a team of blocks.
    pub teams: u32,
    /// Work items in all queues.
    pub items: u32,
    /// (Split tile of rows, KV head) pairs: counts in use in `arrivals`.
    pub groups: u32,
    /// Partial states that the kernel writes.
    pub partial_rows: u32,
    /// Where `arrivals` starts.
    pub arrivals_offset_bytes: u32,
    /// Where `queue_begin` starts.
    pub queue_begin_offset_bytes: u32,
    /// Where the items start.
    pub items_offset_bytes: u32,
    /// Row tiles that the fold kernel folds.
    pub folds: u32,
    /// Where their items' indices start.
    pub folds_offset_bytes: u32,
    /// Counts the plans made by one planner, from 1.
    pub epoch: u64,
    /// Whole image in bytes.
    pub image_bytes: u64,
}

/// Where a packed row of a shared item leaves its partial states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct SharedRow {
    /// State of KV head 0 that the item with [`piece`](WorkItem::piece) 0 writes; that of another is `piece` further.
    pub state: u32,
    /// States from a KV head to the next.
    pub head_states: u32,
}

/// Some packed rows of one request, for every KV head, against one range of its keys; or, if it [is
/// shared](Self::is_shared), of several requests, against keys that they have in common. 48 bytes, 16-byte aligned in the
/// image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct WorkItem {
    /// Index of the request in the batch; of a shared item, the first of those that share.
    pub request: u32,
    /// First query token of the request in `q` and `out`.
    pub query_begin_tokens: u32,
    /// First packed row of the tile, counted from the request's first, also where it is another request's.
    pub row_begin: u32,
    /// Packed rows in the tile: of a short item at most [`ATTEND_TILE_ROWS`](super::tile::ATTEND_TILE_ROWS), of a tall
    /// one at most [`tall_rows`](super::tile::AttendTile::tall_rows).
    pub rows: u32,
    /// First key of the range.
    pub kv_begin_tokens: u32,
    /// One past the last key of the range.
    pub kv_end_tokens: u32,
    /// Position of the request's query token 0 among its keys: `kv_len - query_len`, negative where there are more
    /// queries than keys. Of a shared item, past all its keys, which every row of it sees.
    pub query_position: i32,
    /// Where the request's page ids start in the page index array.
    pub page_begin: u32,
    /// Pieces that the rows' keys are cut into; 1 for an item that writes its output directly. Of a shared item, [`SHARED`]
    /// and the pieces of its row tile's keys.
    pub pieces: u32,
    /// Which piece this is, in the order of the keys; of a shared item, of those of its row tile.
    pub piece: u32,
    /// First partial state of the tile. State of (KV head `h`, row `r`, piece `i`): `partial_begin + (h * rows + r) *
    /// pieces + i`. Of a shared item, where the [`SharedRow`] of its first row lies, counted in
    /// such from the first item.
    pub partial_begin: u32,
    /// First of the tile's counts in `arrivals`, one a KV head; or [`NOT_COUNTED`].
    pub group: u32,
}

impl WorkItem {
    /// Whether the rows are those of several requests.
    #[inline(always)]
    pub fn is_shared(&self) -> bool {
        self.pieces & SHARED != 0
    }

    /// The pages, counted in the request, that the item reads and no piece or row tile before it does. Over the items
    /// of a plan these are the pages in use, each once. A row sees at most `keys_after` keys after its own.
    #[inline(always)]
    pub fn first_read_pages(&self, page_size: Divisor, group: Divisor, keys_after: u32) -> Range<u32> {
        let pages_holding = |tokens: u32| {
            let (pages, rest) = page_size.divide(tokens);
            pages + (rest != 0) as u32
        };
        // Row tiles see ever later keys, so the one before this one ends last.
        let seen_before = if self.row_begin == 0 {
            0
        } else {
            let (token, _) = group.divide(self.row_begin - 1);
            let end = self.query_position as i64 + token as i64 + keys_after as i64 + 1;
            end.clamp(0, self.kv_end_tokens as i64) as u32
        };
        // The page that a cut goes through belongs to the piece before it, and keys before a shared item are shared.
        let begin = if self.piece == 0 && !self.is_shared() {
            page_size.divide(self.kv_begin_tokens).0
        } else {
            pages_holding(self.kv_begin_tokens)
        };
        begin.max(pages_holding(seen_before))..pages_holding(self.kv_end_tokens)
    }
}

/// Where a request's part of a custom mask is; the image has them only where there is a mask. The mask's element of
/// query token `t` and key `k` is `begin_elements + t * kv_len_tokens + k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct MaskRequest {
    /// First element of the request.
    pub begin_elements: u64,
    /// Elements from a query token to the next.
    pub kv_len_tokens: u32,
    /// Fills the struct to 16 bytes.
    pub padding: u32,
}

const _: () = {
    assert!(size_of::<MaskRequest>() == 16);
    assert!(size_of::<PlanHeader>() == 56);
    assert!(size_of::<SharedRow>() == 8);
    // The arrays behind the items are counted from the first item.
    assert!(size_of::<WorkItem>().is_multiple_of(size_of::<SharedRow>()));
    assert!(size_of::<WorkItem>() == 48);
    assert!(core::mem::offset_of!(PlanHeader, epoch) == 40);
    assert!(core::mem::offset_of!(WorkItem, kv_begin_tokens) == 16);
    assert!(core::mem::offset_of!(WorkItem, pieces) == 32);
};
