//! Arguments that several subcommands share.

use oxattn::{AttentionConfig, DType, SplitMode};
use std::str::FromStr;

/// The shape of one layer's attention; by default that of an 8-billion-parameter Llama 3.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct AttentionArguments {
    /// Query heads.
    #[arg(long, default_value_t = 32)]
    pub query_heads: u32,
    /// KV heads; divides the query heads.
    #[arg(long, default_value_t = 8)]
    pub kv_heads: u32,
    /// Elements of a head's row.
    #[arg(long, default_value_t = 128)]
    pub head_dim: u32,
    /// Tokens of a page.
    #[arg(long, default_value_t = 16)]
    pub page_size: u32,
    /// bf16 or f16.
    #[arg(long, default_value = "bf16", value_parser = dtype)]
    pub dtype: DType,
}

impl AttentionArguments {
    /// The configuration, not yet validated.
    pub fn config(&self) -> AttentionConfig {
        AttentionConfig::new(self.query_heads, self.kv_heads, self.head_dim, self.page_size).with_dtype(self.dtype)
    }
}

fn dtype(text: &str) -> Result<DType, String> {
    match text {
        "bf16" => Ok(DType::Bf16),
        "f16" => Ok(DType::F16),
        _ => Err("supported are bf16 and f16".to_owned()),
    }
}

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU where there is one, else the CPU.
    Auto,
    /// The host executor.
    Cpu,
    /// A GPU by ordinal.
    Cuda(u32),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match (text, ordinal) {
            ("auto", _) => Ok(DeviceChoice::Auto),
            ("cpu", _) => Ok(DeviceChoice::Cpu),
            (_, Some(ordinal)) => Ok(DeviceChoice::Cuda(ordinal)),
            _ => Err("supported are auto, cpu and cuda:N".to_owned()),
        }
    }
}

/// `balanced`, `batch-invariant`, `fixed:N` or `unsplit`.
pub fn split_mode(text: &str) -> Result<SplitMode, String> {
    let fixed = text.strip_prefix("fixed:").and_then(|tokens| tokens.parse().ok());
    match (text, fixed) {
        ("balanced", _) => Ok(SplitMode::Balanced),
        ("batch-invariant", _) => Ok(SplitMode::BatchInvariant),
        ("unsplit", _) => Ok(SplitMode::Unsplit),
        (_, Some(tokens)) if tokens > 0 => Ok(SplitMode::FixedSplit { tokens }),
        _ => Err("supported are balanced, batch-invariant, unsplit, and fixed:N for pieces of N tokens".to_owned()),
    }
}

/// The words [`split_mode`] reads.
pub fn split_mode_name(mode: SplitMode) -> String {
    match mode {
        SplitMode::Balanced => "balanced".to_owned(),
        SplitMode::BatchInvariant => "batch-invariant".to_owned(),
        SplitMode::Unsplit => "unsplit".to_owned(),
        SplitMode::FixedSplit { tokens } => format!("fixed:{tokens}"),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_documented() {
        for (text, device) in [
            ("auto", Some(DeviceChoice::Auto)),
            ("cpu", Some(DeviceChoice::Cpu)),
            ("cuda:3", Some(DeviceChoice::Cuda(3))),
            ("cuda", None),
            ("cuda:", None),
            ("cuda:-1", None),
            ("gpu", None),
        ] {
            assert_eq!(text.parse().ok(), device, "{text}");
        }
    }

    #[test]
    fn modes_are_read_as_they_are_written() {
        for text in ["balanced", "batch-invariant", "unsplit", "fixed:512"] {
            assert_eq!(split_mode_name(split_mode(text).unwrap()), text);
        }
        for text in ["", "fixed", "fixed:", "fixed:0", "fixed:-1", "Balanced"] {
            assert!(split_mode(text).is_err(), "{text}");
        }
    }
}
