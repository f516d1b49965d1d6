//! `oxattn replay`: serves a trace step by step and checks what comes out.
//!
//! In: a trace file and a model's shape. Each step, for the requests that run: one page table, one plan, and for each
//! layer the new keys and values appended, the attention run, and sampled rows compared with the f64 oracle, which
//! sees neither pages nor plan. Out: a [`Report`], and failure if a row is past the tolerance.

mod check;
mod report;
mod tensors;
mod values;

use crate::arguments::{self, AttentionArguments, DeviceChoice};
use crate::engine::{Engine, EngineError, EngineOptions};
use crate::serve::{self, Running, ServeError, ServeLimits, Serving};
use crate::trace::{self, Request, TraceFileError};
use check::{Checker, Sampled};
use indicatif::{ProgressBar, ProgressStyle};
use oxattn::{DType, NotShared, SplitMode};
use report::{Report, Samples};
use std::path::PathBuf;
use tensors::StepTensors;
use values::Values;

/// Serve a trace of requests: plan each step once, append and attend in each layer, check sampled rows.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Azure CSV, ShareGPT turns CSV or Mooncake JSONL; the first line decides which.
    trace: PathBuf,
    /// Steps to run at most; each decodes one token of every running request. 0 runs the whole trace.
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// Requests that run at once at most.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    batch: u32,
    /// Layers, each with a cache of its own; the plan serves them all.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 10))]
    layers: u32,
    /// Pages of each layer's cache; by default as many as the steps need without holding a request back.
    #[arg(long)]
    pages: Option<u32>,
    /// auto (the first GPU where there is one, else cpu), cpu, or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    #[command(flatten)]
    attention: AttentionArguments,
    /// How KV is cut: balanced, batch-invariant, unsplit, or fixed:N for pieces of N tokens.
    #[arg(long, default_value = "balanced", value_parser = arguments::split_mode)]
    mode: SplitMode,
    /// Levels of prompt prefixes that plans may read once for several requests, where a trace says which prompts begin
    /// alike; 0 reads them for each.
    #[arg(long, value_name = "LEVELS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=8))]
    share_prefixes: u32,
    /// Output rows of each step to compare with the f64 oracle.
    #[arg(long, default_value_t = 2)]
    check_rows: u32,
    /// Of the values, the scattered pages and the rows checked.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

/// Why a replay stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace was not read.
    #[error(transparent)]
    Trace(#[from] TraceFileError),
    /// The trace cannot be served.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// Nothing says which prompts begin alike.
    #[error(
        "--share-prefixes is {levels}, but the trace does not say which prompts begin alike; a Mooncake trace does"
    )]
    NothingToShare {
        /// The value given.
        levels: u32,
    },
    /// The library refused a call.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A row is past the tolerance.
    #[error("the worst relative L2 error, {error:.2e}, is past the tolerance of {tolerance:.0e} for {dtype}: {row}")]
    Wrong {
        /// The error found.
        error: f64,
        /// The largest allowed.
        tolerance: f64,
        /// The dtype.
        dtype: DType,
        /// Where.
        row: String,
    },
    /// The report could not be written.
    #[error("cannot write the report: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<(), ReplayError> {
    let requests = trace::read(&arguments.trace)?;
    let report = replay(&requests, arguments)?;
    if arguments.json {
        let text = serde_json::to_string_pretty(&report).map_err(std::io::Error::from)?;
        crate::print(&format!("{text}\n"))?;
    } else {
        crate::print(&report.to_string())?;
    }
    outcome(&report, arguments.attention.dtype)
}

/// Fails where a row was past the tolerance.
fn outcome(report: &Report, dtype: DType) -> Result<(), ReplayError> {
    match (report.worst_error, &report.worst_row) {
        (Some(error), Some(row)) if !report.passed => {
            Err(ReplayError::Wrong { error, tolerance: report.tolerance, dtype, row: row.clone() })
        }
        _ => Ok(()),
    }
}

/// Largest relative L2 error of an output row: 4e-3 for bf16, whose half unit in the last place is 2^-9, and an
/// eighth of it for f16, which has three bits more.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 5e-4,
        _ => 4e-3,
    }
}

fn replay(requests: &[Request], arguments: &Arguments) -> Result<Report, ReplayError> {
    let config = arguments.attention.config().with_shared_prefixes(arguments.share_prefixes);
    // Before the page size divides anything.
    config.validate().map_err(EngineError::from)?;
    if arguments.share_prefixes > 0 && requests.iter().all(|request| request.prompt_blocks.is_empty()) {
        return Err(ReplayError::NothingToShare { levels: arguments.share_prefixes });
    }
    let (batch, page_size_tokens) = (arguments.batch as usize, config.page_size_tokens);
    let step_limit = (arguments.steps > 0).then_some(arguments.steps);
    let forecast = serve::forecast(requests, batch, page_size_tokens, step_limit)?;
    let pages = arguments.pages.unwrap_or(forecast.pages);
    let limits = ServeLimits { batch, pages, page_size_tokens, seed: arguments.seed };
    let mut serving = Serving::new(requests, limits)?;
    let mut engine = Engine::new(EngineOptions {
        device: arguments.device,
        config,
        mode: arguments.mode,
        layers: arguments.layers,
        pages,
        named_pages: Serving::most_named_pages(requests, limits),
        batch: arguments.batch,
    })?;
    let values = Values { seed: arguments.seed, dtype: config.dtype };
    let mut checker = Checker::new(config, values);
    let mut measured = Measured::new(requests.len());
    let progress = ProgressBar::new(forecast.steps).with_style(
        ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {eta} left").expect("the template is well-formed"),
    );

    while step_limit.is_none_or(|limit| measured.steps < limit)
        && let Some(running) = serving.next_step()
    {
        let planned = engine.plan(running)?;
        measured.plan.push_time(planned.time);
        measured.balance.push(planned.fullest_over_mean);
        measured.split_items.push(planned.split_items as f64);
        measured.saved_kv_tokens += planned.sharing.saved_kv_tokens;
        measured.not_shared = planned.sharing.not_shared.or(measured.not_shared);
        let sampled = checker.sample(running, arguments.layers, arguments.check_rows);

        for layer in 0..arguments.layers {
            let tensors = StepTensors { config: &config, values: &values, running, layer };
            for (index, running) in running.iter().enumerate().filter(|(_, running)| running.is_new()) {
                let piece_tokens = engine.append_limit_tokens();
                for begin in (running.cached_tokens..running.prompt_tokens).step_by(piece_tokens as usize) {
                    let end = running.prompt_tokens.min(begin + piece_tokens);
                    engine.append(layer, &tensors.prompt(index, begin..end))?;
                }
            }
            measured.append.push_time(engine.append(layer, &tensors.new_tokens())?);
            measured.run.push_time(engine.run(layer, &tensors.queries())?);
            for &Sampled { index, head, .. } in sampled.iter().filter(|sampled| sampled.layer == layer) {
                checker.check(measured.steps, &running[index], layer, head, &engine.output_row(index, head)?);
            }
        }
        measured.end_step(running);
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(measured.report(arguments, &engine, pages, checker))
}

/// What is recorded on the way.
struct Measured {
    steps: u64,
    tokens: u64,
    kv_tokens: u64,
    saved_kv_tokens: u64,
    cached_prompt_tokens: u64,
    /// Why the latest plan that shared nothing did not.
    not_shared: Option<NotShared>,
    has_run: Vec<bool>,
    batch: Samples,
    skew: Samples,
    plan: Samples,
    append: Samples,
    run: Samples,
    balance: Samples,
    split_items: Samples,
}

impl Measured {
    fn new(requests: usize) -> Measured {
        Measured {
            steps: 0,
            tokens: 0,
            kv_tokens: 0,
            saved_kv_tokens: 0,
            cached_prompt_tokens: 0,
            not_shared: None,
            has_run: vec![false; requests],
            batch: Samples::default(),
            skew: Samples::default(),
            plan: Samples::default(),
            append: Samples::default(),
            run: Samples::default(),
            balance: Samples::default(),
            split_items: Samples::default(),
        }
    }

    fn end_step(&mut self, running: &[Running]) {
        let kv_tokens: u64 = running.iter().map(|running| running.kv_len_tokens() as u64).sum();
        let longest = running.iter().map(Running::kv_len_tokens).max().unwrap_or_default();
        self.steps += 1;
        self.tokens += running.len() as u64;
        self.kv_tokens += kv_tokens;
        let new = running.iter().filter(|running| running.is_new());
        self.cached_prompt_tokens += new.map(|running| running.cached_tokens as u64).sum::<u64>();
        self.batch.push(running.len() as f64);
        self.skew.push(longest as f64 * running.len() as f64 / kv_tokens as f64);
        running.iter().for_each(|running| self.has_run[running.request] = true);
    }

    fn report(self, arguments: &Arguments, engine: &Engine, pages: u32, checker: Checker) -> Report {
        let run_total_us = self.run.sum();
        let (worst_error, worst_row) = checker.worst.unzip();
        let config = engine.config();
        let tolerance = tolerance(config.dtype);
        let token_bytes = 2 * config.kv_heads as u64 * config.head_dim as u64 * config.dtype.bytes() as u64;
        let kv_bytes = (self.kv_tokens - self.saved_kv_tokens) * token_bytes * arguments.layers as u64;
        Report {
            device: engine.device_name().to_owned(),
            mode: arguments::split_mode_name(arguments.mode),
            requests_in_trace: self.has_run.len(),
            requests_run: self.has_run.iter().filter(|&&has_run| has_run).count(),
            steps: self.steps,
            layers: arguments.layers,
            tokens: self.tokens,
            batch: self.batch.spread(),
            skew: self.skew.spread(),
            pages,
            plan_us: self.plan.spread(),
            append_us: self.append.spread(),
            run_us: self.run.spread(),
            run_total_us,
            kv_tokens: self.kv_tokens,
            saved_kv_tokens: self.saved_kv_tokens,
            cached_prompt_tokens: self.cached_prompt_tokens,
            not_shared: self.not_shared.map(|reason| reason.to_string()),
            kv_bytes,
            gigabytes_per_second: if run_total_us > 0.0 { kv_bytes as f64 / 1e3 / run_total_us } else { 0.0 },
            balance: self.balance.spread(),
            split_items: self.split_items.spread(),
            checked_rows: checker.checked_rows,
            worst_error,
            worst_row,
            tolerance,
            // An error that is not a number is not within it.
            passed: worst_error.is_none_or(|error| error <= tolerance),
        }
    }
}

#[cfg(test)]
mod tests;
