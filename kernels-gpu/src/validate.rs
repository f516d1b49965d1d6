//! Checks of what only the device knows: the page ids a planned batch may read, and where an append would write.
//!
//! In: the plan image or the append's arrays. Out: one [`Report`]: how many values are out of range, and the one that
//! lies first. Invariant: only values that the checked call would read are looked at, each once, so the report depends
//! on the batch and not on how it was cut; and a check reads nothing else through what it checks.
//!
//! One block, so that nothing has to be cleared before it or gathered after it.
use simt::{block::sync_threads, global::Global, grid, shared::Shared, thread, warp};

use crate::abi::parameters::{CHECK_THREADS, CheckAppendParameters, CheckPageIdsParameters, Report};
use crate::abi::plan::WorkItem;
use crate::tile::unroll;

const WARPS: u32 = CHECK_THREADS / 32;

// A warp sums up what the warps found.
const _: () = assert!(WARPS == 32);

/// Page ids that a lane has in flight.
const IN_FLIGHT: usize = 4;

/// How many values are bad, and where the first one lies.
#[derive(Clone, Copy)]
struct Found {
    bad: u32,
    first: u32,
}

impl Found {
    const NOTHING: Found = Found { bad: 0, first: u32::MAX };

    #[inline(always)]
    fn add(&mut self, other: Found) {
        self.bad += other.bad;
        self.first = self.first.min(other.first);
    }

    /// The sum over the warp's lanes.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn of_warp(mut self) -> Found {
        unroll::<5>(|step| {
            // SAFETY: the caller has the warp's lanes together.
            let other = |value| unsafe { warp::shuffle_xor_u32(value, 1 << step) };
            self.add(Found { bad: other(self.bad), first: other(self.first) });
        });
        self
    }
}

/// Checks the page ids that the items of a plan read; warps take items in turn.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has one block of [`CHECK_THREADS`] threads.
#[inline(always)]
pub unsafe fn check_page_ids(p: CheckPageIdsParameters) {
    grid::wait_for_previous_grid();
    grid::allow_next_grid();
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let ids = Global::<u32>::new(p.page_indices);
        let items = Global::<u32>::new(p.queue_begin).add(2 * p.teams as u64).load_constant();
        let mut found = Found::NOTHING;
        let mut item = thread::warp_idx();
        while item < items {
            let work = item_at(p.items, item);
            let pages = work.first_read_pages(p.page_size, p.group, p.keys_after);
            let mut base = pages.start + thread::lane_idx();
            while base < pages.end {
                let mut batch = [0; IN_FLIGHT];
                unroll::<IN_FLIGHT>(|i| {
                    let page = base + 32 * i as u32;
                    if page < pages.end {
                        batch[i] = ids.add(work.page_begin as u64 + page as u64).load_constant();
                    }
                });
                unroll::<IN_FLIGHT>(|i| {
                    let page = base + 32 * i as u32;
                    if page < pages.end && batch[i] as u64 >= p.pages {
                        found.add(Found { bad: 1, first: work.page_begin + page });
                    }
                });
                base += 32 * IN_FLIGHT as u32;
            }
            item += WARPS;
        }
        report(p.report, found, |index| Fault {
            finding: Report::PAGE_INDICES,
            index: index as u64,
            value: ids.add(index as u64).load_constant() as u64,
            supported: p.pages,
        });
    }
}

/// Checks where an append would write; threads take tokens in turn.
///
/// # Safety
/// As [`check_page_ids`].
#[inline(always)]
pub unsafe fn check_append(p: CheckAppendParameters) {
    grid::wait_for_previous_grid();
    grid::allow_next_grid();
    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let mut found = Found::NOTHING;
        let mut token = thread::thread_idx_x();
        while token < p.tokens {
            if fault_of(&p, token).finding != Report::FINE {
                found.add(Found { bad: 1, first: token });
            }
            token += CHECK_THREADS;
        }
        report(p.report, found, |token| fault_of(&p, token));
    }
}

/// A report but for its count.
struct Fault {
    finding: u32,
    index: u64,
    value: u64,
    supported: u64,
}

impl Fault {
    const NONE: Fault = Fault { finding: Report::FINE, index: 0, value: 0, supported: 0 };
}

/// What is wrong with a token's destination.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
unsafe fn fault_of(p: &CheckAppendParameters, token: u32) -> Fault {
    let page_size = p.page_size.get() as u64;
    // SAFETY: the kernel's contract; nothing is read at an index that was not checked.
    unsafe {
        let word = |array: u64, index: u64| Global::<u32>::new(array).add(index).load_constant();
        if p.slots != 0 {
            let value = Global::<u64>::new(p.slots).add(token as u64).load_constant();
            let supported = p.pages * page_size;
            let fine = (value as i64) < 0 || value < supported;
            let fault = Fault { finding: Report::SLOTS, index: token as u64, value, supported };
            return if fine { Fault::NONE } else { fault };
        }
        let (request, position) = (word(p.requests, token as u64), word(p.positions, token as u64));
        if (request as i32) < 0 || (position as i32) < 0 {
            return Fault::NONE;
        }
        let (index, value) = (token as u64, request as u64);
        if request >= p.request_count {
            return Fault { finding: Report::REQUESTS, index, value, supported: p.request_count as u64 };
        }
        // A request's pages end where the next one's begin.
        let begin = word(p.page_begin, request as u64) as u64;
        let last = request + 1 == p.request_count;
        let end = if last { p.page_index_len } else { word(p.page_begin, request as u64 + 1) as u64 };
        let page_index = begin + p.page_size.divide(position).0 as u64;
        if page_index >= end.min(p.page_index_len) {
            let supported = end.min(p.page_index_len).saturating_sub(begin) * page_size;
            return Fault { finding: Report::POSITIONS, index, value: position as u64, supported };
        }
        let id = word(p.page_indices, page_index) as u64;
        let fault = Fault { finding: Report::PAGE_INDICES, index: page_index, value: id, supported: p.pages };
        if id < p.pages { Fault::NONE } else { fault }
    }
}

/// Sums up what the block's threads found, and writes it with the fault of the first bad value.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
unsafe fn report(at: u64, found: Found, fault: impl FnOnce(u32) -> Fault) {
    // SAFETY: all threads of the block come here together, and each warp has its words.
    unsafe {
        let of_warps = Shared::<[u32; 2]>::dynamic();
        let of_warp = found.of_warp();
        if thread::lane_idx() == 0 {
            of_warps.add(thread::warp_idx()).store([of_warp.bad, of_warp.first]);
        }
        sync_threads();
        if thread::warp_idx() == 0 {
            let [bad, first] = of_warps.add(thread::lane_idx()).load();
            let found = Found { bad, first }.of_warp();
            if thread::lane_idx() == 0 {
                let fault = if found.bad == 0 { Fault::NONE } else { fault(found.first) };
                Global::<[u32; 2]>::new(at).store([fault.finding, found.bad]);
                let words = Global::<u64>::new(at);
                words.add(1).store(fault.index);
                words.add(2).store(fault.value);
                words.add(3).store(fault.supported);
            }
        }
    }
}

#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
unsafe fn item_at(items: u64, index: u32) -> WorkItem {
    let words = Global::<[u32; 4]>::new(items).add(3 * index as u64);
    // SAFETY: the kernel's contract.
    let [a, b, c] = unsafe { [words.load_constant(), words.add(1).load_constant(), words.add(2).load_constant()] };
    WorkItem {
        request: a[0],
        query_begin_tokens: a[1],
        row_begin: a[2],
        rows: a[3],
        kv_begin_tokens: b[0],
        kv_end_tokens: b[1],
        query_position: b[2] as i32,
        page_begin: b[3],
        pieces: c[0],
        piece: c[1],
        partial_begin: c[2],
        group: c[3],
    }
}
