//! LLM-serving attention: plan once, run per layer.
//!
//! In the order the data moves: [`page_table`] says which tokens live in which pages, [`plan`] which query rows meet
//! which keys on which block, [`attention`] uploads the plan and runs it for every layer on a [`Device`], and
//! [`operators`] append to the cache and merge states. [`oracle`] is what all of it is measured against.
pub mod attention;
pub mod config;
#[cfg(feature = "cpu")]
pub mod cpu;
pub mod device;
#[cfg(feature = "cuda")]
pub mod driver;
mod error;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod operators;
pub mod oracle;
pub mod page_table;
pub mod plan;
pub mod tensor;
pub mod workspace;

pub use attention::{Attention, Planned, Run, Workspace};
pub use config::{AttentionConfig, ConfigError, DType};
pub use device::{Buffer, Device, Stream};
pub use error::Error;
pub use page_table::{Indices, PageTable, PageTableError, QueryLengths};
pub use plan::{Balance, Explain, Limits, Plan, PlanError, Planner, SplitMode, Target};
pub use tensor::{ArgumentError, Layout, Lse2, LseE, PageIndices, PagedCache, Rows};
pub use workspace::{WorkspaceError, WorkspaceLayout};
