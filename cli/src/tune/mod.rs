//! `oxattn tune`: times both attention kernels and writes down which batches are faster by which.
//!
//! In: batches, as shapes on the command line or as cases of the GPU suite. Out: a file that
//! [`Device::load_tuning`](oxattn::Device::load_tuning) reads, and a table of the times. Each batch is checked against the
//! oracle and timed as `bench` does it, by the attend kernel and by the prefill kernel, with balanced plans.
//!
//! Invariant: a file is written only when every batch was timed and every answer was right.

mod shape;

use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use oxattn::{DType, Device, Kernel, Machine, PageTable, QueryLengths, SplitMode, Tuning, TuningError};

use crate::arguments::AttentionArguments;
use crate::bench::case::{self, Case};
use crate::bench::lab::Lab;
use crate::bench::variants::config;
use crate::bench::{Failure, sections};
use shape::Shape;

/// Where the kernels are close on an H200: some tokens of many requests, and prompts beside decodes.
const SHAPES: [&str; 21] = [
    "4:1024x64",
    "8:1024x64",
    "16:1024x64",
    "4:4096x64",
    "8:4096x64",
    "16:4096x64",
    "8:16384x64",
    "4:1024x16",
    "8:1024x16",
    "16:1024x16",
    "8:8192x16",
    "16:8192x16",
    "8:1024",
    "8:8192",
    "8:32768",
    "32:8192",
    "64:1024x16",
    "1:4096x128+128:4096",
    "1:4096x128+512:4096",
    "1:4096x64+2048:2048",
    "1:4096x128+512:8192x4",
];

/// Time both attention kernels for batches, and write a file by which a device chooses between them.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Batches: 8:4096x64 is 64 requests of 8 query tokens and 4096 keys, 1:4096x128+512:8192 is a batch of decodes and a
    /// chunk of a prompt; by default some where the kernels are close.
    #[arg(long, value_delimiter = ',', default_values = SHAPES)]
    shapes: Vec<Shape>,
    /// A file of cases as `bench` reads them, in place of shapes.
    #[arg(long, conflicts_with_all = ["shapes", "AttentionArguments"])]
    cases: Option<PathBuf>,
    /// Sections of the cases.
    #[arg(long, value_delimiter = ',', requires = "cases", default_values = SECTIONS)]
    sections: Vec<String>,
    /// File to write.
    #[arg(long, default_value = "oxattn-tuning.txt")]
    out: PathBuf,
    /// GPU to use.
    #[arg(long, default_value_t = 0)]
    device: u32,
    #[command(flatten)]
    attention: AttentionArguments,
}

/// Sections of the suite whose cases are batches of one attention.
const SECTIONS: [&str; 5] = ["decode", "replay", "prefill", "append-chunk", "mixed"];

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuneError {
    /// There is no GPU to time.
    #[error("tuning times the kernels on a GPU, and there is none to be had: {0}")]
    NoGpu(oxattn::Error),
    /// The suite times bf16 alone.
    #[error("dtype is {got}; tuning times bf16")]
    DType {
        /// The value given.
        got: String,
    },
    /// A section whose cases are no batches.
    #[error("section {got} cannot be tuned; {} can", SECTIONS.join(", "))]
    Section {
        /// The value given.
        got: String,
    },
    /// The cases cannot be read.
    #[error("cases {}: {source}", path.display())]
    Cases {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Failure,
    },
    /// There is nothing to time.
    #[error("there is no case of the sections {sections}")]
    NoCases {
        /// The sections asked for.
        sections: String,
    },
    /// A batch could not be timed.
    #[error("{case}: {source}")]
    Case {
        /// The case.
        case: String,
        /// Why.
        source: Failure,
    },
    /// A kernel gave a wrong answer, so its time is worth nothing.
    #[error("{case}: the {kernel} kernel's answer is wrong: relative error {error:.1e}")]
    Wrong {
        /// The case.
        case: String,
        /// The kernel.
        kernel: Kernel,
        /// Against the oracle.
        error: f64,
    },
    /// No batch has two kernels.
    #[error(
        "there is nothing to choose: this GPU, or these head dims and page sizes, have no prefill kernel beside the attend \
         kernel"
    )]
    NothingToChoose,
    /// The library refused a batch.
    #[error(transparent)]
    Tuning(#[from] TuningError),
    /// The file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The table could not be written.
    #[error("cannot write the table: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<(), TuneError> {
    let cases = cases(arguments)?;
    let device = Device::cuda(arguments.device).map_err(TuneError::NoGpu)?;
    let machine = device.machine();
    let lab = Lab::new(device).map_err(|source| TuneError::Case { case: "ceilings".to_owned(), source })?;
    let progress = ProgressBar::new(cases.len() as u64).with_style(
        ProgressStyle::with_template("{bar:40} {pos}/{len} batches, {eta} left").expect("the template is well-formed"),
    );
    let measure = |case: &Case, kernel| {
        let measured = measure(&lab, case, kernel);
        progress.inc(u64::from(kernel == Kernel::Attend));
        measured
    };
    let outcome = tune(&cases, machine, measure)?;
    progress.finish_and_clear();
    write(&outcome.tuning, &arguments.out)?;
    crate::print(&format!("{}wrote {}\n", outcome.table(), arguments.out.display()))?;
    Ok(())
}

/// The batches asked for.
fn cases(arguments: &Arguments) -> Result<Vec<Case>, TuneError> {
    let Some(path) = &arguments.cases else {
        let AttentionArguments { query_heads, kv_heads, head_dim, page_size, dtype } = arguments.attention;
        if dtype != DType::Bf16 {
            return Err(TuneError::DType { got: dtype.to_string() });
        }
        let kv_dtype = dtype.to_string();
        let attention = Case { query_heads, kv_heads, head_dim, page_size, kv_dtype, ..Case::default() };
        return Ok(arguments.shapes.iter().map(|shape| shape.case(&attention)).collect());
    };
    if let Some(got) = arguments.sections.iter().find(|section| !SECTIONS.contains(&section.as_str())) {
        return Err(TuneError::Section { got: got.clone() });
    }
    let refuse = |source| TuneError::Cases { path: path.clone(), source };
    let text = std::fs::read_to_string(path).map_err(|source| refuse(source.into()))?;
    let mut cases = case::parse(&text).map_err(refuse)?;
    cases.retain(|case| arguments.sections.contains(&case.section));
    if let Some(case) = cases.iter().find(|case| case.kv_dtype != "bf16") {
        return Err(TuneError::DType { got: case.kv_dtype.clone() });
    }
    if cases.is_empty() {
        return Err(TuneError::NoCases { sections: arguments.sections.join(", ") });
    }
    Ok(cases)
}

/// Microseconds of a case by a kernel; `None` where there is no such kernel for it.
fn measure(lab: &Lab, case: &Case, kernel: Kernel) -> Result<Option<f64>, TuneError> {
    let mode = SplitMode::Balanced;
    let row = match kernel {
        Kernel::Prefill => sections::by_prefill(lab, case, config(case), mode),
        _ => sections::attention_in(
            lab,
            case,
            config(case),
            mode,
            "oxattn-attend",
            Some(kernel),
            crate::bench::rope_attention::Rotates::Nowhere,
        )
        .map(Some),
    };
    let row = row.map_err(|source| TuneError::Case { case: case.case.clone(), source })?;
    match row {
        Some(row) if !row.ok => {
            let error = row.rel_err.unwrap_or(f64::NAN);
            Err(TuneError::Wrong { case: case.case.clone(), kernel, error })
        }
        row => Ok(row.and_then(|row| row.us)),
    }
}

/// What was found out.
#[derive(Debug)]
struct Outcome {
    tuning: Tuning,
    rows: Vec<TimedRow>,
}

/// A batch's times in microseconds, of the prefill kernel where there is one.
#[derive(Debug)]
struct TimedRow {
    case: String,
    attend_us: f64,
    prefill_us: Option<f64>,
}

/// Times each case by both kernels.
fn tune(
    cases: &[Case],
    machine: Machine,
    mut measure: impl FnMut(&Case, Kernel) -> Result<Option<f64>, TuneError>,
) -> Result<Outcome, TuneError> {
    let mut outcome = Outcome { tuning: Tuning::new(machine), rows: Vec::new() };
    for case in cases {
        let prefill_us = measure(case, Kernel::Prefill)?;
        let Some(attend_us) = measure(case, Kernel::Attend)? else { continue };
        outcome.rows.push(TimedRow { case: case.case.clone(), attend_us, prefill_us });
        if let Some(prefill_us) = prefill_us {
            record(&mut outcome.tuning, case, attend_us, prefill_us)?;
        }
    }
    if outcome.tuning.is_empty() { Err(TuneError::NothingToChoose) } else { Ok(outcome) }
}

fn record(tuning: &mut Tuning, case: &Case, attend_us: f64, prefill_us: f64) -> Result<(), TuneError> {
    let refuse = |source| TuneError::Case { case: case.case.clone(), source };
    let (kv_lens, query_lens) = (case.kv_lens().map_err(refuse)?, case.query_lens().map_err(refuse)?);
    let mut begin = vec![0];
    query_lens.iter().for_each(|query_len| begin.push(begin[begin.len() - 1] + query_len));
    let pages = kv_lens.iter().map(|kv_len| kv_len.div_ceil(case.page_size)).max().unwrap_or(0);
    let table = PageTable::block_table(case.page_size, pages, &kv_lens).map_err(TuningError::from)?;
    let queries = QueryLengths::indptr(&begin).map_err(TuningError::from)?;
    let [attend, prefill] = [attend_us, prefill_us].map(|us| Duration::from_nanos((us * 1e3).round() as u64));
    Ok(tuning.record(&config(case), &table, queries, attend, prefill)?)
}

impl Outcome {
    /// The times for people, and what they say.
    fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.case.len()).max().unwrap_or(0).max("batch".len());
        let mut text = format!("{:<width$}  {:>9}  {:>10}  faster\n", "batch", "attend us", "prefill us");
        for TimedRow { case, attend_us, prefill_us } in &self.rows {
            let (prefill, faster) = match prefill_us {
                None => ("-".to_owned(), "attend, the only one"),
                Some(us) => (format!("{us:.1}"), if us < attend_us { "prefill" } else { "attend" }),
            };
            text += &format!("{case:<width$}  {attend_us:>9.1}  {prefill:>10}  {faster}\n");
        }
        text
    }
}

/// Writes the file at once, so that nobody reads half of it.
fn write(tuning: &Tuning, path: &Path) -> Result<(), TuneError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = std::fs::write(&partial, tuning.to_string()).and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|source| TuneError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
