//! The state of the block that runs now, and every question a thread may ask it.
mod bulk;
mod copies;
mod global;
mod mbarrier;
mod rendezvous;
mod shared;
mod wgmma;

use std::{cell::Cell, collections::VecDeque, ptr};

use bulk::BulkStores;
use copies::PendingCopy;
use corosensei::Yielder;
pub use global::Order;
use mbarrier::Mbarrier;
use rendezvous::NamedBarrier;
use wgmma::Products;
pub use wgmma::{A_SHARED, A_TRANSPOSED, ACCUMULATE, B_TRANSPOSED, BF16};

use super::{
    clock::{self, Accessor, Clocks},
    counters::Counters,
    error::{Access, AccessKind, Earlier, EmulatorError, Operation, Place, Space},
    global::{GlobalMemory, Regions},
    launch::Launch,
    random::Random,
    shadow::{Conflict, Rule},
    shared::SharedMemory,
    site::{Site, Sites, Tag},
    tensor::Registers,
    traffic::Traffic,
};

thread_local! {
    /// The machine whose threads run on this OS thread; null outside of a launch.
    pub static CURRENT: Cell<*mut Machine<'static>> = const { Cell::new(ptr::null_mut()) };
}

/// Payload of the unwinding that stops a thread after an error.
pub struct Stopped;

type Outcome<T> = Result<T, Box<EmulatorError>>;

pub struct Machine<'m> {
    launch: Launch,
    step_limit: u64,
    regions: &'m mut Regions,
    last_region: usize,
    shared: SharedMemory,
    clocks: Clocks,
    sites: Sites,
    traffic: Traffic,
    random: Random,
    pub counters: Counters,
    error: Option<Box<EmulatorError>>,
    /// The blocks of the grid in the order in which they run.
    order: Vec<u32>,
    block: u32,
    /// Index of the thread that runs, and the same for the shadow memory.
    thread: u32,
    accessor: Accessor,
    threads: Vec<Thread>,
    warps: Vec<Warp>,
    /// Bit `w` is set while warp `w` has a thread that can go on.
    ready_warps: u32,
    /// Warps that wait at `sync_threads`, and those that have exited.
    at_block_barrier: u32,
    exited_warps: u32,
    named_barriers: [NamedBarrier; 16],
    mbarriers: Vec<Mbarrier>,
    /// Warps that wait for their warpgroup.
    at_warpgroup: u32,
    /// Registers a thread of each warpgroup has, where it has said so.
    register_limits: [Option<u32>; 8],
    /// What each wants, where others have not given up enough yet.
    wanted_limits: [Option<(u32, Place)>; 8],
}

struct Thread {
    yielder: *const Yielder<(), ()>,
    status: Status,
    steps: u64,
    /// Asynchronous copies, oldest first; `groups` counts those of each committed group.
    copies: VecDeque<PendingCopy>,
    groups: VecDeque<u32>,
    uncommitted: u32,
    /// Accumulators it has handed to `wgmma`.
    tickets: u32,
    bulk_stores: BulkStores,
}

#[derive(Clone, Copy)]
enum Status {
    Running,
    Waiting(Operation, Site),
    Exited,
}

struct Warp {
    /// Lanes that can go on.
    ready: u32,
    /// Lanes that wait or have exited.
    stopped: u32,
    registers: [Registers; 32],
    products: Products,
}

impl<'m> Machine<'m> {
    pub fn new(
        launch: &Launch,
        step_limit: u64,
        order: Vec<u32>,
        memory: &'m mut GlobalMemory<'_>,
        random: Random,
    ) -> Self {
        let clocks = Clocks::new(memory.regions.next_rank);
        memory.regions.next_rank += launch.grid_blocks;
        Machine {
            launch: *launch,
            step_limit,
            regions: &mut memory.regions,
            last_region: 0,
            shared: SharedMemory::new(launch.shared_bytes),
            clocks,
            sites: Sites::new(),
            traffic: Traffic::new(launch.block_threads as usize / 32),
            random,
            counters: Counters::default(),
            error: None,
            order,
            block: 0,
            thread: 0,
            accessor: Accessor::default(),
            threads: Vec::new(),
            warps: Vec::new(),
            ready_warps: 0,
            at_block_barrier: 0,
            exited_warps: 0,
            named_barriers: Default::default(),
            mbarriers: Vec::new(),
            at_warpgroup: 0,
            register_limits: [None; 8],
            wanted_limits: [None; 8],
        }
    }

    #[inline]
    pub fn thread(&self) -> u32 {
        self.thread
    }
    #[inline]
    pub fn block(&self) -> u32 {
        self.block
    }
    #[inline]
    pub fn block_threads(&self) -> u32 {
        self.launch.block_threads
    }
    #[inline]
    pub fn grid_blocks(&self) -> u32 {
        self.launch.grid_blocks
    }

    #[inline]
    fn running(&mut self) -> &mut Thread {
        &mut self.threads[self.thread as usize]
    }
    #[inline]
    pub fn yielder(&mut self) -> *const Yielder<(), ()> {
        self.running().yielder
    }
    pub fn set_yielder(&mut self, yielder: *const Yielder<(), ()>) {
        self.running().yielder = yielder;
    }
    pub fn fail(&mut self, error: Box<EmulatorError>) {
        self.error = Some(error);
    }
    /// The error of a thread that was stopped.
    pub fn take_error(&mut self) -> Box<EmulatorError> {
        self.error.take().expect("a thread is only stopped after `fail`")
    }

    /// Starts the block that runs as number `rank` of its launch.
    pub fn start_block(&mut self, rank: u32) {
        let warps = self.launch.block_threads / 32;
        self.block = self.order[rank as usize];
        self.shared.shadow.reset();
        self.clocks.start_block(self.clocks.first_rank() + rank, self.launch.block_threads);
        self.threads = (0..self.launch.block_threads)
            .map(|_| Thread {
                yielder: ptr::null(),
                status: Status::Running,
                steps: 0,
                copies: VecDeque::new(),
                groups: VecDeque::new(),
                uncommitted: 0,
                tickets: 0,
                bulk_stores: BulkStores::default(),
            })
            .collect();
        let warp = |_| Warp { ready: !0, stopped: 0, registers: [[0; 10]; 32], products: Products::default() };
        self.warps = (0..warps).map(warp).collect();
        self.ready_warps = !0 >> (32 - warps);
        self.at_block_barrier = 0;
        self.exited_warps = 0;
        self.named_barriers = Default::default();
        self.mbarriers.clear();
        self.at_warpgroup = 0;
        self.register_limits = [None; 8];
        self.wanted_limits = [None; 8];
    }

    /// Picks the thread that goes on now; `None` when none can.
    #[inline]
    pub fn next_thread(&mut self) -> Option<u32> {
        if self.ready_warps == 0 {
            return None;
        }
        let warp = self.random.set_bit(self.ready_warps);
        let ready = &mut self.warps[warp as usize].ready;
        let lane = self.random.set_bit(*ready);
        *ready &= !(1 << lane);
        if *ready == 0 {
            self.ready_warps &= !(1 << warp);
        }
        self.thread = 32 * warp + lane;
        self.start_run();
        Some(self.thread)
    }

    /// The running thread starts or goes on.
    #[inline]
    fn start_run(&mut self) {
        self.accessor = self.clocks.accessor(self.thread);
        self.traffic.start_run();
    }

    /// The running thread has returned from the kernel.
    pub fn exit(&mut self) -> Outcome<()> {
        self.exit_bulk_stores()?;
        self.running().status = Status::Exited;
        self.stop_lane().map(|_| ())
    }

    /// When no thread can go on, all must have exited.
    pub fn finish_block(&self) -> Outcome<()> {
        if self.exited_warps.count_ones() == self.warps.len() as u32 {
            return match self.loads().next() {
                Some(load) => {
                    Err(Box::new(EmulatorError::NeverWaited { kind: AccessKind::BulkCopy, place: load.place }))
                }
                None => Ok(()),
            };
        }
        self.check_announced_bytes()?;
        self.check_wanted_registers()?;
        Err(Box::new(EmulatorError::Deadlock { block: self.block, waiting: self.waiting(0..self.threads.len()) }))
    }

    fn place(&self, site: Site) -> Place {
        Place { location: site, thread: self.thread, block: self.block }
    }

    fn access(&self, space: Space, kind: AccessKind, address: u64, bytes: u32, site: Site) -> Access {
        Access { space, kind, address, bytes, place: self.place(site) }
    }

    #[inline]
    fn step(&mut self, site: Site) -> Outcome<()> {
        let limit = self.step_limit;
        let thread = self.running();
        thread.steps += 1;
        if thread.steps > limit {
            return Err(Box::new(EmulatorError::StepLimit { limit, place: self.place(site) }));
        }
        if self.traffic.is_full(self.thread) {
            self.traffic.gather(self.thread as usize / 32, &mut self.counters);
        }
        Ok(())
    }

    /// Tells what an access of the running thread collided with.
    #[cold]
    fn conflict(
        &self,
        space: Space,
        kind: AccessKind,
        address: u64,
        bytes: u32,
        site: Site,
        conflict: Conflict,
    ) -> Box<EmulatorError> {
        let access = self.access(space, kind, address, bytes, site);
        let byte = address + conflict.offset as u64;
        Box::new(match conflict.rule {
            Rule::Uninitialised => EmulatorError::Uninitialised { access, byte },
            Rule::Pending(thread, tag) => EmulatorError::UnfinishedCopy { copy: self.earlier(thread, tag), access },
            Rule::Race(thread, tag) => {
                EmulatorError::DataRace { byte, first: self.earlier(thread, tag), second: access }
            }
            Rule::Unfenced(thread, tag) => {
                EmulatorError::MissingProxyFence { write: self.earlier(thread, tag), read: access }
            }
            Rule::Held if space == Space::Global => {
                let copy = self.load_that_reads(byte & !15).expect("a copy holds the bytes");
                EmulatorError::UnfinishedSource { copy, access }
            }
            Rule::Held => {
                let offset = (byte as u32 - self.shared.address(0)) as usize;
                match self.reader_of(offset) {
                    Some(product) => EmulatorError::UnfinishedProduct { product, access },
                    None => {
                        let copy = self.store_that_reads(offset).expect("a product or a copy holds the bytes");
                        EmulatorError::UnfinishedSource { copy, access }
                    }
                }
            }
            Rule::NotConstant(thread, tag) => {
                EmulatorError::NotConstant { load: access, store: self.earlier(thread, tag) }
            }
        })
    }

    /// What the running thread wrote is visible to the async proxy for whoever is ordered after this.
    pub fn fence_proxy(&mut self) {
        self.clocks.fence_proxy(self.thread);
        self.accessor = self.clocks.accessor(self.thread);
    }

    fn earlier(&self, thread: u32, tag: Tag) -> Earlier {
        let (rank, thread) = clock::thread_of(thread);
        // A copy that has landed is its barrier's write; the barrier knows who issued it.
        let thread = clock::agent_of(thread).map_or(thread, |agent| self.issuer(agent));
        let block = self.order[(rank - self.clocks.first_rank()) as usize];
        Earlier { kind: tag.kind(), place: Place { location: self.sites.site(tag), thread, block } }
    }
}
