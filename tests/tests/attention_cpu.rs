//! The attention table on the host executor: whole, cut by force, and as the planner cuts it.

use kernels_gpu::abi::tile::Teams;
use oxattn::oracle::merge;
use oxattn::{SplitMode, Target};
use oxattn_tests::cases::{Case, Pages, Unused, Values, among_others, cases, paged, prompt, split_cases};
use oxattn_tests::executors::Cpu;
use oxattn_tests::fixture::{Fixture, Lse, Outputs};
use oxattn_tests::layout::LAYOUTS;
use oxattn_tests::plans::{PlanImage, forced_split, planned, planner_for};

fn run(fixture: &mut Fixture, pieces: u32, lse: Lse) -> Outputs {
    let teams = Teams::new(fixture.case.config.kv_heads, 7);
    let mut plan = forced_split(&fixture.case, &fixture.page_begin, pieces, teams, 64);
    fixture.run(&Cpu, &mut plan, lse)
}

fn run_and_check(fixture: &mut Fixture, pieces: u32, lse: Lse) -> Outputs {
    let outputs = run(fixture, pieces, lse);
    if let Err(difference) = fixture.check(&outputs) {
        panic!("{}, {pieces} pieces, LSE {lse:?}: {difference}", fixture.case.name);
    }
    outputs
}

fn run_planned(fixture: &mut Fixture, target: Target, mode: SplitMode) -> Outputs {
    let mut plan = planned(&fixture.case, &fixture.page_begin, target, mode);
    fixture.run(&Cpu, &mut plan, Lse::Two)
}

const MODES: [SplitMode; 4] =
    [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 100 }, SplitMode::Unsplit];

#[test]
fn every_case_is_the_oracle_s_answer_however_it_is_planned() {
    for (index, case) in cases().iter().chain(&split_cases()).enumerate() {
        let mut fixture = Fixture::new(case);
        for (mode, (blocks, tile_tokens)) in MODES.into_iter().zip([(264, 64), (7, 16), (1, 32), (132, 64)]) {
            let outputs = run_planned(
                &mut fixture,
                Target::new(blocks, tile_tokens).with_tall_rows([0, 128, 64, 48][index % 4]),
                mode,
            );
            if let Err(difference) = fixture.check(&outputs) {
                panic!("{}, {mode:?}, {blocks} blocks: {difference}", case.name);
            }
        }
    }
}

/// E1, E4: what a workspace held before a plan, be it 0xff or a larger plan, is not run.
#[test]
fn e1_a_plan_over_another_runs_alone() {
    let (long, short) = (among_others(32, 5), among_others(2, 0));
    let target = Target::new(132, 64);
    let mut planner = planner_for(&[&long, &short], target, SplitMode::Balanced);
    let mut image = PlanImage::unplanned(&planner, target, long.config.kv_heads);
    for case in [&long, &short, &long] {
        let mut fixture = Fixture::new(case);
        image.plan(&mut planner, case, &fixture.page_begin);
        let outputs = fixture.run(&Cpu, &mut image, Lse::Two);
        fixture.check(&outputs).unwrap();
    }
}

#[test]
fn h1_batch_mates_change_no_bit_of_a_request() {
    for mode in [SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 256 }, SplitMode::Unsplit] {
        let row_of = |batch, at| {
            let mut fixture = Fixture::new(&among_others(batch, at));
            let outputs = run_planned(&mut fixture, Target::new(132, 64), mode);
            (0..4).map(|head| fixture.row(&outputs, at, 0, head)).collect::<Vec<_>>()
        };
        let alone = row_of(1, 0);
        for (batch, at) in [(2, 0), (2, 1), (32, 17), (256, 255)] {
            assert!(row_of(batch, at) == alone, "number {at} of {batch}, {mode:?}");
        }
    }
}

#[test]
fn h1_chunks_of_a_prompt_change_no_bit_of_it() {
    let rows = |begin, end| {
        let mut fixture = Fixture::new(&prompt(begin, end));
        let outputs =
            run_planned(&mut fixture, Target::new(132, 64).with_tall_rows(128), SplitMode::FixedSplit { tokens: 64 });
        fixture.check(&outputs).unwrap();
        (0..(end - begin) as usize)
            .flat_map(|token| (0..4).map(move |head| (token, head)))
            .map(|(token, head)| fixture.row(&outputs, 0, token, head))
            .collect::<Vec<_>>()
    };
    let whole = rows(0, 300);
    assert!([rows(0, 128), rows(128, 300)].concat() == whole);
}

#[test]
fn every_case_is_the_oracle_s_answer_whole_and_split() {
    let lse = [Lse::Two, Lse::E, Lse::None];
    for (index, case) in cases().iter().enumerate() {
        let mut fixture = Fixture::new(case);
        run_and_check(&mut fixture, 1, lse[index % 3]);
        run_and_check(&mut fixture, 3, lse[(index + 1) % 3]);
    }
}

#[test]
fn c5_any_number_of_pieces_gives_the_same_attention() {
    for case in split_cases() {
        let mut fixture = Fixture::new(&case);
        for pieces in [1, 2, 3, 7, 64] {
            run_and_check(&mut fixture, pieces, Lse::Two);
        }
    }
}

#[test]
fn b10_what_unused_slots_hold_changes_no_bit() {
    for case in cases().into_iter().filter(|case| case.unused != Unused::Large) {
        for pieces in [1, 3] {
            let poisoned = run(&mut Fixture::new(&case), pieces, Lse::Two);
            let clean = run(&mut Fixture::new(&Case { unused: Unused::Large, ..case.clone() }), pieces, Lse::Two);
            assert!(poisoned.bits() == clean.bits(), "{}, {pieces} pieces", case.name);
        }
    }
}

#[test]
fn c14_pages_and_layout_change_no_bit() {
    let first = run_and_check(&mut Fixture::new(&paged(64, LAYOUTS[0])), 1, Lse::Two);
    for page_size in [1, 2, 3, 16, 64, 1000] {
        for layout in LAYOUTS {
            let case = paged(page_size, layout);
            assert!(run(&mut Fixture::new(&case), 1, Lse::Two).bits() == first.bits(), "{}", case.name);
        }
    }
}

/// Without pages the same keys lie elsewhere, with rows of NaN between the requests' or without.
#[test]
fn ragged_keys_change_no_bit() {
    let first = run_and_check(&mut Fixture::new(&paged(16, LAYOUTS[0])), 3, Lse::Two);
    for (layout, pages) in
        LAYOUTS.into_iter().flat_map(|layout| [Pages::Scattered, Pages::Adjacent].map(|p| (layout, p)))
    {
        let case = Case { pages, ..paged(16, layout).ragged() };
        assert!(run(&mut Fixture::new(&case), 3, Lse::Two).bits() == first.bits(), "{layout:?}, {pages:?}");
    }
}

#[test]
fn h2_a_second_run_changes_no_bit() {
    let mut fixture = Fixture::new(&split_cases()[1]);
    let first = run(&mut fixture, 7, Lse::Two);
    for _ in 0..10 {
        assert!(run(&mut fixture, 7, Lse::Two).bits() == first.bits());
    }
}

/// B7 by hand: `-4096 * 128 / sqrt(128) * log2(e)`, and one more for two keys.
#[test]
fn b7_finite_logits_far_down_are_not_masked() {
    let is_far_down = |case: &Case| case.values == Values::ExtremeNegative && case.config.soft_cap.is_none();
    for case in cases().into_iter().filter(is_far_down) {
        let mut fixture = Fixture::new(&case);
        for pieces in [1, 3] {
            let outputs = run(&mut fixture, pieces, Lse::Two);
            for (request, lse) in [(0, -66_855.86), (1, -66_854.86)] {
                let (out, got) = fixture.row(&outputs, request, 0, 0);
                assert!((got - lse).abs() < 0.02, "{}: LSE is {got}, not {lse}", case.name);
                assert_eq!(out, vec![1.0; 128], "{}", case.name);
            }
        }
    }
}

/// D13: one key's LSE is its score, in the base asked for.
#[test]
fn d13_bases_of_the_lse() {
    let case = Case { kv_lens: vec![1; 3], query_lens: vec![1; 3], ..paged(16, LAYOUTS[0]) };
    let mut fixture = Fixture::new(&case);
    let (two, natural) = (run(&mut fixture, 1, Lse::Two), run(&mut fixture, 1, Lse::E));
    for request in 0..3 {
        let score = fixture.expected(request, 0, 0).lse;
        let (_, lse2) = fixture.row(&two, request, 0, 0);
        let (_, lse) = fixture.row(&natural, request, 0, 0);
        assert!((lse - score).abs() < 1e-5 && (lse2 * std::f64::consts::LN_2 - score).abs() < 1e-5);
    }
}

/// The oracle's own halves merge to its whole, so that a split plan may be held against the unsplit oracle.
#[test]
fn the_oracle_s_halves_are_its_whole() {
    use oxattn::oracle::{Request, Rules};
    let number = |a: usize, b: usize| ((a * 37 + b * 11) % 17) as f64 / 4.0 - 2.0;
    let row = |token: usize, head: usize| (0..8).map(|column| number(token + column, head)).collect::<Vec<f64>>();
    let late = |position: usize, head: usize| row(position + 9, head);
    let rules = Rules::default();
    let part = |kv_len, k: &dyn Fn(usize, usize) -> Vec<f64>| {
        Request {
            query_len: 1,
            kv_len,
            group: 1,
            value_head_dim: 8,
            softmax_scale: 0.3,
            causal: false,
            rules,
            q: &row,
            k,
            v: k,
        }
        .attend(0, 2)
    };
    let merged = merge(&[part(9, &row), part(12, &late)]);
    let whole = part(21, &row);
    assert!((merged.lse - whole.lse).abs() < 1e-12);
    assert!(merged.out.iter().zip(&whole.out).all(|(a, b)| (a - b).abs() < 1e-12));
}
