//! Variants of one's own, light and heavy, under the emulator: by attend kernels and by prefill kernels, whole and in
//! pieces, against the f64 oracle.
//!
//! One kind doubles queries and keys in shared memory, and the softmax scale is a quarter of the oracle's, so that a row
//! changed once too often or not at all shows. The other has a sink, or weights that are sigmoids and not normalised.
//!
//! Unsafe: runs take addresses; the buffers behind them live until the outputs are read, which waits.
use std::f32::consts::LOG2_E;

use half::bf16;
use kernels_gpu::attend_kernels;
use kernels_gpu::simt::{math, tensor::Element, thread};
use kernels_gpu::tile::Rows as TileRows;
use kernels_gpu::variant::{Piece, QueryAt, RowAt, Variant};
use oxattn::custom::{CustomVariant, Family};
use oxattn::oracle::{Request, Rules};
use oxattn::*;
use oxattn_tests::random::Random;

/// Doubles each bf16 of a tile's rows: one more in the exponent.
unsafe fn double<const HEAD_DIM: u32>(tile: impl TileRows, rows: u32, threads: u32) {
    let mut index = thread::thread_idx_x() % threads;
    while index < rows * (HEAD_DIM / 8) {
        let words = tile.chunk(index / (HEAD_DIM / 8), index % (HEAD_DIM / 8)).cast::<[u32; 4]>();
        // SAFETY: the tile's bytes are there, by the trait's contract.
        unsafe { words.store(words.load().map(|word| word + 0x0080_0080)) };
        index += threads;
    }
}

/// A variant that doubles queries and keys.
macro_rules! doubling {
    ($name:ident, $symbol:literal, $is_light:literal) => {
        #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        struct $name {
            unused: u32,
        }

        impl Variant for $name {
            type Parameters = $name;
            type Row = ();
            const IS_LIGHT: bool = $is_light;
            const TRANSFORMS: bool = true;
            fn bind(parameters: $name) -> Self {
                parameters
            }
            unsafe fn row(&self, _at: impl FnOnce() -> RowAt) {}
            fn logit(&self, (): (), score: f32, _key: u32) -> f32 {
                score
            }
            unsafe fn transform_queries<E: Element, const HEAD_DIM: u32>(
                &self,
                tile: impl TileRows,
                rows: u32,
                threads: u32,
                _at: impl Fn(u32) -> QueryAt,
            ) {
                // SAFETY: the trait's contract.
                unsafe { double::<HEAD_DIM>(tile, rows, threads) }
            }
            unsafe fn transform_keys<E: Element, const HEAD_DIM: u32>(
                &self,
                tile: impl TileRows,
                [begin, end]: [u32; 2],
                threads: u32,
            ) {
                // SAFETY: the trait's contract.
                unsafe { double::<HEAD_DIM>(tile, end - begin, threads) }
            }
        }
        attend_kernels! { variant: $name, name: $symbol, elements: [bf16], head_dims: [64, 128, 256] }
    };
}

/// A variant whose softmax starts with a sink, or that has none.
macro_rules! starting {
    ($name:ident, $symbol:literal, $is_light:literal) => {
        #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        struct $name {
            /// 1 for sigmoids.
            sigmoid: u32,
        }

        impl Variant for $name {
            type Parameters = $name;
            /// The position.
            type Row = i32;
            const IS_LIGHT: bool = $is_light;
            fn bind(parameters: $name) -> Self {
                parameters
            }
            unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> i32 {
                at().position
            }
            fn logit(&self, _position: i32, score: f32, _key: u32) -> f32 {
                if self.sigmoid == 1 { -math::log2(1.0 + math::exp2(-score)) } else { score }
            }
            unsafe fn start(&self, position: i32, piece: Piece) -> [f32; 2] {
                if piece.is_own(position) { [SINK * LOG2_E, 1.0] } else { [f32::NEG_INFINITY, 0.0] }
            }
            fn is_softmax(&self) -> bool {
                self.sigmoid == 0
            }
        }
        attend_kernels! { variant: $name, name: $symbol, elements: [bf16], head_dims: [64, 128, 256] }
    };
}

/// A variant in a module of its own, as its kernels' table is. What it is launched with is one number.
macro_rules! module {
    ($module:ident, $make:ident, $symbol:literal, $is_light:literal) => {
        mod $module {
            use super::*;
            $make!(Own, $symbol, $is_light);
            pub const VARIANT: Custom = Custom {
                name: <Own as CustomVariant>::NAME,
                emulate: |device, family| device.emulate::<Own>(family, 5).unwrap(),
                with_parameter: |run, parameter| run.with_custom_parameters(&bytemuck::cast::<u32, Own>(parameter)),
            };
        }
    };
}

module!(doubling_light, doubling, "doubling_light", true);
module!(doubling_heavy, doubling, "doubling_heavy", false);
module!(starting_light, starting, "starting_light", true);
module!(starting_heavy, starting, "starting_heavy", false);

/// A variant, and how a device and a run get it.
#[derive(Clone, Copy)]
struct Custom {
    name: &'static str,
    emulate: fn(&Device, Family),
    with_parameter: fn(Run, u32) -> Run,
}

/// The head's sink, above most logits.
const SINK: f32 = 1.9;
const PAGE_TOKENS: u32 = 16;
const HEADS: u32 = 2;
/// Items of one warpgroup and of both, of one tile of keys and of several, one behind the other in a block's queue.
const LENS: [(u32, u32); 18] = [
    (60, 71),
    (90, 330),
    (1, 450),
    (3, 200),
    (0, 9),
    (40, 129),
    (20, 300),
    (70, 200),
    (64, 64),
    (65, 257),
    (30, 400),
    (2, 128),
    (50, 260),
    (80, 90),
    (33, 280),
    (12, 390),
    (100, 100),
    (9, 270),
];

/// A batch's `q`, `k` and `v`, and where its queries begin; pages are in order.
struct Batch {
    head_dim: usize,
    tensors: [Vec<bf16>; 3],
    query_begin: Vec<u32>,
    page_begin: Vec<u32>,
}

impl Batch {
    fn new(head_dim: u32) -> Batch {
        let (mut query_begin, mut page_begin) = (vec![0], vec![0]);
        for (index, (query_len, kv_len)) in LENS.into_iter().enumerate() {
            query_begin.push(query_begin[index] + query_len);
            page_begin.push(page_begin[index] + kv_len.div_ceil(PAGE_TOKENS));
        }
        let slots = page_begin[LENS.len()] * PAGE_TOKENS;
        let mut random = Random::new(3);
        let tensors = [query_begin[LENS.len()] * HEADS, slots, slots]
            .map(|rows| (0..rows * head_dim).map(|_| bf16::from_f32(random.normal())).collect());
        Batch { head_dim: head_dim as usize, tensors, query_begin, page_begin }
    }

    fn run(
        &self,
        device: &Device,
        config: AttentionConfig,
        (kernel, mode): (Kernel, SplitMode),
        complete: impl Fn(Run) -> Run,
    ) -> Vec<bf16> {
        let kv_lens = LENS.map(|(_, kv_len)| kv_len);
        let tokens = self.query_begin[LENS.len()];
        let limits = Limits {
            max_requests: LENS.len() as u32,
            max_query_tokens: tokens,
            max_kv_len_tokens: 450,
            max_kv_tokens: kv_lens.iter().map(|&len| len as u64).sum(),
        };
        let attention = Attention::new(device, config, mode, limits).unwrap();
        let mut attention = attention.with_kernel(kernel).unwrap();
        let memory = device.allocate(attention.workspace_bytes() as usize).unwrap();
        // SAFETY: the device's memory, used for nothing else while the workspace lives.
        let mut workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
        let table = PageTable::csr(PAGE_TOKENS, &self.page_begin, &kv_lens).unwrap();
        let queries = QueryLengths::indptr(&self.query_begin).unwrap();
        let planned = attention.plan(&table, queries, &mut workspace, Stream::default()).unwrap();
        let [q, k, v] = self.tensors.each_ref().map(|tensor| device.upload(tensor).unwrap());
        let pages = *self.page_begin.last().unwrap();
        let page_ids = device.upload(&(0..pages).collect::<Vec<u32>>()).unwrap();
        let out = device.upload(&vec![bf16::NAN; self.tensors[0].len()]).unwrap();
        let rows = |of: &Buffer| Rows::contiguous(of.address(), DType::Bf16, tokens as u64, HEADS, config.head_dim);
        let run = Run::new(
            rows(&q),
            PagedCache::separate(k.address(), v.address(), pages as u64, Layout::Nhd, &config),
            PageIndices { address: page_ids.address(), len: pages as u64 },
            rows(&out),
        );
        // SAFETY: the buffers are the device's and live until the download, which waits; every page id is one of the pool.
        unsafe { attention.run(&planned, &complete(run), &mut workspace, Stream::default()).unwrap() };
        out.download().unwrap()
    }

    /// The definition.
    fn expected(&self, softmax_scale: f64, rules: Rules<'_>, request: usize, token: usize, head: usize) -> Vec<f64> {
        let head_dim = self.head_dim;
        let (query_len, kv_len) = LENS[request];
        let row = |tensor: usize, row: usize| -> Vec<f64> {
            self.tensors[tensor][row * head_dim..][..head_dim].iter().map(|number| number.to_f64()).collect()
        };
        let slot = |position: usize| (self.page_begin[request] * PAGE_TOKENS) as usize + position;
        Request {
            query_len: query_len as usize,
            kv_len: kv_len as usize,
            group: HEADS as usize,
            value_head_dim: head_dim,
            softmax_scale,
            causal: true,
            rules,
            q: &|token, head| row(0, (self.query_begin[request] as usize + token) * HEADS as usize + head),
            k: &|position, _| row(1, slot(position)),
            v: &|position, _| row(2, slot(position)),
        }
        .attend(token, head)
        .out
    }
}

/// Runs the variant by every kernel and compares each row with the oracle's under `rules`. Scores of the variant are
/// `scores_are` times what they would be without it.
fn check(custom: Custom, parameter: u32, scores_are: f32, rules: Rules<'_>) {
    let device_of = |family| {
        let device = Device::cpu();
        (custom.emulate)(&device, family);
        device
    };
    let (whole, cut) = (SplitMode::Unsplit, SplitMode::FixedSplit { tokens: 128 });
    for (family, kernel, mode, head_dim) in [
        (Family::Sm80, Kernel::Attend, whole, 64),
        (Family::Sm80, Kernel::Attend, cut, 128),
        (Family::Sm90a, Kernel::Attend, cut, 64),
        (Family::Sm90a, Kernel::Attend, whole, 128),
        (Family::Sm90a, Kernel::Prefill, whole, 64),
        (Family::Sm90a, Kernel::Prefill, SplitMode::Balanced, 128),
        (Family::Sm90a, Kernel::Prefill, whole, 128),
        (Family::Sm90a, Kernel::Prefill, whole, 256),
    ] {
        let scale = 1.0 / (head_dim as f32).sqrt();
        let config = AttentionConfig::new(HEADS, 1, head_dim, PAGE_TOKENS).with_softmax_scale(scale / scores_are);
        let batch = Batch::new(head_dim);
        let complete = |run| (custom.with_parameter)(run, parameter);
        let config = config.with_custom_variant(custom.name);
        let got = batch.run(&device_of(family), config, (kernel, mode), complete);
        for (request, (query_len, _)) in LENS.into_iter().enumerate() {
            for (token, head) in (0..query_len).flat_map(|token| (0..HEADS).map(move |head| (token, head))) {
                let row = (batch.query_begin[request] + token) * HEADS + head;
                let got = &got[row as usize * batch.head_dim..][..batch.head_dim];
                let wanted = batch.expected(scale as f64, rules, request, token as usize, head as usize);
                let off: f64 = got.iter().zip(&wanted).map(|(got, wanted)| (got.to_f64() - wanted).powi(2)).sum();
                let size: f64 = wanted.iter().map(|wanted| wanted * wanted).sum();
                assert!(
                    off.sqrt() <= 4e-3 * size.sqrt(),
                    "{}, {family:?}, {kernel:?}, {mode:?}, head dim {head_dim}: request {request}, token {token}, head \
                     {head} is off by {:.2e}",
                    custom.name,
                    (off / size).sqrt()
                );
            }
        }
    }
}

#[test]
fn rows_are_changed_once_whatever_comes_before_and_behind() {
    for custom in [doubling_light::VARIANT, doubling_heavy::VARIANT] {
        check(custom, 0, 4.0, Rules::default());
    }
}

#[test]
fn sinks_count_once() {
    let sink = |_: usize| SINK as f64;
    for custom in [starting_light::VARIANT, starting_heavy::VARIANT] {
        check(custom, 0, 1.0, Rules { sink: Some(&sink), ..Rules::default() });
    }
}

#[test]
fn sums_are_not_normalised() {
    for custom in [starting_light::VARIANT, starting_heavy::VARIANT] {
        check(custom, 1, 1.0, Rules { sigmoid_bias: Some(0.0), ..Rules::default() });
    }
}
