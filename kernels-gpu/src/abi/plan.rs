//! The plan image: one flat block of bytes that the planner writes, one copy uploads, and the kernels walk.
//!
//! ```text
//! PlanHeader | queue_begin: [u32; queues + 1] | merge_rows: [MergeRow] | items: [WorkItem]
//! ```
//!
//! The arrays start where the planner's limits put them, whatever the batch; a plan is uploaded up to its last item.
//!
//! Block `b` of the attend kernel runs items `queue_begin[b] .. queue_begin[b + 1]`, in order. Every (query row,
//! key) pair of the batch lies in exactly one item. An item that holds all of a row's keys writes the output
//! itself; otherwise it writes a partial state, and the row's [`MergeRow`] says which states to fold.
//!
//! A *packed row* is one (query token, query head) pair of the heads that share a KV head: packed row `r` of a
//! request is token `r / group` and head `kv_head * group + r % group`.

/// First bytes of an image.
pub const PLAN_MAGIC: u32 = 0x6f78_6131; // "oxa1"

/// Marks an item that writes its output directly.
pub const DIRECT: u32 = u32::MAX;

/// What the image holds and where. Offsets are bytes from the start of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct PlanHeader {
    /// [`PLAN_MAGIC`], which changes with the layout.
    pub magic: u32,
    /// Blocks of the attend kernel.
    pub queues: u32,
    /// Work items in all queues.
    pub items: u32,
    /// Output rows that are folded from partial states.
    pub merge_rows: u32,
    /// Partial states written by the attend kernel.
    pub partial_rows: u32,
    /// Where `queue_begin` starts.
    pub queue_begin_offset_bytes: u32,
    /// Where the items start.
    pub items_offset_bytes: u32,
    /// Where the merge rows start.
    pub merge_rows_offset_bytes: u32,
    /// Counts the plans made by one planner, from 1.
    pub epoch: u64,
    /// Whole image in bytes.
    pub image_bytes: u64,
}

/// Some packed rows of one request and KV head, against one range of its keys. 48 bytes, 16-byte aligned in the
/// image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct WorkItem {
    /// Index of the request in the batch.
    pub request: u32,
    /// First query token of the request in `q` and `out`.
    pub query_begin_tokens: u32,
    /// First packed row of the tile, counted in the request.
    pub row_begin: u32,
    /// Packed rows in the tile (low half) and the KV head (high half).
    pub rows_and_head: u32,
    /// First key of the range.
    pub kv_begin_tokens: u32,
    /// One past the last key of the range; at most `kv_len_tokens`.
    pub kv_end_tokens: u32,
    /// Keys of the request.
    pub kv_len_tokens: u32,
    /// Query tokens of the request.
    pub query_len_tokens: u32,
    /// Where the request's page ids start in the page index array.
    pub page_begin: u32,
    /// Partial state of the tile's first row, or [`DIRECT`].
    pub partial_begin: u32,
    /// Partial states from one row of the tile to the next.
    pub partial_stride: u32,
    /// Tile shape: packed rows a tile can hold.
    pub tile_rows: u32,
}

impl WorkItem {
    /// Packed rows in the tile.
    #[inline(always)]
    pub const fn rows(&self) -> u32 {
        self.rows_and_head & 0xffff
    }

    /// The KV head.
    #[inline(always)]
    pub const fn kv_head(&self) -> u32 {
        self.rows_and_head >> 16
    }

    /// Packs [`rows`](Self::rows) and [`kv_head`](Self::kv_head).
    #[inline(always)]
    pub const fn pack(rows: u32, kv_head: u32) -> u32 {
        rows | kv_head << 16
    }
}

/// One output row folded from the partial states `partial_begin .. partial_begin + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct MergeRow {
    /// Query token in `out`.
    pub token: u32,
    /// Query head.
    pub head: u32,
    /// First partial state.
    pub partial_begin: u32,
    /// How many, at least 1.
    pub count: u32,
}

const _: () = {
    assert!(size_of::<PlanHeader>() == 48);
    assert!(size_of::<WorkItem>() == 48);
    assert!(size_of::<MergeRow>() == 16);
    assert!(core::mem::offset_of!(PlanHeader, epoch) == 32);
    assert!(core::mem::offset_of!(WorkItem, kv_begin_tokens) == 16);
    assert!(core::mem::offset_of!(WorkItem, page_begin) == 32);
};
