//! The table of rotations on the kernels, under the emulator.

use kernels_gpu::abi::tile::Family;
use oxattn_tests::executors::Emulator;
use oxattn_tests::rope::{check, check_by_hand, rope_cases};

#[test]
fn every_rotation_is_the_oracle_s() {
    for (index, case) in rope_cases().into_iter().enumerate() {
        let family = [Family::Sm80, Family::Sm90a][index % 2];
        if let Err(difference) = check(&case, &Emulator::new(family, index as u64)) {
            panic!("{}: {difference}", case.name);
        }
    }
}

#[test]
fn f11_pairs_turn_as_worked_by_hand() {
    check_by_hand(&Emulator::new(Family::Sm90a, 0));
}
