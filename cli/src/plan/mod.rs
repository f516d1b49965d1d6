//! `oxattn plan`: makes the schedule of a batch, says why it is so, and draws it.
//!
//! In: KV lengths and a model's shape; no device is needed. Out: the planner's own explanation on standard output, and
//! an SVG document on request.

mod draw;
mod kv_lens;

use crate::arguments::{self, AttentionArguments};
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
    #[arg(long)]
    kv_lens: KvLens,
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
    let kv_lens = &arguments.kv_lens.0;
    let mut planner = planner(arguments)?;
    let page_indptr = page_indptr(kv_lens, arguments.attention.page_size)?;
    let table = PageTable::csr(arguments.attention.page_size, &page_indptr, kv_lens)?;
    let plan = planner.plan(&table, QueryLengths::uniform(arguments.query_len))?;
    crate::print(&format!("{}\n", plan.explain()))?;
    if let Some(path) = &arguments.svg {
        std::fs::write(path, picture(plan, kv_lens))
            .map_err(|source| PlanCommandError::Picture { path: path.clone(), source })?;
    }
    Ok(())
}

/// A planner just large enough for the batch.
fn planner(arguments: &Arguments) -> Result<Planner, PlanCommandError> {
    let config = arguments.attention.config();
    config.validate().map_err(PlanError::from)?;
    let kv_lens = &arguments.kv_lens.0;
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
