//! Programmatic dependent launch: the next kernel of a stream may start while this one drains.
//! On targets older than sm_90 both calls are nothing: the launch is an ordinary one there.
use crate::body;

/// Blocks until the kernels this launch depends on have finished and their writes are visible.
/// Everything read before it must not be written by them.
#[inline(always)]
pub fn wait_for_previous_grid() {
    body::wait_for_previous_grid()
}

/// Lets the dependent launch start once every block has called this or exited.
#[inline(always)]
pub fn allow_next_grid() {
    body::allow_next_grid()
}
