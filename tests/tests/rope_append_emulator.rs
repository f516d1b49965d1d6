//! The table of rotations whose keys go to the cache, on the kernels, under the emulator.

use kernels_gpu::abi::tile::Family;
use oxattn_tests::executors::Emulator;
use oxattn_tests::rope_append::{check, rope_append_cases};

#[test]
fn every_rotated_append_is_the_oracle_s_and_that_of_two_launches() {
    for family in [Family::Sm80, Family::Sm90a] {
        for (index, case) in rope_append_cases().into_iter().enumerate() {
            if let Err(difference) = check(&case, &Emulator::new(family, index as u64)) {
                panic!("{}, {family:?}: {difference}", case.name);
            }
        }
    }
}
