//! Bulk copies. Loads land when somebody waits for the barrier they complete on, stores when their thread waits for
//! them: as late as the rules allow. Until then their destination is nobody's to touch and their source nobody's to
//! write.
use std::collections::VecDeque;

use super::{Machine, Outcome};
use crate::{
    bulk::TensorMap,
    emulator::{
        error::{AccessKind, EmulatorError, Place, Space},
        shadow::Conflict,
        site::Site,
        tensor_map::{Image, Segment},
    },
    wgmma::Swizzle,
};

const KIND: AccessKind = AccessKind::BulkCopy;
const PIECE: u32 = 16;

/// A load that has not landed.
pub(super) struct BulkLoad {
    destination: u32,
    pub bytes: u32,
    swizzle: Swizzle,
    segments: Vec<Segment>,
    pub place: Place,
}

/// Stores of a thread, oldest first.
#[derive(Default)]
pub(super) struct BulkStores {
    /// By group; the last one is open.
    groups: VecDeque<Vec<BulkStore>>,
    open: Vec<BulkStore>,
}

struct BulkStore {
    destination: u64,
    offset: usize,
    bytes: u32,
    /// What was read from the source, once somebody has waited for that.
    read: Option<Vec<u8>>,
    site: Site,
}

impl Machine<'_> {
    /// The map at an address.
    pub fn tensor_map(&mut self, address: u64, site: Site) -> Outcome<Image> {
        self.step(site)?;
        let bytes = size_of::<TensorMap>() as u32;
        let segment = Segment { source: address, offset: 0, bytes };
        self.read_source(&segment, site)?;
        if !address.is_multiple_of(align_of::<TensorMap>() as u64) {
            let access = self.access(Space::Global, KIND, address, bytes, site);
            return Err(Box::new(EmulatorError::Misaligned { access, alignment: align_of::<TensorMap>() as u32 }));
        }
        let mut map = TensorMap([0; 16]);
        self.copy_source(&segment, bytemuck::bytes_of_mut(&mut map));
        Image::read(map).ok_or_else(|| Box::new(EmulatorError::NoTensorMap { address, place: self.place(site) }))
    }

    pub fn start_tensor_load(
        &mut self,
        destination: u32,
        map: u64,
        coordinates: &[i32],
        barrier: u32,
        site: Site,
    ) -> Outcome<()> {
        let image = self.tensor_map(map, site)?;
        if image.dimensions() != coordinates.len() {
            let (found, place) = (coordinates.len() as u32, self.place(site));
            return Err(Box::new(EmulatorError::TensorRank { found, wanted: image.dimensions() as u32, place }));
        }
        // A swizzle's pattern begins at a multiple of its eight rows, any box at one of 128 bytes.
        let alignment = (8 * image.swizzle().row_bytes()).max(128);
        let (bytes, segments) = (image.bytes(), image.segments(coordinates));
        self.start_load(destination, bytes, alignment, image.swizzle(), segments, barrier, site)
    }

    pub fn start_bulk_load(
        &mut self,
        destination: u32,
        source: u64,
        bytes: u32,
        barrier: u32,
        site: Site,
    ) -> Outcome<()> {
        self.step(site)?;
        self.check_bulk(source, bytes, site)?;
        let segments = vec![Segment { source, offset: 0, bytes }];
        self.start_load(destination, bytes, PIECE, Swizzle::None, segments, barrier, site)
    }

    /// Global address and size of a plain copy.
    fn check_bulk(&self, address: u64, bytes: u32, site: Site) -> Outcome<()> {
        if !bytes.is_multiple_of(PIECE) {
            return Err(Box::new(EmulatorError::BulkSize { bytes, place: self.place(site) }));
        }
        if !address.is_multiple_of(PIECE as u64) {
            let access = self.access(Space::Global, KIND, address, bytes, site);
            return Err(Box::new(EmulatorError::Misaligned { access, alignment: PIECE }));
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "a copy has two ends, a shape and a barrier")]
    fn start_load(
        &mut self,
        destination: u32,
        bytes: u32,
        alignment: u32,
        swizzle: Swizzle,
        segments: Vec<Segment>,
        barrier: u32,
        site: Site,
    ) -> Outcome<()> {
        if !destination.is_multiple_of(alignment) {
            let access = self.access(Space::Shared, KIND, destination as u64, bytes, site);
            return Err(Box::new(EmulatorError::Misaligned { access, alignment }));
        }
        let index = self.mbarrier_for_copies(barrier, site)?;
        let tag = self.sites.tag(KIND, site);
        for address in (destination..destination + bytes).step_by(PIECE as usize) {
            let offset = self.shared_offset(KIND, address, PIECE, site)?;
            if let Err(conflict) = self.shared.shadow.write(offset, PIECE, tag, &self.accessor, &self.clocks) {
                return Err(self.conflict(Space::Shared, KIND, address as u64, PIECE, site, conflict));
            }
        }
        for segment in &segments {
            self.read_source(segment, site)?;
            self.count_sectors_read(segment);
            self.hold_source(segment, true);
        }
        self.counters.bulk_copies += 1;
        self.counters.bulk_copy_bytes += bytes as u64;
        let place = self.place(site);
        self.add_load(index, BulkLoad { destination, bytes, swizzle, segments, place })
    }

    /// Brings a load's bytes in as the write of `writer` in `epoch`.
    pub(super) fn land(&mut self, load: &BulkLoad, writer: u32, epoch: u32) {
        let mut bytes = vec![0; load.bytes as usize];
        for segment in &load.segments {
            self.hold_source(segment, false);
            self.copy_source(segment, &mut bytes[segment.offset as usize..(segment.offset + segment.bytes) as usize]);
        }
        for (address, piece) in (load.destination..).step_by(PIECE as usize).zip(bytes.chunks_exact(PIECE as usize)) {
            let offset = (load.swizzle.apply(address) - self.shared.address(0)) as usize;
            self.shared.bytes[offset..offset + PIECE as usize].copy_from_slice(piece);
            self.shared.shadow.land_as(offset, writer, epoch);
        }
    }

    /// Lines of 16 bytes that a range of global memory touches: `(address, bytes)` of each part.
    fn lines(address: u64, bytes: u32) -> impl Iterator<Item = (u64, u32)> {
        let end = address + bytes as u64;
        let first = address & !15;
        (first..end).step_by(PIECE as usize).map(move |line| {
            let (from, to) = (line.max(address), (line + PIECE as u64).min(end));
            (from, (to - from) as u32)
        })
    }

    /// Checks that the running thread may read the source now.
    fn read_source(&mut self, segment: &Segment, site: Site) -> Outcome<()> {
        let Some(index) = self.regions.find(segment.source, segment.bytes, &mut self.last_region) else {
            let access = self.access(Space::Global, KIND, segment.source, segment.bytes, site);
            let nearest = self.regions.nearest(segment.source);
            return Err(Box::new(EmulatorError::OutOfBounds { access, nearest }));
        };
        let tag = self.sites.tag(KIND, site);
        let region = self.regions.region(index);
        let base = region.line_address();
        let Some(shadow) = &mut region.shadow else { return Ok(()) };
        let conflict = Self::lines(segment.source, segment.bytes).find_map(|(address, bytes)| {
            let read = shadow.read((address - base) as usize, bytes, tag, &self.accessor, &self.clocks);
            read.err()
                .map(|conflict| Conflict { offset: conflict.offset + (address - segment.source) as usize, ..conflict })
        });
        match conflict {
            Some(conflict) => Err(self.conflict(Space::Global, KIND, segment.source, segment.bytes, site, conflict)),
            None => Ok(()),
        }
    }

    /// From now on nobody may write the source, or anybody may again.
    fn hold_source(&mut self, segment: &Segment, hold: bool) {
        let Some(index) = self.regions.find(segment.source, segment.bytes, &mut self.last_region) else { return };
        let region = self.regions.region(index);
        let base = region.line_address();
        let Some(shadow) = &mut region.shadow else { return };
        for (address, _) in Self::lines(segment.source, segment.bytes) {
            match hold {
                true => shadow.hold((address - base) as usize),
                false => shadow.let_go((address - base) as usize),
            }
        }
    }

    fn copy_source(&mut self, segment: &Segment, into: &mut [u8]) {
        let index = self.regions.find(segment.source, segment.bytes, &mut self.last_region);
        let region = self.regions.region(index.expect("the copy was checked when it started"));
        // SAFETY: the range was checked when the copy started, and `into` is as long.
        unsafe { region.read(segment.source - region.address, into.as_mut_ptr(), segment.bytes) };
    }

    fn count_sectors_read(&mut self, segment: &Segment) {
        const SECTOR: u64 = 32;
        let index = self.regions.find(segment.source, segment.bytes, &mut self.last_region);
        let base = index.map_or(0, |index| self.regions.region(index).line_address());
        let from = segment.source - base;
        self.counters.global_sectors_read += (from + segment.bytes as u64).div_ceil(SECTOR) - from / SECTOR;
    }

    /// The place of an unfinished load that reads the global byte.
    pub(super) fn load_that_reads(&self, address: u64) -> Option<Place> {
        let reads =
            |segment: &Segment| (segment.source & !15..segment.source + segment.bytes as u64).contains(&address);
        self.loads().find(|load| load.segments.iter().any(reads)).map(|load| load.place)
    }

    pub fn start_bulk_store(&mut self, destination: u64, source: u32, bytes: u32, site: Site) -> Outcome<()> {
        self.step(site)?;
        self.check_bulk(destination, bytes, site)?;
        let tag = self.sites.tag(KIND, site);
        for piece in (0..bytes).step_by(PIECE as usize) {
            let offset = self.shared_offset(KIND, source + piece, PIECE, site)?;
            if let Err(conflict) = self.shared.shadow.read(offset, PIECE, tag, &self.accessor, &self.clocks) {
                return Err(self.conflict(Space::Shared, KIND, (source + piece) as u64, PIECE, site, conflict));
            }
            self.shared.shadow.hold(offset);
            self.write_piece(destination + piece as u64, site)?;
        }
        self.counters.bulk_copies += 1;
        self.counters.bulk_copy_bytes += bytes as u64;
        self.counters.global_sectors_written += bytes.div_ceil(32) as u64;
        let offset = (source - self.shared.address(0)) as usize;
        self.running().bulk_stores.open.push(BulkStore { destination, offset, bytes, read: None, site });
        Ok(())
    }

    /// Checks and claims 16 bytes of a store's destination.
    fn write_piece(&mut self, address: u64, site: Site) -> Outcome<()> {
        let tag = self.sites.tag(KIND, site);
        let found = self.regions.find(address, PIECE, &mut self.last_region);
        let access = self.access(Space::Global, KIND, address, PIECE, site);
        let Some(index) = found else {
            return Err(Box::new(EmulatorError::OutOfBounds { access, nearest: self.regions.nearest(address) }));
        };
        let region = self.regions.region(index);
        let offset = (address - region.line_address()) as usize;
        let Some(shadow) = &mut region.shadow else { return Err(Box::new(EmulatorError::ReadOnly { access })) };
        shadow
            .write(offset, PIECE, tag, &self.accessor, &self.clocks)
            .map_err(|conflict| self.conflict(Space::Global, KIND, address, PIECE, site, conflict))
    }

    pub fn commit_bulk_stores(&mut self) {
        let stores = &mut self.running().bulk_stores;
        let group = std::mem::take(&mut stores.open);
        stores.groups.push_back(group);
    }

    /// Reads the sources of all groups but the youngest `pending`.
    pub fn wait_bulk_stores_read(&mut self, pending: u32) -> Outcome<()> {
        let thread = self.thread as usize;
        let groups = &mut self.threads[thread].bulk_stores.groups;
        let count = groups.len().saturating_sub(pending as usize);
        for store in groups.iter_mut().take(count).flatten() {
            store.read_source(&mut self.shared);
        }
        Ok(())
    }

    /// Finishes all groups but the youngest `pending`.
    pub fn wait_bulk_stores(&mut self, pending: u32) -> Outcome<()> {
        while self.running().bulk_stores.groups.len() > pending as usize {
            let group = self.running().bulk_stores.groups.pop_front().unwrap_or_default();
            group.into_iter().for_each(|store| self.finish_store(store));
        }
        Ok(())
    }

    fn finish_store(&mut self, mut store: BulkStore) {
        let destination = store.destination;
        let bytes = store.read_source(&mut self.shared);
        for (address, piece) in (destination..).step_by(PIECE as usize).zip(bytes.chunks_exact(PIECE as usize)) {
            let index = self.regions.find(address, PIECE, &mut self.last_region);
            let region = self.regions.region(index.expect("the copy was checked when it started"));
            // SAFETY: the range was checked when the copy started and is writable; a piece is 16 bytes.
            unsafe { region.write(address - region.address, piece.as_ptr(), PIECE) };
            let offset = (address - region.line_address()) as usize;
            if let Some(shadow) = &mut region.shadow {
                shadow.land(offset, &self.accessor);
            }
        }
    }

    /// The running thread exits: its stores arrive by the end of the kernel if their sources were waited for.
    pub(super) fn exit_bulk_stores(&mut self) -> Outcome<()> {
        let stores = &self.threads[self.thread as usize].bulk_stores;
        if let Some(store) = stores.all().find(|store| store.read.is_none()) {
            return Err(Box::new(EmulatorError::NeverWaited { kind: KIND, place: self.place(store.site) }));
        }
        self.finish_stores();
        Ok(())
    }

    /// Finishes all stores of the running thread.
    fn finish_stores(&mut self) {
        let stores = std::mem::take(&mut self.running().bulk_stores);
        stores.groups.into_iter().flatten().chain(stores.open).for_each(|store| self.finish_store(store));
    }

    /// After an error: leaves no mark of unfinished copies in global memory, which may serve another launch.
    pub fn abandon_copies(&mut self) {
        for load in self.take_loads() {
            load.segments.iter().for_each(|segment| self.hold_source(segment, false));
        }
        for thread in 0..self.threads.len() as u32 {
            self.thread = thread;
            self.accessor = self.clocks.accessor(thread);
            self.finish_stores();
        }
    }

    /// The place of an unfinished store that reads the 16 bytes of shared memory at `offset`.
    pub(super) fn store_that_reads(&self, offset: usize) -> Option<Place> {
        let reads = |store: &&BulkStore| {
            store.read.is_none() && (store.offset..store.offset + store.bytes as usize).contains(&(offset & !15))
        };
        (0..).zip(&self.threads).find_map(|(thread, state)| {
            let store = state.bulk_stores.all().find(reads)?;
            Some(Place { location: store.site, thread, block: self.block })
        })
    }
}

impl BulkStores {
    fn all(&self) -> impl Iterator<Item = &BulkStore> {
        self.groups.iter().flatten().chain(&self.open)
    }
}

impl BulkStore {
    /// The bytes of the source, read now unless they were before; whoever wants may then write it.
    fn read_source(&mut self, shared: &mut crate::emulator::shared::SharedMemory) -> &[u8] {
        let range = self.offset..self.offset + self.bytes as usize;
        self.read.get_or_insert_with(|| {
            range.clone().step_by(PIECE as usize).for_each(|offset| shared.shadow.let_go(offset));
            shared.bytes[range].to_vec()
        })
    }
}
