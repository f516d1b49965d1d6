//! LLM-serving attention: plan once, run per layer.
pub mod config;
#[cfg(feature = "cpu")]
pub mod cpu;
pub mod oracle;
