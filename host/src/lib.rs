//! LLM-serving attention: plan once, run per layer.
pub mod config;
pub mod page_table;
pub mod plan;
pub mod workspace;

pub use config::{AttentionConfig, ConfigError, DType};
pub use page_table::{Indices, PageTable, PageTableError, QueryLengths};
pub use plan::{Balance, Explain, Limits, Plan, PlanError, Planner, SplitMode, Target};
pub use workspace::{WorkspaceError, WorkspaceLayout};
