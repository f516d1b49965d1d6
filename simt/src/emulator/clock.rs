//! Which accesses are ordered before which: vector clocks, kept by warp.
//!
//! Every collective that orders memory takes whole warps, so the lanes of a warp know the same of every other warp.
//! A thread counts *epochs*: its warp's ordering collectives, and its own atomic releases in between. What a warp
//! knows is one epoch for each warp of its block: all accesses of that warp up to it are ordered before what comes
//! now. Knowledge gained through atomics may reach into other blocks; it is kept aside, because few kernels have any.
//! The scheme follows FastTrack (Flanagan and Freund, PLDI 2009): an access is remembered as (thread, epoch).
//!
//! Blocks are numbered by *rank*, the order in which they started, counted over all launches on one memory.
use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

/// Warps with ids in each block: 32 of threads, and 32 more whose threads stand for the block's `mbarrier`s.
const WARPS: u32 = 64;
const THREADS: u32 = 32 * WARPS;
/// Index of the first thread that stands for an `mbarrier`, and how many there are.
const FIRST_AGENT: u32 = 1024;
pub const AGENTS: u32 = THREADS - FIRST_AGENT;

/// Ranks a [`GlobalMemory`](super::GlobalMemory) can count: thread ids are 32 bits, of which 11 are the thread.
pub const MAX_RANKS: u32 = u32::MAX / THREADS - 1;

/// Who accesses memory now.
#[derive(Clone, Copy, Default)]
pub struct Accessor {
    /// Id of the thread; 0 where the warp reads as a whole.
    pub thread: u32,
    /// Id of its warp.
    pub warp: u32,
    /// The lanes that access.
    pub lanes: u32,
    pub epoch: u32,
}

/// Reads of one warp in one epoch.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Reading {
    /// Id of the warp; 0 for none.
    pub warp: u32,
    pub lanes: u32,
    pub epoch: u32,
    pub tag: super::site::Tag,
}

/// Id of a thread: unique over the launches on one memory, and not 0.
#[inline]
pub fn thread_id(rank: u32, thread: u32) -> u32 {
    rank * THREADS + thread + 1
}

/// Rank and index in its block of the thread with this id.
#[inline]
pub fn thread_of(id: u32) -> (u32, u32) {
    ((id - 1) / THREADS, (id - 1) % THREADS)
}

/// Id of the warp of a thread.
#[inline]
pub fn warp_id(thread_id: u32) -> u32 {
    (thread_id - 1) / 32 + 1
}

/// Id of the thread at a lane of a warp.
#[inline]
pub fn lane_id(warp_id: u32, lane: u32) -> u32 {
    (warp_id - 1) * 32 + lane + 1
}

/// Whether two warps belong to one block.
#[inline]
pub fn same_block(warp_id: u32, other: u32) -> bool {
    (warp_id - 1) / WARPS == (other - 1) / WARPS
}

/// The `mbarrier` that a thread index stands for.
#[inline]
pub fn agent_of(thread: u32) -> Option<u32> {
    thread.checked_sub(FIRST_AGENT)
}

/// Index in its block of the warp that accesses.
#[inline]
fn warp_index(now: &Accessor) -> usize {
    ((now.warp - 1) % WARPS) as usize
}

/// What atomics and `mbarrier`s have made known.
#[derive(Clone, Default, PartialEq)]
pub struct Knowledge {
    /// By warp id: everything up to the epoch.
    warps: BTreeMap<u32, u32>,
    /// By thread id: what that thread alone did up to the epoch.
    threads: BTreeMap<u32, u32>,
}

impl Knowledge {
    fn learn(&mut self, other: &Knowledge) {
        for (known, more) in [(&mut self.warps, &other.warps), (&mut self.threads, &other.threads)] {
            for (&id, &epoch) in more {
                let known = known.entry(id).or_default();
                *known = epoch.max(*known);
            }
        }
    }

    /// What both know.
    fn common(&self, other: &Knowledge) -> Knowledge {
        let both = |ours: &BTreeMap<u32, u32>, theirs: &BTreeMap<u32, u32>| {
            ours.iter().filter_map(|(id, epoch)| Some((*id, *epoch.min(theirs.get(id)?)))).collect()
        };
        Knowledge { warps: both(&self.warps, &other.warps), threads: both(&self.threads, &other.threads) }
    }

    fn covers(&self, thread: u32, epoch: u32) -> bool {
        let reaches = |known: Option<&u32>| known.is_some_and(|known| epoch <= *known);
        reaches(self.warps.get(&warp_id(thread))) || reaches(self.threads.get(&thread))
    }
}

pub type Learned = Option<Rc<Knowledge>>;

/// Adds what one knows to what another does.
pub fn join(into: &mut Learned, other: &Learned) {
    match (into.as_mut(), other) {
        (_, None) => {}
        (None, Some(_)) => into.clone_from(other),
        (Some(known), Some(more)) if Rc::ptr_eq(known, more) => {}
        (Some(known), Some(more)) => Rc::make_mut(known).learn(more),
    }
}

/// What the warps of a barrier have told it.
#[derive(Default)]
pub struct Told {
    known: [u32; 32],
    learned: Learned,
}

pub struct Clocks {
    /// Blocks of earlier ranks belong to earlier launches, which are ordered before this one.
    first_rank: u32,
    rank: u32,
    /// Current epoch of each thread of the block.
    epochs: Vec<u32>,
    /// What each warp of the block knows of each.
    known: Vec<[u32; 32]>,
    learned_by_warp: Vec<Learned>,
    learned_by_thread: Vec<Learned>,
    /// Warps whose threads have learned something since `share_common`.
    unshared: u32,
    /// By thread: the epochs that ended with a fence towards the async proxy, ascending.
    proxy_fences: Vec<Vec<u32>>,
    /// The same for a fence that only covers `mbarrier`s.
    mbarrier_fences: Vec<Vec<u32>>,
    /// What each atomic location has been told.
    locations: HashMap<u64, Learned>,
}

impl Clocks {
    pub fn new(first_rank: u32) -> Self {
        Clocks {
            first_rank,
            rank: first_rank,
            epochs: Vec::new(),
            known: Vec::new(),
            learned_by_warp: Vec::new(),
            learned_by_thread: Vec::new(),
            unshared: 0,
            proxy_fences: Vec::new(),
            mbarrier_fences: Vec::new(),
            locations: HashMap::new(),
        }
    }

    pub fn start_block(&mut self, rank: u32, threads: u32) {
        let (threads, warps) = (threads as usize, threads as usize / 32);
        self.rank = rank;
        self.epochs = vec![1; threads];
        self.known = vec![[0; 32]; warps];
        self.learned_by_warp = vec![None; warps];
        self.learned_by_thread = vec![None; threads];
        self.unshared = 0;
        self.proxy_fences = vec![Vec::new(); threads];
        self.mbarrier_fences = vec![Vec::new(); threads];
    }

    #[inline]
    pub fn first_rank(&self) -> u32 {
        self.first_rank
    }

    #[inline]
    pub fn accessor(&self, thread: u32) -> Accessor {
        let id = thread_id(self.rank, thread);
        Accessor { thread: id, warp: warp_id(id), lanes: 1 << (thread % 32), epoch: self.epochs[thread as usize] }
    }

    /// A warp that reads as a whole: no lane's own program order counts for the others.
    pub fn warp_accessor(&self, warp: u32) -> Accessor {
        let lanes = &self.epochs[32 * warp as usize..32 * warp as usize + 32];
        let epoch = lanes.iter().copied().max().unwrap_or(0);
        Accessor { thread: 0, warp: warp_id(thread_id(self.rank, 32 * warp)), lanes: !0, epoch }
    }

    /// Whether what `thread` did in `epoch` is ordered before what the accessor does now.
    #[inline]
    pub fn is_before(&self, thread: u32, epoch: u32, now: &Accessor) -> bool {
        let (rank, index) = thread_of(thread);
        (rank == self.rank && epoch <= self.known_here(index / 32, now))
            || thread == now.thread
            || self.is_before_elsewhere(thread, epoch, now)
    }

    /// Whether all of the reading is ordered before what the accessor does now.
    #[inline]
    pub fn reading_is_before(&self, reading: &Reading, now: &Accessor) -> bool {
        let (rank, warp) = ((reading.warp - 1) / WARPS, (reading.warp - 1) % WARPS);
        (rank == self.rank && reading.epoch <= self.known_here(warp, now))
            || (reading.warp == now.warp && reading.lanes == now.lanes && now.thread != 0)
            || (0..32)
                .filter(|lane| reading.lanes >> lane & 1 == 1)
                .map(|lane| lane_id(reading.warp, lane))
                .all(|thread| thread == now.thread || self.is_before_elsewhere(thread, reading.epoch, now))
    }

    #[inline]
    fn known_here(&self, warp: u32, now: &Accessor) -> u32 {
        self.known[warp_index(now)].get(warp as usize).copied().unwrap_or(0)
    }

    #[cold]
    fn is_before_elsewhere(&self, thread: u32, epoch: u32, now: &Accessor) -> bool {
        let covers = |learned: &Learned| learned.as_ref().is_some_and(|known| known.covers(thread, epoch));
        thread_of(thread).0 < self.first_rank
            || covers(&self.learned_by_warp[warp_index(now)])
            || (now.thread != 0 && covers(&self.learned_by_thread[thread_of(now.thread).1 as usize]))
    }

    /// A fence between the proxies: it ends the thread's epoch, so that what came before it can be told apart.
    pub fn fence_proxy(&mut self, thread: u32) {
        self.proxy_fences[thread as usize].push(self.epochs[thread as usize]);
        self.epochs[thread as usize] += 1;
    }

    /// The same for `mbarrier`s alone.
    pub fn fence_mbarriers(&mut self, thread: u32) {
        self.mbarrier_fences[thread as usize].push(self.epochs[thread as usize]);
        self.epochs[thread as usize] += 1;
    }

    /// Whether the thread of this block that wrote in `epoch` has fenced since, ordered before what the accessor does.
    pub fn is_fenced(&self, thread: u32, epoch: u32, now: &Accessor) -> bool {
        self.has_fence(&self.proxy_fences, thread, epoch, now)
    }

    /// The same for an `mbarrier` made in `epoch`.
    pub fn is_mbarrier_fenced(&self, thread: u32, epoch: u32, now: &Accessor) -> bool {
        self.is_fenced(thread, epoch, now) || self.has_fence(&self.mbarrier_fences, thread, epoch, now)
    }

    fn has_fence(&self, fences: &[Vec<u32>], thread: u32, epoch: u32, now: &Accessor) -> bool {
        let fences = &fences[thread_of(thread).1 as usize];
        let first = fences.partition_point(|fence| *fence < epoch);
        fences.get(first).is_some_and(|fence| self.is_before(thread, fence + 1, now))
    }

    /// Orders everything the warps of the set did before everything they will do.
    pub fn synchronise(&mut self, warps: u32) {
        let mut told = Told::default();
        let members = || (0..32usize).filter(|warp| warps >> warp & 1 == 1);
        members().for_each(|warp| self.tell(warp, &mut told));
        members().for_each(|warp| self.hear(warp, &told));
    }

    /// Adds everything a warp did and knows, and starts an epoch for what it does next.
    pub fn tell(&mut self, warp: usize, told: &mut Told) {
        let lanes = 32 * warp..32 * warp + 32;
        for (told, more) in told.known.iter_mut().zip(&self.known[warp]) {
            *told = (*told).max(*more);
        }
        let latest = self.epochs[lanes.clone()].iter().copied().fold(told.known[warp], u32::max);
        told.known[warp] = latest;
        self.epochs[lanes.clone()].fill(latest + 1);
        join(&mut told.learned, &self.learned_by_warp[warp]);
        for thread in lanes.filter(|thread| self.learned_by_thread[*thread].is_some()) {
            join(&mut told.learned, &self.learned_by_thread[thread]);
        }
    }

    /// Orders what was told before everything the warp does from now on. It has told its own.
    pub fn hear(&mut self, warp: usize, told: &Told) {
        for (known, more) in self.known[warp].iter_mut().zip(&told.known) {
            *known = (*known).max(*more);
        }
        join(&mut self.learned_by_warp[warp], &told.learned);
        self.learned_by_thread[32 * warp..32 * warp + 32].fill(None);
        self.unshared &= !(1 << warp);
    }

    /// What all lanes of a warp have learned by themselves, the warp knows.
    pub fn share_common(&mut self, warp: usize) {
        if self.unshared >> warp & 1 == 0 {
            return;
        }
        self.unshared &= !(1 << warp);
        let lanes = &mut self.learned_by_thread[32 * warp..32 * warp + 32];
        let Some(Some(first)) = lanes.first().cloned() else { return };
        let mut common = first.clone();
        for lane in &lanes[1..] {
            match lane {
                Some(other) if Rc::ptr_eq(other, &first) => {}
                Some(other) => common = Rc::new(common.common(other)),
                None => return,
            }
        }
        for lane in lanes {
            if lane.as_ref().is_some_and(|lane| **lane == *common) {
                *lane = None;
            }
        }
        join(&mut self.learned_by_warp[warp], &Some(common));
    }

    /// A release: adds all that the thread did and knows, and starts an epoch for what it does next.
    pub fn release_into(&mut self, told: &mut Learned, thread: u32) {
        let (index, warp) = (thread as usize, thread as usize / 32);
        join(told, &self.learned_by_warp[warp]);
        join(told, &self.learned_by_thread[index]);
        let knowledge = Rc::make_mut(told.get_or_insert_default());
        for (warp, &epoch) in (0..).zip(&self.known[warp]).filter(|(_, epoch)| **epoch > 0) {
            let known = knowledge.warps.entry(warp_id(thread_id(self.rank, 32 * warp))).or_default();
            *known = epoch.max(*known);
        }
        knowledge.threads.insert(thread_id(self.rank, thread), self.epochs[index]);
        self.epochs[index] += 1;
    }

    /// The copies that complete an `mbarrier`'s phase are the writes, in that epoch, of the thread that stands for it.
    pub fn tell_of_copies(&self, told: &mut Learned, agent: u32, epoch: u32) {
        Rc::make_mut(told.get_or_insert_default()).threads.insert(self.agent_id(agent), epoch);
    }

    /// Id of the thread that stands for an `mbarrier` of this block.
    pub fn agent_id(&self, agent: u32) -> u32 {
        thread_id(self.rank, FIRST_AGENT + agent)
    }

    /// An acquire: the thread learns what was told.
    pub fn acquire_from(&mut self, told: &Learned, thread: u32) {
        join(&mut self.learned_by_thread[thread as usize], told);
        self.unshared |= 1 << (thread / 32);
    }

    /// An atomic with acquire and release ordering: the thread tells the location all it knows, and learns what the
    /// location has been told.
    pub fn acquire_release(&mut self, address: u64, thread: u32) {
        let mut told = self.locations.remove(&address).flatten();
        self.release_into(&mut told, thread);
        self.acquire_from(&told, thread);
        self.locations.insert(address, told);
    }
}
