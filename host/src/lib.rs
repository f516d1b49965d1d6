//! LLM-serving attention: plan once, run per layer.
pub mod config;
