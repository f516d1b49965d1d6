//! The table of rotations whose keys go to the cache, and what each must leave behind: by the oracle of
//! [`rope`](crate::rope), and bit for bit what a rotation and an append of their own leave.
//!
//! Keys are rounded once, so the two launches are given keys in f32; where rows are of the cache's dtype they leave the
//! same with rows as they are.

use crate::buffer::{Access, Buffer, Region};
use crate::executors::{RopeAppendLaunch, RopeLaunch, RotatedAppends};
use crate::layout::{LAYOUTS, Layout, Strides, strides};
use crate::number::{bits, decode, encode};
use crate::random::Random;
use crate::rope::{Where, rotated, rounding};
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{AppendParameters, RopeAppendParameters, RopeParameters, RowsView};
use kernels_gpu::abi::tile::ROPE_HEADS;
use oxattn::config::DType;
use oxattn::rope::{RopeAngles, RopeConfig, RopeScaling};

/// Requests whose tokens are stored, in turn.
const REQUESTS: usize = 3;

/// How a token's place is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    /// By slot.
    Slots,
    /// By request and a position that is not the one it is rotated by.
    Positions,
    /// By request and the position that it is rotated by, in one array.
    Shared,
}

/// One call.
#[derive(Clone, Debug)]
pub struct RopeAppendCase {
    /// Says what it is about.
    pub name: String,
    /// What is rotated by what. The address of a table is not used.
    pub config: RopeConfig,
    /// Elements of a value row.
    pub value_head_dim: usize,
    /// Of the rows.
    pub source: DType,
    /// Of the cache.
    pub cache: DType,
    /// Query heads; 0 where there are no queries.
    pub query_heads: usize,
    /// Whether queries are rotated in place.
    pub in_place: bool,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Of the cache.
    pub layout: Layout,
    /// By what tokens are rotated.
    pub positions: Where,
    /// How places are named.
    pub places: Places,
    /// Every fourth token has no place.
    pub skips: bool,
    /// Elements between a row and the next, and three times that between tokens.
    pub gap: usize,
}

/// The table.
pub fn rope_append_cases() -> Vec<RopeAppendCase> {
    let case = |name: &str, config: RopeConfig| RopeAppendCase {
        name: name.into(),
        config,
        value_head_dim: config.head_dim as usize,
        source: DType::Bf16,
        cache: DType::Bf16,
        query_heads: 6,
        in_place: true,
        kv_heads: 2,
        page_size: 5,
        layout: Layout::Nhd,
        positions: Where::Ids(vec![3, 0, 77, -1, 40, 12, i32::MIN, 2, 5]),
        places: Places::Slots,
        skips: true,
        gap: 0,
    };
    let offsets = |lens: &[u32], offsets: &[i32], padding_tokens| Where::Offsets {
        lens: lens.to_vec(),
        offsets: offsets.to_vec(),
        padding_tokens,
    };
    let cached = |config: RopeConfig| config.with_cos_sin_cache(0, 41);
    let plain = RopeConfig::new(128);
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, old_context_tokens: 8192 };
    let mut cases = Vec::new();
    for source in [DType::Bf16, DType::F16, DType::F32] {
        for cache in [DType::Bf16, DType::F16] {
            for (head_dim, rotary_dim) in [(64, 64), (64, 16), (80, 48), (128, 128), (256, 64)] {
                for interleaved in [false, true] {
                    let index = cases.len();
                    let config = RopeConfig::new(head_dim).with_rotary_dim(rotary_dim);
                    let config = if interleaved { config.interleaved() } else { config };
                    let config = if index % 5 == 2 { cached(config) } else { config };
                    let name = format!("{source} to {cache}, {rotary_dim} of {head_dim}, interleaved {interleaved}");
                    // Periods without common factors, and not those of the loops: places meet layouts, dtypes and dims.
                    cases.push(RopeAppendCase {
                        source,
                        cache,
                        places: [Places::Slots, Places::Positions, Places::Shared][index % 3],
                        layout: LAYOUTS[index / 3 % 4],
                        in_place: index / 2 % 2 == 0,
                        page_size: [5, 1, 16, 3, 4, 2, 7][index % 7],
                        gap: [0, 8][index % 11 % 2],
                        ..case(&name, config)
                    });
                }
            }
        }
    }
    let far = vec![0, 1, 255, 262_145, 1_048_575, 1_999_999_999, 1 << 30, i32::MAX];
    let far = RopeAppendCase { source: DType::F32, positions: Where::Ids(far), ..case("far positions", plain) };
    let shared = RopeAppendCase { places: Places::Shared, ..case("one array of positions", plain) };
    cases.extend([
        RopeAppendCase { cache: DType::F16, ..far.clone() },
        RopeAppendCase { config: plain.with_theta(5e5).with_scaling(llama3), cache: DType::F16, ..far.clone() },
        RopeAppendCase { config: plain.with_scaling(RopeScaling::Linear { factor: 4.0 }), ..far },
        RopeAppendCase { skips: false, ..shared.clone() },
        RopeAppendCase { config: cached(plain.with_rotary_dim(32)), in_place: false, ..shared.clone() },
        RopeAppendCase { query_heads: 32, kv_heads: 8, page_size: 16, ..case("32 and 8 heads", plain) },
        RopeAppendCase { query_heads: 71, kv_heads: 1, gap: 8, ..case("71 heads and one", RopeConfig::new(64)) },
        RopeAppendCase { query_heads: 7, kv_heads: 7, in_place: false, ..case("seven of each", plain) },
        RopeAppendCase { query_heads: 0, ..case("no queries", plain.with_rotary_dim(64)) },
        RopeAppendCase { query_heads: 0, kv_heads: 5, places: Places::Shared, ..case("no queries, one array", plain) },
        RopeAppendCase { query_heads: 1, kv_heads: 1, ..case("512 wide", RopeConfig::new(512)) },
        RopeAppendCase {
            value_head_dim: 128,
            ..case("64 of keys of 192 are rotated, values of 128", RopeConfig::new(192).with_rotary_dim(64))
        },
        RopeAppendCase {
            value_head_dim: 128,
            gap: 8,
            in_place: false,
            ..case("values wider than keys", RopeConfig::new(64))
        },
        RopeAppendCase {
            value_head_dim: 40,
            cache: DType::F16,
            layout: Layout::Padded,
            places: Places::Positions,
            ..case("a piece past the last unit, values of 40", RopeConfig::new(72).with_rotary_dim(48))
        },
        RopeAppendCase { positions: Where::Ids(vec![]), ..case("no tokens", plain) },
        RopeAppendCase { positions: Where::Ids(vec![-1; 6]), ..case("no token has a position", plain) },
        RopeAppendCase { positions: offsets(&[], &[], 3), ..case("no requests, three tokens", plain) },
        RopeAppendCase { positions: offsets(&[3, 0, 1, 0, 6], &[9, 1, 99, 2, -2], 2), ..case("by offsets", plain) },
        RopeAppendCase {
            positions: offsets(&[5, 2], &[37, 100], 1),
            places: Places::Positions,
            ..case("over the table's end by offsets", cached(plain))
        },
        RopeAppendCase {
            positions: offsets(&[1; 37], &(0..37).map(|request| request * 997).collect::<Vec<_>>(), 0),
            places: Places::Positions,
            in_place: false,
            ..case("a decode batch by offsets", plain)
        },
    ]);
    cases
}

/// What a launch reads and writes.
struct Memory {
    q: Buffer,
    q_out: Buffer,
    k: Buffer,
    v: Buffer,
    pool: Buffer,
    ids: Buffer,
    begins: Buffer,
    offsets: Buffer,
    turns: Buffer,
    cos_sin: Buffer,
    slots: Buffer,
    requests: Buffer,
    positions: Buffer,
    page_begin: Buffer,
    page_indices: Buffer,
}

/// A case spelt out, and what lies in its memory before.
struct Fixture<'a> {
    case: &'a RopeAppendCase,
    /// The position that each token is rotated by, or `None` where it is skipped.
    rotated_by: Vec<Option<u64>>,
    /// Page and offset of each token, or `None` where it has no place.
    cells: Vec<Option<(usize, usize)>>,
    table: Vec<f32>,
    keys: Strides,
    values: Strides,
    memory: Vec<(&'static str, Vec<u8>)>,
}

impl Fixture<'_> {
    fn new(case: &RopeAppendCase) -> Fixture<'_> {
        let mut random = Random::new(21);
        let positions = case.positions.positions();
        let tokens = positions.len();
        let cached = match case.config.angles {
            RopeAngles::Cached { positions, .. } => positions as u64,
            _ => u64::MAX,
        };
        let rotated_by = positions.iter().map(|position| position.filter(|&position| position < cached)).collect();

        let stored_at: Vec<i32> = (0..tokens)
            .map(|token| match case.places {
                Places::Shared => positions[token].map_or(-1, |position| position as i32),
                _ => (3 * (token / REQUESTS) + token % REQUESTS) as i32,
            })
            .collect();
        let longest = stored_at.iter().map(|&position| position + 1).max().unwrap_or(0) as usize;
        let request_pages = longest.div_ceil(case.page_size);
        let pages = REQUESTS * request_pages + 2;
        let mut page_indices: Vec<u32> = (0..pages as u32).collect();
        random.shuffle(&mut page_indices);
        page_indices.truncate(REQUESTS * request_pages);
        let page_begin: Vec<u32> = (0..=REQUESTS).map(|request| (request * request_pages) as u32).collect();
        let skipped = |token: usize| case.skips && token % 4 == 1;
        let cells: Vec<Option<(usize, usize)>> = (0..tokens)
            .map(|token| {
                let position = usize::try_from(stored_at[token]).ok().filter(|_| !skipped(token))?;
                let page = page_indices[token % REQUESTS * request_pages + position / case.page_size];
                Some((page as usize, position % case.page_size))
            })
            .collect();
        // A negative request alone and a negative position alone both say that there is no place.
        let names_request = |token: usize| case.places != Places::Shared && token % 8 == 1;
        let requests: Vec<i32> = (0..tokens)
            .map(|token| if skipped(token) && !names_request(token) { -2 } else { (token % REQUESTS) as i32 })
            .collect();
        let positions: Vec<i32> = (0..tokens)
            .map(|token| if skipped(token) && names_request(token) { -7 } else { stored_at[token] })
            .collect();
        let slot = |cell: &Option<(usize, usize)>| cell.map_or(-5, |(page, at)| (page * case.page_size + at) as i64);
        let slots: Vec<i64> = cells.iter().map(slot).collect();

        let (ids, lens, offsets) = match &case.positions {
            Where::Ids(ids) => (ids.clone(), vec![], vec![]),
            Where::Offsets { lens, offsets, .. } => (vec![], lens.clone(), offsets.clone()),
        };
        let begins: Vec<u32> = (0..=lens.len()).map(|request| lens[..request].iter().sum()).collect();
        let table_rows = if cached == u64::MAX { 0 } else { cached as usize };
        let table: Vec<f32> = (0..table_rows * case.config.rotary_dim as usize).map(|_| random.normal()).collect();
        let (head_dim, value_dim) = (case.config.head_dim as usize, case.value_head_dim);
        let mut rows = |heads: usize, dim: usize| -> Vec<u8> {
            let elements = tokens * case.token_elements(heads, dim);
            encode(case.source, &(0..elements).map(|_| random.normal()).collect::<Vec<_>>())
        };
        let (q, k) = (rows(case.query_heads, head_dim), rows(case.kv_heads, head_dim));
        let v = rows(case.kv_heads, value_dim);
        let (keys, values, elements) =
            strides(case.layout, pages, case.page_size, case.kv_heads, [head_dim, value_dim]);
        let pool: Vec<u16> = (0..elements).map(|_| bits(case.cache, random.normal())).collect();
        let bytes = |values: &[u32]| bytemuck::cast_slice(values).to_vec();
        let signed = |values: &[i32]| bytemuck::cast_slice(values).to_vec();
        let memory = vec![
            ("q_out", vec![0xcc; q.len()]),
            ("q", q),
            ("k", k),
            ("v", v),
            ("pool", bytemuck::cast_slice(&pool).to_vec()),
            ("ids", signed(&ids)),
            ("begins", bytes(&begins)),
            ("offsets", signed(&offsets)),
            ("turns", bytemuck::cast_slice(&case.config.turns()).to_vec()),
            ("cos_sin", bytemuck::cast_slice(&table).to_vec()),
            ("slots", bytemuck::cast_slice(&slots).to_vec()),
            ("requests", signed(&requests)),
            ("positions", signed(&positions)),
            ("page_begin", bytes(&page_begin)),
            ("page_indices", bytes(&page_indices)),
        ];
        Fixture { case, rotated_by, cells, table, keys, values, memory }
    }

    fn before(&self, name: &str) -> &[u8] {
        &self.memory.iter().find(|(of, _)| *of == name).expect("a name of the fixture's").1
    }

    fn memory(&self) -> Memory {
        let buffer = |name| Buffer::of(self.before(name));
        Memory {
            q: buffer("q"),
            q_out: buffer("q_out"),
            k: buffer("k"),
            v: buffer("v"),
            pool: buffer("pool"),
            ids: buffer("ids"),
            begins: buffer("begins"),
            offsets: buffer("offsets"),
            turns: buffer("turns"),
            cos_sin: buffer("cos_sin"),
            slots: buffer("slots"),
            requests: buffer("requests"),
            positions: buffer("positions"),
            page_begin: buffer("page_begin"),
            page_indices: buffer("page_indices"),
        }
    }
}

impl RopeAppendCase {
    fn token_elements(&self, heads: usize, dim: usize) -> usize {
        heads * (dim + self.gap) + 3 * self.gap
    }

    fn rows(&self, address: u64, dtype: DType, heads: usize) -> RowsView {
        self.rows_of(address, dtype, heads, self.config.head_dim as usize)
    }

    fn rows_of(&self, address: u64, dtype: DType, heads: usize, dim: usize) -> RowsView {
        RowsView {
            address: if heads == 0 { 0 } else { address },
            token_stride_bytes: (self.token_elements(heads, dim) * dtype.bytes()) as i64,
            head_stride_bytes: ((dim + self.gap) * dtype.bytes()) as i64,
        }
    }
}

impl Memory {
    /// A rotation of `heads` query heads and key heads, keys of `keys` dtype and in place.
    fn rope(
        &mut self,
        fixture: &Fixture,
        [query_heads, kv_heads]: [usize; 2],
        keys: DType,
        units: u32,
    ) -> RopeParameters {
        let case = fixture.case;
        let RopeConfig { head_dim, rotary_dim, interleaved, angles, .. } = case.config;
        let k = case.rows(self.k.address(), keys, kv_heads);
        let by_ids = matches!(case.positions, Where::Ids(_));
        let is_shared = case.places == Places::Shared;
        let given = |present: bool, buffer: &mut Buffer| if present { buffer.address() } else { 0 };
        let cached_positions = match angles {
            RopeAngles::Cached { positions, .. } => positions,
            _ => 0,
        };
        let heads = (query_heads + kv_heads) as u32;
        RopeParameters {
            q: case.rows(self.q.address(), case.source, query_heads),
            k,
            q_out: case.rows(
                if case.in_place { &mut self.q } else { &mut self.q_out }.address(),
                case.source,
                query_heads,
            ),
            k_out: k,
            positions: given(by_ids, if is_shared { &mut self.positions } else { &mut self.ids }),
            query_begin: given(!by_ids, &mut self.begins),
            offsets: given(!by_ids, &mut self.offsets),
            turns: given(cached_positions == 0, &mut self.turns),
            cos_sin: given(cached_positions != 0, &mut self.cos_sin),
            cached_positions,
            request_count: self.begins.as_slice::<u32>().len() as u32 - 1,
            tokens: fixture.cells.len() as u32,
            query_heads: query_heads as u32,
            heads,
            head_dim,
            rotary_dim,
            interleaved: interleaved as u32,
            units: Divisor::new(units).unwrap(),
            token_units: Divisor::new(units * heads.div_ceil(ROPE_HEADS)).unwrap(),
        }
    }

    /// An append of rows of `source`.
    fn append(&mut self, fixture: &Fixture, source: DType) -> AppendParameters {
        let case = fixture.case;
        let [key_chunks, value_chunks] = [case.config.head_dim / 8, case.value_head_dim as u32 / 8];
        let chunks = key_chunks.max(value_chunks);
        AppendParameters {
            new_k: case.rows(self.k.address(), source, case.kv_heads),
            new_v: case.rows_of(self.v.address(), source, case.kv_heads, case.value_head_dim),
            k: fixture.keys.view(self.pool.address()),
            v: fixture.values.view(self.pool.address()),
            slots: if case.places == Places::Slots { self.slots.address() } else { 0 },
            requests: self.requests.address(),
            positions: self.positions.address(),
            page_begin: self.page_begin.address(),
            page_indices: self.page_indices.address(),
            tokens: fixture.cells.len() as u32,
            kv_heads: case.kv_heads as u32,
            chunks: Divisor::new(chunks).unwrap(),
            token_chunks: Divisor::new(case.kv_heads as u32 * chunks).unwrap(),
            page_size: Divisor::new(case.page_size as u32).unwrap(),
            key_chunks,
            value_chunks,
            padding: 0,
        }
    }

    fn regions(&mut self, q: Access, k: Access, pool: Access) -> Vec<Region> {
        let inputs = [
            &mut self.v,
            &mut self.ids,
            &mut self.begins,
            &mut self.offsets,
            &mut self.turns,
            &mut self.cos_sin,
            &mut self.slots,
            &mut self.requests,
            &mut self.positions,
            &mut self.page_begin,
            &mut self.page_indices,
        ];
        let mut regions = inputs.map(|buffer| buffer.region(Access::Read)).to_vec();
        regions.extend([
            self.q.region(q),
            self.q_out.region(Access::Produce),
            self.k.region(k),
            self.pool.region(pool),
        ]);
        regions
    }

    fn config(&mut self, case: &RopeAppendCase) -> RopeConfig {
        match case.config.angles {
            RopeAngles::Cached { positions, .. } => case.config.with_cos_sin_cache(self.cos_sin.address(), positions),
            _ => case.config,
        }
    }
}

/// Runs `case` and compares all that was or could have been written.
pub fn check(case: &RopeAppendCase, executor: &dyn RotatedAppends) -> Result<(), String> {
    let fixture = Fixture::new(case);
    let mut fused = fixture.memory();
    let units = case.config.head_dim.div_ceil(16);
    let parameters = RopeAppendParameters {
        rope: fused.rope(&fixture, [case.query_heads, case.kv_heads], case.source, units),
        append: fused.append(&fixture, case.source),
    };
    let q = if case.in_place { Access::Update } else { Access::Read };
    let regions = fused.regions(q, Access::Read, Access::Update);
    let config = fused.config(case);
    executor.rope_append(&RopeAppendLaunch { config, parameters, source: case.source, cache: case.cache, regions });
    by_oracle(&fixture, &fused)?;

    let mut ways = vec![DType::F32];
    if case.source == case.cache {
        ways.push(case.source);
    }
    for keys in ways {
        let apart = in_two_launches(&fixture, keys, executor);
        for (what, a, b) in
            [("q", &fused.q, &apart.q), ("q_out", &fused.q_out, &apart.q_out), ("pool", &fused.pool, &apart.pool)]
        {
            let (a, b) = (a.as_slice::<u8>(), b.as_slice::<u8>());
            if let Some(at) = (0..a.len()).find(|&at| a[at] != b[at]) {
                return Err(format!("byte {at} of {what} is not that of two launches, with keys in {keys}"));
            }
        }
    }
    Ok(())
}

/// The same by a rotation and an append, with keys and values in `rows`.
fn in_two_launches(fixture: &Fixture, rows: DType, executor: &dyn RotatedAppends) -> Memory {
    let case = fixture.case;
    let mut memory = fixture.memory();
    if rows != case.source {
        let in_f32 =
            |bytes: &[u8]| -> Vec<f32> { decode(case.source, bytes).iter().map(|&value| value as f32).collect() };
        (memory.k, memory.v) = (Buffer::of(&in_f32(fixture.before("k"))), Buffer::of(&in_f32(fixture.before("v"))));
    }
    // An append knows nothing of positions to rotate by.
    for token in (0..fixture.cells.len()).filter(|&token| fixture.rotated_by[token].is_none()) {
        memory.slots.as_mut_slice::<i64>()[token] = -1;
        memory.requests.as_mut_slice::<i32>()[token] = -1;
    }
    let config = memory.config(case);
    let rotary_units = case.config.rotary_dim / 16;
    if case.query_heads != 0 {
        let units = if case.in_place { rotary_units } else { case.config.head_dim.div_ceil(16) };
        let parameters = memory.rope(fixture, [case.query_heads, 0], rows, units);
        let regions = memory.regions(Access::Update, Access::Read, Access::Read);
        executor.rope(&RopeLaunch { config, parameters, dtype: case.source, regions });
    }
    let parameters = memory.rope(fixture, [0, case.kv_heads], rows, rotary_units);
    let regions = memory.regions(Access::Read, Access::Update, Access::Read);
    executor.rope(&RopeLaunch { config, parameters, dtype: rows, regions });
    let parameters = memory.append(fixture, rows);
    let regions = memory.regions(Access::Read, Access::Read, Access::Update);
    executor.append(&parameters, rows, case.cache, &regions);
    memory
}

/// What a buffer must hold: numbers, and how far off each may be.
struct Expected {
    values: Vec<f64>,
    slack: Vec<f64>,
}

impl Expected {
    fn untouched(dtype: DType, bytes: &[u8]) -> Expected {
        let values = decode(dtype, bytes);
        Expected { slack: vec![0.0; values.len()], values }
    }

    fn check(&self, what: &str, dtype: DType, bytes: &[u8]) -> Result<(), String> {
        for (at, found) in decode(dtype, bytes).into_iter().enumerate() {
            let (expected, slack) = (self.values[at], self.slack[at]);
            let same = found == expected || found.is_nan() && expected.is_nan();
            if !same && (found.is_nan() || (found - expected).abs() > slack) {
                return Err(format!("element {at} of {what} is {found:e}, not {expected:e} within {slack:e}"));
            }
        }
        Ok(())
    }
}

fn by_oracle(fixture: &Fixture, memory: &Memory) -> Result<(), String> {
    let case = fixture.case;
    let (head_dim, value_dim) = (case.config.head_dim as usize, case.value_head_dim);
    let [q, k, v] = ["q", "k", "v"].map(|name| decode(case.source, fixture.before(name)));
    let mut q_out = Expected::untouched(case.source, fixture.before(if case.in_place { "q" } else { "q_out" }));
    let mut pool = Expected::untouched(case.cache, fixture.before("pool"));
    // A row as it must be found in `dtype` at an element.
    let put = |into: &mut Expected, at: usize, dtype: DType, position: u64, row: &[f64]| {
        let (values, errors) = rotated(&case.config, &fixture.table, position, row);
        for (index, (value, error)) in values.into_iter().zip(errors).enumerate() {
            // Elements that are not rotated are rounded to nearest, or copied.
            let is_copied = index >= case.config.rotary_dim as usize && dtype == case.source;
            into.values[at + index] = value;
            into.slack[at + index] = if is_copied { 0.0 } else { rounding(dtype, value) + 1.01 * error };
        }
    };
    for (token, position) in fixture.rotated_by.iter().enumerate() {
        let Some(position) = *position else { continue };
        let row =
            |heads: usize, dim: usize, head: usize| token * case.token_elements(heads, dim) + head * (dim + case.gap);
        for at in (0..case.query_heads).map(|head| row(case.query_heads, head_dim, head)) {
            put(&mut q_out, at, case.source, position, &q[at..][..head_dim]);
        }
        let Some((page, offset)) = fixture.cells[token] else { continue };
        for head in 0..case.kv_heads {
            let at = row(case.kv_heads, head_dim, head);
            let key = fixture.keys.row(page, offset, head);
            put(&mut pool, key, case.cache, position, &k[at..][..head_dim]);
            let value = fixture.values.row(page, offset, head);
            let at = row(case.kv_heads, value_dim, head);
            for (element, &new) in v[at..][..value_dim].iter().enumerate() {
                let nearest = encode(case.cache, &[new as f32]);
                pool.values[value + element] = decode(case.cache, &nearest)[0];
            }
        }
    }
    let written = if case.in_place { &memory.q } else { &memory.q_out };
    q_out.check("the queries", case.source, written.as_slice())?;
    pool.check("the pool", case.cache, memory.pool.as_slice())?;
    for (what, buffer) in [("k", &memory.k), ("v", &memory.v)] {
        if buffer.as_slice::<u8>() != fixture.before(what) {
            return Err(format!("{what} was written"));
        }
    }
    if !case.in_place && memory.q.as_slice::<u8>() != fixture.before("q") {
        return Err("q was written".into());
    }
    Ok(())
}
