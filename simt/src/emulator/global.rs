//! The device memory of a launch: the host slices it may touch, and nothing else.
use std::marker::PhantomData;

use bytemuck::{NoUninit, Pod};

use crate::global::Global;

/// The regions of host memory that a launch may touch. A kernel's global address is a host address.
///
/// Registering a slice returns its address and keeps the borrow, so the host cannot touch the slice while the
/// `GlobalMemory` lives. It may serve several launches in turn; what one wrote, the next may read.
/// An address that strays from one region into another one passes: only the gaps between regions are guarded.
#[derive(Debug, Default)]
pub struct GlobalMemory<'a> {
    pub(super) regions: Regions,
    borrows: PhantomData<&'a mut [u8]>,
}

#[derive(Debug, Default)]
pub(super) struct Regions(Vec<Region>);

#[derive(Debug)]
pub(super) struct Region {
    base: *mut u8,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) writable: bool,
    /// One flag a byte where the region began uninitialised; empty otherwise.
    pub(super) written: Vec<bool>,
}

impl<'a> GlobalMemory<'a> {
    /// No memory at all.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a slice that the kernel may only read.
    pub fn read_only<T: NoUninit>(&mut self, slice: &'a [T]) -> Global<T> {
        self.register(slice.as_ptr().cast_mut().cast(), size_of_val(slice), false, false)
    }

    /// Registers a slice that the kernel may read and write.
    pub fn writable<T: Pod>(&mut self, slice: &'a mut [T]) -> Global<T> {
        self.register(slice.as_mut_ptr().cast(), size_of_val(slice), true, false)
    }

    /// Registers a slice that the kernel may write, and may read only where a kernel has written it.
    pub fn uninitialised<T: Pod>(&mut self, slice: &'a mut [T]) -> Global<T> {
        self.register(slice.as_mut_ptr().cast(), size_of_val(slice), true, true)
    }

    fn register<T>(&mut self, base: *mut u8, bytes: usize, writable: bool, uninitialised: bool) -> Global<T> {
        let written = if uninitialised { vec![false; bytes] } else { Vec::new() };
        self.regions.0.push(Region { base, address: base as u64, bytes: bytes as u64, writable, written });
        Global::new(base as u64)
    }
}

impl Regions {
    /// Index of the region that holds all of `address .. address + bytes`. `last` is where the previous one was.
    pub(super) fn find(&self, address: u64, bytes: u32, last: &mut usize) -> Option<usize> {
        let holds = |region: &Region| {
            let offset = address.wrapping_sub(region.address);
            offset < region.bytes && region.bytes - offset >= bytes as u64
        };
        if !self.0.get(*last).is_some_and(holds) {
            *last = self.0.iter().position(holds)?;
        }
        Some(*last)
    }

    pub(super) fn region(&mut self, index: usize) -> &mut Region {
        &mut self.0[index]
    }
}

impl Region {
    /// Copies bytes out of the region.
    ///
    /// # Safety
    /// `offset .. offset + bytes` is inside the region and `into` is good for `bytes`.
    pub(super) unsafe fn read(&self, offset: u64, into: *mut u8, bytes: u32) {
        // SAFETY: the region is borrowed for as long as the GlobalMemory lives; the range is the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset as usize), into, bytes as usize) }
    }

    /// Copies bytes into the region.
    ///
    /// # Safety
    /// As [`read`](Self::read), and the region is writable.
    pub(super) unsafe fn write(&mut self, offset: u64, from: *const u8, bytes: u32) {
        // SAFETY: as in `read`; a writable region was borrowed exclusively.
        unsafe { std::ptr::copy_nonoverlapping(from, self.base.add(offset as usize), bytes as usize) }
    }
}
