//! The race detector against a naive one: random programs run under the emulator while a model beside them keeps a
//! full vector clock for every thread and the whole history of every byte. At each access both must agree.
use std::{cell::RefCell, collections::HashMap};

use simt::{
    atomic::fetch_add,
    block::{sync_named_barrier, sync_threads},
    emulator::{EmulatorError, GlobalMemory, Launch},
    global::Global,
    shared::Shared,
    thread::{block_idx_x, thread_idx_x, warp_idx},
    warp::sync_warp,
};

const BLOCKS: usize = 3;
const WARPS: usize = 3;
const BLOCK_THREADS: usize = 32 * WARPS;
const THREADS: usize = BLOCKS * BLOCK_THREADS;
/// Bytes of shared memory, of each block's own global memory, and of global memory common to the blocks.
const BYTES: usize = 32;
const COUNTERS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Memory {
    Shared,
    Own,
    Common,
}

#[derive(Clone, Debug)]
enum Step {
    /// One thread of each block loads or stores.
    Access {
        thread: usize,
        memory: Memory,
        offset: usize,
        bytes: usize,
        write: bool,
    },
    /// One thread of one block adds to a counter.
    Atomic {
        thread: usize,
        block: usize,
        counter: usize,
    },
    SyncWarp(usize),
    SyncThreads,
    /// Two warps meet, at a barrier of their own: at a common one a third warp could come between.
    Named(usize, usize),
}

/// xorshift64 (Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound
    }
}

fn program(random: &mut Random) -> Vec<Step> {
    // Few threads act, so that they meet again. How much they write and synchronise differs by program.
    let actors: Vec<usize> = (0..4).map(|_| random.below(BLOCK_THREADS)).collect();
    let (writes_in_16, synchronisation_in_6) = (1 + random.below(8), 3 + random.below(4));
    let memories: &[Memory] = match random.below(3) {
        0 => &[Memory::Common, Memory::Own],
        _ => &[Memory::Shared, Memory::Own],
    };
    (0..12 + random.below(20))
        .flat_map(|_| {
            let actor = actors[random.below(4)];
            let bytes = [2, 4, 8, 16, 16, 16][random.below(6)];
            let access = Step::Access {
                thread: actor,
                memory: memories[random.below(2)],
                offset: random.below(BYTES / bytes) * bytes,
                bytes,
                write: random.below(16) < writes_in_16,
            };
            let other = match random.below(16) {
                12..16 | 0 | 1 => Some(Step::SyncThreads),
                2 => Some(Step::Named(0, 1)),
                3 => Some(Step::Named(1, 2)),
                4..8 => {
                    Some(Step::Atomic { thread: actor, block: random.below(BLOCKS), counter: random.below(COUNTERS) })
                }
                _ => Some(Step::SyncWarp(actor / 32)),
            };
            [Some(access), other.filter(|_| random.below(6) < synchronisation_in_6)].into_iter().flatten()
        })
        .collect()
}

type Clock = Vec<u32>;

fn join(into: &mut Clock, other: &Clock) {
    into.iter_mut().zip(other).for_each(|(into, other)| *into = (*into).max(*other));
}

struct Event {
    thread: usize,
    time: u32,
    write: bool,
    atomic: bool,
}

struct Model {
    clocks: Vec<Clock>,
    history: HashMap<(usize, usize), Vec<Event>>,
    /// What the threads that arrived at a rendezvous knew, by step and group.
    gathered: HashMap<(usize, usize), Clock>,
    counters: Vec<Clock>,
    race: bool,
}

impl Model {
    fn new() -> Self {
        Model {
            clocks: vec![vec![0; THREADS]; THREADS],
            history: HashMap::new(),
            gathered: HashMap::new(),
            counters: vec![vec![0; THREADS]; COUNTERS],
            race: false,
        }
    }

    fn access(&mut self, thread: usize, memory: usize, offset: usize, bytes: usize, write: bool, atomic: bool) {
        self.clocks[thread][thread] += 1;
        let clock = &self.clocks[thread];
        for byte in offset..offset + bytes {
            let events = self.history.entry((memory, byte)).or_default();
            self.race |= events
                .iter()
                .any(|event| (write || event.write) && !(atomic && event.atomic) && clock[event.thread] < event.time);
            events.push(Event { thread, time: clock[thread], write, atomic });
        }
    }

    fn arrive(&mut self, thread: usize, key: (usize, usize)) {
        join(self.gathered.entry(key).or_insert_with(|| vec![0; THREADS]), &self.clocks[thread]);
    }

    fn leave(&mut self, thread: usize, key: (usize, usize)) {
        join(&mut self.clocks[thread], &self.gathered[&key]);
    }

    fn acquire_release(&mut self, thread: usize, counter: usize) {
        join(&mut self.clocks[thread], &self.counters[counter]);
        self.counters[counter].clone_from(&self.clocks[thread]);
    }
}

unsafe fn access(address: Result<Shared<u8>, Global<u8>>, bytes: usize, write: bool) {
    macro_rules! as_word {
        ($type:ty) => {
            // SAFETY: the program's accesses are aligned and inside.
            unsafe {
                match (address, write) {
                    (Ok(shared), true) => shared.cast::<$type>().store(Default::default()),
                    (Ok(shared), false) => drop(shared.cast::<$type>().load()),
                    (Err(global), true) => global.cast::<$type>().store(Default::default()),
                    (Err(global), false) => drop(global.cast::<$type>().load()),
                }
            }
        };
    }
    match bytes {
        2 => as_word!(u16),
        4 => as_word!(f32),
        8 => as_word!([u32; 2]),
        _ => as_word!([f32; 4]),
    }
}

fn interpret(program: &[Step], model: &RefCell<Model>, global: Global<u8>, counters: Global<u32>) {
    let (index, block) = (thread_idx_x() as usize, block_idx_x() as usize);
    let thread = block * BLOCK_THREADS + index;
    let rendezvous = |key: (usize, usize), meet: &dyn Fn()| {
        model.borrow_mut().arrive(thread, key);
        meet();
        model.borrow_mut().leave(thread, key);
    };
    let touch = |memory: Memory, offset: usize, bytes: usize, write: bool| {
        // Memories of the model: each block's shared and own memory, and the common one.
        let (number, address) = match memory {
            Memory::Shared => (block, Ok(Shared::dynamic().add(offset as u32))),
            Memory::Own => (BLOCKS + block, Err(global.add((block * BYTES + offset) as u64))),
            Memory::Common => (2 * BLOCKS, Err(global.add((BLOCKS * BYTES + offset) as u64))),
        };
        model.borrow_mut().access(thread, number, offset, bytes, write, false);
        // SAFETY: all memories have BYTES bytes.
        unsafe { access(address, bytes, write) };
        assert!(!model.borrow().race, "missed a race on {memory:?} at {offset}");
    };
    // SAFETY: whole warps, or whole blocks, come to each rendezvous.
    unsafe {
        if index == 0 {
            (0..BYTES).step_by(16).for_each(|offset| touch(Memory::Shared, offset, 16, true));
        }
        rendezvous((usize::MAX, block), &|| sync_threads());
        for (number, step) in program.iter().enumerate() {
            let group = block * WARPS;
            match *step {
                Step::Access { thread, memory, offset, bytes, write } if thread == index => {
                    touch(memory, offset, bytes, write)
                }
                Step::Atomic { thread: actor, block: place, counter } if (actor, place) == (index, block) => {
                    model.borrow_mut().access(thread, 2 * BLOCKS + 1, 4 * counter, 4, true, true);
                    fetch_add(counters.add(counter as u64), 1);
                    model.borrow_mut().acquire_release(thread, counter);
                }
                Step::SyncWarp(warp) if warp == warp_idx() as usize => {
                    rendezvous((number, group + warp), &|| sync_warp());
                }
                Step::SyncThreads => rendezvous((number, group), &|| sync_threads()),
                Step::Named(first, second) if [first, second].contains(&(warp_idx() as usize)) => {
                    rendezvous((number, group), &|| sync_named_barrier(1 + first as u32, 64));
                }
                _ => {}
            }
        }
    }
}

#[test]
fn agrees_with_full_vector_clocks() {
    let mut races = 0;
    let mut random = Random(0x1234_5678_9abc_def1);
    const PROGRAMS: usize = 1500;
    for number in 0..PROGRAMS {
        let program = program(&mut random);
        let (mut global, mut counters) = (vec![[0u64; 2]; (BLOCKS + 1) * BYTES / 16], [0u32; COUNTERS]);
        let mut memory = GlobalMemory::new();
        let (global, counters) = (memory.writable(&mut global).cast(), memory.writable(&mut counters));
        let model = RefCell::new(Model::new());
        let launch = Launch {
            grid_blocks: BLOCKS as u32,
            block_threads: BLOCK_THREADS as u32,
            shared_bytes: BYTES as u32,
            seed: number as u64,
        };
        let result = launch.run(&mut memory, || interpret(&program, &model, global, counters));
        let race = model.borrow().race;
        match result {
            Ok(_) => assert!(!race, "program {number}: missed a race\n{program:#?}"),
            Err(EmulatorError::DataRace { .. }) => assert!(race, "program {number}: no race\n{program:#?}"),
            Err(other) => panic!("program {number}: {other}\n{program:#?}"),
        }
        races += race as usize;
    }
    assert!((PROGRAMS / 10..PROGRAMS * 9 / 10).contains(&races), "{races} of {PROGRAMS} programs race");
}
