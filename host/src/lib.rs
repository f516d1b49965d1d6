//! LLM-serving attention: plan once, run per layer.
//!
//! In the order the data moves: [`page_table`] says which tokens live in which pages, [`plan`] which query rows meet
//! which keys on which block, [`attention`] uploads the plan and runs it for every layer on a [`Device`], and
//! [`rope`] rotates queries and keys, on request straight into the cache, [`operators`] append to it and merge states;
//! [`validate`] checks page ids where they lie, [`block_sparse`] makes batches of block patterns. [`oracle`] is what all
//! of it is measured against. A first step is [`single`]: one request in one call.
//!
//! Kernels of your own come in a bundle: see [`custom`].
//!
//! Features: `cpu` and `cuda` are the two executors, both on by default; with neither there is only the planning.
//! `emulator` lets tests run kernels of user-defined variants on the CPU executor.

#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod attention;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod block_sparse;
pub mod config;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod custom;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod device;
#[cfg(feature = "cuda")]
pub mod driver;
#[cfg(feature = "emulator")]
mod emulate;
mod error;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod inputs;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod multi_item;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod operators;
pub mod oracle;
pub mod page_table;
pub mod plan;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod rope;
mod rope_config;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod single;
pub mod streaming;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod tensor;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod tuning;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod validate;
pub mod variant;
pub mod workspace;

#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use attention::{Attention, Choice, Explanation, Kernel, Planned, Run, Workspace};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use block_sparse::{BlockSparse, BlockSparseError, Bsr, VariableBlocks};
pub use config::{AttentionConfig, ConfigError, DType, MaskForm};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use custom::{CustomParameters, CustomVariantError};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use device::{Buffer, Device, Stream};
pub use error::Error;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use inputs::{MaskMemory, QueryPositions, Values, VariantInputs};
pub use multi_item::{MultiItem, MultiItemError};
pub use page_table::{Indices, PageTable, PageTableError, QueryLengths};
pub use plan::{Balance, Explain, Limits, NotShared, Plan, PlanError, Planner, Sharing, SplitMode, Target};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use rope::{Rope, RopeAppend, RopePositions, RopeRun, Rotate};
pub use rope_config::{RopeAngles, RopeConfig, RopeError, RopeScaling};
pub use streaming::{Streaming, StreamingError};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use tensor::{ArgumentError, KvMemory, Layout, Lse2, LseE, PageIndices, PagedCache, Rows};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use tuning::{LineError, Machine, Times, Tuning, TuningError, TuningMismatch};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use validate::DeviceValueError;
pub use variant::{alibi_slopes, pack_mask, tree_mask, window_left};
pub use workspace::{WorkspaceError, WorkspaceLayout};

/// The examples of the README, compiled and run with the crate's own.
#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../../README.md")]
pub struct Readme;
