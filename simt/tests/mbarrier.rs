//! Producers and consumers that meet at `mbarrier`s and named barriers: correct programs, and programs with one planted
//! bug each. Lines are found by the comment that marks them.
#![expect(clippy::undocumented_unsafe_blocks, reason = "these kernels break the contracts on purpose")]
mod marked;

use simt::{
    block::{arrive_named_barrier, sync_named_barrier, sync_threads},
    emulator::{AccessKind, Counters, EmulatorError, GlobalMemory, Launch, Operation, Place},
    mbarrier::Mbarrier,
    registers::{lower_register_limit, raise_register_limit},
    shared::Shared,
    thread::{lane_idx, thread_idx_x, warp_idx},
};

const SEEDS: [u64; 6] = [0, 1, 2, 3, 0xdead_beef, u64::MAX];

fn line_of(marker: &str) -> u32 {
    marked::line_of(include_str!("mbarrier.rs"), marker)
}

fn run(threads: u32, seed: u64, kernel: impl Fn()) -> Result<Counters, EmulatorError> {
    let launch = Launch { grid_blocks: 1, block_threads: threads, shared_bytes: 2048, seed };
    launch.run(&mut GlobalMemory::new(), kernel).map(|report| report.counters)
}

/// Expects a data race between the two marked lines, under every seed.
fn expect_race(markers: [&str; 2], kernel: impl Fn()) {
    let sorted = |mut lines: [u32; 2]| {
        lines.sort();
        lines
    };
    for seed in SEEDS {
        match run(64, seed, &kernel).unwrap_err() {
            EmulatorError::DataRace { first, second, .. } => {
                let found = [first.place, second.place].map(|place: Place| place.location.line());
                assert_eq!(sorted(found), sorted(markers.map(line_of)), "seed {seed}");
            }
            other => panic!("seed {seed}: {other}"),
        }
    }
}

fn barrier(index: u32) -> Mbarrier {
    Mbarrier::new(Shared::<u64>::dynamic().add(index))
}

fn stage(index: u32) -> Shared<u32> {
    Shared::<u8>::dynamic().add_bytes(1024 + 128 * index).cast()
}

const STAGES: u32 = 2;

/// Warp 0 fills a ring of two stages, warp 1 reads it. `releases` tells in which rounds warp 1 gives its stage back,
/// `waits` in which warp 0 waits for that.
fn ring(rounds: u32, releases: fn(u32) -> bool, waits: fn(u32) -> bool) {
    unsafe {
        let (full, empty) = (|stage: u32| barrier(stage), |stage: u32| barrier(STAGES + stage));
        if thread_idx_x() == 0 {
            for stage in 0..STAGES {
                full(stage).initialise(32);
                empty(stage).initialise(1);
            }
        }
        sync_threads();
        for round in 0..rounds {
            let (index, parity) = (round % STAGES, round / STAGES % 2);
            if warp_idx() == 0 {
                if waits(round) {
                    empty(index).wait(parity ^ 1); // ring: empty
                }
                stage(index).add(lane_idx()).store(round + lane_idx()); // ring: store
                // No lane arrives a round ahead of another.
                simt::warp::sync_warp();
                full(index).arrive();
            } else {
                full(index).wait(parity); // ring: full
                let neighbour = (lane_idx() + 1) % 32;
                assert_eq!(stage(index).add(neighbour).load(), round + neighbour); // ring: load
                // The lanes have all read before one of them says so.
                simt::warp::sync_warp();
                if releases(round) && lane_idx() == 0 {
                    empty(index).arrive();
                }
            }
        }
    }
}

#[test]
fn a_ring_of_stages() {
    for seed in SEEDS {
        let counters = run(64, seed, || ring(9, |_| true, |_| true)).unwrap();
        // Nine fillings, and as many returns that were waited for or followed by an arrival.
        assert!((16..=18).contains(&counters.mbarrier_phases), "{}", counters.mbarrier_phases);
    }
}

#[test]
fn asking_instead_of_waiting() {
    for seed in SEEDS {
        run(64, seed, || unsafe {
            if thread_idx_x() == 0 {
                barrier(0).initialise(32);
            }
            sync_threads();
            if warp_idx() == 0 {
                stage(0).add(lane_idx()).store(5);
                barrier(0).arrive();
            } else {
                while !barrier(0).is_complete(0) {}
                assert_eq!(stage(0).add(31 - lane_idx()).load(), 5);
            }
        })
        .unwrap();
    }
}

#[test]
fn asking_for_ever() {
    let error = run(32, 0, || unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(1);
            while !barrier(0).is_complete(0) {} // for ever
        }
    });
    let EmulatorError::StepLimit { place, .. } = error.unwrap_err() else { panic!() };
    assert_eq!(place.location.line(), line_of("for ever"));
}

#[test]
fn a_stage_overwritten_before_it_is_released() {
    expect_race(["ring: store", "ring: load"], || ring(STAGES + 1, |_| true, |_| false));
}

#[test]
fn a_wait_nobody_satisfies() {
    for seed in SEEDS {
        let error = run(64, seed, || ring(STAGES + 1, |_| false, |_| true)).unwrap_err();
        let EmulatorError::Deadlock { waiting, .. } = error else { panic!("{error}") };
        let point = |threads: &[u32]| waiting.iter().find(|group| group.threads == threads).unwrap().point.unwrap();
        let lanes: Vec<u32> = (0..64).collect();
        let (operation, at) = point(&lanes[..32]);
        let address = barrier(STAGES).address();
        assert_eq!((operation, at.line()), (Operation::MbarrierWait { address, parity: 0 }, line_of("ring: empty")));
        assert_eq!(point(&lanes[32..]).1.line(), line_of("ring: full"));
    }
}

#[test]
fn a_full_barrier_nobody_waits_for() {
    let kernel = || unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(32);
        }
        sync_threads();
        match warp_idx() {
            0 => {
                stage(0).add(lane_idx()).store(1); // unwaited store
                barrier(0).arrive();
            }
            _ if thread_idx_x() == 40 => {
                stage(0).add(7).load(); // unwaited load
            }
            _ => {}
        }
    };
    for seed in SEEDS {
        match run(64, seed, kernel).unwrap_err() {
            EmulatorError::DataRace { first, second, .. } => {
                let lines = [first.place, second.place].map(|place| place.location.line());
                assert!(lines.contains(&line_of("unwaited store")) && lines.contains(&line_of("unwaited load")));
            }
            EmulatorError::Uninitialised { access, .. } => {
                assert_eq!(access.place.location.line(), line_of("unwaited load"));
            }
            other => panic!("{other}"),
        }
    }
}

/// A thread's wait is its own: what one lane has waited for, another has not.
#[test]
fn a_lane_that_does_not_wait() {
    expect_race(["lane: store", "lane: load"], || unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(1);
        }
        sync_threads();
        if thread_idx_x() == 0 {
            stage(0).store(1); // lane: store
            barrier(0).arrive();
        }
        if thread_idx_x() >= 32 {
            if lane_idx() != 31 {
                barrier(0).wait(0);
            }
            // A shuffle orders nothing, but it lets every other lane go first.
            simt::warp::shuffle_xor_u32(0, 1);
            stage(0).load(); // lane: load
        }
    });
}

#[test]
fn a_barrier_used_before_it_is_known() {
    expect_race(["early: make", "early: use"], || unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(1); // early: make
            stage(0).store(1);
        }
        // Everybody has run, nobody is ordered.
        simt::warp::shuffle_xor_u32(0, 1);
        if thread_idx_x() == 1 {
            barrier(0).wait(1); // early: use
        }
    });
}

#[test]
fn misused_barriers() {
    let error = |kernel: fn()| run(32, 0, kernel).unwrap_err();
    let missing = error(|| unsafe {
        barrier(0).arrive(); // no barrier
    });
    let EmulatorError::MbarrierMissing { place, .. } = missing else { panic!("{missing}") };
    assert_eq!(place.location.line(), line_of("no barrier"));
    let empty = error(|| unsafe { barrier(0).initialise(0) });
    assert!(matches!(empty, EmulatorError::MbarrierCount { arrivals: 0, .. }));
    let twice = error(|| unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(1);
            barrier(0).initialise(1);
        }
    });
    assert!(matches!(twice, EmulatorError::MbarrierAlive { .. }));
    let misaligned = error(|| unsafe { Mbarrier::new(Shared::<u8>::dynamic().add(4).cast()).initialise(1) });
    assert!(
        matches!(misaligned, EmulatorError::Misaligned { alignment: 8, access } if access.kind == AccessKind::Mbarrier)
    );
    let ended = error(|| unsafe {
        if thread_idx_x() == 0 {
            barrier(0).initialise(1);
            barrier(0).invalidate();
            barrier(0).initialise(2);
            barrier(0).invalidate();
            barrier(0).wait(1);
        }
    });
    assert!(matches!(ended, EmulatorError::MbarrierMissing { .. }));
}

/// One group arrives, the other waits: order goes one way.
fn handed_over(reads_back: bool) -> impl Fn() {
    move || unsafe {
        if warp_idx() == 0 {
            stage(0).add(lane_idx()).store(3);
            arrive_named_barrier(2, 64);
            if reads_back {
                stage(1).load(); // arrived: load
            }
        } else {
            stage(1).add(lane_idx()).store(4); // arrived: store
            sync_named_barrier(2, 64);
            assert_eq!(stage(0).add(31 - lane_idx()).load(), 3);
        }
    }
}

#[test]
fn arriving_orders_one_way() {
    for seed in SEEDS {
        assert_eq!(run(64, seed, handed_over(false)).unwrap().named_barriers, 1);
        match run(64, seed, handed_over(true)).unwrap_err() {
            EmulatorError::DataRace { .. } => {}
            EmulatorError::Uninitialised { access, .. } => {
                assert_eq!(access.place.location.line(), line_of("arrived: load"));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn arriving_twice_in_a_phase() {
    let error = run(64, 0, || unsafe {
        if warp_idx() == 0 {
            arrive_named_barrier(1, 64);
            arrive_named_barrier(1, 64); // twice
        }
    });
    let EmulatorError::NamedBarrier { field: "arrivals", place, .. } = error.unwrap_err() else { panic!() };
    assert_eq!(place.location.line(), line_of("twice"));
}

#[test]
fn register_limits() {
    let limits =
        |producers: fn(), consumers: fn()| run(384, 1, move || if warp_idx() < 4 { producers() } else { consumers() });
    let fits = limits(|| unsafe { lower_register_limit::<24>() }, || unsafe { raise_register_limit::<240>() });
    fits.unwrap();
    let too_many = limits(|| unsafe { lower_register_limit::<40>() }, || unsafe { raise_register_limit::<240>() });
    assert!(matches!(too_many, Err(EmulatorError::RegisterLimit { .. })), "{too_many:?}");
    let handed_back = limits(
        || unsafe {
            lower_register_limit::<40>();
            raise_register_limit::<168>();
        },
        || unsafe {
            raise_register_limit::<232>();
            lower_register_limit::<168>();
        },
    );
    handed_back.unwrap();
    let kept = limits(
        || unsafe {
            lower_register_limit::<40>();
            raise_register_limit::<168>(); // waits
            sync_threads();
        },
        || unsafe {
            raise_register_limit::<232>();
            sync_threads();
            lower_register_limit::<168>();
        },
    );
    let Err(EmulatorError::Deadlock { waiting, .. }) = kept else { panic!("{kept:?}") };
    assert!(waiting.iter().any(|group| group.point.is_some_and(|(_, site)| site.line() == line_of("waits"))));
    let lowered_up = limits(
        || {},
        || unsafe {
            raise_register_limit::<160>();
            lower_register_limit::<168>(); // upwards
        },
    );
    let Err(EmulatorError::RegisterLimit { registers: 168, place, .. }) = lowered_up else { panic!("{lowered_up:?}") };
    assert_eq!(place.location.line(), line_of("upwards"));
}

#[test]
fn a_warp_that_keeps_its_registers() {
    let error = run(128, 0, || unsafe {
        if warp_idx() != 1 {
            lower_register_limit::<24>(); // three of four
        }
        sync_threads();
    });
    let EmulatorError::Deadlock { waiting, .. } = error.unwrap_err() else { panic!() };
    assert_eq!(waiting[0].point.unwrap().1.line(), line_of("three of four"));
}
