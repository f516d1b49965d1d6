//! The tables through the library's own operators, on any device: what users call.
//!
//! [`Setup`] plans and runs cases; [`Public`] turns the launches of the merge and append tables back into the calls
//! that make them, with every region copied to the device and back.
//!
//! Unsafe: the operators take addresses; setups and copies own the memory behind them.

use crate::buffer::{Access, Region};
use crate::cases::Case;
use crate::checks::{AppendCheck, PAGES, Tokens, Verdict};
use crate::executors::{Operators, RopeAppendLaunch, RopeLaunch, RotatedAppends, Rotations};
use crate::fixture::{Fixture, Lse, Outputs, Tensors};
use crate::plans::{limits_for, table_of};
use kernels_gpu::abi::parameters::{
    AppendParameters, CacheView, MergeStatesParameters, PositionsParameters, RopeParameters, RowsView,
};
use oxattn::config::{AttentionConfig, DType};
use oxattn::operators::{
    Append, Destination, Positions, State, StateOrder, States, append, merge_state, merge_state_in_place, merge_states,
    positions,
};
use oxattn::rope::{Rope, RopeAngles, RopeAppend, RopeConfig, RopePositions, RopeRun, Rotate};
use oxattn::tensor::{Base2, BaseE, CacheRows, LogBase};
use oxattn::validate::{REPORT_BYTES, verdict};
use oxattn::{
    Attention, Buffer, Device, Error, Layout, PageIndices, PagedCache, Planned, QueryLengths, Rows, Run, SplitMode,
    Stream, Workspace,
};

/// An attention with a workspace, which held 0xff before the first plan.
pub struct Setup {
    /// The attention.
    pub attention: Attention,
    /// Its workspace.
    pub workspace: Workspace,
    memory: Buffer,
}

impl Setup {
    /// One with room for any of `cases`, which share a configuration.
    pub fn new(device: &Device, cases: &[&Case], mode: SplitMode) -> Setup {
        Setup::of(device, Attention::new(device, cases[0].config, mode, limits_for(cases)).unwrap())
    }

    /// The same whose runs may be captured.
    pub fn for_graphs(device: &Device, cases: &[&Case], mode: SplitMode) -> Setup {
        Setup::of(device, Attention::for_graphs(device, cases[0].config, mode, limits_for(cases)).unwrap())
    }

    /// `attention` with a workspace.
    pub fn of(device: &Device, attention: Attention) -> Setup {
        let (memory, workspace) = workspace(device, &attention);
        Setup { attention, workspace, memory }
    }

    /// Plans a case.
    pub fn plan(&mut self, fixture: &Fixture, stream: Stream) -> Result<Planned, Error> {
        plan(&mut self.attention, fixture, &mut self.workspace, stream)
    }

    /// Plans lengths of `case` whose page ids start at `page_begin`.
    pub fn plan_lens(&mut self, case: &Case, page_begin: &[u32], stream: Stream) -> Result<Planned, Error> {
        plan_lens(&mut self.attention, case, page_begin, &mut self.workspace, stream)
    }

    /// Checks the page ids of a plan.
    pub fn check_page_ids(
        &mut self,
        planned: &Planned,
        page_indices: &PageIndices,
        pages: u64,
        report: &Report,
        stream: Stream,
    ) -> Result<(), Error> {
        let (address, workspace) = (report.memory.address(), &mut self.workspace);
        // SAFETY: as `run`; the report lives until its verdict, which waits.
        unsafe { self.attention.check_page_ids(planned, page_indices, pages, address, workspace, stream) }
    }

    /// Runs a case's plan.
    pub fn run(&mut self, planned: &Planned, run: &Run, stream: Stream) -> Result<(), Error> {
        // SAFETY: the tests' tensors are live until they are downloaded, which waits; refused ones are never read.
        unsafe { self.attention.run(planned, run, &mut self.workspace, stream) }
    }

    /// Plans and runs a case.
    pub fn outputs(&mut self, fixture: &Fixture, tensors: &Tensors, stream: Stream) -> Outputs {
        let planned = self.plan(fixture, stream).unwrap();
        self.run(&planned, &tensors.run, stream).unwrap();
        tensors.download(fixture)
    }

    /// The workspace's bytes.
    pub fn memory(&self) -> Vec<u8> {
        self.memory.download().unwrap()
    }
}

/// A workspace for `attention`, and the memory it is in.
pub fn workspace(device: &Device, attention: &Attention) -> (Buffer, Workspace) {
    let bytes = attention.workspace_bytes() as usize;
    let memory = device.upload(&vec![0xffu8; bytes]).unwrap();
    // SAFETY: the memory is kept as long as the workspace, and is used for nothing else.
    let workspace = unsafe { Workspace::new(memory.address(), bytes as u64) };
    (memory, workspace)
}

/// Plans a case.
pub fn plan(
    attention: &mut Attention,
    fixture: &Fixture,
    workspace: &mut Workspace,
    stream: Stream,
) -> Result<Planned, Error> {
    plan_lens(attention, &fixture.case, &fixture.page_begin, workspace, stream)
}

fn plan_lens(
    attention: &mut Attention,
    case: &Case,
    page_begin: &[u32],
    workspace: &mut Workspace,
    stream: Stream,
) -> Result<Planned, Error> {
    let table = table_of(case, page_begin)?;
    let query_begin = case.query_begin();
    attention.plan(&table, QueryLengths::indptr(&query_begin)?, workspace, stream)
}

/// Runs one case with a setup of its own.
pub fn run_alone(device: &Device, fixture: &Fixture, mode: SplitMode, lse: Lse) -> Outputs {
    let tokens = *fixture.case.query_begin().last().unwrap() as usize;
    let tensors = fixture.tensors(device, lse, tokens);
    Setup::new(device, &[&fixture.case], mode).outputs(fixture, &tensors, Stream::default())
}

/// A check's report on a device.
pub struct Report {
    /// Where it lies.
    pub memory: Buffer,
}

/// One that no check has written.
pub fn report(device: &Device) -> Report {
    Report { memory: device.upload(&[0xccu8; REPORT_BYTES]).unwrap() }
}

impl Report {
    /// What it says; waits for the device.
    pub fn verdict(&self) -> Verdict {
        let mut bytes = [0; REPORT_BYTES];
        self.memory.read(0, &mut bytes).unwrap();
        verdict(&bytes)
    }
}

/// Checks where an append would write, and waits for it.
pub fn check_append(device: &Device, case: &AppendCheck, report: &Report) -> Result<(), Error> {
    let config = AttentionConfig::new(2, 2, 64, case.page_size);
    let rows = Rows::contiguous(4096, config.dtype, case.tokens.count(), 2, 64);
    let cache = PagedCache::separate(4096, 4096, PAGES as u64, Layout::Nhd, &config);
    let arguments = |destination| Append { k: rows, v: rows, cache, destination };
    let check = |destination, request_count| {
        let address = report.memory.address();
        // SAFETY: the arrays live until the wait; the rows are not looked at.
        unsafe {
            oxattn::validate::check_append(
                device,
                &config,
                &arguments(destination),
                request_count,
                address,
                Stream::default(),
            )
        }?;
        device.synchronize()
    };
    match &case.tokens {
        Tokens::Slots(slots) => {
            let slots = device.upload(slots)?;
            check(Destination::Slots { address: slots.address() }, 0)
        }
        Tokens::Positions { requests, positions, page_begin, page_indices } => {
            let (requests, positions) = (device.upload(requests)?, device.upload(positions)?);
            let (begin, ids) = (device.upload(page_begin)?, device.upload(page_indices)?);
            let destination = Destination::Positions {
                requests: requests.address(),
                positions: positions.address(),
                page_begin: begin.address(),
                page_indices: PageIndices { address: ids.address(), len: page_indices.len() as u64 },
            };
            check(destination, page_begin.len() as u32)
        }
    }
}

/// The public operators on a device.
pub struct Public<'a> {
    /// Where they run.
    pub device: &'a Device,
    /// Whether two states a token are merged by `merge_state` rather than by `merge_states`.
    pub pairs: bool,
}

/// Copies of a launch's regions.
struct Copies<'a>(Vec<(&'a Region, Buffer)>);

impl<'a> Copies<'a> {
    fn new(device: &Device, regions: &'a [Region]) -> Copies<'a> {
        let copy = |region: &'a Region| {
            // SAFETY: fixtures own the memory that their launches describe, and wait.
            let bytes = unsafe { std::slice::from_raw_parts(region.address as *const u8, region.bytes) };
            let copy = device.allocate(region.bytes.max(16)).unwrap();
            copy.write(0, bytes).unwrap();
            (region, copy)
        };
        Copies(regions.iter().map(copy).collect())
    }

    /// The copy of what lies at a host address.
    fn at(&self, address: u64) -> u64 {
        if address == 0 {
            return 0;
        }
        let holds =
            |region: &Region| address >= region.address && address - region.address < region.bytes.max(1) as u64;
        let (region, copy) = self.0.iter().find(|(region, _)| holds(region)).expect("an address of the launch's");
        copy.address() + (address - region.address)
    }

    fn rows(&self, view: &RowsView, dtype: DType, tokens: u64, heads: u32, head_dim: u32) -> Rows {
        let bytes = dtype.bytes() as i64;
        Rows::contiguous(self.at(view.address), dtype, tokens, heads, head_dim)
            .with_strides(view.token_stride_bytes / bytes, view.head_stride_bytes / bytes)
    }

    fn state<B: LogBase>(&self, values: Rows, lse: &RowsView) -> State<B> {
        let lse = oxattn::tensor::Lse::contiguous(self.at(lse.address), values.tokens, values.heads)
            .with_strides(lse.token_stride_bytes / 4, lse.head_stride_bytes / 4);
        State { out: values, lse }
    }

    /// What an append's parameters were made from, for `config`'s cache.
    fn append(&self, p: &AppendParameters, source: DType, config: &AttentionConfig) -> Append {
        let tokens = p.tokens as u64;
        let half = |view: &CacheView, head_dim: u32| {
            let strides = [view.page_stride_bytes, view.token_stride_bytes, view.head_stride_bytes];
            let [page, token, head] = strides.map(|bytes| bytes / config.dtype.bytes() as i64);
            let half = CacheRows::contiguous(self.at(view.address), 1 << 20, Layout::Nhd, config);
            CacheRows { head_dim, ..half }.with_strides(page, token, head)
        };
        let length_of = |address: u64| {
            let (region, _) = self.0.iter().find(|(region, _)| region.address == address).expect("page ids");
            region.bytes as u64 / 4
        };
        Append {
            k: self.rows(&p.new_k, source, tokens, p.kv_heads, config.head_dim),
            v: self.rows(&p.new_v, source, tokens, p.kv_heads, config.value_head_dim),
            cache: PagedCache { k: half(&p.k, config.head_dim), v: half(&p.v, config.value_head_dim) },
            destination: match p.slots {
                0 => Destination::Positions {
                    requests: self.at(p.requests),
                    positions: self.at(p.positions),
                    page_begin: self.at(p.page_begin),
                    page_indices: PageIndices { address: self.at(p.page_indices), len: length_of(p.page_indices) },
                },
                slots => Destination::Slots { address: self.at(slots) },
            },
        }
    }

    fn rope(&self, config: &RopeConfig) -> RopeConfig {
        match config.angles {
            RopeAngles::Cached { cos_sin, positions } => config.with_cos_sin_cache(self.at(cos_sin), positions),
            _ => *config,
        }
    }

    fn rotate(&self, p: &RopeParameters, [from, to]: [&RowsView; 2], dtype: DType, heads: u32) -> Option<Rotate> {
        let rows = |view| self.rows(view, dtype, p.tokens as u64, heads, p.head_dim);
        (heads != 0).then(|| Rotate::into(rows(from), rows(to)))
    }

    fn rope_positions(&self, p: &RopeParameters) -> RopePositions {
        match p.positions {
            0 => RopePositions::Offsets {
                request_count: p.request_count,
                query_begin: self.at(p.query_begin),
                offsets: self.at(p.offsets),
            },
            positions => RopePositions::Ids { address: self.at(positions) },
        }
    }

    fn copy_back(&self) {
        for (region, copy) in &self.0 {
            if region.access != Access::Read {
                // SAFETY: as in `new`; nobody else looks at the memory meanwhile.
                let bytes = unsafe { std::slice::from_raw_parts_mut(region.address as *mut u8, region.bytes) };
                copy.read(0, bytes).unwrap();
            }
        }
    }
}

impl Public<'_> {
    fn merge<B: LogBase>(&self, p: &MergeStatesParameters, dtype: DType, regions: &[Region]) {
        let copies = Copies::new(self.device, regions);
        let (tokens, heads) = (p.tokens as u64, p.heads.get());
        let rows = |view: &RowsView, tokens| copies.rows(view, dtype, tokens, heads, p.head_dim);
        let merged = copies.state::<B>(rows(&p.out, tokens), &p.out_lse);
        let stream = Stream::default();
        let in_place = p.out.address == p.values.address;
        let result = if in_place || self.pairs && p.state_begin == 0 && p.states == 2 && p.mask == 0 {
            let second = |view: &RowsView, bytes: i64| RowsView {
                address: if tokens == 0 { view.address } else { view.address.wrapping_add_signed(bytes) },
                ..*view
            };
            let other = second(&p.values, p.state_stride_bytes);
            let other_lse = second(&p.lse, p.lse_state_stride_bytes);
            let a = copies.state::<B>(rows(&p.values, tokens), &p.lse);
            let b = copies.state::<B>(rows(&other, tokens), &other_lse);
            // SAFETY: the copies live until they are read back, which waits.
            unsafe {
                if in_place {
                    merge_state_in_place(self.device, &a, &b, copies.at(p.mask), stream)
                } else {
                    merge_state(self.device, &a, &b, &merged, stream)
                }
            }
        } else {
            assert_eq!(p.mask, 0, "no operator masks other than in place");
            let values = RowsView { token_stride_bytes: p.state_stride_bytes, ..p.values };
            let lse = RowsView { token_stride_bytes: p.lse_state_stride_bytes, ..p.lse };
            let region = regions.iter().find(|region| region.address == p.values.address).expect("values");
            let count = region.bytes as u64 / p.state_stride_bytes as u64;
            let order = match p.state_begin {
                0 => StateOrder::Uniform { per_token: p.states },
                begin => StateOrder::Csr { begin: copies.at(begin) },
            };
            let State { out, lse } = copies.state::<B>(rows(&values, count), &lse);
            // SAFETY: as above.
            unsafe { merge_states(self.device, &States { out, lse, order }, &merged, stream) }
        };
        result.unwrap();
        copies.copy_back();
    }
}

impl Operators for Public<'_> {
    fn merge_states(&self, parameters: &MergeStatesParameters, dtype: DType, regions: &[Region]) {
        if parameters.lse_in_scale == 1.0 {
            self.merge::<Base2>(parameters, dtype, regions);
        } else {
            self.merge::<BaseE>(parameters, dtype, regions);
        }
    }

    fn append(&self, p: &AppendParameters, source: DType, cache: DType, regions: &[Region]) {
        let copies = Copies::new(self.device, regions);
        let config = AttentionConfig::new(p.kv_heads, p.kv_heads, 8 * p.key_chunks, p.page_size.get());
        let config = config.with_value_head_dim(8 * p.value_chunks).with_dtype(cache);
        let arguments = copies.append(p, source, &config);
        // SAFETY: the copies live until they are read back, which waits.
        unsafe { append(self.device, &config, &arguments, Stream::default()) }.unwrap();
        copies.copy_back();
    }

    fn positions(&self, p: &PositionsParameters, regions: &[Region]) {
        let copies = Copies::new(self.device, regions);
        let arguments = Positions {
            request_count: p.request_count,
            append_begin: copies.at(p.append_begin),
            kv_lens: copies.at(p.kv_lens),
            tokens: p.tokens,
            requests: copies.at(p.requests),
            positions: copies.at(p.positions),
        };
        // SAFETY: as above.
        unsafe { positions(self.device, &arguments, Stream::default()) }.unwrap();
        copies.copy_back();
    }
}

impl Rotations for Public<'_> {
    fn rope(&self, launch: &RopeLaunch) {
        let RopeLaunch { config, parameters: p, dtype, regions } = launch;
        let copies = Copies::new(self.device, regions);
        let run = RopeRun {
            q: copies.rotate(p, [&p.q, &p.q_out], *dtype, p.query_heads),
            k: copies.rotate(p, [&p.k, &p.k_out], *dtype, p.heads - p.query_heads),
            positions: copies.rope_positions(p),
        };
        let rope = Rope::new(self.device, copies.rope(config)).unwrap();
        // SAFETY: the copies live until they are read back, which waits.
        unsafe { rope.apply(&run, Stream::default()) }.unwrap();
        copies.copy_back();
    }
}

impl RotatedAppends for Public<'_> {
    fn rope_append(&self, launch: &RopeAppendLaunch) {
        let RopeAppendLaunch { config, parameters, source, cache, regions } = launch;
        let (p, append) = (&parameters.rope, &parameters.append);
        let copies = Copies::new(self.device, regions);
        let query_heads = if p.query_heads == 0 { append.kv_heads } else { p.query_heads };
        let attention = AttentionConfig::new(query_heads, append.kv_heads, p.head_dim, append.page_size.get());
        let attention = attention.with_value_head_dim(8 * append.value_chunks).with_dtype(*cache);
        let is_shared = append.slots == 0 && p.positions == append.positions;
        let run = RopeAppend {
            q: copies.rotate(p, [&p.q, &p.q_out], *source, p.query_heads),
            append: copies.append(append, *source, &attention),
            positions: (!is_shared).then(|| copies.rope_positions(p)),
        };
        let rope = Rope::new(self.device, copies.rope(config)).unwrap();
        // SAFETY: the copies live until they are read back, which waits.
        unsafe { rope.apply_and_append(&attention, &run, Stream::default()) }.unwrap();
        copies.copy_back();
    }
}
