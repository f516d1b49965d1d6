//! A few block-sparse patterns on the kernels, under the emulator: no byte past the keys is there to be read.

use kernels_gpu::abi::tile::{AttendTile, Family};
use oxattn::{SplitMode, Target};
use oxattn_tests::block_sparse::{SparseFixture, sparse_cases};
use oxattn_tests::executors::Emulator;

/// Of [`SparseCase::cost`](oxattn_tests::block_sparse::SparseCase::cost): what one launch may cost.
const BUDGET: u64 = 8 << 20;

#[test]
fn patterns_are_the_oracle_s_answer() {
    let modes =
        [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 40 }, SplitMode::Unsplit];
    let cases = sparse_cases();
    let affordable = cases.iter().filter(|case| case.cost() > 0 && case.cost() <= BUDGET);
    for (index, case) in affordable.enumerate() {
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
