//! The operator: plan once for a batch, run for every layer.
//!
//! In: a page table and query lengths (host), then queries, keys and values, and page ids (device addresses). Out:
//! outputs and, on request, LSE. Invariant: `run` allocates nothing, waits for nothing and records nothing; it refuses
//! arguments that do not fit the plan in the workspace, before a launch.
//!
//! Walk: [`crate::page_table`] to [`crate::plan`] to here to the attend kernel.
//!
//! Unsafe: [`Attention::run`] and [`Workspace::new`] take raw addresses; only the caller knows that they are live.

use std::sync::atomic::{AtomicU64, Ordering};

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::AttendParameters;
use kernels_gpu::abi::plan::{PlanHeader, RAGGED_PAGE_TOKENS, WorkItem};
use kernels_gpu::variant::RotaryParameters;

use crate::Error;
use crate::config::{AttentionConfig, ConfigError, HEAD_DIM_STEP};
#[cfg(feature = "emulator")]
use crate::custom::config_parameters;
use crate::custom::{Custom, CustomParameters};
use crate::device::{Buffer, Device, Executor, Stream};
use crate::inputs::VariantInputs;
use crate::page_table::{PageTable, QueryLengths};
use crate::plan::{Limits, Plan, PlanError, SplitMode};
use crate::tensor::{
    ABSENT, AnyLse, ArgumentError, KvMemory, PageIndices, PagedCache, Rows, address, is_dtype, matches,
};
use crate::tuning::Measured;
use crate::workspace::WorkspaceLayout;

mod check;
mod path;

pub(crate) use path::BatchLengths;
pub use path::{Choice, Explanation, Kernel};
use path::{Path, Prefill};

/// Attention of one shape over a paged cache, or over ragged keys and values, on one device.
#[derive(Debug)]
pub struct Attention {
    /// Tells attentions of the process apart.
    number: u64,
    device: Device,
    config: AttentionConfig,
    group: Divisor,
    page_size: Divisor,
    attend: Path,
    /// Where there is such a kernel.
    prefill: Option<Prefill>,
    /// The kernel for all batches and why, or whichever suits each.
    kernel: Option<(Kernel, Choice)>,
    /// What the device's tuning has of batches of this attention.
    measured: Measured,
    custom: Option<Custom>,
    /// The angles of the config's rotary embedding.
    turns: Option<Buffer>,
    graphs: bool,
    /// Of the latest plan, by either planner.
    epoch: u64,
    planned: Option<Planned>,
    #[cfg(feature = "cuda")]
    gpu: Option<gpu::Gpu>,
}

/// Memory of the device for the plan and the partial states, of at least
/// [`workspace_bytes`](Attention::workspace_bytes) bytes. Calls take it by `&mut`: two streams need two.
#[derive(Debug)]
pub struct Workspace {
    address: u64,
    bytes: u64,
    /// The plan that lies in it.
    holds: Option<PlanId>,
}

/// A plan among all of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PlanId {
    attention: u64,
    epoch: u64,
}

impl Workspace {
    /// Describes a caller's memory.
    ///
    /// # Safety
    /// The memory is the device's, lives as long as work launched with it runs, and is used for nothing else
    /// meanwhile.
    pub unsafe fn new(address: u64, bytes: u64) -> Workspace {
        Workspace { address, bytes, holds: None }
    }
}

/// A receipt for a plan: `run` takes it and refuses it once a newer plan has replaced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The planner's count of plans.
    pub epoch: u64,
    /// Query tokens of the batch: rows of `q` and `out`.
    pub query_tokens: u64,
    /// Page ids the plan may read.
    pub page_index_len: u64,
    /// Rows that ragged keys and values must have; 0 where they lie in pages.
    pub kv_rows: u64,
    /// Requests of the batch.
    pub requests: u64,
    /// Bytes of the batch's mask, 0 where the attention has none.
    pub mask_bytes: u64,
    id: PlanId,
    workspace: u64,
    header: PlanHeader,
    /// The kernel it is for, why, and which of its paths.
    kernel: Kernel,
    choice: Choice,
    many: bool,
}

impl Planned {
    /// The kernel that the plan is for.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// Why it is for this kernel.
    pub fn choice(&self) -> Choice {
        self.choice
    }
}

/// What one layer's call needs besides the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Queries, `[query tokens, query heads, head_dim]`.
    pub q: Rows,
    /// Keys and values.
    pub kv: KvMemory,
    /// Outputs, shaped like `q` but for the head dim, which is the values'.
    pub out: Rows,
    /// Where the rows' LSE go, if wanted.
    pub lse: Option<AnyLse>,
    /// What the config's variants read.
    pub variant: VariantInputs,
}

impl Run {
    /// A call over a paged cache, without LSE, of an attention whose variants, if any, read nothing at run time.
    pub fn new(q: Rows, cache: PagedCache, page_indices: PageIndices, out: Rows) -> Run {
        let kv = KvMemory::Paged { cache, page_indices };
        Run { q, kv, out, lse: None, variant: VariantInputs::default() }
    }

    /// The same over ragged keys and values, `[rows, kv_heads, head_dim]`, whose strides and head dims may differ:
    /// parts of one fused QKV projection, say. The plan's [`kv_rows`](Planned::kv_rows) says how many rows there must
    /// be.
    pub fn ragged(q: Rows, k: Rows, v: Rows, out: Rows) -> Run {
        Run { q, kv: KvMemory::Ragged { k, v }, out, lse: None, variant: VariantInputs::default() }
    }

    /// The same that also writes the rows' LSE.
    pub fn with_lse(self, lse: impl Into<AnyLse>) -> Run {
        Run { lse: Some(lse.into()), ..self }
    }

    /// The same with what the config's variants read.
    pub fn with_variant(self, variant: VariantInputs) -> Run {
        Run { variant, ..self }
    }

    /// The same with the parameters of the config's custom variant: the struct that its device crate says.
    pub fn with_custom_parameters<P: bytemuck::NoUninit>(self, parameters: &P) -> Run {
        let custom = Some(CustomParameters::new(parameters));
        Run { variant: VariantInputs { custom, ..self.variant }, ..self }
    }
}

impl Attention {
    /// Prepares an attention: checks the configuration, sizes the workspace, loads the kernels.
    pub fn new(device: &Device, config: AttentionConfig, mode: SplitMode, limits: Limits) -> Result<Attention, Error> {
        Attention::build(device, config, mode, limits, false)
    }

    /// The same for calls that are captured into a CUDA graph: grid and addresses never change, so a captured `run`
    /// follows every later `plan` into the same workspace. `q`, `out` and `lse` then have the limits' query tokens, and
    /// ragged keys and values have rows for the limits' keys.
    pub fn for_graphs(
        device: &Device,
        config: AttentionConfig,
        mode: SplitMode,
        limits: Limits,
    ) -> Result<Attention, Error> {
        Attention::build(device, config, mode, limits, true)
    }

    fn build(
        device: &Device,
        config: AttentionConfig,
        mode: SplitMode,
        limits: Limits,
        graphs: bool,
    ) -> Result<Attention, Error> {
        config.validate()?;
        let custom = Custom::find(device, &config)?;
        let attend = Path::new(config, device.target(&config), mode, limits)?;
        let multiprocessors = match &custom {
            Some(custom) => custom.prefill_multiprocessors,
            None => device.prefill_multiprocessors(),
        };
        let prefill = match multiprocessors {
            Some(multiprocessors) => Prefill::new(config, multiprocessors, mode, limits)?,
            None => None,
        };
        let divisor = |field, value| Divisor::new(value).ok_or(ConfigError::Zero { field });
        #[cfg(feature = "cuda")]
        if graphs && let Some(cuda) = device.as_cuda() {
            // A module cannot be loaded while a stream is captured.
            cuda.function(format_args!("{}", check::SYMBOL))?;
        }
        #[cfg(feature = "cuda")]
        let image_bytes = {
            let of_prefill = prefill.iter().flat_map(|prefill| prefill.paths());
            of_prefill.chain([&attend]).map(|path| path.layout().image_bytes).max().unwrap_or(0)
        };
        static ATTENTIONS: AtomicU64 = AtomicU64::new(0);
        Ok(Attention {
            number: ATTENTIONS.fetch_add(1, Ordering::Relaxed),
            device: device.clone(),
            config,
            group: divisor("query_heads / kv_heads", config.group())?,
            page_size: divisor(
                "page_size_tokens",
                if config.ragged { RAGGED_PAGE_TOKENS } else { config.page_size_tokens },
            )?,
            #[cfg(feature = "cuda")]
            gpu: gpu::Gpu::new(device, &config, prefill.as_ref(), attend.layout().max_folds > 0, image_bytes)?,
            measured: Attention::measured(device, &config, mode, prefill.is_some()),
            attend,
            prefill,
            kernel: graphs.then_some((Kernel::Attend, Choice::Graphs)),
            custom,
            turns: config.rope.map(|rope| device.upload(&rope.turns_and_steps())).transpose()?,
            graphs,
            epoch: 0,
            planned: None,
        })
    }

    /// What the device's tuning has of an attention with two kernels: times of balanced plans.
    fn measured(device: &Device, config: &AttentionConfig, mode: SplitMode, has_prefill: bool) -> Measured {
        match device.tuning() {
            Some(Ok(tuning)) if mode == SplitMode::Balanced && has_prefill => tuning.of(config),
            _ => Measured::default(),
        }
    }

    /// The attention's shape.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The same with one kernel for all batches. Else each batch has the one that suits it, and graphs have
    /// [`Kernel::Attend`]. To be called before anything is captured: a graph keeps its kernel, and plans for the other are
    /// laid out in another way.
    ///
    /// # Errors
    /// Refuses a kernel that there is not for the device, the attention or its split mode.
    pub fn with_kernel(self, kernel: Kernel) -> Result<Attention, Error> {
        if kernel == Kernel::Prefill && self.prefill.is_none() {
            let AttentionConfig { head_dim, value_head_dim, page_size_tokens, .. } = self.config;
            return Err(ArgumentError::NoPrefillKernel { head_dim, value_head_dim, page_size_tokens }.into());
        }
        Ok(Attention { kernel: Some((kernel, Choice::Given)), ..self })
    }

    /// The kernel that suits a batch, by the device's [`Tuning`](crate::Tuning) or by its lengths: the one it gets unless
    /// [`with_kernel`](Self::with_kernel) or a graph says otherwise.
    ///
    /// # Errors
    /// Refuses query lengths for another number of requests.
    pub fn suitable_kernel(&mut self, table: &PageTable<'_>, queries: QueryLengths<'_>) -> Result<Kernel, Error> {
        queries.check_requests(table.requests()).map_err(PlanError::from)?;
        let lengths = BatchLengths::new(table, queries, &self.config);
        Ok(self.suitable(table, queries, &lengths).0)
    }

    /// The same and why.
    fn suitable(
        &mut self,
        table: &PageTable<'_>,
        queries: QueryLengths<'_>,
        lengths: &BatchLengths,
    ) -> (Kernel, Choice) {
        let Some(prefill) = &mut self.prefill else { return (Kernel::Attend, Choice::Only) };
        if prefill.suits_shared(table, queries, lengths) {
            return (Kernel::Prefill, Choice::SharedPrefixes);
        }
        lengths.kernel(&self.measured)
    }

    /// Why the latest batch is done as it is.
    pub fn explain(&self) -> Option<Explanation> {
        let Planned { kernel, choice, .. } = self.planned?;
        Some(Explanation { kernel, choice, plan: self.latest_plan()?.explain() })
    }

    /// How the workspace is divided for plans of the attend kernel.
    pub fn workspace_layout(&self) -> WorkspaceLayout {
        self.attend.layout()
    }

    /// Bytes of workspace that every plan within the limits fits in.
    pub fn workspace_bytes(&self) -> u64 {
        self.paths().map(|path| path.layout().total_bytes).max().unwrap_or(0)
    }

    /// The latest plan, for [`Plan::explain`] and drawings.
    pub fn latest_plan(&self) -> Option<&Plan> {
        self.path(self.planned.as_ref()?).planner.latest()
    }

    /// Whether all batches have this kernel.
    fn is_always(&self, kernel: Kernel) -> bool {
        self.kernel.is_some_and(|(fixed, _)| fixed == kernel)
    }

    /// The paths that batches may take.
    fn paths(&self) -> impl Iterator<Item = &Path> {
        let attend = (!self.is_always(Kernel::Prefill)).then_some(&self.attend);
        let prefill = self.prefill.as_ref().filter(|_| !self.is_always(Kernel::Attend));
        attend.into_iter().chain(prefill.into_iter().flat_map(|prefill| prefill.paths()))
    }

    fn path(&self, planned: &Planned) -> &Path {
        match (planned.kernel, &self.prefill) {
            (Kernel::Prefill, Some(prefill)) => prefill.path(planned.many),
            _ => &self.attend,
        }
    }

    /// Plans a batch and uploads the plan with one copy on `stream`. Earlier receipts become stale. Not to be called
    /// while the stream is captured; the host waits only if eight earlier uploads are all still on their way.
    pub fn plan(
        &mut self,
        table: &PageTable<'_>,
        queries: QueryLengths<'_>,
        workspace: &mut Workspace,
        stream: Stream,
    ) -> Result<Planned, Error> {
        for path in self.paths() {
            path.layout().check(workspace.address, workspace.bytes)?;
        }
        #[cfg(feature = "cuda")]
        if let Some(cuda) = self.device.as_cuda() {
            cuda.context().bind()?;
            cuda.check_memory(&[("workspace", workspace.address)])?;
            if stream.is_capturing()? {
                let remedy = "plan before the capture, and again before each replay";
                return Err(ArgumentError::Capturing { call: "plan", remedy }.into());
            }
        }
        self.planned = None;
        workspace.holds = None;
        queries.check_requests(table.requests())?;
        let group = self.config.group();
        let limits = self.attend.planner.limits();
        let limit = limits.max_kv_tokens;
        if self.graphs && table.kv_rows() > limit {
            // What was captured has rows for the limits, spare ones among them.
            let (what, limit_field, got) = ("rows of keys", "max_kv_tokens", table.kv_rows());
            return Err(PlanError::OverLimit { what, limit_field, got, limit }.into());
        }
        // A graph's kernel and path do not depend on the batch.
        let lengths = match self.prefill {
            Some(_) if !self.graphs => BatchLengths::new(table, queries, &self.config),
            _ => BatchLengths::default(),
        };
        let many = self.prefill.as_ref().is_some_and(|prefill| match self.graphs {
            true => prefill.are_many_within(&limits, group),
            false => prefill.are_many(lengths.row_tiles),
        });
        let (kernel, choice) = self.kernel.unwrap_or_else(|| self.suitable(table, queries, &lengths));
        let planner = match (kernel, &mut self.prefill) {
            (Kernel::Prefill, Some(prefill)) => &mut prefill.path_mut(many).planner,
            _ => &mut self.attend.planner,
        };
        planner.count_on_from(self.epoch);
        let plan = planner.plan(table, queries)?;
        self.epoch = plan.epoch();
        match &*self.device.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => {
                let _ = stream;
                let image = plan.image();
                // SAFETY: the workspace is live host memory with room for the image (checked above), by its contract.
                unsafe { (workspace.address as *mut u8).copy_from_nonoverlapping(image.as_ptr(), image.len()) }
            }
            #[cfg(feature = "cuda")]
            Executor::Cuda(_) => {
                if let Some(gpu) = &mut self.gpu {
                    gpu.upload(workspace.address, plan.image(), stream)?;
                }
            }
        }
        let planned = Planned {
            epoch: plan.epoch(),
            query_tokens: plan.query_tokens(),
            requests: plan.requests() as u64,
            mask_bytes: plan.mask_bytes(),
            page_index_len: table.page_index_len() as u64,
            kv_rows: table.kv_rows(),
            id: PlanId { attention: self.number, epoch: plan.epoch() },
            workspace: workspace.address,
            header: plan.header(),
            kernel,
            choice,
            many,
        };
        self.planned = Some(planned);
        workspace.holds = Some(planned.id);
        Ok(planned)
    }

    /// Launches one layer's attention on `stream`.
    ///
    /// # Safety
    /// Every tensor describes live memory of the device, inside its allocation for its shape and strides, that stays
    /// so until the launch has run; every page id the plan's requests use is below the pool's pages; `out`, `lse`
    /// and the workspace overlap nothing that is read.
    pub unsafe fn run(
        &self,
        planned: &Planned,
        arguments: &Run,
        workspace: &mut Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        self.check_receipt(planned, workspace)?;
        let parameters = self.parameters(planned, arguments, workspace)?;
        let variant = self.variant(planned, arguments, workspace)?;
        match &*self.device.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => {
                let _ = stream;
                #[cfg(feature = "emulator")]
                if let Some((kernel, own)) = self.emulated(arguments) {
                    let (blocks, config) = (self.path(planned).blocks(), config_parameters(&variant.modified));
                    let mappable = match planned.kernel {
                        Kernel::Attend => None,
                        Kernel::Prefill => Some(arguments.kv.mappable(&self.config, [&parameters.k, &parameters.v])?),
                    };
                    // SAFETY: the addresses are live host memory, by this function's contract and the checks above.
                    return unsafe {
                        self.device.emulation.launch(kernel, blocks, &parameters, &config, mappable, own)
                    };
                }
                // SAFETY: the addresses are live host memory, by this function's contract and the checks above.
                unsafe { crate::cpu::attend(&parameters, &planned.header, self.config.dtype, &variant) };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                cuda.context().bind()?;
                if !self.graphs && stream.is_capturing()? {
                    let remedy = "make it with Attention::for_graphs";
                    return Err(ArgumentError::Capturing { call: "run", remedy }.into());
                }
                let [k, v] = arguments.kv.names();
                cuda.check_memory(&[
                    ("q", parameters.q.address),
                    (k, parameters.k.address),
                    (v, parameters.v.address),
                    ("page_indices", parameters.page_indices),
                    ("out", parameters.out.address),
                    ("lse", parameters.lse.address),
                    ("variant.sinks", variant.modified.sinks),
                    ("variant.alibi_slopes", variant.modified.alibi_slopes),
                    ("variant.temperatures", variant.modified.temperatures),
                    ("variant.mask", variant.modified.mask),
                    ("variant.rope_positions", variant.positions),
                    ("variant.query_norm", variant.query_norm),
                    ("variant.key_norm", variant.key_norm),
                ])?;
                match &self.gpu {
                    // SAFETY: the addresses are live memory of the device, by this function's contract.
                    Some(gpu) if planned.header.items != 0 || self.graphs => unsafe {
                        let (path, own) = (self.path(planned), arguments.variant.custom.as_ref());
                        if planned.kernel == Kernel::Prefill {
                            let (views, box_tokens) = ([&parameters.k, &parameters.v], parameters.box_tokens);
                            let maps = arguments.kv.maps(&self.config, views, box_tokens)?;
                            gpu.run_prefill(cuda, path.blocks(), (&parameters, &maps), &variant, own, stream)?;
                        } else {
                            gpu.run(cuda, path.blocks(), &parameters, &variant, own, stream)?;
                        }
                        let folds = if self.graphs { path.layout().max_folds } else { planned.header.folds };
                        gpu.fold(cuda, folds, (&parameters, planned.workspace, path.planner.state_columns()), stream)
                    },
                    _ => Ok(()),
                }
            }
        }
    }

    /// What the config's variants do, with this call's addresses.
    fn variant(&self, planned: &Planned, arguments: &Run, workspace: &Workspace) -> Result<RotaryParameters, Error> {
        if self.config.sigmoid_bias.is_some() && arguments.lse.is_some() {
            return Err(ArgumentError::NoLse.into());
        }
        if let (Some(custom), Some(own)) = (&self.custom, &arguments.variant.custom) {
            custom.check(own)?;
        }
        // What is captured into a graph must do for every batch within the limits.
        let path = self.path(planned);
        let limits = path.planner.limits();
        let (requests, mask_bytes) = match self.config.mask {
            _ if !self.graphs => (planned.requests, planned.mask_bytes),
            None => (limits.max_requests as u64, 0),
            Some(form) => (limits.max_requests as u64, limits.mask_bytes(form)),
        };
        let mask_requests = workspace.address + path.layout().mask_requests_offset_bytes;
        let tokens = if self.graphs { limits.max_query_tokens as u64 } else { planned.query_tokens };
        let turns = self.turns.as_ref().map_or(0, Buffer::address);
        Ok(arguments.variant.parameters(&self.config, [requests, tokens], mask_bytes, mask_requests, turns)?)
    }

    /// The custom variant's kernels for the emulator, and its parameters.
    #[cfg(feature = "emulator")]
    fn emulated<'a>(&'a self, arguments: &'a Run) -> Option<(&'a crate::emulate::Kernels, &'a CustomParameters)> {
        Some((self.custom.as_ref()?.emulated.as_ref()?, arguments.variant.custom.as_ref()?))
    }

    fn check_receipt(&self, planned: &Planned, workspace: &Workspace) -> Result<(), ArgumentError> {
        let latest = self.planned.ok_or(ArgumentError::NotPlanned)?;
        if planned.id.attention != self.number {
            return Err(ArgumentError::OtherAttention);
        }
        if planned.epoch != latest.epoch {
            return Err(ArgumentError::StalePlan { got: planned.epoch, latest: latest.epoch });
        }
        if workspace.address != planned.workspace {
            return Err(ArgumentError::OtherWorkspace { planned: planned.workspace, got: workspace.address });
        }
        if workspace.holds != Some(planned.id) {
            return Err(ArgumentError::WorkspaceReused { address: workspace.address });
        }
        Ok(())
    }

    fn parameters(&self, planned: &Planned, arguments: &Run, workspace: &Workspace) -> Result<AttendParameters, Error> {
        let config = &self.config;
        let Run { q, kv, out, lse, variant: _ } = arguments;
        is_dtype("q", q.dtype, config.dtype)?;
        is_dtype("out", out.dtype, config.dtype)?;
        let path = self.path(planned);
        let (limits, layout) = (path.planner.limits(), path.layout());
        let tokens = if self.graphs { limits.max_query_tokens as u64 } else { planned.query_tokens };
        let (k, v, page_indices) = match kv {
            KvMemory::Paged { cache, page_indices } => {
                is_dtype("cache.k", cache.k.dtype, config.dtype)?;
                is_dtype("cache.v", cache.v.dtype, config.dtype)?;
                let (k, v) = cache.views(config)?;
                let page_ids = planned.page_index_len;
                if page_indices.len < page_ids {
                    matches("page_indices", "len", page_indices.len, page_ids)?;
                }
                // A later plan of a captured call may have page ids where this one has none.
                let is_read = page_ids != 0 || self.graphs;
                (k, v, address("page_indices", page_indices.address, is_read, 4)?)
            }
            KvMemory::Ragged { k, v } => {
                if !config.ragged {
                    let (input, made) = ("k and v without pages", "with AttentionConfig::ragged");
                    return Err(ArgumentError::UnusedInput { input, made }.into());
                }
                let rows = if self.graphs { limits.max_kv_tokens } else { planned.kv_rows };
                let first_kv_rows = workspace.address + layout.first_kv_rows_offset_bytes;
                let k = k.ragged_view("k", rows, config, config.head_dim)?;
                (k, v.ragged_view("v", rows, config, config.value_head_dim)?, first_kv_rows)
            }
        };
        let (lse, lse_scale) = match lse {
            Some(lse) => lse.view(tokens, config.query_heads)?,
            None => (ABSENT, 1.0),
        };
        let box_tokens = match (&self.prefill, planned.kernel) {
            (Some(prefill), Kernel::Prefill) => prefill.box_tokens,
            _ => 0,
        };
        Ok(AttendParameters {
            queue_begin: workspace.address + layout.queue_begin_offset_bytes,
            items: workspace.address + layout.items_offset_bytes,
            arrivals: workspace.address + layout.arrivals_offset_bytes,
            page_indices,
            partial_out: workspace.address + layout.partial_out_offset_bytes,
            partial_lse: workspace.address + layout.partial_lse_offset_bytes,
            q: q.view("q", tokens, config.query_heads, config.head_dim)?,
            out: out.view("out", tokens, config.query_heads, config.value_head_dim)?,
            lse,
            k,
            v,
            page_size: self.page_size,
            group: self.group,
            team_blocks: path.team_blocks,
            heads_per_block: path.teams.heads_per_block,
            kv_heads: config.kv_heads,
            causal: config.causal as u32,
            lse_scale,
            box_tokens,
            key_pieces: config.head_dim / HEAD_DIM_STEP,
            value_pieces: config.value_head_dim / HEAD_DIM_STEP,
        })
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests;

// The kernels read items 16 bytes at a time.
const _: () = assert!(size_of::<WorkItem>().is_multiple_of(16));

/// The GPU's half of an attention: its kernels and its staging ring.
#[cfg(feature = "cuda")]
mod gpu {
    use kernels_gpu::abi::parameters::{AttendParameters, CacheMaps, FoldParameters};
    use kernels_gpu::abi::tile::FOLD_BLOCKS_PER_MULTIPROCESSOR;
    use kernels_gpu::variant::{RotaryParameters, StandardParameters};

    use super::Prefill;
    use crate::custom::{CustomParameters, config_parameters};
    use crate::driver::{Event, Function, PinnedMemory, Stream};
    use crate::launch::Cuda;
    use crate::{Error, config::AttentionConfig, device::Device};

    /// Uploads that may be on their way at once.
    const STAGING_BUFFERS: usize = 8;

    #[derive(Debug)]
    pub struct Gpu {
        /// The attend kernel, and whether it is plain attention's.
        attend: (Function, bool),
        /// The same of the prefill kernel.
        prefill: Option<(Function, bool)>,
        /// Whether the kernels are ones that change queries and keys.
        changes_rows: bool,
        /// For attentions whose plans may share prefixes.
        fold: Option<Function>,
        staging: Vec<Staging>,
        next: usize,
    }

    #[derive(Debug)]
    struct Staging {
        memory: PinnedMemory,
        uploaded: Event,
        used: bool,
    }

    impl Gpu {
        /// Loads the kernels, that of `prefill` too if there is one, and makes room to stage plan images of up to
        /// `image_bytes`.
        pub fn new(
            device: &Device,
            config: &AttentionConfig,
            prefill: Option<&Prefill>,
            may_share: bool,
            image_bytes: u64,
        ) -> Result<Option<Gpu>, Error> {
            let Some(cuda) = device.as_cuda() else { return Ok(None) };
            let attend = cuda.function(format_args!("{}", config.attend_symbol()))?;
            let prefill = prefill.map(|prefill| {
                let function = cuda.function(format_args!("{}", config.prefill_symbol(prefill.tile)))?;
                Ok::<_, Error>((function, config.is_plain()))
            });
            let prefill = prefill.transpose()?;
            let fold = may_share.then(|| cuda.function(format_args!("fold_{}", config.dtype))).transpose()?;
            cuda.context().bind()?;
            let staging = (0..STAGING_BUFFERS)
                .map(|_| {
                    let memory = PinnedMemory::new(image_bytes as usize)?;
                    Ok(Staging { memory, uploaded: Event::new()?, used: false })
                })
                .collect::<Result<_, Error>>()?;
            let attend = (attend, config.is_plain_for_attend());
            Ok(Some(Gpu { attend, prefill, changes_rows: config.changes_rows(), fold, staging, next: 0 }))
        }

        pub fn upload(&mut self, workspace: u64, image: &[u8], stream: Stream) -> Result<(), Error> {
            let staging = &mut self.staging[self.next];
            self.next = (self.next + 1) % STAGING_BUFFERS;
            if staging.used && !staging.uploaded.is_done()? {
                staging.uploaded.synchronize()?;
            }
            let source = &mut staging.memory.as_mut_slice()[..image.len()];
            source.copy_from_slice(image);
            // SAFETY: the workspace has room for the image (checked by the caller); the staging buffer is not reused
            // before its event.
            unsafe { stream.upload(workspace, source)? };
            staging.uploaded.record(stream)?;
            staging.used = true;
            Ok(())
        }

        /// # Safety
        /// The parameters describe live memory of the device; the attention has a prefill kernel.
        pub unsafe fn run_prefill(
            &self,
            cuda: &Cuda,
            blocks: u32,
            (parameters, maps): (&AttendParameters, &CacheMaps),
            variant: &RotaryParameters,
            custom: Option<&CustomParameters>,
            stream: Stream,
        ) -> Result<(), Error> {
            let (kernel, is_plain) =
                self.prefill.as_ref().expect("plans for a prefill kernel come where one was loaded");
            // SAFETY: the caller's contract is the kernel's own.
            unsafe {
                if let Some(own) = custom {
                    let config = config_parameters(&variant.modified);
                    cuda.launch_custom(kernel, stream, blocks, (parameters, &config), Some(maps), own)
                } else if *is_plain {
                    let plain = StandardParameters { scale_log2: variant.modified.scale };
                    cuda.launch_three(kernel, stream, blocks, (parameters, &plain, maps))
                } else if self.changes_rows {
                    cuda.launch_three(kernel, stream, blocks, (parameters, variant, maps))
                } else {
                    cuda.launch_three(kernel, stream, blocks, (parameters, &variant.modified, maps))
                }
            }
        }

        /// # Safety
        /// The parameters describe live memory of the device.
        pub unsafe fn run(
            &self,
            cuda: &Cuda,
            blocks: u32,
            parameters: &AttendParameters,
            variant: &RotaryParameters,
            custom: Option<&CustomParameters>,
            stream: Stream,
        ) -> Result<(), Error> {
            let (kernel, is_plain) = &self.attend;
            // SAFETY: the caller's contract is the kernel's own.
            unsafe {
                if let Some(own) = custom {
                    let config = config_parameters(&variant.modified);
                    cuda.launch_custom(kernel, stream, blocks, (parameters, &config), None, own)
                } else if *is_plain {
                    let plain = StandardParameters { scale_log2: variant.modified.scale };
                    cuda.launch_pair(kernel, stream, blocks, parameters, &plain)
                } else if self.changes_rows {
                    cuda.launch_pair(kernel, stream, blocks, parameters, variant)
                } else {
                    cuda.launch_pair(kernel, stream, blocks, parameters, &variant.modified)
                }
            }
        }

        /// Folds the row tiles that the launch before left, up to `folds` of each KV head: fewer blocks take several.
        ///
        /// # Safety
        /// The parameters are those of the launch before, and the plan's address is the workspace's.
        pub unsafe fn fold(
            &self,
            cuda: &Cuda,
            folds: u32,
            (attend, plan, state_columns): (&AttendParameters, u64, u32),
            stream: Stream,
        ) -> Result<(), Error> {
            let Some(fold) = self.fold.as_ref().filter(|_| folds > 0) else { return Ok(()) };
            let most = FOLD_BLOCKS_PER_MULTIPROCESSOR * cuda.properties().multiprocessors;
            let blocks = folds.saturating_mul(attend.kv_heads).min(most);
            let parameters = FoldParameters { attend: *attend, plan, state_columns, padding: 0 };
            // SAFETY: the caller's contract is the kernel's own.
            unsafe { cuda.launch(fold, stream, blocks, &parameters) }
        }
    }
}
