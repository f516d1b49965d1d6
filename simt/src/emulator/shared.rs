//! The shared memory of one block. It starts poisoned, and every byte knows whether it may be read.

/// Where the dynamic shared memory begins in the shared window. Not 0, so that a null address is out of bounds.
pub const BASE: u32 = 1024;

/// What is known of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteState {
    /// Nobody wrote it.
    Poisoned,
    /// It may be read.
    Written,
    /// An asynchronous copy will write it.
    Pending,
}

pub struct SharedMemory {
    pub bytes: Vec<u8>,
    pub states: Vec<ByteState>,
}

impl SharedMemory {
    pub fn new(bytes: u32) -> Self {
        SharedMemory { bytes: vec![0; bytes as usize], states: vec![ByteState::Poisoned; bytes as usize] }
    }

    /// Poisons everything for the next block.
    pub fn reset(&mut self) {
        self.states.fill(ByteState::Poisoned);
    }

    /// Offset of `address` if all of `bytes` are inside.
    pub fn offset(&self, address: u32, bytes: u32) -> Option<usize> {
        let offset = address.checked_sub(BASE)? as usize;
        (offset + bytes as usize <= self.bytes.len()).then_some(offset)
    }
}
