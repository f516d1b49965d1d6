//! Accesses to global memory.
use super::{Machine, Outcome};
use crate::emulator::{
    error::{AccessKind, EmulatorError, Space},
    site::Site,
};

/// What an atomic orders.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Relaxed,
    AcquireRelease,
}

impl Machine<'_> {
    /// Region and offset of an access that is aligned, inside and allowed.
    #[inline]
    pub(super) fn global_access(
        &mut self,
        kind: AccessKind,
        address: u64,
        bytes: u32,
        alignment: u32,
        site: Site,
    ) -> Outcome<(usize, u64)> {
        let Some(index) = self.regions.find(address, bytes, &mut self.last_region) else {
            let access = self.access(Space::Global, kind, address, bytes, site);
            let nearest = self.regions.nearest(address);
            return Err(Box::new(EmulatorError::OutOfBounds { access, nearest }));
        };
        if address & (alignment as u64 - 1) != 0 {
            let access = self.access(Space::Global, kind, address, bytes, site);
            return Err(Box::new(EmulatorError::Misaligned { access, alignment }));
        }
        let tag = self.sites.tag(kind, site);
        let writes = matches!(kind, AccessKind::Store | AccessKind::Atomic);
        let region = self.regions.region(index);
        let line_offset = address - region.line_address();
        match &mut region.shadow {
            Some(shadow) => {
                let offset = line_offset as usize;
                let result = match writes {
                    true => shadow.write(offset, bytes, tag, &self.accessor, &self.clocks),
                    false => shadow.read(offset, bytes, tag, &self.accessor, &self.clocks),
                };
                if let Err(conflict) = result {
                    return Err(self.conflict(Space::Global, kind, address, bytes, site, conflict));
                }
            }
            None if writes => {
                let access = self.access(Space::Global, kind, address, bytes, site);
                return Err(Box::new(EmulatorError::ReadOnly { access }));
            }
            None => {}
        }
        if kind != AccessKind::Atomic {
            self.traffic.global(self.thread, tag, index, line_offset, bytes);
        }
        Ok((index, address - self.regions.region(index).address))
    }

    /// # Safety
    /// `into` is good for `bytes`.
    pub unsafe fn load_global(
        &mut self,
        kind: AccessKind,
        address: u64,
        into: *mut u8,
        bytes: u32,
        site: Site,
    ) -> Outcome<()> {
        self.step(site)?;
        let (index, offset) = self.global_access(kind, address, bytes, bytes, site)?;
        // SAFETY: the range was checked; `into` is the caller's promise.
        unsafe { self.regions.region(index).read(offset, into, bytes) };
        Ok(())
    }

    /// # Safety
    /// `from` is good for `bytes`.
    pub unsafe fn store_global(&mut self, address: u64, from: *const u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        // SAFETY: the caller's promise.
        self.check_stored(unsafe { std::slice::from_raw_parts(from, bytes as usize) }, site)?;
        let (index, offset) = self.global_access(AccessKind::Store, address, bytes, bytes, site)?;
        // SAFETY: the range was checked and is writable; `from` is the caller's promise.
        unsafe { self.regions.region(index).write(offset, from, bytes) };
        Ok(())
    }

    pub fn atomic(&mut self, address: u64, site: Site, order: Order, update: impl Fn(u32) -> u32) -> Outcome<u32> {
        self.step(site)?;
        let (index, offset) = self.global_access(AccessKind::Atomic, address, 4, 4, site)?;
        self.counters.atomics += 1;
        if order == Order::AcquireRelease {
            self.clocks.acquire_release(address, self.thread);
            self.accessor = self.clocks.accessor(self.thread);
        }
        let region = self.regions.region(index);
        let mut bytes = [0; 4];
        // SAFETY: the range was checked and is writable.
        unsafe { region.read(offset, bytes.as_mut_ptr(), 4) };
        let old = u32::from_ne_bytes(bytes);
        // SAFETY: as above.
        unsafe { region.write(offset, update(old).to_ne_bytes().as_ptr(), 4) };
        Ok(old)
    }
}
