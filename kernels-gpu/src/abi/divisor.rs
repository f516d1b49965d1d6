//! Division by a number that is fixed for a launch: one multiplication instead of about 20 instructions.
//!
//! In: a divisor from 1 to 2^31; out: quotient and remainder of any `n` below 2^31. Granlund and Montgomery,
//! "Division by invariant integers using multiplication" (1994), theorem 4.2 with 31-bit numerators, where the
//! multiplier always fits 32 bits.

/// A divisor with its reciprocal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct Divisor {
    divisor: u32,
    multiplier: u32,
    shift: u32,
}

impl Divisor {
    /// Prepares division by `divisor`; `None` if it is 0 or above 2^31.
    pub const fn new(divisor: u32) -> Option<Divisor> {
        if divisor == 0 || divisor > 1 << 31 {
            return None;
        }
        if divisor == 1 {
            return Some(Divisor { divisor, multiplier: 0, shift: 0 });
        }
        let bits = 32 - (divisor - 1).leading_zeros();
        let power = 31 + bits;
        let multiplier = (1u64 << power).div_ceil(divisor as u64);
        Some(Divisor { divisor, multiplier: multiplier as u32, shift: bits - 1 })
    }

    /// The divisor itself.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.divisor
    }

    /// `(n / divisor, n % divisor)` for `n < 2^31`.
    #[inline(always)]
    pub const fn divide(self, n: u32) -> (u32, u32) {
        let quotient =
            if self.multiplier == 0 { n } else { ((n as u64 * self.multiplier as u64) >> 32) as u32 >> self.shift };
        (quotient, n - quotient * self.divisor)
    }
}

#[cfg(test)]
mod tests {
    use super::Divisor;

    #[test]
    fn agrees_with_hardware_division() {
        let edges = [1u32, 2, 3, 5, 7, 16, 31, 33, 71, 1000, 1024, 65_535, 65_537, 1 << 30, (1 << 31) - 1, 1 << 31];
        for divisor in (1..=1100).chain(edges) {
            let fast = Divisor::new(divisor).unwrap();
            let multiples = [0u64, 1, 2, 3, 1000, 65_535].map(|m| m * divisor as u64);
            for n in multiples.iter().flat_map(|m| [m.saturating_sub(1), *m, m + 1]).chain([(1 << 31) - 1]) {
                if n < 1 << 31 {
                    let n = n as u32;
                    assert_eq!(fast.divide(n), (n / divisor, n % divisor), "{n} / {divisor}");
                }
            }
        }
        assert_eq!(Divisor::new(0), None);
        assert_eq!(Divisor::new((1 << 31) + 1), None);
    }
}
