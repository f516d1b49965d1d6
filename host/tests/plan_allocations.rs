//! A planner allocates when it is made, and never again.
//!
//! Unsafe: an allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use oxattn::{AttentionConfig, Limits, PageTable, Planner, QueryLengths, SplitMode, Target};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system allocator's; counting touches no memory it hands out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above with this layout, so from the system allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test in this file: another would allocate beside it.
#[test]
fn planning_never_allocates() {
    let limits = Limits { max_requests: 64, max_query_tokens: 600, max_kv_len_tokens: 40_000, max_kv_tokens: 400_000 };
    let kv_lens: Vec<u32> = (0..64).map(|request| (request * 97) % 5000).collect();
    let long = [40_000u32];
    let prompt = [0u32, 600];
    let modes =
        [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 256 }, SplitMode::Unsplit];
    let shared_lens = [4000u32; 64];
    let shared_tokens: Vec<u32> = (0..64)
        .map(|request| [3000, 1000, 0][usize::from(request % 8 == 0) + usize::from(request % 32 == 0)])
        .collect();
    for mode in modes {
        let config = AttentionConfig::new(32, 8, 128, 16).with_shared_prefixes(2).always_sharing();
        let mut planner = Planner::new(config, Target::new(264, 64).with_tall_rows(128), mode, limits).unwrap();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..3 {
            let many = PageTable::block_table(16, 400, &kv_lens).unwrap();
            planner.plan(&many, QueryLengths::uniform(1)).unwrap();
            let one = PageTable::block_table(16, 2500, &long).unwrap();
            planner.plan(&one, QueryLengths::indptr(&prompt).unwrap()).unwrap();
            planner.plan(&one, QueryLengths::uniform(1)).unwrap();
            let shared = PageTable::block_table(16, 400, &shared_lens).unwrap();
            planner.plan(&shared.with_shared_prefixes(&shared_tokens).unwrap(), QueryLengths::uniform(1)).unwrap();
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{mode:?}");
        let plan = planner.latest().unwrap();
        assert_eq!(plan.epoch(), 12);
        let may_share = matches!(mode, SplitMode::Balanced | SplitMode::Unsplit);
        assert_eq!(plan.sharing().shared_requests, if may_share { 64 } else { 0 });
    }
}
