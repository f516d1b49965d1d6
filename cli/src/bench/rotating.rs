//! Rotating new queries and keys and appending keys and values: in one launch, and in two.
//!
//! In: a case's heads, tokens and requests, each of which has some tokens stored already. Out: a row for each way. Both
//! count the bytes that must move: queries, keys and values read once, queries and the cache written once.
//!
//! Unsafe: the operators take raw device addresses, here of buffers that live until the lab has synchronised.

use half::bf16;
use oxattn::operators::{Append, Destination, append};
use oxattn::{
    AttentionConfig, Buffer, DType, PageIndices, PagedCache, Rope, RopeAppend, RopeConfig, RopePositions, RopeRun, Rows,
};

use super::case::Case;
use super::lab::Lab;
use super::sections::{MOST_SETS, Pages, ROTATED_BYTES, TOLERANCE};
use super::variants::config;
use super::{Failure, Row, blank};

/// Tokens that each request has before.
const STORED_TOKENS: u32 = 100;
const THETA: f64 = 5e5;

pub fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>, Failure> {
    let batch = Batch::new(lab, case)?;
    let rope = Rope::new(&lab.device, RopeConfig::new(case.head_dim).with_theta(THETA))?;
    let fused = measure(lab, &batch, &blank(case, "oxattn"), &|layer| {
        let run = RopeAppend::in_place(batch.queries(layer), batch.append(layer));
        // SAFETY: all tensors are live until the lab has synchronised; every position has its own slot.
        unsafe { rope.apply_and_append(&batch.config, &run, lab.stream) }.map_err(Failure::from)
    })?;
    let apart = measure(lab, &batch, &blank(case, "oxattn-rope-then-append"), &|layer| {
        let arguments = batch.append(layer);
        let positions = RopePositions::Ids { address: batch.positions.address() };
        let run = RopeRun::in_place(batch.queries(layer), arguments.k, positions);
        // SAFETY: as above.
        unsafe {
            rope.apply(&run, lab.stream)?;
            append(&lab.device, &batch.config, &arguments, lab.stream).map_err(Failure::from)
        }
    })?;
    Ok(vec![fused, apart])
}

/// New tokens of requests, which all get as many.
struct Batch<'a> {
    case: &'a Case,
    config: AttentionConfig,
    per_request: u32,
    pages: Pages,
    requests: Buffer,
    positions: Buffer,
    page_begin: Buffer,
    page_ids: Buffer,
}

/// The tensors of one call.
struct Layer {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
}

impl Batch<'_> {
    fn new<'a>(lab: &Lab, case: &'a Case) -> Result<Batch<'a>, Failure> {
        let per_request = case.tokens / case.batch;
        let pages = Pages::shuffled(&vec![STORED_TOKENS + per_request; case.batch as usize], case.page_size);
        let tokens = 0..case.batch * per_request;
        let requests: Vec<i32> = tokens.clone().map(|token| (token / per_request) as i32).collect();
        let positions: Vec<i32> = tokens.map(|token| (STORED_TOKENS + token % per_request) as i32).collect();
        Ok(Batch {
            case,
            config: config(case),
            per_request,
            requests: lab.device.upload(&requests)?,
            positions: lab.device.upload(&positions)?,
            page_begin: lab.device.upload(&pages.begin)?,
            page_ids: lab.device.upload(&pages.ids)?,
            pages,
        })
    }

    fn tokens(&self) -> u64 {
        self.case.batch as u64 * self.per_request as u64
    }

    fn elements(&self, heads: u32) -> u64 {
        self.tokens() * heads as u64 * self.config.head_dim as u64
    }

    fn cache_elements(&self) -> u64 {
        let rows = self.pages.pool as u64 * (self.config.page_size_tokens * self.config.kv_heads) as u64;
        rows * self.config.head_dim as u64
    }

    /// Bytes that must move.
    fn bytes(&self) -> u64 {
        2 * 2 * (self.elements(self.config.query_heads) + 2 * self.elements(self.config.kv_heads))
    }

    fn layer(&self, lab: &Lab) -> Result<Layer, Failure> {
        let cache_bytes = (2 * self.cache_elements()) as usize;
        Ok(Layer {
            q: lab.random(self.elements(self.config.query_heads), 0)?,
            k: lab.random(self.elements(self.config.kv_heads), 1)?,
            v: lab.random(self.elements(self.config.kv_heads), 0)?,
            k_cache: lab.device.allocate(cache_bytes)?,
            v_cache: lab.device.allocate(cache_bytes)?,
        })
    }

    fn rows(&self, buffer: &Buffer, heads: u32) -> Rows {
        Rows::contiguous(buffer.address(), DType::Bf16, self.tokens(), heads, self.config.head_dim)
    }

    fn queries(&self, layer: &Layer) -> Rows {
        self.rows(&layer.q, self.config.query_heads)
    }

    fn append(&self, layer: &Layer) -> Append {
        let (k, v, pages) = (layer.k_cache.address(), layer.v_cache.address(), self.pages.pool as u64);
        Append {
            k: self.rows(&layer.k, self.config.kv_heads),
            v: self.rows(&layer.v, self.config.kv_heads),
            cache: PagedCache::separate(k, v, pages, self.case.layout(), &self.config),
            destination: Destination::Positions {
                requests: self.requests.address(),
                positions: self.positions.address(),
                page_begin: self.page_begin.address(),
                page_indices: PageIndices { address: self.page_ids.address(), len: self.pages.ids.len() as u64 },
            },
        }
    }

    /// First element of a token's row of a head in one half of the cache.
    fn cached(&self, token: u64, head: u64) -> u64 {
        let (size, heads) = (self.config.page_size_tokens as u64, self.config.kv_heads as u64);
        let (request, position) = (token / self.per_request as u64, self.position(token));
        let page = self.pages.ids[(self.pages.begin[request as usize] as u64 + position / size) as usize] as u64;
        let row = match self.case.layout() {
            oxattn::Layout::Nhd => (page * size + position % size) * heads + head,
            oxattn::Layout::Hnd => (page * heads + head) * size + position % size,
        };
        row * self.config.head_dim as u64
    }

    fn position(&self, token: u64) -> u64 {
        STORED_TOKENS as u64 + token % self.per_request as u64
    }

    /// Relative L2 error of what a first call left of some tokens: all heads of queries, cached keys and values.
    fn error(&self, lab: &Lab, layer: &Layer) -> Result<f64, Failure> {
        let (q, k): (Vec<bf16>, Vec<bf16>) = (layer.q.download()?, layer.k_cache.download()?);
        let v: Vec<bf16> = layer.v_cache.download()?;
        let dim = self.config.head_dim as u64;
        let (mut difference, mut norm) = (0.0, 0.0);
        let mut compare = |got: &[bf16], expected: &[f64]| {
            for (got, expected) in got.iter().zip(expected) {
                difference += (got.to_f64() - expected).powi(2);
                norm += expected.powi(2);
            }
        };
        let last = self.tokens() - 1;
        for token in [0, last / 3, last / 2, last] {
            let random = |begin: u64, which| (begin..begin + dim).map(|i| lab.value(i, which)).collect::<Vec<f64>>();
            for head in 0..self.config.query_heads as u64 {
                let at = (token * self.config.query_heads as u64 + head) * dim;
                compare(&q[at as usize..], &rotated(self.position(token), &random(at, 0)));
            }
            for head in 0..self.config.kv_heads as u64 {
                let at = (token * self.config.kv_heads as u64 + head) * dim;
                let cached = self.cached(token, head) as usize;
                compare(&k[cached..], &rotated(self.position(token), &random(at, 1)));
                compare(&v[cached..], &random(at, 0));
            }
        }
        let relative = (difference / norm).sqrt();
        Ok(if relative.is_nan() { f64::INFINITY } else { relative })
    }
}

/// A row in two halves, rotated in f64.
fn rotated(position: u64, row: &[f64]) -> Vec<f64> {
    let half = row.len() / 2;
    let mut out = row.to_vec();
    for pair in 0..half {
        let angle = position as f64 * THETA.powf(-(pair as f64) / half as f64);
        let ((sine, cosine), (a, b)) = (angle.sin_cos(), (row[pair], row[pair + half]));
        (out[pair], out[pair + half]) = (a * cosine - b * sine, b * cosine + a * sine);
    }
    out
}

/// Checks a first call, then times calls over layers of about 1 GiB in turn. Queries turn on from call to call.
fn measure(
    lab: &Lab,
    batch: &Batch,
    blank: &Row,
    call: &dyn Fn(&Layer) -> Result<(), Failure>,
) -> Result<Row, Failure> {
    let bytes = batch.bytes();
    let sets = (ROTATED_BYTES / bytes).clamp(1, MOST_SETS) as usize;
    let layers = (0..sets).map(|_| batch.layer(lab)).collect::<Result<Vec<_>, Failure>>()?;
    call(&layers[sets - 1])?;
    lab.stream.synchronize()?;
    let error = batch.error(lab, &layers[sets - 1])?;
    let call = |set: usize| call(&layers[set]);
    let timing = lab.time(sets, &call)?;
    let gbps = bytes as f64 / timing.median / 1e3;
    Ok(Row {
        us: Some(timing.median),
        us_lo: Some(timing.low),
        us_hi: Some(timing.high),
        us_cold: Some(lab.time_cold(sets, &call)?),
        bytes: Some(bytes),
        gbps: Some(gbps),
        of_ceiling: Some(gbps / lab.copy_gbps),
        rel_err: Some(error),
        ok: error < TOLERANCE,
        ..blank.clone()
    })
}
