//! The attention table on the host executor, with plans made by hand.

use oxattn::oracle::merge;
use oxattn_tests::cases::{Case, Unused, Values, cases, paged, split_cases};
use oxattn_tests::executors::Cpu;
use oxattn_tests::fixture::{Fixture, Lse, Outputs};
use oxattn_tests::layout::LAYOUTS;
use oxattn_tests::plans::forced_split;

const QUEUES: usize = 7;

fn run(fixture: &mut Fixture, pieces: u32, lse: Lse) -> Outputs {
    let mut plan = forced_split(&fixture.case, &fixture.page_begin, pieces, QUEUES);
    fixture.run(&Cpu, &mut plan, lse)
}

fn run_and_check(fixture: &mut Fixture, pieces: u32, lse: Lse) -> Outputs {
    let outputs = run(fixture, pieces, lse);
    if let Err(difference) = fixture.check(&outputs) {
        panic!("{}, {pieces} pieces, LSE {lse:?}: {difference}", fixture.case.name);
    }
    outputs
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
    for case in cases().into_iter().filter(|case| case.values == Values::ExtremeNegative) {
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
    use oxattn::oracle::Request;
    let number = |a: usize, b: usize| ((a * 37 + b * 11) % 17) as f64 / 4.0 - 2.0;
    let row = |token: usize, head: usize| (0..8).map(|column| number(token + column, head)).collect::<Vec<f64>>();
    let late = |position: usize, head: usize| row(position + 9, head);
    let part = |kv_len, k: &dyn Fn(usize, usize) -> Vec<f64>| {
        Request { query_len: 1, kv_len, group: 1, softmax_scale: 0.3, causal: false, q: &row, k, v: k }.attend(0, 2)
    };
    let merged = merge(&[part(9, &row), part(12, &late)]);
    let whole = part(21, &row);
    assert!((merged.lse - whole.lse).abs() < 1e-12);
    assert!(merged.out.iter().zip(&whole.out).all(|(a, b)| (a - b).abs() < 1e-12));
}
