//! Shared prefixes on the kernels themselves, under the emulator: whatever a plan makes of them, the answers are the
//! oracle's, with no race and no stray access.

use kernels_gpu::abi::tile::{AttendTile, Family};
use oxattn::{SplitMode, Target};
use oxattn_tests::cases::Case;
use oxattn_tests::executors::{Emulator, Executor, PrefillEmulator};
use oxattn_tests::fixture::{Fixture, Lse, Outputs};
use oxattn_tests::plans::planned;
use oxattn_tests::prefixes::prefix_cases;
use oxattn_tests::prompts::prefill_prefix_cases;

/// Of [`Case::tile_cost`], of a batch without sharing: what one launch may cost.
const BUDGET: u64 = 5 << 20;
const LSE: [Lse; 3] = [Lse::Two, Lse::E, Lse::None];

/// What plans have in them, over a table.
#[derive(Debug, Default)]
struct Seen {
    shared: usize,
    /// Shared row tiles in pieces.
    cut: usize,
    /// Row tiles with shared keys above them on two levels or more.
    nested: usize,
}

fn run(case: &Case, target: Target, mode: SplitMode, executor: &dyn Executor, lse: Lse, seen: &mut Seen) -> Outputs {
    let mut fixture = Fixture::new(case);
    let mut plan = planned(case, &fixture.page_begin, target, mode);
    let items = plan.items();
    if items.iter().any(|item| item.is_shared()) {
        seen.shared += 1;
        seen.cut += usize::from(items.iter().any(|item| item.is_shared() && item.piece > 0));
        seen.nested +=
            usize::from(items.iter().any(|item| item.is_shared() && item.kv_begin_tokens > 0 && item.piece == 0));
    }
    let outputs = fixture.run(executor, &mut plan, lse);
    if let Err(difference) = fixture.check(&outputs) {
        panic!("{}, {target:?}: {difference}", case.name);
    }
    outputs
}

fn affordable() -> Vec<Case> {
    let mut table = prefix_cases();
    table.retain(|case| case.tile_cost() <= BUDGET);
    table
}

fn check_attend(family: Family) {
    let mut seen = Seen::default();
    for (index, case) in affordable().iter().enumerate() {
        let tile = AttendTile::new(case.config.head_dim, family).unwrap();
        let blocks = [4, 7, 16][index % 3];
        let target = Target::new(blocks, tile.tile_tokens()).with_tall_rows(tile.tall_rows(case.config.is_plain()));
        let mode = if index % 5 == 4 { SplitMode::Unsplit } else { SplitMode::Balanced };
        run(case, target, mode, &Emulator::new(family, index as u64), LSE[index % 3], &mut seen);
    }
    assert!(seen.shared >= 10 && seen.cut >= 5 && seen.nested >= 2, "{seen:?}");
}

#[test]
fn shared_on_sm_80() {
    check_attend(Family::Sm80);
}

#[test]
fn shared_on_sm_90a() {
    check_attend(Family::Sm90a);
}

#[test]
fn shared_by_prefill_kernels() {
    let mut seen = Seen::default();
    let mut table = prefill_prefix_cases();
    table.retain(|case| case.tile_cost() <= BUDGET);
    for (index, case) in table.iter().enumerate() {
        let tile = case.prefill_tile().unwrap();
        let target = Target::for_prefill([16, 1, 30, 2][index % 4], tile, index % 2 == 0);
        let executor = PrefillEmulator::new(index as u64);
        run(case, target, SplitMode::Balanced, &executor, LSE[index % 3], &mut seen);
    }
    assert!(seen.shared >= 25 && seen.cut >= 2 && seen.nested >= 2, "{seen:?}");
}

/// In which order blocks, warps and lanes run, and so which of a row tile's items comes last: none of it changes a bit.
#[test]
fn h2_order_changes_no_bit_of_what_is_shared() {
    let table = affordable();
    let case = table.iter().find(|case| case.name.contains("two levels")).expect("such a case");
    for family in [Family::Sm80, Family::Sm90a] {
        let tile = AttendTile::new(case.config.head_dim, family).unwrap();
        let target = Target::new(7, tile.tile_tokens()).with_tall_rows(tile.tall_rows(true));
        let mut seen = Seen::default();
        let mut bits = |seed| {
            let executor = Emulator::new(family, seed);
            run(case, target, SplitMode::Balanced, &executor, Lse::Two, &mut seen)
        };
        let first = bits(0);
        for seed in 1..6 {
            assert!(bits(seed).bits() == first.bits(), "{family:?}, seed {seed}");
        }
    }
}
