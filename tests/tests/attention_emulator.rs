//! The attention table on the kernels themselves, under the emulator: whole, cut by force, and as the planner cuts it.
//! Any race, stray access or missing wait in a kernel fails here, whatever the numbers.

use kernels_gpu::abi::tile::{ATTEND_HEAD_DIMS, AttendTile, Family, Teams};
use oxattn::config::{AttentionConfig, DType};
use oxattn::{SplitMode, Target};
use oxattn_tests::cases::{Case, Pages, Unused, Values, cases, paged, prompt, split_cases};
use oxattn_tests::executors::Emulator;
use oxattn_tests::fixture::{Fixture, Lse};
use oxattn_tests::layout::LAYOUTS;
use oxattn_tests::plans::{PlanImage, forced_split, planned};

/// Of [`Case::tile_cost`]: what one launch may cost.
const BUDGET: u64 = 3 << 20;

fn affordable() -> Vec<Case> {
    let mut table = cases();
    table.extend(split_cases());
    table.retain(|case| case.tile_cost() <= BUDGET);
    table
}

fn tile(case: &Case, family: Family) -> AttendTile {
    AttendTile::new(case.config.attend_head_dim(), family).unwrap()
}

/// 4 to 16 blocks: some queues hold many items, some none.
fn blocks(index: usize) -> u32 {
    [4, 7, 16][index % 3]
}

const LSE: [Lse; 3] = [Lse::Two, Lse::E, Lse::None];
const MODES: [SplitMode; 4] =
    [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 40 }, SplitMode::Unsplit];

/// Runs every affordable case under the plan that `plan` makes of its number.
fn check_all(family: Family, what: &str, plan: impl Fn(usize, &Fixture) -> PlanImage) {
    for (index, case) in affordable().iter().enumerate() {
        let mut fixture = Fixture::new(case);
        let mut plan = plan(index, &fixture);
        let outputs = fixture.run(&Emulator::new(family, index as u64), &mut plan, LSE[index / 2 % 3]);
        if let Err(difference) = fixture.check(&outputs) {
            panic!("{}, {family:?}, {what}: {difference}", case.name);
        }
    }
}

fn check_whole(family: Family) {
    check_all(family, "whole", |index, Fixture { case, page_begin, .. }| {
        // Every second case in tall tiles, which the planner's plans have wherever they can.
        let tall_rows = tile(case, family).tall_rows(case.config.is_plain_for_attend()) * (index as u32 % 2);
        forced_split(case, page_begin, 1, Teams::new(case.config.kv_heads, blocks(index)), tall_rows)
    });
}

fn check_pieces(family: Family) {
    check_all(family, "in pieces", |index, Fixture { case, page_begin, .. }| {
        let pieces = [2, 3, 7][index / 3 % 3];
        let tall_rows = tile(case, family).tall_rows(case.config.is_plain_for_attend()) * ((index as u32 + 1) % 2);
        forced_split(case, page_begin, pieces, Teams::new(case.config.kv_heads, blocks(index)), tall_rows)
    });
}

fn check_planned(family: Family) {
    check_all(family, "planned", |index, Fixture { case, page_begin, .. }| {
        let tile = tile(case, family);
        let target = Target::new(blocks(index), tile.tile_tokens())
            .with_tall_rows(tile.tall_rows(case.config.is_plain_for_attend()));
        planned(case, page_begin, target, MODES[index % 4])
    });
}

#[test]
fn whole_on_sm_80() {
    check_whole(Family::Sm80);
}

#[test]
fn whole_on_sm_90a() {
    check_whole(Family::Sm90a);
}

#[test]
fn in_pieces_on_sm_80() {
    check_pieces(Family::Sm80);
}

#[test]
fn in_pieces_on_sm_90a() {
    check_pieces(Family::Sm90a);
}

#[test]
fn planned_on_sm_80() {
    check_planned(Family::Sm80);
}

#[test]
fn planned_on_sm_90a() {
    check_planned(Family::Sm90a);
}

/// The thinned table still holds everything that has to run on both families.
#[test]
fn the_affordable_cases_cover_the_table() {
    let (all, table) = (cases(), affordable());
    for head_dim in ATTEND_HEAD_DIMS {
        for dtype in [DType::Bf16, DType::F16] {
            assert!(table.iter().any(|case| case.config.head_dim == head_dim && case.config.dtype == dtype));
        }
        // Enough tiles for the ring to turn twice.
        assert!(table.iter().any(|case| case.config.head_dim == head_dim && case.kv_lens.contains(&450)));
    }
    for case in &all {
        let same_shape = |other: &Case| {
            let key = |case: &Case| (case.config.group(), case.config.page_size_tokens, case.config.causal);
            key(case) == key(other)
        };
        assert!(table.iter().any(same_shape), "nothing stands for {}", case.name);
        let rare = case.values != Values::Normal || case.pages == Pages::HighIds || case.query_row_elements.is_some();
        assert!(!rare || table.iter().any(|other| other.name == case.name), "{} is left out", case.name);
    }
    for layout in LAYOUTS {
        for unused in [Unused::Nan, Unused::NanKeys, Unused::NanValues] {
            let has = |layout| table.iter().any(|case| case.layout == layout && case.unused == unused);
            assert!(unused != Unused::Nan || has(layout));
            assert!(LAYOUTS.into_iter().any(has));
        }
    }
}

/// Which block folds, in which order blocks and lanes run, how blocks stand in teams: none of it changes a bit.
#[test]
fn h2_order_and_teams_change_no_bit() {
    let query_lens = vec![3, 1, 70];
    let case = Case { query_lens, kv_lens: vec![150, 70, 90], seeds: vec![0, 1, 2], ..paged(16, LAYOUTS[2]) };
    for family in [Family::Sm80, Family::Sm90a] {
        for pieces in [1, 5] {
            let run = |seed, teams| {
                let mut fixture = Fixture::new(&case);
                let tall_rows = AttendTile::new(64, family).unwrap().tall_rows(true);
                let mut plan = forced_split(&case, &fixture.page_begin, pieces, teams, tall_rows);
                fixture.run(&Emulator::new(family, seed), &mut plan, Lse::Two)
            };
            let first = run(0, Teams { teams: 1, blocks: 1, heads_per_block: 2 });
            for seed in 1..6 {
                for teams in [Teams { teams: 3, blocks: 2, heads_per_block: 1 }, Teams::new(2, 16)] {
                    assert!(run(seed, teams).bits() == first.bits(), "{family:?}, {pieces} pieces, seed {seed}");
                }
            }
        }
    }
}

/// A block counts its pieces in as many at a time as it has threads; here the 135 pieces of its queue are more than
/// its 128 threads, and the count of an item is spread over both rounds.
#[test]
fn a_queue_longer_than_a_block_is_folded_whole() {
    let config = AttentionConfig::new(16, 1, 64, 16);
    let case = Case { config, query_lens: vec![45], kv_lens: vec![60], seeds: vec![0], ..paged(16, LAYOUTS[1]) };
    for family in [Family::Sm80, Family::Sm90a] {
        let mut fixture = Fixture::new(&case);
        let mut plan =
            forced_split(&case, &fixture.page_begin, 3, Teams { teams: 1, blocks: 1, heads_per_block: 1 }, 0);
        assert_eq!((plan.header().items, AttendTile::new(64, family).unwrap().threads()), (135, 128));
        let outputs = fixture.run(&Emulator::new(family, 1), &mut plan, Lse::Two);
        fixture.check(&outputs).unwrap();
    }
}

#[test]
fn b10_what_unused_slots_hold_changes_no_bit() {
    let base = Case { query_lens: vec![1, 14, 2], kv_lens: vec![37, 70, 0], ..paged(5, LAYOUTS[3]) };
    for family in [Family::Sm80, Family::Sm90a] {
        for (pieces, tall_rows) in [(1, 0), (3, 0), (1, 64), (3, 64)] {
            let run = |unused| {
                let mut fixture = Fixture::new(&Case { unused, ..base.clone() });
                let mut plan = forced_split(&base, &fixture.page_begin, pieces, Teams::new(2, 4), tall_rows);
                fixture.run(&Emulator::new(family, 3), &mut plan, Lse::Two)
            };
            let clean = run(Unused::Large);
            for unused in [Unused::NanKeys, Unused::NanValues, Unused::Nan] {
                assert!(run(unused).bits() == clean.bits(), "{family:?}, {unused:?}, {pieces} pieces");
            }
        }
    }
}

/// Pages and layout move the same rows elsewhere.
#[test]
fn c14_pages_and_layout_change_no_bit() {
    let run = |page_size, layout| {
        let mut fixture = Fixture::new(&paged(page_size, layout));
        let mut plan = forced_split(&fixture.case, &fixture.page_begin, 2, Teams::new(2, 7), 0);
        fixture.run(&Emulator::new(Family::Sm90a, 1), &mut plan, Lse::Two)
    };
    let first = run(64, LAYOUTS[0]);
    for (page_size, layout) in [1, 2, 3, 16, 1000].into_iter().flat_map(|page| LAYOUTS.map(|layout| (page, layout))) {
        assert!(run(page_size, layout).bits() == first.bits(), "pages of {page_size}, {layout:?}");
    }
}

/// Without pages the same keys lie elsewhere, with rows of NaN between the requests' or without.
#[test]
fn ragged_keys_change_no_bit() {
    let base = Case {
        query_lens: vec![1, 14, 2, 40],
        kv_lens: vec![37, 70, 0, 40],
        seeds: vec![0, 1, 2, 3],
        ..paged(5, LAYOUTS[0])
    };
    for family in [Family::Sm80, Family::Sm90a] {
        let tall_rows = AttendTile::new(64, family).unwrap().tall_rows(true);
        for (pieces, tall_rows) in [(1, 0), (3, 0), (1, tall_rows), (3, tall_rows)] {
            let run = |case: &Case| {
                let mut fixture = Fixture::new(case);
                let mut plan = forced_split(case, &fixture.page_begin, pieces, Teams::new(2, 4), tall_rows);
                fixture.run(&Emulator::new(family, 3), &mut plan, Lse::Two)
            };
            let in_pages = run(&base);
            for (layout, pages) in [(LAYOUTS[3], Pages::Scattered), (LAYOUTS[2], Pages::Adjacent)] {
                let ragged = Case { layout, pages, ..base.clone().ragged() };
                assert!(run(&ragged).bits() == in_pages.bits(), "{family:?}, {pages:?}, {pieces} pieces");
            }
        }
    }
}

/// 512 keys and 16 query heads on 2 KV heads of 128 elements, by hand: what must be read is read once, `ldmatrix`
/// meets no bank twice, and a 16 x 8 x 16 product is issued for each 8 of the scores and 8 of the output columns.
#[test]
fn an_aligned_decode_costs_what_it_must() {
    let config = AttentionConfig::new(16, 2, 128, 16);
    let case = Case { config, query_lens: vec![1], kv_lens: vec![512], seeds: vec![0], ..paged(16, LAYOUTS[0]) };
    for family in [Family::Sm80, Family::Sm90a] {
        for (pieces, teams) in [(1, Teams::new(2, 2)), (1, Teams::new(2, 1)), (4, Teams::new(2, 8))] {
            let mut fixture = Fixture::new(&case);
            let mut plan = forced_split(&case, &fixture.page_begin, pieces, teams, 0);
            let emulator = Emulator::new(family, 1);
            let outputs = fixture.run(&emulator, &mut plan, Lse::Two);
            fixture.check(&outputs).unwrap();

            let (heads, row_bytes) = (2, 256);
            let kv_bytes = 512 * heads * 2 * row_bytes;
            // Each piece of each head reads the queries of its 8 heads.
            let query_bytes = pieces as u64 * heads * 8 * row_bytes;
            // The fold of a split head reads each piece's state of its 8 rows, in f32.
            let state_bytes = if pieces == 1 { 0 } else { pieces as u64 * heads * 8 * 2 * row_bytes };
            // 32 spans of 16 keys a head, 128 / 16 steps for Q K^T and as many for P V, two products each.
            let products = 32 * heads * (8 + 8) * 2;
            // A step of K, and one of V, are one load; each of a piece's 4 warps loads its queries' 8 steps once.
            let loads = 32 * heads * (8 + 8) + pieces as u64 * heads * 4 * 8;
            let counters = emulator.counters();
            let copied_bytes = kv_bytes + query_bytes + state_bytes;
            assert_eq!(counters.async_copy_bytes, copied_bytes, "{family:?}, {pieces} pieces");
            assert_eq!(counters.mma, products);
            assert_eq!(counters.load_matrix, loads);
            assert_eq!((counters.load_matrix_bank_conflicts, counters.shared_bank_conflicts), (0, 0));
            assert_eq!(counters.atomics, if pieces == 1 { 0 } else { pieces as u64 * heads });
        }
    }
}

/// Rows around every height of a tall item: a warp's block, a block each, two blocks each, and one more row.
#[test]
fn tall_items_of_every_height() {
    for family in [Family::Sm80, Family::Sm90a] {
        for (head_dim, group, pieces) in [(64, 1, 1), (128, 1, 3), (192, 1, 2), (256, 1, 1), (80, 3, 1)] {
            let tile = AttendTile::new(head_dim, family).unwrap();
            let rows = tile.tall_rows(true);
            let query_lens: Vec<u32> = [17, 31, rows / 2, rows / 2 + 1, rows, rows + 1, 2 * rows + 17]
                .into_iter()
                .map(|rows| rows / group)
                .collect();
            let kv_lens = [17, 70, 64, 129, 200, 50, 90].to_vec();
            let config = AttentionConfig::new(group, 1, head_dim, 16);
            let case = Case { config, query_lens, kv_lens, seeds: (0..7).collect(), ..paged(16, LAYOUTS[0]) };
            let mut fixture = Fixture::new(&case);
            let mut plan = forced_split(&case, &fixture.page_begin, pieces, Teams::new(1, 3), rows);
            let outputs = fixture.run(&Emulator::new(family, 1), &mut plan, Lse::Two);
            if let Err(difference) = fixture.check(&outputs) {
                panic!("head dim {head_dim}, group {group}, {family:?}: {difference}");
            }
        }
    }
}

/// H1 on the kernel: a prompt's rows are the same bits in one chunk, in chunks of any size, and one at a time.
#[test]
fn h1_chunks_of_a_prompt_change_no_bit_of_it() {
    let family = Family::Sm80;
    let tile = AttendTile::new(64, family).unwrap();
    let rows = |begin, end| {
        let mut fixture = Fixture::new(&prompt(begin, end));
        let target = Target::new(8, tile.tile_tokens()).with_tall_rows(tile.tall_rows(true));
        let mode = SplitMode::FixedSplit { tokens: 64 };
        let mut plan = planned(&fixture.case, &fixture.page_begin, target, mode);
        let outputs = fixture.run(&Emulator::new(family, 2), &mut plan, Lse::Two);
        fixture.check(&outputs).unwrap();
        (0..(end - begin) as usize)
            .flat_map(|token| (0..4).map(move |head| (token, head)))
            .map(|(token, head)| fixture.row(&outputs, 0, token, head))
            .collect::<Vec<_>>()
    };
    let whole = rows(0, 100);
    for chunks in [&[0, 40, 100][..], &[0, 1, 99, 100], &[0, 33, 37, 80, 100]] {
        let chunked: Vec<_> = chunks.windows(2).flat_map(|ends| rows(ends[0], ends[1])).collect();
        assert!(chunked == whole, "{chunks:?}");
    }
}

/// 128 query tokens over 512 keys, by hand: a key that a tall item reads serves all its rows.
#[test]
fn an_aligned_prefill_costs_what_it_must() {
    let config = AttentionConfig::new(1, 1, 128, 16).non_causal();
    let case = Case { config, query_lens: vec![128], kv_lens: vec![512], seeds: vec![0], ..paged(16, LAYOUTS[0]) };
    let mut fixture = Fixture::new(&case);
    let mut plan = forced_split(&case, &fixture.page_begin, 1, Teams::new(1, 1), 128);
    let emulator = Emulator::new(Family::Sm80, 1);
    let outputs = fixture.run(&emulator, &mut plan, Lse::Two);
    fixture.check(&outputs).unwrap();
    let counters = emulator.counters();
    // K and V once, and the queries once.
    assert_eq!(counters.async_copy_bytes, 2 * 512 * 256 + 128 * 256);
    // 8 blocks of rows, 512 / 8 columns of scores by 8 steps, and 16 columns of outputs by 512 / 16 steps.
    assert_eq!(counters.mma, 8 * (64 * 8 + 16 * 32));
    // Each of 4 warps: 16 steps of 32 keys, each with 8 steps of K, a load for each block of queries and 16 keys, and 2
    // steps of V by 8 loads.
    assert_eq!(counters.load_matrix, 4 * 16 * (8 * (2 + 2) + 2 * 8));
    assert_eq!((counters.load_matrix_bank_conflicts, counters.shared_bank_conflicts), (0, 0));
}

/// 80 states of a row do not fit the shared memory of the widest head, 44 of them on `sm_80` and 73 on `sm_90a`: the
/// rounds of a fold add up.
#[test]
fn a_row_of_more_pieces_than_fit_is_folded_in_rounds() {
    for (family, kv_len) in [(Family::Sm80, 80 * 16 - 3), (Family::Sm90a, 80 * 32 - 3)] {
        let config = AttentionConfig::new(1, 1, 512, 64);
        let case = Case { config, query_lens: vec![2], kv_lens: vec![kv_len], seeds: vec![0], ..paged(64, LAYOUTS[0]) };
        let mut fixture = Fixture::new(&case);
        let mut plan = forced_split(&case, &fixture.page_begin, 80, Teams::new(1, 3), 0);
        let outputs = fixture.run(&Emulator::new(family, 1), &mut plan, Lse::Two);
        fixture.check(&outputs).unwrap();
    }
}
