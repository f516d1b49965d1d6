//! The table of merges on the kernel, under the emulator.

use kernels_gpu::abi::tile::Family;
use oxattn_tests::executors::Emulator;
use oxattn_tests::states::{check, merge_cases};

#[test]
fn every_merge_is_the_oracle_s() {
    for (index, case) in merge_cases().into_iter().enumerate() {
        for (family, seed) in [(Family::Sm80, 0), (Family::Sm90a, 1 + index as u64)] {
            if let Err(difference) = check(&case, &Emulator::new(family, seed)) {
                panic!("{}: {difference}", case.name);
            }
        }
    }
}
