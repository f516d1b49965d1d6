//! What the hardware would have paid for a launch.

/// Counts over all blocks of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// `mma` instructions, one a warp.
    pub mma: u64,
    /// `ldmatrix` instructions, one a warp.
    pub load_matrix: u64,
    /// Bytes that asynchronous copies read from global memory.
    pub async_copy_bytes: u64,
    /// Block barriers passed, one a block and phase.
    pub block_barriers: u64,
    /// Named barriers passed, one a phase.
    pub named_barriers: u64,
    /// Shuffles and votes, one a warp.
    pub shuffles: u64,
    /// Atomic operations, one a thread.
    pub atomics: u64,
}
