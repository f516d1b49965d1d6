//! Rendezvous: lanes gather to their warp, warps to their barrier, and the last one releases all.
//!
//! A warp moves as a whole. It is released when its 32 lanes stand at one call (then the collective is computed for
//! all of them), and it is an error when they stand at different ones or some have exited.
use std::{ops::Range, ptr};

use super::{Machine, Outcome, Status, Warp};
use crate::emulator::{
    arithmetic,
    clock::Told,
    error::{EmulatorError, Operation, Waiting},
    site::Site,
    tensor::{self, Registers},
};

/// The current phase of a named barrier.
#[derive(Default)]
pub(super) struct NamedBarrier {
    /// What the first warp to come said, and where.
    first: Option<(u32, Site)>,
    /// Warps that have come, and those of them that wait.
    arrived: u32,
    waiting: u32,
    told: Told,
}

/// Registers of a multiprocessor.
const REGISTER_FILE: u32 = 1 << 16;

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
    pub(super) fn stop_lane(&mut self) -> Outcome<bool> {
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
        self.clocks.share_common(index);
        match first {
            Status::Waiting(operation, site) => self.warp_arrived(index, operation, site)?,
            _ => {
                self.check_waited(index)?;
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

    pub(super) fn release(&mut self, warps: u32) {
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
            Operation::NamedBarrier { id, threads } => return self.at_named_barrier(index, id, threads, true, site),
            Operation::NamedBarrierArrive { id, threads } => {
                return self.at_named_barrier(index, id, threads, false, site);
            }
            Operation::Wgmma { .. } | Operation::RaiseRegisterLimit { .. } | Operation::LowerRegisterLimit { .. } => {
                if self.warpgroup_arrived(index)? {
                    let group = index / 4;
                    match operation {
                        Operation::RaiseRegisterLimit { registers } => {
                            self.set_register_limit(group, registers, true, site)?;
                        }
                        Operation::LowerRegisterLimit { registers } => {
                            self.set_register_limit(group, registers, false, site)?;
                        }
                        _ => {
                            if let Operation::Wgmma { columns } = operation {
                                self.start_products(group, columns, site)?;
                            }
                            self.release(0b1111 << (4 * group));
                        }
                    }
                }
                return Ok(());
            }
            Operation::MbarrierWait { .. } => {}
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
            Operation::WgmmaFence => self.fence_products(index),
            Operation::WgmmaCommit => self.commit_products(index),
            Operation::WgmmaWait { pending } => self.wait_products(index, pending)?,
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

    /// A whole warp comes to a named barrier, to wait or only to arrive.
    fn at_named_barrier(&mut self, index: usize, id: u32, threads: u32, waits: bool, site: Site) -> Outcome<()> {
        let place = self.place(site);
        let barrier = &mut self.named_barriers[id as usize];
        let wrong = |field, found, wanted| Err(Box::new(EmulatorError::NamedBarrier { field, found, wanted, place }));
        match barrier.first {
            Some((wanted, other)) if wanted != threads => {
                let wanted = format!("{wanted}, as the warp that came first, at {other}, said");
                return wrong("threads", threads, wanted);
            }
            _ => barrier.first = Some((threads, site)),
        }
        if barrier.arrived >> index & 1 == 1 {
            return wrong("arrivals", 2, "one of each warp in a phase".into());
        }
        barrier.arrived |= 1 << index;
        if waits {
            barrier.waiting |= 1 << index;
        }
        self.clocks.tell(index, &mut barrier.told);
        if !waits {
            self.release(1 << index);
        }
        if 32 * self.named_barriers[id as usize].arrived.count_ones() == threads {
            let NamedBarrier { waiting, told, .. } = std::mem::take(&mut self.named_barriers[id as usize]);
            self.counters.named_barriers += 1;
            (0..32).filter(|warp| waiting >> warp & 1 == 1).for_each(|warp| self.clocks.hear(warp, &told));
            self.release(waiting);
        }
        Ok(())
    }

    /// A whole warp stands at a point of its warpgroup; true once all four do. They are to be released then.
    fn warpgroup_arrived(&mut self, index: usize) -> Outcome<bool> {
        let first = index / 4 * 4;
        self.at_warpgroup |= 1 << index;
        let here = (first..self.warps.len().min(first + 4)).filter(|warp| self.at_warpgroup >> warp & 1 == 1);
        let mut points = here.map(|warp| match self.threads[32 * warp].status {
            Status::Waiting(operation, site) => Some((operation, site)),
            _ => None,
        });
        let one = points.next();
        if points.any(|point| Some(point) != one) || self.warps.len() < first + 4 {
            let waiting = self.waiting(32 * first..self.threads.len().min(32 * first + 128));
            let (block, warpgroup) = (self.block, first as u32 / 4);
            return Err(Box::new(EmulatorError::WarpgroupDivergence { block, warpgroup, waiting }));
        }
        let complete = self.at_warpgroup >> first & 0b1111 == 0b1111;
        if complete {
            self.at_warpgroup &= !(0b1111 << first);
        }
        Ok(complete)
    }

    /// A warpgroup changes how many registers its threads have. It goes on once the block has as many, and so do those that
    /// waited for what it gives up.
    fn set_register_limit(&mut self, group: usize, registers: u32, raises: bool, site: Site) -> Outcome<()> {
        let wanted = match self.register_limits[group] {
            Some(before) if raises && registers < before => format!("at least the {before} of now, to raise it"),
            Some(before) if !raises && registers > before => format!("at most the {before} of now, to lower it"),
            _ => {
                self.wanted_limits[group] = Some((registers, self.place(site)));
                self.grant_registers(group);
                (0..8).for_each(|other| self.grant_registers(other));
                return Ok(());
            }
        };
        Err(Box::new(EmulatorError::RegisterLimit { registers, wanted, place: self.place(site) }))
    }

    /// Registers of the block if a warpgroup's threads had `registers`.
    fn registers_with(&self, group: usize, registers: u32) -> u32 {
        let limits = self.register_limits.iter().enumerate();
        limits.map(|(other, limit)| if other == group { registers } else { limit.unwrap_or(0) }).sum::<u32>() * 128
    }

    fn grant_registers(&mut self, group: usize) {
        let Some((registers, _)) = self.wanted_limits[group] else { return };
        if self.registers_with(group, registers) <= REGISTER_FILE {
            self.register_limits[group] = Some(registers);
            self.wanted_limits[group] = None;
            self.release(0b1111 << (4 * group));
        }
    }

    /// No thread can go on: where the others have exited, a warpgroup wants more registers than there ever are.
    pub(super) fn check_wanted_registers(&self) -> Outcome<()> {
        let waits = |warp: usize| self.exited_warps >> warp & 1 == 1 || self.wanted_limits[warp / 4].is_some();
        let mut wanted = self.wanted_limits.iter().enumerate().filter_map(|(group, limit)| Some((group, (*limit)?)));
        match wanted.next() {
            Some((group, (registers, place))) if (0..self.warps.len()).all(waits) => {
                let of_block = self.registers_with(group, registers);
                let wanted = format!("at most {REGISTER_FILE} in a block; its warpgroups now ask for {of_block}");
                Err(Box::new(EmulatorError::RegisterLimit { registers, wanted, place }))
            }
            _ => Ok(()),
        }
    }

    /// Groups the threads that have stopped by where they did.
    pub(super) fn waiting(&self, threads: Range<usize>) -> Vec<Waiting> {
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
