//! The seam between the tables and what runs them.
//!
//! An [`Executor`] and [`Operators`] get exactly what the library hands to a launcher: parameters with host
//! addresses, and the regions those addresses lie in. What has memory of its own copies the regions there, moves each
//! address along (one inside region `r` becomes `copy_of(r) + (address - r.address)`), launches, and copies them back.
//!
//! Unsafe: executors take addresses; fixtures own the memory behind them and wait for the launch.

use crate::buffer::{Access, Region};
use kernels_gpu::abi::manifest::LaunchBounds;
use kernels_gpu::abi::parameters::{
    AppendParameters, AttendParameters, CacheView, CheckAppendParameters, CheckPageIdsParameters, FoldParameters,
    MergeStatesParameters, PositionsParameters, RopeAppendParameters, RopeParameters,
};
use kernels_gpu::abi::plan::PlanHeader;
use kernels_gpu::abi::plan::RAGGED_PAGE_TOKENS;
use kernels_gpu::abi::tile::{
    APPEND_PIECES, APPEND_THREADS, Family, MERGE_THREADS, PrefillTile, ROPE_THREADS, attend_head_dim,
};
use kernels_gpu::entries::{KERNELS, Parameters, body};
use kernels_gpu::variant::{RotaryParameters, StandardParameters};
use oxattn::config::DType;
use oxattn::rope::RopeConfig;
use simt::bulk::TensorMap;
use simt::emulator::{Counters, GlobalMemory, Launch, RawAccess, TensorMapDescription};
use simt::wgmma::Swizzle;
use std::cell::Cell;

/// An attention.
#[derive(Clone, Debug)]
pub struct AttentionLaunch {
    /// Of the attend kernel.
    pub attend: AttendParameters,
    /// The plan's header.
    pub header: PlanHeader,
    /// Address of the plan's image.
    pub plan: u64,
    /// Blocks of all teams.
    pub blocks: u32,
    /// Elements of a key and of a value.
    pub head_dims: [u32; 2],
    /// Of queries, cache and outputs.
    pub dtype: DType,
    /// What it does beside plain softmax.
    pub variant: RotaryParameters,
    /// Whether that is nothing.
    pub is_plain: bool,
    /// Whether it changes queries and keys.
    pub changes_rows: bool,
    /// Pages of the cache.
    pub pages: u32,
    /// All memory that the launch touches.
    pub regions: Vec<Region>,
}

/// Something that runs any plan.
pub trait Executor {
    /// Attends.
    fn attention(&self, launch: &AttentionLaunch);

    /// Whether queries and keys that it changes are rounded to their dtype.
    fn rounds_rows(&self) -> bool {
        true
    }
}

/// Something that runs the small operators.
pub trait Operators {
    /// Merges states of `dtype`.
    fn merge_states(&self, parameters: &MergeStatesParameters, dtype: DType, regions: &[Region]);
    /// Appends tokens of `source` to a cache of `cache`.
    fn append(&self, parameters: &AppendParameters, source: DType, cache: DType, regions: &[Region]);
    /// Spells out requests and positions.
    fn positions(&self, parameters: &PositionsParameters, regions: &[Region]);
}

/// Something that runs the checks of values on the device.
pub trait CheckLaunches {
    /// Checks the page ids of a plan.
    fn check_page_ids(&self, parameters: &CheckPageIdsParameters, regions: &[Region]);
    /// Checks where an append would write.
    fn check_append(&self, parameters: &CheckAppendParameters, regions: &[Region]);
}

/// A rotation.
#[derive(Clone, Debug)]
pub struct RopeLaunch {
    /// What the parameters were made from; a table's address is a host address.
    pub config: RopeConfig,
    /// Of the kernel.
    pub parameters: RopeParameters,
    /// Of the rows.
    pub dtype: DType,
    /// All memory that the launch touches.
    pub regions: Vec<Region>,
}

/// Something that rotates queries and keys.
pub trait Rotations {
    /// Rotates.
    fn rope(&self, launch: &RopeLaunch);
}

/// A rotation whose keys go to the cache, with their values.
#[derive(Clone, Debug)]
pub struct RopeAppendLaunch {
    /// What the rotation's parameters were made from; a table's address is a host address.
    pub config: RopeConfig,
    /// Of the kernel.
    pub parameters: RopeAppendParameters,
    /// Of the rows.
    pub source: DType,
    /// Of the cache.
    pub cache: DType,
    /// All memory that the launch touches.
    pub regions: Vec<Region>,
}

/// Something that rotates and appends, in one launch and in two.
pub trait RotatedAppends: Rotations + Operators {
    /// Rotates queries and keys and appends keys and values.
    fn rope_append(&self, launch: &RopeAppendLaunch);
}

/// The host executor.
pub struct Cpu;

impl Executor for Cpu {
    fn attention(&self, launch: &AttentionLaunch) {
        let AttentionLaunch { attend, header, dtype, variant, .. } = launch;
        // SAFETY: fixtures own the memory that their launches describe, and wait.
        unsafe { oxattn::cpu::attend(attend, header, *dtype, variant) }
    }

    fn rounds_rows(&self) -> bool {
        false
    }
}

impl Operators for Cpu {
    fn merge_states(&self, parameters: &MergeStatesParameters, dtype: DType, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::merge_states(parameters, dtype) }
    }

    fn append(&self, parameters: &AppendParameters, source: DType, cache: DType, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::append(parameters, source, cache) }
    }

    fn positions(&self, parameters: &PositionsParameters, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::positions(parameters) }
    }
}

impl CheckLaunches for Cpu {
    fn check_page_ids(&self, parameters: &CheckPageIdsParameters, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::check_page_ids(parameters) }
    }

    fn check_append(&self, parameters: &CheckAppendParameters, _: &[Region]) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::check_append(parameters) }
    }
}

impl Rotations for Cpu {
    fn rope(&self, launch: &RopeLaunch) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::rope(&launch.parameters, launch.dtype) }
    }
}

impl RotatedAppends for Cpu {
    fn rope_append(&self, launch: &RopeAppendLaunch) {
        // SAFETY: as above.
        unsafe { oxattn::cpu::rope_append(&launch.parameters, launch.source, launch.cache) }
    }
}

/// The kernels themselves, under `simt`'s emulator; a fault panics.
pub struct Emulator {
    family: Family,
    seed: u64,
    counters: Cell<Counters>,
}

impl Emulator {
    /// The kernels of `family`; `seed` picks the order of blocks, warps and lanes.
    pub fn new(family: Family, seed: u64) -> Emulator {
        Emulator { family, seed, counters: Cell::default() }
    }

    /// What the last launch would have cost.
    pub fn counters(&self) -> Counters {
        self.counters.get()
    }

    /// Runs `symbol` in `blocks` blocks with its launch bounds; no memory outside `regions` is touched.
    fn launch(&self, symbol: &str, blocks: u32, parameters: Parameters, regions: &[Region]) {
        let kernel = KERNELS.iter().find(|kernel| kernel.symbol == symbol).expect("a kernel's symbol");
        let bounds = (kernel.launch)(self.family).expect("a kernel of the family");
        let mut memory = GlobalMemory::new();
        for region in regions {
            let access = match region.access {
                Access::Read => RawAccess::ReadOnly,
                Access::Update => RawAccess::Writable,
                Access::Produce => RawAccess::Uninitialised,
            };
            // SAFETY: fixtures own the memory that their launches describe, and wait.
            unsafe { memory.register_raw(region.address, region.bytes, access) };
        }
        let LaunchBounds { threads, shared_bytes, .. } = bounds;
        let launch = Launch { grid_blocks: blocks, block_threads: threads, shared_bytes, seed: self.seed };
        let result = launch.run(&mut memory, || {
            // SAFETY: the parameters describe the regions; a stray access is the emulator's to find.
            unsafe { body(symbol, self.family, parameters) }.expect("the kernel takes these parameters")
        });
        match result {
            Ok(report) => self.counters.set(report.counters),
            Err(fault) => panic!("{symbol}, {:?}, seed {}: {fault}", self.family, self.seed),
        }
    }
}

impl Emulator {
    /// Folds the row tiles that an attention left to this kernel, in few blocks, so that each takes several.
    fn fold(&self, launch: &AttentionLaunch, state_columns: u32) {
        if launch.header.folds == 0 {
            return;
        }
        let attention = self.counters();
        let written = |region: &Region| match region.access {
            Access::Produce => Region { access: Access::Update, ..*region },
            _ => *region,
        };
        let regions: Vec<Region> = launch.regions.iter().map(written).collect();
        let AttentionLaunch { attend, plan, .. } = *launch;
        let parameters = Parameters::Fold(FoldParameters { attend, plan, state_columns, padding: 0 });
        self.launch(&format!("fold_{}", launch.dtype), 5, parameters, &regions);
        self.counters.set(attention);
    }
}

impl Executor for Emulator {
    fn attention(&self, launch: &AttentionLaunch) {
        let AttentionLaunch { attend, variant, dtype, head_dims: [query_dim, value_dim], .. } = *launch;
        let head_dim = attend_head_dim(query_dim, value_dim).expect("a kernel for the head dims");
        // Plain kernels have no padding.
        let (symbol, parameters) = if launch.is_plain && [query_dim, value_dim] == [head_dim; 2] {
            let plain = StandardParameters { scale_log2: variant.modified.scale };
            (format!("attend_{dtype}_d{head_dim}"), Parameters::Attend(attend, plain))
        } else if launch.changes_rows {
            (format!("attend_rotary_{dtype}_d{head_dim}"), Parameters::AttendRotary(attend, variant))
        } else {
            (format!("attend_modified_{dtype}_d{head_dim}"), Parameters::AttendModified(attend, variant.modified))
        };
        self.launch(&symbol, launch.blocks, parameters, &launch.regions);
        self.fold(launch, head_dim);
    }
}

/// The prefill kernels under the emulator, for plans whose cuts fall on multiples of their tiles.
pub struct PrefillEmulator(Emulator);

impl PrefillEmulator {
    /// `seed` as [`Emulator::new`]'s.
    pub fn new(seed: u64) -> PrefillEmulator {
        PrefillEmulator(Emulator::new(Family::Sm90a, seed))
    }

    /// What the last launch would have cost.
    pub fn counters(&self) -> Counters {
        self.0.counters()
    }
}

impl Executor for PrefillEmulator {
    fn attention(&self, launch: &AttentionLaunch) {
        let AttentionLaunch { attend, variant, dtype, head_dims: [query_dim, value_dim], pages, .. } = *launch;
        let tile = PrefillTile::fitting(query_dim, value_dim, launch.is_plain).expect("head dims of theirs");
        let box_tokens = tile.box_tokens(attend.page_size.get()).expect("a page size of theirs");
        let attend = AttendParameters { box_tokens, ..attend };
        let maps = [(attend.k, query_dim), (attend.v, value_dim)]
            .map(|(cache, head_dim)| cache_map(&attend, &cache, head_dim, pages));
        let address = maps.as_ptr() as u64;
        let mut regions = launch.regions.clone();
        regions.push(Region { address, bytes: size_of_val(&maps), access: Access::Read });
        let dims = match [tile.query_dim, tile.value_dim] {
            [192, 128] => "d192_v128".to_owned(),
            [dim, _] => format!("d{dim}"),
        };
        let is_exact = [query_dim, value_dim] == [tile.query_dim, tile.value_dim];
        let (symbol, parameters) = if launch.is_plain {
            let (plain, padded) =
                (StandardParameters { scale_log2: variant.modified.scale }, ["padded_", ""][is_exact as usize]);
            (format!("prefill_{padded}{dtype}_{dims}"), Parameters::Prefill(attend, plain, address))
        } else if launch.changes_rows {
            (format!("prefill_rotary_{dtype}_{dims}"), Parameters::PrefillRotary(attend, variant, address))
        } else {
            (format!("prefill_modified_{dtype}_{dims}"), Parameters::PrefillModified(attend, variant.modified, address))
        };
        self.0.launch(&symbol, launch.blocks, parameters, &regions);
        self.0.fold(launch, tile.value_dim);
    }
}

/// The tensor map of one of K and V.
fn cache_map(attend: &AttendParameters, cache: &CacheView, head_dim: u32, pages: u32) -> TensorMap {
    let strides_bytes = [cache.token_stride_bytes, cache.head_stride_bytes, cache.page_stride_bytes];
    // Of ragged keys and values, pages are rows.
    let [tokens, pages] = match attend.page_size.get() {
        RAGGED_PAGE_TOKENS => [pages, 1],
        tokens => [tokens, pages],
    };
    let description = TensorMapDescription {
        address: cache.address,
        element_bytes: 2,
        extents: &[head_dim, tokens, attend.kv_heads, pages],
        strides_bytes: &strides_bytes.map(|bytes| bytes as u64),
        box_extents: &[64, attend.box_tokens, 1, 1],
        element_strides: &[1; 4],
        swizzle: Swizzle::Bytes128,
    };
    description.encode().expect("a cache that can be mapped")
}

impl Operators for Emulator {
    /// In few blocks, so that warps take several rows where there are many.
    fn merge_states(&self, parameters: &MergeStatesParameters, dtype: DType, regions: &[Region]) {
        let blocks = (parameters.tokens * parameters.heads.get()).div_ceil(MERGE_THREADS / 32).clamp(1, 8);
        self.launch(&format!("merge_states_{dtype}"), blocks, Parameters::MergeStates(*parameters), regions);
    }

    fn append(&self, parameters: &AppendParameters, source: DType, cache: DType, regions: &[Region]) {
        let pieces = parameters.tokens * parameters.token_chunks.get();
        let blocks = pieces.div_ceil(APPEND_THREADS * APPEND_PIECES).clamp(1, 3);
        self.launch(&format!("append_{source}_{cache}"), blocks, Parameters::Append(*parameters), regions);
    }

    fn positions(&self, parameters: &PositionsParameters, regions: &[Region]) {
        self.launch("positions", 1, Parameters::Positions(*parameters), regions);
    }
}

impl CheckLaunches for Emulator {
    fn check_page_ids(&self, parameters: &CheckPageIdsParameters, regions: &[Region]) {
        self.launch("check_page_ids", 1, Parameters::CheckPageIds(*parameters), regions);
    }

    fn check_append(&self, parameters: &CheckAppendParameters, regions: &[Region]) {
        self.launch("check_append", 1, Parameters::CheckAppend(*parameters), regions);
    }
}

impl Rotations for Emulator {
    /// In few blocks, so that threads take several units where there are many.
    fn rope(&self, launch: &RopeLaunch) {
        let RopeLaunch { parameters, dtype, regions, .. } = launch;
        let units = parameters.tokens * parameters.token_units.get();
        let blocks = units.div_ceil(ROPE_THREADS).clamp(1, 2);
        self.launch(&format!("rope_{dtype}"), blocks, Parameters::Rope(*parameters), regions);
    }
}

impl RotatedAppends for Emulator {
    /// In few blocks, so that some rotate and then copy.
    fn rope_append(&self, launch: &RopeAppendLaunch) {
        let RopeAppendLaunch { parameters, source, cache, regions, .. } = launch;
        let symbol = format!("rope_append_{source}_{cache}");
        let blocks = if parameters.rope.tokens == 0 { 1 } else { 3 };
        self.launch(&symbol, blocks, Parameters::RopeAppend(*parameters), regions);
    }
}
