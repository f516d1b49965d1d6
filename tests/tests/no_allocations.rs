//! `plan` runs between an engine's steps: once made, an attention plans without asking for memory.
//!
//! Unsafe: a global allocator, which hands everything to the system's.

use oxattn::{Device, SplitMode, Stream};
use oxattn_tests::cases::{Case, among_others};
use oxattn_tests::fixture::Fixture;
use oxattn_tests::public_api::Setup;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts the calls of each thread.
struct Counting;

// SAFETY: everything is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract is this function's own.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(of: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    of();
    ALLOCATIONS.get() - before
}

#[test]
fn a_plan_asks_for_no_memory() {
    assert_eq!(allocations(|| drop(vec![0u8; 100])), 1);
    let several = Case { query_lens: vec![40; 8], ..among_others(8, 1) };
    let batches = [among_others(64, 5), among_others(1, 0), several, among_others(64, 63)];
    let fixtures = batches.each_ref().map(Fixture::new);
    let device = Device::cpu();
    for mode in
        [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 100 }, SplitMode::Unsplit]
    {
        let mut setup = Setup::new(&device, &batches.each_ref(), mode);
        for (fixture, case) in fixtures.iter().zip(&batches).cycle().take(12) {
            let query_begin = case.query_begin();
            let count = allocations(|| {
                let table = oxattn::PageTable::csr(case.config.page_size_tokens, &fixture.page_begin, &case.kv_lens);
                let queries = oxattn::QueryLengths::indptr(&query_begin).unwrap();
                let Setup { attention, workspace, .. } = &mut setup;
                attention.plan(&table.unwrap(), queries, workspace, Stream::default()).unwrap();
            });
            assert_eq!(count, 0, "{}, {mode:?}", case.name);
        }
    }
}
