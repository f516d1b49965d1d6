//! The example's variants on a device, against what they mean in f64.
//!
//! In: a [`Case`] and a device that has the variants' kernels. Out: the largest error of an output row. The expected rows
//! come from [`oxattn::oracle`] with a mask or a bias written out below, which share nothing with the device crate.
//!
//! Unsafe: runs take addresses; the buffers behind them live until the outputs are read, which waits.

mod cases;

use example_variants::{Chunked, DistanceBias};
use fastrand::Rng;
use half::{bf16, f16};
use oxattn::custom::CustomVariant;
use oxattn::oracle::{Request, Rules};
use oxattn::*;

pub use cases::{Case, Which, cases, prefill_cases};

/// A batch's tensors, elements in the config's dtype.
struct Batch {
    query_begin: Vec<u32>,
    page_begin: Vec<u32>,
    page_ids: Vec<u32>,
    q: Vec<u16>,
    k: Vec<u16>,
    v: Vec<u16>,
    /// `[query_heads, 4]`.
    biases: Vec<f32>,
}

/// Runs a case and returns the largest error of an output row: the 2-norm of the difference over that of the row.
pub fn largest_error(device: &Device, case: &Case) -> Result<f64, Error> {
    largest_error_of(device, case, &|run| run)
}

/// The same of a run that `change` makes of the right one.
pub fn largest_error_of(device: &Device, case: &Case, change: &dyn Fn(Run) -> Run) -> Result<f64, Error> {
    let batch = Batch::new(case);
    let out = batch.run(device, case, change)?;
    let (heads, head_dim) = (case.config.query_heads as usize, case.config.head_dim as usize);
    let mut largest = 0f64;
    for (request, &(query_len, _)) in case.lens.iter().enumerate() {
        for (token, head) in (0..query_len as usize).flat_map(|token| (0..heads).map(move |head| (token, head))) {
            let row = (batch.query_begin[request] as usize + token) * heads + head;
            let got = &out[row * head_dim..][..head_dim];
            let expected = batch.expected(case, request, token, head);
            let pairs = || got.iter().zip(&expected);
            let difference: f64 = pairs().map(|(&got, want)| (number(&case.config, got) - want).powi(2)).sum();
            let size: f64 = expected.iter().map(|want| want * want).sum();
            let error = if difference == 0.0 { 0.0 } else { (difference / size).sqrt() };
            largest = if error.is_nan() { f64::INFINITY } else { largest.max(error) };
        }
    }
    Ok(largest)
}

/// What rounding to the config's dtype explains.
pub fn tolerance(config: &AttentionConfig) -> f64 {
    if config.dtype == DType::F16 { 1e-3 } else { 4e-3 }
}

fn number(config: &AttentionConfig, bits: u16) -> f64 {
    if config.dtype == DType::F16 { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() }
}

fn bits(config: &AttentionConfig, value: f32) -> u16 {
    if config.dtype == DType::F16 { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() }
}

/// What the config adds to a case's variant.
pub fn config(case: &Case) -> AttentionConfig {
    case.config.with_custom_variant(match case.which {
        Which::Chunked { .. } => Chunked::NAME,
        Which::DistanceBias => DistanceBias::NAME,
    })
}

impl Batch {
    fn new(case: &Case) -> Batch {
        let AttentionConfig { query_heads, kv_heads, head_dim, page_size_tokens: page_size, .. } = case.config;
        let mut random = Rng::with_seed(7);
        let (mut query_begin, mut page_begin) = (vec![0], vec![0]);
        for &(query_len, kv_len) in case.lens {
            query_begin.push(query_begin[query_begin.len() - 1] + query_len);
            page_begin.push(page_begin[page_begin.len() - 1] + kv_len.div_ceil(page_size));
        }
        let pages = page_begin[case.lens.len()];
        let mut page_ids: Vec<u32> = (0..pages).collect();
        random.shuffle(&mut page_ids);
        let mut values = |count: u32| -> Vec<u16> {
            (0..count).map(|_| bits(&case.config, 3.0 * (random.f32() + random.f32() - 1.0))).collect()
        };
        let q = values(query_begin[case.lens.len()] * query_heads * head_dim);
        let (k, v) = (values(pages * page_size * kv_heads * head_dim), values(pages * page_size * kv_heads * head_dim));
        let biases = (0..4 * query_heads).map(|_| 4.0 * random.f32() - 2.0).collect();
        let mut batch = Batch { query_begin, page_begin, page_ids, q, k, v, biases };
        // What lies past a request's keys must not be seen.
        for (request, &(_, kv_len)) in case.lens.iter().enumerate() {
            for position in kv_len..kv_len.next_multiple_of(page_size) {
                for head in 0..kv_heads {
                    let row = batch.row(case, request, position as usize, head as usize);
                    batch.k[row.clone()].fill(bits(&case.config, f32::NAN));
                    batch.v[row].fill(bits(&case.config, f32::NAN));
                }
            }
        }
        batch
    }

    /// Where a cache row is.
    fn row(&self, case: &Case, request: usize, position: usize, head: usize) -> std::ops::Range<usize> {
        let AttentionConfig { kv_heads, head_dim, page_size_tokens, .. } = case.config;
        let page_size = page_size_tokens as usize;
        let page = self.page_ids[self.page_begin[request] as usize + position / page_size] as usize;
        let row = ((page * page_size + position % page_size) * kv_heads as usize + head) * head_dim as usize;
        row..row + head_dim as usize
    }

    fn run(&self, device: &Device, case: &Case, change: &dyn Fn(Run) -> Run) -> Result<Vec<u16>, Error> {
        let config = config(case);
        let (tokens, pages) = (self.query_begin[case.lens.len()], self.page_begin[case.lens.len()]);
        let kv_lens: Vec<u32> = case.lens.iter().map(|lens| lens.1).collect();
        let limits = Limits {
            max_requests: kv_lens.len() as u32,
            max_query_tokens: tokens,
            max_kv_len_tokens: kv_lens.iter().copied().max().unwrap_or(1),
            max_kv_tokens: kv_lens.iter().map(|&len| len as u64).sum(),
        };
        let mut attention = Attention::new(device, config, case.mode, limits)?.with_kernel(case.kernel)?;
        let memory = device.allocate(attention.workspace_bytes() as usize)?;
        // SAFETY: the device's memory, used for nothing else while the workspace lives.
        let mut workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
        let table = PageTable::csr(config.page_size_tokens, &self.page_begin, &kv_lens)?;
        let queries = QueryLengths::indptr(&self.query_begin)?;
        let planned = attention.plan(&table, queries, &mut workspace, Stream::default())?;

        let [q, k, v] = [&self.q, &self.k, &self.v].map(|values| device.upload(values));
        let (q, k, v) = (q?, k?, v?);
        let (page_ids, biases) = (device.upload(&self.page_ids)?, device.upload(&self.biases)?);
        let out = device.upload(&vec![0xffffu16; self.q.len()])?;
        let rows = |of: &Buffer| {
            Rows::contiguous(of.address(), config.dtype, tokens as u64, config.query_heads, config.head_dim)
        };
        let layer = Run::new(
            rows(&q),
            PagedCache::separate(k.address(), v.address(), pages as u64, Layout::Nhd, &config),
            PageIndices { address: page_ids.address(), len: pages as u64 },
            rows(&out),
        );
        let layer = match case.which {
            Which::Chunked { chunk_tokens_log2 } => layer.with_custom_parameters(&Chunked { chunk_tokens_log2 }),
            Which::DistanceBias => layer.with_custom_parameters(&DistanceBias { biases: biases.address() }),
        };
        // SAFETY: the buffers are the device's and live until the download, which waits; every page id is one of the pool.
        unsafe { attention.run(&planned, &change(layer), &mut workspace, Stream::default())? };
        out.download()
    }

    /// The definition.
    fn expected(&self, case: &Case, request: usize, token: usize, head: usize) -> Vec<f64> {
        let config = &case.config;
        let (query_len, kv_len) = case.lens[request];
        let position = token as i64 + kv_len as i64 - query_len as i64;
        let numbers = |bits: &[u16]| bits.iter().map(|&bits| number(config, bits)).collect::<Vec<f64>>();
        let in_chunk = |_: usize, key: usize| match case.which {
            Which::Chunked { chunk_tokens_log2 } => {
                position.div_euclid(1 << chunk_tokens_log2) == (key as i64).div_euclid(1 << chunk_tokens_log2)
            }
            Which::DistanceBias => true,
        };
        let bias = |head: usize, position: i64, key: usize| {
            let class = match (position - key as i64).unsigned_abs() {
                0 => 0,
                1..16 => 1,
                16..256 => 2,
                _ => 3,
            };
            if case.which == Which::DistanceBias { self.biases[4 * head + class] as f64 } else { 0.0 }
        };
        let rules = Rules {
            window_left: config.window_left.map(|keys| keys as usize),
            window_right: config.window_right.map(|keys| keys as usize),
            mask: Some(&in_chunk),
            bias: Some(&bias),
            ..Rules::default()
        };
        Request {
            query_len: query_len as usize,
            kv_len: kv_len as usize,
            group: config.group() as usize,
            value_head_dim: config.value_head_dim as usize,
            softmax_scale: config.softmax_scale as f64,
            causal: config.causal,
            rules,
            q: &|token, head| {
                let row = (self.query_begin[request] as usize + token) * config.query_heads as usize + head;
                numbers(&self.q[row * config.head_dim as usize..][..config.head_dim as usize])
            },
            k: &|position, head| numbers(&self.k[self.row(case, request, position, head)]),
            v: &|position, head| numbers(&self.v[self.row(case, request, position, head)]),
        }
        .attend(token, head)
        .out
    }
}

/// The code of the guide, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../../docs/user-variants.md")]
pub struct Guide;
