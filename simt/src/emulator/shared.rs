//! The shared memory of one block.
use super::shadow::Shadow;

/// Where the dynamic shared memory begins in the shared window. Not 0, so that a null address is out of bounds.
pub const BASE: u32 = 1024;

pub struct SharedMemory {
    pub bytes: Vec<u8>,
    pub shadow: Shadow,
}

impl SharedMemory {
    pub fn new(bytes: u32) -> Self {
        SharedMemory { bytes: vec![0; bytes as usize], shadow: Shadow::of_shared(bytes as usize) }
    }

    /// Offset of `address` if all of `bytes` are inside.
    #[inline]
    pub fn offset(&self, address: u32, bytes: u32) -> Option<usize> {
        let offset = address.wrapping_sub(BASE) as usize;
        (offset + bytes as usize <= self.bytes.len()).then_some(offset)
    }

    /// The address of an offset.
    #[inline]
    pub fn address(&self, offset: usize) -> u32 {
        BASE + offset as u32
    }
}
