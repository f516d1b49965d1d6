//! Everything host and device both see: plain `repr(C)` data, no pointer wider than `u64`, layouts asserted.
//!
//! [`plan`] is what the planner writes and the kernels walk; [`parameters`] is what a launch passes; [`divisor`]
//! is division by a number known only at run time; [`tile`] is the table of tile shapes that planner, launcher
//! and kernels share; `manifest` is the kernels' table and the bundle's format, for hosts only.

pub mod divisor;
#[cfg(not(target_arch = "nvptx64"))]
pub mod manifest;
pub mod parameters;
pub mod plan;
pub mod tile;
