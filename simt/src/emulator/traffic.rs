//! Loads and stores gathered into the warp instructions they came from, to count what each moves.
//!
//! Lanes run one after another, so an instruction is put together afterwards: accesses of a warp between two of its
//! rendezvous belong together if they came from one source line, at the same repetition within their lane. For
//! lanes that took the same path this is exact; where they did not, it merges what hardware would at best.
use super::{counters::Counters, error::AccessKind, site::Tag};

/// Global memory moves in pieces of this size.
const SECTOR_BYTES: u64 = 32;
/// Shared memory has 32 banks of 4 bytes, and one pass serves one word of each.
const BANKS: u32 = 32;

/// A warp that has this many accesses without a rendezvous is counted early; what later ones would merge with is gone.
const MOST_ACCESSES: usize = 1 << 20;

/// Source line, kind and repetition.
type Instruction = (Tag, u32);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SharedAccess {
    instruction: Instruction,
    lane: u32,
    offset: u32,
    bytes: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct GlobalAccess {
    instruction: Instruction,
    region: u32,
    sector: u64,
}

#[derive(Clone, Default)]
struct Warp {
    shared: Vec<SharedAccess>,
    global: Vec<GlobalAccess>,
}

pub struct Traffic {
    /// By tag, for shared and for global memory: the run that used it last, and how often.
    repetitions: Vec<[(u64, u32); 2]>,
    /// A run is what one lane does between two rendezvous.
    run: u64,
    warps: Vec<Warp>,
}

impl Traffic {
    pub fn new(warps: usize) -> Self {
        Traffic { repetitions: Vec::new(), run: 0, warps: vec![Warp::default(); warps] }
    }

    /// A lane starts, or passes a rendezvous.
    #[inline]
    pub fn start_run(&mut self) {
        self.run += 1;
    }

    #[inline]
    pub fn shared(&mut self, thread: u32, tag: Tag, offset: usize, bytes: u32) {
        let instruction = self.instruction(tag, 0);
        let access = SharedAccess { instruction, lane: thread % 32, offset: offset as u32, bytes };
        self.warps[thread as usize / 32].shared.push(access);
    }

    /// `offset` counts from the 16-byte line in which the region starts, as if that were a sector's start.
    #[inline]
    pub fn global(&mut self, thread: u32, tag: Tag, region: usize, offset: u64) {
        let instruction = self.instruction(tag, 1);
        let access = GlobalAccess { instruction, region: region as u32, sector: offset / SECTOR_BYTES };
        self.warps[thread as usize / 32].global.push(access);
    }

    #[inline]
    fn instruction(&mut self, tag: Tag, space: usize) -> Instruction {
        if tag.index() >= self.repetitions.len() {
            self.repetitions.resize(tag.index() + 1, [(0, 0); 2]);
        }
        let (run, count) = &mut self.repetitions[tag.index()][space];
        if *run != self.run {
            (*run, *count) = (self.run, 0);
        }
        *count += 1;
        (tag, *count)
    }

    /// Whether the warp of the thread must be gathered now, to bound the memory it takes.
    #[inline]
    pub fn is_full(&self, thread: u32) -> bool {
        let warp = &self.warps[thread as usize / 32];
        warp.shared.len().max(warp.global.len()) >= MOST_ACCESSES
    }

    /// The warp has gathered: what it did since it last had is complete.
    pub fn gather(&mut self, warp: usize, counters: &mut Counters) {
        let Warp { shared, global } = &mut self.warps[warp];
        shared.sort_unstable();
        for instruction in shared.chunk_by(|a, b| a.instruction == b.instruction) {
            counters.shared_bank_conflicts += conflicts(instruction);
        }
        shared.clear();
        global.sort_unstable();
        for sector in global.chunk_by(|a, b| a == b) {
            match sector[0].instruction.0.kind() {
                AccessKind::Store => counters.global_sectors_written += 1,
                _ => counters.global_sectors_read += 1,
            }
        }
        global.clear();
    }
}

/// Passes beyond the first of each phase. A pass serves 128 bytes, so wide accesses go in phases of as many lanes
/// as ask for that much.
fn conflicts(instruction: &[SharedAccess]) -> u64 {
    let phase = |access: &SharedAccess| access.lane / BANKS.min(4 * BANKS / access.bytes);
    let words = |access: &SharedAccess| access.offset / 4..(access.offset + access.bytes).div_ceil(4);
    instruction.chunk_by(|a, b| phase(a) == phase(b)).map(|phase| passes(phase.iter().flat_map(words)) - 1).sum()
}

/// How many passes serve the words: the most distinct words that fall into one bank.
pub fn passes(words: impl Iterator<Item = u32>) -> u64 {
    // Almost always each bank is asked for one word, which needs no sorting.
    let mut first = [u32::MAX; BANKS as usize];
    let mut others = Vec::new();
    for word in words {
        let first = &mut first[(word % BANKS) as usize];
        if *first == u32::MAX {
            *first = word;
        } else if *first != word {
            others.push((word % BANKS, word));
        }
    }
    others.sort_unstable();
    others.dedup();
    let most = others.chunk_by(|a, b| a.0 == b.0).map(|bank| bank.len() as u64).max();
    1 + most.unwrap_or(0)
}
