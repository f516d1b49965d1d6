//! Pointers into the block's shared memory: 32-bit byte addresses with a type.
use core::marker::PhantomData;

use crate::{Word, body};

/// A typed address in the block's shared memory.
#[repr(transparent)]
pub struct Shared<T>(u32, PhantomData<*mut T>);

impl<T> Clone for Shared<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T> Shared<T> {
    /// The start of the dynamic shared memory the block was launched with, aligned to 1024 bytes.
    #[inline(always)]
    pub fn dynamic() -> Self {
        Shared(body::dynamic_shared_base(), PhantomData)
    }

    /// The byte address inside the shared window.
    #[inline(always)]
    pub fn address(self) -> u32 {
        self.0
    }

    /// The same address, another type.
    #[inline(always)]
    pub fn cast<U>(self) -> Shared<U> {
        Shared(self.0, PhantomData)
    }

    /// `count` elements further.
    #[inline(always)]
    #[allow(clippy::should_implement_trait)]
    pub fn add(self, count: u32) -> Self {
        Shared(self.0.wrapping_add(count.wrapping_mul(size_of::<T>() as u32)), PhantomData)
    }

    /// The same address, by [`registers::anew`](crate::registers::anew): others are constants away from it.
    #[inline(always)]
    pub fn anew(self) -> Self {
        Shared(body::anew(self.0), PhantomData)
    }

    /// `bytes` bytes further.
    #[inline(always)]
    pub fn add_bytes(self, bytes: u32) -> Self {
        Shared(self.0.wrapping_add(bytes), PhantomData)
    }
}

impl<T: Word> Shared<T> {
    /// Reads the element.
    ///
    /// # Safety
    /// The address is aligned, inside the block's shared memory, written before, and no other thread writes it
    /// without a barrier in between.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn load(self) -> T {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::load_shared(self.0) }
    }

    /// Writes the element.
    ///
    /// # Safety
    /// The address is aligned, inside the block's shared memory, and no other thread accesses it without a
    /// barrier in between.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn store(self, value: T) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::store_shared(self.0, value) }
    }
}
