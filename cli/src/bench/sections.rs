//! What each section does with a case.
//!
//! Unsafe: the operators take raw device addresses, here of buffers that live until the lab has synchronised.

use half::bf16;
use oxattn::operators::{Append, Destination, append};
use oxattn::oracle;
use oxattn::{
    ArgumentError, Attention, AttentionConfig, DType, Kernel, KvMemory, Layout, Limits, Lse2, MaskForm, PageIndices,
    PageTable, PagedCache, QueryLengths, Rows, Run, SplitMode, Stream, Workspace,
};

use super::case::Case;
use super::lab::{Lab, Random};
use super::rope_attention::{Before, Rotates};
use super::variants::{Inputs, config, seen};
use super::{Failure, Row, blank, rope_attention, rotating};

/// Bytes of cache that the calls of a graph rotate over: several times the L2 cache.
pub(super) const ROTATED_BYTES: u64 = 1 << 30;
/// Bytes of all sets' caches at most.
const MOST_CACHE_BYTES: u64 = 32 << 30;
/// Sets of inputs at most.
pub(super) const MOST_SETS: u64 = 64;
/// Above this, a case's error against the oracle is a wrong answer (bf16 outputs).
pub(super) const TOLERANCE: f64 = 4e-3;
const LSE_TOLERANCE: f64 = 2e-4;

/// The rows of a case; a failure becomes a row that says so.
pub fn run(lab: &Lab, case: &Case) -> Vec<Row> {
    let result = match case.section.as_str() {
        _ if case.kv_dtype != "bf16" => Err(format!("kv_dtype {} is not supported; bf16 is", case.kv_dtype).into()),
        "append_kv" | "rope_append" if case.value_head_dim.is_some() => {
            Err(format!("value_head_dim is not supported in section {}", case.section).into())
        }
        "decode" | "replay" | "prefill" | "append-chunk" | "mixed" => attention(lab, case),
        "prefix" => prefix(lab, case),
        "append_kv" => appending(lab, case),
        "rope_append" => rotating::run(lab, case),
        "rope_attention" => rope_attention::run(lab, case),
        "plan" => planning(lab, case),
        other => Err(format!(
            "section {other} is not supported; decode, replay, prefill, append-chunk, mixed, prefix, append_kv, \
             rope_append, rope_attention and plan are"
        )
        .into()),
    };
    result.unwrap_or_else(|error: Failure| {
        let unsupported = case.kv_dtype != "bf16";
        vec![Row { ok: unsupported, error: Some(error.to_string()), ..blank(case, "oxattn") }]
    })
}

/// A batch's page table: where each request's page ids begin, and the ids.
pub struct Pages {
    pub begin: Vec<u32>,
    pub ids: Vec<u32>,
    pub pool: u32,
}

impl Pages {
    pub fn shuffled(kv_lens: &[u32], page_size: u32) -> Pages {
        let mut begin = vec![0];
        for length in kv_lens {
            begin.push(begin[begin.len() - 1] + length.div_ceil(page_size));
        }
        let pool = begin[begin.len() - 1];
        Pages { begin, ids: Random(7).shuffled(pool), pool }
    }

    /// The same where the first pages of a request are those of the one before it.
    fn with_prefixes(mut self, shared_tokens: &[u32], page_size: u32) -> Pages {
        for (request, tokens) in shared_tokens.iter().enumerate().skip(1) {
            let (before, own) = (self.begin[request - 1] as usize, self.begin[request] as usize);
            self.ids.copy_within(before..before + (tokens / page_size) as usize, own);
        }
        self
    }

    /// Ragged keys as pages of a token, in their order.
    fn ragged(kv_lens: &[u32]) -> Pages {
        let begin = indptr(kv_lens);
        let pool = begin[kv_lens.len()];
        Pages { begin, ids: (0..pool).collect(), pool }
    }
}

fn indptr(lengths: &[u32]) -> Vec<u32> {
    let mut begin = vec![0];
    begin.extend(lengths.iter().scan(0, |sum, length| {
        *sum += length;
        Some(*sum)
    }));
    begin
}

/// A decode case's batch.
pub struct Batch {
    pub kv_lens: Vec<u32>,
    pub query_lens: Vec<u32>,
    /// Keys in common with the request before.
    shared_tokens: Vec<u32>,
    /// Where each request's query tokens begin.
    query_begin: Vec<u32>,
    pub pages: Pages,
}

impl Batch {
    fn new(case: &Case, ragged: bool) -> Result<Batch, Failure> {
        let (kv_lens, query_lens) = (case.kv_lens()?, case.query_lens()?);
        let query_begin = indptr(&query_lens);
        let shared_tokens = case.shared_tokens()?;
        let pages = if ragged {
            Pages::ragged(&kv_lens)
        } else {
            Pages::shuffled(&kv_lens, case.page_size).with_prefixes(&shared_tokens, case.page_size)
        };
        Ok(Batch { kv_lens, query_lens, shared_tokens, query_begin, pages })
    }
}

fn limits(kv_lens: &[u32], query_lens: &[u32]) -> Limits {
    Limits {
        max_requests: kv_lens.len() as u32,
        max_query_tokens: query_lens.iter().sum(),
        max_kv_len_tokens: kv_lens.iter().copied().max().unwrap_or(1),
        max_kv_tokens: kv_lens.iter().map(|length| *length as u64).sum(),
    }
}

fn attention(lab: &Lab, case: &Case) -> Result<Vec<Row>, Failure> {
    let skewed = case.case.contains("skew");
    let (paged, mode) = (config(case), SplitMode::Balanced);
    let mut rows = vec![attention_in(lab, case, paged, mode, "oxattn", None, Rotates::Nowhere)?];
    if rows[0].kernel == Some("prefill") {
        rows.push(attention_in(lab, case, paged, mode, "oxattn-attend", Some(Kernel::Attend), Rotates::Nowhere)?);
    } else if has_prompts(case)? {
        rows.extend(by_prefill(lab, case, paged, mode)?);
    }
    if skewed {
        rows.push(attention_in(lab, case, paged, SplitMode::Unsplit, "oxattn-unsplit", None, Rotates::Nowhere)?);
    }
    if case.section == "prefill" {
        // The same keys without pages, for what pages cost.
        let mut ragged = paged;
        (ragged.ragged, ragged.page_size_tokens) = (true, 1);
        rows.push(attention_in(lab, case, ragged, mode, "oxattn-ragged", None, Rotates::Nowhere)?);
    }
    Ok(rows)
}

/// Decodes with prefixes in common, read once and by each request for itself. The bytes that must move are the same: each
/// key once.
fn prefix(lab: &Lab, case: &Case) -> Result<Vec<Row>, Failure> {
    let (flat, mode) = (config(case), SplitMode::Balanced);
    let sharing = flat.with_shared_prefixes(case.prefix_levels);
    let mut rows = vec![attention_in(lab, case, sharing, mode, "oxattn", None, Rotates::Nowhere)?];
    rows.extend(by_prefill(lab, case, sharing, mode)?);
    rows.push(attention_in(lab, case, flat, mode, "oxattn-flat", None, Rotates::Nowhere)?);
    Ok(rows)
}

/// Whether a request has more rows than a short item, so that the prefill kernel is worth a row.
fn has_prompts(case: &Case) -> Result<bool, Failure> {
    let group = case.query_heads / case.kv_heads;
    Ok(case.query_lens()?.iter().any(|len| len * group > 16))
}

/// A row of a case by the prefill kernel, where there is one: not on every GPU, and not for every head dim and page size.
pub fn by_prefill(lab: &Lab, case: &Case, config: AttentionConfig, mode: SplitMode) -> Result<Option<Row>, Failure> {
    match attention_in(lab, case, config, mode, "oxattn-prefill", Some(Kernel::Prefill), Rotates::Nowhere) {
        Err(failure) if is_without_prefill(&*failure) => Ok(None),
        row => row.map(Some),
    }
}

fn is_without_prefill(failure: &(dyn std::error::Error + 'static)) -> bool {
    matches!(failure.downcast_ref(), Some(oxattn::Error::Argument(ArgumentError::NoPrefillKernel { .. })))
}

/// A row of a case by `kernel`, or by the one that a batch of it is given.
pub fn attention_in(
    lab: &Lab,
    case: &Case,
    config: AttentionConfig,
    mode: SplitMode,
    peer: &str,
    kernel: Option<Kernel>,
    rotates: Rotates,
) -> Result<Row, Failure> {
    let config = rotates.configured(config);
    let layout = if config.ragged { Layout::Nhd } else { case.layout() };
    let batch = Batch::new(case, config.ragged)?;
    let Batch { kv_lens, query_lens, shared_tokens, query_begin, pages } = &batch;
    let tokens = query_begin[query_lens.len()] as u64;
    let heads = config.query_heads as u64;
    let [key_dim, value_dim] = [config.head_dim as u64, config.value_head_dim as u64];
    let pool_rows = pages.pool as u64 * (config.page_size_tokens * config.kv_heads) as u64;
    let kv_tokens = query_lens.iter().zip(kv_lens).map(|(query, kv)| seen(case, *query, *kv)).sum::<u64>()
        - shared_tokens.iter().map(|tokens| *tokens as u64).sum::<u64>();
    let key_and_value_bytes = 2 * (key_dim + value_dim);
    let kv_bytes = kv_tokens * config.kv_heads as u64 * key_and_value_bytes;
    // A window reads little of a cache, which is there all the same.
    let most_sets = (MOST_CACHE_BYTES / (pool_rows * key_and_value_bytes).max(1)).clamp(1, MOST_SETS);
    let sets = (ROTATED_BYTES / kv_bytes.max(1)).clamp(1, most_sets) as usize;

    let caches = (0..sets)
        .map(|_| Ok((lab.random(pool_rows * key_dim, 0)?, lab.random(pool_rows * value_dim, 1)?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    let q = lab.random(tokens * heads * key_dim, 1)?;
    let out = lab.device.allocate((2 * tokens * heads * value_dim) as usize)?;
    let lse = lab.device.allocate((tokens * heads * 4) as usize)?;
    let page_ids = lab.device.upload(&pages.ids)?;
    let before = if rotates == Rotates::Before { Some(Before::new(lab, &batch, config)?) } else { None };
    let table = match config.ragged {
        true => PageTable::ragged(&pages.begin)?,
        false if config.shared_prefix_levels > 0 => {
            PageTable::csr(case.page_size, &pages.begin, kv_lens)?.with_shared_prefixes(shared_tokens)?
        }
        false => PageTable::csr(case.page_size, &pages.begin, kv_lens)?,
    };
    let queries = QueryLengths::indptr(query_begin)?;
    let mut attention = Attention::for_graphs(&lab.device, config, mode, limits(kv_lens, query_lens))?;
    let kernel = kernel.unwrap_or(attention.suitable_kernel(&table, queries)?);
    let mut attention = attention.with_kernel(kernel)?;
    let memory = lab.device.allocate(attention.workspace_bytes() as usize)?;
    // SAFETY: the buffer is live and used for nothing else.
    let mut workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
    let planned = attention.plan(&table, queries, &mut workspace, lab.stream)?;
    let plan = attention.latest_plan().ok_or("no plan")?;
    let (items, folded) = (plan.header().items, plan.header().partial_rows);
    let balance = plan.balance().efficiency();

    let mask_bytes = limits(kv_lens, query_lens).mask_bytes(MaskForm::Bits);
    let inputs = Inputs::new(lab, case, query_lens, kv_lens, mask_bytes)?;
    let kv = |set: usize| {
        let k = before.as_ref().map_or(&caches[set].0, |before| &before.k).address();
        let v = caches[set].1.address();
        if config.ragged {
            let rows = |address, dim| Rows::contiguous(address, DType::Bf16, pages.pool as u64, config.kv_heads, dim);
            return KvMemory::Ragged { k: rows(k, config.head_dim), v: rows(v, config.value_head_dim) };
        }
        KvMemory::Paged {
            cache: PagedCache::separate(k, v, pages.pool as u64, layout, &config),
            page_indices: PageIndices { address: page_ids.address(), len: pages.ids.len() as u64 },
        }
    };
    let arguments = |set: usize| Run {
        q: Rows::contiguous(
            before.as_ref().map_or(&q, |before| &before.q).address(),
            DType::Bf16,
            tokens,
            config.query_heads,
            config.head_dim,
        ),
        kv: kv(set),
        out: Rows::contiguous(out.address(), DType::Bf16, tokens, config.query_heads, config.value_head_dim),
        lse: Some(Lse2::contiguous(lse.address(), tokens, config.query_heads).into()),
        variant: inputs.arguments(),
    };
    let workspace = std::cell::RefCell::new(workspace);
    let call = |set: usize| -> Result<(), Failure> {
        if let Some(before) = &before {
            before.rotate(lab, &q, &caches[set].0)?;
        }
        // SAFETY: all tensors are live until the lab has synchronised, and page ids are below the pool's pages.
        unsafe { attention.run(&planned, &arguments(set), &mut workspace.borrow_mut(), lab.stream) }
            .map_err(Failure::from)
    };

    out.fill(0xff)?;
    lse.fill(0xff)?;
    call(sets - 1)?;
    let answer = Answer { out: out.download()?, lse: lse.download()? };
    let (rel_err, lse_err) = inputs.with_rules(case, |rules| {
        rotates.with_rules(case.head_dim, rules, |rules| check(lab, &config, rules, layout, &batch, &answer))
    });
    let ok = rel_err < TOLERANCE && lse_err < LSE_TOLERANCE;

    let timing = lab.time(sets, &call)?;
    let us_cold = if timing.median < 2000.0 { Some(lab.time_cold(sets, &call)?) } else { None };
    let bytes = kv_bytes + tokens * heads * key_and_value_bytes;
    let gbps = bytes as f64 / timing.median / 1e3;
    let pairs: u64 = query_lens.iter().zip(kv_lens).map(|(query, kv)| pairs(case, *query, *kv)).sum();
    let flops = 2 * pairs * heads * (key_dim + value_dim);
    Ok(Row {
        tflops: Some(flops as f64 / timing.median / 1e6),
        us: Some(timing.median),
        us_lo: Some(timing.low),
        us_hi: Some(timing.high),
        us_cold,
        bytes: Some(bytes),
        gbps: Some(gbps),
        of_ceiling: Some(gbps / lab.read_gbps),
        rel_err: Some(rel_err),
        lse_err: Some(lse_err),
        items: Some(items),
        folded: Some(folded),
        balance: Some(balance),
        kernel: Some(kernel.name()),
        ok,
        ..blank(case, peer)
    })
}

/// (Query token, key) pairs of a causal request that meet: what must be computed.
fn pairs(case: &Case, query_len: u32, kv_len: u32) -> u64 {
    let left = case.window_left.map_or(u64::MAX, |left| left as u64 + 1);
    let position = |token: u32| (token as i64 + kv_len as i64 - query_len as i64 + 1).max(0) as u64;
    (0..query_len).map(|token| position(token).min(left)).sum()
}

struct Answer {
    out: Vec<bf16>,
    lse: Vec<f32>,
}

/// Relative L2 error of the outputs and absolute error of the LSE, over rows of the first, last, middle and longest
/// request.
fn check(
    lab: &Lab,
    config: &AttentionConfig,
    rules: oracle::Rules<'_>,
    layout: Layout,
    batch: &Batch,
    answer: &Answer,
) -> (f64, f64) {
    let Batch { kv_lens, query_lens, query_begin, pages, .. } = batch;
    let (heads, kv_heads) = (config.query_heads as u64, config.kv_heads as u64);
    let [key_dim, value_dim] = [config.head_dim as u64, config.value_head_dim as u64];
    let longest = (0..kv_lens.len()).max_by_key(|i| kv_lens[*i]).unwrap_or(0);
    let (mut difference, mut norm, mut lse_error) = (0.0, 0.0, 0f64);
    let last = kv_lens.len() - 1;
    // Each by another of its tokens, in quarters of its new ones.
    for (request, head, quarters) in
        [(0, 0, 4), (last, heads - 1, 0), (last / 2, heads / 3, 2), (longest, heads / 2, 3)]
    {
        let cache_row = |position: usize, kv_head: usize, dim: u64, which: usize| -> Vec<f64> {
            let page = pages.ids[pages.begin[request] as usize + position / config.page_size_tokens as usize] as u64;
            let (size, slot) = (config.page_size_tokens as u64, position as u64 % config.page_size_tokens as u64);
            let row = match layout {
                Layout::Nhd => (page * size + slot) * kv_heads + kv_head as u64,
                Layout::Hnd => (page * kv_heads + kv_head as u64) * size + slot,
            };
            let begin = row * dim;
            (begin..begin + dim).map(|i| lab.value(i, which)).collect()
        };
        let row_of = |token: usize, head: u64| (query_begin[request] as u64 + token as u64) * heads + head;
        let oracle = oracle::Request {
            query_len: query_lens[request] as usize,
            kv_len: kv_lens[request] as usize,
            group: config.group() as usize,
            value_head_dim: config.value_head_dim as usize,
            softmax_scale: config.softmax_scale as f64,
            causal: config.causal,
            // Rotated rows are rounded, here as by every kernel.
            rules: oracle::Rules { rotation: None, ..rules },
            q: &|token, head| {
                let begin = row_of(token, head as u64) * key_dim;
                let position = token as i64 + kv_lens[request] as i64 - query_lens[request] as i64;
                rounded(rules.changed_query(position, (begin..begin + key_dim).map(|i| lab.value(i, 1)).collect()))
            },
            k: &|position, kv_head| {
                rounded(rules.changed_key(position as i64, cache_row(position, kv_head, key_dim, 0)))
            },
            v: &|position, kv_head| cache_row(position, kv_head, value_dim, 1),
        };
        let token = (query_lens[request] as usize - 1) * quarters / 4;
        let expected = oracle.attend(token, head as usize);
        let row = row_of(token, head) as usize;
        let got = &answer.out[row * value_dim as usize..(row + 1) * value_dim as usize];
        for (got, expected) in got.iter().zip(&expected.out) {
            difference += (got.to_f64() - expected).powi(2);
            norm += expected.powi(2);
        }
        let error = (answer.lse[row] as f64 - expected.lse2()).abs();
        lse_error = if error.is_nan() { f64::INFINITY } else { lse_error.max(error) };
    }
    let relative = (difference / norm).sqrt();
    (if relative.is_nan() { f64::INFINITY } else { relative }, lse_error)
}

fn rounded(row: Vec<f64>) -> Vec<f64> {
    row.into_iter().map(|x| bf16::from_f64(x).to_f64()).collect()
}

fn appending(lab: &Lab, case: &Case) -> Result<Vec<Row>, Failure> {
    let config = config(case);
    let (tokens, batch) = (case.tokens, case.batch);
    let per_request = tokens / batch;
    let kv_lens = vec![per_request; batch as usize];
    let pages = Pages::shuffled(&kv_lens, case.page_size);
    let dim = config.head_dim as u64;
    let new_elements = tokens as u64 * config.kv_heads as u64 * dim;
    let pool_elements = pages.pool as u64 * (config.page_size_tokens * config.kv_heads) as u64 * dim;
    let sets = (ROTATED_BYTES / (pool_elements * 4)).clamp(1, MOST_SETS) as usize;
    let new = (0..sets)
        .map(|_| Ok((lab.random(new_elements, 0)?, lab.random(new_elements, 1)?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    let caches = (0..sets)
        .map(|_| {
            let bytes = (pool_elements * 2) as usize;
            Ok((lab.device.allocate(bytes)?, lab.device.allocate(bytes)?))
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    let requests: Vec<i32> = (0..tokens as i32).map(|token| token / per_request as i32).collect();
    let positions: Vec<i32> = (0..tokens as i32).map(|token| token % per_request as i32).collect();
    let (requests, positions) = (lab.device.upload(&requests)?, lab.device.upload(&positions)?);
    let (page_begin, page_ids) = (lab.device.upload(&pages.begin)?, lab.device.upload(&pages.ids)?);
    let call = |set: usize| -> Result<(), Failure> {
        let rows = |address| Rows::contiguous(address, DType::Bf16, tokens as u64, config.kv_heads, config.head_dim);
        let arguments = Append {
            k: rows(new[set].0.address()),
            v: rows(new[set].1.address()),
            cache: PagedCache::separate(
                caches[set].0.address(),
                caches[set].1.address(),
                pages.pool as u64,
                Layout::Nhd,
                &config,
            ),
            destination: Destination::Positions {
                requests: requests.address(),
                positions: positions.address(),
                page_begin: page_begin.address(),
                page_indices: PageIndices { address: page_ids.address(), len: pages.ids.len() as u64 },
            },
        };
        // SAFETY: all tensors are live until the lab has synchronised; every position has its own slot.
        unsafe { append(&lab.device, &config, &arguments, lab.stream) }.map_err(Failure::from)
    };
    call(sets - 1)?;
    let stored: Vec<bf16> = caches[sets - 1].1.download()?;
    let row_elements = config.kv_heads as u64 * dim;
    let mut wrong = 0;
    for token in 0..tokens as u64 {
        let (request, position) = (token / per_request as u64, token % per_request as u64);
        let page = pages.ids[(pages.begin[request as usize] as u64 + position / case.page_size as u64) as usize] as u64;
        let slot = page * case.page_size as u64 + position % case.page_size as u64;
        for i in 0..row_elements {
            let got = stored[(slot * row_elements + i) as usize].to_f64();
            wrong += (got != lab.value(token * row_elements + i, 1)) as u64;
        }
    }
    let timing = lab.time(sets, &call)?;
    let us_cold = lab.time_cold(sets, &call)?;
    let bytes = new_elements * 2 * 2 * 2;
    let gbps = bytes as f64 / timing.median / 1e3;
    Ok(vec![Row {
        us: Some(timing.median),
        us_lo: Some(timing.low),
        us_hi: Some(timing.high),
        us_cold: Some(us_cold),
        bytes: Some(bytes),
        gbps: Some(gbps),
        of_ceiling: Some(gbps / lab.copy_gbps),
        ok: wrong == 0,
        ..blank(case, "oxattn")
    }])
}

fn planning(lab: &Lab, case: &Case) -> Result<Vec<Row>, Failure> {
    let config = config(case);
    let (kv_lens, query_lens) = (case.kv_lens()?, case.query_lens()?);
    let query_begin = indptr(&query_lens);
    let begin = indptr(&kv_lens.iter().map(|length| length.div_ceil(case.page_size)).collect::<Vec<_>>());
    let mut attention = Attention::new(&lab.device, config, SplitMode::Balanced, limits(&kv_lens, &query_lens))?;
    let memory = lab.device.allocate(attention.workspace_bytes() as usize)?;
    // SAFETY: the buffer is live and used for nothing else.
    let mut workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
    let (mut returned, mut idle) = (Vec::new(), Vec::new());
    for _ in 0..300 {
        lab.device.synchronize()?;
        let started = std::time::Instant::now();
        let table = PageTable::csr(case.page_size, &begin, &kv_lens)?;
        attention.plan(&table, QueryLengths::indptr(&query_begin)?, &mut workspace, lab.stream)?;
        returned.push(started.elapsed().as_secs_f64() * 1e6);
        Stream::synchronize(lab.stream)?;
        idle.push(started.elapsed().as_secs_f64() * 1e6);
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let plan = attention.latest_plan().ok_or("no plan")?;
    let (items, folded) = (plan.header().items, plan.header().partial_rows);
    let balance = plan.balance().efficiency();
    let row = Row { items: Some(items), folded: Some(folded), balance: Some(balance), ..blank(case, "oxattn") };
    Ok(vec![Row { us: Some(median(returned)), us_until_idle: Some(median(idle)), ..row }])
}
