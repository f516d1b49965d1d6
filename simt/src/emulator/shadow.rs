//! What is known of every byte of a memory: who wrote it last and who has read it since.
//!
//! Bytes are tracked in pairs, the smallest access there is. A *line* of 16 bytes, the largest access, has one mark
//! while all accesses were to the whole line; the first smaller one splits it into a mark for each pair.
use bytemuck::Zeroable;

use super::{
    clock::{Accessor, Clocks, Reading, lane_id, same_block, thread_of},
    error::AccessKind,
    site::Tag,
};

const LINE_BYTES: usize = 16;
const GRANULES: usize = LINE_BYTES / 2;

/// The history of some bytes. All zeros: nobody touched them.
#[derive(Clone, Copy, bytemuck::Zeroable)]
#[repr(C)]
struct Mark {
    /// Id of the last writer; 0 for none.
    writer: u32,
    write_epoch: u32,
    write_tag: Tag,
    flags: u32,
    /// The reads since then. Where one `Reading` cannot hold them, `warp` is `SEVERAL` and `lanes` the index of a list.
    reading: Reading,
}

/// On a line's mark: its granules have marks of their own.
const SPLIT: u32 = 1;
/// An asynchronous or a bulk copy will write the bytes.
const PENDING: u32 = 2;
/// On a line's mark, added for each unfinished `wgmma` or bulk copy that reads it.
const HOLD: u32 = 4;

const SEVERAL: u32 = u32::MAX;

/// Why an access is wrong; `first_byte` counts from the start of the access.
pub struct Conflict {
    pub rule: Rule,
    pub offset: usize,
}

pub enum Rule {
    /// Nobody wrote the bytes.
    Uninitialised,
    /// A copy that is not waited for will write them: thread id and source line.
    Pending(u32, Tag),
    /// An earlier access is not ordered before this one: thread id and source line.
    Race(u32, Tag),
    /// Written through the generic proxy and not fenced before this read through the async one: thread id and line.
    Unfenced(u32, Tag),
    /// An unfinished `wgmma` or bulk copy reads the bytes.
    Held,
    /// A constant load after this launch wrote the bytes: thread id and source line.
    NotConstant(u32, Tag),
}

/// Granules of a line: `(writer, epoch)` of each.
pub type Writers = [(u32, u32); GRANULES];

pub struct Shadow {
    /// Bytes that nobody wrote may not be read.
    poisoned: bool,
    /// Whether what was written through the generic proxy must be fenced for the async one: in shared memory.
    has_proxies: bool,
    lines: Vec<Mark>,
    granules: Vec<Mark>,
    readings: Readings,
}

/// Lists of readings by several warps, or in several epochs of one.
#[derive(Default)]
struct Readings {
    lists: Vec<Vec<Reading>>,
    free: Vec<u32>,
}

impl std::fmt::Debug for Shadow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shadow").field("poisoned", &self.poisoned).field("lines", &self.lines.len()).finish()
    }
}

impl Shadow {
    /// For `bytes` bytes, counted from an address that is a multiple of 16. Pages are touched only when used.
    pub fn new(bytes: usize, poisoned: bool) -> Self {
        let lines = bytes.div_ceil(LINE_BYTES);
        Shadow {
            poisoned,
            has_proxies: false,
            lines: bytemuck::zeroed_vec(lines),
            granules: bytemuck::zeroed_vec(lines * GRANULES),
            readings: Readings::default(),
        }
    }

    /// The same for shared memory.
    pub fn of_shared(bytes: usize) -> Self {
        Shadow { has_proxies: true, ..Shadow::new(bytes, true) }
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.lines.fill(Mark::zeroed());
        self.readings.clear();
    }

    /// The marks of an access that stays inside one line, and the lists they point into.
    #[inline]
    fn marks(&mut self, offset: usize, bytes: u32) -> (&mut [Mark], &mut Readings) {
        let (index, first) = (offset / LINE_BYTES, offset % LINE_BYTES / 2);
        let last = (offset % LINE_BYTES + bytes as usize).div_ceil(2);
        let line = &mut self.lines[index];
        if line.flags & SPLIT == 0 {
            if last - first == GRANULES {
                return (std::slice::from_mut(line), &mut self.readings);
            }
            let granules = &mut self.granules[index * GRANULES..(index + 1) * GRANULES];
            granules.fill(*line);
            if line.reading.warp == SEVERAL {
                for granule in &mut granules[1..] {
                    granule.reading = self.readings.copy(line.reading);
                }
            }
            line.flags |= SPLIT;
        }
        (&mut self.granules[index * GRANULES + first..index * GRANULES + last], &mut self.readings)
    }

    #[inline]
    pub fn read(
        &mut self,
        offset: usize,
        bytes: u32,
        tag: Tag,
        now: &Accessor,
        clocks: &Clocks,
    ) -> Result<(), Conflict> {
        let (poisoned, proxies) = (self.poisoned, self.has_proxies && tag.kind().is_async_proxy());
        let (marks, readings) = self.marks(offset, bytes);
        for (index, mark) in marks.iter_mut().enumerate() {
            let result = mark.check_read(poisoned, tag, now, clocks);
            let result = if proxies { result.and_then(|()| mark.check_fenced(now, clocks)) } else { result };
            result.map_err(|rule| Conflict { rule, offset: 2 * index })?;
            readings.add(
                &mut mark.reading,
                Reading { warp: now.warp, lanes: now.lanes, epoch: now.epoch, tag },
                now,
                clocks,
            );
        }
        Ok(())
    }

    #[inline]
    pub fn write(
        &mut self,
        offset: usize,
        bytes: u32,
        tag: Tag,
        now: &Accessor,
        clocks: &Clocks,
    ) -> Result<(), Conflict> {
        let (poisoned, proxies) = (self.poisoned, self.has_proxies && tag.kind().is_async_proxy());
        if self.lines[offset / LINE_BYTES].flags >= HOLD {
            return Err(Conflict { rule: Rule::Held, offset: 0 });
        }
        let (marks, readings) = self.marks(offset, bytes);
        let flags = if matches!(tag.kind(), AccessKind::AsyncCopy | AccessKind::BulkCopy) { PENDING } else { 0 };
        let written =
            Mark { writer: now.thread, write_epoch: now.epoch, write_tag: tag, flags, reading: Reading::zeroed() };
        for (index, mark) in marks.iter_mut().enumerate() {
            let result = mark.check_write(poisoned, readings, tag, now, clocks);
            let result = if proxies { result.and_then(|()| mark.check_fenced(now, clocks)) } else { result };
            result.map_err(|rule| Conflict { rule, offset: 2 * index })?;
            readings.release(mark.reading);
            *mark = written;
        }
        if marks.len() == GRANULES {
            self.lines[offset / LINE_BYTES] = written;
        }
        Ok(())
    }

    /// An unfinished `wgmma` or bulk copy reads the line at `offset`.
    pub fn hold(&mut self, offset: usize) {
        self.lines[offset / LINE_BYTES].flags += HOLD;
    }

    /// One that did has finished.
    pub fn let_go(&mut self, offset: usize) {
        self.lines[offset / LINE_BYTES].flags -= HOLD;
    }

    /// The copy that made the line at `offset` pending has landed, and is as of now a write like any other.
    pub fn land(&mut self, offset: usize, now: &Accessor) {
        let line = &mut self.lines[offset / LINE_BYTES];
        line.flags &= !PENDING;
        line.write_epoch = now.epoch;
    }

    /// The same for a copy that lands as the write of another thread.
    pub fn land_as(&mut self, offset: usize, writer: u32, epoch: u32) {
        let line = &mut self.lines[offset / LINE_BYTES];
        line.flags &= !PENDING;
        line.writer = writer;
        line.write_epoch = epoch;
    }

    /// Who wrote each granule of the line at `offset`.
    pub fn writers(&self, offset: usize) -> Writers {
        let index = offset / LINE_BYTES;
        let line = &self.lines[index];
        match line.flags & SPLIT {
            0 => [(line.writer, line.write_epoch); GRANULES],
            _ => std::array::from_fn(|granule| {
                let mark = &self.granules[index * GRANULES + granule];
                (mark.writer, mark.write_epoch)
            }),
        }
    }

    /// The tag of the last write to the granule at `offset`.
    pub fn last_write(&self, offset: usize) -> Tag {
        let line = &self.lines[offset / LINE_BYTES];
        if line.flags & SPLIT == 0 { line.write_tag } else { self.granules[offset / 2].write_tag }
    }
}

impl Mark {
    #[inline]
    fn check_read(&self, poisoned: bool, tag: Tag, now: &Accessor, clocks: &Clocks) -> Result<(), Rule> {
        if self.writer == 0 {
            return if poisoned { Err(Rule::Uninitialised) } else { Ok(()) };
        }
        if self.flags & PENDING != 0 {
            return Err(Rule::Pending(self.writer, self.write_tag));
        }
        if !clocks.is_before(self.writer, self.write_epoch, now) {
            return Err(Rule::Race(self.writer, self.write_tag));
        }
        if tag.kind() == AccessKind::LoadConstant && thread_of(self.writer).0 >= clocks.first_rank() {
            return Err(Rule::NotConstant(self.writer, self.write_tag));
        }
        Ok(())
    }

    /// An access through the async proxy to what was written through the generic one.
    fn check_fenced(&self, now: &Accessor, clocks: &Clocks) -> Result<(), Rule> {
        let is_generic = self.writer != 0 && !self.write_tag.kind().is_async_proxy();
        match is_generic && !clocks.is_fenced(self.writer, self.write_epoch, now) {
            true => Err(Rule::Unfenced(self.writer, self.write_tag)),
            false => Ok(()),
        }
    }

    #[inline]
    fn check_write(
        &self,
        poisoned: bool,
        readings: &Readings,
        tag: Tag,
        now: &Accessor,
        clocks: &Clocks,
    ) -> Result<(), Rule> {
        if self.writer == 0 && poisoned && tag.kind() == AccessKind::Atomic {
            return Err(Rule::Uninitialised);
        }
        if self.flags & PENDING != 0 {
            return Err(Rule::Pending(self.writer, self.write_tag));
        }
        let both_atomic = || tag.kind() == AccessKind::Atomic && self.write_tag.kind() == AccessKind::Atomic;
        if self.writer != 0 && !clocks.is_before(self.writer, self.write_epoch, now) && !both_atomic() {
            return Err(Rule::Race(self.writer, self.write_tag));
        }
        match readings.unordered(&self.reading, now, clocks) {
            None => Ok(()),
            Some(reading) => {
                let own = if reading.warp == now.warp { now.lanes } else { 0 };
                let others = if reading.lanes & !own == 0 { reading.lanes } else { reading.lanes & !own };
                let lane = others.trailing_zeros();
                Err(Rule::Race(lane_id(reading.warp, lane), reading.tag))
            }
        }
    }
}

impl Readings {
    /// Adds a reading to those of a mark.
    #[inline]
    fn add(&mut self, readings: &mut Reading, new: Reading, now: &Accessor, clocks: &Clocks) {
        if readings.warp == new.warp && readings.epoch == new.epoch {
            readings.lanes |= new.lanes;
            readings.tag = new.tag;
        } else if readings.warp == 0 {
            *readings = new;
        } else {
            self.add_to_others(readings, new, now, clocks);
        }
    }

    fn add_to_others(&mut self, readings: &mut Reading, new: Reading, now: &Accessor, clocks: &Clocks) {
        if self.unordered(readings, now, clocks).is_none() {
            // Whatever conflicts with the earlier reads conflicts with this one too.
            self.release(*readings);
            *readings = new;
        } else if readings.warp != SEVERAL {
            *readings = self.list(&[*readings, new]);
        } else {
            let list = &mut self.lists[readings.lanes as usize];
            // Blocks run one after another, so the readings of this one are the last.
            let others =
                list.iter().rposition(|reading| !same_block(reading.warp, new.warp)).map_or(0, |last| last + 1);
            let mut index = others;
            while let Some(own) = list.get_mut(index) {
                if own.warp == new.warp && own.epoch == new.epoch {
                    own.lanes |= new.lanes;
                    own.tag = new.tag;
                    return;
                }
                if own.warp == new.warp && clocks.reading_is_before(own, now) {
                    list.swap_remove(index);
                } else {
                    index += 1;
                }
            }
            list.push(new);
        }
    }

    /// A reading that is not ordered before the accessor.
    #[inline]
    fn unordered(&self, readings: &Reading, now: &Accessor, clocks: &Clocks) -> Option<Reading> {
        match readings.warp {
            0 => None,
            SEVERAL => {
                let list = &self.lists[readings.lanes as usize];
                list.iter().find(|reading| !clocks.reading_is_before(reading, now)).copied()
            }
            _ => (!clocks.reading_is_before(readings, now)).then_some(*readings),
        }
    }

    fn clear(&mut self) {
        self.lists.iter_mut().for_each(Vec::clear);
        self.free = (0..self.lists.len() as u32).collect();
    }

    fn list(&mut self, readings: &[Reading]) -> Reading {
        let index = self.free.pop().unwrap_or_else(|| {
            self.lists.push(Vec::new());
            self.lists.len() as u32 - 1
        });
        self.lists[index as usize].extend_from_slice(readings);
        Reading { warp: SEVERAL, lanes: index, epoch: 0, tag: Tag::zeroed() }
    }

    fn copy(&mut self, readings: Reading) -> Reading {
        let list = self.lists[readings.lanes as usize].clone();
        self.list(&list)
    }

    #[inline]
    fn release(&mut self, readings: Reading) {
        if readings.warp == SEVERAL {
            self.lists[readings.lanes as usize].clear();
            self.free.push(readings.lanes);
        }
    }
}
