//! Attention of one tile of queries in the whole vocabulary of sm_90a: a producer warpgroup copies tiles by tensor map
//! into a ring, two consumer warpgroups multiply from it, and the next scores are under way while the last weights meet
//! their values. Heads of 64, tiles of 64 tokens, no mask.
use simt::{
    block::sync_threads,
    bulk::{TensorMap, load_tensor_box, prefetch_tensor_map},
    global::Global,
    math::{exp2, maximum, multiply_add, reciprocal},
    mbarrier::{Mbarrier, fence_mbarrier_initialisation},
    number::Bf16,
    registers::{lower_register_limit, raise_register_limit},
    shared::Shared,
    tensor::Element,
    thread::{lane_idx, thread_idx_x, warp_idx},
    warp::{shuffle_xor_f32, sync_warp},
    wgmma::{self, Descriptor, KMajor, MnMajor, Swizzle, commit_group, multiply_registers, multiply_shared},
};

pub const THREADS: u32 = 384;
pub const SHARED_BYTES: u32 = 1024 + QUERY_BYTES + 2 * STAGES * TILE_BYTES;
const STAGES: u32 = 2;
/// 64 tokens of 64 values.
const TILE_BYTES: u32 = 8 << 10;
const QUERY_BYTES: u32 = 2 * TILE_BYTES;

/// Where things lie in shared memory.
#[derive(Clone, Copy)]
struct Layout;

impl Layout {
    #[inline(always)]
    fn barrier(self, index: u32) -> Mbarrier {
        Mbarrier::new(Shared::<u64>::dynamic().add(index))
    }
    #[inline(always)]
    fn queries_full(self) -> Mbarrier {
        self.barrier(0)
    }
    #[inline(always)]
    fn keys_full(self, stage: u32) -> Mbarrier {
        self.barrier(1 + stage)
    }
    #[inline(always)]
    fn values_full(self, stage: u32) -> Mbarrier {
        self.barrier(1 + STAGES + stage)
    }
    #[inline(always)]
    fn keys_empty(self, stage: u32) -> Mbarrier {
        self.barrier(1 + 2 * STAGES + stage)
    }
    #[inline(always)]
    fn values_empty(self, stage: u32) -> Mbarrier {
        self.barrier(1 + 3 * STAGES + stage)
    }
    #[inline(always)]
    fn queries(self) -> Shared<u8> {
        Shared::dynamic().add_bytes(1024)
    }
    #[inline(always)]
    fn keys(self, stage: u32) -> Shared<u8> {
        self.queries().add_bytes(QUERY_BYTES + stage * TILE_BYTES)
    }
    #[inline(always)]
    fn values(self, stage: u32) -> Shared<u8> {
        self.keys(STAGES + stage)
    }
}

/// `maps`: queries (128 rows), keys, values, all with boxes of 64 x 64. `output`: 128 x 64 f32. `log2_scale` is the
/// scores' factor times log2(e).
///
/// # Safety
/// The maps describe live memory of that shape; one block of `THREADS` with `SHARED_BYTES` on sm_90a.
#[inline(always)]
pub unsafe fn attention(maps: Global<TensorMap>, output: Global<[f32; 2]>, tiles: u32, log2_scale: f32) {
    let at = Layout;
    // SAFETY: the contract above; barriers and stages are used in the order the ring gives.
    unsafe {
        if thread_idx_x() == 0 {
            at.queries_full().initialise(1);
            for stage in 0..STAGES {
                at.keys_full(stage).initialise(1);
                at.values_full(stage).initialise(1);
                // One arrival of each consumer warp.
                at.keys_empty(stage).initialise(8);
                at.values_empty(stage).initialise(8);
            }
            fence_mbarrier_initialisation();
        }
        sync_threads();
        if warp_idx() < 4 {
            lower_register_limit::<24>();
            if thread_idx_x() == 0 {
                produce(at, maps, tiles);
            }
        } else {
            raise_register_limit::<240>();
            consume(at, output, tiles, log2_scale);
        }
    }
}

#[inline(always)]
unsafe fn produce(at: Layout, maps: Global<TensorMap>, tiles: u32) {
    // SAFETY: the contract of `attention`.
    unsafe {
        prefetch_tensor_map(maps.add(1));
        at.queries_full().arrive_and_expect_bytes(QUERY_BYTES);
        load_tensor_box(at.queries(), maps, [0, 0], at.queries_full());
        load_tensor_box(at.queries().add_bytes(TILE_BYTES), maps, [0, 64], at.queries_full());
        let mut tile = 0;
        while tile < tiles {
            let (stage, parity) = (tile % STAGES, (tile / STAGES + 1) % 2);
            let row = 64 * tile as i32;
            at.keys_empty(stage).wait(parity);
            at.keys_full(stage).arrive_and_expect_bytes(TILE_BYTES);
            load_tensor_box(at.keys(stage), maps.add(1), [0, row], at.keys_full(stage));
            at.values_empty(stage).wait(parity);
            at.values_full(stage).arrive_and_expect_bytes(TILE_BYTES);
            load_tensor_box(at.values(stage), maps.add(2), [0, row], at.values_full(stage));
            tile += 1;
        }
    }
}

type Tile = [[f32; 4]; 8];
type Weights = [[u32; 4]; 4];

/// `$body` for each `$index` of the range, unrolled: arrays in registers have constant indices.
macro_rules! each {
    ($index:ident in 4 $body:block) => { each!(@ $index $body 0 1 2 3) };
    ($index:ident in 8 $body:block) => { each!(@ $index $body 0 1 2 3 4 5 6 7) };
    (@ $index:ident $body:block $($value:literal)*) => { $({ let $index: usize = $value; $body })* };
}

#[inline(always)]
unsafe fn start_scores(scores: &mut Tile, queries: Shared<u8>, keys: Shared<u8>) {
    let queries = Descriptor::<Bf16, KMajor>::new(queries, 0, 1024, Swizzle::Bytes128);
    let keys = Descriptor::<Bf16, KMajor>::new(keys, 0, 1024, Swizzle::Bytes128);
    // SAFETY: the contract of `attention`; both tiles were waited for.
    unsafe {
        each!(step in 4 {
            let bytes = 32 * step as u32;
            multiply_shared(scores, queries.advance_bytes(bytes), keys.advance_bytes(bytes), step > 0);
        });
        commit_group();
    }
}

#[inline(always)]
unsafe fn start_output(sums: &mut Tile, weights: &Weights, values: Shared<u8>) {
    let values = Descriptor::<Bf16, MnMajor>::new(values, 0, 1024, Swizzle::Bytes128);
    // SAFETY: the contract of `attention`; the tile was waited for.
    unsafe {
        each!(step in 4 {
            multiply_registers(sums, weights[step], values.advance_bytes(2048 * step as u32), true);
        });
        commit_group();
    }
}

/// Running maximum and sum of the two rows a thread has parts of.
struct Softmax {
    maximum: [f32; 2],
    sum: [f32; 2],
    log2_scale: f32,
}

impl Softmax {
    /// Scores become weights; returns what earlier sums shrink by.
    #[inline(always)]
    unsafe fn update(&mut self, scores: &mut Tile) -> [f32; 2] {
        let mut largest = self.maximum;
        each!(tile in 8 {
            each!(index in 4 { largest[index / 2] = maximum(largest[index / 2], scores[tile][index]); });
        });
        let mut shrink = self.sum;
        for row in 0..2 {
            // SAFETY: a consumer warp comes here as a whole.
            unsafe {
                largest[row] = maximum(largest[row], shuffle_xor_f32(largest[row], 1));
                largest[row] = maximum(largest[row], shuffle_xor_f32(largest[row], 2));
            }
            shrink[row] = exp2((self.maximum[row] - largest[row]) * self.log2_scale);
            self.maximum[row] = largest[row];
            self.sum[row] *= shrink[row];
        }
        each!(tile in 8 {
            each!(index in 4 {
                let row = index / 2;
                scores[tile][index] =
                    exp2(multiply_add(scores[tile][index], self.log2_scale, -largest[row] * self.log2_scale));
                self.sum[row] += scores[tile][index];
            });
        });
        shrink
    }
}

/// C's layout of two tiles is A's layout of one step.
#[inline(always)]
fn pack(scores: &Tile, weights: &mut Weights) {
    each!(step in 4 {
        let (left, right) = (scores[2 * step], scores[2 * step + 1]);
        weights[step] = [
            Bf16::pack(left[0], left[1]),
            Bf16::pack(left[2], left[3]),
            Bf16::pack(right[0], right[1]),
            Bf16::pack(right[2], right[3]),
        ];
    });
}

#[inline(always)]
unsafe fn consume(at: Layout, output: Global<[f32; 2]>, tiles: u32, log2_scale: f32) {
    // SAFETY: the contract of `attention`.
    unsafe {
        let group = warp_idx() / 4 - 1;
        let queries = at.queries().add_bytes(group * TILE_BYTES);
        let (mut sums, mut scores, mut weights): (Tile, Tile, Weights) = core::mem::zeroed();
        let mut softmax = Softmax { maximum: [f32::NEG_INFINITY; 2], sum: core::mem::zeroed(), log2_scale };
        at.queries_full().wait(0);
        at.keys_full(0).wait(0);
        wgmma::fence();
        start_scores(&mut scores, queries, at.keys(0));
        wgmma::wait_group::<0, _>(&mut scores);
        release(at.keys_empty(0));
        softmax.update(&mut scores);
        pack(&scores, &mut weights);
        let mut tile = 1;
        while tile < tiles {
            let (stage, parity) = (tile % STAGES, tile / STAGES % 2);
            let (last_stage, last_parity) = ((tile - 1) % STAGES, (tile - 1) / STAGES % 2);
            at.keys_full(stage).wait(parity);
            at.values_full(last_stage).wait(last_parity);
            wgmma::fence();
            start_scores(&mut scores, queries, at.keys(stage));
            start_output(&mut sums, &weights, at.values(last_stage));
            wgmma::wait_group::<1, _>(&mut scores);
            release(at.keys_empty(stage));
            let shrink = softmax.update(&mut scores);
            wgmma::wait_group::<0, _>(&mut sums);
            release(at.values_empty(last_stage));
            each!(tile in 8 { each!(index in 4 { sums[tile][index] *= shrink[index / 2]; }); });
            pack(&scores, &mut weights);
            tile += 1;
        }
        let (stage, parity) = ((tiles - 1) % STAGES, (tiles - 1) / STAGES % 2);
        at.values_full(stage).wait(parity);
        wgmma::fence();
        start_output(&mut sums, &weights, at.values(stage));
        wgmma::wait_group::<0, _>(&mut sums);
        let mut factor = softmax.sum;
        for factor in &mut factor {
            *factor += shuffle_xor_f32(*factor, 1);
            *factor += shuffle_xor_f32(*factor, 2);
            *factor = reciprocal(*factor);
        }
        let row = 64 * group + warp_idx() % 4 * 16 + lane_idx() / 4;
        let pairs = output.add((row * 32 + lane_idx() % 4) as u64);
        each!(tile in 8 {
            let [a, b, c, d] = sums[tile];
            pairs.add(4 * tile as u64).store([a * factor[0], b * factor[0]]);
            pairs.add(8 * 32 + 4 * tile as u64).store([c * factor[1], d * factor[1]]);
        });
    }
}

/// This warp has read the stage: one lane says so for all, after all have waited for the product.
#[inline(always)]
unsafe fn release(empty: Mbarrier) {
    // SAFETY: a consumer warp comes here as a whole.
    unsafe {
        sync_warp();
        if lane_idx() == 0 {
            empty.arrive();
        }
    }
}
