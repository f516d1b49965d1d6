//! The state of the block that runs now, and every question a thread may ask it.
use std::{cell::Cell, collections::VecDeque, panic::Location, ptr};

use corosensei::Yielder;

use super::{
    arithmetic,
    counters::Counters,
    error::{Access, AccessKind, EmulatorError, Operation, Place, Space, Waiting},
    global::{GlobalMemory, Regions},
    launch::Launch,
    random::Random,
    shared::{ByteState, SharedMemory},
    tensor::{self, Registers},
};

thread_local! {
    /// The machine whose threads run on this OS thread; null outside of a launch.
    pub static CURRENT: Cell<*mut Machine<'static>> = const { Cell::new(ptr::null_mut()) };
}

/// Payload of the unwinding that stops a thread after an error.
pub struct Stopped;

type Site = &'static Location<'static>;
type Outcome<T> = Result<T, Box<EmulatorError>>;

pub struct Machine<'m> {
    launch: Launch,
    step_limit: u64,
    regions: &'m mut Regions,
    last_region: usize,
    shared: SharedMemory,
    random: Random,
    pub counters: Counters,
    error: Option<Box<EmulatorError>>,
    block: u32,
    /// Index of the thread that runs.
    thread: u32,
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
}

impl<'m> Machine<'m> {
    pub fn new(launch: &Launch, step_limit: u64, memory: &'m mut GlobalMemory<'_>, random: Random) -> Self {
        Machine {
            launch: *launch,
            step_limit,
            regions: &mut memory.regions,
            last_region: 0,
            shared: SharedMemory::new(launch.shared_bytes),
            random,
            counters: Counters::default(),
            error: None,
            block: 0,
            thread: 0,
            threads: Vec::new(),
            warps: Vec::new(),
            ready_warps: 0,
            at_block_barrier: 0,
            exited_warps: 0,
            at_named_barrier: [0; 16],
        }
    }

    pub fn thread(&self) -> u32 {
        self.thread
    }
    pub fn block(&self) -> u32 {
        self.block
    }
    pub fn block_threads(&self) -> u32 {
        self.launch.block_threads
    }
    pub fn grid_blocks(&self) -> u32 {
        self.launch.grid_blocks
    }

    fn running(&mut self) -> &mut Thread {
        &mut self.threads[self.thread as usize]
    }
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

    pub fn start_block(&mut self, block: u32) {
        let warps = self.launch.block_threads / 32;
        self.block = block;
        self.shared.reset();
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
        Some(self.thread)
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
        match first {
            Status::Waiting(operation, site) => self.warp_arrived(index, operation, site)?,
            _ => {
                self.exited_warps |= 1 << index;
                self.try_block_barrier();
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
                self.try_block_barrier();
                return Ok(());
            }
            Operation::NamedBarrier { id, threads } => return self.arrive_named_barrier(index, id, threads),
            Operation::SyncWarp => {}
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

    fn try_block_barrier(&mut self) {
        let live = !0 >> (32 - self.warps.len()) & !self.exited_warps;
        if self.at_block_barrier == live && live != 0 {
            self.at_block_barrier = 0;
            self.counters.block_barriers += 1;
            self.release(live);
        }
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
    fn shared_offset(&self, kind: AccessKind, address: u32, bytes: u32, site: Site) -> Outcome<usize> {
        let access = || self.access(Space::Shared, kind, address as u64, bytes, site);
        let offset = self
            .shared
            .offset(address, bytes)
            .ok_or_else(|| Box::new(EmulatorError::OutOfBounds { access: access() }))?;
        if !address.is_multiple_of(bytes) {
            return Err(Box::new(EmulatorError::Misaligned { access: access() }));
        }
        Ok(offset)
    }

    fn read_shared(&mut self, kind: AccessKind, address: u32, bytes: u32, site: Site) -> Outcome<usize> {
        let offset = self.shared_offset(kind, address, bytes, site)?;
        let states = &self.shared.states[offset..offset + bytes as usize];
        if let Some(first) = states.iter().position(|state| *state != ByteState::Written) {
            let access = self.access(Space::Shared, kind, address as u64, bytes, site);
            return Err(match states[first] {
                ByteState::Pending => self.unfinished_copy(access, offset + first),
                _ => Box::new(EmulatorError::Uninitialised { access, byte: address as u64 + first as u64 }),
            });
        }
        Ok(offset)
    }

    fn write_shared(
        &mut self,
        kind: AccessKind,
        address: u32,
        bytes: u32,
        site: Site,
        state: ByteState,
    ) -> Outcome<usize> {
        let offset = self.shared_offset(kind, address, bytes, site)?;
        let states = &mut self.shared.states[offset..offset + bytes as usize];
        if let Some(first) = states.iter().position(|state| *state == ByteState::Pending) {
            let access = self.access(Space::Shared, kind, address as u64, bytes, site);
            return Err(self.unfinished_copy(access, offset + first));
        }
        states.fill(state);
        Ok(offset)
    }

    fn unfinished_copy(&self, access: Access, offset: usize) -> Box<EmulatorError> {
        let destination = (offset as u32 & !15) + super::shared::BASE;
        let copy = self.threads.iter().enumerate().find_map(|(thread, state)| {
            let copy = state.copies.iter().find(|copy| copy.destination == destination)?;
            let place = Place { location: copy.site, thread: thread as u32, block: self.block };
            Some(Access {
                space: Space::Shared,
                kind: AccessKind::AsyncCopy,
                address: destination as u64,
                bytes: 16,
                place,
            })
        });
        Box::new(EmulatorError::UnfinishedCopy { copy: copy.unwrap_or(access), access })
    }

    /// # Safety
    /// `into` is good for `bytes`.
    pub unsafe fn load_shared(&mut self, address: u32, into: *mut u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let offset = self.read_shared(AccessKind::Load, address, bytes, site)?;
        // SAFETY: the range was checked; `into` is the caller's promise.
        unsafe { ptr::copy_nonoverlapping(self.shared.bytes.as_ptr().add(offset), into, bytes as usize) };
        Ok(())
    }

    /// # Safety
    /// `from` is good for `bytes`.
    pub unsafe fn store_shared(&mut self, address: u32, from: *const u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let offset = self.write_shared(AccessKind::Store, address, bytes, site, ByteState::Written)?;
        // SAFETY: the range was checked; `from` is the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, self.shared.bytes.as_mut_ptr().add(offset), bytes as usize) };
        Ok(())
    }

    /// Register 0 of each lane is a row's address.
    fn load_matrix(&mut self, warp: usize, site: Site, transposed: bool) -> Outcome<()> {
        let mut rows = [[0u16; 8]; 32];
        let running = self.thread;
        for (lane, row) in rows.iter_mut().enumerate() {
            // Errors name the lane that gave the address.
            self.thread = (32 * warp + lane) as u32;
            let address = self.warps[warp].registers[lane][0];
            let offset = self.read_shared(AccessKind::LoadMatrix, address, 16, site)?;
            for (value, bytes) in row.iter_mut().zip(self.shared.bytes[offset..offset + 16].chunks_exact(2)) {
                *value = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
        }
        self.thread = running;
        tensor::distribute(&rows, transposed, &mut self.warps[warp].registers);
        self.counters.load_matrix += 1;
        Ok(())
    }
}

/// Global memory.
impl Machine<'_> {
    /// Region and offset of an access that is aligned, inside and allowed.
    fn global_offset(
        &mut self,
        kind: AccessKind,
        address: u64,
        bytes: u32,
        alignment: u32,
        site: Site,
    ) -> Outcome<(usize, u64)> {
        let access = self.access(Space::Global, kind, address, bytes, site);
        let Some(index) = self.regions.find(address, bytes, &mut self.last_region) else {
            return Err(Box::new(EmulatorError::OutOfBounds { access }));
        };
        if !address.is_multiple_of(alignment as u64) {
            return Err(Box::new(EmulatorError::Misaligned { access }));
        }
        let region = self.regions.region(index);
        if matches!(kind, AccessKind::Store | AccessKind::Atomic) && !region.writable {
            return Err(Box::new(EmulatorError::ReadOnly { access }));
        }
        let offset = address - region.address;
        if !region.written.is_empty() {
            let written = &mut region.written[offset as usize..offset as usize + bytes as usize];
            if kind == AccessKind::Store {
                written.fill(true);
            } else if let Some(first) = written.iter().position(|written| !written) {
                return Err(Box::new(EmulatorError::Uninitialised { access, byte: address + first as u64 }));
            }
        }
        Ok((index, offset))
    }

    /// # Safety
    /// `into` is good for `bytes`.
    pub unsafe fn load_global(&mut self, address: u64, into: *mut u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let (index, offset) = self.global_offset(AccessKind::Load, address, bytes, bytes, site)?;
        // SAFETY: the range was checked; `into` is the caller's promise.
        unsafe { self.regions.region(index).read(offset, into, bytes) };
        Ok(())
    }

    /// # Safety
    /// `from` is good for `bytes`.
    pub unsafe fn store_global(&mut self, address: u64, from: *const u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let (index, offset) = self.global_offset(AccessKind::Store, address, bytes, bytes, site)?;
        // SAFETY: the range was checked and is writable; `from` is the caller's promise.
        unsafe { self.regions.region(index).write(offset, from, bytes) };
        Ok(())
    }

    pub fn atomic(&mut self, address: u64, site: Site, update: impl Fn(u32) -> u32) -> Outcome<u32> {
        self.step(site)?;
        let (index, offset) = self.global_offset(AccessKind::Atomic, address, 4, 4, site)?;
        self.counters.atomics += 1;
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
        self.step(site)?;
        if source_bytes > 16 {
            return Err(Box::new(EmulatorError::CopySize { source_bytes, place: self.place(site) }));
        }
        self.write_shared(AccessKind::AsyncCopy, destination, 16, site, ByteState::Pending)?;
        if source_bytes > 0 {
            self.global_offset(AccessKind::AsyncCopy, source, source_bytes, 16, site)?;
        }
        self.counters.async_copy_bytes += source_bytes as u64;
        let thread = self.running();
        thread.copies.push_back(PendingCopy { destination, source, source_bytes, site });
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
            let (index, offset) =
                self.global_offset(AccessKind::AsyncCopy, copy.source, copy.source_bytes, 16, copy.site)?;
            // SAFETY: the range was checked, and `bytes` has room for 16.
            unsafe { self.regions.region(index).read(offset, bytes.as_mut_ptr(), copy.source_bytes) };
        }
        let offset = self.shared_offset(AccessKind::AsyncCopy, copy.destination, 16, copy.site)?;
        self.shared.bytes[offset..offset + 16].copy_from_slice(&bytes);
        self.shared.states[offset..offset + 16].fill(ByteState::Written);
        Ok(())
    }
}
