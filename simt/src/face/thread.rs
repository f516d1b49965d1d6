//! Who am I: ids and extents. All one-dimensional; oxattn's kernels need no more.
use crate::body;

/// Index of this thread in its block.
#[inline(always)]
pub fn thread_idx_x() -> u32 {
    body::thread_idx_x()
}

/// Index of this block in the grid.
#[inline(always)]
pub fn block_idx_x() -> u32 {
    body::block_idx_x()
}

/// Threads in a block.
#[inline(always)]
pub fn block_dim_x() -> u32 {
    body::block_dim_x()
}

/// Blocks in the grid.
#[inline(always)]
pub fn grid_dim_x() -> u32 {
    body::grid_dim_x()
}

/// Index of this thread in its warp, 0 to 31.
#[inline(always)]
pub fn lane_idx() -> u32 {
    thread_idx_x() % 32
}

/// Index of this warp in its block.
#[inline(always)]
pub fn warp_idx() -> u32 {
    thread_idx_x() / 32
}
