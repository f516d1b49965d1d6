//! Gigabytes of numbers that are made in milliseconds: a buffer of 16-bit elements that repeat.
//!
//! The period is 8 times a prime, which shares no factor with any stride of rows, so neighbouring rows, heads and pages
//! differ, and those that do not are half a million pieces of 16 bytes apart.
//!
//! Unsafe: a copy takes addresses; the buffer owns the memory behind them.

use crate::number::{bits, value};
use crate::random::Random;
use oxattn::config::DType;
use oxattn::{Buffer, Device, Stream};

/// The buffer.
pub struct Periodic {
    /// Where they lie.
    pub memory: Buffer,
    /// One round of them, as the numbers they are.
    period: Vec<f64>,
}

impl Periodic {
    /// `elements` elements on `device` that repeat after 8 times a prime, so that rows of 16 bytes and more do not.
    pub fn new(device: &Device, elements: usize, prime: usize, dtype: DType) -> Periodic {
        let mut random = Random::new(prime as u64);
        let period: Vec<u16> = (0..8 * prime).map(|_| bits(dtype, random.normal())).collect();
        let memory = device.allocate(2 * elements.next_multiple_of(period.len())).unwrap();
        let (first, bytes) = (2 * period.len(), memory.bytes());
        memory.write(0, bytemuck::cast_slice(&period)).unwrap();
        if device.is_cpu() {
            for begin in (first..bytes).step_by(first) {
                memory.write(begin, bytemuck::cast_slice(&period)).unwrap();
            }
        } else {
            let mut filled = first;
            while filled < bytes {
                let more = filled.min(bytes - filled);
                // SAFETY: both ranges lie in the buffer, one after the other, until the wait.
                unsafe { Stream::default().copy(memory.address() + filled as u64, memory.address(), more) }.unwrap();
                filled += more;
            }
            device.synchronize().unwrap();
        }
        Periodic { memory, period: period.iter().map(|&bits| value(dtype, bits) as f64).collect() }
    }

    /// Elements `begin .. begin + len`.
    pub fn row(&self, begin: usize, len: usize) -> Vec<f64> {
        let (again, begin) = (&self.period, begin % self.period.len());
        self.period[begin..].iter().chain(again).take(len).copied().collect()
    }
}
