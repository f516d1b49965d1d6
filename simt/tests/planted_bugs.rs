//! Kernels with one planted bug each: the emulator must name the rule, the lines and the threads.
//! Lines are found by the comment that marks them.
#![expect(clippy::undocumented_unsafe_blocks, reason = "these kernels break the contracts on purpose")]
mod marked;

use std::{cell::RefCell, collections::BTreeSet};

use simt::{
    asynchronous::{commit_async_copies, copy_async_16, wait_async_copies},
    atomic::{fetch_add, fetch_min},
    block::{sync_named_barrier, sync_threads},
    emulator::{AccessKind, EmulatorError, GlobalMemory, Launch, Operation, Place, Space},
    global::Global,
    number::Bf16,
    shared::Shared,
    tensor::{Element, load_matrix_x4},
    thread::{block_idx_x, lane_idx, thread_idx_x, warp_idx},
    warp::{shuffle_xor_u32, sync_warp},
};

const SEEDS: [u64; 6] = [0, 1, 2, 3, 0xdead_beef, u64::MAX];

/// The line of this file that ends with the marker.
fn line_of(marker: &str) -> u32 {
    marked::line_of(include_str!("planted_bugs.rs"), marker)
}

fn lines(places: &[Place]) -> BTreeSet<u32> {
    places.iter().map(|place| place.location.line()).collect()
}

fn marked<const N: usize>(markers: [&str; N]) -> BTreeSet<u32> {
    markers.iter().map(|marker| line_of(marker)).collect()
}

/// One block of `threads` with 1 KiB of shared memory.
fn block(threads: u32, seed: u64) -> Launch {
    Launch { grid_blocks: 1, block_threads: threads, shared_bytes: 1024, seed }
}

/// Runs a kernel without global memory.
fn run(threads: u32, seed: u64, kernel: impl Fn()) -> Result<(), EmulatorError> {
    block(threads, seed).run(&mut GlobalMemory::new(), kernel).map(|_| ())
}

/// Expects a data race between the two marked lines, under every seed.
fn expect_race<const N: usize>(markers: [&str; N], run: impl Fn(u64) -> Result<(), EmulatorError>) {
    for seed in SEEDS {
        match run(seed).unwrap_err() {
            EmulatorError::DataRace { first, second, .. } => {
                assert_eq!(lines(&[first.place, second.place]), marked(markers), "seed {seed}");
            }
            other => panic!("seed {seed}: {other}"),
        }
    }
}

#[test]
fn poisoned_shared_memory() {
    for seed in SEEDS {
        let error = run(32, seed, || unsafe {
            let shared = Shared::<u32>::dynamic();
            if thread_idx_x() == 7 {
                shared.add(1).store(1);
                shared.cast::<[u32; 2]>().load(); // poisoned load
            }
        })
        .unwrap_err();
        let EmulatorError::Uninitialised { access, byte } = error else { panic!("{error}") };
        assert_eq!((access.space, access.kind, access.bytes), (Space::Shared, AccessKind::Load, 8));
        assert_eq!((access.place.thread, access.place.block), (7, 0));
        assert_eq!(access.place.location.line(), line_of("poisoned load"));
        assert_eq!(byte, access.address);
    }
}

#[test]
fn poison_returns_for_each_block() {
    let kernel = || unsafe {
        let shared = Shared::<u32>::dynamic();
        if thread_idx_x() == 0 {
            if block_idx_x() == 0 {
                shared.store(1);
            }
            shared.load();
        }
    };
    let launch = Launch { grid_blocks: 2, ..block(32, 0) };
    let error = launch.run(&mut GlobalMemory::new(), kernel).unwrap_err();
    assert!(matches!(error, EmulatorError::Uninitialised { access, .. } if access.place.block == 1), "{error}");
}

#[test]
fn uninitialised_global_memory() {
    let mut output = [0u32; 8];
    let mut memory = GlobalMemory::new();
    let output: Global<u32> = memory.uninitialised(&mut output);
    let write = || unsafe {
        if thread_idx_x() < 7 {
            output.add(thread_idx_x() as u64).store(1)
        }
    };
    let read = || unsafe {
        if thread_idx_x() < 8 {
            output.add(thread_idx_x() as u64).load(); // uninitialised load
        }
    };
    block(32, 0).run(&mut memory, write).unwrap();
    let error = block(32, 0).run(&mut memory, read).unwrap_err();
    let EmulatorError::Uninitialised { access, .. } = error else { panic!("{error}") };
    assert_eq!((access.place.thread, access.place.location.line()), (7, line_of("uninitialised load")));
}

#[test]
fn out_of_bounds() {
    let end = run(32, 0, || unsafe {
        Shared::<f32>::dynamic().add(255 + thread_idx_x()).store(0.0); // past the end
    });
    let EmulatorError::OutOfBounds { access, nearest } = end.unwrap_err() else { panic!() };
    let start = Shared::<u8>::dynamic().address() as u64;
    assert_eq!(nearest, Some(start..start + 1024));
    assert_eq!(access.place.location.line(), line_of("past the end"));
    assert!(access.place.thread > 0);

    let null = run(32, 0, || unsafe {
        Shared::<f32>::dynamic().add_bytes(0u32.wrapping_sub(Shared::<f32>::dynamic().address())).store(0.0);
    });
    assert!(matches!(null, Err(EmulatorError::OutOfBounds { .. })));

    let input = [0u32; 40];
    for (offset, thread) in [(9, 31), (10, 30)] {
        let mut memory = GlobalMemory::new();
        let input: Global<u32> = memory.read_only(&input);
        let error = block(32, 3).run(&mut memory, || unsafe {
            let index = thread_idx_x() as u64 + offset;
            if thread_idx_x() >= thread {
                input.add(index).load(); // global out of bounds
            }
        });
        let EmulatorError::OutOfBounds { access, nearest } = error.unwrap_err() else { panic!() };
        assert_eq!(nearest, Some(input.address()..input.address() + 160));
        assert_eq!((access.space, access.place.location.line()), (Space::Global, line_of("global out of bounds")));
    }
}

#[test]
fn misaligned() {
    let error = run(32, 0, || unsafe {
        Shared::<u8>::dynamic().add(4).cast::<[u32; 4]>().store([0; 4]); // misaligned store
    });
    let EmulatorError::Misaligned { access, alignment: 16 } = error.unwrap_err() else { panic!() };
    assert_eq!(access.place.location.line(), line_of("misaligned store"));

    let input = [0u128; 4];
    let mut memory = GlobalMemory::new();
    let input = memory.read_only(&input);
    let error = block(32, 0).run(&mut memory, || unsafe {
        copy_async_16(Shared::dynamic(), input.cast::<u8>().add(8), 4);
    });
    assert!(matches!(error, Err(EmulatorError::Misaligned { access, alignment: 16 }) if access.space == Space::Global));
}

#[test]
fn write_to_read_only_memory() {
    let input = [0u32; 32];
    let mut memory = GlobalMemory::new();
    let input: Global<u32> = memory.read_only(&input);
    let error = block(32, 0).run(&mut memory, || unsafe {
        input.store(1); // forbidden store
    });
    let EmulatorError::ReadOnly { access } = error.unwrap_err() else { panic!() };
    assert_eq!(access.place.location.line(), line_of("forbidden store"));
}

#[test]
fn race_without_a_barrier() {
    expect_race(["race: store", "race: load"], |seed| {
        run(64, seed, || unsafe {
            let shared = Shared::<u32>::dynamic();
            let thread = thread_idx_x();
            if warp_idx() == 0 {
                shared.add(lane_idx()).store(0);
            }
            sync_threads();
            if thread == 3 {
                shared.store(thread); // race: store
            }
            if thread == 40 {
                shared.load(); // race: load
            }
        })
    });
}

#[test]
fn race_when_a_buffer_is_reused() {
    expect_race(["reuse: store", "reuse: load"], |seed| {
        run(64, seed, || unsafe {
            let shared = Shared::<u32>::dynamic();
            for round in 0..2 {
                shared.add(thread_idx_x()).store(round); // reuse: store
                sync_threads();
                shared.add(63 - thread_idx_x()).load(); // reuse: load
            }
        })
    });
}

#[test]
fn race_of_two_stores() {
    expect_race(["two stores"], |seed| {
        run(32, seed, || unsafe {
            Shared::<u32>::dynamic().store(1); // two stores
        })
    });
}

#[test]
fn race_of_neighbouring_halves_is_none() {
    run(32, 1, || unsafe {
        let shared = Shared::<u16>::dynamic();
        shared.add(thread_idx_x()).store(thread_idx_x() as u16);
        shared.add(thread_idx_x()).load();
    })
    .unwrap();
}

#[test]
fn a_shuffle_orders_nothing() {
    expect_race(["shuffled: store", "shuffled: load"], |seed| {
        run(32, seed, || unsafe {
            let shared = Shared::<u32>::dynamic();
            shared.add(lane_idx()).store(1); // shuffled: store
            shuffle_xor_u32(0, 1);
            shared.add(lane_idx() ^ 1).load(); // shuffled: load
        })
    });
}

#[test]
fn sync_warp_orders_its_warp_only() {
    let kernel = |partner: u32| unsafe {
        let shared = Shared::<u32>::dynamic();
        shared.add(thread_idx_x()).store(0);
        sync_threads();
        shared.add(thread_idx_x()).store(1); // warp: store
        sync_warp();
        shared.add(thread_idx_x() ^ partner).load(); // warp: load
    };
    for seed in SEEDS {
        run(64, seed, || kernel(1)).unwrap();
    }
    expect_race(["warp: store", "warp: load"], |seed| run(64, seed, || kernel(32)));
}

#[test]
fn ldmatrix_needs_the_whole_warp_ordered() {
    expect_race(["row: store", "row: ldmatrix"], |seed| {
        run(32, seed, || unsafe {
            let row = Shared::<[u32; 4]>::dynamic().add(lane_idx());
            row.store([0; 4]); // row: store
            load_matrix_x4(row.cast()); // row: ldmatrix
        })
    });
}

#[test]
fn a_named_barrier_orders_its_members_only() {
    let kernel = |reader: u32| unsafe {
        let shared = Shared::<u32>::dynamic();
        if warp_idx() == 3 {
            shared.add(lane_idx()).store(0);
        }
        sync_threads();
        if warp_idx() == 0 {
            shared.add(lane_idx()).store(1); // named: store
        }
        sync_named_barrier(1 + warp_idx() / 2, 64);
        if warp_idx() == reader {
            shared.add(lane_idx() ^ 1).load(); // named: load
        }
    };
    for seed in SEEDS {
        run(128, seed, || kernel(1)).unwrap();
    }
    expect_race(["named: store", "named: load"], |seed| run(128, seed, || kernel(2)));
}

#[test]
fn race_in_global_memory() {
    expect_race(["global: store", "global: load"], |seed| {
        let mut data = [0u32; 64];
        let mut memory = GlobalMemory::new();
        let data: Global<u32> = memory.writable(&mut data);
        let kernel = || unsafe {
            data.add(thread_idx_x() as u64).store(1); // global: store
            data.add(63 - thread_idx_x() as u64).load(); // global: load
        };
        block(64, seed).run(&mut memory, kernel).map(|_| ())
    });
}

#[test]
fn race_between_blocks() {
    expect_race(["blocks: store", "blocks: load"], |seed| {
        let mut data = [0u32; 2];
        let mut memory = GlobalMemory::new();
        let data: Global<u32> = memory.writable(&mut data);
        let kernel = || unsafe {
            if thread_idx_x() == 0 && block_idx_x() == 0 {
                data.store(1); // blocks: store
            }
            sync_threads();
            if thread_idx_x() == 9 && block_idx_x() == 1 {
                data.load(); // blocks: load
            }
        };
        Launch { grid_blocks: 2, ..block(32, seed) }.run(&mut memory, kernel).map(|_| ())
    });
}

/// Every block writes a partial sum; the one that counts itself last adds them up.
unsafe fn last_block_sums(
    partial: Global<u32>,
    counter: Global<u32>,
    sum: Global<u32>,
    barrier: bool,
    count: unsafe fn(Global<u32>) -> u32,
) {
    unsafe {
        let (thread, shared) = (thread_idx_x(), Shared::<u32>::dynamic());
        partial.add((block_idx_x() * 64 + thread) as u64).store(thread); // partial: store
        if barrier {
            sync_threads();
        }
        if thread == 0 {
            shared.store(count(counter));
        }
        sync_threads();
        if shared.load() == 3 {
            let terms = (0..4).map(|block| partial.add((block * 64 + 63 - thread) as u64).load()); // partial: load
            sum.add(thread as u64).store(terms.sum());
        }
    }
}

fn run_last_block(seed: u64, barrier: bool, count: unsafe fn(Global<u32>) -> u32) -> Result<Vec<u32>, EmulatorError> {
    let (mut partial, mut counter, mut sum) = (vec![0u32; 256], [0u32], vec![0u32; 64]);
    let mut memory = GlobalMemory::new();
    let partial = memory.uninitialised(&mut partial);
    let (counter, result) = (memory.writable(&mut counter), memory.uninitialised(&mut sum));
    let launch = Launch { grid_blocks: 4, ..block(64, seed) };
    launch.run(&mut memory, || unsafe { last_block_sums(partial, counter, result, barrier, count) })?;
    Ok(sum)
}

#[test]
fn atomics_order_blocks() {
    for seed in SEEDS {
        let sum = run_last_block(seed, true, |counter| unsafe { fetch_add(counter, 1) }).unwrap();
        assert_eq!(sum, (0..64).map(|thread| 4 * (63 - thread)).collect::<Vec<_>>());
    }
    // The thread that counts speaks for itself only: the others' stores need the barrier before it.
    expect_race(["partial: store", "partial: load"], |seed| {
        run_last_block(seed, false, |counter| unsafe { fetch_add(counter, 1) }).map(|_| ())
    });
}

#[test]
fn what_an_atomic_taught_is_passed_on() {
    // The first block tells the second through one counter; there another lane, or the same one, tells the third
    // through another counter.
    let run_chain = |seed: u64, second_listens: bool, teller: u32| {
        let (mut data, blocks) = ([0u32; 3], RefCell::new(Vec::new()));
        let mut memory = GlobalMemory::new();
        let data: Global<u32> = memory.writable(&mut data);
        let kernel = || unsafe {
            let (thread, block) = (thread_idx_x(), block_idx_x());
            if !blocks.borrow().contains(&block) {
                blocks.borrow_mut().push(block);
            }
            let turn = blocks.borrow().len();
            if turn == 1 && thread == 11 {
                data.store(1); // chain: store
                fetch_add(data.add(1), 1);
            }
            if turn == 2 {
                if second_listens && thread == 11 {
                    fetch_add(data.add(1), 0);
                }
                if teller != 11 {
                    sync_warp();
                }
                if thread == teller {
                    fetch_add(data.add(2), 1);
                }
            }
            if turn == 3 && thread == 11 {
                fetch_add(data.add(2), 0);
                data.load(); // chain: load
            }
        };
        Launch { grid_blocks: 3, ..block(32, seed) }.run(&mut memory, kernel).map(|_| ())
    };
    for teller in [11, 12] {
        for seed in SEEDS {
            run_chain(seed, true, teller).unwrap();
        }
        expect_race(["chain: store", "chain: load"], |seed| run_chain(seed, false, teller));
    }
}

#[test]
fn a_relaxed_atomic_orders_nothing() {
    let mut data = [5u32, 0];
    let mut memory = GlobalMemory::new();
    let data: Global<u32> = memory.writable(&mut data);
    let kernel = || unsafe {
        if thread_idx_x() == 0 {
            if fetch_min(data, block_idx_x()) == 5 {
                data.add(1).store(1);
                fetch_min(data, block_idx_x());
            } else {
                data.add(1).load();
            }
        }
    };
    let error = Launch { grid_blocks: 2, ..block(32, 0) }.run(&mut memory, kernel).unwrap_err();
    assert!(matches!(error, EmulatorError::DataRace { .. }), "{error}");
}

#[test]
fn a_plain_access_races_with_an_atomic() {
    expect_race(["counter: atomic", "counter: load"], |seed| {
        let mut counter = [0u32];
        let mut memory = GlobalMemory::new();
        let counter: Global<u32> = memory.writable(&mut counter);
        let kernel = || unsafe {
            if thread_idx_x() == 0 {
                fetch_add(counter, 1); // counter: atomic
            }
            if thread_idx_x() == 1 {
                counter.load(); // counter: load
            }
        };
        block(32, seed).run(&mut memory, kernel).map(|_| ())
    });
}

#[test]
fn launches_are_ordered() {
    let mut data = [0u32; 32];
    let mut memory = GlobalMemory::new();
    let data: Global<u32> = memory.writable(&mut data);
    for round in 0..3 {
        let kernel = || unsafe {
            let here = data.add((thread_idx_x() ^ round) as u64);
            here.store(here.load() + 1);
        };
        block(32, round as u64).run(&mut memory, kernel).unwrap();
    }
}

#[test]
fn constant_load_of_what_the_launch_writes() {
    let mut data = [0u32; 32];
    let mut memory = GlobalMemory::new();
    let data: Global<u32> = memory.writable(&mut data);
    let kernel = || unsafe {
        data.add(thread_idx_x() as u64).load_constant();
        data.add(thread_idx_x() as u64).store(1); // constant: store
        sync_threads();
        data.add(thread_idx_x() as u64 ^ 1).load_constant(); // constant: load
    };
    let EmulatorError::NotConstant { load, store } = block(32, 0).run(&mut memory, kernel).unwrap_err() else {
        panic!()
    };
    assert_eq!(load.place.location.line(), line_of("constant: load"));
    assert_eq!(store.place.location.line(), line_of("constant: store"));
}

/// Runs a kernel on 64 threads x 16 bytes of input.
fn run_copies(seed: u64, kernel: impl Fn(Global<u8>, Shared<u8>)) -> Result<(), EmulatorError> {
    let mut input = [0u128; 64];
    let mut memory = GlobalMemory::new();
    let input: Global<u8> = memory.writable(&mut input).cast();
    let kernel = || {
        let offset = 16 * thread_idx_x();
        kernel(input.add(offset as u64), Shared::dynamic().add(offset));
    };
    block(64, seed).run(&mut memory, kernel).map(|_| ())
}

fn expect_unfinished(access_marker: &str, copy_marker: &str, run: impl Fn(u64) -> Result<(), EmulatorError>) {
    for seed in SEEDS {
        match run(seed).unwrap_err() {
            EmulatorError::UnfinishedCopy { copy, access } => {
                assert_eq!(access.place.location.line(), line_of(access_marker));
                assert_eq!(copy.place.location.line(), line_of(copy_marker));
                assert_eq!(copy.kind, AccessKind::AsyncCopy);
            }
            other => panic!("seed {seed}: {other}"),
        }
    }
}

#[test]
fn copy_read_before_its_wait() {
    expect_unfinished("early: load", "early: copy", |seed| {
        run_copies(seed, |source, destination| unsafe {
            copy_async_16(destination, source, 16); // early: copy
            commit_async_copies();
            destination.cast::<u32>().load(); // early: load
        })
    });
}

#[test]
fn copy_waited_for_by_the_wrong_count() {
    expect_unfinished("count: load", "count: second copy", |seed| {
        let kernel = |source: Global<u8>, destination: Shared<u8>| unsafe {
            if lane_idx().is_multiple_of(2) {
                copy_async_16(destination, source, 16);
                commit_async_copies();
                copy_async_16(destination.add(16), source, 16); // count: second copy
                commit_async_copies();
                wait_async_copies::<1>();
                destination.cast::<u32>().load();
                destination.add(16).cast::<u32>().load(); // count: load
            }
        };
        run_copies(seed, kernel)
    });
}

#[test]
fn copy_never_committed() {
    expect_unfinished("group: load", "group: copy", |seed| {
        run_copies(seed, |source, destination| unsafe {
            copy_async_16(destination, source, 16); // group: copy
            wait_async_copies::<0>();
            destination.cast::<u32>().load(); // group: load
        })
    });
}

#[test]
fn copy_target_overwritten_before_its_wait() {
    expect_unfinished("overwrite: store", "overwrite: copy", |seed| {
        run_copies(seed, |source, destination| unsafe {
            copy_async_16(destination, source, 16); // overwrite: copy
            commit_async_copies();
            sync_threads();
            let neighbour = Shared::<u16>::dynamic().add(8 * (thread_idx_x() ^ 1) + 7);
            neighbour.store(0); // overwrite: store
        })
    });
}

#[test]
fn copy_waited_for_without_a_barrier() {
    for seed in SEEDS {
        let error = run_copies(seed, |source, destination| unsafe {
            copy_async_16(destination, source, 16); // landed: copy
            commit_async_copies();
            sync_threads();
            wait_async_copies::<0>();
            if thread_idx_x() == 63 {
                for thread in 0..63 {
                    load_of_another(thread);
                }
            }
        });
        // The load may also come before the other thread's wait.
        let places = match error.unwrap_err() {
            EmulatorError::DataRace { first, second, .. } => [first.place, second.place],
            EmulatorError::UnfinishedCopy { copy, access } => [copy.place, access.place],
            other => panic!("seed {seed}: {other}"),
        };
        assert_eq!(lines(&places), marked(["landed: copy", "landed: load"]));
    }
}

/// Loads another thread's bytes, once they have landed.
unsafe fn load_of_another(thread: u32) {
    unsafe {
        Shared::<[u32; 4]>::dynamic().add(thread).load(); // landed: load
    }
}

#[test]
fn copy_into_a_buffer_still_read() {
    for seed in SEEDS {
        let error = run_copies(seed, |source, destination| unsafe {
            destination.cast::<[u32; 4]>().store([0; 4]);
            sync_threads();
            Shared::<[u32; 4]>::dynamic().add(thread_idx_x() ^ 32).load(); // refill: load
            copy_async_16(destination, source, 16); // refill: copy
        });
        // Either the copy starts after the load, or the load finds the copy under way.
        let places = match error.unwrap_err() {
            EmulatorError::DataRace { first, second, .. } => [first.place, second.place],
            EmulatorError::UnfinishedCopy { copy, access } => [copy.place, access.place],
            other => panic!("seed {seed}: {other}"),
        };
        assert_eq!(lines(&places), marked(["refill: copy", "refill: load"]));
    }
}

#[test]
fn copy_source_overwritten_before_its_wait() {
    for own_word in [0, 4] {
        expect_race(["source: copy", "source: store"], |seed| {
            run_copies(seed, |source, destination| unsafe {
                copy_async_16(destination, source, 16); // source: copy
                commit_async_copies();
                sync_threads();
                if thread_idx_x() < 32 {
                    let across = 16 * 32 + own_word;
                    source.add(across).cast::<u32>().store(1); // source: store
                }
                sync_threads();
                wait_async_copies::<0>();
            })
        });
    }
}

#[test]
fn copy_of_too_many_bytes() {
    let error = run_copies(0, |source, destination| unsafe {
        copy_async_16(destination, source, 17); // seventeen
    });
    let EmulatorError::CopySize { source_bytes: 17, place } = error.unwrap_err() else { panic!() };
    assert_eq!(place.location.line(), line_of("seventeen"));
}

#[test]
fn lanes_at_different_shuffles() {
    for seed in SEEDS {
        let error = run(64, seed, || unsafe {
            if warp_idx() == 1 && lane_idx() < 10 {
                shuffle_xor_u32(0, 1); // left shuffle
            } else {
                shuffle_xor_u32(0, 1); // right shuffle
            }
        });
        let EmulatorError::Divergence { block: 0, warp: 1, waiting } = error.unwrap_err() else { panic!() };
        let found: Vec<_> = waiting
            .iter()
            .map(|group| {
                let (operation, location) = group.point.unwrap();
                assert_eq!(operation, Operation::ShuffleXor);
                (location.line(), group.threads.clone())
            })
            .collect();
        let wanted =
            [(line_of("left shuffle"), (32..42).collect()), (line_of("right shuffle"), (42..64).collect::<Vec<_>>())];
        assert_eq!(found, wanted);
    }
}

#[test]
fn lanes_at_different_collectives() {
    /// Generic code is named by its own line.
    fn multiply<E: Element>() {
        unsafe { E::multiply_accumulate(&mut [0.0; 4], [0; 4], [0; 2]) }; // left at mma
    }
    for seed in SEEDS {
        let error = run(32, seed, || unsafe {
            if lane_idx() < 16 {
                multiply::<Bf16>();
            } else {
                sync_warp(); // left at sync_warp
            }
        });
        let EmulatorError::Divergence { waiting, .. } = error.unwrap_err() else { panic!() };
        let found: Vec<_> = waiting.iter().map(|group| group.point.unwrap()).collect();
        assert_eq!((found[0].0, found[0].1.line()), (Operation::MmaBf16, line_of("left at mma")));
        assert_eq!((found[1].0, found[1].1.line()), (Operation::SyncWarp, line_of("left at sync_warp")));
    }
}

#[test]
fn half_a_warp_skips_the_barrier() {
    for seed in SEEDS {
        let error = run(64, seed, || unsafe {
            if thread_idx_x() < 48 {
                sync_threads(); // half barrier
            }
        })
        .unwrap_err();
        let EmulatorError::Divergence { warp: 1, waiting, .. } = &error else { panic!("{error}") };
        assert_eq!(waiting[0].threads, (32..48).collect::<Vec<_>>());
        assert_eq!(waiting[0].point.unwrap().1.line(), line_of("half barrier"));
        assert_eq!((waiting[1].point, waiting[1].threads.clone()), (None, (48..64).collect::<Vec<_>>()));
        assert!(error.to_string().contains("threads 32-47 at sync_threads"), "{error}");
        assert!(error.to_string().contains("threads 48-63 exited"), "{error}");
    }
}

#[test]
fn a_lane_exits_before_a_shuffle() {
    for seed in SEEDS {
        let error = run(32, seed, || unsafe {
            if lane_idx() != 31 {
                shuffle_xor_u32(0, 1);
            }
        });
        assert!(matches!(error, Err(EmulatorError::Divergence { warp: 0, .. })));
    }
}

#[test]
fn a_whole_warp_may_exit_before_a_barrier() {
    for seed in SEEDS {
        run(96, seed, || unsafe {
            if warp_idx() != 1 {
                sync_threads();
            }
        })
        .unwrap();
    }
}

#[test]
fn a_named_barrier_nobody_completes() {
    for seed in SEEDS {
        let error = run(96, seed, || unsafe {
            match warp_idx() {
                0 => sync_named_barrier(3, 64), // lonely
                1 => sync_threads(),            // everyone else
                _ => {}
            }
        });
        let EmulatorError::Deadlock { block: 0, waiting } = error.unwrap_err() else { panic!() };
        assert_eq!(waiting.len(), 3);
        assert_eq!(waiting[0].point.unwrap().0, Operation::NamedBarrier { id: 3, threads: 64 });
        assert_eq!(waiting[0].point.unwrap().1.line(), line_of("lonely"));
        assert_eq!(waiting[1].point.unwrap().1.line(), line_of("everyone else"));
        assert_eq!(waiting[2].threads, (64..96).collect::<Vec<_>>());
    }
}

#[test]
fn warps_at_different_block_barriers() {
    for seed in SEEDS {
        let error = run(64, seed, || unsafe {
            if warp_idx() == 0 {
                sync_threads(); // first barrier
            } else {
                sync_threads(); // second barrier
            }
        });
        let EmulatorError::MismatchedBarrier { waiting, .. } = error.unwrap_err() else { panic!() };
        let found: BTreeSet<_> = waiting.iter().map(|group| group.point.unwrap().1.line()).collect();
        assert_eq!(found, marked(["first barrier", "second barrier"]));
    }
}

#[test]
fn impossible_named_barriers() {
    for (id, threads, wrong) in
        [(0, 32, "id"), (16, 32, "id"), (1, 33, "threads"), (1, 96, "threads"), (1, 0, "threads")]
    {
        let error = run(64, 0, || unsafe { sync_named_barrier(id, threads) });
        assert!(matches!(error, Err(EmulatorError::NamedBarrier { field, .. }) if field == wrong));
    }
    let error = run(64, 0, || unsafe { sync_named_barrier(1, 32 + 32 * warp_idx()) });
    // Warp 0 alone completes its phase of 32; warp 1 then waits for a second warp in vain, or finds warp 1 waiting.
    assert!(matches!(error, Err(EmulatorError::Deadlock { .. } | EmulatorError::NamedBarrier { .. })));
}

#[test]
fn an_endless_loop() {
    let mut flag = [0u32];
    let mut memory = GlobalMemory::new();
    let flag: Global<u32> = memory.writable(&mut flag);
    let kernel = || unsafe {
        while flag.load() == 0 {} // endless
    };
    let EmulatorError::StepLimit { place, .. } = block(32, 0).run(&mut memory, kernel).unwrap_err() else { panic!() };
    assert_eq!(place.location.line(), line_of("endless"));
}

#[test]
fn a_panic_in_the_kernel() {
    let launch = Launch { grid_blocks: 4, ..block(32, 5) };
    let kernel = || unsafe {
        sync_threads();
        assert!(block_idx_x() != 2 || thread_idx_x() != 17, "tile {} is empty", 3);
        sync_threads();
    };
    let error = launch.run(&mut GlobalMemory::new(), kernel).unwrap_err();
    assert_eq!(error, EmulatorError::KernelPanic { message: "tile 3 is empty".into(), thread: 17, block: 2 });
}

#[test]
fn values_on_the_stacks_are_dropped_after_an_error() {
    let token = std::rc::Rc::new(());
    let error = run(64, 0, || unsafe {
        let _held = token.clone();
        sync_warp();
        if thread_idx_x() == 40 {
            Shared::<u32>::dynamic().load();
        }
        sync_threads();
    });
    assert!(error.is_err());
    assert_eq!(std::rc::Rc::strong_count(&token), 1);
}

#[test]
fn impossible_launches() {
    let good = block(32, 0);
    for (launch, wrong) in [
        (Launch { block_threads: 33, ..good }, "block_threads"),
        (Launch { block_threads: 0, ..good }, "block_threads"),
        (Launch { block_threads: 1056, ..good }, "block_threads"),
        (Launch { shared_bytes: (227 << 10) + 1, ..good }, "shared_bytes"),
        (Launch { grid_blocks: u32::MAX, ..good }, "grid_blocks"),
    ] {
        let error = launch.run(&mut GlobalMemory::new(), || {});
        assert!(matches!(error, Err(EmulatorError::InvalidLaunch { field, .. }) if field == wrong));
    }
    let empty = Launch { grid_blocks: 0, ..good };
    empty.run(&mut GlobalMemory::new(), || unreachable!()).unwrap();
}
