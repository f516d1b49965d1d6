//! The one place where the program calls the library's attention: a cache for each layer, one plan a step.
//!
//! In: the running requests of a step with their pages, then rows of new keys, values and queries. Out: output rows.
//! Invariant: `append` and `run` belong to the latest `plan`, whose page table is the one on the device. Every call
//! returns when the device is done, so that the times it returns are the device's work and one launch, by the host's
//! clock.
//!
//! Unsafe: the operators take raw device addresses, here of buffers that the engine owns.

use crate::arguments::DeviceChoice;
use crate::serve::{Running, Tables};
use oxattn::attention::{Attention, Planned, Run, Workspace};
use oxattn::device::{Buffer, Device, Stream};
use oxattn::operators::{self, Append, Destination};
use oxattn::page_table::MAX_KV_LEN_TOKENS;
use oxattn::tensor::{Layout, PageIndices, PagedCache, Rows};
use oxattn::{AttentionConfig, ConfigError, Limits, PageTable, PageTableError, QueryLengths, Sharing, SplitMode};
use std::time::{Duration, Instant};

/// What to set up.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    pub device: DeviceChoice,
    pub config: AttentionConfig,
    pub mode: SplitMode,
    pub layers: u32,
    /// Pages of each layer's cache.
    pub pages: u32,
    /// Pages that a step's requests name together at most: more than there are where they share some.
    pub named_pages: u64,
    /// Requests of the largest step.
    pub batch: u32,
}

/// New keys and values of some tokens, `[tokens, kv_heads, head_dim]`, and where each token belongs.
pub struct NewTokens {
    /// Index of the request in the step.
    pub requests: Vec<i32>,
    /// Position in the request.
    pub positions: Vec<i32>,
    /// Keys, bits of the configuration's dtype.
    pub keys: Vec<u16>,
    /// Values.
    pub values: Vec<u16>,
}

/// What a plan took and how it came out.
#[derive(Clone, Copy, Debug)]
pub struct PlanFigures {
    /// The host's time in `plan`, its upload's launch included.
    pub time: Duration,
    /// Largest queue load over the mean; 1 where there is no load.
    pub fullest_over_mean: f64,
    /// Items that write a partial state.
    pub split_items: usize,
    /// What became of pages in common.
    pub sharing: Sharing,
}

/// Why the library did not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The library's own refusal.
    #[error(transparent)]
    Library(#[from] oxattn::Error),
    /// More memory than the machine can address.
    #[error("a cache of {pages} pages needs {needed_bytes} bytes a layer; use fewer pages or a smaller batch")]
    CacheTooLarge {
        /// Pages asked for.
        pages: u32,
        /// Keys and values together.
        needed_bytes: u128,
    },
    /// A run without a plan.
    #[error("a layer was run before its step was planned")]
    NotPlanned,
}

impl From<ConfigError> for EngineError {
    fn from(error: ConfigError) -> EngineError {
        EngineError::Library(error.into())
    }
}

impl From<PageTableError> for EngineError {
    fn from(error: PageTableError) -> EngineError {
        EngineError::Library(error.into())
    }
}

/// Tokens that one append takes at least: 8 MiB of keys at 8 heads of 128.
const APPEND_TOKENS: u32 = 4096;

/// A device with caches, buffers for one step, and the attention that serves all layers.
pub struct Engine {
    device: Device,
    device_name: String,
    stream: Stream,
    config: AttentionConfig,
    attention: Attention,
    workspace: Workspace,
    planned: Option<Planned>,
    pages: u32,
    append_limit_tokens: u32,
    caches: Vec<LayerCache>,
    step: StepBuffers,
    /// Outlives `workspace`, which describes it.
    _workspace_memory: Buffer,
}

struct LayerCache {
    keys: Buffer,
    values: Buffer,
}

/// Device memory that every step writes anew.
struct StepBuffers {
    page_begin: Buffer,
    page_indices: Buffer,
    new_requests: Buffer,
    new_positions: Buffer,
    new_keys: Buffer,
    new_values: Buffer,
    queries: Buffer,
    outputs: Buffer,
}

impl Engine {
    /// Opens the device and allocates everything.
    pub fn new(options: EngineOptions) -> Result<Engine, EngineError> {
        let EngineOptions { config, mode, layers, pages, named_pages, batch, .. } = options;
        config.validate()?;
        let (device, device_name) = open(options.device)?;
        let pool_tokens = pages as u64 * config.page_size_tokens as u64;
        let limits = Limits {
            max_requests: batch,
            max_query_tokens: batch,
            max_kv_len_tokens: pool_tokens.min(MAX_KV_LEN_TOKENS as u64) as u32,
            max_kv_tokens: named_pages * config.page_size_tokens as u64,
        };
        let attention = Attention::new(&device, config, mode, limits)?;
        let workspace_memory = device.allocate(attention.workspace_bytes() as usize)?;
        // SAFETY: memory of the device, of this size, owned by the engine as long as the workspace and used for
        // nothing else; every call waits for the device before it returns.
        let workspace = unsafe { Workspace::new(workspace_memory.address(), workspace_memory.bytes() as u64) };

        let element_bytes = config.dtype.bytes();
        let kv_row_bytes = config.kv_heads as usize * config.head_dim as usize * element_bytes;
        let query_row_bytes = config.query_heads as usize * config.head_dim as usize * element_bytes;
        let half_bytes = pool_tokens as u128 * kv_row_bytes as u128;
        let too_large = EngineError::CacheTooLarge { pages, needed_bytes: 2 * half_bytes };
        let half_bytes = isize::try_from(half_bytes).map_err(|_| too_large)? as usize;
        let caches = (0..layers)
            .map(|_| Ok(LayerCache { keys: device.allocate(half_bytes)?, values: device.allocate(half_bytes)? }))
            .collect::<Result<_, EngineError>>()?;

        let append_limit_tokens = batch.max(APPEND_TOKENS);
        let new_tokens = append_limit_tokens as usize;
        let requests = batch as usize;
        let step = StepBuffers {
            page_begin: device.allocate(4 * (requests + 1))?,
            page_indices: device.allocate(4 * named_pages as usize)?,
            new_requests: device.allocate(4 * new_tokens)?,
            new_positions: device.allocate(4 * new_tokens)?,
            new_keys: device.allocate(kv_row_bytes * new_tokens)?,
            new_values: device.allocate(kv_row_bytes * new_tokens)?,
            queries: device.allocate(query_row_bytes * requests)?,
            outputs: device.allocate(query_row_bytes * requests)?,
        };
        Ok(Engine {
            device,
            device_name,
            stream: Stream::default(),
            config,
            attention,
            workspace,
            planned: None,
            pages,
            append_limit_tokens,
            caches,
            step,
            _workspace_memory: workspace_memory,
        })
    }

    /// The attention served.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The device in words.
    pub fn device_name(&self) -> &str {
        &self.device_name
    }

    /// Tokens that one `append` takes at most.
    pub fn append_limit_tokens(&self) -> u32 {
        self.append_limit_tokens
    }

    /// Puts a step's page table on the device and plans the step: one query token a request.
    pub fn plan(&mut self, running: &[Running]) -> Result<PlanFigures, EngineError> {
        let Tables { kv_lens, page_begin, page_ids } = Tables::new(running);
        let table = PageTable::csr(self.config.page_size_tokens, &page_begin, &kv_lens)?;
        table.validate_append(&page_ids, self.pages, QueryLengths::uniform(1))?;
        let shared_tokens = table.shared_tokens_of_pages(&page_ids)?;
        let table = match self.config.shared_prefix_levels {
            0 => table,
            _ => table.with_shared_prefixes(&shared_tokens)?,
        };
        self.step.page_begin.write(0, bytemuck::cast_slice(&page_begin))?;
        self.step.page_indices.write(0, bytemuck::cast_slice(&page_ids))?;

        let begin = Instant::now();
        let planned = self.attention.plan(&table, QueryLengths::uniform(1), &mut self.workspace, self.stream)?;
        let time = begin.elapsed();
        self.planned = Some(planned);
        self.device.synchronize()?;

        let plan = self.attention.latest_plan().ok_or(EngineError::NotPlanned)?;
        let balance = plan.balance();
        Ok(PlanFigures {
            time,
            fullest_over_mean: if balance.mean > 0.0 { balance.max / balance.mean } else { 1.0 },
            split_items: plan.items().iter().filter(|item| item.pieces > 1).count(),
            sharing: plan.sharing(),
        })
    }

    /// Writes new keys and values of the planned step into a layer's cache.
    pub fn append(&mut self, layer: u32, tokens: &NewTokens) -> Result<Duration, EngineError> {
        let StepBuffers { page_begin, page_indices, new_requests, new_positions, new_keys, new_values, .. } =
            &self.step;
        new_requests.write(0, bytemuck::cast_slice(&tokens.requests))?;
        new_positions.write(0, bytemuck::cast_slice(&tokens.positions))?;
        new_keys.write(0, bytemuck::cast_slice(&tokens.keys))?;
        new_values.write(0, bytemuck::cast_slice(&tokens.values))?;
        let count = tokens.requests.len() as u64;
        let rows = |buffer: &Buffer| {
            Rows::contiguous(buffer.address(), self.config.dtype, count, self.config.kv_heads, self.config.head_dim)
        };
        let arguments = Append {
            k: rows(new_keys),
            v: rows(new_values),
            cache: self.cache(layer),
            destination: Destination::Positions {
                requests: new_requests.address(),
                positions: new_positions.address(),
                page_begin: page_begin.address(),
                page_indices: self.page_indices(page_indices),
            },
        };
        self.device.synchronize()?;
        let begin = Instant::now();
        // SAFETY: the buffers are the device's and live; `plan` checked every page id against the pool, and positions
        // are below the request's length in that plan; nothing overlaps.
        unsafe { operators::append(&self.device, &self.config, &arguments, self.stream)? };
        self.device.synchronize()?;
        Ok(begin.elapsed())
    }

    /// Runs a layer's attention for the planned step, `queries` being `[requests, query_heads, head_dim]`.
    pub fn run(&mut self, layer: u32, queries: &[u16]) -> Result<Duration, EngineError> {
        let planned = self.planned.ok_or(EngineError::NotPlanned)?;
        self.step.queries.write(0, bytemuck::cast_slice(queries))?;
        let rows = |buffer: &Buffer| {
            let AttentionConfig { dtype, query_heads, head_dim, .. } = self.config;
            Rows::contiguous(buffer.address(), dtype, planned.query_tokens, query_heads, head_dim)
        };
        let page_indices = self.page_indices(&self.step.page_indices);
        let (q, out) = (rows(&self.step.queries), rows(&self.step.outputs));
        let arguments = Run::new(q, self.cache(layer), page_indices, out);
        self.device.synchronize()?;
        let begin = Instant::now();
        // SAFETY: the buffers are the device's, live, and large enough for the largest step; `plan` checked every page
        // id against the pool; outputs and workspace overlap nothing that is read.
        unsafe { self.attention.run(&planned, &arguments, &mut self.workspace, self.stream)? };
        self.device.synchronize()?;
        Ok(begin.elapsed())
    }

    /// The bits of the latest run's output row of the step's request `index` and query head `head`.
    pub fn output_row(&self, index: usize, head: u32) -> Result<Vec<u16>, EngineError> {
        let head_dim = self.config.head_dim as usize;
        let row = index * self.config.query_heads as usize + head as usize;
        let mut bits = vec![0u16; head_dim];
        self.step.outputs.read(2 * row * head_dim, bytemuck::cast_slice_mut(&mut bits))?;
        Ok(bits)
    }

    fn cache(&self, layer: u32) -> PagedCache {
        let LayerCache { keys, values } = &self.caches[layer as usize];
        PagedCache::separate(keys.address(), values.address(), self.pages as u64, Layout::Nhd, &self.config)
    }

    fn page_indices(&self, buffer: &Buffer) -> PageIndices {
        PageIndices { address: buffer.address(), len: buffer.bytes() as u64 / 4 }
    }
}

/// Opens a device; `Auto` falls back to the CPU and says why.
fn open(choice: DeviceChoice) -> Result<(Device, String), EngineError> {
    let (device, remark) = match choice {
        DeviceChoice::Cpu => (Device::cpu(), String::new()),
        DeviceChoice::Cuda(ordinal) => (Device::cuda(ordinal)?, String::new()),
        DeviceChoice::Auto => match Device::cuda(0) {
            Ok(device) => (device, String::new()),
            Err(error) => (Device::cpu(), format!(" ({error})")),
        },
    };
    let name = format!("{}{remark}", device.describe());
    Ok((device, name))
}
