//! One error a stage, and the one that wraps them.

use crate::config::ConfigError;

/// Anything that can go wrong between a page table and an output.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The attention itself is not one we can do.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The page table does not hold together.
    #[error(transparent)]
    PageTable(#[from] crate::page_table::PageTableError),
    /// The batch cannot be planned.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
    /// The workspace is too small or misaligned.
    #[error(transparent)]
    Workspace(#[from] crate::workspace::WorkspaceError),
    /// A tensor or plan given to `run` does not fit.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[error(transparent)]
    Argument(#[from] crate::tensor::ArgumentError),
    /// A block-sparse pattern does not hold together.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[error(transparent)]
    BlockSparse(#[from] crate::block_sparse::BlockSparseError),
    /// A user-defined variant has no kernel here.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[error(transparent)]
    CustomVariant(#[from] crate::custom::CustomVariantError),
    /// A kernel of a user-defined variant broke a rule under the emulator.
    #[cfg(feature = "emulator")]
    #[error("kernel {symbol} under the emulator: {fault}")]
    Emulator {
        /// The kernel.
        symbol: String,
        /// The rule, and where it was broken.
        fault: simt::emulator::EmulatorError,
    },
    /// The emulator cannot map a cache for a prefill kernel.
    #[cfg(feature = "emulator")]
    #[error(transparent)]
    EmulatedTensorMap(#[from] simt::emulator::TensorMapError),
    /// A tuning cannot be had from its file.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[error(transparent)]
    Tuning(#[from] crate::tuning::TuningError),
    /// The rotary embedding is not one we can do.
    #[error(transparent)]
    Rope(#[from] crate::rope_config::RopeError),
    /// A check found values on the device that are out of range.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[error(transparent)]
    DeviceValue(#[from] crate::validate::DeviceValueError),
    /// The host has no such block of memory; a GPU says so as a driver's error.
    #[cfg(feature = "cpu")]
    #[error("{bytes} bytes of host memory are needed; the system has no such block")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The GPU or its driver.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Driver(#[from] crate::driver::DriverError),
    /// The kernels that ship with the crate.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Bundle(#[from] crate::launch::bundle::BundleError),
}
