//! Checks of page ids and of where an append would write.
//!
//! In: the plan image, or the append's arrays. Out: a [`Report`]: how many values are out of range, and the first.

use super::memory::{read, write};
use kernels_gpu::abi::parameters::{CheckAppendParameters, CheckPageIdsParameters, Report};
use kernels_gpu::abi::plan::WorkItem;

/// Nothing found yet.
const FINE: Report = Report { finding: Report::FINE, bad: 0, index: 0, value: 0, supported: 0 };

/// Checks the page ids that the items of a plan read.
///
/// # Safety
/// `parameters` describe live memory as [the module](super) says, but for the page ids, which may be any.
pub unsafe fn check_page_ids(parameters: &CheckPageIdsParameters) {
    let CheckPageIdsParameters { pages: supported, page_size, group, .. } = *parameters;
    let mut report = FINE;
    // SAFETY: the caller's.
    unsafe {
        let items = read::<u32>(parameters.queue_begin, 2 * parameters.teams as usize);
        for item in (0..items as usize).map(|item| read::<WorkItem>(parameters.items, item)) {
            for page in item.first_read_pages(page_size, group, parameters.keys_after) {
                let index = (item.page_begin + page) as u64;
                let value = read::<u32>(parameters.page_indices, index as usize) as u64;
                if value >= supported {
                    let (finding, bad) = (Report::PAGE_INDICES, 1);
                    let is_first = report.bad == 0 || index < report.index;
                    add(&mut report, is_first, Report { finding, bad, index, value, supported });
                }
            }
        }
        write(parameters.report, 0, report);
    }
}

/// Checks where an append would write.
///
/// # Safety
/// `parameters` describe live memory as [the module](super) says, but for slots, requests, positions and page ids,
/// which may be any.
pub unsafe fn check_append(parameters: &CheckAppendParameters) {
    let mut report = FINE;
    // SAFETY: the caller's.
    unsafe {
        for token in 0..parameters.tokens as usize {
            if let Some(fault) = fault(parameters, token) {
                let is_first = report.bad == 0;
                add(&mut report, is_first, fault);
            }
        }
        write(parameters.report, 0, report);
    }
}

/// Counts a fault, and keeps it if it is the first so far.
fn add(report: &mut Report, is_first: bool, fault: Report) {
    let bad = report.bad + fault.bad;
    *report = Report { bad, ..if is_first { fault } else { *report } };
}

/// What is wrong with a token's destination, as a report of that alone.
///
/// # Safety
/// As [`check_append`]'s.
unsafe fn fault(parameters: &CheckAppendParameters, token: usize) -> Option<Report> {
    let page_size = parameters.page_size.get() as u64;
    let out_of_range = |finding, index: usize, value: u64, supported: u64| {
        (value >= supported).then_some(Report { finding, bad: 1, index: index as u64, value, supported })
    };
    // SAFETY: the caller's; nothing is read at an index that was not checked.
    unsafe {
        if parameters.slots != 0 {
            let slot = u64::try_from(read::<i64>(parameters.slots, token)).ok()?;
            return out_of_range(Report::SLOTS, token, slot, parameters.pages * page_size);
        }
        let request = usize::try_from(read::<i32>(parameters.requests, token)).ok()?;
        let position = u64::try_from(read::<i32>(parameters.positions, token)).ok()?;
        let request_count = parameters.request_count as u64;
        if let Some(fault) = out_of_range(Report::REQUESTS, token, request as u64, request_count) {
            return Some(fault);
        }
        // A request's pages end where the next one's begin.
        let page_begin = |request| match request as u64 == request_count {
            true => parameters.page_index_len,
            false => (read::<u32>(parameters.page_begin, request) as u64).min(parameters.page_index_len),
        };
        let begin = page_begin(request);
        let held = page_begin(request + 1).saturating_sub(begin) * page_size;
        if let Some(fault) = out_of_range(Report::POSITIONS, token, position, held) {
            return Some(fault);
        }
        let index = (begin + position / page_size) as usize;
        out_of_range(Report::PAGE_INDICES, index, read::<u32>(parameters.page_indices, index) as u64, parameters.pages)
    }
}
