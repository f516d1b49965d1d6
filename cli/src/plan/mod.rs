//! `oxattn plan`: makes the schedule of a batch, says why it is so, and draws it.
//!
//! In: KV lengths, or a trace whose first requests run together, and a model's shape; no device is needed. Out: the
//! planner's own explanation on standard output, and an SVG document on request.

mod draw;
mod kv_lens;

use crate::arguments::{self, AttentionArguments};
use crate::serve::{ServeError, Tables};
use crate::trace::{self, TraceFileError};
use draw::{Block, Caption, thousands};
use kernels_gpu::abi::plan::WorkItem;
use kernels_gpu::abi::tile::{AttendTile, Family};
use kv_lens::KvLens;
use oxattn::plan::{Cost, TILE_COST};
use oxattn::{Limits, PageTable, PageTableError, Plan, PlanError, Planner, QueryLengths, SplitMode, Target};
use std::path::PathBuf;

/// Multiprocessors of the GPU that blocks are counted for by default: an H100 or H200.
const MULTIPROCESSORS: u32 = 132;

/// Plan a batch: print why the schedule is as it is, and draw it.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Keys of each request: 512x63,100000 is 63 requests of 512 and one of 100,000.
    #[arg(long, required_unless_present = "trace", conflicts_with = "trace")]
    kv_lens: Option<KvLens>,
    /// A trace as `replay` reads it, whose first requests are the batch, each at the first token it decodes.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Requests of the trace.
    #[arg(long, default_value_t = 64, conflicts_with = "kv_lens", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    batch: u32,
    /// Levels of prompt prefixes that are read once for several requests, where a trace says which prompts begin alike; 0
    /// reads them for each.
    #[arg(long, value_name = "LEVELS", default_value_t = 0, conflicts_with = "kv_lens", value_parser = clap::value_parser!(u32).range(..=8))]
    share_prefixes: u32,
    /// Query tokens of each request.
    #[arg(long, default_value_t = 1)]
    query_len: u32,
    /// Blocks of the attend kernel that run at once; by default as many as 132 multiprocessors hold.
    #[arg(long)]
    blocks: Option<u32>,
    /// Gigabytes a second that the GPU reads from memory, for the predicted time; by default an H200's.
    #[arg(long, default_value_t = 4700, value_parser = clap::value_parser!(u32).range(1..))]
    gb_per_s: u32,
    #[command(flatten)]
    attention: AttentionArguments,
    /// How KV is cut: balanced, batch-invariant, unsplit, or fixed:N for pieces of N tokens.
    #[arg(long, default_value = "balanced", value_parser = arguments::split_mode)]
    mode: SplitMode,
    /// File to draw the schedule to.
    #[arg(long)]
    svg: Option<PathBuf>,
}

/// Why there is no schedule.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanCommandError {
    /// The trace was not read.
    #[error(transparent)]
    Trace(#[from] TraceFileError),
    /// The trace's requests cannot run together.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The planner refused the batch or the shape.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A length is out of range.
    #[error(transparent)]
    PageTable(#[from] PageTableError),
    /// There are more pages or query tokens than 32 bits count.
    #[error("the batch has {got} {what}; supported are at most {}", u32::MAX)]
    BatchTooLarge {
        /// Pages or query tokens.
        what: &'static str,
        /// How many there are.
        got: u64,
    },
    /// The picture could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The explanation could not be written.
    #[error("cannot write the explanation: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<(), PlanCommandError> {
    let batch = Batch::new(arguments)?;
    let mut planner = planner(arguments, &batch.kv_lens)?;
    let plan = planner.plan(&batch.table(arguments)?, QueryLengths::uniform(arguments.query_len))?;
    crate::print(&format!("{}\n", plan.explain()))?;
    if let Some(path) = &arguments.svg {
        std::fs::write(path, picture(plan, &batch.kv_lens))
            .map_err(|source| PlanCommandError::Picture { path: path.clone(), source })?;
    }
    Ok(())
}

/// What is planned.
struct Batch {
    kv_lens: Vec<u32>,
    page_begin: Vec<u32>,
    /// Keys in common with the request before; empty where the batch does not come from a trace.
    shared_tokens: Vec<u32>,
}

impl Batch {
    fn new(arguments: &Arguments) -> Result<Batch, PlanCommandError> {
        let page_size_tokens = arguments.attention.page_size;
        // Before the page size divides anything.
        arguments.attention.config().validate().map_err(PlanError::from)?;
        if let Some(path) = &arguments.trace {
            let requests = trace::read(path)?;
            let first = &requests[..requests.len().min(arguments.batch as usize)];
            let Tables { kv_lens, page_begin, page_ids } = Tables::in_flight(first, first.len(), page_size_tokens)?;
            let shared_tokens =
                PageTable::csr(page_size_tokens, &page_begin, &kv_lens)?.shared_tokens_of_pages(&page_ids)?;
            return Ok(Batch { kv_lens, page_begin, shared_tokens });
        }
        let kv_lens = arguments.kv_lens.as_ref().map_or_else(Vec::new, |kv_lens| kv_lens.0.clone());
        let page_begin = page_indptr(&kv_lens, page_size_tokens)?;
        Ok(Batch { kv_lens, page_begin, shared_tokens: Vec::new() })
    }

    fn table(&self, arguments: &Arguments) -> Result<PageTable<'_>, PageTableError> {
        let table = PageTable::csr(arguments.attention.page_size, &self.page_begin, &self.kv_lens)?;
        if arguments.share_prefixes == 0 { Ok(table) } else { table.with_shared_prefixes(&self.shared_tokens) }
    }
}

/// A planner just large enough for the batch.
fn planner(arguments: &Arguments, kv_lens: &[u32]) -> Result<Planner, PlanCommandError> {
    let config = arguments.attention.config().with_shared_prefixes(arguments.share_prefixes);
    config.validate().map_err(PlanError::from)?;
    let count = |what, got: u64| u32::try_from(got).map_err(|_| PlanCommandError::BatchTooLarge { what, got });
    let max_query_tokens = count("query tokens", kv_lens.len() as u64 * arguments.query_len as u64)?;
    let limits = Limits {
        max_requests: count("requests", kv_lens.len() as u64)?,
        max_query_tokens,
        max_kv_len_tokens: kv_lens.iter().copied().max().unwrap_or(0),
        max_kv_tokens: kv_lens.iter().map(|&kv_len| kv_len as u64).sum(),
    };
    let tile = AttendTile::new(config.attend_head_dim(), Family::Sm90a)
        .expect("validated: there is a kernel for the head dim");
    let mut target =
        Target::for_tile(MULTIPROCESSORS, tile, config.is_plain_for_attend()).with_read_gb_per_s(arguments.gb_per_s);
    target.blocks = arguments.blocks.unwrap_or(target.blocks);
    Ok(Planner::new(config, target, arguments.mode, limits)?)
}

/// Where each request's pages begin, one request after another: where pages lie has no part in a plan.
fn page_indptr(kv_lens: &[u32], page_size_tokens: u32) -> Result<Vec<u32>, PlanCommandError> {
    let mut indptr = vec![0];
    let mut got = 0;
    for kv_len in kv_lens {
        got += kv_len.div_ceil(page_size_tokens) as u64;
        indptr.push(u32::try_from(got).map_err(|_| PlanCommandError::BatchTooLarge { what: "pages", got })?);
    }
    Ok(indptr)
}

/// The plan's queues, drawn.
fn picture(plan: &Plan, kv_lens: &[u32]) -> String {
    let tile_tokens = plan.target().tile_tokens;
    let tiles = |cost: u64| cost as f64 / TILE_COST as f64;
    let block = |(item, cost): (&WorkItem, Cost)| Block {
        request: item.request,
        tiles: tiles(cost.of(plan.tiles(item)) - cost.item),
        blank_tiles: tiles(cost.item),
        split: item.pieces > 1,
    };
    let lanes: Vec<Vec<Block>> = plan.costs().map(|items| items.map(block).collect()).collect();
    let config = plan.config();
    let explain = plan.explain();
    let title = format!(
        "{} requests, {} keys, {}/{} heads of {}: {} items for {} teams of {} blocks",
        thousands(explain.requests as u64),
        thousands(explain.kv_tokens),
        config.query_heads,
        config.kv_heads,
        config.head_dim,
        thousands(explain.items as u64),
        thousands(lanes.len() as u64),
        explain.teams.blocks
    );
    let subtitle = format!(
        "{}: {} of {} row tiles cut, teams {:.1} % busy; a colour is a request, hatching a piece of a cut row tile",
        arguments::split_mode_name(plan.mode()),
        thousands(explain.cut_units),
        thousands(explain.units),
        100.0 * explain.balance.efficiency()
    );
    let caption = Caption { title: &title, subtitle: &subtitle, kv_lens, tile_tokens };
    draw::schedule(&lanes, &caption)
}

#[cfg(test)]
mod tests;
