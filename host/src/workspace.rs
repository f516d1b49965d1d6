//! How the caller's workspace is divided: the plan image, then the partial states.
//!
//! In: a planner's capacities. Out: fixed byte offsets, which depend on the planner's limits and never on a batch,
//! so that addresses captured in a graph stay good when the plan is refreshed. The planner places its arrays by the
//! same [`WorkspaceLayout`], so sizes and offsets cannot disagree.

/// Alignment a workspace's address must have: kernels read plan items and partial outputs 16 bytes at a time.
pub const WORKSPACE_ALIGNMENT_BYTES: u64 = 16;

/// Alignment of every offset: a multiple of the 128-byte lines in which memory moves.
pub(crate) const OFFSET_ALIGNMENT_BYTES: u64 = 256;

/// Offsets and sizes in bytes from the start of the workspace. The plan image starts at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceLayout {
    /// Where the plan's arrival counts start.
    pub arrivals_offset_bytes: u64,
    /// Where the plan's `queue_begin` starts.
    pub queue_begin_offset_bytes: u64,
    /// Where the plan says which part of a mask is each request's.
    pub mask_requests_offset_bytes: u64,
    /// Where the plan says which row of ragged keys and values is each request's first.
    pub first_kv_rows_offset_bytes: u64,
    /// Where the plan's work items start.
    pub items_offset_bytes: u64,
    /// Room for the plan image; a plan uses a prefix of it.
    pub image_bytes: u64,
    /// Where the partial outputs start: f32, `[partial_rows, head_dim]` of the kernel.
    pub partial_out_offset_bytes: u64,
    /// Where the partial LSE start: f32, `[partial_rows]`.
    pub partial_lse_offset_bytes: u64,
    /// The whole workspace.
    pub total_bytes: u64,
    /// Work items a plan may have.
    pub max_items: u32,
    /// Arrival counts a plan may have.
    pub max_groups: u32,
    /// Partial states a plan may have.
    pub max_partial_rows: u32,
    /// Rows of shared items a plan may have; 0 where plans never share.
    pub max_shared_rows: u32,
    /// Most row tiles that a plan leaves to the fold kernel; 0 for an attention whose plans never share.
    pub max_folds: u32,
}

/// A workspace that cannot hold what the planner's limits allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkspaceError {
    /// Too few bytes.
    #[error("workspace has {available_bytes} bytes; the planner's limits need {needed_bytes}")]
    TooSmall {
        /// Bytes the limits need.
        needed_bytes: u64,
        /// Bytes there are.
        available_bytes: u64,
    },
    /// An address kernels cannot read from.
    #[error("workspace address {address:#x} is not a multiple of {WORKSPACE_ALIGNMENT_BYTES} bytes")]
    Misaligned {
        /// The address.
        address: u64,
    },
}

impl WorkspaceLayout {
    /// Refuses a workspace that is too small or not aligned to [`WORKSPACE_ALIGNMENT_BYTES`].
    pub fn check(&self, address: u64, available_bytes: u64) -> Result<(), WorkspaceError> {
        if !address.is_multiple_of(WORKSPACE_ALIGNMENT_BYTES) {
            return Err(WorkspaceError::Misaligned { address });
        }
        if available_bytes < self.total_bytes {
            return Err(WorkspaceError::TooSmall { needed_bytes: self.total_bytes, available_bytes });
        }
        Ok(())
    }
}
