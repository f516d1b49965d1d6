//! Kernels of one warpgroup or two with one planted bug each in their use of `wgmma`. Lines are found by the comment
//! that marks them.
#![expect(clippy::undocumented_unsafe_blocks, reason = "these kernels break the contracts on purpose")]
mod marked;

use simt::{
    asynchronous::{commit_async_copies, copy_async_16, fence_proxy_async, wait_async_copies},
    block::{sync_named_barrier, sync_threads},
    emulator::{AccessKind, EmulatorError, GlobalMemory, Launch, Operation},
    global::Global,
    number::Bf16,
    shared::Shared,
    thread::{thread_idx_x, warp_idx},
    warp::sync_warp,
    wgmma::{self, Descriptor, KMajor, Swizzle, multiply_shared},
};

const SEEDS: [u64; 4] = [0, 1, 0xdead_beef, u64::MAX];

/// A 64 x 64 tile of bf16; it is both operands.
const TILE_BYTES: u32 = 8 << 10;

fn line_of(marker: &str) -> u32 {
    marked::line_of(include_str!("planted_wgmma.rs"), marker)
}

/// Runs a block of `threads` with two tiles of shared memory.
fn run(threads: u32, seed: u64, kernel: impl Fn()) -> EmulatorError {
    let launch = Launch { grid_blocks: 1, block_threads: threads, shared_bytes: 2 * TILE_BYTES, seed };
    launch.run(&mut GlobalMemory::new(), kernel).unwrap_err()
}

/// Each thread of the block writes its share of the tile.
#[track_caller]
unsafe fn fill(tile: Shared<u8>) {
    for line in (thread_idx_x()..TILE_BYTES / 16).step_by(128) {
        unsafe { tile.cast::<[u32; 4]>().add(line).store([0x3f80_3f80; 4]) };
    }
}

fn operand(tile: Shared<u8>) -> Descriptor<Bf16, KMajor> {
    Descriptor::new(tile, 0, 1024, Swizzle::Bytes128)
}

type Accumulators = [[f32; 4]; 8];

#[test]
fn missing_proxy_fence() {
    for seed in SEEDS {
        let error = run(128, seed, || unsafe {
            let tile = Shared::<u8>::dynamic();
            fill(tile); // unfenced store
            sync_threads();
            let mut c = Accumulators::default();
            wgmma::fence();
            multiply_shared(&mut c, operand(tile), operand(tile), false); // unfenced product
        });
        let EmulatorError::MissingProxyFence { write, read } = error else { panic!("{error}") };
        assert_eq!((write.kind, write.place.location.line()), (AccessKind::Store, line_of("unfenced store")));
        assert_eq!((read.kind, read.place.location.line()), (AccessKind::Wgmma, line_of("unfenced product")));
    }
}

#[test]
fn proxy_fence_after_the_barrier() {
    let error = run(128, 0, || unsafe {
        let tile = Shared::<u8>::dynamic();
        fill(tile);
        sync_threads();
        fence_proxy_async();
        let mut c = Accumulators::default();
        wgmma::fence();
        multiply_shared(&mut c, operand(tile), operand(tile), false);
    });
    assert!(matches!(error, EmulatorError::MissingProxyFence { .. }), "{error}");
}

#[test]
fn proxy_fence_before_the_last_store() {
    let error = run(128, 0, || unsafe {
        let tile = Shared::<u8>::dynamic();
        fill(tile);
        fence_proxy_async();
        if thread_idx_x() == 72 {
            tile.add_bytes(16 * 72).cast::<u32>().store(0); // late store
        }
        sync_threads();
        let mut c = Accumulators::default();
        wgmma::fence();
        multiply_shared(&mut c, operand(tile), operand(tile), false);
    });
    let EmulatorError::MissingProxyFence { write, .. } = error else { panic!("{error}") };
    assert_eq!((write.place.thread, write.place.location.line()), (72, line_of("late store")));
}

#[test]
fn unfenced_asynchronous_copies() {
    let source = vec![0u128; TILE_BYTES as usize / 16];
    for fenced in [true, false] {
        let mut memory = GlobalMemory::new();
        let source: Global<u8> = memory.read_only(&source).cast();
        let launch = Launch { grid_blocks: 1, block_threads: 128, shared_bytes: TILE_BYTES, seed: 0 };
        let result = launch.run(&mut memory, || unsafe {
            let tile = Shared::<u8>::dynamic();
            for line in (thread_idx_x()..TILE_BYTES / 16).step_by(128) {
                copy_async_16(tile.add_bytes(16 * line), source.add(16 * line as u64), 16); // unfenced copy
            }
            commit_async_copies();
            wait_async_copies::<0>();
            if fenced {
                fence_proxy_async();
            }
            sync_threads();
            let mut c = Accumulators::default();
            wgmma::fence();
            multiply_shared(&mut c, operand(tile), operand(tile), false);
            wgmma::commit_group();
            wgmma::wait_group::<0, _>(&mut c);
        });
        match result {
            Ok(_) => assert!(fenced),
            Err(EmulatorError::MissingProxyFence { write, .. }) => {
                assert!(!fenced);
                assert_eq!(
                    (write.kind, write.place.location.line()),
                    (AccessKind::AsyncCopy, line_of("unfenced copy"))
                );
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn poisoned_operand() {
    let error = run(128, 0, || unsafe {
        let tile = Shared::<u8>::dynamic();
        fill(tile);
        fence_proxy_async();
        sync_threads();
        let mut c = Accumulators::default();
        wgmma::fence();
        multiply_shared(&mut c, operand(tile), operand(tile.add_bytes(1024)), false); // poisoned product
    });
    let EmulatorError::Uninitialised { access, byte } = error else { panic!("{error}") };
    assert_eq!((access.kind, access.place.location.line()), (AccessKind::Wgmma, line_of("poisoned product")));
    assert_eq!(byte, (Shared::<u8>::dynamic().address() + TILE_BYTES) as u64);
}

/// Fills a tile, fences, and starts one product on it. Its group is not committed.
#[track_caller]
unsafe fn started(c: &mut Accumulators) -> Shared<u8> {
    let tile = Shared::<u8>::dynamic();
    unsafe {
        if thread_idx_x() < 128 {
            fill(tile);
        }
        fence_proxy_async();
        sync_threads();
        wgmma::fence();
        multiply_shared(c, operand(tile), operand(tile), false);
    }
    tile
}

#[test]
fn missing_wait() {
    for seed in SEEDS {
        let error = run(128, seed, || unsafe {
            let mut c = Accumulators::default();
            let tile = started(&mut c); // not waited for
            wgmma::commit_group();
            tile.add_bytes(TILE_BYTES).cast::<f32>().add(thread_idx_x()).store(c[7][3]); // early read
        });
        let EmulatorError::AccumulatorsInFlight { product, place } = error else { panic!("{error}") };
        assert_eq!(product.location.line(), line_of("not waited for"));
        assert_eq!(place.location.line(), line_of("early read"));
    }
}

#[test]
fn a_product_nobody_waits_for() {
    let error = run(128, 0, || unsafe {
        started(&mut Accumulators::default()); // abandoned
        wgmma::commit_group();
    });
    let EmulatorError::NeverWaited { kind: AccessKind::Wgmma, place } = error else { panic!("{error}") };
    assert_eq!(place.location.line(), line_of("abandoned"));
}

#[test]
fn a_wait_that_is_too_weak() {
    for committed in [true, false] {
        let error = run(128, 0, || unsafe {
            let mut c = Accumulators::default();
            started(&mut c);
            if committed {
                wgmma::commit_group();
                wgmma::wait_group::<1, _>(&mut c); // weak wait
            } else {
                wgmma::wait_group::<0, _>(&mut c); // uncommitted wait
            }
        });
        let EmulatorError::AccumulatorsInFlight { place, .. } = error else { panic!("{error}") };
        let marker = if committed { "weak wait" } else { "uncommitted wait" };
        assert_eq!(place.location.line(), line_of(marker));
    }
}

#[test]
fn accumulators_changed_in_flight() {
    let error = run(128, 0, || unsafe {
        let mut c = Accumulators::default();
        let tile = started(&mut c);
        c[3][1] *= 0.5;
        c[4][0] = 0.0;
        multiply_shared(&mut c, operand(tile), operand(tile), true); // changed
    });
    let EmulatorError::AccumulatorsInFlight { place, .. } = error else { panic!("{error}") };
    assert_eq!(place.location.line(), line_of("changed"));
}

#[test]
fn operand_overwritten_before_the_wait() {
    for seed in SEEDS {
        // A barrier between product and store does not help: the product may read until its wait.
        let error = run(256, seed, || unsafe {
            let mut c = Accumulators::default();
            if warp_idx() < 4 {
                let tile = Shared::<u8>::dynamic();
                fill(tile);
                fence_proxy_async();
                sync_named_barrier(1, 128);
                wgmma::fence();
                multiply_shared(&mut c, operand(tile), operand(tile), false); // overwritten product
                wgmma::commit_group();
            }
            sync_threads();
            if thread_idx_x() == 200 {
                Shared::<u8>::dynamic().add_bytes(4096).cast::<u32>().store(0); // overwriting store
            }
            sync_threads();
            if warp_idx() < 4 {
                wgmma::wait_group::<0, _>(&mut c);
            }
        });
        let EmulatorError::UnfinishedProduct { product, access } = error else { panic!("{error}") };
        assert_eq!(product.location.line(), line_of("overwritten product"));
        assert_eq!((access.place.thread, access.place.location.line()), (200, line_of("overwriting store")));
    }
}

#[test]
fn operand_overwritten_after_the_wait_without_a_barrier() {
    let mut found = [false; 2];
    for seed in 0..32 {
        let error = run(128, seed, || unsafe {
            let mut c = Accumulators::default();
            let tile = started(&mut c); // raced product
            wgmma::commit_group();
            wgmma::wait_group::<0, _>(&mut c);
            // The warps that have not waited yet still read the bytes.
            if thread_idx_x() == 5 {
                tile.cast::<u32>().store(0); // racing store
            }
        });
        // One or the other, as the warps happen to run.
        match error {
            EmulatorError::UnfinishedProduct { product, access } => {
                assert_eq!(product.location.line(), line_of("raced product"));
                assert_eq!(access.place.location.line(), line_of("racing store"));
                found[0] = true;
            }
            EmulatorError::DataRace { first, second, .. } => {
                assert_eq!((first.kind, first.place.location.line()), (AccessKind::Wgmma, line_of("raced product")));
                assert_eq!(second.place.location.line(), line_of("racing store"));
                found[1] = true;
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(found, [true, true]);
}

/// The store is ordered after the product's start, not after its wait.
#[test]
fn operand_overwritten_around_the_wait() {
    let mut found = [false; 2];
    for seed in 0..32 {
        let error = run(160, seed, || unsafe {
            let mut c = Accumulators::default();
            if warp_idx() < 4 {
                let tile = Shared::<u8>::dynamic();
                fill(tile);
                fence_proxy_async();
                sync_named_barrier(1, 128);
                wgmma::fence();
                multiply_shared(&mut c, operand(tile), operand(tile), false); // product before the barrier
                wgmma::commit_group();
            }
            sync_threads();
            if warp_idx() < 4 {
                wgmma::wait_group::<0, _>(&mut c);
            } else {
                sync_warp();
                if thread_idx_x() == 130 {
                    Shared::<u8>::dynamic().cast::<u32>().store(0); // store after the barrier
                }
            }
        });
        let lines = match error {
            EmulatorError::UnfinishedProduct { product, access } => {
                found[0] = true;
                [product, access.place]
            }
            EmulatorError::DataRace { first, second, .. } => {
                found[1] = true;
                [first.place, second.place]
            }
            other => panic!("{other}"),
        };
        let wanted = ["product before the barrier", "store after the barrier"].map(line_of);
        assert_eq!(lines.map(|place| place.location.line()), wanted);
    }
    assert_eq!(found, [true, true]);
}

#[test]
fn missing_register_fence() {
    let error = run(128, 0, || unsafe {
        let mut c = Accumulators::default();
        let tile = started(&mut c);
        wgmma::commit_group();
        wgmma::wait_group::<0, _>(&mut c);
        c[0][0] *= 2.0;
        multiply_shared(&mut c, operand(tile), operand(tile), true); // without a fence
    });
    let EmulatorError::WgmmaNotFenced { place } = error else { panic!("{error}") };
    assert_eq!(place.location.line(), line_of("without a fence"));
}

#[test]
fn a_warp_that_skips() {
    for seed in SEEDS {
        let error = run(128, seed, || unsafe {
            let tile = Shared::<u8>::dynamic();
            fill(tile);
            fence_proxy_async();
            sync_threads();
            let mut c = Accumulators::default();
            wgmma::fence();
            if warp_idx() != 2 {
                multiply_shared(&mut c, operand(tile), operand(tile), false); // three warps
            }
            wgmma::commit_group();
            wgmma::wait_group::<0, _>(&mut c);
            sync_threads(); // one warp
        });
        let EmulatorError::Deadlock { waiting, .. } = error else { panic!("{error}") };
        let points: Vec<_> = waiting.iter().map(|group| (group.point, group.threads.len())).collect();
        let [(Some((three, at)), 96), (Some((Operation::SyncThreads, other)), 32)] = points[..] else {
            panic!("{waiting:?}")
        };
        assert_eq!((three, at.line()), (Operation::Wgmma { columns: 64 }, line_of("three warps")));
        assert_eq!(other.line(), line_of("one warp"));
    }
}

#[test]
fn warps_at_different_products() {
    let error = run(128, 0, || unsafe {
        let tile = Shared::<u8>::dynamic();
        fill(tile);
        fence_proxy_async();
        sync_threads();
        let mut c = Accumulators::default();
        wgmma::fence();
        if warp_idx() == 3 {
            multiply_shared(&mut c, operand(tile), operand(tile), false); // odd one out
        } else {
            multiply_shared(&mut c, operand(tile), operand(tile), true);
        }
    });
    let EmulatorError::WarpgroupDivergence { warpgroup: 0, waiting, .. } = error else { panic!("{error}") };
    let odd = waiting.iter().find(|group| group.threads[0] == 96).unwrap();
    assert_eq!(odd.point.unwrap().1.line(), line_of("odd one out"));
}

#[test]
fn operands_that_differ() {
    let error = run(128, 0, || unsafe {
        let tile = Shared::<u8>::dynamic();
        fill(tile);
        fence_proxy_async();
        sync_threads();
        let mut c = Accumulators::default();
        wgmma::fence();
        let b = operand(tile).advance_bytes(if thread_idx_x() == 90 { 32 } else { 0 });
        multiply_shared(&mut c, operand(tile), b, false);
    });
    assert!(matches!(error, EmulatorError::WgmmaNotUniform { field: "b", place } if place.thread == 90), "{error}");
}

#[test]
fn half_a_warpgroup() {
    let error = run(64, 0, || unsafe {
        wgmma::fence();
        let tile = Shared::<u8>::dynamic();
        multiply_shared(&mut Accumulators::default(), operand(tile), operand(tile), false);
    });
    assert!(matches!(error, EmulatorError::WarpgroupDivergence { .. }), "{error}");
}
