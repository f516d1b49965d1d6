//! LLM-serving attention: plan once, run per layer.
pub mod config;
#[cfg(feature = "cuda")]
pub mod launch;
