//! Block-sparse patterns: FlashInfer's grid, thinned, and what it leaves out.
//!
//! In: a [`SparseCase`], a pattern over one sequence. Out: a [`SparseFixture`] that lays the sequence out and runs it
//! through the library's own mapping. The answer is the oracle's for the whole sequence under a dense mask, which is
//! worked out here from the pattern alone. Keys and values that no block lists are NaN, as is what lies between rows.
//!
//! Unsafe: the operators take addresses; fixtures own the memory behind them.

use crate::buffer::{Access, Buffer};
use crate::executors::{AttentionLaunch, Executor};
use crate::fixture::widest_state;
use crate::number::{bits, lse_agrees, row_error, row_tolerance, value};
use crate::plans::PlanImage;
use crate::public_api::workspace;
use crate::random::Random;
use crate::scenarios::refused;
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{AttendParameters, CacheView, RowsView};
use kernels_gpu::variant::{ModifiedParameters, RotaryParameters};
use oxattn::config::AttentionConfig;
use oxattn::oracle::{Request, Rules, State};
use oxattn::tensor::CacheRows;
use oxattn::{
    Attention, BlockSparse, Bsr, Device, Layout, Lse2, MaskMemory, PageIndices, Planner, Rows, Run, SplitMode, Stream,
    Target, Values, VariableBlocks, VariantInputs, single,
};
use std::cell::OnceCell;
use std::f32::consts::LOG2_E;

/// A pattern over one sequence.
#[derive(Clone, Debug)]
pub struct SparseCase {
    /// Says what it is about.
    pub name: String,
    /// Of the whole sequence.
    pub config: AttentionConfig,
    /// Queries.
    pub query_tokens: u32,
    /// Keys.
    pub kv_tokens: u32,
    /// Which meet.
    pub pattern: Pattern,
    /// Elements after each row of keys and values; of equal blocks, as many again after each token.
    pub padding: usize,
}

/// Which queries and keys meet.
#[derive(Clone, Debug)]
pub enum Pattern {
    /// Blocks of rows and columns of these sizes.
    Equal {
        /// Query tokens and keys of a block.
        sizes: [u32; 2],
        /// First entry of each row block.
        indptr: Vec<u32>,
        /// Column blocks.
        indices: Vec<u32>,
        /// Elements of the listed blocks.
        mask: Option<Vec<bool>>,
    },
    /// Blocks of each KV head's own.
    Variable {
        /// Row blocks of each head.
        rows: Vec<Vec<u32>>,
        /// Column blocks of each head.
        columns: Vec<Vec<u32>>,
        /// Of head, row block and column block.
        map: Vec<bool>,
        /// The order of keys and values.
        layout: Layout,
    },
}

impl SparseCase {
    /// Equal blocks, of which each row block lists `listed` in four, in any order; the second row block lists none, and
    /// nobody lists the second column block.
    fn equal(
        heads: (u32, u32),
        head_dim: u32,
        [query_tokens, kv_tokens]: [u32; 2],
        sizes: [u32; 2],
        listed: usize,
    ) -> SparseCase {
        let mut random = Random::keyed(&[query_tokens as u64, kv_tokens as u64, sizes[0] as u64, sizes[1] as u64]);
        let (mut indptr, mut indices) = (vec![0], Vec::new());
        for row_block in 0..query_tokens.div_ceil(sizes[0]) {
            let columns = 0..kv_tokens.div_ceil(sizes[1]);
            let mut columns: Vec<u32> =
                columns.filter(|&column| row_block != 1 && column != 1 && random.below(4) < listed).collect();
            random.shuffle(&mut columns);
            indices.extend(columns);
            indptr.push(indices.len() as u32);
        }
        SparseCase {
            name: format!("{query_tokens} x {kv_tokens} in blocks of {sizes:?}, {heads:?} heads, dim {head_dim}"),
            config: AttentionConfig::ragged(heads.0, heads.1, head_dim).non_causal(),
            query_tokens,
            kv_tokens,
            pattern: Pattern::Equal { sizes, indptr, indices, mask: None },
            padding: 0,
        }
    }

    /// Blocks of sizes of each head's own, of which `listed` in four meet.
    fn variable(
        heads: (u32, u32),
        head_dim: u32,
        tokens: [u32; 2],
        blocks: [usize; 2],
        (listed, layout): (usize, Layout),
    ) -> SparseCase {
        let mut random = Random::keyed(&[tokens[0] as u64, tokens[1] as u64, blocks[0] as u64, listed as u64]);
        let mut sizes = |tokens: u32, blocks: usize| -> Vec<u32> {
            let mut cuts: Vec<u32> = (1..blocks).map(|_| random.below(tokens as usize + 1) as u32).collect();
            cuts.extend([0, tokens]);
            cuts.sort_unstable();
            cuts.windows(2).map(|cut| cut[1] - cut[0]).collect()
        };
        let rows = (0..heads.1).map(|_| sizes(tokens[0], blocks[0])).collect();
        let columns = (0..heads.1).map(|_| sizes(tokens[1], blocks[1])).collect();
        let map = (0..heads.1 as usize * blocks[0] * blocks[1]).map(|_| random.below(4) < listed).collect();
        SparseCase {
            name: format!("{tokens:?} in {blocks:?} blocks a head, {layout:?}, {heads:?} heads, dim {head_dim}"),
            config: AttentionConfig::ragged(heads.0, heads.1, head_dim).non_causal(),
            query_tokens: tokens[0],
            kv_tokens: tokens[1],
            pattern: Pattern::Variable { rows, columns, map, layout },
            padding: 0,
        }
    }

    /// The same pattern of equal blocks, sorted, without what is in a row block's future and with its own column blocks.
    fn diagonal(mut self) -> SparseCase {
        let before = self.kv_tokens - self.query_tokens;
        if let Pattern::Equal { sizes: [rows, columns], indptr, indices, .. } = &mut self.pattern {
            let (mut begin, mut sorted) = (vec![0], Vec::new());
            for (row_block, range) in indptr.windows(2).enumerate() {
                let first = row_block as u32 * *rows;
                let own =
                    (first + before) / *columns..(self.query_tokens.min(first + *rows) + before).div_ceil(*columns);
                let listed = &indices[range[0] as usize..range[1] as usize];
                sorted.extend((0..own.end).filter(|column| own.contains(column) || listed.contains(column)));
                begin.push(sorted.len() as u32);
            }
            (*indptr, *indices) = (begin, sorted);
        }
        SparseCase { name: format!("{}, diagonal", self.name), ..self }
    }

    /// The same with another config.
    fn with(mut self, what: &str, change: impl Fn(AttentionConfig) -> AttentionConfig) -> SparseCase {
        self.name = format!("{}, {what}", self.name);
        self.config = change(self.config);
        self
    }

    fn causal(self) -> SparseCase {
        self.with("causal", |mut config| {
            config.causal = true;
            config
        })
    }

    fn f16(self) -> SparseCase {
        self.with("f16", |config| config.with_dtype(oxattn::DType::F16))
    }

    /// The same with two elements in three of each block.
    fn masked(mut self) -> SparseCase {
        self.name = format!("{}, masked", self.name);
        if let Pattern::Equal { sizes, indices, mask, .. } = &mut self.pattern {
            let mut random = Random::new(17);
            *mask = Some((0..indices.len() as u32 * sizes[0] * sizes[1]).map(|_| random.below(3) > 0).collect());
        }
        self
    }

    fn padded(self, padding: usize) -> SparseCase {
        let name = format!("{}, {padding} elements between rows", self.name);
        SparseCase { name, padding, ..self }
    }

    /// Sinks of the heads and temperatures of the row blocks, where the config has them.
    fn numbers(&self) -> [Vec<f32>; 2] {
        let row_blocks = match &self.pattern {
            Pattern::Equal { indptr, .. } => indptr.len() - 1,
            Pattern::Variable { rows, .. } => rows.concat().len(),
        };
        let heads = if self.config.sinks { self.config.query_heads } else { 0 };
        let row_blocks = if self.config.temperatures { row_blocks } else { 0 };
        let sinks = (0..heads).map(|head| head as f32 - 1.5);
        [sinks.collect(), (0..row_blocks).map(|block| 0.5 + 0.25 * (block % 4) as f32).collect()]
    }

    /// Multiplications of the dense product: what a slow executor chooses by.
    pub fn cost(&self) -> u64 {
        let pairs = self.query_tokens as u64 * self.kv_tokens as u64;
        pairs * self.config.query_heads as u64 * self.config.head_dim as u64
    }

    /// Whether query and key of a KV head are in blocks that meet.
    fn meet(&self, kv_head: usize, query: usize, key: usize) -> bool {
        match &self.pattern {
            Pattern::Equal { sizes, indptr, indices, mask } => {
                let [row_block, column_block] = [query / sizes[0] as usize, key / sizes[1] as usize];
                let range = indptr[row_block] as usize..indptr[row_block + 1] as usize;
                let Some(place) = range.into_iter().find(|&place| indices[place] as usize == column_block) else {
                    return false;
                };
                let [row, column] = [query % sizes[0] as usize, key % sizes[1] as usize];
                let element = (place * sizes[0] as usize + row) * sizes[1] as usize + column;
                mask.as_ref().is_none_or(|mask| mask[element])
            }
            Pattern::Variable { rows, columns, map, .. } => {
                let block_of = |sizes: &[u32], token: usize| {
                    (0..sizes.len()).find(|&block| sizes[..=block].iter().sum::<u32>() as usize > token).unwrap()
                };
                let [rows, columns] = [&rows[kv_head], &columns[kv_head]];
                let row_block = kv_head * rows.len() + block_of(rows, query);
                map[row_block * columns.len() + block_of(columns, key)]
            }
        }
    }

    /// Whether any query reads the key.
    fn is_listed(&self, kv_head: usize, key: usize) -> bool {
        let SparseCase { pattern, .. } = self;
        let whole = match pattern.clone() {
            Pattern::Equal { sizes, indptr, indices, .. } => Pattern::Equal { sizes, indptr, indices, mask: None },
            variable => variable,
        };
        let whole = SparseCase { pattern: whole, ..self.clone() };
        (0..self.query_tokens as usize).any(|query| whole.meet(kv_head, query, key))
    }

    /// The library's mapping.
    pub fn sparse(&self) -> BlockSparse {
        let SparseCase { config, query_tokens, kv_tokens, .. } = *self;
        match &self.pattern {
            Pattern::Equal { sizes, indptr, indices, mask } => {
                let bsr = Bsr::new(query_tokens, kv_tokens, sizes[0], sizes[1], indptr, indices);
                BlockSparse::bsr(config, &Bsr { mask: mask.as_deref(), ..bsr }).unwrap()
            }
            Pattern::Variable { rows, columns, map, layout } => {
                let (rows, columns) = (rows.concat(), columns.concat());
                let blocks = VariableBlocks {
                    query_tokens,
                    kv_tokens,
                    row_block_tokens: &rows,
                    column_block_tokens: &columns,
                    block_map: map,
                    layout: *layout,
                };
                BlockSparse::variable(config, &blocks).unwrap()
            }
        }
    }

    /// Elements from a token to the next and from a head to the next of keys and values.
    fn strides(&self) -> (usize, usize) {
        let row = self.config.head_dim as usize + self.padding;
        match self.pattern {
            Pattern::Equal { .. } => (self.config.kv_heads as usize * row + self.padding, row),
            Pattern::Variable { layout: Layout::Nhd, .. } => (self.config.kv_heads as usize * row, row),
            Pattern::Variable { layout: Layout::Hnd, .. } => (row, self.kv_tokens as usize * row),
        }
    }

    /// The row of queries and outputs that a token and a query head have.
    fn query_row(&self, token: usize, head: usize) -> usize {
        let (heads, group) = (self.config.query_heads as usize, self.config.group() as usize);
        match self.pattern {
            Pattern::Equal { .. } => token * heads + head,
            Pattern::Variable { .. } => (head / group * self.query_tokens as usize + token) * group + head % group,
        }
    }
}

/// The table.
pub fn sparse_cases() -> Vec<SparseCase> {
    let mut cases = Vec::new();
    let heads = [(1, 1), (4, 1), (16, 2), (4, 4)];
    let dims = [64, 128, 256];
    let tokens = [[64, 128], [128, 64], [100, 150], [33, 256], [65, 77]];
    let sizes = [[1, 1], [2, 1], [1, 16], [4, 4], [16, 2], [16, 16], [64, 16], [16, 64], [64, 64], [5, 24]];
    for (index, &sizes) in sizes.iter().enumerate() {
        for (turn, &tokens) in [tokens[index % 5], tokens[(index + 2) % 5]].iter().enumerate() {
            let case = SparseCase::equal(heads[(index + turn) % 4], dims[(index + 2 * turn) % 3], tokens, sizes, 2);
            let case = if index % 2 == 0 { case } else { case.f16() };
            cases.push(match turn {
                0 => case.clone(),
                _ => case.clone().padded(8),
            });
            cases.push(match (index + turn) % 3 {
                0 => case.causal(),
                1 => case.masked(),
                _ => case.masked().causal().padded(24),
            });
        }
    }
    cases.extend([
        SparseCase::equal((4, 2), 64, [40, 70], [8, 16], 0).with("nothing listed", |config| config),
        SparseCase::equal((4, 2), 64, [1, 300], [16, 64], 4),
        SparseCase::equal((4, 2), 64, [0, 64], [16, 16], 4),
        SparseCase::equal((4, 2), 64, [20, 0], [16, 16], 4),
        // A block of two pages, and one of three.
        SparseCase::equal((2, 1), 64, [6, 6144], [4, 2048], 4),
        SparseCase::equal((2, 1), 64, [6, 3100], [4, 3072], 4).causal(),
        SparseCase::equal((4, 2), 80, [30, 60], [8, 8], 3)
            .with("soft cap, sinks, temperatures", |config| config.with_soft_cap(5.0).with_sinks().with_temperatures()),
    ]);
    let mut all = SparseCase::equal((8, 1), 128, [50, 90], [16, 16], 4);
    let every = (0..4).flat_map(|_| 0..6).collect();
    all.pattern = Pattern::Equal { sizes: [16, 16], indptr: vec![0, 6, 12, 18, 24], indices: every, mask: None };
    cases.extend([all.clone().with("all blocks", |config| config), all.causal()]);
    // Each row block's own column blocks last: causal requests without a mask, and from 65 rows on a prompt's.
    for (index, (heads, tokens, sizes)) in
        [((8, 2), [100, 100], [32, 16]), ((4, 4), [70, 118], [16, 16]), ((2, 1), [200, 200], [64, 64])]
            .into_iter()
            .enumerate()
    {
        let case = SparseCase::equal(heads, [128, 64, 64][index], tokens, sizes, 2);
        cases.push(case.diagonal().causal().padded(8 * index));
    }
    let layouts = [Layout::Nhd, Layout::Hnd];
    for (index, (heads, head_dim, listed)) in
        [((2, 2), 64, 1), ((8, 2), 128, 3), ((4, 4), 64, 2), ((3, 3), 128, 4), ((8, 1), 256, 2)].into_iter().enumerate()
    {
        let tokens = [[90, 128], [64, 200], [7, 61]][index % 3];
        let case = SparseCase::variable(heads, head_dim, tokens, [4, 7], (listed, layouts[index % 2]));
        cases.push(case.clone());
        let other = SparseCase::variable(heads, head_dim, tokens, [5, 3], (listed, layouts[(index + 1) % 2]));
        cases.push(other.causal().padded(8));
    }
    cases
}

/// A case in memory.
pub struct SparseFixture {
    /// The case.
    pub case: SparseCase,
    /// Its mapping.
    pub sparse: BlockSparse,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    answers: OnceCell<Vec<State>>,
}

/// What was written: outputs and LSE in base 2, in the order of the query rows.
#[derive(Clone, PartialEq)]
pub struct SparseOutputs {
    out: Vec<u16>,
    lse: Vec<u32>,
}

impl SparseFixture {
    /// Lays out `case`.
    pub fn new(case: &SparseCase) -> SparseFixture {
        let AttentionConfig { dtype, head_dim, query_heads, kv_heads, .. } = case.config;
        let [head_dim, kv_heads, kv_tokens] = [head_dim as usize, kv_heads as usize, case.kv_tokens as usize];
        let mut random = Random::new(5);
        let query_elements = case.query_tokens as usize * query_heads as usize * head_dim;
        let q: Vec<u16> = (0..query_elements).map(|_| bits(dtype, random.normal())).collect();
        let (token_stride, head_stride) = case.strides();
        // To the end of the last row, so that nothing after it is the executor's.
        let elements = match kv_tokens {
            0 => 0,
            tokens => (tokens - 1) * token_stride + (kv_heads - 1) * head_stride + head_dim,
        };
        let [k, v] = [1, 2].map(|role| {
            let mut rows = vec![bits(dtype, f32::NAN); elements];
            for (key, head) in (0..kv_tokens).flat_map(|key| (0..kv_heads).map(move |head| (key, head))) {
                if case.is_listed(head, key) {
                    let mut random = Random::keyed(&[role, key as u64, head as u64]);
                    let row = &mut rows[key * token_stride + head * head_stride..][..head_dim];
                    row.fill_with(|| bits(dtype, random.normal()));
                }
            }
            Buffer::of(&rows)
        });
        SparseFixture { case: case.clone(), sparse: case.sparse(), q: Buffer::of(&q), k, v, answers: OnceCell::new() }
    }

    /// Tokens and heads of queries and outputs, as the operator has them.
    fn query_shape(&self) -> (u64, u32) {
        let heads = self.sparse.config().query_heads;
        (self.case.query_tokens as u64 * (self.case.config.query_heads / heads) as u64, heads)
    }

    fn rows(&self) -> usize {
        self.case.query_tokens as usize * self.case.config.query_heads as usize
    }

    /// Queries, keys, values and outputs at these addresses.
    fn run_at(&self, [q, k, v, out, lse]: [u64; 5]) -> Run {
        let AttentionConfig { dtype, head_dim, kv_heads, .. } = self.case.config;
        let ((tokens, heads), (token_stride, head_stride)) = (self.query_shape(), self.case.strides());
        let queries = |address| Rows::contiguous(address, dtype, tokens, heads, head_dim);
        let keys = |address| {
            let rows = Rows::contiguous(address, dtype, self.case.kv_tokens as u64, kv_heads, head_dim);
            rows.with_strides(token_stride as i64, head_stride as i64)
        };
        Run::ragged(queries(q), keys(k), keys(v), queries(out)).with_lse(Lse2::contiguous(lse, tokens, heads))
    }

    /// Runs it on `device` as an engine does, by `mode`, or in one call.
    pub fn run(&self, device: &Device, mode: Option<SplitMode>) -> SparseOutputs {
        let upload = |buffer: &Buffer| device.upload(buffer.as_slice::<u8>()).unwrap();
        let [q, k, v] = [&self.q, &self.k, &self.v].map(upload);
        let out = device.upload(&vec![u16::MAX; self.rows() * self.case.config.head_dim as usize]).unwrap();
        let lse = device.upload(&vec![u32::MAX; self.rows()]).unwrap();
        let numbers = self.case.numbers().map(|numbers| device.upload(&numbers).unwrap());
        let [sinks, temperatures] = numbers.each_ref().map(|numbers| {
            let values = Values { address: numbers.address(), len: numbers.bytes() as u64 / 4 };
            (values.len != 0).then_some(values)
        });
        let variant = VariantInputs { sinks, temperatures, ..VariantInputs::default() };
        let run = self.run_at([&q, &k, &v, &out, &lse].map(|buffer| buffer.address())).with_variant(variant);
        let (sparse, stream) = (&self.sparse, Stream::default());
        match mode {
            // SAFETY: everything lives until it is downloaded, which waits.
            None => unsafe { single::block_sparse(device, sparse, &run, stream) }.unwrap(),
            Some(mode) => {
                let page_ids = device.upload(sparse.page_indices()).unwrap();
                let page_indices = PageIndices { address: page_ids.address(), len: sparse.page_indices().len() as u64 };
                let bits = device.upload(sparse.mask_bits()).unwrap();
                let mask = MaskMemory { address: bits.address(), bytes: sparse.mask_bits().len() as u64 };
                let variant = VariantInputs { mask: sparse.config().mask.map(|_| mask), ..run.variant };
                let mut attention = Attention::new(device, *sparse.config(), mode, sparse.limits()).unwrap();
                let (_memory, mut workspace) = workspace(device, &attention);
                let table = sparse.page_table().unwrap();
                let planned = attention.plan(&table, sparse.query_lengths(), &mut workspace, stream).unwrap();
                let oxattn::KvMemory::Ragged { k, v } = run.kv else { panic!("rows of keys") };
                let cache = sparse.cache(k, v).unwrap();
                let paged = Run::new(run.q, cache, page_indices, run.out).with_variant(variant);
                let paged = Run { lse: run.lse, ..paged };
                // SAFETY: as above.
                unsafe { attention.run(&planned, &paged, &mut workspace, stream) }.unwrap();
                device.synchronize().unwrap();
            }
        }
        SparseOutputs { out: out.download().unwrap(), lse: lse.download().unwrap() }
    }

    /// Runs it by the parameters of a launch, planned for `target`.
    pub fn launch(&mut self, executor: &dyn Executor, target: Target, mode: SplitMode) -> SparseOutputs {
        let config = *self.sparse.config();
        let mut planner = Planner::new(config, target, mode, self.sparse.limits()).unwrap();
        let mut plan = PlanImage::unplanned(&planner, target, config.kv_heads);
        let layout = planner.workspace_size();
        let planned = planner.plan(&self.sparse.page_table().unwrap(), self.sparse.query_lengths()).unwrap();
        let planned = planned.image().to_vec();
        plan.image.as_mut_slice()[..planned.len()].copy_from_slice(&planned);
        let header = plan.header();

        let (rows, dim) = (self.rows(), config.head_dim as usize);
        let mut out = Buffer::filled(2 * rows * dim, 0xff);
        let mut lse = Buffer::filled(4 * rows, 0xff);
        let mut partial_out = Buffer::filled(4 * header.partial_rows as usize * widest_state(&config), 0xff);
        let mut partial_lse = Buffer::filled(4 * header.partial_rows as usize, 0xff);
        let mut page_indices = Buffer::of(self.sparse.page_indices());
        let mut mask = Buffer::of(self.sparse.mask_bits());
        let mut numbers = self.case.numbers().map(|numbers| Buffer::of(&numbers));
        let [sinks, temperatures] = numbers.each_mut().map(Buffer::address);
        let [q, k, v] = [&mut self.q, &mut self.k, &mut self.v].map(Buffer::address);
        let run = self.run_at([q, k, v, out.address(), lse.address()]);
        let oxattn::KvMemory::Ragged { k, v } = run.kv else { panic!("rows of keys") };
        let cache = self.sparse.cache(k, v).unwrap();
        let image = plan.image.address();
        let attend = AttendParameters {
            queue_begin: image + header.queue_begin_offset_bytes as u64,
            items: image + header.items_offset_bytes as u64,
            arrivals: image + header.arrivals_offset_bytes as u64,
            page_indices: page_indices.address(),
            partial_out: partial_out.address(),
            partial_lse: partial_lse.address(),
            q: rows_view(run.q.address, 2 * dim, config.query_heads),
            out: rows_view(run.out.address, 2 * dim, config.query_heads),
            lse: rows_view(lse.address(), 4, config.query_heads),
            k: cache_view(&cache.k),
            v: cache_view(&cache.v),
            page_size: Divisor::new(config.page_size_tokens).unwrap(),
            group: Divisor::new(config.group()).unwrap(),
            team_blocks: Divisor::new(plan.teams.blocks).unwrap(),
            heads_per_block: plan.teams.heads_per_block,
            kv_heads: config.kv_heads,
            causal: config.causal as u32,
            lse_scale: 1.0,
            box_tokens: 0,
            key_pieces: config.head_dim / 8,
            value_pieces: config.value_head_dim / 8,
        };
        let variant = ModifiedParameters {
            sinks: if config.sinks { sinks } else { 0 },
            alibi_slopes: 0,
            temperatures: if config.temperatures { temperatures } else { 0 },
            mask: if config.mask.is_some() { mask.address() } else { 0 },
            mask_requests: image + layout.mask_requests_offset_bytes,
            scale: match config.soft_cap {
                None => config.softmax_scale * LOG2_E,
                Some(cap) => config.softmax_scale / cap,
            },
            cap_log2: config.soft_cap.map_or(0.0, |cap| cap * LOG2_E),
            window_left: i32::MAX,
            window_right: i32::MAX,
            mask_shift: 3,
            sigmoid: 0,
            sigmoid_bias_log2: 0.0,
            padding: 0,
        };
        let variant = RotaryParameters { modified: variant, ..bytemuck::Zeroable::zeroed() };
        let mut regions = plan.regions().to_vec();
        let inputs = [&mut page_indices, &mut mask, &mut self.q, &mut self.k, &mut self.v];
        regions.extend(inputs.into_iter().chain(&mut numbers).map(|buffer| buffer.region(Access::Read)));
        let outputs = [&mut out, &mut lse, &mut partial_out, &mut partial_lse];
        regions.extend(outputs.map(|buffer| buffer.region(Access::Produce)));
        executor.attention(&AttentionLaunch {
            attend,
            header,
            plan: plan.image.address(),
            blocks: plan.teams.teams * plan.teams.blocks,
            head_dims: [config.head_dim, config.value_head_dim],
            dtype: config.dtype,
            is_plain: config.is_plain(),
            changes_rows: false,
            pages: cache.k.pages as u32,
            variant,
            regions,
        });
        SparseOutputs { out: out.as_slice().to_vec(), lse: lse.as_slice().to_vec() }
    }

    /// The oracle's answer for a token and a query head.
    fn expected(&self, token: usize, head: usize) -> State {
        let AttentionConfig { dtype, head_dim, soft_cap, softmax_scale, .. } = self.case.config;
        let (dim, group) = (head_dim as usize, self.case.config.group() as usize);
        let (token_stride, head_stride) = self.case.strides();
        let numbers = |buffer: &Buffer, first: usize| -> Vec<f64> {
            buffer.as_slice::<u16>()[first..][..dim].iter().map(|&bits| value(dtype, bits) as f64).collect()
        };
        let diagonal = self.case.kv_tokens as i64 - self.case.query_tokens as i64;
        let mask = |query: usize, key: usize| {
            let is_past = !self.case.config.causal || key as i64 <= query as i64 + diagonal;
            is_past && self.case.meet(head / group, query, key)
        };
        let [sinks, temperatures] = self.case.numbers();
        let sink = |head: usize| sinks[head] as f64;
        let temperature = match &self.case.pattern {
            Pattern::Equal { sizes, .. } => temperatures.get(token / sizes[0] as usize).map(|&number| number as f64),
            Pattern::Variable { .. } => None,
        };
        let rules = Rules {
            mask: Some(&mask),
            soft_cap: soft_cap.map(f64::from),
            sink: if self.case.config.sinks { Some(&sink) } else { None },
            temperature,
            ..Rules::default()
        };
        Request {
            query_len: self.case.query_tokens as usize,
            kv_len: self.case.kv_tokens as usize,
            group,
            value_head_dim: dim,
            softmax_scale: softmax_scale as f64,
            causal: false,
            rules,
            q: &|token, head| numbers(&self.q, self.case.query_row(token, head) * dim),
            k: &|key, head| numbers(&self.k, key * token_stride + head * head_stride),
            v: &|key, head| numbers(&self.v, key * token_stride + head * head_stride),
        }
        .attend(token, head)
    }

    /// Holds every row against the oracle's; the first difference is the error.
    pub fn check(&self, outputs: &SparseOutputs) -> Result<(), String> {
        let (heads, dim) = (self.case.config.query_heads as usize, self.case.config.head_dim as usize);
        let dtype = self.case.config.dtype;
        let places =
            || (0..self.case.query_tokens as usize).flat_map(|token| (0..heads).map(move |head| (token, head)));
        let answers = self.answers.get_or_init(|| places().map(|(token, head)| self.expected(token, head)).collect());
        for ((token, head), expected) in places().zip(answers) {
            let row = self.case.query_row(token, head);
            let out: Vec<f64> = outputs.out[row * dim..][..dim].iter().map(|&bits| value(dtype, bits) as f64).collect();
            let error = row_error(&out, &expected.out);
            if error.is_nan() || error > row_tolerance(dtype) {
                return Err(format!("token {token}, head {head}: output is off by {error:.2e}"));
            }
            let lse = f32::from_bits(outputs.lse[row]) as f64;
            if !lse_agrees(lse, expected.lse2()) {
                return Err(format!("token {token}, head {head}: LSE is {lse}, not {}", expected.lse2()));
            }
        }
        Ok(())
    }
}

/// Runs in one call that do not match their pattern.
pub fn check_refusals(device: &Device) {
    let case = SparseCase::equal((4, 2), 64, [40, 64], [16, 16], 4);
    let fixture = SparseFixture::new(&case);
    let memory = device.allocate(1 << 16).unwrap();
    let run = fixture.run_at([memory.address(); 5]);
    let oxattn::KvMemory::Ragged { k, v } = run.kv else { panic!("rows of keys") };
    let cache = fixture.sparse.cache(k, v).unwrap();
    let mask = Some(MaskMemory { address: memory.address(), bytes: 1 << 16 });
    let paged = Run::new(run.q, cache, PageIndices { address: memory.address(), len: 100 }, run.out);
    let keys = |k| Run::ragged(run.q, k, v, run.out);
    for (run, message) in [
        (paged, "this call brings a paged cache, which the attention does not read; make it with AttentionConfig::new"),
        (
            run.with_variant(VariantInputs { mask, ..VariantInputs::default() }),
            "this call brings variant.mask, which the attention does not read; make it with Bsr::with_mask",
        ),
        (Run { q: Rows { tokens: 39, ..run.q }, ..run }, "q.tokens is 39; this call needs 40"),
        (Run { out: Rows { heads: 2, ..run.out }, ..run }, "out.heads is 2; this call needs 4"),
        (keys(Rows { tokens: 63, ..k }), "k.tokens is 63; this call needs 64"),
        (keys(Rows { dtype: oxattn::DType::F16, ..k }), "k is f16; this call needs bf16"),
    ] {
        // SAFETY: refused before a launch.
        refused(unsafe { single::block_sparse(device, &fixture.sparse, &run, Stream::default()) }, message);
    }
}

/// Contiguous rows of `heads` heads.
fn rows_view(address: u64, row_bytes: usize, heads: u32) -> RowsView {
    let head_stride_bytes = row_bytes as i64;
    RowsView { address, token_stride_bytes: heads as i64 * head_stride_bytes, head_stride_bytes }
}

fn cache_view(rows: &CacheRows) -> CacheView {
    let [page, token, head] = [rows.page_stride, rows.token_stride, rows.head_stride].map(|elements| 2 * elements);
    CacheView { address: rows.address, page_stride_bytes: page, token_stride_bytes: token, head_stride_bytes: head }
}
