//! Asynchronous copies. They read their source and write their destination when they are waited for, as late as the
//! rules allow; until then their destination is nobody's to touch, and their source nobody's to write.
use super::{Machine, Outcome};
use crate::emulator::{
    error::{AccessKind, EmulatorError, Space},
    shadow::{Conflict, Rule, Writers},
    site::Site,
};

#[derive(Clone, Copy)]
pub(super) struct PendingCopy {
    destination: u32,
    source: u64,
    source_bytes: u32,
    site: Site,
    /// Who had written the source's line when the copy started.
    source_writers: Writers,
}

impl Machine<'_> {
    pub fn start_copy(&mut self, destination: u32, source: u64, source_bytes: u32, site: Site) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::AsyncCopy;
        self.step(site)?;
        if source_bytes > 16 {
            return Err(Box::new(EmulatorError::CopySize { source_bytes, place: self.place(site) }));
        }
        let offset = self.shared_offset(KIND, destination, 16, site)?;
        let tag = self.sites.tag(KIND, site);
        if let Err(conflict) = self.shared.shadow.write(offset, 16, tag, &self.accessor, &self.clocks) {
            return Err(self.conflict(Space::Shared, KIND, destination as u64, 16, site, conflict));
        }
        let mut source_writers = Writers::default();
        if source_bytes > 0 {
            let (index, _) = self.global_access(KIND, source, source_bytes, 16, site)?;
            let region = self.regions.region(index);
            if let Some(shadow) = &region.shadow {
                source_writers = shadow.writers((source - region.line_address()) as usize);
            }
        }
        self.counters.async_copy_bytes += source_bytes as u64;
        let thread = self.running();
        thread.copies.push_back(PendingCopy { destination, source, source_bytes, site, source_writers });
        thread.uncommitted += 1;
        Ok(())
    }

    pub fn commit_copies(&mut self) {
        let thread = self.running();
        thread.groups.push_back(std::mem::take(&mut thread.uncommitted));
    }

    /// Finishes the running thread's copies until at most `pending` groups are left.
    pub fn wait_copies(&mut self, pending: u32) -> Outcome<()> {
        while self.running().groups.len() > pending as usize {
            let count = self.running().groups.pop_front().unwrap_or(0);
            for _ in 0..count {
                let Some(copy) = self.running().copies.pop_front() else { break };
                self.finish_copy(copy)?;
            }
        }
        Ok(())
    }

    fn finish_copy(&mut self, copy: PendingCopy) -> Outcome<()> {
        let mut bytes = [0; 16];
        if copy.source_bytes > 0 {
            let index = self
                .regions
                .find(copy.source, copy.source_bytes, &mut self.last_region)
                .expect("the copy was checked when it started");
            self.check_source(index, &copy)?;
            let region = self.regions.region(index);
            // SAFETY: the range was checked when the copy started, and `bytes` has room for 16.
            unsafe { region.read(copy.source - region.address, bytes.as_mut_ptr(), copy.source_bytes) };
        }
        let offset = self.shared_offset(AccessKind::AsyncCopy, copy.destination, 16, copy.site)?;
        self.shared.bytes[offset..offset + 16].copy_from_slice(&bytes);
        self.shared.shadow.land(offset, &self.accessor);
        Ok(())
    }

    /// Nobody may write the source while the copy runs; until its wait, the copy may read.
    fn check_source(&mut self, index: usize, copy: &PendingCopy) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::AsyncCopy;
        let tag = self.sites.tag(KIND, copy.site);
        let region = self.regions.region(index);
        let offset = (copy.source - region.line_address()) as usize;
        let Some(shadow) = &mut region.shadow else { return Ok(()) };
        let changed = shadow.writers(offset).iter().zip(&copy.source_writers).position(|(now, then)| now != then);
        let result = match changed {
            Some(granule) if 2 * granule < copy.source_bytes as usize => {
                let writer = shadow.writers(offset)[granule].0;
                let tag = shadow.last_write(offset + 2 * granule);
                Err(Conflict { rule: Rule::Race(writer, tag), offset: 2 * granule })
            }
            _ => shadow.read(offset, copy.source_bytes, tag, &self.accessor, &self.clocks),
        };
        result
            .map_err(|conflict| self.conflict(Space::Global, KIND, copy.source, copy.source_bytes, copy.site, conflict))
    }
}
