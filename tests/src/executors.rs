//! The seam between the tables and what runs them.
//!
//! An [`Executor`] gets exactly what the operators hand to a launcher: parameters with host addresses, and the
//! regions those addresses lie in. One with memory of its own copies the regions there, moves each address along
//! (one inside region `r` becomes `copy_of(r) + (address - r.address)`), launches, and copies the regions back.

use crate::buffer::Region;
use kernels_gpu::abi::parameters::{
    AppendParameters, AttendParameters, MergeParameters, MergeStatesParameters, PositionsParameters,
};
use kernels_gpu::abi::plan::PlanHeader;
use oxattn::config::DType;

/// An attention: the attend launch and the merge that follows it.
#[derive(Clone, Debug)]
pub struct AttentionLaunch {
    /// Of the attend kernel.
    pub attend: AttendParameters,
    /// Of the planned merge, which has nothing to do where `header.merge_rows` is 0.
    pub merge: MergeParameters,
    /// The plan's header.
    pub header: PlanHeader,
    /// Elements of a row.
    pub head_dim: u32,
    /// Of queries, cache and outputs.
    pub dtype: DType,
    /// Multiplies raw scores.
    pub softmax_scale: f32,
    /// All memory that the launch touches.
    pub regions: Vec<Region>,
}

/// Something that runs launches.
pub trait Executor {
    /// For messages.
    fn name(&self) -> &'static str;
    /// Attends and merges.
    fn attention(&self, launch: &AttentionLaunch);
    /// Merges states of `dtype`.
    fn merge_states(&self, parameters: &MergeStatesParameters, dtype: DType, regions: &[Region]);
    /// Appends tokens of `source` to a cache of `cache`.
    fn append(&self, parameters: &AppendParameters, source: DType, cache: DType, regions: &[Region]);
    /// Spells out requests and positions.
    fn positions(&self, parameters: &PositionsParameters, regions: &[Region]);
}

/// The host executor.
pub struct Cpu;

impl Executor for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn attention(&self, launch: &AttentionLaunch) {
        let AttentionLaunch { attend, merge, header, .. } = launch;
        // SAFETY: fixtures own the memory that their launches describe, and wait.
        unsafe {
            oxattn::cpu::attend(attend, header, launch.head_dim, launch.dtype, launch.softmax_scale);
            oxattn::cpu::merge(merge, launch.dtype);
        }
    }

    fn merge_states(&self, parameters: &MergeStatesParameters, dtype: DType, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::merge_states(parameters, dtype) }
    }

    fn append(&self, parameters: &AppendParameters, source: DType, cache: DType, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::append(parameters, source, cache) }
    }

    fn positions(&self, parameters: &PositionsParameters, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::positions(parameters) }
    }
}
