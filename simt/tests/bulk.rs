//! Bulk copies against a walk over the tensor on the host, and as operands of `wgmma`.
use simt::{
    asynchronous::fence_proxy_async,
    block::sync_threads,
    bulk::{
        TensorMap, commit_bulk_stores, load_bulk, load_tensor_box, prefetch_tensor_map, store_bulk, wait_bulk_stores,
        wait_bulk_stores_read,
    },
    emulator::{GlobalMemory, Launch, TensorMapDescription},
    global::Global,
    mbarrier::{Mbarrier, fence_mbarrier_initialisation},
    number::Bf16,
    shared::Shared,
    thread::{lane_idx, thread_idx_x, warp_idx},
    warp::sync_warp,
    wgmma::{self, Descriptor, KMajor, MnMajor, Swizzle, multiply_shared},
};

const SEEDS: [u64; 4] = [0, 1, 7, 0xdead_beef];

/// A tensor of 16-bit values with room between its rows.
struct Tensor<'a> {
    values: &'a [u16],
    extents: &'a [u32],
    /// In elements, from the second dimension on.
    strides: &'a [u64],
}

impl Tensor<'_> {
    fn at(&self, coordinates: &[i64]) -> u16 {
        let inside = coordinates.iter().zip(self.extents).all(|(at, extent)| (0..*extent as i64).contains(at));
        let strides = std::iter::once(&1).chain(self.strides);
        let index =
            || coordinates.iter().zip(strides).map(|(at, stride)| *at as usize * *stride as usize).sum::<usize>();
        if inside { self.values[index()] } else { 0 }
    }
}

/// Copies one box and reads it back, undoing the swizzle.
fn copy_box<const RANK: usize>(
    tensor: &Tensor<'_>,
    box_extents: [u32; RANK],
    element_strides: [u32; RANK],
    swizzle: Swizzle,
    coordinates: [i32; RANK],
) {
    let counts: Vec<u32> =
        box_extents.iter().zip(element_strides).map(|(extent, stride)| extent.div_ceil(stride)).collect();
    let elements = counts.iter().product::<u32>();
    let mut memory = GlobalMemory::new();
    let values: Global<u16> = memory.read_only(tensor.values);
    let strides_bytes: Vec<u64> = tensor.strides.iter().map(|stride| 2 * stride).collect();
    let description = TensorMapDescription {
        address: values.address(),
        element_bytes: 2,
        extents: tensor.extents,
        strides_bytes: &strides_bytes,
        box_extents: &box_extents,
        element_strides: &element_strides,
        swizzle,
    };
    let maps = [description.encode().unwrap()];
    let map: Global<TensorMap> = memory.read_only(&maps);
    let mut output = vec![0u16; elements as usize];
    let result = memory.uninitialised(&mut output);
    // SAFETY: one warp; the box fits into the shared memory behind the barrier.
    let kernel = || unsafe {
        let barrier = Mbarrier::new(Shared::dynamic());
        let tile = Shared::<u8>::dynamic().add_bytes(1024);
        if thread_idx_x() == 0 {
            barrier.initialise(1);
            fence_mbarrier_initialisation();
            prefetch_tensor_map(map);
            load_tensor_box(tile, map, coordinates, barrier);
            barrier.arrive_and_expect_bytes(2 * elements);
        }
        sync_warp();
        barrier.wait(0);
        for element in (thread_idx_x()..elements).step_by(32) {
            let address = swizzle.apply(tile.address() + 2 * element);
            result.add(element as u64).store(tile.add_bytes(address - tile.address()).cast::<u16>().load());
        }
    };
    let launch = Launch { grid_blocks: 1, block_threads: 32, shared_bytes: 1024 + 2 * elements, seed: elements as u64 };
    let counters = launch.run(&mut memory, kernel).unwrap().counters;
    assert_eq!((counters.bulk_copies, counters.bulk_copy_bytes), (1, 2 * elements as u64));
    for (index, found) in output.into_iter().enumerate() {
        let mut rest = index as u32;
        let at: Vec<i64> = (0..RANK)
            .map(|dimension| {
                let step = rest % counts[dimension];
                rest /= counts[dimension];
                let stride = if dimension == 0 { 1 } else { element_strides[dimension] };
                coordinates[dimension] as i64 + (step * stride) as i64
            })
            .collect();
        assert_eq!(found, tensor.at(&at), "{at:?} of {box_extents:?}, {swizzle:?}");
    }
}

/// A 16-byte aligned tensor whose values tell where they are.
fn values(count: usize) -> Vec<u16> {
    (0..count).map(|index| (index * 31 % 65521) as u16 + 1).collect()
}

/// `values` from the first address that is a multiple of 16.
fn aligned(values: &[u16]) -> &[u16] {
    let skip = (values.as_ptr().addr().wrapping_neg() % 16) / 2;
    &values[skip..]
}

#[test]
fn boxes_of_two_dimensions() {
    let values = values(8 + 40 * 104);
    let tensor = Tensor { values: aligned(&values), extents: &[100, 40], strides: &[104] };
    for coordinates in [[0, 0], [32, 8], [-8, -3], [96, 36], [99, 39], [200, 0], [0, -70]] {
        copy_box(&tensor, [64, 16], [1, 1], Swizzle::Bytes128, coordinates);
        copy_box(&tensor, [32, 16], [1, 1], Swizzle::Bytes64, coordinates);
        copy_box(&tensor, [16, 9], [1, 1], Swizzle::Bytes32, coordinates);
        copy_box(&tensor, [24, 7], [1, 1], Swizzle::None, coordinates);
        copy_box(&tensor, [8, 16], [1, 3], Swizzle::None, coordinates);
    }
}

#[test]
fn boxes_of_more_dimensions() {
    let values = values(8 + 4000);
    let values = aligned(&values);
    let tensor = Tensor { values, extents: &[24, 5, 7], strides: &[24, 120] };
    copy_box(&tensor, [16, 4, 3], [1, 1, 1], Swizzle::Bytes32, [10, 3, -1]);
    copy_box(&tensor, [16, 4, 3], [1, 2, 1], Swizzle::None, [0, 1, 6]);
    let tensor = Tensor { values, extents: &[16, 5, 4, 3], strides: &[64, 16, 320] };
    copy_box(&tensor, [16, 2, 4, 2], [1, 1, 1, 1], Swizzle::Bytes32, [0, 1, 0, 2]);
    let tensor = Tensor { values, extents: &[8, 2, 3, 4, 5], strides: &[8, 16, 48, 192] };
    copy_box(&tensor, [8, 2, 2, 3, 2], [1, 1, 1, 2, 1], Swizzle::None, [0, -1, 1, 2, 4]);
    let tensor = Tensor { values, extents: &[300], strides: &[] };
    copy_box(&tensor, [256], [1], Swizzle::None, [100]);
}

/// Both operands come by tensor map in the layouts of attention: queries and keys by rows, values as two halves of 64
/// columns.
#[test]
fn tiles_for_the_tensor_cores() {
    const TOKENS: u32 = 64;
    let pattern = |index: usize| (index * 37 % 19) as f32 - 9.0;
    let number = |value: f32| Bf16((value.to_bits() >> 16) as u16);
    // Aligned as the maps want it.
    let storage = |salt: usize, count: usize| -> Vec<u128> {
        let bits = |index: usize| (number(pattern(index + salt)).0 as u128) << (16 * (index % 8));
        (0..count / 8).map(|line| (0..8).map(|within| bits(8 * line + within)).sum()).collect()
    };
    let (queries, values) = (storage(3, 64 * 64), storage(5, TOKENS as usize * 128));
    let mut output = vec![0f32; 64 * 128];
    let mut memory = GlobalMemory::new();
    let (queries, values) = (memory.read_only(&queries), memory.read_only(&values));
    let map = |address, extents: &[u32], strides_bytes: &[u64], box_extents: &[u32]| {
        let element_strides = vec![1; extents.len()];
        let (element_strides, swizzle) = (&element_strides[..], Swizzle::Bytes128);
        TensorMapDescription {
            address,
            element_bytes: 2,
            extents,
            strides_bytes,
            box_extents,
            element_strides,
            swizzle,
        }
        .encode()
        .unwrap()
    };
    let maps = [
        map(queries.address(), &[64, 64], &[128], &[64, 64]),
        map(values.address(), &[64, TOKENS, 2], &[256, 128], &[64, TOKENS, 2]),
    ];
    let maps: Global<TensorMap> = memory.read_only(&maps);
    let result = memory.uninitialised(&mut output);
    // SAFETY: one warpgroup; 8 KiB of queries and 16 KiB of values behind the barrier.
    let kernel = || unsafe {
        let barrier = Mbarrier::new(Shared::dynamic());
        let (a, b) = (Shared::<u8>::dynamic().add_bytes(1024), Shared::<u8>::dynamic().add_bytes(9 << 10));
        if thread_idx_x() == 0 {
            barrier.initialise(1);
            fence_mbarrier_initialisation();
            barrier.arrive_and_expect_bytes(24 << 10);
            load_tensor_box(a, maps, [0, 0], barrier);
            load_tensor_box(b, maps.add(1), [0, 0, 0], barrier);
        }
        sync_threads();
        barrier.wait(0);
        let a = Descriptor::<Bf16, KMajor>::new(a, 0, 1024, Swizzle::Bytes128);
        let b = Descriptor::<Bf16, MnMajor>::new(b, 8 << 10, 1024, Swizzle::Bytes128);
        let mut c = [[0f32; 4]; 16];
        wgmma::fence();
        for step in 0..4 {
            multiply_shared(&mut c, a.advance_bytes(32 * step), b.advance_bytes(2048 * step), step > 0);
        }
        wgmma::commit_group();
        wgmma::wait_group::<0, _>(&mut c);
        for (tile, four) in c.into_iter().enumerate() {
            for (index, value) in four.into_iter().enumerate() {
                let row = 16 * warp_idx() as usize + lane_idx() as usize / 4 + index / 2 * 8;
                let column = 8 * tile + 2 * (lane_idx() as usize % 4) + index % 2;
                result.add((row * 128 + column) as u64).store(value);
            }
        }
    };
    let launch = Launch { grid_blocks: 1, block_threads: 128, shared_bytes: 25 << 10, seed: 5 };
    launch.run(&mut memory, kernel).unwrap();
    for (index, found) in output.into_iter().enumerate() {
        let (row, column) = (index / 128, index % 128);
        let wanted: f32 = (0..64).map(|k| pattern(row * 64 + k + 3) * pattern(k * 128 + column + 5)).sum();
        assert_eq!(found, wanted, "row {row}, column {column}");
    }
}

/// Thread 0 streams tiles through two stages to the other warps, which store their sums in bulk.
#[test]
fn a_ring_of_bulk_copies() {
    const TILES: u32 = 7;
    const TILE_BYTES: u32 = 512;
    let words = TILE_BYTES / 4;
    let input: Vec<u128> = (0..(TILES * TILE_BYTES / 16) as u128).map(|line| line * 0x1_0000_0003_0000_0005).collect();
    for seed in SEEDS {
        let mut output = vec![0u128; (TILE_BYTES / 16) as usize];
        let mut memory = GlobalMemory::new();
        let source: Global<u8> = memory.read_only(&input).cast();
        let target: Global<u8> = memory.uninitialised(&mut output).cast();
        // SAFETY: two stages and a tile of sums lie behind four barriers.
        let kernel = || unsafe {
            let barrier = |index: u32| Mbarrier::new(Shared::<u64>::dynamic().add(index));
            let stage = |index: u32| Shared::<u8>::dynamic().add_bytes(128 + TILE_BYTES * index);
            if thread_idx_x() == 0 {
                for index in 0..2 {
                    barrier(index).initialise(1);
                    barrier(2 + index).initialise(words);
                }
                fence_mbarrier_initialisation();
            }
            sync_threads();
            if thread_idx_x() == 0 {
                for tile in 0..TILES {
                    barrier(2 + tile % 2).wait((tile / 2 % 2) ^ 1);
                    barrier(tile % 2).arrive_and_expect_bytes(TILE_BYTES);
                    let source = source.add((tile * TILE_BYTES) as u64);
                    load_bulk(stage(tile % 2), source, TILE_BYTES, barrier(tile % 2));
                }
            } else if thread_idx_x() >= 32 {
                let word = thread_idx_x() - 32;
                let mut sum = 0u32;
                for tile in 0..TILES {
                    barrier(tile % 2).wait(tile / 2 % 2);
                    sum = sum.wrapping_add(stage(tile % 2).cast::<u32>().add(word).load());
                    barrier(2 + tile % 2).arrive();
                }
                stage(2).cast::<u32>().add(word).store(sum);
                fence_proxy_async();
            }
            sync_threads();
            if thread_idx_x() == 40 {
                store_bulk(target, stage(2), TILE_BYTES / 2);
                commit_bulk_stores();
                store_bulk(target.add(TILE_BYTES as u64 / 2), stage(2).add_bytes(TILE_BYTES / 2), TILE_BYTES / 2);
                commit_bulk_stores();
                wait_bulk_stores::<1>();
                wait_bulk_stores_read::<0>();
                // Both sources are free again.
                stage(2).add_bytes(TILE_BYTES - 4).cast::<u32>().store(0);
            }
        };
        let launch = Launch { grid_blocks: 1, block_threads: 32 + words, shared_bytes: 128 + 3 * TILE_BYTES, seed };
        let counters = launch.run(&mut memory, kernel).unwrap().counters;
        assert_eq!(counters.bulk_copies, TILES as u64 + 2);
        assert_eq!(counters.bulk_copy_bytes, (TILES as u64 + 1) * TILE_BYTES as u64);
        assert_eq!(counters.global_sectors_read, (TILES * TILE_BYTES / 32) as u64);
        assert_eq!(counters.global_sectors_written, (TILE_BYTES / 32) as u64);
        let word_of = |lines: &[u128], word: usize| (lines[word / 4] >> (32 * (word % 4))) as u32;
        for word in 0..words as usize {
            let tiles = input.chunks((TILE_BYTES / 16) as usize);
            let wanted = tiles.fold(0u32, |sum, tile| sum.wrapping_add(word_of(tile, word)));
            assert_eq!(word_of(&output, word), wanted);
        }
    }
}
