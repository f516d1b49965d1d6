//! Correct programs: each runs under several seeds and is compared with a computation on the host.
use half::{bf16, f16};
use simt::{
    asynchronous::{commit_async_copies, copy_async_16, wait_async_copies},
    block::{sync_named_barrier, sync_threads},
    emulator::{GlobalMemory, Launch},
    global::Global,
    number::{Bf16, F16},
    shared::Shared,
    tensor::{Element, load_matrix_x4, load_matrix_x4_transposed},
    thread::{block_idx_x, lane_idx, thread_idx_x, warp_idx},
    warp::{shuffle_u32, shuffle_xor_f32, shuffle_xor_u32, sync_warp, vote_ballot},
};

const SEEDS: [u64; 4] = [0, 1, 7, 0xdead_beef];

/// Small whole numbers with a pattern that repeats late: their sums are exact in f32.
fn pattern(index: usize) -> f32 {
    (index * 37 % 19) as f32 - 9.0
}

#[test]
fn block_reduction() {
    unsafe fn kernel(input: Global<f32>, output: Global<f32>) {
        // SAFETY: the launch below registers what is touched.
        unsafe {
            let thread = thread_idx_x();
            let shared = Shared::<f32>::dynamic();
            let mut sum = input.add((block_idx_x() * 128 + thread) as u64).load();
            for lane_mask in [16, 8, 4, 2, 1] {
                sum += shuffle_xor_f32(sum, lane_mask);
            }
            if lane_idx() == 0 {
                shared.add(warp_idx()).store(sum);
            }
            sync_threads();
            if thread == 0 {
                let total = (0..4).map(|warp| shared.add(warp).load()).sum();
                output.add(block_idx_x() as u64).store(total);
            }
        }
    }
    let input: Vec<f32> = (0..5 * 128).map(pattern).collect();
    let wanted: Vec<f32> = input.chunks(128).map(|block| block.iter().sum()).collect();
    for seed in SEEDS {
        let mut output = vec![0f32; 5];
        let mut memory = GlobalMemory::new();
        let (input, result) = (memory.read_only(&input), memory.uninitialised(&mut output));
        let launch = Launch { grid_blocks: 5, block_threads: 128, shared_bytes: 16, seed };
        // SAFETY: the kernel's own contract.
        let report = launch.run(&mut memory, || unsafe { kernel(input, result) }).unwrap();
        assert_eq!(output, wanted);
        assert_eq!(report.counters.block_barriers, 5);
        assert_eq!(report.counters.shuffles, 5 * 4 * 5);
    }
}

#[test]
fn double_buffered_copies() {
    const TILES: u32 = 6;
    unsafe fn kernel(input: Global<u32>, output: Global<u32>) {
        // SAFETY: the launch below registers what is touched.
        unsafe {
            let thread = thread_idx_x();
            let shared = Shared::<u8>::dynamic();
            // Two buffers of 64 threads x 16 bytes.
            let start = |tile: u32| {
                if tile < TILES {
                    let source = input.add((tile * 256 + thread * 4) as u64).cast();
                    copy_async_16(shared.add(tile % 2 * 1024 + thread * 16), source, 16);
                }
                commit_async_copies();
            };
            start(0);
            let mut sum = 0;
            for tile in 0..TILES {
                start(tile + 1);
                wait_async_copies::<1>();
                sync_threads();
                let row = (63 - thread) * 16;
                sum += shared.add(tile % 2 * 1024 + row).cast::<[u32; 4]>().load().iter().sum::<u32>() * (tile + 1);
                sync_threads();
            }
            output.add(thread as u64).store(sum);
        }
    }
    let input: Vec<u32> = (0..TILES * 256).map(|index| index * 7 % 101).collect();
    let wanted: Vec<u32> = (0..64)
        .map(|thread| {
            let row = |tile: usize| &input[tile * 256 + (63 - thread) * 4..][..4];
            (0..TILES as usize).map(|tile| row(tile).iter().sum::<u32>() * (tile as u32 + 1)).sum()
        })
        .collect();
    for seed in SEEDS {
        let mut output = vec![0u32; 64];
        let mut memory = GlobalMemory::new();
        let (input, result) = (memory.read_only(&input), memory.uninitialised(&mut output));
        let launch = Launch { grid_blocks: 1, block_threads: 64, shared_bytes: 2048, seed };
        // SAFETY: the kernel's own contract.
        let report = launch.run(&mut memory, || unsafe { kernel(input, result) }).unwrap();
        assert_eq!(output, wanted);
        assert_eq!(report.counters.async_copy_bytes, TILES as u64 * 1024);
    }
}

#[test]
fn copies_fill_with_zeros() {
    for source_bytes in 0..=16u32 {
        let input: Vec<u8> = (1..=16).collect();
        // Aligned as the copy wants it.
        let words = [u128::from_le_bytes(input.clone().try_into().unwrap())];
        let mut output = [u128::MAX];
        let mut memory = GlobalMemory::new();
        let source = memory.read_only(&words);
        let result = memory.uninitialised(&mut output);
        let launch = Launch { grid_blocks: 1, block_threads: 32, shared_bytes: 16, seed: 0 };
        let kernel = || {
            if thread_idx_x() == 5 {
                let shared = Shared::<u8>::dynamic();
                // SAFETY: both memories have 16 aligned bytes.
                unsafe {
                    copy_async_16(shared, source.cast(), source_bytes);
                    commit_async_copies();
                    wait_async_copies::<0>();
                    result.cast::<[u32; 4]>().store(shared.cast::<[u32; 4]>().load());
                }
            }
        };
        launch.run(&mut memory, kernel).unwrap();
        let mut wanted = input;
        wanted[source_bytes as usize..].fill(0);
        assert_eq!(output[0].to_le_bytes()[..], wanted, "{source_bytes}");
    }
}

/// C = A * B for one 16 x 8 x 16 tile: A is stored by row, B by row, so A goes through `ldmatrix` and B through
/// its transposed form.
unsafe fn multiply<E: Element>(a: Global<[u32; 4]>, b: Global<[u32; 4]>, c: Global<[f32; 2]>) {
    // SAFETY: the launch registers a (16 x 16), b (16 x 16: two 16 x 8 tiles side by side) and c (16 x 16).
    unsafe {
        let (thread, shared) = (thread_idx_x(), Shared::<u8>::dynamic());
        shared.cast::<[u32; 4]>().add(thread).store(a.add(thread as u64).load());
        shared.cast::<[u32; 4]>().add(32 + thread).store(b.add(thread as u64).load());
        sync_threads();
        // Matrices in the order of a's registers: rows 0..8 then 8..16 of the left half, then the right half.
        let a = load_matrix_x4(shared.add(thread % 16 * 32 + thread / 16 * 16));
        // Matrices: rows 0..8 and 8..16 of the left tile, then of the right tile.
        let b = load_matrix_x4_transposed(shared.add(512 + thread % 16 * 32 + thread / 16 * 16));
        for tile in 0..2 {
            let mut sum = [0.5f32; 4];
            E::multiply_accumulate(&mut sum, a, [b[2 * tile], b[2 * tile + 1]]);
            let (row, pair) = (thread / 4, thread % 4 + 4 * tile as u32);
            c.add((row * 8 + pair) as u64).store([sum[0], sum[1]]);
            c.add(((row + 8) * 8 + pair) as u64).store([sum[2], sum[3]]);
        }
    }
}

fn matrix_product<E: Element>(encode: impl Fn(f32) -> u16, decode: impl Fn(u16) -> f64) {
    // 16-byte rows, so that the slices are aligned for vector loads.
    let matrix = |start: usize| -> Vec<[u64; 2]> {
        let value = |index: usize| encode(pattern(index + start) * 0.37) as u64;
        (0..32)
            .map(|row| {
                let word = |half: usize| (0..4).map(|i| value(8 * row + 4 * half + i) << (16 * i)).sum();
                [word(0), word(1)]
            })
            .collect()
    };
    let (a, b) = (matrix(0), matrix(1000));
    let element = |matrix: &[[u64; 2]], row: usize, column: usize| {
        let bits = matrix[row * 2 + column / 8][column % 8 / 4] >> (16 * (column % 4));
        decode(bits as u16)
    };
    for seed in SEEDS {
        let mut c = vec![0f32; 256];
        let mut memory = GlobalMemory::new();
        let (a_global, b_global) = (memory.read_only(&a).cast(), memory.read_only(&b).cast());
        let c_global = memory.uninitialised(&mut c).cast();
        let launch = Launch { grid_blocks: 1, block_threads: 32, shared_bytes: 1024, seed };
        // SAFETY: the kernel's own contract.
        let report = launch.run(&mut memory, || unsafe { multiply::<E>(a_global, b_global, c_global) }).unwrap();
        for row in 0..16 {
            for column in 0..16 {
                let product = |k: usize| element(&a, row, k) * element(&b, k, column);
                let wanted = 0.5 + (0..16).map(product).sum::<f64>();
                let found = c[row * 16 + column] as f64;
                assert!((found - wanted).abs() < 1e-4, "row {row}, column {column}: {found}, wanted {wanted}");
            }
        }
        assert_eq!((report.counters.mma, report.counters.load_matrix), (2, 2));
    }
}

#[test]
fn matrix_product_bf16() {
    matrix_product::<Bf16>(|x| bf16::from_f32(x).to_bits(), |bits| bf16::from_bits(bits).to_f64());
}

#[test]
fn matrix_product_f16() {
    matrix_product::<F16>(|x| f16::from_f32(x).to_bits(), |bits| f16::from_bits(bits).to_f64());
}

#[test]
fn collectives() {
    for seed in SEEDS {
        let mut output = vec![[0u32; 4]; 64];
        let mut memory = GlobalMemory::new();
        let result: Global<[u32; 4]> = memory.uninitialised(&mut output);
        let launch = Launch { grid_blocks: 1, block_threads: 64, shared_bytes: 0, seed };
        let kernel = || {
            let thread = thread_idx_x();
            // SAFETY: every lane comes here; each thread writes its own element.
            unsafe {
                let ballot = vote_ballot(thread.is_multiple_of(3));
                sync_warp();
                let words = [ballot, shuffle_u32(thread, 35), shuffle_xor_u32(thread, 5), warp_idx()];
                result.add(thread as u64).store(words);
            }
        };
        launch.run(&mut memory, kernel).unwrap();
        for (thread, words) in (0u32..).zip(&output) {
            let ballot =
                (0..32).filter(|lane| (thread / 32 * 32 + lane) % 3 == 0).fold(0, |mask, lane| mask | 1 << lane);
            assert_eq!(*words, [ballot, thread / 32 * 32 + 3, thread ^ 5, thread / 32]);
        }
    }
}

#[test]
fn named_barriers_join_producer_and_consumer() {
    const FULL: u32 = 1;
    const EMPTY: u32 = 2;
    for seed in SEEDS {
        let mut output = vec![0u32; 32];
        let mut memory = GlobalMemory::new();
        let result = memory.uninitialised(&mut output);
        let launch = Launch { grid_blocks: 1, block_threads: 96, shared_bytes: 128, seed };
        let kernel = || {
            let (warp, lane, shared) = (warp_idx(), lane_idx(), Shared::<u32>::dynamic());
            // SAFETY: warps 0 and 1 take turns on the buffer; warp 2 takes no part.
            unsafe {
                match warp {
                    0 => {
                        for round in 0..4 {
                            shared.add(lane).store(10 * round + lane);
                            sync_named_barrier(FULL, 64);
                            sync_named_barrier(EMPTY, 64);
                        }
                    }
                    1 => {
                        let mut sum = 0;
                        for _ in 0..4 {
                            sync_named_barrier(FULL, 64);
                            sum += shared.add(lane ^ 1).load();
                            sync_named_barrier(EMPTY, 64);
                        }
                        result.add(lane as u64).store(sum);
                    }
                    _ => {}
                }
            }
        };
        let report = launch.run(&mut memory, kernel).unwrap();
        assert_eq!(report.counters.named_barriers, 8);
        assert_eq!(output, (0..32u32).map(|lane| 60 + 4 * (lane ^ 1)).collect::<Vec<_>>());
    }
}
