//! The table of appends on the kernels, under the emulator.

use kernels_gpu::abi::tile::Family;
use oxattn_tests::executors::Emulator;
use oxattn_tests::new_tokens::{append_cases, check};

#[test]
fn every_append_writes_its_cells_and_nothing_else() {
    for (index, case) in append_cases().into_iter().enumerate() {
        let family = [Family::Sm80, Family::Sm90a][index % 2];
        if let Err(difference) = check(&case, &Emulator::new(family, index as u64)) {
            panic!("{}: {difference}", case.name);
        }
    }
}
