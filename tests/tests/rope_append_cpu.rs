//! The table of rotations whose keys go to the cache, on the host executor.

use oxattn_tests::executors::Cpu;
use oxattn_tests::rope_append::{check, rope_append_cases};

#[test]
fn every_rotated_append_is_the_oracle_s_and_that_of_two_launches() {
    for case in rope_append_cases() {
        if let Err(difference) = check(&case, &Cpu) {
            panic!("{}: {difference}", case.name);
        }
    }
}
