//! The state of the block that runs now, and every question a thread may ask it.
use std::{cell::Cell, collections::VecDeque, ptr};

use corosensei::Yielder;

use super::{
    arithmetic,
    clock::{self, Accessor, Clocks},
    counters::Counters,
    error::{Access, AccessKind, Earlier, EmulatorError, Operation, Place, Space, Waiting},
    global::{GlobalMemory, Regions},
    launch::Launch,
    random::Random,
    shadow::{Conflict, Rule, Writers},
    shared::{self, SharedMemory},
    site::{Site, Sites, Tag},
    tensor::{self, Registers},
    traffic::{self, Traffic},
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
    /// Warps that wait at each named barrier.
    at_named_barrier: [u32; 16],
}

struct Thread {
    yielder: *const Yielder<(), ()>,
    status: Status,
    steps: u64,
    /// Asynchronous copies, oldest first; `groups` counts those of each committed group.
    copies: VecDeque<PendingCopy>,
    groups: VecDeque<u32>,
    uncommitted: u32,
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
}

#[derive(Clone, Copy)]
struct PendingCopy {
    destination: u32,
    source: u64,
    source_bytes: u32,
    site: Site,
    /// Who had written the source's line when the copy started.
    source_writers: Writers,
}

/// What an atomic orders.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Relaxed,
    AcquireRelease,
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
            at_named_barrier: [0; 16],
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
            })
            .collect();
        self.warps = (0..warps).map(|_| Warp { ready: !0, stopped: 0, registers: [[0; 10]; 32] }).collect();
        self.ready_warps = !0 >> (32 - warps);
        self.at_block_barrier = 0;
        self.exited_warps = 0;
        self.at_named_barrier = [0; 16];
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
        self.running().status = Status::Exited;
        self.stop_lane().map(|_| ())
    }

    /// When no thread can go on, all must have exited.
    pub fn finish_block(&self) -> Outcome<()> {
        if self.exited_warps.count_ones() == self.warps.len() as u32 {
            return Ok(());
        }
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
}

/// Rendezvous.
impl Machine<'_> {
    /// The running thread arrives; true if it may go on at once, because it was the last one missing.
    pub fn arrive(&mut self, operation: Operation, site: Site, operands: Registers) -> Outcome<bool> {
        self.step(site)?;
        let (warp, lane) = (self.thread as usize / 32, self.thread as usize % 32);
        self.warps[warp].registers[lane] = operands;
        self.running().status = Status::Waiting(operation, site);
        self.stop_lane()
    }

    /// What the rendezvous gave the running thread.
    #[inline]
    pub fn results(&self) -> Registers {
        self.warps[self.thread as usize / 32].registers[self.thread as usize % 32]
    }

    /// The running thread waits or has exited. Once its whole warp has, something must happen; true if the running
    /// thread may go on.
    fn stop_lane(&mut self) -> Outcome<bool> {
        let index = self.thread as usize / 32;
        self.warps[index].stopped += 1;
        if self.warps[index].stopped < 32 {
            return Ok(false);
        }
        let lanes = 32 * index..32 * index + 32;
        let first = self.threads[lanes.start].status;
        let together = self.threads[lanes.clone()].iter().all(|thread| match (first, thread.status) {
            (Status::Exited, Status::Exited) => true,
            (Status::Waiting(operation, site), Status::Waiting(other, other_site)) => {
                operation == other && (ptr::eq(site, other_site) || site == other_site)
            }
            _ => false,
        });
        if !together {
            let waiting = self.waiting(lanes);
            return Err(Box::new(EmulatorError::Divergence { block: self.block, warp: index as u32, waiting }));
        }
        self.traffic.gather(index, &mut self.counters);
        match first {
            Status::Waiting(operation, site) => self.warp_arrived(index, operation, site)?,
            _ => {
                self.exited_warps |= 1 << index;
                self.try_block_barrier()?;
            }
        }
        // Its warp was released: the last lane to arrive goes on without suspending.
        let (warp, lane) = (&mut self.warps[index], self.thread % 32);
        let goes_on = warp.ready >> lane & 1 == 1;
        if goes_on {
            warp.ready &= !(1 << lane);
            if warp.ready == 0 {
                self.ready_warps &= !(1 << index);
            }
            self.start_run();
        }
        Ok(goes_on)
    }

    fn release(&mut self, warps: u32) {
        for index in (0..32).filter(|index| warps >> index & 1 == 1) {
            let warp: &mut Warp = &mut self.warps[index];
            warp.ready = !0;
            warp.stopped = 0;
            for thread in &mut self.threads[32 * index..32 * index + 32] {
                thread.status = Status::Running;
            }
        }
        self.ready_warps |= warps;
    }

    fn warp_arrived(&mut self, index: usize, operation: Operation, site: Site) -> Outcome<()> {
        let registers = &mut self.warps[index].registers;
        match operation {
            Operation::SyncThreads => {
                self.at_block_barrier |= 1 << index;
                return self.try_block_barrier();
            }
            Operation::NamedBarrier { id, threads } => return self.arrive_named_barrier(index, id, threads),
            Operation::SyncWarp => self.clocks.synchronise(1 << index),
            Operation::ShuffleXor | Operation::Shuffle => {
                let values = registers.map(|registers| registers[0]);
                for (lane, registers) in registers.iter_mut().enumerate() {
                    let source = match operation {
                        Operation::Shuffle => registers[1] % 32,
                        _ => (lane as u32 ^ registers[1]) % 32,
                    };
                    registers[0] = values[source as usize];
                }
                self.counters.shuffles += 1;
            }
            Operation::Ballot => {
                let ballot =
                    registers.iter().enumerate().fold(0, |ballot, (lane, registers)| ballot | registers[0] << lane);
                registers.fill([ballot; 10]);
                self.counters.shuffles += 1;
            }
            Operation::MmaBf16 => {
                tensor::multiply_accumulate(registers, arithmetic::f32_from_bf16);
                self.counters.mma += 1;
            }
            Operation::MmaF16 => {
                tensor::multiply_accumulate(registers, arithmetic::f32_from_f16);
                self.counters.mma += 1;
            }
            Operation::LoadMatrix => self.load_matrix(index, site, false)?,
            Operation::LoadMatrixTransposed => self.load_matrix(index, site, true)?,
        }
        self.release(1 << index);
        Ok(())
    }

    fn try_block_barrier(&mut self) -> Outcome<()> {
        let live = !0 >> (32 - self.warps.len()) & !self.exited_warps;
        if self.at_block_barrier != live || live == 0 {
            return Ok(());
        }
        let mut sites = (0..self.warps.len()).filter_map(|warp| match self.threads[32 * warp].status {
            Status::Waiting(_, site) => Some(site),
            _ => None,
        });
        let first = sites.next();
        if sites.any(|site| Some(site) != first) {
            let waiting = self.waiting(0..self.threads.len());
            return Err(Box::new(EmulatorError::MismatchedBarrier { block: self.block, waiting }));
        }
        self.at_block_barrier = 0;
        self.counters.block_barriers += 1;
        self.clocks.synchronise(live);
        self.release(live);
        Ok(())
    }

    /// Refuses what no phase of a named barrier can be.
    pub fn check_named_barrier(&self, id: u32, threads: u32, site: Site) -> Outcome<()> {
        let wrong = |field, found, wanted: String| {
            Err(Box::new(EmulatorError::NamedBarrier { field, found, wanted, place: self.place(site) }))
        };
        if !(1..16).contains(&id) {
            return wrong("id", id, "1 to 15".into());
        }
        let block = self.launch.block_threads;
        if threads == 0 || !threads.is_multiple_of(32) || threads > block {
            return wrong("threads", threads, format!("a multiple of 32 from 32 to the block's {block}"));
        }
        Ok(())
    }

    fn arrive_named_barrier(&mut self, index: usize, id: u32, threads: u32) -> Outcome<()> {
        let here = self.at_named_barrier[id as usize];
        if here != 0 {
            let earlier = self.threads[32 * here.trailing_zeros() as usize].status;
            if let Status::Waiting(Operation::NamedBarrier { threads: wanted, .. }, other) = earlier
                && wanted != threads
            {
                let Status::Waiting(_, site) = self.threads[32 * index].status else { return Ok(()) };
                return Err(Box::new(EmulatorError::NamedBarrier {
                    field: "threads",
                    found: threads,
                    wanted: format!("{wanted}, as the warp that already waits at {other} said"),
                    place: self.place(site),
                }));
            }
        }
        self.at_named_barrier[id as usize] |= 1 << index;
        if 32 * self.at_named_barrier[id as usize].count_ones() == threads {
            let warps = std::mem::take(&mut self.at_named_barrier[id as usize]);
            self.counters.named_barriers += 1;
            self.clocks.synchronise(warps);
            self.release(warps);
        }
        Ok(())
    }

    /// Groups the threads that have stopped by where they did.
    fn waiting(&self, threads: std::ops::Range<usize>) -> Vec<Waiting> {
        let mut groups: Vec<Waiting> = Vec::new();
        for thread in threads {
            let point = match self.threads[thread].status {
                Status::Waiting(operation, location) => Some((operation, location)),
                Status::Exited => None,
                Status::Running => continue,
            };
            match groups.iter_mut().find(|group| group.point == point) {
                Some(group) => group.threads.push(thread as u32),
                None => groups.push(Waiting { point, threads: vec![thread as u32] }),
            }
        }
        groups
    }
}

/// Shared memory.
impl Machine<'_> {
    /// Offset of an access that is aligned and inside.
    #[inline]
    fn shared_offset(&self, kind: AccessKind, address: u32, bytes: u32, site: Site) -> Outcome<usize> {
        let offset = self.shared.offset(address, bytes);
        match offset {
            Some(offset) if address & (bytes - 1) == 0 => Ok(offset),
            _ => {
                let access = self.access(Space::Shared, kind, address as u64, bytes, site);
                Err(Box::new(match offset {
                    None => {
                        let (start, bytes) = (shared::BASE as u64, self.launch.shared_bytes as u64);
                        EmulatorError::OutOfBounds { access, nearest: (bytes > 0).then_some(start..start + bytes) }
                    }
                    Some(_) => EmulatorError::Misaligned { access, alignment: bytes },
                }))
            }
        }
    }

    /// # Safety
    /// `into` is good for `bytes`.
    pub unsafe fn load_shared(&mut self, address: u32, into: *mut u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let offset = self.shared_offset(AccessKind::Load, address, bytes, site)?;
        let tag = self.sites.tag(AccessKind::Load, site);
        if let Err(conflict) = self.shared.shadow.read(offset, bytes, tag, &self.accessor, &self.clocks) {
            return Err(self.conflict(Space::Shared, AccessKind::Load, address as u64, bytes, site, conflict));
        }
        self.traffic.shared(self.thread, tag, offset, bytes);
        // SAFETY: the range was checked; `into` is the caller's promise.
        unsafe { ptr::copy_nonoverlapping(self.shared.bytes.as_ptr().add(offset), into, bytes as usize) };
        Ok(())
    }

    /// # Safety
    /// `from` is good for `bytes`.
    pub unsafe fn store_shared(&mut self, address: u32, from: *const u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let offset = self.shared_offset(AccessKind::Store, address, bytes, site)?;
        let tag = self.sites.tag(AccessKind::Store, site);
        if let Err(conflict) = self.shared.shadow.write(offset, bytes, tag, &self.accessor, &self.clocks) {
            return Err(self.conflict(Space::Shared, AccessKind::Store, address as u64, bytes, site, conflict));
        }
        self.traffic.shared(self.thread, tag, offset, bytes);
        // SAFETY: the range was checked; `from` is the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, self.shared.bytes.as_mut_ptr().add(offset), bytes as usize) };
        Ok(())
    }

    /// Register 0 of each lane is a row's address.
    fn load_matrix(&mut self, warp: usize, site: Site, transposed: bool) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::LoadMatrix;
        let tag = self.sites.tag(KIND, site);
        let accessor = self.clocks.warp_accessor(warp as u32);
        let running = self.thread;
        let mut offsets = [0; 32];
        let mut rows = [[0u16; 8]; 32];
        for (lane, row) in rows.iter_mut().enumerate() {
            // Errors name the lane that gave the address.
            self.thread = (32 * warp + lane) as u32;
            let address = self.warps[warp].registers[lane][0];
            let offset = self.shared_offset(KIND, address, 16, site)?;
            if let Err(conflict) = self.shared.shadow.read(offset, 16, tag, &accessor, &self.clocks) {
                return Err(self.conflict(Space::Shared, KIND, address as u64, 16, site, conflict));
            }
            for (value, bytes) in row.iter_mut().zip(self.shared.bytes[offset..offset + 16].chunks_exact(2)) {
                *value = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
            offsets[lane] = offset as u32;
        }
        self.thread = running;
        for matrix in offsets.chunks_exact(8) {
            let words = matrix.iter().flat_map(|offset| offset / 4..offset / 4 + 4);
            self.counters.load_matrix_bank_conflicts += traffic::passes(words) - 1;
        }
        tensor::distribute(&rows, transposed, &mut self.warps[warp].registers);
        self.counters.load_matrix += 1;
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
            Rule::NotConstant(thread, tag) => {
                EmulatorError::NotConstant { load: access, store: self.earlier(thread, tag) }
            }
        })
    }

    fn earlier(&self, thread: u32, tag: Tag) -> Earlier {
        let (rank, thread) = clock::thread_of(thread);
        let block = self.order[(rank - self.clocks.first_rank()) as usize];
        Earlier { kind: tag.kind(), place: Place { location: self.sites.site(tag), thread, block } }
    }
}

/// Global memory.
impl Machine<'_> {
    /// Region and offset of an access that is aligned, inside and allowed.
    #[inline]
    fn global_access(
        &mut self,
        kind: AccessKind,
        address: u64,
        bytes: u32,
        alignment: u32,
        site: Site,
    ) -> Outcome<(usize, u64)> {
        let Some(index) = self.regions.find(address, bytes, &mut self.last_region) else {
            let access = self.access(Space::Global, kind, address, bytes, site);
            let nearest = self.regions.nearest(address);
            return Err(Box::new(EmulatorError::OutOfBounds { access, nearest }));
        };
        if address & (alignment as u64 - 1) != 0 {
            let access = self.access(Space::Global, kind, address, bytes, site);
            return Err(Box::new(EmulatorError::Misaligned { access, alignment }));
        }
        let tag = self.sites.tag(kind, site);
        let writes = matches!(kind, AccessKind::Store | AccessKind::Atomic);
        let region = self.regions.region(index);
        let line_offset = address - region.line_address();
        match &mut region.shadow {
            Some(shadow) => {
                let offset = line_offset as usize;
                let result = match writes {
                    true => shadow.write(offset, bytes, tag, &self.accessor, &self.clocks),
                    false => shadow.read(offset, bytes, tag, &self.accessor, &self.clocks),
                };
                if let Err(conflict) = result {
                    return Err(self.conflict(Space::Global, kind, address, bytes, site, conflict));
                }
            }
            None if writes => {
                let access = self.access(Space::Global, kind, address, bytes, site);
                return Err(Box::new(EmulatorError::ReadOnly { access }));
            }
            None => {}
        }
        if kind != AccessKind::Atomic {
            self.traffic.global(self.thread, tag, index, line_offset, bytes);
        }
        Ok((index, address - self.regions.region(index).address))
    }

    /// # Safety
    /// `into` is good for `bytes`.
    pub unsafe fn load_global(
        &mut self,
        kind: AccessKind,
        address: u64,
        into: *mut u8,
        bytes: u32,
        site: Site,
    ) -> Outcome<()> {
        self.step(site)?;
        let (index, offset) = self.global_access(kind, address, bytes, bytes, site)?;
        // SAFETY: the range was checked; `into` is the caller's promise.
        unsafe { self.regions.region(index).read(offset, into, bytes) };
        Ok(())
    }

    /// # Safety
    /// `from` is good for `bytes`.
    pub unsafe fn store_global(&mut self, address: u64, from: *const u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let (index, offset) = self.global_access(AccessKind::Store, address, bytes, bytes, site)?;
        // SAFETY: the range was checked and is writable; `from` is the caller's promise.
        unsafe { self.regions.region(index).write(offset, from, bytes) };
        Ok(())
    }

    pub fn atomic(&mut self, address: u64, site: Site, order: Order, update: impl Fn(u32) -> u32) -> Outcome<u32> {
        self.step(site)?;
        let (index, offset) = self.global_access(AccessKind::Atomic, address, 4, 4, site)?;
        self.counters.atomics += 1;
        if order == Order::AcquireRelease {
            self.clocks.acquire_release(address, self.thread);
            self.accessor = self.clocks.accessor(self.thread);
        }
        let region = self.regions.region(index);
        let mut bytes = [0; 4];
        // SAFETY: the range was checked and is writable.
        unsafe { region.read(offset, bytes.as_mut_ptr(), 4) };
        let old = u32::from_ne_bytes(bytes);
        // SAFETY: as above.
        unsafe { region.write(offset, update(old).to_ne_bytes().as_ptr(), 4) };
        Ok(old)
    }
}

/// Asynchronous copies: they read their source and write their destination when they are waited for, as late as
/// the rules allow.
impl Machine<'_> {
    pub fn start_copy(&mut self, destination: u32, source: u64, source_bytes: u32, site: Site) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::AsyncCopy;
        self.step(site)?;
        if source_bytes > 16 {
            return Err(Box::new(EmulatorError::CopySize { source_bytes, place: self.place(site) }));
        }
        let offset = self.shared_offset(KIND, destination, 16, site)?;
        let tag = self.sites.tag(KIND, site);
        if let Err(conflict) = self.shared.shadow.write(offset, 16, tag, &self.accessor, &self.clocks) {
            return Err(self.conflict(Space::Shared, KIND, destination as u64, 16, site, conflict));
        }
        let mut source_writers = Writers::default();
        if source_bytes > 0 {
            let (index, _) = self.global_access(KIND, source, source_bytes, 16, site)?;
            let region = self.regions.region(index);
            if let Some(shadow) = &region.shadow {
                source_writers = shadow.writers((source - region.line_address()) as usize);
            }
        }
        self.counters.async_copy_bytes += source_bytes as u64;
        let thread = self.running();
        thread.copies.push_back(PendingCopy { destination, source, source_bytes, site, source_writers });
        thread.uncommitted += 1;
        Ok(())
    }

    pub fn commit_copies(&mut self) {
        let thread = self.running();
        thread.groups.push_back(std::mem::take(&mut thread.uncommitted));
    }

    /// Finishes the running thread's copies until at most `pending` groups are left.
    pub fn wait_copies(&mut self, pending: u32) -> Outcome<()> {
        while self.running().groups.len() > pending as usize {
            let count = self.running().groups.pop_front().unwrap_or(0);
            for _ in 0..count {
                let Some(copy) = self.running().copies.pop_front() else { break };
                self.finish_copy(copy)?;
            }
        }
        Ok(())
    }

    fn finish_copy(&mut self, copy: PendingCopy) -> Outcome<()> {
        let mut bytes = [0; 16];
        if copy.source_bytes > 0 {
            let index = self
                .regions
                .find(copy.source, copy.source_bytes, &mut self.last_region)
                .expect("the copy was checked when it started");
            self.check_source(index, &copy)?;
            let region = self.regions.region(index);
            // SAFETY: the range was checked when the copy started, and `bytes` has room for 16.
            unsafe { region.read(copy.source - region.address, bytes.as_mut_ptr(), copy.source_bytes) };
        }
        let offset = self.shared_offset(AccessKind::AsyncCopy, copy.destination, 16, copy.site)?;
        self.shared.bytes[offset..offset + 16].copy_from_slice(&bytes);
        self.shared.shadow.land(offset, &self.accessor);
        Ok(())
    }

    /// Nobody may write the source while the copy runs; until its wait, the copy may read.
    fn check_source(&mut self, index: usize, copy: &PendingCopy) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::AsyncCopy;
        let tag = self.sites.tag(KIND, copy.site);
        let region = self.regions.region(index);
        let offset = (copy.source - region.line_address()) as usize;
        let Some(shadow) = &mut region.shadow else { return Ok(()) };
        let changed = shadow.writers(offset).iter().zip(&copy.source_writers).position(|(now, then)| now != then);
        let result = match changed {
            Some(granule) if 2 * granule < copy.source_bytes as usize => {
                let writer = shadow.writers(offset)[granule].0;
                let tag = shadow.last_write(offset + 2 * granule);
                Err(Conflict { rule: Rule::Race(writer, tag), offset: 2 * granule })
            }
            _ => shadow.read(offset, copy.source_bytes, tag, &self.accessor, &self.clocks),
        };
        result
            .map_err(|conflict| self.conflict(Space::Global, KIND, copy.source, copy.source_bytes, copy.site, conflict))
    }
}
