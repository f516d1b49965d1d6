//! The seeded order of everything the rules leave open (splitmix64, Steele, Lea and Flood 2014).

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Index of some set bit; `mask` is not 0.
    #[inline]
    pub fn set_bit(&mut self, mask: u32) -> u32 {
        let turn = self.next() as u32 % (32 - mask.leading_zeros());
        turn + (mask >> turn).trailing_zeros()
    }

    pub fn shuffle(&mut self, items: &mut [u32]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.next() as usize % (end + 1));
        }
    }
}
