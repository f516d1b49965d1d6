//! `oxattn bench`: the GPU suite.
//!
//! In: cases (`serving.jsonl`, `rope_append.jsonl`, `rope_attention.jsonl` and `prefix.jsonl` of
//! `benches/definitions/`, or a file of the same form). Out: a row a case, and others of a skewed batch uncut, of a
//! prompt without pages and of shared prefixes that every request reads for itself, on a terminal or as JSON lines:
//! microseconds, bytes that had to move, GB/s, the ratio to the ceiling measured in the same run, and the error against
//! the f64 oracle. Invariant: a case's answer is checked before it is timed, and a wrong answer fails the run.

pub mod case;
pub mod lab;
pub mod rope_attention;
mod rotating;
pub mod sections;
pub mod variants;

use std::path::PathBuf;

use oxattn::Device;

use case::Case;
use lab::Lab;

/// The cases of the section `prefix`.
const PREFIX: &str = include_str!("../../../benches/definitions/prefix.jsonl");
/// Sizes of the suite's own cases and the shapes engines serve.
const SERVING: &str = include_str!("../../../benches/definitions/serving.jsonl");
/// The cases of the section `rope_append`, which run beside those.
const ROPE_APPEND: &str = include_str!("../../../benches/definitions/rope_append.jsonl");

/// The cases of the section `rope_attention`.
const ROPE_ATTENTION: &str = include_str!("../../../benches/definitions/rope_attention.jsonl");

/// Time the GPU suite beside ceilings measured in the same run.
#[derive(clap::Args)]
pub struct Arguments {
    /// Cases, one JSON object a line.
    #[arg(long)]
    cases: Option<PathBuf>,
    /// Sections to run: ceiling, decode, append_kv, rope_append, rope_attention, plan,
    /// prefix, replay.
    #[arg(long, value_delimiter = ',', default_values_t = ["ceiling", "decode", "append_kv", "rope_append", "rope_attention", "plan", "prefix", "replay"].map(String::from))]
    sections: Vec<String>,
    /// Run only cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// GPU to use.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Choose kernels by this file of measured times, as `tune` writes it.
    #[arg(long)]
    tuning: Option<PathBuf>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Start no case after this many seconds.
    #[arg(long, default_value_t = 540)]
    budget_seconds: u64,
}

/// One measured row.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Row {
    pub section: String,
    pub case: String,
    pub peer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_lo: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_hi: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_cold: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_until_idle: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gbps: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_ceiling: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rel_err: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lse_err: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub items: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folded: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<&'static str>,
    pub ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

pub type Failure = Box<dyn std::error::Error>;

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let started = std::time::Instant::now();
    let text = match &arguments.cases {
        Some(path) => std::fs::read_to_string(path)?,
        None => format!("{SERVING}{ROPE_APPEND}{ROPE_ATTENTION}{PREFIX}"),
    };
    let cases = case::parse(&text)?;
    let mut device = Device::cuda(arguments.device)?;
    if let Some(path) = &arguments.tuning {
        device = device.load_tuning(path)?;
        if let Some(Err(mismatch)) = device.tuning() {
            return Err(format!("tuning {}: {mismatch}", path.display()).into());
        }
    }
    let lab = Lab::new(device)?;
    let mut wrong = 0;
    let mut emit = |row: &Row| -> Result<(), Failure> {
        wrong += !row.ok as u32;
        let text = if arguments.json { serde_json::to_string(row)? } else { describe(row) };
        crate::print(&format!("{text}\n"))?;
        Ok(())
    };
    if arguments.sections.iter().any(|section| section == "ceiling") {
        for row in lab.ceiling_rows() {
            emit(&row)?;
        }
    }
    for case in &cases {
        let wanted = arguments.sections.contains(&case.section)
            && arguments.only.as_ref().is_none_or(|only| case.case.contains(only.as_str()));
        if !wanted || started.elapsed().as_secs() > arguments.budget_seconds {
            continue;
        }
        for row in sections::run(&lab, case) {
            emit(&row)?;
        }
    }
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} rows are wrong or failed").into()) }
}

fn describe(row: &Row) -> String {
    let number = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |v| format!("{v:.digits$}"));
    let mut text = format!(
        "{:<10} {:<52} {:<16} {:>9} us  cold {:>8}  {:>6} GB/s  {:>5}",
        row.section,
        row.case,
        row.peer,
        number(row.us, 1),
        number(row.us_cold, 1),
        number(row.gbps, 0),
        number(row.of_ceiling, 3),
    );
    if let Some(tflops) = row.tflops {
        text += &format!("  {tflops:>4.0} TFLOP/s");
    }
    if let Some(error) = row.rel_err {
        text += &format!("  err {error:.1e} lse {:.1e}", row.lse_err.unwrap_or(0.0));
    }
    if let Some(items) = row.items {
        text += &format!("  items {items} folded {} balance {}", row.folded.unwrap_or(0), number(row.balance, 3));
    }
    if let Some(error) = &row.error {
        text += &format!("  {error}");
    }
    if !row.ok {
        text += "  WRONG";
    }
    text
}

fn blank(case: &Case, peer: &str) -> Row {
    Row { section: case.section.clone(), case: case.case.clone(), peer: peer.to_owned(), ok: true, ..Row::default() }
}
