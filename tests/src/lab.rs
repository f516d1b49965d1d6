//! Runs a grid: every point on the device, sampled rows against the oracle.
//!
//! In: points, most of them of the configuration before them. Out: silence, or the first row that is off. So that
//! thousands of batches take a minute, nothing is made for one of them: queries and cache are two [`Periodic`] buffers
//! that each point sees as its own tensors, and an attention with its workspace serves all points of its configuration.
//! Outputs are cleared before each point. Where a batch has more pages than the cache, requests share some.

use crate::grid::Point;
use crate::number::{lse_agrees, row_error, row_tolerance, value};
use crate::periodic::Periodic;
use crate::public_api::Setup;
use crate::random::Random;
use oxattn::oracle::{Request, Rules};
use oxattn::{
    Attention, Buffer, Device, Error, Layout, Limits, Lse2, PageIndices, PageTable, PagedCache, Planned, QueryLengths,
    Rows, Run, Stream,
};

/// Most bytes of the cache on a GPU: past 2^32 elements.
const GPU_CACHE_BYTES: u64 = 9 << 30;
/// The same on the host.
const HOST_CACHE_BYTES: u64 = 64 << 20;
/// Multiplications of one product that a point's oracle may cost, past its first and last row.
const ORACLE_BUDGET: usize = 1 << 20;
/// Rows of a point that are checked at most.
const MOST_ROWS: usize = 6;

/// Memory for all points of a grid.
struct Lab<'a> {
    device: &'a Device,
    cache: Periodic,
    queries: Periodic,
    page_ids: Buffer,
    page_ids_len: usize,
    out: Buffer,
    lse: Buffer,
}

/// Request, its token, query head.
type Place = (usize, usize, usize);

impl<'a> Lab<'a> {
    /// Memory for any of `points`, which share a dtype.
    fn new(device: &'a Device, points: &[Point]) -> Lab<'a> {
        let dtype = points[0].config.dtype;
        let most = |of: &dyn Fn(&Point) -> usize| points.iter().map(of).max().unwrap();
        let rows = |point: &Point| point.query_tokens() * point.config.query_heads as usize;
        let elements = most(&|point| rows(point) * point.config.head_dim as usize);
        let page_ids_len = most(&Point::pages);
        let cache_bytes = match device.as_cuda() {
            Some(cuda) => GPU_CACHE_BYTES.min(cuda.properties().memory_bytes / 4),
            None => HOST_CACHE_BYTES,
        };
        Lab {
            device,
            cache: Periodic::new(device, cache_bytes as usize / 2, 524_287, dtype),
            queries: Periodic::new(device, elements, 131_071, dtype),
            page_ids: device.allocate(4 * page_ids_len).unwrap(),
            page_ids_len,
            out: device.allocate(2 * elements).unwrap(),
            lse: device.allocate(4 * most(&rows)).unwrap(),
        }
    }

    /// An attention with room for any of `points`, which share a configuration.
    fn setup(&self, points: &[Point], graphs: bool) -> Setup {
        let most = |of: &dyn Fn(&Point) -> u64| points.iter().map(of).max().unwrap();
        let limits = Limits {
            max_requests: most(&|point| point.requests.len() as u64) as u32,
            max_query_tokens: most(&|point| point.query_tokens() as u64) as u32,
            max_kv_len_tokens: most(&|point| point.requests.iter().map(|lens| lens.1 as u64).max().unwrap()) as u32,
            max_kv_tokens: most(&|point| point.requests.iter().map(|lens| lens.1 as u64).sum()),
        };
        let make = if graphs { Attention::for_graphs } else { Attention::new };
        let attention = make(self.device, points[0].config, points[0].mode, limits);
        Setup::of(self.device, attention.unwrap_or_else(|error| panic!("{}: {error}", points[0])))
    }

    /// Plans a point and uploads its page ids.
    fn plan(&self, setup: &mut Setup, point: &Point, stream: Stream) -> Result<Planned, Error> {
        let mut page_indptr = vec![0];
        let mut query_indptr = vec![0];
        let mut kv_lens = Vec::new();
        for &(query_len, kv_len) in &point.requests {
            page_indptr.push(page_indptr[kv_lens.len()] + kv_len.div_ceil(point.config.page_size_tokens));
            query_indptr.push(query_indptr[kv_lens.len()] + query_len);
            kv_lens.push(kv_len);
        }
        let view = View::new(self, point);
        let ids: Vec<u32> = (0..point.pages()).map(|index| view.page_id(index) as u32).collect();
        self.page_ids.write(0, bytemuck::cast_slice(&ids))?;
        let table = PageTable::csr(point.config.page_size_tokens, &page_indptr, &kv_lens)?;
        let Setup { attention, workspace, .. } = setup;
        attention.plan(&table, QueryLengths::indptr(&query_indptr)?, workspace, stream)
    }

    /// What a run of a point is given.
    fn arguments(&self, point: &Point) -> Run {
        let config = &point.config;
        let tokens = point.query_tokens() as u64;
        let rows = |address| Rows::contiguous(address, config.dtype, tokens, config.query_heads, config.head_dim);
        let View { pages, v_begin, .. } = View::new(self, point);
        let (pages, k) = (pages as u64, self.cache.memory.address());
        let cache = if point.together {
            PagedCache::interleaved(k, pages, point.layout, config)
        } else {
            PagedCache::separate(k, k + 2 * v_begin as u64, pages, point.layout, config)
        };
        let page_ids = PageIndices { address: self.page_ids.address(), len: self.page_ids_len as u64 };
        Run::new(rows(self.queries.memory.address()), cache, page_ids, rows(self.out.address()))
            .with_lse(Lse2::contiguous(self.lse.address(), tokens, config.query_heads))
    }

    fn clear(&self) {
        self.out.fill(0xff).unwrap();
        self.lse.fill(0xff).unwrap();
    }

    /// Plans and runs a point over cleared outputs.
    fn run(&self, setup: &mut Setup, point: &Point) {
        self.clear();
        let planned = self.plan(setup, point, Stream::default());
        let result = planned.and_then(|planned| setup.run(&planned, &self.arguments(point), Stream::default()));
        result.unwrap_or_else(|error| panic!("{point}: {error}"));
    }

    /// Holds sampled rows of the outputs against the oracle's.
    fn check(&self, point: &Point) {
        let (head_dim, heads) = (point.config.head_dim as usize, point.config.query_heads as usize);
        let view = View::new(self, point);
        for (request, token, head) in sampled(point) {
            let row = (view.query_begin[request] + token) * heads + head;
            let (mut out, mut lse) = (vec![0u16; head_dim], [0f32]);
            self.out.read(2 * row * head_dim, bytemuck::cast_slice_mut(&mut out)).unwrap();
            self.lse.read(4 * row, bytemuck::cast_slice_mut(&mut lse)).unwrap();
            let out: Vec<f64> = out.iter().map(|&bits| value(point.config.dtype, bits) as f64).collect();
            let expected = view.expected(request, token, head);
            let (error, tolerance) = (row_error(&out, &expected.out), row_tolerance(point.config.dtype));
            let place = format!("{point}: request {request}, token {token}, head {head}");
            assert!(error <= tolerance, "{place}: output is off by {error:.2e}, more than {tolerance:.0e}");
            assert!(lse_agrees(lse[0] as f64, expected.lse2()), "{place}: LSE is {}, not {}", lse[0], expected.lse2());
        }
    }

    /// The bits of the first `requests` requests' outputs and LSE.
    fn bits(&self, point: &Point, requests: usize) -> (Vec<u16>, Vec<u32>) {
        let rows = View::new(self, point).query_begin[requests] * point.config.query_heads as usize;
        let (mut out, mut lse) = (vec![0u16; rows * point.config.head_dim as usize], vec![0u32; rows]);
        self.out.read(0, bytemuck::cast_slice_mut(&mut out)).unwrap();
        self.lse.read(0, bytemuck::cast_slice_mut(&mut lse)).unwrap();
        (out, lse)
    }
}

/// A point's tensors in the lab's buffers, in elements, written out independently of the code under test.
struct View<'a> {
    lab: &'a Lab<'a>,
    point: &'a Point,
    /// Pages of the cache.
    pages: usize,
    /// Ids of neighbours are this far apart, around the cache.
    step: usize,
    page: usize,
    token: usize,
    head: usize,
    v_begin: usize,
    page_begin: Vec<usize>,
    query_begin: Vec<usize>,
}

impl<'a> View<'a> {
    fn new(lab: &'a Lab<'a>, point: &'a Point) -> View<'a> {
        let config = &point.config;
        let (page_size, heads) = (config.page_size_tokens as usize, config.kv_heads as usize);
        let head_dim = config.head_dim as usize;
        let half = page_size * heads * head_dim;
        let pages = lab.cache.memory.bytes() / (4 * half);
        let mut step = (pages * 5 / 8).max(1);
        while greatest_common_divisor(step, pages) != 1 {
            step += 1;
        }
        let (token, head) = match point.layout {
            Layout::Nhd => (heads * head_dim, head_dim),
            Layout::Hnd => (head_dim, page_size * head_dim),
        };
        let (page, v_begin) = if point.together { (2 * half, half) } else { (half, pages * half) };
        let sums = |of: &dyn Fn(&(u32, u32)) -> usize| {
            let mut sums = vec![0];
            point.requests.iter().for_each(|lens| sums.push(sums[sums.len() - 1] + of(lens)));
            sums
        };
        let page_begin = sums(&|&(_, kv_len)| (kv_len as usize).div_ceil(page_size));
        let query_begin = sums(&|&(query_len, _)| query_len as usize);
        View { lab, point, pages, step, page, token, head, v_begin, page_begin, query_begin }
    }

    fn page_id(&self, index: usize) -> usize {
        (index + 1) * self.step % self.pages
    }

    fn expected(&self, request: usize, token: usize, head: usize) -> oxattn::oracle::State {
        let config = &self.point.config;
        let (query_len, kv_len) = self.point.requests[request];
        let (head_dim, page_size) = (config.head_dim as usize, config.page_size_tokens as usize);
        let cached = |begin: usize, position: usize, head: usize| {
            let page = self.page_id(self.page_begin[request] + position / page_size);
            let row = begin + page * self.page + position % page_size * self.token + head * self.head;
            self.lab.cache.row(row, head_dim)
        };
        let query = |token: usize, head: usize| {
            let row = (self.query_begin[request] + token) * config.query_heads as usize + head;
            self.lab.queries.row(row * head_dim, head_dim)
        };
        Request {
            query_len: query_len as usize,
            kv_len: kv_len as usize,
            group: config.group() as usize,
            value_head_dim: head_dim,
            softmax_scale: config.softmax_scale as f64,
            causal: config.causal,
            rules: Rules::default(),
            q: &query,
            k: &|position, head| cached(0, position, head),
            v: &|position, head| cached(self.v_begin, position, head),
        }
        .attend(token, head)
    }
}

/// The first row of the first request, the last of the last, and some between.
fn sampled(point: &Point) -> Vec<Place> {
    let (last, heads) = (point.requests.len() - 1, point.config.query_heads as usize);
    let tokens = |request: usize| point.requests[request].0 as usize;
    let mut places = vec![(0, 0, 0), (last, tokens(last) - 1, heads - 1)];
    let mut random = Random::keyed(&[point.cost(), point.config.page_size_tokens as u64]);
    let mut budget = ORACLE_BUDGET;
    while places.len() < MOST_ROWS {
        let request = random.below(point.requests.len());
        let cost = point.requests[request].1 as usize * point.config.head_dim as usize;
        let Some(rest) = budget.checked_sub(cost) else { break };
        budget = rest;
        places.push((request, random.below(tokens(request)), random.below(heads)));
    }
    places
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Runs every point, and holds sampled rows against the oracle's.
pub fn check_points(device: &Device, points: &[Point]) {
    for of_dtype in points.chunk_by(|a, b| a.config.dtype == b.config.dtype) {
        let lab = Lab::new(device, of_dtype);
        for group in of_dtype.chunk_by(|a, b| (a.config, a.mode) == (b.config, b.mode)) {
            let mut setup = lab.setup(group, false);
            for point in group {
                lab.run(&mut setup, point);
                lab.check(point);
            }
        }
    }
}

/// Runs every point, and its first requests alone, which must have the same bits.
pub fn check_invariant(device: &Device, points: &[(Point, usize)]) {
    let all: Vec<Point> = points.iter().map(|(point, _)| point.clone()).collect();
    let lab = Lab::new(device, &all);
    for group in points.chunk_by(|(a, _), (b, _)| (a.config, a.mode) == (b.config, b.mode)) {
        let whole: Vec<Point> = group.iter().map(|(point, _)| point.clone()).collect();
        let mut setup = lab.setup(&whole, false);
        for (point, invariant) in group {
            lab.run(&mut setup, point);
            lab.check(point);
            let among_others = lab.bits(point, *invariant);
            let alone = Point { requests: point.requests[..*invariant].to_vec(), ..point.clone() };
            lab.run(&mut setup, &alone);
            assert!(lab.bits(&alone, *invariant) == among_others, "{point}: the first {invariant} differ alone");
        }
    }
}

/// Captures each group's first point into a graph and replays it at every point.
pub fn check_graphs(device: &Device, groups: &[Vec<Point>], stream: Stream) {
    let lab = Lab::new(device, &groups.concat());
    for group in groups {
        let mut setup = lab.setup(group, true);
        let planned = lab.plan(&mut setup, &group[0], stream).unwrap();
        let arguments = lab.arguments(&group[0]);
        stream.begin_capture().unwrap();
        let captured = setup.run(&planned, &arguments, stream);
        let graph = stream.end_capture().unwrap();
        captured.unwrap_or_else(|error| panic!("{}: {error}", group[0]));
        for point in group {
            lab.clear();
            lab.plan(&mut setup, point, stream).unwrap();
            graph.launch(stream).unwrap();
            stream.synchronize().unwrap();
            lab.check(point);
        }
    }
}
