//! What a launch is said to have cost, against values worked out by hand.
use simt::{
    block::sync_threads,
    emulator::{Counters, GlobalMemory, Launch},
    global::Global,
    shared::Shared,
    tensor::{load_matrix_x4, load_matrix_x4_transposed},
    thread::{lane_idx, thread_idx_x},
    warp::sync_warp,
};

/// Runs one warp with 16 KiB of shared memory, all of it written before, without conflicts.
fn warp(kernel: impl Fn(Shared<u8>)) -> Counters {
    let launch = Launch { grid_blocks: 1, block_threads: 32, shared_bytes: 16 << 10, seed: 3 };
    let fill_and_run = || {
        let shared = Shared::<u8>::dynamic();
        for row in 0..32 {
            // SAFETY: 32 rows of 32 lanes x 16 bytes are the 16 KiB.
            unsafe { shared.cast::<[u32; 4]>().add(row * 32 + lane_idx()).store([0; 4]) };
        }
        // SAFETY: the whole warp comes here.
        unsafe { sync_warp() };
        kernel(shared);
    };
    launch.run(&mut GlobalMemory::new(), fill_and_run).unwrap().counters
}

#[test]
fn bank_conflicts_of_loads() {
    // Words between neighbouring lanes, and passes beyond the first.
    for (stride, wanted) in [(0, 0), (1, 0), (2, 1), (3, 0), (4, 3), (8, 7), (32, 31), (33, 0)] {
        let counters = warp(|shared| {
            // SAFETY: inside the 4096 words, since 31 * 33 < 4096.
            unsafe { shared.cast::<u32>().add(lane_idx() * stride).load() };
        });
        assert_eq!(counters.shared_bank_conflicts, wanted, "stride of {stride} words");
    }
}

#[test]
fn bank_conflicts_of_other_widths() {
    // Two lanes share a word: one pass.
    let counters = warp(|shared| {
        // SAFETY: inside the shared memory.
        unsafe { shared.cast::<u16>().add(lane_idx()).load() };
    });
    assert_eq!(counters.shared_bank_conflicts, 0);
    // 8 bytes go in two phases of 16 lanes; 16 bytes apart, lanes 0 and 8 of a phase collide, so do 1 and 9, ...
    for (stride_bytes, wanted) in [(8, 0), (16, 2)] {
        let counters = warp(|shared| {
            // SAFETY: inside the shared memory.
            unsafe { shared.add(lane_idx() * stride_bytes).cast::<[u32; 2]>().load() };
        });
        assert_eq!(counters.shared_bank_conflicts, wanted);
    }
    // 16 bytes go in four phases of 8 lanes; 128 bytes apart, all 8 hit banks 0 to 3: 7 more passes each.
    for (stride_bytes, wanted) in [(16, 0), (128, 28)] {
        let counters = warp(|shared| {
            // SAFETY: inside the shared memory.
            unsafe { shared.add(lane_idx() * stride_bytes).cast::<[f32; 4]>().store([1.0; 4]) };
        });
        assert_eq!(counters.shared_bank_conflicts, wanted);
    }
}

#[test]
fn bank_conflicts_of_ldmatrix() {
    // Rows of 128 bytes, one chunk of 16 bytes from each: straight down a column all 8 rows of a matrix fall into the
    // same four banks; xor-swizzled they cover all 32.
    let column = |swizzled: bool| {
        warp(|shared| {
            let row = lane_idx();
            let chunk = if swizzled { 5 ^ (row % 8) } else { 5 };
            // SAFETY: 32 rows of 128 bytes are inside; the warp is ordered and whole.
            unsafe {
                load_matrix_x4(shared.add(row * 128 + chunk * 16));
                load_matrix_x4_transposed(shared.add(row * 128 + chunk * 16));
            }
        })
    };
    assert_eq!(column(false).load_matrix_bank_conflicts, 2 * 4 * 7);
    assert_eq!(column(true).load_matrix_bank_conflicts, 0);
    assert_eq!(column(true).load_matrix, 2);
    // Padding each row by 16 bytes does the same as the swizzle.
    let padded = warp(|shared| {
        // SAFETY: 32 rows of 144 bytes are inside; the warp is ordered and whole.
        unsafe { load_matrix_x4(shared.add(lane_idx() * 144)) };
    });
    assert_eq!(padded.load_matrix_bank_conflicts, 0);
    // Fewer distinct rows: the same words serve several lanes.
    let two_rows = warp(|shared| {
        // SAFETY: two rows of 128 bytes are inside; the warp is ordered and whole.
        unsafe { load_matrix_x4(shared.add(lane_idx() % 2 * 128)) };
    });
    assert_eq!(two_rows.load_matrix_bank_conflicts, 4);
}

/// Runs 64 threads over 64 KiB of global memory.
fn global(kernel: impl Fn(Global<u32>)) -> Counters {
    let mut data = vec![[0u64; 2]; 4096];
    let mut memory = GlobalMemory::new();
    let data = memory.writable(&mut data).cast();
    let launch = Launch { grid_blocks: 1, block_threads: 64, shared_bytes: 0, seed: 9 };
    launch.run(&mut memory, || kernel(data)).unwrap().counters
}

#[test]
fn sectors_of_loads() {
    // Words between neighbouring threads, and 32-byte sectors for 64 threads.
    for (stride, wanted) in [(0, 2), (1, 8), (2, 16), (8, 64), (100, 64)] {
        let counters = global(|data| {
            // SAFETY: inside the 16384 words, since 63 * 100 < 16384.
            unsafe { data.add((thread_idx_x() * stride) as u64).load() };
        });
        assert_eq!(counters.global_sectors_read, wanted, "stride of {stride} words");
        assert_eq!(counters.global_sectors_written, 0);
    }
    let vectors = global(|data| {
        // SAFETY: inside the region.
        unsafe { data.cast::<[u32; 4]>().add(thread_idx_x() as u64).load() };
    });
    assert_eq!(vectors.global_sectors_read, 64 * 16 / 32);
}

#[test]
fn sectors_of_stores() {
    let counters = global(|data| {
        for row in 0..5 {
            // SAFETY: inside the region, each word written by one thread.
            unsafe { data.add((row * 64 + thread_idx_x()) as u64).store(row) };
        }
    });
    assert_eq!((counters.global_sectors_read, counters.global_sectors_written), (0, 5 * 8));
}

#[test]
fn sectors_where_lanes_part() {
    let counters = global(|data| {
        let thread = thread_idx_x() as u64;
        // Threads leave the loop after 1 to 4 rounds: round r is read by the lanes with lane % 4 >= r, and a sector
        // holds 8 lanes, so each round still reads all of its sectors.
        for round in 0..=thread % 4 {
            // SAFETY: inside the region.
            unsafe { data.add(round * 64 + thread).load() };
        }
        // Odd lanes skip this one: the same sectors.
        if thread.is_multiple_of(2) {
            // SAFETY: inside the region.
            unsafe { data.add(1024 + thread).load() };
        }
        // SAFETY: inside the region.
        unsafe { data.add(2048 + thread).load() };
    });
    assert_eq!(counters.global_sectors_read, 4 * 8 + 8 + 8);
}

#[test]
fn a_rendezvous_parts_instructions() {
    let counters = global(|data| {
        for _ in 0..3 {
            // SAFETY: inside the region, and every thread comes to the barrier.
            unsafe {
                data.load();
                sync_threads();
            }
        }
    });
    // No cache is modelled: two warps read the sector three times.
    assert_eq!(counters.global_sectors_read, 6);
    assert_eq!(counters.block_barriers, 3);
}
