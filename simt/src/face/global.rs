//! Pointers into device memory: 64-bit addresses with a type. On a host the address is a host address.
use core::marker::PhantomData;

use crate::{Word, body};

/// A typed address in global memory. `repr(transparent)` over `u64`, so parameter structs can hold it.
#[repr(transparent)]
pub struct Global<T>(u64, PhantomData<*mut T>);

impl<T> Clone for Global<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Global<T> {}

impl<T> Global<T> {
    /// A pointer to `address`.
    #[inline(always)]
    pub fn new(address: u64) -> Self {
        Global(address, PhantomData)
    }

    /// The address.
    #[inline(always)]
    pub fn address(self) -> u64 {
        self.0
    }

    /// The same address, another type.
    #[inline(always)]
    pub fn cast<U>(self) -> Global<U> {
        Global(self.0, PhantomData)
    }

    /// `count` elements further; the product is formed in 64 bits.
    #[inline(always)]
    #[allow(clippy::should_implement_trait)]
    pub fn add(self, count: u64) -> Self {
        Global(self.0.wrapping_add(count.wrapping_mul(size_of::<T>() as u64)), PhantomData)
    }

    /// `bytes` bytes further (or back).
    #[inline(always)]
    pub fn add_bytes(self, bytes: i64) -> Self {
        Global(self.0.wrapping_add(bytes as u64), PhantomData)
    }
}

impl<T> Global<T> {
    /// Asks for the 128-byte line of the address to be brought into the L2 cache. Nothing is read, so nothing need be
    /// ordered; a line that is not there is no error.
    #[inline(always)]
    pub fn prefetch(self) {
        body::prefetch_global(self.0)
    }
}

impl<T: Word> Global<T> {
    /// Reads the element (`ld.global`).
    ///
    /// # Safety
    /// The address is aligned and inside live memory, and no thread writes it unordered with this read.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn load(self) -> T {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::load_global(self.0) }
    }

    /// Reads the element through the read-only path (`ld.global.nc`).
    ///
    /// # Safety
    /// As [`load`](Self::load), and nothing writes the element while the kernel runs.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn load_constant(self) -> T {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::load_global_constant(self.0) }
    }

    /// Writes the element (`st.global`).
    ///
    /// # Safety
    /// The address is aligned and inside live memory, and no thread accesses it unordered with this write.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn store(self, value: T) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::store_global(self.0, value) }
    }
}
