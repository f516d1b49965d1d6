//! Runs a grid: blocks one after another, the threads of a block as coroutines on the calling OS thread.
use std::{
    any::Any,
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
};

use corosensei::{Coroutine, CoroutineResult, Yielder, stack::DefaultStack};

use super::{
    clock::MAX_RANKS,
    counters::Counters,
    error::EmulatorError,
    global::GlobalMemory,
    machine::{CURRENT, Machine, Stopped},
    random::Random,
};

/// Room for a kernel's frames; pages are only touched when used.
const STACK_BYTES: usize = 256 << 10;

thread_local! {
    /// Stacks of finished launches, kept for the next one: mapping one costs more than running a thread.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks in the grid.
    pub grid_blocks: u32,
    /// Threads in a block: a multiple of 32, at most 1024.
    pub block_threads: u32,
    /// Dynamic shared memory of a block, at most 227 KiB.
    pub shared_bytes: u32,
    /// Order of blocks, warps and lanes. Any value is a legal order.
    pub seed: u64,
}

/// What a launch that broke no rule did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What the hardware would have paid.
    pub counters: Counters,
}

impl Launch {
    /// Memory accesses and collectives one thread may make: the emulator needs seconds for as many.
    const STEP_LIMIT: u64 = 1 << 22;

    /// Runs `kernel` once for every thread of the grid. A kernel that needs more stack than a coroutine has
    /// (256 KiB) hits a guard page and ends the process.
    ///
    /// # Errors
    /// The first rule that the kernel breaks; memory then holds whatever had been written by that time.
    pub fn run(&self, memory: &mut GlobalMemory<'_>, kernel: impl Fn()) -> Result<Report, EmulatorError> {
        self.check(memory)?;
        let mut random = Random::new(self.seed);
        let mut order: Vec<u32> = (0..self.grid_blocks).collect();
        random.shuffle(&mut order);
        let mut stacks = STACKS.take();
        while stacks.len() < self.block_threads as usize {
            stacks.push(
                DefaultStack::new(STACK_BYTES).map_err(|error| EmulatorError::NoStack { reason: error.to_string() })?,
            );
        }
        let mut machine = Machine::new(self, Self::STEP_LIMIT, order, memory, random);
        let result = (0..self.grid_blocks).try_for_each(|rank| run_block(&mut machine, rank, &kernel, &mut stacks));
        STACKS.set(stacks);
        result.map(|()| Report { counters: machine.counters })
    }

    fn check(&self, memory: &GlobalMemory<'_>) -> Result<(), EmulatorError> {
        let invalid =
            |field, found: u32, supported| Err(EmulatorError::InvalidLaunch { field, found: found as u64, supported });
        match *self {
            Launch { block_threads, .. } if block_threads % 32 != 0 || !(32..=1024).contains(&block_threads) => {
                invalid("block_threads", block_threads, "a multiple of 32 from 32 to 1024")
            }
            Launch { shared_bytes, .. } if shared_bytes > 227 << 10 => {
                invalid("shared_bytes", shared_bytes, "at most 227 KiB")
            }
            Launch { grid_blocks, .. } if grid_blocks > MAX_RANKS - memory.regions.next_rank => {
                invalid("grid_blocks", grid_blocks, "2 million blocks over all launches on one GlobalMemory")
            }
            _ => Ok(()),
        }
    }
}

/// Puts the previous machine back when a launch ends, so that a kernel's host code may itself launch.
struct Entered(*mut Machine<'static>);

impl Entered {
    fn new(machine: *mut Machine<'_>) -> Self {
        Entered(CURRENT.replace(machine.cast()))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

fn run_block(
    machine: &mut Machine<'_>,
    rank: u32,
    kernel: &impl Fn(),
    stacks: &mut Vec<DefaultStack>,
) -> Result<(), EmulatorError> {
    machine.start_block(rank);
    let block = machine.block();
    // From here on only short borrows are made through this pointer, here and by the threads.
    let machine: *mut Machine<'_> = machine;
    let _entered = Entered::new(machine);
    // SAFETY: the machine outlives this function, and no other reference to it is alive.
    let with = || unsafe { &mut *machine };
    let mut threads: Vec<Coroutine<(), (), ()>> = stacks
        .drain(stacks.len() - with().block_threads() as usize..)
        .map(|stack| {
            let body = |yielder: &Yielder<(), ()>, ()| {
                // SAFETY: the machine outlives the coroutines, which end with `run_block`.
                unsafe { (*CURRENT.get()).set_yielder(yielder) };
                kernel();
            };
            // SAFETY: `kernel` outlives the coroutines: all are finished or dropped before `run_block` returns.
            unsafe { Coroutine::with_stack_unchecked(stack, body) }
        })
        .collect();
    let mut result = Ok(());
    while let Some(thread) = with().next_thread() {
        let resumed = catch_unwind(AssertUnwindSafe(|| threads[thread as usize].resume(())));
        let outcome = match resumed {
            Ok(CoroutineResult::Yield(())) => Ok(()),
            Ok(CoroutineResult::Return(())) => with().exit(),
            Err(payload) => Err(match payload.is::<Stopped>() {
                true => with().take_error(),
                false => Box::new(EmulatorError::KernelPanic { message: message(&*payload), thread, block }),
            }),
        };
        if let Err(error) = outcome {
            result = Err(*error);
            break;
        }
    }
    if result.is_ok() {
        result = with().finish_block().map_err(|error| *error);
    }
    if result.is_err() {
        with().abandon_copies();
    }
    for mut thread in threads {
        thread.force_unwind();
        stacks.push(thread.into_stack());
    }
    result
}

fn message(payload: &(dyn Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text.to_string(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without a message".into(),
    }
}
