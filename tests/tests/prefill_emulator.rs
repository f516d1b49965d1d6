//! The prefill kernels under the emulator, on the planner's plans and on ones cut by force. Any race, stray access,
//! missing wait or missing fence in a kernel fails here, whatever the numbers.

use kernels_gpu::abi::tile::{PREFILL_HEAD_DIMS, PrefillTile, Teams};
use oxattn::config::{AttentionConfig, DType};
use oxattn::{SplitMode, Target};
use oxattn_tests::cases::{Case, Unused, paged};
use oxattn_tests::executors::PrefillEmulator;
use oxattn_tests::fixture::{Fixture, Lse};
use oxattn_tests::layout::LAYOUTS;
use oxattn_tests::plans::{PlanImage, forced_split_in_steps, planned};
use oxattn_tests::prompts::{PAGE_SIZES, prefill_cases};

/// Of [`Case::prefill_cost`]: what one launch may cost; of a variant more, so that none is left out.
const BUDGET: [u64; 2] = [3 << 20, 21 << 18];
const LSE: [Lse; 3] = [Lse::Two, Lse::E, Lse::None];

fn affordable() -> Vec<Case> {
    let mut table = prefill_cases();
    table.retain(|case| case.prefill_cost() <= BUDGET[usize::from(!case.config.is_plain())]);
    table
}

fn tile(case: &Case) -> PrefillTile {
    case.prefill_tile().unwrap()
}

/// Runs every `step`-th affordable case under the plan that `plan` makes of its number.
fn check_all(what: &str, step: usize, plan: impl Fn(usize, &Fixture) -> PlanImage) {
    for (index, case) in affordable().iter().enumerate().step_by(step) {
        let mut fixture = Fixture::new(case);
        let mut plan = plan(index, &fixture);
        let outputs = fixture.run(&PrefillEmulator::new(index as u64), &mut plan, LSE[index / 2 % 3]);
        if let Err(difference) = fixture.check(&outputs) {
            panic!("{}, {what}: {difference}", case.name);
        }
    }
}

/// A multiprocessor has a block: 1 to 30 of them, so that blocks have several heads of an item, several items, or none.
fn check_planned(mode: SplitMode, step: usize) {
    check_all(&format!("{mode:?}"), step, |index, Fixture { case, page_begin, .. }| {
        let multiprocessors = [4, 1, 7, 2, 30][index % 5];
        planned(case, page_begin, Target::for_prefill(multiprocessors, tile(case), index % 2 == 0), mode)
    });
}

#[test]
fn prefill_balanced() {
    check_planned(SplitMode::Balanced, 1);
}

/// Few plans differ from balanced ones.
#[test]
fn prefill_unsplit() {
    check_planned(SplitMode::Unsplit, 5);
}

/// Every case in tiles' worth of keys, most of them in pieces of which some have none.
#[test]
fn prefill_in_pieces() {
    check_all("in pieces", 1, |index, Fixture { case, page_begin, .. }| {
        let teams = Teams::new(case.config.kv_heads, [4, 7, 16][index % 3]);
        let cuts = ([2, 3, 7][index / 3 % 3], tile(case).tile_tokens);
        forced_split_in_steps(case, page_begin, cuts, teams, tile(case).rows())
    });
}

/// The thinned table still holds what a prefill can meet.
#[test]
fn the_affordable_prefill_cases_cover_the_table() {
    let table = affordable();
    let has = |what: &str, holds: &dyn Fn(&Case) -> bool| assert!(table.iter().any(holds), "no case has {what}");
    for dims @ [head_dim, value_dim] in PREFILL_HEAD_DIMS {
        let is_of = |case: &Case| [case.config.head_dim, case.config.value_head_dim] == dims;
        for page in PAGE_SIZES {
            has(&format!("pages of {page}, head dim {head_dim} and {value_dim}"), &|case| {
                is_of(case) && case.config.page_size_tokens == page
            });
        }
        for dtype in [DType::Bf16, DType::F16] {
            has(&format!("{dtype} of {head_dim} and {value_dim}"), &|case| is_of(case) && case.config.dtype == dtype);
        }
        // Enough tiles for the stages to turn twice.
        let turns = |case: &Case| case.kv_lens.iter().any(|&kv_len| kv_len > 8 * tile(case).tile_tokens);
        has("a ring that turns twice", &|case| is_of(case) && turns(case));
        has(&format!("cuts of {head_dim} and {value_dim}"), &|case| is_of(case) && pieces_of(case) > 1);
        has(&format!("variants of {head_dim} and {value_dim}"), &|case| is_of(case) && !case.config.is_plain());
        let is_padded = |case: &Case| [tile(case).query_dim, tile(case).value_dim] == dims && !is_of(case);
        has(&format!("rows narrower than {head_dim} and {value_dim}"), &is_padded);
        for group in [5, 7, 128] {
            has(&format!("{group} heads of {head_dim} and {value_dim}"), &|case| {
                is_of(case) && case.config.group() == group
            });
        }
    }
    let config = |what: &str, holds: &dyn Fn(&AttentionConfig) -> bool| {
        has(what, &|case| holds(&case.config) && pieces_of(case) > 1);
        has(what, &|case| holds(&case.config) && pieces_of(case) == 1);
    };
    config("sinks", &|config| config.sinks);
    config("ALiBi", &|config| config.alibi);
    config("temperatures", &|config| config.temperatures);
    config("a soft cap", &|config| config.soft_cap.is_some());
    config("a window", &|config| config.window_left.is_some());
    config("a mask", &|config| config.mask.is_some());
    config("a sigmoid", &|config| config.sigmoid_bias.is_some());
    has("no requests", &|case| case.kv_lens.is_empty());
    has("no keys", &|case| case.kv_lens.contains(&0) && case.kv_lens.len() > 1);
    has("more tokens than keys", &|case| case.query_lens.iter().zip(&case.kv_lens).any(|(query, kv)| query > kv));
    has("several heads a block", &|case| case.config.kv_heads == 8);
    for layout in LAYOUTS {
        for unused in [Unused::Nan, Unused::NanKeys, Unused::NanValues] {
            has(&format!("{layout:?}, {unused:?}"), &|case| case.layout == layout && case.unused == unused);
        }
    }
    for case in prefill_cases() {
        let is_small_variant = !case.config.is_plain() && case.query_lens.iter().all(|&tokens| tokens < 300);
        assert!(!is_small_variant || table.iter().any(|other| other.name == case.name), "{} is left out", case.name);
    }
}

/// Into how many a balanced plan for 7 multiprocessors cuts an item, at most.
fn pieces_of(case: &Case) -> u32 {
    let target = Target::for_prefill(7, tile(case), true);
    let page_begin = Fixture::new(case).page_begin;
    let mut planner = oxattn_tests::plans::planner_for(&[case], target, SplitMode::Balanced);
    let mut image = PlanImage::unplanned(&planner, target, case.config.kv_heads);
    image.plan(&mut planner, case, &page_begin);
    planner.latest().unwrap().explain().most_pieces
}

/// In which order blocks, warps and lanes run, which block folds, how blocks stand in teams: none of it changes a bit.
#[test]
fn h2_order_and_teams_change_no_bit_of_a_prefill() {
    let case = Case { query_lens: vec![3, 1, 70], kv_lens: vec![150, 70, 400], ..paged(16, LAYOUTS[2]) };
    for pieces in [1, 3] {
        let run = |seed, teams| {
            let mut fixture = Fixture::new(&case);
            let mut plan = forced_split_in_steps(&case, &fixture.page_begin, (pieces, 128), teams, tile(&case).rows());
            fixture.run(&PrefillEmulator::new(seed), &mut plan, Lse::Two)
        };
        let first = run(0, Teams { teams: 1, blocks: 1, heads_per_block: 2 });
        for seed in 1..5 {
            for teams in [Teams { teams: 3, blocks: 2, heads_per_block: 1 }, Teams::new(2, 16)] {
                assert!(run(seed, teams).bits() == first.bits(), "{pieces} pieces, seed {seed}");
            }
        }
    }
}

/// Pages of any size and layout, and what their slots hold that no request owns, change no bit.
#[test]
fn b10_c14_pages_and_unused_slots_change_no_bit_of_a_prefill() {
    let run = |page, layout, unused| {
        let case = Case { query_lens: vec![1, 14, 2], kv_lens: vec![37, 300, 0], unused, ..paged(page, layout) };
        let mut fixture = Fixture::new(&case);
        let mut plan =
            forced_split_in_steps(&case, &fixture.page_begin, (2, 128), Teams::new(2, 4), tile(&case).rows());
        let outputs = fixture.run(&PrefillEmulator::new(page as u64), &mut plan, Lse::Two);
        fixture.check(&outputs).unwrap();
        outputs
    };
    let first = run(64, LAYOUTS[0], Unused::Large);
    for (index, page) in PAGE_SIZES.into_iter().enumerate() {
        for (turn, unused) in [Unused::Large, Unused::NanKeys, Unused::NanValues, Unused::Nan].into_iter().enumerate() {
            let outputs = run(page, LAYOUTS[(index + turn) % 4], unused);
            assert!(outputs.bits() == first.bits(), "pages of {page}, {unused:?}");
        }
    }
}

/// A block counts its pieces in as many at a time as it has threads.
#[test]
fn a_queue_longer_than_a_prefill_block_is_folded_whole() {
    let config = AttentionConfig::new(16, 1, 64, 16);
    let case = Case { config, query_lens: vec![90], kv_lens: vec![120], seeds: vec![0], ..paged(16, LAYOUTS[1]) };
    let mut fixture = Fixture::new(&case);
    let teams = Teams { teams: 1, blocks: 1, heads_per_block: 1 };
    let mut plan = forced_split_in_steps(&case, &fixture.page_begin, (70, 16), teams, tile(&case).rows());
    assert!(plan.header().items > tile(&case).threads());
    let outputs = fixture.run(&PrefillEmulator::new(1), &mut plan, Lse::Two);
    fixture.check(&outputs).unwrap();
}

/// 128 query tokens over 512 keys, by hand: a key that an item reads serves all its rows.
#[test]
fn an_aligned_prefill_by_boxes_costs_what_it_must() {
    let config = AttentionConfig::new(1, 1, 128, 16).non_causal();
    let case = Case { config, query_lens: vec![128], kv_lens: vec![512], seeds: vec![0], ..paged(16, LAYOUTS[0]) };
    let mut fixture = Fixture::new(&case);
    let mut plan = planned(&case, &fixture.page_begin, Target::for_prefill(1, tile(&case), false), SplitMode::Balanced);
    let emulator = PrefillEmulator::new(1);
    let outputs = fixture.run(&emulator, &mut plan, Lse::Two);
    fixture.check(&outputs).unwrap();
    let counters = emulator.counters();
    // K and V once, in boxes of 16 tokens and 64 columns; the queries once.
    assert_eq!((counters.bulk_copy_bytes, counters.bulk_copies), (2 * 512 * 256, 2 * 2 * 512 / 16));
    assert_eq!(counters.async_copy_bytes, 128 * 256);
    // 4 tiles, 2 warpgroups, 128 / 16 steps of head dim and as many of keys.
    assert_eq!(counters.wgmma, 4 * 2 * (8 + 8));
    assert_eq!((counters.load_matrix, counters.mma, counters.shared_bank_conflicts), (0, 0, 0));
    assert_eq!(counters.atomics, 0);
}
