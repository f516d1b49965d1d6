//! Shared prefixes on the host executor: whatever a plan makes of them, the answers are the oracle's.

use oxattn::{SplitMode, Target};
use oxattn_tests::cases::{Case, Unused};
use oxattn_tests::executors::Cpu;
use oxattn_tests::fixture::{Fixture, Lse, Outputs};
use oxattn_tests::plans::planned;
use oxattn_tests::prefixes::prefix_cases;

/// Plans a case for a number of blocks, and says whether something is shared.
fn run(fixture: &mut Fixture, target: Target, mode: SplitMode, lse: Lse) -> (Outputs, bool) {
    let mut plan = planned(&fixture.case, &fixture.page_begin, target, mode);
    let shares = plan.items().iter().any(|item| item.is_shared());
    (fixture.run(&Cpu, &mut plan, lse), shares)
}

fn targets() -> [(Target, SplitMode, Lse); 6] {
    let target = |blocks, tile_tokens, tall_rows| Target::new(blocks, tile_tokens).with_tall_rows(tall_rows);
    let all_tall = |mut target: Target| {
        target.all_tall = true;
        target
    };
    [
        (target(264, 64, 128), SplitMode::Balanced, Lse::Two),
        (target(7, 16, 64), SplitMode::Balanced, Lse::E),
        (target(40, 16, 0), SplitMode::Balanced, Lse::None),
        (all_tall(target(33, 128, 128)), SplitMode::Balanced, Lse::Two),
        (target(1, 16, 48), SplitMode::Balanced, Lse::Two),
        (target(7, 16, 128), SplitMode::Unsplit, Lse::Two),
    ]
}

#[test]
fn shared_prefixes_change_no_answer() {
    let mut shared = [0; 6];
    let cases = prefix_cases();
    for case in &cases {
        let mut fixture = Fixture::new(case);
        for (index, (target, mode, lse)) in targets().into_iter().enumerate() {
            let (outputs, shares) = run(&mut fixture, target, mode, lse);
            if let Err(difference) = fixture.check(&outputs) {
                panic!("{}, {target:?}, {mode:?}: {difference}", case.name);
            }
            shared[index] += usize::from(shares);
        }
    }
    // Tiles of 128 keys are longer than many of the prefixes, and without tall items few requests fit a row tile.
    for (shared, least) in shared.into_iter().zip([30, 45, 30, 25, 45, 45]) {
        assert!(shared >= least, "{shared} of {} plans share something", cases.len());
    }
}

/// What lies past a request's keys, or in pages that nobody owns, changes no bit.
#[test]
fn b10_unused_slots_change_no_bit_of_what_is_shared() {
    for case in prefix_cases().into_iter().step_by(3) {
        let bits = |unused| {
            let mut fixture = Fixture::new(&Case { unused, ..case.clone() });
            let (target, mode, lse) = targets()[1];
            run(&mut fixture, target, mode, lse).0
        };
        let first = bits(Unused::Large);
        for unused in [Unused::Nan, Unused::NanKeys, Unused::NanValues] {
            assert!(bits(unused).bits() == first.bits(), "{}, {unused:?}", case.name);
        }
    }
}

/// The same plan, and the same plan made again, give the same bits.
#[test]
fn h2_a_second_plan_and_run_change_no_bit() {
    for case in prefix_cases().into_iter().skip(1).step_by(4) {
        let mut fixture = Fixture::new(&case);
        let (target, mode, lse) = targets()[1];
        let first = run(&mut fixture, target, mode, lse).0;
        for _ in 0..3 {
            assert!(run(&mut fixture, target, mode, lse).0.bits() == first.bits(), "{}", case.name);
        }
    }
}
