//! `mbarrier`s. A phase completes when its arrivals have come and its bytes have landed, and they land when somebody
//! waits for them, as late as the rules allow.
//!
//! To the race check the copies that complete on a barrier are the writes of a thread of the barrier's own
//! ([`clock::agent_id`]), in epochs that are its phases: only who has waited for a phase is ordered after them.
use super::{Machine, Outcome, Status, bulk::BulkLoad};
use crate::emulator::{
    clock::{self, Learned},
    error::{AccessKind, EmulatorError, Operation, Place, Space},
    site::Site,
};

const BYTES: u32 = 8;
/// The counter has 20 bits.
const MOST_ARRIVALS: u32 = (1 << 20) - 1;

pub(super) struct Mbarrier {
    address: u32,
    alive: bool,
    /// Arrivals of a phase, and those still missing in the current one.
    arrivals: u32,
    missing: u32,
    /// Bytes announced for the current phase, and the last line that did.
    expected_bytes: u64,
    expect_site: Site,
    /// Phases completed.
    phase: u32,
    /// What the current phase has been told, and what the completed ones had been.
    told: Learned,
    passed: Learned,
    /// Threads that wait, and for which parity.
    waiting: Vec<(u32, u32)>,
    /// Who made it, and when.
    maker: (u32, u32, Site),
    /// Copies that complete on the current phase.
    loads: Vec<BulkLoad>,
    /// The thread that issued the last one that landed.
    issuer: u32,
}

impl Machine<'_> {
    pub fn init_mbarrier(&mut self, address: u32, arrivals: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        if !(1..=MOST_ARRIVALS).contains(&arrivals) {
            return Err(Box::new(EmulatorError::MbarrierCount { arrivals, place: self.place(site) }));
        }
        self.touch_mbarrier(address, true, site)?;
        if self.mbarriers.iter().any(|barrier| barrier.address == address && barrier.alive) {
            return Err(Box::new(EmulatorError::MbarrierAlive { address, place: self.place(site) }));
        }
        self.mbarriers.push(Mbarrier {
            address,
            alive: true,
            arrivals,
            missing: arrivals,
            expected_bytes: 0,
            expect_site: site,
            phase: 0,
            told: None,
            passed: None,
            waiting: Vec::new(),
            maker: (self.accessor.thread, self.accessor.epoch, site),
            loads: Vec::new(),
            issuer: self.thread,
        });
        Ok(())
    }

    pub fn invalidate_mbarrier(&mut self, address: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let index = self.mbarrier(address, site)?;
        self.touch_mbarrier(address, true, site)?;
        self.mbarriers[index].alive = false;
        Ok(())
    }

    /// The running thread arrives, and announces `bytes` if there are any.
    pub fn arrive_mbarrier(&mut self, address: u32, bytes: u32, site: Site) -> Outcome<()> {
        let index = self.mbarrier_in_use(address, site)?;
        self.try_complete(index)?;
        let place = self.place(site);
        let barrier = &mut self.mbarriers[index];
        if barrier.missing == 0 {
            return Err(Box::new(EmulatorError::MbarrierOverrun { arrivals: barrier.arrivals, place }));
        }
        barrier.missing -= 1;
        if bytes > 0 {
            barrier.expected_bytes += bytes as u64;
            barrier.expect_site = site;
        }
        self.clocks.release_into(&mut barrier.told, self.thread);
        self.accessor = self.clocks.accessor(self.thread);
        if !self.mbarriers[index].waiting.is_empty() {
            self.try_complete(index)?;
        }
        Ok(())
    }

    /// The running thread waits; true if it may go on at once.
    pub fn wait_mbarrier(&mut self, address: u32, parity: u32, site: Site) -> Outcome<bool> {
        let index = self.mbarrier_in_use(address, site)?;
        if self.has_passed(index, parity)? {
            return Ok(true);
        }
        self.mbarriers[index].waiting.push((self.thread, parity));
        self.running().status = Status::Waiting(Operation::MbarrierWait { address, parity }, site);
        Ok(false)
    }

    /// The running thread asks whether it would have to wait. If so it is to let others go on.
    pub fn test_mbarrier(&mut self, address: u32, parity: u32, site: Site) -> Outcome<bool> {
        let index = self.mbarrier_in_use(address, site)?;
        let passed = self.has_passed(index, parity)?;
        if !passed {
            self.make_ready(self.thread);
        }
        Ok(passed)
    }

    /// Whether the phase of a parity is complete, for the running thread, which has then waited for it.
    fn has_passed(&mut self, index: usize, parity: u32) -> Outcome<bool> {
        if self.mbarriers[index].phase % 2 == parity {
            self.try_complete(index)?;
        }
        let passed = self.mbarriers[index].phase % 2 != parity;
        if passed {
            self.clocks.acquire_from(&self.mbarriers[index].passed, self.thread);
            self.accessor = self.clocks.accessor(self.thread);
        }
        Ok(passed)
    }

    fn make_ready(&mut self, thread: u32) {
        self.threads[thread as usize].status = Status::Running;
        self.warps[thread as usize / 32].ready |= 1 << (thread % 32);
        self.ready_warps |= 1 << (thread / 32);
    }

    /// What the running thread initialised is visible to bulk copies of whoever is ordered after this.
    pub fn fence_mbarriers(&mut self) {
        self.clocks.fence_mbarriers(self.thread);
        self.accessor = self.clocks.accessor(self.thread);
    }

    /// Index of the barrier that the running thread uses now.
    fn mbarrier_in_use(&mut self, address: u32, site: Site) -> Outcome<usize> {
        self.step(site)?;
        let index = self.mbarrier(address, site)?;
        self.touch_mbarrier(address, false, site)?;
        Ok(index)
    }

    /// Index of the live barrier at an address.
    fn mbarrier(&self, address: u32, site: Site) -> Outcome<usize> {
        let found = self.mbarriers.iter().position(|barrier| barrier.address == address && barrier.alive);
        found.ok_or_else(|| Box::new(EmulatorError::MbarrierMissing { address, place: self.place(site) }))
    }

    /// A use of the barrier is ordered after its making and before its end.
    fn touch_mbarrier(&mut self, address: u32, changes: bool, site: Site) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::Mbarrier;
        let offset = self.shared_offset(KIND, address, BYTES, site)?;
        let tag = self.sites.tag(KIND, site);
        let shadow = &mut self.shared.shadow;
        let result = match changes {
            true => shadow.write(offset, BYTES, tag, &self.accessor, &self.clocks),
            false => shadow.read(offset, BYTES, tag, &self.accessor, &self.clocks),
        };
        result.map_err(|conflict| self.conflict(Space::Shared, KIND, address as u64, BYTES, site, conflict))
    }

    /// Completes the current phase if everything it waits for has come, and lets go who waits for it.
    fn try_complete(&mut self, index: usize) -> Outcome<()> {
        let barrier = &mut self.mbarriers[index];
        let copied = barrier.loads.iter().map(|load| load.bytes as u64).sum::<u64>();
        if barrier.missing > 0 || copied < barrier.expected_bytes {
            return Ok(());
        }
        if let Some(load) = barrier.loads.last()
            && copied > barrier.expected_bytes
        {
            let (expected, announced) = (barrier.expected_bytes, barrier.expect_site);
            return Err(Box::new(EmulatorError::MbarrierBytes { expected, announced, copied, place: load.place }));
        }
        let (loads, epoch) = (std::mem::take(&mut barrier.loads), barrier.phase + 1);
        let agent = index as u32 % clock::AGENTS;
        for load in &loads {
            self.land(load, self.clocks.agent_id(agent), epoch);
        }
        let barrier = &mut self.mbarriers[index];
        if let Some(load) = loads.last() {
            barrier.issuer = load.place.thread;
            self.clocks.tell_of_copies(&mut barrier.told, agent, epoch);
        }
        barrier.phase = epoch;
        barrier.missing = barrier.arrivals;
        barrier.expected_bytes = 0;
        clock::join(&mut barrier.passed, &barrier.told.take());
        self.counters.mbarrier_phases += 1;
        let phase = barrier.phase;
        let (free, waiting) = barrier.waiting.drain(..).partition(|(_, parity)| phase % 2 != *parity);
        barrier.waiting = waiting;
        let free: Vec<(u32, u32)> = free;
        for (thread, _) in free {
            self.clocks.acquire_from(&self.mbarriers[index].passed, thread);
            self.make_ready(thread);
        }
        Ok(())
    }

    /// Index of the live barrier that a copy of the running thread completes on.
    pub(super) fn mbarrier_for_copies(&mut self, address: u32, site: Site) -> Outcome<usize> {
        let index = self.mbarrier(address, site)?;
        self.touch_mbarrier(address, false, site)?;
        let (maker, epoch, made_at) = self.mbarriers[index].maker;
        if !self.clocks.is_mbarrier_fenced(maker, epoch, &self.accessor) {
            let tag = self.sites.tag(AccessKind::Mbarrier, made_at);
            let write = self.earlier(maker, tag);
            let read = self.access(Space::Shared, AccessKind::BulkCopy, address as u64, BYTES, site);
            return Err(Box::new(EmulatorError::MissingProxyFence { write, read }));
        }
        Ok(index)
    }

    /// A copy has started that completes on the barrier's current phase.
    pub(super) fn add_load(&mut self, index: usize, load: BulkLoad) -> Outcome<()> {
        self.mbarriers[index].loads.push(load);
        if self.mbarriers[index].waiting.is_empty() { Ok(()) } else { self.try_complete(index) }
    }

    /// All copies that have not landed.
    pub(super) fn loads(&self) -> impl Iterator<Item = &BulkLoad> {
        self.mbarriers.iter().flat_map(|barrier| &barrier.loads)
    }

    /// The same, which then never do.
    pub(super) fn take_loads(&mut self) -> Vec<BulkLoad> {
        self.mbarriers.iter_mut().flat_map(|barrier| std::mem::take(&mut barrier.loads)).collect()
    }

    /// The thread that issued the last copy to complete on a barrier.
    pub(super) fn issuer(&self, agent: u32) -> u32 {
        let mut barriers = self.mbarriers.iter().skip(agent as usize).step_by(clock::AGENTS as usize);
        barriers.next_back().map_or(0, |barrier| barrier.issuer)
    }

    /// Where nobody can go on, it may be that somebody waits for bytes that no copy brings.
    pub(super) fn check_announced_bytes(&self) -> Outcome<()> {
        for barrier in self.mbarriers.iter().filter(|barrier| barrier.missing == 0) {
            let Some((thread, _)) = barrier.waiting.first() else { continue };
            let Status::Waiting(_, location) = self.threads[*thread as usize].status else { continue };
            let copied = barrier.loads.iter().map(|load| load.bytes as u64).sum();
            return Err(Box::new(EmulatorError::MbarrierBytes {
                expected: barrier.expected_bytes,
                announced: barrier.expect_site,
                copied,
                place: Place { location, thread: *thread, block: self.block },
            }));
        }
        Ok(())
    }
}
