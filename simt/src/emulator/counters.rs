//! What the hardware would have paid for a launch.

/// Counts over all blocks of a launch.
///
/// Sectors and conflicts of loads and stores are counted by warp instruction; the emulator takes accesses of a
/// warp's lanes for one instruction if they came from one source line, at the same repetition since the warp's last
/// rendezvous. No cache is modelled: a sector read by two instructions counts twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// 32-byte sectors that loads, asynchronous and bulk copies read. A region counts as aligned to a sector.
    pub global_sectors_read: u64,
    /// 32-byte sectors that stores and bulk copies wrote, whole or in part.
    pub global_sectors_written: u64,
    /// Bytes that asynchronous copies read from global memory.
    pub async_copy_bytes: u64,
    /// Bulk copies, tensor boxes or plain, one a call.
    pub bulk_copies: u64,
    /// Bytes that these bring to shared memory, zeros included, or take from it.
    pub bulk_copy_bytes: u64,
    /// Atomic operations, one a thread.
    pub atomics: u64,
    /// Passes that shared loads and stores took beyond the least number for their width (asynchronous copies are
    /// not counted).
    pub shared_bank_conflicts: u64,
    /// Passes that `ldmatrix` took beyond one for each of its four matrices.
    pub load_matrix_bank_conflicts: u64,
    /// `ldmatrix` instructions, one a warp.
    pub load_matrix: u64,
    /// `mma` instructions, one a warp.
    pub mma: u64,
    /// `wgmma` instructions, one a warpgroup.
    pub wgmma: u64,
    /// Multiplications and additions of those, `2 * 64 * N * 16` each.
    pub wgmma_flops: u64,
    /// Shuffles and votes, one a warp.
    pub shuffles: u64,
    /// `sync_threads`, one a block and phase.
    pub block_barriers: u64,
    /// Named barriers, one a phase.
    pub named_barriers: u64,
    /// Phases that `mbarrier`s completed.
    pub mbarrier_phases: u64,
}
