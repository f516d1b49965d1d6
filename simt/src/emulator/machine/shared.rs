//! Accesses to shared memory.
use std::ptr;

use super::{Machine, Outcome};
use crate::emulator::{
    error::{AccessKind, EmulatorError, Space},
    shared,
    site::Site,
    tensor, traffic,
};

impl Machine<'_> {
    /// Offset of an access that is aligned and inside.
    #[inline]
    pub(super) fn shared_offset(&self, kind: AccessKind, address: u32, bytes: u32, site: Site) -> Outcome<usize> {
        let offset = self.shared.offset(address, bytes);
        match offset {
            Some(offset) if address & (bytes - 1) == 0 => Ok(offset),
            _ => {
                let access = self.access(Space::Shared, kind, address as u64, bytes, site);
                Err(Box::new(match offset {
                    None => {
                        let (start, bytes) = (shared::BASE as u64, self.launch.shared_bytes as u64);
                        EmulatorError::OutOfBounds { access, nearest: (bytes > 0).then_some(start..start + bytes) }
                    }
                    Some(_) => EmulatorError::Misaligned { access, alignment: bytes },
                }))
            }
        }
    }

    /// # Safety
    /// `into` is good for `bytes`.
    pub unsafe fn load_shared(&mut self, address: u32, into: *mut u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        let offset = self.shared_offset(AccessKind::Load, address, bytes, site)?;
        let tag = self.sites.tag(AccessKind::Load, site);
        if let Err(conflict) = self.shared.shadow.read(offset, bytes, tag, &self.accessor, &self.clocks) {
            return Err(self.conflict(Space::Shared, AccessKind::Load, address as u64, bytes, site, conflict));
        }
        self.traffic.shared(self.thread, tag, offset, bytes);
        // SAFETY: the range was checked; `into` is the caller's promise.
        unsafe { ptr::copy_nonoverlapping(self.shared.bytes.as_ptr().add(offset), into, bytes as usize) };
        Ok(())
    }

    /// # Safety
    /// `from` is good for `bytes`.
    pub unsafe fn store_shared(&mut self, address: u32, from: *const u8, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        // SAFETY: the caller's promise.
        self.check_stored(unsafe { std::slice::from_raw_parts(from, bytes as usize) }, site)?;
        let offset = self.shared_offset(AccessKind::Store, address, bytes, site)?;
        let tag = self.sites.tag(AccessKind::Store, site);
        if let Err(conflict) = self.shared.shadow.write(offset, bytes, tag, &self.accessor, &self.clocks) {
            return Err(self.conflict(Space::Shared, AccessKind::Store, address as u64, bytes, site, conflict));
        }
        self.traffic.shared(self.thread, tag, offset, bytes);
        // SAFETY: the range was checked; `from` is the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, self.shared.bytes.as_mut_ptr().add(offset), bytes as usize) };
        Ok(())
    }

    /// Register 0 of each lane is a row's address.
    pub(super) fn load_matrix(&mut self, warp: usize, site: Site, transposed: bool) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::LoadMatrix;
        let tag = self.sites.tag(KIND, site);
        let accessor = self.clocks.warp_accessor(warp as u32);
        let running = self.thread;
        let mut offsets = [0; 32];
        let mut rows = [[0u16; 8]; 32];
        for (lane, row) in rows.iter_mut().enumerate() {
            // Errors name the lane that gave the address.
            self.thread = (32 * warp + lane) as u32;
            let address = self.warps[warp].registers[lane][0];
            let offset = self.shared_offset(KIND, address, 16, site)?;
            if let Err(conflict) = self.shared.shadow.read(offset, 16, tag, &accessor, &self.clocks) {
                return Err(self.conflict(Space::Shared, KIND, address as u64, 16, site, conflict));
            }
            for (value, bytes) in row.iter_mut().zip(self.shared.bytes[offset..offset + 16].chunks_exact(2)) {
                *value = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
            offsets[lane] = offset as u32;
        }
        self.thread = running;
        for matrix in offsets.chunks_exact(8) {
            let words = matrix.iter().flat_map(|offset| offset / 4..offset / 4 + 4);
            self.counters.load_matrix_bank_conflicts += traffic::passes(words) - 1;
        }
        tensor::distribute(&rows, transposed, &mut self.warps[warp].registers);
        self.counters.load_matrix += 1;
        Ok(())
    }
}
