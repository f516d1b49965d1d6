//! A few block-sparse patterns on the kernels, under the emulator: no byte past the keys is there to be read.

use kernels_gpu::abi::tile::{AttendTile, Family};
use oxattn::{SplitMode, Target};
use oxattn_tests::block_sparse::{SparseCase, SparseFixture, sparse_cases};
use oxattn_tests::executors::{Emulator, PrefillEmulator};

/// Of [`SparseCase::cost`]: what one launch may cost.
const BUDGET: u64 = 8 << 20;

fn affordable() -> Vec<SparseCase> {
    sparse_cases().into_iter().filter(|case| case.cost() > 0 && case.cost() <= BUDGET).collect()
}

#[test]
fn patterns_are_the_oracle_s_answer() {
    let modes =
        [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 40 }, SplitMode::Unsplit];
    for (index, case) in affordable().iter().enumerate() {
        let family = [Family::Sm80, Family::Sm90a][index % 2];
        let mut fixture = SparseFixture::new(case);
        let tile = AttendTile::new(case.config.head_dim, family).unwrap();
        let tall_rows = tile.tall_rows(fixture.sparse.config().is_plain());
        let target = Target::new([4, 7, 16][index % 3], tile.tile_tokens()).with_tall_rows(tall_rows);
        let outputs = fixture.launch(&Emulator::new(family, index as u64), target, modes[index % 4]);
        if let Err(difference) = fixture.check(&outputs) {
            panic!("{}, {family:?}, {:?}: {difference}", case.name, modes[index % 4]);
        }
    }
}

/// The prefill kernel copies whole boxes of a page, which end with the keys too. Masks, causal requests and neither.
#[test]
fn patterns_are_the_oracle_s_answer_by_the_prefill_kernel() {
    let mut kinds = [0; 3];
    for (index, case) in affordable().iter().enumerate() {
        let mut fixture = SparseFixture::new(case);
        let config = *fixture.sparse.config();
        let Some(tile) = config.prefill_tile() else { continue };
        if tile.box_tokens(config.page_size_tokens).is_none() {
            continue;
        }
        let target = Target::for_prefill([4, 7, 2][index % 3], tile, index % 2 == 0);
        let outputs = fixture.launch(&PrefillEmulator::new(index as u64), target, SplitMode::Balanced);
        if let Err(difference) = fixture.check(&outputs) {
            panic!("{}: {difference}", case.name);
        }
        kinds[config.causal as usize + 2 * config.mask.is_some() as usize] += 1;
    }
    assert!(kinds.iter().all(|&count| count > 0), "plain, causal and masked: {kinds:?}");
}
