//! Loads and stores gathered into the warp instructions they came from, to count what each moves.
//!
//! Lanes run one after another, so an instruction is put together afterwards. Between two rendezvous of a warp, the
//! first lane's accesses form a sequence; each further lane walks along it and joins the next access from its own
//! source line, or puts a new one in. For lanes that took the same path this is exact; where they did not, it
//! merges what hardware would at best.
use super::{counters::Counters, error::AccessKind, site::Tag};

/// Global memory moves in pieces of this size.
const SECTOR_BYTES: u64 = 32;
/// Shared memory has 32 banks of 4 bytes, and one pass serves one word of each.
const BANKS: u32 = 32;
/// How far a lane looks along the sequence for its source line.
const LOOK_AHEAD: usize = 64;
/// A warp with this many instructions since its last rendezvous is counted early, to bound the memory it takes.
const MOST_INSTRUCTIONS: usize = 1 << 14;

/// Accesses of up to 32 lanes in one memory.
struct Instruction<Address> {
    tag: Tag,
    bytes: u32,
    lanes: u32,
    /// Index of the instruction that follows; 0 for none.
    next: u32,
    addresses: [Address; 32],
}

/// The instructions of a warp since its last rendezvous, as a list that begins at index 0 with an empty one.
struct Sequence<Address> {
    instructions: Vec<Instruction<Address>>,
    /// Where the lane that runs is.
    cursor: usize,
    run: u64,
}

pub struct Traffic {
    /// A run is what one lane does between two rendezvous.
    run: u64,
    /// Byte offsets in shared memory, by warp.
    shared: Vec<Sequence<u32>>,
    /// Sectors of global memory, by warp: the region in the upper 16 bits.
    global: Vec<Sequence<u64>>,
}

impl<Address: Copy + Default> Sequence<Address> {
    fn new() -> Self {
        let head =
            Instruction { tag: Tag::default(), bytes: 0, lanes: 0, next: 0, addresses: [Address::default(); 32] };
        Sequence { instructions: vec![head], cursor: 0, run: 0 }
    }

    #[inline]
    fn add(&mut self, run: u64, lane: u32, tag: Tag, bytes: u32, address: Address) {
        if self.run != run {
            (self.run, self.cursor) = (run, 0);
        }
        let mut index = self.instructions[self.cursor].next as usize;
        for _ in 0..LOOK_AHEAD {
            if index == 0 {
                break;
            }
            let instruction = &mut self.instructions[index];
            if instruction.tag == tag && instruction.bytes == bytes {
                instruction.lanes |= 1 << lane;
                instruction.addresses[lane as usize] = address;
                self.cursor = index;
                return;
            }
            index = instruction.next as usize;
        }
        self.insert(lane, tag, bytes, address);
    }

    fn insert(&mut self, lane: u32, tag: Tag, bytes: u32, address: Address) {
        let here = self.instructions.len();
        let next = std::mem::replace(&mut self.instructions[self.cursor].next, here as u32);
        let mut addresses = [Address::default(); 32];
        addresses[lane as usize] = address;
        self.instructions.push(Instruction { tag, bytes, lanes: 1 << lane, next, addresses });
        self.cursor = here;
    }

    /// All instructions, in no order.
    fn instructions(&self) -> &[Instruction<Address>] {
        &self.instructions[1..]
    }

    /// The sequence begins anew.
    fn clear(&mut self) {
        self.cursor = 0;
        self.instructions.truncate(1);
        self.instructions[0].next = 0;
    }
}

impl<Address: Copy> Instruction<Address> {
    fn accesses(&self) -> impl Iterator<Item = (u32, Address)> {
        (0..32).filter(|lane| self.lanes >> lane & 1 == 1).map(|lane| (lane, self.addresses[lane as usize]))
    }
}

impl Traffic {
    pub fn new(warps: usize) -> Self {
        Traffic {
            run: 0,
            shared: (0..warps).map(|_| Sequence::new()).collect(),
            global: (0..warps).map(|_| Sequence::new()).collect(),
        }
    }

    /// A lane starts, or passes a rendezvous.
    #[inline]
    pub fn start_run(&mut self) {
        self.run += 1;
    }

    #[inline]
    pub fn shared(&mut self, thread: u32, tag: Tag, offset: usize, bytes: u32) {
        self.shared[thread as usize / 32].add(self.run, thread % 32, tag, bytes, offset as u32);
    }

    /// `offset` counts from the 16-byte line in which the region starts, as if that were a sector's start.
    #[inline]
    pub fn global(&mut self, thread: u32, tag: Tag, region: usize, offset: u64, bytes: u32) {
        let sector = ((region as u64) << 48) | (offset / SECTOR_BYTES);
        self.global[thread as usize / 32].add(self.run, thread % 32, tag, bytes, sector);
    }

    /// Whether the warp of the thread must be gathered now.
    #[inline]
    pub fn is_full(&self, thread: u32) -> bool {
        let warp = thread as usize / 32;
        self.shared[warp].instructions.len().max(self.global[warp].instructions.len()) > MOST_INSTRUCTIONS
    }

    /// The warp has gathered: what it did since it last had is complete.
    pub fn gather(&mut self, warp: usize, counters: &mut Counters) {
        for instruction in self.shared[warp].instructions() {
            counters.shared_bank_conflicts += conflicts(instruction);
        }
        for instruction in self.global[warp].instructions() {
            match instruction.tag.kind() {
                AccessKind::Store => counters.global_sectors_written += sectors(instruction),
                _ => counters.global_sectors_read += sectors(instruction),
            }
        }
        self.shared[warp].clear();
        self.global[warp].clear();
    }
}

fn sectors(instruction: &Instruction<u64>) -> u64 {
    let mut sectors = [0; 32];
    let mut count = 0;
    for (_, sector) in instruction.accesses() {
        sectors[count] = sector;
        count += 1;
    }
    let sectors = &mut sectors[..count];
    if !sectors.is_sorted() {
        sectors.sort_unstable();
    }
    sectors.chunk_by(|a, b| a == b).count() as u64
}

/// Passes beyond the first of each phase. A pass serves 128 bytes, so wide accesses go in phases of as many lanes
/// as ask for that much.
fn conflicts(instruction: &Instruction<u32>) -> u64 {
    let lanes_a_phase = BANKS.min(4 * BANKS / instruction.bytes);
    let words = |offset: u32| offset / 4..(offset + instruction.bytes).div_ceil(4);
    (0..BANKS / lanes_a_phase)
        .map(|phase| {
            let accesses = instruction.accesses().filter(|(lane, _)| lane / lanes_a_phase == phase);
            passes(accesses.flat_map(|(_, offset)| words(offset))) - 1
        })
        .sum()
}

/// How many passes serve the words: the most distinct words that fall into one bank.
pub fn passes(words: impl Iterator<Item = u32>) -> u64 {
    // Almost always each bank is asked for at most one word, which needs no sorting.
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
