//! Memory the library owns itself: buffers for callers without an allocator of their own, and pinned staging.

use cudarc::driver::sys;

use super::{DriverError, check};

/// Device memory, freed on drop.
#[derive(Debug)]
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates in the current context; 0 bytes are fine.
    pub fn new(bytes: usize) -> Result<DeviceMemory, DriverError> {
        let mut address = 0;
        if bytes != 0 {
            call!(cuMemAlloc_v2(&mut address, bytes))?;
        }
        Ok(DeviceMemory { address, bytes })
    }

    /// Its address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `source` to `offset_bytes`, waiting for it. The range was checked by the caller.
    pub(crate) fn write(&self, offset_bytes: usize, source: &[u8]) -> Result<(), DriverError> {
        assert!(offset_bytes + source.len() <= self.bytes);
        call!(cuMemcpyHtoD_v2(self.address + offset_bytes as u64, source.as_ptr().cast(), source.len()))
    }

    /// Copies from `offset_bytes` to `target`, waiting for it. The range was checked by the caller.
    pub(crate) fn read(&self, offset_bytes: usize, target: &mut [u8]) -> Result<(), DriverError> {
        assert!(offset_bytes + target.len() <= self.bytes);
        call!(cuMemcpyDtoH_v2(target.as_mut_ptr().cast(), self.address + offset_bytes as u64, target.len()))
    }

    /// Sets every byte, waiting for it.
    pub(crate) fn fill(&self, byte: u8) -> Result<(), DriverError> {
        if self.bytes == 0 {
            return Ok(());
        }
        call!(cuMemsetD8_v2(self.address, byte, self.bytes))?;
        // The call only starts the fill, on the default stream, which other streams need not wait for.
        call!(cuStreamSynchronize(std::ptr::null_mut()))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes != 0 {
            // The context may be gone; there is nobody to tell.
            let _ = call!(cuMemFree_v2(self.address));
        }
    }
}

/// Page-locked host memory: copies from it run beside the host. Freed on drop.
#[derive(Debug)]
pub struct PinnedMemory {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the block is owned and unaliased.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Allocates in the current context.
    pub fn new(bytes: usize) -> Result<PinnedMemory, DriverError> {
        let mut start = std::ptr::null_mut();
        call!(cuMemAllocHost_v2(&mut start, bytes.max(1)))?;
        let start = start.cast::<u8>();
        // SAFETY: freshly allocated, `bytes` long; zeroed so that a slice of it is initialised.
        unsafe { start.write_bytes(0, bytes) };
        Ok(PinnedMemory { start, bytes })
    }

    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: owned, initialised, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = call!(cuMemFreeHost(self.start.cast()));
    }
}
