//! Addresses whose owner the driver has named already: a run's tensors are asked for once, not at every run.
//!
//! In: addresses of this device's memory. Out: whether one was remembered. Invariant: an address is found only if it
//! was remembered; one may be forgotten, and is then asked for again. Nothing here locks or allocates, so a run may
//! call it.
//!
//! The table is set-associative, as caches are: an address has [`WAYS`] places, all of one cache line, and a newcomer
//! pushes the oldest of a full set out. An engine of 80 layers gives some 330 addresses (K and V of each layer, and
//! the rest shared or in turn); 256 sets hold 1.3 of them each, so even a set with three times its share has room.

use std::sync::atomic::{AtomicU64, Ordering};

const SETS_LOG2: u32 = 8;
const WAYS: usize = 8;

/// The places of one cache line, the latest address first; 0 where there is none.
#[derive(Debug)]
#[repr(align(64))]
struct Set([AtomicU64; WAYS]);

/// The table: 16 KiB.
#[derive(Debug)]
pub(super) struct KnownAddresses(Box<[Set]>);

impl KnownAddresses {
    pub fn new() -> KnownAddresses {
        KnownAddresses((0..1 << SETS_LOG2).map(|_| Set([const { AtomicU64::new(0) }; WAYS])).collect())
    }

    /// Whether `address`, which is not 0, was remembered.
    pub fn contains(&self, address: u64) -> bool {
        self.ways(address).iter().any(|way| way.load(Ordering::Relaxed) == address)
    }

    /// Remembers `address`, which is not 0. Two threads at one set may forget an address, but never make one up: every
    /// step stores what was remembered.
    pub fn insert(&self, address: u64) {
        let mut pushed = address;
        for way in self.ways(address) {
            pushed = way.swap(pushed, Ordering::Relaxed);
            if pushed == 0 || pushed == address {
                break;
            }
        }
    }

    /// Fibonacci hashing: allocations lie at regular distances, which the golden ratio's multiples spread evenly.
    fn ways(&self, address: u64) -> &[AtomicU64; WAYS] {
        const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
        &self.0[(address.wrapping_mul(GOLDEN_RATIO) >> (u64::BITS - SETS_LOG2)) as usize].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// K and V of 80 layers and two of everything else, at the distances that pools and allocators choose.
    #[test]
    fn an_engine_s_tensors_are_all_known_from_the_second_step_on() {
        for (base, distance) in [
            (0x7f00_0000_0000, 1 << 32),
            (0x7f00_0000_0000, 1 << 28),
            (0x7f12_3460_0000, 2 << 20),
            (0x7f12_3460_0000, 3 * (2 << 20)),
            (0x7f12_3460_0000, 512),
            (0x7f12_3460_0000, 16 * 8 * 128 * 2),
            (0x3_0200_0000, 1_342_177_280 + 512),
        ] {
            let known = KnownAddresses::new();
            let addresses: Vec<u64> = (0..2 * 80 + 160).map(|index| base + index * distance).collect();
            for &address in &addresses {
                assert!(!known.contains(address), "{address:#x}");
                known.insert(address);
            }
            let forgotten = addresses.iter().filter(|&&address| !known.contains(address)).count();
            assert_eq!(forgotten, 0, "{distance} bytes apart");
        }
    }

    /// Twenty times as many as there are places: the latest of a set stay, nothing is made up.
    #[test]
    fn a_full_set_forgets_its_oldest() {
        let known = KnownAddresses::new();
        let mates = |address: &u64| std::ptr::eq(known.ways(*address), known.ways(4096));
        let of_one_set: Vec<u64> = (1..).map(|page| page << 12).filter(mates).take(20 * WAYS).collect();
        for (index, &address) in of_one_set.iter().enumerate() {
            known.insert(address);
            let oldest = (index + 1).saturating_sub(WAYS);
            assert!(of_one_set[..oldest].iter().all(|&gone| !known.contains(gone)));
            assert!(of_one_set[oldest..=index].iter().all(|&here| known.contains(here)));
        }
        // One that is remembered again takes no second place.
        let newest = of_one_set[20 * WAYS - 1];
        known.insert(newest);
        assert!(of_one_set[19 * WAYS..].iter().all(|&address| known.contains(address)));
    }

    #[test]
    fn threads_that_insert_at_once_make_nothing_up() {
        let known = KnownAddresses::new();
        std::thread::scope(|scope| {
            for thread in 1..=4u64 {
                let known = &known;
                scope.spawn(move || {
                    for page in 1..20_000u64 {
                        known.insert(page << 16 | thread << 8);
                        assert!(!known.contains(page << 16 | 5 << 8));
                    }
                });
            }
        });
    }
}
