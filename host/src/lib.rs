//! LLM-serving attention: plan once, run per layer.
pub mod config;
pub mod page_table;

pub use config::{AttentionConfig, ConfigError, DType};
pub use page_table::{Indices, PageTable, PageTableError, QueryLengths};
