//! Seeded data: SplitMix64 (Steele, Lea and Flood 2014), the same on every machine.

/// The generator.
pub struct Random(u64);

impl Random {
    /// One that depends on `seed` alone.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// One that depends on all of `keys`, in order.
    pub fn keyed(keys: &[u64]) -> Random {
        Random(keys.iter().fold(0, |seed, key| Random(seed ^ key).bits()))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// Mean 0, variance 1, between -3.5 and 3.5: the sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u16 as u32).sum();
        (sum as f32 / 65_536.0 - 2.0) * 3f32.sqrt()
    }

    /// Puts `items` in any order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}
