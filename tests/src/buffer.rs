//! Host memory as an executor sees it: an address, 16-byte aligned like a device allocation's rows.

use bytemuck::Pod;

/// Some memory.
#[derive(Clone)]
pub struct Buffer {
    words: Vec<u128>,
    bytes: usize,
}

/// Where a buffer lies: what an executor with memory of its own has to copy there and back.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Address of the first byte.
    pub address: u64,
    /// Bytes.
    pub bytes: usize,
    /// What a launch may do to it.
    pub access: Access,
}

/// What a launch may do to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read it.
    Read,
    /// Read and write it.
    Update,
    /// Write it, and then read what it wrote.
    Produce,
}

impl Buffer {
    /// `bytes` bytes of `fill`, at least one word so that the address is never 0.
    pub fn filled(bytes: usize, fill: u8) -> Buffer {
        Buffer { words: vec![u128::from_ne_bytes([fill; 16]); bytes.div_ceil(16).max(1)], bytes }
    }

    /// A copy of `values`.
    pub fn of<T: Pod>(values: &[T]) -> Buffer {
        let mut buffer = Buffer::filled(size_of_val(values), 0);
        buffer.as_mut_slice().copy_from_slice(values);
        buffer
    }

    /// The address of the first byte. What is written through it shows in [`as_slice`](Self::as_slice).
    pub fn address(&mut self) -> u64 {
        self.words.as_mut_ptr() as u64
    }

    /// Where it lies.
    pub fn region(&mut self, access: Access) -> Region {
        Region { address: self.address(), bytes: self.bytes, access }
    }

    /// The contents.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&bytemuck::cast_slice::<u128, u8>(&self.words)[..self.bytes])
    }

    /// The contents, to write.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut bytemuck::cast_slice_mut::<u128, u8>(&mut self.words)[..self.bytes])
    }
}
