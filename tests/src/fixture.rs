//! A case in memory: queries, a paged cache, the page table; and the oracle's answer to hold an executor's against.
//!
//! A row's numbers depend on its request's seed, its position, heads and dims, not on pages, layout or batch: cases
//! that differ only there must have the same outputs.

use crate::buffer::{Access, Buffer};
use crate::cases::{Case, HIGH_PAGE, HIGH_ROW, Pages, Unused, Values};
use crate::executors::{AttentionLaunch, Executor};
use crate::layout::{Strides, strides};
use crate::number::{bits, lse_agrees, lse_agrees_rounded, row_error, row_tolerance, value};
use crate::plans::PlanImage;
use crate::random::Random;
use crate::rope::frequency;
use crate::variants::Modifiers;
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{AttendParameters, CacheView, RowsView};
use kernels_gpu::abi::plan::{MaskRequest, RAGGED_PAGE_TOKENS};
use kernels_gpu::variant::{ModifiedParameters, RotaryParameters};
use oxattn::config::AttentionConfig;
use oxattn::oracle::{Norm, Request, Rotation, Rules, State};
use oxattn::tensor::CacheRows;
use oxattn::{
    Device, KvMemory, Lse2, LseE, MaskForm, MaskMemory, PageIndices, PagedCache, QueryPositions, Rows, Run,
    VariantInputs, pack_mask,
};
use std::cell::OnceCell;
use std::f32::consts::{LN_2, LOG2_E};
use std::rc::Rc;

/// What unused slots hold where they do not hold NaN.
const LARGE: f32 = 10_000.0;
/// Multiplications that an oracle's answers may cost; past it, rows are sampled.
const ORACLE_BUDGET: u64 = 1 << 24;

/// Which LSE a run asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lse {
    /// None.
    None,
    /// Base 2.
    Two,
    /// Natural.
    E,
}

/// A case in memory.
pub struct Fixture {
    /// The case.
    pub case: Case,
    /// Where each request's page ids start in `page_indices`, or its rows if they are ragged, and their total.
    pub page_begin: Vec<u32>,
    /// Page ids of the pool; none of ragged rows.
    pub page_indices: Vec<u32>,
    q: Buffer,
    q_strides: RowStrides,
    pool: Buffer,
    pages: usize,
    k_strides: Strides,
    v_strides: Strides,
    /// First query token of each request, and their total.
    query_begin: Vec<u32>,
    /// `[tokens, query_heads, head_dim]`.
    queries: Vec<u16>,
    /// For each request `[kv_len, kv_heads, head_dim]`, values of their own head dim.
    keys: Vec<Vec<u16>>,
    values: Vec<Vec<u16>>,
    /// What the case's variants read: sinks, slopes, temperatures, weights of the queries' norm and of the keys'.
    numbers: [Buffer; 5],
    positions: Buffer,
    turns: Buffer,
    mask: Buffer,
    mask_requests: Buffer,
    /// Queries and keys as they meet, as exact as f64, and rounded to their dtype; once asked for.
    changed: [OnceCell<Changed>; 2],
    /// The oracle's answers by these.
    answers: [OnceCell<Vec<(Place, State)>>; 2],
}

/// Rows that were normalised and rotated.
struct Changed {
    /// `[tokens, query_heads, head_dim]`.
    queries: Vec<f64>,
    /// For each request `[kv_len, kv_heads, head_dim]`.
    keys: Vec<Vec<f64>>,
}

/// Request, its token, query head.
type Place = (usize, usize, usize);

/// Rows of a matrix `[tokens, heads, head_dim]`, in elements.
#[derive(Clone, Copy)]
struct RowStrides {
    base: usize,
    token: usize,
    head: usize,
}

impl RowStrides {
    fn row(&self, token: usize, head: usize) -> usize {
        self.base + token * self.token + head * self.head
    }

    fn view(&self, address: u64, element_bytes: usize) -> RowsView {
        RowsView {
            address: address + (element_bytes * self.base) as u64,
            token_stride_bytes: (element_bytes * self.token) as i64,
            head_stride_bytes: (element_bytes * self.head) as i64,
        }
    }
}

/// What an executor wrote. Everything was 0xff, NaN, before.
#[derive(Clone)]
pub struct Outputs {
    out: Buffer,
    out_strides: RowStrides,
    lse: Buffer,
    lse_asked: Lse,
    /// Whether queries and keys that were changed were rounded.
    rounds_rows: bool,
}

impl Outputs {
    /// All bits of outputs and LSE.
    pub fn bits(&self) -> (&[u16], &[u32]) {
        (self.out.as_slice(), self.lse.as_slice())
    }
}

impl Fixture {
    /// Lays out `case`.
    pub fn new(case: &Case) -> Fixture {
        let config = &case.config;
        let (dtype, [head_dim, value_dim]) = (config.dtype, head_dims(config));
        let (query_heads, kv_heads) = (config.query_heads as usize, config.kv_heads as usize);
        let page_size = config.page_size_tokens as usize;
        let query_begin = case.query_begin();
        let tokens = *query_begin.last().unwrap() as usize;

        let [fixed_q, fixed_k, fixed_v] = match case.values {
            Values::Normal => [None; 3],
            Values::ZeroQuery => [Some(0.0), None, None],
            Values::ExtremeNegative => [Some(64.0), Some(-64.0), Some(1.0)],
        };
        let mut queries = Vec::with_capacity(tokens * query_heads * head_dim);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (request, (&query_len, &kv_len)) in case.query_lens.iter().zip(&case.kv_lens).enumerate() {
            let rows = |role: u64, positions: std::ops::Range<i64>, elements: usize, fixed: Option<f32>| -> Vec<u16> {
                let row = |position: i64| {
                    let owner = if role == 0 { request } else { owner(case, request, position as u32) };
                    let seed = if case.pages == Pages::Shared { 0 } else { case.seeds[owner] };
                    let mut random = Random::keyed(&[seed, role, position as u64]);
                    (0..elements).map(move |_| bits(dtype, fixed.unwrap_or_else(|| random.normal())))
                };
                positions.flat_map(row).collect()
            };
            queries.extend(rows(0, kv_len as i64 - query_len as i64..kv_len as i64, query_heads * head_dim, fixed_q));
            keys.push(rows(1, 0..kv_len as i64, kv_heads * head_dim, fixed_k));
            values.push(rows(2, 0..kv_len as i64, kv_heads * value_dim, fixed_v));
        }

        let (page_begin, page_indices, pages) = page_table(case);
        let (k_strides, v_strides, pool_elements) =
            strides(case.layout, pages, page_size, kv_heads, [head_dim, value_dim]);
        let mut pool = Buffer::filled(2 * pool_elements, 0);
        let cells = pool.as_mut_slice::<u16>();
        cells.fill(bits(dtype, if case.unused == Unused::Large { LARGE } else { f32::NAN }));
        let finite = match case.unused {
            Unused::NanKeys => Some((v_strides, value_dim)),
            Unused::NanValues => Some((k_strides, head_dim)),
            Unused::Large | Unused::Nan => None,
        };
        if let Some((strides, dim)) = finite {
            for_each_cell(pages, page_size, kv_heads, |page, offset, head| {
                cells[strides.row(page, offset, head)..][..dim].fill(bits(dtype, LARGE));
            });
        }
        for (request, &kv_len) in case.kv_lens.iter().enumerate() {
            for_each_cell(1, kv_len as usize, kv_heads, |_, position, head| {
                let page = pool_page(case, &page_begin, &page_indices, request, position);
                let row = position * kv_heads + head;
                for (strides, dim, rows) in
                    [(k_strides, head_dim, &keys[request]), (v_strides, value_dim, &values[request])]
                {
                    let to = strides.row(page, position % page_size, head);
                    cells[to..][..dim].copy_from_slice(&rows[row * dim..][..dim]);
                }
            });
        }

        let row_elements = case.query_row_elements.unwrap_or(query_heads * head_dim);
        let q_strides = RowStrides { base: 0, token: row_elements, head: head_dim };
        let mut q = Buffer::filled(2 * tokens * row_elements, 0xff);
        for token in 0..tokens {
            let row = &queries[token * query_heads * head_dim..][..query_heads * head_dim];
            q.as_mut_slice::<u16>()[q_strides.row(token, 0)..][..row.len()].copy_from_slice(row);
        }

        let (mask, mask_requests) = mask_of(case);
        let Modifiers { sinks, slopes, temperatures, query_norm, key_norm, positions, .. } = &case.modifiers;
        let turns = config.rope.map_or(Vec::new(), |rope| rope.turns_and_steps());
        Fixture {
            case: case.clone(),
            numbers: [sinks, slopes, temperatures, query_norm, key_norm].map(|numbers| Buffer::of(numbers)),
            positions: Buffer::of(positions),
            turns: Buffer::of(&turns),
            mask: Buffer::of(&mask),
            mask_requests: Buffer::of(&mask_requests),
            page_begin,
            page_indices,
            q,
            q_strides,
            pool,
            pages,
            k_strides,
            v_strides,
            query_begin,
            queries,
            keys,
            values,
            changed: Default::default(),
            answers: Default::default(),
        }
    }

    /// Runs the case with `plan`.
    pub fn run(&mut self, executor: &dyn Executor, plan: &mut PlanImage, lse_asked: Lse) -> Outputs {
        let config = self.case.config;
        let query_heads = config.query_heads as usize;
        let tokens = *self.query_begin.last().unwrap() as usize;
        let header = plan.header();
        let (out_strides, lse_strides) = (self.out_strides(), self.lse_strides());
        let mut out = Buffer::filled(2 * out_strides.row(tokens, 0), 0xff);
        let mut lse = Buffer::filled(4 * tokens * query_heads, 0xff);
        let mut partial_out = Buffer::filled(4 * header.partial_rows as usize * widest_state(&config), 0xff);
        let mut partial_lse = Buffer::filled(4 * header.partial_rows as usize, 0xff);
        let mut page_indices = Buffer::of(&self.page_indices);
        page_indices.as_mut_slice::<u32>().iter_mut().for_each(|page| *page += first_page(&self.case));
        let pool = self.pool.address();
        let image = plan.image.address();
        let lse_view = match lse_asked {
            Lse::None => RowsView { address: 0, token_stride_bytes: 0, head_stride_bytes: 0 },
            _ => lse_strides.view(lse.address(), 4),
        };
        let lse_scale = if lse_asked == Lse::E { LN_2 } else { 1.0 };
        let attend = AttendParameters {
            queue_begin: image + header.queue_begin_offset_bytes as u64,
            items: image + header.items_offset_bytes as u64,
            arrivals: image + header.arrivals_offset_bytes as u64,
            page_indices: match config.ragged {
                true => image + plan.first_kv_rows_offset_bytes,
                false => page_indices.address(),
            },
            partial_out: partial_out.address(),
            partial_lse: partial_lse.address(),
            q: self.q_strides.view(self.q.address(), 2),
            out: out_strides.view(out.address(), 2),
            lse: lse_view,
            k: self.cache_view(self.k_strides, pool),
            v: self.cache_view(self.v_strides, pool),
            page_size: Divisor::new(if config.ragged { RAGGED_PAGE_TOKENS } else { config.page_size_tokens }).unwrap(),
            group: Divisor::new(config.group()).unwrap(),
            team_blocks: Divisor::new(plan.teams.blocks).unwrap(),
            heads_per_block: plan.teams.heads_per_block,
            kv_heads: config.kv_heads,
            causal: config.causal as u32,
            lse_scale,
            box_tokens: 0,
            key_pieces: config.head_dim / 8,
            value_pieces: config.value_head_dim / 8,
        };
        let variant = self.parameters();
        let variant_inputs = [&mut self.mask, &mut self.mask_requests, &mut self.positions, &mut self.turns];
        let variant_inputs = variant_inputs.into_iter().chain(&mut self.numbers);
        let inputs = [&mut page_indices, &mut self.q, &mut self.pool].into_iter().chain(variant_inputs);
        let outputs = [&mut out, &mut lse, &mut partial_out, &mut partial_lse];
        let mut regions = plan.regions().to_vec();
        regions.extend(inputs.map(|buffer| buffer.region(Access::Read)));
        regions.extend(outputs.map(|buffer| buffer.region(Access::Produce)));
        executor.attention(&AttentionLaunch {
            attend,
            header,
            plan: image,
            blocks: plan.teams.teams * plan.teams.blocks,
            head_dims: [config.head_dim, config.value_head_dim],
            dtype: config.dtype,
            is_plain: config.is_plain(),
            changes_rows: config.changes_rows(),
            pages: first_page(&self.case) + self.pages as u32,
            variant,
            regions,
        });
        assert!(plan.arrivals().iter().all(|&count| count == 0), "{}: counts are left behind", self.case.name);
        Outputs { out, out_strides, lse, lse_asked, rounds_rows: executor.rounds_rows() }
    }

    /// What the kernels are told of the case's variants, worked out here once more.
    fn parameters(&mut self) -> RotaryParameters {
        let config = self.case.config;
        let [sinks, slopes, temperatures, query_norm, key_norm] =
            self.numbers.each_mut().map(|buffer| buffer.address());
        let if_asked = |asked: bool, address: u64| if asked { address } else { 0 };
        let (scale, cap_log2) = match config.soft_cap {
            None => (config.softmax_scale * LOG2_E, 0.0),
            Some(cap) => (config.softmax_scale / cap, cap * LOG2_E),
        };
        let window = |keys: Option<u32>| keys.map_or(i32::MAX, |keys| i32::try_from(keys).unwrap_or(i32::MAX));
        let modified = ModifiedParameters {
            sinks: if_asked(config.sinks, sinks),
            alibi_slopes: if_asked(config.alibi, slopes),
            temperatures: if_asked(config.temperatures, temperatures),
            mask: if_asked(config.mask.is_some(), self.mask.address()),
            mask_requests: self.mask_requests.address(),
            scale,
            cap_log2,
            window_left: window(config.window_left),
            window_right: window(config.window_right),
            mask_shift: if config.mask == Some(MaskForm::Bits) { 3 } else { 0 },
            sigmoid: config.sigmoid_bias.is_some() as u32,
            sigmoid_bias_log2: config.sigmoid_bias.unwrap_or(0.0) * LOG2_E,
            padding: 0,
        };
        RotaryParameters {
            modified,
            turns: if_asked(config.rope.is_some(), self.turns.address()),
            positions: if_asked(config.rope_positions, self.positions.address()),
            query_norm: if_asked(config.query_norm.is_some(), query_norm),
            key_norm: if_asked(config.key_norm.is_some(), key_norm),
            query_epsilon: config.query_norm.unwrap_or(0.0),
            key_epsilon: config.key_norm.unwrap_or(0.0),
            rotary_dim: config.rope.map_or(0, |rope| rope.rotary_dim),
            interleaved: config.rope.is_some_and(|rope| rope.interleaved) as u32,
        }
    }

    /// A piece of padding follows each head's row, and more each token's: it must stay as it is.
    fn out_strides(&self) -> RowStrides {
        let (query_heads, [_, value_dim]) = (self.case.config.query_heads as usize, head_dims(&self.case.config));
        RowStrides { base: 8, token: query_heads * (value_dim + 8) + 16, head: value_dim + 8 }
    }

    fn lse_strides(&self) -> RowStrides {
        RowStrides { base: 0, token: self.case.config.query_heads as usize, head: 1 }
    }

    /// The case on `device`, with room for `tokens` query tokens, at least the case's own.
    pub fn tensors(&self, device: &Device, lse_asked: Lse, tokens: usize) -> Tensors {
        let allocate = |bytes: usize| device.allocate(bytes.max(16)).unwrap();
        let inputs = Rc::new(Inputs {
            q: allocate(2 * self.q_strides.row(tokens, 0)),
            pool: allocate(self.pool.as_slice::<u8>().len()),
            page_indices: allocate(4 * self.page_indices.len()),
            numbers: self.numbers.each_ref().map(|numbers| allocate(numbers.as_slice::<u8>().len())),
            mask: allocate(self.mask.as_slice::<u8>().len()),
            positions: allocate(4 * tokens),
        });
        let tensors = self.tensors_on(inputs, device, lse_asked, tokens);
        tensors.load(self);
        tensors
    }

    fn tensors_on(&self, inputs: Rc<Inputs>, device: &Device, lse_asked: Lse, tokens: usize) -> Tensors {
        let config = &self.case.config;
        let AttentionConfig { head_dim, value_head_dim, .. } = *config;
        let out_strides = self.out_strides();
        let allocate = |bytes: usize| device.allocate(bytes.max(16)).unwrap();
        let out = allocate(2 * out_strides.row(tokens, 0));
        let lse = allocate(4 * tokens * config.query_heads as usize);
        let rows = |address: u64, head_dim: u32, strides: RowStrides| {
            Rows::contiguous(address, config.dtype, tokens as u64, config.query_heads, head_dim)
                .with_strides(strides.token as i64, strides.head as i64)
        };
        let half = |strides: Strides, head_dim: u32| {
            let address = inputs.pool.address() + 2 * strides.base as u64;
            let half = CacheRows::contiguous(address, self.pages as u64, oxattn::Layout::Nhd, config);
            let [page, token, head] = [strides.page, strides.token, strides.head].map(|elements| elements as i64);
            CacheRows { head_dim, ..half }.with_strides(page, token, head)
        };
        let (lse_address, lse_tokens) = (lse.address(), tokens as u64);
        let page_indices = PageIndices { address: inputs.page_indices.address(), len: self.page_indices.len() as u64 };
        let ragged = |strides: Strides, head_dim: u32| {
            let address = inputs.pool.address() + 2 * strides.base as u64;
            Rows::contiguous(address, config.dtype, self.pages as u64, config.kv_heads, head_dim)
                .with_strides(strides.page as i64, strides.head as i64)
        };
        let run = Run {
            q: rows(inputs.q.address(), head_dim, self.q_strides),
            kv: if config.ragged {
                KvMemory::Ragged { k: ragged(self.k_strides, head_dim), v: ragged(self.v_strides, value_head_dim) }
            } else {
                let cache = PagedCache { k: half(self.k_strides, head_dim), v: half(self.v_strides, value_head_dim) };
                KvMemory::Paged { cache, page_indices }
            },
            out: rows(out.address() + 2 * out_strides.base as u64, value_head_dim, out_strides),
            lse: match lse_asked {
                Lse::None => None,
                Lse::Two => Some(Lse2::contiguous(lse_address, lse_tokens, config.query_heads).into()),
                Lse::E => Some(LseE::contiguous(lse_address, lse_tokens, config.query_heads).into()),
            },
            variant: self.variant_inputs(&inputs),
        };
        let tensors = Tensors { run, lse_asked, inputs, out, lse, rounds_rows: device.as_cuda().is_some() };
        tensors.clear();
        tensors
    }

    fn variant_inputs(&self, inputs: &Inputs) -> VariantInputs {
        let config = self.case.config;
        let numbers = |which: usize, asked: bool| {
            let (address, len) = (inputs.numbers[which].address(), self.numbers[which].as_slice::<f32>().len() as u64);
            asked.then_some(oxattn::Values { address, len })
        };
        let mask = MaskMemory { address: inputs.mask.address(), bytes: self.mask.as_slice::<u8>().len() as u64 };
        VariantInputs {
            sinks: numbers(0, config.sinks),
            alibi_slopes: numbers(1, config.alibi),
            temperatures: numbers(2, config.temperatures),
            mask: config.mask.is_some().then_some(mask),
            rope_positions: config.rope_positions.then(|| QueryPositions {
                address: inputs.positions.address(),
                len: inputs.positions.bytes() as u64 / 4,
            }),
            query_norm: numbers(3, config.query_norm.is_some()),
            key_norm: numbers(4, config.key_norm.is_some()),
            custom: None,
        }
    }

    /// `count` tensors with inputs in common and outputs of their own.
    pub fn tensors_of_layers(&self, device: &Device, lse_asked: Lse, tokens: usize, count: usize) -> Vec<Tensors> {
        let mut layers = vec![self.tensors(device, lse_asked, tokens)];
        while layers.len() < count {
            layers.push(self.tensors_on(Rc::clone(&layers[0].inputs), device, lse_asked, tokens));
        }
        layers
    }

    /// Takes the keys and values of the requests' query tokens out of the cache, whose cells become NaN: what an
    /// append has to write before a run.
    pub fn take_new_tokens(&mut self) -> NewTokens {
        let config = self.case.config;
        let (kv_heads, [head_dim, value_dim]) = (config.kv_heads as usize, head_dims(&config));
        let page_size = config.page_size_tokens as usize;
        let mut new = NewTokens { k: Vec::new(), v: Vec::new(), slots: Vec::new() };
        let cells = self.pool.as_mut_slice::<u16>();
        for (request, (&query_len, &kv_len)) in self.case.query_lens.iter().zip(&self.case.kv_lens).enumerate() {
            for position in (kv_len - query_len) as usize..kv_len as usize {
                let page = pool_page(&self.case, &self.page_begin, &self.page_indices, request, position);
                let row = |dim: usize| position * kv_heads * dim..(position + 1) * kv_heads * dim;
                new.k.extend_from_slice(&self.keys[request][row(head_dim)]);
                new.v.extend_from_slice(&self.values[request][row(value_dim)]);
                new.slots.push((page * page_size + position % page_size) as i64);
                for head in 0..kv_heads {
                    for (strides, dim) in [(self.k_strides, head_dim), (self.v_strides, value_dim)] {
                        let cell = &mut cells[strides.row(page, position % page_size, head)..][..dim];
                        cell.fill(bits(config.dtype, f32::NAN));
                    }
                }
            }
        }
        new
    }

    /// The cache as a launch sees it: page [`first_page`] is the pool's page 0.
    fn cache_view(&self, strides: Strides, pool: u64) -> CacheView {
        // Ragged keys are in no pages, so the pool's have a row each, from which the next token's is as far as the next page.
        let token = if self.case.config.ragged { strides.page } else { strides.token };
        let view = Strides { token, ..strides }.view(pool);
        let before = first_page(&self.case) as i64 * view.page_stride_bytes;
        CacheView { address: view.address.wrapping_add_signed(-before), ..view }
    }

    /// Runs `f` with the oracle's rules for a request, what changes queries and keys among them.
    fn with_rules<T>(&self, request: usize, f: impl FnOnce(Rules<'_>) -> T) -> T {
        let config = &self.case.config;
        let Modifiers { sinks, slopes, temperatures, masks, query_norm, key_norm, positions } = &self.case.modifiers;
        let kv_len = self.case.kv_lens[request] as usize;
        let first = self.query_begin[request] as usize;
        let slope = |head: usize| slopes[head] as f64;
        let sink = |head: usize| sinks[head] as f64;
        let mask = |token: usize, position: usize| masks[request][token * kv_len + position];
        let frequency = |pair: usize| config.rope.map_or(0.0, |rope| frequency(&rope, pair));
        let position = |token: usize| positions[first + token] as i64;
        let [query_weight, key_weight] =
            [query_norm, key_norm].map(|weights| move |column: usize| weights[column] as f64);
        f(Rules {
            window_left: config.window_left.map(|keys| keys as usize),
            window_right: config.window_right.map(|keys| keys as usize),
            mask: if config.mask.is_some() { Some(&mask) } else { None },
            temperature: config.temperatures.then(|| temperatures[request] as f64),
            soft_cap: config.soft_cap.map(f64::from),
            alibi_slope: if config.alibi { Some(&slope) } else { None },
            bias: None,
            sink: if config.sinks { Some(&sink) } else { None },
            query_norm: config.query_norm.map(|epsilon| Norm { epsilon: epsilon.into(), weight: &query_weight }),
            key_norm: config.key_norm.map(|epsilon| Norm { epsilon: epsilon.into(), weight: &key_weight }),
            rotation: config.rope.map(|rope| Rotation {
                dim: rope.rotary_dim as usize,
                interleaved: rope.interleaved,
                frequency: &frequency,
            }),
            query_position: if config.rope_positions { Some(&position) } else { None },
            sigmoid_bias: config.sigmoid_bias.map(f64::from),
        })
    }

    /// Queries and keys after norms and rotation, rounded to their dtype or not.
    fn changed(&self, rounds: bool) -> &Changed {
        self.changed[rounds as usize].get_or_init(|| {
            let config = &self.case.config;
            let head_dim = config.head_dim as usize;
            let exact = |row: &[u16]| row.iter().map(|&bits| value(config.dtype, bits) as f64).collect();
            let rounded = |x: f64| if rounds { value(config.dtype, bits(config.dtype, x as f32)) as f64 } else { x };
            let (mut queries, mut keys) = (Vec::new(), Vec::new());
            for (request, (&query_len, &kv_len)) in self.case.query_lens.iter().zip(&self.case.kv_lens).enumerate() {
                self.with_rules(request, |rules| {
                    let width = config.query_heads as usize * head_dim;
                    for token in 0..query_len as usize {
                        let place = token as i64 + kv_len as i64 - query_len as i64;
                        let position = rules.query_position.map_or(place, |position| position(token));
                        let heads = &self.queries[(self.query_begin[request] as usize + token) * width..][..width];
                        for row in heads.chunks_exact(head_dim) {
                            queries.extend(rules.changed_query(position, exact(row)).into_iter().map(rounded));
                        }
                    }
                    let rows = self.keys[request].chunks_exact(head_dim).enumerate();
                    let changed = rows.flat_map(|(index, row)| {
                        rules.changed_key((index / config.kv_heads as usize) as i64, exact(row))
                    });
                    keys.push(changed.map(rounded).collect());
                });
            }
            Changed { queries, keys }
        })
    }

    /// The oracle's answer for a token of a request.
    pub fn expected(&self, request: usize, token: usize, head: usize) -> State {
        self.expected_by(request, token, head, false)
    }

    /// The same where queries and keys that the config changes are rounded to their dtype, or not.
    fn expected_by(&self, request: usize, token: usize, head: usize, rounds: bool) -> State {
        let config = &self.case.config;
        let ([head_dim, value_dim], query_heads) = (head_dims(config), config.query_heads as usize);
        let kv_heads = config.kv_heads as usize;
        let row = |elements: &[u16], row: usize, dim: usize| -> Vec<f64> {
            elements[row * dim..][..dim].iter().map(|&bits| value(config.dtype, bits) as f64).collect()
        };
        let first = self.query_begin[request] as usize;
        let changed = config.changes_rows().then(|| self.changed(rounds));
        let changed_row = |rows: &[f64], row: usize| rows[row * head_dim..][..head_dim].to_vec();
        self.with_rules(request, |rules| {
            Request {
                query_len: self.case.query_lens[request] as usize,
                kv_len: self.case.kv_lens[request] as usize,
                group: config.group() as usize,
                value_head_dim: value_dim,
                softmax_scale: config.softmax_scale as f64,
                causal: config.causal,
                // Once for all rows, above.
                rules: Rules { query_norm: None, key_norm: None, rotation: None, ..rules },
                q: &|token, head| match (changed, (first + token) * query_heads + head) {
                    (Some(changed), index) => changed_row(&changed.queries, index),
                    (None, index) => row(&self.queries, index, head_dim),
                },
                k: &|position, head| match (changed, position * kv_heads + head) {
                    (Some(changed), index) => changed_row(&changed.keys[request], index),
                    (None, index) => row(&self.keys[request], index, head_dim),
                },
                v: &|position, head| row(&self.values[request], position * kv_heads + head, value_dim),
            }
            .attend(token, head)
        })
    }

    /// Holds `outputs` against the oracle's; the first difference is the error.
    pub fn check(&self, outputs: &Outputs) -> Result<(), String> {
        self.check_written(outputs)?;
        let config = &self.case.config;
        // Without such changes both are the same.
        let rounds = outputs.rounds_rows && config.changes_rows();
        let answers = self.answers[rounds as usize].get_or_init(|| {
            let expected = |(request, token, head)| self.expected_by(request, token, head, rounds);
            self.rows_to_check().into_iter().map(|place| (place, expected(place))).collect()
        });
        for &((request, token, head), ref expected) in answers {
            let (out, lse) = self.row(outputs, request, token, head);
            let place = format!("request {request}, token {token}, head {head}");
            let error = row_error(&out, &expected.out);
            let tolerance = row_tolerance(config.dtype);
            if error.is_nan() || error > tolerance {
                return Err(format!("{place}: output is off by {error:.2e}, more than {tolerance:.0e}"));
            }
            let expected_lse = match outputs.lse_asked {
                Lse::None => continue,
                Lse::Two => expected.lse2(),
                Lse::E => expected.lse,
            };
            let agrees = lse_agrees(lse, expected_lse) || rounds && lse_agrees_rounded(config.dtype, lse, expected_lse);
            if !agrees {
                return Err(format!("{place}: LSE is {lse}, not {expected_lse}"));
            }
        }
        Ok(())
    }

    /// Output and LSE of a row.
    pub fn row(&self, outputs: &Outputs, request: usize, token: usize, head: usize) -> (Vec<f64>, f64) {
        let config = &self.case.config;
        let token = self.query_begin[request] as usize + token;
        let [_, value_dim] = head_dims(config);
        let out = &outputs.out.as_slice::<u16>()[outputs.out_strides.row(token, head)..][..value_dim];
        let lse = outputs.lse.as_slice::<f32>()[token * config.query_heads as usize + head];
        (out.iter().map(|&bits| value(config.dtype, bits) as f64).collect(), lse as f64)
    }

    /// Every output was written, and nothing between them.
    fn check_written(&self, outputs: &Outputs) -> Result<(), String> {
        let config = &self.case.config;
        let mut padding = outputs.out.clone();
        let padding = padding.as_mut_slice::<u16>();
        for token in 0..*self.query_begin.last().unwrap() as usize {
            for head in 0..config.query_heads as usize {
                let row = &mut padding[outputs.out_strides.row(token, head)..][..config.value_head_dim as usize];
                if row.iter().any(|&bits| !value(config.dtype, bits).is_finite()) {
                    return Err(format!("token {token} of the batch, head {head}: output unwritten or not finite"));
                }
                row.fill(0xffff);
            }
        }
        if padding.iter().any(|&bits| bits != 0xffff) {
            return Err("padding between outputs was written".into());
        }
        let lse_is_nan = |lse: &f32| lse.is_nan();
        match outputs.lse_asked {
            Lse::None if !outputs.lse.as_slice().iter().all(lse_is_nan) => Err("an LSE nobody asked for".into()),
            Lse::Two | Lse::E if outputs.lse.as_slice().iter().any(lse_is_nan) => Err("an LSE is unwritten".into()),
            _ => Ok(()),
        }
    }

    /// All rows, or, where that is too much for the oracle, the first and last token of the first and last requests
    /// and others at random.
    fn rows_to_check(&self) -> Vec<Place> {
        let (requests, heads) = (self.case.query_lens.len(), self.case.config.query_heads as usize);
        let rows = *self.query_begin.last().unwrap() as usize * heads;
        if self.case.cost() <= ORACLE_BUDGET {
            let tokens = (0..requests).flat_map(|r| (0..self.case.query_lens[r] as usize).map(move |t| (r, t)));
            return tokens.flat_map(|(r, t)| (0..heads).map(move |h| (r, t, h))).collect();
        }
        let mut random = Random::new(2);
        let with_tokens: Vec<usize> = (0..requests).filter(|&request| self.case.query_lens[request] > 0).collect();
        let mut checked = Vec::new();
        for &request in [with_tokens.first(), with_tokens.last()].into_iter().flatten() {
            for token in [0, self.case.query_lens[request] as usize - 1] {
                checked.extend([(request, token, 0), (request, token, heads - 1)]);
            }
        }
        for _ in 0..(rows as u64 * ORACLE_BUDGET / self.case.cost()).max(16) {
            let request = with_tokens[random.below(with_tokens.len())];
            checked.push((request, random.below(self.case.query_lens[request] as usize), random.below(heads)));
        }
        checked
    }
}

/// Keys and values that are not in the cache yet.
pub struct NewTokens {
    /// `[tokens, kv_heads, head_dim]`.
    pub k: Vec<u16>,
    /// The same, of the values' head dim.
    pub v: Vec<u16>,
    /// Where each token goes.
    pub slots: Vec<i64>,
}

/// A case's tensors on a device.
pub struct Tensors {
    /// What a run is given.
    pub run: Run,
    lse_asked: Lse,
    inputs: Rc<Inputs>,
    out: oxattn::Buffer,
    lse: oxattn::Buffer,
    rounds_rows: bool,
}

struct Inputs {
    q: oxattn::Buffer,
    pool: oxattn::Buffer,
    page_indices: oxattn::Buffer,
    numbers: [oxattn::Buffer; 5],
    mask: oxattn::Buffer,
    positions: oxattn::Buffer,
}

impl Tensors {
    /// The cache and page ids of a case that has them.
    pub fn paged(&self) -> (PagedCache, PageIndices) {
        match self.run.kv {
            KvMemory::Paged { cache, page_indices } => (cache, page_indices),
            KvMemory::Ragged { .. } => panic!("ragged keys and values are in no cache"),
        }
    }

    /// Copies the inputs of `fixture`, whose rows must lie as those of the fixture they were made for, and clears the
    /// outputs.
    pub fn load(&self, fixture: &Fixture) {
        let Inputs { q, pool, page_indices, numbers, mask, positions } = &*self.inputs;
        q.write(0, fixture.q.as_slice()).unwrap();
        pool.write(0, fixture.pool.as_slice()).unwrap();
        page_indices.write(0, bytemuck::cast_slice(&fixture.page_indices)).unwrap();
        for (to, from) in numbers.iter().zip(&fixture.numbers) {
            to.write(0, from.as_slice()).unwrap();
        }
        mask.write(0, fixture.mask.as_slice()).unwrap();
        positions.write(0, fixture.positions.as_slice()).unwrap();
        self.clear();
    }

    /// Fills the outputs with 0xff.
    pub fn clear(&self) {
        self.out.fill(0xff).unwrap();
        self.lse.fill(0xff).unwrap();
    }

    /// What the device wrote of `fixture`'s rows; it wrote nothing past them.
    pub fn download(&self, fixture: &Fixture) -> Outputs {
        let mut lse = self.lse.download::<u32>().unwrap();
        let rows = *fixture.query_begin.last().unwrap() as usize * fixture.case.config.query_heads as usize;
        assert!(lse[rows..].iter().all(|&bits| bits == u32::MAX), "an LSE past the batch was written");
        lse.truncate(rows);
        Outputs {
            out: Buffer::of(&self.out.download::<u16>().unwrap()),
            out_strides: fixture.out_strides(),
            lse: Buffer::of(&lse),
            lse_asked: self.lse_asked,
            rounds_rows: self.rounds_rows,
        }
    }
}

/// The mask's bytes, and where each request's part is.
fn mask_of(case: &Case) -> (Vec<u8>, Vec<MaskRequest>) {
    let (mut bytes, mut places) = (Vec::new(), Vec::new());
    for (elements, &kv_len_tokens) in case.modifiers.masks.iter().zip(&case.kv_lens) {
        let elements_of_byte = if case.config.mask == Some(MaskForm::Bits) { 8 } else { 1 };
        let begin_elements = bytes.len() as u64 * elements_of_byte;
        places.push(MaskRequest { begin_elements, kv_len_tokens, padding: 0 });
        match case.config.mask {
            Some(MaskForm::Bits) => bytes.extend(pack_mask(elements)),
            _ => bytes.extend(elements.iter().map(|&element| element as u8)),
        }
    }
    (bytes, places)
}

/// Elements of a key and of a value.
fn head_dims(config: &AttentionConfig) -> [usize; 2] {
    [config.head_dim as usize, config.value_head_dim as usize]
}

/// Columns of a partial state of the kernel whose states have most.
pub(crate) fn widest_state(config: &AttentionConfig) -> usize {
    let prefill = config.prefill_tile().map_or(0, |tile| tile.value_dim);
    config.attend_head_dim().max(prefill) as usize
}

/// The id of the pool's first page, or the number of its first row.
fn first_page(case: &Case) -> u32 {
    match case.pages {
        Pages::HighIds if case.config.ragged => HIGH_ROW,
        Pages::HighIds => HIGH_PAGE,
        _ => 0,
    }
}

/// The page of the pool that holds a position of a request.
fn pool_page(case: &Case, page_begin: &[u32], page_indices: &[u32], request: usize, position: usize) -> usize {
    let place = page_begin[request] as usize + position / case.config.page_size_tokens as usize;
    if case.config.ragged { place - first_page(case) as usize } else { page_indices[place] as usize }
}

/// `page_begin`, no page ids, and the rows of the pool: up to two rows after each request's, and more after the last,
/// are nobody's.
fn ragged_rows(case: &Case) -> (Vec<u32>, Vec<u32>, usize) {
    let mut row_begin = vec![0];
    let mut end = 0;
    for (request, &kv_len) in case.kv_lens.iter().enumerate() {
        end += match case.pages {
            Pages::Adjacent => kv_len,
            Pages::HighIds if request == 0 => kv_len + HIGH_ROW,
            _ => kv_len + 2 - request as u32 % 3,
        };
        row_begin.push(end);
    }
    let rows = end - first_page(case);
    (row_begin, Vec::new(), rows as usize + 3)
}

/// The first of the requests whose key at `position` is that of `request`.
fn owner(case: &Case, request: usize, position: u32) -> usize {
    let shares = |&request: &usize| case.shared_tokens.get(request).is_some_and(|&tokens| position < tokens);
    request - (0..=request).rev().take_while(shares).count()
}

/// Leading pages that a request has in common with the one before it: those that hold nothing else of either.
fn shared_pages(case: &Case, request: usize) -> u32 {
    let page_size = case.config.page_size_tokens;
    match case.shared_tokens.get(request) {
        None | Some(0) => 0,
        Some(&tokens) if tokens == case.kv_lens[request - 1].min(case.kv_lens[request]) => tokens.div_ceil(page_size),
        Some(&tokens) => tokens / page_size,
    }
}

/// `page_begin`, page ids, and the pages of the pool: a third more than are owned, in any order.
fn page_table(case: &Case) -> (Vec<u32>, Vec<u32>, usize) {
    if case.config.ragged {
        return ragged_rows(case);
    }
    let page_size = case.config.page_size_tokens;
    let spare = (case.pages == Pages::OneTooMany) as u32;
    let counts: Vec<u32> = case.kv_lens.iter().map(|kv_len| kv_len.div_ceil(page_size) + spare).collect();
    let owned = match case.pages {
        Pages::Shared => counts.iter().copied().max().unwrap_or(0),
        _ => counts.iter().enumerate().map(|(request, &count)| count - shared_pages(case, request)).sum(),
    };
    let pages = owned + owned / 3 + 1;
    let mut free: Vec<u32> = (0..pages).collect();
    Random::new(3).shuffle(&mut free);
    let mut page_begin = vec![0];
    let mut page_indices = Vec::new();
    for (request, &count) in counts.iter().enumerate() {
        let shared = shared_pages(case, request);
        match case.pages {
            Pages::Shared => page_indices.extend_from_slice(&free[..count as usize]),
            _ => {
                if shared > 0 {
                    let before = page_begin[request - 1] as usize;
                    page_indices.extend_from_within(before..before + shared as usize);
                }
                page_indices.extend(free.drain(..(count - shared) as usize));
            }
        }
        page_begin.push(page_indices.len() as u32);
    }
    (page_begin, page_indices, pages as usize)
}

fn for_each_cell(pages: usize, page_size: usize, heads: usize, mut visit: impl FnMut(usize, usize, usize)) {
    for page in 0..pages {
        for offset in 0..page_size {
            for head in 0..heads {
                visit(page, offset, head);
            }
        }
    }
}
