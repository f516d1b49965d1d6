//! Norms and rotations inside attention, on the host executor.

use kernels_gpu::abi::tile::Teams;
use oxattn::{NotShared, QueryLengths, SplitMode, Target};
use oxattn_tests::cases::{Case, Unused};
use oxattn_tests::executors::Cpu;
use oxattn_tests::fixture::{Fixture, Lse, Outputs};
use oxattn_tests::plans::{forced_split, planned, planner_for, table_of};
use oxattn_tests::rotary::{rotary_cases, rotary_prefix_cases};

const MODES: [SplitMode; 4] =
    [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 40 }, SplitMode::Unsplit];

fn lse_of(case: &Case, index: usize) -> Lse {
    if case.config.sigmoid_bias.is_some() { Lse::None } else { [Lse::Two, Lse::E, Lse::None][index % 3] }
}

fn run(case: &Case, pieces: u32, lse: Lse) -> (Fixture, Outputs) {
    let mut fixture = Fixture::new(case);
    let mut plan = forced_split(case, &fixture.page_begin, pieces, Teams::new(case.config.kv_heads, 7), 64);
    let outputs = fixture.run(&Cpu, &mut plan, lse);
    (fixture, outputs)
}

#[test]
fn every_case_is_the_oracle_s_answer() {
    for (index, case) in rotary_cases().iter().chain(&rotary_prefix_cases()).enumerate() {
        for mode in MODES {
            let mut fixture = Fixture::new(case);
            let target = Target::new([132, 7][index % 2], 64).with_tall_rows([0, 128, 64][index % 3]);
            let mut plan = planned(case, &fixture.page_begin, target, mode);
            let outputs = fixture.run(&Cpu, &mut plan, lse_of(case, index));
            if let Err(difference) = fixture.check(&outputs) {
                panic!("{}, {mode:?}: {difference}", case.name);
            }
        }
        if case.shared_tokens.is_empty() {
            for pieces in [1, 3] {
                let (fixture, outputs) = run(case, pieces, lse_of(case, index + 1));
                if let Err(difference) = fixture.check(&outputs) {
                    panic!("{}, {pieces} pieces: {difference}", case.name);
                }
            }
        }
    }
}

#[test]
fn what_unused_slots_hold_changes_no_bit() {
    for case in rotary_cases() {
        let poisoned = run(&case, 3, Lse::Two);
        let clean = run(&Case { unused: Unused::Large, ..case.clone() }, 3, Lse::Two);
        assert!(poisoned.1.bits() == clean.1.bits(), "{}", case.name);
    }
}

/// A shared item's rows stand side by side, whatever their requests, so that their places are not known to it.
#[test]
fn plans_share_prefixes_of_rotated_keys_where_positions_are_given() {
    let not_shared = |case: &Case| {
        let page_begin = Fixture::new(case).page_begin;
        let mut planner = planner_for(&[case], Target::new(7, 16).with_tall_rows(64), SplitMode::Balanced);
        let query_begin = case.query_begin();
        let queries = QueryLengths::indptr(&query_begin).unwrap();
        planner.plan(&table_of(case, &page_begin).unwrap(), queries).unwrap().sharing().not_shared
    };
    for case in rotary_prefix_cases() {
        assert_eq!(not_shared(&case), None, "{}", case.name);
        let mut by_places = case.clone();
        by_places.config.rope_positions = false;
        assert_eq!(not_shared(&by_places), case.config.rope.map(|_| NotShared::Rope), "{}", case.name);
    }
}
