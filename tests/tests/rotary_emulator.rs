//! Norms and rotations inside attention, on the kernels themselves, under the emulator.

use kernels_gpu::abi::tile::{AttendTile, Family, Teams};
use oxattn::{SplitMode, Target};
use oxattn_tests::cases::{Case, Unused};
use oxattn_tests::executors::Emulator;
use oxattn_tests::fixture::{Fixture, Lse};
use oxattn_tests::plans::{PlanImage, forced_split, planned};
use oxattn_tests::rotary::{rotary_cases, rotary_prefix_cases};

const LSE: [Lse; 3] = [Lse::Two, Lse::E, Lse::None];
const MODES: [SplitMode; 4] =
    [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 40 }, SplitMode::Unsplit];

fn tall_rows(case: &Case, family: Family) -> u32 {
    AttendTile::new(case.config.head_dim, family).unwrap().tall_rows(false)
}

/// Runs each of `cases` under the plan that `plan` makes of its number.
fn check_all(cases: &[Case], family: Family, what: &str, plan: impl Fn(usize, &Fixture) -> PlanImage) {
    for (index, case) in cases.iter().enumerate() {
        let mut fixture = Fixture::new(case);
        let mut plan = plan(index, &fixture);
        let outputs = fixture.run(&Emulator::new(family, index as u64), &mut plan, LSE[index % 3]);
        if let Err(difference) = fixture.check(&outputs) {
            panic!("{}, {family:?}, {what}: {difference}", case.name);
        }
    }
}

fn check_whole(family: Family) {
    check_all(&rotary_cases(), family, "whole", |index, Fixture { case, page_begin, .. }| {
        let tall_rows = if index % 2 == 0 { tall_rows(case, family) } else { 0 };
        forced_split(case, page_begin, 1, Teams::new(case.config.kv_heads, [4, 7][index / 2 % 2]), tall_rows)
    });
}

fn check_pieces(family: Family) {
    check_all(&rotary_cases(), family, "in pieces", |index, Fixture { case, page_begin, .. }| {
        let tall_rows = if index % 2 == 1 { tall_rows(case, family) } else { 0 };
        forced_split(case, page_begin, 2 + index as u32 % 2, Teams::new(case.config.kv_heads, 7), tall_rows)
    });
}

fn plan(family: Family) -> impl Fn(usize, &Fixture) -> PlanImage {
    move |index, Fixture { case, page_begin, .. }| {
        let tile = AttendTile::new(case.config.head_dim, family).unwrap();
        let target = Target::new([4, 7, 16][index % 3], tile.tile_tokens()).with_tall_rows(tall_rows(case, family));
        let mode = if case.shared_tokens.is_empty() { MODES[index % 4] } else { SplitMode::Balanced };
        let plan = planned(case, page_begin, target, mode);
        assert_eq!(plan.items().iter().any(|item| item.is_shared()), !case.shared_tokens.is_empty(), "{}", case.name);
        plan
    }
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
    check_all(&rotary_cases(), Family::Sm80, "planned", plan(Family::Sm80));
}

#[test]
fn planned_on_sm_90a() {
    check_all(&rotary_cases(), Family::Sm90a, "planned", plan(Family::Sm90a));
}

#[test]
fn shared_prefixes_change_no_answer() {
    for family in [Family::Sm80, Family::Sm90a] {
        check_all(&rotary_prefix_cases(), family, "planned", plan(family));
    }
}

#[test]
fn what_unused_slots_hold_changes_no_bit() {
    let cases = rotary_cases();
    for (index, case) in cases.iter().enumerate().step_by(3) {
        let family = [Family::Sm80, Family::Sm90a][index % 2];
        let run = |unused| {
            let mut fixture = Fixture::new(&Case { unused, ..case.clone() });
            let tall_rows = if index % 4 < 2 { tall_rows(case, family) } else { 0 };
            let mut plan = forced_split(case, &fixture.page_begin, 2, Teams::new(case.config.kv_heads, 4), tall_rows);
            fixture.run(&Emulator::new(family, 3), &mut plan, Lse::Two)
        };
        let clean = run(Unused::Large);
        for unused in [Unused::NanKeys, Unused::NanValues, Unused::Nan] {
            assert!(run(unused).bits() == clean.bits(), "{}, {family:?}, {unused:?}", case.name);
        }
    }
}
