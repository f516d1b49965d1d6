//! Kernels with one planted bug each in their use of bulk copies. Lines are found by the comment that marks them.
#![expect(clippy::undocumented_unsafe_blocks, reason = "these kernels break the contracts on purpose")]
mod marked;

use simt::{
    asynchronous::fence_proxy_async,
    block::sync_threads,
    bulk::{
        TensorMap, commit_bulk_stores, load_bulk, load_tensor_box, store_bulk, wait_bulk_stores, wait_bulk_stores_read,
    },
    emulator::{AccessKind, EmulatorError, GlobalMemory, Launch, Space, TensorMapDescription},
    global::Global,
    mbarrier::{Mbarrier, fence_mbarrier_initialisation},
    number::Bf16,
    shared::Shared,
    thread::{thread_idx_x, warp_idx},
    wgmma::{self, Descriptor, KMajor, Swizzle, multiply_shared},
};

const SEEDS: [u64; 6] = [0, 1, 2, 3, 0xdead_beef, u64::MAX];

/// A 64 x 64 tile of 16-bit values.
const TILE_BYTES: u32 = 8 << 10;

fn line_of(marker: &str) -> u32 {
    marked::line_of(include_str!("planted_bulk.rs"), marker)
}

/// What a kernel gets: a tensor of 64 x 128 values with its map, and as much writable memory.
#[derive(Clone, Copy)]
struct Memory {
    source: Global<u8>,
    map: Global<TensorMap>,
    target: Global<u8>,
}

fn run(threads: u32, seed: u64, kernel: impl Fn(Memory)) -> Result<(), EmulatorError> {
    let input = vec![0u128; 2 * TILE_BYTES as usize / 16];
    let mut output = input.clone();
    let mut memory = GlobalMemory::new();
    let source: Global<u8> = memory.read_only(&input).cast();
    let maps = [describe(source.address()).encode().unwrap()];
    let map = memory.read_only(&maps);
    let target = memory.writable(&mut output).cast();
    let launch = Launch { grid_blocks: 1, block_threads: threads, shared_bytes: 1024 + 2 * TILE_BYTES, seed };
    launch.run(&mut memory, || kernel(Memory { source, map, target })).map(|_| ())
}

fn describe(address: u64) -> TensorMapDescription<'static> {
    TensorMapDescription {
        address,
        element_bytes: 2,
        extents: &[64, 128],
        strides_bytes: &[128],
        box_extents: &[64, 64],
        element_strides: &[1, 1],
        swizzle: Swizzle::Bytes128,
    }
}

fn barrier(index: u32) -> Mbarrier {
    Mbarrier::new(Shared::<u64>::dynamic().add(index))
}

fn tile() -> Shared<u8> {
    Shared::<u8>::dynamic().add_bytes(1024)
}

/// Makes two barriers of one arrival each.
unsafe fn make_barriers() {
    unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(1);
            barrier(1).initialise(1);
            fence_mbarrier_initialisation();
        }
        sync_threads();
    }
}

#[test]
fn a_missing_wait() {
    for seed in SEEDS {
        for waits_elsewhere in [false, true] {
            let error = run(64, seed, |memory| unsafe {
                make_barriers();
                if thread_idx_x() == 0 {
                    barrier(0).arrive_and_expect_bytes(TILE_BYTES);
                    load_tensor_box(tile(), memory.map, [0, 0], barrier(0)); // unwaited copy
                }
                // That another thread has waited is no wait of this one.
                if waits_elsewhere && thread_idx_x() == 1 {
                    barrier(0).wait(0);
                }
                if thread_idx_x() == 40 {
                    tile().cast::<u32>().load(); // unwaited load
                }
            });
            let (copy, access) = match error.unwrap_err() {
                EmulatorError::UnfinishedCopy { copy, access } => (copy, access),
                EmulatorError::DataRace { first, second, .. } => (first, second),
                // The load ran before the copy.
                EmulatorError::Uninitialised { access, .. } => {
                    assert_eq!(access.place.location.line(), line_of("unwaited load"));
                    continue;
                }
                other => panic!("{other}"),
            };
            assert_eq!((copy.kind, copy.place.thread), (AccessKind::BulkCopy, 0));
            assert_eq!(copy.place.location.line(), line_of("unwaited copy"));
            assert_eq!(access.place.location.line(), line_of("unwaited load"));
        }
    }
}

#[test]
fn a_copy_nobody_waits_for() {
    let error = run(32, 0, |memory| unsafe {
        make_barriers();
        if thread_idx_x() == 0 {
            barrier(0).arrive_and_expect_bytes(16);
            load_bulk(tile(), memory.source, 16, barrier(0)); // abandoned
        }
    });
    let EmulatorError::NeverWaited { kind: AccessKind::BulkCopy, place } = error.unwrap_err() else { panic!() };
    assert_eq!(place.location.line(), line_of("abandoned"));
}

#[test]
fn wrong_bytes_announced() {
    for seed in SEEDS {
        for announced in [TILE_BYTES - 16, TILE_BYTES + 16, 0] {
            let error = run(32, seed, |memory| unsafe {
                make_barriers();
                if thread_idx_x() == 0 {
                    barrier(0).arrive_and_expect_bytes(announced); // announced
                    load_tensor_box(tile(), memory.map, [0, 0], barrier(0)); // copied
                }
                barrier(0).wait(0); // waited
            });
            // With nothing announced the phase may have passed before the copy began.
            let EmulatorError::MbarrierBytes { expected, copied, place, .. } = error.unwrap_err() else {
                assert_eq!(announced, 0);
                continue;
            };
            assert_eq!((expected, copied), (announced as u64, TILE_BYTES as u64));
            let marker = if announced > TILE_BYTES { "waited" } else { "copied" };
            assert_eq!(place.location.line(), line_of(marker));
        }
    }
}

/// One thread fills a stage twice, a warpgroup multiplies what it holds.
fn refilled(seed: u64, waits: bool) -> Result<(), EmulatorError> {
    run(160, seed, |memory| unsafe {
        make_barriers();
        if thread_idx_x() == 128 {
            for round in 0..2 {
                if waits {
                    barrier(1).wait(round ^ 1);
                }
                barrier(0).arrive_and_expect_bytes(TILE_BYTES);
                load_tensor_box(tile(), memory.map, [0, 64 * round as i32], barrier(0)); // refill
            }
        } else if warp_idx() < 4 {
            let operand = Descriptor::<Bf16, KMajor>::new(tile(), 0, 1024, Swizzle::Bytes128);
            for round in 0..2 {
                barrier(0).wait(round);
                let mut c = [[0f32; 4]; 8];
                wgmma::fence();
                multiply_shared(&mut c, operand, operand, false); // refilled product
                wgmma::commit_group();
                wgmma::wait_group::<0, _>(&mut c);
                // All four warps have waited for the product before one thread gives the stage back.
                simt::block::sync_named_barrier(1, 128);
                if thread_idx_x() == 0 {
                    barrier(1).arrive();
                }
            }
        }
    })
}

#[test]
fn a_stage_refilled_before_it_is_released() {
    let mut races = 0;
    for seed in 0..16 {
        refilled(seed, true).unwrap();
        let lines = match refilled(seed, false).unwrap_err() {
            EmulatorError::DataRace { first, second, .. } => [first.place, second.place],
            EmulatorError::UnfinishedProduct { product, access } => [product, access.place],
            // The second filling met the first.
            EmulatorError::UnfinishedCopy { copy, access } => {
                assert_eq!([copy.place, access.place].map(|place| place.location.line()), [line_of("refill"); 2]);
                continue;
            }
            EmulatorError::MbarrierOverrun { .. } => continue,
            other => panic!("{other}"),
        };
        assert!(lines.iter().any(|place| place.location.line() == line_of("refill")), "{lines:?}");
        races += 1;
    }
    assert!(races > 0);
}

#[test]
fn a_barrier_whose_making_is_not_fenced() {
    let error = run(32, 0, |memory| unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(1); // unfenced barrier
            barrier(0).arrive_and_expect_bytes(16);
            load_bulk(tile(), memory.source, 16, barrier(0)); // hasty copy
        }
    });
    let EmulatorError::MissingProxyFence { write, read } = error.unwrap_err() else { panic!() };
    assert_eq!((write.kind, write.place.location.line()), (AccessKind::Mbarrier, line_of("unfenced barrier")));
    assert_eq!(read.place.location.line(), line_of("hasty copy"));
}

#[test]
fn a_copy_over_unfenced_stores() {
    for fenced in [true, false] {
        let error = run(32, 0, |memory| unsafe {
            make_barriers();
            if thread_idx_x() == 0 {
                tile().cast::<u32>().store(7); // covered store
                if fenced {
                    fence_proxy_async();
                }
                barrier(0).arrive_and_expect_bytes(16);
                load_bulk(tile(), memory.source, 16, barrier(0));
                barrier(0).wait(0);
            }
        });
        match error {
            Ok(()) => assert!(fenced),
            Err(EmulatorError::MissingProxyFence { write, .. }) => {
                assert!(!fenced);
                assert_eq!(write.place.location.line(), line_of("covered store"));
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn a_tensor_larger_than_its_memory() {
    // The tensor's second half is past the end but for 16 bytes.
    let input = vec![0u128; TILE_BYTES as usize / 16 + 1];
    let mut memory = GlobalMemory::new();
    let source = memory.read_only(&input);
    let maps = [describe(source.address()).encode().unwrap()];
    let map: Global<TensorMap> = memory.read_only(&maps);
    let launch = Launch { grid_blocks: 1, block_threads: 32, shared_bytes: 1024 + TILE_BYTES, seed: 0 };
    let error = launch.run(&mut memory, || unsafe {
        make_barriers();
        if thread_idx_x() == 0 {
            load_tensor_box(tile(), map, [0, 64], barrier(0)); // outside
        }
    });
    let EmulatorError::OutOfBounds { access, .. } = error.unwrap_err() else { panic!() };
    assert_eq!((access.space, access.place.location.line()), (Space::Global, line_of("outside")));
    assert_eq!(access.address, source.address() + TILE_BYTES as u64);
}

#[test]
fn impossible_copies() {
    let error = |copy: unsafe fn(Memory)| {
        run(32, 0, |memory| unsafe {
            make_barriers();
            if thread_idx_x() == 0 {
                copy(memory);
            }
        })
        .unwrap_err()
    };
    let rank = error(|memory| unsafe { load_tensor_box(tile(), memory.map, [0, 0, 0], barrier(0)) });
    assert!(matches!(rank, EmulatorError::TensorRank { found: 3, wanted: 2, .. }), "{rank}");
    let no_map = error(|memory| unsafe { load_tensor_box(tile(), memory.target.cast(), [0, 0], barrier(0)) });
    assert!(matches!(no_map, EmulatorError::NoTensorMap { .. } | EmulatorError::Misaligned { .. }), "{no_map}");
    let askew = error(|memory| unsafe { load_tensor_box(tile().add_bytes(128), memory.map, [0, 0], barrier(0)) });
    assert!(matches!(askew, EmulatorError::Misaligned { alignment: 1024, .. }), "{askew}");
    let size = error(|memory| unsafe { load_bulk(tile(), memory.source, 24, barrier(0)) });
    assert!(matches!(size, EmulatorError::BulkSize { bytes: 24, .. }), "{size}");
    let end = error(|memory| unsafe { load_bulk(tile(), memory.source, 2 * TILE_BYTES + 16, barrier(0)) });
    assert!(matches!(end, EmulatorError::OutOfBounds { .. }), "{end}");
    let missing = error(|memory| unsafe { load_bulk(tile(), memory.source, 16, barrier(2)) });
    assert!(matches!(missing, EmulatorError::MbarrierMissing { .. }), "{missing}");
    let read_only = error(|memory| unsafe {
        tile().cast::<[u32; 4]>().store([0; 4]);
        fence_proxy_async();
        store_bulk(memory.source, tile(), 16);
    });
    assert!(matches!(read_only, EmulatorError::ReadOnly { .. }), "{read_only}");
}

/// Thread 0 writes 16 bytes, fences them unless told not to, and starts to store them.
#[track_caller]
unsafe fn stored(memory: Memory, fenced: bool) {
    unsafe {
        tile().cast::<[u32; 4]>().store([1; 4]);
        if fenced {
            fence_proxy_async();
        }
        store_bulk(memory.target, tile(), 16);
        commit_bulk_stores();
    }
}

#[test]
fn broken_stores() {
    let error = |kernel: unsafe fn(Memory)| {
        run(32, 0, |memory| unsafe {
            if thread_idx_x() == 0 {
                kernel(memory);
            }
        })
    };
    error(|memory| unsafe {
        stored(memory, true);
        wait_bulk_stores_read::<0>();
        tile().cast::<u32>().store(2);
        wait_bulk_stores::<0>();
        assert_eq!(memory.target.cast::<u32>().load(), 1);
    })
    .unwrap();
    let unfenced = error(|memory| unsafe { stored(memory, false) });
    assert!(matches!(unfenced, Err(EmulatorError::MissingProxyFence { .. })), "{unfenced:?}");
    let overwritten = error(|memory| unsafe {
        stored(memory, true); // overwritten source
        tile().cast::<u32>().store(2); // overwriting store
    });
    let Err(EmulatorError::UnfinishedSource { copy, access }) = overwritten else { panic!("{overwritten:?}") };
    assert_eq!(copy.location.line(), line_of("overwritten source"));
    assert_eq!(access.place.location.line(), line_of("overwriting store"));
    let early = error(|memory| unsafe {
        stored(memory, true);
        wait_bulk_stores_read::<0>();
        memory.target.cast::<u32>().load();
    });
    assert!(matches!(early, Err(EmulatorError::UnfinishedCopy { .. })), "{early:?}");
    let abandoned = error(|memory| unsafe { stored(memory, true) });
    assert!(matches!(abandoned, Err(EmulatorError::NeverWaited { kind: AccessKind::BulkCopy, .. })), "{abandoned:?}");
}

#[test]
fn a_source_overwritten_in_flight() {
    let error = run(32, 0, |memory| unsafe {
        make_barriers();
        if thread_idx_x() == 0 {
            barrier(0).arrive_and_expect_bytes(32);
            load_bulk(tile(), memory.target, 32, barrier(0)); // in flight
            memory.target.add(16).cast::<u32>().store(1); // too early
        }
    });
    let EmulatorError::UnfinishedSource { copy, access } = error.unwrap_err() else { panic!() };
    assert_eq!(copy.location.line(), line_of("in flight"));
    assert_eq!(access.place.location.line(), line_of("too early"));
}

/// Memory outlives the launch that broke a rule.
#[test]
fn the_next_launch_starts_afresh() {
    let mut data = vec![0u128; 8];
    let mut memory = GlobalMemory::new();
    let data: Global<u8> = memory.writable(&mut data).cast();
    let launch = Launch { grid_blocks: 1, block_threads: 32, shared_bytes: 2048, seed: 0 };
    let broken = launch.run(&mut memory, || unsafe {
        make_barriers();
        if thread_idx_x() == 0 {
            tile().cast::<[u32; 4]>().store([1; 4]);
            fence_proxy_async();
            store_bulk(data.add(64), tile(), 16);
            barrier(0).arrive_and_expect_bytes(16);
            load_bulk(tile().add_bytes(128), data, 16, barrier(0));
        }
    });
    assert!(matches!(broken, Err(EmulatorError::NeverWaited { .. })), "{broken:?}");
    let store = || unsafe {
        if thread_idx_x() < 8 {
            data.cast::<[u32; 4]>().add(thread_idx_x() as u64).store([2; 4]);
        }
    };
    launch.run(&mut memory, store).unwrap();
}

#[test]
fn impossible_tensor_maps() {
    let field = |change: fn(&mut TensorMapDescription<'static>)| {
        let mut description = describe(4096);
        change(&mut description);
        description.encode().unwrap_err().field
    };
    assert_eq!(field(|map| map.address = 8), "address");
    assert_eq!(field(|map| map.element_bytes = 3), "element_bytes");
    assert_eq!(field(|map| map.extents = &[64, 0]), "extents");
    assert_eq!(field(|map| map.extents = &[1; 6]), "extents");
    assert_eq!(field(|map| map.strides_bytes = &[120]), "strides_bytes");
    assert_eq!(field(|map| map.strides_bytes = &[]), "strides_bytes");
    assert_eq!(field(|map| map.box_extents = &[64, 257]), "box_extents");
    assert_eq!(field(|map| map.box_extents = &[32, 64]), "box_extents");
    assert_eq!(field(|map| map.element_strides = &[1, 9]), "element_strides");
}
