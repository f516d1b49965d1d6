//! The queues by load, the least loaded first.
//!
//! Pieces are always dealt to a least loaded queue, so the smallest load never falls, and a ring of buckets indexed
//! by load finds it in constant time, where a heap would compare and move log2(queues) entries a piece.

#[derive(Debug)]
pub(super) struct Loads {
    /// First queue of each bucket, or [`NONE`].
    first: [u32; BUCKETS],
    /// The queue after each in its bucket.
    next: Vec<u32>,
    load: Vec<u64>,
    /// Bucket of the least loaded queues, not reduced to the ring.
    least: u64,
    /// A bucket spans `2^shift` tiles, so that the costliest piece spans less than the ring.
    shift: u32,
}

/// Loads in a bucket differ by less than 1/512 of the costliest piece, and not at all where that is below 1024.
const BUCKETS: usize = 2048;
const NONE: u32 = u32::MAX;

impl Loads {
    pub fn new(queues: u32) -> Loads {
        let next = vec![NONE; queues as usize];
        Loads { first: [NONE; BUCKETS], load: vec![0; queues as usize], next, least: 0, shift: 0 }
    }

    /// All queues empty, lowest number first; no piece will cost more than `most`.
    pub fn restart(&mut self, most: u64) {
        // Only the queues' buckets are not empty: clearing those is less than clearing the ring.
        for load in &mut self.load {
            self.first[(std::mem::take(load) >> self.shift) as usize % BUCKETS] = NONE;
        }
        self.shift = (u64::BITS - most.leading_zeros()).saturating_sub(BUCKETS.ilog2() - 1);
        self.least = 0;
        for (queue, next) in self.next.iter_mut().enumerate().rev() {
            *next = std::mem::replace(&mut self.first[0], queue as u32);
        }
    }

    /// A least loaded queue and its load.
    #[inline(always)]
    pub fn least(&mut self) -> (u32, u64) {
        loop {
            let queue = self.first[self.least as usize % BUCKETS];
            if queue != NONE {
                return (queue, self.load[queue as usize]);
            }
            self.least += 1;
        }
    }

    /// The largest load.
    pub fn most(&self) -> u64 {
        self.load.iter().copied().max().unwrap_or(0)
    }

    /// Adds a piece to `queue`, which [`least`](Self::least) just named.
    #[inline(always)]
    pub fn add(&mut self, queue: u32, cost: u64) {
        let (next, load) = (&mut self.next[queue as usize], &mut self.load[queue as usize]);
        *load += cost;
        self.first[self.least as usize % BUCKETS] = *next;
        *next = std::mem::replace(&mut self.first[(*load >> self.shift) as usize % BUCKETS], queue);
    }
}
