//! The device memory of a launch: the host slices it may touch, and nothing else.
use std::{marker::PhantomData, ops::Range};

use bytemuck::{NoUninit, Pod};

use super::shadow::Shadow;
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

/// What a launch may do to memory registered by [`GlobalMemory::register_raw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawAccess {
    /// As [`GlobalMemory::read_only`].
    ReadOnly,
    /// As [`GlobalMemory::writable`].
    Writable,
    /// As [`GlobalMemory::uninitialised`].
    Uninitialised,
}

#[derive(Debug, Default)]
pub(super) struct Regions {
    list: Vec<Region>,
    /// Rank of the next block: blocks are counted over all launches.
    pub(super) next_rank: u32,
}

#[derive(Debug)]
pub(super) struct Region {
    base: *mut u8,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// History of a writable region's bytes, counted from `line_address`. What is read-only has none.
    pub(super) shadow: Option<Shadow>,
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

    /// Registers `bytes` bytes at `address`, for callers that hold addresses rather than slices.
    ///
    /// # Safety
    /// They are live, initialised host memory for as long as this lives, and meanwhile nobody else writes them, nor,
    /// unless `access` is [`RawAccess::ReadOnly`], reads them.
    pub unsafe fn register_raw(&mut self, address: u64, bytes: usize, access: RawAccess) {
        let (writable, uninitialised) = (access != RawAccess::ReadOnly, access == RawAccess::Uninitialised);
        self.register::<u8>(address as *mut u8, bytes, writable, uninitialised);
    }

    fn register<T>(&mut self, base: *mut u8, bytes: usize, writable: bool, uninitialised: bool) -> Global<T> {
        let address = base as u64;
        let shadow = writable.then(|| Shadow::new(bytes + (address % 16) as usize, uninitialised));
        self.regions.list.push(Region { base, address, bytes: bytes as u64, shadow });
        Global::new(address)
    }
}

impl Regions {
    /// Index of the region that holds all of `address .. address + bytes`. `last` is where the previous one was.
    #[inline]
    pub(super) fn find(&self, address: u64, bytes: u32, last: &mut usize) -> Option<usize> {
        let holds = |region: &Region| {
            let offset = address.wrapping_sub(region.address);
            offset < region.bytes && region.bytes - offset >= bytes as u64
        };
        if !self.list.get(*last).is_some_and(holds) {
            *last = self.list.iter().position(holds)?;
        }
        Some(*last)
    }

    /// Addresses of the region whose start or end is closest to `address`.
    pub(super) fn nearest(&self, address: u64) -> Option<Range<u64>> {
        let addresses = self.list.iter().map(|region| region.address..region.address + region.bytes);
        addresses.min_by_key(|range| address.abs_diff(range.start).min(address.abs_diff(range.end)))
    }

    #[inline]
    pub(super) fn region(&mut self, index: usize) -> &mut Region {
        &mut self.list[index]
    }
}

impl Region {
    /// The 16-byte line in which the region begins.
    #[inline]
    pub(super) fn line_address(&self) -> u64 {
        self.address & !15
    }

    /// Copies bytes out of the region.
    ///
    /// # Safety
    /// `offset .. offset + bytes` is inside the region and `into` is good for `bytes`.
    #[inline]
    pub(super) unsafe fn read(&self, offset: u64, into: *mut u8, bytes: u32) {
        // SAFETY: the region is borrowed for as long as the GlobalMemory lives; the range is the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset as usize), into, bytes as usize) }
    }

    /// Copies bytes into the region.
    ///
    /// # Safety
    /// As [`read`](Self::read), and the region is writable.
    #[inline]
    pub(super) unsafe fn write(&mut self, offset: u64, from: *const u8, bytes: u32) {
        // SAFETY: as in `read`; a writable region was borrowed exclusively.
        unsafe { std::ptr::copy_nonoverlapping(from, self.base.add(offset as usize), bytes as usize) }
    }
}
