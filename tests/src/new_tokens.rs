//! The table of appends, and the pool each must leave behind, byte for byte.

use crate::buffer::{Access, Buffer};
use crate::executors::Operators;
use crate::layout::{LAYOUTS, Layout, Strides, strides};
use crate::number::{bits, decode, encode, value};
use crate::random::Random;
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{AppendParameters, PositionsParameters, RowsView};
use oxattn::config::DType;
use oxattn::oracle::{Pool, append};

/// How a token's cell is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// By slot.
    Slots,
    /// By request and position.
    Positions,
    /// By the request and position that the executor spells out, with room for 3 tokens more than there are.
    SpeltOut,
}

/// One append.
#[derive(Clone, Debug)]
pub struct AppendCase {
    /// Says what it is about.
    pub name: String,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a key row.
    pub head_dim: u32,
    /// Elements of a value row.
    pub value_head_dim: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Of the cache.
    pub layout: Layout,
    /// Of the new tokens.
    pub source: DType,
    /// Of the cache.
    pub cache: DType,
    /// Tokens each request has.
    pub lens_before: Vec<u32>,
    /// Tokens each request gets.
    pub append_lens: Vec<u32>,
    /// How cells are named.
    pub address: Address,
    /// Every third token is to be skipped.
    pub skips: bool,
    /// Elements between a new token's rows and the next token's.
    pub source_padding: usize,
}

/// The table.
pub fn append_cases() -> Vec<AppendCase> {
    let case = |name: &str, lens_before: &[u32], append_lens: &[u32]| AppendCase {
        name: name.into(),
        kv_heads: 2,
        head_dim: 64,
        value_head_dim: 64,
        page_size: 4,
        layout: Layout::Nhd,
        source: DType::Bf16,
        cache: DType::Bf16,
        lens_before: lens_before.to_vec(),
        append_lens: append_lens.to_vec(),
        address: Address::Positions,
        skips: false,
        source_padding: 0,
    };
    let mut cases = vec![
        case("F5: over a page edge, and into an empty request", &[3, 0], &[2, 5]),
        AppendCase { layout: Layout::Together, ..case("D7: K and V page by page", &[2], &[5]) },
        case("no tokens", &[3, 0], &[0, 0]),
        case("no requests", &[], &[]),
        AppendCase { address: Address::SpeltOut, ..case("no requests, spelt out", &[], &[]) },
    ];
    for address in [Address::Slots, Address::Positions, Address::SpeltOut] {
        for layout in LAYOUTS {
            for source_padding in [0, 24] {
                let name = format!("FlashInfer's grid: {address:?}, {layout:?}, padding {source_padding}");
                let grid = case(&name, &[0, 3, 16, 40], &[45, 8, 25, 22]);
                let grid = AppendCase { kv_heads: 32, head_dim: 128, value_head_dim: 128, page_size: 16, ..grid };
                cases.push(AppendCase { address, layout, source_padding, ..grid });
            }
        }
        for source in [DType::Bf16, DType::F16, DType::F32] {
            for cache in [DType::Bf16, DType::F16] {
                let name = format!("{source} to {cache}, {address:?}");
                let skips = address != Address::SpeltOut;
                let mixed = case(&name, &[6, 1, 0, 9], &[1, 0, 3, 7]);
                let mixed = AppendCase { page_size: 5, head_dim: 80, value_head_dim: 80, ..mixed };
                cases.push(AppendCase { source, cache, address, skips, ..mixed });
            }
        }
    }
    for (index, (head_dim, value_head_dim)) in
        [(192, 128), (64, 128), (8, 8), (8, 72), (320, 8)].into_iter().enumerate()
    {
        let (layout, source) = (LAYOUTS[index % 4], [DType::Bf16, DType::F32, DType::F16][index % 3]);
        let name = format!("keys of {head_dim} and values of {value_head_dim}, {layout:?}, {source}");
        let wide = AppendCase { head_dim, value_head_dim, layout, source, ..case(&name, &[3, 0, 5], &[2, 5, 30]) };
        cases.push(AppendCase { source_padding: 8 * (index % 2), skips: index > 2, ..wide });
    }
    cases
}

/// Runs `case` and compares the whole pool.
pub fn check(case: &AppendCase, executor: &dyn Operators) -> Result<(), String> {
    let (kv_heads, page_size) = (case.kv_heads as usize, case.page_size as usize);
    let [head_dim, value_dim] = [case.head_dim as usize, case.value_head_dim as usize];
    let mut random = Random::new(5);

    let kv_lens: Vec<u32> = case.lens_before.iter().zip(&case.append_lens).map(|(a, b)| a + b).collect();
    let counts: Vec<usize> = kv_lens.iter().map(|&len| (len as usize).div_ceil(page_size)).collect();
    let pages = counts.iter().sum::<usize>() + 3;
    let mut free: Vec<u32> = (0..pages as u32).collect();
    random.shuffle(&mut free);
    let page_lists: Vec<Vec<u32>> = counts.iter().map(|&count| free.drain(..count).collect()).collect();

    // Every token's (request, position), in order.
    let cells: Vec<(usize, usize)> = (0..kv_lens.len())
        .flat_map(|request| (case.lens_before[request]..kv_lens[request]).map(move |p| (request, p as usize)))
        .collect();
    let skipped = |token: usize| case.skips && token % 3 == 1;

    let token_elements = |dim: usize| kv_heads * dim + case.source_padding;
    let mut new_rows = |dim: usize| -> Vec<u8> {
        let elements = cells.len() * token_elements(dim);
        encode(case.source, &(0..elements).map(|_| random.normal()).collect::<Vec<_>>())
    };
    let (new_k, new_v) = (new_rows(head_dim), new_rows(value_dim));
    let (k, v, elements) = strides(case.layout, pages, page_size, kv_heads, [head_dim, value_dim]);
    let before: Vec<u16> = (0..elements).map(|_| bits(case.cache, random.normal())).collect();

    let mut expected = before.clone();
    for (strides, new, dim) in [(k, &new_k, head_dim), (v, &new_v, value_dim)] {
        let new = decode(case.source, new);
        let mut pool = gather(&before, (strides, dim), case, pages);
        for (token, &(request, position)) in cells.iter().enumerate().filter(|(token, _)| !skipped(*token)) {
            let rows = &new[token * token_elements(dim)..][..kv_heads * dim];
            let rows: Vec<Vec<f64>> = rows.chunks_exact(dim).map(<[f64]>::to_vec).collect();
            append(&mut pool, &page_lists[request], position, &rows);
        }
        scatter(&pool, &mut expected, strides, case);
    }

    let room = cells.len() + if case.address == Address::SpeltOut { 3 } else { 0 };
    let slot = |token: usize| -> i64 {
        let (request, position) = cells[token];
        page_lists[request][position / page_size] as i64 * case.page_size as i64 + (position % page_size) as i64
    };
    let named = |token: usize, name: i64| if skipped(token) { -1 - token as i64 } else { name };
    let slots: Vec<i64> = (0..cells.len()).map(|token| named(token, slot(token))).collect();
    // A negative request alone and a negative position alone are both to be skipped.
    let requests: Vec<i32> = (0..cells.len())
        .map(|token| if token % 2 == 0 { named(token, cells[token].0 as i64) } else { cells[token].0 as i64 } as i32)
        .collect();
    let positions: Vec<i32> = (0..cells.len())
        .map(|token| if token % 2 == 1 { named(token, cells[token].1 as i64) } else { cells[token].1 as i64 } as i32)
        .collect();
    let sums = |counts: &mut dyn Iterator<Item = usize>| -> Vec<u32> {
        let mut sums = vec![0];
        counts.for_each(|count| sums.push(sums[sums.len() - 1] + count as u32));
        sums
    };

    // The padding tokens of `SpeltOut` have rows too.
    let element = case.source.bytes();
    let padded = |new: &[u8], dim: usize| {
        Buffer::of(&[new, &vec![0xff; (room - cells.len()) * token_elements(dim) * element]].concat())
    };
    let (mut new_k, mut new_v) = (padded(&new_k, head_dim), padded(&new_v, value_dim));
    let mut pool = Buffer::of(&before);
    let mut slots = Buffer::of(&slots);
    let spelt_out = case.address == Address::SpeltOut;
    let of_or_unset = |values: &[i32]| if spelt_out { Buffer::filled(4 * room, 0xcc) } else { Buffer::of(values) };
    let (mut request_of, mut position_of) = (of_or_unset(&requests), of_or_unset(&positions));
    let mut page_begin = Buffer::of(&sums(&mut counts.iter().copied()));
    let mut page_indices = Buffer::of(&page_lists.concat());
    let mut append_begin = Buffer::of(&sums(&mut case.append_lens.iter().map(|&len| len as usize)));
    let mut lens = Buffer::of(&kv_lens);
    let rows = |buffer: &mut Buffer, dim: usize| RowsView {
        address: buffer.address(),
        token_stride_bytes: (token_elements(dim) * element) as i64,
        head_stride_bytes: (dim * element) as i64,
    };
    let chunks = case.head_dim.max(case.value_head_dim) / 8;
    let parameters = AppendParameters {
        new_k: rows(&mut new_k, head_dim),
        new_v: rows(&mut new_v, value_dim),
        k: k.view(pool.address()),
        v: v.view(pool.address()),
        slots: if case.address == Address::Slots { slots.address() } else { 0 },
        requests: request_of.address(),
        positions: position_of.address(),
        page_begin: page_begin.address(),
        page_indices: page_indices.address(),
        tokens: room as u32,
        kv_heads: case.kv_heads,
        chunks: Divisor::new(chunks).unwrap(),
        token_chunks: Divisor::new(case.kv_heads * chunks).unwrap(),
        key_chunks: case.head_dim / 8,
        value_chunks: case.value_head_dim / 8,
        padding: 0,
        page_size: Divisor::new(case.page_size).unwrap(),
    };
    let spell = PositionsParameters {
        append_begin: append_begin.address(),
        kv_lens: lens.address(),
        requests: request_of.address(),
        positions: position_of.address(),
        request_count: kv_lens.len() as u32,
        tokens: room as u32,
    };
    let inputs = [&mut new_k, &mut new_v, &mut slots, &mut page_begin, &mut page_indices, &mut append_begin, &mut lens];
    let mut regions = inputs.map(|buffer| buffer.region(Access::Read)).to_vec();
    regions.push(pool.region(Access::Update));
    let with_names = |access, request_of: &mut Buffer, position_of: &mut Buffer| {
        [regions.as_slice(), &[request_of.region(access), position_of.region(access)]].concat()
    };
    if spelt_out {
        executor.positions(&spell, &with_names(Access::Produce, &mut request_of, &mut position_of));
        for (what, got, expected) in [("request", &request_of, &requests), ("position", &position_of, &positions)] {
            let expected = [expected.as_slice(), &[-1; 3]].concat();
            if got.as_slice::<i32>() != expected {
                return Err(format!("{what}s are {:?}, not {expected:?}", got.as_slice::<i32>()));
            }
        }
    }
    let regions = with_names(Access::Read, &mut request_of, &mut position_of);
    executor.append(&parameters, case.source, case.cache, &regions);

    let pool = pool.as_slice::<u16>();
    match (0..elements).find(|&element| pool[element] != expected[element]) {
        None => Ok(()),
        Some(at) => Err(format!(
            "element {at} of the pool is {:#06x}, not {:#06x}; it was {:#06x}",
            pool[at], expected[at], before[at]
        )),
    }
}

/// The oracle's picture of one of K and V.
fn gather(cells: &[u16], (strides, dim): (Strides, usize), case: &AppendCase, pages: usize) -> Pool {
    let row = |page, offset, head| -> Vec<f64> {
        let row = &cells[strides.row(page, offset, head)..][..dim];
        row.iter().map(|&bits| value(case.cache, bits) as f64).collect()
    };
    let token = |page, offset| (0..case.kv_heads as usize).map(|head| row(page, offset, head)).collect();
    let page = |page| (0..case.page_size as usize).map(|offset| token(page, offset)).collect();
    (0..pages).map(page).collect()
}

/// Writes the picture back.
fn scatter(pool: &Pool, cells: &mut [u16], strides: Strides, case: &AppendCase) {
    for (page, tokens) in pool.iter().enumerate() {
        for (offset, rows) in tokens.iter().enumerate() {
            for (head, row) in rows.iter().enumerate() {
                let to = &mut cells[strides.row(page, offset, head)..][..row.len()];
                to.iter_mut().zip(row).for_each(|(cell, &value)| *cell = bits(case.cache, value as f32));
            }
        }
    }
}
