//! Variants of one's own that change queries and keys in shared memory, light and heavy, under the emulator: by attend
//! kernels and by prefill kernels, against the f64 oracle.
//!
//! The variants double queries and keys, and the softmax scale is a quarter of the oracle's, so that a row changed once too
//! often or not at all shows.
//!
//! Unsafe: runs take addresses; the buffers behind them live until the outputs are read, which waits.
use half::bf16;
use kernels_gpu::attend_kernels;
use kernels_gpu::simt::{tensor::Element, thread};
use kernels_gpu::tile::Rows as TileRows;
use kernels_gpu::variant::{QueryAt, RowAt, Variant};
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

mod light {
    use super::*;
    doubling!(Light, "doubling_light", true);
    pub const NAME: &str = <Light as CustomVariant>::NAME;
    pub fn emulate(device: &Device, family: Family) {
        device.emulate::<Light>(family, 5).unwrap();
    }
    pub fn with_parameters(run: Run) -> Run {
        run.with_custom_parameters(&Light { unused: 0 })
    }
}

mod heavy {
    use super::*;
    doubling!(Heavy, "doubling_heavy", false);
    pub const NAME: &str = <Heavy as CustomVariant>::NAME;
    pub fn emulate(device: &Device, family: Family) {
        device.emulate::<Heavy>(family, 6).unwrap();
    }
    pub fn with_parameters(run: Run) -> Run {
        run.with_custom_parameters(&Heavy { unused: 0 })
    }
}

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
        Batch { tensors, query_begin, page_begin }
    }

    fn run(&self, device: &Device, config: AttentionConfig, kernel: Kernel, complete: fn(Run) -> Run) -> Vec<bf16> {
        let kv_lens = LENS.map(|(_, kv_len)| kv_len);
        let tokens = self.query_begin[LENS.len()];
        let limits = Limits {
            max_requests: LENS.len() as u32,
            max_query_tokens: tokens,
            max_kv_len_tokens: 450,
            max_kv_tokens: kv_lens.iter().map(|&len| len as u64).sum(),
        };
        let attention = Attention::new(device, config, SplitMode::Unsplit, limits).unwrap();
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

    fn expected(&self, softmax_scale: f64, head_dim: usize, request: usize, token: usize, head: usize) -> Vec<f64> {
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
            rules: Rules::default(),
            q: &|token, head| row(0, (self.query_begin[request] as usize + token) * HEADS as usize + head),
            k: &|position, _| row(1, slot(position)),
            v: &|position, _| row(2, slot(position)),
        }
        .attend(token, head)
        .out
    }
}

#[test]
fn changed_once_whatever_comes_before_and_behind() {
    type Doubling = (&'static str, fn(&Device, Family), fn(Run) -> Run);
    let variants: [Doubling; 2] =
        [(light::NAME, light::emulate, light::with_parameters), (heavy::NAME, heavy::emulate, heavy::with_parameters)];
    for (name, emulate, complete) in variants {
        for (family, kernel, head_dim) in [
            (Family::Sm80, Kernel::Attend, 64),
            (Family::Sm90a, Kernel::Attend, 128),
            (Family::Sm90a, Kernel::Prefill, 64),
            (Family::Sm90a, Kernel::Prefill, 128),
            (Family::Sm90a, Kernel::Prefill, 256),
        ] {
            let device = Device::cpu();
            emulate(&device, family);
            let scale = 1.0 / (head_dim as f32).sqrt();
            let config = AttentionConfig::new(HEADS, 1, head_dim, PAGE_TOKENS).with_softmax_scale(scale / 4.0);
            let batch = Batch::new(head_dim);
            let got = batch.run(&device, config.with_custom_variant(name), kernel, complete);
            for (request, (query_len, _)) in LENS.into_iter().enumerate() {
                for (token, head) in (0..query_len).flat_map(|token| (0..HEADS).map(move |head| (token, head))) {
                    let row = (batch.query_begin[request] + token) * HEADS + head;
                    let got = &got[(row * head_dim) as usize..][..head_dim as usize];
                    let dim = head_dim as usize;
                    let wanted = batch.expected(scale as f64, dim, request, token as usize, head as usize);
                    let off: f64 = got.iter().zip(&wanted).map(|(got, wanted)| (got.to_f64() - wanted).powi(2)).sum();
                    let size: f64 = wanted.iter().map(|wanted| wanted * wanted).sum();
                    assert!(
                        off.sqrt() <= 4e-3 * size.sqrt(),
                        "{name}, {family:?}, {kernel:?}, head dim {head_dim}: request {request}, token {token}, head {head}"
                    );
                }
            }
        }
    }
}
